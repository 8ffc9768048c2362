"""Looking for messages at other workers: one that does not answer does not delay messages of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.cluster.peers import Peers
from app.service import polling as module
from app.service.polling import Ready
from marq.errors import UnavailableError
from tests.unit.test_faults import polling_of

SILENT, OTHER = "http://silent:1", "http://other:1"


class Lab:
    """Receives that wait here, and two other workers, of which one does not answer until the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Peers, "call", self.call)
        _, self.polling = polling_of([SILENT, OTHER])
        self.polling._receivers = self  # type: ignore[assignment]
        self.speaks = asyncio.Event()
        self.ready = {SILENT: False, OTHER: False}
        self.waiting = 0
        self.silent_fetches = False  # it answers, but gives nothing
        self.fetched: list[str] = []

    async def call(self, url: str, operation: Any, watch: Any, *_: Any) -> Ready:
        if url == SILENT and not self.silent_fetches:
            await self.speaks.wait()
        return Ready(watch.queues if self.ready[url] else [])

    # -- the receives of this worker

    def waiting_count(self, queue: str) -> int:
        return self.waiting

    async def fetch(self, queue: str, url: str) -> bool:
        if url == SILENT:
            await self.speaks.wait()
        self.fetched.append(url)
        self.waiting = max(0, self.waiting - 1)
        return True

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)


Scenario = Callable[[Lab], Awaitable[None]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    monkeypatch.setattr(module, "SLOW_S", 0.02)
    monkeypatch.setattr(module, "LAST_LOOK_S", 0.05)

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(5):
                await scenario(Lab(monkeypatch))

        asyncio.run(main())

    return run


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("last_look", [True, False])
def test_what_one_worker_has_is_told_though_another_one_does_not_answer(run: Any, watch: bool, last_look: bool) -> None:
    async def scenario(lab: Lab) -> None:
        lab.ready[OTHER] = True
        assert await lab.polling.ready_at("q", watch=watch, last_look=last_look) == [OTHER]

    run(scenario)


def test_a_last_look_ends_though_a_worker_does_not_answer(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        assert await lab.polling.ready_at("q", watch=False, last_look=True) == []

    run(scenario)


def test_a_last_look_waits_a_little_for_a_worker_that_answers_late(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        lab.ready[SILENT] = True
        asyncio.get_running_loop().call_later(0.03, lab.speaks.set)
        assert await lab.polling.ready_at("q", watch=False, last_look=True) == [SILENT]

    run(scenario)


def test_receives_get_what_others_have_while_one_worker_does_not_answer(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        lab.ready[OTHER], lab.waiting = True, 3
        lab.polling.poll_peers("q")
        await lab.until(lambda: lab.waiting == 0)
        assert lab.fetched == [OTHER] * 3

    run(scenario)


def test_an_answer_that_comes_late_wakes_those_who_wait(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        lab.ready[SILENT], lab.waiting = True, 1
        lab.polling.poll_peers("q")
        await asyncio.sleep(0.05)
        lab.speaks.set()
        await lab.until(lambda: lab.fetched == [SILENT])

    run(scenario)


def test_a_worker_that_promises_and_does_not_give_holds_up_no_other(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        lab.silent_fetches = True
        lab.ready, lab.waiting = {SILENT: True, OTHER: False}, 2
        lab.polling.poll_peers("q")
        await asyncio.sleep(0.01)
        lab.ready[OTHER] = True
        await lab.until(lambda: OTHER in lab.fetched)
        lab.speaks.set()
        await lab.until(lambda: not lab.polling._polls)

    run(scenario)


def test_a_worker_that_can_not_be_reached_has_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(lab: Lab) -> None:
        async def call(*_: Any) -> Any:
            raise UnavailableError("refused")

        monkeypatch.setattr(Peers, "call", call)
        assert await lab.polling.ready_at("q", watch=False) == []
        assert await lab.polling.ready_at("q") == []

    run(scenario)
