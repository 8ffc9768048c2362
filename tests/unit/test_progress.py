"""Partitions that do not advance though something was fetched of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.subscription_state import SubscriptionState
from faust.types import TP

from app.engine.progress import STUCK_MS, Progress
from app.streaming.transport import ChunkConsumer

LOGS = SimpleNamespace(queue="q", markers="m")


class Consumer:
    """What `Progress` asks of one."""

    def __init__(self) -> None:
        self.stirred: dict[int, None] = {}
        self.ends: dict[TP, int] = {}
        self.sought: list[tuple[TP, int]] = []
        self.asked = 0

    def highwater(self, tp: TP) -> int | None:
        self.asked += 1
        return self.ends.get(tp)

    def seek_chunks(self, tp: TP, offset: int, generation: int) -> bool:
        self.sought.append((tp, offset))
        return True


class Desk:
    """Partitions, all of which are read up to offset 5 of their queue log, and a clock."""

    def __init__(self, count: int) -> None:
        self.consumer = Consumer()
        self.progress = Progress(SimpleNamespace(consumer=self.consumer), lambda: LOGS, lambda *_: None)  # type: ignore[arg-type, return-value]
        self.owned: dict[int, Any] = {n: self._owned(n) for n in range(count)}
        self.now_ms = 0

    def _owned(self, number: int) -> Any:
        self.consumer.ends[TP("q", number)] = 5
        partition = SimpleNamespace(position=5, markers_position=0)
        owner = SimpleNamespace(partition=partition)
        return SimpleNamespace(number=number, owner=owner, watched={}, paused=False, begins_later=False, generation=1)

    def fetched(self, number: int) -> None:
        """A chunk up to offset 7 has come."""
        self.consumer.ends[TP("q", number)] = 7
        self.consumer.stirred[number] = None

    def pass_ms(self, ms: int) -> None:
        for _ in range(0, ms, 100):
            self.now_ms += 100
            self.progress.look_after_some(self.owned, self.now_ms)


def test_the_end_of_a_log_that_is_not_read_here_is_not_known() -> None:
    """The thread of the consumer learns of a new assignment before the main thread does."""

    async def scenario() -> None:
        subscriptions, tp = SubscriptionState(), TP("q", 1)
        consumer = ChunkConsumer.__new__(ChunkConsumer)
        consumer._thread = SimpleNamespace(_consumer=None)  # type: ignore[assignment]
        assert consumer.highwater(tp) is None
        consumer._thread._consumer = SimpleNamespace(_subscription=subscriptions)
        assert consumer.highwater(tp) is None
        subscriptions.subscribe({"q"})
        assert consumer.highwater(tp) is None
        subscriptions.assign_from_subscribed([TopicPartition(*tp)])
        assert consumer.highwater(tp) is None
        subscriptions.subscription.assignment.state_value(tp).highwater = 7
        assert consumer.highwater(tp) == 7
        subscriptions.assign_from_subscribed([])
        assert consumer.highwater(tp) is None

    asyncio.run(scenario())


@pytest.fixture
def desk() -> Desk:
    return Desk(1_000)


def test_partitions_of_which_nothing_comes_are_not_looked_at(desk: Desk) -> None:
    desk.pass_ms(10 * STUCK_MS)
    assert desk.consumer.asked == 0


def test_a_partition_whose_last_chunk_was_dropped_is_read_again(desk: Desk) -> None:
    desk.fetched(7)
    desk.pass_ms(STUCK_MS * 5 // 2)
    assert desk.consumer.sought == [(TP("q", 7), 5)]


def test_it_is_read_again_until_that_helps(desk: Desk) -> None:
    desk.fetched(7)
    desk.pass_ms(20 * STUCK_MS)
    assert 2 < len(desk.consumer.sought) < 10

    desk.owned[7].owner.partition.position = 7
    desk.pass_ms(2 * STUCK_MS)
    asked = desk.consumer.asked
    desk.pass_ms(10 * STUCK_MS)
    assert desk.consumer.asked == asked


def test_what_was_read_is_looked_at_once(desk: Desk) -> None:
    for number in desk.owned:
        desk.fetched(number)
        desk.owned[number].owner.partition.position = 7
    desk.pass_ms(3 * STUCK_MS)
    assert not desk.consumer.sought
    assert desk.consumer.asked == 2 * len(desk.owned)


def test_a_partition_that_has_left_is_forgotten(desk: Desk) -> None:
    desk.fetched(7)
    del desk.owned[7]
    desk.pass_ms(10 * STUCK_MS)
    assert desk.consumer.asked == 0
