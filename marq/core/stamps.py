"""Tells when the next messages of a queue were sent: a receive from several partitions begins with the oldest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice

from marq.core.partition import Partition
from marq.core.segments import Segment

#: Stands for the timestamp of a message whose payload is on disk: reading it would cost too much.
LONG_AGO = -1

#: Steps into which a larger limit is divided: examining each message would cost as much as taking it.
STEPS = 32


def next_stamps(partition: Partition, queue: str) -> Iterator[int]:
    """Timestamps of ready messages of ``queue``, about in the order of delivery. Of a group only the first one counts.

    Nothing may be folded, read or taken meanwhile.
    """
    messages, deliveries, reserved = partition.messages, partition.deliveries, partition.reserved
    if partition.segments.has_parked(queue):
        while True:
            yield LONG_AGO
    backlog = partition.backlogs.get(queue)
    if backlog is None:
        return
    lanes = (backlog, *islice((lane for lane in backlog.turns if lane is not backlog), STEPS))
    for lane in lanes:
        for row in (lane.again, lane.returned):
            if row and partition.is_ready(row[0]):
                yield _stamp(messages[row[0]])
        found = (o for o in lane.fresh if o in messages and o not in deliveries and o not in reserved)
        for offset in found if lane is backlog else islice(found, 1):
            yield _stamp(messages[offset])


def _stamp(record: object) -> int:
    return LONG_AGO if type(record) is Segment else int(record.timestamp)  # type: ignore[attr-defined]


def shares_of(limit: int, stamps: Sequence[Iterator[int]]) -> list[tuple[int, int]]:
    """How many of ``limit`` messages to take from each of several partitions, so that the oldest are taken.

    If two partitions have equally old messages, the first one goes first.
    """
    step = -(-limit // STEPS)
    heads = [(first, i) for i, found in enumerate(stamps) if (first := next(found, None)) is not None]
    heapify(heads)
    shares: dict[int, int] = {}
    left = limit
    while heads and left > 0:
        i = heads[0][1]
        count = min(step, left)
        shares[i] = shares.get(i, 0) + count
        left -= count
        following = next(islice(stamps[i], count - 1, None), None)
        if following is None:
            heappop(heads)
        else:
            heapreplace(heads, (following, i))
    return list(shares.items())
