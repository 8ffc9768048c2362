"""Every queue that messages of a Kafka producer create is listed, even if its messages are finished at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agents.housekeeping import ALL_EVERY, Housekeeping
from app.engine.due_times import DueTimes
from tests.unit.core_helpers import TwoLogs


class Catalog:
    """Which queues are listed."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}
        self.auto: set[str] = set()
        self.purging: dict[str, Any] = {}
        self.changes = 0

    def exists(self, queue: str) -> bool:
        record = self.records.get(queue)
        return record.active if record is not None else queue in self.auto

    def deleted(self, queue: str, state: str = "deleted") -> None:
        self.auto.discard(queue)
        self.changes += 1
        self.records[queue] = SimpleNamespace(active=False, state=state)

    async def make(self, queue: str) -> None:
        self.records.pop(queue, None)
        self.auto.add(queue)

    async def catch_up(self) -> None: ...


class Desk:
    """A worker with one partition."""

    def __init__(self, auto_create: bool = True) -> None:
        self.logs = TwoLogs()
        self.logs.own()
        self.catalog = Catalog()
        owner = SimpleNamespace(partition=self.logs.partition)
        self.owned: Any = SimpleNamespace(number=0, serving=True, owner=owner, queues_seen=None)
        self.due = DueTimes()
        self.ownership: Any = SimpleNamespace(owned={0: self.owned}, catalog=self.catalog, stirred={}, due=self.due)
        settings: Any = SimpleNamespace(queue_id=None, auto_create=auto_create)
        purges: Any = None
        self.housekeeping = Housekeeping(self.ownership, settings, purges)  # type: ignore[arg-type]

    def finish(self, queue: str) -> None:
        """A message is sent, read and acknowledged."""
        self.ownership.stirred[0] = None
        self.logs.send(queue)
        self.logs.read()
        self.logs.ack(self.logs.start(*self.logs.take(queue=queue)))

    def look(self) -> set[str]:
        """The queues that are listed after the next look at all partitions."""
        for _ in range(ALL_EVERY):
            asyncio.run(self.housekeeping._name_queues())
        return self.catalog.auto


def test_a_queue_is_listed_though_all_its_messages_are_finished_within_one_turn() -> None:
    desk = Desk()
    desk.finish("clicks")
    assert desk.look() == {"clicks"}


def test_queues_that_are_listed_are_gone_through_again_only_where_the_catalog_has_changed() -> None:
    desk, looks = Desk(), []
    partition = desk.logs.partition
    desk.finish("clicks")
    desk.look()
    desk.look()
    partition.queues = lambda: looks.append(1) or iter(())  # type: ignore[method-assign, func-returns-value]
    for _ in range(3):
        desk.finish("clicks")
        desk.look()
    assert looks == []
    desk.catalog.changes += 1
    desk.finish("clicks")
    desk.look()
    assert looks
    assert "clicks" in desk.catalog.auto


def test_a_queue_whose_messages_wait_is_listed() -> None:
    desk = Desk()
    desk.logs.send("clicks")
    desk.logs.read()
    assert desk.look() == {"clicks"}


def test_names_are_forgotten_once_their_queues_are_listed() -> None:
    desk = Desk()
    desk.finish("clicks")
    desk.look()
    desk.look()
    assert not desk.logs.partition.named


@pytest.mark.parametrize("state", ["deleting", "deleted"])
def test_a_queue_is_not_made_again_by_what_was_purged_with_it(state: str) -> None:
    desk = Desk()
    desk.finish("clicks")
    desk.catalog.deleted("clicks", "deleting")
    desk.look()
    desk.logs.purge("clicks")
    desk.catalog.deleted("clicks", state)
    assert desk.look() == set()


def test_what_was_sent_behind_a_purge_makes_the_queue_again() -> None:
    desk = Desk()
    desk.finish("clicks")
    desk.catalog.deleted("clicks", "deleting")
    desk.logs.purge("clicks")
    desk.finish("clicks")
    assert desk.look() == set()
    desk.catalog.deleted("clicks")
    assert desk.look() == {"clicks"}


def test_a_name_that_no_queue_can_have_makes_none_and_is_forgotten() -> None:
    desk = Desk()
    desk.finish("no\nqueue")
    assert desk.look() == set()
    assert not desk.logs.partition.named


def test_where_messages_make_no_queues_names_are_forgotten() -> None:
    desk = Desk(auto_create=False)
    desk.finish("clicks")
    assert desk.look() == set()
    assert not desk.logs.partition.named


def test_a_partition_to_which_nothing_happens_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.finish("clicks")
    desk.look()
    looked: list[str] = []
    monkeypatch.setattr(desk.logs.partition, "queues", lambda: looked.append("queues") or [])
    desk.look()
    assert looked == []
    desk.catalog.changes += 1
    desk.look()
    assert looked == ["queues"]


def test_a_poisoned_name_is_seen_by_the_timer() -> None:
    desk = Desk()
    desk.logs.send("no\nqueue")
    desk.logs.read()
    desk.ownership.stirred[0] = None
    desk.look()
    assert desk.due.take(0) == [0]
