"""Messages whose payload lies in the messages table, in segments of offsets.

A segment is one immutable row of payloads, and an *index row* with everything else about its messages. In memory it
knows the queue and group of each message, and which messages are *parked*: their payload is only on disk, and they have
no entry in the partition. That takes a few bytes a message, so a million parked messages do not cost a dict entry each,
and the queue of a message is known without reading its row.

Adjacent segments are kept together in *pages*, which are the unit in which a checkpoint writes their state.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat

from marq.core.rows import SegmentState, epoch_and_number_of, index_key_of
from marq.errors import InternalError

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
    """Some adjacent segments, and the row that has their state. ``key`` is None until the row is written."""

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
        self._set(
            key=key,
            checksum=checksum,
            start=start,
            stop=stop,
            offsets=offsets,
            lanes=list(numbers),
            of=of,
            row_bytes=row_bytes,
        )

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
        """A segment made from its index row. ``of`` may be empty if all messages are in the first lane."""
        self = cls.__new__(cls)
        self._set(
            key=key,
            checksum=checksum,
            start=offsets[0],
            stop=offsets[-1] + 1,
            offsets=offsets,
            lanes=lanes,
            of=of or repeat(0, len(offsets)),
            row_bytes=row_bytes,
        )
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
    def in_page(self) -> Page:
        """The page that it is in."""
        if self.page is None:
            raise InternalError(f"segment {self.key} is in no page")
        return self.page

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
        """The number of the lane of each of its messages, including done ones."""
        return self._of

    @property
    def live_bytes(self) -> int:
        """About how many bytes of its row belong to unfinished messages."""
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

    def is_loose(self, offset: int) -> bool:
        """True if ``offset`` is one of its messages, unfinished, and has an entry in the partition."""
        i = bisect_left(self.offsets, offset)
        return i < len(self.offsets) and self.offsets[i] == offset and self._states[i] == LOOSE

    def loose(self) -> Iterator[int]:
        """Its unfinished messages that have an entry in the partition, ascending."""
        if not self.has_loose():
            return iter(())  # most segments have none; finding that out from a thousand states takes longer
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
        if self._states[i] != LOOSE:
            raise InternalError(f"{offset} of segment {self.key} ends, and is done or parked")
        self._states[i] = DONE
        self.remaining -= 1
        self._state = None

    def state(self) -> SegmentState:
        """Its state for the row of its page. It is kept until a message is done: pages are often written for others."""
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

    def lowest_parked(self, queues: Iterable[str]) -> dict[str, int]:
        """The lowest parked message of each of some queues that have one. Needs no index."""
        wanted, lanes, found = set(queues), self._lanes, dict[str, int]()
        for place, state in enumerate(self._states):
            if state == PARKED and (queue := lanes[self._of[place]][0]) in wanted:
                found[str(queue)] = self.offsets[place]
                wanted.remove(str(queue))
                if not wanted:
                    break
        return found

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
        """Mark ``offset`` as parked or not. Returns its queue, its group, and how many of that group are parked now."""
        i = self._index(offset)
        number = self._of[i]
        queue, group = self._lanes[number]
        if queue is None or self._states[i] != (LOOSE if parked else PARKED):
            raise InternalError(f"{offset} of segment {self.key}, queue {queue}, can't change to parked: {parked}")
        self._states[i] = PARKED if parked else LOOSE
        change = 1 if parked else -1
        self._counts[number] += change
        self._parked += change
        if parked and self._places is not None:
            self._places[queue, group].first = 0
        return queue, group, self._counts[number]

    def park_open(self, spared: Iterable[int]) -> list[tuple[str, int]]:
        """Park all unfinished messages except ``spared`` and poison. None may be parked yet. Returns their lanes."""
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
        """Mark all messages of one group as not parked. Returns them. There must be an index."""
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

    def problem(self) -> str:
        """What is wrong with its counts, by the states of its messages; empty if nothing is."""
        states = self._states
        remaining, parked = len(states) - states.count(DONE), states.count(PARKED)
        if not 0 < remaining == self.remaining:
            return f"{self.remaining} messages are said to remain, there are {remaining}"
        if not parked == self._parked == sum(self._counts):
            return f"{self._parked} messages are said to be parked, by lanes {sum(self._counts)}, there are {parked}"
        if self._state is not None and self._state.done != self.done_bits():
            return "its page would be written without the last messages that are done"
        return ""

    def index(self) -> None:
        """Make an index of the places of each group's messages."""
        every = [array("H") for _ in self._lanes]
        for i, number in enumerate(self._of):
            every[number].append(i)
        self._places = {lane: _Places(places) for lane, places in zip(self._lanes, every, strict=True)}

    def forget_index(self) -> None:
        """Drop the index; it is made again when it is needed."""
        self._places = None

    @property
    def is_indexed(self) -> bool:
        """True if there is an index of the places of each group's messages."""
        return self._places is not None

    def _places_of(self, queue: str, group: int) -> _Places:
        if self._places is None:
            raise InternalError(f"segment {self.key} has no index")
        return self._places[queue, group]

    def _index(self, offset: int) -> int:
        i = bisect_left(self.offsets, offset)
        if i == len(self.offsets) or self.offsets[i] != offset:
            raise InternalError(f"{offset} is none of segment {self.key}, [{self.start}, {self.stop})")
        return i


class _Places:
    """Where in a segment the messages of a group are, and the number of the first place that may be parked."""

    __slots__ = ("first", "places")

    def __init__(self, places: array[int]) -> None:
        self.places = places
        self.first = 0
