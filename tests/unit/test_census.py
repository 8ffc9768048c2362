"""The oldest message of each queue is found without a look at all others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.service import census
from app.service.census import Census
from marq.core import checkpoints
from marq.core.segments import Segment
from marq.core.stamps import note_lowest
from marq.protocol.headers import H_GROUP
from tests.unit.core_helpers import EPOCH_MS, TwoLogs


def found(logs: TwoLogs) -> dict[str, int]:
    return gathered(census._lowest_in_turns(logs.partition))


def gathered(pairs: AsyncIterator[tuple[str, int]]) -> dict[str, int]:
    async def gather() -> dict[str, int]:
        return {queue: offset async for queue, offset in pairs}

    return asyncio.run(gather())


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_of_each_queue_is_found_in_whatever_order_messages_were_read_back(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(census, "TURN_MESSAGES", 3)
    chance, logs = random.Random(seed), TwoLogs()
    logs.own()
    for _ in range(40):
        logs.send(queue=chance.choice("aaaabc"))
    logs.send(queue=None)  # poison
    logs.read()
    logs.ack(logs.start(*sorted(chance.sample(range(40), 15))))
    messages = logs.partition.messages
    for offset in chance.sample(list(messages), 10):
        messages[offset] = messages.pop(offset)
    everything: dict[str, int] = {}
    note_lowest(logs.partition, list(messages), everything)
    assert found(logs) == everything


def test_a_long_backlog_of_one_queue_is_not_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "TURN_MESSAGES", 10)
    looked_at: list[int] = []

    def note(partition: object, offsets: list[int], lowest: dict[str, int]) -> None:
        looked_at.extend(offsets)
        note_lowest(partition, offsets, lowest)  # type: ignore[arg-type]

    monkeypatch.setattr(census, "note_lowest", note)
    logs = TwoLogs()
    logs.own()
    for _ in range(100):
        logs.send(queue="q")
    logs.read()
    assert found(logs) == {"q": 0}
    assert looked_at == list(range(10))


def parked(seed: int, queues: int, messages: int, groups: int = 0) -> TwoLogs:
    """Messages of many queues, all parked, in several segments."""
    chance, logs = random.Random(seed), TwoLogs()
    logs.own()
    for _ in range(messages):
        headers = [(H_GROUP, b"%d" % chance.randrange(groups))] if groups else []
        logs.send(queue=f"q{chance.randrange(queues)}", headers=headers)
    logs.read()
    logs.checkpoint(window=0)
    logs.partition.shed(1 << 60)
    return logs


@pytest.mark.parametrize("groups", [0, 7])
@pytest.mark.parametrize("seed", range(5))
def test_the_oldest_that_is_parked_is_found_in_whatever_segment_it_is(
    seed: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SEGMENT_MESSAGES", 10)
    logs = parked(seed, queues=30, messages=100, groups=groups)
    segments = logs.partition.segments
    assert len(segments) == 10
    for offset in random.Random(seed).sample(range(100), 40):
        segments.unpark(offset)
    wanted: dict[str, int] = {}
    for segment in segments:
        for queue, offsets in segment.parked.items():
            wanted.setdefault(queue, offsets[0])
    assert gathered(census._lowest_parked_in_turns(logs.partition)) == wanted


@pytest.mark.parametrize("groups", [0, 50])
def test_a_step_of_the_search_for_parked_messages_is_bounded_however_many_queues_there_are(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step looks at some queues or groups, or goes through one segment; it makes no index."""
    monkeypatch.setattr(checkpoints, "SEGMENT_MESSAGES", 100)
    monkeypatch.setattr(census, "TURN_QUEUES", 20)
    logs = parked(1, queues=20 if groups else 800, messages=2_000, groups=groups)
    step: list[str] = []
    steps: list[list[str]] = []

    async def sleep(_: float) -> None:
        steps.append(step.copy())
        step.clear()

    class Noting(dict[Any, Any]):
        """A dict whose values note that they are looked at."""

        def values(self) -> Any:
            for value in super().values():
                step.append("group")
                yield value

    segments = logs.partition.segments
    segments.queues = {queue: Noting(found) for queue, found in segments.queues.items()}
    lowest_parked = Segment.lowest_parked

    def note(self: Segment, queues: Any) -> dict[str, int]:
        step.append("segment")
        return lowest_parked(self, queues)

    monkeypatch.setattr(Segment, "lowest_parked", note)
    monkeypatch.setattr(Segment, "index", lambda self: pytest.fail("an index takes long"))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert len(gathered(census._lowest_parked_in_turns(logs.partition))) > 19
    steps.append(step)
    assert sum(one.count("group") for one in steps) == sum(len(one) for one in segments.queues.values()) > 700
    assert max(one.count("segment") for one in steps) == 1
    # a queue's groups are listed when it is begun
    assert max(one.count("group") for one in steps) <= 20 + groups


def test_the_age_of_what_was_stamped_before_kafka_was_counts_from_when_it_was_seen() -> None:
    logs, clock = TwoLogs(), SimpleNamespace(now_ms=EPOCH_MS)
    logs.own()
    logs.now_ms = 0
    logs.send(queue="wrong")
    logs.now_ms = EPOCH_MS - 5_000
    logs.send(queue="right")
    logs.read()
    owned = SimpleNamespace(number=0, serving=True, owner=SimpleNamespace(partition=logs.partition))
    one = Census(
        SimpleNamespace(owned={0: owned}, broker_time=clock),  # type: ignore[arg-type]
        SimpleNamespace(register=lambda part: None),  # type: ignore[arg-type]
    )

    async def ages() -> list[dict[str, int]]:
        found = [await one.ages()]
        clock.now_ms += 60_000
        one._oldest = one._oldest._replace(at_s=-1e9)
        return [*found, await one.ages()]

    assert asyncio.run(ages()) == [{"wrong": 0, "right": 5_000}, {"wrong": 60_000, "right": 65_000}]
