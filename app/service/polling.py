"""Messages from the partitions of other workers for receivers here, and the other way round.

    asking worker                        owner
      watch(queues) ───────────────────►   remembers the caller; answers what is ready now
                    ◄─────────────────── wake(queues)   something became ready (nothing is reserved)
      receive(queue, …) ───────────────►   takes what is ready; never asks a third worker; renews the watch

An owner wakes one watcher at a time, and more of them only while something stays ready: so the calls for a message do
not grow with the number of workers that wait. A lost call costs time, but never a message: watches expire, and all
owners are asked again every `RENEW_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from itertools import islice
from typing import Any, NamedTuple, Protocol

import msgspec

from app.cluster.peers import Peers, peer_call
from marq.errors import MarqError

log = logging.getLogger(__name__)

#: Seconds after which a watch expires unless it is renewed. Those of all queues are renewed at the same time, …
WATCH_S = 12.0
#: … whenever so many seconds are over.
RENEW_S = 5.0
#: Seconds after which a worker that did not answer is asked again.
RETRY_S = 1.0
#: Seconds after which more watchers are woken if something is still ready. Their number doubles.
WAKE_MORE_S = 0.02
#: Seconds before another watcher is woken if one got nothing of what is ready: a limit may be reached. They double …
FRUITLESS_S = 0.005
#: … up to so many.
FRUITLESS_MAX_S = 0.1
#: Seconds to wait for workers that don't answer before those that did are asked for their messages …
SLOW_S = 0.2
#: … and, if none of them has any, the seconds for a receive that does not wait for messages.
LAST_LOOK_S = 1.0
#: Receives of one queue in progress at one other worker.
FETCHES_MAX = 8
#: Seconds between checks for watches that were not renewed.
EXPIRE_S = 1.0
#: Seconds between questions what others have of the queues that receivers here get their messages of, …
STOCK_S = 1.0
#: … the same if one of them was not asked about before, …
STOCK_NEW_S = 0.05
#: … and the most queues of one question.
STOCK_QUEUES = 1_000


class Watch(msgspec.Struct):
    """The queues that another worker wants messages of. Without a URL it only asks what is ready now.

    `read_up`: answer once everything is folded that was confirmed before.
    """

    queues: list[str]
    url: str = ""
    read_up: bool = False


class Ready(msgspec.Struct):
    """The queues that have something ready now."""

    ready: list[str]


class Wake(msgspec.Struct):
    """Queues that have something ready now at the worker `url`."""

    queues: list[str]
    url: str


class Unwanted(msgspec.Struct):
    """The answer to `Wake`: queues that nobody waits for any more."""

    queues: list[str]


class Fetched(NamedTuple):
    """How many messages a receiver wanted of another worker, 0 if none was left who waits; and how many it got.

    Of a worker that did not answer it got None.
    """

    wanted: int
    got: int | None


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

    async def fetch(self, queue: str, url: str) -> Fetched:
        """Take what another worker has now, for the first receive that waits here."""


#: True if a worker has something ready; None if it did not answer.
Answer = asyncio.Future[bool | None]


async def _within(seconds: float, asked: Collection[Answer]) -> set[Answer]:
    """The futures that are done, once all are or the time is over."""
    return (await asyncio.wait(asked, timeout=seconds))[0] if asked else set()


class Questions:
    """Questions to other workers whether they have something of a queue.

    One call to a worker is under way at a time. All that is asked meanwhile shares the next one.
    """

    def __init__(self, peers: Peers, spawn: Callable[[Any], Any], call: Callable[[str, list[str]], Awaitable[Ready]]):
        self._peers = peers
        self._spawn = spawn
        self._call = call
        self._waiting: dict[str, dict[str, Answer]] = {}
        self._asking: dict[str, float] = {}  # URLs with a call in progress -> since when

    def ask(self, url: str, queue: str) -> Answer:
        """Ask a worker. Several may share the answer: it must not be cancelled."""
        waiting = self._waiting.setdefault(url, {})
        future = waiting.get(queue)
        if future is None:
            future = waiting[queue] = asyncio.get_running_loop().create_future()
        if url not in self._asking:
            self._asking[url] = asyncio.get_running_loop().time()
            asyncio.get_running_loop().call_soon(lambda: self._spawn(self._send(url)))
        return future

    def is_slow(self, url: str) -> bool:
        """True if a worker was asked a while ago, and has not answered yet."""
        now = asyncio.get_running_loop().time()
        return now - self._asking.get(url, now) > SLOW_S

    async def _send(self, url: str) -> None:
        try:
            while waiting := self._waiting.pop(url, None):
                self._asking[url] = asyncio.get_running_loop().time()
                ready: set[str] | None = None
                error: Exception | None = None
                try:
                    ready = set((await self._call(url, list(waiting))).ready)
                except MarqError as exc:
                    log.debug("%s", exc)
                except Exception as exc:  # ours: it is for those who asked
                    error = exc
                for queue, future in waiting.items():
                    if error is not None:
                        future.set_exception(error)
                    else:
                        future.set_result(None if ready is None else queue in ready)
        finally:
            self._asking.pop(url, None)


class Known:
    """What the other workers said of a queue. All that are not in `ready`, and not being asked, will wake us."""

    __slots__ = ("ready", "until_s", "widths")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """All have to be asked again."""
        self.until_s = 0.0  # by the clock of the loop: when all are to be asked again
        self.ready: dict[str, None] = {}  # URLs of workers that have something, or may have
        self.widths: dict[str, int] = {}  # URL of a worker that gave plenty -> fetches at once


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
        self._known: dict[str, Known] = {}  # those that were asked last are the last
        self._watches = Questions(peers, spawn, lambda url, queues: self._question(url, Watch(queues, peers.url)))
        # for receives that don't wait
        self._looks = Questions(peers, spawn, lambda url, queues: self._question(url, Watch(queues)))
        self._last_looks = Questions(peers, spawn, lambda url, queues: self._question(url, Watch(queues, "", True)))
        # for receives that find enough here
        self._served: dict[str, None] = {}
        self._stock: dict[str, dict[str, None]] = {}  # queue -> URLs of workers that have something as well
        self._stock_s = float("-inf")
        # for partitions that this worker owns
        self.watchers: dict[str, dict[str, float]] = {}  # queue -> URL -> until when
        self._to_wake: dict[str, dict[str, None]] = {}
        self._wakes_more: dict[str, asyncio.TimerHandle] = {}
        self._fruitless: dict[str, float] = {}  # queue of which the last one got nothing -> seconds until the next try
        self._expiry: asyncio.TimerHandle | None = None
        peers.register(self)

    async def _question(self, url: str, watch: Watch) -> Ready:
        return await self._peers.call(url, self.on_watch, watch)

    # ------------------------------------------------------------------ one who waits

    def poll_peers(self, queue: str) -> None:
        """Look for messages of `queue` at the other workers, as long as receives wait for them here."""
        if queue in self._polls:
            self._woken[queue].set()  # one more waits: there may be something for it
        elif self._peers.others() or self._peers.rebalancing:
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
        woken, loop = self._woken[queue], asyncio.get_running_loop()
        fetches: dict[asyncio.Future[Fetched], str] = {}  # under way, and where
        known = self._known.get(queue)
        if known is None:
            known = self._known[queue] = Known()
        try:
            while True:
                woken.clear()
                for fetch in [fetch for fetch in fetches if fetch.done()]:
                    self._learn(queue, known, fetches.pop(fetch), fetch.result())
                waiting = self._receivers.waiting_count(queue)
                if self._closing or not (waiting or fetches):
                    return
                if waiting:
                    self._ask_all(queue, known)
                for url in self._to_fetch(known, waiting, list(fetches.values())):
                    fetch = asyncio.ensure_future(self._receivers.fetch(queue, url))
                    fetch.add_done_callback(lambda _: woken.set())
                    fetches[fetch] = url
                try:
                    async with asyncio.timeout_at(max(known.until_s, loop.time()) if waiting else None):
                        await woken.wait()
                except TimeoutError:
                    pass
        except asyncio.CancelledError:
            for fetch in fetches:
                fetch.cancel()
            raise

    def _ask_all(self, queue: str, known: Known) -> None:
        """Ask all owners what they have, unless that was done not long ago: since then they tell."""
        now = asyncio.get_running_loop().time()
        if now < known.until_s:
            return
        known.until_s = (now // RENEW_S + 1) * RENEW_S  # the same for all queues, so that they share calls
        self._known.pop(queue, None)
        self._known[queue] = known
        while (first := next(iter(self._known))) not in self._polls and self._known[first].until_s < now:
            del self._known[first]
        for url in self._peers.others():
            self._ask(queue, url)

    def _ask(self, queue: str, url: str) -> None:
        def answered(answer: Answer) -> None:
            if answer.result() is None:
                asyncio.get_running_loop().call_later(RETRY_S, self._ask_again, queue, url)
            elif answer.result():
                self._is_ready(queue, url)

        self._watches.ask(url, queue).add_done_callback(answered)

    def _ask_again(self, queue: str, url: str) -> None:
        if queue in self._polls and url in self._peers.members():
            self._ask(queue, url)

    def _to_fetch(self, known: Known, waiting: int, asked: list[str]) -> list[str]:
        """Where to ask for messages now, once for each fetch. More than one at a worker only after it gave plenty."""
        urls: list[str] = []
        for url in list(known.ready):
            count = min(known.widths.get(url, 1) - asked.count(url), waiting - len(urls))
            if count > 0:
                urls += [url] * count
                del known.ready[url]  # here, not later: who is woken meanwhile asks again
        return urls

    def _learn(self, queue: str, known: Known, url: str, fetched: Fetched) -> None:
        """Note what a fetch says of a worker. If it gave less than was wanted, it wakes us when it has more."""
        if fetched.got == fetched.wanted:
            known.ready[url] = None
            if fetched.got:
                known.widths[url] = min(2 * known.widths.get(url, 1), FETCHES_MAX)
            return
        known.widths.pop(url, None)
        if fetched.got is None:
            asyncio.get_running_loop().call_later(RETRY_S, self._ask_again, queue, url)

    def _is_ready(self, queue: str, url: str) -> None:
        """A worker has something, or may have."""
        known = self._known.get(queue)
        if known is not None:
            known.ready[url] = None
        event = self._woken.get(queue)
        if event is not None:
            event.set()

    @peer_call("wake")
    async def on_wake(self, wake: Wake) -> Unwanted:
        """Called by another worker that has something ready in watched queues."""
        for queue in wake.queues:
            self._is_ready(queue, wake.url)
        return Unwanted([queue for queue in wake.queues if not self._receivers.waiting_count(queue)])

    def members_changed(self) -> None:
        """Called after a rebalance: receives that wait have to ask the new owners."""
        self._stock.clear()
        for known in self._known.values():
            known.forget()
        for event in self._woken.values():
            event.set()
        for queue in self._receivers.waited_for():
            self.poll_peers(queue)

    # ------------------------------------------------------------------ one who does not wait

    async def ready_at(
        self, queue: str, last_look: bool = False, found: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """Returns the other workers that have something of `queue` ready.

        A worker that does not answer does not delay messages of the others.

        Args:
            last_look: find everything that was confirmed before. If nothing is found, wait a little longer for a worker
                that does not answer.
            found: True if something was found here.
        """
        questions = self._last_looks if last_look else self._looks
        asked = {questions.ask(url, queue): url for url in self._peers.others()}
        prompt = {answer for answer, url in asked.items() if not questions.is_slow(url)}
        done = await _within(SLOW_S, prompt)
        if last_look and not found() and not any(answer.result() for answer in done):
            done |= await _within(LAST_LOOK_S, asked.keys() - done)
        return [url for answer, url in asked.items() if answer in done and answer.result()]

    # ------------------------------------------------------------------ one who finds enough here

    def elsewhere(self, queue: str) -> str | None:
        """Another worker that had something of `queue` not long ago, or None. In turn, and each once."""
        urls = self._stock.get(queue)
        return urls.popitem()[0] if urls else None

    def served_here(self, queue: str) -> None:
        """Note that a receiver of `queue` finds something here. Now and then the others are asked what they have."""
        self._served[queue] = None
        now = asyncio.get_running_loop().time()
        if now - self._stock_s >= (STOCK_S if queue in self._stock else STOCK_NEW_S) and not self._closing:
            self._stock_s = now
            self._spawn(self._take_stock())

    async def _take_stock(self) -> None:
        """One call to each other worker, whatever the number of receives."""
        queues, self._served = list(islice(self._served, STOCK_QUEUES)), {}
        stock: dict[str, dict[str, None]] = {queue: {} for queue in queues}
        urls = self._peers.others()
        answers = await self._peers.ask_all(urls, self.on_watch, Watch(queues)) if urls else []
        for url, answer in zip(urls, answers, strict=True):
            for queue in () if isinstance(answer, MarqError) else answer.ready:
                stock[queue][url] = None
        self._stock = stock if len(self._stock) > STOCK_QUEUES else self._stock | stock

    # ------------------------------------------------------------------ an owner

    @peer_call("watch")
    async def on_watch(self, watch: Watch) -> Ready:
        """Called by another worker that wants messages: answers what is ready now, and calls `wake` later."""
        has_ready = self._receivers.has_ready
        if watch.read_up:
            await asyncio.gather(*map(self._receivers.read_up, watch.queues))
        if watch.url:
            for queue in watch.queues:
                self.watch(queue, watch.url)
        return Ready([queue for queue in watch.queues if has_ready(queue)])

    def watch(self, queue: str, url: str) -> None:
        """Another worker wants to know when something is ready. It comes after all others in the line."""
        loop = asyncio.get_running_loop()
        urls = self.watchers.setdefault(queue, {})
        urls.pop(url, None)
        urls[url] = loop.time() + WATCH_S
        if self._expiry is None:
            self._expiry = loop.call_later(EXPIRE_S, self._expire)

    def tell(self, queue: str) -> None:
        """Something of `queue` is ready: wake the worker that has watched it for longest."""
        if queue not in self._fruitless or queue not in self._wakes_more:
            self._wake_some(queue, 1)

    def _wake_some(self, queue: str, count: int) -> None:
        """Wake `count` workers, and more if that does not help."""
        urls = self.watchers.get(queue)
        if not urls:
            return
        for url in list(islice(urls, count)):
            del urls[url]
            queues = self._to_wake.get(url)
            if queues is None:
                queues = self._to_wake[url] = {}
                asyncio.get_running_loop().call_soon(self._spawn_wakes, url)
            queues[queue] = None
        if urls:
            self._wake_later(queue, WAKE_MORE_S, 2 * count)
        else:
            del self.watchers[queue]

    def _wake_later(self, queue: str, pause_s: float, count: int) -> None:
        if queue not in self._wakes_more:
            timer = asyncio.get_running_loop().call_later(pause_s, self._wake_more, queue, count)
            self._wakes_more[queue] = timer

    def _wake_more(self, queue: str, count: int) -> None:
        del self._wakes_more[queue]
        if not self._wake_if_ready(queue, count):
            self._fruitless.pop(queue, None)

    def _wake_if_ready(self, queue: str, count: int = 1) -> bool:
        if self._closing or not self._receivers.has_ready(queue):
            return False
        self._wake_some(queue, count)
        return True

    def has_taken(self, queue: str, url: str, got: int) -> None:
        """Another worker has taken `got` messages, all that it could get, and watches for more.

        If something is left, others may want it, two for each. If it got nothing of what is ready, others are no better
        off: workers that ask each other on and on would keep everybody from work.
        """
        if got:
            self._fruitless.pop(queue, None)
            self._wake_if_ready(queue, 2)
            self.watch(queue, url)
            return
        self.watch(queue, url)
        if self._receivers.has_ready(queue):
            pause_s = self._fruitless[queue] = min(2 * self._fruitless.get(queue, FRUITLESS_S / 2), FRUITLESS_MAX_S)
            timer = self._wakes_more.pop(queue, None)
            if timer is not None:
                timer.cancel()
            self._wake_later(queue, pause_s, 1)

    def _spawn_wakes(self, url: str) -> None:
        self._spawn(self._send_wakes(url))

    async def _send_wakes(self, url: str) -> None:
        queues = list(self._to_wake.pop(url, ()))
        try:
            unwanted = (await self._peers.call(url, self.on_wake, Wake(queues, self._peers.url))).queues
        except MarqError as exc:
            log.debug("%s", exc)
            unwanted = queues  # if it did hear it, it asks all the same
        for queue in unwanted:
            self._wake_if_ready(queue)

    def _expire(self) -> None:
        """End the watches of workers that don't renew them."""
        now = asyncio.get_running_loop().time()
        for queue, urls in list(self.watchers.items()):
            for url, until in list(urls.items()):
                if until < now:
                    del urls[url]
            if not urls:
                del self.watchers[queue]
        for queue in self._fruitless.keys() - self.watchers.keys():  # nobody may ever ask for it again
            del self._fruitless[queue]
        self._expiry = asyncio.get_running_loop().call_later(EXPIRE_S, self._expire) if self.watchers else None

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """Stop asking other workers."""
        self._closing = True
        for task in list(self._polls.values()):
            task.cancel()
        for timer in (self._expiry, *self._wakes_more.values()):
            if timer is not None:
                timer.cancel()
