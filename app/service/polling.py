"""Messages for receivers that wait here, from the partitions of other workers; and the other way round.

    asked worker                         owner
      watch(queues) ───────────────────►   notes who wants to know; says what is ready now
                    ◄─────────────────── wake(queues)   something became ready (nothing is reserved)
      receive(queue, …) ───────────────►   takes what is there; never asks a third worker

A call that gets lost costs time, never a message: watches end by themselves and are renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from app.cluster.peers import Peers, peer_call
from marq.errors import MarqError

log = logging.getLogger(__name__)

#: Seconds that a watch lasts unless it is renewed …
WATCH_S = 10.0
#: … and after which it is.
RENEW_S = 2.0
#: First pause after a look at other workers that had something, but gave nothing; it doubles.
FRUITLESS_S = 0.005
#: Receives of one queue under way at one other worker.
FETCHES_MAX = 8
#: Seconds between looks for watches that were not renewed.
EXPIRE_S = 1.0


class Watch(msgspec.Struct):
    """Which queues another worker wants messages of. Without a URL it only asks what is ready now."""

    queues: list[str]
    url: str


class Ready(msgspec.Struct):
    """Those queues of a watch that have something ready now."""

    ready: list[str]


class Wake(msgspec.Struct):
    """Queues that have something ready now."""

    queues: list[str]


class Receivers(Protocol):
    """Who waits here, and what is here."""

    def waiting_count(self, queue: str) -> int:
        """How many receivers wait here for `queue`."""

    def waited_for(self) -> list[str]:
        """Queues that receivers wait for here."""

    def has_ready(self, queue: str) -> bool:
        """True if a partition of this worker may have something for a receiver of `queue`."""

    async def fetch(self, queue: str, url: str) -> bool:
        """Take what another worker has right now for the first who waits here; False if that was nothing."""


class PeerPolling:
    """Both sides: receivers here that ask others, and partitions here that others ask."""

    def __init__(self, receivers: Receivers, peers: Peers, spawn: Callable[[Any], Any]) -> None:
        self._receivers = receivers
        self._peers = peers
        self._spawn = spawn
        self._closing = False
        # as one who waits
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._woken: dict[str, asyncio.Event] = {}
        self._to_watch: dict[str, dict[str, asyncio.Future[bool]]] = {}
        self._watching: set[str] = set()  # URLs with a watch call under way
        # as an owner
        self.watchers: dict[str, dict[str, float]] = {}  # queue -> URL -> until when
        self._to_wake: dict[str, set[str]] = {}
        self._expiry: asyncio.TimerHandle | None = None
        peers.register(self)

    # ------------------------------------------------------------------ one who waits

    def poll_peers(self, queue: str) -> None:
        """Receivers wait here for `queue`: look for messages at the other workers until nobody waits any more."""
        if queue not in self._polls and (self._peers.others() or self._peers.rebalancing):
            self._start_poll(queue)

    def _start_poll(self, queue: str) -> None:
        self._woken[queue] = asyncio.Event()
        task = self._polls[queue] = asyncio.ensure_future(self._poll(queue))
        task.add_done_callback(lambda done: self._end_poll(queue, done))

    def _end_poll(self, queue: str, done: asyncio.Task[None]) -> None:
        self._polls.pop(queue, None)
        self._woken.pop(queue, None)
        if done.cancelled():
            return
        if done.exception() is not None:
            log.error("Looking for messages of %r elsewhere failed: %r", queue, done.exception())
            asyncio.get_running_loop().call_later(RENEW_S, self._poll_again, queue)
            return
        # a receive that began to wait between the poll's last look and this found the poll still there
        self._poll_again(queue)

    def _poll_again(self, queue: str) -> None:
        if self._receivers.waiting_count(queue) and not self._closing:
            self.poll_peers(queue)

    async def _poll(self, queue: str) -> None:
        receivers, woken, pause_s = self._receivers, self._woken[queue], FRUITLESS_S
        while (waiting := receivers.waiting_count(queue)) and not self._closing:
            woken.clear()
            urls = await self.ready_at(queue)
            each = min(-(-waiting // max(1, len(urls))), FETCHES_MAX)
            if any(await asyncio.gather(*(receivers.fetch(queue, url) for url in urls for _ in range(each)))):
                pause_s = FRUITLESS_S
                continue
            # what is there may be reserved, or held up by a limit
            pause_s = min(pause_s * 2, RENEW_S) if urls else RENEW_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), pause_s)

    async def ready_at(self, queue: str, watch: bool = True) -> list[str]:
        """Which other workers have something ready of `queue`; all are asked to tell when that changes."""
        urls = self._peers.others()
        if not urls:
            return []
        if watch:
            answers = await asyncio.gather(*(self._watch(url, queue) for url in urls))
        else:
            found = await self._peers.ask_all(urls, self.on_watch, Watch([queue], ""))
            answers = [not isinstance(answer, MarqError) and queue in answer.ready for answer in found]
        return [url for url, ready in zip(urls, answers, strict=True) if ready]

    def _watch(self, url: str, queue: str) -> asyncio.Future[bool]:
        """Watches of one turn of the loop, and those that come while a call is under way, go in one call."""
        waiting = self._to_watch.setdefault(url, {})
        future = waiting.get(queue)
        if future is None:
            future = waiting[queue] = asyncio.get_running_loop().create_future()
        if url not in self._watching:
            self._watching.add(url)
            asyncio.get_running_loop().call_soon(lambda: self._spawn(self._send_watches(url)))
        return future

    async def _send_watches(self, url: str) -> None:
        try:
            while waiting := self._to_watch.pop(url, None):
                ready: set[str] = set()
                try:
                    answer = await self._peers.call(url, self.on_watch, Watch(list(waiting), self._peers.url))
                    ready.update(answer.ready)
                except MarqError as exc:
                    log.debug("%s", exc)
                for queue, future in waiting.items():
                    if not future.done():
                        future.set_result(queue in ready)
        finally:
            self._watching.discard(url)

    @peer_call("wake")
    async def on_wake(self, wake: Wake) -> None:
        """Another worker has something that was watched."""
        for queue in wake.queues:
            event = self._woken.get(queue)
            if event is not None:
                event.set()

    def members_changed(self) -> None:
        """A rebalance has ended: those who wait have to ask the new owners."""
        for event in self._woken.values():
            event.set()
        for queue in self._receivers.waited_for():
            self.poll_peers(queue)

    # ------------------------------------------------------------------ an owner

    @peer_call("watch")
    async def on_watch(self, watch: Watch) -> Ready:
        """Another worker wants messages: what is ready now, and later a `wake`."""
        loop = asyncio.get_running_loop()
        ready = []
        for queue in watch.queues:
            if self._receivers.has_ready(queue):
                ready.append(queue)
            if watch.url:
                self.watchers.setdefault(queue, {})[watch.url] = loop.time() + WATCH_S
        if self.watchers and self._expiry is None:
            self._expiry = loop.call_later(EXPIRE_S, self._expire)
        return Ready(ready)

    def tell(self, queue: str) -> None:
        """`queue` has something ready here: tell those who watch it, once."""
        urls = self.watchers.pop(queue, None)
        if not urls:
            return
        for url in urls:
            queues = self._to_wake.get(url)
            if queues is None:
                queues = self._to_wake[url] = set()
                asyncio.get_running_loop().call_soon(self._spawn_wakes, url)
            queues.add(queue)

    def _spawn_wakes(self, url: str) -> None:
        self._spawn(self._send_wakes(url))

    async def _send_wakes(self, url: str) -> None:
        queues = self._to_wake.pop(url, None)
        if queues:
            try:
                await self._peers.call(url, self.on_wake, Wake(list(queues)))
            except MarqError as exc:
                log.debug("%s", exc)

    def _expire(self) -> None:
        """End the watches of workers that don't renew them."""
        now = asyncio.get_running_loop().time()
        for queue, urls in list(self.watchers.items()):
            for url, until in list(urls.items()):
                if until < now:
                    del urls[url]
            if not urls:
                del self.watchers[queue]
        self._expiry = asyncio.get_running_loop().call_later(EXPIRE_S, self._expire) if self.watchers else None

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """Ask no more."""
        self._closing = True
        for task in list(self._polls.values()):
            task.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
