"""The numbers of a report, counted by Spark in the table `lifecycle`.

Levels come from counts: the backlog at the end of a bucket is the number of messages sent until then, less those that
ended. What happened before the span is in bucket -1, so that levels begin at the right height.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from marq.core.policies import DEAD_SUFFIX, takes_dead_letters
from pipeline.report import counting
from pipeline.report.counting import COUNTS, ENDS, UNKNOWN, Level
from pipeline.report.examples import RETRIED, SLOWEST, Examples, messages, receivers
from pipeline.report.span import Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

#: Queues with a row of their own in the table of queues; the others share one row.
QUEUES_MAX = 500
#: Most points of a small line in that table.
SPARK_POINTS = 40

NO_QUEUE = ""
"""Name for no queue: poison records have none, and no queue's name is empty."""

_EVERY = None
"""Key for all queues together, where queues are keys."""


@dataclass
class Series:
    """Counts of each bucket, and levels at its end."""

    counts: dict[str, list[int]]
    backlog: list[int]
    in_flight: list[int]
    oldest_ms: list[int]
    waiting: list[Level] = field(default_factory=list)
    working: list[Level] = field(default_factory=list)


@dataclass
class Totals:
    """Totals of one queue, or of all."""

    name: str
    counts: dict[str, int]
    backlog: int
    in_flight: int
    oldest_ms: int
    waiting: Level = UNKNOWN
    working: Level = UNKNOWN
    sent_line: list[int] = field(default_factory=list)
    backlog_line: list[int] = field(default_factory=list)
    takes_dead_letters: bool = False

    @property
    def ended(self) -> int:
        return sum(self.counts[name] for name in ENDS)

    @property
    def redelivered_part(self) -> float:
        """Share of deliveries that were not the first of their message."""
        return self.counts["redelivered"] / self.counts["delivered"] if self.counts["delivered"] else 0.0

    @property
    def dead_part(self) -> float:
        """Share of ended messages that became dead letters."""
        return self.counts["dead"] / self.ended if self.ended else 0.0


@dataclass
class Section:
    """The section about one queue."""

    totals: Totals
    series: Series
    receivers: list[dict[str, Any]]
    receivers_count: int
    slowest: list[dict[str, Any]]
    retried: list[dict[str, Any]]


@dataclass
class Measures:
    """Everything that a report shows."""

    span: Span
    totals: Totals
    series: Series
    queues: list[Totals]
    queues_count: int
    rest: Totals | None
    sections: list[Section]
    slowest: list[dict[str, Any]]
    retried: list[dict[str, Any]]


def measure(
    histories: DataFrame, span: Span, top: int, *, dead_letter_queues: Collection[str] = (), few: bool = False
) -> Measures:
    """Count everything.

    Args:
        histories: rows of the table `lifecycle`, of the wanted queues.
        top: number of queues with a section.
        dead_letter_queues: those that the settings of queues name.
        few: all rows have room in memory, and one task counts them sooner than several.
    """
    from pyspark import StorageLevel

    histories = histories.where(F.col("sent_ms") < span.stop_ms).withColumn(
        "queue", F.coalesce("queue", F.lit(NO_QUEUE))
    )
    if few:
        histories = histories.coalesce(1).persist(StorageLevel.MEMORY_AND_DISK)
    # One row per queue and bucket: far fewer than messages, and read several times.
    counts = counting.counts(histories, span).persist(StorageLevel.MEMORY_AND_DISK)
    oldest = counting.oldest(histories, span).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        ranked = counting.ranked(counts)
        names = [row["queue"] for row in ranked.take(QUEUES_MAX)]
        queues_count = ranked.count() if len(names) == QUEUES_MAX else len(names)
        shown = names[:top]
        levels = _Levels(span, counting.levels(histories, span, names, shown))
        lines = _Lines(span, counts, oldest, names, shown, dead_letter_queues)
        whole = _whole(lines, levels, dead_letter_queues)
        overall = lines.overall(levels)
        totals = _total("", overall)
        totals.waiting, totals.working = levels.whole(_EVERY)
        examples = messages(histories, span, shown)
        return Measures(
            span,
            totals,
            overall,
            [whole[name] for name in names],
            queues_count,
            _rest(totals, [whole[name] for name in names], queues_count),
            _sections(examples, receivers(histories, span, shown) if shown else {}, shown, whole, lines.each(levels)),
            *(examples.get((order, None), []) for order in (SLOWEST, RETRIED)),
        )
    finally:
        counts.unpersist()
        oldest.unpersist()
        if few:
            histories.unpersist()


# ------------------------------------------------------------------ over time


class _Levels:
    """Percentiles of the time to the first delivery (`waiting`) and of the time in work (`working`)."""

    def __init__(self, span: Span, levels: DataFrame) -> None:
        self._span = span
        self._found = {(row["queue"], row["what"], row["bucket"]): Level(*row["levels"]) for row in levels.collect()}

    def whole(self, queue: str | None) -> tuple[Level, Level]:
        """Over the whole span."""
        return (
            self._found.get((queue, "waiting", None), UNKNOWN),
            self._found.get((queue, "working", None), UNKNOWN),
        )

    def lines(self, queue: str | None, what: str) -> list[Level]:
        """Of each bucket."""
        return [self._found.get((queue, what, bucket), UNKNOWN) for bucket in range(self._span.count)]


class _Lines:
    """Counts and ages by bucket: of all queues together, of the queues shown, and of each one for its small line."""

    def __init__(
        self,
        span: Span,
        counts: DataFrame,
        oldest: DataFrame,
        names: Sequence[str],
        shown: Sequence[str],
        dead_letter_queues: Collection[str],
    ) -> None:
        self.span = span
        #: the span in wider buckets, those of the small lines
        self.wide = Span(span.start_ms, span.stop_ms, span.width_ms * max(1, -(-span.count // SPARK_POINTS)))
        every = F.lit(None).cast("string").alias("queue")
        named, few = F.col("queue").isin(list(names)), F.col("queue").isin(list(shown))
        coarse = F.floor((F.col("bucket") * span.width_ms + span.origin_ms - self.wide.origin_ms) / self.wide.width_ms)
        bucket = F.when(F.col("bucket") < 0, -1).otherwise(coarse).cast("int")
        sums = [F.sum(name).alias(name) for name in COUNTS]
        # `takes_dead_letters` in SQL; the messages that became dead letters count in their queues
        wanted = ~(F.col("queue").endswith(DEAD_SUFFIX) | F.col("queue").isin(list(dead_letter_queues)))
        self._counts = _in_parts(
            counts.where(wanted).groupBy(every, "bucket").agg(*sums),
            counts.where(few),
            counts.where(named).withColumn("bucket", bucket).groupBy("queue", "bucket").agg(*sums),
        )
        last = oldest.where((F.col("bucket") == span.count - 1) & named)
        self._ages = _in_parts(
            oldest.where(wanted).groupBy(every, "bucket").agg(F.min("oldest_ms").alias("oldest_ms")),
            oldest.where(few),
            last.withColumn("bucket", F.lit(self.wide.count - 1)),
        )

    def overall(self, levels: _Levels) -> Series:
        """Of all queues together."""
        found = _series(self.span, self._counts[0], self._ages[0], levels)
        nothing = {name: [0] * (self.span.count + 1) for name in COUNTS}
        return found.get(_EVERY) or _one_series(self.span, nothing, [0] * self.span.count)

    def each(self, levels: _Levels) -> dict[str | None, Series]:
        """Of each of the queues shown."""
        return _series(self.span, self._counts[1], self._ages[1], levels)

    def small(self) -> dict[str | None, Series]:
        """Of each queue that is named, in wide buckets; the age only in the last."""
        return _series(self.wide, self._counts[2], self._ages[2])


def _in_parts(*frames: DataFrame) -> list[list[Row]]:
    """The rows of each of these frames, which have the same columns, with one query."""
    parts = [frame.withColumn("part", F.lit(number)) for number, frame in enumerate(frames)]
    found: list[list[Row]] = [[] for _ in frames]
    for row in reduce(lambda a, b: a.unionByName(b), parts).collect():
        found[row["part"]].append(row)
    return found


def _series(
    span: Span, counts: Iterable[Row], oldest: Iterable[Row], levels: _Levels | None = None
) -> dict[str | None, Series]:
    """The series of each queue in `counts`."""
    rows: dict[str | None, dict[str, list[int]]] = {}
    for row in counts:
        columns = rows.setdefault(row["queue"], {name: [0] * (span.count + 1) for name in COUNTS})
        for name in COUNTS:
            columns[name][row["bucket"] + 1] += int(row[name])
    ages: dict[str | None, list[int]] = {}
    for row in oldest:
        line = ages.setdefault(row["queue"], [0] * span.count)
        line[row["bucket"]] = span.end_ms(row["bucket"]) - row["oldest_ms"]
    found = {name: _one_series(span, columns, ages.get(name, [0] * span.count)) for name, columns in rows.items()}
    if levels is not None:
        for queue, series in found.items():
            series.waiting, series.working = (levels.lines(queue, what) for what in ("waiting", "working"))
    return found


def _one_series(span: Span, columns: dict[str, list[int]], oldest_ms: list[int]) -> Series:
    ended = [sum(values) for values in zip(*(columns[name] for name in ENDS), strict=True)]
    backlog = accumulate(sent - end for sent, end in zip(columns["sent"], ended, strict=True))
    leases = accumulate(a - b for a, b in zip(columns["leased"], columns["unleased"], strict=True))
    nothing = [UNKNOWN] * span.count
    counts = {name: columns[name][1:] for name in COUNTS}
    return Series(counts, list(backlog)[1:], list(leases)[1:], oldest_ms, nothing, nothing)


# ------------------------------------------------------------------ in total


def _total(name: str, series: Series) -> Totals:
    return Totals(
        name,
        {count: sum(series.counts[count]) for count in COUNTS},
        series.backlog[-1],
        series.in_flight[-1],
        series.oldest_ms[-1],
    )


def _whole(lines: _Lines, levels: _Levels, dead_letter_queues: Collection[str]) -> dict[str, Totals]:
    """Totals of these queues, with their small lines."""
    whole = {}
    for name, one in lines.small().items():
        assert name is not None
        whole[name] = _total(name, one)
        whole[name].sent_line, whole[name].backlog_line = one.counts["sent"], one.backlog
        whole[name].waiting, whole[name].working = levels.whole(name)
        whole[name].takes_dead_letters = takes_dead_letters(name, dead_letter_queues)
    return whole


def _rest(totals: Totals, shown: Iterable[Totals], count: int) -> Totals | None:
    """The totals of all queues without a row of their own."""
    shown = list(shown)
    if count <= len(shown):
        return None
    shown = [one for one in shown if not one.takes_dead_letters]
    return Totals(
        "",
        {name: totals.counts[name] - sum(one.counts[name] for one in shown) for name in COUNTS},
        totals.backlog - sum(one.backlog for one in shown),
        totals.in_flight - sum(one.in_flight for one in shown),
        0,
    )


def _sections(
    examples: Examples,
    who: dict[str, list[dict[str, Any]]],
    shown: Sequence[str],
    whole: dict[str, Totals],
    series: dict[str | None, Series],
) -> list[Section]:
    return [
        Section(
            whole[name],
            series[name],
            who.get(name, []),
            who[name][0]["receivers"] if name in who else 0,
            examples.get((SLOWEST, name), []),
            examples.get((RETRIED, name), []),
        )
        for name in shown
    ]
