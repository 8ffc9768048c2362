"""Lets partitions take turns at checkpoints, so that they do not all come in the same second, nor too many in each.

A checkpoint costs about the same for one message and for a thousand. So a worker makes a limited number of them a
second: with many busy partitions, each of them makes one more seldom, which then has more to write.

    wanted ─► ask: a slot, in which it may append what it needs to begin ─► begin: rows are written ─► end
"""

from __future__ import annotations

#: Partitions that write rows at once: each writes a few MB.
AT_ONCE = 2
#: Milliseconds between two slots at least: also what a checkpoint may take in the mean, of one worker.
PACE_MS = 20
#: Milliseconds after which a partition whose rows Kafka does not take no longer keeps others waiting.
HELD_MAX_MS = 5_000
#: Milliseconds for which a slot may be used, and for which a place is kept for one that does not try again.
SLOT_MS, PLACE_MS = 5_000, 2_000


class Turns:
    """Decides who may begin now: first come, first served. Times are the worker's monotonic milliseconds."""

    def __init__(self, at_once: int = AT_ONCE, pace_ms: int = PACE_MS) -> None:
        self._at_once = at_once
        self._pace_ms = pace_ms
        self._slots: dict[int, int] = {}  # partition -> from when on it may begin
        self._next_ms = 0  # the next slot
        self._active: dict[int, int] = {}  # partition -> since when it writes
        self._waiting: dict[int, int] = {}  # that found no room, in order; when they try again
        self._write_ms = 0.0  # how long one wrote of late

    def ask(self, number: int, now_ms: int) -> int:
        """How many milliseconds `number` has to wait before it may try to begin: 0 if its slot has come."""
        if number in self._waiting:
            return 0
        slot_ms = self._slots.get(number)
        if slot_ms is None or now_ms - slot_ms >= SLOT_MS:
            slot_ms = self._slots[number] = max(now_ms, self._next_ms)
            # rather fewer than can be written, so that those that found no room come in between
            self._next_ms = slot_ms + max(self._pace_ms, round(1.1 * self._write_ms / self._at_once))
        return max(0, slot_ms - now_ms)

    def begin(self, number: int, now_ms: int) -> int:
        """Returns 0 if `number` may write now, and has to call `end`. Else milliseconds after which to try again."""
        self._active = {n: since for n, since in self._active.items() if now_ms - since < HELD_MAX_MS}
        behind = self._before(number, now_ms) - (self._at_once - len(self._active))
        if behind >= 0:
            # rather too early than too late, when nobody would be there
            wait_ms = max(1, self._pace_ms, round(0.7 * (behind + 1) * self._write_ms / self._at_once))
            self._waiting[number] = now_ms + wait_ms
            return wait_ms
        self._slots.pop(number, None)
        self._waiting.pop(number, None)
        self._active[number] = now_ms
        return 0

    def _before(self, number: int, now_ms: int) -> int:
        """How many tried to begin before `number` and wait. Those that do not try again lose their places."""
        before, stale = 0, []
        for n, again_ms in self._waiting.items():
            if n == number:
                break
            if now_ms - again_ms >= PLACE_MS:
                stale.append(n)
            else:
                before += 1
        for n in stale:
            del self._waiting[n]
        return before

    def end(self, number: int, now_ms: int) -> None:
        """`number` has written its rows, or has none, or is not ours any more."""
        since_ms = self._active.pop(number, None)
        if since_ms is not None:
            self._write_ms += (now_ms - since_ms - self._write_ms) / 8
        self._slots.pop(number, None)
        self._waiting.pop(number, None)
