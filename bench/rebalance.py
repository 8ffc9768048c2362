"""Effect of a worker that joins and leaves: the longest gaps between deliveries, in partitions that stay or move."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from aiokafka import TopicPartition

from app.kafka.broker import EmbeddedBroker
from app.processes import WorkerProcess
from bench.cycle import Bench, percentile, result
from bench.lag import Pause
from bench.overload import records_of
from marq.core.markers import Own, decode
from tests.integration.duplicates import deliveries

WORKERS = 3
READ = "q0"
PARKED = "parked"
#: Milliseconds for one move: meanwhile deliveries of the old owner end, mixed with the first of the new one.
SAME_MOVE_MS = 1_500


def run(*, times: int, parked: int, rate: int, pause_s: float) -> None:
    """Start three workers. Another one joins and leaves `times` times while messages are sent."""
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder, EmbeddedBroker(Path(folder) / "kafka") as broker:
        bench = Bench(broker.bootstrap, Path(folder), 100)
        name = bench.new_name("rebalance")
        topic = asyncio.run(bench.create(name))
        asyncio.run(bench.send(topic, parked, names=[PARKED]))
        environment = {"MARQ_HANDLERS": "bench.gaps", "BENCH_QUEUES": READ, "MARQ_PERSIST_AFTER_MS": "1000"}
        with bench.worker(name, **environment) as first:
            others = [WorkerProcess(MARQ_DATA_DIR=f"{folder}/data{i}") for i in range(1, WORKERS)]
            try:
                for worker in others:
                    worker.wait_ready()
                sent: list[int] = []
                stop = threading.Event()
                sender = threading.Thread(target=lambda: sent.append(asyncio.run(_send(bench, topic, rate, stop))))
                sender.start()
                wait_parked(bench, [first, *others], parked)
                time.sleep(pause_s)
                began_ms = _now_ms()
                for _ in range(times):
                    with WorkerProcess(MARQ_DATA_DIR=f"{folder}/data{WORKERS}") as joining:
                        joining.wait_ready()
                        time.sleep(pause_s)
                    time.sleep(pause_s)
                ended_ms = _now_ms()
                stop.set()
                sender.join()
                time.sleep(2)
            finally:
                for worker in others:
                    worker.stop()
        _report(bench.folder / name, began_ms, ended_ms, sent[0], times)
        asyncio.run(_tell_attempts(broker.bootstrap, name, bench.folder / name))


async def _send(bench: Bench, topic: str, rate: int, stop: threading.Event) -> int:
    total = 0
    while not stop.is_set():
        total += await bench.send_at_rate(topic, rate, 1.0)
    return total


def wait_parked(bench: Bench, workers: list[WorkerProcess], parked: int) -> None:
    """Wait until so many messages are in the tables of these workers."""
    deadline = time.monotonic() + 120
    while sum(p["persisted"] for worker in workers for p in bench.state(worker)["partitions"]) < parked:
        if time.monotonic() > deadline:
            raise SystemExit(f"not all is in the tables: {[bench.state(worker) for worker in workers]}")
        time.sleep(0.2)


def _report(folder: Path, began_ms: int, ended_ms: int, sent: int, times: int) -> None:
    seen: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    messages: dict[tuple[int, int], int] = defaultdict(int)
    attempts = 0
    for file in folder.glob("*.gaps"):
        for line in file.read_text().splitlines():
            partition, offset, attempt, at_ms, waited_ms = map(int, line.split())
            seen[partition].append((at_ms, int(file.stem), waited_ms))
            messages[partition, offset] += 1
            attempts += attempt > 1
    stays: list[tuple[int, int]] = []  # gap, and gap without the time that the worker waited for a processor
    moves: list[int] = []
    for handed in seen.values():
        handed.sort()
        moved_ms = -SAME_MOVE_MS
        for (before_ms, before, waited), (after_ms, after, waited_then) in itertools.pairwise(handed):
            gap_ms = after_ms - before_ms
            if began_ms <= after_ms <= ended_ms:
                if before == after:
                    stays.append((gap_ms, gap_ms - max(0, waited_then - waited)))
                elif after_ms - moved_ms > SAME_MOVE_MS:
                    moves.append(gap_ms)
                    moved_ms = after_ms
                else:
                    moves[-1] = max(moves[-1], gap_ms)
    pauses = [
        Pause(*map(int, line.split()))
        for file in folder.glob("*.pauses")
        for line in file.read_text().splitlines()
        if began_ms <= int(line.split()[0]) <= ended_ms
    ]
    result(
        phase="rebalance",
        times=times,
        sent=sent,
        lost=sent - len(messages),
        twice=sum(count - 1 for count in messages.values()),
        attempts_above_one=attempts,
        stay_longest_ms=max(gap for gap, _ in stays),
        stay_longest_without_waiting_ms=max(gap for _, gap in stays),
        stay_over_100_ms=sum(gap > 100 for gap, _ in stays),
        moves=len(moves),
        move_p50_ms=percentile(list(map(float, moves)), 0.5),
        move_p95_ms=percentile(list(map(float, moves)), 0.95),
        move_longest_ms=max(moves),
        pause_longest_ms=max((pause.ms for pause in pauses), default=0),
        pause_longest_ours_ms=max((pause.ours_ms for pause in pauses), default=0),
    )


async def _tell_attempts(bootstrap: str, name: str, folder: Path) -> None:
    """Print what the log says of each message that a handler got with an attempt number above one."""
    again: dict[int, set[int]] = defaultdict(set)
    for file in folder.glob("*.gaps"):
        for line in file.read_text().splitlines():
            partition, offset, attempt, *_ = map(int, line.split())
            if attempt > 1:
                again[partition].add(offset)
    for partition, offsets in again.items():
        records = await records_of(bootstrap, TopicPartition(f"{name}.markers", partition))
        for offset, life in deliveries(records, offsets).items():
            print(f"  attempt above one: {partition}:{offset}: {'; '.join(map(str, life))}")
            owns = [(r.offset, own) for r in records for own in _owns(r)]
            for at in [place for one in life for place in (one.at, one.given_back_at) if place is not None]:
                near = [f"own of {own.worker} at {o}" for o, own in owns if abs(o - at) < 50]
                print(f"    at {at}: {', '.join(near) or 'no change of owner'}")


def _owns(record: Any) -> list[Own]:
    return [marker for marker in decode(record.value).markers if isinstance(marker, Own)]


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
