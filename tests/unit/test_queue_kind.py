"""Settings that a queue is made with, and keeps."""

from __future__ import annotations

import pytest

from marq.core.policies import QueueSettings
from marq.core.settings import QueueSettingsError, check_kind, settings_with


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
