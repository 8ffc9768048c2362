"""One batch of `metrics`: from records of both logs to rows of a table and a topic, and the state for the next batch.

A batch adds its counts to the table, then writes the changed rows to the topic, then its state. The commits of table
and state carry the query's id and the batch's number. After a crash the batch is repeated: the commit to the table is
skipped if it was made, rows in the topic replace themselves, and the state's commit completes the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from app.settings import Settings
from pipeline.checkpoints import Checkpoint
from pipeline.logs import Bounds, from_records
from pipeline.metrics_walker import BUCKETS_PER_DOUBLING, COUNTS, WALKED, MetricsWalker, Plan, ResumeState
from pipeline.resuming import states_left
from pipeline.walk import walk

if TYPE_CHECKING:
    from delta.tables import DeltaTable
    from pyspark.sql import Column, DataFrame, SparkSession

#: Version of the rows of both tables, and of the records in the topic.
VERSION = 1

#: Columns of the table of metrics.
METRICS_ROW = (
    "queue string, start_ms bigint, end_ms bigint, "
    + ", ".join(f"{name} bigint" for name in COUNTS)
    + ", waiting_sum_ms bigint, waiting_max_ms bigint, waiting_p50_ms bigint, waiting_p95_ms bigint, "
    "waiting_p99_ms bigint, waiting_histogram array<bigint>, final boolean, batch bigint, updated_ms bigint, day date"
)
STATE_ROW = "partition int, key string, value binary, query string, batch bigint"

RANKS = {"waiting_p50_ms": 0.5, "waiting_p95_ms": 0.95, "waiting_p99_ms": 0.99}

Positions = dict[int, tuple[int, int]]
"""Position in the queue topic and in the markers topic, by partition."""


@dataclass(frozen=True)
class Windows:
    """Counts batches of both logs (a function for `foreachBatch`)."""

    settings: Settings
    metrics: str  # path of the table of metrics
    state: str  # path of the table of state between batches
    checkpoint: str  # of the streaming query
    topic: str
    sink_options: Mapping[str, str]
    window_ms: int
    late_ms: int
    there: Mapping[int, Bounds]  # bounds of the logs when the query was started
    after: Callable[[SparkSession], None]  # called after each batch

    def __call__(self, batch: DataFrame, number: int) -> None:
        from pyspark import StorageLevel

        spark = batch.sparkSession
        query = str(spark.sparkContext.getLocalProperty("sql.streaming.queryId"))
        left = left_of(spark, self.state)
        if any(one.query == query and one.batch >= number for one in left.values()):
            # the state is written last, so the batch is complete
            return
        ends = self._ends(spark, number)
        resume_states = {n: one.resume_state for n, one in left.items()}
        plans = self._plans(ends, resume_states)
        if not plans:
            return
        records = from_records(batch, self.settings.queue_topic)
        walked = walk(
            spark,
            records,
            plans,
            MetricsWalker,
            WALKED,
            rows=spark.read.format("delta")
            .load(self.state)
            .where(_in(plans))
            .selectExpr("partition", "key", "value", "0L as offset"),
        ).persist(StorageLevel.DISK_ONLY)
        try:
            self._write(walked, query, number, resume_states, plans)
        finally:
            walked.unpersist()
        self.after(spark)

    def _ends(self, spark: SparkSession, number: int) -> Positions:
        """The end of the batch in both logs."""
        ends = Checkpoint(spark, self.checkpoint).ends(number)
        queue, markers = (ends.get(topic, {}) for topic in (self.settings.queue_topic, self.settings.markers_topic))
        return {n: (queue[n], markers[n]) for n in queue.keys() & markers.keys()}

    def _plans(self, ends: Positions, resume_states: Mapping[int, ResumeState]) -> dict[int, bytes]:
        """Plans for the walkers of the partitions with something new."""
        plans = {}
        for n, (queue_end, markers_end) in ends.items():
            bound, before = self.there[n], resume_states.get(n)
            if before is not None and (before.position, before.markers_position) == (queue_end, markers_end):
                continue
            if before is None and (bound.queue_start, bound.markers_start) == (queue_end, markers_end):
                continue
            plans[n] = msgspec.msgpack.encode(
                Plan(
                    bound.queue_start,
                    queue_end,
                    bound.markers_start,
                    markers_end,
                    self.settings.queue_id,
                    self.window_ms,
                )
            )
        return plans

    def _write(
        self,
        walked: DataFrame,
        query: str,
        number: int,
        resume_states: Mapping[int, ResumeState],
        plans: Mapping[int, bytes],
    ) -> None:
        from delta.tables import DeltaTable
        from pyspark.sql import functions as F

        spark = walked.sparkSession
        before_ms = watermark_ms(resume_states.values(), self.late_ms)
        state = walked.where("state_key is not null").selectExpr(
            "partition", "state_key as key", "state_value as value", f"'{query}' as query", f"{number}L as batch"
        )
        told = [
            msgspec.msgpack.decode(bytes(row.value), type=ResumeState)
            for row in state.where("key = 'walker'").collect()
        ]
        after_ms = max(before_ms, watermark_ms(told, self.late_ms))
        table = DeltaTable.forPath(spark, self.metrics)
        changed = self._changed(walked, table.toDF(), before_ms, after_ms).persist()
        try:
            first = changed.agg(F.min("day")).first()
            if first is not None and first[0] is not None:
                with _transaction(spark, query, number):
                    _add(table, changed, first[0], after_ms, number)
                self._publish(spark, first[0], number)
        finally:
            changed.unpersist()
        _write_state(state, self.state, query, number, plans)

    def _changed(self, walked: DataFrame, table: DataFrame, before_ms: int, after_ms: int) -> DataFrame:
        """A row per queue and window that changes: what to add, or nothing if it only becomes final."""
        from pyspark.sql import functions as F

        sums = ["waiting_sum_ms", *COUNTS]
        ended = table.where(
            (F.col("end_ms") > before_ms)
            & (F.col("end_ms") <= after_ms)
            & (F.col("day") >= F.to_date(F.timestamp_millis(F.lit(before_ms - self.window_ms))))
        ).select(
            "queue",
            "start_ms",
            *[F.lit(0).cast("long").alias(name) for name in [*sums, "waiting_max_ms"]],
            F.array().cast("array<bigint>").alias("waiting_histogram"),
        )
        added = walked.where("state_key is null").select(ended.columns).unionByName(ended)
        counts = added.groupBy("queue", "start_ms").agg(
            *[F.sum(name).alias(name) for name in sums],
            F.max("waiting_max_ms").alias("waiting_max_ms"),
            F.reduce(F.collect_list("waiting_histogram"), F.array().cast("array<bigint>"), _sum_arrays).alias(
                "waiting_histogram"
            ),
        )
        return counts.withColumns(
            {
                "end_ms": F.col("start_ms") + self.window_ms,
                "day": F.to_date(F.timestamp_millis("start_ms")),
            }
        )

    def _publish(self, spark: SparkSession, first: Any, number: int) -> None:
        """Write the present state of the rows that the batch changed to the topic."""
        from pyspark.sql import functions as F

        table = spark.read.format("delta").load(self.metrics)
        rows = table.where((F.col("day") >= F.lit(first)) & (F.col("batch") == number))
        names = [name for name in table.columns if name not in ("day", "batch", "waiting_histogram")]
        value = F.to_json(F.struct(F.lit(VERSION).alias("v"), *names))
        key = F.concat("queue", F.lit("@"), F.col("start_ms").cast("string"))
        records = rows.select(key.alias("key"), value.alias("value"))
        records.write.format("kafka").options(**self.sink_options).option("topic", self.topic).save()


def _write_state(state: DataFrame, path: str, query: str, number: int, plans: Mapping[int, bytes]) -> None:
    """Replace the state of these partitions."""
    writer = state.write.format("delta").mode("overwrite").option("replaceWhere", _in(plans))
    writer.option("txnAppId", query).option("txnVersion", number).save(path)


def _in(plans: Mapping[int, bytes]) -> str:
    return f"partition in ({', '.join(map(str, sorted(plans)))})"


class Left(NamedTuple):
    """The state that a batch left of a partition."""

    resume_state: ResumeState
    query: str
    batch: int


def left_of(spark: SparkSession, path: str) -> dict[int, Left]:
    """The state that the last batch left, by partition. Raises `PipelineError`."""
    table = spark.read.format("delta").load(path)
    return {
        row.partition: Left(resume_state, row.query, row.batch)
        for row, resume_state in states_left(table, ResumeState, MetricsWalker.version, path, "query", "batch")
    }


def watermark_ms(resume_states: Iterable[ResumeState], late_ms: int) -> int:
    """The watermark: windows that end up to it are final, as records `late_ms` later were read."""
    return max((one.latest_ms for one in resume_states), default=0) - late_ms


def _add(table: DeltaTable, changed: DataFrame, first: Any, watermark_ms: int, number: int) -> None:
    """Add the counts to the rows of the table."""
    from pyspark.sql import functions as F

    summed = ["waiting_sum_ms", *COUNTS]
    now_ms = F.lit(int(time.time() * 1000))
    final = F.col("s.end_ms") <= watermark_ms

    def derived(count: Column, most: Column, histogram: Column) -> dict[str, Column]:
        ranks = {name: _percentile(rank, count, most, histogram) for name, rank in RANKS.items()}
        return ranks | {
            "waiting_max_ms": most,
            "waiting_histogram": histogram,
            "final": final,
            "batch": F.lit(number).cast("long"),
            "updated_ms": now_ms,
        }

    same = f"t.day >= date'{first}' and t.day = s.day and t.start_ms = s.start_ms and t.queue = s.queue"
    both: dict[str, str | Column] = {name: F.col(f"t.{name}") + F.col(f"s.{name}") for name in summed}
    both |= derived(
        F.col("t.first_deliveries") + F.col("s.first_deliveries"),
        F.greatest("t.waiting_max_ms", "s.waiting_max_ms"),
        _sum_arrays(F.col("t.waiting_histogram"), F.col("s.waiting_histogram")),
    )
    new: dict[str, str | Column] = {
        name: F.col(f"s.{name}") for name in ["queue", "start_ms", "end_ms", "day", *summed]
    }
    new |= derived(F.col("s.first_deliveries"), F.col("s.waiting_max_ms"), F.col("s.waiting_histogram"))
    table.alias("t").merge(changed.alias("s"), same).whenMatchedUpdate(set=both).whenNotMatchedInsert(
        values=new
    ).execute()


def _sum_arrays(a: Column, b: Column) -> Column:
    from pyspark.sql import functions as F

    return F.zip_with(a, b, lambda x, y: F.coalesce(x, F.lit(0)) + F.coalesce(y, F.lit(0)))


def _percentile(rank: float, count: Column, most: Column, histogram: Column) -> Column:
    """The bound of the first bucket that reaches the rank; null if nothing was counted."""
    from pyspark.sql import functions as F

    wanted = F.ceil(count * rank)
    places = F.sequence(F.lit(0), F.size(histogram) - 1)
    reached = F.filter(
        places,
        lambda i: F.aggregate(F.slice(histogram, 1, i + 1), F.lit(0).cast("long"), lambda a, x: a + x) >= wanted,
    )
    bound = F.round(F.pow(F.lit(2.0), F.get(reached, F.lit(0)) / BUCKETS_PER_DOUBLING)).cast("long")
    at_bound = F.when(F.get(reached, F.lit(0)) == 0, F.lit(0).cast("long")).otherwise(F.least(bound, most))
    return F.when(count > 0, at_bound)


class _transaction:
    """Delta commits in the block belong to a batch, and are skipped if they were made before."""

    def __init__(self, spark: SparkSession, app: str, version: int) -> None:
        self._conf = spark.conf
        self._values = {
            "spark.databricks.delta.write.txnAppId": app,
            "spark.databricks.delta.write.txnVersion": str(version),
        }

    def __enter__(self) -> None:
        for key, value in self._values.items():
            self._conf.set(key, value)

    def __exit__(self, *_: object) -> None:
        for key in self._values:
            self._conf.unset(key)
