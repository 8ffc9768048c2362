"""The JSON API (msgpack too): HTTP and codec around the operations of `app.service.operations`."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from app.cluster import peers
from app.service.operations import Outgoing, QueueInfo, QueueService, Sent
from app.service.receives import Received
from gateway.auth import ALL, PERMISSIONS, Grants, Keys, check_browser
from gateway.openapi import Operation
from marq.core.policies import QUEUE_NAME_MAX, TTL_MAX_MS, Delay, Lease, QueueSettings
from marq.errors import BadValueError, MarqError, NotAllowedError, UnavailableError
from marq.protocol import problems

if TYPE_CHECKING:
    from app.worker import WorkerApp

log = logging.getLogger(__name__)

JSON = "application/json"
MSGPACK = "application/msgpack"
#: Whoever asks may know whether a worker is well.
HEALTH = "/health/"
#: Seconds that a client has for the body of a request.
BODY_TIMEOUT_S = 30.0
#: Messages or receipts in one request.
BATCH_MAX = 10_000
#: Messages that one request moves.
MOVE_MAX = 1_000
#: Messages that one receive takes.
RECEIVE_MAX = 1_000
#: Longest wait of a receive.
WAIT_MAX_MS = 60_000

Name = Annotated[str, Meta(max_length=200)]
Receipts = Annotated[list[str], Meta(min_length=1, max_length=BATCH_MAX)]


class Message(Outgoing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a send, with what values it may have."""

    delay_ms: Delay | None = None
    ttl_ms: Annotated[int, Meta(ge=1, le=TTL_MAX_MS)] | None = None
    group: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    deduplication_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class Send(msgspec.Struct, forbid_unknown_fields=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=BATCH_MAX)]


class Receive(msgspec.Struct, forbid_unknown_fields=True):
    max: Annotated[int, Meta(ge=1, le=RECEIVE_MAX)] = 1
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MAX_MS)] = 0
    visibility_timeout_ms: Lease | None = None
    receiver: Name = ""


class Ack(msgspec.Struct, forbid_unknown_fields=True):
    receipts: Receipts


class Extend(msgspec.Struct, forbid_unknown_fields=True):
    receipts: Receipts
    visibility_timeout_ms: Lease


class Release(msgspec.Struct, forbid_unknown_fields=True):
    receipts: Receipts
    delay_ms: Delay | None = None  # None: the back-off of the queue, if it has one
    counted: bool = True


class Reject(msgspec.Struct, forbid_unknown_fields=True):
    receipts: Receipts
    reason: Name = "rejected"


class Place(msgspec.Struct, forbid_unknown_fields=True):
    """Where a message is."""

    partition: Annotated[int, Meta(ge=0, lt=1 << 31)]
    offset: Annotated[int, Meta(ge=0, lt=1 << 62)]


class Move(msgspec.Struct, forbid_unknown_fields=True):
    """Which messages go where: those named, or up to `max` in their order. Without `to`: dead letters, back to where
    they come from."""

    to: Annotated[str, Meta(min_length=1, max_length=QUEUE_NAME_MAX)] | None = None
    messages: Annotated[list[Place], Meta(min_length=1, max_length=MOVE_MAX)] | None = None
    max: Annotated[int, Meta(ge=1, le=MOVE_MAX)] | None = None


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class ListQueues(msgspec.Struct, forbid_unknown_fields=True):
    prefix: Name = ""
    after: Annotated[str, Meta(max_length=QUEUE_NAME_MAX)] = ""
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class Queues(msgspec.Struct):
    queues: list[QueueInfo]
    after: str  # where the next page begins; empty: this is the last


class Done(msgspec.Struct):
    ok: bool = True


class Problem(msgspec.Struct):
    type: str
    title: str
    detail: str


class SendResult(msgspec.Struct):
    """Where the message is, or why it is not there."""

    topic: str | msgspec.UnsetType = msgspec.UNSET
    partition: int | msgspec.UnsetType = msgspec.UNSET
    offset: int | msgspec.UnsetType = msgspec.UNSET
    error: Problem | msgspec.UnsetType = msgspec.UNSET


class SettleResult(msgspec.Struct):
    """Done, or why not."""

    ok: bool | msgspec.UnsetType = msgspec.UNSET
    error: Problem | msgspec.UnsetType = msgspec.UNSET


class SendResults(msgspec.Struct):
    results: list[SendResult]


class SettleResults(msgspec.Struct):
    results: list[SettleResult]


class Results(msgspec.Struct):
    results: list[Any]


class Messages(msgspec.Struct):
    messages: list[Received]


_OK = {"ok": True}
_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode
Encode = Callable[[Any], bytes]


class Body:
    """Decodes one kind of request body."""

    def __init__(self, kind: type) -> None:
        self._json = msgspec.json.Decoder(kind)
        self._msgpack = msgspec.msgpack.Decoder(kind)

    async def read(self, request: web.Request) -> Any:
        """The body of a request. Raises `BadValueError`, or an HTTP exception where it can't be read."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                raw = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from None
        content_type = request.content_type
        try:
            if content_type == MSGPACK:
                return self._msgpack.decode(raw or b"\x80")
            if content_type == JSON:
                return self._json.decode(raw or b"{}")
            if not raw:
                return self._json.decode(b"{}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadValueError(f"the body is not what it has to be: {exc}") from None
        raise web.HTTPUnsupportedMediaType(text=f"Content-Type is {content_type}; it has to be {JSON} or {MSGPACK}")


Query = TypeVar("Query")


def query_of(request: web.Request, kind: type[Query]) -> Query:
    """The parameters of a query. Raises `BadValueError`."""
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as exc:
        raise BadValueError(f"the query is not what it has to be: {exc}") from None


def answers_msgpack(request: web.Request) -> bool:
    """Whether the answer is to be msgpack: as `Accept` says, else like the request."""
    accept = request.headers.get("Accept", "*/*")
    if MSGPACK in accept:
        return True
    return request.content_type == MSGPACK and JSON not in accept


def answer(request: web.Request, value: Any, status: int = 200) -> web.Response:
    """An answer in the codec that the client asked for."""
    if answers_msgpack(request):
        return web.Response(body=_to_msgpack(value), status=status, content_type=MSGPACK)
    return web.Response(body=_to_json(value), status=status, content_type=JSON)


def problem(error: BaseException) -> web.Response:
    """The answer that says what is wrong."""
    status, name, title = problems.kind_of(error)
    response = problem_of(status, name, title, str(error) if status != 500 else "see the worker's log")
    if isinstance(error, UnavailableError):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return response


def problem_of(status: int, name: str, title: str, detail: str) -> web.Response:
    """An answer with problem details."""
    return web.Response(
        body=_to_json(problems.body(status, name, title, detail)), status=status, content_type=problems.CONTENT_TYPE
    )


def results(outcomes: list[MarqError | None]) -> Results:
    """The answer per receipt."""
    return Results([_OK if outcome is None else {"error": problems.entry(outcome)} for outcome in outcomes])


def sent(places: Sequence[Sent | MarqError]) -> Results:
    """The answer per message."""
    return Results([{"error": problems.entry(s)} if isinstance(s, MarqError) else s for s in places])


def _is_gone(request: web.Request) -> Callable[[], bool]:
    def gone() -> bool:
        transport = request.transport
        return transport is None or transport.is_closing()

    return gone


def may_see(grants: Grants, queue: str) -> bool:
    """Whoever may do anything with a queue may know that it is there, and how it is set."""
    return any(grants.allow(permission, queue) for permission in PERMISSIONS)


class JsonApi:
    """The routes."""

    def __init__(self, door: QueueService) -> None:
        self.operations = door
        self._send, self._receive = Body(Send), Body(Receive)
        self._ack, self._extend, self._release = Body(Ack), Body(Extend), Body(Release)
        self._reject, self._move = Body(Reject), Body(Move)
        self._settings, self._nothing = Body(dict[str, Any]), Body(Nothing)

    async def send(self, request: web.Request) -> web.Response:
        body: Send = await self._send.read(request)
        return answer(request, sent(await self.operations.send(request.match_info["queue"], body.messages)))

    async def receive(self, request: web.Request) -> web.Response:
        body: Receive = await self._receive.read(request)
        messages = await self.operations.receive(
            request.match_info["queue"],
            limit=body.max,
            wait_ms=body.wait_ms,
            lease_ms=body.visibility_timeout_ms,
            name=body.receiver,
            gone=_is_gone(request),
        )
        return answer(request, Messages(messages))

    async def ack(self, request: web.Request) -> web.Response:
        body: Ack = await self._ack.read(request)
        return answer(request, results(await self.operations.ack(body.receipts)))

    async def extend(self, request: web.Request) -> web.Response:
        body: Extend = await self._extend.read(request)
        return answer(request, results(await self.operations.extend(body.receipts, body.visibility_timeout_ms)))

    async def release(self, request: web.Request) -> web.Response:
        body: Release = await self._release.read(request)
        return answer(request, results(await self.operations.release(body.receipts, body.delay_ms, body.counted)))

    async def reject(self, request: web.Request) -> web.Response:
        body: Reject = await self._reject.read(request)
        return answer(request, results(await self.operations.reject(body.receipts, body.reason)))

    async def move(self, request: web.Request) -> web.Response:
        queue, body = request.match_info["queue"], await self._move.read(request)
        # where dead letters come from is not known before they are read
        request[GRANTS].require("send", body.to, everywhere=True)
        if (body.messages is None) == (body.max is None):
            raise BadValueError("say which messages are to be moved: either `messages` or `max`")
        if body.messages is not None:
            moved = await self.operations.move(queue, [(m.partition, m.offset) for m in body.messages], body.to)
        else:
            moved = await self.operations.move_some(queue, body.max, body.to)
        return answer(request, sent(moved))

    # -- queues

    async def create_queue(self, request: web.Request) -> web.Response:
        values = await self._settings.read(request)
        info, made = await self.operations.create_queue(request.match_info["queue"], values)
        return answer(request, info, 201 if made else 200)

    async def update_queue(self, request: web.Request) -> web.Response:
        values = await self._settings.read(request)
        return answer(request, await self.operations.update_queue(request.match_info["queue"], values))

    async def get_queue(self, request: web.Request) -> web.Response:
        queue = request.match_info["queue"]
        if not may_see(request[GRANTS], queue):
            raise NotAllowedError(f"this key has no permission for queue {queue!r}")
        return answer(request, self.operations.get_queue(queue))

    async def list_queues(self, request: web.Request) -> web.Response:
        query, grants = query_of(request, ListQueues), request[GRANTS]
        queues, after = self.operations.list_queues(query.prefix, query.after, query.limit, partial(may_see, grants))
        return answer(request, Queues(queues, after))

    async def delete_queue(self, request: web.Request) -> web.Response:
        await self.operations.delete_queue(request.match_info["queue"])
        return answer(request, Done())

    async def purge_queue(self, request: web.Request) -> web.Response:
        await self._nothing.read(request)
        await self.operations.purge_queue(request.match_info["queue"])
        return answer(request, Done(), 202)


Handler = Callable[[web.Request], Awaitable[Any]]
#: Where the permissions of a request are kept.
GRANTS = web.RequestKey("grants", Grants)


def guard(keys: Keys) -> Any:
    """Middleware around everything that is served: who may, and every error as problem details."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> Any:
        try:
            guards_itself = getattr(request.match_info.handler, "guards_itself", False)
            if not guards_itself and not request.path.startswith((peers.PATH, HEALTH)):
                if keys:
                    request[GRANTS] = keys.grants_of(request.headers)
                else:
                    check_browser(request.method, request.headers)
                    request[GRANTS] = ALL
            return await handler(request)
        except MarqError as exc:
            return problem(exc)
        except web.HTTPException as exc:
            if exc.status < 400:
                raise
            response = problem_of(exc.status, "http", exc.reason, exc.text or exc.reason)
            for name in ("Allow", "Retry-After"):
                if name in exc.headers:
                    response.headers[name] = exc.headers[name]
            return response
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as exc:
            log.exception("%s %s failed", request.method, request.path)
            return problem(exc)

    return guarded


def secured(permission: str, handler: Handler, everywhere: bool = False) -> Handler:
    """`handler` for those who have a permission, for the queue in the path if there is one."""

    async def checked(request: web.Request) -> Any:
        request[GRANTS].require(permission, request.match_info.get("queue"), everywhere)
        return await handler(request)

    return checked


def operations_of(api: JsonApi) -> list[Operation]:
    """What this API offers."""
    queue = "/v1/queues/{queue}"
    return [
        Operation("POST", f"{queue}/messages", "send", api.send, "Send messages", Send, response=SendResults),
        Operation("POST", f"{queue}/receive", "receive", api.receive, "Take messages", Receive, response=Messages),
        Operation("POST", "/v1/ack", "receive", api.ack, "Finished: never again", Ack, response=SettleResults),
        Operation("POST", "/v1/extend", "receive", api.extend, "Still at work", Extend, response=SettleResults),
        Operation("POST", "/v1/release", "receive", api.release, "Give back", Release, response=SettleResults),
        Operation("POST", "/v1/reject", "receive", api.reject, "Dead letters now", Reject, response=SettleResults),
        Operation(
            "POST",
            f"{queue}/move",
            "receive",
            api.move,
            "Put into another queue, each once",
            Move,
            response=SendResults,
        ),
        Operation(
            "GET", "/v1/queues", None, api.list_queues, "List queues", query=ListQueues, response=Queues, tag="queues"
        ),
        Operation("GET", queue, None, api.get_queue, "A queue and its settings", response=QueueInfo, tag="queues"),
        Operation(
            "PUT",
            queue,
            "manage",
            api.create_queue,
            "Make a queue, or set all its settings",
            QueueSettings,
            response=QueueInfo,
            statuses=(200, 201),
            tag="queues",
        ),
        Operation(
            "PATCH",
            queue,
            "manage",
            api.update_queue,
            "Set some settings",
            QueueSettings,
            response=QueueInfo,
            tag="queues",
        ),
        Operation(
            "DELETE", queue, "manage", api.delete_queue, "Delete a queue and what is in it", response=Done, tag="queues"
        ),
        Operation(
            "POST",
            f"{queue}/purge",
            "manage",
            api.purge_queue,
            "Drop everything that is in a queue now",
            response=Done,
            statuses=(202,),
            tag="queues",
        ),
    ]


def register(app: WorkerApp, operations: list[Operation]) -> None:
    """Put operations on Faust's web server."""
    for one in operations:
        handler = secured(one.permission, one.handler, one.everywhere) if one.permission else one.handler
        # the name of a queue may have braces in it
        app.web.web_app.router.add_route(one.method, one.path.replace("{queue}", "{queue:[^/]+}"), handler)


def define(app: WorkerApp) -> list[Operation]:
    """Register the routes; what they are."""
    operations = operations_of(JsonApi(app.operations))
    register(app, operations)
    app.web.web_app.router.add_post(peers.PATH + "{name}", app.peers.serve)
    app.peers.register("receive", lambda argument: _receive_for_peer(app.operations, *argument))
    return operations


async def _receive_for_peer(door: QueueService, argument: dict[str, Any], request: web.Request) -> list[Received]:
    return await door.receives.receive_here(
        argument["queue"],
        argument["limit"],
        argument["lease_ms"],
        argument["name"],
        _is_gone(request),
        argument.get("whole", False),
    )
