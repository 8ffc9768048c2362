"""Choosing what is delivered next, and what is due to be ended by the owner. Reserved here, started by the owner."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop
from typing import NamedTuple

from marq.core import memory
from marq.core.backlog import Backlog, Lane
from marq.core.order import Order
from marq.core.policies import QueueSettings, SettingsOf, batch_cap, is_exhausted

LANES_AT_ONCE = 1_000
"""Groups of a queue with a TTL whose first message is looked at in one go."""


class Due(NamedTuple):
    """What the owner has to do now, as offsets. Computed from the state, so a crash neither loses nor repeats it."""

    dead: list[int]
    expired: list[int]
    purged: list[int]
    poison: list[tuple[int, str]]


class Deliveries(Order):
    """Reserves messages."""

    def take(
        self, queue: str, limit: int, settings: QueueSettings, shared_fate: bool = False, batch: int = 0
    ) -> list[int]:
        """Reserve up to ``limit`` ready messages of ``queue`` for a start (strict: never more).

        Redelivered ones get at most half while first deliveries wait, and the other way round. With ``shared_fate`` a
        batch that has a suspicious message in it is smaller (:func:`~marq.core.policies.batch_cap`), and all that is
        taken; else several batches of ``batch`` (0: one) may be taken at once. Groups take turns. In a FIFO queue
        messages come group by group, each in order, and a group that was taken from goes behind the others. Messages
        that are past their maximum or their TTL are left for :meth:`due`.
        """
        self.isolated = False
        self._reads = 0
        backlog = self.backlogs.get(queue)
        if backlog is None:
            if queue not in self.segments.queues:
                return []
            backlog = self._backlog(queue)
        suspicious = (batch or limit) if shared_fate else 0
        taken: list[int] = []
        try:
            if settings.fifo:
                self._take_in_order(backlog, taken, limit, settings, suspicious, batch)
            else:
                if self._fifo or self._apart is not None:
                    self._in_any_order(backlog)
                self._take(backlog, taken, limit, settings, suspicious)
        except Exception:  # a row can't be read: all is as if nothing had been asked for
            self.put_back(taken)
            raise
        self.reserved.update(taken)
        if not settings.fifo:
            taken.sort()
        return taken

    def _take(self, backlog: Backlog, taken: list[int], limit: int, settings: QueueSettings, suspicious: int) -> None:
        """:meth:`take` of a queue without order."""
        cap, queue = limit, backlog.name
        if backlog.groups:
            self._join(backlog)
        if backlog.again or backlog.again_turns:
            quota = limit // 2
            if limit == 1:
                quota = 1 if queue in self._again_turn else 0
                self._again_turn.symmetric_difference_update((queue,))
            cap = self._again(backlog, taken, quota, cap, settings, suspicious)
        if len(taken) < cap:
            self._first(backlog, taken, cap, settings)
        if (backlog.again or backlog.again_turns) and len(taken) < cap:
            cap = self._again(backlog, taken, cap, cap, settings, suspicious)

    def _again(
        self, backlog: Backlog, taken: list[int], quota: int, cap: int, settings: QueueSettings, batch: int
    ) -> int:
        """Redeliveries: one of each lane in turn."""
        turns = backlog.again_turns
        if not turns:
            return self._take_again(backlog, taken, quota, cap, settings, batch)
        while turns and len(taken) < min(quota, cap):
            lane = turns.popleft()
            before = len(taken)
            try:
                cap = self._take_again(lane, taken, min(quota, before + 1 if turns else cap), cap, settings, batch)
            except Exception:
                turns.appendleft(lane)
                raise
            lane.queued_again = bool(lane.again)
            if lane.again:
                turns.append(lane)
                if len(taken) == before:
                    break  # it is suspicious, and has to wait for a smaller batch
        return cap

    def _first(self, backlog: Backlog, taken: list[int], cap: int, settings: QueueSettings) -> None:
        """First deliveries: one of each lane in turn."""
        turns = backlog.turns
        if not turns:
            self._take_first(backlog, taken, cap, settings)
            return
        while turns and len(taken) < cap:
            lane = turns.popleft()
            lane.queued = False
            try:
                more = self._take_first(lane, taken, len(taken) + 1 if turns else cap, settings)
            except Exception:
                backlog.queue_up(lane)
                raise
            if not more:
                lane.queued = True
                turns.appendleft(lane)
                return
            if lane.fresh or lane.returned or self.segments.has_parked(backlog.name, lane.group):
                backlog.queue_up(lane)
            elif lane.group and not lane.again:
                del backlog.groups[lane.group]

    def _join(self, backlog: Backlog) -> None:
        """The lane of no group takes its turn with the others."""
        if backlog.fresh or backlog.returned or self.segments.has_parked(backlog.name):
            backlog.queue_up(backlog)
        if backlog.again:
            backlog.queue_up_again(backlog)

    def _take_again(
        self,
        lane: Lane,
        taken: list[int],
        quota: int,
        cap: int,
        settings: QueueSettings,
        batch: int,
    ) -> int:
        """Move up to ``quota`` redeliveries into ``taken``; how many there may be in all with them among them.

        ``batch``: size of the batches that share one fate, 0 if messages don't.
        """
        again, maximum = lane.again, settings.max_receives
        while again and len(taken) < min(quota, cap):
            offset = again[0]
            if not self.is_ready(offset):
                heappop(again)
                continue
            receives = self.receives(offset)
            if not receives:
                heappop(again)  # given back uncounted: it is among the returned ones, too
                continue
            if is_exhausted(receives, settings) or self._past_ttl(offset, settings):
                self._refuse(heappop(again))
                continue
            if batch and batch_cap(receives + 1, 2, maximum) < 2:
                own_cap = batch_cap(receives + 1, batch, maximum)
                if len(taken) + 1 > own_cap:
                    break
                cap = min(cap, own_cap)
                self.isolated = True
            self.reserved.add(offset)
            taken.append(heappop(again))
        return cap

    def _take_first(self, lane: Lane, taken: list[int], cap: int, settings: QueueSettings) -> bool:
        """Fill ``taken`` up to ``cap`` with what was never delivered; False if more would have to be read back."""
        name, segments = lane.backlog.name, self.segments
        messages, deliveries, reserved = self.messages, self.deliveries, self.reserved
        parked = name in segments.queues and segments.has_parked(name, lane.group)
        if not lane.returned and not parked and not self.ttls and not settings.ttl_ms and not lane.group:
            fresh = lane.backlog.fresh
            while fresh and len(taken) < cap:
                offset = fresh.popleft()
                if offset in messages and offset not in deliveries and offset not in reserved:
                    taken.append(offset)
            return True
        lowest = segments.first_parked(name, lane.group) if parked else None
        while len(taken) < cap:
            first = lane.peek_first()
            if lowest is not None and (first < 0 or lowest < first):
                if taken and not self._may_read():
                    return False
                self._unpark(lane)
                lowest = segments.first_parked(name, lane.group)
                continue
            if first < 0:
                return True
            delivered = deliveries.get(first)
            if not self.is_ready(first) or (delivered is not None and delivered.receives):
                lane.pop_first()
            elif self._past_ttl(first, settings):
                self._refuse(lane.pop_first())
            else:
                reserved.add(first)
                taken.append(lane.pop_first())
        return True

    def reserve(self, queue: str, offsets: Iterable[int]) -> list[int]:
        """Reserve those of ``offsets`` that are ready in ``queue``, ascending, whatever their place in it."""
        found: list[int] = []
        for offset in sorted(set(offsets)):
            parked = offset not in self.messages
            if not self._unfinished(offset) or offset not in self.messages:
                continue
            if self.is_ready(offset) and self.queue_of(offset) == queue:
                self.reserved.add(offset)
                found.append(offset)
                if parked:
                    self._note_out(queue, offset)
            elif parked:
                self._push(offset, self.receives(offset))  # it lost its place in the segment
        return found

    def reserve_current(self, offsets: Iterable[int], epoch: int, delivery: int) -> list[int]:
        """Reserve those of ``offsets`` that are with the receiver of this delivery: it must not come back meanwhile."""
        found: list[int] = []
        for offset in offsets:
            delivered = self.deliveries.get(offset)
            theirs = delivered is not None and delivered.leased and self.is_current(offset, epoch, delivery)
            if theirs and offset in self.messages and offset not in self.reserved:
                found.append(offset)
        self.reserved.update(found)
        return found

    def put_back(self, offsets: Iterable[int]) -> None:
        """End reservations; what is ready goes back to its place."""
        for offset in offsets:
            self.reserved.discard(offset)
            if self.is_ready(offset):
                self._push(offset, self.receives(offset))

    def unreserve(self, offsets: Iterable[int]) -> None:
        """End reservations of offsets on which a marker took effect."""
        self.reserved.difference_update(offsets)

    def due(self, settings_of: SettingsOf, ttl_queues: Iterable[str] = (), expire: bool = True) -> Due:
        """What is past its maximum receive count or TTL, is a dead letter's duplicate, or poison; reserved until done.

        Without ``expire`` nothing expires yet: it is not known how late it is.
        """
        dead: list[int] = []
        expired: list[int] = []
        refused, self._refused = self._refused, []
        if refused and self.estimate_ms > self.broker_ms:
            refused, self._refused = self._decided(refused, settings_of)
        self.put_back(refused)
        suspects, self._suspects = self._suspects + refused, []
        heads: list[int] = []
        try:
            if expire:
                while self._expiring and self._expiring[0][0] <= self.broker_ms:
                    suspects.append(heappop(self._expiring)[1])
                for queue in ttl_queues:
                    self._stale_heads(queue, settings_of(queue), heads)
            self._end_suspects(suspects + heads, settings_of, expire, dead, expired)
        except Exception:  # a row can't be read: all is as if nobody had looked
            self.put_back([*dead, *expired, *heads])
            self._suspects += suspects
            raise
        purged = [o for o in self.duplicates if o not in self.reserved]
        poison = [(o, why) for o, why in self.poison.items() if o not in self.reserved and o in self.messages]
        self.reserved.update(purged)
        self.reserved.update(o for o, _ in poison)
        return Due(dead, expired, purged, poison)

    def _end_suspects(
        self, suspects: Iterable[int], settings_of: SettingsOf, expire: bool, dead: list[int], expired: list[int]
    ) -> None:
        """Reserve those that are past their TTL or maximum."""
        now_ms = self.broker_ms
        for offset in suspects:
            placeless = offset not in self.messages and self.ttls.get(offset, now_ms + 1) <= now_ms
            if placeless and not expire:
                self._suspects.append(offset)
                continue
            if placeless:
                self._unfinished(offset)  # parked: only what is to be ended may lose its place
            if not self.is_ready(offset):
                continue
            queue_of = self.queue_of(offset)
            if queue_of is None:
                continue
            settings = settings_of(queue_of)
            if self._expired(offset, settings):
                if not expire:
                    self._suspects.append(offset)
                    continue
                expired.append(offset)
            elif is_exhausted(self.receives(offset), settings):
                dead.append(offset)
            else:
                continue
            self.reserved.add(offset)
            if placeless:
                self._note_out(queue_of, offset)

    def _expired(self, offset: int, settings: QueueSettings) -> bool:
        """True if the log says that the time to live of ``offset`` is over: an estimate is no reason to end it."""
        expires_ms = self._expires_ms(offset, settings)
        return expires_ms is not None and expires_ms <= self.broker_ms

    def _decided(self, refused: list[int], settings_of: SettingsOf) -> tuple[list[int], list[int]]:
        """What was refused, without and with that of which the log has yet to say whether it is past its TTL."""
        decided, open_ones = [], []
        for offset in refused:
            queue = self.queue_of(offset) if offset in self.messages else None
            settings = settings_of(queue) if queue is not None else None
            if settings is None or self._expired(offset, settings) or not self._past_ttl(offset, settings):
                decided.append(offset)
            else:
                open_ones.append(offset)
        return decided, open_ones

    def _stale_heads(self, queue: str, settings: QueueSettings, found: list[int]) -> None:
        """Never delivered messages of ``queue`` whose TTL, by the queue's setting, is over."""
        backlog = self.backlogs.get(queue)
        if backlog is None and queue in self.segments.queues:
            backlog = self._backlog(queue)
        if backlog is None or not settings.ttl_ms:
            return
        self._reads = 0
        self._stale_head(backlog, settings, found)
        if backlog.groups:
            # not all at once: there may be a hundred thousand
            if not backlog.looked_at:
                backlog.looked_at = list(backlog.groups)
            for group in backlog.looked_at[-LANES_AT_ONCE:]:
                if group in backlog.groups:
                    self._stale_head(backlog.groups[group], settings, found)
            del backlog.looked_at[-LANES_AT_ONCE:]

    def _stale_head(self, lane: Lane, settings: QueueSettings, found: list[int]) -> None:
        queue, fifo = lane.backlog.name, lane.backlog.fifo
        parked = self.segments.has_parked(queue, lane.group)
        lowest = self.segments.first_parked(queue, lane.group) if parked else None
        while True:
            first = lane.peek_first()
            if lowest is not None and (first < 0 or lowest < first):
                if self._reads >= memory.READS_MAX:
                    return
                self._unpark(lane)
                lowest = self.segments.first_parked(queue, lane.group)
                continue
            if first < 0:
                return
            if fifo:
                for offset in lane.fresh:  # they keep their places until they are done
                    if offset in self.messages:
                        if not self.is_ready(offset) or not self._expired(offset, settings):
                            break
                        found.append(offset)
                return
            if not self.is_ready(first) or self.receives(first):
                lane.pop_first()
            elif self._expired(first, settings):
                self._mixed.add(queue)  # it is at no place any more, should the order be kept later
                found.append(lane.pop_first())
            else:
                return
