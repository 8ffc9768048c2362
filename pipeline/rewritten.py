"""Whether the archive and Kafka still have the same records, where both reach.

A log that lost its end (a broker that was elected without being in sync, a topic that was made anew or restored) gives
the offsets out a second time. What was archived before tells. A log only changes from some offset up to its end, so
the last record that both have is compared, and all of them only if that one differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as F

from marq.text import plural
from pipeline.logs import MARKERS, QUEUE, Archive, Bounds, Positions, logs
from pipeline.verdict import Found

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pipeline.damage import Damaged
    from pipeline.kafka import Kafka

_KEY = ["partition", "log", "offset"]


class _Span(NamedTuple):
    """Of one log: the offsets that both have are in `[start, stop)`; the archive may go on beyond Kafka's `end`."""

    start: int
    stop: int
    end: int


class Sources(NamedTuple):
    """The archive, and Kafka, and where the logs began and ended in them."""

    spark: SparkSession
    archive: Archive
    kafka: Kafka
    archived: Mapping[int, Bounds]  # read before `there`
    there: Mapping[int, Bounds]
    damaged: Damaged  # see `pipeline.logs.logs`


def rewritten(of: Sources, most: int) -> tuple[list[Found], int]:
    """Records of the archive that Kafka lacks at its end, or has others in the place of; and how many they are.

    Args:
        most: so many faults of a partition are named.
    """
    spans = {number: _spans(of.archived.get(number, Bounds(0, 0, 0, 0)), bound) for number, bound in of.there.items()}
    common = logs(of.spark, of.archive, _at(spans, lambda _, s: s.start), _at(spans, lambda _, s: s.stop))
    last = {(row[0], row[1]): row[2] for row in common.groupBy("partition", "log").agg(F.max("offset")).collect()}
    found = _different(
        of, _at(spans, lambda at, s: last.get(at, s.stop)), _at(spans, lambda at, s: last.get(at, s.stop - 1) + 1)
    )
    differ = {(row.partition, row.log) for row in found.collect()}
    found = _different(
        of, _at(spans, lambda at, s: s.start if at in differ else s.stop), _at(spans, lambda _, s: s.stop)
    )
    beyond = logs(of.spark, of.archive, _at(spans, lambda _, s: s.end)).where(F.col("partition").isin(list(spans)))
    return _named(found.unionByName(beyond.select(*_KEY, F.lit(True).alias("gone"))), most)


def _spans(archived: Bounds, there: Bounds) -> dict[str, _Span]:
    def span(archived_start: int, archived_end: int, start: int, end: int) -> _Span:
        stop = max(min(archived_end, end), start)
        return _Span(min(max(archived_start, start), stop), stop, end)

    return {QUEUE: span(*archived[:2], *there[:2]), MARKERS: span(*archived[2:], *there[2:])}


def _at(spans: Mapping[int, Mapping[str, _Span]], offset: Callable[[tuple[int, str], _Span], int]) -> Positions:
    return {n: (offset((n, QUEUE), of[QUEUE]), offset((n, MARKERS), of[MARKERS])) for n, of in spans.items()}


def _different(of: Sources, start: Positions, stop: Positions) -> DataFrame:
    """Records that the archive has, and Kafka does not, or not the same (not `gone`)."""
    mine = logs(of.spark, of.archive, start, stop, prints=True).where(F.col("partition").isin(list(start)))
    theirs = logs(of.spark, of.kafka, start, stop, prints=True, damaged=of.damaged).withColumn("found", F.lit(True))
    both = mine.alias("mine").join(theirs.alias("theirs"), _KEY, "left")
    same = F.lit(True)
    for name in ("timestamp_ms", "value", "print"):
        same &= F.col(f"mine.{name}").eqNullSafe(F.col(f"theirs.{name}"))
    gone = F.col("found").isNull()
    if of.kafka.settings.queue_id is not None:
        same |= gone & (F.col("log") == QUEUE)  # a topic that is not ours may be compacted
    return both.where(~same).select(*_KEY, gone.alias("gone"))


def _named(found: DataFrame, most: int) -> tuple[list[Found], int]:
    """A fault for each message, and one for all records of markers of a partition, from the first one on."""
    of = Window.partitionBy("partition", "log", "gone")
    numbered = found.withColumn("of", F.count("*").over(of)).withColumn("n", F.row_number().over(of.orderBy("offset")))
    faults: list[Found] = []
    count = 0
    for row in numbered.where(F.col("n") <= F.when(F.col("log") == QUEUE, most).otherwise(1)).collect():
        what = "not in Kafka" if row.gone else "another one in Kafka"
        if row.log == QUEUE:
            kind = "record gone" if row.gone else "rewritten"
            faults.append(Found(row.partition, row.offset, None, kind, f"is in the archive, and {what}"))
            count += row.of if row.n == 1 else 0
        else:
            kind = "markers gone" if row.gone else "rewritten"
            of_them = f"{plural(row.of, 'record')} of the markers log, from {row.offset} on"
            faults.append(Found(row.partition, -1, None, kind, f"{of_them}: in the archive, and {what}"))
            count += 1
    return faults, count
