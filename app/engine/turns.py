"""Lets partitions take turns at checkpoints, so that they do not all come in the same second, nor too many in each.

A checkpoint costs about the same for one message and for a thousand. So a worker makes a limited number of them a
second: with many busy partitions, each of them makes one more seldom, which then has more to write.
"""

from __future__ import annotations

#: Partitions that write rows at once: each writes a few MB.
AT_ONCE = 2
#: Milliseconds between the beginnings of two checkpoints.
PACE_MS = 20
#: Milliseconds after which a partition whose rows Kafka does not take no longer keeps others waiting.
HELD_MAX_MS = 5_000
#: Milliseconds for which a place in the queue is kept for a partition that does not ask again when it was told to.
PLACE_MS = 2_000


class Turns:
    """Decides who may begin now: first come, first served. Times are the worker's monotonic milliseconds."""

    def __init__(self, at_once: int = AT_ONCE, pace_ms: int = PACE_MS) -> None:
        self._at_once = at_once
        self._pace_ms = pace_ms
        self._next_ms = 0  # earliest time of the next beginning
        self._write_ms = 0.0  # how long one took of late
        self._active: dict[int, int] = {}  # partition -> since when
        self._queue: dict[int, int] = {}  # in order; when it will ask again

    def ask(self, number: int, now_ms: int, *, urgent: bool = False) -> int:
        """Returns 0 if `number` may begin now, and has to call `end` afterwards. Else milliseconds until it asks again.

        Args:
            urgent: memory is short: it need not wait for others that wait, only for those that write.
        """
        self._active = {n: since for n, since in self._active.items() if now_ms - since < HELD_MAX_MS}
        free = self._at_once - len(self._active)
        before = 0 if urgent else self._before(number, now_ms)
        if before < free and (urgent or now_ms >= self._next_ms):
            self._begin(number, now_ms)
            return 0
        gap_ms = max(self._pace_ms, self._write_ms / self._at_once)
        # rather too early than too late, when nobody would be there
        wait_ms = max(1, self._next_ms - now_ms, round(0.7 * (before + (before >= free)) * gap_ms))
        self._queue[number] = now_ms + wait_ms
        return wait_ms

    def _begin(self, number: int, now_ms: int) -> None:
        self._queue.pop(number, None)
        self._active[number] = now_ms
        self._next_ms = now_ms + self._pace_ms

    def _before(self, number: int, now_ms: int) -> int:
        """How many wait in the queue before `number`. Those that did not ask again lose their places."""
        if number not in self._queue:
            self._queue[number] = now_ms
        stale = []
        before = 0
        for n, asks_ms in self._queue.items():
            if n == number:
                break
            if now_ms - asks_ms >= PLACE_MS:
                stale.append(n)
            else:
                before += 1
        for n in stale:
            del self._queue[n]
        return before

    def end(self, number: int, now_ms: int) -> None:
        """`number` has written its rows, or has none, or is not ours any more."""
        since_ms = self._active.pop(number, None)
        if since_ms is not None:
            self._write_ms += (now_ms - since_ms - self._write_ms) / 8
        self._queue.pop(number, None)
