"""Connections of clients, with limits that aiohttp does not have.

By itself, aiohttp accepts any number of connections. It gives a client as long for the head of a request as for its
next request, and waits for ever for a client that does not read its answer. It logs a traceback for each malformed
request.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler, RequestPayloadError
from aiohttp.web_server import Server

from app.bodies import holder_of
from app.cluster import peers
from gateway.connection_limits import HEAD_S, STUCK_S, Connections, address_of
from gateway.replies import LARGE_BYTES, UNREAD, PacedWriter
from gateway.routes import problem
from marq.errors import UnavailableError

#: How often connections are checked within `STUCK_S`.
STUCK_LOOKS = 3
#: Lines in one read that are parsed at once: aiohttp takes 1.6 us for a chunk of one byte, which has two lines.
LINES_MAX = 200
#: Bytes parsed in one turn, for all connections together, of reads with more lines.
PIECE_BYTES = 16 * 1024
#: Bytes that may wait for it.
PUT_OFF_BYTES = 32 * 1024 * 1024
#: Requests that one connection may send ahead of the answers.
AHEAD_MAX = 2
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Connection(RequestHandler):
    """One connection of a client."""

    __slots__ = (
        "_address",
        "_book",
        "_head",
        "_head_due",
        "_later",
        "_looks",
        "_progress",
        "_rest",
        "_wire",
        "_writer",
        "is_made",
    )

    def __init__(self, manager: ConnectionServer, address: str | None = None, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._max_msg_queue_size = AHEAD_MAX
        self._msg_queue_resume_size = AHEAD_MAX - 1
        self._book = manager.book
        self._address = address  # of one that was admitted
        self.is_made = False
        self._wire: asyncio.Transport | None = None
        self._head: asyncio.TimerHandle | None = None
        self._head_due = 0.0
        self._looks = 0
        self._progress = 0, 0  # bytes in the transport, and those of a large answer that were handed to it
        self._writer: PacedWriter | None = None  # of a large answer
        self._later = manager.later
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast(asyncio.Transport, transport)
        if self._address is None:
            address = address_of(wire.get_extra_info("peername"))
            if not self._book.admit(address):
                self._close = True  # read nothing that comes
                wire.write(_REFUSAL)
                wire.close()
                return
            self._address = address
        self._wire = wire
        self.is_made = True
        if wire.get_extra_info("sslcontext") is not None:
            wire.set_write_buffer_limits()  # those of TLS let eight times as much wait
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        self._later.forget(self)
        self._wire = None
        self.leave()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Stop counting the connection."""
        if self._address is not None:
            self._book.leave(self._address)
            self._address = None

    # -- what comes in many short lines

    def data_received(self, data: bytes) -> None:
        if data and (self._rest or data.count(b"\n") > LINES_MAX):
            self._put_off(data)
        else:
            self._parse(data)

    def _put_off(self, data: bytes) -> None:
        if self._force_close or self._close:
            return
        if not self._later.put(self, len(data)):
            self._note("lines")
            self.force_close()
            return
        self._rest += data
        self._pause_transport_reading()

    def parse_a_piece(self) -> int:
        """Parse a piece of the bytes that were put off. Returns its size: 0 if nothing can be parsed now."""
        if self._reading_paused or self._buffer_paused:
            return 0  # aiohttp does not want to read on yet
        piece, self._rest = self._rest[:PIECE_BYTES], self._rest[PIECE_BYTES:]
        self._parse(piece)
        if not self._rest and not self._reading_paused and not self._buffer_paused:
            super()._resume_transport_reading()
        return len(piece)

    @property
    def has_rest(self) -> bool:
        """True if bytes were put off."""
        return bool(self._rest)

    def drop_rest(self) -> int:
        """Drop the bytes that were put off. Returns how many there were."""
        size, self._rest = len(self._rest), b""
        return size

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp calls it twice for each body, and would parse and read on each time. Where nothing is paused, nothing
        # was held back. A pause for other reasons (`_buffer_paused`, `_rest`) has an end of its own.
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def _resume_transport_reading(self) -> None:
        if self._rest:
            self._later.put(self, 0)
        else:
            super()._resume_transport_reading()

    # -- the head of a request

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        waiter = self._waiter
        if (waiter is None or waiter.done()) and self._request_count:
            if self._head is not None:
                self._stop_waiting()
        elif self._head is None and not self._force_close:
            # aiohttp waits for a request, and only a part of its head has come
            self._await_head()

    def _await_head(self) -> None:
        self._head_due = self._loop.time() + HEAD_S
        self._head = self._loop.call_at(self._head_due, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _head_is_late(self) -> None:
        self._head = None
        if self.transport is None or self._force_close:
            return
        if self._rest or self._loop.time() > self._head_due + 1.0:
            self._await_head()  # this process stood still: the head may have come, unread
            return
        self._note("head")
        self.force_close()

    # -- answers that nobody reads

    def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> Any:  # no coroutine of ours around aiohttp's for small answers
        body = resp.body if isinstance(resp, web.Response) else None
        if isinstance(body, bytes) and len(body) > LARGE_BYTES:
            return self._finish_large(request, resp, start_time, len(body))
        return super().finish_response(request, resp, start_time)

    async def _finish_large(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None, size_bytes: int
    ) -> tuple[web.StreamResponse, bool]:
        answers, holder, unread = self._book.answers, holder_of(request), request.get(UNREAD)
        # those to other workers are read at once, or their connection ends; if nothing waits, any answer is allowed
        if answers.used_bytes and not answers.has(size_bytes, holder) and not request.path.startswith(peers.PATH):
            answers.refused += 1
            if unread is not None:
                unread()
            refusal = problem(UnavailableError("too many large answers are still to be read; try again later", 1.0))
            return await super().finish_response(request, refusal, start_time)
        answers.add(size_bytes, holder)
        writer = self._writer = request._payload_writer = PacedWriter(self, self._loop)
        is_whole = False
        try:
            resp, lost = await super().finish_response(request, resp, start_time)
            is_whole = not lost
            return resp, lost
        finally:
            if self._writer is writer:
                self._writer = None
            answers.add(-size_bytes, holder)
            if unread is not None and not is_whole:
                unread()

    def look(self) -> None:
        """End the connection if its client has read nothing for `STUCK_S`. Called `STUCK_LOOKS` times in that time."""
        wire = self._wire
        if wire is None:
            return
        pending = wire.get_write_buffer_size()
        progress = pending, self._writer.output_size if self._writer is not None else 0
        if progress != self._progress or not any(progress):
            self._progress, self._looks = progress, 0
            return
        self._looks += 1
        if self._looks >= STUCK_LOOKS:
            self._note("stuck")
            wire.abort()

    # -- malformed requests

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):  # the client has gone: nobody reads the answer
            response = web.Response(status=400)
            response.force_close()
            return response
        # invalid text gets here only from aiohttp's own parsing
        if not isinstance(exc, HttpProcessingError | UnicodeError):
            return super().handle_error(request, status, exc, message)
        self._note("malformed")
        response = web.Response(status=400, text="400: Bad Request")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        if isinstance(options.get("exc_info"), RequestPayloadError | HttpProcessingError):
            self._note("malformed")  # aiohttp could not unpack the rest of a body, which it drops
        else:
            super().log_exception(*args, **options)

    def _note(self, reason: str) -> None:
        self._book.note(reason, self._address or "")


class Later:
    """Connections that sent many short lines. In each turn of the loop, a piece of one of them is parsed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Connection, None] = {}
        self._handle: asyncio.Handle | None = None
        self.put_off_bytes = 0

    def put(self, connection: Connection, size_bytes: int) -> bool:
        """Note that `connection` has `size_bytes` more to parse. Returns False if that is too much."""
        if self.put_off_bytes + size_bytes > PUT_OFF_BYTES:
            return False
        self.put_off_bytes += size_bytes
        self._waiting.setdefault(connection)
        if self._handle is None:
            self._handle = self._loop.call_soon(self._turn)
        return True

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._waiting.pop(connection, None)
        self.put_off_bytes -= connection.drop_rest()

    def _turn(self) -> None:
        self._handle = None
        while self._waiting:
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            parsed = connection.parse_a_piece()
            self.put_off_bytes -= parsed
            if parsed and connection.has_rest:
                self._waiting.setdefault(connection)
            if parsed:
                break
        if self._waiting and self._handle is None:
            self._handle = self._loop.call_soon(self._turn)


class ConnectionServer(Server):
    """aiohttp's server, with our connections."""

    def __init__(self, book: Connections, handler: Any, **kwargs: Any) -> None:
        super().__init__(handler, **kwargs)
        self.book = book
        self.later = Later(self._loop)
        self._timer = self._loop.call_later(STUCK_S / STUCK_LOOKS, self._look)

    def __call__(self, address: str | None = None) -> Connection:
        """Make a connection. `address`: that of a client which was admitted already; None if it was not."""
        return Connection(self, address, loop=self._loop, **self._kwargs)

    def _look(self) -> None:
        for connection in self.connections:
            if isinstance(connection, Connection):
                connection.look()
        self._timer = self._loop.call_later(STUCK_S / STUCK_LOOKS, self._look)

    async def shutdown(self, timeout: float | None = None) -> None:
        self._timer.cancel()
        await super().shutdown(timeout)
