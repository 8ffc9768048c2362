"""Messages whose payload lies in the messages table, in segments of offsets.

A segment is one immutable row. Which queue and group each of its messages is in, and which of them are *parked*
(payload on disk alone, no entry in the partition), is known here, in a few bytes a message: a million parked messages
must not cost a dict entry each, and a message's queue must not cost a read of its row.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

INDEXED_MAX = 16
"""Of so many segments it is known where the messages of each group are: that takes hundreds of bytes a group."""


class Segment:
    """One messages row: offsets in ``[start, stop)``.

    ``messages``: offset, queue (None: poison) and number of the group (0: none), ascending.
    """

    __slots__ = (
        "_counts", "_lanes", "_of", "_parked", "_places", "checksum", "key", "offsets", "remaining", "start", "stop"
    )  # fmt: skip

    def __init__(
        self, key: str, checksum: int, start: int, stop: int, messages: Sequence[tuple[int, str | None, int]]
    ) -> None:
        self.key = key
        self.checksum = checksum
        self.start = start
        self.stop = stop
        self.remaining = len(messages)  # unfinished messages, parked or in memory
        first, last = messages[0][0], messages[-1][0]
        contiguous = last - first + 1 == len(messages)
        self.offsets: Sequence[int] = range(first, last + 1) if contiguous else array("q", (m[0] for m in messages))
        numbers: dict[tuple[str | None, int], int] = {}
        self._of = array("H", (numbers.setdefault((queue, group), len(numbers)) for _, queue, group in messages))
        self._lanes = list(numbers)
        self._parked = bytearray(len(messages))
        self._counts = array("H", bytes(2 * len(numbers)))  # parked messages of each lane
        self._places: dict[tuple[str | None, int], _Places] | None = None

    def __lt__(self, other: Segment) -> bool:
        return self.start < other.start

    def queue_of(self, offset: int) -> str | None:
        """The queue of one of its messages; None for poison."""
        return self._lanes[self._of[self._index(offset)]][0]

    def group_of(self, offset: int) -> int:
        """The number of the group of one of its messages."""
        return self._lanes[self._of[self._index(offset)]][1]

    def is_parked(self, offset: int) -> bool:
        """True if ``offset`` is one of its messages and parked."""
        i = bisect_left(self.offsets, offset)
        return i < len(self.offsets) and self.offsets[i] == offset and bool(self._parked[i])

    def parked_of(self, queue: str) -> list[int]:
        """Its parked messages of ``queue``, ascending."""
        numbers = {n for n, lane in enumerate(self._lanes) if lane[0] == queue}
        messages = zip(self.offsets, self._of, self._parked, strict=True)
        return [o for o, n, parked in messages if parked and n in numbers]

    def first_parked(self, queue: str, group: int) -> int:
        """The lowest parked message of one group of ``queue``; there must be one, and an index."""
        known, parked = self._places_of(queue, group), self._parked
        while not parked[known.places[known.first]]:
            known.first += 1
        return self.offsets[known.places[known.first]]

    @property
    def parked(self) -> dict[str, list[int]]:
        """All of its parked messages by queue (made anew for each call)."""
        found: dict[str, list[int]] = {}
        for (queue, _), offsets in self.parked_lanes().items():
            found.setdefault(queue, []).extend(offsets)
        return found

    def parked_lanes(self) -> dict[tuple[str, int], list[int]]:
        """All of its parked messages by queue and group (made anew for each call)."""
        lanes: dict[int, list[int]] = {}
        for offset, number, parked in zip(self.offsets, self._of, self._parked, strict=True):
            if parked:
                lanes.setdefault(number, []).append(offset)
        return {(str(self._lanes[n][0]), self._lanes[n][1]): offsets for n, offsets in lanes.items()}

    def set_parked(self, offset: int, parked: bool) -> tuple[str, int, int]:
        """Note that ``offset`` is parked, or no more; its queue, its group, and how many of those are parked now."""
        i = self._index(offset)
        number = self._of[i]
        queue, group = self._lanes[number]
        assert queue is not None and self._parked[i] != parked, offset
        self._parked[i] = parked
        self._counts[number] += 1 if parked else -1
        if parked and self._places is not None:
            self._places[queue, group].first = 0
        return queue, group, self._counts[number]

    def take_parked(self, queue: str, group: int) -> list[int]:
        """Those of one group of ``queue``, parked no more; there must be an index."""
        offsets, parked = self.offsets, self._parked
        places = [i for i in self._places_of(queue, group).places if parked[i]]
        for i in places:
            parked[i] = False
        self._counts[self._of[places[0]]] = 0
        return [offsets[i] for i in places]

    def parked_counts(self) -> Iterator[tuple[str, int]]:
        """Queues, and how many messages of each are parked; a queue comes once for each of its groups."""
        for (queue, _), count in zip(self._lanes, self._counts, strict=True):
            if count:
                yield str(queue), count

    def parked_total(self) -> int:
        """How many are parked."""
        return sum(self._counts)

    def parked_in(self, start: int, stop: int) -> list[int]:
        """Its parked messages in ``[start, stop)``, ascending."""
        offsets, parked = self.offsets, self._parked
        return [offsets[i] for i in range(bisect_left(offsets, start), bisect_left(offsets, stop)) if parked[i]]

    def index(self) -> None:
        """Find out where the messages of each group are."""
        every = [array("H") for _ in self._lanes]
        for i, number in enumerate(self._of):
            every[number].append(i)
        self._places = {lane: _Places(places) for lane, places in zip(self._lanes, every, strict=True)}

    def forget_index(self) -> None:
        """Free what `index` takes; it is made again when it is needed."""
        self._places = None

    @property
    def is_indexed(self) -> bool:
        """Whether it is known where the messages of each group are."""
        return self._places is not None

    def _places_of(self, queue: str, group: int) -> _Places:
        assert self._places is not None
        return self._places[queue, group]

    def _index(self, offset: int) -> int:
        i = bisect_left(self.offsets, offset)
        assert self.offsets[i] == offset, offset
        return i


class _Places:
    """Where in a segment the messages of a group are, and the number of the first place that may be parked."""

    __slots__ = ("first", "places")

    def __init__(self, places: array[int]) -> None:
        self.places = places
        self.first = 0


class Segments:
    """The segments of one partition, ascending and disjoint."""

    __slots__ = ("_all", "_indexed", "_starts", "queues")

    def __init__(self) -> None:
        self._all: list[Segment] = []
        self._starts: list[int] = []
        self._indexed: deque[Segment] = deque()
        # queue -> group -> segments that hold parked messages of it, ascending
        self.queues: dict[str, dict[int, list[Segment]]] = {}

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
        queue, group, count = segment.set_parked(offset, True)
        if count == 1:
            insort(self.queues.setdefault(queue, {}).setdefault(group, []), segment)

    def queue_of(self, offset: int) -> str | None:
        """The queue of the parked message ``offset``; None if it is not parked."""
        segment = self.find(offset)
        return segment.queue_of(offset) if segment is not None and segment.is_parked(offset) else None

    def unpark(self, offset: int) -> Segment | None:
        """Take ``offset`` off the parked ones; its segment, or None if it was not parked."""
        segment = self.find(offset)
        if segment is None or not segment.is_parked(offset):
            return None
        queue, group, count = segment.set_parked(offset, False)
        if count == 0:
            self._forget(queue, group, segment)
        return segment

    def next_parked(self, queue: str, group: int = 0) -> Segment | None:
        """The lowest segment with parked messages of a group."""
        segments = self.queues.get(queue, {}).get(group)
        return segments[0] if segments else None

    def unpark_lane(self, segment: Segment, queue: str, group: int) -> list[int]:
        """Take all of one group that is parked in ``segment``."""
        offsets = self._with_index(segment).take_parked(queue, group)
        self._forget(queue, group, segment)
        return offsets

    def _with_index(self, segment: Segment) -> Segment:
        if not segment.is_indexed:
            if len(self._indexed) == INDEXED_MAX:
                self._indexed.popleft().forget_index()
            segment.index()
            self._indexed.append(segment)
        return segment

    def _forget(self, queue: str, group: int, segment: Segment) -> None:
        groups = self.queues[queue]
        segments = groups[group]
        del segments[bisect_left(segments, segment)]
        if not segments:
            del groups[group]
            if not groups:
                del self.queues[queue]

    def has_parked(self, queue: str, group: int = 0) -> bool:
        """True if messages of a group are parked."""
        groups = self.queues.get(queue)
        return groups is not None and group in groups

    def of(self, queue: str) -> list[Segment]:
        """The segments that hold parked messages of ``queue``, ascending."""
        groups = self.queues.get(queue, {})
        return sorted({segment.start: segment for segments in groups.values() for segment in segments}.values())

    def lowest_parked(self, queue: str) -> int | None:
        """The lowest parked offset of a queue."""
        firsts = (self.first_parked(queue, group) for group in self.queues.get(queue, ()))
        return min((offset for offset in firsts if offset is not None), default=None)

    def parked_in(self, start: int, stop: int) -> list[int]:
        """Parked offsets in ``[start, stop)``, ascending."""
        found: list[int] = []
        i = max(bisect_right(self._starts, start) - 1, 0)
        while i < len(self._all) and self._all[i].start < stop:
            found += self._all[i].parked_in(start, stop)
            i += 1
        return found

    def parked_counts(self) -> Counter[str]:
        """How many messages of each queue are parked."""
        counts: Counter[str] = Counter()
        for segment in self._all:
            for queue, count in segment.parked_counts():
                counts[queue] += count
        return counts

    def parked_total(self) -> int:
        """How many messages are parked in all."""
        return sum(segment.parked_total() for segment in self._all)

    def first_parked(self, queue: str, group: int = 0) -> int | None:
        """The lowest parked offset of a group."""
        segments = self.queues.get(queue, {}).get(group)
        return self._with_index(segments[0]).first_parked(queue, group) if segments else None


def keys_of(segments: Iterable[Segment]) -> dict[str, int]:
    """What a manifest names: row key -> checksum."""
    return {segment.key: segment.checksum for segment in segments}
