"""The groups and ids in the records of FIFO queues."""

from __future__ import annotations

import pytest

from app.engine.queue_records import QueueRecord, next_record
from app.service.fifo import fifo_headers
from marq.core.policies import QueueSettings
from marq.core.settings import placed_as, settings_with
from marq.protocol.headers import H_DEDUP
from marq.protocol.messages import Entry
from tests.unit.core_helpers import TwoLogs


def id_of(settings: QueueSettings, life: int, group: str = "g", name: str = "id") -> bytes:
    message = Entry(payload=b"x", group=group, deduplication_id=name)
    return dict(fifo_headers(message, settings, life))[H_DEDUP]


@pytest.mark.parametrize("scope", ["queue", "group"])
def test_an_id_is_another_one_in_a_queue_that_was_made_again(scope: str) -> None:
    settings = QueueSettings(fifo=True, deduplication_scope=scope)  # type: ignore[arg-type]
    assert len({id_of(settings, life) for life in range(3)}) == 3
    assert {id_of(settings, life).rpartition(b"\0")[2] for life in range(3)} == {b"id"}


def test_an_id_is_another_one_in_another_group_where_the_scope_is_the_group() -> None:
    for scope, count in (("queue", 1), ("group", 2)):
        settings = QueueSettings(fifo=True, deduplication_scope=scope)  # type: ignore[arg-type]
        assert len({id_of(settings, 0, group) for group in ("a", "b")}) == count


def test_ids_count_by_group_from_the_change_of_the_scope_on() -> None:
    made = QueueSettings(fifo=True)
    changed = placed_as(made, settings_with("q", made, {"deduplication_scope": "group"}))
    logs = TwoLogs()
    logs.own()
    for settings in (made, changed):
        for group in ("a", "b", "a"):
            logs.send("q", headers=fifo_headers(Entry(payload=b"x", group=group, deduplication_id="id"), settings, 0))
    logs.read()
    assert logs.states(list(range(6))) == ["ready", "duplicate", "duplicate", "ready", "ready", "duplicate"]


def test_a_purge_begins_another_generation_of_ids_and_its_end_does_not() -> None:
    made = next_record(None, settings=QueueSettings(), state="active")
    purging = next_record(made, settings=QueueSettings(), state="active", purge=(5, 0))
    purged = next_record(purging, settings=QueueSettings(), state="active", purge=())
    changed = next_record(purged, settings=QueueSettings(), state="active")
    assert [record.generation for record in (made, purging, purged, changed)] == [0, 1, 1, 1]


def test_a_queue_knows_how_many_of_its_name_there_were() -> None:
    record: QueueRecord | None = None
    generations = []
    for state in ("active", "active", "deleting", "deleted", "active", "deleting", "active", "active"):
        record = next_record(record, settings=QueueSettings(), state=state)  # type: ignore[arg-type]
        generations.append(record.generation)
    assert generations == [0, 0, 0, 0, 1, 1, 2, 2]
