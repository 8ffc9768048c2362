"""Puts messages that become ready into their lanes, and ends leases, delays and times to live."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from marq.core import state
from marq.core.backlog import PRUNE_SLACK, Backlog, Lane
from marq.core.counts import Counting
from marq.core.segments import Segment
from marq.core.state import DeliveryState, MessageState, block_of

#: Timers of finished messages that are kept before a pass removes them: a pass looks at all timers, so it must be rare.
TIMERS_SLACK = 100_000


class Lanes(Counting):
    """Keeps the order of deliveries, and the timers."""

    def _lane(self, backlog: Backlog, group: int) -> Lane:
        """The lane of a group, made if there is none. Lanes of empty groups are dropped when there are too many."""
        if group and group not in backlog.groups and len(backlog.groups) >= backlog.prune_at:
            self._prune(backlog)
        return backlog.lane(group)

    def _prune(self, backlog: Backlog) -> None:
        for group, lane in list(backlog.groups.items()):
            if lane.blocker < 0 and not self.segments.has_parked(backlog.name, group):
                lane.retain(self.messages)
                if not (lane.fresh or lane.returned or lane.out or any(o in self.messages for o in lane.again)):
                    del backlog.groups[group]
        kept = backlog.groups
        backlog.turns = deque(ln for ln in backlog.turns if not ln.group or kept.get(ln.group) is ln)
        backlog.again_turns = deque(ln for ln in backlog.again_turns if not ln.group or kept.get(ln.group) is ln)
        backlog.prune_at = 2 * len(kept) + PRUNE_SLACK

    def _clean(self) -> None:
        """Drop entries of finished messages. Entries are usually dropped when they are taken, but a queue may have no
        receiver. A pass comes after as many new entries as it has to look at, so its cost per entry is constant.
        """
        messages = self.messages
        self._listed, self._listed_max = 0, len(messages) + state.CLEAN_SLACK
        for backlog in self.backlogs.values():
            for lane in backlog.lanes():
                lane.retain(messages)
            if backlog.groups:
                self._prune(backlog)
        self._sweep()
        self._forget_counts()
        self._suspects = [o for o in dict.fromkeys(self._suspects) if o in messages or o in self.ttls]
        self._delayed = [entry for entry in self._delayed if entry[1] in self.delays]
        heapify(self._delayed)
        parked = self.segments.queues
        self.woken = {q: None for q in self.woken if not q or q in self.backlogs or q in parked}
        names = len(self._mixed) + len(self._fifo) + len(self._apart or ())
        if names > len(self.backlogs) + len(parked) + state.CLEAN_SLACK:
            here = {self.queue_of(o) for o in self.deliveries.keys() | self.reserved if o in messages}
            here |= self.backlogs.keys() | parked.keys()
            self._mixed &= here
            self._fifo &= here
            if self._apart is not None:
                self._apart = {q: offsets for q, offsets in self._apart.items() if q in here}

    def _sweep(self) -> None:
        """Structures of a queue exist only while it has something in them."""
        empty = [name for name, backlog in self.backlogs.items() if backlog.idle]
        if empty:
            for name in empty:
                del self.backlogs[name]
                self._again_turn.discard(name)
            self._by_key = {key: b for key, b in self._by_key.items() if b.name in self.backlogs}

    def _push(self, offset: int, receives: int) -> None:
        """``offset`` is ready again."""
        if offset in self.reserved:
            return  # the owner puts it back when the reservation ends
        queue = self.queue_of(offset)
        if queue is None:
            return
        self._listed += 1
        backlog = self._backlog(queue)
        if backlog.fifo:
            self._push_in_order(backlog, offset)
        else:
            lane = self._lane(backlog, self.group_of(offset))
            lane.push(offset, receives)
            if lane.group:
                (backlog.queue_up_again if receives else backlog.queue_up)(lane)
            self.woken[queue] = None
        if receives or offset in self.ttls:
            self._suspects.append(offset)

    def next_due_ms(self) -> int | None:
        """Milliseconds of log time until a message becomes ready or expires by itself; None if none will."""
        waits = [wait for wait in (self.next_lease_ms(), self.next_time_ms()) if wait is not None]
        return min(waits) if waits else None

    def next_lease_ms(self) -> int | None:
        """Milliseconds of the partition clock until the next lease or wait is over; None if there is none."""
        # what is finished by now is nothing to wait for
        while self._timers and not self._is_in_use(self._timers[0][2]):
            self._timed -= len(heappop(self._timers)[2].offsets)
        return max(0, self._timers[0][0] - self.clock_ms) if self._timers else None

    def next_time_ms(self) -> int | None:
        """Milliseconds of broker time until the next delay or time to live is over; None if there is none."""
        waits: list[int] = []
        while self._delayed and self._delayed[0][1] not in self.delays:
            heappop(self._delayed)
        while self._expiring and self._expiring[0][1] not in self.ttls:
            heappop(self._expiring)
        if self._delayed:
            waits.append(self._delayed[0][0] - self.broker_ms)
        if self._expiring:
            waits.append(self._expiring[0][0] - self.broker_ms)
        return max(0, min(waits)) if waits else None

    def _fire_delays(self) -> None:
        delayed = self._delayed
        while delayed and delayed[0][0] <= self.broker_ms:
            due_ms, offset = heappop(delayed)
            if self.delays.pop(offset, None) is not None and offset in self.messages:
                self.elapsed[offset] = due_ms
                self._count_change((offset,), MessageState.DELAYED, MessageState.READY)
                if self._fifo and (queue := self.queue_of(offset)) in self._fifo:
                    if type(self.messages[offset]) is Segment:
                        self._note_out(str(queue), offset)  # it may have lost its place when it was parked
                    self._moved((offset,))  # else it is at its place already
                    self.woken[str(queue)] = None
                    if offset in self.ttls:
                        self._suspects.append(offset)
                else:
                    self._push(offset, 0)

    # ------------------------------------------------------------------ groups whose order is kept

    def _is_one_ahead(self) -> bool:
        """True if a message that was not read yet is with a receiver, or may be again."""
        position, deliveries = self.position, self.deliveries
        if self._highest_delivered < position and not self.missed:
            return False
        delivered = deliveries.get(self._one_ahead)
        if delivered is not None and delivered.leased and self.is_unread(self._one_ahead):
            return True
        # seldom: the one that was known has ended, been given back or been read
        self._highest_delivered = max(deliveries, default=-1)
        self._one_ahead = max((o for o, h in deliveries.items() if h.leased and self.is_unread(o)), default=-1)
        return self._one_ahead >= 0

    def _deliver_again(self) -> None:
        """No unread message holds FIFO queues up any more: let them deliver."""
        self.woken.update(dict.fromkeys(self._held_up))
        self._held_up.clear()

    def _push_in_order(self, backlog: Backlog, offset: int) -> None:
        """A message that was taken, or about to be ended, is ready again: make sure that it is at its place."""
        lane = self._blockers.get(offset)
        if lane is None:
            self._note_out(backlog.name, offset)
            lane = self._lane(backlog, self.group_of(offset))
            if lane.queued or 0 <= lane.blocker < offset:
                return
        self._recheck(lane)

    def _note_out(self, queue: str, offset: int) -> None:
        """A message without a place in its lane was taken: note in its group that it is out."""
        backlog = self._backlog(queue)
        if not backlog.fifo:
            self._mixed.add(queue)  # should its order be kept later
            return
        lane = self._lane(backlog, self.group_of(offset))
        if not lane.out:
            lane.out = [offset]
            return
        i = bisect_left(lane.out, offset)
        if i == len(lane.out) or lane.out[i] != offset:
            lane.out.insert(i, offset)

    def _moved(self, offsets: Iterable[int]) -> None:
        """The state of messages has changed: examine the lanes that wait for one of them."""
        blockers = self._blockers
        for offset in offsets:
            lane = blockers.get(offset)
            if lane is not None:
                self._recheck(lane)

    def _recheck(self, lane: Lane) -> None:
        """Examine a lane that waited: it takes its turn, goes on waiting, or is empty."""
        backlog = lane.backlog
        self._unblock(lane)
        if self._in_order(lane):
            backlog.queue_up(lane)
            self.woken[backlog.name] = None
        elif lane.blocker < 0 and lane.group and not lane.queued:
            backlog.groups.pop(lane.group, None)

    def _block(self, lane: Lane, offset: int) -> None:
        """Take nothing from ``lane`` until the state of ``offset`` changes."""
        lane.blocker = offset
        self._blockers[offset] = lane

    def _unblock(self, lane: Lane) -> None:
        if lane.blocker >= 0:
            self._blockers.pop(lane.blocker, None)
            lane.blocker = -1

    def _deliverable(self, offset: int) -> bool:
        """True if ``offset`` is to be delivered, so that it has a place in the order of its group."""
        return offset in self.messages and offset not in self.poison and offset not in self.duplicates

    def _in_order(self, lane: Lane) -> bool:
        """True if the first message of ``lane`` may be taken; else the lane is blocked, or has nothing."""
        first = self._first_in_order(lane)
        if first < 0:
            return self.segments.has_parked(lane.backlog.name, lane.group)
        if not self.is_ready(first):
            lowest = self.segments.first_parked(lane.backlog.name, lane.group)
            if lowest is None or lowest > first:
                self._block(lane, first)
                return False
        return True

    def _first_in_order(self, lane: Lane) -> int:
        """The lowest message of ``lane`` in memory; -1 if there is none."""
        over = next((i for i, o in enumerate(lane.out) if self._deliverable(o)), len(lane.out))
        if over:
            lane.out = lane.out[over:]
        while lane.fresh and not self._deliverable(lane.fresh[0]):
            lane.next_fresh()
        if lane.out and (not lane.fresh or lane.out[0] <= lane.fresh[0]):
            return lane.out[0]
        return lane.fresh[0] if lane.fresh else -1

    def out_of_turn(self, offsets: list[int]) -> list[int]:
        """The offsets of a delivery that come after a message of their group which is not done and not in the delivery.

        Between the choice of messages and the fold of their start, the receiver of a lease that was over can revive it.
        Then an earlier message of the group is still with that receiver.
        """
        found: list[int] = []
        if not self._fifo:
            return found
        lanes: dict[Lane, list[int]] = {}
        for offset in offsets:
            queue = self.queue_of(offset) if offset in self.messages else None
            if queue in self._fifo:
                lanes.setdefault(self._lane(self._backlog(str(queue)), self.group_of(offset)), []).append(offset)
        for lane, taken in lanes.items():
            ours = set(taken)
            first = next((o for o in lane.out if o not in ours and self._deliverable(o)), taken[-1])
            found += [o for o in taken if o > first]
        return found

    def _set_timer(self, delivered: DeliveryState) -> None:
        heappush(self._timers, (delivered.deadline_ms, next(self._serial), delivered))
        self._timed += len(delivered.offsets)
        if self._timed > 2 * len(self.deliveries) + TIMERS_SLACK:
            self._clear_timers()

    def _clear_timers(self) -> None:
        """Drop timers of finished messages, and their offsets from other timers: a long lease may be acked at once."""
        deliveries, lowest = self.deliveries, min(self.deliveries)
        for _, _, delivered in self._timers:
            delivered.offsets = (
                [o for o in delivered.offsets if deliveries.get(o) is delivered]
                if delivered.offsets[-1] >= lowest
                else ()
            )
        self._timers = [timer for timer in self._timers if timer[2].offsets]
        heapify(self._timers)
        self._timed = sum(len(timer[2].offsets) for timer in self._timers)

    def _is_in_use(self, delivered: DeliveryState) -> bool:
        deliveries = self.deliveries
        return not deliveries.keys().isdisjoint(delivered.offsets) and any(
            deliveries.get(o) is delivered for o in delivered.offsets
        )

    def _end_wait(self) -> bool:
        """End the first lease, or wait after a release, that is over by now. Returns False if there is none."""
        timers = self._timers
        if not timers or not timers[0][2].is_over(self.clock_ms):
            return False
        delivered = heappop(timers)[2]
        self._timed -= len(delivered.offsets)
        self._count_over(delivered)
        self._come_back(delivered)
        return True

    def _come_back(self, delivered: DeliveryState) -> None:
        """The lease or the wait of ``delivered`` is over: make the messages that it still has ready."""
        deliveries, messages = self.deliveries, self.messages
        for offset in delivered.offsets:
            if deliveries.get(offset) is delivered and offset in messages:
                self._push(offset, delivered.receives)

    def _forget(self, offset: int) -> None:
        """Drop everything that is known of ``offset``: it is done."""
        self.delays.pop(offset, None)
        self.elapsed.pop(offset, None)
        self.ttls.pop(offset, None)
        self.poison.pop(offset, None)
        self.duplicates.discard(offset)
        self.reserved.discard(offset)

    def _touch(self, ranges: Sequence[int]) -> None:
        for i in range(0, len(ranges), 2):
            first, last = block_of(ranges[i]), block_of(ranges[i + 1] - 1)
            if first == last:
                self._dirty.add(first)
            else:
                self._dirty.update(range(first, last + 1))
