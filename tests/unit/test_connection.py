"""Connections to Kafka that break, and brokers that are away while a worker starts."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from aiokafka.conn import AIOKafkaConnection
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    NotLeaderForPartitionError,
    RequestTimedOutError,
)
from aiokafka.protocol.admin import ApiVersionRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest

from app.kafka import connection as module
from app.kafka import internals
from app.kafka.connection import asked_again, until_kafka_takes_it
from marq.errors import BrokerError


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


class BlackHole:
    """A broker that takes connections and requests, and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))  # the system accepts; nobody reads
        self.port: int = self._socket.getsockname()[1]

    def connection(self) -> AIOKafkaConnection:
        return AIOKafkaConnection("127.0.0.1", self.port, request_timeout_ms=60_000)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def black_hole(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlackHole]:
    monkeypatch.setattr(internals, "ANSWER_S", 0.05)
    monkeypatch.setattr(internals, "_patience_s", {})
    found = BlackHole()
    yield found
    found.close()


def _versions_known(connection: AIOKafkaConnection) -> AIOKafkaConnection:
    async def known() -> None:
        connection._versions = {
            kind.API_KEY: (0, 3) for kind in (MetadataRequest, FindCoordinatorRequest, FetchRequest, ProduceRequest)
        }

    connection._do_version_lookup = known
    return connection


FETCH = FetchRequest(100, 1, 1_000_000, 0, [])
PROMPT = {
    "leader": MetadataRequest([]),
    "group": FindCoordinatorRequest("group", 0),
    "fetch": FETCH,
    "produce": ProduceRequest(required_acks=-1, timeout=2_000, topics=[], transactional_id=None),
}


@pytest.mark.parametrize("question", PROMPT.values(), ids=PROMPT)
def test_a_broker_that_does_not_answer_soon_is_given_up(black_hole: BlackHole, question: Any) -> None:
    """Each later question could go to the same dead connection if it stayed open."""

    async def scenario() -> None:
        connection = _versions_known(black_hole.connection())
        await connection.connect()
        async with asyncio.timeout(5):
            with pytest.raises(TimeoutError):
                await connection.send(question)
        assert not connection.connected()

    asyncio.run(scenario())


def test_a_broker_that_takes_a_connection_and_says_nothing_is_given_up(black_hole: BlackHole) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(5):
            with pytest.raises(TimeoutError):
                await black_hole.connection().connect()

    asyncio.run(scenario())


def test_other_requests_have_the_time_of_the_client(black_hole: BlackHole) -> None:
    """To join a group takes as long as a rebalance."""

    async def scenario() -> None:
        connection = _versions_known(black_hole.connection())
        await connection.connect()
        other = asyncio.ensure_future(connection.send(ApiVersionRequest()))
        await asyncio.sleep(0.2)
        assert not other.done()
        assert connection.connected()
        connection.close()
        with pytest.raises(KafkaConnectionError):
            await other

    asyncio.run(scenario())


def test_a_slow_broker_gets_more_time_after_each_time_out(
    black_hole: BlackHole, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await black_hole.connection().connect()
        assert internals._patience_s["127.0.0.1", black_hole.port, "connect"] == 8 * internals.ANSWER_S
        monkeypatch.setattr(internals, "ANSWER_S", 60)  # so any answer is a quick one
        connection = _versions_known(black_hole.connection())
        await connection.connect()
        assert not internals._patience_s
        connection.close()

    asyncio.run(scenario())


def test_who_answers_slowly_has_twice_that_time(black_hole: BlackHole, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large fetch over a slow line comes in the end."""

    async def scenario() -> None:
        connection = _versions_known(black_hole.connection())
        await connection.connect()

        async def answered_after(seconds: float) -> None:
            answer = asyncio.ensure_future(connection.send(FETCH))
            await asyncio.sleep(seconds)
            connection._requests.pop()[2].set_result("answer")
            assert await answer == "answer"

        slow_s = internals.ANSWER_S
        asked = connection.host, connection.port, "FetchRequest"
        internals._patience_s[asked] = 60  # it is not given up, however slow this machine is
        await answered_after(slow_s)
        assert internals._patience_s[asked] >= 2 * slow_s
        monkeypatch.setattr(internals, "ANSWER_S", 60)
        await answered_after(0)
        assert asked not in internals._patience_s
        connection.close()

    asyncio.run(scenario())


class Kafka:
    """Fails so many times."""

    def __init__(self, error: BaseException, times: int) -> None:
        self.error, self.times = error, times
        self.said: list[str] = []

    async def ask(self) -> str:
        if self.times:
            self.times -= 1
            raise BrokerError("a request failed") from self.error
        return "done"


def test_a_consumer_whose_broker_leads_a_log_no_more_asks_who_does() -> None:
    """Else it would ask the same broker for the edges of the log until its metadata is five minutes old."""

    class Client:
        asked = 0

        async def send(self, node_id: int, request: Any) -> Any:
            return SimpleNamespace(API_VERSION=1, topics=[("t", [(0, NotLeaderForPartitionError.errno, -1, -1)])])

        def force_metadata_update(self) -> None:
            self.asked += 1

    async def scenario() -> None:
        client = Client()
        fetcher: Any = SimpleNamespace(_client=client, _isolation_level=0)
        with pytest.raises(NotLeaderForPartitionError):
            await Fetcher._proc_offset_request(fetcher, 1, {"t": [(0, -2)]})
        assert client.asked == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "error",
    [NodeNotReadyError("2"), KafkaConnectionError("2"), RequestTimedOutError(), ConnectionRefusedError()],
    ids=lambda error: type(error).__name__,
)
def test_a_worker_that_starts_waits_for_a_broker_that_is_away(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0)
    kafka = Kafka(error, 3)
    assert asyncio.run(until_kafka_takes_it(kafka.ask, 60, kafka.said.append)) == "done"
    assert len(kafka.said) == 1


@pytest.mark.parametrize(
    ("error", "wait_s"), [(ClusterAuthorizationFailedError(), 60), (KafkaError("odd"), 60), (NodeNotReadyError("2"), 0)]
)
def test_it_waits_for_nothing_that_time_does_not_mend_and_no_longer_than_it_may(
    error: Exception, wait_s: float
) -> None:
    kafka = Kafka(error, 10)
    with pytest.raises(BrokerError):
        asyncio.run(until_kafka_takes_it(kafka.ask, wait_s, kafka.said.append))
    assert kafka.times == 9


def test_kafka_is_asked_again_for_long_if_it_says_so_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0)
    kafka = Kafka(GroupCoordinatorNotAvailableError(), 10)
    assert asyncio.run(until_kafka_takes_it(kafka.ask, 0, kafka.said.append)) == "done"
    monkeypatch.setattr(module, "SAYS_AGAIN_S", 0)
    kafka = Kafka(GroupCoordinatorNotAvailableError(), 10)
    with pytest.raises(BrokerError):
        asyncio.run(until_kafka_takes_it(kafka.ask, 0, kafka.said.append))
    assert kafka.times == 9


@pytest.mark.parametrize("error", [NodeNotReadyError("1"), GroupCoordinatorNotAvailableError()])
def test_a_command_asks_again_what_kafka_can_not_tell_yet(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker with a ZooKeeper answers before it knows of any broker, itself included."""
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0)
    assert asyncio.run(asked_again(Kafka(error, 3).ask)) == "done"
    monkeypatch.setattr(module, "COMMAND_S", 0)
    with pytest.raises(BrokerError):
        asyncio.run(asked_again(Kafka(error, 10).ask))


@pytest.mark.parametrize("error", [KafkaConnectionError("away"), ClusterAuthorizationFailedError()])
def test_a_command_does_not_wait_for_a_kafka_that_is_away(error: Exception) -> None:
    kafka = Kafka(error, 10)
    with pytest.raises(BrokerError):
        asyncio.run(asked_again(kafka.ask))
    assert kafka.times == 9
