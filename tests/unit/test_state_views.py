"""Views of queues: ages that grow, dead letters of topic mode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from app.cluster.peers import peer_call
from app.engine.breakers import Breakers
from app.engine.broker_time import PLAUSIBLE_MS, BrokerTime
from app.engine.owned_partition import OwnedPartition
from app.engine.read_up import ReadUp
from app.engine.stalls import Stall
from app.service import census as census_module
from app.service.census import Census, CountsWanted
from app.service.descriptions import Place
from app.service.inspection import Inspection
from gateway.metrics import QUEUES_MAX, Collector
from marq.core.policies import Limits, QueueSettings
from marq.protocol.headers import H_DEDUP, H_DELAY
from tests.unit.core_helpers import Worker
from tests.unit.peer_helpers import Network, alone
from tests.unit.test_metrics import app, collector, samples

__all__ = ["app", "collector"]  # fixtures


class Clock:
    def __init__(self) -> None:
        self.now_ms = 5_000


class Desk:
    """The views of a worker with one partition."""

    def __init__(self, **limits: Any) -> None:
        self.clock = Clock()
        self.worker = Worker(limits=Limits(**limits)).serve()
        self.broker_time = BrokerTime(lambda: self.clock.now_ms)
        self.broker_time.stamped(self.worker.broker.now_ms)
        owned = OwnedPartition(0, 0, self.worker.owner, None)  # type: ignore[arg-type]
        self.settings = QueueSettings()
        self.network = Network()
        peers = self.network.join("here")
        self.breakers = Breakers(lambda queue: self.settings, lambda: self.clock.now_ms, peers, asyncio.ensure_future)
        topics: Any = SimpleNamespace(queue="t", markers="m", partitions=1)
        self.read_up = ReadUp(self.ask, lambda: topics, {0: owned}, lambda: None, asyncio.ensure_future)
        self.ownership: Any = SimpleNamespace(
            owned={0: owned},
            read_up=self.read_up,
            copies=SimpleNamespace(are_dying=lambda owned, queue: False),
            broker_time=self.broker_time,
            topics=topics,
            breakers=self.breakers,
            catalog=SimpleNamespace(
                settings_of=lambda queue: self.settings, takes_dead_letters=lambda queue: queue.endswith(".dead")
            ),
            worker_name="w1",
            unserved={},
            stalls=SimpleNamespace(now=dict),
            app=SimpleNamespace(consumer=SimpleNamespace(highwater=lambda tp: len(self.worker.queue_log))),
        )
        self.census = Census(self.ownership, peers)  # type: ignore[arg-type]
        receivers: Any = SimpleNamespace(of=self.received)
        self.inspection = Inspection(self.ownership, SimpleNamespace(), self.census, receivers, peers)  # type: ignore[arg-type]

    async def ask(self, tps: Any) -> Any:
        return {tp: len(self.worker.queue_log if tp.topic == "t" else self.worker.broker.log) for tp in tps}

    async def received(self, queues: list[str]) -> dict[str, bool]:
        return dict.fromkeys(queues, False)

    async def stats(self, queue: str) -> dict[str, Any]:
        (found,) = (await self.inspection.stats([queue])).queues
        return msgspec.to_builtins(found)


def run(scenario: Callable[[Desk], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        await scenario(Desk(**limits))

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census_module, "OLDEST_KEPT_MS", -1)


def test_counts_are_those_of_now_and_of_all_that_is_in_the_log() -> None:
    async def scenario(desk: Desk) -> None:
        worker = desk.worker
        for name in ("a", "b", "a"):
            worker.queue_log.append(worker.record(headers=((H_DEDUP, name.encode()),)))
        asked = asyncio.ensure_future(desk.stats("q"))
        await asyncio.sleep(0.01)
        assert not asked.done()
        worker.read_queue()
        (owned,) = desk.ownership.owned.values()
        desk.read_up.advanced(owned)
        found = await asked
        assert (found["ready"], found["in_flight"]) == (2, 0), "a duplicate does not count"
        (handout,) = worker.receive(1)
        found = await desk.stats("q")
        assert (found["ready"], found["in_flight"]) == (1, 1)
        worker.owner.acked(handout.offsets, handout.receipt)
        worker.flush()
        found = await desk.stats("q")
        assert (found["ready"], found["in_flight"]) == (1, 0)

    run(scenario)


def test_what_is_not_read_is_counted_and_what_is_not_counted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        now_ms = 1_000_000
        monkeypatch.setattr(census_module, "now_ms", lambda: now_ms)
        worker, partition = desk.worker, desk.worker.owner.partition
        worker.send(2)
        assert not (await desk.stats("q"))["at_least"]
        for _ in range(3):
            worker.queue_log.append(worker.record())
        desk.clock.now_ms += 60_000
        await desk.stats("q")
        now_ms += 1_000
        stats = await desk.inspection.stats(["q"])
        assert stats.queues[0].at_least and stats.uncounted == {"0": 1_000}
        assert partition.count_unread(2, 5, worker.queue_log[2:])
        stats = await desk.inspection.stats(["q"])
        assert stats.queues[0].ready == 5 and stats.uncounted == {} and not stats.queues[0].at_least
        (handout,) = worker.receive(2)
        worker.owner.acked(handout.offsets, handout.receipt)
        worker.flush()
        found = await desk.stats("q")
        assert (found["ready"], found["oldest_ms"]) == (3, 60_000)

    run(scenario)


def test_a_partition_that_no_worker_serves_makes_counts_at_least() -> None:
    async def scenario(desk: Desk) -> None:
        desk.worker.send(2)
        desk.ownership.topics.partitions = 2
        stats = await desk.inspection.stats(["q"])
        assert stats.queues[0].at_least and list(stats.uncounted) == ["1"]

    run(scenario)


def test_for_the_counts_of_a_queue_no_other_queue_is_counted() -> None:
    async def scenario(desk: Desk) -> None:
        for queue, count in (("q", 3), ("q.dead", 2), ("other", 5), ("another", 1)):
            desk.worker.send(count, queue=queue)

        found, missing = await desk.census.total(["q"])
        assert (found, missing) == ({"q": {"ready": 3, "delayed": 0, "in_flight": 0}}, [])
        assert await desk.census.counts_of("other") == {"ready": 5, "delayed": 0, "in_flight": 0}
        stats = await desk.stats("q")
        assert (stats["ready"], stats["dead"]) == (3, 2)
        assert not await desk.census.counts_here(CountsWanted(["none"]))

    run(scenario)


def test_counts_of_all_queues_are_those_of_all_partitions_together() -> None:
    async def scenario(desk: Desk) -> None:
        first, second = desk.worker, Worker().serve()
        desk.ownership.owned[1] = SimpleNamespace(number=1, serving=True, owner=second.owner)
        for worker, count in ((first, 3), (second, 5)):
            worker.send(count, "both", headers=())
            worker.send(1, "both", headers=((H_DELAY, b"60000"),))
            worker.receive(1, "both")
        second.send(2, "one")
        (gone,) = first.receive(1, "both")
        first.owner.acked(gone.offsets, gone.receipt)
        first.flush()
        counts = desk.census.counts()
        assert counts == {
            "both": {"ready": 5, "delayed": 2, "in_flight": 2},
            "one": {"ready": 2, "delayed": 0, "in_flight": 0},
        }

    run(scenario)


def test_the_age_of_the_oldest_message_goes_on_where_nothing_happens() -> None:
    async def scenario(desk: Desk) -> None:
        desk.worker.send()
        desk.clock.now_ms += 3_000
        desk.worker.send(queue="other")
        for age_ms in (3_000, 63_000):
            assert (await desk.stats("q"))["oldest_ms"] == age_ms
            assert (await desk.inspection.message_here(Place(0, 0))).age_ms == age_ms
            desk.clock.now_ms += 60_000

    run(scenario)


def test_the_age_is_that_of_the_oldest_in_memory_and_on_disk() -> None:
    async def scenario(desk: Desk) -> None:
        parked = desk.worker.send(2)
        desk.worker.clock_ms += 20_000
        desk.worker.checkpoint()
        desk.worker.owner.partition.shed(1 << 40, [])
        desk.worker.checkpoint()
        desk.worker.broker.now_ms += 10_000
        desk.clock.now_ms += 10_000
        desk.worker.send(1)
        assert (await desk.stats("q"))["oldest_ms"] == 10_000
        (handout,) = desk.worker.receive(2)
        assert handout.offsets == parked
        desk.worker.owner.acked(parked, handout.receipt)
        desk.worker.flush()
        assert (await desk.stats("q"))["oldest_ms"] == 0

    run(scenario)


def test_a_queue_has_an_age_exactly_while_it_has_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census_module, "OLDEST_KEPT_MS", 3_600_000)

    async def scenario(desk: Desk) -> None:
        desk.worker.send(queue="other")
        assert (await desk.stats("q"))["oldest_ms"] is None  # from here on, these ages are reused
        desk.worker.send()
        assert (await desk.stats("q"))["oldest_ms"] == 0
        (handout,) = desk.worker.receive(1)
        desk.worker.owner.acked(handout.offsets, handout.receipt)
        desk.worker.flush()
        assert (await desk.stats("q"))["oldest_ms"] is None

    run(scenario)


def test_dead_letters_of_topic_mode_are_those_that_became_some() -> None:
    async def scenario(desk: Desk) -> None:
        desk.worker.send(3)
        (handout,) = desk.worker.receive(3)
        desk.worker.owner.ended_as("dead", handout.offsets[:2])
        desk.worker.flush()
        assert (await desk.stats("theirs")) == {
            "queue": "theirs",
            "ready": 0,
            "delayed": 0,
            "in_flight": 1,
            "dead": 2,
            "oldest_ms": 0,
            "breaker": None,
            "has_receiver": False,
            "at_least": False,
            "at_most": False,
            "takes_dead_letters": False,
        }

    async def main() -> None:
        desk = Desk(queue_id="theirs")
        receive = desk.worker.receive
        desk.worker.receive = lambda limit: receive(limit, "theirs")  # type: ignore[method-assign, assignment, misc]
        await scenario(desk)

    asyncio.run(main())


def test_the_breaker_of_a_queue_is_told_and_is_a_metric(app: Any, collector: Collector) -> None:
    settings = QueueSettings(breaker_failures=2, breaker_pause_ms=9_000)

    async def scenario(desk: Desk) -> None:
        desk.settings = settings
        assert (await desk.stats("q"))["breaker"] == {"state": "closed", "failures": 0, "pause_ms": 0}
        breaker = desk.breakers.of("q")
        for _ in range(2):
            breaker.failed(2, 9_000, desk.clock.now_ms)
        desk.clock.now_ms += 1_000
        assert (await desk.stats("q"))["breaker"] == {"state": "open", "failures": 2, "pause_ms": 8_000}

    run(scenario)

    async def measured(desk: Desk) -> None:
        breakers = app.ownership.breakers = Breakers(lambda queue: settings, lambda: 0, alone(), asyncio.ensure_future)
        fine, broken = breakers.of("fine"), breakers.of("broken")
        assert not fine.failed(2, 9_000, 0) and broken.failed(1, 9_000, 0)
        found = {
            labels: value for (name, labels), value in samples(app.meters.registry).items() if "queue_break" in name
        }
        assert found == {("fine",): 0, ("broken",): 1}

    run(measured)


def test_a_partition_that_can_not_be_served_is_named_with_its_reason() -> None:
    async def scenario(desk: Desk) -> None:
        desk.ownership.unserved = {3: "records were deleted unread", 0: "it is served by now"}
        assert (await desk.inspection.unserved_here(None)) == {3: "records were deleted unread"}
        assert (await desk.inspection.unserved()) == {"3": "records were deleted unread"}

    run(scenario)


def test_a_partition_that_can_not_be_served_is_a_metric(app: Any, collector: Collector) -> None:
    app.ownership.unserved = {3: "records were deleted unread"}
    assert samples(app.meters.registry)["marq_partition_unserved", ("3",)] == 1


class OtherWorker:
    """One to which another partition is stalled, too."""

    @peer_call("stalled")
    async def stalled_here(self, _: None) -> dict[int, Stall]:
        return {3: Stall("m", 9.0)}


def test_a_stalled_partition_is_named_as_the_worker_says_that_knows_most() -> None:
    async def scenario(desk: Desk) -> None:
        desk.ownership.stalls = SimpleNamespace(now=lambda: {3: Stall("t", 4.0), 1: Stall("m", 5.0)})
        desk.network.join("there").register(OtherWorker())
        assert await desk.inspection.stalled() == {"1": Stall("m", 5.0), "3": Stall("m", 9.0)}

    run(scenario)


def test_a_stalled_partition_is_a_metric(app: Any, collector: Collector) -> None:
    app.ownership.stalls = SimpleNamespace(now=lambda: {3: Stall("t", 4.0)})
    assert samples(app.meters.registry)["marq_partition_stalled_seconds", ("3",)] == 4.0


# ---------------------------------------------------------------------- metric


def test_the_oldest_of_each_queue_is_a_metric_with_so_many_labels(app: Any, collector: Collector) -> None:
    collector.ages = {f"q{i}": i * 1_000 for i in range(1, QUEUES_MAX + 4)} | {"": 1 << 40}
    every = samples(app.meters.registry).items()
    found = {labels: value for (name, labels), value in every if name == "marq_queue_oldest_seconds"}
    assert len(found) == QUEUES_MAX + 1
    assert found[f"q{QUEUES_MAX + 3}",] == QUEUES_MAX + 3
    assert found["",] == 3


# ---------------------------------------------------------------------- the brokers' time


def test_the_brokers_time_goes_on_by_the_workers_clock() -> None:
    clock = Clock()
    time = BrokerTime(lambda: clock.now_ms)
    assert time.now_ms is None
    time.stamped(1_000_000)
    clock.now_ms += 500_000
    assert time.now_ms == 1_500_000


@pytest.mark.parametrize("off_ms", [86_400_000, -86_400_000])
def test_one_wrong_stamp_changes_nothing_and_a_second_one_that_agrees_does(off_ms: int) -> None:
    clock = Clock()
    time = BrokerTime(lambda: clock.now_ms)
    time.stamped(1_000_000)
    time.stamped(1_000_000 + off_ms)
    assert time.now_ms == 1_000_000
    time.stamped(1_000_100)
    time.stamped(1_000_000 + off_ms)
    assert time.now_ms == 1_000_100
    time.stamped(1_000_000 + off_ms + PLAUSIBLE_MS)
    assert time.now_ms == 1_000_000 + off_ms + PLAUSIBLE_MS
