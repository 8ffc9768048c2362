"""Handlers get messages of every partition in the cluster: from owners elsewhere, if this worker has too few.

    worker with handlers                  owner
      handlers(specs) ─────────────────►    records who handles what; answers for which handlers something is ready
                      ◄─────────────────  ready(handlers)   something became ready (nothing is reserved)
      take(spec, …)   ─────────────────►    starts deliveries and answers with their messages

So workers with different handlers can share one cluster. Acknowledgements, extensions and releases are markers, which
any worker writes. A lost call costs time, never a message: specs are sent again and again, and deliveries that were
started but not answered are released uncounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

from agents.remote_handlers import RENEW_S, Introduction, Ready, RemoteHandlers, Spec, Take, Taken
from app.cluster.peers import Peers, peer_call
from app.engine.ownership import Ownership
from marq.clock import now_ms
from marq.errors import MarqError
from marq.handlers import Handler

log = logging.getLogger(__name__)

#: Seconds after which an unanswered take no longer counts against a handler's room.
SLOW_S = 0.25


class Taker(Protocol):
    """A handler of this worker, as `agents.handlers` runs it."""

    handler: Handler
    fetching: dict[str, int]  # URL of another worker -> calls asked of it
    elsewhere: dict[str, None]  # URLs of workers with something ready, the next one to ask first

    @property
    def room(self) -> int:
        """Calls for which messages may be asked now."""

    def calls_of_start(self, room: int) -> int:
        """Calls that one start covers."""

    def arrived(self, taken: Taken, until_ms: int) -> None:
        """A delivery from another worker's partition arrived."""

    def run(self) -> None:
        """Start calls as the concurrency allows, and ask for more messages."""


class Elsewhere:
    """Handlers of this worker that take from other workers."""

    def __init__(self, ownership: Ownership, peers: Peers, takers: Sequence[Taker]) -> None:
        self.ownership = ownership
        self.peers = peers
        self._takers = takers
        self._closing = False
        self._specs = [
            Spec(h.name, h.queues, h.batch, h.visibility_timeout_ms, h.max_receives)
            for h in (taker.handler for taker in takers)
        ]
        self._told = asyncio.Event()
        self._turn = 0
        self.remote_handlers = RemoteHandlers(ownership, peers, self.on_ready)
        peers.register(self)

    async def renew(self) -> None:
        """Tell all owners what is handled here, now and again every `RENEW_S`."""
        while True:
            self._told.clear()
            if self._specs and not self._closing:
                urls = self.peers.others()
                for taker in self._takers:
                    for url in taker.elsewhere.keys() - set(urls):
                        del taker.elsewhere[url]
                await asyncio.gather(*(self._introduce(url) for url in urls))
            self.remote_handlers.expire()
            # not `wait_for`: in Python 3.11 it loses a cancellation that comes as the event does
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._told.wait()

    def close(self) -> None:
        """Stop taking from other workers, and letting them take from here."""
        self._closing = True
        self.remote_handlers.close()

    def renew_soon(self) -> None:
        """Called when partitions changed hands."""
        self._told.set()

    async def _introduce(self, url: str) -> None:
        try:
            answer = await self.peers.call(
                url, self.remote_handlers.on_handlers, Introduction(self.peers.url, self._specs)
            )
        except MarqError as exc:
            log.debug("%s", exc)
            return
        self._became_ready(url, answer.ready)

    @peer_call("ready")
    async def on_ready(self, told: Ready) -> None:
        """Called by another worker that has something for handlers here."""
        self._became_ready(told.url, told.ready)

    def _became_ready(self, url: str, numbers: list[int]) -> None:
        for number in numbers:
            taker = self._takers[number]
            taker.elsewhere[url] = None
            taker.run()

    def goes_first(self, taker: Taker) -> bool:
        """True if it is the turn of partitions elsewhere whose workers don't have this handler."""
        members = self.peers.members()
        theirs = sum(
            len(members.get(url, ()))
            for url in taker.elsewhere
            if not any(spec.name == taker.handler.name for spec in self.remote_handlers.specs_of(url))
        )
        self._turn += 1
        return self._turn % (theirs + max(1, len(self.ownership.owned))) < theirs

    def fetch(self, taker: Taker) -> None:
        """Ask other workers for as much as there is room for, with one call at a time to each."""
        for url in list(taker.elsewhere):
            room = taker.room
            if room <= 0:
                return
            if url not in taker.fetching:
                taker.fetching[url] = taker.calls_of_start(room)
                self.ownership.spawn(self._fetch(taker, url))

    async def _fetch(self, taker: Taker, url: str) -> None:
        calls, asked_ms = taker.fetching[url], now_ms()
        slow = asyncio.get_running_loop().call_later(SLOW_S, self._is_slow, taker, url)
        found: list[Taken] = []
        try:
            found = await self.peers.call(
                url, self.remote_handlers.on_take, Take(self.peers.url, self._takers.index(taker), calls)
            )
        except MarqError as exc:
            log.info("%s", exc)
        finally:
            slow.cancel()
            taker.fetching.pop(url, None)
        if not found:
            taker.elsewhere.pop(url, None)  # it will say when there is more
        else:
            taker.elsewhere[url] = taker.elsewhere.pop(url, None)  # next time others go first
        for taken in found:
            # counted from before the call: the lease began later
            taker.arrived(taken, asked_ms + taken.lease_ms)
        taker.run()

    def _is_slow(self, taker: Taker, url: str) -> None:
        """A worker that is slow to answer no longer takes room from others."""
        taker.fetching[url] = 0
        taker.run()
