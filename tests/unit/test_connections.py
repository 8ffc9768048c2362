"""Connections of clients, over real sockets: how many there may be, and how long one may stay for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import ssl
import tomllib
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from app.bodies import Room
from gateway import connection_limits, connections, listening
from gateway.connection_limits import Connections, address_of, connections_for, raise_file_limit
from gateway.connections import Connection
from gateway.listening import Runner, TlsSite
from gateway.replies import UNREAD

HALF = b"GET /ping HTTP/1.1\r\nHost: here\r\nX-"
PING = b"GET /ping HTTP/1.1\r\nHost: here\r\n\r\n"
#: Bytes of a large answer, and of all that are not read.
MUCH_BYTES, ANSWERS_BYTES = 32 * 1024 * 1024, 100 * 1024 * 1024
#: A second loopback address: to the server, another client.
OTHER = "127.0.0.2"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """A real server, and clients of it."""

    def __init__(self, port: int, runner: Runner, trust: ssl.SSLContext | None) -> None:
        self.port, self.book, self._trust = port, runner.book, trust
        self._runner = runner
        self._writers: list[asyncio.StreamWriter] = []
        self.unread: list[web.Request] = []  # whose answers did not get to their clients

    async def connect(self, data: bytes = b"", source: str = "127.0.0.1", shake_hands: bool = True) -> Streams:
        """A connection that sends `data` and nothing else."""
        trust = self._trust if shake_hands else None
        host = "localhost" if trust else None
        streams = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(source, 0), ssl=trust, server_hostname=host
        )
        self._writers.append(streams[1])
        streams[1].write(data)
        return streams

    @property
    def connections(self) -> list[Connection]:
        assert self._runner.server is not None
        return [one for one in self._runner.server.connections if isinstance(one, Connection)]

    async def ping(self, source: str = "127.0.0.1") -> bytes:
        """The first line of the answer to a good request."""
        reader, _ = await self.connect(PING, source)
        return (await asyncio.wait_for(reader.readline(), 10)).rstrip()

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(total: int = 100, per_address: int = 100, tls: bool = False) -> AsyncIterator[Server]:
    app = web.Application()

    async def ping(request: web.Request) -> web.Response:
        return web.Response(text="pong")

    async def much(request: web.Request) -> web.Response:
        request[UNREAD] = partial(server.unread.append, request)
        return web.Response(body=bytes(MUCH_BYTES))

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.6)
        return web.Response(text="at last")

    app.router.add_get("/ping", ping)
    app.router.add_get("/much", much)
    app.router.add_get("/slow", slow)
    book = Connections(total, per_address, Room(ANSWERS_BYTES))
    runner = Runner(app, book, shutdown_timeout=0.1)
    await runner.setup()
    trust: ssl.SSLContext | None = None
    if tls:
        authority = pytest.importorskip("trustme").CA()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost").configure_cert(context)
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        site: Any = TlsSite(runner, "127.0.0.1", 0, context)
        await site.start()
        port = site.addresses[0][1]
    else:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
    server = Server(port, runner, trust)
    try:
        yield server
    finally:
        await server.close()
        await runner.cleanup()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same times, shorter."""
    for module in (connections, listening):
        monkeypatch.setattr(module, "HEAD_S", 0.3)
    monkeypatch.setattr(connections, "STUCK_S", 0.6)


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_one_address_with_half_sent_requests_does_not_shut_out_another(tls: bool) -> None:
    async def test() -> None:
        async with serving(per_address=20, tls=tls) as server:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    await server.connect(HALF)

            assert await server.ping(OTHER) == b"HTTP/1.1 200 OK"
            await until(lambda: server.book.refused["address"] == 30)
            assert server.book.open == 21

    run(test)


def test_connections_beyond_the_limit_are_told_so_and_leave_room_when_they_end() -> None:
    async def test() -> None:
        async with serving(total=2) as server:
            first = await server.connect(HALF)
            await server.connect(HALF)
            await until(lambda: server.book.open == 2)

            assert await server.ping() == b"HTTP/1.1 503 Service Unavailable"
            assert server.book.refused["total"] == 1
            first[1].close()
            await until(lambda: server.book.open == 1)
            assert await server.ping() == b"HTTP/1.1 200 OK"

    run(test)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sent", [b"", b"G", HALF], ids=["nothing", "a-byte", "half"])
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_a_connection_without_a_whole_head_is_closed(sent: bytes, tls: bool) -> None:
    async def test() -> None:
        async with serving(tls=tls) as server:
            reader, _ = await server.connect(sent)

            assert await asyncio.wait_for(reader.read(), 5) == b""
            await until(lambda: not server.book.open)
            assert server.book.refused["head"] == 1

    run(test)


@pytest.mark.usefixtures("quick")
def test_a_head_that_comes_byte_by_byte_gets_no_more_time() -> None:
    async def test() -> None:
        async with serving() as server:
            reader, writer = await server.connect(HALF)

            async def trickle() -> None:
                while True:
                    writer.write(b"a")
                    await asyncio.sleep(0.05)

            trickling = asyncio.ensure_future(trickle())
            with contextlib.suppress(ConnectionResetError):  # a byte was on its way when it was closed
                assert await asyncio.wait_for(reader.read(), 5) == b""
            assert server.book.refused["head"] == 1
            trickling.cancel()

    run(test)


@pytest.mark.usefixtures("quick")
def test_half_of_a_second_request_is_closed_too() -> None:
    async def test() -> None:
        async with serving() as server:
            reader, writer = await server.connect(PING)
            await reader.readuntil(b"pong")
            writer.write(HALF)

            assert await asyncio.wait_for(reader.read(), 5) == b""
            assert server.book.refused["head"] == 1

    run(test)


@pytest.mark.usefixtures("quick")
def test_answers_and_pauses_between_requests_may_take_longer_than_a_head() -> None:
    async def test() -> None:
        async with serving() as server:
            reader, writer = await server.connect(PING.replace(b"ping", b"slow"))
            await reader.readuntil(b"at last")
            await asyncio.sleep(0.6)
            writer.write(PING)

            await asyncio.wait_for(reader.readuntil(b"pong"), 5)
            assert server.book.open == 1

    run(test)


async def ask_for_much(server: Server) -> Streams:
    """A client that asks and reads nothing."""
    reader, writer = await server.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(PING.replace(b"ping", b"much"))
    return reader, writer


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_a_client_that_does_not_read_its_answer_is_closed_and_the_answer_counts_until_then(tls: bool) -> None:
    async def test() -> None:
        async with serving(tls=tls) as server:
            await ask_for_much(server)

            await until(lambda: server.book.answers.used_bytes == MUCH_BYTES)
            await until(lambda: not server.book.open)
            assert server.book.refused["stuck"] == 1
            await until(lambda: not server.book.answers.used_bytes)
            assert len(server.unread) == 1

    run(test)


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_answers_that_nobody_reads_are_bounded_and_leave_room_again(tls: bool) -> None:
    async def test() -> None:
        async with serving(tls=tls) as server:
            held = [await ask_for_much(server) for _ in range(3)]
            await until(lambda: server.book.answers.used_bytes == 3 * MUCH_BYTES)
            for connection in server.connections:  # the rest is not with the transport, which counts nothing
                assert connection._writer is not None
                assert connection._writer.output_size < MUCH_BYTES / 2

            for _ in range(3):
                reader, _ = await server.connect(PING.replace(b"ping", b"much"))
                assert b"503" in await asyncio.wait_for(reader.readline(), 10)
            assert await server.ping() == b"HTTP/1.1 200 OK"
            assert len(server.unread) == server.book.answers.refused == 3

            held[0][1].transport.abort()
            await until(lambda: len(server.unread) == 4)
            for reader, writer in held[1:]:
                writer.transport.resume_reading()  # type: ignore[attr-defined]
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
                assert await asyncio.wait_for(reader.readexactly(MUCH_BYTES), 10) == bytes(MUCH_BYTES)
            await until(lambda: not server.book.answers.used_bytes)
            assert len(server.unread) == 4
            # and the connection goes on
            held[1][1].write(PING)
            assert await asyncio.wait_for(held[1][0].readline(), 10) == b"HTTP/1.1 200 OK\r\n"

    run(test)


@pytest.mark.usefixtures("quick")
def test_a_handshake_that_does_not_go_on_counts_and_ends() -> None:
    async def test() -> None:
        async with serving(total=1, tls=True) as server:
            reader, _ = await server.connect(b"\x16\x03\x01", shake_hands=False)
            await until(lambda: server.book.open == 1)
            with pytest.raises((OSError, ssl.SSLError)):
                await server.ping(OTHER)

            assert await asyncio.wait_for(reader.read(), 5) == b""
            await until(lambda: not server.book.open)
            assert server.book.refused["handshake"] == 1
            assert await server.ping(OTHER) == b"HTTP/1.1 200 OK"

    run(test)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\xff rubbish\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        PING.replace(b"here", b"a\x00b"),
        b"\r\n" * 9 + b"\xff\r\n\r\n",
    ],
    ids=["tls", "version", "nul", "bytes"],
)
def test_what_is_no_http_is_a_400_without_a_traceback(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving() as server:
            reader, _ = await server.connect(sent)
            assert (await asyncio.wait_for(reader.read(), 5))[8:13] == b" 400 "
            assert server.book.refused["malformed"] == 1

    with caplog.at_level(logging.DEBUG, "aiohttp.server"):
        run(test)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_refusal_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    book = Connections(0, 0, Room(0))
    for _ in range(1000):
        assert not book.admit("192.0.2.1")

    assert len(caplog.records) == 1
    assert "192.0.2.1" in caplog.text
    assert "MARQ_MAX_CONNECTIONS" in caplog.text
    assert book.refused["total"] == 1000


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        ("/a/socket", ""),
        (None, ""),
    ],
    ids=["v4", "mapped", "v6", "same-network", "scoped", "unix", "none"],
)
def test_a_client_is_counted_by_what_it_can_not_change(peer: Any, address: str) -> None:
    assert address_of(peer) == address


def test_connections_leave_files_for_tables_and_kafka() -> None:
    assert connections_for(files=65_536, wanted=8_192) == 8_192
    assert connections_for(files=4_096, wanted=8_192) == 3_072
    assert connections_for(files=1_024, wanted=8_192) == 512


def test_the_soft_limit_of_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert raise_file_limit() == min(hard, connection_limits.FILES_WANTED)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, connection_limits.FILES_WANTED)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_taken_of_aiohttp_is_there_in_the_version_that_is_permitted() -> None:
    """`Connection` stands on how aiohttp's handler is made: another minor version has to be looked at first."""
    with (Path(__file__).resolve().parents[2] / "pyproject.toml").open("rb") as file:
        groups = tomllib.load(file)["dependency-groups"]
    (permitted,) = (one for one in groups["worker"] if isinstance(one, str) and one.startswith("aiohttp"))
    lowest, _, below = permitted.removeprefix("aiohttp>=").partition(",<")
    low, high, here = ([int(part) for part in text.split(".")] for text in (lowest, below, aiohttp.__version__))
    assert high == [low[0], low[1] + 1]
    assert low <= here < high
    taken = "_waiter _messages _request_count _force_close _close _max_msg_queue_size _msg_queue_resume_size transport"
    for name in taken.split():
        assert hasattr(RequestHandler, name), name
