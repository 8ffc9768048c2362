"""The circuit breaker of a queue is one, though its messages lie in several partitions of several workers."""

from __future__ import annotations

import asyncio

import pytest

from app.engine import breakers as module
from app.engine.breakers import STAGGER_MS, Breakers
from marq.core.flow import Breaker
from marq.core.policies import QueueSettings
from tests.unit.core_helpers import LEASE_MS, Worker
from tests.unit.peer_helpers import Network, alone
from tests.unit.test_flow import finish, give_back, take

FAILURES, PAUSE_MS = 3, 10_000
SETTINGS = QueueSettings(breaker_failures=FAILURES, breaker_pause_ms=PAUSE_MS)


class Cluster:
    """Partitions of several workers, whose clocks agree."""

    def __init__(self, workers: int, partitions: int) -> None:
        self.now_ms = 10_000
        network = Network()
        self.peers = [network.join(f"worker {rank}") for rank in range(workers)]
        self.breakers = [
            Breakers(lambda queue: SETTINGS, lambda: self.now_ms, peers, asyncio.ensure_future) for peers in self.peers
        ]
        self.partitions: list[Worker] = []
        for number in range(partitions):
            worker = Worker(settings={"q": SETTINGS})
            worker.owner._breaker_of = self.breakers[number % workers].of
            worker.serve().send(10)
            self.partitions.append(worker)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        for worker in self.partitions:
            worker.wait(ms)

    async def heard(self) -> None:
        """Wait until all workers know all events."""
        for _ in range(10):  # turns of the loop, not time
            await asyncio.sleep(0)

    async def fail_all(self, rounds: int) -> int:
        """A receiver asks partition by partition, and fails; how many messages it was given."""
        failed = 0
        for _ in range(rounds):
            for worker in self.partitions:
                taken = take(worker, 1)
                give_back(worker, taken, delay_ms=600_000)
                failed += len(taken)
                await self.heard()
        return failed

    def states(self) -> set[str]:
        return {one.of("q").state for one in self.breakers}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHER_S", 0)


@pytest.mark.parametrize("workers", [1, 3])
def test_so_many_failures_open_it_wherever_the_messages_lie(workers: int) -> None:
    async def scenario() -> None:
        cluster = Cluster(workers, partitions=8)
        assert await cluster.fail_all(rounds=3) == FAILURES
        assert cluster.states() == {"open"}

    asyncio.run(scenario())


@pytest.mark.parametrize("workers", [1, 3])
def test_after_a_pause_one_message_is_tried_in_all(workers: int) -> None:
    async def scenario() -> None:
        cluster = Cluster(workers, partitions=8)
        await cluster.fail_all(rounds=3)
        for _ in range(3):
            cluster.wait(PAUSE_MS)
            assert await cluster.fail_all(rounds=2) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("workers", [1, 3])
def test_the_success_of_the_probe_closes_it_everywhere_and_wakes_those_that_were_refused(workers: int) -> None:
    async def scenario() -> None:
        cluster = Cluster(workers, partitions=4)
        await cluster.fail_all(rounds=3)
        cluster.wait(PAUSE_MS)
        probe = take(cluster.partitions[0], 1)
        await cluster.heard()
        assert [take(worker, 1) for worker in cluster.partitions[1:]] == [[], [], []]
        finish(cluster.partitions[0], probe)
        await cluster.heard()

        assert cluster.states() == {"closed"}
        for worker in cluster.partitions[1:]:
            worker.owner.partition.woken.clear()
            worker.owner.work(worker.clock_ms)
            assert "q" in worker.owner.partition.woken
            assert len(take(worker, 5)) == 5

    asyncio.run(scenario())


def test_what_fails_or_succeeds_late_is_not_taken_for_the_probe_of_another_partition() -> None:
    async def scenario() -> None:
        cluster = Cluster(1, partitions=2)
        first, second = cluster.partitions
        late = take(second, 2)
        await cluster.fail_all(rounds=2)
        cluster.wait(PAUSE_MS)
        assert len(take(first, 1)) == 1
        give_back(second, late[:1], delay_ms=600_000)
        assert cluster.states() == {"probing"}
        finish(second, late[1:])
        assert cluster.states() == {"probing"}

    asyncio.run(scenario())


def test_where_the_first_worker_has_nothing_to_try_the_next_one_does() -> None:
    async def scenario() -> None:
        cluster = Cluster(2, partitions=2)
        await cluster.fail_all(rounds=3)
        second = cluster.partitions[1]
        cluster.wait(PAUSE_MS)
        assert take(second, 1) == []
        cluster.wait(STAGGER_MS)
        assert len(take(second, 1)) == 1

    asyncio.run(scenario())


def test_a_probe_of_which_nothing_is_heard_any_more_is_replaced() -> None:
    """Its worker may have died."""

    async def scenario() -> None:
        cluster = Cluster(2, partitions=2)
        await cluster.fail_all(rounds=3)
        cluster.wait(PAUSE_MS)
        assert len(take(cluster.partitions[0], 1)) == 1
        await cluster.heard()
        cluster.peers[0].cut_off()
        cluster.wait(2 * LEASE_MS + PAUSE_MS - 1)
        assert take(cluster.partitions[1], 1) == []
        cluster.wait(1)
        assert len(take(cluster.partitions[1], 1)) == 1

    asyncio.run(scenario())


def test_nothing_is_told_of_a_queue_in_which_all_goes_well() -> None:
    async def scenario() -> None:
        cluster = Cluster(2, partitions=2)
        for _ in range(5):
            finish(cluster.partitions[0], take(cluster.partitions[0], 1))
        await cluster.heard()
        assert cluster.peers[0].called == []

    asyncio.run(scenario())


def test_a_breaker_that_is_as_new_is_not_kept() -> None:
    async def scenario() -> None:
        breakers = Breakers(lambda queue: SETTINGS, lambda: 0, alone(), asyncio.ensure_future)
        breaker: Breaker | None = breakers.of("q")
        assert breaker is not None
        breaker.failed(FAILURES, PAUSE_MS, 0)
        del breaker
        assert breakers.of("q").failures == 1, "a failure is remembered, though no partition has the queue"
        breakers.of("q").succeeded()
        assert not breakers._kept

    asyncio.run(scenario())
