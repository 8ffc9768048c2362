"""Which partitions the timer looks at: those that are due or touched, and no others."""

from __future__ import annotations

import random

from app.engine.due_times import SLACK, DueTimes


def test_a_partition_is_due_at_its_time_and_not_before() -> None:
    due = DueTimes()
    due.set(1, 100)
    due.set(2, 50)
    assert due.take(49) == []
    assert due.take(60) == [2]
    assert due.take(60) == []
    assert due.take(100) == [1]


def test_what_was_touched_is_due_once_whatever_its_time() -> None:
    due = DueTimes()
    due.set(1, 1_000)
    due.touch(1)
    due.touch(1)
    assert due.take(0) == [1]
    assert due.take(0) == []
    assert due.take(1_000) == [1]


def test_a_new_time_replaces_the_old_one_earlier_or_later() -> None:
    due = DueTimes()
    due.set(1, 100)
    due.set(1, 200)
    assert due.take(150) == []
    due.set(1, 160)
    assert due.take(160) == [1]
    assert due.take(300) == []


def test_what_has_no_time_or_is_gone_is_not_due() -> None:
    due = DueTimes()
    due.set(1, 10)
    due.set(1, None)
    due.set(2, 10)
    due.touch(2)
    due.forget(2)
    assert due.take(1_000_000) == []


def test_old_times_take_no_memory() -> None:
    due = DueTimes()
    for now in range(10_000):
        due.set(now % 3, 1_000_000 - now)
    assert len(due._heap) <= 2 * 3 + SLACK


def test_it_agrees_with_looking_at_all() -> None:
    rng = random.Random(3)
    for _ in range(200):
        due = DueTimes()
        times: dict[int, int] = {}
        touched: set[int] = set()
        now = 0
        for _ in range(200):
            number = rng.randrange(8)
            match rng.randrange(4):
                case 0:
                    at = rng.choice([None, now + rng.randrange(20)])
                    due.set(number, at)
                    touched.discard(number)
                    times.pop(number, None)
                    if at is not None:
                        times[number] = at
                case 1:
                    due.touch(number)
                    touched.add(number)
                case _:
                    now += rng.randrange(6)
                    wanted = touched | {n for n, at in times.items() if at <= now}
                    taken = due.take(now)
                    assert sorted(taken) == sorted(wanted)
                    touched.clear()
                    times = {n: at for n, at in times.items() if at > now}
