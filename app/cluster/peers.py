"""Calls between workers, and who the other workers are.

What other workers may call is a method marked with `@peer_call(NAME)`; `Peers.register` finds those of a part of this
worker. As all workers run the same parts, the method itself says what to call and what types come back:

    answer = await peers.call(url, self.counts_here, queues)

A `url` here is an address, which has the identity of a worker (`app.cluster.addresses`). Calls and answers are sealed
with the installation's secret (`app.cluster.seals`), and so are addresses: nothing is sent to one without a seal.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from hmac import compare_digest
from typing import Any, NamedTuple, TypeVar, get_type_hints

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web
from mode import Service

from app import bodies
from app.cluster import addresses
from app.cluster.addresses import Address
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
#: Header that names the worker that a call is for.
RECEIVER = "Marq-Worker"
#: Status of a call that is for another worker.
MISDIRECTED = 421
#: A call with an empty body, which tells nothing: whatever a worker answers is sealed. Earlier versions answer to it.
PROBE = "worker"
MSGPACK = "application/msgpack"
_PERSON = b"marq-peer"
#: Attribute of a method that other workers may call: the name of the call.
_MARK = "peer_call"

#: What to do where a worker is not reached at its address, and where one has another secret.
UNREACHED = "set MARQ_WEB_URL of each to an address that leads to it alone"
OTHER_SECRET = (
    "set MARQ_SECRET to the same everywhere (MARQ_SECRET_PREVIOUS while it is replaced), and see who may read the group"
)

_encode = msgspec.msgpack.Encoder().encode

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
#: Tells whether the worker that asked went away.
Gone = Callable[[], bool]


class PeerError(UnavailableError):
    """Another worker did not answer, or refused the call."""


class MemberTrouble(msgspec.Struct, frozen=True):
    """What keeps workers from reaching each other, and what to do."""

    what: str
    mend: str


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
        self._addresses: dict[str, Address] = {}  # taken apart
        self._misdirected: dict[str, str] = {}  # address -> that of the worker that answers there
        self._told: frozenset[MemberTrouble] = frozenset()  # that were logged

    # ------------------------------------------------------------------ who

    @property
    def url(self) -> str:
        """Address at which the other workers reach this one."""
        return self._members.url

    @property
    def shown_url(self) -> str:
        """URL of this worker, for people."""
        return self._at(self.url).url

    def shown(self, url: str) -> str:
        """The URL of another worker, for people."""
        return self._at(url).url

    def announce(self, url: str, name: str) -> str:
        """The address of this process, with a new identity. `name`: the worker's."""
        return addresses.announce(url, addresses.new_identity(name), self._keys_for(addresses.PURPOSE))

    def admits(self, url: str) -> bool:
        """Tells whether a member of the group with this address may get partitions: not if it has another secret."""
        return self._at(url).may_be_ours

    def _at(self, url: str) -> Address:
        found = self._addresses.get(url)
        if found is None:
            known = {one: self._addresses[one] for one in self.members() if one in self._addresses}
            found = addresses.read(url, lambda: self._keys_for(addresses.PURPOSE))
            self._addresses = known | {url: found}
        return found

    def missing(self, answers: Mapping[str, object]) -> list[str]:
        """Workers that did not answer, with their partitions."""
        members = self.members()
        return sorted(
            f"{self._at(url).url}{_partitions(members.get(url, ()))}"
            for url, answer in answers.items()
            if isinstance(answer, MarqError)
        )

    def unseen(self, answers: Mapping[str, object]) -> set[int]:
        """The partitions of workers that did not answer: they may be served."""
        members = self.members()
        silent = (url for url, answer in answers.items() if isinstance(answer, MarqError))
        return {number for url in silent for number in members.get(url, ())}

    def troubles(self) -> list[MemberTrouble]:
        """Workers that can't be told apart or are not what they say, by their addresses and the answers of calls."""
        members, found = self.members(), []
        by_url: dict[str, list[str]] = {}
        for url in members:
            by_url.setdefault(self._at(url).url, []).append(url)
        for shown, urls in sorted(by_url.items()):
            if len(urls) > 1:
                workers = " and ".join(sorted(map(self._identity, urls)))
                found.append(MemberTrouble(f"{workers} announce the same address, {shown}", UNREACHED))
        for url, other in sorted(self._misdirected.items()):
            if {url, other} <= members.keys() and self._at(url).url != self._at(other).url:
                what = f"{self._identity(other)} answers at {self._at(url).url}, the address of {self._identity(url)}"
                found.append(MemberTrouble(what, UNREACHED))
        for url in sorted(members):
            if not self.admits(url):
                what = f"{self._at(url).url} is in the group, but has another secret or is no worker: it is not called"
                found.append(MemberTrouble(what, OTHER_SECRET))
        return found

    def _identity(self, url: str) -> str:
        return f"worker {self._at(url).worker}" if self._at(url).worker else "a worker of an earlier version"

    def members_changed(self) -> None:
        """Log what is wrong with the members now and was not before."""
        found = frozenset(self.troubles())
        for trouble in sorted(found - self._told, key=lambda one: one.what):
            self.log.error("%s: %s", trouble.what, trouble.mend)
        self._told = found

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
            raise PeerError(f"worker {self._at(url).url} did not answer to {name} as a worker does: {exc}") from exc
        return found

    async def _send(self, url: str, name: str, body: bytes, timeout_s: float) -> tuple[str, bytes]:
        """Content type and body of an answer, after its seal was checked."""
        address = self._at(url)
        if not address.may_be_ours:
            raise PeerError(f"{address.url} is not called: it has another secret, or is no worker")
        if not address.is_proven:
            await self._exchange(url, address, PROBE, b"", timeout_s)
            self._addresses[url] = address._replace(is_proven=True)
        return await self._exchange(url, address, name, body, timeout_s)

    async def _exchange(
        self, url: str, address: Address, name: str, body: bytes, timeout_s: float
    ) -> tuple[str, bytes]:
        seals, key, learned, shown = self._seals, 0, False, address.url
        while True:
            try:
                status, content_type, header, answer, call = await self._post(url, address, name, body, key, timeout_s)
            except (ClientError, OSError, TimeoutError) as exc:
                raise PeerError(f"worker {shown} did not answer to {name}: {reason_of(exc)}") from exc
            try:
                seals.check_answer(call, header, status, content_type, answer)
            except OtherVersionError as exc:
                raise PeerError(f"worker {shown} answered {status} to {name}, in {exc}") from None
            except NotAuthenticatedError:
                if status == 401 and key + 1 < seals.key_count:
                    key += 1  # while a secret is being replaced: the other worker may know only the other one
                    continue
                raise PeerError(f"worker {shown} answered {status} to {name}, without a seal") from None
            if status == MISDIRECTED:
                other = self._misdirected[url] = answer.decode()
                self.members_changed()
                raise PeerError(f"{self._identity(other)} answers at {shown}, the address of {self._identity(url)}")
            if status == 401 and not learned:
                seals.learn_time(call, header)
                learned = True
                continue
            if status != 200 and content_type != problems.CONTENT_TYPE:
                raise PeerError(f"worker {shown} answered {status} to {name}")
            self._misdirected.pop(url, None)
            return content_type, answer

    async def _post(
        self, url: str, address: Address, name: str, body: bytes, key: int, timeout_s: float
    ) -> tuple[int, str, str, bytes, Call]:
        """Status, content type, seal and body of an answer, and the call that it belongs to."""
        path, receiver = PATH + name, _receiver(url)
        call, header = self._seals.call("POST", path, receiver, body, key)
        if self._session is None:
            raise PeerError("this worker has not started, or stops")
        async with self._session.post(
            address.url + path,
            data=body,
            headers={HEADER: header, RECEIVER: receiver, "Content-Type": MSGPACK},
            timeout=ClientTimeout(total=timeout_s),
            allow_redirects=False,
        ) as response:
            answer = await _read_answer(response, address.url, name)
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
        except NotAuthenticatedError:
            return self._misdirect(request, header)
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

    def _misdirect(self, request: web.Request, header: str) -> web.Response:
        """Tell a worker whose call is for another one who answers here. Raises `NotAuthenticatedError` for others."""
        call, key = self._seals.open(header, request.method, request.raw_path, request.headers.get(RECEIVER, ""))
        body = self.url.encode()
        seal = self._seals.answer(call, key, MISDIRECTED, MSGPACK, body)
        return web.Response(body=body, status=MISDIRECTED, content_type=MSGPACK, headers={HEADER: seal})

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


def _partitions(numbers: Iterable[int]) -> str:
    """The partitions of a worker, behind its URL."""
    listed = ", ".join(map(str, sorted(numbers)))
    return f" (partition{'s' if ',' in listed else ''} {listed})" if listed else ""


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
