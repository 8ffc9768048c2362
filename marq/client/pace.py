"""How many messages a receiver may take at once, so that each is finished well within its lease."""

from __future__ import annotations

#: Part of a lease in which what was taken at once should be finished: the rest is for what goes wrong.
PART = 0.2
#: Messages taken ahead of a reader whose rate is not known yet.
FIRST = 10


class Pace:
    """For a receiver that takes some, works on them and acknowledges them together."""

    def __init__(self, lease_s: float, most: int) -> None:
        self.most = most
        self.limit = min(most, FIRST)
        self._target_s = lease_s * PART

    def took(self, count: int, seconds: float) -> None:
        """Messages that were taken at once are acknowledged, so long after they were asked for."""
        if seconds > self._target_s:
            # by what it would have been in time, and less if it was few that took so long
            self.limit = max(1, min(self.limit, int(count * self._target_s / seconds)))
        elif count >= self.limit:
            self.limit = min(self.most, max(self.limit + 1, int(self.limit * min(2.0, self._target_s / seconds))))


class Ahead:
    """For a reader that is given one message after the other: how many may wait for it unread."""

    def __init__(self, lease_s: float, most: int) -> None:
        self._most = most
        self._within_s = lease_s * PART
        self._began_s: float | None = None
        self._reads = 0
        self._rate: float | None = None  # messages read in a second

    def limit(self, now_s: float, reads: int) -> int:
        """How many, after so many reads in all."""
        if self._began_s is None:
            self._began_s, self._reads = now_s, reads
        elapsed, count = now_s - self._began_s, reads - self._reads
        enough = elapsed >= self._within_s / 4 or (self._rate is None and count >= FIRST / 2)
        if count and elapsed > 0 and enough:
            rate = count / elapsed
            self._rate = rate if self._rate is None else (self._rate + rate) / 2
            self._began_s, self._reads = now_s, reads
        elif not count and self._rate is not None and elapsed > 0:
            self._rate = min(self._rate, 1 / elapsed)  # not even one since then
            if elapsed > self._within_s:
                self._began_s = now_s
        if self._rate is None:
            return min(self._most, FIRST)
        return min(self._most, max(1, int(self._rate * self._within_s)))
