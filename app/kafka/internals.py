"""Reaches into aiokafka that every client needs: errors of its connections, and requests that it lacks.

Import this before a client connects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.api import Request


def _with_errors_of_kafka(send: Callable[..., Any]) -> Callable[..., Any]:
    """As `send`, but a request on a connection that was just reset fails with a `KafkaError`.

    For a turn or two of the event loop only the transport knows of a reset. Then uvloop's raises RuntimeError, and
    asyncio's only warns. aiokafka's background tasks expect a `KafkaError`: a RuntimeError would end them for good, and
    with them metadata, heartbeats, fetches or produce requests.
    """

    @functools.wraps(send)
    def guarded(connection: AIOKafkaConnection, *args: Any, **kwargs: Any) -> Any:
        try:
            return send(connection, *args, **kwargs)
        except KafkaError:  # which is a RuntimeError
            raise
        except RuntimeError as exc:
            connection.close(reason=CloseReason.CONNECTION_BROKEN)
            raise KafkaConnectionError(f"Connection at {connection.host}:{connection.port} broken: {exc}") from exc

    return guarded


AIOKafkaConnection.send = _with_errors_of_kafka(AIOKafkaConnection.send)
AIOKafkaConnection._send_sasl_token = _with_errors_of_kafka(AIOKafkaConnection._send_sasl_token)


def _with_new_leaders(ask: Callable[..., Any]) -> Callable[..., Any]:
    """As `ask` for edges of logs, but if a broker does not lead them any more, the client asks who does.

    aiokafka's consumer would ask the same broker again and again, until its metadata is five minutes old.
    """

    @functools.wraps(ask)
    async def guarded(fetcher: Fetcher, *args: Any, **kwargs: Any) -> Any:
        try:
            return await ask(fetcher, *args, **kwargs)
        except KafkaError as exc:
            if exc.retriable:
                fetcher._client.force_metadata_update()
            raise

    return guarded


Fetcher._proc_offset_request = _with_new_leaders(Fetcher._proc_offset_request)


async def ask(admin: AIOKafkaAdminClient, request: Any, node_id: int | None = None) -> Any:
    """Send a request, to any broker or to the one given. Returns the answer. Raises `KafkaError`."""
    return await admin._send_request(request, node_id)


def offered_versions(connection: AIOKafkaConnection) -> dict[int, tuple[int, int]]:
    """The lowest and highest version of each request that a broker takes, by the number of its kind."""
    return dict(connection._versions)


def known_versions(request: type[Request[Any]]) -> list[int]:
    """The versions of a request that the client knows."""
    return [one.API_VERSION for one in request._CLASSES]
