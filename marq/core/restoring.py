"""Restores the state from rows and a manifest: the inverse of a checkpoint."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import Any, NamedTuple, Self

from marq.core import rows
from marq.core.dedup import origin_digest
from marq.core.deliveries import Deliveries
from marq.core.ranges import RangeSet, offsets_in
from marq.core.segments import Page, Segment
from marq.core.state import DeliveryState, newest_possible_ms
from marq.errors import RowError

#: Segments in one slice of a restore: 0.005 s with a thousand queues in each.
SLICE_SEGMENTS = 2

#: Lane (queue and group) -> the one object that stands for all equal lanes.
_Lanes = dict[tuple[str | None, int], tuple[str | None, int]]


class _Times(NamedTuple):
    """Delays and times to live from an index row."""

    delays: list[int]
    ttls: list[int]


class Restoring(Deliveries):
    """Takes the state from the tables."""

    @classmethod
    def restore(
        cls,
        number: int,
        manifest: rows.Manifest,
        load: Callable[[str], bytes],
        *,
        queue_id: str | None = None,
        present: Collection[str] | None = None,
        origin_keys: tuple[bytes, ...] = (),
    ) -> Self:
        """The inverse of :meth:`checkpoint`: the state at the manifest's positions.

        Args:
            load: reads a row by its key. Payloads are not read before they are wanted.
            present: keys of the messages rows in the table; None: not known.

        Raises:
            RowError: a row that the manifest names is missing or damaged.
        """
        steps = cls.restoring(number, manifest, load, queue_id=queue_id, present=present, origin_keys=origin_keys)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                restored: Self = stop.value
                return restored

    @classmethod
    def restoring(
        cls,
        number: int,
        manifest: rows.Manifest,
        load: Callable[[str], bytes],
        *,
        queue_id: str | None = None,
        present: Collection[str] | None = None,
        origin_keys: tuple[bytes, ...] = (),
    ) -> Generator[None, None, Self]:
        """:meth:`restore` in slices of some milliseconds. The generator returns the partition."""
        self = cls(number, queue_id=queue_id, load=load, origin_keys=origin_keys)
        self._take_manifest(manifest)
        pages: list[tuple[int, Page, tuple[rows.PageRow, list[_Times]]]] = []
        lanes: _Lanes = {}
        ids: list[tuple[int, str, int, Any]] = []
        unpaged: list[tuple[str, int]] = []
        unfinished = RangeSet()
        for key, checksum in manifest.rows.items():
            kind = rows.kind_of(key)
            if kind == "messages":
                unpaged.append((key, checksum))
                continue
            value = rows.loaded(load, key, checksum)
            if kind == "pages":
                page, row, times = Page(key, checksum), rows.decode_page(value), []
                for s in row.segments:
                    index = self._index_of(s, present)
                    page.segments.append(self._restored_segment(s, index, lanes))
                    times.append(_Times(index.delays, index.ttls))
                    if len(times) % SLICE_SEGMENTS == 0:
                        yield
                pages.append((page.segments[0].start, page, (row, times)))
            elif kind in ("dedup", "origins"):
                parts = rows.decode_dedup(value)
                ids.append((parts[1][0], key, checksum, parts))
                self._id_rows[key] = checksum
            else:
                self._restore_markers(key, checksum, rows.decode_markers(value), unfinished)
            yield
        yield from self._restore_ids(sorted(ids), manifest)
        for _, page, (row, times) in sorted(pages, key=lambda p: p[0]):
            yield from self._restore_page(page, row, times)
            yield
        if unpaged or unfinished:
            yield from self._restore_unpaged(unpaged, unfinished)
        while self._end_wait():
            yield
        yield from self._recount()
        return self

    def _take_manifest(self, manifest: rows.Manifest) -> None:
        self.position = self.persisted = manifest.position
        self.markers_position = manifest.markers_position
        self.ahead = RangeSet(manifest.done)
        self.clock_ms = manifest.clock_ms
        self.last_timestamp_ms = manifest.last_timestamp_ms
        self.broker_ms = manifest.broker_ms
        self.told_ms = manifest.broker_ms if manifest.told_ms is None else manifest.told_ms
        self.tick_ms = manifest.tick_ms
        self.own = manifest.own
        self.delivery = manifest.delivery
        self.purges = dict(manifest.purges)
        self.missed = RangeSet(manifest.unreadable)
        self.counters = Counter(manifest.counters)
        self.lost = list(manifest.lost)
        self.world = manifest.world
        self.newest_ms = newest_read_ms(manifest, self.queue_id)

    def _restore_ids(self, ids: Iterable[tuple[int, str, int, Any]], manifest: rows.Manifest) -> Iterator[None]:
        """``ids``: first offset, key, checksum and content of rows, ascending."""
        for _, key, checksum, parts in ids:
            (self.recent if rows.kind_of(key) == "dedup" else self.origins).restore(key, checksum, *parts)
            yield
        self.recent.skip(manifest.ids_skipped)
        self.origins.skip(manifest.origins_skipped)
        for origin, (copy, _) in sorted(manifest.copied.items(), key=lambda item: item[1]):
            if copy < manifest.position:
                name = origin if isinstance(origin, str) else f"{self.number}:{origin}"
                self.origins.is_duplicate(origin_digest(name), copy, manifest.last_timestamp_ms)

    def _index_of(self, s: rows.SegmentState, present: Collection[str] | None) -> rows.IndexRow:
        key = rows.row_key(self.number, s.epoch, "messages", s.number)
        if present is not None and key not in present:
            raise RowError(f"row {key} is named by a page, but it is not in the table")
        return rows.decode_index(rows.loaded(self.load, rows.index_key_of(key), s.index_checksum))

    def _restored_segment(self, s: rows.SegmentState, index: rows.IndexRow, lanes: _Lanes) -> Segment:
        key = rows.row_key(self.number, s.epoch, "messages", s.number)
        # segments share the names of their queues: of a thousand in each, a collection of garbage would see a million
        names = [lanes.setdefault(lane, lane) for lane in index.lanes]
        segment = Segment.of_index(key, s.checksum, index.offsets(), names, index.of, index.row_bytes)
        segment.set_state(s)
        return segment

    def _restore_page(self, page: Page, row: rows.PageRow, times: list[_Times]) -> Iterator[None]:
        self._restore_deliveries(row.deliveries)
        self.duplicates.update(offsets_in(row.duplicates))
        self.segments.add_page(page)
        special = set(offsets_in(row.duplicates))
        for delivered in row.deliveries:
            special.update(offsets_in(delivered.offsets))
        for segment, (delays, ttls) in zip(page.segments, times, strict=True):
            offsets, is_open = segment.offsets, segment.is_open
            for place, due_ms in zip(delays[::2], delays[1::2], strict=True):
                if is_open(place) and offsets[place] not in self.deliveries:
                    self._delay_until(offsets[place], due_ms)
                    special.add(offsets[place])
            for place, expires_ms in zip(ttls[::2], ttls[1::2], strict=True):
                if is_open(place):
                    self._expire_at(offsets[place], expires_ms)
            if delays or ttls:
                yield
        spared = sorted(special)
        for i, segment in enumerate(page.segments, 1):
            self._park_restored(segment, spared[bisect_left(spared, segment.start) : bisect_left(spared, segment.stop)])
            if i % SLICE_SEGMENTS == 0:
                yield

    def _park_restored(self, segment: Segment, special: Iterable[int]) -> None:
        """Park the ready messages of a segment. The others get an entry of their own."""
        deliveries, delays, duplicates = self.deliveries, self.delays, self.duplicates
        waiting = [o for o in special if o in deliveries or o in delays or o in duplicates]
        for queue, group in self.segments.park_open(segment, waiting):
            backlog = self._backlog(queue)
            self.woken[queue] = None
            if group:
                backlog.queue_up(self._lane(backlog, group))
        for offset in segment.loose():
            self.messages[offset] = segment
            queue_id, group = segment.queue_of(offset), segment.group_of(offset)
            if queue_id is None:
                if offset not in self.poison:  # version 0.1 wrote it, too
                    self.poison[offset] = str(self._facts_or_poison(self.record(offset)))
            elif group and offset in delays and offset not in duplicates:
                self._lane(self._backlog(queue_id), group).add(offset)

    def _restore_deliveries(self, deliveries: Iterable[rows.DeliveryRow]) -> None:
        for h in deliveries:
            offsets = list(offsets_in(h.offsets))
            delivered = DeliveryState(h.epoch, h.delivery, h.receives, h.deadline_ms, h.leased, h.receiver, offsets)
            self.deliveries.update(dict.fromkeys(offsets, delivered))
            self._highest_delivered = max(self._highest_delivered, offsets[-1])
            self._set_timer(delivered)

    def _restore_markers(self, key: str, checksum: int, row: rows.MarkersRow, unfinished: RangeSet) -> None:
        self._marker_rows[row.block] = (key, checksum)
        for start, stop in zip(*[iter(row.unfinished)] * 2, strict=True):
            unfinished.add(start, stop)
        self.duplicates.update(offsets_in(row.duplicates))
        self._restore_deliveries(row.deliveries)

    # ------------------------------------------------------------------ manifests of version 1

    def _restore_unpaged(self, unpaged: list[tuple[str, int]], unfinished: RangeSet) -> Iterator[None]:
        """Restore the segments of a manifest without pages: its markers rows say what is unfinished."""
        segments: list[tuple[str, int, bytes]] = []
        for key, checksum in unpaged:
            segments.append((key, checksum, rows.loaded(self.load, key, checksum)))
            yield
        found = 0
        decoded = ((key, checksum, len(v), rows.decode_messages(v).records()) for key, checksum, v in segments)
        for key, checksum, size, records in sorted(decoded, key=lambda s: s[3][0].offset):
            held = [r for r in records if r.offset in unfinished]
            if not held:
                self._garbage.append(key)
                continue
            described = [(record.offset, *self._describe(record, self._facts_or_poison(record))) for record in held]
            segment = Segment(key, checksum, records[0].offset, records[-1].offset + 1, described, size)
            self.segments.add(segment)
            special = [o for o, *_ in described if o in self.deliveries or o in self.delays or o in self.duplicates]
            self._park_restored(segment, special)
            found += len(held)
            yield
        if found != len(unfinished):
            raise RowError(
                f"partition {self.number}: the markers rows name {len(unfinished)} unfinished messages, the messages "
                f"rows hold {found}"
            )
        self._dirty.update(self._marker_rows)


def newest_read_ms(manifest: rows.Manifest, queue_id: str | None) -> int:
    """At least the greatest timestamp of the queue topic's records that were read."""
    if manifest.newest_ms is not None:
        return manifest.newest_ms
    return newest_possible_ms(manifest.last_timestamp_ms, queue_id)
