"""Rules of the design, each broken on purpose. The simulator must notice each.

A mutation is a patch of the real core, or of the worker around it; nothing in the core knows of this.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from marq.core import folding, recovery, rows
from marq.core import markers as m
from marq.core.agenda import Handout
from marq.core.backlog import Backlog
from marq.core.checkpoint_cycle import CycleState, WriteManifest, WriteRows
from marq.core.dedup import Recent
from marq.core.markers import Start
from marq.core.owner import Owner, Phase
from marq.core.partition import Partition
from marq.core.queue_clock import QueueClock
from marq.core.segment_list import SegmentList
from marq.core.segments import Segment
from marq.core.starts import Starts
from marq.core.state import DeliveryState
from marq.core.ticker import Ticker
from tests.simulation.logs import Sent
from tests.simulation.simulator import ORIGIN_RULES
from tests.simulation.worker import Worker


class Mutation(NamedTuple):
    """One broken rule."""

    rule: str  # what the design says
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    worker: type[Worker] = Worker


def _replaced(cls: type, name: str, make: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """A patch of the method ``name`` by what ``make`` makes of the original."""
    return lambda: mock.patch.object(cls, name, make(getattr(cls, name)))


# ---------------------------------------------------------------------- the fold


def _of_any_epoch(method: Any) -> Any:
    def mutated(self: Partition, marker: Any) -> Any:
        own, self.own = self.own, marker.epoch
        try:
            return method(self, marker)
        finally:
            self.own = own

    return mutated


def _of_any_epoch_if_not_acked(end: Any) -> Any:
    any_epoch = _of_any_epoch(end)

    def mutated(self: Partition, marker: Any) -> Any:
        return end(self, marker) if marker.outcome == "acked" else any_epoch(self, marker)

    return mutated


def _in_reverse(fold: Any) -> Any:
    def mutated(self: Partition, offset: int, timestamp_ms: int, markers: Any) -> Any:
        return fold(self, offset, timestamp_ms, list(markers)[::-1])[::-1]

    return mutated


def _over_a_gap(ingest: Any) -> Any:
    def mutated(self: Partition, start: int, stop: int, records: Any) -> bool:
        self.position = max(self.position, start)
        return bool(ingest(self, start, stop, records))

    return mutated


def _clock_runs_back(fold: Any) -> Any:
    def mutated(self: Partition, offset: int, timestamp_ms: int, markers: Any) -> Any:
        if self.last_timestamp_ms > timestamp_ms:
            self.clock_ms -= self.last_timestamp_ms - timestamp_ms
        return fold(self, offset, timestamp_ms, markers)

    return mutated


def _busy_or_not(start: Any) -> Any:
    def mutated(self: Partition, marker: Start) -> Any:
        for offset in range(marker.offsets[0], marker.offsets[-1]) if marker.epoch == self.own else ():
            delivered = self.deliveries.get(offset)
            if delivered is not None and (delivered.epoch, delivered.delivery) < (marker.epoch, marker.delivery):
                free = DeliveryState(
                    delivered.epoch,
                    delivered.delivery,
                    delivered.receives,
                    delivered.deadline_ms,
                    False,
                    "",
                    delivered.offsets,
                )
                self.deliveries[offset] = free
        return start(self, marker)

    return mutated


def _of_any_delivery(field: str) -> Any:
    def make(change: Any) -> Any:
        def mutated(self: Partition, marker: Any) -> Any:
            delivered = self.deliveries.get(marker.offsets[0])
            if delivered is not None:
                marker = msgspec.structs.replace(marker, **{field: getattr(delivered, field)})
            return change(self, marker)

        return mutated

    return make


def _of_the_current_delivery_only(end: Any) -> Any:
    def mutated(self: Partition, marker: Any) -> Any:
        delivered = self.deliveries.get(marker.offsets[0])
        if marker.outcome == "acked" and delivered is not None and delivered.delivery != marker.delivery:
            return []
        return end(self, marker)

    return mutated


def _fence_said_once(settle: Any) -> Any:
    def mutated(self: Owner, seq: int) -> None:
        fence, self.checkpoints._fence = self.checkpoints._fence, ""
        settle(self, seq)
        self.checkpoints._fence = fence

    return mutated


# ---------------------------------------------------------------------- recovery


def _manifest_without(**fields: Any) -> Callable[[], AbstractContextManager[Any]]:
    original = Partition.restoring.__func__  # type: ignore[attr-defined]

    def mutated(cls: Any, number: int, manifest: rows.Manifest, load: Any, **kwargs: Any) -> Any:
        return original(cls, number, msgspec.structs.replace(manifest, **fields), load, **kwargs)

    return lambda: mock.patch.object(Partition, "restoring", classmethod(mutated))  # type: ignore[arg-type]


class ClaimsLate(Worker):
    """Appends its own marker after it has read the tables, and takes its time."""

    def claim(self) -> None:
        self._forget()
        self.sim.nonces += 1
        self.owner = self.sim.make_owner(self, f"w{self.number}.{self.sim.nonces}")
        self.read_tables_from_now()

    def read_table(self) -> None:
        super().read_table()
        self.claimed = False

    def fetch_queue(self, limit: int) -> None:
        super().fetch_queue(limit)
        owner = self.owner
        if owner is not None and not self.claimed and self.sim.chance(0.1):
            self.claimed = True
            self.send("markers", Sent(m.encode([owner.claim()], owner.nonce, 0), "own"))


# ---------------------------------------------------------------------- checkpoints


def _page_unchanged(finish: Any) -> Any:
    def mutated(self: SegmentList, offset: int) -> None:
        before = set(self.changed)
        finish(self, offset)
        self.changed &= before

    return mutated


def _keeps_its_state(finish: Any) -> Any:
    def mutated(self: Segment, offset: int) -> None:
        before = self._state
        finish(self, offset)
        self._state = before

    return mutated


def _parks_all(replace: Any) -> Any:
    def mutated(self: SegmentList, run: Any, merged: Segment) -> None:
        with mock.patch.object(Segment, "loose", lambda segment: iter(())):
            replace(self, run, merged)

    return mutated


def _all_messages(unfinished: Any) -> Any:
    def mutated(self: Segment) -> Any:
        return ((o, self.queue_of(o), self.group_of(o)) for o in self.offsets)

    return mutated


def _obsolete_at_once(checkpoint: Any) -> Any:
    """Returns the obsolete keys one checkpoint too early: they are deleted while a manifest names them."""

    def mutated(self: Partition, *args: Any) -> Any:
        found = checkpoint(self, *args)
        if found is not None:
            gone = [(key, b"") for key in found.obsolete]
            return found._replace(rows=[*found.rows, *gone])
        return found

    return mutated


def _manifest_at_once(step: Any) -> Any:
    def mutated(self: Owner, now_ms: int) -> Any:
        found = step(self, now_ms)
        if isinstance(found, WriteRows):
            self.checkpoints._enter(CycleState.ROWS_WRITTEN, now_ms)
        return found

    return mutated


def _manifest_of_later(step: Any) -> Any:
    def mutated(self: Owner, now_ms: int) -> Any:
        found = step(self, now_ms)
        if isinstance(found, WriteManifest):
            p = self.partition
            late = msgspec.structs.replace(
                rows.decode_manifest(found.value),
                markers_position=p.markers_position,
                clock_ms=p.clock_ms,
                last_timestamp_ms=p.last_timestamp_ms,
            )
            return WriteManifest(found.key, rows.encode_manifest(late))
        return found

    return mutated


def _retire_at_once(written: Any) -> Any:
    def mutated(self: Owner, now_ms: int) -> None:
        written(self, now_ms)
        if self.checkpoints.state is CycleState.FENCING:
            self.checkpoints._enter(CycleState.RETIRING, now_ms)

    return mutated


def _few_keys(row_key: Any) -> Any:
    def mutated(self: Partition, epoch: int, kind: Any) -> Any:
        self._next_row %= 4
        return row_key(self, epoch, kind)

    return mutated


class DeletesEarly(Worker):
    """Lets the logs be cut when the manifest is written, before it is acknowledged and fenced."""

    def write(self, table: str, key: str, value: bytes | None, confirmed: Any = None) -> None:
        super().write(table, key, value, confirmed)
        if table == "progress" and value is not None:
            manifest = rows.decode_manifest(value)
            self.sim.deletions.append((manifest.position, manifest.markers_position))


# ---------------------------------------------------------------------- the owner


def _over_a_gap_of_markers(read: Any) -> Any:
    def mutated(self: Owner, start: int, stop: int, records: Any, now_ms: int) -> bool:
        self.partition.skip_markers(start)
        return bool(read(self, start, stop, records, now_ms))

    return mutated


def _eager_over_a_gap(fold_acked: Any) -> Any:
    def mutated(self: Owner, now_ms: int) -> None:
        if self._acked and self.phase is Phase.SERVING:
            self.partition.skip_markers(min(self._acked))
        fold_acked(self, now_ms)

    return mutated


def _number_again(failed: Any) -> Any:
    def mutated(self: Owner, seq: int) -> None:
        starts = [marker.delivery for marker in self._sent.get(seq, ()) if isinstance(marker, Start)]
        failed(self, seq)
        if starts and min(starts) + len(starts) - 1 == self.starts._last:
            self.starts._last -= len(starts)

    return mutated


def _hand_out_unfolded(acknowledged: Any) -> Any:
    def mutated(self: Owner, seq: int, offset: int, timestamp_ms: int, markers: Any, now_ms: int) -> None:
        acknowledged(self, seq, offset, timestamp_ms, markers, now_ms)
        for marker in markers:
            pending = self.starts.pending.get(marker.delivery) if isinstance(marker, Start) else None
            if pending is not None and pending.receiver == "receiver" and not pending.gone:
                until_ms = pending.sent_ms + pending.lease_ms
                if now_ms < until_ms:
                    receipt = (self.epoch, pending.delivery)
                    self._agenda.handouts.append(Handout(pending.receiver, receipt, pending.offsets, until_ms))

    return mutated


def _hand_out_late(resolve: Any) -> Any:
    def mutated(self: Starts, pending: Any, now_ms: int, lost: bool = False) -> None:
        pending.sent_ms = now_ms
        resolve(self, pending, now_ms, lost)

    return mutated


def _foreign_own_ignored(owned: Any) -> Any:
    def mutated(self: Owner, own: Any, offset: int, now_ms: int) -> None:
        if own.nonce == self.nonce:
            owned(self, own, offset, now_ms)

    return mutated


def _leaves_without_a_word(leave: Any) -> Any:
    def mutated(self: Owner) -> list[m.Marker]:
        self.starts.pending.clear()
        self._agenda.handouts.clear()
        self._agenda.dead.clear()
        return list(leave(self))

    return mutated


def _stalled_for_good(apply: Any) -> Any:
    def mutated(self: Owner, *record: Any) -> None:
        stalled = self.starts.stalled
        apply(self, *record)
        self.starts.stalled |= stalled

    return mutated


def _any_own_of_mine(owned: Any) -> Any:
    def mutated(self: Owner, own: Any, offset: int, now_ms: int) -> None:
        if own.worker == self.worker and self.phase is Phase.CATCHING_UP:
            own = m.Own(own.worker, self.nonce)
        owned(self, own, offset, now_ms)

    return mutated


def _serves_unfolded(restore: Any) -> Any:
    def mutated(self: Owner, *args: Any) -> None:
        restore(self, *args)
        if self.phase is Phase.CATCHING_UP:
            self.phase, self.epoch = Phase.SERVING, args[-1]

    return mutated


# ---------------------------------------------------------------------- order, turns, duplicates


def _forgets_what_is_out(in_order: Any) -> Any:
    def mutated(self: Partition, lane: Any) -> bool:
        lane.out = [o for o in lane.out if o not in self.reserved and not self.is_leased(o)]
        return bool(in_order(self, lane))

    return mutated


def _counts_nothing(count: Any) -> Any:
    return lambda self, delivered: None


def _recounts_nothing(recount: Any) -> Any:
    return lambda self: iter(())


def _counts_duplicates(take_up: Any) -> Any:
    def mutated(self: Partition, record: Any) -> None:
        take_up(self, record)
        if record.offset in self.duplicates:
            self._count_in(record.offset)

    return mutated


def _waits_for_all_that_is_out(in_order: Any) -> Any:
    def mutated(self: Partition, lane: Any) -> bool:
        for offset in reversed(lane.out):
            if self.is_leased(offset):
                self._block(lane, offset)
                return False
        return bool(in_order(self, lane))

    return mutated


def _by_offset(resolve: Any) -> Any:
    def mutated(self: Starts, pending: Any, now_ms: int, lost: bool = False) -> None:
        pending.order = None
        resolve(self, pending, now_ms, lost)

    return mutated


def _skips_what_waits(ready: Any) -> Any:
    def mutated(self: Partition, lane: Any) -> int:
        while lane.fresh and lane.fresh[0] in self.delays:
            lane.next_fresh()
        return int(ready(self, lane))

    return mutated


def _knows_nothing_of_before(keep_order: Any) -> Any:
    def mutated(self: Partition, backlog: Any) -> None:
        deliveries, self.deliveries = self.deliveries, {}
        try:
            keep_order(self, backlog)
        finally:
            self.deliveries = deliveries

    return mutated


def _as_standard(take: Any) -> Any:
    def mutated(self: Partition, queue: str, limit: int, settings: Any, *args: Any) -> Any:
        return take(self, queue, limit, msgspec.structs.replace(settings, fifo=False), *args)

    return mutated


def _newest_group_first(backlog_class: Any) -> Any:
    def mutated(self: Any, lane: Any) -> None:
        if not lane.queued:
            lane.queued = True
            self.turns.appendleft(lane)

    return mutated


def _takes_expired_away(stale_head: Any) -> Any:
    def mutated(self: Partition, lane: Any, settings: Any, found: list[int]) -> None:
        stale_head(self, lane, settings, found)
        lane.set_fresh([o for o in lane.fresh if o not in found])

    return mutated


def _takes_before_it_reads(unpark: Any) -> Any:
    def mutated(self: Partition, lane: Any) -> None:
        name = lane.backlog.name
        segment = self.segments.lowest_with(name, lane.group)
        taken = [] if segment is None else self.segments.unpark_lane(segment, name, lane.group)
        if segment is not None:
            self._records(segment)
        self.segments.park(taken)
        unpark(self, lane)

    return mutated


def _goes_on_after_damage(records: Any) -> Any:
    def mutated(self: Partition, segment: Any) -> Any:
        try:
            return records(self, segment)
        finally:
            self.damage = None

    return mutated


def _all_ids(unwritten: Any) -> Any:
    return lambda self, position: unwritten(self, 1 << 60)


def _ids_of_messages_only(restore: Any) -> Any:
    def mutated(self: Recent, key: str, checksum: int, digests: list[bytes], *row: Any) -> None:
        if self._most <= ORIGIN_RULES.most:
            digests = [digest[::-1] for digest in digests]  # as many, so that the count to skip is still right
        restore(self, key, checksum, digests, *row)

    return mutated


def _forgets_origins_by_the_clock(checkpoint: Any) -> Any:
    def mutated(self: Partition, *args: Any) -> Any:
        self.origins._end_silence(self.last_timestamp_ms + (1 << 40), self.position)
        return checkpoint(self, *args)

    return mutated


def _without_duplicates(restore_page: Any) -> Any:
    def mutated(self: Partition, page: Any, row: Any, indexes: Any) -> Any:
        row.duplicates = []
        return restore_page(self, page, row, indexes)

    return mutated


# ---------------------------------------------------------------------- time


def _whatever_its_stamp_is(tick: Any) -> Any:
    def mutated(self: Partition, marker: Any, timestamp_ms: int) -> None:
        tick(self, marker, marker.clock_ms)

    return mutated


def _never_back(tell_time: Any) -> Any:
    def mutated(self: Partition, broker_ms: int, told_ms: int) -> None:
        tell_time(self, max(broker_ms, self.broker_ms), told_ms)

    return mutated


def _of_any_owner(tick: Any) -> Any:
    def mutated(self: Partition, marker: Any, timestamp_ms: int) -> None:
        tick(self, msgspec.structs.replace(marker, epoch=max(0, self.own)), timestamp_ms)

    return mutated


def _believes_all_stamps(read: Any) -> Any:
    def mutated(self: QueueClock, start: int, records: Any, now_ms: int, since_ms: int) -> bool:
        return False

    return mutated


def _goes_on_meanwhile(read: Any) -> Any:
    def mutated(self: Ticker, *chunk: Any) -> None:
        self._clock.read(*chunk)

    return mutated


def _with_any_tick(read: Any) -> Any:
    def mutated(self: Ticker, *chunk: Any) -> None:
        read(self, *chunk)
        self._tells_from = 0

    return mutated


def _over_for_good(turn_back: Any) -> Any:
    def mutated(self: Partition) -> None:
        elapsed, self.elapsed = self.elapsed, {}
        turn_back(self)
        self.elapsed = elapsed

    return mutated


def _knows_time_at_once(owned: Any) -> Any:
    def mutated(self: Owner, own: Any, offset: int, now_ms: int) -> None:
        owned(self, own, offset, now_ms)
        self.ticker.told = True

    return mutated


def _ends_by_its_own_clock(expired: Any) -> Any:
    def mutated(self: Partition, offset: int, settings: Any) -> bool:
        return self._past_ttl(offset, settings)

    return mutated


def _by_one_stamp(forget: Any) -> Any:
    def mutated(self: Recent, offset: int) -> None:
        live, end = self._live, self._base + len(self._times)
        while live < end and self._times[live - self._base] <= self._last_ms - self._window_ms:
            live += 1
        self._forget_below(max(live, end + 1 - self._most), offset)

    return mutated


def _however_much_later(is_duplicate: Any) -> Any:
    def mutated(self: Recent, digest: bytes, offset: int, timestamp_ms: int) -> bool:
        found = self._by_digest.get(digest)
        for number in () if found is None else (found,) if isinstance(found, int) else found:
            if timestamp_ms - self._times[number - self._base] < self._window_ms:
                return True
        return bool(is_duplicate(self, digest, offset, timestamp_ms))

    return mutated


# ---------------------------------------------------------------------- what only an invariant notices


def _still_listed(unblock: Any) -> Any:
    def mutated(self: Partition, lane: Any) -> None:
        listed = dict(self._blockers)
        unblock(self, lane)
        self._blockers.update(listed)

    return mutated


def _counted_twice(set_timer: Any) -> Any:
    def mutated(self: Partition, delivered: DeliveryState) -> None:
        set_timer(self, delivered)
        self._timed += 1

    return mutated


def _keeps_purges(ingest: Any) -> Any:
    def mutated(self: Partition, *chunk: Any) -> bool:
        purges = self.purges
        done = bool(ingest(self, *chunk))
        self.purges = purges
        return done

    return mutated


def _reserved_no_more(acquire: Any) -> Any:
    def mutated(self: Owner, *args: Any, **options: Any) -> Any:
        pending = acquire(self, *args, **options)
        if pending is not None:
            self.partition.unreserve(pending.offsets[:1])
        return pending

    return mutated


def _rows_of_all_ids(write_ids: Any) -> Any:
    def mutated(self: Partition, epoch: int, new_rows: list[tuple[str, bytes]]) -> dict[str, int]:
        with mock.patch.object(Recent, "rows", lambda ids, position: {row.key: row.checksum for row in ids._rows}):
            write_ids(self, epoch, new_rows)
        return self.recent.rows(self.persisted) | self.origins.rows(self.persisted)

    return mutated


class EndsBeforeCopies(Worker):
    """Ends a dead letter before its copy is in the log."""

    def copy(self, offset: int) -> None:
        super().copy(offset)
        assert self.owner is not None
        self.owner.ended_as("dead", [offset])


def _rests_too_long(next_ms: Any) -> Any:
    def mutated(self: Owner, now_ms: int, has_ttl: bool = False) -> int | None:
        found: int | None = next_ms(self, now_ms, has_ttl)
        return None if found is None else found + 1_000

    return mutated


# ---------------------------------------------------------------------- what can't be read


def _takes_it_for_absent(miss: Any) -> Any:
    def mutated(self: Partition, start: int, stop: int) -> int:
        self._absent(start, stop)
        return stop

    return mutated


def _forgets_what_markers_ended(miss: Any) -> Any:
    def mutated(self: Partition, start: int, stop: int) -> int:
        self.missed.add(start, stop)
        return stop

    return mutated


def _without_the_unreadable(manifest: rows.Manifest) -> rows.Manifest:
    return msgspec.structs.replace(manifest, unreadable=[])


def _only_unread_purges(keep: Any) -> Any:
    def mutated(self: Partition) -> None:
        self.purges = {queue: before for queue, before in self.purges.items() if before > self.position}

    return mutated


def _of_others(unread: Any) -> Any:
    return lambda self, offset: offset >= self.position and offset not in self.ahead


MUTATIONS = {
    "unreadable is absent": Mutation(
        "what can't be read is not done", _replaced(Partition, "_miss", _takes_it_for_absent)
    ),
    "unreadable though done": Mutation(
        "except what its markers have ended", _replaced(Partition, "_miss", _forgets_what_markers_ended)
    ),
    "unreadable is forgotten": Mutation(
        "a manifest names what can't be read",
        lambda: mock.patch.object(
            rows,
            "encode_manifest",
            lambda manifest, encode=rows.encode_manifest: encode(_without_the_unreadable(manifest)),
        ),
    ),
    "unreadable and deleted": Mutation(
        "nothing is deleted from there on",
        lambda: mock.patch.object(Partition, "needed_from", property(lambda self: self.persisted)),
    ),
    "unreadable and not purged": Mutation(
        "a purge is kept for it", _replaced(Partition, "_keep_purges", _only_unread_purges)
    ),
    "unreadable and not started": Mutation("markers take effect on it", _replaced(Partition, "is_unread", _of_others)),
    "unreadable for ever": Mutation(
        "what retention deletes of it is lost",
        _replaced(Owner, "lacks", lambda lacks: lambda self, start: start > self.partition.position),
    ),
    "start of an old epoch": Mutation(
        "a start whose epoch is not the last folded own is ignored", _replaced(Partition, "_start", _of_any_epoch)
    ),
    "owner's end of an old epoch": Mutation(
        "so is an owner's end", _replaced(Partition, "_end", _of_any_epoch_if_not_acked)
    ),
    "purge of an old epoch": Mutation("and a purge", _replaced(Partition, "_purge", _of_any_epoch)),
    "start on a lease": Mutation(
        "a start takes effect only where no lease is unexpired", _replaced(Partition, "_start", _busy_or_not)
    ),
    "markers in reverse": Mutation(
        "order per message is the order in the markers partition", _replaced(Partition, "fold", _in_reverse)
    ),
    "release of another epoch": Mutation(
        "keepalive and release carry the epoch of their delivery",
        _replaced(Partition, "_change", _of_any_delivery("epoch")),
    ),
    "release of another delivery": Mutation(
        "and its number: only the current delivery", _replaced(Partition, "_change", _of_any_delivery("delivery"))
    ),
    "end of the current delivery only": Mutation(
        "an end of an older delivery still finishes the message",
        _replaced(Partition, "_end", _of_the_current_delivery_only),
    ),
    "clock not clamped": Mutation(
        "the clock advances by at most 5 s a record",
        lambda: mock.patch.object(folding, "CLOCK_STEP_MS", 1 << 40),
    ),
    "clock runs back": Mutation("and never back", _replaced(Partition, "fold", _clock_runs_back)),
    "gap in the queue": Mutation("queue chunks are contiguous", _replaced(Partition, "ingest", _over_a_gap)),
    "gap in the markers": Mutation(
        "markers chunks are contiguous", _replaced(Owner, "read_markers", _over_a_gap_of_markers)
    ),
    "eager over a gap": Mutation(
        "an own append is folded at once only when contiguous", _replaced(Owner, "_fold_acked", _eager_over_a_gap)
    ),
    "delivery number used again": Mutation(
        "a number ever sent is not used again, even if its append failed", _replaced(Owner, "failed", _number_again)
    ),
    "hand-out at the acknowledgement": Mutation(
        "only what the folded start took effect on is handed out",
        _replaced(Owner, "acknowledged", _hand_out_unfolded),
    ),
    "hand-out after the lease": Mutation(
        "it hands out only while the lease has not run out on its own clock",
        _replaced(Starts, "_resolve", _hand_out_late),
    ),
    "foreign own ignored": Mutation(
        "a worker that folds a foreign own stops", _replaced(Owner, "_owned", _foreign_own_ignored)
    ),
    "a reservation ends early": Mutation(
        "what is about to be started is reserved", _replaced(Owner, "acquire", _reserved_no_more)
    ),
    "start left behind": Mutation(
        "who leaves releases what was started and not handed out", _replaced(Owner, "leave", _leaves_without_a_word)
    ),
    "start read together with the next owner's own": Mutation(
        "who loses the partition releases what was folded and not handed out",
        _replaced(Starts, "unanswered", lambda unanswered: lambda self: iter(())),
    ),
    "stalled for good": Mutation(
        "a partition whose log takes something again goes on", _replaced(Owner, "_apply", _stalled_for_good)
    ),
    "rests too long": Mutation(
        "an owner is asked when something may be due", _replaced(Owner, "next_ms", _rests_too_long)
    ),
    "older own of mine": Mutation("own carries a nonce per attempt", _replaced(Owner, "_owned", _any_own_of_mine)),
    "serving before the own is folded": Mutation(
        "a worker serves only after it has folded its own marker", _replaced(Owner, "restore", _serves_unfolded)
    ),
    "own after the tables": Mutation("append own, then read the tables", worker=ClaimsLate),
    "lowest manifest": Mutation(
        "recovery takes the manifest with the highest epoch",
        lambda: mock.patch.object(recovery, "max", min, create=True),
    ),
    "manifest before its rows": Mutation(
        "the manifest is written when all rows are acknowledged", _replaced(Owner, "step", _manifest_at_once)
    ),
    "manifest captured late": Mutation(
        "the manifest is captured in the same instant as the rows", _replaced(Owner, "step", _manifest_of_later)
    ),
    "rows changed in place": Mutation(
        "rows are new, never changed in place", _replaced(Partition, "_row_key", _few_keys)
    ),
    "a lost fence is not repeated": Mutation(
        "a fence that did not land is appended again", _replaced(Owner, "_settle", _fence_said_once)
    ),
    "deletions before the fence": Mutation(
        "deletions only after a tick behind the manifest is folded", _replaced(Owner, "written", _retire_at_once)
    ),
    "records deleted before the fence": Mutation("DeleteRecords too", worker=DeletesEarly),
    "dead letter ended before its copy": Mutation("the copy first, then the end", worker=EndsBeforeCopies),
    "no own in the manifest": Mutation("the manifest has the last folded own", _manifest_without(own=-1)),
    "no last timestamp in the manifest": Mutation("and the last timestamp", _manifest_without(last_timestamp_ms=-1)),
    "no clock in the manifest": Mutation("and the clock", _manifest_without(clock_ms=0)),
    "no purges in the manifest": Mutation("and the purges above its position", _manifest_without(purges={})),
    "no done in the manifest": Mutation("and what is done above its position", _manifest_without(done=[])),
    "origins not read back": Mutation(
        "the origins of copies survive", _replaced(Recent, "restore", _ids_of_messages_only)
    ),
    "origins forgotten by the clock": Mutation(
        "which origins are remembered is a function of the queue log alone",
        _replaced(Partition, "checkpoint", _forgets_origins_by_the_clock),
    ),
    "a group with two receivers": Mutation(
        "nothing of a FIFO group is delivered while one before it is in flight",
        _replaced(Partition, "_in_order", _forgets_what_is_out),
    ),
    "a group waits for all that is in flight": Mutation(
        "what stands before the first one in flight of its FIFO group is delivered",
        _replaced(Partition, "_in_order", _waits_for_all_that_is_out),
    ),
    "leases end uncounted": Mutation(
        "counts change when a lease or wait is over", _replaced(Partition, "_count_over", _counts_nothing)
    ),
    "duplicates counted": Mutation("duplicates don't count", _replaced(Partition, "_take_up", _counts_duplicates)),
    "not recounted": Mutation("counts are known after a recovery", _replaced(Partition, "_recount", _recounts_nothing)),
    "FIFO groups handed out by offset": Mutation(
        "a delivery of a FIFO queue is group by group", _replaced(Starts, "_resolve", _by_offset)
    ),
    "a delay passed over": Mutation(
        "a message that waits holds its FIFO group up", _replaced(Partition, "_first_in_order", _skips_what_waits)
    ),
    "order forgotten at takeover": Mutation(
        "a new owner knows what the former one delivered of a FIFO group",
        _replaced(Partition, "_keep_order", _knows_nothing_of_before),
    ),
    "FIFO taken for standard": Mutation("a FIFO queue keeps the order", _replaced(Partition, "take", _as_standard)),
    "groups don't take turns": Mutation("groups take turns", _replaced(Backlog, "queue_up", _newest_group_first)),
    "parked flags taken before the row is read": Mutation(
        "a row is read before its messages are taken off the parked ones",
        _replaced(Partition, "_unpark", _takes_before_it_reads),
    ),
    "served on after damage": Mutation(
        "an owner that can't read a row stops", _replaced(Partition, "_records", _goes_on_after_damage)
    ),
    "an expired message passed over": Mutation(
        "a message that has expired keeps its place in its FIFO group until its end",
        _replaced(Partition, "_stale_head", _takes_expired_away),
    ),
    "a tick with a wrong stamp": Mutation(
        "a tick tells nothing if its stamp is not what its owner expects",
        _replaced(Partition, "_tick", _whatever_its_stamp_is),
    ),
    "broker time never goes back": Mutation(
        "it follows the clock that stamps messages back", _replaced(Partition, "_tell_time", _never_back)
    ),
    "a tick of another owner": Mutation(
        "only the owner of a partition tells it the time", _replaced(Partition, "_tick", _of_any_owner)
    ),
    "all stamps are believed": Mutation(
        "a stamp from before its message can have been sent is of a clock that is behind",
        _replaced(QueueClock, "read", _believes_all_stamps),
    ),
    "handed out by the time of before": Mutation(
        "while broker time has to go back, what depends on it waits", _replaced(Ticker, "read", _goes_on_meanwhile)
    ),
    "any tick tells that time": Mutation(
        "and a tick that was under way does not end that", _replaced(Ticker, "read", _with_any_tick)
    ),
    "a delay is over for good": Mutation(
        "a delay that was over by a wrong clock goes on", _replaced(Partition, "_turn_back", _over_for_good)
    ),
    "time known at once": Mutation(
        "what may have expired waits for the ticks of the new owner", _replaced(Owner, "_owned", _knows_time_at_once)
    ),
    "expired by the owner's clock": Mutation(
        "only the log ends a time to live", _replaced(Partition, "_expired", _ends_by_its_own_clock)
    ),
    "no broker time in the manifest": Mutation("the manifest has broker time", _manifest_without(broker_ms=-1)),
    "no time of the last tick in the manifest": Mutation(
        "and what the clock of the markers topic showed then", _manifest_without(told_ms=-1)
    ),
    "ids forgotten by one stamp": Mutation(
        "one wrong stamp makes no id forgotten", _replaced(Recent, "_forget", _by_one_stamp)
    ),
    "an id far ahead swallows later ones": Mutation(
        "a duplicate is stamped no more than a little before the first",
        _replaced(Recent, "is_duplicate", _however_much_later),
    ),
    "ids not read back": Mutation(
        "the ids of messages survive", _replaced(Recent, "restore", lambda method: lambda *args: None)
    ),
    "ids of what is read again": Mutation(
        "only the ids below the position are written", _replaced(Recent, "unwritten", _all_ids)
    ),
    "duplicates not read back": Mutation(
        "what was found to be a duplicate stays one", _replaced(Partition, "_restore_page", _without_duplicates)
    ),
    "an end not written to its page": Mutation(
        "the page of a segment is written anew when one of its messages is done",
        _replaced(SegmentList, "finish", _page_unchanged),
    ),
    "an end not written to a page that is": Mutation(
        "what its page says of a segment is made anew when one of its messages is done",
        _replaced(Segment, "finish", _keeps_its_state),
    ),
    "a delivery not written to its page": Mutation(
        "and when one is delivered", _replaced(SegmentList, "touch", lambda method: lambda *args: None)
    ),
    "merged while in work": Mutation(
        "what has an entry in memory keeps it when its segment is merged", _replaced(SegmentList, "replace", _parks_all)
    ),
    "merged with what is done": Mutation(
        "what is done stays so when its segment is merged", _replaced(Segment, "unfinished", _all_messages)
    ),
    "merged rows deleted at once": Mutation(
        "a row goes after the manifest that does not name it any more",
        _replaced(Partition, "checkpoint", _obsolete_at_once),
    ),
}

INVARIANTS = {
    "a lane that waits no more": Mutation(
        "what a lane waits for is listed while it waits", _replaced(Partition, "_unblock", _still_listed)
    ),
    "offsets in timers": Mutation(
        "and counted as often as they are there", _replaced(Partition, "_set_timer", _counted_twice)
    ),
    "purges of what was read": Mutation(
        "a purge is kept until everything below it was read", _replaced(Partition, "ingest", _keeps_purges)
    ),
    "rows of ids that are forgotten": Mutation(
        "every row that is written is named", _replaced(Partition, "_write_ids", _rows_of_all_ids)
    ),
}
"""Faults that cost memory, or are healed by another rule: no guarantee fails, but an invariant does."""
