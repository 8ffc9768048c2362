"""The walk: the core folds both logs of each partition in order of time, one task per partition.

Spark sorts the records (on disk, where they don't fit) and passes them to a `pipeline.walker.Walker` in runs of one
log. So a task only remembers what is unfinished, however long the logs are. Lifecycle, audit and metrics are walkers.

The fold comes to the same state however the two logs are interleaved. In order of time the least is unfinished. A
broker's clock may step back, so records are ordered by the greatest timestamp in their log so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from marq.core.history import Envelope
from marq.core.reading import BAD_NAME, COPY_ROOM_BYTES, is_too_large
from marq.protocol.headers import H_ORIGIN, RESERVED
from marq.protocol.limits import MESSAGE_MAX_BYTES
from pipeline.walker import Walker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

#: Order of records with equal times: the walker's plan, rows of tables, then the logs.
PLAN, ROW, QUEUE, MARKERS = range(4)


#: Replaces the payload of a message that is larger than allowed.
TOO_LARGE = bytes(MESSAGE_MAX_BYTES + COPY_ROOM_BYTES + 1)


def walk(
    spark: SparkSession,
    logs: DataFrame,
    plans: Mapping[int, bytes],
    walker: Callable[[int, bytes], Walker],
    schema: StructType | str,
    *,
    rows: DataFrame | None = None,
) -> DataFrame:
    """Walk the logs, and return what the walkers find. Nothing runs until the result is used.

    Args:
        logs: rows of `pipeline.logs.logs`; a column `print` (a number) is passed on, if there is one.
        plans: the encoded plan of each partition. A partition without a plan is not walked.
        walker: makes the walker of a partition, on the executor.
        schema: of the batches that walkers return.
        rows: (partition, key, value, offset) of tables, passed to `Walker.row` in the order of `offset`.
    """
    tasks = max(len(plans), spark.sparkContext.defaultParallelism)
    stream = _stream(spark, logs, plans, rows).repartition(min(tasks, 512), "partition")
    return _in_order(stream).mapInArrow(_walk_batches(walker), schema)


def _stream(spark: SparkSession, logs: DataFrame, plans: Mapping[int, bytes], rows: DataFrame | None) -> DataFrame:
    from pyspark.sql import functions as F

    from pipeline.records import headers_size

    # empty, not null: Spark's conversion to Arrow takes quadratic time for nulls in a list column
    no_headers = F.array().cast("array<struct<key:string,value:binary>>")
    special = F.filter("headers", lambda h: h["key"].startswith(RESERVED) | F.contains(h["key"], F.lit(BAD_NAME)))
    fingerprint = F.col("print") if "print" in logs.columns else F.lit(None).cast("long")
    records = logs.select(
        "partition",
        F.when(F.col("log") == "queue", F.lit(QUEUE)).otherwise(F.lit(MARKERS)).alias("log"),
        "offset",
        "timestamp_ms",
        "key",
        "value",
        F.col("value_size").alias("size"),
        F.when(F.size("headers") > 0, special).otherwise(no_headers).alias("headers"),
        headers_size().alias("headers_size"),
        fingerprint.alias("print"),
    )

    def extra(frame: DataFrame, log: int) -> DataFrame:
        return frame.select(
            "partition",
            F.lit(log).alias("log"),
            F.col("offset").cast("long").alias("offset"),
            F.lit(-1).cast("long").alias("timestamp_ms"),
            F.col("key").cast("binary").alias("key"),
            "value",
            F.lit(0).alias("size"),
            no_headers.alias("headers"),
            F.lit(0).alias("headers_size"),
            F.lit(None).cast("long").alias("print"),
        )

    told = spark.createDataFrame(
        [(number, 0, b"", bytearray(plan)) for number, plan in sorted(plans.items())],
        "partition int, offset long, key binary, value binary",
    )
    stream = records.where(F.col("partition").isin(list(plans))).unionByName(extra(told, PLAN))
    return stream.unionByName(extra(rows, ROW)) if rows is not None else stream


def _in_order(stream: DataFrame) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    log = Window.partitionBy("partition", "log").orderBy("offset").rowsBetween(Window.unboundedPreceding, 0)
    timed = stream.withColumn("at_ms", F.max("timestamp_ms").over(log))
    return timed.sortWithinPartitions("partition", "at_ms", "log", "offset").drop("at_ms")


def _walk_batches(make: Callable[[int, bytes], Walker]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        walker: Walker | None = None
        begun = False
        for batch in batches:
            for number, log, run in _runs(batch):
                if log == PLAN:
                    if walker is not None:
                        yield from _finish(walker, begun)
                    walker, begun = make(number, run.values[0]), False
                    continue
                assert walker is not None and walker.number == number
                if log == ROW:
                    for key, value in zip(run.keys, run.values, strict=True):
                        walker.row(key.decode(), value)
                    continue
                if not begun:
                    walker.begin()
                    begun = True
                if log == QUEUE:
                    walker.read(run.envelopes(), run.prints)
                else:
                    for offset, timestamp_ms, value in zip(run.offsets, run.timestamps, run.values, strict=True):
                        walker.fold(offset, timestamp_ms, value)
            if walker is not None:
                yield from walker.results()
        if walker is not None:
            yield from _finish(walker, begun)

    return run


def _finish(walker: Walker, begun: bool) -> Iterator[pa.RecordBatch]:
    if not begun:
        walker.begin()
    walker.end()
    yield from walker.results()


class _Run:
    """Consecutive records of one log."""

    __slots__ = ("_columns", "offsets", "prints", "timestamps", "values")

    def __init__(self, columns: _Columns, start: int, stop: int) -> None:
        self._columns = (columns, start, stop)
        self.offsets = columns.offsets[start:stop]
        self.timestamps = columns.timestamps[start:stop]
        self.values = columns.values[start:stop]
        self.prints = columns.prints[start:stop]

    @property
    def keys(self) -> list[Any]:
        columns, start, stop = self._columns
        return columns.keys[start:stop]

    def envelopes(self) -> list[Envelope]:
        columns, start, stop = self._columns
        return list(
            map(
                Envelope,
                self.offsets,
                self.timestamps,
                columns.keys[start:stop],
                columns.bodies[start:stop],
                columns.headers[start:stop],
                columns.sizes[start:stop],
            )
        )


class _Columns:
    """Columns of a batch as lists."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        count = batch.num_rows
        self.offsets: list[int] = batch.column("offset").to_pylist()
        self.timestamps: list[int] = batch.column("timestamp_ms").to_pylist()
        self.sizes: list[int] = batch.column("size").to_pylist()
        self.values: list[Any] = _values(batch.column("value"))
        self.prints: list[int | None] = _values(batch.column("print"))
        self.keys: list[Any] = _shared(batch.column("key"))
        self.bodies: list[bytes | None] = [None] * count
        headers = batch.column("headers")
        if len(headers.flatten()):
            self.headers: list[Any] = [tuple((h["key"], h["value"]) for h in row) for row in headers.to_pylist()]
        else:
            self.headers = [()] * count
        self._mark_large(batch.column("headers_size"))

    def _mark_large(self, headers_size: pa.Array) -> None:
        """Mark messages that are too large, the only thing that the core needs to know of a payload."""
        keys_size = max((len(key) for key in self.keys if key is not None), default=0)
        largest = max(self.sizes, default=0) + keys_size
        if largest <= MESSAGE_MAX_BYTES and headers_size.null_count == len(headers_size):
            return
        for i, (size, more) in enumerate(zip(self.sizes, headers_size.to_pylist(), strict=True)):
            size = max(size, 0) + (more or 0) + len(self.keys[i] or b"")
            if size > MESSAGE_MAX_BYTES and is_too_large(size, any(name == H_ORIGIN for name, _ in self.headers[i])):
                self.bodies[i] = TOO_LARGE


def _values(column: pa.Array) -> list[Any]:
    return [None] * len(column) if column.null_count == len(column) else column.to_pylist()


def _shared(column: pa.Array) -> list[Any]:
    """The values of a column, equal ones as one object: there are few queues and many messages."""
    if column.null_count == len(column):
        return [None] * len(column)
    coded = column.dictionary_encode()
    values = [*coded.dictionary.to_pylist(), None]
    return [values[i] if i is not None else None for i in coded.indices.to_pylist()]


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[int, int, _Run]]:
    """Runs of records of one partition and log, in order."""
    import numpy as np

    if not batch.num_rows:
        return
    columns = _Columns(batch)
    numbers = batch.column("partition").to_numpy()
    logs = batch.column("log").to_numpy()
    ends = np.flatnonzero((numbers[1:] != numbers[:-1]) | (logs[1:] != logs[:-1])) + 1
    start = 0
    for stop in [*ends.tolist(), batch.num_rows]:
        yield int(numbers[start]), int(logs[start]), _Run(columns, start, stop)
        start = stop
