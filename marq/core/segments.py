"""Messages whose payload lies in the messages table, in segments of offsets.

A segment is one immutable row. Which queue each of its messages is in, and which of them are *parked* (payload on disk
alone, no entry in the partition), is known here, in a few bytes a message: a million parked messages must not cost a
dict entry each, and a message's queue must not cost a read of its row.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence


class Segment:
    """One messages row: offsets in ``[start, stop)``. ``messages``: offset and queue (None: poison), ascending."""

    __slots__ = ("_counts", "_names", "_of", "_parked", "checksum", "key", "offsets", "remaining", "start", "stop")

    def __init__(
        self, key: str, checksum: int, start: int, stop: int, messages: Sequence[tuple[int, str | None]]
    ) -> None:
        self.key = key
        self.checksum = checksum
        self.start = start
        self.stop = stop
        self.remaining = len(messages)  # unfinished messages, parked or in memory
        first, last = messages[0][0], messages[-1][0]
        contiguous = last - first + 1 == len(messages)
        self.offsets: Sequence[int] = range(first, last + 1) if contiguous else array("q", (o for o, _ in messages))
        numbers: dict[str | None, int] = {}
        self._of = array("H", (numbers.setdefault(queue, len(numbers)) for _, queue in messages))
        self._names = list(numbers)
        self._parked = bytearray(len(messages))
        self._counts = array("H", bytes(2 * len(numbers)))  # parked messages of each queue

    def __lt__(self, other: Segment) -> bool:
        return self.start < other.start

    def queue_of(self, offset: int) -> str | None:
        """The queue of one of its messages; None for poison."""
        return self._names[self._of[self._index(offset)]]

    def is_parked(self, offset: int) -> bool:
        """True if ``offset`` is one of its messages and parked."""
        i = bisect_left(self.offsets, offset)
        return i < len(self.offsets) and self.offsets[i] == offset and bool(self._parked[i])

    def parked_of(self, queue: str) -> list[int]:
        """Its parked messages of ``queue``, ascending."""
        number = self._names.index(queue)
        return [o for o, n, parked in zip(self.offsets, self._of, self._parked, strict=True) if parked and n == number]

    @property
    def parked(self) -> dict[str, list[int]]:
        """All of its parked messages by queue (made anew for each call)."""
        found: dict[str, list[int]] = {}
        for offset, number, parked in zip(self.offsets, self._of, self._parked, strict=True):
            if parked:
                found.setdefault(str(self._names[number]), []).append(offset)
        return found

    def set_parked(self, offset: int, parked: bool) -> tuple[str, int]:
        """Note that ``offset`` is parked, or no more; its queue, and how many of that are parked now."""
        i = self._index(offset)
        number = self._of[i]
        queue = self._names[number]
        assert queue is not None and self._parked[i] != parked, offset
        self._parked[i] = parked
        self._counts[number] += 1 if parked else -1
        return queue, self._counts[number]

    def take_parked(self, queue: str) -> list[int]:
        """Those of ``queue``, parked no more."""
        offsets = self.parked_of(queue)
        for offset in offsets:
            self._parked[self._index(offset)] = False
        self._counts[self._names.index(queue)] = 0
        return offsets

    def take_all_parked(self) -> dict[str, list[int]]:
        """All of them by queue, parked no more."""
        found = self.parked
        self._parked = bytearray(len(self._parked))
        self._counts = array("H", bytes(2 * len(self._names)))
        return found

    def parked_count(self, queue: str) -> int:
        """How many of ``queue`` are parked."""
        return self._counts[self._names.index(queue)]

    def parked_total(self) -> int:
        """How many are parked."""
        return sum(self._counts)

    def parked_in(self, start: int, stop: int) -> list[int]:
        """Its parked messages in ``[start, stop)``, ascending."""
        offsets, parked = self.offsets, self._parked
        return [offsets[i] for i in range(bisect_left(offsets, start), bisect_left(offsets, stop)) if parked[i]]

    def _index(self, offset: int) -> int:
        i = bisect_left(self.offsets, offset)
        assert self.offsets[i] == offset, offset
        return i


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
            i = bisect_left(self._starts, segment.start)
            del self._all[i], self._starts[i]

    def park(self, offset: int) -> None:
        """The payload of ``offset`` is now only in its segment."""
        segment = self.find(offset)
        assert segment is not None, offset
        queue, count = segment.set_parked(offset, True)
        if count == 1:
            insort(self.queues.setdefault(queue, []), segment)

    def queue_of(self, offset: int) -> str | None:
        """The queue of the parked message ``offset``; None if it is not parked."""
        segment = self.find(offset)
        return segment.queue_of(offset) if segment is not None and segment.is_parked(offset) else None

    def unpark(self, offset: int) -> Segment | None:
        """Take ``offset`` off the parked ones; its segment, or None if it was not parked."""
        segment = self.find(offset)
        if segment is None or not segment.is_parked(offset):
            return None
        queue, count = segment.set_parked(offset, False)
        if count == 0:
            self._forget(queue, segment)
        return segment

    def unpark_next(self, queue: str) -> tuple[Segment, list[int]] | None:
        """Take the lowest segment with parked messages of ``queue``, and which they are."""
        segments = self.queues.get(queue)
        if not segments:
            return None
        segment = segments[0]
        offsets = segment.take_parked(queue)
        self._forget(queue, segment)
        return segment, offsets

    def unpark_all(self, segment: Segment) -> dict[str, list[int]]:
        """Take all that is parked in ``segment``, by queue."""
        found = segment.take_all_parked()
        for queue in found:
            self._forget(queue, segment)
        return found

    def _forget(self, queue: str, segment: Segment) -> None:
        segments = self.queues[queue]
        del segments[bisect_left(segments, segment)]
        if not segments:
            del self.queues[queue]

    def parked_in(self, start: int, stop: int) -> list[int]:
        """Parked offsets in ``[start, stop)``, ascending."""
        found: list[int] = []
        i = max(bisect_right(self._starts, start) - 1, 0)
        while i < len(self._all) and self._all[i].start < stop:
            found += self._all[i].parked_in(start, stop)
            i += 1
        return found

    def parked_count(self, queue: str) -> int:
        """How many messages of ``queue`` are parked."""
        return sum(segment.parked_count(queue) for segment in self.queues.get(queue, ()))

    def parked_total(self) -> int:
        """How many messages are parked in all."""
        return sum(segment.parked_total() for segment in self._all)

    def first_parked(self, queue: str) -> int | None:
        """The lowest parked offset of ``queue``; it looks through a segment."""
        segments = self.queues.get(queue)
        return segments[0].parked_of(queue)[0] if segments else None


def keys_of(segments: Iterable[Segment]) -> dict[str, int]:
    """What a manifest names: row key -> checksum."""
    return {segment.key: segment.checksum for segment in segments}
