"""Finds queues without receivers in any worker, and logs those whose messages wait for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from mode import Service

from app.cluster.peers import Peers, peer_call
from app.engine.catalog import Catalog
from app.service.census import Census
from marq.errors import MarqError
from marq.waiting import FORSAKEN_MS, RECENT_S, forsaken

#: Queues for which that is remembered.
REMEMBERED_MAX = 100_000
#: Seconds between checks for queues without a receiver.
LOOK_S = 30.0
#: Queues that are named in one line of the log.
LISTED_MAX = 20
#: Queues that are looked at before other work gets its turn.
TURN_QUEUES = 250


class RecentReceives:
    """The queues from which somebody received over HTTP not long ago."""

    def __init__(self) -> None:
        self._received_s: dict[str, float] = {}  # queue -> when a receive began; the latest ones last

    def note(self, queue: str) -> None:
        """Note that a receive begins."""
        now, received_s = time.monotonic(), self._received_s
        received_s.pop(queue, None)
        received_s[queue] = now
        while (first := next(iter(received_s))) != queue and (
            received_s[first] < now - RECENT_S or len(received_s) > REMEMBERED_MAX
        ):
            del received_s[first]

    def is_recent(self, queue: str) -> bool:
        """True if a receive of `queue` began not long ago."""
        return time.monotonic() - self._received_s.get(queue, -RECENT_S) < RECENT_S


class Receivers(Service):
    """Finds receivers here, and asks the other workers for theirs."""

    def __init__(
        self,
        catalog: Catalog,
        census: Census,
        peers: Peers,
        takers: Sequence[Callable[[str], bool]],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._catalog = catalog
        self._census = census
        self._peers = peers
        self._takers = takers  # parts of this worker that may receive from a queue: each returns True if it does
        self.without: dict[str, int] = {}  # queue here that nobody receives from -> its ready messages here
        peers.register(self)

    @peer_call("receivers")
    async def receivers_here(self, queues: list[str]) -> list[str]:
        """Those of `queues` that have receivers at this worker."""
        found = []
        for looked_at, queue in enumerate(queues, 1):
            if not looked_at % TURN_QUEUES:
                await asyncio.sleep(0)
            if self._is_received(queue):
                found.append(queue)
        return found

    def _is_received(self, queue: str) -> bool:
        return any(takes(queue) for takes in self._takers)

    async def of(self, queues: list[str]) -> dict[str, bool | None]:
        """For each queue, True if a worker has a receiver for it; None if one that may have did not answer."""
        answers = (await self._peers.everywhere(self.receivers_here, queues)).values() if queues else ()
        found = {queue for answer in answers if not isinstance(answer, MarqError) for queue in answer}
        missing = any(isinstance(answer, MarqError) for answer in answers)
        return {queue: True if queue in found else None if missing else False for queue in queues}

    async def look(self) -> None:
        """Find queues that have had ready messages for long, and no receiver. Logs each once."""
        counts, ages = self._census.counts(), await self._census.ages()
        waiting = {
            queue: states["ready"]
            for queue, states in counts.items()
            if queue
            and states["ready"]
            and ages.get(queue, 0) >= FORSAKEN_MS
            and not self._catalog.takes_dead_letters(queue)
        }
        for queue in await self.receivers_here(list(waiting)):
            del waiting[queue]
        found = await self.of(list(waiting))
        before = self.without
        self.without = {
            queue: ready
            for queue, ready in waiting.items()
            if found[queue] is False or (found[queue] is None and queue in before)
        }
        new = sorted(self.without.keys() - before.keys())
        if new:
            more = f" and {len(new) - LISTED_MAX} more" if len(new) > LISTED_MAX else ""
            listed = ", ".join(f"{queue} ({self.without[queue]})" for queue in new[:LISTED_MAX])
            self.log.warning("Messages wait, and %s", forsaken(f"{listed}{more}"))

    @Service.task
    async def _look_again(self) -> None:
        while not self.should_stop:
            await asyncio.sleep(LOOK_S)
            await self.look()
