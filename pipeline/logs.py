"""Both logs of an installation as one DataFrame, from Kafka or from the archive, without payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from marq.errors import PipelineError
from pipeline.damage import Damaged, records
from pipeline.fingerprints import fingerprint_column
from pipeline.kafka import Kafka
from pipeline.records import HEADERS, NO_PAYLOAD, SCHEMA_VERSION
from pipeline.tables import read_table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

QUEUE = "queue"
MARKERS = "markers"

LOGS = StructType(
    [
        StructField("partition", IntegerType(), False),
        StructField("log", StringType(), False),
        StructField("offset", LongType(), False),
        StructField("timestamp_ms", LongType(), False),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("value_size", IntegerType(), False),
        StructField("headers", HEADERS),
    ]
)


class Bounds(NamedTuple):
    """Of one partition: first offset that each log still has, and the offset after its last."""

    queue_start: int
    queue_end: int
    markers_start: int
    markers_end: int


Positions = Mapping[int, tuple[int, int]]
"""Positions in the queue topic and in the markers topic, by partition."""


@dataclass(frozen=True)
class Archive:
    """The archive in the data folder of a pipeline, as a source of logs."""

    data: str

    @property
    def messages(self) -> str:
        return f"{self.data.rstrip('/')}/archive/messages"

    @property
    def markers(self) -> str:
        return f"{self.data.rstrip('/')}/archive/markers"


Source = Kafka | Archive


def bounds(spark: SparkSession, source: Source) -> dict[int, Bounds]:
    """Where the logs begin and end, by partition.

    Raises:
        TopicError, BrokerError: a topic is missing; Kafka can't be reached.
        PipelineError: the topics differ in their number of partitions; there is no archive.
    """
    if isinstance(source, Kafka):
        # the markers first: what they name was in the queue topic before, so its end lies beyond
        markers = source.bounds(source.settings.markers_topic)
        queue = source.bounds(source.settings.queue_topic)
        if len(queue) != len(markers):
            raise PipelineError(
                f"{source.settings.queue_topic} has {len(queue)} partitions and {source.settings.markers_topic} "
                f"{len(markers)}: they don't belong together; correct MARQ_QUEUE_TOPIC or MARQ_MARKERS_TOPIC"
            )
    else:
        queue, markers = (_table_bounds(spark, path) for path in (source.messages, source.markers))
    numbers = sorted(queue.keys() | markers.keys())
    return {n: Bounds(*queue.get(n, (0, 0)), *markers.get(n, (0, 0))) for n in numbers}


def _table_bounds(spark: SparkSession, path: str) -> dict[int, tuple[int, int]]:
    rows = archived(spark, path).groupBy("partition").agg(F.min("offset"), F.max("offset")).collect()
    return {row[0]: (row[1], row[2] + 1) for row in rows}


def logs(
    spark: SparkSession,
    source: Source,
    start: Positions | None = None,
    stop: Positions | None = None,
    *,
    prints: bool = False,
    damaged: Damaged | None = None,
    may_vanish: bool = False,
) -> DataFrame:
    """The records of both logs, one a row (schema `LOGS`), in no order.

    `value` is the value of a markers record, null for the queue log. Of a message's payload only the length is given
    (`value_size`, -1 for a record without one). Offsets that are not in the log (compacted, transactions) have no row.

    Args:
        start: positions to begin at (inclusive). By default, and for partitions not named, each log's beginning.
        stop: positions to end before; by default each log's present end.
        damaged: all the damage that Spark can't read, if it is known (`pipeline.damage`).
        prints: add a column `print`: a fingerprint of the whole message (`fingerprints.fingerprint`), null for markers.
        may_vanish: records that Kafka deletes before they are read are left out; by default that is an error.
    """
    if isinstance(source, Kafka):
        return _from_kafka(spark, source, start or {}, stop or {}, prints, damaged, may_vanish)
    return _from_archive(spark, source, start or {}, stop or {}, prints)


def _from_kafka(
    spark: SparkSession,
    kafka: Kafka,
    start: Positions,
    stop: Positions,
    prints: bool,
    damaged: Damaged | None,
    may_vanish: bool,
) -> DataFrame:
    queue, markers = kafka.settings.queue_topic, kafka.settings.markers_topic
    there = bounds(spark, kafka)
    begin: dict[str, dict[int, int]] = {queue: {}, markers: {}}
    end: dict[str, dict[int, int]] = {queue: {}, markers: {}}
    for number, found in there.items():
        first, last = start.get(number), stop.get(number)
        pairs = ((queue, found.queue_start, found.queue_end), (markers, found.markers_start, found.markers_end))
        for i, (topic, log_start, log_end) in enumerate(pairs):
            begin[topic][number] = log_start if first is None else first[i]
            end[topic][number] = log_end if last is None else last[i]
            if may_vanish:
                begin[topic][number] = max(begin[topic][number], min(log_start, end[topic][number]))
                log_start = begin[topic][number]
            _check_range(topic, number, begin[topic][number], end[topic][number], log_start, log_end)
    options = {"failOnDataLoss": "false"} if may_vanish else {}
    return from_records(records(spark, kafka, begin, end, damaged, **options), queue, prints=prints)


def from_records(rows: DataFrame, queue_topic: str, *, prints: bool = False) -> DataFrame:
    """Records of both topics, as Kafka's source gives them, converted to rows of `logs`."""
    is_queue = F.col("topic") == queue_topic
    headers = F.coalesce("headers", F.array().cast(HEADERS))
    printed = F.when(is_queue, fingerprint_column(F.unix_millis("timestamp"), "key", headers, "value"))
    return rows.select(
        "partition",
        F.when(is_queue, QUEUE).otherwise(MARKERS).alias("log"),
        "offset",
        F.unix_millis("timestamp").alias("timestamp_ms"),
        "key",
        F.when(~is_queue, F.col("value")).alias("value"),
        F.coalesce(F.length("value"), F.lit(NO_PAYLOAD)).alias("value_size"),
        headers.alias("headers"),
        *([printed.alias("print")] if prints else []),
    )


def _check_range(topic: str, number: int, begin: int, end: int, log_start: int, log_end: int) -> None:
    if begin < log_start:
        raise PipelineError(
            f"{topic} partition {number}: offsets {begin} to {log_start - 1} are no longer in Kafka; read from the "
            "archive, or raise MARQ_RETENTION_HISTORY_MS"
        )
    if begin > end or end > log_end:
        raise PipelineError(
            f"{topic} partition {number}: asked for offsets {begin} to {end - 1}, but it ends at {log_end - 1}: this "
            "is not the topic that was read before"
        )


def _from_archive(spark: SparkSession, archive: Archive, start: Positions, stop: Positions, prints: bool) -> DataFrame:
    queue = archived(spark, archive.messages).where(_within(start, stop, 0))
    markers = archived(spark, archive.markers).where(_within(start, stop, 1))
    common = ("partition", "offset", F.unix_millis("timestamp").alias("timestamp_ms"))
    printed = fingerprint_column(F.unix_millis("timestamp"), "key", "headers", "payload")
    rows = queue.select(
        *common,
        F.lit(QUEUE).alias("log"),
        "key",
        F.lit(None).cast("binary").alias("value"),
        F.col("size").alias("value_size"),
        "headers",
        printed.alias("print"),
    ).unionByName(
        markers.select(
            *common,
            F.lit(MARKERS).alias("log"),
            F.lit(None).cast("binary").alias("key"),
            "value",
            F.coalesce(F.length("value"), F.lit(NO_PAYLOAD)).alias("value_size"),
            F.array().cast(HEADERS).alias("headers"),
            F.lit(None).cast("long").alias("print"),
        )
    )
    return rows.select([*LOGS.names, *(["print"] if prints else [])])


def archived(spark: SparkSession, path: str) -> DataFrame:
    """The rows of a table of the archive. Raises `PipelineError` if there is none."""
    return read_table(spark, path, "python -m pipeline archive", version=SCHEMA_VERSION)


def _within(start: Positions, stop: Positions, log: int) -> Column:
    """A condition for rows from `start` up to `stop`, which lets readers skip files. Both may leave partitions out."""
    conditions = []
    for number in sorted(start.keys() | stop.keys()):
        inside = F.lit(True)
        if number in start:
            inside &= F.col("offset") >= start[number][log]
        if number in stop:
            inside &= F.col("offset") < stop[number][log]
        conditions.append((F.col("partition") != number) | inside)
    return reduce(lambda a, b: a & b, conditions, F.lit(True))
