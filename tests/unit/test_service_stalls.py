"""A partition in which Kafka confirms nothing does not delay others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.stalls import STALLED_S
from app.service.meters import Meters
from app.service.operations import QueueService
from marq.core.markers import End, Marker
from marq.core.placing import fifo_partition
from marq.core.policies import QueueSettings
from marq.errors import UnavailableError
from marq.protocol.messages import Entry
from tests.unit.peer_helpers import alone

COUNT = 3
FIFO = QueueSettings(fifo=True, deduplication_scope="group")


class Desk:
    """The service over three partitions, of which some wait for Kafka."""

    def __init__(self, *stalled: int, fifo: bool = False) -> None:
        self.stalled = set(stalled)
        self.markers_stalled: set[int] = set()
        self.sent: list[int] = []
        self.said: dict[int, list[Marker]] = {}
        self.settings = FIFO if fifo else QueueSettings()
        catalog = SimpleNamespace(
            require_or_make=self._made,
            settings_of=lambda queue: self.settings,
            generation_of=lambda queue: 0,
            secret=b"s",
        )
        ownership: Any = SimpleNamespace(
            app=SimpleNamespace(producer=self),
            catalog=catalog,
            receivers=[],
            topics=SimpleNamespace(queue="queue", markers="markers", partitions=COUNT),
            outbox=self.outbox,
            stalls=SimpleNamespace(now=lambda: dict.fromkeys(self.markers_stalled | self.stalled)),
        )
        self.operations = QueueService(ownership, SimpleNamespace(queue_id=None), Meters(), alone())  # type: ignore[arg-type]

    async def _made(self, queue: str) -> None: ...

    def waited_s(self, topic: str, partition: int) -> float:
        return STALLED_S + 1 if partition in self.stalled else 0.0

    def append_run(self, topic: str, number: int, key: bytes, records: list[Any]) -> list[tuple[int, Any]]:
        self.sent.append(number)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_result(SimpleNamespace(offset=7))
        return [(len(records), future)]

    def outbox(self, number: int) -> Any:
        def put_confirmed(markers: list[Marker]) -> asyncio.Future[int]:
            self.said[number] = markers
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            future.set_result(1)
            return future

        return SimpleNamespace(put_confirmed=put_confirmed)


def entry(**values: Any) -> Entry:
    return Entry(payload=b"x", **values)


def test_sends_go_to_the_other_partitions() -> None:
    async def scenario() -> None:
        desk = Desk(1)
        for _ in range(9):
            await desk.operations.send("work", [entry()])
        assert set(desk.sent) == {0, 2}

    asyncio.run(scenario())


def test_sends_go_to_partitions_of_which_kafka_takes_the_markers_too() -> None:
    async def scenario() -> None:
        desk = Desk()
        desk.markers_stalled = {1}
        for _ in range(9):
            await desk.operations.send("work", [entry()])
        assert set(desk.sent) == {0, 2}
        desk.stalled, desk.markers_stalled = {0, 1}, {2}
        await desk.operations.send("work", [entry()])
        assert desk.sent[-1] == 2, "where there is no better one"

    asyncio.run(scenario())


def test_sends_are_refused_when_there_is_no_other() -> None:
    async def scenario() -> None:
        desk = Desk(0, 1, 2)
        with pytest.raises(UnavailableError):
            await desk.operations.send("work", [entry()])
        assert not desk.sent

    asyncio.run(scenario())


def test_a_group_keeps_its_partition_and_waits_while_other_groups_are_sent() -> None:
    async def scenario() -> None:
        groups = [f"g{i}" for i in range(20)]
        places = {group: fifo_partition(b"work", group.encode(), FIFO, COUNT) for group in groups}
        assert set(places.values()) == {0, 1, 2}
        desk = Desk(1, fifo=True)
        results = await desk.operations.send("work", [entry(group=group, deduplication_id=group) for group in groups])
        refused = {group for group, result in zip(groups, results, strict=True) if isinstance(result, UnavailableError)}
        assert refused == {group for group, place in places.items() if place == 1}
        assert set(desk.sent) == {0, 2}

    asyncio.run(scenario())


def test_acks_of_the_other_partitions_are_taken() -> None:
    async def scenario() -> None:
        desk = Desk(1)
        receipts = [desk.operations.receipts.make(number, 5, 1, 0, 1, bytes(10)) for number in range(COUNT)]
        results = await desk.operations.ack(receipts)
        assert [type(result) for result in results] == [type(None), UnavailableError, type(None)]
        assert desk.said == {0: [End(5, [0, 1], "acked", 1)], 2: [End(5, [0, 1], "acked", 1)]}

    asyncio.run(scenario())
