"""Messages whose payload lies in the messages table, in segments of offsets.

A segment is one immutable row of payloads, and an *index row* that says all about its messages but the payloads. Which
queue and group each of its messages is in, and which of them are *parked* (payload on disk alone, no entry in the
partition), is known here, in a few bytes a message: a million parked messages must not cost a dict entry each, and a
message's queue must not cost a read of its row.

Adjacent segments are kept together in *pages*, which are the unit in which a checkpoint writes their state.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat

from marq.core.rows import SegmentState, epoch_and_number_of, index_key_of

#: Of so many segments it is known where the messages of each group are: that takes hundreds of bytes a group.
INDEXED_MAX = 16

#: A page has at most so many segments: a checkpoint rewrites the page of a message that changed.
PAGE_SEGMENTS = 64

#: States of the messages of a segment: with an entry in the partition, parked, done.
LOOSE, PARKED, DONE = 0, 1, 2

# translations of such states, of which there are three
_IS_LOOSE = bytes((1, 0, 0)).ljust(256)
_IS_PARKED = bytes((0, 1, 0)).ljust(256)
_IS_OPEN = bytes((1, 1, 0)).ljust(256)
_TO_PARKED = bytes((PARKED, PARKED, DONE)).ljust(256)
_DONE_DIGITS = b"001".ljust(256)
_FROM_DIGITS = bytes(DONE if digit == ord("1") else LOOSE for digit in range(256))


class Page:
    """Some adjacent segments, and the row that has their state; ``key`` is None while it has none."""

    __slots__ = ("checksum", "key", "segments")

    def __init__(self, key: str | None = None, checksum: int = 0) -> None:
        self.key = key
        self.checksum = checksum
        self.segments: list[Segment] = []


class Segment:
    """One messages row of ``row_bytes``: offsets in ``[start, stop)``.

    ``messages``: offset, queue (None: poison) and number of the group (0: none), ascending.
    """

    __slots__ = (
        "_counts", "_lanes", "_of", "_parked", "_places", "_state", "_states", "checksum", "index_checksum", "key",
        "offsets", "page", "remaining", "row_bytes", "start", "stop",
    )  # fmt: skip

    def __init__(
        self,
        key: str,
        checksum: int,
        start: int,
        stop: int,
        messages: Sequence[tuple[int, str | None, int]],
        row_bytes: int = 0,
    ) -> None:
        numbers: dict[tuple[str | None, int], int] = {}
        of = [numbers.setdefault((queue, group), len(numbers)) for _, queue, group in messages]
        first, last = messages[0][0], messages[-1][0]
        contiguous = last - first + 1 == len(messages)
        offsets = range(first, last + 1) if contiguous else array("q", (m[0] for m in messages))
        self._set(key, checksum, start, stop, offsets, list(numbers), of, row_bytes)

    @classmethod
    def of_index(
        cls,
        key: str,
        checksum: int,
        offsets: Sequence[int],
        lanes: list[tuple[str | None, int]],
        of: Sequence[int],
        row_bytes: int,
    ) -> Segment:
        """From what its index row says; ``of`` may be empty if all messages are of the first lane."""
        self = cls.__new__(cls)
        self._set(key, checksum, offsets[0], offsets[-1] + 1, offsets, lanes, of or repeat(0, len(offsets)), row_bytes)
        return self

    def _set(
        self,
        key: str,
        checksum: int,
        start: int,
        stop: int,
        offsets: Sequence[int],
        lanes: list[tuple[str | None, int]],
        of: Iterable[int],
        row_bytes: int,
    ) -> None:
        self.key = key
        self.checksum = checksum
        self.index_checksum = -1  # of its index row; -1: it has none yet
        self.row_bytes = row_bytes
        self.page: Page | None = None
        self.start = start
        self.stop = stop
        self.offsets = offsets
        self.remaining = len(offsets)  # unfinished messages, parked or in memory
        self._lanes = lanes
        self._of = array("H", of)
        self._states = bytearray(len(offsets))
        self._counts = array("H", bytes(2 * len(lanes)))  # parked messages of each lane …
        self._parked = 0  # … and of all
        self._state: SegmentState | None = None  # as `state` has made it; None: something was done since
        self._places: dict[tuple[str | None, int], _Places] | None = None

    def __lt__(self, other: Segment) -> bool:
        return self.start < other.start

    @property
    def index_key(self) -> str:
        """Key of its index row."""
        return index_key_of(self.key)

    @property
    def lanes(self) -> list[tuple[str | None, int]]:
        """Queue (None: poison) and group of the messages in it."""
        return self._lanes

    @property
    def lane_numbers(self) -> array[int]:
        """For each of its messages, done ones too, which of the lanes it is in."""
        return self._of

    @property
    def live_bytes(self) -> int:
        """About how much of its row belongs to messages that are not done."""
        return self.row_bytes * self.remaining // len(self.offsets)

    def queue_of(self, offset: int) -> str | None:
        """The queue of one of its messages; None for poison."""
        return self._lanes[self._of[self._index(offset)]][0]

    def group_of(self, offset: int) -> int:
        """The number of the group of one of its messages."""
        return self._lanes[self._of[self._index(offset)]][1]

    def is_parked(self, offset: int) -> bool:
        """True if ``offset`` is one of its messages and parked."""
        i = bisect_left(self.offsets, offset)
        return i < len(self.offsets) and self.offsets[i] == offset and self._states[i] == PARKED

    def loose(self) -> Iterator[int]:
        """Its unfinished messages that have an entry in the partition, ascending."""
        return compress(self.offsets, self._states.translate(_IS_LOOSE))

    def unfinished(self) -> Iterator[tuple[int, str | None, int]]:
        """Offset, queue and group of its unfinished messages, ascending."""
        lanes = self._lanes
        is_open = self._states.translate(_IS_OPEN)
        for offset, number in zip(compress(self.offsets, is_open), compress(self._of, is_open), strict=True):
            yield offset, *lanes[number]

    def has_loose(self) -> bool:
        """True if there are messages with an entry in the partition."""
        return self.remaining > self._parked

    def is_open(self, place: int) -> bool:
        """True if the message at this place in it is not done."""
        return self._states[place] != DONE

    def finish(self, offset: int) -> None:
        """One of its messages, not parked, is done."""
        i = self._index(offset)
        assert self._states[i] == LOOSE, offset
        self._states[i] = DONE
        self.remaining -= 1
        self._state = None

    def state(self) -> SegmentState:
        """What its page's row says of it, kept until a message is done: a page is often written for one of many."""
        if self._state is None or self._state.index_checksum != self.index_checksum:
            epoch, number = epoch_and_number_of(self.key)
            self._state = SegmentState(epoch, number, self.checksum, self.index_checksum, self.done_bits())
        return self._state

    def set_state(self, state: SegmentState) -> None:
        """The inverse of :meth:`state`, on a segment that nothing has happened to yet."""
        self.index_checksum = state.index_checksum
        self.set_done(state.done)
        self._state = state

    def done_bits(self) -> bytes:
        """Which of its messages are done, a bit each, the first one lowest; empty: none is."""
        if self.remaining == len(self.offsets):
            return b""
        digits = self._states.translate(_DONE_DIGITS)[::-1]
        return int(digits, 2).to_bytes((len(self.offsets) + 7) // 8, "little")

    def set_done(self, bits: bytes) -> None:
        """The inverse of :meth:`done_bits`, on a segment that nothing has happened to yet."""
        if bits:
            count = len(self.offsets)
            digits = f"{int.from_bytes(bits, 'little'):0{count}b}"[::-1]
            self._states = bytearray(digits.encode()).translate(_FROM_DIGITS)
            self.remaining = self._states.count(LOOSE)

    def parked_of(self, queue: str) -> list[int]:
        """Its parked messages of ``queue``, ascending."""
        numbers = {n for n, lane in enumerate(self._lanes) if lane[0] == queue}
        messages = zip(self.offsets, self._of, self._states, strict=True)
        return [o for o, n, state in messages if state == PARKED and n in numbers]

    def first_parked(self, queue: str, group: int) -> int:
        """The lowest parked message of one group of ``queue``; there must be one, and an index."""
        known, states = self._places_of(queue, group), self._states
        while states[known.places[known.first]] != PARKED:
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
        for offset, number, state in zip(self.offsets, self._of, self._states, strict=True):
            if state == PARKED:
                lanes.setdefault(number, []).append(offset)
        return {(str(self._lanes[n][0]), self._lanes[n][1]): offsets for n, offsets in lanes.items()}

    def set_parked(self, offset: int, parked: bool) -> tuple[str, int, int]:
        """Note that ``offset`` is parked, or no more; its queue, its group, and how many of those are parked now."""
        i = self._index(offset)
        number = self._of[i]
        queue, group = self._lanes[number]
        assert queue is not None and self._states[i] == (LOOSE if parked else PARKED), offset
        self._states[i] = PARKED if parked else LOOSE
        change = 1 if parked else -1
        self._counts[number] += change
        self._parked += change
        if parked and self._places is not None:
            self._places[queue, group].first = 0
        return queue, group, self._counts[number]

    def park_open(self, spared: Iterable[int]) -> list[tuple[str, int]]:
        """Park all that is not done but for ``spared`` and poison, when none is parked; the lanes that have some."""
        states = self._states.translate(_TO_PARKED)
        for offset in spared:
            i = self._index(offset)
            if states[i] == PARKED:
                states[i] = LOOSE
        poison = {n for n, (queue, _) in enumerate(self._lanes) if queue is None}
        for i in range(len(states)) if poison else ():
            if self._of[i] in poison and states[i] == PARKED:
                states[i] = LOOSE
        self._states = states
        self._parked = states.count(PARKED)
        if len(self._lanes) == 1:
            self._counts[0] = self._parked
        else:
            for number, count in Counter(compress(self._of, states.translate(_IS_PARKED))).items():
                self._counts[number] = count
        return self.lanes_with_parked()

    def take_parked(self, queue: str, group: int) -> list[int]:
        """Those of one group of ``queue``, parked no more; there must be an index."""
        offsets, states = self.offsets, self._states
        places = [i for i in self._places_of(queue, group).places if states[i] == PARKED]
        for i in places:
            states[i] = LOOSE
        self._parked -= len(places)
        self._counts[self._of[places[0]]] = 0
        return [offsets[i] for i in places]

    def parked_counts(self) -> Iterator[tuple[str, int]]:
        """Queues, and how many messages of each are parked; a queue comes once for each of its groups."""
        for (queue, _), count in zip(self._lanes, self._counts, strict=True):
            if count:
                yield str(queue), count

    def lanes_with_parked(self) -> list[tuple[str, int]]:
        """Queues and groups of which messages are parked."""
        return [(str(queue), group) for (queue, group), n in zip(self._lanes, self._counts, strict=True) if n]

    def parked_total(self) -> int:
        """How many are parked."""
        return self._parked

    def parked_in(self, start: int, stop: int) -> list[int]:
        """Its parked messages in ``[start, stop)``, ascending."""
        offsets, states = self.offsets, self._states
        places = range(bisect_left(offsets, start), bisect_left(offsets, stop))
        return [offsets[i] for i in places if states[i] == PARKED]

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
    """The segments of one partition, ascending and disjoint, and their pages."""

    __slots__ = ("_all", "_indexed", "_starts", "changed", "dropped", "pages", "queues")

    def __init__(self) -> None:
        self._all: list[Segment] = []
        self._starts: list[int] = []
        self._indexed: deque[Segment] = deque()
        self.pages: list[Page] = []  # ascending
        self.changed: set[Page] = set()  # whose row is out of date
        self.dropped: list[str] = []  # keys of rows of segments and pages that are no more
        # queue -> group -> segments that hold parked messages of it, ascending
        self.queues: dict[str, dict[int, list[Segment]]] = {}

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, places: slice) -> list[Segment]:
        return self._all[places]

    def add(self, segment: Segment) -> None:
        """Take a segment up, into the page below or a new one."""
        i = bisect_left(self._starts, segment.start)
        below = self._all[i - 1].page if i else None
        self._all.insert(i, segment)
        self._starts.insert(i, segment.start)
        if below is not None and len(below.segments) < PAGE_SEGMENTS:
            insort(below.segments, segment)
            segment.page = below
        else:
            segment.page = Page()
            segment.page.segments.append(segment)
            self.pages.insert(self.pages.index(below) + 1 if below is not None else 0, segment.page)
        self.changed.add(segment.page)

    def add_page(self, page: Page) -> None:
        """Take a page up with its segments, which begin above all that there are."""
        for segment in page.segments:
            assert not self._all or self._all[-1].stop <= segment.start, segment.start
            segment.page = page
            self._all.append(segment)
            self._starts.append(segment.start)
        self.pages.append(page)

    def find(self, offset: int) -> Segment | None:
        """The segment that covers ``offset``."""
        i = bisect_right(self._starts, offset) - 1
        if i < 0:
            return None
        segment = self._all[i]
        return segment if offset < segment.stop else None

    def touch(self, start: int, stop: int) -> None:
        """The state of messages in ``[start, stop)`` has changed."""
        i = max(bisect_right(self._starts, start) - 1, 0)
        while i < len(self._all) and self._all[i].start < stop:
            page = self._all[i].page
            assert page is not None
            if self._all[i].stop > start:
                self.changed.add(page)
            i += 1

    def finish(self, offset: int) -> None:
        """A message of a segment is done; an empty segment goes."""
        segment = self.find(offset)
        if segment is None:
            return
        segment.finish(offset)
        assert segment.page is not None
        self.changed.add(segment.page)
        if segment.remaining == 0:
            self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        i = bisect_left(self._starts, segment.start)
        del self._all[i], self._starts[i]
        page = segment.page
        assert page is not None
        page.segments.remove(segment)
        self.changed.add(page)
        self.dropped.append(segment.key)
        if segment.index_checksum >= 0:
            self.dropped.append(segment.index_key)

    def replace(self, run: Sequence[Segment], merged: Segment) -> None:
        """``merged`` takes the place of adjacent segments: it has all of their messages that are not done."""
        loose = [offset for segment in run for offset in segment.loose()]
        page = run[0].page
        assert page is not None
        for segment in run:
            for queue, group in segment.lanes_with_parked():
                self._forget(queue, group, segment)
            self._remove(segment)
        insort(self._all, merged)
        insort(self._starts, merged.start)
        insort(page.segments, merged)
        merged.page = page
        self.park_open(merged, loose)

    def tidy(self) -> list[Page]:
        """The pages whose rows have to be written, ascending. Empty ones go, small neighbours become one."""
        if not self.changed:
            return []
        kept: list[Page] = []
        for page in self.pages:
            below = kept[-1] if kept else None
            if not page.segments:
                self._drop(page)
            elif (
                below is not None
                and (page in self.changed or below in self.changed)
                and len(below.segments) + len(page.segments) <= PAGE_SEGMENTS // 2
            ):
                for segment in page.segments:
                    segment.page = below
                below.segments += page.segments
                self.changed.add(below)
                self._drop(page)
            else:
                kept.append(page)
        self.pages = kept
        changed, self.changed = self.changed, set()
        return [page for page in kept if page in changed]

    def _drop(self, page: Page) -> None:
        if page.key is not None:
            self.dropped.append(page.key)

    def split(self, page: Page) -> tuple[Page, Page]:
        """The page, and a new one behind it, with half of its segments each."""
        upper = Page()
        half = len(page.segments) // 2
        upper.segments, page.segments = page.segments[half:], page.segments[:half]
        for segment in upper.segments:
            segment.page = upper
        self.pages.insert(self.pages.index(page) + 1, upper)
        return page, upper

    def park(self, offset: int) -> None:
        """The payload of ``offset`` is now only in its segment."""
        segment = self.find(offset)
        assert segment is not None, offset
        queue, group, count = segment.set_parked(offset, True)
        if count == 1:
            self._note(queue, group, segment)

    def park_open(self, segment: Segment, spared: Iterable[int]) -> list[tuple[str, int]]:
        """Park all of ``segment`` but ``spared``, done ones and poison; queues and groups of what is parked."""
        lanes = segment.park_open(spared)
        for queue, group in lanes:
            self._note(queue, group, segment)
        return lanes

    def _note(self, queue: str, group: int, segment: Segment) -> None:
        """There are parked messages of a group in ``segment``."""
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

    def lowest_with(self, queue: str, group: int = 0) -> Segment | None:
        """The lowest segment that has parked messages of a group."""
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

    def named(self) -> Iterator[str]:
        """Keys of all rows of segments and pages."""
        for page in self.pages:
            if page.key is not None:
                yield page.key
        for segment in self._all:
            yield segment.key
            if segment.index_checksum >= 0:
                yield segment.index_key


# ------------------------------------------------------------------ which segments are worth merging

#: Fullness of a segment that has as many messages, or bytes, as a row may have. Tiers are powers of four of it.
FULL = 1024
_TIERS = (1024, 256, 64, 16, 4)


def mergeable(weights: Sequence[int]) -> list[tuple[int, int]]:
    """Runs ``[i, j)`` of adjacent segments that should become one, by how full they are (in parts of ``FULL``).

    As in a log-structured store with size tiers: a run of segments below a tier is merged when together they reach
    that tier. So each merge lifts a message by a tier at least, and it is rewritten at most once for each of them
    (five times) while nothing around it is finished; and what is not merged is few: per full segment's worth of
    messages, some for each tier.
    """
    found: list[tuple[int, int]] = []
    taken = bytearray(len(weights))
    for tier in _TIERS:
        i = 0
        while i < len(weights):
            j, total = i, 0
            while j < len(weights) and weights[j] < tier and not taken[j]:
                total += weights[j]
                j += 1
            if j - i > 1 and total >= tier:
                for start, stop in _filled(weights, i, j):
                    if sum(weights[start:stop]) >= min(tier, FULL // 2):
                        found.append((start, stop))
                        taken[start:stop] = b"\1" * (stop - start)
            i = max(j, i + 1)
    return sorted(found)


def _filled(weights: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """A run in pieces of several segments that fit into one."""
    i = start
    while i < stop:
        j, total = i + 1, weights[i]
        while j < stop and total + weights[j] <= FULL:
            total += weights[j]
            j += 1
        if j - i > 1:
            yield i, j
        i = j
