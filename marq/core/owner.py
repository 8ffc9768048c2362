"""The protocol by which one worker owns a partition: claim, recover, serve, checkpoint, lose.

    CLAIMING ──restore──► CATCHING_UP ──own marker folded──► SERVING ──foreign own folded──► LOST
                                                             SERVING ──a row can't be read, a fold fails──► FAILED
                                                             SERVING ──leave()──► LEFT
                    (any) ──marker of a later protocol version──► STOPPED

The owner hands out only messages on which its *folded* start took effect. When an append of its own is confirmed, and
it is the next record of the log, it is folded at once; otherwise when it is read. Nothing here does I/O: the caller
carries out the effects of :meth:`Owner.take_effects` and the steps of :meth:`Owner.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from enum import Enum
from typing import Any

from marq.core import invariants, rows
from marq.core import markers as m
from marq.core.agenda import Agenda, Effects
from marq.core.checkpoint_cycle import CheckpointCycle, Step
from marq.core.deliveries import Due
from marq.core.flow import Breaker, FlowControl
from marq.core.ignored import IgnoredMarkers
from marq.core.markers import End, Keepalive, Marker, Own, Purge, Release, Start, Tick
from marq.core.partition import Partition
from marq.core.policies import DEFAULT_LIMITS, Limits, QueueSettings, SettingsOf
from marq.core.ranges import count, offsets_in, ranges_of
from marq.core.reading import Undecodable, Unreadable
from marq.core.recovery import Deleted, Edges, deleted_unread, lose_markers, pass_deleted, recovering
from marq.core.starts import Pending, Starts
from marq.core.state import no_rows
from marq.core.ticker import TICK_MAX_MS, Ticker
from marq.core.versions import is_of_installation, place_of_markers
from marq.errors import InternalError, MarkerError, NewerVersionError, RowError, UnreadableError

#: Milliseconds without a marker, while a checkpoint waits for its ticks, after which Kafka or this process stood still.
OUTAGE_MS = 5 * TICK_MAX_MS


class Phase(Enum):
    """The phases of an owner."""

    CLAIMING = "claiming"  # the own marker is on its way; nothing is known yet
    CATCHING_UP = "catching up"  # state restored, reading up to the own marker
    SERVING = "serving"
    LOST = "lost"  # another worker's own marker was folded: no effect may follow
    FAILED = "failed"  # a row can't be read, or a fold raised: no effect may follow; another claim recovers
    LEFT = "left"  # the partition was given away: nor here
    STOPPED = "stopped"  # a marker of a later protocol version was read: ``reason`` says which


class Owner:
    """Partition ``number`` and its ownership by one worker.

    ``nonce`` must be new for each attempt to own it. Times are milliseconds of a monotonic clock. ``touch`` is called
    when what receivers or the caller ask for may bring :meth:`next_ms` forward.
    """

    def __init__(
        self,
        number: int,
        worker: str,
        nonce: str,
        *,
        limits: Limits = DEFAULT_LIMITS,
        settings_of: SettingsOf = lambda queue: QueueSettings(),
        load: Callable[[str], bytes] = no_rows,
        breaker_of: Callable[[str], Breaker] = lambda queue: Breaker(),
        touch: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = number
        self.worker = worker
        self.nonce = nonce
        self.limits = limits
        self.settings_of = settings_of
        self._phase = Phase.CLAIMING
        self._newer = ""  # why it is ``STOPPED``
        self.epoch = -1
        self._breaker_of = breaker_of
        self._touch = touch
        self._agenda = Agenda()
        self._use(Partition(number, queue_id=limits.queue_id, load=load, origin_keys=limits.origin_keys))
        self._sent: dict[int, Sequence[Marker]] = {}  # own records not folded yet, by their number
        self._acked: dict[int, tuple[int, m.Batch]] = {}  # own records that are in the log but not folded yet
        self._deleted: Deleted | None = None
        self._losses: list[rows.Loss] = []
        self._folded_ms = 0

    # ------------------------------------------------------------------ claim and recover

    def claim(self) -> Own:
        """Returns the own marker. Append it, alone in its record, before any table is read."""
        return Own(self.worker, self.nonce)

    def restore(
        self,
        manifests: dict[str, bytes],
        row_keys: Iterable[str],
        load: Callable[[str], bytes],
        edges: Edges,
        own_offset: int = -1,
        *,
        accept_loss: bool = False,
    ) -> None:
        """Take the state from the tables, which have to be read after the own marker was acknowledged.

        The owner is ``LOST`` afterwards if the newest manifest is of a later epoch: claim again.

        Args:
            manifests: all manifests of this partition.
            row_keys: the keys of all its rows.
            load: reads a row by its key.
            edges: where both logs begin and end.
            own_offset: the offset of the own marker.
            accept_loss: go on without markers that were deleted before an owner had read them.

        Raises:
            RowError: a row that the manifest names is missing or damaged.
            DeletedError: the markers log begins beyond the position of the manifest. Another owner has gone on (recover
                again), or somebody has deleted unread records. For the queue log see :meth:`begins_later`.
            RewrittenError: a log has lost what was read.
        """
        for _ in self.restoring(manifests, row_keys, load, edges, own_offset, accept_loss=accept_loss):
            pass

    def restoring(
        self,
        manifests: dict[str, bytes],
        row_keys: Iterable[str],
        load: Callable[[str], bytes],
        edges: Edges,
        own_offset: int = -1,
        *,
        accept_loss: bool = False,
    ) -> Generator[None, None, None]:
        """:meth:`restore` in slices of a few rows each. Call nothing else of this owner before the last one."""
        if self.phase is not Phase.CLAIMING:
            raise InternalError(f"partition {self.number} is restored while it is {self.phase.value}")
        recovered = yield from recovering(
            self.number,
            manifests,
            row_keys,
            load,
            edges,
            own_offset=own_offset,
            queue_id=self.limits.queue_id,
            origin_keys=self.limits.origin_keys,
            accept_loss=accept_loss,
        )
        if recovered is None:
            self.phase = Phase.LOST
            return
        yield from invariants.checking(recovered.partition, invariants.MANY)
        self._use(*recovered)
        self.phase = Phase.CATCHING_UP
        self.begins_later(edges.start[0], edges.end[1] if edges.end is not None else 0, 0)

    def begins_later(self, queue_start: int, markers_end: int, now_ms: int) -> None:
        """The records of the queue log below ``queue_start`` were deleted: some that were not read yet, or unreadable.

        It is no loss if all of them are done, once the markers below ``markers_end`` are folded. If not, the owner is
        ``FAILED`` with a :exc:`DeletedError`, or goes on and adds a loss to ``partition.lost``
        (:attr:`~marq.core.policies.Limits.pass_deleted`). It does not begin to serve before that is known.
        """
        if self.lacks(queue_start):
            self._deleted = Deleted(queue_start, markers_end)
            self._pass_deleted(now_ms)

    def lacks(self, queue_start: int) -> bool:
        """True if it goes on behind something below ``queue_start`` that it has not read, or stops there."""
        unreadable = self.partition.unreadable_ranges() if self.limits.pass_deleted else []
        return queue_start > self.partition.position or (bool(unreadable) and unreadable[0][0] < queue_start)

    @property
    def passes_deleted(self) -> bool:
        """True from :meth:`begins_later` until the queue log can be read on from ``partition.position``."""
        return self._deleted is not None

    def take_losses(self) -> list[rows.Loss]:
        """Returns, once, what was lost when the owner went on at the start of the queue log."""
        losses, self._losses = self._losses, []
        return losses

    def _pass_deleted(self, now_ms: int) -> None:
        deleted, partition = self._deleted, self.partition
        if self.epoch < 0 or deleted is None or partition.markers_position < deleted.markers_end:
            return
        losses = deleted.losses_of(partition)
        if losses and not self.limits.pass_deleted:
            loss = losses[-1]
            lost = f"{loss.unfinished} messages that are not known to be done"
            partition.damage = deleted_unread(self.number, "queue", loss.stop, loss.start, lost)
            return
        self._deleted = None
        self._losses += losses
        pass_deleted(partition, deleted, losses)
        if self.phase is Phase.CATCHING_UP:
            self._serve(now_ms)

    def spread_over(self, partitions: int) -> None:
        """The limits of queues are spread over so many partitions from now on."""
        self.limits = self.limits._replace(partitions=partitions)
        self.flow.partitions = partitions

    def skip_unreadable(self, start: int, stop: int) -> None:
        """Go on without markers that no replica has whole: what they ended comes again. `repair` calls this."""
        lose_markers(self.partition, start, stop)

    def _use(self, partition: Partition, orphans: Iterable[str] = (), old_manifests: Iterable[str] = ()) -> None:
        """Use this state, and make everything that depends on it."""
        self.partition = partition
        partition.on_damage = self._touch
        self.flow = FlowControl(partition, self.limits.partitions, self.settings_of, self._breaker_of)
        self.checkpoints = CheckpointCycle(partition, self.nonce, self.limits, orphans, old_manifests)
        self.ticker = Ticker(partition)
        self.starts = Starts(partition, self.settings_of, self.flow, self.ticker, self._agenda)
        self._ignored = IgnoredMarkers(partition)

    # ------------------------------------------------------------------ phases

    @property
    def phase(self) -> Phase:
        """The phase of the owner. It is ``FAILED`` as soon as any call has met a row that can't be read."""
        if self.partition.damage is not None and self._phase in (Phase.CATCHING_UP, Phase.SERVING):
            self.phase = Phase.FAILED
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        was, self._phase = self._phase, phase
        if phase in (Phase.LOST, Phase.FAILED, Phase.LEFT, Phase.STOPPED):
            # what receivers say counts whoever appends it, and what was not handed out is given back
            last = [marker for marker in self._agenda.appends if not m.is_owners(marker)]
            if was is Phase.SERVING:
                last += self._given_back(self.starts.unanswered())
            self._agenda.take()
            self._agenda.appends = last

    def _given_back(self, deliveries: Iterable[tuple[int, list[int]]]) -> list[Marker]:
        """Uncounted releases of deliveries that nobody got."""
        releases: list[Marker] = []
        for delivery, offsets in deliveries:
            releases += m.split(Release(self.epoch, delivery, ranges_of(sorted(offsets)), 0, counted=False))
        return releases

    @property
    def reason(self) -> str:
        """Why the owner is ``FAILED`` or ``STOPPED``; else empty."""
        damage = self.partition.damage
        if damage is None or isinstance(damage, RowError):
            return self._newer if damage is None else str(damage)
        return f"a marker could not be folded: {damage!r}"

    @property
    def error(self) -> Exception | None:
        """The error that made the owner ``FAILED``: a `RowError`, which a recovery may mend, or an error of our own."""
        return self.partition.damage

    @property
    def serving(self) -> bool:
        """True from the fold of the own marker until a foreign one is folded, or a row can't be read."""
        return self.phase is Phase.SERVING

    @property
    def stalled(self) -> bool:
        """True while the markers log takes no records: no delivery is started."""
        return self.starts.stalled

    # ------------------------------------------------------------------ what it wants done

    def take_effects(self) -> Effects | None:
        """Returns what to do, each effect once, or None. Call it after each other call, until it returns None."""
        return self._agenda.take()

    def take_appends(self) -> list[Marker]:
        """Returns only the markers to append, for a caller that must not be handed messages yet."""
        appends, self._agenda.appends = self._agenda.appends, []
        return appends

    def take_woken(self) -> bool:
        """True if something became ready since the last call: receivers may ask again."""
        woken = self.partition.woken
        if not woken or not self.serving:
            return False
        woken.clear()
        return True

    def wake(self) -> None:
        """Let receivers ask again, whatever became ready."""
        self._touch()
        self.partition.woken[""] = None

    # ------------------------------------------------------------------ the two logs

    def ingest(
        self, start: int, stop: int, records: Sequence[Any], now_ms: int = 0, since_ms: int | None = None
    ) -> bool:
        """Take up a chunk of the queue topic. Returns False if it begins too late: seek to ``partition.position``.

        Args:
            start: the fetch position before the chunk.
            stop: the one after it.
            records: its records.
            now_ms: when it is taken up.
            since_ms: when the log was last seen to end at ``start`` or below; None: not known, or the topic's
                timestamps are not of its brokers.
        """
        if self.phase is Phase.FAILED:
            return True
        self._saw_arrive(self.partition.position, start, stop, records, now_ms, since_ms)
        return self.partition.ingest(start, stop, records)

    def count_unread(self, start: int, stop: int, records: Sequence[Any], now_ms: int, since_ms: int | None) -> bool:
        """Count a chunk of the queue topic beyond the position. For the arguments see :meth:`ingest`.

        Returns False if it begins too late: read from ``partition.unread.stop`` on.
        """
        partition = self.partition
        counted = max(partition.unread.stop, partition.position)
        self._saw_arrive(counted, start, stop, records, now_ms, since_ms)
        return partition.count_unread(start, stop, records)

    def _saw_arrive(
        self, position: int, start: int, stop: int, records: Sequence[Any], now_ms: int, since_ms: int | None
    ) -> None:
        if since_ms is not None and records and start <= position < stop:
            new = records if records[0].offset >= position else [r for r in records if r.offset >= position]
            self.ticker.read(position, new, now_ms, since_ms)

    def read_again(self, start: int, stop: int, records: Sequence[Any]) -> None:
        """Take up records in ``[start, stop)``, where something was unreadable when reading passed it."""
        self._touch()
        if self.phase is not Phase.FAILED:
            self.partition.read_again(start, stop, records)

    def read_markers(self, start: int, stop: int, records: Iterable[Any], now_ms: int) -> bool:
        """Fold a chunk of the markers topic: records with offset, timestamp and value.

        Returns False if it begins too late: seek to ``partition.markers_position``. The owner is ``STOPPED`` in front
        of a record of a later protocol version that the installation has sealed: it can't know who owns the partition
        from there on. In front of records that no replica has whole it has ``FAILED``, as an own marker or an end may
        be among them.
        """
        if self.phase is Phase.FAILED:
            return True
        if self.phase is Phase.CLAIMING or start > self.partition.markers_position:
            return False
        for record in records:
            if type(record) is Unreadable and record.stop > self.partition.markers_position:
                self._fold_acked(now_ms)  # it may know them all
                if record.stop > self.partition.markers_position:
                    self.partition.damage = UnreadableError(
                        f"the records [{record.offset}, {record.stop}) of the markers topic can't be read from any "
                        f"replica ({record.reason}); `python -m app repair --partition {self.number}` names them"
                    )
                    return True
            if record.offset < self.partition.markers_position:
                continue
            known = self._acked.pop(record.offset, None)
            timestamp_ms = record.timestamp
            if known is not None:
                batch = known[1]
            elif type(record) is Undecodable:
                self.partition.counters["unreadable_markers"] += 1
                batch = m.Batch(m.VERSION, [])
                if timestamp_ms < 0:  # not known: no time has passed
                    timestamp_ms = self.partition.last_timestamp_ms
            else:
                try:
                    batch = m.decode(record.value)
                except MarkerError as exc:
                    if type(exc) is NewerVersionError and self._is_ours(record.value):
                        self.phase = Phase.STOPPED
                        self._newer = f"partition {self.number}, markers offset {record.offset}: {exc}"
                        return True
                    self.partition.counters["unreadable_markers"] += 1
                    batch = m.Batch(m.VERSION, [])
            self._fold(record.offset, timestamp_ms, batch, now_ms)
            if self.phase in (Phase.LOST, Phase.FAILED):
                return True
        self.partition.skip_markers(stop)
        self._fold_acked(now_ms)
        if self._deleted is not None:
            self._pass_deleted(now_ms)
        return True

    def _is_ours(self, value: bytes) -> bool:
        return is_of_installation(value, place_of_markers(self.number), self.limits.version_keys)

    def sent(self, seq: int, markers: Sequence[Marker]) -> None:
        """An own record is on its way. ``seq`` grows; the log keeps the order of one writer's records."""
        self._touch()
        self._sent[seq] = markers
        if self.ticker.is_out:
            self.ticker.sent(seq, markers)

    def acknowledged(self, seq: int, offset: int, timestamp_ms: int, markers: list[Marker], now_ms: int) -> None:
        """The own record ``seq`` is in the log: fold it now if it is the next one, else when that is so."""
        if self.phase is not Phase.SERVING or offset < self.partition.markers_position:
            return
        self._acked[offset] = (timestamp_ms, m.Batch(m.VERSION, markers, self.nonce, seq))
        self._fold_acked(now_ms)

    @property
    def is_behind(self) -> bool:
        """True if own records are in the log that are not folded, because those before them have to be read first."""
        return bool(self._acked)

    def failed(self, seq: int) -> None:
        """The append of record ``seq`` failed or timed out, but it may still land.

        What it reserved stays reserved until this record, or a later one of this owner, is folded.
        """
        for marker in self._sent.get(seq, ()):
            if isinstance(marker, Start):
                self.starts.failed(marker)

    def _fold_acked(self, now_ms: int) -> None:
        while self._phase is Phase.SERVING:  # a fold that damages the state fails
            known = self._acked.pop(self.partition.markers_position, None)
            if known is None:
                return
            self._fold(self.partition.markers_position, known[0], known[1], now_ms)

    def _fold(self, offset: int, timestamp_ms: int, batch: m.Batch, now_ms: int) -> None:
        try:
            self._apply(offset, timestamp_ms, batch, now_ms)
        except Exception as exc:
            # half of the record has taken effect, and it would not be folded again: this state can't be used any more
            if self.partition.damage is None:
                self.partition.damage = exc
                self.phase = Phase.FAILED

    def _apply(self, offset: int, timestamp_ms: int, batch: m.Batch, now_ms: int) -> None:
        effects = self.partition.fold(offset, timestamp_ms, batch.markers)
        if now_ms - self._folded_ms > OUTAGE_MS:
            # no tick came through either, so Kafka was away: the time-out is for a changelog that alone is stuck
            self.checkpoints.stood_still(now_ms)
        self._folded_ms = now_ms
        if self.starts.stalled:
            self.starts.stall_is_over()
        for marker, effect in zip(batch.markers, effects, strict=True):
            kind = type(marker)
            if kind is Start:
                if self._phase is Phase.SERVING and marker.epoch == self.epoch:  # type: ignore[union-attr]
                    self.starts.folded(marker, effect, now_ms)  # type: ignore[arg-type]
            elif kind is Own:
                self._owned(marker, offset, now_ms)  # type: ignore[arg-type]
            elif kind is Tick and self._phase is Phase.SERVING:
                self.checkpoints.folded(marker)  # type: ignore[arg-type]
            elif kind is End or kind is Purge:
                if self._agenda.handouts:
                    self._agenda.withdraw(effect)
            elif (kind is Keepalive or kind is Release) and len(effect) < count(marker.offsets):  # type: ignore[union-attr]
                self._ignored.note(offset, marker, effect)  # type: ignore[arg-type]
            if self.flow.in_flight and (kind is End or kind is Release or kind is Purge):
                self.flow.landed(marker, effect, now_ms)
        if batch.by == self.nonce:
            if self.ticker.on_its_way:
                self.ticker.folded(batch.seq, timestamp_ms, now_ms)
            if self._sent:
                self._settle(batch.seq)

    def took_effect(self, record: int, epoch: int, delivery: int, offset: int) -> bool:
        """True if the extension or release of a delivery in the markers record ``record`` had effect.

        ``record`` must be folded; -1: any record that is folded.
        """
        if record >= self.partition.markers_position:
            raise InternalError(f"partition {self.number}: record {record} of its markers is not folded yet")
        return self._ignored.took_effect(record, epoch, delivery, offset)

    def clock_at(self, now_ms: int) -> int:
        """The clock of the partition now: it stands still between records, but the time of leases does not."""
        return self.partition.clock_ms + max(0, now_ms - self._folded_ms)

    def _owned(self, own: Own, offset: int, now_ms: int) -> None:
        if own.nonce == self.nonce and self.phase is Phase.CATCHING_UP:
            self.epoch = self.starts.epoch = offset
            if self._deleted is None:
                self._serve(now_ms)
        elif self.epoch >= 0:
            self.phase = Phase.LOST

    def _serve(self, now_ms: int) -> None:
        self.phase = Phase.SERVING
        self.checkpoints.serve(self.epoch, now_ms)

    def leave(self) -> list[Marker]:
        """Stop serving, because another worker gets the partition. Returns what to append behind all that was sent.

        For each start that was sent and not handed out there is an uncounted release, which is ignored if the start
        takes no effect. So it is for an owner that has stopped serving by itself, because it read the own marker of
        another worker or could not read a row. The caller has to drop unsent markers that are the owner's
        (:func:`~marq.core.markers.is_owners`), and to send those of receivers.
        """
        was, self.phase = self._phase, Phase.LEFT
        last = self.take_appends()
        if was in (
            Phase.SERVING,
            Phase.FAILED,
            Phase.STOPPED,
        ):  # LOST: what is not folded is behind another's own, void
            sent = {marker.delivery for of in self._sent.values() for marker in of if isinstance(marker, Start)}
            last += self._given_back(self.starts.unfolded(sent))
        return last

    def _settle(self, seq: int) -> None:
        """Record ``seq`` was folded: records that were sent before it and are not folded by now never landed."""
        for number in [n for n in self._sent if n <= seq]:
            markers = self._sent.pop(number)
            if self.ticker.on_its_way:
                self.ticker.settled(number)
            if number == seq:
                continue
            for marker in markers:
                if isinstance(marker, Start):
                    self.starts.lost(marker)
                elif isinstance(marker, End) and marker.outcome != "acked":
                    self.starts.put_back(offsets_in(marker.offsets))
                elif isinstance(marker, Tick) and self.checkpoints.is_awaited(marker):
                    self._agenda.appends.append(marker)

    # ------------------------------------------------------------------ deliveries

    def acquire(
        self,
        queues: Iterable[str],
        limit: int,
        receiver: Any,
        now_ms: int,
        *,
        lease_ms: int,
        shared_fate: bool = False,
        batch: int = 0,
        name: str = "",
    ) -> Pending | None:
        """Reserve up to ``limit`` ready messages of ``queues`` and append their start. Returns None if there are none.

        Once the start is folded, the messages are among the effects, as a :class:`Handout`. For ``shared_fate`` and
        ``batch`` see :meth:`~marq.core.partition.Partition.take`.
        """
        self._touch()
        if self.phase is not Phase.SERVING:
            return None
        return self.starts.acquire(
            queues, limit, receiver, now_ms, lease_ms=lease_ms, shared_fate=shared_fate, batch=batch, name=name
        )

    def acquire_to_end(
        self,
        queue: str,
        offsets: Iterable[int] | None,
        limit: int,
        receiver: Any,
        now_ms: int,
        *,
        lease_ms: int,
        name: str,
    ) -> Pending | None:
        """Like :meth:`acquire`, for one queue and without its limits, to end the messages as the owner.

        ``offsets`` takes those that are ready; None takes up to ``limit`` messages in their order.
        """
        self._touch()
        if self.phase is not Phase.SERVING:
            return None
        return self.starts.acquire_to_end(queue, offsets, limit, receiver, now_ms, lease_ms=lease_ms, name=name)

    def release(self, offsets: list[int], receipt: tuple[int, int], delay_ms: int = 0, counted: bool = True) -> None:
        """Append a release of ``offsets``, whose delivery is folded."""
        self._touch()
        self._agenda.release(offsets, receipt, delay_ms, counted)

    def extend(self, offsets: list[int], receipt: tuple[int, int], lease_ms: int) -> None:
        """Append an extension of the lease of ``offsets``."""
        self._touch()
        self._agenda.appends += m.split(Keepalive(receipt[0], receipt[1], ranges_of(sorted(offsets)), lease_ms))

    def acked(self, offsets: list[int], receipt: tuple[int, int]) -> None:
        """Append an ack of ``offsets``."""
        self._touch()
        self._agenda.appends += m.split(End(receipt[0], ranges_of(sorted(offsets)), "acked", receipt[1]))

    def ended_as(self, outcome: m.Outcome, offsets: list[int]) -> None:
        """Append the owner's own end of ``offsets``."""
        self._touch()
        if offsets and self.phase is Phase.SERVING:
            self._agenda.appends += m.split(End(self.epoch, ranges_of(sorted(offsets)), outcome))

    def purge(self, queue: str, before: int) -> None:
        """Append a purge of all messages of ``queue`` below ``before``."""
        self._touch()
        if self.phase is Phase.SERVING:
            self._agenda.appends.append(Purge(self.epoch, queue, before))

    # ------------------------------------------------------------------ time

    def work(self, now_ms: int, ttl_queues: Iterable[str] = ()) -> Due | None:
        """Do what is due: append ends, start dead letters, list poison. Returns what was due."""
        if self.phase is not Phase.SERVING:
            return None
        self.starts.look_for_stall(now_ms, self._folded_ms)
        self.flow.wake_probes(now_ms)
        due = self.starts.due(now_ms, ttl_queues)
        if due is not None:
            self.ended_as("expired", due.expired)
            self.ended_as("purged", due.purged)
            self._agenda.poison += due.poison
            if due.dead:
                self.starts.begin_dead(due.dead, now_ms)
        return due

    def tick(self, now_ms: int, ttl_queues: Iterable[str] = ()) -> bool:
        """Append a tick if log time has to be known. Returns True if it did. Call often: the rate of ticks is limited.

        ``ttl_queues`` are the queues with a time to live in their settings that have messages here.
        """
        if self.phase is not Phase.SERVING:
            return False
        has_ttl, has_sent = bool(list(ttl_queues)), bool(self._sent)
        tick = self.ticker.tick(
            self.epoch, now_ms, self._folded_ms, self.checkpoints, has_sent=has_sent, has_ttl=has_ttl
        )
        if tick is None:
            return False
        self._agenda.appends.append(tick)
        return True

    def next_ms(self, now_ms: int, has_ttl: bool = False) -> int | None:
        """The time before which :meth:`tick` and :meth:`work` do nothing, unless something happens; None: for ever.

        Something happens when any other method is called, or settings change. An idle partition has None, so that it
        costs nothing.

        Args:
            has_ttl: messages are here of a queue with a time to live in its settings.
        """
        if self.phase is not Phase.SERVING:
            return None
        # with a time to live in its settings, the messages of a queue are looked at in parts
        partition = self.partition
        if has_ttl or partition.woken or self._agenda.is_open or self.flow.refuses or partition.has_due:
            return now_ms
        tick_ms = self.ticker.next_ms(now_ms, self._folded_ms, self.checkpoints, has_sent=bool(self._sent))
        times = [at for at in (tick_ms, self.starts.stall_ms(self._folded_ms)) if at is not None]
        return min(times) if times else None

    # ------------------------------------------------------------------ checkpoints

    def hurry_checkpoint(self) -> None:
        """Memory is short: the next checkpoint comes at once, unless it is put off, and writes all payloads."""
        self._touch()
        self.checkpoints.hurry()

    def put_off_checkpoint(self, until_ms: int) -> None:
        """Others come first: the next checkpoint begins at this time, or later."""
        self.checkpoints.put_off(until_ms)

    @property
    def checkpoint_is_urgent(self) -> bool:
        """True from :meth:`hurry_checkpoint` until the checkpoint begins."""
        return self.checkpoints.is_urgent

    def wants_checkpoint(self, now_ms: int) -> bool:
        """True if :meth:`step` would begin a checkpoint now that has something to write, up to a few MB."""
        return self.phase is Phase.SERVING and self.checkpoints.is_due(now_ms) and self.checkpoints.has_to_write

    def step(self, now_ms: int) -> Step | None:
        """Returns the next step of the checkpoint, or None. Call it in the event context of a marker of this partition.

        Raises:
            InternalError: a step was not acknowledged in time, or the state breaks a rule: recover again.
        """
        return self.checkpoints.step(now_ms) if self.phase is Phase.SERVING else None

    def written(self, now_ms: int) -> None:
        """All that the last step wrote is acknowledged by the changelog."""
        fence = self.checkpoints.written(now_ms) if self.phase is Phase.SERVING else None
        if fence is not None:
            self._agenda.appends.append(fence)
