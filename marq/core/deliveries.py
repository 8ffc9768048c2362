"""Chooses what is delivered next, and what the owner has to end. Messages are reserved here; the owner starts them."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop
from typing import NamedTuple

from marq.core import memory
from marq.core.backlog import Backlog, Lane
from marq.core.order import Order
from marq.core.policies import QueueSettings, SettingsOf, batch_cap, is_exhausted

#: Groups of a queue with a time to live whose first message is examined in one call: there may be a hundred thousand.
LANES_AT_ONCE = 1_000


class Due(NamedTuple):
    """Offsets with which the owner has to do something now. They follow from the state, so a crash loses none."""

    dead: list[int]
    expired: list[int]
    purged: list[int]
    poison: list[tuple[int, str]]


class Deliveries(Order):
    """Reserves messages."""

    def take(
        self, queue: str, limit: int, settings: QueueSettings, shared_fate: bool = False, batch: int = 0
    ) -> list[int]:
        """Reserve up to ``limit`` ready messages of ``queue`` for a start; never more.

        While both first deliveries and redeliveries wait, each gets at least half. Groups take turns. In a FIFO queue
        messages come group by group, each in order, and a group that was taken from goes behind the others. Messages
        past their maximum or time to live are left for :meth:`due`.

        Args:
            shared_fate: the messages fail together. A batch with a suspicious message is then smaller
                (:func:`~marq.core.policies.batch_cap`), and it is all that is taken.
            batch: messages in a batch, of which several may be taken at once; 0: one batch.

        Raises:
            RowError: a row can't be read; nothing is reserved.
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
        """:meth:`take` for a queue without order."""
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
        """Take redeliveries, one of each lane in turn."""
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
        """Take first deliveries, one of each lane in turn."""
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
        """Let the lane without a group take its turn with the others."""
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
        """Move up to ``quota`` redeliveries into ``taken``. Returns the limit for all that is taken with them.

        ``batch`` is the size of batches whose messages fail together, 0 if they don't.
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
        """Fill ``taken`` up to ``cap`` with new messages. Returns False if more would have to be read back first."""
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
        """Reserve those of ``offsets`` that are ready in ``queue``, wherever they are in it. Returns them ascending."""
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
        """Reserve those of ``offsets`` that this delivery still has, so that they do not become ready. Returns them."""
        found: list[int] = []
        for offset in offsets:
            delivered = self.deliveries.get(offset)
            theirs = delivered is not None and delivered.leased and self.is_current(offset, epoch, delivery)
            if theirs and offset in self.messages and offset not in self.reserved:
                found.append(offset)
        self.reserved.update(found)
        return found

    def put_back(self, offsets: Iterable[int]) -> None:
        """End reservations. What is ready goes back to its place."""
        for offset in offsets:
            self.reserved.discard(offset)
            if self.is_ready(offset):
                self._push(offset, self.receives(offset))

    def unreserve(self, offsets: Iterable[int]) -> None:
        """End reservations of offsets on which a marker took effect."""
        self.reserved.difference_update(offsets)

    def due(self, settings_of: SettingsOf, ttl_queues: Iterable[str] = (), expire: bool = True) -> Due:
        """Reserve, until they are done, messages past their maximum receive count or time to live, duplicates, poison.

        Args:
            expire: False: nothing expires yet, because broker time is not known yet.
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

    @property
    def has_due(self) -> bool:
        """False if :meth:`due`, without ``ttl_queues``, would find nothing and change nothing."""
        if self._suspects or self._refused or (self._expiring and self._expiring[0][0] <= self.broker_ms):
            return True
        reserved, messages = self.reserved, self.messages
        return not (
            reserved.issuperset(self.duplicates) and all(o in reserved or o not in messages for o in self.poison)
        )

    def _end_suspects(
        self, suspects: Iterable[int], settings_of: SettingsOf, expire: bool, dead: list[int], expired: list[int]
    ) -> None:
        """Reserve those of ``suspects`` that are past their time to live or maximum receive count."""
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
            if placeless or queue_of not in self._fifo:
                self._note_out(queue_of, offset)  # should its order be kept later, it comes before what follows it

    def _expired(self, offset: int, settings: QueueSettings) -> bool:
        """True if the time to live of ``offset`` is over by the broker time in the log; an estimate does not count."""
        expires_ms = self._expires_ms(offset, settings)
        return expires_ms is not None and expires_ms <= self.broker_ms

    def _decided(self, refused: list[int], settings_of: SettingsOf) -> tuple[list[int], list[int]]:
        """Split refused messages: those that can be decided now, and those that wait for the log to tell the time."""
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
        """Add new messages of ``queue`` to ``heads`` whose time to live, by the queue's setting, is over."""
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
