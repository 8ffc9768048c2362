"""Pauses between fetches: only while nobody waits for what the next one brings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from app.streaming import gathering
from app.streaming.gathering import CALM_S, Gathering


class Lab:
    """Pauses that do not end by themselves, and a clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000.0
        self.on_look: Callable[[], None] = lambda: None
        monkeypatch.setattr(gathering, "GATHER_S", 600.0)
        monkeypatch.setattr(gathering, "time", SimpleNamespace(monotonic=self._look))
        loop = asyncio.get_running_loop()
        self.gathering = Gathering(lambda function: loop.call_soon(function))

    def _look(self) -> float:
        on_look, self.on_look = self.on_look, lambda: None
        on_look()
        return self.now_s

    async def begin(self) -> asyncio.Task[None]:
        """A pause that has begun."""
        pause = asyncio.ensure_future(self.gathering.pause())
        await asyncio.sleep(0)
        assert not pause.done()
        return pause


def run(scenario: Callable[[Lab], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with asyncio.timeout(5):
            await scenario(Lab(monkeypatch))

    asyncio.run(main())


def test_a_pause_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(lab: Lab) -> None:
        monkeypatch.setattr(gathering, "GATHER_S", 0.0)
        await lab.gathering.pause()

    run(scenario, monkeypatch)


def test_pauses_end_at_all_brokers_when_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(lab: Lab) -> None:
        pauses = [await lab.begin(), await lab.begin()]
        lab.gathering.hurry()
        await asyncio.gather(*pauses)

    run(scenario, monkeypatch)


def test_there_are_no_pauses_for_a_while_after_somebody_had_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(lab: Lab) -> None:
        lab.gathering.hurry()
        await lab.gathering.pause()
        lab.now_s += CALM_S
        pause = await lab.begin()
        lab.gathering.hurry()
        await pause

    run(scenario, monkeypatch)


def test_who_waits_for_one_record_ends_this_pause_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(lab: Lab) -> None:
        pause = await lab.begin()
        lab.gathering.hurry(lasting=False)
        await pause
        (await lab.begin()).cancel()

    run(scenario, monkeypatch)


def test_who_waits_for_one_record_while_it_is_fetched_prevents_one_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(lab: Lab) -> None:
        lab.gathering.hurry(lasting=False)
        await lab.gathering.pause()
        (await lab.begin()).cancel()

    run(scenario, monkeypatch)


def test_who_begins_to_wait_while_a_pause_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(lab: Lab) -> None:
        monkeypatch.setattr(gathering, "CALM_S", 0.0)  # the thread that fetches has looked too early
        lab.on_look = lab.gathering.hurry
        await lab.gathering.pause()

    run(scenario, monkeypatch)


def test_a_pause_that_is_cancelled_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(lab: Lab) -> None:
        pause = await lab.begin()
        pause.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pause
        lab.gathering.hurry()
        assert not lab.gathering._pauses

    run(scenario, monkeypatch)
