"""Markers on their way to the log: which share a record, which wait, and the errors if Kafka does not confirm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaTimeoutError

from app.engine import outbox as module
from app.engine.outbox import IN_FLIGHT, Outbox, Writer
from app.streaming.producer import ProducerFull
from marq.core import markers as m
from marq.core.markers import End, Own, Release, Start, Tick
from marq.core.ranges import ranges_of
from marq.errors import BrokerError


class Kafka:
    """Takes appends, and answers when the test says so."""

    def __init__(self) -> None:
        self.appends: list[tuple[m.Batch, asyncio.Future[SimpleNamespace]]] = []

    def append(self, topic: str, partition: int, value: bytes) -> asyncio.Future[SimpleNamespace]:
        future: asyncio.Future[SimpleNamespace] = asyncio.get_running_loop().create_future()
        self.appends.append((m.decode(value), future))
        return future

    def confirm(self, index: int, offset: int, timestamp: int = 1, timestamp_type: int = 1) -> None:
        metadata = SimpleNamespace(offset=offset, timestamp=timestamp, timestamp_type=timestamp_type)
        self.appends[index][1].set_result(metadata)

    def refuse(self, index: int) -> None:
        self.appends[index][1].set_exception(KafkaTimeoutError())

    def batches(self) -> list[int]:
        return [len(batch.markers) for batch, _ in self.appends]


class Desk:
    """An outbox with Kafka behind it, and a record of the calls of its writer."""

    def __init__(self) -> None:
        self.kafka = Kafka()
        self.told: list[tuple[object, ...]] = []
        self.outbox = Outbox(lambda: self.kafka, "markers", 3)  # type: ignore[arg-type, return-value]
        self.outbox.writer = Writer(
            "nonce",
            lambda seq, markers: self.told.append(("sent", seq)),
            lambda seq, offset, timestamp, markers: self.told.append(("took", seq, offset)),
            lambda seq: self.told.append(("failed", seq)),
        )


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_what_is_put_in_one_turn_shares_a_record_with_the_writers_name_and_number() -> None:
    async def scenario() -> None:
        desk = Desk()
        desk.outbox.put([Tick()])
        desk.outbox.put([Tick(), Tick()])
        await turn()
        assert desk.kafka.batches() == [3]
        assert (desk.kafka.appends[0][0].by, desk.kafka.appends[0][0].seq) == ("nonce", 1)
        desk.kafka.confirm(0, 17)
        await turn()
        assert desk.told == [("sent", 1), ("took", 1, 17)]
        assert desk.outbox.idle

    run(scenario)


def test_an_own_marker_is_alone_in_its_record() -> None:
    async def scenario() -> None:
        desk = Desk()
        desk.outbox.put([Tick(), Own("w", "n"), Tick()])
        await turn()
        assert desk.kafka.batches() == [1, 1, 1]

    run(scenario)


def test_what_comes_while_enough_is_on_its_way_waits_and_goes_in_one_record() -> None:
    async def scenario() -> None:
        desk = Desk()
        for _ in range(IN_FLIGHT + 5):
            desk.outbox.put([Tick()])
            await turn()
        assert desk.kafka.batches() == [1] * IN_FLIGHT
        desk.kafka.confirm(0, 0)
        await turn()
        assert desk.kafka.batches() == [1] * IN_FLIGHT + [5]

    run(scenario)


def test_a_confirmation_carries_the_offset() -> None:
    async def scenario() -> None:
        desk = Desk()
        confirmed = desk.outbox.put_confirmed([Tick(), Tick()])
        await turn()
        assert not confirmed.done()
        desk.kafka.confirm(0, 9)
        assert await confirmed == 9

    run(scenario)


def test_who_waits_for_an_append_that_failed_is_told_and_later_appends_go_on() -> None:
    async def scenario() -> None:
        desk = Desk()
        confirmed = desk.outbox.put_confirmed([Tick()])
        await turn()
        desk.kafka.refuse(0)
        with pytest.raises(BrokerError, match="not confirmed"):
            await confirmed
        assert desk.told == [("sent", 1), ("failed", 1)]
        desk.outbox.put([Tick()])
        await turn()
        desk.kafka.confirm(1, 4)
        await turn()
        assert desk.told[2:] == [("sent", 2), ("took", 2, 4)]

    run(scenario)


def test_an_append_whose_place_kafka_can_not_tell_counts_as_failed_until_it_is_read() -> None:
    async def scenario() -> None:
        desk = Desk()
        confirmed = desk.outbox.put_confirmed([Tick()])
        await turn()
        desk.kafka.confirm(0, -1)
        assert await confirmed == -1
        assert desk.told == [("sent", 1), ("failed", 1)]

    run(scenario)


def test_an_append_without_an_answer_counts_as_failed_and_may_still_land(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "APPEND_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        desk = Desk()
        desk.outbox.put([Tick()])
        await asyncio.sleep(0.03)
        assert desk.told == [("sent", 1), ("failed", 1)]
        assert not desk.outbox.idle
        desk.kafka.confirm(0, 4)
        await turn()
        assert desk.told[-1] == ("took", 1, 4)

    run(scenario)


def test_what_a_former_writer_sent_is_told_to_it_alone() -> None:
    async def scenario() -> None:
        desk, later = Desk(), Desk()
        desk.outbox.put([Tick()])
        await turn()
        desk.outbox.writer = later.outbox.writer
        desk.kafka.confirm(0, 4)
        await turn()
        assert desk.told == [("sent", 1), ("took", 1, 4)]
        assert later.told == []

    run(scenario)


def ack(offset: int) -> m.End:
    return m.End(1, ranges_of([offset]), "acked", 1)


def test_what_receivers_say_goes_before_everything_that_waits() -> None:
    async def scenario() -> None:
        desk = Desk()
        desk.outbox.put([Tick(), Tick()])
        desk.outbox.put([ack(1)])
        desk.outbox.put([m.Release(1, 1, ranges_of([2]), 0)])
        await turn()
        (batch, _) = desk.kafka.appends[0]
        assert [type(marker) for marker in batch.markers] == [m.End, m.Release, Tick, Tick]

    run(scenario)


def test_acks_and_releases_that_kafka_refused_are_said_again_until_it_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.001)

    async def scenario() -> None:
        desk = Desk()
        desk.outbox.put([ack(1), m.Release(1, 1, ranges_of([2]), 0), m.Keepalive(1, 1, ranges_of([3]), 5_000), Tick()])
        await turn()
        desk.kafka.appends[0][1].set_exception(ProducerFull("planted"))
        await asyncio.sleep(0.02)
        assert not desk.outbox.idle
        desk.kafka.refuse(1)
        await asyncio.sleep(0.02)
        desk.kafka.confirm(2, 5)
        await turn()
        assert desk.kafka.batches() == [4, 2, 2]
        assert [type(marker) for marker in desk.kafka.appends[2][0].markers] == [m.End, m.Release]
        assert desk.outbox.idle

    run(scenario)


def test_who_waits_for_an_ack_is_told_and_says_it_again_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.001)

    async def scenario() -> None:
        desk = Desk()
        confirmed = desk.outbox.put_confirmed([ack(1)])
        await turn()
        desk.kafka.refuse(0)
        with pytest.raises(BrokerError):
            await confirmed
        await asyncio.sleep(0.02)
        assert desk.kafka.batches() == [1]

    run(scenario)


def test_it_tells_for_how_long_the_oldest_ack_has_waited() -> None:
    async def scenario() -> None:
        desk = Desk()
        desk.outbox.put([Tick()])
        await turn()
        assert desk.outbox.late_s == 0
        desk.outbox.put([ack(1)])
        await asyncio.sleep(0.01)
        assert desk.outbox.late_s >= 0.01
        desk.outbox.put([ack(2)])
        assert desk.outbox.late_s >= 0.01
        desk.kafka.confirm(1, 5)
        await turn()
        assert desk.outbox.late_s < 0.01 or len(desk.kafka.appends) == 3
        desk.kafka.confirm(2, 6)
        await turn()
        assert desk.outbox.late_s == 0

    run(scenario)


def test_what_only_the_owner_says_is_dropped_when_it_leaves_unless_it_is_sent() -> None:
    async def scenario() -> None:
        desk = Desk()
        desk.outbox.put([Start(1, 1, [0, 1], 5)])
        await turn()
        claimed = desk.outbox.put_confirmed([Own("w", "n")])
        desk.outbox.put([Tick(), End(1, [0, 1], "dead"), End(1, [0, 1], "acked", 1), Release(1, 1, [2, 3])])
        desk.outbox.drop_owners()
        await turn()
        sent = [[type(marker) for marker in batch.markers] for batch, _ in desk.kafka.appends]
        assert sent == [[Start], [End, Release]]
        assert isinstance(claimed.exception(), BrokerError)

    run(scenario)


def test_a_topic_that_has_not_the_brokers_time_is_an_error_for_who_waits() -> None:
    async def scenario() -> None:
        desk = Desk()
        waiting = desk.outbox.put_confirmed([Tick(), Tick()])
        await turn()
        desk.kafka.confirm(0, 17, timestamp_type=0)
        with pytest.raises(BrokerError, match=r"markers has message.timestamp.type=CreateTime, must be LogAppendTime"):
            await waiting

    run(scenario)
