"""Every byte of a message counts, in any field, also while it waits for Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from faust.types import TP

from app.service.sends import FromProtocol, record_headers
from app.streaming import producer as module
from app.streaming.producer import IdempotentProducer, ProducerFull
from gateway.schemas import Message
from gateway.sqs.limits import OUR_HEADERS, RELAXED
from gateway.sqs.messages import Attribute, headers_of
from marq.core.policies import QueueSettings
from marq.errors import BadValueError, TooLargeError
from marq.protocol.limits import HEADERS_MAX
from marq.protocol.messages import Entry

SMALL = QueueSettings(max_message_bytes=1024)


def headers(message: Entry, settings: QueueSettings = SMALL) -> list[tuple[str, bytes]]:
    return record_headers(message, settings, 0)


# -- the limit of a queue


@pytest.mark.parametrize(
    "message",
    [
        Message(payload=b"x" * 1025),
        Message(payload=b"", headers={"a": b"x" * 1024}),
        Message(payload=b"", headers={"x" * 1025: b""}),
        Message(payload=b"", key=b"x" * 1025),
        FromProtocol(payload=b"", protocol_headers={"AWS.TraceHeader": b"x" * 1024}),
        FromProtocol(payload=b"", protocol_headers=headers_of([Attribute("a", "String." + "x" * 1024, b"b")])[1]),
    ],
    ids=["payload", "header", "name", "key", "trace", "type"],
)
def test_all_that_a_sender_says_counts(message: Entry) -> None:
    with pytest.raises(TooLargeError):
        headers(message)


def test_a_protocol_counts_as_its_users_know_it() -> None:
    sender = {"AWS.SenderId": b"AKID"}

    assert headers(FromProtocol(payload=b"x" * 1024, protocol_headers=sender, size_bytes=1024)) == [*sender.items()]
    with pytest.raises(TooLargeError, match="1025"):
        headers(FromProtocol(payload=b"x" * 1000, protocol_headers=sender, size_bytes=1025))


# -- names that are not the sender's


@pytest.mark.parametrize(
    "name", ["AWS.SenderId", "aws.senderid", "AwS.TraceHeader", "Amazon.x", "AMAZON.", "marq-group"]
)
def test_headers_that_receivers_believe_are_not_the_senders_to_set(name: str) -> None:
    with pytest.raises(BadValueError, match="names that begin with"):
        headers(Message(payload=b"", headers={name: b"admin"}))
    with pytest.raises(BadValueError, match="names that begin with"):
        headers(FromProtocol(payload=b"", headers={name: b"admin"}))


@pytest.mark.parametrize("name", ["AWS", "awsome.x", "x-AWS.y", "amazonas.z"])
def test_names_that_look_a_little_like_them_are(name: str) -> None:
    assert headers(Message(payload=b"", headers={name: b""})) == [(name, b"")]


# -- how many there are


def test_a_message_has_at_most_a_hundred_headers_from_any_protocol() -> None:
    many = {f"{i}": b"" for i in range(HEADERS_MAX)}
    assert len(headers(Entry(payload=b"", headers=many))) == HEADERS_MAX
    with pytest.raises(BadValueError, match="at most 100"):
        headers(Entry(payload=b"", headers=many | {"one more": b""}))
    with pytest.raises(BadValueError, match="at most 100"):
        headers(FromProtocol(payload=b"", headers=many, protocol_headers={"AWS.types": b""}))
    assert RELAXED.attributes + OUR_HEADERS == HEADERS_MAX


# -- what waits for Kafka


class Desk:
    """A producer that Kafka never answers."""

    def __init__(self) -> None:
        self.kafka = AIOKafkaProducer(bootstrap_servers="127.0.0.1:1", enable_idempotence=True)
        self.producer: Any = object.__new__(IdempotentProducer)
        self.producer.__dict__.update(
            _loop=asyncio.get_running_loop(),
            delivery_timeout_s=60.0,
            pending_bytes=0,
            lanes={},
            _producer=self.kafka,
            _known={TP("t", 0)},
            _unconfirmed={},
            _waiting={},
            _learning=set(),
            request_timeout=0.05,
        )

    def batches(self) -> Any:
        return self.kafka._message_accumulator._batches[TP("t", 0)]

    def confirm_one(self) -> None:
        """Kafka confirms the oldest batch."""
        self.batches().popleft().done(0, 1, None)


def run(scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            desk = Desk()
            desk.kafka._closed = True  # it was never started
            await scenario(desk)

    asyncio.run(main())


HEADER = ("h" * 1000, b"v" * 1000)


def test_headers_count_in_what_waits_for_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 100_000)

    async def scenario(desk: Desk) -> None:
        futures = [desk.producer.append("t", 0, b"", b"k", [HEADER]) for _ in range(60)]
        full = [f for f in futures if f.done() and isinstance(f.exception(), ProducerFull)]

        assert 100_000 < desk.producer.pending_bytes < 105_000
        assert len(full) == 60 - desk.producer.pending_bytes // (2000 + module.RECORD_BYTES)

    run(scenario)


def test_headers_of_a_run_count_as_those_of_single_records() -> None:
    async def scenario(desk: Desk) -> None:
        desk.producer.append_run("t", 0, b"k", [(b"value", [HEADER])] * 20)
        of_run = desk.producer.pending_bytes
        for _ in range(20):
            desk.producer.append("t", 0, b"value", b"k", [HEADER])

        assert desk.producer.pending_bytes == pytest.approx(2 * of_run, rel=0.01)
        assert of_run > 20 * 2005
        while desk.batches():
            desk.confirm_one()
            await asyncio.sleep(0)
        assert desk.producer.pending_bytes == 0

    run(scenario)


def test_records_of_a_topic_that_is_not_known_yet_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 10_000)

    async def scenario(desk: Desk) -> None:
        async def never(topic: str) -> set[int]:
            raise TimeoutError

        desk.producer._ensure_producer = lambda: SimpleNamespace(client=SimpleNamespace(_wait_on_metadata=never))
        futures = [desk.producer.append("new", 0, b"", b"k", [HEADER]) for _ in range(20)]
        assert sum(f.done() and isinstance(f.exception(), ProducerFull) for f in futures) > 10
        await asyncio.wait(futures)
        assert desk.producer.pending_bytes == 0

    run(scenario)


def test_a_stall_ends_when_kafka_confirms_something_though_more_waits() -> None:
    async def scenario(desk: Desk) -> None:
        now = 1000.0
        loop = asyncio.get_running_loop()
        desk.producer.loop = SimpleNamespace(
            time=lambda: now, call_later=loop.call_later, create_future=loop.create_future
        )
        for _ in range(30):
            desk.producer.append("t", 0, b"x" * 10_000, b"k", [])
        assert len(desk.batches()) > 2
        now += 5.0
        assert desk.producer.waited_s("t", 0) == 5.0
        assert desk.producer.waits(3.0) == {TP("t", 0): 5.0}

        desk.confirm_one()
        await asyncio.sleep(0)

        assert desk.producer.waited_s("t", 0) == 0.0
        assert desk.producer.waits(3.0) == {}
        now += 4.0
        assert desk.producer.waited_s("t", 0) == 4.0

    run(scenario)


def test_a_batch_that_fails_ends_no_stall() -> None:
    async def scenario(desk: Desk) -> None:
        now = 1000.0
        loop = asyncio.get_running_loop()
        desk.producer.loop = SimpleNamespace(
            time=lambda: now, call_later=loop.call_later, create_future=loop.create_future
        )
        futures = [desk.producer.append("t", 0, b"x" * 10_000, b"k", []) for _ in range(30)]
        now += 5.0
        desk.batches().popleft().failure(ValueError("refused"))
        await asyncio.sleep(0)

        assert desk.producer.waited_s("t", 0) == 5.0
        assert any(f.done() and f.exception() for f in futures)

    run(scenario)
