"""Request bodies: read within limits of size and time, and within a limit for all requests in progress together."""

from __future__ import annotations

import asyncio
import zlib
from typing import Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from marq.errors import UnavailableError

#: Most seconds for the body of a request.
TIMEOUT_S = 30.0
#: Bodies up to this many bytes are accepted when larger ones no longer are: acks must not wait for sends.
SMALL_BYTES = 16 * 1024
#: Bytes that are unpacked of a compressed body before others get a turn.
PIECE_BYTES = 256 * 1024


class Holder(Protocol):
    """A client with requests in progress."""

    @property
    def room_parts(self) -> int:
        """It gets at most the room divided by this."""

    @property
    def within(self) -> Holder | None:
        """All clients of its kind, if they have one part together. It gets at most half of what the others leave."""


class Room:
    """Limits the bytes that requests in progress have together: of their bodies, or of answers that are not written."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self.refused = 0
        self._held: dict[Holder, int] = {}

    def held_by(self, holder: Holder | None) -> int:
        """Bytes of one client."""
        return self._held.get(holder, 0) if holder is not None else 0

    def has(self, count_bytes: int, holder: Holder | None) -> bool:
        """Tells whether there is room for more bytes. A client gets at most its part of all."""
        if self.used_bytes + count_bytes > self.most_bytes:
            return False
        if holder is None:
            return True
        held = self._held.get(holder, 0) + count_bytes
        if holder.within is not None:
            held += self._held.get(holder.within, 0) + count_bytes
        return holder.room_parts * held <= self.most_bytes

    def add(self, count_bytes: int, holder: Holder | None) -> None:
        """Count bytes; with a negative number, bytes that are free again."""
        self.used_bytes += count_bytes
        while holder is not None:
            held = self._held[holder] = self._held.get(holder, 0) + count_bytes
            if not held:
                del self._held[holder]
            holder = holder.within

    def require_for_answer(self, request: web.Request) -> None:
        """Raises `UnavailableError` if answers that were not read leave no room for another one of this client."""
        if not self.has(1, holder_of(request)):
            self.refused += 1
            raise UnavailableError(f"{self.used_bytes} bytes of answers are still to be read; try again later", 1.0)


class Taken:
    """Bytes that the body of a request has taken of a room, and who sent it, if known."""

    __slots__ = ("count_bytes", "holder", "room")

    def __init__(self, holder: Holder | None = None) -> None:
        self.count_bytes = 0
        self.room: Room | None = None
        self.holder = holder


TAKEN = web.RequestKey("taken", Taken)


def holder_of(request: web.BaseRequest) -> Holder | None:
    """The client whose share a request counts for; None if there are no keys, or it is not known yet."""
    taken = request.get(TAKEN)
    return taken.holder if taken is not None else None


def hand_over(request: web.Request, holder: Holder) -> None:
    """Count the bytes that a request has taken, and will take, for `holder`."""
    taken = request.get(TAKEN)
    if taken is None:
        request[TAKEN] = Taken(holder)
        return
    if taken.room is not None:
        taken.room.add(-taken.count_bytes, taken.holder)
        taken.room.add(taken.count_bytes, holder)
    taken.holder = holder


def give_back(request: web.Request) -> None:
    """Return the bytes of a request that has ended."""
    taken = request.get(TAKEN)
    if taken is not None and taken.room is not None:
        taken.room.add(-taken.count_bytes, taken.holder)
        taken.count_bytes = 0


async def read(
    request: web.Request, limit_bytes: int, room: Room | None = None, timeout_s: float | None = None
) -> bytes:
    """The body of a request.

    Args:
        limit_bytes: most bytes. A body whose header says that it is larger is refused unread.
        room: where the bytes count until `give_back`.
        timeout_s: most seconds until it has arrived; None: `TIMEOUT_S`.

    Raises:
        UnavailableError: there is no room now.
        web.HTTPException: the body is too large, too late, or malformed.
    """
    encoding = request.headers.get("Content-Encoding")
    if encoding is None:
        return await _read(request, limit_bytes, room, timeout_s)
    unpacker = _unpacker(encoding.strip().lower())
    data = await _read(request, limit_bytes, room, timeout_s)
    return data if unpacker is None or not data else await _unpack(unpacker, data, request, limit_bytes, room)


async def _read(request: web.Request, limit_bytes: int, room: Room | None, timeout_s: float | None) -> bytes:
    """The body as it was sent."""
    length = request.content_length
    if length is not None and length > limit_bytes:
        raise too_large(limit_bytes, length)
    content = request.content
    if content.is_eof():
        # nearly always: it arrived with the head
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


_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": zlib.MAX_WBITS}


def _unpacker(encoding: str) -> int | None:
    """The window size of zlib for a `Content-Encoding`; None: not compressed. Raises `HTTPUnsupportedMediaType`."""
    if encoding in ("", "identity"):
        return None
    if encoding not in _WINDOWS:
        raise web.HTTPUnsupportedMediaType(text="Content-Encoding has to be gzip, deflate or identity")
    return _WINDOWS[encoding]


async def _unpack(window: int, data: bytes, request: web.Request, limit_bytes: int, room: Room | None) -> bytes:
    """Unpack a body. Unpacked bytes count too, and others get a turn after each piece.

    aiohttp must not do it: it also unpacks what it throws away, so 200 KiB from a stranger could block a worker.
    """
    if window == zlib.MAX_WBITS and data[0] & 0x0F != 8:
        window = -window  # without the header of zlib, as some clients send it
    stream = zlib.decompressobj(window)
    parts: list[bytes] = []
    size = 0
    view = memoryview(data)
    try:
        for at in range(0, len(data), SMALL_BYTES):
            if stream.eof:
                raise _odd_end()
            left: bytes | memoryview = view[at : at + SMALL_BYTES]
            while left:
                part = stream.decompress(left, PIECE_BYTES)
                left = stream.unconsumed_tail
                size += len(part)
                _count(request, room, len(part), size, limit_bytes)
                parts.append(part)
                if len(part) == PIECE_BYTES:
                    await asyncio.sleep(0)
        # what is left because of the limit `PIECE_BYTES`
        while part := stream.decompress(b"", PIECE_BYTES):
            size += len(part)
            _count(request, room, len(part), size, limit_bytes)
            parts.append(part)
            await asyncio.sleep(0)
    except zlib.error as exc:
        raise malformed(exc) from None
    if not stream.eof or stream.unused_data:
        raise _odd_end()
    return b"".join(parts)


def _odd_end() -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text="the body can't be unpacked: it ends too early, or goes on after its end")


def _count(request: web.Request, room: Room | None, count: int, size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise too_large(limit_bytes, size)
    if room is not None:
        taken = request.get(TAKEN)
        if taken is None:
            taken = request[TAKEN] = Taken()
        if not room.has(count, taken.holder) and (size > SMALL_BYTES or room.used_bytes + count > 2 * room.most_bytes):
            room.refused += 1
            raise UnavailableError("too many large requests are in progress here; try again later", 1.0)
        room.add(count, taken.holder)
        taken.room = room
        taken.count_bytes += count


def too_large(limit_bytes: int, size_bytes: int) -> web.HTTPRequestEntityTooLarge:
    """The error for a body that is too large."""
    return web.HTTPRequestEntityTooLarge(
        limit_bytes, size_bytes, text=f"a body of {size_bytes} bytes or more; at most {limit_bytes} here"
    )


def malformed(exc: Exception) -> web.HTTPBadRequest:
    """The error for a body that is invalid in HTTP."""
    return web.HTTPBadRequest(text=f"the body can't be read: {type(exc).__name__}")
