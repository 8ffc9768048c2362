"""`python -m bench core`: what the core takes of a message, without Kafka: read, taken, started, ended."""

from __future__ import annotations

import time

from bench.cycle import result
from marq.core.markers import End, Own, Start
from marq.core.partition import Partition
from marq.core.policies import QueueSettings
from marq.core.ranges import ranges_of
from marq.core.rows import Record

#: Broker time, and the lease, in milliseconds.
NOW_MS, LEASE_MS = 1_700_000_000_000, 30_000
#: Runs, of which the fastest counts.
RUNS = 3


def run(*, messages: int, batches: list[int], queues: int) -> None:
    """Print microseconds a message of each part, for each size of a batch."""
    for batch in batches:
        parts = min((_parts(messages, batch, queues) for _ in range(RUNS)), key=lambda found: sum(found.values()))
        us = {f"{name}_us": round(1e6 * seconds / messages, 2) for name, seconds in parts.items()}
        result(system="core", batch=batch, queues=queues, msgs=messages, all_us=round(sum(us.values()), 2), **us)


def _parts(messages: int, batch: int, queues: int) -> dict[str, float]:
    """Seconds of each part. Messages of all queues come mixed, `batch` of each in one fetch."""
    names = [f"q{i}" for i in range(queues)]
    records = [Record(i, NOW_MS, names[i % queues].encode(), bytes(100), ()) for i in range(messages)]
    partition, settings = Partition(0), QueueSettings()
    partition.start_at(0, 0)
    partition.fold(0, NOW_MS, [Own("w", "w-1")])
    spent = dict.fromkeys(("ingest", "take", "start", "end"), 0.0)
    delivery = 0

    def timed(part: str, began_s: float) -> float:
        now_s = time.perf_counter()
        spent[part] += now_s - began_s
        return now_s

    for start in range(0, messages, batch * queues):
        chunk = records[start : start + batch * queues]
        at_s = time.perf_counter()
        partition.ingest(start, start + len(chunk), chunk)
        at_s = timed("ingest", at_s)
        for name in names:
            taken = partition.take(name, batch, settings)
            at_s = timed("take", at_s)
            if taken:
                delivery += 1
                ranges = ranges_of(taken)
                at_s = time.perf_counter()
                partition.fold(2 * delivery - 1, NOW_MS, [Start(partition.own, delivery, ranges, LEASE_MS)])
                at_s = timed("start", at_s)
                partition.fold(2 * delivery, NOW_MS, [End(partition.own, ranges, "acked", delivery)])
                at_s = timed("end", at_s)
    assert not partition.messages, "not all were ended"
    return spent
