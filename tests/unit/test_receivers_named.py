"""A queue without a receiver is named: in the log once, and in the metrics for as long as it has none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.service import watches
from app.service.watches import Receivers
from gateway.metrics import QUEUES_MAX, Collector
from marq.errors import UnavailableError
from marq.waiting import FORSAKEN_MS
from tests.unit.peer_helpers import Network
from tests.unit.test_metrics import app, collector, samples

__all__ = ["app", "collector"]  # fixtures


class Desk:
    """Two workers; the first one has the messages."""

    def __init__(self) -> None:
        self.ready: dict[str, int] = {}
        self.age_ms = FORSAKEN_MS
        self.received: tuple[set[str], set[str]] = set(), set()  # from which queues each of them receives
        self.silent = False  # the second one does not answer
        self.network = Network()
        self.workers = [
            Receivers(
                SimpleNamespace(takes_dead_letters=lambda queue: queue in ("failed", "orders.dead")),  # type: ignore[arg-type]
                self,  # type: ignore[arg-type]
                self.network.join(f"worker {rank}"),
                [lambda queue, rank=rank: self.is_received(rank, queue)],
            )
            for rank in range(2)
        ]

    def is_received(self, rank: int, queue: str) -> bool:
        if rank and self.silent:
            raise UnavailableError("planted")
        return queue in self.received[rank]

    def counts(self) -> dict[str, dict[str, int]]:
        return {queue: {"ready": ready} for queue, ready in self.ready.items()}

    async def ages(self) -> dict[str, int]:
        return dict.fromkeys(self.ready, self.age_ms)

    async def look(self) -> dict[str, int]:
        await self.workers[0].look()
        return self.workers[0].without


def run(scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Desk())

    asyncio.run(main())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "nobody receives from" in record.getMessage()]


def test_a_queue_that_no_worker_receives_from_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(desk: Desk) -> None:
        desk.ready = {"orders": 3}
        for _ in range(3):
            assert await desk.look() == {"orders": 3}
        (line,) = said(caplog)
        assert "orders (3)" in line

        desk.received[1].add("orders")
        assert await desk.look() == {}
        desk.received[1].clear()
        assert await desk.look() == {"orders": 3}
        assert len(said(caplog)) == 2, "it had a receiver meanwhile"

    run(scenario)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_receiver_in_any_worker_is_enough(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(desk: Desk) -> None:
        desk.ready = {"orders": 3}
        desk.received[rank].add("orders")
        assert await desk.look() == {}
        assert not said(caplog)

    run(scenario)


def test_what_waits_for_a_moment_or_is_dead_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(desk: Desk) -> None:
        desk.ready = {"orders.dead": 1, "failed": 1, "": 1, "empty": 0}
        assert await desk.look() == {}
        desk.ready, desk.age_ms = {"orders": 3}, FORSAKEN_MS - 1
        assert await desk.look() == {}
        assert not said(caplog)

    run(scenario)


def test_where_a_worker_does_not_answer_nothing_is_said_that_it_may_know_better(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(desk: Desk) -> None:
        desk.ready = {"before": 1}
        assert await desk.look() == {"before": 1}
        desk.silent = True
        desk.ready["new"] = 1
        assert await desk.look() == {"before": 1}
        assert len(said(caplog)) == 1

    run(scenario)


def test_a_line_of_the_log_names_so_many_queues(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(desk: Desk) -> None:
        desk.ready = {f"q{i:03}": 1 for i in range(watches.LISTED_MAX + 5)}
        await desk.look()
        (line,) = said(caplog)
        assert line.count("(1)") == watches.LISTED_MAX
        assert "and 5 more" in line

    run(scenario)


def test_queues_without_a_receiver_are_a_metric_with_so_many_labels(app: Any, collector: Collector) -> None:
    app.receivers.without = {f"q{i}": i for i in range(1, QUEUES_MAX + 4)}
    every = samples(app.meters.registry).items()
    found = {labels: value for (name, labels), value in every if name == "marq_queue_without_receiver"}
    assert len(found) == QUEUES_MAX + 1
    assert found[f"q{QUEUES_MAX + 3}",] == QUEUES_MAX + 3
    assert found["",] == 1 + 2 + 3
