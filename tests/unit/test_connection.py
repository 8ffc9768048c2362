"""Connections to Kafka that break: whoever sends a request then gets an error of Kafka's, whatever the event loop."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.admin import ApiVersionRequest

import app.kafka.connection  # noqa: F401


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_request_in_the_moment_of_a_reset_fails_as_any_other_on_a_broken_connection(run: Callable[..., Any]) -> None:
    """A killed broker resets its connections. Tasks of the client take errors of Kafka, and end with any other."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    class Connection(AIOKafkaConnection):  # type: ignore[misc]
        async def _do_version_lookup(self) -> None: ...

    async def scenario() -> None:
        server = await asyncio.start_server(reset, "127.0.0.1", 0)
        connection = Connection("127.0.0.1", server.sockets[0].getsockname()[1])
        await connection.connect()
        lost = connection._protocol.connection_lost
        sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def send() -> None:
            try:
                await connection.send(ApiVersionRequest())
            except Exception as exc:
                sent.set_result(exc)

        def hear_of_the_reset(exc: Exception | None) -> None:
            lost(exc)
            assert connection.connected(), "it does not know yet"
            asyncio.ensure_future(send())  # noqa: RUF006

        connection._protocol.connection_lost = hear_of_the_reset
        with pytest.raises(KafkaConnectionError):
            await connection.send(ApiVersionRequest())
        assert isinstance(await sent, KafkaConnectionError)
        assert not connection.connected()
        server.close()

    run(asyncio.wait_for(scenario(), 5))
