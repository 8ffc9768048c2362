"""Pauses of a worker's event loop while it takes over a million parked messages."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from app.kafka.broker import EmbeddedBroker
from bench.cycle import Bench, result
from bench.lag import Pause
from bench.rebalance import PARKED, READ, wait_parked

#: Seconds that are measured after the worker is ready.
AFTER_S = 2.0


def run(*, messages: int, size: int) -> None:
    """Park messages. Then a worker with their rows in its local store takes them over, then one without."""
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder, EmbeddedBroker(Path(folder) / "kafka") as broker:
        bench = Bench(broker.bootstrap, Path(folder), size)
        name = bench.new_name("restore")
        topic = asyncio.run(bench.create(name))
        asyncio.run(bench.send(topic, messages, names=[PARKED]))
        # with a handler for another queue: without any, messages that nobody receives are not even read
        with bench.worker(name, MARQ_HANDLERS="bench.gaps", BENCH_QUEUES=READ, MARQ_PERSIST_AFTER_MS="1000") as worker:
            wait_parked(bench, [worker], messages)
            time.sleep(AFTER_S)
        for phase, data in (("local store", "data"), ("empty store", "other")):
            _take_over(bench, name, phase, data, messages)


def _take_over(bench: Bench, name: str, phase: str, data: str, messages: int) -> None:
    folder = bench.folder / name
    with bench.worker(name, MARQ_HANDLERS="bench.pauses", MARQ_DATA_DIR=str(folder / data)) as worker:
        pid = worker.process.pid
        parked = sum(p["persisted"] for p in bench.state(worker)["partitions"])
        time.sleep(AFTER_S)
    seconds = [float(line.split()[1]) for line in (folder / f"{pid}.takeovers").read_text().splitlines()]
    told = folder / f"{pid}.pauses"
    pauses = [Pause(*map(int, line.split())) for line in told.read_text().splitlines()] if told.exists() else []
    result(
        phase=f"restore:{phase.replace(' ', '-')}",
        messages=messages,
        parked=parked,
        seconds=max(seconds),
        pause_longest_ms=max((pause.ms for pause in pauses), default=0),
        pause_longest_ours_ms=max((pause.ours_ms for pause in pauses), default=0),
        pauses_over_50_ms_ours=sum(pause.ours_ms > 50 for pause in pauses),
    )
