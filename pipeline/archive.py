"""`python -m pipeline archive`: both topics into Delta tables that outlive Kafka's retention.

    queue topic   -> archive/messages    every record; poison ones without a queue
    markers topic -> archive/markers     every record, as it was and decoded
    both, and the poison topic -> archive/malformed    what can't be read, with its reason

Each topic is a streaming query of its own with its own checkpoint, so that one that waits holds up no other. A batch is
appended in one Delta commit that carries the query's id and the batch's number: what a restart repeats is recognised
and left out. How far the archive is stands in Kafka too, as the offsets of a group, which retention respects.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click
from pyspark.sql import functions as F

from app.processes import stop_signals
from marq.errors import BrokerError, MarqError, PipelineError, TopicError
from pipeline import files, records, tables
from pipeline.kafka import Kafka, Offsets, offsets_json
from pipeline.options import Job, job_options
from pipeline.session import explain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery
    from pyspark.sql.types import StructType

MESSAGES = "archive/messages"
MARKERS = "archive/markers"
MALFORMED = "archive/malformed"
CHECKPOINTS = "checkpoints/archive"

#: Offsets of one batch: what it takes in memory does not depend on them, but how long a stop may take does.
BATCH_OFFSETS = 500_000
#: Seconds that batches under way get when the job is asked to stop; then they are broken off, and their work is lost.
STOP_S = 20.0
#: Seconds between looks at the queries.
LOOK_S = 0.2


@click.command()
@click.option("--once", is_flag=True, help="Archive what is there now, then end.")
@click.option(
    "--interval", default=5.0, show_default=True, type=click.FloatRange(min=0), help="Seconds between batches."
)
@click.option(
    "--accept-loss", is_flag=True, help="Go on although records were deleted from Kafka before they were archived."
)
@click.option(
    "--wait", "wait_s", default=0.0, type=click.FloatRange(0), help="Seconds to wait for Kafka and the topics."
)
@job_options
def command(job: Job, once: bool, interval: float, accept_loss: bool, wait_s: float) -> None:
    """Stream the queue and markers topics into Delta tables, until stopped.

    Exactly once: a job that was killed, even with -9, goes on where it was.
    """
    with stop_signals() as stopped:
        archive = Archiving(job, once=once, interval_s=interval, accept_loss=accept_loss, stopped=stopped)
        archive.await_topics(wait_s)
        if stopped():
            return
        with job.session("archive") as spark:
            archive.run(spark)


@dataclass
class _Flow:
    """One topic on its way into its table."""

    topic: str
    table: str
    decode: Callable[[DataFrame], DataFrame]
    malformed: Callable[[DataFrame], DataFrame] | None
    schema: StructType
    checkpoint: str
    source: str = ""
    #: What is in the table and in the checkpoint.
    positions: Offsets = field(default_factory=dict)
    #: Where this run began, and where the topic ended then.
    began: Offsets = field(default_factory=dict)
    ends: Offsets = field(default_factory=dict)
    query: StreamingQuery | None = None


class Archiving:
    """One run of the job."""

    def __init__(
        self, job: Job, *, once: bool, interval_s: float, accept_loss: bool, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self.job = job
        self.kafka: Kafka = job.kafka
        self.once = once
        self.interval_s = interval_s
        self.accept_loss = accept_loss
        self.stopped = stopped
        self.flows: list[_Flow] = []

    # -- before anything is written

    def check(self) -> None:
        """Find the topics. Raises `TopicError`, `BrokerError`, before Spark is started for nothing."""
        settings = self.job.settings
        there = self.kafka.topics()
        for topic in (settings.queue_topic, settings.markers_topic):
            self.kafka.require(topic, there)
        self.flows = [
            _Flow(
                settings.queue_topic,
                MESSAGES,
                lambda batch: records.messages(batch, settings.queue_id),
                records.malformed_messages,
                records.MESSAGES,
                "messages",
            ),
            _Flow(
                settings.markers_topic, MARKERS, records.markers, records.malformed_markers, records.MARKERS, "markers"
            ),
        ]
        if settings.poison_topic in there:
            self.flows.append(
                _Flow(settings.poison_topic, MALFORMED, records.poison, None, records.MALFORMED, "poison")
            )
        for flow in self.flows:
            flow.source = self.kafka.source_of(flow.topic)

    def await_topics(self, wait_s: float) -> None:
        """As `check`, tried again for so long: broker and worker may be started at the same time."""
        deadline = time.monotonic() + wait_s
        while not self.stopped():
            try:
                self.check()
            except (BrokerError, TopicError):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LOOK_S)
            else:
                return

    def _open(self, spark: SparkSession) -> None:
        """Make or check tables and checkpoints, and find out where each flow goes on."""
        new: set[str] = set()
        for table, schema in ((MESSAGES, records.MESSAGES), (MARKERS, records.MARKERS), (MALFORMED, records.MALFORMED)):
            source = next((flow.source for flow in self.flows if flow.table == table and table != MALFORMED), "")
            path = self.job.path(table)
            if not tables.is_table(spark, path):
                self._refuse_checkpoints(spark, table)
                new.add(table)
            opened = tables.open_table(
                spark,
                path,
                schema,
                version=records.SCHEMA_VERSION,
                partition_by=["day"],
                source=source,
                properties=tables.kept_small(),
            )
            tables.vacuum_daily(spark, path, opened)
        for flow in self.flows:
            flow.positions = self._positions(spark, flow, is_new=flow.table in new)
            flow.began = dict(flow.positions)

    def _refuse_checkpoints(self, spark: SparkSession, table: str) -> None:
        """Raise for a table that is gone while its checkpoint goes on behind what was in it."""
        for checkpoint in (self._checkpoint(flow) for flow in self.flows if flow.table == table):
            if files.names(spark, f"{checkpoint}/offsets"):
                raise PipelineError(
                    f"{self.job.path(table)} is gone, but {checkpoint} goes on behind what was in it; put the table "
                    "back, or delete the checkpoint to archive anew what Kafka still has"
                )

    def _checkpoint(self, flow: _Flow) -> str:
        return self.job.path(CHECKPOINTS, flow.checkpoint)

    def _positions(self, spark: SparkSession, flow: _Flow, *, is_new: bool) -> Offsets:
        """Next offset of each partition: from the checkpoint, else from the table, else where the topic begins."""
        bounds = self.kafka.bounds(flow.topic)
        found = _checkpointed(spark, self._checkpoint(flow), flow.topic)
        if found is None:
            found = {} if is_new else _tabled(spark, self.job.path(flow.table), flow.topic)
        positions = {number: found.get(number, start) for number, (start, _) in bounds.items()}
        self._refuse_loss(flow, positions, bounds)
        flow.ends = {number: end for number, (_, end) in bounds.items()}
        return positions

    def _refuse_loss(self, flow: _Flow, positions: Offsets, bounds: dict[int, tuple[int, int]]) -> None:
        for number, position in sorted(positions.items()):
            start, end = bounds[number]
            if position > end:
                raise PipelineError(
                    f"{self.job.path(flow.table)} is at offset {position} of {flow.topic} partition {number}, which "
                    f"ends at {end}: it is of another topic of that name; choose another folder with --data"
                )
            if position < start and not self.accept_loss:
                raise PipelineError(
                    f"lost: offsets {position} to {start - 1} of {flow.topic} partition {number} were deleted from "
                    "Kafka before they were archived; --accept-loss goes on without them"
                )

    # -- running

    def run(self, spark: SparkSession) -> None:
        """Archive until all that was there is (`once`), or until stopped.

        A Kafka that goes away while the job runs without `once` is waited for.
        """
        self._open(spark)
        self._publish()
        names = ", ".join(flow.topic for flow in self.flows)
        click.echo(f"Archiving {names} into {self.job.path('archive')}" + ("" if self.once else "  (Ctrl-C stops it)"))
        while not self.stopped():
            try:
                self._stream(spark)
            except BrokerError as error:
                if self.once:
                    raise
                click.echo(f"marq: {error}; waiting for it", err=True)
                self._await_kafka()
                continue
            break
        done = {flow.checkpoint: sum(flow.positions.values()) - sum(flow.began.values()) for flow in self.flows}
        click.echo("Archived " + ", ".join(f"{count} {name}" for name, count in done.items()))

    def _stream(self, spark: SparkSession) -> None:
        try:
            for flow in self.flows:
                if not self._has_all(spark, flow):
                    flow.query = self._start(spark, flow)
            while any(flow.query.isActive for flow in self.flows if flow.query) and not self.stopped():
                time.sleep(LOOK_S)
                self._note_progress()
                self._raise_failure(spark)
            self._raise_failure(spark)
        finally:
            self._stop()
        self._note_progress()

    def _has_all(self, spark: SparkSession, flow: _Flow) -> bool:
        """Whether a run that is to end has nothing to do: a query that finds nothing new takes seconds, too."""
        is_at_end = all(flow.positions[number] >= end for number, end in flow.ends.items())
        return self.once and is_at_end and _begun(spark, self._checkpoint(flow)) is None

    def _start(self, spark: SparkSession, flow: _Flow) -> StreamingQuery:
        source = (
            spark.readStream.format("kafka")
            .options(**self.kafka.source_options())
            .option("subscribe", flow.topic)
            # Only a query without a checkpoint looks at it.
            .option("startingOffsets", offsets_json({flow.topic: flow.positions}))
            .option("maxOffsetsPerTrigger", str(BATCH_OFFSETS))
            .option("failOnDataLoss", str(not self.accept_loss).lower())
            .load()
        )
        writer = (
            source.writeStream.queryName(f"archive {flow.checkpoint}")
            .option("checkpointLocation", self._checkpoint(flow))
            .foreachBatch(_Append(self.job, flow, _begun(spark, self._checkpoint(flow))))
        )
        trigger = {"availableNow": True} if self.once else {"processingTime": f"{self.interval_s} seconds"}
        return writer.trigger(**trigger).start()

    def _note_progress(self) -> None:
        before = [dict(flow.positions) for flow in self.flows]
        for flow in self.flows:
            progress = flow.query.lastProgress if flow.query is not None else None
            if progress is not None:
                ends = progress["sources"][0]["endOffset"]
                ends = json.loads(ends) if isinstance(ends, str) else ends
                flow.positions |= {int(number): offset for number, offset in (ends or {}).get(flow.topic, {}).items()}
        if before != [flow.positions for flow in self.flows]:
            self._publish()

    def _publish(self) -> None:
        """Tell retention how far the archive is: it keeps what is not in it yet."""
        try:
            self.kafka.commit(self.job.settings.archive_group, {flow.topic: flow.positions for flow in self.flows})
        except MarqError as error:
            # The next batch tells again; until then Kafka keeps more than it needs to.
            click.echo(f"marq: the positions of the archive were not published: {error}", err=True)

    def _raise_failure(self, spark: SparkSession) -> None:
        for flow in self.flows:
            error = flow.query.exception() if flow.query is not None else None
            if error is None:
                continue
            bounds = self.kafka.bounds(flow.topic)  # an error of its own if Kafka is away
            found = _checkpointed(spark, self._checkpoint(flow), flow.topic) or flow.positions
            self._refuse_loss(flow, flow.positions | found, bounds)
            raise PipelineError(
                f"archiving {flow.topic} failed: {explain(error)}; nothing is lost: start it again, --verbose shows "
                "Spark's log"
            )

    def _stop(self) -> None:
        """End the queries, after the batches that are under way."""
        running = [flow.query for flow in self.flows if flow.query is not None]
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and any(q.isActive and q.status["isTriggerActive"] for q in running):
            time.sleep(LOOK_S / 4)
        for query in running:
            query.stop()

    def _await_kafka(self) -> None:
        while not self.stopped():
            try:
                self.kafka.topics()
            except BrokerError:
                time.sleep(1)
            else:
                return


class _Append:
    """Appends the batches of one flow to its tables."""

    def __init__(self, job: Job, flow: _Flow, begun: int | None) -> None:
        self.flow = flow
        self.begun = begun
        self.table = job.path(flow.table)
        self.malformed_table = job.path(MALFORMED)

    def __call__(self, batch: DataFrame, number: int) -> None:
        from pyspark.sql import Observation

        spark = batch.sparkSession
        query_id = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
        # As many files as tasks can run, whatever the number of partitions.
        decoded = self.flow.decode(batch.coalesce(spark.sparkContext.defaultParallelism))
        rows = decoded.select(self.flow.schema.names)
        if self.flow.malformed is None:
            _append(rows, self.table, query_id, number)
            return
        seen = Observation()
        counted = decoded.observe(seen, F.count("reason").alias("malformed")).select(self.flow.schema.names)
        _append(counted, self.table, query_id, number)
        # A batch that a killed job began may be in the table already; then it was not read, and nothing was counted.
        if number == self.begun or seen.get["malformed"]:
            _append(self.flow.malformed(decoded), self.malformed_table, f"{query_id}-malformed", number)


def _append(rows: DataFrame, path: str, app: str, version: int) -> None:
    """One commit, left out if it was made before."""
    rows.write.format("delta").mode("append").option("txnAppId", app).option("txnVersion", version).save(path)


# -- where a flow is ----------------------------------------------------------------------------------------


def _checkpointed(spark: SparkSession, checkpoint: str, topic: str) -> Offsets | None:
    """The end of the last batch that is complete; None where none is.

    Spark's own log: `commits/N` says that batch N is complete, the last line of `offsets/N` where it ended.
    """
    done = [int(name) for name in files.names(spark, f"{checkpoint}/commits") if name.isdigit()]
    if not done:
        return None
    try:
        ends = json.loads(files.read_text(spark, f"{checkpoint}/offsets/{max(done)}").splitlines()[-1])
    except Exception as error:
        raise PipelineError(
            f"{checkpoint} is damaged: {explain(error)}; delete it: the tables say where to go on"
        ) from None
    if topic not in ends:
        raise PipelineError(
            f"{checkpoint} is the checkpoint of {', '.join(ends)}, not of {topic}; choose another folder with --data, "
            "or correct MARQ_NAME or MARQ_QUEUE_TOPIC"
        )
    return {int(number): offset for number, offset in ends[topic].items()}


def _tabled(spark: SparkSession, path: str, topic: str) -> Offsets:
    """The ends of what is in a table, for a checkpoint that is gone."""
    rows = spark.read.format("delta").load(path).where(F.col("topic") == topic)
    return {row[0]: row[1] + 1 for row in rows.groupBy("partition").agg(F.max("offset")).collect()}


def _begun(spark: SparkSession, checkpoint: str) -> int | None:
    """The batch that was begun, and will be repeated, because nothing says that it is complete."""
    begun = {int(name) for name in files.names(spark, f"{checkpoint}/offsets") if name.isdigit()}
    done = {int(name) for name in files.names(spark, f"{checkpoint}/commits") if name.isdigit()}
    return max(begun) if begun and max(begun) not in done else None
