"""The errors for a port that speaks no Kafka, and for a Kafka of another version."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.kafka.probe import NEEDED, PERMISSION_OF, Trouble, find_trouble
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


async def trouble_with(serve: Serve, timeout_ms: int, **values: Any) -> Trouble | None:
    """The trouble with a server on this machine."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        args = {"bootstrap_servers": [f"127.0.0.1:{port}"], "security_protocol": "PLAINTEXT"}
        return await find_trouble(Settings(kafka=f"kafka://127.0.0.1:{port}", **values), args, timeout_ms)


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
        trouble = await trouble_with(serve, 300)
        assert trouble is not None
        assert said in trouble.what
        assert trouble.what.isprintable()
        assert trouble.passing is passing
        assert "MARQ_KAFKA" in trouble.mend
        return trouble

    asyncio.run(look())


# -- versions


def _broker(versions: dict[int, tuple[int, int]]) -> Serve:
    """What answers which requests it takes, as a broker does, and closes the connection on anything else."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            key, _, correlation = struct.unpack(">hhi", (await reader.readexactly(size))[:8])
            assert key == 18  # ApiVersions, which comes first
            listed = b"".join(struct.pack(">hhh", key, *both) for key, both in versions.items())
            body = struct.pack(">ihi", correlation, 0, len(versions)) + listed
            writer.write(struct.pack(">i", len(body)) + body)
            await reader.read(4)
        finally:
            writer.close()

    return serve


#: Versions that any current Kafka accepts.
OFFERED = {request.API_KEY: (0, 99) for request, _ in NEEDED}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({0: (0, 6), 1: (0, 8)}, "it is too old: it has no Produce of version 7"),  # Kafka 2.0
        ({1: (0, 10)}, "it is too old: it has no Fetch of version 11"),  # Kafka 2.1
        ({22: None}, "it is too old: it has no InitProducerId of version 0"),
        ({1: (90, 99)}, "it is too new: it takes Fetch from version 90 on"),
        ({3: (90, 99)}, "it is too new: it takes Metadata from version 90 on"),
    ],
    ids=["2.0", "2.1", "a request that it has not", "a later fetch", "later metadata"],
)
def test_a_kafka_that_is_too_old_or_too_new_is_told_so(changed: dict[int, tuple[int, int] | None], said: str) -> None:
    async def look() -> None:
        offered = {key: both for key, both in (OFFERED | changed).items() if both is not None}
        trouble = await trouble_with(_broker(offered), 5_000)
        assert trouble is not None
        assert said in trouble.what
        assert trouble.mend
        assert not trouble.passing

    asyncio.run(look())


@pytest.mark.parametrize("request_", PERMISSION_OF, ids=lambda request: request.__name__)
def test_a_kafka_without_a_request_that_is_dispensable_is_used_when_that_is_asked_for(request_: Any) -> None:
    permission = PERMISSION_OF[request_]
    serve = _broker({key: both for key, both in OFFERED.items() if key != request_.API_KEY})

    async def look() -> None:
        trouble = await trouble_with(serve, 5_000)
        assert trouble is not None
        assert trouble.what == f"it knows no {request_.__name__.removesuffix('Request')}"
        assert trouble.mend.startswith(f"set MARQ_KAFKA_WITHOUT={permission}: ")
        trouble = await trouble_with(serve, 5_000, kafka_without=(permission,))
        assert "it knows no" not in str(trouble)

    asyncio.run(look())
