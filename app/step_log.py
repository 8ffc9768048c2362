"""Log lines for the ordinary steps of a worker: start, serving, rebalance, end."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepLog:
    """Logs one line for each step. `say` gets a format and its arguments, like a logger."""

    def __init__(self, say: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._assigned: set[int] | None = None  # None: nothing was assigned yet
        self._waiting: set[int] = set()  # assigned, and not served yet
        self._serving: set[int] = set()
        self._since_s = 0.0

    def assigned(self, numbers: set[int], total: int) -> None:
        """Called after a rebalance with the partitions, of `total`, that are assigned to this worker."""
        before, self._assigned = self._assigned, set(numbers)
        new, gone = numbers - (before or set()), (before or set()) - numbers
        if before is not None and not new and not gone:
            return
        if before is not None:
            self._say("rebalance: %s partitions come, %s go", len(new), len(gone))
        if not self._waiting:
            self._since_s = self._clock()
        self._waiting = (self._waiting & numbers) | new
        self._serving &= numbers
        if not self._waiting:
            self._tell(total)

    def settled(self, number: int, total: int, *, serving: bool) -> None:
        """Called when a partition is served from now on, or can't be served (which has a line of its own)."""
        self._serving.add(number) if serving else self._serving.discard(number)
        if number in self._waiting:
            self._waiting.remove(number)
            if not self._waiting:
                self._tell(total)

    def _tell(self, total: int) -> None:
        if self._assigned:
            self._say("serving %s of %s partitions, %.1f s", len(self._serving), total, self._clock() - self._since_s)
        else:
            self._say("serving none of %s partitions: other workers have them", total)
