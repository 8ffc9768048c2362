"""Settings that a queue is made with, and keeps."""

from __future__ import annotations

import pytest

from app.engine.queue_records import next_record
from marq.core.placing import fifo_partition
from marq.core.policies import QueueSettings
from marq.core.settings import QueueSettingsError, check_kind, placed_as, settings_with, told


@pytest.mark.parametrize("fifo", [True, False])
def test_a_queue_stays_of_the_kind_that_it_was_made_as(fifo: bool) -> None:
    old = QueueSettings(fifo=fifo)
    check_kind("q", old, settings_with("q", old, {"delay_ms": 5}))
    with pytest.raises(QueueSettingsError, match="for good"):
        check_kind("q", old, settings_with("q", old, {"fifo": not fifo}))


@pytest.mark.parametrize("limit", [1, 1023, 4 * 1024 * 1024 + 1, -1])
def test_a_limit_for_messages_is_at_least_a_kibibyte_and_at_most_the_topics(limit: int) -> None:
    with pytest.raises(QueueSettingsError, match="max_message_bytes"):
        settings_with("q", QueueSettings(), {"max_message_bytes": limit})


def test_a_scope_is_the_queue_or_the_group() -> None:
    assert settings_with("q", QueueSettings(), {"deduplication_scope": "group"}).deduplication_scope == "group"
    with pytest.raises(QueueSettingsError):
        settings_with("q", QueueSettings(), {"deduplication_scope": "partition"})


def test_groups_stay_where_they_are_when_the_scope_is_changed_and_changed_back() -> None:
    made = QueueSettings(fifo=True, deduplication_scope="queue")
    changed = placed_as(made, settings_with("q", made, {"deduplication_scope": "group"}))
    assert (changed.deduplication_scope, changed.placement, changed.id_scope) == ("group", "queue", "group")
    for group in (b"a", b"b", b"c"):
        assert fifo_partition(b"q", group, changed, 64) == fifo_partition(b"q", b"", made, 64)
    assert placed_as(changed, settings_with("q", changed, {"delay_ms": 5})).placement == "queue"
    assert placed_as(changed, settings_with("q", changed, {"deduplication_scope": "queue"})) == made


def test_a_queue_whose_groups_are_spread_knows_ids_of_a_group_alone() -> None:
    made = QueueSettings(fifo=True, deduplication_scope="group")
    changed = placed_as(made, settings_with("q", made, {"deduplication_scope": "queue"}))
    assert (changed.deduplication_scope, changed.placement, changed.id_scope) == ("queue", "group", "group")


def test_a_queue_that_is_made_again_is_placed_anew() -> None:
    made = next_record(None, settings=QueueSettings(fifo=True), state="active")
    changed = next_record(made, settings=QueueSettings(fifo=True, deduplication_scope="group"), state="active")
    deleted = next_record(changed, settings=changed.settings, state="deleted")
    again = next_record(deleted, settings=QueueSettings(fifo=True, deduplication_scope="group"), state="active")
    assert [record.settings.placement for record in (made, changed, again)] == ["queue", "queue", "group"]


def test_where_groups_are_placed_is_told_and_set_by_nobody() -> None:
    assert "placed_by" not in told(QueueSettings())
    with pytest.raises(QueueSettingsError, match="can't have a setting 'placed_by'"):
        settings_with("q", QueueSettings(), {"placed_by": "group"})
