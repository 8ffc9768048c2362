"""Calls between workers, and who the other workers are.

What other workers may call is a method marked with `@peer_call(NAME)`; `Peers.register` finds those of a part of this
worker. As all workers run the same parts, the method itself says what to call and what types come back:

    answer = await peers.call(url, self.counts_here, queues)

Calls and answers are sealed with the installation's secret (`app.cluster.seals`).
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, cached_property
from hmac import compare_digest
from typing import Any, NamedTuple, TypeVar, get_type_hints

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web
from mode import Service

from app import bodies
from app.cluster.members import Members
from app.cluster.seals import HEADER, VERSION, Call, OtherVersionError, Seals, StaleCallError, hash_of
from app.settings import Settings
from marq.clock import now_ms
from marq.errors import BadValueError, InternalError, MarqError, NotAuthenticatedError, UnavailableError
from marq.protocol import problems
from marq.text import reason_of

#: Seconds for an answer of another worker.
CALL_TIMEOUT_S = 5.0
#: Connections to each other worker.
CONNECTIONS = 64
#: Most bytes of a call's body, and seconds until it must have arrived.
CALL_MAX_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT_S = 10.0
#: Most bytes of an answer: `app.service.receives.ANSWER_BYTES`, the last message that exceeds it, and the rest.
ANSWER_MAX_BYTES = 64 * 1024 * 1024
#: Seconds between two log lines about workers of another version: anybody can claim to be one.
VERSION_LOG_S = 60.0

PATH = "/v1/peer/"
MSGPACK = "application/msgpack"
_PERSON = b"marq-peer"
#: Attribute of a method that other workers may call: the name of the call.
_MARK = "peer_call"

_encode = msgspec.msgpack.Encoder().encode

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
#: Tells whether the worker that asked went away.
Gone = Callable[[], bool]


class PeerError(UnavailableError):
    """Another worker did not answer, or refused the call."""


def peer_call(name: str) -> Callable[[Method], Method]:
    """Mark a method that other workers may call by a name.

    It takes one argument and returns an answer, both annotated with types that msgspec knows. If it has a parameter
    `gone`, it is told there whether the worker that asked went away.
    """

    def mark(method: Method) -> Method:
        setattr(method, _MARK, name)
        return method

    return mark


class _Operation(NamedTuple):
    """A call that this worker answers: the method, and the types of its argument and answer."""

    method: Callable[..., Awaitable[Any]]
    argument: msgspec.msgpack.Decoder[Any]
    answer: msgspec.msgpack.Decoder[Any]
    takes_gone: bool


@cache
def _types_of(function: Callable[..., Any]) -> tuple[msgspec.msgpack.Decoder[Any], msgspec.msgpack.Decoder[Any], bool]:
    """The decoders of the argument and the answer, and whether it asks if the caller went away."""
    types = get_type_hints(function)
    answer = types.pop("return")
    takes_gone = types.pop("gone", None) is not None
    (argument,) = types.values()
    return msgspec.msgpack.Decoder(argument), msgspec.msgpack.Decoder(answer), takes_gone


def is_gone(request: web.Request) -> Gone:
    """Whether the caller went away."""

    def gone() -> bool:
        transport = request.transport
        return transport is None or transport.is_closing()

    return gone


async def _answers(*asked: Awaitable[Answer]) -> list[Answer | MarqError]:
    """The results in order. A `MarqError` is returned as a result; any other error is raised."""
    found: list[Answer | MarqError] = []
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, BaseException) and not isinstance(answer, MarqError):
            raise answer
        found.append(answer)
    return found


class Peers(Service):
    """The other workers of the installation."""

    def __init__(
        self, settings: Settings, keys_for: Callable[[bytes], Sequence[bytes]], members: Members, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._settings = settings
        self._keys_for = keys_for
        self._members = members
        self._operations: dict[str, _Operation] = {}
        self._session: ClientSession | None = None
        self._turn = itertools.count()
        self._version_said_s = -VERSION_LOG_S

    # ------------------------------------------------------------------ who

    @property
    def url(self) -> str:
        """URL at which the other workers reach this one."""
        return self._members.url

    @property
    def rebalancing(self) -> bool:
        """True while partitions change hands."""
        return self._members.rebalancing

    def members(self) -> dict[str, set[int]]:
        """Every worker by its URL, and the partitions that it was assigned."""
        return self._members.partitions()

    def others(self) -> list[str]:
        """URLs of the other workers that own partitions, in an order that rotates with each call."""
        urls = [url for url, numbers in self.members().items() if numbers and url != self.url]
        if len(urls) < 2:
            return urls
        first = next(self._turn) % len(urls)
        return urls[first:] + urls[:first]

    def owner_of(self, number: int) -> str | None:
        """URL of the worker that was assigned a partition."""
        return next((url for url, numbers in self.members().items() if number in numbers), None)

    def rank(self) -> int:
        """Our place among the workers that own partitions, from 0."""
        return sum(url < self.url for url, numbers in self.members().items() if numbers)

    # ------------------------------------------------------------------ calls

    def register(self, part: object) -> None:
        """Let other workers call the methods of a part of this worker that are marked with `@peer_call`."""
        for attribute in dict.fromkeys(attribute for kind in type(part).__mro__ for attribute in vars(kind)):
            function = getattr(type(part), attribute)
            name = getattr(function, _MARK, None)
            if name is None:
                continue
            if name in self._operations:
                raise InternalError(f"two parts of the worker answer to {name!r}")
            self._operations[name] = _Operation(getattr(part, attribute), *_types_of(function))

    @cached_property
    def _seals(self) -> Seals:
        return Seals(self._keys_for(_PERSON), now_ms)

    async def call(
        self,
        url: str,
        operation: Callable[[Argument], Awaitable[Answer]],
        argument: Argument,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Answer:
        """Ask another worker for what `operation`, a method of a part that is registered, does there.

        Raises:
            PeerError: it did not answer.
            MarqError: what it answered was an error.
        """
        name: str = getattr(operation, _MARK)
        content_type, answer = await self._send(url, name, _encode(argument), timeout_s)
        try:
            if content_type == problems.CONTENT_TYPE:
                raise problems.error_of(answer)
            found: Answer = self._operations[name].answer.decode(answer)
        except msgspec.MsgspecError as exc:
            raise PeerError(f"worker {url} did not answer to {name} as a worker does: {exc}") from exc
        return found

    async def _send(self, url: str, name: str, body: bytes, timeout_s: float) -> tuple[str, bytes]:
        """Content type and body of an answer, after its seal was checked."""
        seals, key, learned = self._seals, 0, False
        while True:
            try:
                status, content_type, header, answer, call = await self._post(url, name, body, key, timeout_s)
            except (ClientError, OSError, TimeoutError) as exc:
                raise PeerError(f"worker {url} did not answer to {name}: {reason_of(exc)}") from exc
            try:
                seals.check_answer(call, header, status, content_type, answer)
            except OtherVersionError as exc:
                raise PeerError(f"worker {url} answered {status} to {name}, in {exc}") from None
            except NotAuthenticatedError:
                if status == 401 and key + 1 < seals.key_count:
                    key += 1  # while a secret is being replaced: the other worker may know only the other one
                    continue
                raise PeerError(f"worker {url} answered {status} to {name}, without a seal") from None
            if status == 401 and not learned:
                seals.learn_time(call, header)
                learned = True
                continue
            if status != 200 and content_type != problems.CONTENT_TYPE:
                raise PeerError(f"worker {url} answered {status} to {name}")
            return content_type, answer

    async def _post(
        self, url: str, name: str, body: bytes, key: int, timeout_s: float
    ) -> tuple[int, str, str, bytes, Call]:
        """Status, content type, seal and body of an answer, and the call that it belongs to."""
        path = PATH + name
        call, header = self._seals.call("POST", path, _receiver(url), body, key)
        if self._session is None:
            raise PeerError("this worker has not started, or stops")
        async with self._session.post(
            url.rstrip("/") + path,
            data=body,
            headers={HEADER: header, "Content-Type": MSGPACK},
            timeout=ClientTimeout(total=timeout_s),
            allow_redirects=False,
        ) as response:
            answer = await _read_answer(response, url, name)
            return response.status, response.content_type, response.headers.get(HEADER, ""), answer, call

    async def everywhere(
        self, operation: Callable[[Argument], Awaitable[Answer]], argument: Argument
    ) -> dict[str, Answer | MarqError]:
        """The answers of all workers by URL, ours included; the error of a worker that gave none."""
        urls = [url for url in self.members() if url != self.url]
        answers = await _answers(operation(argument), *(self.call(url, operation, argument) for url in urls))
        return dict(zip([self.url, *urls], answers, strict=True))

    async def ask_all(
        self, urls: Sequence[str], operation: Callable[[Argument], Awaitable[Answer]], argument: Argument
    ) -> list[Answer | MarqError]:
        """The answers of other workers in order; the error of a worker that gave none."""
        return await _answers(*(self.call(url, operation, argument) for url in urls))

    async def tell(self, operation: Callable[[Argument], Awaitable[object]], argument: Argument) -> None:
        """Call all other workers that own partitions. Errors are ignored."""
        for answer in await self.ask_all(self.others(), operation, argument):
            if isinstance(answer, MarqError):
                self.log.debug("%s", answer)

    async def serve(self, request: web.Request) -> web.Response:
        """The route that other workers call. A body is read only after the seal in the header was checked."""
        seals, header = self._seals, request.headers.get(HEADER, "")
        try:
            call, key = seals.open(header, request.method, request.raw_path, _receiver(self.url))
        except OtherVersionError as exc:
            return self._other_version(request, exc)
        status, content_type = 200, MSGPACK
        try:
            seals.take(call)
            body = await bodies.read(request, CALL_MAX_BYTES, timeout_s=BODY_TIMEOUT_S)
            if not compare_digest(hash_of(body), call.body):
                raise NotAuthenticatedError("the body is not the one that was sealed")
            answer = await self.answer(request.match_info["name"], body, is_gone(request))
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

    def _other_version(self, request: web.Request, error: OtherVersionError) -> web.Response:
        """Tell a worker of another version which one is known here; and the log, as its messages don't come."""
        if time.monotonic() - self._version_said_s >= VERSION_LOG_S:
            self._version_said_s = time.monotonic()
            self.log.warning(
                "A worker at %s called with %s: workers have to be of one version of marq", request.remote, error
            )
        status, problem, title = problems.kind_of(error)
        body = msgspec.json.encode(problems.body(status, problem, title, str(error)))
        headers = {HEADER: f"version={VERSION}"}
        return web.Response(body=body, status=status, content_type=problems.CONTENT_TYPE, headers=headers)

    async def answer(self, name: str, body: bytes, gone: Gone) -> bytes:
        """The answer of this worker to a call. Raises `MarqError`, or an HTTP exception for an unknown name."""
        operation = self._operations.get(name)
        if operation is None:
            raise web.HTTPNotFound
        try:
            argument = operation.argument.decode(body)
        except msgspec.MsgspecError as exc:
            raise BadValueError(f"this is not what {name} takes: {exc}") from None
        if operation.takes_gone:
            return _encode(await operation.method(argument, gone=gone))
        return _encode(await operation.method(argument))

    # ------------------------------------------------------------------ life

    async def on_start(self) -> None:
        assert self._seals  # calls made before this moment are refused
        verify: ssl.SSLContext | bool = True
        if self._settings.web_tls_ca_file is not None:
            verify = ssl.create_default_context(cafile=str(self._settings.web_tls_ca_file))
        self._session = ClientSession(
            connector=TCPConnector(limit=0, limit_per_host=CONNECTIONS, ssl=verify), cookie_jar=DummyCookieJar()
        )

    async def on_stop(self) -> None:
        session, self._session = self._session, None  # else a call that begins later fails with a RuntimeError
        if session is not None:
            await session.close()


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
