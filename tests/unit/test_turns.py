"""Checkpoints take turns: few at a time, few a second, all in the end, and none waits for a stuck one."""

from __future__ import annotations

import heapq

import pytest

from app.engine.turns import HELD_MAX_MS, PACE_MS, SLOT_MS, Turns


def test_at_most_so_many_write_at_once() -> None:
    turns = Turns(2)
    assert [turns.begin(n, 0) == 0 for n in range(8)] == [True, True] + [False] * 6
    turns.end(0, 5)
    assert [turns.begin(n, 10) for n in range(2, 8)].count(0) == 1


def test_slots_come_one_after_the_other_in_the_order_in_which_they_were_asked_for() -> None:
    turns = Turns()
    waits = [turns.ask(n, 0) for n in range(100)]
    assert waits == [n * PACE_MS for n in range(100)]
    assert [turns.ask(n, 30) for n in (0, 1, 2)] == [0, 0, 2 * PACE_MS - 30], "asking again changes nothing"


def test_who_has_begun_needs_another_slot_for_the_next_one() -> None:
    turns = Turns()
    assert not turns.ask(0, 0) and not turns.begin(0, 5)
    turns.end(0, 10)
    assert turns.ask(0, 11) == PACE_MS - 11


def test_a_slot_that_nobody_used_is_over_after_a_while() -> None:
    turns = Turns()
    for n in range(500):
        turns.ask(n, 0)
    now = 500 * PACE_MS + SLOT_MS
    assert [turns.ask(n, now) for n in range(10)] == [n * PACE_MS for n in range(10)]


def simulated(count: int, seconds: int, write_ms: int, way_ms: int) -> tuple[list[int], int]:
    """Partitions that always have something to write. `way_ms`: from the slot until the event in which to begin.

    Returns the checkpoints of each, and how many events that took.
    """
    turns, done, tries = Turns(), [0] * count, 0
    events = [(0, n, "ask") for n in range(count)]
    while events[0][0] < seconds * 1_000:
        now, number, what = heapq.heappop(events)
        if what == "written":
            turns.end(number, now)
            done[number] += 1
            heapq.heappush(events, (now + 2_000, number, "ask"))
        elif what == "ask":
            wait_ms = turns.ask(number, now)
            heapq.heappush(events, (now + wait_ms, number, "ask") if wait_ms else (now + way_ms, number, "try"))
        else:
            tries += 1
            wait_ms = turns.begin(number, now)
            heapq.heappush(events, (now + wait_ms, number, "ask") if wait_ms else (now + write_ms, number, "written"))
    return done, tries


def test_a_few_partitions_make_theirs_as_often_as_they_want() -> None:
    done, _ = simulated(8, 60, write_ms=10, way_ms=10)
    assert min(done) >= 28


@pytest.mark.parametrize("way_ms", [10, 1_000])
def test_a_thousand_make_a_limited_number_a_second_evenly_however_long_an_event_takes(way_ms: int) -> None:
    done, tries = simulated(1_000, 200, write_ms=10, way_ms=way_ms)
    assert sum(done) <= 200_000 // PACE_MS + 2
    assert sum(done) >= 0.9 * 200_000 // PACE_MS
    assert max(done) - min(done) <= 1
    assert tries < 1.2 * sum(done)


def test_where_writing_is_slow_nobody_is_forgotten() -> None:
    done, tries = simulated(100, 300, write_ms=300, way_ms=50)
    assert max(done) - min(done) <= 1
    assert sum(done) >= 0.7 * 300_000 * 2 / 300
    assert tries < 10 * sum(done)


def test_one_whose_rows_kafka_does_not_take_holds_up_nobody_for_long() -> None:
    turns = Turns(1)
    assert not turns.begin(0, 0)
    assert turns.begin(1, HELD_MAX_MS - 1)
    assert not turns.begin(1, HELD_MAX_MS)
