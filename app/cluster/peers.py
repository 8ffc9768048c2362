"""Worker to worker: who the others are, calls between them, and messages for receivers that wait at another worker.

    asked worker                         owner
      watch(queues) ───────────────────►   notes who wants to know; says what is ready now
                    ◄─────────────────── wake(queues)   something became ready (nothing is reserved)
      receive(queue, …) ───────────────►   takes what is there; never asks a third worker

Members and their URLs are what the group's leader sent with the newest assignment. Calls and answers are sealed with
the installation's secret (`app.cluster.seals`). A call that gets lost costs time, never a message: watches end by
themselves and are renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import time
from collections.abc import Awaitable, Callable, Collection
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web
from mode import Service

from app import bodies
from app.cluster.seals import HEADER, Call, Seals, StaleCallError, hash_of
from marq.errors import MarqError, NotAuthenticatedError, UnavailableError
from marq.protocol import problems

if TYPE_CHECKING:
    from app.engine.breakers import Events
    from app.worker import WorkerApp

#: Seconds for an answer of another worker.
CALL_TIMEOUT_S = 5.0
#: Seconds that a watch lasts unless it is renewed …
WATCH_S = 10.0
#: … and after which it is.
RENEW_S = 2.0
#: First pause after a look at other workers that had something, but gave nothing; it doubles.
FRUITLESS_S = 0.005
#: Seconds that a worker which does not answer is waited for before those that did are asked for what they have …
SLOW_S = 0.25
#: … and where none has anything, by somebody who does not wait for messages.
LAST_LOOK_S = 1.0
#: Receives of one queue under way at one other worker.
FETCHES_MAX = 8
#: Connections to each other worker.
CONNECTIONS = 64
#: Bytes of a call's body, and seconds until it has to be there.
CALL_MAX_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT_S = 10.0
#: Bytes of an answer: more than `app.service.receives.ANSWER_BYTES`, with its last message and all that goes with them.
ANSWER_MAX_BYTES = 64 * 1024 * 1024

PATH = "/v1/peer/"
MSGPACK = "application/msgpack"
_PERSON = b"marq-peer"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

Operation = Callable[[Any], Awaitable[Any]]


class PeerError(UnavailableError):
    """Another worker did not answer, or refused."""


async def _answers(*asked: Awaitable[Any]) -> list[Any]:
    """What comes of each, in order: a `MarqError` is an answer; any other error is raised."""
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, MarqError):
            raise answer
    return answers


async def _within(seconds: float, asked: Collection[asyncio.Future[bool]]) -> set[asyncio.Future[bool]]:
    """Which of them are done, once all are, or the time is over."""
    return (await asyncio.wait(asked, timeout=seconds))[0] if asked else set()


class Peers(Service):
    """The other workers of the installation."""

    def __init__(self, app: WorkerApp, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.app = app
        self._operations: dict[str, Operation] = {}
        self._session: ClientSession | None = None
        self._sealing: Seals | None = None
        self._turn = itertools.count()
        # as one who waits
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._woken: dict[str, asyncio.Event] = {}
        self._to_watch: dict[str, dict[str, asyncio.Future[bool]]] = {}
        self._watching: dict[str, float] = {}  # URLs with a watch call under way -> since when
        # as an owner
        self.watchers: dict[str, dict[str, float]] = {}  # queue -> URL -> until when
        self._to_wake: dict[str, set[str]] = {}
        self.register("watch", self._on_watch)
        self.register("wake", self._on_wake)
        breakers = app.ownership.breakers
        breakers.tell, breakers.rank, breakers.spawn = self._tell_breakers, self._rank, app.ownership.spawn
        self.register("breakers", breakers.on_told)

    # ------------------------------------------------------------------ who

    @property
    def url(self) -> str:
        """Our own address, as the others know it."""
        return str(self.app.conf.canonical_url)

    def members(self) -> dict[str, set[int]]:
        """Every worker by its URL, and the partitions that it was assigned."""
        topic = self.app.tables["progress"].changelog_topic_name
        found = {
            url: {int(n) for n in topics.get(topic, ())}
            for url, topics in self.app.assignor.changelog_distribution.items()
        }
        found.setdefault(self.url, set())
        return found

    def others(self) -> list[str]:
        """URLs of the other workers that own partitions, beginning with another one each time."""
        urls = [url for url, numbers in self.members().items() if numbers and url != self.url]
        if len(urls) < 2:
            return urls
        first = next(self._turn) % len(urls)
        return urls[first:] + urls[:first]

    def owner_of(self, number: int) -> str | None:
        """URL of the worker that was assigned a partition."""
        return next((url for url, numbers in self.members().items() if number in numbers), None)

    # ------------------------------------------------------------------ calls

    def register(self, name: str, operation: Operation) -> None:
        """What `name` does when another worker calls it; gets and returns what msgpack can carry."""
        self._operations[name] = operation

    @property
    def _seals(self) -> Seals:
        if self._sealing is None:
            self._sealing = Seals(self.app.catalog.keys_for(_PERSON), lambda: time.time_ns() // 1_000_000)
        return self._sealing

    async def call(
        self, url: str, name: str, argument: Any, kind: Any = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Ask another worker. Raises `PeerError`."""
        body, seals, key, learned = _encode(argument), self._seals, 0, False
        while True:
            try:
                status, content_type, header, answer, call = await self._post(url, name, body, key, timeout_s)
            except (ClientError, OSError, TimeoutError) as exc:
                raise PeerError(f"worker {url} did not answer to {name}: {exc or type(exc).__name__}") from exc
            try:
                seals.check_answer(call, header, status, content_type, answer)
            except NotAuthenticatedError:
                if status == 401 and key + 1 < seals.key_count:
                    key += 1  # while the secret is changed: of a worker that knows only another one
                    continue
                raise PeerError(f"worker {url} answered {status} to {name}, without a seal") from None
            if status == 401 and not learned:
                seals.learn_time(call, header)
                learned = True
                continue
            try:
                if content_type == problems.CONTENT_TYPE:
                    raise problems.error_of(answer)
                if status != 200:
                    raise PeerError(f"worker {url} answered {status} to {name}")
                return _decode(answer) if kind is None else msgspec.msgpack.decode(answer, type=kind)
            except msgspec.MsgspecError as exc:
                raise PeerError(f"worker {url} did not answer to {name} as a worker does: {exc}") from exc

    async def _post(
        self, url: str, name: str, body: bytes, key: int, timeout_s: float
    ) -> tuple[int, str, str, bytes, Call]:
        """Status, type, seal and body of an answer, and the call that it answers."""
        path = PATH + name
        call, header = self._seals.call("POST", path, _receiver(url), body, key)
        assert self._session is not None
        async with self._session.post(
            url.rstrip("/") + path,
            data=body,
            headers={HEADER: header, "Content-Type": MSGPACK},
            timeout=ClientTimeout(total=timeout_s),
            allow_redirects=False,
        ) as response:
            answer = await _read_answer(response, url, name)
            return response.status, response.content_type, response.headers.get(HEADER, ""), answer, call

    async def everywhere(self, name: str, argument: Any) -> dict[str, Any]:
        """The answers of all workers, ours included, by URL; a `PeerError` where there was none."""
        urls = [url for url in self.members() if url != self.url]
        answers = await _answers(self._operations[name](argument), *(self.call(url, name, argument) for url in urls))
        return dict(zip([self.url, *urls], answers, strict=True))

    async def _ask_all(self, urls: list[str], name: str, argument: Any) -> list[Any]:
        """The answers of other workers, in order; a `MarqError` where there was none."""
        return await _answers(*(self.call(url, name, argument) for url in urls))

    async def serve(self, request: web.Request) -> web.Response:
        """The route that other workers call. Nothing of a body is read before its call is known to be a worker's."""
        seals = self._seals
        call, key = seals.open(request.headers.get(HEADER, ""), request.method, request.raw_path, _receiver(self.url))
        status, content_type = 200, MSGPACK
        try:
            seals.take(call)
            body = await bodies.read(request, CALL_MAX_BYTES, timeout_s=BODY_TIMEOUT_S)
            if not compare_digest(hash_of(body), call.body):
                raise NotAuthenticatedError("the body is not the one that was sealed")
            operation = self._operations.get(request.match_info["name"])
            if operation is None:
                raise web.HTTPNotFound
            argument = _decode(body)
            if request.match_info["name"] in ("receive", "take"):
                # the asking worker may go away as any client may
                argument = (argument, request)
            answer = _encode(await operation(argument))
        except MarqError as exc:
            if isinstance(exc, NotAuthenticatedError) and not isinstance(exc, StaleCallError):
                raise
            status, problem, title = problems.kind_of(exc)
            content_type = problems.CONTENT_TYPE
            answer = msgspec.json.encode(problems.body(status, problem, title, str(exc)))
        return web.Response(
            body=answer,
            status=status,
            content_type=content_type,
            headers={HEADER: seals.answer(call, key, status, content_type, answer)},
        )

    # ------------------------------------------------------------------ one who waits

    def poll_peers(self, queue: str) -> None:
        """Receivers wait here for `queue`: look for messages at the other workers until nobody waits any more."""
        if queue not in self._polls and (self.others() or self.app.rebalancing):
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
            self.log.error("Looking for messages of %r elsewhere failed: %r", queue, done.exception())
            asyncio.get_running_loop().call_later(RENEW_S, self._poll_again, queue)
            return
        # a receive that began to wait between the hunt's last look and this found the hunt still there
        if self.app.operations.receives.waiting_count(queue) and not self.should_stop:
            self.poll_peers(queue)

    def _poll_again(self, queue: str) -> None:
        if self.app.operations.receives.waiting_count(queue) and not self.should_stop:
            self.poll_peers(queue)

    async def _poll(self, queue: str) -> None:
        receives, woken, pause_s = self.app.operations.receives, self._woken[queue], FRUITLESS_S
        fetches: dict[asyncio.Future[bool], str] = {}  # under way, and where
        try:
            while not self.should_stop and ((waiting := receives.waiting_count(queue)) or fetches):
                woken.clear()
                asked = set(fetches.values())
                urls = [url for url in await self.ready_at(queue) if url not in asked] if waiting else []
                each = min(-(-waiting // max(1, len(urls))), FETCHES_MAX)
                fetches |= {asyncio.ensure_future(receives.fetch(queue, url)): url for url in urls for _ in range(each)}
                done = await _within(SLOW_S, fetches.keys())
                for fetch in done:
                    del fetches[fetch]
                given = [fetch.result() for fetch in done]
                if any(given):
                    pause_s = FRUITLESS_S
                    continue
                # what is there may be reserved, or held up by a limit
                pause_s = min(pause_s * 2, RENEW_S) if urls else RENEW_S
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), SLOW_S if fetches else pause_s)
        except asyncio.CancelledError:
            for fetch in fetches:
                fetch.cancel()
            raise

    async def ready_at(self, queue: str, watch: bool = True, last_look: bool = False) -> list[str]:
        """Which other workers have something ready of `queue`.

        One that does not answer keeps nobody from what others have.

        Args:
            watch: all are asked to tell when that changes; an answer that comes late counts when it comes.
            last_look: wait a little longer for one that does not answer, where the others have nothing.
        """
        urls = self.others()
        if not urls:
            return []
        if watch:
            asked = {self._watch(url, queue): url for url in urls}
        else:
            asked = {asyncio.ensure_future(self._is_ready(url, queue)): url for url in urls}
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

    async def _is_ready(self, url: str, queue: str) -> bool:
        try:
            answer = await self.call(url, "watch", {"queues": [queue], "url": ""})
        except MarqError as exc:
            self.log.debug("%s", exc)
            return False
        return queue in answer["ready"]

    def _wake(self, queue: str) -> None:
        event = self._woken.get(queue)
        if event is not None:
            event.set()

    def _watch(self, url: str, queue: str) -> asyncio.Future[bool]:
        """Watches of one turn of the loop, and those that come while a call is under way, go in one call."""
        waiting = self._to_watch.setdefault(url, {})
        future = waiting.get(queue)
        if future is None:
            future = waiting[queue] = asyncio.get_running_loop().create_future()
        if url not in self._watching:
            self._watching[url] = asyncio.get_running_loop().time()
            asyncio.get_running_loop().call_soon(lambda: self.app.ownership.spawn(self._send_watches(url)))
        return future

    async def _send_watches(self, url: str) -> None:
        try:
            while waiting := self._to_watch.pop(url, None):
                ready: set[str] = set()
                self._watching[url] = asyncio.get_running_loop().time()
                try:
                    answer = await self.call(url, "watch", {"queues": list(waiting), "url": self.url})
                    ready.update(answer["ready"])
                except MarqError as exc:
                    self.log.debug("%s", exc)
                for queue, future in waiting.items():
                    if not future.done():
                        future.set_result(queue in ready)
        finally:
            self._watching.pop(url, None)

    async def _on_wake(self, argument: Any) -> Any:
        for queue in argument["queues"]:
            self._wake(queue)
        return {}

    def members_changed(self) -> None:
        """A rebalance has ended: those who wait have to ask the new owners."""
        for event in self._woken.values():
            event.set()
        for queue in self.app.operations.receives.waited_for():
            self.poll_peers(queue)

    # ------------------------------------------------------------------ an owner

    async def _on_watch(self, argument: Any) -> Any:
        url, until = argument["url"], asyncio.get_running_loop().time() + WATCH_S
        door = self.app.operations.receives
        ready = []
        for queue in argument["queues"]:
            if door.has_ready(queue):
                ready.append(queue)
            if url:
                self.watchers.setdefault(queue, {})[url] = until
        return {"ready": ready}

    def tell(self, queue: str) -> None:
        """`queue` has something ready here: whoever watches it is told, once."""
        urls = self.watchers.pop(queue, None)
        if not urls:
            return
        for url in urls:
            queues = self._to_wake.get(url)
            if queues is None:
                queues = self._to_wake[url] = set()
                asyncio.get_running_loop().call_soon(lambda url=url: self.app.ownership.spawn(self._send_wakes(url)))
            queues.add(queue)

    async def _send_wakes(self, url: str) -> None:
        queues = self._to_wake.pop(url, None)
        if queues:
            try:
                await self.call(url, "wake", {"queues": list(queues)})
            except MarqError as exc:
                self.log.debug("%s", exc)

    async def _tell_breakers(self, events: Events) -> None:
        for answer in await self._ask_all(self.others(), "breakers", events):
            if isinstance(answer, MarqError):
                self.log.debug("%s", answer)

    def _rank(self) -> int:
        """How many workers that own partitions come before us."""
        return sum(url < self.url for url, numbers in self.members().items() if numbers)

    def expire(self) -> None:
        """End the watches of workers that don't renew them."""
        now = asyncio.get_running_loop().time()
        for queue, urls in list(self.watchers.items()):
            for url, until in list(urls.items()):
                if until < now:
                    del urls[url]
            if not urls:
                del self.watchers[queue]

    # ------------------------------------------------------------------ life

    async def on_start(self) -> None:
        assert self._seals  # calls from before this moment are not taken
        verify: ssl.SSLContext | bool = True
        if self.app.settings.web_tls_ca_file is not None:
            verify = ssl.create_default_context(cafile=str(self.app.settings.web_tls_ca_file))
        self._session = ClientSession(
            connector=TCPConnector(limit=0, limit_per_host=CONNECTIONS, ssl=verify), cookie_jar=DummyCookieJar()
        )

    async def on_stop(self) -> None:
        for task in list(self._polls.values()):
            task.cancel()
        if self._session is not None:
            await self._session.close()

    def unreachable(self, what: str) -> UnavailableError:
        """The error for a request whose owner does not answer."""
        return UnavailableError(f"{what}: the worker that owns it can't be reached now; try again")


def _receiver(url: str) -> str:
    """A worker, as calls to it name it."""
    return url.rstrip("/")


async def _read_answer(response: ClientResponse, url: str, name: str) -> bytes:
    """The body of an answer, if it is not too large. Raises `PeerError`."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > ANSWER_MAX_BYTES:
            response.close()
            raise PeerError(f"worker {url} answered more than {ANSWER_MAX_BYTES} bytes to {name}")
        parts.append(part)
    return b"".join(parts)
