"""The timer: often while something may be due, seldom while nothing is, and at once when something happens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agents.redelivery import Redelivery
from app.engine import ownership as ownership_module
from app.engine.due_times import DueTimes
from app.engine.ownership import REST_MS, TIMER_MS, Ownership
from app.engine.throttle import Throttle
from app.settings import Settings
from marq.core.lateness import STALL_MS
from tests.unit.peer_helpers import alone
from tests.worksim.clock import VirtualLoop


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> VirtualLoop:
    loop = VirtualLoop()
    monkeypatch.setattr(ownership_module, "now_ms", lambda: ms_of(loop))
    return loop


def ms_of(loop: VirtualLoop) -> int:
    return 1_000_000 + int(loop.now * 1000)


def an_ownership() -> Ownership:
    """Without partitions: what the timer does with one that is due is tested elsewhere."""
    catalog = SimpleNamespace(settings_of=lambda queue: None, with_ttl=(), settings_changes=0)
    app = SimpleNamespace(
        fail=lambda exc: None,
        producer=SimpleNamespace(waits=lambda s: {}),
        consumer=SimpleNamespace(stirred={}, unstable=dict),
    )
    topics = SimpleNamespace(queue="q", markers="m", partitions=1)
    settings = Settings(kafka="kafka://nowhere:1")
    return Ownership(app, settings, lambda: topics, {}, catalog, alone())  # type: ignore[arg-type, return-value]


Runs = Callable[[Ownership, "asyncio.Task[None]"], Any]


def calls(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, meanwhile: Runs) -> list[int]:
    """The milliseconds at which the timer was called while something else ran."""
    at: list[int] = []

    async def main() -> None:
        ownership = an_ownership()
        on_timer = ownership.on_timer
        monkeypatch.setattr(ownership, "on_timer", lambda: (at.append(round(loop.now * 1000)), on_timer()))
        timer = asyncio.ensure_future(Redelivery(ownership)._run.fun(Redelivery(ownership)))
        await meanwhile(ownership, timer)
        timer.cancel()

    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main())
    finally:
        asyncio.set_event_loop(None)
    return at


def test_an_idle_worker_is_looked_at_a_few_times_a_second(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    at = calls(loop, monkeypatch, lambda ownership, timer: asyncio.sleep(60))
    assert 60_000 / (REST_MS + TIMER_MS + 2) - 2 <= len(at) <= 60_000 / REST_MS + 2
    assert max(b - a for a, b in itertools.pairwise(at)) <= REST_MS + TIMER_MS + 2


def test_what_happens_ends_the_rest_at_once(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def touch(ownership: Ownership, _: Any) -> None:
        for _ in range(20):
            await asyncio.sleep(0.313)
            ownership.due.touch(0)
            touched.append(round(loop.now * 1000))
            await asyncio.sleep(0.0)
            ownership.due.touch(1)

    touched: list[int] = []
    at = calls(loop, monkeypatch, touch)
    for when in touched[:-1]:
        assert any(when <= t <= when + TIMER_MS + 1 for t in at)


def test_a_time_that_comes_is_met(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def plan(ownership: Ownership, _: Any) -> None:
        for _ in range(10):
            ownership.due.set(0, ms_of(loop) + 137)
            due.append(round(loop.now * 1000) + 137)
            await asyncio.sleep(0.5)

    due: list[int] = []
    at = calls(loop, monkeypatch, plan)
    for when in due:
        assert any(when <= t <= when + 2 * TIMER_MS + 2 for t in at)


def test_a_busy_worker_is_looked_at_as_often_as_before(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(ownership: Ownership, _: Any) -> None:
        for _ in range(2_000):
            await asyncio.sleep(0.001)
            ownership.due.touch(0)

    at = calls(loop, monkeypatch, work)
    assert max(b - a for a, b in itertools.pairwise(at)) <= TIMER_MS + 1
    assert len(at) <= 2_100 / TIMER_MS + 2


@pytest.mark.parametrize("change", ["settings", "refused", "paused", "stalled"])
def test_what_no_partition_tells_keeps_the_timer_awake(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    ownership = an_ownership()
    ownership.on_timer()
    assert ownership.rest_ms() == REST_MS
    if change == "settings":
        ownership.catalog.settings_changes += 1
    elif change == "refused":
        monkeypatch.setattr(ownership.throttle, "_again_ms", 0)
    elif change == "paused":
        ownership.read_ahead._paused[0] = None
    else:
        loop.now += STALL_MS / 1000 + 1
        ownership.throttle.timer_fired(ms_of(loop))
    assert ownership.rest_ms() == 0


def test_a_rest_is_not_late_and_a_stall_in_it_is() -> None:
    throttle = Throttle(lambda: 0, lambda: TIMER_MS)
    throttle.timer_fired(1_000)
    throttle.rests(1_020, REST_MS)
    throttle.timer_fired(1_020 + REST_MS)
    assert throttle.lateness.lag_ms == 0
    throttle.rests(2_000, REST_MS)
    throttle.timer_fired(2_000 + REST_MS + STALL_MS)
    assert throttle.lateness.stalls == 1
    throttle.timer_fired(2_000 + REST_MS + STALL_MS + TIMER_MS + 30)
    assert throttle.lateness.lag_ms > 900  # fades


def test_how_long_nothing_is_due() -> None:
    due = DueTimes()
    assert due.wait_ms(0, 250) == 250
    due.set(1, 100)
    assert (due.wait_ms(0, 250), due.wait_ms(90, 250), due.wait_ms(120, 250)) == (100, 10, 0)
    assert due.take(100) == [1]
    due.touch(1)
    assert due.wait_ms(0, 250) == 0


def test_who_waits_for_a_touch_is_called_once() -> None:
    due, called = DueTimes(), []
    due.on_touch = lambda: called.append(1)
    due.touch(1)
    due.touch(2)
    assert called == [1]
