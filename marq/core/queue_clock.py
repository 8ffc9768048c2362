"""The clock that stamps messages, as their owner may believe it: by it, no message is older than it is.

The age of a message is the difference between two stamps of brokers, and any broker's clock may be wrong. So the owner
compares the stamps of what it reads with its own monotonic clock. It knows since when a record can be in the log at
the earliest: since the log was last seen to end in front of it. A stamp from before that time proves that the clock
which wrote it is behind. From then on the owner counts by that clock, until all messages that were read before are
done. A clock that is ahead only makes its own messages wait and live longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

#: Milliseconds by which clocks may differ without being treated as different: stamps are whole milliseconds, and clocks
#: are adjusted all the time.
DRIFT_MS = 100

#: Changes of the clock that are told apart while messages from before are unfinished. The oldest two become one.
RUNS_MAX = 16


class Run(NamedTuple):
    """Messages from ``start`` on were stamped by a clock that is at least ``ahead_ms`` ahead of the owner's own."""

    start: int
    ahead_ms: int


class QueueClock:
    """The clock of the queue topic's leader. Times without a word are milliseconds of the owner's monotonic clock."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._ahead_ms = 0  # the least of ``_runs``: by it counts what is unfinished
        self._early: tuple[int, int] | None = None  # by what was read while `begin` may come
        self._rise_ms: int | None = None  # the clock of the last chunk, if it was ahead of the present run's

    @property
    def has_changed(self) -> bool:
        """True while messages are unfinished that were read before a change of the clock."""
        return len(self._runs) > 1

    def begin(self, broker_ms: int, now_ms: int) -> None:
        """It is ``broker_ms`` now, by what the predecessor has told and the log since then. May be called again."""
        ahead_ms = broker_ms - now_ms
        if self._early is not None and ahead_ms > self._early[1] + DRIFT_MS:
            ahead_ms = self._early[0]
        self._use([Run(0, ahead_ms), *self._runs[1:]])

    def now_ms(self, now_ms: int) -> int:
        """What the clock shows now, at most."""
        return now_ms + self._ahead_ms

    def read(self, start: int, records: Sequence[Any], now_ms: int, since_ms: int) -> bool:
        """A chunk was read. Returns True if its stamps prove that the clock is behind what was believed.

        Args:
            start: the offset at which the chunk begins.
            records: the new records in it.
            since_ms: when the log was last seen to end at ``start`` or below: none of the records is older.
        """
        stamps = {record.timestamp for record in records}  # a batch has one
        stamps.discard(-1)
        if not stamps:
            return False
        first_ms, last_ms = min(stamps), max(stamps)
        if len(self._runs) < 2:  # `begin` may still come, or come again
            least, most = first_ms - now_ms, first_ms - since_ms
            if self._early is not None:
                least, most = min(least, self._early[0]), min(most, self._early[1])
            self._early = (least, most)
        if not self._runs:
            return False
        present_ms, rise_ms = self._runs[-1].ahead_ms, self._rise_ms
        self._rise_ms = None
        if first_ms - since_ms + DRIFT_MS < present_ms:
            before_ms = self._ahead_ms
            self._use([*self._runs, Run(start, first_ms - now_ms)])
            return self._ahead_ms < before_ms
        if last_ms - now_ms > present_ms + DRIFT_MS:
            # a single wrong stamp ahead must not make what follows it look old
            self._rise_ms = last_ms - now_ms
            if rise_ms is not None and rise_ms > present_ms + DRIFT_MS:
                self._use([*self._runs, Run(records[-1].offset + 1, min(rise_ms, self._rise_ms))])
        return False

    def forget(self, lowest: int) -> None:
        """All messages below ``lowest`` are done."""
        runs = self._runs
        while len(runs) > 1 and runs[1].start <= lowest:
            del runs[0]
        self._use(runs)

    def _use(self, runs: list[Run]) -> None:
        if len(runs) > RUNS_MAX:
            runs = [Run(runs[0].start, min(runs[0].ahead_ms, runs[1].ahead_ms)), *runs[2:]]
        self._runs = runs
        self._ahead_ms = min(run.ahead_ms for run in runs)
