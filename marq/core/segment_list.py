"""The segments of one partition, in the order of their offsets, and what can be asked of all of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from marq.core.segments import Page, Segment
from marq.errors import InternalError

#: Segments that have an index of the places of each group at the same time: it takes hundreds of bytes a group.
INDEXED_MAX = 16

#: Segments in a page at most: a checkpoint writes the whole page for each message of it that changed.
PAGE_SEGMENTS = 64


class SegmentList:
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
        """Add a segment, to the page below it or a new one."""
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
        """Add a page with its segments, which must begin above all others."""
        for segment in page.segments:
            if self._all and self._all[-1].stop > segment.start:
                raise InternalError(f"segment {segment.key} begins inside segment {self._all[-1].key}")
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

    def at(self, offset: int) -> Segment:
        """The segment that covers ``offset``. Raises :exc:`InternalError` if there is none."""
        segment = self.find(offset)
        if segment is None:
            raise InternalError(f"{offset} is in no segment")
        return segment

    def touch(self, start: int, stop: int) -> None:
        """The state of messages in ``[start, stop)`` has changed."""
        i = max(bisect_right(self._starts, start) - 1, 0)
        while i < len(self._all) and self._all[i].start < stop:
            if self._all[i].stop > start:
                self.changed.add(self._all[i].in_page)
            i += 1

    def finish(self, offset: int) -> None:
        """A message of a segment is done. A segment without unfinished messages is removed."""
        segment = self.find(offset)
        if segment is None:
            return
        segment.finish(offset)
        self.changed.add(segment.in_page)
        if segment.remaining == 0:
            self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        i = bisect_left(self._starts, segment.start)
        del self._all[i], self._starts[i]
        page = segment.in_page
        page.segments.remove(segment)
        self.changed.add(page)
        self.dropped.append(segment.key)
        if segment.index_checksum >= 0:
            self.dropped.append(segment.index_key)

    def replace(self, run: Sequence[Segment], merged: Segment) -> None:
        """Put ``merged`` in the place of adjacent segments. It has all of their unfinished messages."""
        loose = [offset for segment in run for offset in segment.loose()]
        page = run[0].in_page
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
        """The pages whose rows have to be written, ascending. Empty pages are removed, small neighbours are joined."""
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
        """Split a page. Returns it and a new page behind it, with half of the segments each."""
        upper = Page()
        half = len(page.segments) // 2
        upper.segments, page.segments = page.segments[half:], page.segments[:half]
        for segment in upper.segments:
            segment.page = upper
        self.pages.insert(self.pages.index(page) + 1, upper)
        return page, upper

    def park(self, offsets: Iterable[int]) -> None:
        """The payloads of these messages are now only in their segments."""
        segment: Segment | None = None
        for offset in offsets:
            if segment is None or not segment.start <= offset < segment.stop:
                segment = self.at(offset)
            queue, group, count = segment.set_parked(offset, True)
            if count == 1:
                self._note(queue, group, segment)

    def park_open(self, segment: Segment, spared: Iterable[int]) -> list[tuple[str, int]]:
        """Park the messages of ``segment``, except ``spared``, done ones and poison. Returns queues and groups."""
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
        """Mark ``offset`` as not parked. Returns its segment, or None if it was not parked."""
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
        """Mark all messages of one group in ``segment`` as not parked. Returns their offsets."""
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
