"""Answers that are written in one piece equal those of aiohttp, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import pytest
from aiohttp import web

from app.bodies import Room
from gateway.connection_limits import Connections
from gateway.listening import Runner
from gateway.replies import Reply
from tests.unit.http_lab import run

REQUESTS = {
    "get": b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n",
    "post": b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    "head": b"HEAD %b HTTP/1.1\r\nHost: x\r\n\r\n",
    "close": b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "http 1.0": b"GET %b HTTP/1.0\r\nHost: x\r\n\r\n",
    "http 1.0, kept": b"GET %b HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n\r\n",
}
ANSWERS: dict[str, dict[str, Any]] = {
    "json": {"body": b'{"a": 1}', "headers": {"Content-Type": "application/json", "x-id": "7"}},
    "created": {"body": b"{}", "status": 201, "content_type": "application/msgpack"},
    "nothing": {"body": b"", "status": 204},
    "empty": {"body": b""},
    "no body": {},
    "text": {"text": "ä"},
    "large": {"body": bytes(300_000), "content_type": "application/json"},
    "without a type": {"body": b"x"},
    "with a date": {"body": b"x", "headers": {"Date": "now", "Server": "none"}},
    "refused": {"body": b"{}", "status": 403, "headers": {"Retry-After": "1"}},
}


async def told(request: bytes, answer: type[web.Response], special: str, **values: object) -> bytes:
    """All bytes that a client gets, without the time of day. Asks twice if the connection is kept open."""

    async def handle(_: web.Request) -> web.Response:
        response = answer(**values)  # type: ignore[arg-type]
        if special == "cookie":
            response.set_cookie("a", "b")
        if special == "closed":
            response.force_close()
        if special == "compressed":
            response.enable_compression(strategy=None)
        return response

    app = web.Application()
    app.router.add_route("*", "/", handle)
    runner = Runner(app, Connections(10, 10, Room(1 << 30)), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0], limit=1 << 22)
    try:
        writer.write(request % b"/")
        if b"close" not in request and not request.endswith(b"HTTP/1.0\r\nHost: x\r\n\r\n"):
            writer.write(b"GET /none HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            return re.sub(rb"Date: [A-Z].*?\r\n", b"Date: -\r\n", await asyncio.wait_for(reader.read(-1), 20))
        return b"reset"
    finally:
        writer.close()
        await runner.cleanup()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("request_", REQUESTS)
def test_an_answer_in_one_piece_is_that_of_aiohttp(request_: str, answer: str) -> None:
    async def compare() -> None:
        theirs = await told(REQUESTS[request_], web.Response, "", **ANSWERS[answer])
        assert theirs.startswith(b"HTTP/1.")
        assert await told(REQUESTS[request_], Reply, "", **ANSWERS[answer]) == theirs

    run(compare)


@pytest.mark.parametrize("special", ["cookie", "closed", "compressed"])
def test_what_is_set_on_an_answer_afterwards_is_sent(special: str) -> None:
    async def compare() -> None:
        theirs = await told(REQUESTS["get"], web.Response, special, **ANSWERS["json"])
        assert await told(REQUESTS["get"], Reply, special, **ANSWERS["json"]) == theirs

    run(compare)


@pytest.mark.parametrize("answer", [web.Response, Reply])
def test_a_header_never_makes_two(answer: type[web.Response]) -> None:
    async def look() -> None:
        got = await told(REQUESTS["get"], answer, "", body=b"x", headers={"x-id": "7\r\nx-more: 8"})
        assert b"x-more" not in got

    run(look)
