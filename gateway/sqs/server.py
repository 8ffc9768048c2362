"""The routes: a request of either protocol -> an action -> an answer, with errors as AWS has them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from aiohttp import web

from app import bodies
from app.service.census import Census
from app.service.move_tasks import MoveTasks
from app.service.operations import QueueService
from app.settings import Settings
from gateway.auth import ALL, Grants, Keys, check_browser
from gateway.connection_limits import address_of
from gateway.metrics import ACTION
from gateway.routes import UNNAMED, media_type
from gateway.shares import Unproven
from gateway.sqs import json_protocol, query_protocol
from gateway.sqs.call import Call
from gateway.sqs.deliveries import Deliveries
from gateway.sqs.errors import SqsError, error_of
from gateway.sqs.identity import Identity
from gateway.sqs.limits import limits_of
from gateway.sqs.messages import MessageIds
from gateway.sqs.model import Action, actions, identity_action
from gateway.sqs.moves import Moves
from gateway.sqs.queues import Queues
from gateway.sqs.sending import Sending
from gateway.sqs.signature import ALGORITHM, Signatures, check_service
from marq.errors import NotAllowedError, UnavailableError

log = logging.getLogger(__name__)

#: The permission that each action needs; actions that are not here need any permission for the queue.
PERMISSIONS = {
    **dict.fromkeys(("SendMessage", "SendMessageBatch"), "send"),
    **dict.fromkeys(
        (
            "ReceiveMessage",
            "DeleteMessage",
            "DeleteMessageBatch",
            "ChangeMessageVisibility",
            "ChangeMessageVisibilityBatch",
            "StartMessageMoveTask",
            "CancelMessageMoveTask",
        ),
        "receive",
    ),
    **dict.fromkeys(
        (
            "CreateQueue",
            "DeleteQueue",
            "PurgeQueue",
            "SetQueueAttributes",
            "TagQueue",
            "UntagQueue",
            "AddPermission",
            "RemovePermission",
        ),
        "manage",
    ),
}
#: Bytes of a request in JSON that carries no messages: a thousand receipts of a batch, or the tags of a queue.
SMALL_BYTES = 640 * 1024
REQUEST_ID = "x-amzn-RequestId"
#: Paths of queue URLs. Paths of the JSON API, the health checks and the cockpit look similar.
QUEUE_PATH = "/{account:(?!v1/|health/|ui/)[A-Za-z0-9_-]+}/{queue:[^/]+}"

Do = Callable[[Call, Any], Awaitable[dict[str, Any] | None]]


class Server:
    """Answers requests."""

    def __init__(
        self,
        operations: QueueService,
        census: Census,
        move_tasks: MoveTasks,
        keys: Keys,
        settings: Settings,
        room: bodies.Room,
        answers: bodies.Room,
    ) -> None:
        limits = limits_of(settings.sqs_limits)
        queues = Queues(operations, census, limits)
        ids = MessageIds(lambda: operations.catalog.secret)
        groups = (
            queues,
            Sending(queues, limits, ids),
            Deliveries(queues, limits, ids, answers),
            Moves(queues, move_tasks),
        )
        self._do: dict[str, Do] = {}
        for name in actions():
            for group in groups:
                if hasattr(group, name):
                    self._do[name] = getattr(group, name)
        self._targets = {json_protocol.target_of(name): name for name in self._do}
        self._do[identity_action().name] = Identity().GetCallerIdentity
        self._account = settings.sqs_account
        self._signatures = Signatures(keys)
        self._body_bytes = min(limits.body_bytes or settings.max_body_bytes, settings.max_body_bytes)
        self._small_bytes = min(SMALL_BYTES, self._body_bytes)
        self._sends = {json_protocol.target_of(name) for name in ("SendMessage", "SendMessageBatch")}
        self._room = room
        tag = uuid4().hex
        self._request_ids = (f"{tag[:8]}-{tag[8:12]}-4{tag[13:16]}-8{tag[17:20]}-{n:012x}" for n in itertools.count())

    async def serve(self, request: web.Request) -> web.Response:
        """The handler of all routes."""
        request_id = next(self._request_ids)
        target = request.headers.get(json_protocol.TARGET)
        action: Action | None = None
        begun: Grants | None = None
        if target in self._targets:
            request[ACTION] = self._targets[target]
        try:
            sender, grants, claim = None, ALL, None
            if self._asks_for_nothing(request):
                response = query_protocol.unknown_operation()
                response.headers[REQUEST_ID] = request_id
                return response
            if self._signatures:
                claim, credential = self._signatures.claim_of(request)
                sender, grants = claim.key_id, credential.grants
                if not request.content.is_eof():
                    self._signatures.check_head(request, claim, credential.secret)
                peer = request.transport.get_extra_info("peername") if request.transport is not None else None
                bodies.hand_over(request, Unproven(address_of(peer)))
                body = self._signatures.check(request, await self._body(request, target), claim, credential.secret)
                if grants.share is not None:
                    bodies.hand_over(request, grants.share)
                self._check_permission(grants, request)
                grants.begin()
                begun = grants
            else:
                _check_browser(request)
                body = await self._body(request, target)
            url = request.path if "queue" in request.match_info else None
            if target is not None:
                action, parameters = json_protocol.read(target, body)
            else:
                action, parameters = query_protocol.read(request.rel_url.raw_query_string, _form(request, body), url)
                request[ACTION] = action.name
            if claim is not None:
                check_service(claim, action.service)
            call = Call(request, grants, sender, self._account)
            result = await self._do[action.name](call, parameters)
            if target is not None:
                response = json_protocol.answer(result)
            else:
                response = query_protocol.answer(action, result, request_id, query_protocol.wants_json(request))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as exc:
            error = error_of(exc)
            if error.name == "InternalFailure":
                log.exception("SQS action %s failed", action.name if action is not None else "?")
            if target is not None:
                response = json_protocol.problem(error)
            else:
                response = query_protocol.problem(error, request_id, query_protocol.wants_json(request))
            if isinstance(exc, UnavailableError):
                response.headers["Retry-After"] = str(max(1, math.ceil(exc.retry_after_s)))
        finally:
            if begun is not None:
                begun.end()
        response.headers[REQUEST_ID] = request_id
        return response

    @staticmethod
    def _asks_for_nothing(request: web.Request) -> bool:
        """Answer a `GET` of a queue's URL."""
        return (
            request.method == "GET"
            and "queue" in request.match_info
            and not {"Action", "X-Amz-Signature"} & request.query.keys()
            and json_protocol.TARGET not in request.headers
            and not request.body_exists
        )

    @staticmethod
    def _check_permission(grants: Grants, request: web.Request) -> None:
        """Refuse a request before its body is decoded, if the key may not do this with any queue."""
        permission = PERMISSIONS.get(request.get(ACTION, ""))
        if permission is not None:
            grants.require(permission, None)

    async def _body(self, request: web.Request, target: str | None) -> bytes:
        # the action of a form is in its body
        limit_bytes = self._body_bytes if target is None or target in self._sends else self._small_bytes
        try:
            return await bodies.read(request, limit_bytes, self._room)
        except web.HTTPRequestTimeout as exc:
            raise SqsError("RequestTimeout", f"{exc.text}") from None
        except web.HTTPRequestEntityTooLarge as exc:
            raise SqsError("RequestTooLarge", f"The request is too large: {exc.text}.") from None
        except (web.HTTPBadRequest, web.HTTPUnsupportedMediaType) as exc:
            raise SqsError("Serialization", f"{exc.text}") from None


def _form(request: web.Request, body: bytes) -> bytes:
    """Check that the body is a form, or empty. Returns it. Raises `SqsError`."""
    if body and (kind := media_type(request.headers)) not in UNNAMED:
        raise SqsError("UnknownOperation", f"Send {json_protocol.TARGET}, or a form: this is {kind[:100]}.")
    return body


def _check_browser(request: web.Request) -> None:
    """Without keys, refuse requests of web pages, and every `GET` that a link on one could make a browser send."""
    check_browser("POST", request.headers)
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise NotAllowedError("a page of another origin can't ask for that")
    if request.method == "GET" and not request.headers.get("Authorization", "").startswith(ALGORITHM):
        raise NotAllowedError("without keys, an action is a POST: a link on any web page can make a browser send a GET")


def define(router: web.UrlDispatcher, server: Server) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Register the routes. Returns their handler."""

    async def handler(request: web.Request) -> web.Response:
        return await server.serve(request)

    handler.guards_itself = True  # type: ignore[attr-defined]
    # a GET of "/" may be a browser's
    for method, path in (("POST", "/"), ("GET", QUEUE_PATH), ("POST", QUEUE_PATH)):
        router.add_route(method, path, handler)
    return handler
