"""Worker to worker: who the others are, and calls between them.

What other workers may call is a method marked with `@peer_call(NAME)`; `Peers.register` finds those of a part of this
worker. As all workers run the same parts, the method itself says what to call and what types come back:

    answer = await peers.call(url, self.counts_here, queues)

Calls are signed with the installation's secret, which covers path and body.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import ssl
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, NamedTuple, TypeVar, get_type_hints

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from mode import Service

from app.cluster.members import Members
from app.settings import Settings
from marq.errors import BadValueError, InternalError, MarqError, NotAuthenticatedError, UnavailableError
from marq.protocol import problems

#: Seconds for an answer of another worker.
CALL_TIMEOUT_S = 5.0
#: Connections to each other worker.
CONNECTIONS = 64

HEADER = "Marq-Peer"
PATH = "/v1/peer/"
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
    """Another worker did not answer, or refused."""


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
    """What a call does here, and how its argument and answer look."""

    method: Callable[..., Awaitable[Any]]
    argument: msgspec.msgpack.Decoder[Any]
    answer: msgspec.msgpack.Decoder[Any]
    takes_gone: bool


def _operation(method: Callable[..., Awaitable[Any]]) -> _Operation:
    types = get_type_hints(method)
    answer = types.pop("return")
    takes_gone = types.pop("gone", None) is not None
    (argument,) = types.values()
    return _Operation(method, msgspec.msgpack.Decoder(argument), msgspec.msgpack.Decoder(answer), takes_gone)


def is_gone(request: web.Request) -> Gone:
    """Whether the one who asked went away."""

    def gone() -> bool:
        transport = request.transport
        return transport is None or transport.is_closing()

    return gone


class Peers(Service):
    """The other workers of the installation."""

    def __init__(self, settings: Settings, secret: Callable[[], bytes], members: Members, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._settings = settings
        self._secret = secret
        self._members = members
        self._operations: dict[str, _Operation] = {}
        self._session: ClientSession | None = None
        self._key: bytes | None = None
        self._turn = itertools.count()

    # ------------------------------------------------------------------ who

    @property
    def url(self) -> str:
        """Our own address, as the others know it."""
        return self._members.url

    @property
    def rebalancing(self) -> bool:
        """True while partitions change hands."""
        return self._members.rebalancing

    def members(self) -> dict[str, set[int]]:
        """Every worker by its URL, and the partitions that it was assigned."""
        return self._members.partitions()

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

    def rank(self) -> int:
        """How many workers that own partitions come before us."""
        return sum(url < self.url for url, numbers in self.members().items() if numbers)

    # ------------------------------------------------------------------ calls

    def register(self, part: object) -> None:
        """Let other workers call the methods of a part of this worker that are marked with `@peer_call`."""
        for attribute, function in inspect.getmembers(type(part), inspect.isfunction):
            name = getattr(function, _MARK, None)
            if name is None:
                continue
            if name in self._operations:
                raise InternalError(f"two parts of the worker answer to {name!r}")
            self._operations[name] = _operation(getattr(part, attribute))

    def _sign(self, path: str, body: bytes) -> str:
        if self._key is None:
            self._key = blake2b(self._secret(), digest_size=32, person=_PERSON).digest()
        return blake2b(path.encode() + b"\0" + body, key=self._key, digest_size=32).hexdigest()

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
        answer = await self._post(url, name, _encode(argument), timeout_s)
        try:
            found: Answer = self._operations[name].answer.decode(answer)
        except msgspec.MsgspecError as exc:
            raise PeerError(f"worker {url} answered to {name} what this one does not know: {exc}") from exc
        return found

    async def _post(self, url: str, name: str, body: bytes, timeout_s: float) -> bytes:
        path = PATH + name
        if self._session is None:
            raise PeerError("this worker has not started, or stops")
        try:
            async with self._session.post(
                url.rstrip("/") + path,
                data=body,
                headers={HEADER: self._sign(path, body), "Content-Type": "application/msgpack"},
                timeout=ClientTimeout(total=timeout_s),
            ) as response:
                answer = await response.read()
                if response.content_type == problems.CONTENT_TYPE:
                    raise problems.error_of(answer)
                if response.status != 200:
                    raise PeerError(f"worker {url} answered {response.status} to {name}")
        except (ClientError, OSError, TimeoutError) as exc:
            raise PeerError(f"worker {url} did not answer to {name}: {exc or type(exc).__name__}") from exc
        return answer

    async def everywhere(
        self, operation: Callable[[Argument], Awaitable[Answer]], argument: Argument
    ) -> dict[str, Answer | MarqError]:
        """The answers of all workers, ours included, by URL; an error where there was none."""
        urls = [url for url in self.members() if url != self.url]
        answers = await asyncio.gather(
            operation(argument), *(self.call(url, operation, argument) for url in urls), return_exceptions=True
        )
        found: dict[str, Answer | MarqError] = {}
        for url, answer in zip([self.url, *urls], answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, MarqError):
                raise answer
            found[url] = answer
        return found

    async def tell(self, operation: Callable[[Argument], Awaitable[object]], argument: Argument) -> None:
        """Tell all other workers that own partitions; who does not answer is not told."""
        told = await asyncio.gather(
            *(self.call(url, operation, argument) for url in self.others()), return_exceptions=True
        )
        for answer in told:
            if isinstance(answer, BaseException):
                self.log.debug("%s", answer)

    async def serve(self, request: web.Request) -> web.Response:
        """The route that other workers call."""
        body = await request.read()
        signature = request.headers.get(HEADER, "")
        if not compare_digest(signature.encode(), self._sign(request.path, body).encode()):
            raise NotAuthenticatedError("this path is for workers of the installation alone")
        answer = await self.answer(request.match_info["name"], body, is_gone(request))
        return web.Response(body=answer, content_type="application/msgpack")

    async def answer(self, name: str, body: bytes, gone: Gone) -> bytes:
        """What this worker answers to a call. Raises `MarqError`, or an HTTP exception for a name that it has not."""
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
        verify: ssl.SSLContext | bool = True
        if self._settings.web_tls_ca_file is not None:
            verify = ssl.create_default_context(cafile=str(self._settings.web_tls_ca_file))
        self._session = ClientSession(connector=TCPConnector(limit=0, limit_per_host=CONNECTIONS, ssl=verify))

    async def on_stop(self) -> None:
        if self._session is not None:
            await self._session.close()
