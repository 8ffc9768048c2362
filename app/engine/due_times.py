"""When each partition of this worker has to be looked at next.

    something happens ─► touched ─┐
                                  ├─► take(): look, then `set` the next time, or none
    a time comes ─► one heap ─────┘

A partition with nothing pending has no time, and is looked at when something happens to it. So the timer's cost
depends on what is due, not on the number of partitions.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

#: The heap is cleaned when its outdated entries outnumber the valid ones by this.
SLACK = 64


class DueTimes:
    """The times of partitions, by number. Times are monotonic milliseconds."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []  # with outdated entries
        self._touched: dict[int, None] = {}
        #: Called once, at the next touch or new time: whoever waits until something happens sets it.
        self.on_touch: Callable[[], None] | None = None

    def touch(self, number: int) -> None:
        """Look at the partition soon. Call this whenever its next time may have become earlier."""
        self._touched[number] = None
        self._tell()

    def _tell(self) -> None:
        if self.on_touch is not None:
            self.on_touch()
            self.on_touch = None

    def set(self, number: int, at_ms: int | None) -> None:
        """The partition was looked at; the next time is `at_ms`, or when it is touched."""
        self._touched.pop(number, None)
        if at_ms is None:
            self._at.pop(number, None)
        elif self._at.get(number) != at_ms:
            self._at[number] = at_ms
            heappush(self._heap, (at_ms, number))
            self._tell()
            if len(self._heap) > 2 * len(self._at) + SLACK:
                self._heap = [(at, n) for n, at in self._at.items()]
                heapify(self._heap)

    def forget(self, number: int) -> None:
        """The partition is not ours any more."""
        self.set(number, None)

    def wait_ms(self, now_ms: int, most_ms: int) -> int:
        """How long nothing is to be looked at unless a partition is touched: 0 to `most_ms`."""
        if self._touched:
            return 0
        return max(0, min(most_ms, self._heap[0][0] - now_ms)) if self._heap else most_ms

    def take(self, now_ms: int) -> list[int]:
        """The partitions to look at now, each once. Call `set` for each."""
        heap, at = self._heap, self._at
        taken, self._touched = self._touched, {}
        while heap and heap[0][0] <= now_ms:
            when, number = heappop(heap)
            if at.get(number) == when:
                del at[number]
                taken[number] = None
        return list(taken)
