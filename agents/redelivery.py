"""The timer agent: advances log time, so that leases, delays and TTLs end, and takes the effects that are due.

It appends a tick to a partition if something is due there. The fold of the tick makes messages ready again.
While nothing is due it sleeps longer, until something happens: an idle worker costs next to nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mode import Service

from agents.guard import stop_on_error
from app.engine.ownership import TIMER_MS, Ownership

#: Seconds between checks of what is due.
INTERVAL_S = TIMER_MS / 1000


class Redelivery(Service):
    """Runs as long as the worker."""

    def __init__(self, ownership: Ownership, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ownership = ownership

    @Service.task
    async def _run(self) -> None:
        while not self.should_stop:
            with stop_on_error(self._ownership):
                self._ownership.on_timer()
            await asyncio.sleep(INTERVAL_S)
            if rest_ms := self._ownership.rest_ms():
                await self._rest(rest_ms / 1000)

    async def _rest(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._ownership.due.on_touch = woken.set
        # costs half of `asyncio.timeout`, which ends a wait with an exception
        timer = asyncio.get_running_loop().call_later(seconds, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()
            self._ownership.due.on_touch = None
