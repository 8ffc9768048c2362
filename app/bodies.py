"""Bodies of requests: read within limits of size and time, and of what all requests under way have together."""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from marq.errors import UnavailableError

#: Seconds that a client has for the body of a request.
TIMEOUT_S = 30.0
#: Bytes of a body that get in when larger ones don't any more: acks must not wait for sends.
SMALL_BYTES = 16 * 1024


class Room:
    """Bytes that bodies of requests under way have together."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self.refused = 0

    def take(self, count_bytes: int, body_bytes: int, holder: Holder | None = None) -> None:
        """Count bytes that came, of a body that has `body_bytes` with them. Raises `UnavailableError`.

        One `holder`, whose request it is, has a half of it all at most.
        """
        used = self.used_bytes + count_bytes
        held = 2 * (holder.body_bytes + count_bytes) if holder is not None else 0
        if max(used, held) > self.most_bytes and (body_bytes > SMALL_BYTES or used > 2 * self.most_bytes):
            self.refused += 1
            raise UnavailableError("too many large requests are under way here; try again later", 1.0)
        self.used_bytes = used
        if holder is not None:
            holder.body_bytes += count_bytes

    def give_back(self, request: web.Request) -> None:
        """A request has ended."""
        if TAKEN in request:
            count_bytes, holder = request.pop(TAKEN), request.get(HOLDER)
            self.used_bytes -= count_bytes
            if holder is not None:
                holder.body_bytes -= count_bytes


class Holder(Protocol):
    """Who has requests under way."""

    body_bytes: int


#: What a request has taken of the room, and for whom, where that is known.
TAKEN = web.RequestKey("taken_bytes", int)
HOLDER = web.RequestKey("holder", Holder)


async def read(
    request: web.Request, limit_bytes: int, room: Room | None = None, timeout_s: float | None = None
) -> bytes:
    """The body of a request.

    Args:
        limit_bytes: how large it may be; one that says that it is larger is refused unread.
        room: what it counts in, until `Room.give_back`.
        timeout_s: seconds until it has to be there; None: `TIMEOUT_S`.

    Raises:
        UnavailableError: there is no room now.
        web.HTTPException: it is too large, too late, or malformed.
    """
    length = request.content_length
    if length is not None and length > limit_bytes:
        raise too_large(limit_bytes, length)
    content = request.content
    if content.is_eof():
        # nearly always: it came with the head
        try:
            data = content.read_nowait()
        except (RequestPayloadError, HttpProcessingError) as exc:
            raise malformed(exc) from None
        _count(request, room, len(data), len(data), limit_bytes)
        return data
    if timeout_s is None:
        timeout_s = TIMEOUT_S
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while part := await content.readany():
                size += len(part)
                _count(request, room, len(part), size, limit_bytes)
                parts.append(part)
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {timeout_s:.0f} s") from None
    except (RequestPayloadError, HttpProcessingError) as exc:
        raise malformed(exc) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _count(request: web.Request, room: Room | None, count: int, size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise too_large(limit_bytes, size)
    if room is not None:
        room.take(count, size, request.get(HOLDER))
        request[TAKEN] = request.get(TAKEN, 0) + count


def too_large(limit_bytes: int, size_bytes: int) -> web.HTTPRequestEntityTooLarge:
    """The error for a body that is too large."""
    return web.HTTPRequestEntityTooLarge(
        limit_bytes, size_bytes, text=f"a body of {size_bytes} bytes or more; at most {limit_bytes} here"
    )


def malformed(exc: Exception) -> web.HTTPBadRequest:
    """The error for a body that can't be read as HTTP says."""
    return web.HTTPBadRequest(text=f"the body can't be read: {type(exc).__name__}")
