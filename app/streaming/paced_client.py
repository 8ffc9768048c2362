"""Lets aiokafka's fetcher ask for the leader of a partition only at a bounded rate."""

from __future__ import annotations

import asyncio
from typing import Any

#: Seconds between two such questions: short compared with an election, and no load for a broker.
METADATA_PAUSE_S = 0.1


class PacedClient:
    """aiokafka's client for its fetcher: while a partition has no leader, it asks for one from time to time.

    The fetcher would ask again as soon as a broker has answered, hundreds of times a second.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._asked_s = -METADATA_PAUSE_S
        self._later: asyncio.Task[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def force_metadata_update(self) -> asyncio.Future[Any]:
        """A future of the update. Calls that come too soon share the next update."""
        if self._later is None or self._later.done():
            loop = asyncio.get_running_loop()
            pause_s = max(0.0, self._asked_s + METADATA_PAUSE_S - loop.time())
            self._asked_s = loop.time() + pause_s
            self._later = asyncio.ensure_future(self._update(pause_s))
        return asyncio.shield(self._later)

    async def _update(self, pause_s: float) -> Any:
        await asyncio.sleep(pause_s)
        return await self._client.force_metadata_update()
