"""`python -m bench hol`: a queue that nobody reads, in front of one that is read, in the same partitions."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from app.kafka.broker import EmbeddedBroker
from app.processes import WorkerProcess
from bench.cycle import Bench, percentile, result

#: The queue that nobody reads, and the queue of the handlers.
UNREAD, READ = "unread", "q0"
#: Most seconds for the worker to read past the unread messages.
READ_PAST_S = 300.0


def run(*, messages: int, size: int, rate: int, seconds: float, runs: int) -> None:
    """Latency of the second queue with and without unread messages before it, in turns; medians last."""
    folder = Path(tempfile.mkdtemp(prefix="marq-bench-"))
    found: dict[int, list[float]] = {0: [], messages: []}
    try:
        with EmbeddedBroker(folder / "kafka", heap_mib=1024) as broker:
            bench = Bench(broker.bootstrap, folder, size)
            for _ in range(runs):
                for unread in found:
                    found[unread].append(_latency(bench, unread, rate, seconds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    without, with_unread = (statistics.median(values) for values in found.values())
    result(
        phase="hol",
        unread=messages,
        runs=runs,
        p95_ms_without=round(without, 1),
        p95_ms=round(with_unread, 1),
        ratio=round(with_unread / without, 2),
    )


def _latency(bench: Bench, unread: int, rate: int, seconds: float) -> float:
    name = bench.new_name("hol")
    topic = asyncio.run(bench.create(name))
    if unread:
        asyncio.run(bench.send(topic, unread, names=[UNREAD]))
    with bench.worker(name, BENCH_QUEUES=READ, BENCH_LATENCY="1", BENCH_BATCH="500") as worker:
        began = time.monotonic()
        _wait_read(bench, worker, unread)
        read_past_s = time.monotonic() - began
        total = asyncio.run(bench.send_at_rate(topic, rate, seconds))
        bench.wait_acked(worker, total)
        values = bench.seen(name)["latencies_ms"][rate:]  # the first second only warms up connections and code
        state = bench.state(worker)
    persisted = min(unread, sum(p["persisted"] for p in state["partitions"]))
    changelog_bytes = _changelog_bytes(bench.folder / "kafka", name)
    p95 = percentile(values, 0.95)
    result(
        phase="hol",
        unread=unread,
        rate=rate,
        msgs=len(values),
        p50_ms=round(percentile(values, 0.5), 1),
        p95_ms=round(p95, 1),
        p99_ms=round(percentile(values, 0.99), 1),
        read_past_s=round(read_past_s, 1),
        peak_mib=round(state["peak_memory_bytes"] / 2**20),
        in_memory=sum(p["in_memory"] for p in state["partitions"]),
        persisted=persisted,
        changelog_bytes_per_message=round(changelog_bytes / persisted) if persisted else 0,
    )
    return p95


def _wait_read(bench: Bench, worker: WorkerProcess, messages: int) -> None:
    deadline = time.monotonic() + READ_PAST_S
    while sum(p["position"] for p in bench.state(worker)["partitions"]) < messages:
        if time.monotonic() > deadline:
            raise SystemExit(f"the worker has not read past the unread messages: {bench.state(worker)}")
        time.sleep(0.1)


def _changelog_bytes(broker_folder: Path, name: str) -> int:
    """Bytes of an installation's changelogs on the broker's disk."""
    return sum(log.stat().st_size for log in broker_folder.rglob(f"{name}-*-changelog-*/*.log"))
