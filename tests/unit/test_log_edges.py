"""The edges of logs are asked for all partitions at once, and a partition without an answer does not delay others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, NodeNotReadyError, NotLeaderForPartitionError, TopicAuthorizationFailedError

from app.streaming import log_edges as module
from app.streaming.log_edges import BEGIN, END, LogEdges


class Kafka:
    """The client of a consumer: even partitions are led by broker 0, odd ones by broker 1."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []  # broker, partitions in it
        self.leaderless: set[int] = set()
        self.codes: dict[int, list[int]] = {}  # partition -> error codes of its next answers
        self.down: list[Exception] = []  # for the next requests
        self.asked_for_leaders = 0
        self.cluster = self._client = self

    def leader_for_partition(self, tp: TopicPartition) -> int:
        return -1 if tp.partition in self.leaderless else tp.partition % 2

    def add_topic(self, topic: str) -> None: ...

    def force_metadata_update(self) -> None:
        self.asked_for_leaders += 1

    async def _maybe_wait_metadata(self) -> None: ...

    async def send(self, node: int, request: Any) -> Any:
        if self.down:
            raise self.down.pop()
        self.requests.append((node, sum(len(wanted) for _, wanted in request._topics)))
        return SimpleNamespace(
            topics=[
                (topic, [(n, self._code(n), -1, {BEGIN: n, END: 100 + n}.get(edge, edge)) for n, edge in wanted])
                for topic, wanted in request._topics
            ]
        )

    def _code(self, number: int) -> int:
        codes = self.codes.get(number)
        return codes.pop() if codes else 0

    async def consumer(self) -> Kafka:
        return self


Scenario = Callable[[Kafka, LogEdges], Awaitable[None]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    monkeypatch.setattr(module, "AGAIN_S", 0.001)

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            kafka = Kafka()
            edges = LogEdges(kafka.consumer)  # type: ignore[arg-type]
            async with asyncio.timeout(10):
                await scenario(kafka, edges)
            edges.close()

        asyncio.run(main())

    return run


def tps(*numbers: int) -> list[TopicPartition]:
    return [TopicPartition("t", number) for number in numbers]


def test_a_thousand_who_ask_at_once_make_one_request_to_each_broker(run: Any) -> None:
    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        found = await asyncio.gather(*(edges.end(tps(number)) for number in range(1_000)))
        assert found == [{TopicPartition("t", n): 100 + n} for n in range(1_000)]
        assert sorted(kafka.requests) == [(0, 500), (1, 500)]

    run(scenario)


def test_begin_and_end_are_told_apart(run: Any) -> None:
    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        begin, end = await asyncio.gather(edges.begin(tps(4)), edges.end(tps(4)))
        assert (list(begin.values()), list(end.values())) == ([4], [104])

    run(scenario)


def test_times_of_many_logs_are_asked_for_in_one_request_and_those_of_one_log_told_apart(run: Any) -> None:
    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        asked = [edges.since(TopicPartition("t", n), 5_000 + n) for n in range(0, 200, 2)]
        assert await asyncio.gather(*asked) == [5_000 + n for n in range(0, 200, 2)]
        assert kafka.requests == [(0, 100)]
        (tp,) = tps(4)
        found = await asyncio.gather(edges.since(tp, 1), edges.since(tp, 2), edges.end([tp]), edges.begin([tp]))
        assert found == [1, 2, {tp: 104}, {tp: 4}]

    run(scenario)


def test_who_asks_after_a_request_was_sent_does_not_get_its_answer(run: Any) -> None:
    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        await edges.end(tps(0))
        await edges.end(tps(0))
        assert len(kafka.requests) == 2

    run(scenario)


def test_a_partition_without_a_leader_is_asked_for_until_it_has_one_and_holds_up_no_other(run: Any) -> None:
    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        kafka.leaderless = {3}
        waits = asyncio.ensure_future(edges.end(tps(3)))
        assert await edges.end(tps(1, 2)) == {TopicPartition("t", 1): 101, TopicPartition("t", 2): 102}
        while not kafka.asked_for_leaders:
            await asyncio.sleep(0)
        assert not waits.done()
        kafka.leaderless = set()
        assert await waits == {TopicPartition("t", 3): 103}

    run(scenario)


def test_an_error_that_may_pass_is_asked_about_again(run: Any) -> None:
    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        kafka.codes = {5: [NotLeaderForPartitionError.errno] * 3}
        kafka.down = [NodeNotReadyError("1"), NodeNotReadyError("0")]
        assert await edges.end(tps(5, 6)) == {TopicPartition("t", 5): 105, TopicPartition("t", 6): 106}

    run(scenario)


def test_an_error_that_does_not_pass_concerns_its_partition_alone(run: Any) -> None:
    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        kafka.codes = {1: [TopicAuthorizationFailedError.errno]}
        refused, fine = await asyncio.gather(edges.end(tps(1)), edges.end(tps(3)), return_exceptions=True)
        assert isinstance(refused, TopicAuthorizationFailedError)  # type: ignore[has-type]
        assert fine == {TopicPartition("t", 3): 103}  # type: ignore[has-type]

    run(scenario)


def test_who_gives_up_takes_the_answer_from_nobody_else(run: Any) -> None:
    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        impatient, patient = (asyncio.ensure_future(edges.end(tps(2))) for _ in range(2))
        await asyncio.sleep(0)
        impatient.cancel()
        assert await patient == {TopicPartition("t", 2): 102}

    run(scenario)


def test_without_a_connection_all_who_asked_are_told(run: Any) -> None:
    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        async def none() -> Any:
            raise KafkaError("away")

        edges._consumer = none
        failed = await asyncio.gather(edges.end(tps(1)), edges.begin(tps(2)), return_exceptions=True)
        assert [str(one) for one in failed] == ["KafkaError: away"] * 2

    run(scenario)


def test_askers_that_give_up_leave_nothing_behind_and_no_question_goes_on_without_one(run: Any) -> None:
    """A partition without a leader is asked for by take-overs that lose patience, again and again."""

    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        kafka.leaderless = {3}

        async def ask(rounds: int) -> None:
            for _ in range(rounds):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.005):
                        await asyncio.gather(edges.begin(tps(3, 4)), edges.end(tps(3, 4)))

        before = unanswered()
        await ask(100)
        assert unanswered() <= before + 5
        while edges._tasks:
            await asyncio.sleep(0)
        assert not edges._waiting and not edges._later and unanswered() == before

    run(scenario)


def unanswered() -> int:
    """Futures of questions that nobody has answered yet."""
    gc.collect()
    found = (one for one in gc.get_objects() if isinstance(one, asyncio.Future) and not isinstance(one, asyncio.Task))
    return sum(not one.done() for one in found)


def test_a_partition_without_a_leader_is_asked_about_at_one_pace_however_many_ask(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(kafka: Kafka, edges: LogEdges) -> None:
        pause_s = 0.02
        monkeypatch.setattr(module, "AGAIN_S", pause_s)
        kafka.leaderless = {3}
        now = asyncio.get_running_loop().time
        began_s, waits = now(), []
        for _ in range(60):
            waits.append(asyncio.ensure_future(edges.end(tps(3))))
            await asyncio.sleep(0.003)
        assert kafka.asked_for_leaders <= (now() - began_s) / pause_s + 1
        kafka.leaderless = set()
        assert await asyncio.gather(*waits) == [{TopicPartition("t", 3): 103}] * len(waits)

    run(scenario)
