"""Lets partitions take turns at writing rows, so that their checkpoints do not all come in the same second."""

from __future__ import annotations

#: Partitions that write rows at once: each writes a few MB.
AT_ONCE = 2
#: Milliseconds after which a partition whose rows Kafka does not take no longer keeps others waiting.
HELD_MAX_MS = 5_000
#: Milliseconds for which a place in the queue is kept for a partition that does not ask again.
PLACE_MS = 2_000


class Turns:
    """Decides who may begin now: first come, first served. Times are the worker's monotonic milliseconds."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._active: dict[int, int] = {}  # partition -> since when
        self._queue: dict[int, int] = {}  # in order; when it last asked

    def take(self, number: int, now_ms: int) -> bool:
        """True if `number` may begin now; it has to call `end` afterwards. False: ask again soon."""
        self._active = {n: since for n, since in self._active.items() if now_ms - since < HELD_MAX_MS}
        self._queue[number] = now_ms
        if not self._is_first(number, self._at_once - len(self._active), now_ms):
            return False
        del self._queue[number]
        self._active[number] = now_ms
        return True

    def _is_first(self, number: int, free: int, now_ms: int) -> bool:
        """True if `number` is one of the first `free` in the queue. Does not go through the rest, which may be long."""
        stale: list[int] = []
        before = 0
        for n, asked_ms in self._queue.items():
            if before >= free:
                break
            if n == number:
                break
            if now_ms - asked_ms >= PLACE_MS:
                stale.append(n)
            else:
                before += 1
        for n in stale:
            del self._queue[n]
        return before < free

    @property
    def pause_ms(self) -> int:
        """Milliseconds after which to ask again: longer if many wait. The place in the queue is kept meanwhile."""
        return min(PLACE_MS // 2, 2 * len(self._queue))

    def end(self, number: int) -> None:
        """`number` has written its rows, or has none, or is not ours any more."""
        self._active.pop(number, None)
        self._queue.pop(number, None)
