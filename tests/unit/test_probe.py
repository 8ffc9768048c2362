"""What is said of a port that something else than Kafka has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.kafka.probe import find_trouble
from app.settings import Settings

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # as a server that waits for the end of a line
    if await reader.read(3) == b"GET":
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
    else:
        await reader.read()
    writer.close()


async def _mail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 mail.example ESMTP\x1b\r\n")
    await writer.drain()
    await reader.read(100)
    writer.close()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("serve", "said", "passing"),
    [
        (_http, "it speaks no Kafka on this port, it answers HTTP", False),
        (_mail, "it speaks no Kafka on this port, it answers '220 mail.example ESMTP", False),
        (_silent, "it takes connections and answers nothing", True),
    ],
    ids=["http", "mail", "silent"],
)
def test_a_port_that_speaks_no_kafka_is_told_with_what_it_answers(
    serve: Serve, said: str, passing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.kafka.probe.ATTEMPT_S", 0.3)

    async def look() -> object:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            args = {"bootstrap_servers": [f"127.0.0.1:{port}"], "security_protocol": "PLAINTEXT"}
            trouble = await find_trouble(Settings(kafka=f"kafka://127.0.0.1:{port}"), args, 300)
        assert trouble is not None
        assert said in trouble.what
        assert trouble.what.isprintable()
        assert trouble.passing is passing
        assert "MARQ_KAFKA" in trouble.mend
        return trouble

    asyncio.run(look())
