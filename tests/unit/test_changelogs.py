"""Reads and deletions outside the group: a partition without an answer of Kafka does not delay others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CorruptRecordException, NotLeaderForPartitionError, OffsetOutOfRangeError

from app.engine import changelogs as module
from app.engine.changelogs import READERS, Changelogs
from app.settings import Settings
from marq.core.recovery import LastRead

TOPICS: Any = SimpleNamespace(queue="q", markers="m")


class Kafka:
    """Consumers and an admin client of a Kafka that does not answer for some partitions."""

    def __init__(self) -> None:
        self.silent: set[int] = set()
        self.ended = 0
        self.end = 0  # where all logs begin and end
        self.deleted: list[int] = []

    @property
    def _client(self) -> Kafka:
        return self

    @property
    def cluster(self) -> Kafka:
        return self

    @property
    def _subscription(self) -> Kafka:
        return self

    def leader_for_partition(self, tp: TopicPartition) -> int:
        return tp.partition  # a broker for each

    async def _maybe_wait_metadata(self) -> None: ...

    async def send(self, node: int, request: Any) -> Any:
        if node in self.silent:
            await asyncio.Event().wait()
        parts = [(topic, [(number, 0, -1, self.end) for number, _ in wanted]) for topic, wanted in request._topics]
        return SimpleNamespace(topics=parts)

    async def _answer(self, tps: Any) -> None:
        if any(tp.partition in self.silent for tp in tps):
            await asyncio.Event().wait()

    async def offsets_for_times(self, times: Any) -> dict[TopicPartition, None]:
        await self._answer(times)
        return dict.fromkeys(times)

    async def list_consumer_group_offsets(self, group: str) -> dict[TopicPartition, Any]:
        return {}

    async def delete_records(self, due: Any) -> None:
        self.deleted += [tp.partition for tp in due]

    def unsubscribe(self) -> None: ...

    async def stop(self) -> None:
        self.ended += 1


class Desk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kafka = Kafka()
        app: Any = SimpleNamespace(log=logging.getLogger("desk"))
        self.changelogs = Changelogs(app, Settings(kafka="kafka://nowhere:1"))

        async def client() -> Kafka:
            return self.kafka

        monkeypatch.setattr(self.changelogs, "_new_consumer", client)
        monkeypatch.setattr(self.changelogs, "_plain_admin", client)

    async def trim(self, number: int) -> None:
        owned: Any = SimpleNamespace(number=number, retire_at_ms=0)
        await self.changelogs.trim(owned, TOPICS, 5, 5)


Scenario = Callable[[Desk], Awaitable[None]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    monkeypatch.setattr(module, "TURN_S", 0.02)

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(5):
                await scenario(Desk(monkeypatch))

        asyncio.run(main())

    return run


def test_partitions_that_kafka_does_not_answer_for_keep_no_other_from_being_read(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        desk.kafka.silent = set(range(READERS + 2))
        silent = [asyncio.ensure_future(desk.changelogs.edges(TOPICS, number, None)) for number in desk.kafka.silent]
        await asyncio.sleep(0)  # they ask together
        assert (await desk.changelogs.edges(TOPICS, 99, None)).start == (0, 0)
        assert not any(one.done() for one in silent)
        for one in silent:
            one.cancel()

    run(scenario)


def test_a_store_that_knows_more_than_its_changelog_is_filled_again(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Kafka was restored from an older snapshot, with the same ids."""

    async def scenario(desk: Desk) -> None:
        wiped: list[str] = []

        def table(name: str, persisted: int | None) -> Any:
            return SimpleNamespace(
                changelog_topic_name=name, persisted=lambda number: persisted, wipe=lambda number: wiped.append(name)
            )

        desk.kafka.end = 7
        await desk.changelogs.read_rest([table("a", 6), table("b", 7)], 0)
        assert wiped == ["b"]
        assert "its local store has more than b, which ends at 7" in caplog.text

    run(scenario)


def test_who_has_given_up_its_place_gives_up_none_of_another(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(3):
            async with desk.changelogs._reader():
                await asyncio.sleep(0.03)
        assert desk.changelogs._readers._value == READERS

    run(scenario)


def test_a_reader_that_advances_keeps_its_place(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_S", 3_600.0)  # so that only this test ends its turn

    async def scenario(desk: Desk) -> None:
        async with desk.changelogs._reader() as reader:
            for _ in range(10):
                ends = reader._timer
                await asyncio.sleep(0.002)
                reader.advanced()
                assert ends.cancelled() and reader._timer.when() > ends.when()
            assert desk.changelogs._readers._value == READERS - 1

    run(scenario)


def test_no_more_connections_are_kept_than_are_used_at_once(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(2 * READERS):
                group.create_task(self_reading(desk))
        await asyncio.sleep(0)
        assert len(desk.changelogs._idle) == READERS

    async def self_reading(desk: Desk) -> None:
        async with desk.changelogs._reader():
            await asyncio.sleep(0.1)

    run(scenario)


def test_a_deletion_that_kafka_does_not_answer_holds_up_no_other(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIM_TIMEOUT_S", 0.1)

    async def scenario(desk: Desk) -> None:
        desk.kafka.silent = {1}
        silent = asyncio.ensure_future(desk.trim(1))
        await asyncio.sleep(0)
        await desk.trim(2)
        assert set(desk.kafka.deleted) == {2}
        assert not silent.done()
        await silent

    run(scenario)


def test_without_the_permission_no_record_is_deleted(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.trim(1)
        assert desk.kafka.deleted == [1, 1], "in both logs"
        desk.changelogs.settings = Settings(kafka="kafka://nowhere:1", kafka_without="Delete")
        await desk.trim(2)
        assert desk.kafka.deleted == [1, 1]

    run(scenario)


@pytest.mark.parametrize(
    ("error", "proves"),
    [
        (ValueError("garbage"), None),
        (CorruptRecordException(), None),
        (OffsetOutOfRangeError(), None),
        (NotLeaderForPartitionError(), "raised"),
        (TimeoutError(), "raised"),
    ],
    ids=["garbage", "corrupt", "deleted", "no leader", "late"],
)
def test_a_record_that_can_not_be_read_does_not_prove_that_a_log_was_written_anew(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, proves: str | None
) -> None:
    async def scenario(desk: Desk) -> None:
        async def consumer(*_: Any, **__: Any) -> Kafka:
            return desk.kafka

        async def first_newer(*_: Any) -> int:
            raise error

        monkeypatch.setattr(module, "start_consumer", consumer)
        monkeypatch.setattr(module, "first_newer", first_newer)
        read = LastRead(position=5, newest_ms=1_000)  # and there is something newer, at offset 0
        if proves is None:
            assert (await desk.changelogs.edges(TOPICS, 0, read)).newer is None
        else:
            with pytest.raises(type(error)):
                await desk.changelogs.edges(TOPICS, 0, read)

    run(scenario)
