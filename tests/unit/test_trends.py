"""Rates and histories: values of a step, gaps, sums over workers, and bounds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from app.engine import intake as intakes
from app.engine.intake import Intake
from app.service import trends as trends_module
from app.service.histories import POINTS, STEP_S, History, Point, Series, merged, summed
from tests.unit.http_lab import run, serving


def records(*keys: bytes | None) -> list[SimpleNamespace]:
    return [SimpleNamespace(key=key) for key in keys]


def point(step: int, sent: int, unfinished: int, oldest_ms: int = 0, counted: int = -1) -> Point:
    return Point(step, (sent, 0, 0, 0, 0, 0), unfinished, 0, oldest_ms, counted)


def test_records_are_counted_by_queue_until_somebody_asks() -> None:
    intake = Intake()
    intake.read(None, records(b"a", b"b", b"a", None, b"\xff"))
    intake.read("topic", records(b"x", b"y"))
    assert intake.take() == {"a": 2, "b": 1, "\ufffd": 1, "topic": 2}
    assert intake.take() == {}
    assert intake.total == 7


def test_what_was_finished_is_what_came_and_is_not_there_any_more() -> None:
    history = History(9, 4)
    history.note(10, 10, 6, 1)
    history.note(11, 0, 1, 0)
    series = history.series()
    assert (series.first, len(series.sent)) == (11 - POINTS + 1, POINTS)
    assert (series.sent[-2:], series.unfinished[-3:], series.in_flight[-2:]) == ([10, 0], [4, 6, 1], [1, 0])
    assert series.done[-2:] == [8, 5]
    assert history.rates() == (10 / (2 * STEP_S), 13 / (2 * STEP_S))


def test_what_happened_since_the_last_point_is_spread_over_the_steps_between() -> None:
    history = History(0, 0)
    history.note(4, 10, 8, 0)
    series = history.series()
    assert series.sent[-4:] == [2, 3, 2, 3]
    assert series.unfinished[-5:] == [0, 2, 4, 6, 8]


def test_a_gap_that_is_longer_than_the_history_leaves_it_full() -> None:
    history = History(0, 1)
    history.note(10 * POINTS, POINTS, 1, 0)
    assert history.series().sent == [1] * POINTS


def test_two_notes_of_one_step_add_up() -> None:
    history = History(1, 0)
    history.note(2, 3, 3, 0)
    history.note(2, 2, 4, 1)
    series = history.series()
    assert (series.sent[-1], series.unfinished[-1], series.in_flight[-1]) == (5, 4, 1)


def test_the_histories_of_workers_are_added_and_what_is_not_known_is_a_gap() -> None:
    """One worker is late for step 6; step 7 has a partition too few, step 8 one too many; step 9 is on its way."""
    one = [point(5, 1, 10, 7, counted=2), point(7, 2, 20, counted=2), point(8, 2, 20, counted=4)]
    other = [point(5, 4, 1, 9, counted=2), point(6, 4, 1, 9, counted=2), point(7, 1, 1, counted=1)]
    first, found = merged([one, [*other, point(8, 0, 1, counted=1)]], 9, 4)
    assert first == 5
    assert [p and (p.flows[0], p.unfinished, p.oldest_ms) for p in found] == [(5, 11, 9), None, None, None]


def test_workers_of_an_earlier_version_do_not_say_what_they_counted() -> None:
    assert [p and p.unfinished for p in merged([[point(5, 1, 10)], [point(5, 1, 1, counted=2)]], 5, 4)[1]] == [11]


def test_points_that_are_too_old_or_not_over_yet_are_in_no_sum() -> None:
    first, found = merged([[point(1, 9, 9), point(POINTS + 5, 1, 1), point(POINTS + 7, 9, 9)]], POINTS + 6, 4)
    assert (first, [p and p.flows[0] for p in found]) == (POINTS + 5, [1])
    assert merged([], 6, 4) == (7, [])


def test_the_histories_of_a_queue_are_added_step_by_step() -> None:
    last = 1_000
    told = [Series(last - 1, [1, 2], [5, 6], [0, 1]), Series(last - 3, [7], [3], [0])]
    total = summed(told, last, {last - 3, last - 1, last})
    assert total.first == last - POINTS + 1
    assert total.sent[-5:] == [None, 7, None, 1, 2]
    assert total.unfinished[-5:] == [None, 8, None, 8, 9]
    assert total.done[-4:] == [None, None, None, 1]
    assert total.since(last - 1).sent == [1, 2]
    assert total.since(last + 5).sent == [1, 2], "a chart needs two points"


def test_a_step_that_is_sampled_again_counts_messages_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as http:
            trends, intake = http.app.trends, http.app.ownership.intake
            for step, key in ((7, b"a"), (8, b"b"), (8, b"c"), (8, b"d")):
                intake.read(None, records(key))
                await trends.sample(step)
            assert [(p.step, p.flows[0]) for p in trends._points] == [(7, 1), (8, 3)]

    run(test)


# -- bounds


def test_a_worker_remembers_the_queues_with_the_latest_changes_and_fifteen_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trends_module, "QUEUES_MAX", 5)

    async def test() -> None:
        async with serving(tmp_path) as http:
            trends, intake = http.app.trends, http.app.ownership.intake
            for step in range(2 * POINTS):
                intake.read(None, records(f"q{step}".encode(), b"always"))
                trends._counted_s = -1e9
                await trends.sample(step)
            assert len(trends._points) == POINTS
            assert set(trends._histories) == {"always", *(f"q{2 * POINTS - n}" for n in range(1, 5))}
            assert len(trends._now) < 10, "those in which nothing happens any more are not looked at"

    run(test)


def test_counts_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intakes, "QUEUES_MAX", 10)
    intake = Intake()
    for i in range(1_000):
        intake.read(None, records(f"{i}".encode()))
        assert len(intake._by_key) <= 11
    assert intake.total == 1_000
