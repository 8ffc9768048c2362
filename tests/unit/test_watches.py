"""A queue with messages but without receivers is named: in the stats, in the log once, and as a metric."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from app.cluster.peers import peer_call
from app.service import watches as module
from app.service.watches import TURN_QUEUES, Receivers, RecentReceives
from marq.errors import UnavailableError
from marq.waiting import FORSAKEN_MS
from tests.unit.peer_helpers import Network


class OtherWorker:
    """Another worker, with its receivers."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    @peer_call("receivers")
    async def receivers_here(self, queues: list[str]) -> list[str]:
        if isinstance(self.desk.elsewhere, Exception):
            raise self.desk.elsewhere
        return [queue for queue in self.desk.elsewhere if queue in queues]


class Desk:
    """This worker, and another one."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self.ages: dict[str, int] = {}
        self.handled: set[str] = set()
        self.waiting: set[str] = set()
        self.elsewhere: Any = []  # queues that the other worker receives from, or an error
        network = Network()
        self.recent = RecentReceives()
        self.receivers = Receivers(
            SimpleNamespace(takes_dead_letters=lambda queue: queue in ("orders.dead", "letters")),  # type: ignore[arg-type]
            SimpleNamespace(counts=self._counts, ages=self._ages),  # type: ignore[arg-type]
            network.join("here"),
            takers=(self.handled.__contains__, self.waiting.__contains__, self.recent.is_recent),
        )
        network.join("there").register(OtherWorker(self))

    def _counts(self) -> Any:
        return self.counts

    async def _ages(self) -> Any:
        return self.ages

    def stranded(self, *queues: str, age_ms: int = FORSAKEN_MS, ready: int = 5) -> Desk:
        for queue in queues:
            self.counts[queue] = {"ready": ready, "delayed": 0, "in_flight": 0}
            self.ages[queue] = age_ms
        return self

    def look(self) -> dict[str, int]:
        asyncio.run(self.receivers.look())
        return self.receivers.without

    def of(self, queue: str) -> bool | None:
        return asyncio.run(self.receivers.of([queue]))[queue]


def test_messages_that_nobody_comes_for_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk().stranded("q")
    with caplog.at_level(logging.WARNING):
        assert desk.look() == {"q": 5}
        assert desk.look() == {"q": 5}
    (line,) = [record.getMessage() for record in caplog.records if record.name == "app.service.watches"]
    assert "q (5)" in line
    assert desk.of("q") is False


@pytest.mark.parametrize("who", ["handler", "waiting", "recent", "another worker"])
def test_a_queue_that_somebody_receives_from_is_not_named(who: str) -> None:
    desk = Desk().stranded("q")
    if who == "handler":
        desk.handled.add("q")
    elif who == "waiting":
        desk.waiting.add("q")
    elif who == "recent":
        desk.recent.note("q")
    else:
        desk.elsewhere = ["q"]
    assert desk.look() == {}
    assert desk.of("q") is True


def test_a_receive_counts_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk().stranded("q")
    desk.recent.note("q")
    monkeypatch.setattr(module, "RECENT_S", 0.0)
    assert desk.of("q") is False
    desk.recent.note("other")
    assert list(desk.recent._received_s) == ["other"]


@pytest.mark.parametrize("queue", ["orders.dead", "letters", ""])
def test_dead_letters_may_wait(queue: str) -> None:
    assert Desk().stranded(queue).look() == {}


def test_what_came_a_moment_ago_may_wait() -> None:
    assert Desk().stranded("q", age_ms=FORSAKEN_MS - 1).look() == {}


def test_while_a_worker_does_not_answer_nothing_new_is_named_and_nothing_forgotten() -> None:
    desk = Desk().stranded("q")
    desk.elsewhere = UnavailableError("away")
    assert desk.look() == {} and desk.of("q") is None
    desk.elsewhere = []
    assert desk.look() == {"q": 5}
    desk.elsewhere = UnavailableError("away")
    assert desk.look() == {"q": 5}


def test_among_thousands_of_queues_others_have_their_turn() -> None:
    desk = Desk().stranded(*(f"q{i}" for i in range(10 * TURN_QUEUES)))
    turn, asked = 0, Counter[int]()

    def takes(queue: str) -> bool:
        asked[turn] += 1
        return False

    async def look() -> None:
        nonlocal turn
        desk.receivers._takers = (takes,)
        looking = asyncio.ensure_future(desk.receivers.look())
        while not looking.done():
            turn += 1
            await asyncio.sleep(0)
        await looking

    asyncio.run(look())
    assert len(desk.receivers.without) == 10 * TURN_QUEUES
    assert max(asked.values()) <= 2 * TURN_QUEUES
