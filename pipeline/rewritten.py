"""Whether the archive and Kafka still have the same records, where both reach.

A log that lost its end (a broker that was elected without being in sync, a topic that was made anew or restored) gives
the offsets out a second time. What was archived before tells. An archive may have gone on since, so that its last
records are those of Kafka again. So all that both have is compared: by a checksum for each block of offsets, and record
by record only where these differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as F

from marq.text import plural
from pipeline.logs import MARKERS, QUEUE, Archive, Bounds, Positions, bounds, logs
from pipeline.verdict import Found

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pipeline.damage import Damaged
    from pipeline.kafka import Kafka

#: Offsets that one checksum covers.
BLOCK = 10_000

_KEY = ["partition", "log", "offset"]
_NOTHING = Bounds(0, 0, 0, 0)


class _Span(NamedTuple):
    """Of one log: the offsets that both have, `[start, stop)`, and the ends of both."""

    start: int
    stop: int
    end: int
    archived_end: int


_Spans = Mapping[tuple[int, str], _Span]
"""By partition and log."""


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

    Both may change meanwhile: the archive grows, and workers delete the beginning of what Kafka has.

    Args:
        most: so many faults of a partition are named.
    """
    spans = _spans(of)
    found = []
    blocks = _differing(of, spans)
    if blocks:
        found.append(_different(of, _narrowed(_spans(of), blocks)))
    if any(span.archived_end > span.end for span in spans.values()):
        beyond = _archived(of, _at(spans, lambda span: span.end), _at(spans, lambda span: span.archived_end))
        found.append(beyond.select(*_KEY, F.lit(True).alias("gone")))
    return _named(reduce(lambda a, b: a.unionByName(b), found), most) if found else ([], 0)


def _spans(of: Sources) -> _Spans:
    """What can be compared now."""
    now = bounds(of.spark, of.kafka)
    spans: dict[tuple[int, str], _Span] = {}
    for number in sorted(of.archived.keys() | of.there.keys()):
        old, there, left = (found.get(number, _NOTHING) for found in (of.archived, of.there, now))
        for log, i in ((QUEUE, 0), (MARKERS, 2)):
            start, stop = max(there[i], left[i]), min(old[i + 1], there[i + 1])
            stop = max(start, stop)
            spans[number, log] = _Span(min(max(start, old[i]), stop), stop, there[i + 1], old[i + 1])
    return spans


def _narrowed(spans: _Spans, blocks: Mapping[tuple[int, str], tuple[int, int]]) -> _Spans:
    """Less of the spans: from the first to the last of these blocks; nothing of a log without any."""
    less: dict[tuple[int, str], _Span] = {}
    for place, span in spans.items():
        first, last = blocks.get(place, (0, -1))
        stop = max(span.start, min(span.stop, (last + 1) * BLOCK))
        less[place] = span._replace(start=min(max(span.start, first * BLOCK), stop), stop=stop)
    return less


def _at(spans: _Spans, offset: Callable[[_Span], int]) -> Positions:
    return {n: (offset(spans[n, QUEUE]), offset(spans[n, MARKERS])) for n, _ in spans}


def _archived(of: Sources, start: Positions, stop: Positions, *, prints: bool = False) -> DataFrame:
    """Of the archive, nothing but these partitions: it may have got others meanwhile."""
    return logs(of.spark, of.archive, start, stop, prints=prints).where(F.col("partition").isin(list(start)))


def _differing(of: Sources, spans: _Spans) -> dict[tuple[int, str], tuple[int, int]]:
    """The first and the last block of each log in which the archive and Kafka differ, by times, sizes and markers."""
    start, stop = _at(spans, lambda span: span.start), _at(spans, lambda span: span.stop)
    mine = _archived(of, start, stop).withColumn("more", F.lit(1))
    theirs = logs(of.spark, of.kafka, start, stop, damaged=of.damaged, may_vanish=True).withColumn("more", F.lit(-1))
    one = F.xxhash64("offset", "timestamp_ms", "value_size", "value")
    block = F.floor(F.col("offset") / BLOCK).alias("block")
    blocks = (
        mine.unionByName(theirs)
        .groupBy("partition", "log", block)
        .agg(F.sum("more").alias("more"), F.bit_xor(one).alias("sum"))
        .where("more <> 0 OR sum <> 0")
    )
    rows = blocks.groupBy("partition", "log").agg(F.min("block"), F.max("block")).collect()
    return {(row[0], row[1]): (row[2], row[3]) for row in rows}


def _different(of: Sources, spans: _Spans) -> DataFrame:
    """Records that the archive has, and Kafka does not, or not the same (not `gone`)."""
    start, stop = _at(spans, lambda span: span.start), _at(spans, lambda span: span.stop)
    mine = _archived(of, start, stop, prints=True)
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
        what = "in the archive, but not in Kafka" if row.gone else "Kafka has another record here than the archive"
        if row.log == QUEUE:
            kind = "record gone" if row.gone else "rewritten"
            faults.append(Found(row.partition, row.offset, None, kind, what))
            count += row.of if row.n == 1 else 0
        else:
            kind = "markers gone" if row.gone else "rewritten"
            of_them = f"{plural(row.of, 'record')} of the markers log, from {row.offset} on"
            faults.append(Found(row.partition, -1, None, kind, f"{of_them}: {what}"))
            count += 1
    return faults, count
