"""Messages whose payload lies in the messages table, in segments of offsets.

A segment is one immutable row. Which of its messages are unfinished is known here: those that the partition has in
memory are only counted, the *parked* ones (payload on disk alone) are listed, as ranges per queue, because a million
of them must not cost a dict entry each.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator

from marq.core.ranges import RangeSet


class Segment:
    """One messages row: offsets in ``[start, stop)``."""

    __slots__ = ("checksum", "key", "parked", "remaining", "start", "stop")

    def __init__(self, key: str, checksum: int, start: int, stop: int, remaining: int) -> None:
        self.key = key
        self.checksum = checksum
        self.start = start
        self.stop = stop
        self.remaining = remaining  # unfinished messages, parked or in memory
        self.parked: dict[str, RangeSet] = {}

    def __lt__(self, other: Segment) -> bool:
        return self.start < other.start


class Segments:
    """The segments of one partition, ascending and disjoint."""

    __slots__ = ("_all", "_starts", "queues")

    def __init__(self) -> None:
        self._all: list[Segment] = []
        self._starts: list[int] = []
        self.queues: dict[str, list[Segment]] = {}  # queue -> segments that hold parked messages of it, ascending

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, segment: Segment) -> None:
        """Take a segment up."""
        insort(self._all, segment)
        insort(self._starts, segment.start)

    def find(self, offset: int) -> Segment | None:
        """The segment that covers ``offset``."""
        i = bisect_right(self._starts, offset) - 1
        if i < 0:
            return None
        segment = self._all[i]
        return segment if offset < segment.stop else None

    def finish(self, offset: int) -> None:
        """A message of a segment is done; an empty segment goes."""
        segment = self.find(offset)
        if segment is None:
            return
        segment.remaining -= 1
        if segment.remaining == 0:
            i = self._starts.index(segment.start)
            del self._all[i], self._starts[i]

    def park(self, queue: str, offset: int) -> None:
        """The payload of ``offset`` is now only in its segment."""
        segment = self.find(offset)
        assert segment is not None, offset
        ranges = segment.parked.get(queue)
        if ranges is None:
            ranges = segment.parked[queue] = RangeSet()
            insort(self.queues.setdefault(queue, []), segment)
        ranges.add(offset, offset + 1)

    def queue_of(self, offset: int) -> str | None:
        """The queue of the parked message ``offset``; None if it is not parked."""
        segment = self.find(offset)
        if segment is not None:
            for queue, ranges in segment.parked.items():
                if offset in ranges:
                    return queue
        return None

    def unpark(self, offset: int) -> tuple[str, Segment] | None:
        """Take ``offset`` off the parked ones; its queue and segment, or None if it was not parked."""
        queue = self.queue_of(offset)
        if queue is None:
            return None
        segment = self.find(offset)
        assert segment is not None
        ranges = segment.parked[queue]
        ranges.discard(offset, offset + 1)
        if not ranges:
            self._forget(queue, segment)
        return queue, segment

    def unpark_next(self, queue: str) -> tuple[Segment, RangeSet] | None:
        """Take the lowest segment with parked messages of ``queue``, and which they are."""
        segments = self.queues.get(queue)
        if not segments:
            return None
        segment = segments[0]
        ranges = segment.parked[queue]
        self._forget(queue, segment)
        return segment, ranges

    def _forget(self, queue: str, segment: Segment) -> None:
        del segment.parked[queue]
        segments = self.queues[queue]
        segments.remove(segment)
        if not segments:
            del self.queues[queue]

    def parked_in(self, start: int, stop: int) -> list[int]:
        """Parked offsets in ``[start, stop)``, ascending."""
        found: list[int] = []
        i = max(bisect_right(self._starts, start) - 1, 0)
        while i < len(self._all) and self._all[i].start < stop:
            for ranges in self._all[i].parked.values():
                part = ranges.within(start, stop)
                for k in range(0, len(part), 2):
                    found += range(part[k], part[k + 1])
            i += 1
        found.sort()
        return found

    def parked_count(self, queue: str) -> int:
        """How many messages of ``queue`` are parked."""
        return sum(len(segment.parked[queue]) for segment in self.queues.get(queue, ()))

    def first_parked(self, queue: str) -> int | None:
        """The lowest parked offset of ``queue``."""
        segments = self.queues.get(queue)
        return segments[0].parked[queue].first() if segments else None


def keys_of(segments: Iterable[Segment]) -> dict[str, int]:
    """What a manifest names: row key -> checksum."""
    return {segment.key: segment.checksum for segment in segments}
