"""What all routes share: permissions, the codec of bodies and answers, errors as problem details."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from app import bodies
from app.cluster import peers
from gateway.auth import ALL, Grants, Keys, check_browser
from gateway.openapi import Operation
from gateway.replies import Reply
from marq.errors import BadValueError, MarqError, TooLargeError, UnavailableError
from marq.protocol import problems
from marq.text import invalid_value

log = logging.getLogger(__name__)

JSON = "application/json"
MSGPACK = "application/msgpack"
#: Routes that need no key.
HEALTH = "/health/"
#: Names with a value in a JSON request, and objects. Decoding more would delay all other requests.
VALUES_MAX = 200_000
#: Content types of senders that named none: aiohttp's default, and curl's.
UNNAMED = ("application/octet-stream", "application/x-www-form-urlencoded")
Handler = Callable[[web.Request], Awaitable[Any]]
#: Where the permissions of a request are kept.
GRANTS = web.RequestKey("grants", Grants)

Read = TypeVar("Read")

_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class Body(Generic[Read]):
    """Reads and decodes request bodies of one type, up to `limit_bytes`."""

    def __init__(self, kind: type[Read], limit_bytes: int, room: bodies.Room | None = None) -> None:
        self._json = msgspec.json.Decoder(kind)
        self._msgpack = msgspec.msgpack.Decoder(kind)
        self._limit_bytes = limit_bytes
        self._room = room

    async def read(self, request: web.Request) -> Read:
        """The body of a request. Raises `BadValueError`, or an HTTP exception where it can't be read."""
        raw = await bodies.read(request, self._limit_bytes, self._room)
        content_type = media_type(request.headers)
        try:
            if content_type == MSGPACK:
                return self._msgpack.decode(raw or b"\x80")
            if content_type == JSON or (content_type in UNNAMED and is_typed_by_hand(request.headers)):
                if len(raw) > VALUES_MAX and max(raw.count(b":"), raw.count(b"{")) > VALUES_MAX:
                    raise TooLargeError(
                        f"more than {VALUES_MAX} names with a value, or objects, in one request: send several"
                    )
                return self._json.decode(raw or b"{}")
            if not raw:
                return self._json.decode(b"{}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadValueError(f"invalid body: {invalid_value(exc)}") from None
        raise web.HTTPUnsupportedMediaType(text=f"Content-Type is {content_type}; it has to be {JSON} or {MSGPACK}")


def media_type(headers: Mapping[str, str]) -> str:
    """The content type of a request, without parameters.

    aiohttp's reads it with the `email` package, which takes 3 s for 8 KB of quotes.
    """
    named = headers.get("Content-Type", UNNAMED[0]).partition(";")[0].strip().lower()
    return named if named.isascii() else named.encode("ascii", "replace").decode()


def is_typed_by_hand(headers: Mapping[str, str]) -> bool:
    """True if no web page sent a request: to those, browsers add headers that say so."""
    return "Origin" not in headers and not any(name.lower().startswith("sec-fetch-") for name in headers)


def query_of(request: web.Request, kind: type[Read]) -> Read:
    """The parameters of a query. Raises `BadValueError`."""
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as exc:
        raise BadValueError(f"invalid query: {invalid_value(exc)}") from None


def answers_msgpack(request: web.Request) -> bool:
    """True if the answer has to be msgpack: as `Accept` says, else as the request was."""
    accept = request.headers.get("Accept", "*/*")
    if MSGPACK in accept:
        return True
    return media_type(request.headers) == MSGPACK and JSON not in accept


def answer(request: web.Request, value: Any, status: int = 200) -> web.Response:
    """An answer in the codec that the client asked for."""
    if answers_msgpack(request):
        return Reply(body=_to_msgpack(value), status=status, content_type=MSGPACK)
    return Reply(body=_to_json(value), status=status, content_type=JSON)


def problem(error: BaseException) -> web.Response:
    """The answer for an error."""
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


def guard(keys: Keys, session: Callable[[Mapping[str, str]], Grants | None]) -> Any:
    """Middleware of all routes: checks permissions, and answers every error as problem details.

    When a request ends, the memory of its body is free again.

    Args:
        session: returns the permissions of a request of the cockpit's page, by its headers; None for other requests.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> Any:
        begun: Grants | None = None
        try:
            guards_itself = getattr(request.match_info.handler, "guards_itself", False)
            if not guards_itself and not request.path.startswith((peers.PATH, HEALTH)):
                if keys:
                    grants = request[GRANTS] = session(request.headers) or keys.grants_of(request.headers)
                    grants.begin()
                    begun = grants
                    if grants.share is not None:
                        bodies.hand_over(request, grants.share)
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
        finally:
            bodies.give_back(request)
            if begun is not None:
                begun.end()

    return guarded


def secured(permission: str, handler: Handler, everywhere: bool = False) -> Handler:
    """`handler`, for requests with a permission: for the queue in the path, if there is one."""

    async def checked(request: web.Request) -> Any:
        request[GRANTS].require(permission, request.match_info.get("queue"), everywhere)
        return await handler(request)

    return checked


def register(router: web.UrlDispatcher, operations: Iterable[Operation]) -> None:
    """Register the routes of operations."""
    for one in operations:
        handler = secured(one.permission, one.handler, one.everywhere) if one.permission else one.handler
        # the name of a queue may have braces in it
        router.add_route(one.method, one.path.replace("{queue}", "{queue:[^/]+}"), handler)
