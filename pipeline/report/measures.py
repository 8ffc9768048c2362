"""What a report shows, counted by Spark in the table `lifecycle`.

Levels come from counts: the backlog at the end of a bucket is what was sent until then less what had ended. What
happened before the span is bucket -1, so that levels begin where they stood.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as F

from pipeline.report.span import Span

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Queues with a row of their own in the table; the others are one row.
QUEUES_MAX = 500
#: Points of a small line in that table.
SPARK_POINTS = 40
#: Rows of the tables of messages and of receivers.
MESSAGES_SHOWN = 10
RECEIVERS_SHOWN = 10

#: Ranks of percentiles, and how exact Spark takes them: the rank is off by less than 1/10,000 (exact below as many).
RANKS = (0.5, 0.95, 0.99)
ACCURACY = 10_000

#: Counts of a bucket: what happened in it.
COUNTS = (
    *("sent", "bytes", "delivered", "redelivered", "acked", "dead", "expired", "purged", "other_ends"),
    *("released", "lapsed", "leased", "unleased"),
)
#: How a message ends; poison and moved are `other_ends`.
ENDS = ("acked", "dead", "expired", "purged", "other_ends")

NO_QUEUE = ""
"""What stands for no queue: poison records have none, and no queue is called so."""


class Level(NamedTuple):
    """Of a time: its percentiles 50, 95, 99; ms, None where there is nothing."""

    p50: float | None
    p95: float | None
    p99: float | None


#: Nothing was measured.
NO_LEVEL = Level(None, None, None)


UNKNOWN = Level(None, None, None)


@dataclass
class Series:
    """What happened in each bucket, and how things stood at its end."""

    counts: dict[str, list[int]]
    backlog: list[int]
    in_flight: list[int]
    oldest_ms: list[int]
    waiting: list[Level] = field(default_factory=list)
    working: list[Level] = field(default_factory=list)


@dataclass
class Totals:
    """Of one queue, or of all."""

    name: str
    counts: dict[str, int]
    backlog: int
    in_flight: int
    oldest_ms: int
    waiting: Level = UNKNOWN
    working: Level = UNKNOWN
    sent_line: list[int] = field(default_factory=list)
    backlog_line: list[int] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return sum(self.counts[name] for name in ENDS)

    @property
    def redelivered_part(self) -> float:
        """Of all deliveries, those that were not the first of their message."""
        return self.counts["redelivered"] / self.counts["delivered"] if self.counts["delivered"] else 0.0

    @property
    def dead_part(self) -> float:
        """Of all messages that ended, those that became dead letters."""
        return self.counts["dead"] / self.ended if self.ended else 0.0


@dataclass
class Section:
    """All about one queue."""

    totals: Totals
    series: Series
    receivers: list[dict[str, Any]]
    receivers_count: int
    slowest: list[dict[str, Any]]
    retried: list[dict[str, Any]]


@dataclass
class Measures:
    """All that a report shows."""

    span: Span
    totals: Totals
    series: Series
    queues: list[Totals]
    queues_count: int
    rest: Totals | None
    sections: list[Section]
    slowest: list[dict[str, Any]]
    retried: list[dict[str, Any]]


def extent(lives: DataFrame) -> tuple[int, int] | None:
    """Time of the first and of the last thing that happened; None if nothing did."""
    latest = F.greatest("sent_ms", F.col("ended_ms"), F.array_max(F.col("deliveries.start_ms")))
    row = lives.agg(F.min("sent_ms"), F.max(latest)).first()
    return None if row is None or row[0] is None else (row[0], row[1])


def measure(lives: DataFrame, span: Span, top: int) -> Measures:
    """Count everything.

    Parameters:
        lives: rows of the table `lifecycle`, of the queues that are wanted.
        top: how many queues get a section.
    """
    from pyspark import StorageLevel

    lives = lives.where(F.col("sent_ms") < span.stop_ms).withColumn("queue", F.coalesce("queue", F.lit(NO_QUEUE)))
    # One row a queue and bucket: far fewer than messages, and looked at several times.
    counts = _counts(lives, span).persist(StorageLevel.MEMORY_AND_DISK)
    oldest = _oldest(lives, span).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        ranked = _ranked(counts)
        names = [row["queue"] for row in ranked.take(QUEUES_MAX)]
        queues_count = ranked.count()
        shown = names[:top]
        all_counts = counts.groupBy("bucket").agg(*[F.sum(c).alias(c) for c in COUNTS])
        all_oldest = oldest.groupBy("bucket").agg(F.min("oldest_ms").alias("oldest_ms"))
        every = F.lit("all").alias("queue")
        series = _series(span, all_counts.select(every, "*"), all_oldest.select(every, "*"), _levels(lives, span, None))
        whole = _whole(span, counts, oldest, names)
        _add_percentiles(whole, lives, span)
        few = F.col("queue").isin(shown)
        section_series = _series(span, counts.where(few), oldest.where(few), _levels(lives, span, shown))
        overall = series.get("all") or _empty(span)
        totals = _total("", overall)
        everything = lives.withColumn("queue", F.lit("all"))
        _add_percentiles({"all": totals}, everything, span)
        return Measures(
            span,
            totals,
            overall,
            [whole[name] for name in names],
            queues_count,
            _rest(totals, [whole[name] for name in names], queues_count),
            _sections(lives, span, shown, whole, section_series),
            _messages(lives, span, ["total_ms"], None).get("all", []),
            _messages(lives, span, ["receives", "total_ms"], None).get("all", []),
        )
    finally:
        counts.unpersist()
        oldest.unpersist()


# ------------------------------------------------------------------ what happened


def _bucket(span: Span, at: str | Column) -> Column:
    """The bucket of a time: -1 before the span, `span.count` after it and where there is none."""
    at = F.col(at) if isinstance(at, str) else at
    inside = F.floor((at - span.origin_ms) / span.width_ms)
    return (
        F.when(at < span.start_ms, -1).when(at < span.stop_ms, inside).otherwise(span.count).cast("int").alias("bucket")
    )


def _number(condition: Column) -> Column:
    return F.count(F.when(condition, 1))


def _counts(lives: DataFrame, span: Span) -> DataFrame:
    """(queue, bucket) with a column for each of `COUNTS`."""
    sent = lives.groupBy("queue", _bucket(span, "sent_ms")).agg(
        F.count("*").alias("sent"), F.sum(F.greatest("size", F.lit(0))).alias("bytes")
    )
    outcome = F.col("outcome")
    ends = (
        lives.where(F.col("ended_ms").isNotNull())
        .groupBy("queue", _bucket(span, "ended_ms"))
        .agg(
            *[_number(outcome == name).alias(name) for name in ENDS[:-1]],
            _number(~outcome.isin(list(ENDS[:-1]))).alias("other_ends"),
        )
    )
    each = _deliveries(lives)
    handed = F.col("given")
    starts = each.groupBy("queue", _bucket(span, "start_ms")).agg(
        _number(handed).alias("delivered"),
        _number(handed & F.col("again")).alias("redelivered"),
        F.count("*").alias("leased"),
    )
    finishes = (
        each.where(F.col("finish_ms").isNotNull())
        .groupBy("queue", _bucket(span, "finish_ms"))
        .agg(
            _number(F.col("end") == "released").alias("released"),
            _number(F.col("end") == "expired_lease").alias("lapsed"),
            F.count("*").alias("unleased"),
        )
    )
    parts = [
        part.select("queue", "bucket", *[(F.col(c) if c in part.columns else F.lit(0)).alias(c) for c in COUNTS])
        for part in (sent, ends, starts, finishes)
    ]
    union = parts[0]
    for part in parts[1:]:
        union = union.unionByName(part)
    union = union.where(F.col("bucket") < span.count)
    return union.groupBy("queue", "bucket").agg(*[F.sum(c).alias(c) for c in COUNTS])


def _deliveries(lives: DataFrame) -> DataFrame:
    """One row a delivery: was it handed out, had its message been delivered before, when was it over."""
    each = lives.select("queue", F.posexplode("deliveries").alias("place", "d")).select("queue", "d.*")
    lapsed = F.when(F.col("end") == "expired_lease", F.col("deadline_ms"))
    return each.select(
        "queue",
        "receiver",
        "start_ms",
        "end",
        (F.coalesce("end", F.lit("")) != "uncounted").alias("given"),
        (F.col("attempt") > 1).alias("again"),
        F.coalesce("end_ms", lapsed).alias("finish_ms"),
    )


def _oldest(lives: DataFrame, span: Span) -> DataFrame:
    """(queue, bucket, oldest_ms): when the oldest message was sent that was unfinished at the end of the bucket."""
    pairs = (
        lives.select("queue", "sent_ms", _bucket(span, "sent_ms").alias("a"), _bucket(span, "ended_ms").alias("b"))
        .where("a < b")
        .groupBy("queue", "a", "b")
        .agg(F.min("sent_ms").alias("oldest_ms"))
    )
    held = F.explode(F.sequence(F.greatest("a", F.lit(0)), F.col("b") - 1)).alias("bucket")
    return (
        pairs.where(F.col("b") > 0)
        .select("queue", held, "oldest_ms")
        .groupBy("queue", "bucket")
        .agg(F.min("oldest_ms").alias("oldest_ms"))
    )


def _ranked(counts: DataFrame) -> DataFrame:
    """The queues in which something happened or is held, the busiest first."""
    busy = F.sum(F.when(F.col("bucket") >= 0, F.col("sent") + F.col("delivered")).otherwise(0))
    held = F.sum(F.col("sent") - sum((F.col(name) for name in ENDS[1:]), F.col(ENDS[0])))
    return (
        counts.groupBy("queue")
        .agg(busy.alias("busy"), held.alias("held"))
        .where("busy > 0 or held > 0")
        .orderBy(F.desc("busy"), F.desc("held"), "queue")
    )


# ------------------------------------------------------------------ over time


def _series(
    span: Span, counts: DataFrame, oldest: DataFrame, levels: dict[str, dict[str, list[Level]]]
) -> dict[str, Series]:
    """Series of each queue in `counts`."""
    rows: dict[str, dict[str, list[int]]] = {}
    for row in counts.collect():
        columns = rows.setdefault(row["queue"], {name: [0] * (span.count + 1) for name in COUNTS})
        for name in COUNTS:
            columns[name][row["bucket"] + 1] += int(row[name])
    ages: dict[str, list[int]] = {}
    for row in oldest.collect():
        line = ages.setdefault(row["queue"], [0] * span.count)
        line[row["bucket"]] = span.end_ms(row["bucket"]) - row["oldest_ms"]
    nothing = {"waiting": [UNKNOWN] * span.count, "working": [UNKNOWN] * span.count}
    return {
        name: _one_series(span, columns, ages.get(name, [0] * span.count), levels.get(name, nothing))
        for name, columns in rows.items()
    }


def _one_series(
    span: Span, columns: dict[str, list[int]], oldest_ms: list[int], levels: dict[str, list[Level]]
) -> Series:
    ended = [sum(values) for values in zip(*(columns[name] for name in ENDS), strict=True)]
    backlog = accumulate(sent - end for sent, end in zip(columns["sent"], ended, strict=True))
    leases = accumulate(a - b for a, b in zip(columns["leased"], columns["unleased"], strict=True))
    return Series(
        {name: columns[name][1:] for name in COUNTS},
        list(backlog)[1:],
        list(leases)[1:],
        oldest_ms,
        levels["waiting"],
        levels["working"],
    )


def _empty(span: Span) -> Series:
    nothing = [UNKNOWN] * span.count
    return _one_series(
        span,
        {name: [0] * (span.count + 1) for name in COUNTS},
        [0] * span.count,
        {"waiting": nothing, "working": nothing},
    )


def _timed(lives: DataFrame, span: Span) -> DataFrame:
    """(queue, what, bucket, ms): each first delivery with the time before it, each end with the time in work."""
    first = F.element_at(F.col("deliveries"), 1)["start_ms"]
    waited = F.struct(F.lit("waiting").alias("what"), first.alias("at_ms"), F.col("waiting_ms").alias("ms"))
    worked = F.struct(
        F.lit("working").alias("what"),
        F.when(F.size("deliveries") > 0, F.col("ended_ms")).alias("at_ms"),
        F.col("working_ms").alias("ms"),
    )
    delivered = lives.where(F.size("deliveries") > 0)
    each = delivered.select("queue", F.inline(F.array(waited, worked))).where("at_ms is not null and ms is not null")
    bucket = _bucket(span, "at_ms")
    return each.select("queue", "what", bucket, "ms").where((F.col("bucket") >= 0) & (F.col("bucket") < span.count))


def _percentiles() -> Column:
    return F.percentile_approx("ms", list(RANKS), ACCURACY).alias("levels")


def _levels(lives: DataFrame, span: Span, queues: Sequence[str] | None) -> dict[str, dict[str, list[Level]]]:
    """Percentiles in each bucket: of these queues, or of all together (None)."""
    timed = _timed(lives, span)
    timed = timed.withColumn("queue", F.lit("all")) if queues is None else timed.where(F.col("queue").isin(queues))
    found: dict[str, dict[str, list[Level]]] = {}
    for row in timed.groupBy("queue", "what", "bucket").agg(_percentiles()).collect():
        lines = found.setdefault(row["queue"], {what: [UNKNOWN] * span.count for what in ("waiting", "working")})
        lines[row["what"]][row["bucket"]] = Level(*row["levels"])
    return found


# ------------------------------------------------------------------ in total


def _total(name: str, series: Series) -> Totals:
    return Totals(
        name,
        {count: sum(series.counts[count]) for count in COUNTS},
        series.backlog[-1],
        series.in_flight[-1],
        series.oldest_ms[-1],
    )


def _whole(span: Span, counts: DataFrame, oldest: DataFrame, names: Sequence[str]) -> dict[str, Totals]:
    """Totals of these queues, with their small lines."""
    wide = Span(span.start_ms, span.stop_ms, span.width_ms * max(1, -(-span.count // SPARK_POINTS)))
    chosen = counts.where(F.col("queue").isin(list(names)))
    coarse = F.when(F.col("bucket") < 0, -1).otherwise(
        F.floor((F.col("bucket") * span.width_ms + span.origin_ms - wide.origin_ms) / wide.width_ms)
    )
    rows = chosen.withColumn("bucket", coarse.cast("int")).groupBy("queue", "bucket")
    last = oldest.where((F.col("bucket") == span.count - 1) & F.col("queue").isin(list(names)))
    series = _series(
        wide,
        rows.agg(*[F.sum(c).alias(c) for c in COUNTS]),
        last.withColumn("bucket", F.lit(wide.count - 1)),
        {},
    )
    whole = {}
    for name, one in series.items():
        whole[name] = _total(name, one)
        whole[name].sent_line, whole[name].backlog_line = one.counts["sent"], one.backlog
    return whole


def _add_percentiles(whole: dict[str, Totals], lives: DataFrame, span: Span) -> None:
    timed = _timed(lives, span).where(F.col("queue").isin(list(whole)))
    for row in timed.groupBy("queue", "what").agg(_percentiles()).collect():
        setattr(whole[row["queue"]], row["what"], Level(*row["levels"]))


def _rest(totals: Totals, shown: Iterable[Totals], count: int) -> Totals | None:
    """All queues without a row of their own, as one."""
    shown = list(shown)
    if count <= len(shown):
        return None
    return Totals(
        "",
        {name: totals.counts[name] - sum(one.counts[name] for one in shown) for name in COUNTS},
        totals.backlog - sum(one.backlog for one in shown),
        totals.in_flight - sum(one.in_flight for one in shown),
        0,
    )


# ------------------------------------------------------------------ messages and receivers


def _sections(
    lives: DataFrame, span: Span, shown: Sequence[str], whole: dict[str, Totals], series: dict[str, Series]
) -> list[Section]:
    if not shown:
        return []
    slowest = _messages(lives, span, ["total_ms"], shown)
    retried = _messages(lives, span, ["receives", "total_ms"], shown)
    receivers = _receivers(lives, span, shown)
    return [
        Section(
            whole[name],
            series[name],
            receivers.get(name, []),
            receivers[name][0]["receivers"] if name in receivers else 0,
            slowest.get(name, []),
            retried.get(name, []),
        )
        for name in shown
    ]


def _messages(
    lives: DataFrame, span: Span, order: Sequence[str], queues: Sequence[str] | None
) -> dict[str, list[dict[str, Any]]]:
    """The first messages in this order (most first) of these queues, or of all together (None, under `all`)."""
    end = F.when(F.col("ended_ms") < span.stop_ms, F.col("ended_ms")).otherwise(span.stop_ms)
    alive = lives.where(F.coalesce(F.col("ended_ms") >= span.start_ms, F.lit(True)))
    rows = alive.select(
        "queue",
        "partition",
        "offset",
        F.when(F.col("ended_ms") < span.stop_ms, F.col("outcome")).otherwise(F.lit(None)).alias("outcome"),
        "state",
        "receives",
        "sent_ms",
        "waiting_ms",
        "working_ms",
        (end - F.col("sent_ms")).alias("total_ms"),
    )
    if order[0] == "receives":
        rows = rows.where("receives > 1")
    by = [*[F.desc(name) for name in order], F.asc("partition"), F.asc("offset")]
    if queues is None:
        return {"all": [row.asDict() for row in rows.orderBy(*by).limit(MESSAGES_SHOWN).collect()]}
    place = F.row_number().over(Window.partitionBy("queue").orderBy(*by))
    first = rows.where(F.col("queue").isin(list(queues))).withColumn("place", place)
    found: dict[str, list[dict[str, Any]]] = {}
    for row in first.where(F.col("place") <= MESSAGES_SHOWN).orderBy("queue", "place").collect():
        found.setdefault(row["queue"], []).append(row.asDict())
    return found


def _receivers(lives: DataFrame, span: Span, queues: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Who was given most, by queue; each row also says how many `receivers` there were."""
    inside = (F.col("start_ms") >= span.start_ms) & (F.col("start_ms") < span.stop_ms)
    took = F.col("finish_ms") - F.col("start_ms")
    each = _deliveries(lives.where(F.col("queue").isin(list(queues)))).where(inside & F.col("given"))
    by_receiver = each.groupBy("queue", "receiver").agg(
        F.count("*").alias("delivered"),
        _number(F.col("end") == "acked").alias("acked"),
        _number(F.col("end") == "released").alias("released"),
        _number(F.col("end") == "expired_lease").alias("lapsed"),
        F.min("start_ms").alias("first_ms"),
        F.max("start_ms").alias("last_ms"),
        F.percentile_approx(F.when(F.col("end") == "acked", took), list(RANKS), ACCURACY).alias("levels"),
    )
    by = Window.partitionBy("queue")
    ranked = by_receiver.withColumns(
        {
            "place": F.row_number().over(by.orderBy(F.desc("delivered"), F.asc("receiver"))),
            "receivers": F.count("*").over(by),
        }
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for row in ranked.where(F.col("place") <= RECEIVERS_SHOWN).orderBy("queue", "place").collect():
        found.setdefault(row["queue"], []).append(row.asDict())
    return found
