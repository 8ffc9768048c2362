"""Counts and times per bucket of a span, as DataFrames with far fewer rows than there are messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as F

from pipeline.report.span import Span

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Ranks of percentiles, and Spark's accuracy: a rank is off by less than 1/10,000 (exact for fewer values than that).
RANKS = (0.5, 0.95, 0.99)
ACCURACY = 10_000

#: Events that are counted per bucket.
COUNTS = (
    *("sent", "bytes", "delivered", "redelivered", "acked", "dead", "expired", "purged", "other_ends"),
    *("released", "lapsed", "leased", "unleased"),
)
#: Outcomes of messages; poison and moved are `other_ends`.
ENDS = ("acked", "dead", "expired", "purged", "other_ends")


class Level(NamedTuple):
    """Percentiles 50, 95, 99 of a time, in milliseconds; None if there is no value."""

    p50: float | None
    p95: float | None
    p99: float | None


#: Nothing was measured.
UNKNOWN = Level(None, None, None)


def extent(histories: DataFrame, wanted: Column) -> tuple[int | None, int | None]:
    """When the first of the wanted messages was sent, and when the last event of any message was."""
    latest = F.greatest("sent_ms", F.col("ended_ms"), F.array_max(F.col("deliveries.start_ms")))
    row = histories.agg(F.min(F.when(wanted, F.col("sent_ms"))), F.max(latest)).first()
    assert row is not None
    return row[0], row[1]


def _bucket(span: Span, at: str | Column) -> Column:
    """The bucket of a time: -1 before the span; `span.count` after it and for null."""
    at = F.col(at) if isinstance(at, str) else at
    inside = F.floor((at - span.origin_ms) / span.width_ms)
    return (
        F.when(at < span.start_ms, -1).when(at < span.stop_ms, inside).otherwise(span.count).cast("int").alias("bucket")
    )


def counts(histories: DataFrame, span: Span) -> DataFrame:
    """(queue, bucket) with a column for each of `COUNTS`."""
    outcome = F.col("outcome")
    once = [
        _event(F.col("sent_ms"), sent=F.lit(True), bytes=F.greatest("size", F.lit(0))),
        _event(
            F.col("ended_ms"),
            **{name: outcome == name for name in ENDS[:-1]},
            other_ends=~outcome.isin(list(ENDS[:-1])),
        ),
    ]
    starts = F.transform(
        "deliveries",
        lambda d: _event(
            d["start_ms"], delivered=_given(d), redelivered=_given(d) & (d["attempt"] > 1), leased=F.lit(True)
        ),
    )
    finishes = F.transform(
        "deliveries",
        lambda d: _event(
            _finish_ms(d),
            released=d["end"] == "released",
            lapsed=d["end"] == "expired_lease",
            unleased=F.lit(True),
        ),
    )
    events = histories.select("queue", F.inline(F.concat(F.array(*once), starts, finishes))).where("at_ms is not null")
    within = events.withColumn("bucket", _bucket(span, "at_ms")).where(F.col("bucket") < span.count)
    return within.groupBy("queue", "bucket").agg(*[F.sum(name).alias(name) for name in COUNTS])


def _event(at_ms: Column, **added: Column) -> Column:
    """An event: its time, and what it adds to the counts."""
    counts = [F.coalesce(added[c].cast("long"), F.lit(0)) if c in added else F.lit(0) for c in COUNTS]
    named = [count.cast("long").alias(name) for name, count in zip(COUNTS, counts, strict=True)]
    return F.struct(at_ms.alias("at_ms"), *named)


def _given(delivery: Column) -> Column:
    """Whether a delivery was handed out."""
    return F.coalesce(delivery["end"], F.lit("")) != "uncounted"


def _finish_ms(delivery: Column) -> Column:
    """When a delivery ended; null while it goes on."""
    return F.coalesce(delivery["end_ms"], F.when(delivery["end"] == "expired_lease", delivery["deadline_ms"]))


def deliveries(histories: DataFrame) -> DataFrame:
    """One row per delivery that was handed out: its receiver, when it began, how and when it ended."""
    each = histories.select("queue", F.explode("deliveries").alias("d")).where(_given(F.col("d")))
    return each.select("queue", "d.receiver", "d.start_ms", "d.end", _finish_ms(F.col("d")).alias("finish_ms"))


def oldest(histories: DataFrame, span: Span) -> DataFrame:
    """(queue, bucket, oldest_ms): when the oldest message that was unfinished at the end of the bucket was sent."""
    begin, end = _bucket(span, "sent_ms").alias("begin"), _bucket(span, "ended_ms").alias("end")
    held = histories.select("queue", "sent_ms", begin, end).where("begin < end and end > 0")
    first = held.groupBy("queue", "begin", "end").agg(F.min("sent_ms").alias("oldest_ms"))
    # going on from the oldest, each message only adds the buckets after the last one that an older one covers
    older = Window.partitionBy("queue").orderBy("oldest_ms", F.desc("end")).rowsBetween(Window.unboundedPreceding, -1)
    start = F.greatest("begin", F.coalesce(F.max("end").over(older), F.lit(0)), F.lit(0))
    added = first.withColumn("start", start).where("start < end")
    return added.select("queue", F.explode(F.sequence("start", F.col("end") - 1)).alias("bucket"), "oldest_ms")


def ranked(counts: DataFrame) -> DataFrame:
    """The queues with events or unfinished messages, the busiest first."""
    busy = F.sum(F.when(F.col("bucket") >= 0, F.col("sent") + F.col("delivered")).otherwise(0))
    held = F.sum(F.col("sent") - sum((F.col(name) for name in ENDS[1:]), F.col(ENDS[0])))
    return (
        counts.groupBy("queue")
        .agg(busy.alias("busy"), held.alias("held"))
        .where("busy > 0 or held > 0")
        .orderBy(F.desc("busy"), F.desc("held"), "queue")
    )


def timed(histories: DataFrame, span: Span) -> DataFrame:
    """(queue, what, bucket, ms): the waiting time of each first delivery, and the working time of each end."""
    first = F.get("deliveries", F.lit(0))["start_ms"]
    waited = F.struct(F.lit("waiting").alias("what"), first.alias("at_ms"), F.col("waiting_ms").alias("ms"))
    worked = F.struct(
        F.lit("working").alias("what"),
        F.when(F.size("deliveries") > 0, F.col("ended_ms")).alias("at_ms"),
        F.col("working_ms").alias("ms"),
    )
    delivered = histories.where(F.size("deliveries") > 0)
    each = delivered.select("queue", F.inline(F.array(waited, worked))).where("at_ms is not null and ms is not null")
    bucket = _bucket(span, "at_ms")
    return each.select("queue", "what", bucket, "ms").where((F.col("bucket") >= 0) & (F.col("bucket") < span.count))


def levels(histories: DataFrame, span: Span, named: Sequence[str], shown: Sequence[str]) -> DataFrame:
    """Percentiles (`levels`) of both times (`what`), in one pass.

    For all queues together: per `bucket`, and over the whole span. For each of the queues `named`: over the whole span.
    For each of those `shown`: per bucket. A row about all queues has no `queue`, one about the whole span no `bucket`.
    """
    times = timed(histories, span).select(
        "what",
        "bucket",
        "ms",
        F.when(F.col("queue").isin(list(named)), F.col("queue")).alias("one"),
        F.when(F.col("queue").isin(list(shown)), F.col("queue")).alias("some"),
    )
    sets = [["what"], ["what", "bucket"], ["what", "one"], ["what", "bucket", "some"]]
    grouped = times.groupingSets(sets, "what", "bucket", "one", "some").agg(
        F.percentile_approx("ms", list(RANKS), ACCURACY).alias("levels"),
        F.grouping("one").alias("any_one"),
        F.grouping("some").alias("any_some"),
    )
    # leave out the groups of queues that were not asked for: they have no name
    wanted = grouped.where("(any_one = 1 or one is not null) and (any_some = 1 or some is not null)")
    return wanted.select("what", "bucket", F.coalesce("one", "some").alias("queue"), "levels")
