"""How answers are written.

Nearly all are written in one piece, for which aiohttp takes eleven calls of coroutines. Large ones are written in
pieces, each when the one before is nearly sent: what is handed to the transport is not counted by anybody, and over TLS
not even waited for.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11
from aiohttp.http_writer import StreamWriter, _serialize_headers

#: Bytes from which on an answer is written in pieces, and counts as unread until nearly all of it is sent.
LARGE_BYTES = 64 * 1024
#: Bytes of a piece.
PIECE_BYTES = 256 * 1024
#: What to do if the client can't have got the whole of a large answer.
UNREAD = web.RequestKey("unread", partial)
#: Statuses whose answers have no body.
_WITHOUT_BODY = (204, 304)


class Reply(web.Response):
    """As `web.Response`, byte for byte, but for signals of answers (`on_response_prepare`), which nothing here uses.

    A request that wants anything special gets aiohttp's own answer: HEAD, HTTP/1.0, a connection that is to be closed.
    """

    _is_whole = False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if (
            self.prepared
            or type(self._body) is not bytes
            or len(self._body) > LARGE_BYTES
            or self._keep_alive is not None
            or self._cookies
            or self._compression
            or self._chunked
            or self._status in _WITHOUT_BODY
            or request.method == hdrs.METH_HEAD
            or request.version != HttpVersion11
            or not request.keep_alive
        ):
            return await super().prepare(request)
        self._is_whole = self._keep_alive = True
        self._req = request
        self._payload_writer = request._payload_writer
        return self._payload_writer

    async def write_eof(self, data: bytes = b"") -> None:
        if not self._is_whole:
            await super().write_eof(data)
            return
        if self._eof_sent:
            return
        body, headers = cast(bytes, self._body), self._headers
        headers[hdrs.CONTENT_LENGTH] = str(len(body))
        if body:
            headers.setdefault(hdrs.CONTENT_TYPE, "application/octet-stream")
        headers.setdefault(hdrs.DATE, rfc822_formatted_time())
        headers.setdefault(hdrs.SERVER, SERVER_SOFTWARE)
        # refuses line ends in a header, as always
        head = _serialize_headers(f"HTTP/1.1 {self._status} {self._reason}", headers)
        writer = cast(StreamWriter, self._payload_writer)
        writer._writelines((head, body))
        await writer.drain()
        writer._eof = self._eof_sent = True
        self._body_length = writer.output_size
        self._req = self._payload_writer = None


class PacedWriter(StreamWriter):
    """Writes a large body in pieces, and ends when all of it was handed to the system."""

    async def write_eof(self, chunk: bytes = b"") -> None:
        view = memoryview(chunk)
        last = max(0, len(view) - 1) // PIECE_BYTES * PIECE_BYTES
        for start in range(0, last, PIECE_BYTES):
            await self.write(view[start : start + PIECE_BYTES])
        transport = self.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=0)
        await super().write_eof(cast(bytes, view[last:]))
        if transport is not None and not transport.is_closing():
            transport.set_write_buffer_limits()
