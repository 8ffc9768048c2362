"""Decisions that depend on settings."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core.policies import QUEUE_NAME_MAX, QueueSettings, backoff_ms, batch_cap, is_exhausted, name_problem


@pytest.mark.parametrize(("attempt", "size"), [(1, 100), (2, 100), (3, 50), (4, 25), (5, 12), (8, 1), (60, 1)])
def test_from_the_third_attempt_a_batch_is_halved_per_attempt(attempt: int, size: int) -> None:
    assert batch_cap(attempt, 100, max_receives=0) == size


@pytest.mark.parametrize("maximum", [2, 3, 10])
def test_at_the_last_permitted_attempt_a_message_is_alone(maximum: int) -> None:
    assert batch_cap(maximum, 100, maximum) == 1


def test_a_queue_with_one_attempt_has_full_batches() -> None:
    assert batch_cap(1, 100, max_receives=1) == 100


@given(st.integers(1, 1_000), st.integers(1, 10_000), st.integers(0, 1_000))
def test_a_batch_is_never_empty_nor_larger_than_asked_for(attempt: int, limit: int, maximum: int) -> None:
    assert 1 <= batch_cap(attempt, limit, maximum) <= limit


@given(st.integers(1, 1_000), st.integers(1, 60_000), st.integers(1, 3_600_000), st.integers())
def test_back_off_doubles_up_to_its_ceiling_with_jitter_in_the_upper_half(
    attempt: int, base_ms: int, max_ms: int, seed: int
) -> None:
    delay_ms = backoff_ms(attempt, base_ms, max_ms, Random(seed))

    ceiling_ms = min(max_ms, base_ms * 2 ** (attempt - 1))
    assert ceiling_ms // 2 <= delay_ms <= ceiling_ms


def test_the_same_seed_gives_the_same_back_off() -> None:
    assert backoff_ms(5, 100, 60_000, Random(1)) == backoff_ms(5, 100, 60_000, Random(1))


def test_dead_letters_go_to_the_queue_named_dead_unless_it_is_set() -> None:
    assert QueueSettings().dead_letters_of("orders") == "orders.dead"
    assert QueueSettings(dead_letter_queue="grave").dead_letters_of("orders") == "grave"


@pytest.mark.parametrize(
    "queue",
    [
        "x" * 246,
        "x" * 251,
        "x" * 255,
        "x" * 250 + ".dead",
        ".dead" * 51,
        "~9" * 125 + ".dead",
        "~" * 250 + ".dead",
        "~" + "9" * 249 + ".dead",
        "x" * 240 + "~999999999.dead",
        "\u0663" * 250 + ".dead",
    ],
)
def test_dead_letters_of_dead_letters_never_come_back_to_a_queue_that_they_were_in(queue: str) -> None:
    seen = [queue]
    for _ in range(1_000):
        seen.append(QueueSettings().dead_letters_of(seen[-1]))
    assert len(set(seen)) == len(seen)
    for name in seen[1:]:
        assert name_problem(name) is None
        assert name.endswith(".dead")


@given(st.text("x~0129.dea", min_size=235, max_size=255))
def test_no_queue_is_its_own_dead_letter_queue(queue: str) -> None:
    target = QueueSettings().dead_letters_of(queue)
    assert len(target) <= QUEUE_NAME_MAX
    assert len({queue, target, QueueSettings().dead_letters_of(target)}) == 3


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"visibility_timeout": 5}', type=QueueSettings)


@pytest.mark.parametrize(
    "max_receives, receives, exhausted",
    [(0, 1_000_000, False), (3, 2, False), (3, 3, True), (3, 4, True), (1, 0, False)],
)
def test_a_message_is_exhausted_when_it_was_delivered_as_often_as_its_queue_permits(
    max_receives: int, receives: int, exhausted: bool
) -> None:
    assert is_exhausted(receives, QueueSettings(max_receives=max_receives)) is exhausted
