"""Offset ranges: flat lists ``[from, next, from, next, …]``, half-open, and a set that is stored as such.

Flat and half-open because markers, manifests and chunks all carry them: one encoding from wire to memory, and a batch
of consecutive messages costs two integers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

#: ``[from, next, …]``: ascending, disjoint, each pair non-empty.
Ranges = list[int]


def ranges_of(offsets: Iterable[int]) -> Ranges:
    """Ranges that cover ``offsets`` (ascending, without repeats)."""
    out: Ranges = []
    end = None
    for offset in offsets:
        if offset != end:
            if end is not None:
                out.append(end)
            out.append(offset)
        end = offset + 1
    if end is not None:
        out.append(end)
    return out


def offsets_in(ranges: Ranges) -> Iterator[int]:
    """Every offset of ``ranges``, ascending."""
    for i in range(0, len(ranges), 2):
        yield from range(ranges[i], ranges[i + 1])


def flat(ranges: Ranges) -> list[int]:
    """The same as a list: faster where many ranges are single offsets, as with many queues on one partition."""
    out: list[int] = []
    pairs = iter(ranges)
    for start, stop in zip(pairs, pairs, strict=True):
        if stop == start + 1:
            out.append(start)
        else:
            out += range(start, stop)
    return out


def count(ranges: Ranges) -> int:
    """How many offsets ``ranges`` hold."""
    return sum(ranges[1::2]) - sum(ranges[::2])


def well_formed(ranges: Ranges) -> bool:
    """True if ``ranges`` is ascending, disjoint and made of non-empty pairs of offsets >= 0."""
    if len(ranges) % 2 or (ranges and ranges[0] < 0):
        return False
    last = -1
    for i in range(0, len(ranges), 2):
        if ranges[i] < last or ranges[i + 1] <= ranges[i]:
            return False
        last = ranges[i + 1]
    return True


class RangeSet:
    """A set of offsets kept as sorted disjoint ranges; cost grows with the number of ranges, not of offsets."""

    __slots__ = ("_froms", "_nexts")

    def __init__(self, ranges: Ranges = ()) -> None:  # type: ignore[assignment]
        self._froms: list[int] = list(ranges[::2])
        self._nexts: list[int] = list(ranges[1::2])

    def __bool__(self) -> bool:
        return bool(self._froms)

    def __len__(self) -> int:
        return sum(self._nexts) - sum(self._froms)

    def __iter__(self) -> Iterator[int]:
        return offsets_in(self.ranges())

    def __contains__(self, offset: int) -> bool:
        i = bisect_right(self._froms, offset) - 1
        return i >= 0 and offset < self._nexts[i]

    def ranges(self) -> Ranges:
        """The set as flat ranges."""
        out: Ranges = []
        for pair in zip(self._froms, self._nexts, strict=True):
            out += pair
        return out

    def first(self) -> int:
        """The lowest offset (the set must not be empty)."""
        return self._froms[0]

    def add(self, start: int, stop: int) -> None:
        """Add ``[start, stop)``."""
        froms, nexts = self._froms, self._nexts
        i = bisect_left(nexts, start)
        j = bisect_right(froms, stop)
        if i < j:
            start = min(start, froms[i])
            stop = max(stop, nexts[j - 1])
        froms[i:j] = [start]
        nexts[i:j] = [stop]

    def discard(self, start: int, stop: int) -> None:
        """Take ``[start, stop)`` out."""
        froms, nexts = self._froms, self._nexts
        i = bisect_right(nexts, start)
        j = bisect_left(froms, stop)
        if i >= j:
            return
        left, right = froms[i], nexts[j - 1]
        new_froms, new_nexts = [], []
        if left < start:
            new_froms.append(left)
            new_nexts.append(start)
        if right > stop:
            new_froms.append(stop)
            new_nexts.append(right)
        froms[i:j] = new_froms
        nexts[i:j] = new_nexts

    def within(self, start: int, stop: int) -> Ranges:
        """The part of the set that lies in ``[start, stop)``."""
        froms, nexts = self._froms, self._nexts
        out: Ranges = []
        for i in range(bisect_right(nexts, start), bisect_left(froms, stop)):
            out += (max(froms[i], start), min(nexts[i], stop))
        return out
