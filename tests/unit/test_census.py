"""The oldest message of each queue is found without a look at all others."""

from __future__ import annotations

import asyncio
import random

import pytest

from app.service import census
from marq.core.stamps import note_lowest
from tests.unit.core_helpers import TwoLogs


def found(logs: TwoLogs) -> dict[str, int]:
    async def gather() -> dict[str, int]:
        return {queue: offset async for queue, offset in census._lowest_in_turns(logs.partition)}

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
