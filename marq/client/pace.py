"""How many messages a receiver may take at once to finish each well within its lease."""

from __future__ import annotations

#: Part of a lease in which messages taken together should be finished. The rest is for what goes wrong.
PART = 0.2
#: Messages taken ahead of a reader whose rate is not known yet.
FIRST = 10


class Pace:
    """For a receiver that takes several messages, works on them and acknowledges them together."""

    def __init__(self, lease_s: float, most: int) -> None:
        self.most = most
        self.limit = min(most, FIRST)
        self._target_s = lease_s * PART

    def took(self, count: int, seconds: float) -> None:
        """Record that `count` messages taken together were acknowledged `seconds` after they were asked for."""
        if seconds > self._target_s:
            # as many as would have been done in time; never more than now
            self.limit = max(1, min(self.limit, int(count * self._target_s / seconds)))
        elif count >= self.limit:
            self.limit = min(self.most, max(self.limit + 1, int(self.limit * min(2.0, self._target_s / seconds))))


class Ahead:
    """For a reader that gets one message after another: how many may wait for it unread."""

    def __init__(self, lease_s: float, most: int) -> None:
        self._most = most
        self._within_s = lease_s * PART
        self._began_s: float | None = None
        self._reads = 0
        self._rate: float | None = None  # messages read per second

    def limit(self, now_s: float, reads: int) -> int:
        """The number, after so many reads in all."""
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
