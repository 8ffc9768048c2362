"""How many messages of each queue are in which state, kept as they change it: to ask costs nothing, and is exact.

What was read and is not done counts, parked messages too. Duplicates don't: they are never delivered. Poison counts as
of the queue ``""``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from marq.core.segments import Segment
from marq.core.state import DeliveryState, MessageState, QueueCounts, State

#: Messages that are counted in one slice when a state was restored.
SLICE_MESSAGES = 10_000


class Counting(State):
    """Keeps the counts."""

    def counted(self, queue: str) -> QueueCounts:
        """The counts of a queue, which come into being."""
        counts = self.counts.get(queue)
        if counts is None:
            counts = self.counts[queue] = QueueCounts()
        return counts

    def _count_in(self, offset: int) -> None:
        """A message was read."""
        counts = self.counted(self.queue_of(offset) or "")
        counts.total += 1
        self._count_state(counts, self.state_of(offset), 1)

    def _count_out(self, offset: int) -> None:
        """A message is about to be done."""
        if offset not in self.messages:
            queue = self.segments.queue_of(offset) if offset < self.position else None
            if queue is not None:
                self.counted(queue).total -= 1
        elif offset not in self.duplicates:
            counts = self.counted(self.queue_of(offset) or "")
            counts.total -= 1
            self._count_state(counts, self.state_of(offset), -1)

    def _count_state(self, counts: QueueCounts, state: MessageState, number: int) -> None:
        if state is MessageState.IN_FLIGHT:
            counts.in_flight += number
        elif state is MessageState.DELAYED:
            counts.delayed += number

    def _count_change(self, offsets: Collection[int], old: MessageState, new: MessageState) -> None:
        """Messages have another state now; those that were not read yet don't count."""
        if old is new or not offsets:
            return
        if len(self.counts) == 1 and self._highest_delivered < self.position and not (self.duplicates or self.missed):
            # they are all of one queue, and were read: what most partitions are like costs least
            (counts,) = self.counts.values()
            self._count_state(counts, old, -len(offsets))
            self._count_state(counts, new, len(offsets))
            return
        for queue, number in self._by_queue(offsets).items():
            counts = self.counted(queue)
            self._count_state(counts, old, -number)
            self._count_state(counts, new, number)

    def _count_over(self, delivered: DeliveryState) -> None:
        """A lease, or the wait after a release, is over."""
        deliveries = self.deliveries
        over = [offset for offset in delivered.offsets if deliveries.get(offset) is delivered]
        if over:
            was = MessageState.IN_FLIGHT if delivered.leased else MessageState.DELAYED
            self._count_change(over, was, MessageState.READY)

    def _by_queue(self, offsets: Iterable[int]) -> dict[str, int]:
        """How many of these messages, of those that count, are of which queue."""
        messages, found = self.messages, dict[str, int]()
        if self.poison or self.duplicates or self.queue_id is not None:
            duplicates = self.duplicates
            for offset in offsets:
                if offset in messages and offset not in duplicates:
                    queue = self.queue_of(offset) or ""
                    found[queue] = found.get(queue, 0) + 1
            return found
        last_key, queue, number = b"", "", 0  # messages of one queue come in runs
        for offset in offsets:
            record = messages.get(offset)
            if record is None:
                continue
            if record.key == last_key:  # that of a segment is a text
                number += 1
                continue
            if number:
                found[queue] = found.get(queue, 0) + number
            queue, number = self.queue_of(offset) or "", 1
            last_key = b"" if type(record) is Segment else record.key
        if number:
            found[queue] = found.get(queue, 0) + number
        return found

    def _recount(self) -> Iterator[None]:
        """Count everything, in slices: a state was restored, in which nothing changes meanwhile."""
        self.counts.clear()
        for queue, number in self.segments.parked_counts().items():
            self.counted(queue).total += number
        offsets = iter(self.messages)
        while found := list(islice(offsets, SLICE_MESSAGES)):
            for offset in found:
                if offset not in self.duplicates:
                    self._count_in(offset)
            yield

    def unread_counts(self) -> dict[str, tuple[int, int, int]]:
        """What was counted beyond the position, by queue, as :meth:`.QueueCounts.as_tuple`."""
        broker_ms = self.broker_ms
        found = {queue: [one.count, 0, one.delayed(broker_ms) if one.due else 0] for queue, one in self.unread}
        for offset, queue in self.unread.delivered.items():
            state = self.state_of(offset)
            if queue in found and state in (MessageState.IN_FLIGHT, MessageState.DELAYED):
                found[queue][1 if state is MessageState.IN_FLIGHT else 2] += 1
        return {queue: (total, in_flight, delayed) for queue, (total, in_flight, delayed) in found.items()}

    def _forget_counts(self) -> None:
        """Queues that have nothing any more need none."""
        self.counts = {queue: counts for queue, counts in self.counts.items() if counts.total}
