"""Checkpoints take turns: few at a time, all in the end, and none waits for a stuck one."""

from __future__ import annotations

from app.engine.turns import HELD_MAX_MS, PLACE_MS, Turns


def test_at_most_so_many_write_at_once() -> None:
    turns = Turns(2)
    assert [turns.take(n, 0) for n in range(8)] == [True, True] + [False] * 6
    turns.end(0)
    assert [turns.take(n, 10) for n in range(1, 8)].count(True) == 1


def test_who_asked_first_is_next() -> None:
    turns = Turns(1)
    assert turns.take(5, 0)
    assert not turns.take(3, 1)
    assert not turns.take(1, 2)
    turns.end(5)
    assert not turns.take(1, 3)
    assert not turns.take(5, 3)
    assert turns.take(3, 4)
    turns.end(3)
    assert turns.take(1, 5)


def test_each_gets_its_turn() -> None:
    turns, done, now = Turns(2), dict.fromkeys(range(16), 0), 0
    for _ in range(400):
        now += 100
        begun = [n for n in done if turns.take(n, now)]
        assert len(begun) <= 2
        for number in begun:
            done[number] += 1
            turns.end(number)
    assert max(done.values()) - min(done.values()) <= 1


def test_one_whose_rows_kafka_does_not_take_holds_up_nobody_for_long() -> None:
    turns = Turns(1)
    assert turns.take(0, 0)
    assert not turns.take(1, HELD_MAX_MS - 1)
    assert turns.take(1, HELD_MAX_MS)


def test_a_place_is_not_kept_for_one_that_does_not_come_back() -> None:
    turns = Turns(1)
    assert turns.take(0, 0)
    assert not turns.take(1, 1)
    assert not turns.take(2, 100)
    turns.end(0)
    assert not turns.take(2, PLACE_MS)
    assert turns.take(2, PLACE_MS + 1)


def test_the_more_wait_the_longer_until_they_ask_again_and_none_loses_its_place() -> None:
    turns = Turns(1)
    assert turns.take(0, 0)
    assert turns.pause_ms == 0
    pauses = []
    for number in range(1, 2_000):
        assert not turns.take(number, 0)
        pauses.append(turns.pause_ms)
    assert pauses == sorted(pauses)
    assert pauses[3] < 100
    assert pauses[-1] < PLACE_MS
    turns.end(0)
    assert not turns.take(2, pauses[-1])
    assert turns.take(1, pauses[-1])
