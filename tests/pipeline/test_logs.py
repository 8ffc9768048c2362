"""Both logs as one DataFrame."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from marq.core.markers import End, Marker, Own, Start, encode
from marq.errors import PipelineError
from pipeline.logs import Bounds, bounds, logs
from tests.pipeline.lab import Installation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_both_logs_come_with_their_places_and_without_payloads(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    here = installation()
    here.send(0, (b"q", b"hello"), (b"q", None, [("marq-delay-ms", b"5"), ("a", None)]))
    own: list[Marker] = [Own("w", "n")]
    here.mark(1, own, [Start(0, 1, [0, 2], 1000)])

    rows = {(r.log, r.partition, r.offset): r for r in logs(spark, here.kafka).collect()}

    assert set(rows) == {("queue", 0, 0), ("queue", 0, 1), ("markers", 1, 0), ("markers", 1, 1)}
    first, second = rows["queue", 0, 0], rows["queue", 0, 1]
    assert (bytes(first.key), first.value, first.value_size, first.headers) == (b"q", None, 5, [])
    assert second.value_size == -1
    assert [(h.key, h.value) for h in second.headers] == [("marq-delay-ms", b"5"), ("a", None)]
    assert bytes(rows["markers", 1, 0].value) == encode(own, by="test", seq=0)
    assert first.timestamp_ms > 1_600_000_000_000
    assert bounds(spark, here.kafka) == {0: Bounds(0, 2, 0, 0), 1: Bounds(0, 0, 0, 2)}


def test_a_range_leaves_out_what_is_before_and_after(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    here = installation(partitions=1)
    here.send(0, *[(b"q", b"%d" % i) for i in range(10)])
    here.mark(0, *[[End(0, [i, i + 1])] for i in range(10)])
    found = logs(spark, here.kafka, {0: (3, 8)}, {0: (5, 9)}).collect()
    assert sorted((r.log, r.offset) for r in found) == [("markers", 8), ("queue", 3), ("queue", 4)]


def test_records_that_are_deleted_before_they_are_read_are_left_out_if_asked(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    here = installation(partitions=1)
    here.send(0, *[(b"q", b"%d" % i) for i in range(10)])
    before = {0: (3, 0)}
    planned = logs(spark, here.kafka, before, may_vanish=True)
    here.delete_before({here.settings.queue_topic: 8}, 0)
    for found in (planned, logs(spark, here.kafka, before, may_vanish=True)):
        assert sorted(r.offset for r in found.collect()) == [8, 9]
    assert logs(spark, here.kafka, before, {0: (5, 0)}, may_vanish=True).collect() == []
    with pytest.raises(PipelineError, match="no longer in Kafka"):
        logs(spark, here.kafka, before)


def test_positions_of_another_topic_are_refused(spark: SparkSession, installation: Callable[..., Installation]) -> None:
    here = installation(partitions=1)
    here.send(0, (b"q", b"1"))
    with pytest.raises(PipelineError, match="not the topic that was read before"):
        logs(spark, here.kafka, {0: (7, 0)})
