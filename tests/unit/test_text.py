from __future__ import annotations

from typing import Any

import msgspec
import pytest

from marq.core.policies import QueueSettings
from marq.core.settings import QueueSettingsError, settings_with
from marq.text import invalid_value, reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [(TimeoutError(), "TimeoutError"), (ValueError("no number"), "no number")],
    ids=["kind", "words"],
)
def test_an_error_without_words_is_told_by_its_kind(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_recieves": 3}, "queue 'q' can't have a setting 'max_recieves'; did you mean 'max_receives'?"),
        ({"TTL": 3}, "queue 'q' can't have a setting 'TTL'; did you mean 'ttl_ms'?"),
        ({"ttl_ms": "10s"}, "queue 'q': ttl_ms: expected a whole number of milliseconds, got text"),
        ({"ttl_ms": 1.5}, "queue 'q': ttl_ms: expected a whole number of milliseconds, got a fraction"),
        ({"max_receives": -1}, "queue 'q': max_receives: expected a whole number >= 0"),
        ({"fifo": "yes"}, "queue 'q': fifo: expected true or false, got text"),
        ({"deduplication_scope": "all"}, "queue 'q': deduplication_scope must be queue or group"),
        ({"deduplication_scope": []}, "queue 'q': deduplication_scope must be queue or group"),
        ({"dead_letters_from": ["a", 1]}, "queue 'q': dead_letters_from[1]: expected text, got a whole number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_a_queue_cannot_have_is_explained(values: dict[str, Any], said: str) -> None:
    with pytest.raises(QueueSettingsError) as caught:
        settings_with("q", QueueSettings(), values)
    assert str(caught.value) == said


def test_a_name_that_is_like_no_setting_is_answered_with_all_there_are() -> None:
    with pytest.raises(QueueSettingsError, match=r"there are visibility_timeout_ms, .*, dead_letters_from$"):
        settings_with("q", QueueSettings(), {"colour": "red"})


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[dict[str, int]] = []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[]", "expected an object, got a list"),
        (b'{"messages":[{"a":"x"}]}', "messages[0][...]: expected a whole number, got text"),
        (b'{"mesages":[]}', "object contains unknown field 'mesages'"),
        (b"{", "input data was truncated"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(body: bytes, said: str) -> None:
    with pytest.raises(msgspec.MsgspecError) as caught:
        msgspec.json.decode(body, type=Wanted)
    assert invalid_value(caught.value) == said
