"""The protocol by which one worker owns a partition: claim, recover, serve, checkpoint, lose.

    CLAIMING ──restore──► CATCHING_UP ──own marker folded──► SERVING ──foreign own folded──► LOST
                                                             SERVING ──a row can't be read, a fold fails──► FAILED
                                                             SERVING ──leave()──► LEFT
                    (any) ──marker of a later protocol version──► STOPPED

The owner hands out only what its *folded* start took effect on. An append of its own whose offset and timestamp came
back is folded at once when it is the next record; otherwise when it is read. Nothing here does I/O: the caller appends
what it finds in ``appends``, delivers what is in ``handouts``, and carries out the step that :meth:`Owner.step` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from marq.core import markers as m
from marq.core import rows
from marq.core.flow import Breaker, Flow, is_limited
from marq.core.folding import CLOCK_STEP_MS
from marq.core.markers import End, Keepalive, Marker, Own, Purge, Release, Start, Tick
from marq.core.partition import Checkpoint, Due, Partition
from marq.core.policies import QueueSettings, SettingsOf
from marq.core.ranges import count, offsets_in, ranges_of
from marq.core.reading import Unreadable
from marq.errors import DeletedError, InternalError, MarkerError, NewerVersionError, RowError

TICK_MIN_MS = 100
"""The timer appends at most one tick per this time and partition …"""

TICK_MAX_MS = 1_000
"""… and at least one while anything is pending there."""

DOUBT_MS = 120_000
"""For so long the stamps of ticks have to be at odds with the owner's own clock before they are believed."""

OUTAGE_MS = 5 * TICK_MAX_MS
"""Without a marker for longer than this, while a checkpoint waits for its ticks, Kafka or this process stood still."""

FLOWS_SLACK = 1_000
"""So many queues with limits are remembered though they have nothing in flight; then those are looked through."""

DEAD_LEASE_MS = 60_000
"""Lease under which the owner itself holds a message while its dead letter is copied."""

STALLED_MS = 1_500
"""A start that waited for so long, while nothing else was folded either, is in a log that takes nothing at present."""

IGNORED_MAX = 10_000
"""Extensions and releases without effect that are remembered, message by message, for those who ask."""

LOSSES_MAX = 1_000
"""Losses that are remembered one by one; of more, the two oldest of a log become one."""

DEAD_RECEIVER = "dlq"
NO_RECEIVER = None
"""Of a start whose receiver was told that nothing came of it."""


class Phase(Enum):
    """Life of an owner."""

    CLAIMING = "claiming"  # the own marker is on its way; nothing is known yet
    CATCHING_UP = "catching up"  # state restored, reading up to the own marker
    SERVING = "serving"
    LOST = "lost"  # another worker's own marker was folded: no effect may follow
    FAILED = "failed"  # a row can't be read, or a fold raised: no effect may follow; another claim recovers
    LEFT = "left"  # the partition was given away: nor here
    STOPPED = "stopped"  # a marker of a later protocol version was read: ``reason`` says which


class Limits(NamedTuple):
    """What the owner is set to. Milliseconds, offsets."""

    checkpoint_ms: int = 2_000
    window_offsets: int = 100_000
    persist_after_ms: int = 10_000
    step_timeout_ms: int = 30_000
    queue_id: str | None = None  # topic mode
    partitions: int = 1  # over which the limits of a queue are spread
    origin_keys: tuple[bytes, ...] = ()  # with which origins of copies are sealed; none: they are not


DEFAULT_LIMITS = Limits()


class Pending:
    """A delivery whose start is on its way: reserved for ``receiver``, not handed out yet."""

    __slots__ = (
        "delivery",
        "effect",
        "gone",
        "in_turn",
        "lease_ms",
        "offsets",
        "parts",
        "receiver",
        "sent_ms",
        "split",
    )

    def __init__(
        self,
        receiver: Any,
        delivery: int,
        offsets: list[int],
        lease_ms: int,
        sent_ms: int,
    ) -> None:
        self.receiver = receiver
        self.delivery = delivery
        self.offsets = offsets
        self.lease_ms = lease_ms
        self.sent_ms = sent_ms
        self.gone = False  # the receiver went away: give back uncounted as soon as the start is folded
        self.in_turn = True  # of a FIFO queue only the first of a group may be delivered
        self.parts = 1  # markers of its start that are not folded yet
        self.split = False  # there were several: they may be in different records
        self.effect: list[int] = []


class Handout(NamedTuple):
    """A delivery to hand out now: ``receipt`` is ``(epoch, delivery)``, ``until_ms`` the owner's monotonic clock.

    Without offsets: nothing came of what the receiver had asked for.
    """

    receiver: Any
    receipt: tuple[int, int]
    offsets: list[int]
    until_ms: int


class WriteRows(NamedTuple):
    """Write these rows, then call :meth:`Owner.written`."""

    rows: list[tuple[str, bytes]]


class WriteManifest(NamedTuple):
    """Write the manifest, then call :meth:`Owner.written`."""

    key: str
    value: bytes


class Retire(NamedTuple):
    """The checkpoint is behind its fence: delete these rows and manifests, and the logs may go up to the positions."""

    rows: list[str]
    manifests: list[str]
    position: int
    markers_position: int


Step = WriteRows | WriteManifest | Retire


class Owner:
    """Partition ``number``, as one worker owns it. ``nonce`` must be new for each attempt; times are monotonic ms."""

    def __init__(
        self,
        number: int,
        worker: str,
        nonce: str,
        *,
        limits: Limits = DEFAULT_LIMITS,
        settings_of: SettingsOf = lambda queue: QueueSettings(),
        load: Callable[[str], bytes] | None = None,
        breaker_of: Callable[[str], Breaker] = lambda queue: Breaker(),
    ) -> None:
        self.number = number
        self.worker = worker
        self.nonce = nonce
        self.limits = limits
        self.settings_of = settings_of
        self._phase = Phase.CLAIMING
        self._newer = ""  # why it is ``STOPPED``
        self.epoch = -1
        self.appends: list[Marker] = []
        self.handouts: list[Handout] = []
        self.dead: list[int] = []  # started for their dead letter: copy, then call copied()
        self.poison: list[tuple[int, str]] = []  # copy to the poison topic, then call ended_as()
        self.partition = self._new_partition(load)
        self.under_pressure = False  # memory is short: the next checkpoint writes all payloads, and comes at once
        self.stalled = False  # the log takes nothing: nothing is begun until it does
        self._load = load
        self._breaker_of = breaker_of
        self._delivery = 0
        self._pending: dict[int, Pending] = {}
        self._sent: dict[int, Sequence[Marker]] = {}  # own records not folded yet, by their number
        self._acked: dict[int, tuple[int, m.Batch]] = {}  # own records that are in the log but not folded yet
        self._checkpoint: Checkpoint | None = None
        self._step = "idle"
        self._step_since_ms = 0
        self._fence = ""
        self._fences = 0
        self._next_checkpoint_ms = 0
        # (epoch, delivery, offset) of extensions and releases without effect -> the first record that had one
        self._ignored: dict[tuple[int, int, int], int] = {}
        self._ignored_from = 0  # of records below it nothing is known
        self.flows: dict[str, Flow] = {}  # of queues with limits
        self._flows_max = FLOWS_SLACK
        self._flow_of: dict[int, str] = {}  # offset in flight -> its queue, if that has limits
        self._orphans: list[str] = []
        self._old_manifests: list[str] = []
        self._folded_ms = 0
        self._ticked_ms = 0
        self._tick_out = False  # the last tick has not been folded yet
        self._tick_sent: dict[int, int] = {}  # own record with a tick, not folded yet -> our clock, when sent or before
        self.told = False  # this owner's own ticks have told broker time
        self._told_ms = 0  # our clock when the last one was sent that did
        self._ahead_ms = 0  # of our clock, broker time, as it is believed
        self._doubt_since_ms: int | None = None  # our clock when the stamps of ticks began to be at odds with it

    # ------------------------------------------------------------------ claim and recover

    def claim(self) -> Own:
        """The marker to append, alone in its record, before any table is read."""
        return Own(self.worker, self.nonce)

    def restore(
        self,
        manifests: dict[str, bytes],
        row_keys: Iterable[str],
        load: Callable[[str], bytes],
        log_start: tuple[int, int],
        own_offset: int = -1,
        *,
        accept_loss: bool = False,
    ) -> None:
        """Take the state from the tables, read after the own marker was acknowledged.

        ``manifests``: all of this partition; ``row_keys``: all its rows; ``log_start``: first offsets still in the
        queue and markers topics; ``own_offset``: where the own marker is. Ends up ``LOST``, with nothing taken, if the
        newest manifest is of a later epoch: claim again. Raises :exc:`RowError` if a named row is missing or damaged,
        and :exc:`DeletedError` if a log begins beyond the manifest's position: another owner has gone on (recover
        again), or somebody has deleted records that no owner had read. ``accept_loss``: go on without those; once the
        own marker is folded, :meth:`give_up` says what is gone.
        """
        assert self.phase is Phase.CLAIMING
        decoded = {key: rows.decode_manifest(value) for key, value in manifests.items()}
        newest = max(decoded, key=lambda key: decoded[key].epoch, default=None)
        self._load = load
        if newest is None:
            if (log_start[1] or (log_start[0] and self.limits.queue_id is None)) and not accept_loss:
                raise DeletedError(
                    f"partition {self.number}: the logs begin at {log_start}, but there is no manifest: records were "
                    "deleted, so another owner has written one meanwhile, or they were deleted unread; "
                    f"`python -m app repair --partition {self.number}` names them"
                )
            self.partition = self._new_partition(load)
            if accept_loss:
                # a topic of the user's may begin anywhere
                self.partition.start_at(0 if self.limits.queue_id is None else log_start[0], 0)
                self._skip_deleted_markers(log_start[1])
            else:
                self.partition.start_at(*log_start)
            self._orphans = list(row_keys)
        else:
            manifest = decoded.pop(newest)
            if manifest.epoch > own_offset >= 0:
                # its owner has read past our own marker, so we would never fold it
                self.phase = Phase.LOST
                return
            for name, position, start in (
                ("queue", manifest.position, log_start[0]),
                ("markers", manifest.markers_position, log_start[1]),
            ):
                if start > position and not accept_loss:
                    raise DeletedError(
                        f"partition {self.number}: the {name} topic begins at {start}, beyond the position "
                        f"{position} of the newest manifest (epoch {manifest.epoch}): records were deleted unread; "
                        f"`python -m app repair --partition {self.number}` names them"
                    )
            present = set(row_keys)
            self.partition = Partition.restore(
                self.number,
                manifest,
                load,
                queue_id=self.limits.queue_id,
                present=present,
                origin_keys=self.limits.origin_keys,
            )
            if accept_loss:
                self._skip_deleted_markers(log_start[1])
            self._orphans = sorted(present.difference(self.partition.named_keys()))
            self._old_manifests = [newest, *decoded]
        self._ignored_from = self.partition.markers_position
        self.phase = Phase.CATCHING_UP

    def _skip_deleted_markers(self, start: int) -> None:
        """Progress that was recorded up to ``start`` is gone: what it finished comes again."""
        partition, position = self.partition, self.partition.markers_position
        if start > position:
            unsure = len(partition.messages) + partition.segments.parked_total()
            self._note_loss(rows.Loss("markers", position, start, unsure, partition.last_timestamp_ms))
            partition.skip_markers(start)

    def _note_loss(self, loss: rows.Loss) -> None:
        lost = self.partition.lost
        lost.append(loss)
        if len(lost) > LOSSES_MAX:
            first, second = [one for one in lost if one.log == lost[0].log][:2]
            lost.remove(second)
            unfinished = first.unfinished + second.unfinished
            lost[0] = rows.Loss(first.log, first.start, second.stop, unfinished, second.at_ms)

    def give_up(self, queue_start: int) -> list[rows.Loss]:
        """Go on where the queue topic begins now, though that is beyond what was read; all that was ever given up.

        Every marker up to the own one is folded: what they say is done counts as that.
        """
        assert self.phase is Phase.SERVING
        partition, position = self.partition, self.partition.position
        if queue_start > position:
            unfinished = queue_start - position - count(partition.ahead.within(position, queue_start))
            self._note_loss(rows.Loss("queue", position, queue_start, unfinished, partition.last_timestamp_ms))
            partition.counters["deleted_unread"] += unfinished
            partition.ingest(position, queue_start, [])
        return list(partition.lost)

    def _new_partition(self, load: Callable[[str], bytes] | None) -> Partition:
        queue_id, origin_keys = self.limits.queue_id, self.limits.origin_keys
        if load is None:
            return Partition(self.number, queue_id=queue_id, origin_keys=origin_keys)
        return Partition(self.number, queue_id=queue_id, load=load, origin_keys=origin_keys)

    @property
    def phase(self) -> Phase:
        """Where in its life the owner is. Whoever met the unreadable row, it is ``FAILED`` from then on."""
        if self.partition.damage is not None and self._phase in (Phase.CATCHING_UP, Phase.SERVING):
            self.phase = Phase.FAILED
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase
        if phase in (Phase.LOST, Phase.FAILED, Phase.LEFT, Phase.STOPPED):
            appends, handouts = self.appends[:], self.handouts[:]
            for effects in (self.appends, self.handouts, self.dead, self.poison):
                effects.clear()
            if phase is Phase.FAILED:
                # what receivers say counts whoever appends it; and what was not handed out is given back
                self.appends += [a for a in appends if not m.is_owners(a)]
                for handout in handouts:
                    if handout.offsets:
                        self.release(handout.offsets, handout.receipt, counted=False)

    @property
    def reason(self) -> str:
        """Why the owner is ``FAILED`` or ``STOPPED``; else empty."""
        damage = self.partition.damage
        if damage is None or isinstance(damage, RowError):
            return self._newer if damage is None else str(damage)
        return f"a marker could not be folded: {damage!r}"

    @property
    def error(self) -> Exception | None:
        """What made the owner ``FAILED``: a `RowError`, which another recovery may mend, or an error of our own."""
        return self.partition.damage

    @property
    def serving(self) -> bool:
        """True from the folding of the own marker until that of a foreign one, or until a row can't be read."""
        return self.phase is Phase.SERVING

    # ------------------------------------------------------------------ the two logs

    def ingest(self, start: int, stop: int, records: Sequence[Any]) -> bool:
        """A chunk of the queue topic; False: seek back to ``partition.position``."""
        if self.phase is Phase.FAILED:
            return True
        return self.partition.ingest(start, stop, records)

    def read_markers(self, start: int, stop: int, records: Iterable[Any], now_ms: int) -> bool:
        """A chunk of the markers topic (records with offset, timestamp, value); False: seek to its position.

        Ends up ``STOPPED`` in front of a record of a later protocol version: whose the partition is, and what may be
        deleted of the logs, is unknown from there on.
        """
        if self.phase is Phase.FAILED:
            return True
        if self.phase is Phase.CLAIMING or start > self.partition.markers_position:
            return False
        for record in records:
            if record.offset < self.partition.markers_position:
                continue
            known = self._acked.pop(record.offset, None)
            timestamp_ms = record.timestamp
            if known is not None:
                batch = known[1]
            elif type(record) is Unreadable:
                self.partition.counters["unreadable_markers"] += 1
                batch = m.Batch(m.VERSION, [])
                if timestamp_ms < 0:  # not known: no time has passed
                    timestamp_ms = self.partition.last_timestamp_ms
            else:
                try:
                    batch = m.decode(record.value)
                except NewerVersionError as exc:
                    self.phase = Phase.STOPPED
                    self._newer = f"partition {self.number}, markers offset {record.offset}: {exc}"
                    return True
                except MarkerError:
                    self.partition.counters["unreadable_markers"] += 1
                    batch = m.Batch(m.VERSION, [])
            self._fold(record.offset, timestamp_ms, batch, now_ms)
            if self.phase in (Phase.LOST, Phase.FAILED):
                return True
        self.partition.skip_markers(stop)
        self._fold_acked(now_ms)
        return True

    def sent(self, seq: int, markers: Sequence[Marker]) -> None:
        """An own record is on its way. ``seq`` grows; the log keeps the order of one writer's records."""
        self._sent[seq] = markers
        if self._tick_out and any(type(marker) is Tick for marker in markers):
            self._tick_sent[seq] = self._ticked_ms

    def acknowledged(
        self,
        seq: int,
        offset: int,
        timestamp_ms: int,
        markers: list[Marker],
        now_ms: int,
    ) -> None:
        """The own record ``seq`` is in the log: fold it now if it is the next one, else when that is so."""
        if self.phase is not Phase.SERVING or offset < self.partition.markers_position:
            return
        self._acked[offset] = (
            timestamp_ms,
            m.Batch(m.VERSION, markers, self.nonce, seq),
        )
        self._fold_acked(now_ms)

    def failed(self, seq: int) -> None:
        """The append of record ``seq`` failed or timed out: it may still land.

        What it reserved stays so until it, or a later record of ours, is folded.
        """
        for marker in self._sent.get(seq, ()):
            if isinstance(marker, Start) and marker.delivery in self._pending:
                self._pending[marker.delivery].gone = True

    def _fold_acked(self, now_ms: int) -> None:
        while self.phase is Phase.SERVING:
            known = self._acked.pop(self.partition.markers_position, None)
            if known is None:
                return
            self._fold(self.partition.markers_position, known[0], known[1], now_ms)

    def _fold(self, offset: int, timestamp_ms: int, batch: m.Batch, now_ms: int) -> None:
        try:
            self._apply(offset, timestamp_ms, batch, now_ms)
        except Exception as exc:
            # Half of the record has taken effect, and it would never be folded again: no state to go on from.
            if self.partition.damage is None:
                self.partition.damage = exc
                self.phase = Phase.FAILED

    def _apply(self, offset: int, timestamp_ms: int, batch: m.Batch, now_ms: int) -> None:
        effects = self.partition.fold(offset, timestamp_ms, batch.markers)
        if now_ms - self._folded_ms > OUTAGE_MS:
            # no tick came through either: Kafka was away, and the time-out is for a changelog that alone does not move
            self._step_since_ms = now_ms
        self._folded_ms = now_ms
        if self.stalled:
            self.stalled = False
            self.partition.woken[""] = None
        for marker, effect in zip(batch.markers, effects, strict=True):
            kind = type(marker)
            if kind is Start:
                if self.phase is Phase.SERVING and marker.epoch == self.epoch:  # type: ignore[union-attr]
                    self._started(marker, effect, now_ms)  # type: ignore[arg-type]
            elif kind is Own:
                self._owned(marker, offset, now_ms)  # type: ignore[arg-type]
            elif kind is End:
                if self.handouts:
                    self._withdraw(effect)
                if marker.outcome != "acked" and marker.epoch == self.epoch:  # type: ignore[union-attr]
                    self.partition.unreserve(offsets_in(marker.offsets))  # type: ignore[union-attr]
            elif (
                kind is Tick
                and self._step == "fence"
                and marker.fence == self._fence  # type: ignore[union-attr]
                and self.phase is Phase.SERVING
            ):
                self._step = "retire"
            elif kind is Purge and self.handouts:
                self._withdraw(effect)
            elif (kind is Keepalive or kind is Release) and len(effect) < count(marker.offsets):  # type: ignore[union-attr]
                self._note_ignored(offset, marker, effect)  # type: ignore[arg-type]
            if self._flow_of and (kind is End or kind is Release or kind is Purge):
                self._landed(marker, effect, now_ms)
        if batch.by == self.nonce:
            sent_ms = self._tick_sent.get(batch.seq)
            if sent_ms is not None and self.phase is Phase.SERVING:
                self._ticked(timestamp_ms, sent_ms, now_ms)
            if self._sent:
                self._settle(batch.seq)

    def _ticked(self, timestamp_ms: int, sent_ms: int, now_ms: int) -> None:
        """A tick that was sent at ``sent_ms`` of our clock, or later, is in the log.

        What it says of broker time is in the fold. Here it is held against our own clock: a broker whose clock jumps
        is believed when it has done so for a while, or by the next owner.
        """
        self._tick_out = False
        partition, ahead_ms = self.partition, timestamp_ms - sent_ms
        if self.told and abs(ahead_ms - self._ahead_ms) > CLOCK_STEP_MS:
            if self._doubt_since_ms is None:
                self._doubt_since_ms = now_ms
            if now_ms - self._doubt_since_ms < DOUBT_MS:
                return
        self._doubt_since_ms = None
        self._ahead_ms = ahead_ms
        if partition.agreed and partition.tick_ms == timestamp_ms:
            self._told_ms = sent_ms
            if not self.told:
                self.told = True
                partition.woken.update(dict.fromkeys(list(partition.queues())))

    def _estimate(self, now_ms: int) -> None:
        """Tell the partition how late it is by our own clock: it delivers nothing that has expired by that."""
        partition = self.partition
        partition.estimate_ms = partition.broker_ms + now_ms - self._told_ms if self.told else -1

    def _note_ignored(self, record: int, marker: Keepalive | Release, effect: list[int]) -> None:
        took, ignored = set(effect), self._ignored
        for offset in offsets_in(marker.offsets):
            if offset not in took:
                ignored.setdefault((marker.epoch, marker.delivery, offset), record)
        while len(ignored) > IGNORED_MAX:
            oldest = next(iter(ignored))
            self._ignored_from = max(self._ignored_from, ignored.pop(oldest) + 1)

    def took_effect(self, record: int, epoch: int, delivery: int, offset: int) -> bool:
        """Whether the extension or release of a delivery in the markers record ``record``, which is folded, had effect.

        A delivery that is over never comes back: what one record could not extend or release, no later one can.
        """
        assert record < self.partition.markers_position  # -1: somewhere below it
        ignored = self._ignored.get((epoch, delivery, offset))
        if ignored is not None:
            return 0 <= record < ignored
        # of a record that was folded before the state was restored, what is there now is all that is known
        return record >= self._ignored_from or self.partition.is_current(offset, epoch, delivery)

    def _withdraw(self, ended: list[int]) -> None:
        """Offsets that ended later in the same chunk as their start are not handed out any more."""
        gone = set(ended)
        self.handouts = [
            h if gone.isdisjoint(h.offsets) else h._replace(offsets=[o for o in h.offsets if o not in gone])
            for h in self.handouts
        ]

    def _owned(self, own: Own, offset: int, now_ms: int) -> None:
        if own.nonce == self.nonce and self.phase is Phase.CATCHING_UP:
            self.phase = Phase.SERVING
            self.epoch = offset
            self._next_checkpoint_ms = now_ms + self.limits.checkpoint_ms
        elif self.phase is Phase.SERVING:
            self.phase = Phase.LOST

    def leave(self) -> list[Marker]:
        """Stop serving, because another worker gets the partition. Returns what to append behind all that was sent.

        Each start that was sent but whose messages were not handed out is followed by an uncounted release. It is
        ignored where the start took no effect. Of what was not sent, only markers of receivers remain: drop all others
        (:func:`~marq.core.markers.is_owners`).
        """
        if self.phase is not Phase.SERVING:
            self.phase = Phase.LEFT
            return []
        last = [marker for marker in self.appends if not m.is_owners(marker)]
        sent = {marker.delivery for markers in self._sent.values() for marker in markers if isinstance(marker, Start)}
        unanswered = [
            (pending.delivery, pending.offsets)
            for pending in self._pending.values()
            if pending.delivery in sent or pending.effect
        ]
        unanswered += [(handout.receipt[1], handout.offsets) for handout in self.handouts if handout.offsets]
        dead: dict[int, list[int]] = {}
        for offset in self.dead:
            if (delivered := self.partition.deliveries.get(offset)) is not None and delivered.epoch == self.epoch:
                dead.setdefault(delivered.delivery, []).append(offset)
        for delivery, offsets in (*unanswered, *dead.items()):
            last += m.split(Release(self.epoch, delivery, ranges_of(sorted(offsets)), 0, counted=False))
        self.phase = Phase.LEFT
        return last

    def _settle(self, seq: int) -> None:
        """Record ``seq`` was folded: those sent before it, and not folded by now, never landed."""
        for number in [n for n in self._sent if n <= seq]:
            markers = self._sent.pop(number)
            self._tick_sent.pop(number, None)
            if number == seq:
                continue
            for marker in markers:
                if isinstance(marker, Start):
                    pending = self._pending.pop(marker.delivery, None)
                    if pending is not None:
                        self._resolve(pending, 0, lost=True)
                elif isinstance(marker, End) and marker.outcome != "acked":
                    self.partition.put_back(offsets_in(marker.offsets))
                elif isinstance(marker, Tick) and marker.fence == self._fence and self._step == "fence":
                    self.appends.append(marker)

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
        """Reserve up to ``limit`` ready messages of ``queues`` and append their start; None if there are none.

        They come out in ``handouts`` once the start is folded. ``shared_fate``, ``batch``: see
        :meth:`~marq.core.partition.Partition.take`.
        """
        if self.phase is not Phase.SERVING or self.stalled:
            return None
        taken: list[int] = []
        self._estimate(now_ms)
        for queue in queues:
            settings, room = self.settings_of(queue), limit - len(taken)
            if not self.told and (settings.ttl_ms or self.partition.ttls):
                continue  # what expired while nobody served must not be delivered
            if settings.fifo and shared_fate and taken:
                continue  # cut into calls by offset, its messages could be in two
            limited = settings.max_in_flight or settings.max_in_flight_per_receiver or settings.breaker_failures
            if limited:
                room = self._room(queue, settings, name, room, now_ms)
                if not room:
                    continue
            try:
                more = self.partition.take(queue, room, settings, shared_fate, batch)
            except RowError:
                self.partition.put_back(taken)
                return None  # and serves no more
            if self.partition.isolated:
                # a suspicious message shares its delivery with none of another queue
                if taken:
                    self.partition.put_back(more)
                    continue
                limit = 0
            elif settings.fifo and shared_fate and more:
                limit = 0
            if limited and more:
                self.flows[queue].add(more, name, now_ms, 2 * lease_ms + settings.breaker_pause_ms)
                self._flow_of.update(dict.fromkeys(more, queue))
            taken += more
            if len(taken) >= limit:
                break
        if not taken:
            return None
        taken.sort()
        return self._start(taken, receiver, lease_ms, now_ms, name)

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
        """Like :meth:`acquire`, of one queue, for whoever is about to end the messages as the owner: without limits.

        ``offsets``: those of them that are ready; None: up to ``limit`` in their order.
        """
        if self.phase is not Phase.SERVING:
            return None
        partition = self.partition
        if offsets is None:
            try:
                taken = partition.take(queue, limit, self.settings_of(queue))
            except RowError:
                return None
        else:
            taken = partition.reserve(queue, offsets)
        if not taken:
            return None
        pending = self._start(taken, receiver, lease_ms, now_ms, name)
        pending.in_turn = False
        return pending

    def _room(self, queue: str, settings: QueueSettings, receiver: str, wanted: int, now_ms: int) -> int:
        """How many of the ``wanted`` messages the limits and the breaker of ``queue`` leave to ``receiver``."""
        flow = self.flows.get(queue)
        if flow is None:
            if len(self.flows) >= self._flows_max:
                self._forget_flows(now_ms)
            flow = self.flows[queue] = self._flow(queue)
        if settings.breaker_failures:
            self._expire(queue, flow, settings, now_ms)
            room = flow.breaker.room(now_ms)
            if room is not None:
                wanted = min(wanted, room)
                flow.refused |= not room
        room = flow.room(settings, receiver, wanted, self.number, self.limits.partitions)
        if room < wanted:
            self._expire(queue, flow, settings, now_ms)
            room = flow.room(settings, receiver, wanted, self.number, self.limits.partitions)
        return room

    def _forget_flows(self, now_ms: int) -> None:
        """A queue that has nothing in flight is made known again when it is asked for, but for failures that matter."""
        for queue, flow in list(self.flows.items()):
            breaker = flow.breaker
            failing = breaker.room(now_ms) == 0 or (breaker.failures and self.partition.has_ready(queue))
            failing = failing or flow.refused
            if not flow.offsets and not failing:
                del self.flows[queue]
        self._flows_max = 2 * len(self.flows) + FLOWS_SLACK

    def _flow(self, queue: str) -> Flow:
        """What is in flight of a queue that has limits since now, or whose partition was taken over."""
        flow, partition = Flow(self._breaker_of(queue)), self.partition
        for offset, delivered in partition.deliveries.items():
            if partition.leased(offset) and offset in partition.messages and partition.queue_of(offset) == queue:
                flow.offsets[offset] = delivered.receiver
                flow.by_receiver[delivered.receiver] += 1
                self._flow_of[offset] = queue
        return flow

    def _expire(self, queue: str, flow: Flow, settings: QueueSettings, now_ms: int) -> None:
        """A lease that ended without a word is a failure."""
        partition = self.partition
        for offset in flow.expired(lambda o: o in partition.reserved or partition.leased(o)):
            self._flow_of.pop(offset, None)
            probe = flow.is_probe(offset)
            if offset in partition.messages and partition.receives(offset):
                opened = flow.breaker.failed(settings.breaker_failures, settings.breaker_pause_ms, now_ms, probe)
                flow.refused |= opened
            else:
                flow.breaker.spared(probe)

    def _landed(self, marker: Marker | None, effect: list[int], now_ms: int) -> None:
        """Messages of queues with limits were acknowledged, given back or ended; None: not even started."""
        for offset in effect:
            queue = self._flow_of.pop(offset, None)
            flow = self.flows.get(queue) if queue is not None else None
            if flow is None or queue is None:
                continue
            flow.remove(offset)
            settings, probe = self.settings_of(queue), flow.is_probe(offset)
            if isinstance(marker, Release):
                if marker.counted:
                    opened = flow.breaker.failed(settings.breaker_failures, settings.breaker_pause_ms, now_ms, probe)
                    flow.refused |= opened
                else:
                    flow.breaker.spared(probe)
            elif isinstance(marker, End) and marker.outcome == "acked":
                flow.breaker.succeeded(probe)
            else:
                flow.breaker.spared(probe)
            if self.partition.has_ready(queue):
                self.partition.woken[queue] = None
            if not flow.offsets and not is_limited(settings):
                del self.flows[queue]

    def _wake_probes(self, now_ms: int) -> None:
        """Tell receivers that a breaker refused when its pause is over, or it was closed, here or elsewhere."""
        for queue, flow in self.flows.items():
            if flow.refused and flow.breaker.room(now_ms) != 0:
                flow.refused = False
                if self.partition.has_ready(queue):
                    self.partition.woken[queue] = None

    def _start(self, offsets: list[int], receiver: Any, lease_ms: int, now_ms: int, name: str) -> Pending:
        self._delivery += 1
        deliveries = self.partition.deliveries
        receives = max((deliveries[o].receives for o in offsets if o in deliveries), default=0) + 1
        start = Start(self.epoch, self._delivery, ranges_of(offsets), lease_ms, name, receives)
        pending = Pending(receiver, self._delivery, offsets, lease_ms, now_ms)
        parts = m.split(start)
        pending.parts = len(parts)
        pending.split = len(parts) > 1
        self._pending[self._delivery] = pending
        self.appends += parts
        return pending

    def _started(self, start: Start, effect: list[int], now_ms: int) -> None:
        pending = self._pending.get(start.delivery)
        if pending is None:
            return
        pending.effect += effect
        pending.parts -= 1
        if pending.parts == 0:
            del self._pending[start.delivery]
            self._resolve(pending, now_ms)

    def _resolve(self, pending: Pending, now_ms: int, lost: bool = False) -> None:
        """The start of ``pending`` is folded, or will never be."""
        effect = pending.effect
        if pending.split:
            # an older delivery may have ended some since the first part was folded
            effect = [o for o in effect if self.partition.is_current(o, self.epoch, pending.delivery)]
        self.partition.unreserve(pending.offsets)
        if len(effect) < len(pending.offsets):
            took = set(effect)
            rest = [o for o in pending.offsets if o not in took]
            self.partition.put_back(rest)
            if self._flow_of:
                self._landed(None, rest, now_ms)
        if effect and not self.partition.leased(effect[0]):
            # the lease was over before the reservation was (of length 0, or the start came in parts)
            self.partition.put_back(effect)
        receipt = (self.epoch, pending.delivery)
        until_ms = pending.sent_ms + pending.lease_ms
        if pending.receiver is DEAD_RECEIVER:
            spared: list[int] = []
            for offset in effect:
                (self.dead if self._exhausted(offset) else spared).append(offset)
            if spared:
                self.release(spared, receipt, counted=False)
            return
        if pending.receiver is NO_RECEIVER:
            if effect:
                self.release(effect, receipt, counted=False)
            return
        if effect and (lost or pending.gone or now_ms >= until_ms):
            self.release(effect, receipt, counted=False)
            effect = []
        if effect and pending.in_turn and (early := set(self.partition.out_of_turn(effect))):
            self.release(sorted(early), receipt, counted=False)
            effect = [o for o in effect if o not in early]
        self.handouts.append(Handout(pending.receiver, receipt, effect, until_ms))

    def _look_for_stall(self, now_ms: int) -> None:
        """Tell those who wait for starts in a log that takes nothing that nothing came of it: others may have more.

        What gets into the log after all is given back.
        """
        oldest = next(iter(self._pending.values()), None)
        if oldest is None or now_ms - max(oldest.sent_ms, self._folded_ms) < STALLED_MS:
            return
        self.stalled = True
        for pending in self._pending.values():
            if pending.receiver is not DEAD_RECEIVER and pending.receiver is not NO_RECEIVER:
                self.handouts.append(Handout(pending.receiver, (self.epoch, pending.delivery), [], now_ms))
                pending.receiver = NO_RECEIVER

    def _exhausted(self, offset: int) -> bool:
        """True if ``offset``, now held by the owner, was delivered often enough.

        An uncounted release may have been folded after the owner decided so.
        """
        partition = self.partition
        queue = partition.queue_of(offset) if offset in partition.messages else None
        maximum = self.settings_of(queue).max_receives if queue is not None else 0
        return bool(maximum) and partition.receives(offset) > maximum

    def release(
        self,
        offsets: list[int],
        receipt: tuple[int, int],
        delay_ms: int = 0,
        counted: bool = True,
    ) -> None:
        """Append that a folded delivery of ``offsets`` is given back."""
        self.appends += m.split(Release(receipt[0], receipt[1], ranges_of(offsets), delay_ms, counted))

    def extend(self, offsets: list[int], receipt: tuple[int, int], lease_ms: int) -> None:
        """Append that ``offsets`` are still being worked on."""
        self.appends += m.split(Keepalive(receipt[0], receipt[1], ranges_of(offsets), lease_ms))

    def acked(self, offsets: list[int], receipt: tuple[int, int]) -> None:
        """Append that ``offsets`` are finished."""
        self.appends += m.split(End(receipt[0], ranges_of(offsets), "acked", receipt[1]))

    def ended_as(self, outcome: m.Outcome, offsets: list[int]) -> None:
        """Append the owner's own end of ``offsets``."""
        if offsets and self.phase is Phase.SERVING:
            self.appends += m.split(End(self.epoch, ranges_of(sorted(offsets)), outcome))

    def purge(self, queue: str, before: int) -> None:
        """Append that everything of ``queue`` below ``before`` is finished."""
        if self.phase is Phase.SERVING:
            self.appends.append(Purge(self.epoch, queue, before))

    # ------------------------------------------------------------------ time

    def work(self, now_ms: int, ttl_queues: Iterable[str] = ()) -> Due | None:
        """Take the effects that are due: ends are appended here, dead letters are started, poison is listed."""
        if self.phase is not Phase.SERVING:
            return None
        self._look_for_stall(now_ms)
        if self.flows:
            self._wake_probes(now_ms)
        self._estimate(now_ms)
        try:
            due = self.partition.due(self.settings_of, ttl_queues, self.told)
        except RowError:
            return None
        self.ended_as("expired", due.expired)
        self.ended_as("purged", due.purged)
        self.poison += due.poison
        if due.dead:
            self._start(sorted(due.dead), DEAD_RECEIVER, DEAD_LEASE_MS, now_ms, DEAD_RECEIVER)
        return due

    def tick(self, now_ms: int, ttl_queues: Iterable[str] = ()) -> bool:
        """Append a tick if log time has to be known; True if one was appended. Call often: it limits itself.

        ``ttl_queues``: those with a time to live of their own that have something here.
        """
        since_tick = now_ms - self._ticked_ms
        if self.phase is not Phase.SERVING or since_tick < (TICK_MAX_MS if self._tick_out else TICK_MIN_MS):
            return False
        since_fold = now_ms - self._folded_ms
        due_ms = self.partition.next_lease_ms()
        if self._wants_time(now_ms, bool(list(ttl_queues))) or (due_ms is not None and since_fold >= due_ms):
            wanted = True
        elif since_fold < TICK_MAX_MS and self._step not in ("manifest", "retire"):
            wanted = self._step == "idle" and now_ms >= self._next_checkpoint_ms and self.partition.changed()
        else:
            wanted = due_ms is not None or self._step != "idle" or bool(self._sent) or self.partition.changed()
        if wanted:
            # two that are sent at once would prove each other right
            sure = self._doubt_since_ms is None and (not self._tick_out or since_tick > CLOCK_STEP_MS)
            self._ticked_ms = now_ms
            self._tick_out = True
            self.appends.append(Tick(sure=sure))
        return wanted

    def _wants_time(self, now_ms: int, has_ttl: bool) -> bool:
        """True if a tick has to tell broker time: other markers move the leases' clock, but say nothing about that."""
        if not self.told:
            return True
        due_ms = self.partition.next_time_ms()
        is_due = self.partition.undecided
        if due_ms is None and not has_ttl and not is_due:
            return False
        is_due = is_due or (due_ms is not None and now_ms - self._told_ms >= due_ms)
        if self._doubt_since_ms is None and (is_due or not self.partition.agreed):
            return True
        return now_ms - self._ticked_ms >= TICK_MAX_MS

    # ------------------------------------------------------------------ checkpoints

    def checkpoint_is_due(self, now_ms: int) -> bool:
        """True if :meth:`step` would begin a checkpoint now, and write up to a few MB."""
        due = now_ms >= self._next_checkpoint_ms or self.under_pressure
        return self._step == "idle" and self.phase is Phase.SERVING and due

    def step(self, now_ms: int) -> Step | None:
        """What to do next for the checkpoint; call in the event context of a marker of this partition.

        Raises :exc:`InternalError` if a step was not acknowledged in time: the worker must stop.
        """
        if self.phase is not Phase.SERVING:
            return None
        if self._step == "idle":
            if now_ms < self._next_checkpoint_ms and not self.under_pressure:
                return None
            limits = self.limits
            self._next_checkpoint_ms = now_ms + limits.checkpoint_ms
            pressed, self.under_pressure = self.under_pressure, False
            window = 0 if pressed else limits.window_offsets
            try:
                self._checkpoint = self.partition.checkpoint(self.epoch, now_ms, window, limits.persist_after_ms)
            except RowError:
                return None  # of a segment that was to be merged; and serves no more
            if self._checkpoint is None:
                return None
            if self._checkpoint.partial:
                self._next_checkpoint_ms, self.under_pressure = now_ms, pressed
            self._enter("rows" if self._checkpoint.rows else "manifest", now_ms)
            if self._checkpoint.rows:
                return WriteRows(self._checkpoint.rows)
        if self._step == "manifest":
            assert self._checkpoint is not None
            self._enter("manifest written", now_ms)
            return WriteManifest(rows.manifest_key(self.number, self.epoch), self._checkpoint.manifest)
        if self._step == "retire":
            checkpoint = self._checkpoint
            assert checkpoint is not None
            self._enter("idle", now_ms)
            own = rows.manifest_key(self.number, self.epoch)
            retire = Retire(
                checkpoint.obsolete + self._orphans,
                [key for key in self._old_manifests if key != own],
                checkpoint.position,
                checkpoint.markers_position,
            )
            self._checkpoint, self._orphans, self._old_manifests = None, [], []
            return retire
        if self._step != "idle" and now_ms - self._step_since_ms > self.limits.step_timeout_ms:
            raise InternalError(
                f"partition {self.number}: checkpoint step {self._step!r} was not acknowledged within "
                f"{self.limits.step_timeout_ms} ms"
            )
        return None

    def written(self, now_ms: int) -> None:
        """All that the last step wrote is acknowledged by the changelog."""
        if self.phase is not Phase.SERVING:
            return
        if self._step == "rows":
            self._enter("manifest", now_ms)
        elif self._step == "manifest written":
            self._enter("fence", now_ms)
            self._fences += 1
            self._fence = f"{self.nonce}/{self._fences}"
            self.appends.append(Tick(self._fence))

    def _enter(self, step: str, now_ms: int) -> None:
        self._step = step
        self._step_since_ms = now_ms
