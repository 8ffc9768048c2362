"""`python -m pipeline archive`: both topics into Delta tables that outlive Kafka's retention.

    queue topic   -> archive/messages    every record; poison ones without a queue
    markers topic -> archive/markers     every record, as it was and decoded
    both, and the poison topic -> archive/malformed    what can't be read, with its reason
    settings of the queues -> archive/queues    as they are now

Each topic has its own streaming query and checkpoint, so a slow one does not delay the others. A batch is appended in
one Delta commit that carries the query's id and the batch's number, so a batch that a restart repeats is recognised
and skipped. The positions of the archive are also committed to Kafka, for a consumer group: retention keeps records
that are not archived yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click
from pyspark.sql import functions as F

from app.processes import stop_signals
from marq.errors import BrokerError, MarqError, PipelineError, TopicError
from marq.text import plural
from pipeline import records, tables
from pipeline.checkpoints import Checkpoint
from pipeline.console import say
from pipeline.kafka import Offsets
from pipeline.options import Job, job_options
from pipeline.queues import QueuesArchive
from pipeline.session import explain
from pipeline.streams import LOOK_S, Streaming

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

MESSAGES = "archive/messages"
MARKERS = "archive/markers"
MALFORMED = "archive/malformed"
CHECKPOINTS = "checkpoints/archive"

#: Backlog, in records, from which on Java is tuned to run fast rather than to start quickly.
LASTING_RECORDS = 300_000
#: Columns with statistics, which let readers skip files. Those of all others would take an eighth of the writing time.
_STATISTICS = {"delta.dataSkippingStatsColumns": "partition,offset,timestamp"}


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
        with job.session("archive", lasting=not once or archive.waiting() > LASTING_RECORDS) as spark:
            archive.run(spark)


@dataclass
class _Flow:
    """A topic, and the table that it is archived into."""

    topic: str
    table: str
    decode: Callable[[DataFrame], DataFrame]
    malformed: Callable[[DataFrame], DataFrame] | None
    schema: StructType
    checkpoint: str
    source: str = ""
    #: Next offset to archive, by partition.
    positions: Offsets = field(default_factory=dict)
    #: Positions when this run began, and the ends of the topic at that time.
    began: Offsets = field(default_factory=dict)
    ends: Offsets = field(default_factory=dict)
    query: StreamingQuery | None = None


class Archiving(Streaming):
    """One run of the job."""

    done = "archived"
    flows: list[_Flow]
    has_queues: bool
    queues: QueuesArchive | None = None

    # -- before anything is written

    def check(self) -> None:
        """Find the topics, before Spark is started. Raises `TopicError`, `BrokerError`."""
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
        self.has_queues = settings.queues_topic in there
        for flow in self.flows:
            flow.source = self.kafka.source_of(flow.topic)

    def await_topics(self, wait_s: float) -> None:
        """Call `check` until it succeeds, for at most so many seconds: broker and worker may start at the same time."""
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

    def waiting(self) -> int:
        """About how many records are waiting to be archived; 0 if Kafka does not tell."""
        try:
            done = self.kafka.committed(self.job.settings.archive_group)
        except MarqError:
            return 0
        return sum(
            max(0, end - max(start, done.get(flow.topic, {}).get(number, start)))
            for flow in self.flows
            for number, (start, end) in self.kafka.bounds(flow.topic).items()
        )

    def open(self, spark: SparkSession) -> str:
        """Create or check tables and checkpoints, and find out where each flow goes on."""
        schemas = {MESSAGES: records.MESSAGES, MARKERS: records.MARKERS, MALFORMED: records.MALFORMED}
        sources = {flow.table: flow.source for flow in self.flows if flow.table != MALFORMED}
        new: set[str] = set()
        # check everything before creating anything
        for table in schemas:
            source = sources.get(table, "")
            if tables.check(spark, self.job.path(table), version=records.SCHEMA_VERSION, source=source) is None:
                self._refuse_checkpoints(spark, table)
                new.add(table)
        if self.has_queues:
            self.queues = QueuesArchive(self.job, spark)
        checkpointed = [_checkpointed(self._checkpoint(spark, flow), flow.topic) for flow in self.flows]
        for table, schema in schemas.items():
            path = self.job.path(table)
            opened = tables.open_table(
                spark,
                path,
                schema,
                version=records.SCHEMA_VERSION,
                partition_by=["day"],
                source=sources.get(table, ""),
                properties=tables.kept_small() | _STATISTICS,
            )
            tables.vacuum_daily(spark, path, opened)
        for flow, found in zip(self.flows, checkpointed, strict=True):
            flow.positions = self._positions(spark, flow, found, is_new=flow.table in new)
            flow.began = dict(flow.positions)
        if self.queues is not None:
            self.queues.open()
        self._publish()
        return f"Archiving {', '.join(flow.topic for flow in self.flows)} into {self.job.path('archive')}"

    def _refuse_checkpoints(self, spark: SparkSession, table: str) -> None:
        """Raise if a table is gone but not its checkpoint, which would go on behind what was in the table."""
        for checkpoint in (self._checkpoint(spark, flow) for flow in self.flows if flow.table == table):
            if checkpoint.exists():
                raise PipelineError(
                    f"{self.job.path(table)} is gone, but {checkpoint.path} continues after what was in it; restore "
                    "the table, or delete the checkpoint to archive again what Kafka still has"
                )

    def _checkpoint(self, spark: SparkSession, flow: _Flow) -> Checkpoint:
        return Checkpoint(spark, self.job.path(CHECKPOINTS, flow.checkpoint))

    def _positions(self, spark: SparkSession, flow: _Flow, found: Offsets | None, *, is_new: bool) -> Offsets:
        """Next offset of each partition: from the checkpoint (`found`), else the table, else the topic's beginning."""
        bounds = self.kafka.bounds(flow.topic)
        if found is None:
            found = {} if is_new else _tabled(spark, self.job.path(flow.table), flow.topic)
        positions = {number: found.get(number, start) for number, (start, _) in bounds.items()}
        self._refuse_loss(flow, positions, bounds)
        flow.ends = {number: end for number, (_, end) in bounds.items()}
        return positions

    def _refuse_loss(self, flow: _Flow, positions: Offsets, bounds: dict[int, tuple[int, int]]) -> None:
        for number, position in sorted(positions.items()):
            self.refuse_loss(self.job.path(flow.table), flow.topic, number, position, *bounds[number])

    # -- running

    def start(self, spark: SparkSession) -> Iterator[StreamingQuery]:
        for flow in self.flows:
            checkpoint = self._checkpoint(spark, flow)
            begun = checkpoint.broken_off()
            is_at_end = all(flow.positions[number] >= end for number, end in flow.ends.items())
            if self.once and is_at_end and begun is None:
                continue  # even a query that finds nothing new takes seconds
            append = _Append(self.job, flow, begun)
            name = f"archive {flow.checkpoint}"
            flow.query = self.query(spark, name, {flow.topic: flow.positions}, checkpoint.path, append)
            yield flow.query

    def look(self) -> None:
        before = [dict(flow.positions) for flow in self.flows]
        for flow in self.flows:
            progress = flow.query.lastProgress if flow.query is not None else None
            if progress is not None:
                ends = progress["sources"][0]["endOffset"]
                ends = json.loads(ends) if isinstance(ends, str) else ends
                flow.positions |= {int(number): offset for number, offset in (ends or {}).get(flow.topic, {}).items()}
        if before != [flow.positions for flow in self.flows]:
            self._publish(at_once=False)

    def _publish(self, *, at_once: bool = True) -> None:
        """Commit the positions for retention, which keeps what is not archived yet; and copy the queues."""
        try:
            self.kafka.commit(self.job.settings.archive_group, {flow.topic: flow.positions for flow in self.flows})
            if self.queues is not None:
                self.queues.update(at_once=at_once)
        except MarqError as error:
            # The next batch commits again; until then Kafka keeps more than it needs to.
            say(f"marq: positions and queues of the archive were not published: {error}", err=True)

    def failed(self, spark: SparkSession, query: StreamingQuery) -> str:
        flow = next(flow for flow in self.flows if flow.query is query)
        bounds = self.kafka.bounds(flow.topic)
        found = _checkpointed(self._checkpoint(spark, flow), flow.topic) or flow.positions
        self._refuse_loss(flow, flow.positions | found, bounds)
        return f"archiving {flow.topic}"

    def outcome(self, spark: SparkSession) -> str:
        self._publish()
        done = {flow.checkpoint: sum(flow.positions.values()) - sum(flow.began.values()) for flow in self.flows}
        return "Archived " + ", ".join(plural(count, name.removesuffix("s"), name) for name, count in done.items())


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
        # A batch begun by a killed job may be in the table already. Then it is not read again, and nothing is counted.
        if number == self.begun or seen.get["malformed"]:
            _append(self.flow.malformed(decoded), self.malformed_table, f"{query_id}-malformed", number)


def _append(rows: DataFrame, path: str, app: str | None, version: int) -> None:
    """Append in one commit; does nothing if that commit was made before."""
    rows.write.format("delta").mode("append").option("txnAppId", app).option("txnVersion", version).save(path)


# -- where a flow is ----------------------------------------------------------------------------------------


def _checkpointed(checkpoint: Checkpoint, topic: str) -> Offsets | None:
    """The end of the last complete batch; None if there is none."""
    last = checkpoint.complete()
    if last is None:
        return None
    try:
        ends = checkpoint.ends(last)
    except Exception as error:
        raise PipelineError(
            f"{checkpoint.path} is damaged: {explain(error)}; delete it: the tables say where to go on"
        ) from None
    if topic not in ends:
        raise PipelineError(
            f"{checkpoint.path} is the checkpoint of {', '.join(ends)}, not of {topic}; choose another folder with "
            "--data, or correct MARQ_NAME or MARQ_QUEUE_TOPIC"
        )
    return ends[topic]


def _tabled(spark: SparkSession, path: str, topic: str) -> Offsets:
    """Next offsets after what is in a table, for a flow whose checkpoint is gone."""
    rows = spark.read.format("delta").load(path).where(F.col("topic") == topic)
    return {row[0]: row[1] + 1 for row in rows.groupBy("partition").agg(F.max("offset")).collect()}
