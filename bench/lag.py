"""How long the event loop of a process stands still, and for how much of that it did not lack a processor.

    probe = LoopProbe(write)
    probe.start_once()      # in the loop

On a machine with more work than processors a thread waits for its turn; Linux says for how long (`schedstat`). A pause
of the loop is ours as far as this process ran meanwhile, or stood still with none of its threads waiting for a
processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

#: Seconds between two beats of a probe.
BEAT_S = 0.02
#: A beat is reported as a pause if it is at least so many milliseconds late.
TOLD_MS = 20.0


class Pause(NamedTuple):
    """The loop did nothing for `ms` up to `at_ms` (monotonic). For `ours_ms` of that it did not lack a processor."""

    at_ms: int
    ms: int
    ours_ms: int


class _Threads:
    """How long each Python thread of this process has waited for a processor so far."""

    def __init__(self) -> None:
        self._stats: dict[int, int] = {}  # thread -> file

    def look(self) -> None:
        """Find the threads that exist now."""
        running = {thread.native_id for thread in threading.enumerate() if thread.native_id is not None}
        for gone in self._stats.keys() - running:
            os.close(self._stats.pop(gone))
        for new in running - self._stats.keys():
            with contextlib.suppress(OSError):  # the thread has ended
                self._stats[new] = os.open(f"/proc/self/task/{new}/schedstat", os.O_RDONLY)

    def waited_ms(self) -> dict[int, float]:
        """Waiting time so far, by thread."""
        found: dict[int, float] = {}
        for thread, file in self._stats.items():
            with contextlib.suppress(OSError):
                found[thread] = int(os.pread(file, 80, 0).split()[1]) / 1e6
        return found


class LoopProbe:
    """Reports pauses of the event loop that it runs in."""

    def __init__(self, tell: Callable[[Pause], None]) -> None:
        self._tell = tell
        self._threads = _Threads()
        self._due_s = self._used_s = 0.0
        self._waited_ms: dict[int, float] = {}

    def start_once(self) -> None:
        """Start in the thread of the loop. Later calls do nothing."""
        if not self._due_s:
            self._threads.look()
            self._go_on()

    @property
    def waited_ms(self) -> float:
        """How long the thread of the loop had waited for a processor at the last beat, in milliseconds."""
        return self._waited_ms.get(threading.get_native_id(), 0.0)

    def _go_on(self) -> None:
        self._used_s, self._waited_ms = time.process_time(), self._threads.waited_ms()
        self._due_s = time.monotonic() + BEAT_S
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        late_ms = (time.monotonic() - self._due_s) * 1000
        if late_ms >= TOLD_MS:
            used_ms = (time.process_time() - self._used_s) * 1000
            before = self._waited_ms
            waited_ms = sum(ms - before.get(thread, ms) for thread, ms in self._threads.waited_ms().items())
            ours_ms = min(late_ms, max(used_ms, late_ms - waited_ms))
            self._tell(Pause(time.monotonic_ns() // 1_000_000, round(late_ms), round(ours_ms)))
            self._threads.look()
        self._go_on()
