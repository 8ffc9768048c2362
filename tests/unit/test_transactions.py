"""Partitions that wait for an open transaction are named, with its producer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError
from faust.types import TP

from app.engine import transactions as module
from app.engine.stalls import Stalls
from app.engine.transactions import Begin, OpenTransactions

TOPICS: Any = SimpleNamespace(queue="q", markers="m", changelogs={})
BEGAN_MS = 1_800_000_000_000  # 2027-01-15 08:00 UTC
SINCE = "waits for an open transaction since 2027-01-15 08:00 UTC"


class Desk:
    """Partitions 0 to 2, which have read their queue logs up to 10, and those of markers up to 5."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        clock = SimpleNamespace(
            monotonic=lambda: self.now_s,
            time=lambda: BEGAN_MS / 1000 + 60,
            strftime=time.strftime,
            gmtime=time.gmtime,
        )
        monkeypatch.setattr(module, "time", clock)
        self.unstable: dict[TP, tuple[int, int]] = {}
        self.answers: list[Any] = []
        self.asked: list[tuple[TopicPartition, int]] = []
        partition = SimpleNamespace(position=10, markers_position=5)
        self.owned: dict[int, Any] = {
            n: SimpleNamespace(owner=SimpleNamespace(partition=partition), paused=False) for n in range(3)
        }
        self.open = OpenTransactions(
            lambda: self.unstable, lambda: TOPICS, self.owned, self.ask, lambda find: asyncio.ensure_future(find)
        )

    async def ask(self, tp: TopicPartition, offset: int) -> Begin | None:
        self.asked.append((tp, offset))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.open.look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    @property
    def named(self) -> dict[int, str]:
        return {number: stall.reason.partition(",")[0] for number, stall in self.open.now().items()}


def run(monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Desk(monkeypatch))

    asyncio.run(main())


def test_a_transaction_that_stays_open_is_named_with_its_producer_and_how_to_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(desk: Desk) -> None:
        desk.unstable = {TP("q", 1): (10, 45)}
        desk.answers = [Begin(4_000, BEGAN_MS)]
        await desk.wait(0)
        await desk.wait(1)
        assert not desk.open.now(), "most are over by then"
        await desk.wait(3)
        (stall,) = desk.open.now().values()
        assert (stall.topic, round(stall.seconds), stall.hidden) == ("q", 60, 35)
        what, _, mend = stall.reason.rpartition(": ")
        assert what == f"{SINCE} (producer id 4000), which hides q from offset 10 on"
        assert "abort --topic q --partition 1 --start-offset 10" in mend
        assert desk.asked == [(TopicPartition("q", 1), 10)]
        desk.unstable = {}
        await desk.wait(2)
        assert not desk.open.now()

    run(monkeypatch, scenario)


def test_transactions_that_follow_each_other_are_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        for stable in range(10):
            desk.unstable = {TP("q", 1): (stable, 45)}
            await desk.wait(2)
        assert not desk.open.now() and not desk.asked

    run(monkeypatch, scenario)


def test_what_is_not_read_up_to_the_transaction_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        desk.owned[2].paused = True  # what the last fetch told may be long ago
        desk.unstable = {TP("q", 1): (11, 45), TP("q", 2): (10, 45), TP("x", 0): (0, 9), TP("q", 7): (0, 9)}
        await desk.wait(0)
        await desk.wait(10)
        assert not desk.open.now() and not desk.asked

    run(monkeypatch, scenario)


def test_a_transaction_among_the_markers_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        desk.unstable = {TP("m", 0): (5, 6)}
        desk.answers = [Begin(1, BEGAN_MS)]
        await desk.wait(0)
        await desk.wait(4)
        assert desk.named == {0: f"{SINCE} (producer id 1)"}

    run(monkeypatch, scenario)


def test_without_an_answer_it_is_named_without_the_producer_who_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(desk: Desk) -> None:
        desk.unstable = {TP("q", 1): (10, 45)}
        desk.answers = [KafkaConnectionError(), Begin(7, None)]
        await desk.wait(0)
        await desk.wait(4)
        seen = "waits for an open transaction since 2027-01-15 08:01 UTC"  # since when it was seen here
        assert desk.named == {1: seen}
        await desk.wait(4)
        assert len(desk.asked) == 1, "not at each look"
        await desk.wait(7)
        assert desk.named == {1: f"{seen} (producer id 7)"}, "a stamp that its producer made up does not count"

    run(monkeypatch, scenario)


def test_it_is_logged_once_and_so_is_its_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(desk: Desk) -> None:
        stalls = Stalls(lambda _: {}, lambda: TOPICS, desk.open.now)
        desk.unstable = {TP("q", 1): (10, 45)}
        desk.answers = [Begin(4_000, BEGAN_MS)]
        for seconds in (0, 4, 2, 2):
            await desk.wait(seconds)
            stalls.look()
        desk.unstable = {}
        await desk.wait(2)
        stalls.look()
        said, over = [r.getMessage() for r in caplog.records if r.name == "app.engine.stalls"]
        assert said.startswith(f"Partition 1 {SINCE} (producer id 4000), which hides q from offset 10 on: ")
        assert over.startswith(f"Partition 1 is well again (was: {SINCE}")

    caplog.set_level(logging.WARNING)
    run(monkeypatch, scenario)
