"""Where logs end is told for those that have a leader, whatever is wrong with others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import LeaderNotAvailableError

from app.engine.read_up import LogEnds
from app.settings import Settings


class Kafka:
    """A consumer, and its client. As aiokafka, it fails if one partition has no leader."""

    def __init__(self, leaders: dict[int, int | None]) -> None:
        self.leaders = leaders
        self.updates = 0
        self._client = self.cluster = self

    async def _wait_on_metadata(self, topic: str) -> None: ...

    def force_metadata_update(self) -> None:
        self.updates += 1

    def leader_for_partition(self, tp: TopicPartition) -> int | None:
        return self.leaders[tp.partition]

    async def end_offsets(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        if any(self.leaders[tp.partition] in (-1, None) for tp in tps):
            raise LeaderNotAvailableError
        return {tp: 10 + tp.partition for tp in tps}


def ends(kafka: Kafka) -> dict[int, int]:
    log_ends: Any = LogEnds(Settings(kafka="kafka://nowhere:1"))
    log_ends._consumer = kafka
    found = asyncio.run(log_ends.ask([TopicPartition("q", number) for number in kafka.leaders]))
    return {tp.partition: end for tp, end in found.items()}


@pytest.mark.parametrize(
    ("leaders", "told"),
    [({0: 0, 1: 1}, {0: 10, 1: 11}), ({0: -1, 1: 0, 2: None}, {1: 11}), ({0: -1}, {})],
    ids=["all have one", "some have none", "none has one"],
)
def test_a_partition_without_a_leader_hides_the_end_of_no_other(
    leaders: dict[int, int | None], told: dict[int, int]
) -> None:
    kafka = Kafka(leaders)
    assert ends(kafka) == told
    assert kafka.updates == (len(told) < len(leaders)), "Kafka is asked for new leaders"
