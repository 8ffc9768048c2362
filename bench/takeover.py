"""`python -m bench takeover`: a worker dies with many messages in flight, and another one takes its partitions over."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from app.kafka.broker import EmbeddedBroker
from app.processes import WorkerProcess
from bench.cycle import PARTITIONS, Bench, result

#: Milliseconds after which Kafka gives a silent worker up.
SESSION_MS = 6_000
#: Most seconds for all messages to be in flight, and for the take-over.
LIMIT_S = 300.0


def run(*, messages: int, size: int) -> None:
    """Hand messages out to a handler that never ends them, kill its worker, and wait until another one serves all."""
    with (
        tempfile.TemporaryDirectory(prefix="marq-bench-") as folder,
        EmbeddedBroker(Path(folder) / "kafka", heap_mib=1024) as broker,
    ):
        bench = Bench(broker.bootstrap, Path(folder), size)
        name = bench.new_name("takeover")
        topic = asyncio.run(bench.create(name))
        asyncio.run(bench.send(topic, messages))
        environment = {"MARQ_SESSION_TIMEOUT_MS": str(SESSION_MS), "MARQ_MEMORY_BYTES": str(messages * (size + 1_000))}
        in_flight = environment | {"BENCH_DROP": "1", "BENCH_TIMEOUT_MS": "600000"}
        with bench.worker(name, **in_flight) as worker:
            _until(lambda: _sum(bench, worker, "held") == messages, "all messages are in flight")
            time.sleep(2 * SESSION_MS / 1000)  # checkpoints
            worker.process.kill()
            worker.process.wait()
            killed = time.monotonic()
            other = environment | {"MARQ_HANDLERS": "", "MARQ_DATA_DIR": f"{folder}/other"}
            with bench.start(name, **other) as heir:
                heir.wait_ready()
                _until(lambda: len(bench.state(heir)["partitions"]) == PARTITIONS, "it has all partitions")
                took_s = time.monotonic() - killed
                result(
                    phase="takeover",
                    in_flight=messages,
                    held=_sum(bench, heir, "held"),
                    secs=round(took_s, 1),
                    after_session_s=round(took_s - SESSION_MS / 1000, 1),
                )


def _sum(bench: Bench, worker: WorkerProcess, field: str) -> int:
    return sum(p[field] for p in bench.state(worker)["partitions"])


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {LIMIT_S} s: {what}")
        time.sleep(0.2)
