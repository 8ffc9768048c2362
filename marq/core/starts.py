"""Deliveries of one owner, from the choice of messages to the hand-out.

    acquire ──► reserved, its start is to be appended ──folded, took effect──► handed out
                   │                                  ├──no effect──► back to its place
                   │                                  └──too late, nobody waits, out of turn──► released uncounted
                   └──never landed──► back to its place

Messages stay reserved until their start is folded, or a later record of the owner is: an append that failed may land.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from marq.core import markers as m
from marq.core.agenda import Agenda, Handout
from marq.core.deliveries import Due
from marq.core.flow import FlowControl, is_limited
from marq.core.markers import Start
from marq.core.partition import Partition
from marq.core.policies import SettingsOf, is_exhausted
from marq.core.ranges import ranges_of
from marq.core.ticker import Ticker
from marq.errors import InternalError, RowError

#: Milliseconds of the lease under which the owner has a message while its dead letter is copied: long, because a second
#: copy is made when it ends too early.
DEAD_LEASE_MS = 60_000

#: Milliseconds within which a delivery with a lease of 0, which is over at once, has to be handed out.
HAND_OUT_MS = 10_000

#: Milliseconds that a start waits, while nothing else is folded, before the markers log counts as stalled.
STALLED_MS = 1_500

DEAD_RECEIVER = "dlq"
#: The receiver of a start whose receiver was already told that it brings nothing.
NO_RECEIVER = None


class Pending:
    """A delivery whose start is on its way: reserved for ``receiver``, not handed out yet."""

    __slots__ = (
        "delivery",
        "effect",
        "gone",
        "in_turn",
        "lease_ms",
        "offsets",
        "order",
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
        self.gone = False  # nobody waits for it any more
        self.in_turn = True  # of a FIFO queue only the first of a group may be delivered
        self.order: list[int] | None = None  # group by group, of FIFO queues; None: by offset
        self.parts = 1  # markers of its start that are not folded yet
        self.split = False  # there were several: they may be in different records
        self.effect: list[int] = []

    def cancel(self) -> None:
        """The receiver went away: release the messages, uncounted, as soon as their start is folded."""
        self.gone = True


class Starts:
    """Chooses messages, starts their deliveries, and hands out those on which the start took effect.

    Times are the owner's monotonic clock.
    """

    def __init__(
        self, partition: Partition, settings_of: SettingsOf, flow: FlowControl, ticker: Ticker, agenda: Agenda
    ) -> None:
        self.epoch = -1
        self.pending: dict[int, Pending] = {}  # by the number of the delivery
        self.stalled = False  # the log takes nothing: nothing is begun until it does
        self._partition = partition
        self._settings_of = settings_of
        self._flow = flow
        self._ticker = ticker
        self._agenda = agenda
        self._last = 0  # number of the last delivery; none is used again, even if its append failed

    # ------------------------------------------------------------------ what is asked for

    def acquire(
        self,
        queues: Iterable[str],
        limit: int,
        receiver: Any,
        now_ms: int,
        *,
        lease_ms: int,
        shared_fate: bool,
        batch: int,
        name: str,
    ) -> Pending | None:
        """See :meth:`~marq.core.owner.Owner.acquire`."""
        if self.stalled:
            return None
        partition, told = self._partition, self._ticker.told
        taken: list[int] = []
        fifo = False
        self._ticker.estimate(now_ms)
        for queue in queues:
            settings, room = self._settings_of(queue), limit - len(taken)
            if not told and (settings.ttl_ms or partition.ttls or partition.elapsed):
                continue  # by the time that is known now, it may have expired, or a delay may go on
            if settings.fifo and shared_fate and taken:
                continue  # cut into calls by offset, its messages could be in two
            limited = is_limited(settings)
            if limited:
                room = self._flow.room(queue, settings, name, room, now_ms)
                if not room:
                    continue
            try:
                more = partition.take(queue, room, settings, shared_fate, batch)
            except RowError:
                partition.put_back(taken)
                return None  # and serves no more
            if partition.isolated:
                # a suspicious message shares its delivery with none of another queue
                if taken:
                    partition.put_back(more)
                    continue
                limit = 0
            elif settings.fifo and shared_fate and more:
                limit = 0
            if limited and more:
                self._flow.add(queue, more, name, now_ms, 2 * lease_ms + settings.breaker_pause_ms)
            taken += more
            fifo = fifo or settings.fifo
            if len(taken) >= limit:
                break
        if not taken:
            return None
        order = list(taken) if fifo else None
        taken.sort()
        pending = self._start(taken, receiver, lease_ms, now_ms, name)
        pending.order = order
        return pending

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
        """See :meth:`~marq.core.owner.Owner.acquire_to_end`."""
        partition = self._partition
        if offsets is None:
            try:
                taken = partition.take(queue, limit, self._settings_of(queue))
            except RowError:
                return None
        else:
            taken = partition.reserve(queue, offsets)
        if not taken:
            return None
        taken.sort()
        pending = self._start(taken, receiver, lease_ms, now_ms, name)
        pending.in_turn = False
        return pending

    def due(self, now_ms: int, ttl_queues: Iterable[str]) -> Due | None:
        """What the owner has to end now; None if a row can't be read."""
        self._ticker.estimate(now_ms)
        try:
            return self._partition.due(self._settings_of, ttl_queues, self._ticker.told)
        except RowError:
            return None

    def begin_dead(self, offsets: Iterable[int], now_ms: int) -> None:
        """Start messages for their dead letters."""
        self._start(sorted(offsets), DEAD_RECEIVER, DEAD_LEASE_MS, now_ms, DEAD_RECEIVER)

    def dying(self) -> Iterator[int]:
        """Messages that are being started for their dead letters."""
        for pending in self.pending.values():
            if pending.receiver is DEAD_RECEIVER:
                yield from pending.offsets

    def _start(self, offsets: list[int], receiver: Any, lease_ms: int, now_ms: int, name: str) -> Pending:
        self._last += 1
        deliveries = self._partition.deliveries
        receives = max((deliveries[o].receives for o in offsets if o in deliveries), default=0) + 1
        start = Start(self.epoch, self._last, ranges_of(offsets), lease_ms, name, receives)
        pending = Pending(receiver, self._last, offsets, lease_ms, now_ms)
        parts = m.split(start)
        pending.parts = len(parts)
        pending.split = len(parts) > 1
        self.pending[self._last] = pending
        self._agenda.appends += parts
        return pending

    # ------------------------------------------------------------------ what becomes of it

    def failed(self, start: Start) -> None:
        """The append of ``start`` failed or timed out. It may still land, but its receiver does not wait for that."""
        if start.delivery in self.pending:
            self.pending[start.delivery].cancel()

    def lost(self, start: Start) -> None:
        """``start`` is not in the log, or only a part of it."""
        pending = self.pending.pop(start.delivery, None)
        if pending is not None:
            self._resolve(pending, 0, lost=True)

    def folded(self, start: Start, effect: list[int], now_ms: int) -> None:
        """``start`` is folded, and took effect on the offsets of ``effect``."""
        pending = self.pending.get(start.delivery)
        if pending is None:
            return
        if effect and not pending.offsets[0] <= effect[0] <= effect[-1] <= pending.offsets[-1]:
            raise InternalError(f"partition {self._partition.number}: start {start.delivery} took effect on others")
        pending.effect += effect
        pending.parts -= 1
        if pending.parts == 0:
            del self.pending[start.delivery]
            self._resolve(pending, now_ms)

    def put_back(self, offsets: Iterable[int]) -> None:
        """An end of these messages was lost: put them back, except those that a later start has reserved."""
        starting = {offset for pending in self.pending.values() for offset in pending.offsets}
        self._partition.put_back([offset for offset in offsets if offset not in starting])

    def look_for_stall(self, now_ms: int, folded_ms: int) -> None:
        """Tell receivers whose starts wait in a stalled log that they get nothing, so that they ask other partitions.

        If a start gets into the log after all, its messages are released.

        Args:
            folded_ms: when a marker was folded last.
        """
        oldest = next(iter(self.pending.values()), None)
        if oldest is None or now_ms - max(oldest.sent_ms, folded_ms) < STALLED_MS:
            return
        self.stalled = True
        for pending in self.pending.values():
            if pending.receiver is not DEAD_RECEIVER and pending.receiver is not NO_RECEIVER:
                self._agenda.handouts.append(Handout(pending.receiver, (self.epoch, pending.delivery), [], now_ms))
                pending.receiver = NO_RECEIVER

    def stall_ms(self, folded_ms: int) -> int | None:
        """The time at which :meth:`look_for_stall` finds one, if nothing happens until then; None: never."""
        oldest = next(iter(self.pending.values()), None)
        return None if oldest is None else max(oldest.sent_ms, folded_ms) + STALLED_MS

    def stall_is_over(self) -> None:
        """The log takes records again."""
        self.stalled = False
        self._partition.woken[""] = None

    def unfolded(self, sent: set[int]) -> Iterator[tuple[int, list[int]]]:
        """Number and offsets of deliveries among those that were sent of which nothing is folded: they may land."""
        for pending in self.pending.values():
            if pending.delivery in sent and not pending.effect:
                yield pending.delivery, pending.offsets

    def unanswered(self) -> Iterator[tuple[int, list[int]]]:
        """Number and offsets of deliveries whose start is folded, all or in part, and that are not handed out."""
        for pending in self.pending.values():
            if pending.effect:
                yield pending.delivery, pending.offsets
        for handout in self._agenda.handouts:
            if handout.offsets:
                yield handout.receipt[1], handout.offsets
        dead: dict[int, list[int]] = {}
        for offset in self._agenda.dead:
            delivered = self._partition.deliveries.get(offset)
            if delivered is not None and delivered.epoch == self.epoch:
                dead.setdefault(delivered.delivery, []).append(offset)
        yield from dead.items()

    def _resolve(self, pending: Pending, now_ms: int, lost: bool = False) -> None:
        """The start of ``pending`` is folded, or will never be."""
        partition, agenda = self._partition, self._agenda
        effect = pending.effect
        if not partition.reserved.issuperset(pending.offsets):
            self._check_reserved(pending)
        if pending.split:
            # an older delivery may have ended some since the first part was folded
            effect = [o for o in effect if partition.is_current(o, self.epoch, pending.delivery)]
        partition.unreserve(pending.offsets)
        if len(effect) < len(pending.offsets):
            took = set(effect)
            rest = [o for o in pending.offsets if o not in took]
            partition.put_back(rest)
            if self._flow.in_flight:
                self._flow.landed(None, rest, now_ms)
        if effect and not partition.is_leased(effect[0]):
            # the lease was over before the reservation was (of length 0, or the start came in parts)
            partition.put_back(effect)
        receipt = (self.epoch, pending.delivery)
        if effect and not partition.is_current(effect[0], *receipt):
            self._check_current(effect[0], receipt)
        if pending.receiver is DEAD_RECEIVER:
            self._take_dead(effect, receipt)
            return
        if pending.receiver is NO_RECEIVER:
            if effect:
                agenda.release(effect, receipt, 0, counted=False)
            return
        until_ms = pending.sent_ms + (pending.lease_ms or HAND_OUT_MS)
        if effect and (lost or pending.gone or now_ms >= until_ms):
            agenda.release(effect, receipt, 0, counted=False)
            effect = []
        if effect and pending.in_turn and (early := set(partition.out_of_turn(effect))):
            agenda.release(sorted(early), receipt, 0, counted=False)
            effect = [o for o in effect if o not in early]
        if pending.order is not None and effect:
            took = set(effect)
            effect = [o for o in pending.order if o in took]
        agenda.handouts.append(Handout(pending.receiver, receipt, effect, until_ms))

    def _check_reserved(self, pending: Pending) -> None:
        """Messages are reserved from their choice until their start is folded, unless they are done.

        The owner's end of an earlier start, made for a dead letter, ends the reservation together with the message.

        Raises:
            InternalError: that is not so.
        """
        partition = self._partition
        lost = [o for o in pending.offsets if o not in partition.reserved and o in partition.messages]
        if lost:
            raise InternalError(f"partition {partition.number}: {lost[:10]} of a start are not reserved any more")

    def _check_current(self, offset: int, receipt: tuple[int, int]) -> None:
        """A message on which a start took effect has its delivery, or a later marker of the record has ended that.

        Raises:
            InternalError: that is not so.
        """
        delivered = self._partition.deliveries.get(offset)
        if delivered is not None and (delivered.epoch, delivered.delivery) < receipt:
            raise InternalError(f"{offset} is handed out as {receipt}, and its delivery is {delivered.as_tuple()}")

    def _take_dead(self, started: list[int], receipt: tuple[int, int]) -> None:
        """The owner has started these for their dead letters. Release those that need none any more."""
        spared: list[int] = []
        for offset in started:
            (self._agenda.dead if self._is_dead(offset) else spared).append(offset)
        if spared:
            self._agenda.release(spared, receipt, 0, counted=False)

    def _is_dead(self, offset: int) -> bool:
        """True if ``offset`` still has to become a dead letter. The owner's own start does not count as a receive.

        An uncounted release may have been folded since the owner decided.
        """
        partition = self._partition
        queue = partition.queue_of(offset) if offset in partition.messages else None
        return queue is not None and is_exhausted(partition.receives(offset) - 1, self._settings_of(queue))
