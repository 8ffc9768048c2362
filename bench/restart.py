"""Effect of a rolling restart on deliveries: three workers are restarted one after another, again and again."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from app.kafka.broker import EmbeddedBroker
from app.processes import WorkerProcess
from bench.cycle import PARTITIONS, Bench, percentile, result
from tests.integration.duplicates import Done, Explained, explain

WORKERS = 3
QUEUES = ("single", "batch")
#: Messages sent up to so many milliseconds after a change count as sent after it.
AFTER_MS = 5_000
#: Most seconds for the remaining messages after the last one was sent.
SETTLE_S = 60.0

Place = tuple[int, int]


class Seen(NamedTuple):
    """A message whose handler call returned."""

    place: Place
    attempt: int
    began_ms: int
    pid: int


class Sender:
    """Sends at a rate, to the queues and partitions in turn, and records when each confirmed message was sent."""

    def __init__(self, bootstrap: str, topic: str, rate: int) -> None:
        self.sent_ms: dict[Place, int] = {}
        self.failed = 0
        self._bootstrap, self._topic, self._rate = bootstrap, topic, rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    async def _run(self) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=self._bootstrap, enable_idempotence=True, acks="all")
        await producer.start()
        began, i = time.monotonic(), 0
        while not self._stop.is_set():
            # looked at each time: a machine that can't keep the rate up would never come to the end of this loop
            while i < (time.monotonic() - began) * self._rate and not self._stop.is_set():
                queue, partition = QUEUES[i % len(QUEUES)], i // len(QUEUES) % PARTITIONS
                now = _now_ms()
                future = await producer.send(self._topic, b"." * 100, key=queue.encode(), partition=partition)
                future.add_done_callback(lambda done, now=now: self._confirmed(done, now))
                i += 1
            await asyncio.sleep(0.002)
        await producer.stop()

    def _confirmed(self, done: Any, sent_ms: int) -> None:
        if done.exception() is not None:
            self.failed += 1
        else:
            self.sent_ms[done.result().partition, done.result().offset] = sent_ms


def run(*, seconds: float, rate: int, pause_s: float) -> None:
    """Restart workers for so many seconds. Exits with status 1 if a message was lost, or done twice unexplained."""
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder, EmbeddedBroker(Path(folder) / "kafka") as broker:
        bench = Bench(broker.bootstrap, Path(folder), 100)
        name = bench.new_name("restart")
        topic = asyncio.run(bench.create(name))
        out = Path(folder) / name
        out.mkdir()
        os.environ.update(
            MARQ_KAFKA=f"kafka://{broker.bootstrap}",
            MARQ_NAME=name,
            MARQ_PARTITIONS=str(PARTITIONS),
            MARQ_WEB_PORT="0",
            MARQ_HANDLERS="bench.calls",
            BENCH_OUT=str(out),
        )
        workers = [_start(folder, i) for i in range(WORKERS)]
        sender = Sender(broker.bootstrap, topic, rate)
        leaves: list[int] = []
        joins: list[int] = []
        killed: set[int] = set()
        try:
            for worker in workers:
                worker.wait_ready()
            sender.start()
            time.sleep(pause_s)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                i = len(joins) % WORKERS
                leaves.append(_now_ms())
                workers[i].stop()
                if workers[i].process.returncode:
                    killed.add(workers[i].process.pid)
                workers[i] = _start(folder, i)
                workers[i].wait_ready()
                joins.append(_now_ms())
                time.sleep(pause_s)
            sender.stop()
            seen = _wait_done(out, sender.sent_ms)
        finally:
            sender.stop()
            for worker in workers:
                worker.stop()
        explained = asyncio.run(_explain(broker.bootstrap, f"{name}.markers", seen, killed))
    _report(sender, seen, leaves, joins, explained, len(killed))


def _start(folder: str, number: int) -> WorkerProcess:
    return WorkerProcess(MARQ_DATA_DIR=f"{folder}/data{number}")


def _wait_done(out: Path, sent: dict[Place, int]) -> list[Seen]:
    deadline = time.monotonic() + SETTLE_S
    while True:
        seen = [
            Seen((int(partition), int(offset)), int(attempt), int(began_ms), int(file.stem))
            for file in out.glob("*.calls")
            for partition, offset, attempt, began_ms in map(str.split, file.read_text().splitlines())
        ]
        if time.monotonic() > deadline or sent.keys() <= {one.place for one in seen}:
            return seen
        time.sleep(1)


async def _explain(bootstrap: str, topic: str, seen: list[Seen], killed: set[int]) -> Explained:
    done = [Done(*one.place, one.attempt, one.pid) for one in seen]
    if len({one[:2] for one in done}) == len(done):
        return Explained()
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        tps = [TopicPartition(topic, n) for n in range(PARTITIONS)]
        consumer.assign(tps)
        ends = await consumer.end_offsets(tps)
        markers: defaultdict[int, list[Any]] = defaultdict(list)
        while any([await consumer.position(tp) < ends[tp] for tp in tps]):
            for tp, records in (await consumer.getmany(timeout_ms=500)).items():
                markers[tp.partition] += records
    finally:
        await consumer.stop()
    return explain(done, markers, killed=killed)


def _report(
    sender: Sender, seen: list[Seen], leaves: list[int], joins: list[int], explained: Explained, killed: int
) -> None:
    first: dict[Place, int] = {}
    for one in seen:
        first[one.place] = min(one.began_ms, first.get(one.place, one.began_ms))
    sent = sender.sent_ms
    for change, at in (("leave", leaves), ("join", joins)):
        # a worker joins some time before it is ready, so messages sent before that count too
        reach_ms = AFTER_MS if change == "join" else 0
        windows = [
            [float(first[p] - ms) for p, ms in sent.items() if p in first and -reach_ms <= ms - t < AFTER_MS]
            for t in at
        ]
        took = [value for window in windows for value in window]
        result(
            phase=f"after_a_{change}",
            times=len(at),
            messages=len(took),
            p50_ms=percentile(took, 0.5),
            p95_ms=percentile(took, 0.95),
            p99_ms=percentile(took, 0.99),
            max_ms=max(took),
            p95_of_the_worst_ms=max(percentile(window, 0.95) for window in windows),
        )
    lost = len(sent.keys() - first.keys())
    twice = len(seen) - len({one.place for one in seen})
    result(
        phase="restart",
        restarts=len(joins),
        sent=len(sent),
        sends_failed=sender.failed,
        lost=lost,
        attempts_above_one=sum(one.attempt > 1 for one in seen),
        twice=twice,
        killed=killed,
        unexplained=len(explained.unexplained),
    )
    print(f"done twice because: {explained}")
    for line in explained.unexplained[:20]:
        print(line)
    if lost or explained.unexplained:
        raise SystemExit(1)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
