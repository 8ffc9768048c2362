"""`python -m bench backlog`: messages that have waited for long: memory, restart, first delivery, rate.

sent ─► a worker without a handler for them puts them into its tables ─► a worker with one starts on these tables
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from app.kafka.broker import EmbeddedBroker
from bench.cycle import Bench, result
from bench.partitions import create, rss_mib, spread

PARTITIONS = 8
#: Most seconds for the worker to have read everything.
PARKED_S = 1_800.0
#: The backlog that the rate is compared with.
SMALL = 10_000


def run(*, messages: int, size: int, measured: int) -> None:
    """Measure `messages`, and the same with few."""
    with (
        tempfile.TemporaryDirectory(prefix="marq-bench-") as folder,
        EmbeddedBroker(Path(folder) / "kafka", heap_mib=1024) as broker,
    ):
        bench = Bench(broker.bootstrap, Path(folder), size)
        rates = [_backlog(bench, count, min(count, measured)) for count in (SMALL, messages)]
    result(phase="backlog", msgs=messages, rate_ratio=round(rates[1] / rates[0], 2))


def _backlog(bench: Bench, messages: int, measured: int) -> float:
    name = bench.new_name("backlog")
    topic = asyncio.run(create(bench, name, PARTITIONS))
    asyncio.run(spread(bench, topic, PARTITIONS, messages))
    environment = {"MARQ_PARTITIONS": str(PARTITIONS), "MARQ_PERSIST_AFTER_MS": "1000"}
    with bench.worker(name, MARQ_HANDLERS="bench.gaps", BENCH_QUEUES="another", **environment) as worker:
        deadline = time.monotonic() + PARKED_S
        while sum(p["position"] for p in bench.state(worker)["partitions"]) < messages:  # a few may be in memory only
            if time.monotonic() > deadline:
                raise SystemExit(f"not all was read: {bench.state(worker)}")
            time.sleep(0.5)
        peak_mib = round(bench.state(worker)["peak_memory_bytes"] / 2**20)
    began, began_ns = time.monotonic(), time.time_ns()
    with bench.worker(name, BENCH_BATCH="500", **environment) as worker:
        ready_s = time.monotonic() - began
        ended = bench.wait_acked(worker, measured)
        seen = bench.seen(name)
        rate = measured / (ended - float(seen["first_ns"]) / 1e9)
        result(
            phase="backlog",
            msgs=messages,
            parking_peak_mib=peak_mib,
            restart_s=round(ready_s, 1),
            first_delivery_s=round((float(seen["first_ns"]) - began_ns) / 1e9, 1),
            measured=measured,
            rate=round(rate),
            rss_mib=rss_mib(worker.process.pid),
            peak_mib=round(bench.state(worker)["peak_memory_bytes"] / 2**20),
        )
    return rate
