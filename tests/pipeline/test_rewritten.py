"""What the audit names of an archive and a Kafka that differ, and what it does not: both change while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from marq.core.markers import Own, Tick
from pipeline.audit import FAULTS_MAX
from pipeline.damage import Damaged
from pipeline.logs import Archive, bounds
from pipeline.rewritten import Sources, rewritten
from tests.pipeline.lab import Installation
from tests.pipeline.tables_lab import archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 6


def work(here: Installation, number: int, count: int = MESSAGES) -> None:
    here.send(number, *[(b"q", b"payload %d" % i, [("mine", None)]) for i in range(count)])
    here.mark(number, [Own("w", "w/1")], *[[Tick()] for _ in range(count)])


def sources(spark: SparkSession, archived: Installation, there: Installation) -> Sources:
    """An archive and Kafka, as they are now."""
    damaged: Damaged = {}
    old = Archive(archived.job.data)
    return Sources(spark, old, there.kafka, bounds(spark, old), bounds(spark, there.kafka), damaged)


def named(of: Sources) -> list[tuple[int, int, str]]:
    """The faults, all of which are counted."""
    faults, count = rewritten(of, FAULTS_MAX)
    assert count == len(faults)
    return sorted((fault.partition, fault.offset, fault.kind) for fault in faults)


def test_what_is_archived_or_deleted_while_an_audit_runs_is_not_missed_in_kafka(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    here = installation(partitions=3)
    for number in range(3):
        work(here, number)
    archive(spark, here)
    before = sources(spark, here, here)
    work(here, 0)
    archive(spark, here)
    here.delete_before({here.settings.queue_topic: MESSAGES, here.settings.markers_topic: 3}, 1)
    assert named(before) == []


def test_an_archive_that_went_on_behind_what_was_rewritten(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    """Its last records are those that Kafka has."""
    here = installation(partitions=2)
    for number in (0, 1):
        work(here, number)
    archive(spark, here)
    for table in ("messages", "markers"):
        path = here.job.path("archive", table)
        spark.sql(
            f"UPDATE delta.`{path}` SET timestamp = timestamp - INTERVAL 5 SECONDS "
            "WHERE partition = 1 AND offset BETWEEN 2 AND 3"
        )
    assert named(sources(spark, here, here)) == [(1, -1, "rewritten"), (1, 2, "rewritten"), (1, 3, "rewritten")]


def test_a_topic_that_was_made_anew_with_fewer_partitions(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    was = installation(partitions=2)
    work(was, 1)
    archive(spark, was)
    now = sources(spark, was, installation(partitions=1))
    assert named(now) == [(1, -1, "markers gone"), *((1, offset, "record gone") for offset in range(MESSAGES))]
    some, count = rewritten(now, 2)
    assert sorted(fault.offset for fault in some) == [-1, 0, 1]
    assert count == MESSAGES + 1, "all are counted"
