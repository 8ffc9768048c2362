"""The state as rows and a manifest, and back."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any, NamedTuple, Self

from marq.core import rows, state
from marq.core.deliveries import Deliveries
from marq.core.ranges import RangeSet, offsets_in, ranges_of
from marq.core.segments import Segment, keys_of
from marq.core.state import MESSAGE_OVERHEAD_BYTES, Hold, block_of, size_of
from marq.errors import RowError

SEGMENT_MESSAGES = 1_000

SEGMENT_BYTES = 256 * 1024
"""A messages row holds at most this much; a larger message is a row of its own."""

ROW_OVERHEAD_BYTES = 40
"""Bytes of a message in a messages row beside key, value and headers."""

TICKS_MAX = 600
"""So many ticks alone are worth a new manifest: they would all be read again after a crash."""

COPIES_MAX = 20_000
"""So many origins of dead letters are remembered at most: the manifest has to fit a record."""

COPY_MEMORY_MS = 600_000
"""How long the origin of a dead letter's copy is remembered, on the partition clock, to recognise a second copy."""

Row = tuple[str, bytes]


class Checkpoint(NamedTuple):
    """What to write: new rows first, then the manifest, then (behind the fence) delete ``obsolete`` rows."""

    rows: list[Row]
    manifest: bytes
    obsolete: list[str]
    position: int
    markers_position: int


class Checkpoints(Deliveries):
    """Writes the state down, and takes it up again."""

    def checkpoint(self, epoch: int, now_ms: int, window_offsets: int, hold_ms: int) -> Checkpoint | None:
        """The state as rows to write and a manifest, captured in this instant; None if nothing changed.

        ``now_ms``: any monotonic clock. Messages that lag ``window_offsets`` behind, or were read ``hold_ms`` ago,
        are written with their payload, so that the position, and what is read again after a crash, stay bounded.
        """
        self._forget_copies()
        new_rows: list[Row] = []
        waiting = self._persist(epoch, self._new_position(now_ms, window_offsets, hold_ms), new_rows)
        self._write_markers(epoch, new_rows)
        self._write_ids(epoch, new_rows)
        self._sweep()
        named = keys_of(self.segments)
        named.update(self.recent.rows(self.persisted, self.queue_timestamp_ms))
        named.update(self._marker_rows.values())
        if not new_rows and self._named == named.keys() and not self.changed():
            return None
        self._ticks = 0
        self._written = self._extent()
        obsolete = sorted(self._named - named.keys())
        self._named = frozenset(named)
        manifest = rows.Manifest(
            v=rows.VERSION,
            epoch=epoch,
            rows=named,
            position=self.persisted,
            markers_position=self.markers_position,
            done=self._done_above(waiting),
            clock_ms=self.clock_ms,
            last_timestamp_ms=self.last_timestamp_ms,
            max_timestamp_ms=self.max_timestamp_ms,
            own=self.own,
            delivery=self.delivery,
            purges=dict(self.purges),
            copied=dict(self.copied),
            counters=dict(self.counters),
            lost=list(self.lost),
        )
        return Checkpoint(
            new_rows,
            rows.encode(manifest),
            obsolete,
            self.persisted,
            self.markers_position,
        )

    def _forget_copies(self) -> None:
        copied = self.copied
        for origin in [o for o, (_, at) in copied.items() if at + COPY_MEMORY_MS < self.clock_ms]:
            del copied[origin]
        for origin in list(itertools.islice(copied, max(0, len(copied) - COPIES_MAX))):
            del copied[origin]

    def forget_hints(self) -> None:
        """For a fold that delivers nothing: let go of what only deliveries need, which would grow with the log."""
        self.backlogs.clear()
        self._by_key.clear()
        self._again_turn.clear()
        self.woken.clear()
        self._suspects.clear()
        self._forget_copies()
        self.recent.forget_unwritten()

    def changed(self) -> bool:
        """True if a checkpoint would have something to write."""
        return self._ticks >= TICKS_MAX or self._written != self._extent()

    def _extent(self) -> tuple[int, ...]:
        return (self.persisted, self.position, self.markers_position - self._ticks, self.own)

    def _new_position(self, now_ms: int, window_offsets: int, hold_ms: int) -> int:
        """Up to where everything unfinished is to have its payload in a segment."""
        seen = self._seen_at
        seen.append((now_ms, self.position))
        held = 0
        while len(seen) > 1 and seen[1][0] <= now_ms - hold_ms:
            del seen[0]
        if seen[0][0] <= now_ms - hold_ms:
            held = seen[0][1]
        return max(self.persisted, held, self.position - window_offsets)

    def _persist(self, epoch: int, position: int, new_rows: list[Row]) -> list[int]:
        """Write the payloads of what is unfinished below ``position``; the unfinished offsets above, ascending."""
        old = self.persisted
        above = sorted([o for o in self.messages if o >= old])
        lagging = above[: bisect_left(above, position)]
        waiting = above[len(lagging) :]
        # everything below the first message that may still be read again is done or in a segment
        self.persisted = max(position, waiting[0] if waiting else self.position)
        batch: list[Any] = []
        size = 0
        self._dirty.update({block_of(offset) for offset in lagging})
        for offset in lagging:
            record = self.messages[offset]
            in_row = size_of(record) - MESSAGE_OVERHEAD_BYTES + len(record.key or b"") + ROW_OVERHEAD_BYTES
            if batch and (len(batch) >= SEGMENT_MESSAGES or size + in_row > SEGMENT_BYTES):
                self._add_segment(epoch, batch, new_rows)
                batch, size = [], 0
            batch.append(record)
            size += in_row
        if batch:
            self._add_segment(epoch, batch, new_rows)
        return waiting

    def _add_segment(self, epoch: int, batch: list[Any], new_rows: list[Row]) -> None:
        key, value = self._row_key(epoch, "messages"), rows.messages_row(batch)
        self.segments.add(
            Segment(
                key,
                rows.checksum(value),
                batch[0].offset,
                batch[-1].offset + 1,
                [(o, self.queue_of(o), self.group_of(o)) for o in (record.offset for record in batch)],
            )
        )
        new_rows.append((key, value))

    def _row_key(self, epoch: int, kind: rows.Kind) -> str:
        self._next_row += 1
        return rows.row_key(self.number, epoch, kind, self._next_row)

    def _write_markers(self, epoch: int, new_rows: list[Row]) -> None:
        holds, messages = self.holds, self.messages
        dirty, self._dirty = self._dirty, set()
        offsets_of = self._offsets_by_block(dirty)
        for block in sorted(dirty):
            start, stop = block << state.BLOCK_BITS, (block + 1) << state.BLOCK_BITS
            groups: dict[Hold, list[int]] = {}
            unfinished: list[int] = []
            for offset in offsets_of(block):
                hold = holds.get(offset)
                if hold is not None:
                    groups.setdefault(hold, []).append(offset)
                if offset in messages and offset < self.persisted:
                    unfinished.append(offset)
            if start < self.persisted and self.segments:
                parked = self.segments.parked_in(start, min(stop, self.persisted))
                if parked:
                    unfinished = sorted(unfinished + parked)
            if not groups and not unfinished:
                self._marker_rows.pop(block, None)
                continue
            hold_rows = [
                rows.HoldRow(
                    h.epoch,
                    h.delivery,
                    h.receives,
                    h.deadline_ms,
                    h.leased,
                    h.receiver,
                    ranges_of(offsets),
                )
                for h, offsets in groups.items()
            ]
            doubles = ranges_of(o for o in unfinished if o in self.doubles) if self.doubles else []
            row = rows.MarkersRow(rows.VERSION, block, ranges_of(unfinished), hold_rows, doubles)
            key, value = self._row_key(epoch, "markers"), rows.encode(row)
            self._marker_rows[block] = (key, rows.checksum(value))
            new_rows.append((key, value))

    def _write_ids(self, epoch: int, new_rows: list[Row]) -> None:
        """The ids of what was read below the position: from there on they are read again."""
        for digests, offsets, timestamps_ms in self.recent.unwritten(self.persisted):
            row = rows.DedupRow(rows.VERSION, b"".join(digests), offsets, timestamps_ms)
            key, value = self._row_key(epoch, "dedup"), rows.encode(row)
            self.recent.written(key, rows.checksum(value), len(digests))
            new_rows.append((key, value))

    def _offsets_by_block(self, dirty: set[int]) -> Callable[[int], Iterable[int]]:
        """Which offsets of a dirty block to look at: all of them, or, if that is more work, those there are."""
        holds, messages = self.holds, self.messages
        if len(dirty) << state.BLOCK_BITS < 4 * (len(holds) + len(messages)) or len(dirty) < 8:
            lowest = min(messages, default=self.position)
            lowest = min(lowest, min(holds, default=lowest))
            return lambda block: range(max(block << state.BLOCK_BITS, lowest), (block + 1) << state.BLOCK_BITS)
        blocks: dict[int, list[int]] = {}
        for offset in sorted(holds.keys() | messages.keys()):
            blocks.setdefault(block_of(offset), []).append(offset)
        return lambda block: blocks.get(block, ())

    def _sweep(self) -> None:
        """Structures of a queue exist only while it has something in them."""
        empty = [name for name, backlog in self.backlogs.items() if backlog.idle]
        if empty:
            for name in empty:
                del self.backlogs[name]
                self._again_turn.discard(name)
            self._by_key = {key: b for key, b in self._by_key.items() if b.name in self.backlogs}

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
        for start, stop in zip(*[iter(self.ahead.ranges())] * 2, strict=True):
            done.add(start, stop)
        return done.ranges()

    @classmethod
    def restore(
        cls,
        number: int,
        manifest: rows.Manifest,
        load: Callable[[str], bytes],
        *,
        queue_id: str | None = None,
    ) -> Self:
        """The inverse of :meth:`checkpoint`: the state at the manifest's positions.

        ``load`` reads a row by its key. Raises :exc:`RowError` if a row that the manifest names is missing or damaged.
        """
        self = cls(number, queue_id=queue_id, load=load)
        self.position = self.persisted = manifest.position
        self.markers_position = manifest.markers_position
        self.ahead = RangeSet(manifest.done)
        self.clock_ms = manifest.clock_ms
        self.last_timestamp_ms = manifest.last_timestamp_ms
        self.max_timestamp_ms = manifest.max_timestamp_ms
        self.own = manifest.own
        self.delivery = manifest.delivery
        self.purges = dict(manifest.purges)
        self.copied = dict(manifest.copied)
        self.counters = Counter(manifest.counters)
        self.lost = list(manifest.lost)
        self._named = frozenset(manifest.rows)
        unfinished = RangeSet()
        segments: list[tuple[str, int, list[rows.Record]]] = []
        ids: list[tuple[int, str, int, Any]] = []
        for key, checksum in manifest.rows.items():
            value = load(key)
            if rows.checksum(value) != checksum:
                raise RowError(f"row {key} does not have the checksum that the manifest names")
            kind = rows.kind_of(key)
            if kind == "messages":
                segments.append((key, checksum, rows.decode_messages(value).records()))
            elif kind == "dedup":
                parts = rows.decode_dedup(value)
                ids.append((parts[1][0], key, checksum, parts))
            else:
                self._restore_markers(key, checksum, rows.decode_markers(value), unfinished)
        for _, key, checksum, parts in sorted(ids):
            self.recent.restore(key, checksum, *parts)
        found = 0
        for key, checksum, records in sorted(segments, key=lambda s: s[2][0].offset):
            found += self._restore_segment(key, checksum, records, unfinished)
        if found != len(unfinished):
            raise RowError(
                f"partition {number}: the manifest of epoch {manifest.epoch} names {len(unfinished)} unfinished "
                f"messages, its rows hold {found}"
            )
        while self._timers and self._timers[0][0] <= self.clock_ms:
            hold = heappop(self._timers)[2]
            self._timed -= len(hold.offsets)
            self._come_back(hold)
        return self

    def _restore_markers(self, key: str, checksum: int, row: rows.MarkersRow, unfinished: RangeSet) -> None:
        self._marker_rows[row.block] = (key, checksum)
        for start, stop in zip(*[iter(row.unfinished)] * 2, strict=True):
            unfinished.add(start, stop)
        self.doubles.update(offsets_in(row.doubles))
        for h in row.holds:
            offsets = list(offsets_in(h.offsets))
            hold = Hold(h.epoch, h.delivery, h.receives, h.deadline_ms, h.leased, h.receiver, offsets)
            self.holds.update(dict.fromkeys(offsets, hold))
            self._highest_hold = max(self._highest_hold, offsets[-1])
            self._set_timer(hold)

    def _restore_segment(self, key: str, checksum: int, records: list[rows.Record], unfinished: RangeSet) -> int:
        held = [r for r in records if r.offset in unfinished]
        if not held:
            # unnamed by the next manifest
            return 0
        described = [(record.offset, *self._describe(record, self._facts(record))) for record in held]
        segment = Segment(key, checksum, records[0].offset, records[-1].offset + 1, described)
        self.segments.add(segment)
        for offset, queue, group in described:
            if queue is not None and offset not in self.doubles:
                backlog = self._backlog(queue)
                due = self.delays.get(offset, 0)
                if due > self.max_timestamp_ms:
                    heappush(self._delayed, (due, offset))
                    if group and offset not in self.holds:
                        self._lane(backlog, group).add(offset)
                else:
                    self.delays.pop(offset, None)
                    if offset not in self.holds:
                        self.segments.park(offset)
                        self.woken[queue] = None
                        if group:
                            backlog.queue_up(self._lane(backlog, group))
                        continue
            self.messages[offset] = segment
        return len(held)
