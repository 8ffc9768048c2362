"""Effect of a worker that joins and leaves: the longest gaps between deliveries, in partitions that stay or move.

The sender, Kafka and four workers share the processors, and a worker that starts takes one for seconds. So each gap is
told a second time without the part in which there was nothing to deliver, because sender or Kafka were held up.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

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
#: Own markers so many records from a delivery are named with it.
NEAR = 50
#: So many of the longest gaps are told one by one.
LONGEST = 5


class Seen(NamedTuple):
    """A message that a handler got."""

    at_ms: int
    pid: int
    waited_ms: int  # so long the thread of the worker's event loop has waited for a processor, since it began
    sent_ms: int  # when the broker got it; the same clock as `at_ms`
    offset: int
    attempt: int


class Change(NamedTuple):
    """Something that happened to the worker that joins and leaves."""

    at_ms: int
    what: str


class Gap(NamedTuple):
    """Time between two deliveries of a partition by the same worker."""

    ms: int
    in_log_ms: int  # since there was something to deliver: less the time in which the sender sent nothing
    ran_ms: int  # less the time in which the thread of the worker's event loop waited for a processor
    partition: int
    at_ms: int  # its end


def run(*, times: int, parked: int, rate: int, pause_s: float, nice: int, control: bool) -> None:
    """Start three workers. Another one joins and leaves `times` times while messages are sent.

    Args:
        nice: niceness of the worker that joins.
        control: first, as often, the worker that starts and stops is one of another installation: no partition moves,
            so what happens to deliveries is what a process that starts beside them does.
    """
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder, EmbeddedBroker(Path(folder) / "kafka") as broker:
        bench = Bench(broker.bootstrap, Path(folder), 100)
        name = bench.new_name("rebalance")
        topic = asyncio.run(bench.create(name))
        stranger = bench.new_name("stranger")
        asyncio.run(bench.create(stranger))
        asyncio.run(bench.send(topic, parked, names=[PARKED]))
        environment = {"MARQ_HANDLERS": "bench.gaps", "BENCH_QUEUES": READ, "MARQ_PERSIST_AFTER_MS": "1000"}
        spans: dict[str, list[Change]] = {}
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
                for phase, of in {"control": stranger, "rebalance": name}.items():
                    if phase == "rebalance" or control:
                        spans[phase] = [
                            change
                            for _ in range(times)
                            for change in _come_and_go(f"{folder}/{phase}", of, nice, pause_s)
                        ]
                stop.set()
                sender.join()
                time.sleep(2)
            finally:
                stop.set()
                for worker in others:
                    worker.stop()
        seen = _read(bench.folder / name)
        for phase, changes in spans.items():
            _report(bench.folder / name, seen, phase, changes, times)
        _report_messages(seen, sent[0])
        asyncio.run(_tell_attempts(broker.bootstrap, name, seen))


def _come_and_go(data_dir: str, name: str, nice: int, pause_s: float) -> list[Change]:
    changes = [Change(_now_ms(), "its process began")]
    with WorkerProcess(MARQ_DATA_DIR=data_dir, MARQ_NAME=name) as joining:
        os.setpriority(os.PRIO_PROCESS, joining.process.pid, nice)
        joining.wait_ready()
        changes.append(Change(_now_ms(), "it was ready"))
        time.sleep(pause_s)
        changes.append(Change(_now_ms(), "SIGTERM"))
    changes.append(Change(_now_ms(), "it had ended"))
    time.sleep(pause_s)
    return [*changes, Change(_now_ms(), "all was quiet")]


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


def _read(folder: Path) -> dict[int, list[Seen]]:
    """All messages that handlers got, by partition, in the order of their deliveries."""
    ahead_ms = time.time_ns() // 1_000_000 - _now_ms()
    seen: dict[int, list[Seen]] = defaultdict(list)
    for file in folder.glob("*.gaps"):
        for line in file.read_text().splitlines():
            partition, offset, attempt, at_ms, waited_ms, sent_ms = map(int, line.split())
            seen[partition].append(Seen(at_ms, int(file.stem), waited_ms, sent_ms - ahead_ms, offset, attempt))
    for found in seen.values():
        found.sort()
    return seen


def _report(folder: Path, seen: dict[int, list[Seen]], phase: str, changes: list[Change], times: int) -> None:
    began_ms, ended_ms = changes[0].at_ms, changes[-1].at_ms
    stays: list[Gap] = []
    moves: list[tuple[int, int]] = []  # as the first two of a `Gap`
    for number, found in seen.items():
        moved_ms = -SAME_MOVE_MS
        for before, then in itertools.pairwise(found):
            if not began_ms <= then.at_ms <= ended_ms:
                continue
            gap_ms = then.at_ms - before.at_ms
            in_log_ms = then.at_ms - min(then.at_ms, max(before.at_ms, then.sent_ms))
            if before.pid == then.pid:
                ran_ms = gap_ms - max(0, then.waited_ms - before.waited_ms)
                stays.append(Gap(gap_ms, in_log_ms, ran_ms, number, then.at_ms))
            elif then.at_ms - moved_ms > SAME_MOVE_MS:
                moves.append((gap_ms, in_log_ms))
                moved_ms = then.at_ms
            else:
                moves[-1] = (max(moves[-1][0], gap_ms), max(moves[-1][1], in_log_ms))
    pauses = [
        Pause(*map(int, line.split()))
        for file in folder.glob("*.pauses")
        for line in file.read_text().splitlines()
        if began_ms <= int(line.split()[0]) <= ended_ms
    ]
    for gap in sorted(stays)[-LONGEST:]:
        last = [change for change in changes if change.at_ms <= gap.at_ms][-1]
        after = f"{gap.at_ms - last.at_ms} ms after {last.what}"
        print(f"  partition {gap.partition}: {gap.ms} ms, {gap.in_log_ms} of them with messages in the log, {after}")
    longest = max(stays)
    result(
        phase=phase,
        times=times,
        load=f"{os.getloadavg()[0]:.1f}",
        stay_longest_ms=longest.ms,
        of_that_in_log_ms=longest.in_log_ms,
        stay_longest_in_log_ms=max(gap.in_log_ms for gap in stays),
        stay_longest_without_waiting_ms=max(gap.ran_ms for gap in stays),
        stay_over_100_ms=sum(gap.ms > 100 for gap in stays),
        stay_over_300_ms=sum(gap.ms > 300 for gap in stays),
        moves=len(moves),
        move_p50_ms=percentile([float(ms) for ms, _ in moves], 0.5),
        move_p95_ms=percentile([float(ms) for ms, _ in moves], 0.95),
        move_longest_ms=max((ms for ms, _ in moves), default=0),
        move_longest_in_log_ms=max((ms for _, ms in moves), default=0),
        pause_longest_ms=max((pause.ms for pause in pauses), default=0),
        pause_longest_ours_ms=max((pause.ours_ms for pause in pauses), default=0),
    )


def _report_messages(seen: dict[int, list[Seen]], sent: int) -> None:
    messages = Counter((partition, one.offset) for partition, found in seen.items() for one in found)
    result(
        phase="messages",
        sent=sent,
        lost=sent - len(messages),
        twice=messages.total() - len(messages),
        attempts_above_one=sum(one.attempt > 1 for found in seen.values() for one in found),
    )


async def _tell_attempts(bootstrap: str, name: str, seen: dict[int, list[Seen]]) -> None:
    """Print what the log says of each message that a handler got with an attempt number above one."""
    for number, found in seen.items():
        again = {one.offset for one in found if one.attempt > 1}
        if not again:
            continue
        records = await records_of(bootstrap, TopicPartition(f"{name}.markers", number))
        owns = [(record.offset, own) for record in records for own in _owns(record)]
        for offset, delivered in deliveries(records, again).items():
            print(f"  attempt above one: {number}:{offset}: {'; '.join(map(str, delivered))}")
            places = [place for one in delivered for place in (one.at, one.given_back_at) if place is not None]
            near = [f"{own.worker} at {at}" for at, own in owns if any(abs(at - place) < NEAR for place in places)]
            print(f"    taken over by: {', '.join(near) or 'nobody at that time'}")


def _owns(record: Any) -> list[Own]:
    return [marker for marker in decode(record.value).markers if isinstance(marker, Own)]


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
