"""`lifecycle`: one row a message, from the archive: its deliveries, how long it waited and was worked on, its outcome.

Incremental: a run keeps the state of its unfinished messages in the table `lifecycle_state`, as a checkpoint of the
core without payloads, and the histories of these messages. A run writes its rows whole, and then the state in one
commit. If it is killed in between, the next run writes the same rows again, which replace those that are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec
import pyarrow as pa

from marq.text import plural
from pipeline.console import say
from pipeline.lifecycle_walker import COLUMNS, LIFECYCLE, STATE_VERSION, LifecycleWalker, Plan
from pipeline.options import Job, job_options
from pipeline.resuming import ResumeState, check_manifests, states_left
from pipeline.walk import walk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from pipeline.logs import Archive, Bounds

#: Version of the rows of the table `lifecycle`.
VERSION = 1

STATE = pa.schema({"partition": pa.int32(), "key": pa.string(), "value": pa.binary(), "run": pa.int64()})


class Done(NamedTuple):
    """The result of a run."""

    run: int
    ended: int
    unfinished: int


@click.command()
@job_options
def command(job: Job) -> None:
    """One row a message in the table `lifecycle`, from the archive; each run goes on where the last one ended."""
    with job.session("lifecycle") as spark:
        done = lifecycle(spark, job)
    if done is None:
        say("nothing new in the archive")
    else:
        say(f"run {done.run}: {done.ended:,} ended, {plural(done.unfinished, 'message')} unfinished")


def lifecycle(spark: SparkSession, job: Job) -> Done | None:
    """Bring the table up to the end of the archive; None if there is nothing new.

    Raises:
        PipelineError: there is no archive, or a table is not ours.
    """
    from pyspark import StorageLevel
    from pyspark.sql import functions as F

    from pipeline.logs import Archive, bounds, logs
    from pipeline.session import FEW_RECORDS, interpreted
    from pipeline.tables import SOURCE, is_table, properties_of

    archive = Archive(job.data)
    with interpreted(spark, _is_small(spark, archive)):
        there = bounds(spark, archive)
    source = properties_of(spark, archive.messages).get(SOURCE, "")
    is_first = not is_table(spark, job.path("lifecycle_state"))
    state = _open(spark, job.path("lifecycle_state"), STATE, STATE_VERSION, source).toDF()
    run, positions = (0, {}) if is_first else _last_run(state, job.path("lifecycle_state"))
    if all(positions.get(n) == (b.queue_end, b.markers_end) for n, b in there.items()):
        return None
    plans = {n: _plan(b, run + 1, job.settings.queue_id) for n, b in there.items()}
    stop = {n: (b.queue_end, b.markers_end) for n, b in there.items()}
    resume_rows = None if is_first else state.select("partition", "key", "value", F.lit(0).alias("offset"))
    stream = logs(spark, archive, positions, stop)
    walked = walk(spark, stream, plans, LifecycleWalker, _schema(LIFECYCLE), rows=resume_rows)
    with interpreted(spark, _records(there, positions) <= FEW_RECORDS):
        walked = walked.persist(StorageLevel.DISK_ONLY)
        try:
            histories = walked.where("state_key is null").drop("state_key", "state_value")
            ended, unfinished = _write_histories(spark, job, histories, run + 1, source)
            _write_state(spark, job, walked, run + 1)
        finally:
            walked.unpersist()
    return Done(run + 1, ended, unfinished)


def _is_small(spark: SparkSession, archive: Archive) -> bool:
    """Whether the archive has few bytes. Raises `PipelineError` if there is none."""
    from pipeline.logs import archived
    from pipeline.session import FEW_BYTES
    from pipeline.tables import size_bytes

    return sum(size_bytes(archived(spark, path)) for path in (archive.messages, archive.markers)) <= FEW_BYTES


def _records(there: dict[int, Bounds], positions: dict[int, tuple[int, int]]) -> int:
    """Most records that this run reads."""
    count = 0
    for number, bound in there.items():
        queue, markers = positions.get(number, (bound.queue_start, bound.markers_start))
        count += bound.queue_end - queue + bound.markers_end - markers
    return count


# ------------------------------------------------------------------ tables


def lifecycle_path(job: Job) -> str:
    return job.path("lifecycle")


def _open(spark: SparkSession, path: str, columns: pa.Schema, version: int, source: str) -> Any:
    """A table of histories; `source` identifies the archived topic."""
    from pipeline import tables

    table = tables.open_table(
        spark,
        path,
        _schema(columns),
        version=version,
        partition_by=["day"] if "day" in columns.names else [],
        source=source,
        properties=tables.kept_small(),
    )
    tables.vacuum_daily(spark, path, table)
    return table


def _last_run(state: DataFrame, path: str) -> tuple[int, dict[int, tuple[int, int]]]:
    """Number of the last run, and the positions where it ended. Raises `PipelineError`."""
    run, positions = 0, {}
    check_manifests(state, path)
    for row, resume_state in states_left(state, ResumeState, STATE_VERSION, path, "run"):
        positions[row.partition] = (resume_state.position, resume_state.markers_position)
        run = max(run, row.run)
    return run, positions


def _write_histories(spark: SparkSession, job: Job, histories: DataFrame, run: int, source: str) -> tuple[int, int]:
    from pyspark.sql import functions as F

    from pipeline.tables import is_table

    path = lifecycle_path(job)
    columns = pa.schema(COLUMNS | {"day": pa.date32()})
    is_new = not is_table(spark, path)
    table = _open(spark, path, columns, VERSION, source)
    dated = histories.withColumn("day", F.to_date(F.timestamp_millis("sent_ms"))).select(columns.names)
    found = dated.agg(F.count("*").alias("rows"), F.count("outcome").alias("ended"), F.min("day").alias("day")).first()
    assert found is not None
    if not found.rows:
        return 0, 0
    if is_new or table.toDF().isEmpty():
        # with an id and a version, so that of two jobs that both find the table empty one fails
        dated.write.format("delta").option("txnAppId", "lifecycle").option("txnVersion", run).mode("append").save(path)
    else:
        same = f"t.day >= date'{found.day}' and t.day = l.day and t.partition = l.partition and t.offset = l.offset"
        changed = " or ".join(f"not t.{name} <=> l.{name}" for name in ("state", "outcome", "working_ms", "deliveries"))
        merge = table.alias("t").merge(dated.alias("l"), same)
        merge.whenMatchedUpdateAll(changed).whenNotMatchedInsertAll().execute()
    return found.ended, found.rows - found.ended


def _write_state(spark: SparkSession, job: Job, walked: DataFrame, run: int) -> None:
    from pyspark.sql import functions as F

    state = walked.where("state_key is not null").select(
        "partition",
        F.col("state_key").alias("key"),
        F.col("state_value").alias("value"),
        F.lit(run).cast("long").alias("run"),
    )
    state.write.format("delta").mode("overwrite").save(job.path("lifecycle_state"))


def _plan(bound: Bounds, run: int, queue_id: str | None) -> bytes:
    return msgspec.msgpack.encode(
        Plan(bound.queue_start, bound.queue_end, bound.markers_start, bound.markers_end, queue_id, run)
    )


def _schema(columns: pa.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(columns)
