"""Partitions whose records have waited long for Kafka are stalled, in the log, views and metrics."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from faust.types import TP

from app.engine.stalls import STALLED_S, Stall, Stalls
from app.streaming.producer import IdempotentProducer

TOPICS: Any = SimpleNamespace(queue="q", markers="m", changelogs={"messages": "c"})


class Kafka:
    def __init__(self) -> None:
        self.waited: dict[TP, float] = {}
        self.stalls = Stalls(self.waits, lambda: TOPICS)

    def waits(self, longer_s: float) -> dict[TP, float]:
        return {tp: waited_s for tp, waited_s in self.waited.items() if waited_s > longer_s}


def test_a_partition_is_stalled_by_what_waits_longest_in_any_of_its_topics() -> None:
    kafka = Kafka()
    kafka.waited = {TP("q", 1): 4.0, TP("m", 1): 9.0, TP("c", 1): 5.0, TP("m", 0): STALLED_S, TP("q", 3): 3.5}

    assert kafka.stalls.now() == {1: Stall("m", 9.0), 3: Stall("q", 3.5)}


def test_a_topic_that_is_not_of_the_partitions_stalls_none() -> None:
    kafka = Kafka()
    kafka.waited = {TP("poison", 0): 100.0}

    assert kafka.stalls.now() == {}


def test_a_stall_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    kafka = Kafka()
    caplog.set_level(logging.WARNING, "app.engine.stalls")

    kafka.waited = {TP("m", 2): 4.0}
    kafka.stalls.look()
    kafka.waited = {TP("m", 2): 6.0}
    kafka.stalls.look()
    kafka.waited = {}
    kafka.stalls.look()
    kafka.stalls.look()

    mine = [record for record in caplog.records if record.name == "app.engine.stalls"]
    assert [record.getMessage() for record in mine] == [
        "Partition 2 is stalled: Kafka has confirmed nothing in m for 4 s. Sends go elsewhere meanwhile",
        "Partition 2 is not stalled any more",
    ]


def test_records_that_are_hidden_count_also_where_something_worse_is_named() -> None:
    kafka = Kafka()
    kafka.stalls = Stalls(kafka.waits, lambda: TOPICS, lambda: {1: Stall("q", 99.0, "waits: end it", hidden=7)})
    kafka.waited = {TP("m", 1): 4.0}

    assert kafka.stalls.now() == {1: Stall("m", 4.0, hidden=7)}


def test_a_refused_checkpoint_is_listed_with_its_reason_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    kafka = Kafka()
    why = "makes no checkpoint: c refuses a row: raise its limit"
    refused = {2: Stall("c", 1.0, why), 4: Stall("c", 1.0, "makes no checkpoint: c refuses a row: grant it")}
    kafka.stalls = Stalls(kafka.waits, lambda: TOPICS, lambda: dict(refused))
    caplog.set_level(logging.WARNING, "app.engine.stalls")

    kafka.waited = {TP("m", 4): 9.0}
    assert kafka.stalls.now() == {2: refused[2], 4: Stall("m", 9.0)}, "what stops a partition comes first"
    kafka.waited = {}
    refused.pop(4)
    kafka.stalls.look()
    kafka.stalls.look()
    refused.clear()
    kafka.stalls.look()

    mine = [record for record in caplog.records if record.name == "app.engine.stalls"]
    assert [record.getMessage() for record in mine] == [
        "Partition 2 makes no checkpoint: c refuses a row: raise its limit",
        "Partition 2 is well again (was: makes no checkpoint: c refuses a row)",
    ]


def test_what_waits_in_a_lane_waits_as_well() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def producer(**began_s: float) -> Any:
            made: Any = object.__new__(IdempotentProducer)
            made.loop, made.lanes = loop, {}
            made._unconfirmed = {
                TP(topic, 0): {object(): loop.time() - s, object(): loop.time()} for topic, s in began_s.items()
            }
            return made

        main, lane = producer(q=5.0, p=1.0), producer(m=7.0)
        main.lanes = {"m": lane, "n": lane}
        waits = main.waits(3.0)
        assert waits.keys() == {TP("q", 0), TP("m", 0)}
        assert waits[TP("m", 0)] >= 7.0

    asyncio.run(scenario())
