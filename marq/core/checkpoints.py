"""The state as rows and a manifest. What a checkpoint keeps, and where:

    of an unfinished message below its position      payload: messages row. Queue, group, delay, time to live: index
                                                     row. Delivery, and whether it is a duplicate: page
    of a message that will be read again             delivery: markers row. That it is done: manifest
    ids and origins of messages                      dedup and origins rows
    what is unreadable, and what was read of it      that it is: manifest. Delivery: markers row. It is read again
    clocks, own marker, delivery number, purges,     manifest
    counters, losses that a user accepted

Everything else follows from these (backlogs, lanes, counts), or a crash may forget it (reservations, what receivers
want, which payloads are in memory). The cost of a checkpoint grows with what has changed, and the size of the tables
with what is unfinished, not with time: small and sparse segments are merged.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from marq.core import rows, state
from marq.core.dedup import Recent
from marq.core.merging import FULL, mergeable
from marq.core.ranges import RangeSet, ranges_of
from marq.core.restoring import Restoring
from marq.core.segments import Page, Segment
from marq.core.state import MESSAGE_OVERHEAD_BYTES, DeliveryState, block_of, size_of
from marq.errors import InternalError

#: Messages in one messages row at most: reading one message back reads its whole row.
SEGMENT_MESSAGES = 1_000
#: Bytes in one messages row at most, for the same reason; a larger message has a row of its own.
SEGMENT_BYTES = 256 * 1024
#: Bytes of a message in a messages row beside key, value and headers.
ROW_OVERHEAD_BYTES = 40
#: Bytes of payload that one checkpoint writes at most, but always one message: the event loop must not wait for more.
#: The next checkpoint goes on.
PERSIST_BYTES = 4 * 1024 * 1024
#: Messages that one checkpoint writes, or reads to merge them: about 0.05 s of work. A quarter is reserved for merging.
WORK_MESSAGES = 16_000
#: Bytes of a page's row above which it is split: a page is written anew for each change in it.
PAGE_BYTES = 256 * 1024
#: Segments that one checkpoint examines for merging, among the newest and again among all others.
SCAN_SEGMENTS = 64
#: Segments, and bytes, that one checkpoint merges at most.
MERGE_SEGMENTS = 64
MERGE_BYTES = 2 * 1024 * 1024
#: Bytes above which a segment is written anew when three quarters of its messages are done: less is not worth a row.
SPARSE_MIN_BYTES = 16 * 1024
#: Ticks after which a manifest is written though nothing else changed (ten minutes): a crash makes them be read again.
TICKS_MAX = 600

Row = tuple[str, bytes]


class Checkpoint(NamedTuple):
    """What to write: first the new rows, then the manifest. Behind the fence, delete the ``obsolete`` rows."""

    rows: list[Row]
    manifest: bytes
    obsolete: list[str]
    position: int  # of the queue topic: nothing below it is read again
    markers_position: int
    partial: bool = False  # there was more to write than one checkpoint may: make the next one at once


class Checkpoints(Restoring):
    """Writes the state down."""

    def checkpoint(
        self, epoch: int, now_ms: int, window_offsets: int, persist_after_ms: int, *, whole: bool = False
    ) -> Checkpoint | None:
        """Capture the state as rows to write and a manifest. Returns None if nothing changed.

        At most ``PERSIST_BYTES`` of payloads are written, and no poison, unless ``whole`` is set.

        Args:
            epoch: of the owner; it is part of the keys of rows.
            now_ms: any monotonic clock.
            window_offsets: write messages with their payload that are this many offsets behind what was read. This
                bounds what is read again after a crash.
            persist_after_ms: the same for messages that were read this long ago.
            whole: write everything up to what was read.
        """
        new_rows: list[Row] = []
        old_segments = len(self.segments)
        position = self._new_position(now_ms, window_offsets, persist_after_ms)
        if whole:
            position = self.position
        written, waiting, partial = self._persist(epoch, position, new_rows, whole)
        self._write_tail(epoch, new_rows)
        ids = self._write_ids(epoch, new_rows)
        if new_rows or self.changed():
            self._merge(epoch, old_segments, max(WORK_MESSAGES - written, WORK_MESSAGES // 4), new_rows)
        self._write_pages(epoch, new_rows)
        self._sweep()
        named = self._named(ids)
        if not new_rows and not self._garbage and not self.changed():
            return None
        self._ticks = 0
        self._written = () if partial else self._extent()  # the rest is written though nothing else happens
        obsolete, self._garbage = sorted(self._garbage), []
        self._check_rows(new_rows, named, obsolete)
        manifest = rows.Manifest(
            v=rows.MANIFEST_VERSION,
            epoch=epoch,
            rows=named,
            position=self.persisted,
            markers_position=self.markers_position,
            done=self._done_above(waiting),
            clock_ms=self.clock_ms,
            last_timestamp_ms=self.last_timestamp_ms,
            own=self.own,
            delivery=self.delivery,
            purges=dict(self.purges),
            counters=dict(self.counters),
            lost=list(self.lost),
            ids_skipped=self.recent.skipped(),
            origins_skipped=self.origins.skipped(),
            broker_ms=self.broker_ms,
            told_ms=self.told_ms,
            tick_ms=self.tick_ms,
            newest_ms=self.newest_ms,
            world=self.world,
            unreadable=self.missed.within(0, self.persisted),
        )
        encoded = rows.encode_manifest(manifest)
        return Checkpoint(new_rows, encoded, obsolete, self.needed_from, self.markers_position, partial)

    def _check_rows(self, new_rows: Sequence[Row], named: dict[str, int], obsolete: Sequence[str]) -> None:
        """No row that is named or new is deleted, and each new row is named by the manifest or by a page.

        Raises:
            InternalError: that is not so.
        """
        for key in obsolete:
            if key in named:
                raise InternalError(f"row {key} is named by the manifest that makes it obsolete")
        gone = set(obsolete)
        for key, _ in new_rows:
            if key in gone or (key not in named and rows.kind_of(key) not in ("messages", "index")):
                raise InternalError(f"row {key} is written, and no manifest will name it")

    def _named(self, ids: dict[str, int]) -> dict[str, int]:
        """The rows that the manifest names."""
        self._garbage += [key for key in self._id_rows if key not in ids]
        self._id_rows = ids
        self._garbage += self.segments.dropped
        self.segments.dropped.clear()
        named = {page.key: page.checksum for page in self.segments.pages if page.key is not None}
        named.update(ids)
        named.update(self._marker_rows.values())
        return named

    def named_keys(self) -> Iterator[str]:
        """Keys of all rows that count since the last checkpoint, or restore."""
        yield from self.segments.named()
        yield from self._id_rows
        for key, _ in self._marker_rows.values():
            yield key

    def forget_hints(self) -> None:
        """Drop what only deliveries need. A fold that delivers nothing must do so: it would grow with the log."""
        self.backlogs.clear()
        self._by_key.clear()
        self._again_turn.clear()
        self.woken.clear()
        self._suspects.clear()
        self.recent.forget_unwritten()
        self.origins.forget_unwritten()

    def changed(self) -> bool:
        """True if a checkpoint would have something to write."""
        return self._ticks >= TICKS_MAX or self._written != self._extent()

    def _extent(self) -> tuple[int, ...]:
        return (self.persisted, self.position, self.markers_position - self._ticks, self.own, len(self.missed))

    def _new_position(self, now_ms: int, window_offsets: int, persist_after_ms: int) -> int:
        """The offset below which each unfinished message has to have its payload in a segment."""
        seen = self._seen_at
        seen.append((now_ms, self.position))
        held = 0
        while len(seen) > 1 and seen[1][0] <= now_ms - persist_after_ms:
            del seen[0]
        if seen[0][0] <= now_ms - persist_after_ms:
            held = seen[0][1]
        return max(self.persisted, held, self.position - window_offsets)

    def _persist(self, epoch: int, position: int, new_rows: list[Row], whole: bool) -> tuple[int, list[int], bool]:
        """Write the payloads of unfinished messages below ``position``, or the first of them.

        Returns how many were written, the unfinished offsets above, ascending, and whether there is more to write.
        """
        old = self.persisted
        above = sorted([o for o in self.messages if o >= old])
        # a poison record is waited for until its copy is made: its row could be too large for the changelog
        if self.poison and not whole:
            position = min([position, *(o for o in self.poison if o >= old)])
        count = bisect_left(above, position)
        batch: list[Any] = []
        size = total = 0
        partial = False
        for i in range(count):
            record = self.messages[above[i]]
            in_row = size_of(record) - MESSAGE_OVERHEAD_BYTES + len(record.key or b"") + ROW_OVERHEAD_BYTES
            if batch and (len(batch) >= SEGMENT_MESSAGES or size + in_row > SEGMENT_BYTES):
                self._add_segment(epoch, batch, new_rows)
                batch, size = [], 0
                if (total + in_row > PERSIST_BYTES or i >= WORK_MESSAGES) and not whole:
                    count, partial, position = i, True, above[i]
                    break
            batch.append(record)
            size += in_row
            total += in_row
        if batch:
            self._add_segment(epoch, batch, new_rows)
        self._dirty.update({block_of(offset) for offset in above[:count]})
        if self.missed:
            for offset in above[:count]:
                self.missed.discard(offset, offset + 1)
            self._keep_purges()
        waiting = above[count:]
        # everything below the first message that may still be read again is done or in a segment
        self.persisted = max(position, waiting[0] if waiting else self.position)
        return count, waiting, partial

    def _add_segment(self, epoch: int, batch: list[Any], new_rows: list[Row]) -> None:
        messages = [(o, self.queue_of(o), self.group_of(o)) for o in (record.offset for record in batch)]
        self.segments.add(self._new_segment(epoch, batch, messages, new_rows))

    def _new_segment(
        self, epoch: int, records: Sequence[Any], messages: Sequence[tuple[int, str | None, int]], new_rows: list[Row]
    ) -> Segment:
        """Write the two rows of a segment; ``messages``: offset, queue and group of each."""
        key, value = self._row_key(epoch, "messages"), rows.messages_row(records)
        segment = Segment(
            key, rows.checksum(value), messages[0][0], messages[-1][0] + 1, messages, row_bytes=len(value)
        )
        new_rows.append((key, value))
        self._write_index(segment, new_rows)
        return segment

    def _write_index(self, segment: Segment, new_rows: list[Row]) -> None:
        offsets = segment.offsets
        row = rows.IndexRow(
            v=rows.VERSION,
            row_bytes=segment.row_bytes,
            first=offsets[0],
            count=len(offsets),
            gaps=[] if isinstance(offsets, range) else [b - a for a, b in itertools.pairwise(offsets)],
            lanes=segment.lanes,
            of=list(segment.lane_numbers) if len(segment.lanes) > 1 else [],
            delays=_of_places(offsets, self.delays, self.elapsed),
            ttls=_of_places(offsets, self.ttls),
        )
        value = rows.encode(row)
        segment.index_checksum = rows.checksum(value)
        new_rows.append((segment.index_key, value))

    # ------------------------------------------------------------------ merging

    def _merge(self, epoch: int, count: int, left_messages: int, new_rows: list[Row]) -> None:
        """Merge some of the first ``count`` segments: small neighbours, and sparse ones.

        The newest are examined each time, all others in turn, so that the work of one checkpoint is bounded.
        """
        places = [max(0, count - SCAN_SEGMENTS)]
        if count > SCAN_SEGMENTS:
            self._scanned = self._scanned % (count - SCAN_SEGMENTS)
            places.insert(0, self._scanned)
            self._scanned += SCAN_SEGMENTS // 2  # the next one begins in the middle of this one's runs
        left_segments, left_bytes = MERGE_SEGMENTS, MERGE_BYTES
        runs: list[list[Segment]] = []
        stop = 0
        for place in places:
            found = self.segments[max(place, stop) : min(place + SCAN_SEGMENTS, count)]
            stop = place + SCAN_SEGMENTS
            inside: set[int] = set()
            for i, j in mergeable([_weight(segment) for segment in found]):
                inside.update(range(i, j))
                runs.append(found[i:j])
            runs += [[s] for i, s in enumerate(found) if i not in inside and _is_sparse(s)]
        for run in runs:
            run = _first_of(run, left_segments, left_messages)
            size = sum(segment.row_bytes for segment in run)
            if not run or size > left_bytes or (len(run) == 1 and not _is_sparse(run[0])):
                continue
            left_segments -= len(run)
            left_messages -= sum(len(segment.offsets) for segment in run)
            left_bytes -= size
            self._merge_run(epoch, run, new_rows)

    def _merge_run(self, epoch: int, run: list[Segment], new_rows: list[Row]) -> None:
        records: list[Any] = []
        messages: list[tuple[int, str | None, int]] = []
        for segment in run:
            stored: dict[int, rows.Record] = {}
            for message in segment.unfinished():
                record = self.messages.get(message[0])
                if record is None or type(record) is Segment:
                    stored = stored or self._records(segment)
                    record = stored[message[0]]
                records.append(record)
                messages.append(message)
        merged = self._new_segment(epoch, records, messages, new_rows)
        for segment in run:
            for offset in segment.loose():
                if type(self.messages[offset]) is Segment:
                    self.messages[offset] = merged
        self.segments.replace(run, merged)

    def _row_key(self, epoch: int, kind: rows.Kind) -> str:
        self._next_row += 1
        return rows.row_key(self.number, epoch, kind, self._next_row)

    def _write_tail(self, epoch: int, new_rows: list[Row]) -> None:
        """Write the markers rows of changed blocks above the position. Below it, pages have the deliveries."""
        deliveries, persisted = self.deliveries, self.persisted
        dirty, self._dirty = self._dirty, set()
        if self.segments:
            for block in dirty:
                if block << state.BLOCK_BITS < persisted:
                    self.segments.touch(block << state.BLOCK_BITS, min((block + 1) << state.BLOCK_BITS, persisted))
        dirty.update(block for block in self._marker_rows if (block + 1) << state.BLOCK_BITS <= persisted)
        offsets_of = self._offsets_by_block(dirty)
        for block in sorted(dirty):
            groups: dict[DeliveryState, list[int]] = {}
            for offset in offsets_of(block):
                delivered = deliveries.get(offset)
                if delivered is not None:
                    groups.setdefault(delivered, []).append(offset)
            old = self._marker_rows.pop(block, None)
            if old is not None:
                self._garbage.append(old[0])
            if groups:
                row = rows.MarkersRow(rows.VERSION, block, [], _delivery_rows(groups))
                key, value = self._row_key(epoch, "markers"), rows.encode(row)
                self._marker_rows[block] = (key, rows.checksum(value))
                new_rows.append((key, value))

    def _write_pages(self, epoch: int, new_rows: list[Row]) -> None:
        changed = self.segments.tidy()
        duplicates = sorted(o for o in self.duplicates if o < self.persisted) if changed else []
        while changed:
            page = changed.pop()
            for segment in page.segments:
                if segment.index_checksum < 0:
                    self._write_index(segment, new_rows)
            value = rows.encode(self._page_row(page, duplicates))
            if len(value) > PAGE_BYTES and len(page.segments) > 1:
                changed += self.segments.split(page)
                continue
            if page.key is not None:
                self._garbage.append(page.key)
            page.key, page.checksum = self._row_key(epoch, "pages"), rows.checksum(value)
            new_rows.append((page.key, value))

    def _page_row(self, page: Page, duplicates: list[int]) -> rows.PageRow:
        segments = page.segments
        groups: dict[DeliveryState, list[int]] = {}
        for segment in segments:
            if segment.has_loose():
                for offset in segment.loose():
                    delivered = self.deliveries.get(offset)
                    if delivered is not None:
                        groups.setdefault(delivered, []).append(offset)
        own_duplicates = duplicates[
            bisect_left(duplicates, segments[0].start) : bisect_left(duplicates, segments[-1].stop)
        ]
        return rows.PageRow(
            rows.VERSION,
            [segment.state() for segment in segments],
            _delivery_rows(groups),
            ranges_of(own_duplicates),
        )

    def _write_ids(self, epoch: int, new_rows: list[Row]) -> dict[str, int]:
        """Write the ids of records below the position; those above are read again. Returns key and checksum of all rows
        of ids that count."""
        written: list[Row] = []
        kinds: tuple[tuple[rows.Kind, Recent], ...] = (("dedup", self.recent), ("origins", self.origins))
        for kind, ids in kinds:
            for digests, offsets, timestamps_ms in ids.unwritten(self.persisted):
                row = rows.DedupRow(rows.VERSION, b"".join(digests), offsets, timestamps_ms)
                key, value = self._row_key(epoch, kind), rows.encode(row)
                ids.written(key, rows.checksum(value), len(digests))
                written.append((key, value))
        named = self.recent.rows(self.persisted) | self.origins.rows(self.persisted)
        # a row whose ids are all forgotten by now would be named by no manifest, and deleted by nobody
        new_rows += [row for row in written if row[0] in named]
        return named

    def _offsets_by_block(self, dirty: set[int]) -> Callable[[int], Iterable[int]]:
        """Returns which offsets of a dirty block to examine: all above the position, or those delivered, if fewer."""
        deliveries, persisted = self.deliveries, self.persisted
        missed = self.missed
        if not missed and (len(dirty) << state.BLOCK_BITS < 4 * len(deliveries) or len(dirty) < 8):
            return lambda block: range(max(block << state.BLOCK_BITS, persisted), (block + 1) << state.BLOCK_BITS)
        blocks: dict[int, list[int]] = {}
        for offset in sorted([o for o in deliveries if o >= persisted or o in missed]):
            blocks.setdefault(block_of(offset), []).append(offset)
        return lambda block: blocks.get(block, ())

    def _done_above(self, waiting: list[int]) -> list[int]:
        """Done offsets in ``[persisted, position)``, then those that are done ahead of being read."""
        done = RangeSet()
        start = self.persisted
        gaps: list[int] = []
        for offset in waiting:
            if offset > start:
                gaps += (start, offset)
            start = offset + 1
        if start < self.position:
            gaps += (start, self.position)
        done = RangeSet(gaps)
        for start, stop in zip(*[iter(self.missed.within(self.persisted, self.position))] * 2, strict=True):
            done.discard(start, stop)
        for start, stop in zip(*[iter(self.ahead.ranges())] * 2, strict=True):
            done.add(start, stop)
        return done.ranges()


def _weight(segment: Segment) -> int:
    """How full a segment is, by what is left in it."""
    by_count = segment.remaining * FULL // SEGMENT_MESSAGES
    return max(1, by_count, segment.live_bytes * FULL // SEGMENT_BYTES)


def _first_of(run: list[Segment], segments: int, messages: int) -> list[Segment]:
    """The first segments of a run: at most so many, with at most so many messages in all, done ones included."""
    for i, segment in enumerate(run[:segments]):
        messages -= len(segment.offsets)
        if messages < 0:
            return run[:i]
    return run[:segments]


def _is_sparse(segment: Segment) -> bool:
    return 4 * segment.remaining <= len(segment.offsets) and segment.row_bytes > SPARSE_MIN_BYTES


def _of_places(offsets: Sequence[int], *times_ms: dict[int, int]) -> list[int]:
    """For those of a segment's messages that have such a time: their number in it, and the time, in turn."""
    found: list[int] = []
    if any(times_ms):
        for place, offset in enumerate(offsets):
            for known in times_ms:
                time_ms = known.get(offset)
                if time_ms is not None:
                    found += (place, time_ms)
    return found


def _delivery_rows(groups: dict[DeliveryState, list[int]]) -> list[rows.DeliveryRow]:
    return [
        rows.DeliveryRow(h.epoch, h.delivery, h.receives, h.deadline_ms, h.leased, h.receiver, ranges_of(offsets))
        for h, offsets in groups.items()
    ]
