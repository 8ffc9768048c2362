"""Messages from the partitions of other workers for receivers here, and the other way round.

    asked worker                         owner
      watch(queues) ───────────────────►   remembers the caller; answers what is ready now
                    ◄─────────────────── wake(queues)   something became ready (nothing is reserved)
      receive(queue, …) ───────────────►   takes what is ready; never asks a third worker

A lost call costs time, but never a message: watches expire, and are renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

import msgspec

from app.cluster.peers import Peers, peer_call
from marq.errors import MarqError

log = logging.getLogger(__name__)

#: Seconds after which a watch expires unless it is renewed …
WATCH_S = 10.0
#: … and after which it is renewed.
RENEW_S = 2.0
#: First pause after other workers said that they have something, but gave nothing. It doubles.
FRUITLESS_S = 0.005
#: Seconds to wait for workers that don't answer before those that did are asked for their messages …
SLOW_S = 0.25
#: … and, if none of them has any, the seconds for a receive that does not wait for messages.
LAST_LOOK_S = 1.0
#: Receives of one queue in progress at one other worker.
FETCHES_MAX = 8
#: Seconds between checks for watches that were not renewed.
EXPIRE_S = 1.0


class Watch(msgspec.Struct):
    """The queues that another worker wants messages of. Without a URL it only asks what is ready now.

    `read_up`: answer once everything is folded that was confirmed before.
    """

    queues: list[str]
    url: str
    read_up: bool = False


class Ready(msgspec.Struct):
    """The watched queues that have something ready now."""

    ready: list[str]


class Wake(msgspec.Struct):
    """Queues that have something ready now."""

    queues: list[str]


class Receivers(Protocol):
    """The receives of this worker, as polling needs them."""

    def waiting_count(self, queue: str) -> int:
        """How many receivers wait here for `queue`."""

    def waited_for(self) -> list[str]:
        """Queues that receivers wait for here."""

    def has_ready(self, queue: str) -> bool:
        """True if a partition of this worker may have something for a receiver of `queue`."""

    async def read_up(self, queue: str) -> None:
        """Wait until what was confirmed before is folded in this worker's partitions."""

    async def fetch(self, queue: str, url: str) -> bool:
        """Take what another worker has now, for the first receive that waits here. Returns False if it has nothing."""


async def _within(seconds: float, asked: Collection[asyncio.Future[bool]]) -> set[asyncio.Future[bool]]:
    """The futures that are done, once all are or the time is over."""
    return (await asyncio.wait(asked, timeout=seconds))[0] if asked else set()


class PeerPolling:
    """Both sides: receivers here that ask other workers, and partitions here that other workers ask."""

    def __init__(self, receivers: Receivers, peers: Peers, spawn: Callable[[Any], Any]) -> None:
        self._receivers = receivers
        self._peers = peers
        self._spawn = spawn
        self._closing = False
        # for receives that wait here
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._woken: dict[str, asyncio.Event] = {}
        self._to_watch: dict[str, dict[str, asyncio.Future[bool]]] = {}
        self._watching: dict[str, float] = {}  # URLs with a watch call in progress -> since when
        # for partitions that this worker owns
        self.watchers: dict[str, dict[str, float]] = {}  # queue -> URL -> until when
        self._to_wake: dict[str, set[str]] = {}
        self._expiry: asyncio.TimerHandle | None = None
        peers.register(self)

    # ------------------------------------------------------------------ one who waits

    def poll_peers(self, queue: str) -> None:
        """Look for messages of `queue` at the other workers, as long as receives wait for them here."""
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
        # a receive that began to wait after the last check found this poll still running, and started none
        self._poll_again(queue)

    def _poll_again(self, queue: str) -> None:
        if self._receivers.waiting_count(queue) and not self._closing:
            self.poll_peers(queue)

    async def _poll(self, queue: str) -> None:
        receivers, woken, pause_s = self._receivers, self._woken[queue], FRUITLESS_S
        fetches: dict[asyncio.Future[bool], str] = {}  # under way, and where
        try:
            while not self._closing and ((waiting := receivers.waiting_count(queue)) or fetches):
                woken.clear()
                asked = set(fetches.values())
                urls = [url for url in await self.ready_at(queue) if url not in asked] if waiting else []
                each = min(-(-waiting // max(1, len(urls))), FETCHES_MAX)
                fetches |= {
                    asyncio.ensure_future(receivers.fetch(queue, url)): url for url in urls for _ in range(each)
                }
                done = await _within(SLOW_S, fetches.keys())
                for fetch in done:
                    del fetches[fetch]
                given = [fetch.result() for fetch in done]
                if any(given):
                    pause_s = FRUITLESS_S
                    continue
                # what is there may be reserved, or a limit may be reached
                pause_s = min(pause_s * 2, RENEW_S) if urls else RENEW_S
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), SLOW_S if fetches else pause_s)
        except asyncio.CancelledError:
            for fetch in fetches:
                fetch.cancel()
            raise

    async def ready_at(self, queue: str, watch: bool = True, last_look: bool = False) -> list[str]:
        """Returns the other workers that have something of `queue` ready.

        A worker that does not answer does not delay messages of the others.

        Args:
            watch: ask all to call back when that changes. A late answer still counts when it comes.
            last_look: find everything that was confirmed before. If the others have nothing, wait a little longer for a
                worker that does not answer.
        """
        urls = self._peers.others()
        if not urls:
            return []
        asked: dict[asyncio.Future[bool], str]
        if watch:
            asked = {self._watch(url, queue): url for url in urls}
        else:
            asked = {asyncio.ensure_future(self._is_ready(url, queue, last_look)): url for url in urls}
        prompt = {answer for answer, url in asked.items() if not self._is_slow(url)}
        done = await _within(SLOW_S, prompt)
        found = [answer.result() for answer in done]
        if last_look and not any(found):
            done |= await _within(LAST_LOOK_S, asked.keys() - done)
        for late in asked.keys() - done:
            if watch:
                late.add_done_callback(lambda answer: self._wake(queue) if answer.result() else None)
            else:
                late.cancel()
        return [url for answer, url in asked.items() if answer in done and answer.result()]

    def _is_slow(self, url: str) -> bool:
        """True if a worker was asked a while ago, and has not answered yet."""
        now = asyncio.get_running_loop().time()
        return now - self._watching.get(url, now) > SLOW_S

    async def _is_ready(self, url: str, queue: str, read_up: bool) -> bool:
        try:
            answer = await self._peers.call(url, self.on_watch, Watch([queue], "", read_up))
        except MarqError as exc:
            log.debug("%s", exc)
            return False
        return queue in answer.ready

    def _wake(self, queue: str) -> None:
        event = self._woken.get(queue)
        if event is not None:
            event.set()

    def _watch(self, url: str, queue: str) -> asyncio.Future[bool]:
        """Watches of one turn of the loop, and those added during a call, share a call."""
        waiting = self._to_watch.setdefault(url, {})
        future = waiting.get(queue)
        if future is None:
            future = waiting[queue] = asyncio.get_running_loop().create_future()
        if url not in self._watching:
            self._watching[url] = asyncio.get_running_loop().time()
            asyncio.get_running_loop().call_soon(lambda: self._spawn(self._send_watches(url)))
        return future

    async def _send_watches(self, url: str) -> None:
        try:
            while waiting := self._to_watch.pop(url, None):
                ready: set[str] = set()
                self._watching[url] = asyncio.get_running_loop().time()
                try:
                    answer = await self._peers.call(url, self.on_watch, Watch(list(waiting), self._peers.url))
                    ready.update(answer.ready)
                except MarqError as exc:
                    log.debug("%s", exc)
                for queue, future in waiting.items():
                    if not future.done():
                        future.set_result(queue in ready)
        finally:
            self._watching.pop(url, None)

    @peer_call("wake")
    async def on_wake(self, wake: Wake) -> None:
        """Called by another worker that has something ready in a watched queue."""
        for queue in wake.queues:
            self._wake(queue)

    def members_changed(self) -> None:
        """Called after a rebalance: receives that wait have to ask the new owners."""
        for event in self._woken.values():
            event.set()
        for queue in self._receivers.waited_for():
            self.poll_peers(queue)

    # ------------------------------------------------------------------ an owner

    @peer_call("watch")
    async def on_watch(self, watch: Watch) -> Ready:
        """Called by another worker that wants messages: answers what is ready now, and calls `wake` later."""
        loop = asyncio.get_running_loop()
        ready = []
        for queue in watch.queues:
            if watch.read_up and not self._receivers.has_ready(queue):
                await self._receivers.read_up(queue)
            if self._receivers.has_ready(queue):
                ready.append(queue)
            if watch.url:
                self.watchers.setdefault(queue, {})[watch.url] = loop.time() + WATCH_S
        if self.watchers and self._expiry is None:
            self._expiry = loop.call_later(EXPIRE_S, self._expire)
        return Ready(ready)

    def tell(self, queue: str) -> None:
        """Tell the workers that watch `queue`, once each, that it has something ready here."""
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
        """Stop asking other workers."""
        self._closing = True
        for task in list(self._polls.values()):
            task.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
