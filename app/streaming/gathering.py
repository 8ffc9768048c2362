"""Fewer and larger fetches while nobody waits for what they bring.

A broker answers a fetch as soon as it has one record. So under load there are hundreds of fetches a second, each with a
round trip, a hop between two threads, and an event for each partition. Nobody waits for most of what a busy worker
reads: markers that it wrote itself and has folded already, and messages behind those that are ready.

    records handed over ─► gather for `GATHER_S` ─► next fetch
                             │ hurry(): somebody waits
                             └─► next fetch at once, and no gathering for `CALM_S`, or not before the next one

Whoever has to wait for a record that is not read yet calls `hurry`: a receive that finds nothing, an own append behind
a record that is not folded. Where receivers are faster than senders there are no pauses at all. A call that is
forgotten makes somebody wait `GATHER_S` longer. It must not make an answer wrong: nothing may conclude from silence
that there are no records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: Seconds between the records of a fetch and the next fetch of their broker.
GATHER_S = 0.01
#: Seconds without such pauses after somebody had to wait.
CALM_S = 1.0


class Gathering:
    """The pauses of a thread that fetches. `call_soon` runs a function in that thread."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._hurried_s = float("-inf")
        self._skips = False  # the next pause
        self._pauses: set[asyncio.Future[None]] = set()

    def hurry(self, *, lasting: bool = True) -> None:
        """Somebody waits for what is not read yet. Called in the main thread.

        Args:
            lasting: more may be waited for soon, so there are no pauses for a while. Else one fetch brings all that is
                waited for.
        """
        if lasting:
            self._hurried_s = time.monotonic()
        else:
            self._skips = True  # the answer on its way may have been made too early
        if self._pauses:
            self._call_soon(self._end_all)

    async def pause(self) -> None:
        """Wait until more has gathered, unless somebody waits for it. Called in the thread that fetches."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        self._pauses.add(over)  # before the look at the time: `hurry` looks at both in the other order
        timer = loop.call_later(GATHER_S, _end, over)
        try:
            skips, self._skips = self._skips, False
            if not skips and time.monotonic() - self._hurried_s >= CALM_S:
                await over
                self._skips = False
        finally:
            timer.cancel()
            self._pauses.discard(over)

    def _end_all(self) -> None:
        for over in self._pauses:
            _end(over)


def _end(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
