"""Deliveries of FIFO queues: each group in the order of its offsets.

The next messages of a group are its first ones, up to a message that is in flight, about to be started, or waiting. If
that is the first one, the group is *blocked*: it takes no turns, and is examined again when the state of that message
changes. So a blocked group costs nothing, however many messages it has. FIFO is a setting, which the fold does not
know: an owner gathers what it has to know about a queue's groups when it first delivers from it.
"""

from __future__ import annotations

from heapq import merge

from marq.core.backlog import Backlog, Lane
from marq.core.memory import Memory
from marq.core.policies import QueueSettings, batch_cap, is_exhausted


class Order(Memory):
    """Takes messages in the order of their groups."""

    def at_hand(self, queue: str, limit: int) -> int:
        """How many messages, up to ``limit``, a take from a FIFO queue finds. It may find more, hardly ever less."""
        backlog, found = self.backlogs.get(queue), 0
        if backlog is None or not backlog.fifo or queue in self._held_up:
            return 0
        for lane in backlog.turns:
            if lane.group and self.segments.has_parked(queue, lane.group):
                return limit
            for offset in merge(lane.out, lane.fresh):
                if not self.is_ready(offset):
                    if self._deliverable(offset):
                        break  # it is in flight, or about to be: what follows waits for it
                    continue
                found += 1
                if found >= limit:
                    return limit
        return found

    def _take_in_order(
        self, backlog: Backlog, taken: list[int], limit: int, settings: QueueSettings, suspicious: int, batch: int
    ) -> None:
        """Take up to ``limit`` messages, group by group. A group is never in two batches of ``batch`` messages."""
        if self._is_one_ahead():
            # a message that was not read yet is in flight, and nobody knows of which group: reading has to go on
            self._held_up.add(backlog.name)
            return
        self._held_up.discard(backlog.name)
        if not backlog.fifo:
            self._keep_order(backlog)
        if suspicious:
            limit = min(limit, suspicious)
        cap, turns = limit, backlog.turns
        if backlog.blocker < 0 and (backlog.fresh or backlog.out or self.segments.has_parked(backlog.name)):
            backlog.queue_up(backlog)
        while turns and len(taken) < cap:
            lane = turns.popleft()
            lane.queued = False
            if not self._in_order(lane):
                if lane.blocker < 0 and lane.group:
                    backlog.groups.pop(lane.group, None)
                continue
            lane.out = [o for o in lane.out if self._deliverable(o)]
            try:
                cap = self._take_lane(lane, taken, cap, settings, suspicious, 1 if batch == 1 else cap)
            except Exception:
                backlog.queue_up(lane)
                raise
            if lane.blocker < 0:
                # what comes next has to be read back, or shares a batch with fewer: it is the first of the next one
                lane.queued = True
                turns.appendleft(lane)
                break

    def _take_lane(
        self, lane: Lane, taken: list[int], cap: int, settings: QueueSettings, suspicious: int, most: int
    ) -> int:
        """Reserve the first messages of a group that is not blocked. Returns the new limit for all that is taken."""
        before, got = len(taken), 0
        maximum = settings.max_receives
        while before + got < cap and got < most:
            offset, is_out = self._next_in_order(lane, got, before)
            if offset < 0:
                break
            if not self.is_ready(offset):
                if not got:
                    self._block(lane, offset)
                break
            receives = self.receives(offset)
            if is_exhausted(receives, settings) or self._past_ttl(offset, settings):
                if not got:
                    if not is_out:
                        lane.out = lane.out or []
                        lane.out.insert(0, lane.next_fresh())
                    self._refuse(offset)
                    self._block(lane, offset)
                break
            if suspicious and batch_cap(receives + 1, 2, maximum) < 2:
                own_cap = batch_cap(receives + 1, suspicious, maximum)
                if before + got + 1 > own_cap:
                    break
                cap = min(cap, own_cap)
                self.isolated = True
            if not is_out:
                lane.out = lane.out or []
                lane.out.insert(got, lane.next_fresh())
            self.reserved.add(offset)
            taken.append(offset)
            got += 1
        if got:
            self._block(lane, taken[before])
        return cap

    def _next_in_order(self, lane: Lane, taken: int, before: int) -> tuple[int, bool]:
        """The next message of ``lane`` after the ``taken`` first ones of ``out``, and whether it is in ``out``.

        -1: there is none, or another delivery has to read it back first.
        """
        name, group = lane.backlog.name, lane.group
        while True:
            while lane.fresh and not self._deliverable(lane.fresh[0]):
                lane.next_fresh()
            out = lane.out[taken] if taken < len(lane.out) else -1
            if lane.fresh and (lane.fresh[0] == out or (taken and lane.fresh[0] <= lane.out[taken - 1])):
                lane.next_fresh()  # it was put back, and is among those
                continue
            first = lane.fresh[0] if lane.fresh else -1
            is_out = out >= 0 and (first < 0 or out < first)
            if is_out:
                first = out
            lowest = self.segments.first_parked(name, group) if self.segments.has_parked(name, group) else None
            if lowest is None or 0 <= first < lowest:
                return first, is_out
            if taken + before and not self._may_read():
                return -1, False
            self._unpark(lane)

    def _refuse(self, offset: int) -> None:
        self.reserved.add(offset)
        self._refused.append(offset)

    def _past_ttl(self, offset: int, settings: QueueSettings) -> bool:
        """True if ``offset`` must not be delivered any more."""
        expires_ms = self._expires_ms(offset, settings)
        return expires_ms is not None and expires_ms <= max(self.broker_ms, self.estimate_ms)

    def _expires_ms(self, offset: int, settings: QueueSettings) -> int | None:
        expires_ms = self.ttls.get(offset)
        if expires_ms is None and settings.ttl_ms:
            expires_ms = int(self.record(offset).timestamp) + settings.ttl_ms
        return expires_ms

    # ------------------------------------------------------------------ a queue becomes one whose order is kept, or not

    def _keep_order(self, backlog: Backlog) -> None:
        """Put the messages of a queue that are not new at their places in their groups."""
        queue = backlog.name
        if self._apart is None:
            # of all queues at once: each would have to look through all that is in flight
            self._apart = {}
            for offset in self.deliveries.keys() | self.reserved:
                if offset in self.messages and (name := self.queue_of(offset)) is not None:
                    self._apart.setdefault(name, []).append(offset)
        if queue in self._mixed:
            self._mixed.discard(queue)
            known = {
                o for o in self.deliveries.keys() | self.reserved if o in self.messages and self.queue_of(o) == queue
            }
        else:
            known = set(self._apart.pop(queue, ()))
        backlog.fifo = True
        self._fifo.add(queue)
        for lane in backlog.lanes():
            known.update(lane.returned, lane.again)
        delayed = [o for o in self.delays if o in self.messages and self.queue_of(o) == queue and o not in known]
        places: dict[int, list[int]] = {}
        for offset in known:
            if offset in self.messages:
                places.setdefault(self.group_of(offset), []).append(offset)
        fresh: dict[int, set[int]] = {}
        for offset in delayed:
            fresh.setdefault(self.group_of(offset), set()).add(offset)
        for group in places.keys() | fresh.keys():
            self._lane(backlog, group)
        for lane in list(backlog.lanes()):
            lane.out = sorted(places.get(lane.group, ()))
            lane.returned, lane.again = [], []
            gone = known if known else ()
            lane.set_fresh(sorted({o for o in lane.fresh if o not in gone} | fresh.get(lane.group, set())))
            if lane.group:
                backlog.queue_up(lane)
        backlog.again_turns.clear()

    def _in_any_order(self, backlog: Backlog) -> None:
        """Forget the order of a queue. Called when a queue is read in any order."""
        self._mixed.add(backlog.name)
        self._held_up.discard(backlog.name)
        if not backlog.fifo:
            return
        backlog.fifo = False
        self._fifo.discard(backlog.name)
        for lane in list(backlog.lanes()):
            self._unblock(lane)
            for offset in lane.out:
                lane.push(offset, self.receives(offset) if offset in self.messages else 0)
            lane.out = []
            lane.queued_again = False
            lane.set_fresh([o for o in lane.fresh if o not in self.delays])
            if lane.group:
                backlog.queue_up(lane)
                if lane.again:
                    backlog.queue_up_again(lane)
