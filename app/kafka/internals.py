"""Reaches into aiokafka that every client needs: errors and time-outs of its connections, and requests that it lacks.

Import this before a client connects.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.api import Request
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest

#: Seconds to open a connection, and for answers for which no broker waits long. The client's own time-out has to be
#: longer than a rebalance: for so long a broker that is gone without closing its connections would hold up what it
#: leads, and keep us from asking another one. After a time-out the same address has twice as long, because Kafka may
#: just be slow, and after a slow answer twice what that took.
ANSWER_S = 5.0
#: How many times as long. Whom to ask, any broker can say. A produce request waits for replicas for 2 s at most, a
#: fetch for half a second, but its answer may be large.
_PROMPT = {MetadataRequest: 1, FindCoordinatorRequest: 1, ProduceRequest: 1, FetchRequest: 2}


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


_Asked = tuple[str, int, str]  # address, question
_patience_s: dict[_Asked, float] = {}  # seconds, where they are not those of `ANSWER_S`


async def _in_time(connection: AIOKafkaConnection, asked: _Asked, patience_s: float, answer: Awaitable[Any]) -> Any:
    """The answer of a broker. Closes the connection if it does not come soon. Raises TimeoutError, as `answer` does."""
    now = asyncio.get_running_loop().time
    began_s = now()
    try:
        result = await answer
    except TimeoutError:
        _patience_s[asked] = min(2 * patience_s, max(patience_s, connection._request_timeout))
        # otherwise the next question may go to the same broker, on the same connection
        connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
        raise
    took_s = now() - began_s
    if 2 * took_s > ANSWER_S:
        _patience_s[asked] = 2 * took_s
    else:
        _patience_s.pop(asked, None)
    return result


def _soon(send: Callable[..., Any]) -> Callable[..., Any]:
    """As `send`, but what brokers answer soon is answered soon, or the connection is given up."""

    @functools.wraps(send)
    def bounded(connection: AIOKafkaConnection, request: Any, *args: Any, **kwargs: Any) -> Any:
        times = next((times for prompt, times in _PROMPT.items() if isinstance(request, prompt)), 0)
        if not times:
            return send(connection, request, *args, **kwargs)
        asked = connection.host, connection.port, type(request).__name__
        patience_s = max(times * ANSWER_S, _patience_s.get(asked, 0.0))
        theirs = connection._request_timeout
        connection._request_timeout = patience_s  # it is read once, in this call; a timer of our own would cost more
        try:
            answer = send(connection, request, *args, **kwargs)
        finally:
            connection._request_timeout = theirs
        return _in_time(connection, asked, patience_s, answer)

    return bounded


def _connected_soon(connect: Callable[..., Any]) -> Callable[..., Any]:
    """As `connect`, but given up soon: meanwhile a client opens no other connection, because it opens one at a time."""

    @functools.wraps(connect)
    async def bounded(connection: AIOKafkaConnection) -> Any:
        asked = connection.host, connection.port, "connect"
        patience_s = _patience_s.get(asked, ANSWER_S)

        async def connected() -> Any:
            async with asyncio.timeout(patience_s):
                return await connect(connection)

        return await _in_time(connection, asked, patience_s, connected())

    return bounded


AIOKafkaConnection.send = _soon(_with_errors_of_kafka(AIOKafkaConnection.send))
AIOKafkaConnection.connect = _connected_soon(AIOKafkaConnection.connect)
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
