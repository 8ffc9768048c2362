"""The JSON API (msgpack too): HTTP and codec around the operations of `app.service.operations`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from app.bodies import Room
from app.cluster.peers import is_gone
from app.service.operations import QueueService
from gateway.auth import may_see
from gateway.openapi import Operation
from gateway.replies import UNREAD
from gateway.routes import GRANTS, MSGPACK, Body, answer, answers_msgpack, media_type, query_of, register
from gateway.schemas import (
    PLACES_BYTES,
    RECEIPTS_BYTES,
    SETTINGS_BYTES,
    Ack,
    Done,
    Extend,
    ListQueues,
    Messages,
    Move,
    Nothing,
    Queues,
    Receive,
    Reject,
    Release,
    Results,
    Send,
    SendResults,
    SettleResults,
    entries_of,
    told_all,
)
from marq.core.policies import QueueSettings
from marq.errors import BadValueError, MarqError, NotAllowedError
from marq.protocol import problems
from marq.protocol.messages import QueueInfo, Sent

_OK = {"ok": True}


def results(outcomes: list[MarqError | None]) -> Results:
    """The result for each receipt."""
    return Results([_OK if outcome is None else {"error": problems.entry(outcome)} for outcome in outcomes])


def sent(places: Sequence[Sent | MarqError]) -> Results:
    """The result for each message."""
    return Results([{"error": problems.entry(s)} if isinstance(s, MarqError) else s for s in places])


class JsonApi:
    """The routes."""

    def __init__(self, operations: QueueService, max_body_bytes: int, room: Room, answers: Room) -> None:
        self.operations = operations
        self._answers = answers
        self._send = Body(Send, max_body_bytes, room)
        self._ack, self._extend = Body(Ack, RECEIPTS_BYTES, room), Body(Extend, RECEIPTS_BYTES, room)
        self._release, self._reject = Body(Release, RECEIPTS_BYTES, room), Body(Reject, RECEIPTS_BYTES, room)
        self._move = Body(Move, PLACES_BYTES, room)
        self._receive, self._nothing = Body(Receive, SETTINGS_BYTES, room), Body(Nothing, SETTINGS_BYTES, room)
        self._settings = Body(dict[str, Any], SETTINGS_BYTES, room)

    async def send(self, request: web.Request) -> web.Response:
        queue, body = request.match_info["queue"], await self._send.read(request)
        messages = await entries_of(body.messages, media_type(request.headers) == MSGPACK)
        self._make(request, queue)
        return answer(request, sent(await self.operations.send(queue, messages)))

    def _make(self, request: web.Request, queue: str) -> None:
        """Count `queue` if this request makes it. Raises `UnavailableError` if its key makes too many queues."""
        if not self.operations.catalog.exists(queue):
            request[GRANTS].make_queue()

    async def receive(self, request: web.Request) -> web.Response:
        body: Receive = await self._receive.read(request)
        self._answers.require_for_answer(request)
        with request[GRANTS].wait(body.wait_ms):
            messages = await self.operations.receive(
                request.match_info["queue"],
                limit=body.max,
                wait_ms=body.wait_ms,
                lease_ms=body.visibility_timeout_ms,
                name=body.receiver,
                gone=is_gone(request),
            )
        if messages:
            request[UNREAD] = partial(self.operations.give_back, messages)
        if body.as_ == "base64":
            return answer(request, {"messages": messages})
        return answer(request, {"messages": await told_all(messages, body.as_, answers_msgpack(request))})

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
        # each dead letter may come from another queue, which is known only when it is read
        request[GRANTS].require("send", body.to, everywhere=True)
        if body.to is not None:
            self._make(request, body.to)
        if body.messages is not None and body.max is None:
            moved = await self.operations.move(queue, [(m.partition, m.offset) for m in body.messages], body.to)
        elif body.max is not None and body.messages is None:
            moved = await self.operations.move_some(queue, body.max, body.to)
        else:
            raise BadValueError("say which messages are to be moved: either `messages` or `max`")
        return answer(request, sent(moved))

    # -- queues

    async def create_queue(self, request: web.Request) -> web.Response:
        queue, values = request.match_info["queue"], await self._settings.read(request)
        self._require_dead_letters(request, queue, values)
        self._make(request, queue)
        info, made = await self.operations.create_queue(queue, values)
        return answer(request, info, 201 if made else 200)

    async def update_queue(self, request: web.Request) -> web.Response:
        queue, values = request.match_info["queue"], await self._settings.read(request)
        self._require_dead_letters(request, queue, values)
        return answer(request, await self.operations.update_queue(queue, values))

    def _require_dead_letters(self, request: web.Request, queue: str, values: dict[str, Any]) -> None:
        """Naming another dead-letter queue needs the permission to send to it. Raises `NotAllowedError`."""
        target = values.get("dead_letter_queue")
        if isinstance(target, str) and target and target != self.operations.dead_letter_queue_of(queue):
            request[GRANTS].require("send", target)

    async def get_queue(self, request: web.Request) -> web.Response:
        queue = request.match_info["queue"]
        if not may_see(request[GRANTS], queue):
            raise NotAllowedError(f"this key has no permission for queue {queue!r}")
        return answer(request, self.operations.get_queue(queue))

    async def list_queues(self, request: web.Request) -> web.Response:
        query, grants = query_of(request, ListQueues), request[GRANTS]
        visible = partial(may_see, grants)
        queues, after = await self.operations.list_queues(query.prefix, query.after, query.limit, visible)
        return answer(request, Queues(queues, after))

    async def delete_queue(self, request: web.Request) -> web.Response:
        await self.operations.delete_queue(request.match_info["queue"])
        return answer(request, Done())

    async def purge_queue(self, request: web.Request) -> web.Response:
        await self._nothing.read(request)
        await self.operations.purge_queue(request.match_info["queue"])
        return answer(request, Done(), 202)


def operations_of(api: JsonApi) -> list[Operation]:
    """The operations of this API."""
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


def define(
    router: web.UrlDispatcher, service: QueueService, max_body_bytes: int, room: Room, answers: Room
) -> list[Operation]:
    """Register the routes. Returns the operations."""
    operations = operations_of(JsonApi(service, max_body_bytes, room, answers))
    register(router, operations)
    return operations
