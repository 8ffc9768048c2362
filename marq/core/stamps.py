"""Tells how a receive is shared among several partitions: the oldest messages first, or in turn where groups are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice

from marq.core.partition import Partition
from marq.core.segments import Segment

#: Stands for the timestamp of a message whose payload is on disk: reading it would cost too much.
LONG_AGO = -1

#: Milliseconds since 1970 before which no record was written: Kafka is not older. Producers may have written anything
#: into a topic with CreateTime.
FIRST_MS = 1_293_840_000_000

#: Steps into which a larger limit is divided: examining each message would cost as much as taking it.
STEPS = 32


def is_believable(timestamp_ms: int) -> bool:
    """False for a timestamp that can't be the time at which a message was sent."""
    return timestamp_ms >= FIRST_MS


def next_stamps(partitions: Sequence[Partition], queue: str, limit: int) -> list[Iterator[int]]:
    """For each partition, the timestamps of ready messages of ``queue``, about in the order of delivery.

    If a partition has groups, all partitions take turns, as groups do: by age, a group with an old backlog in one
    partition would keep the messages of another one waiting. The numbers are then places in turn, up to ``limit``.
    Nothing may be folded, read or taken meanwhile.
    """
    if any((backlog := one.backlogs.get(queue)) is not None and backlog.groups for one in partitions):
        return [iter(range(limit)) for _ in partitions]
    return [_stamps(one, queue) for one in partitions]


def _stamps(partition: Partition, queue: str) -> Iterator[int]:
    messages, deliveries, reserved = partition.messages, partition.deliveries, partition.reserved
    if partition.segments.has_parked(queue):
        while True:
            yield LONG_AGO
    backlog = partition.backlogs.get(queue)
    if backlog is None:
        return
    for row in (backlog.again, backlog.returned):
        if row and partition.is_ready(row[0]):
            yield _stamp(messages[row[0]])
    for offset in backlog.fresh:
        # once for each message that is taken: calls would cost more than the rest
        record = messages.get(offset)
        if record is None or offset in deliveries or offset in reserved:
            continue
        yield LONG_AGO if type(record) is Segment else record.timestamp


def _stamp(record: object) -> int:
    return LONG_AGO if type(record) is Segment else int(record.timestamp)  # type: ignore[attr-defined]


def note_lowest(partition: Partition, offsets: Iterable[int], lowest: dict[str, int]) -> None:
    """Lower the offset of each queue in ``lowest`` to that of its first message among ``offsets``, as far as not done.

    As by the entries of :mod:`marq.core.digest`, at a fifth of their cost: every message is looked at.
    """
    messages, poison, topic_mode = partition.messages, partition.poison, partition.queue_id is not None
    by_key: dict[bytes, int] = {}
    for offset in offsets:
        record = messages.get(offset)
        if record is None:
            continue
        key = None if topic_mode or type(record) is Segment or offset in poison else record.key
        if key is None:
            queue = partition.queue_of(offset) or ""
            if offset < lowest.get(queue, offset + 1):
                lowest[queue] = offset
        elif offset < by_key.get(key, offset + 1):
            by_key[key] = offset
    for offset in by_key.values():
        queue = partition.queue_of(offset) or ""
        if offset < lowest.get(queue, offset + 1):
            lowest[queue] = offset


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
