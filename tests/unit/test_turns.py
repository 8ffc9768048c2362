"""Checkpoints take turns: few at a time, few a second, all in the end, and none waits for a stuck one."""

from __future__ import annotations

import heapq

from app.engine.turns import HELD_MAX_MS, PACE_MS, PLACE_MS, Turns


def test_at_most_so_many_write_at_once() -> None:
    turns = Turns(2, pace_ms=0)
    assert [turns.ask(n, 0) == 0 for n in range(8)] == [True, True] + [False] * 6
    turns.end(0, 5)
    assert [turns.ask(n, 10) for n in range(1, 8)].count(0) == 1


def test_who_asked_first_is_next() -> None:
    turns = Turns(1, pace_ms=0)
    assert not turns.ask(5, 0)
    turns.ask(3, 1)
    turns.ask(1, 2)
    turns.end(5, 3)
    assert not turns.ask(3, 4)
    assert 1 in turns._queue
    turns.end(3, 4)
    assert not turns.ask(1, 5)


def test_one_behind_another_does_not_pass_it() -> None:
    turns = Turns(1)
    turns.ask(5, 0)
    assert turns.ask(3, 1) and turns.ask(1, 2)
    turns.end(5, 2)
    assert turns.ask(1, PACE_MS)
    assert not turns.ask(3, PACE_MS)


def simulated(count: int, seconds: int, write_ms: int, pace_ms: int = PACE_MS) -> tuple[list[int], int]:
    """Partitions that always have something to write, and ask when they were told to: checkpoints of each, and asks."""
    turns, done, asks = Turns(2, pace_ms), [0] * count, 0
    events = [(0, n, "ask") for n in range(count)]
    while events[0][0] < seconds * 1_000:
        now, number, what = heapq.heappop(events)
        if what == "written":
            turns.end(number, now)
            done[number] += 1
            heapq.heappush(events, (now + 2_000, number, "ask"))
            continue
        asks += 1
        wait_ms = turns.ask(number, now)
        heapq.heappush(events, (now + wait_ms, number, "ask") if wait_ms else (now + write_ms, number, "written"))
    return done, asks


def test_a_few_partitions_make_theirs_as_often_as_they_want() -> None:
    done, _ = simulated(8, 60, write_ms=10)
    assert min(done) >= 28


def test_a_thousand_make_a_limited_number_a_second_evenly_and_without_asking_often() -> None:
    done, asks = simulated(1_000, 200, write_ms=10)
    assert sum(done) <= 200_000 // PACE_MS + 2
    assert sum(done) >= 0.9 * 200_000 // PACE_MS
    assert max(done) - min(done) <= 1
    assert asks < 8 * sum(done)


def test_where_writing_is_slow_nobody_is_forgotten() -> None:
    done, asks = simulated(100, 300, write_ms=300)
    assert max(done) - min(done) <= 1
    assert sum(done) >= 0.8 * 300_000 * 2 / 300
    assert asks < 10 * sum(done)


def test_one_whose_rows_kafka_does_not_take_holds_up_nobody_for_long() -> None:
    turns = Turns(1)
    assert not turns.ask(0, 0)
    assert turns.ask(1, HELD_MAX_MS - 1)
    assert not turns.ask(1, HELD_MAX_MS)


def test_a_place_is_not_kept_for_one_that_does_not_come_back() -> None:
    turns = Turns(1)
    assert not turns.ask(0, 0)
    told = 1 + turns.ask(1, 1)
    assert turns.ask(2, 100)
    turns.end(0, 2)
    assert turns.ask(2, told + PLACE_MS - 1)
    assert not turns.ask(2, told + PLACE_MS)


def test_where_memory_is_short_nobody_waits_for_those_that_wait() -> None:
    turns = Turns(2)
    assert not turns.ask(0, 0)
    assert all(turns.ask(n, 1) for n in range(1, 50))
    assert not turns.ask(50, 1, urgent=True)
    assert turns.ask(51, 1, urgent=True), "two write"
    turns.end(0, 2)
    assert not turns.ask(51, 2, urgent=True)
    assert turns.ask(52, 3, urgent=True)
