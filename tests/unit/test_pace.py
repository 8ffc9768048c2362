"""A receiver takes no more messages than it can finish within a lease."""

from __future__ import annotations

import pytest

from marq.client.pace import FIRST, PART, Ahead, Pace


def test_it_begins_with_few_and_takes_more_while_all_is_in_time() -> None:
    pace = Pace(5.0, 500)
    assert pace.limit == FIRST
    for _ in range(10):
        pace.took(pace.limit, 0.05)
    assert pace.limit == 500


@pytest.mark.parametrize("per_message_s", [0.0001, 0.001, 0.01, 0.1, 0.9])
def test_what_is_taken_at_once_is_finished_in_a_part_of_the_lease(per_message_s: float) -> None:
    pace = Pace(5.0, 500)
    for _ in range(50):
        pace.took(pace.limit, pace.limit * per_message_s)
    assert pace.limit == 1 or pace.limit * per_message_s <= 2 * 5.0 * PART


def test_one_that_gets_slower_takes_less_at_once() -> None:
    pace = Pace(5.0, 500)
    for _ in range(10):
        pace.took(pace.limit, 0.05)
    pace.took(500, 4.0)
    assert pace.limit <= 125


def test_few_messages_tell_nothing_about_many() -> None:
    pace = Pace(5.0, 500)
    pace.took(1, 0.01)
    assert pace.limit == FIRST


def test_a_slow_reader_has_little_ahead_and_a_fast_one_much() -> None:
    slow, fast = Ahead(10.0, 100), Ahead(10.0, 100)
    assert slow.limit(0.0, 0) == FIRST
    assert fast.limit(0.0, 0) == FIRST
    limits = [(slow.limit(1.0 * i, i), fast.limit(1.0 * i, 1_000 * i)) for i in range(1, 20)]
    assert limits[-1] == (2, 100)


def test_a_reader_that_stops_has_one_ahead_in_the_end() -> None:
    ahead = Ahead(10.0, 100)
    ahead.limit(0.0, 0)
    assert ahead.limit(1.0, 1_000) == 100
    assert ahead.limit(60.0, 1_000) == 1
    assert ahead.limit(61.0, 1_100) > 1
