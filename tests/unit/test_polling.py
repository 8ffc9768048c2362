"""Looking for messages at other workers: one that does not answer does not delay messages of the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.cluster.peers import Peers
from app.service import polling as module
from app.service.polling import Fetched, Ready, Unwanted, Wake
from marq.errors import UnavailableError
from tests.unit.test_faults import polling_of

SILENT, OTHER = "http://silent:1", "http://other:1"


class Lab:
    """Receives that wait here, and two other workers, of which one does not answer until the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Peers, "call", self.call)
        _, self.polling = polling_of([SILENT, OTHER])
        self.polling._receivers = self
        self.speaks = asyncio.Event()
        self.ready = {SILENT: False, OTHER: False}
        self.ready_here = False
        self.waiting = 0
        self.wanted = 1
        self.looks = 0
        self.silent_fetches = False  # it answers, but gives nothing
        self.fetched: list[str] = []
        self.asked: list[str] = []
        self.woken: list[str] = []
        self.dead: set[str] = set()
        self.unwanted: set[str] = set()

    async def call(self, url: str, operation: Any, argument: Any, *_: Any) -> Any:
        await asyncio.sleep(0)
        if url in self.dead:
            raise UnavailableError("refused")
        if isinstance(argument, Wake):
            assert argument.url == "http://here:1"
            self.woken.append(url)
            return Unwanted(argument.queues if url in self.unwanted else [])
        self.asked.append(url)
        if url == SILENT and not self.silent_fetches:
            await self.speaks.wait()
        return Ready(argument.queues if self.ready[url] else [])

    # -- the receives of this worker

    def waiting_count(self, queue: str) -> int:
        self.looks += 1
        return self.waiting

    def waited_for(self) -> list[str]:
        return ["q"] if self.waiting else []

    def has_ready(self, queue: str) -> bool:
        return self.ready_here

    async def read_up(self, queue: str) -> None:
        pass

    async def fetch(self, queue: str, url: str) -> Fetched:
        if url == SILENT:
            await self.speaks.wait()
        self.fetched.append(url)
        if not self.waiting:
            return Fetched(0, 0)
        self.waiting -= 1
        return Fetched(self.wanted, 1)

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


@pytest.mark.parametrize("last_look", [True, False])
def test_what_one_worker_has_is_told_though_another_one_does_not_answer(run: Any, last_look: bool) -> None:
    async def scenario(lab: Lab) -> None:
        lab.ready[OTHER] = True
        assert await lab.polling.ready_at("q", last_look=last_look) == [OTHER]

    run(scenario)


def test_a_last_look_ends_though_a_worker_does_not_answer(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        assert await lab.polling.ready_at("q", last_look=True) == []

    run(scenario)


def test_a_last_look_waits_a_little_for_a_worker_that_answers_late(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        lab.ready[SILENT] = True
        asyncio.get_running_loop().call_later(0.03, lab.speaks.set)
        assert await lab.polling.ready_at("q", last_look=True) == [SILENT]

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
        assert await lab.polling.ready_at("q") == []

    run(scenario)


def test_questions_that_come_during_a_call_share_the_next_one(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        lab.silent_fetches = True
        asked = [asyncio.ensure_future(lab.polling.ready_at("q", last_look=True)) for _ in range(50)]
        await asyncio.gather(*asked)
        more = [asyncio.ensure_future(lab.polling.ready_at(f"q{i}", last_look=True)) for i in range(50)]
        await asyncio.gather(*more)
        assert Counter(lab.asked) == {SILENT: 2, OTHER: 2}

    run(scenario)


def test_all_are_asked_once_in_a_while_however_many_receives_wait(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        lab.silent_fetches = True
        for queue in ("q", "r"):
            for _ in range(20):
                lab.waiting = 1
                lab.polling.poll_peers(queue)
                await asyncio.sleep(0.001)
                lab.waiting = 0
                lab.polling._woken[queue].set()
                await lab.until(lambda: not lab.polling._polls)
        assert max(Counter(lab.asked).values()) <= 4  # once a queue, and again if time is over

    run(scenario)


def test_a_worker_that_was_woken_is_asked_and_no_other(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        lab.silent_fetches, lab.waiting, lab.wanted = True, 1, 2
        lab.speaks.set()
        lab.polling.poll_peers("q")
        await lab.until(lambda: len(lab.asked) == 2)
        await asyncio.sleep(0.01)
        assert (await lab.polling.on_wake(Wake(["q", "r"], OTHER))).queues == []  # somebody waits
        await lab.until(lambda: not lab.waiting)
        assert lab.fetched == [OTHER]
        assert len(lab.asked) == 2
        assert (await lab.polling.on_wake(Wake(["q"], SILENT))).queues == ["q"]
        lab.waiting = 1
        lab.polling.poll_peers("q")  # it is known who has something
        await lab.until(lambda: SILENT in lab.fetched)
        assert len(lab.asked) == 2

    run(scenario)


def watched(lab: Lab, count: int) -> list[str]:
    urls = [f"http://watcher{i}:1" for i in range(count)]
    for url in urls:
        lab.polling.watch("q", url)
    return urls


def test_one_message_wakes_one_of_the_workers_that_watch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAKE_MORE_S", 0.01)

    async def scenario(lab: Lab) -> None:
        urls = watched(lab, 10)
        lab.ready_here = True
        lab.polling.tell("q")
        lab.ready_here = False  # it takes the message
        await asyncio.sleep(0.03)
        assert lab.woken == urls[:1]
        assert list(lab.polling.watchers["q"]) == urls[1:]

    run(scenario)


def test_more_are_woken_while_something_stays_ready(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAKE_MORE_S", 0.001)

    async def scenario(lab: Lab) -> None:
        urls = watched(lab, 10)
        lab.ready_here = True
        lab.polling.tell("q")
        await lab.until(lambda: len(lab.woken) == 10)
        assert sorted(lab.woken) == sorted(urls)
        assert "q" not in lab.polling.watchers

    run(scenario)


@pytest.mark.parametrize("why", ["dead", "unwanted"])
def test_who_does_not_want_what_is_ready_is_passed_over(run: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAKE_MORE_S", 60.0)

    async def scenario(lab: Lab) -> None:
        urls = watched(lab, 3)
        lab.ready_here = True
        getattr(lab, why).update(urls[:2])
        lab.polling.tell("q")
        await lab.until(lambda: urls[2] in lab.woken)

    run(scenario)


def test_who_took_something_goes_to_the_end_of_the_line_and_two_others_are_woken(run: Any) -> None:
    async def scenario(lab: Lab) -> None:
        urls = watched(lab, 4)
        lab.ready_here = True
        lab.polling.has_taken("q", urls[0], 1)
        await lab.until(lambda: len(lab.woken) == 2)
        assert lab.woken == urls[:2]
        lab.ready_here = False
        lab.polling.has_taken("q", urls[1], 1)
        assert list(lab.polling.watchers["q"]) == [urls[2], urls[3], urls[0], urls[1]]

    run(scenario)


@pytest.mark.parametrize("ready_here", [True, False])
def test_who_came_for_nothing_is_woken_by_the_next_message(run: Any, ready_here: bool) -> None:
    async def scenario(lab: Lab) -> None:
        lab.ready_here = ready_here
        lab.polling.has_taken("q", OTHER, 0)
        assert list(lab.polling.watchers["q"]) == [OTHER]

    run(scenario)


def test_a_worker_that_did_not_answer_is_asked_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.005)

    async def scenario(lab: Lab) -> None:
        lab.dead, lab.silent_fetches, lab.waiting = {OTHER}, True, 1
        lab.polling.poll_peers("q")
        await asyncio.sleep(0.02)
        lab.dead.clear()
        lab.ready[OTHER] = True
        await lab.until(lambda: lab.fetched == [OTHER])

    run(scenario)


def test_who_is_served_here_looks_elsewhere_now_and_then(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOCK_S", 3_600.0)

    async def scenario(lab: Lab) -> None:
        lab.silent_fetches, lab.ready[OTHER] = True, True
        assert lab.polling.elsewhere("q") is None
        for _ in range(100):
            lab.polling.served_here("q")
        await lab.until(lambda: bool(lab.polling._stock))
        assert sorted(lab.asked) == sorted([SILENT, OTHER])
        assert lab.polling.elsewhere("q") == OTHER
        assert lab.polling.elsewhere("q") is None
        monkeypatch.setattr(module, "STOCK_NEW_S", 0.0)
        for _ in range(100):
            lab.polling.served_here("q")
        lab.polling.served_here("r")  # nobody knows what others have of it
        await lab.until(lambda: lab.polling.elsewhere("r") == OTHER)
        assert len(lab.asked) == 4

    run(scenario)


def test_who_begins_to_wait_during_a_fetch_is_given_what_others_have(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_S", 3_600.0)

    async def scenario(lab: Lab) -> None:
        lab.silent_fetches = True
        lab.ready, lab.waiting = {SILENT: True, OTHER: False}, 1
        lab.polling.poll_peers("q")
        await lab.until(lambda: len(lab.asked) == 2)
        await asyncio.sleep(0.01)
        lab.waiting = 0  # the fetch from the silent one is for it, and does not end
        assert (await lab.polling.on_wake(Wake(["q"], OTHER))).queues == ["q"]
        await asyncio.sleep(0.01)
        lab.waiting = 1
        lab.polling.poll_peers("q")
        await lab.until(lambda: lab.fetched == [OTHER])

    run(scenario)


def test_a_fetch_that_does_not_end_is_waited_for_without_a_look_all_the_time(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.002)

    async def scenario(lab: Lab) -> None:
        lab.silent_fetches = True
        lab.ready, lab.waiting = {SILENT: True, OTHER: False}, 1
        lab.polling.poll_peers("q")
        await lab.until(lambda: len(lab.asked) >= 2)
        await asyncio.sleep(0.01)
        lab.waiting, lab.looks = 0, 0  # it is being fetched for
        await asyncio.sleep(0.05)
        assert lab.looks <= 2

    run(scenario)


@pytest.mark.parametrize("again", [False, True])
def test_who_gets_nothing_of_what_is_ready_makes_others_ask_after_a_pause_only(
    run: Any, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAKE_MORE_S", 3_600.0)
    monkeypatch.setattr(module, "FRUITLESS_S", 0.001 if again else 3_600.0)
    monkeypatch.setattr(module, "FRUITLESS_MAX_S", 3_600.0)

    async def scenario(lab: Lab) -> None:
        urls = watched(lab, 8)
        lab.ready_here = True  # a limit is reached
        asked: list[str] = []

        async def call(url: str, operation: Any, wake: Wake, *_: Any) -> Unwanted:
            asked.append(url)
            lab.polling.has_taken("q", url, 0)
            return Unwanted([])

        lab.polling._peers.call = call  # type: ignore[method-assign,assignment]
        lab.polling.tell("q")
        await lab.until(lambda: bool(asked))
        for _ in range(20):
            lab.polling.tell("q")  # something happens in the partition
            await asyncio.sleep(0)
        if again:
            await lab.until(lambda: len(asked) >= 3)
        assert asked[:3] == urls[: 3 if again else 1]
        assert len(lab.polling.watchers["q"]) == 8

    run(scenario)


def test_a_queue_that_gave_nothing_and_that_nobody_watches_any_more_is_forgotten(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_S", -1.0)
    monkeypatch.setattr(module, "EXPIRE_S", 0.005)

    async def scenario(lab: Lab) -> None:
        lab.ready_here = True
        for number in range(1_000):
            lab.polling.has_taken(f"q{number}", OTHER, 0)
        await lab.until(lambda: not lab.polling.watchers)
        await lab.until(lambda: not lab.polling._wakes_more)
        assert lab.polling._fruitless == {}

    run(scenario)
