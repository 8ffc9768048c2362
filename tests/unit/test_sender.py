"""How batches are sent: a partition that Kafka refuses, or that has no leader, does not delay others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.client import ConnectionGroup
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NotEnoughReplicasError,
    RequestTimedOutError,
)
from aiokafka.producer.message_accumulator import MessageAccumulator
from aiokafka.producer.transaction_manager import TransactionManager

from app.streaming.producer import IdempotentProducer, _Batch
from app.streaming.sender import TAKE_TIMEOUT_MS, Sender

TOPIC = "t"
BACKOFF_S = 0.05
NODE = 1


class Request:
    """A request that the broker has not answered yet."""

    def __init__(self, group: Any, request: Any) -> None:
        self.group = group
        self.timeout_ms = request._timeout
        self.partitions = [number for _, batches in request._topics for number, _ in batches]
        self.answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answer(self, **errors: type[Any]) -> None:
        """Confirm all partitions but those with an error (p0=NotEnoughReplicasError)."""
        parts = []
        for number in self.partitions:
            error = errors.get(f"p{number}")
            parts.append((number, error.errno if error is not None else 0, 7, 1_000, 0))
        self.answered.set_result(SimpleNamespace(API_VERSION=7, topics=[(TOPIC, parts)]))

    def break_off(self) -> None:
        self.answered.set_exception(KafkaConnectionError("closed"))


class Kafka:
    """The client of the producer, and a cluster of one broker."""

    def __init__(self) -> None:
        self.cluster = self
        self.leaderless: set[int] = set()
        self.requests: list[Request] = []
        self.refreshed = 0
        self._client_id = "c"

    def leader_for_partition(self, tp: Any) -> int:
        return -1 if tp.partition in self.leaderless else NODE

    async def send(self, node_id: int, request: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:
        self.requests.append(Request(group, request))
        return await self.requests[-1].answered

    def force_metadata_update(self) -> asyncio.Future[Any]:
        self.refreshed += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_result(True)
        return future

    async def _maybe_wait_metadata(self) -> None: ...


class Desk:
    def __init__(self) -> None:
        self.kafka = Kafka()
        transactions = TransactionManager(None, 0)
        transactions.set_pid_and_epoch(1, 0)
        self.accumulator = MessageAccumulator(
            self.kafka, 16_384, 0, 0.2, txn_manager=transactions, loop=asyncio.get_running_loop()
        )
        self.sender = Sender(
            self.kafka,
            acks=-1,
            txn_manager=transactions,
            message_accumulator=self.accumulator,
            retry_backoff_ms=BACKOFF_S * 1000,
            request_timeout_ms=10_000,
        )

    async def append(self, *partitions: int) -> list[asyncio.Future[Any]]:
        """One record each; returns when what can be sent is."""
        futures = [await self.accumulator.add_message(TopicPartition(TOPIC, n), None, b"x", 1) for n in partitions]
        await self.settle()
        return futures

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def pause(self) -> None:
        await asyncio.sleep(2 * BACKOFF_S)
        await self.settle()


Scenario = Callable[[Desk], Awaitable[None]]


@pytest.fixture
def run() -> Callable[[Scenario], None]:
    def run(scenario: Scenario) -> None:
        async def main() -> None:
            desk = Desk()
            await desk.sender.start()
            async with asyncio.timeout(5):
                await scenario(desk)
            desk.sender.sender_task.cancel()

        asyncio.run(main())

    return run


def test_partitions_of_a_broker_share_a_request_of_which_the_broker_answers_soon(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        first, second = await desk.append(0, 1)
        (request,) = desk.kafka.requests
        assert sorted(request.partitions) == [0, 1]
        assert request.timeout_ms == TAKE_TIMEOUT_MS
        request.answer()
        assert [(await future).offset for future in (first, second)] == [7, 7]

    run(scenario)


@pytest.mark.parametrize("error", [NotEnoughReplicasError, RequestTimedOutError])
def test_while_one_partition_is_refused_the_others_are_sent_at_once(run: Any, error: type[Any]) -> None:
    async def scenario(desk: Desk) -> None:
        (refused,) = await desk.append(0)
        desk.kafka.requests[0].answer(p0=error)
        await desk.settle()
        (taken,) = await desk.append(1)
        assert desk.kafka.requests[1].partitions == [1], "without waiting for the pause of the other"
        desk.kafka.requests[1].answer()
        await taken
        assert not refused.done()

    run(scenario)


def test_a_refused_partition_is_tried_again_over_a_connection_without_the_others(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        (refused,) = await desk.append(0)
        desk.kafka.requests[0].answer(p0=NotEnoughReplicasError)
        await desk.pause()
        again = desk.kafka.requests[1]
        assert again.partitions == [0] and again.group != ConnectionGroup.DEFAULT

        (taken,) = await desk.append(1)  # the broker keeps the answer of the first
        other = desk.kafka.requests[2]
        assert other.partitions == [1] and other.group == ConnectionGroup.DEFAULT
        other.answer()
        await taken

        again.answer()
        await refused
        await desk.append(0, 1)
        assert sorted(desk.kafka.requests[3].partitions) == [0, 1], "and is one of them again"

    run(scenario)


def test_of_a_partition_one_batch_is_under_way_and_the_refused_one_comes_first(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        (first,) = await desk.append(0)
        (second,) = await desk.append(0)
        assert len(desk.kafka.requests) == 1
        desk.kafka.requests[0].answer(p0=NotEnoughReplicasError)
        await desk.settle()
        assert len(desk.kafka.requests) == 1
        await desk.pause()
        desk.kafka.requests[1].answer()
        await desk.settle()
        assert first.done() and not second.done()
        desk.kafka.requests[2].answer()
        await second

    run(scenario)


def test_a_connection_that_breaks_sets_no_partition_apart(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        futures = await desk.append(0, 1)
        desk.kafka.requests[0].break_off()
        await desk.pause()
        (again,) = desk.kafka.requests[1:]
        assert sorted(again.partitions) == [0, 1]
        again.answer()
        await asyncio.gather(*futures)

    run(scenario)


def test_what_kafka_will_never_take_fails_and_is_not_sent_again(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        (future,) = await desk.append(0)
        desk.kafka.requests[0].answer(p0=MessageSizeTooLargeError)
        with pytest.raises(MessageSizeTooLargeError):
            await future
        await desk.pause()
        assert len(desk.kafka.requests) == 1

    run(scenario)


def test_a_partition_without_a_leader_holds_up_none_and_does_not_keep_the_worker_busy(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        desk.kafka.leaderless.add(0)
        (waits,) = await desk.append(0)
        for _ in range(5):
            (taken,) = await desk.append(1)
            desk.kafka.requests[-1].answer()
            await taken
        await desk.pause()
        assert desk.kafka.refreshed <= 5, "once in a pause, however often it is looked for work"
        desk.kafka.leaderless.clear()
        await desk.pause()
        desk.kafka.requests[-1].answer()
        await waits

    run(scenario)


def test_it_ends_though_a_broker_does_not_answer(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.append(0)
        await desk.sender.close()
        assert desk.kafka.requests[0].answered.cancelled()

    run(scenario)


def test_an_error_of_our_own_ends_the_task(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        (written,) = await desk.append(0)
        desk.kafka.requests[0].answered.set_exception(ValueError("planted"))
        await asyncio.wait({desk.sender.sender_task})
        assert "planted" in str(written.exception())
        assert "planted" in str(desk.sender.sender_task.exception())

    run(scenario)


def test_what_waits_for_a_partition_without_a_leader_fails_for_lack_of_time_only() -> None:
    """aiokafka's batch would fail with an error of the leader, which says that it was refused."""

    async def scenario() -> None:
        kafka = Kafka()
        kafka.leaderless.add(0)
        accumulator = MessageAccumulator(kafka, 16_384, 0, 0.0, loop=asyncio.get_running_loop())
        producer: Any = object.__new__(IdempotentProducer)
        producer.loop = asyncio.get_running_loop()
        producer.delivery_timeout_s, producer.pending_bytes, producer._unconfirmed = 0.05, 0, {}
        batch = producer._new_batch(accumulator, TopicPartition(TOPIC, 0))
        assert type(batch) is _Batch
        future = batch.append(None, b"x", None)
        accumulator.drain_by_nodes(ignore_nodes=())
        await asyncio.sleep(0)
        assert not future.done()
        with pytest.raises(KafkaTimeoutError):
            await future

    asyncio.run(scenario())
