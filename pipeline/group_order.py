"""The order of FIFO groups, as a part of the reference fold: nothing is handed out while an earlier message is open.

The order is no rule of the fold: a start out of order takes effect, and an owner that has lost a race (a lease was
extended at the last moment) takes it back. So a start is a fault only once its receipt was used. A duplicate is never
delivered, and holds up no one: what was never started counts as overtaken only if it is started later, or is no
duplicate at the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from marq.core.history import Envelope

#: Header with a message's group.
GROUP = "marq-group"
#: Most deliveries out of order that are remembered, in case somebody uses their receipts.
DISORDERED_MAX = 10_000

Receipt = tuple[int, int]
"""Epoch and delivery."""


class Overtaken(NamedTuple):
    """A message that was handed out before an earlier one of its group was done."""

    offset: int
    earlier: int
    receipt: Receipt


class GroupOrder:
    """Follows the groups of one partition.

    Args:
        fifo: FIFO queues, and since when: messages sent earlier are left out.
    """

    def __init__(self, fifo: Mapping[str, int]) -> None:
        self._fifo = fifo
        self._lane_of: dict[int, tuple[str, bytes]] = {}  # unfinished -> queue, group
        self._lanes: dict[tuple[str, bytes], dict[int, None]] = {}  # unfinished offsets, ascending
        self._disordered: OrderedDict[Receipt, dict[int, int]] = OrderedDict()  # offset -> an earlier one
        self._started: set[int] = set()  # of these earlier ones, those that were started at any time
        self._unsure: dict[int, Overtaken] = {}  # by an earlier one that was not started so far

    def __bool__(self) -> bool:
        return bool(self._fifo)

    def read(self, envelope: Envelope, queue: str | None) -> None:
        """Note an unfinished message that was read."""
        if queue is None or envelope.timestamp < self._fifo.get(queue, envelope.timestamp + 1):
            return
        group = b""
        for name, value in envelope.headers:
            if name == GROUP:
                group = value or b""
        self._lane_of[envelope.offset] = queue, group
        self._lanes.setdefault((queue, group), {})[envelope.offset] = None

    def finish(self, offsets: Iterable[int]) -> None:
        """Note messages that are done."""
        for offset in offsets:
            lane = self._lane_of.pop(offset, None)
            if lane is not None:
                offsets_of = self._lanes[lane]
                del offsets_of[offset]
                if not offsets_of:
                    del self._lanes[lane]
                self._unsure.pop(offset, None)

    def start(self, receipt: Receipt, effect: Iterable[int], receipts: Mapping[int, Receipt]) -> Iterator[Overtaken]:
        """Note a start that took effect. Yields what has overtaken its messages.

        Args:
            receipts: of all messages that were delivered and are not done, the last one.
        """
        highest: dict[tuple[str, bytes], int] = {}
        lane_of = self._lane_of
        for offset in effect:
            lane = lane_of.get(offset)
            if lane is None:
                continue
            highest[lane] = offset
            if offset in self._unsure:
                yield self._unsure.pop(offset)
            if self._disordered:
                self._started.add(offset)
        for lane, last in highest.items():
            earlier = next((o for o in self._lanes[lane] if o >= last or receipts.get(o) != receipt), last)
            if earlier >= last:
                continue
            found = self._disordered.setdefault(receipt, {})
            found.update((o, earlier) for o in effect if o > earlier and lane_of.get(o) == lane)
            if earlier in receipts:
                self._started.add(earlier)
            if len(self._disordered) > DISORDERED_MAX:
                self._disordered.popitem(last=False)
        if not self._disordered:
            self._started.clear()

    def use(self, receipt: Receipt, offsets: Iterable[int]) -> Iterator[Overtaken]:
        """Note that receipts were used. Yields those of messages that should have waited."""
        found = self._disordered.get(receipt)
        if found is None:
            return
        for offset in offsets:
            earlier = found.pop(offset, None)
            if earlier is None:
                continue
            overtaken = Overtaken(offset, earlier, receipt)
            if earlier in self._started:
                yield overtaken
            elif earlier in self._lane_of:
                self._unsure[earlier] = overtaken
        if not found:
            del self._disordered[receipt]

    def unsure(self) -> Iterator[Overtaken]:
        """At the end: what has overtaken messages that were never started. They may be duplicates."""
        yield from self._unsure.values()

    def forget_below(self, first: int) -> None:
        """Leave out messages below `first`."""
        self.finish([offset for offset in self._lane_of if offset < first])
