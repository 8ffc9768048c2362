"""`python -m pipeline metrics`: how each queue does, in windows of time, into a table and a topic, as it happens.

    queue topic, markers topic -> the walk -> metrics (table), <name>.metrics (topic)

One streaming query reads both topics. Each batch is folded by the core's rules, from the state that the last one left
in the table `metrics_state`, so that what is counted is what took effect; `windows` says how a batch is counted once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from app.processes import stop_signals
from marq.errors import BrokerError, PipelineError, TopicError
from pipeline import files, tables
from pipeline.archive import BATCH_OFFSETS, LOOK_S, STOP_S
from pipeline.kafka import Kafka, offsets_json
from pipeline.logs import Bounds, bounds
from pipeline.options import Job, job_options
from pipeline.session import explain
from pipeline.windows import METRICS_ROW, STATE_ROW, VERSION, Positions, Windows, left_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

METRICS = "metrics"
STATE = "metrics_state"
CHECKPOINT = "checkpoints/metrics"

#: Property of the tables: the length of their windows.
WINDOW = "marq.window_ms"

#: Days for which the topic keeps a row that no later one replaces.
TOPIC_DAYS = 7


@click.command()
@click.option("--once", is_flag=True, help="Count what is there now, then end.")
@click.option(
    "--window", "window_s", default=60, show_default=True, type=click.IntRange(1, 86_400), help="Seconds of a window."
)
@click.option(
    "--late",
    "late_s",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0),
    help="A window is final once records so many seconds after its end were read.",
)
@click.option(
    "--interval", default=10.0, show_default=True, type=click.FloatRange(min=0), help="Seconds between batches."
)
@click.option("--topic", metavar="NAME", help="Topic of the rows (default: <name>.metrics); made if it is missing.")
@click.option(
    "--accept-loss", is_flag=True, help="Go on although records were deleted from Kafka before they were counted."
)
@job_options
def command(
    job: Job, once: bool, window_s: int, late_s: float, interval: float, topic: str | None, accept_loss: bool
) -> None:
    """Count what happens in each queue, in windows of time, into a table and a topic, until stopped."""
    with stop_signals() as stopped:
        counting = Counting(
            job,
            topic=topic,
            window_ms=window_s * 1000,
            late_ms=round(late_s * 1000),
            once=once,
            interval_s=interval,
            accept_loss=accept_loss,
            stopped=stopped,
        )
        counting.check()
        with job.session("metrics") as spark:
            counting.run(spark)


class Counting:
    """One run of the job."""

    def __init__(
        self,
        job: Job,
        *,
        topic: str | None = None,
        window_ms: int = 60_000,
        late_ms: int = 10_000,
        once: bool = True,
        interval_s: float = 0,
        accept_loss: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.job = job
        self.kafka: Kafka = job.kafka
        self.topic = topic or f"{job.settings.name}.metrics"
        self.window_ms = window_ms
        self.late_ms = late_ms
        self.once = once
        self.interval_s = interval_s
        self.accept_loss = accept_loss
        self.stopped = stopped
        self.checkpoint = job.path(CHECKPOINT)
        self._began: Positions = {}
        self._cleaned = ""
        self._query: StreamingQuery | None = None

    # -- before anything is written

    def check(self) -> None:
        """Find the topics, and make that of the rows. Raises `TopicError`, `BrokerError`."""
        settings = self.job.settings
        there = self.kafka.topics()
        ours = (settings.queue_topic, settings.markers_topic, settings.poison_topic, settings.queues_topic)
        for topic in ours[:2]:
            self.kafka.require(topic, there)
        if self.topic in ours:
            raise PipelineError(f"{self.topic} is a topic of marq's own; choose another with --topic")
        if self.topic not in there:
            _make_topic(self.kafka, self.topic, settings.replication)

    def _open(self, spark: SparkSession) -> None:
        """Make or check the tables and the checkpoint."""
        from pyspark.sql.types import StructType

        settings = self.job.settings
        source = " ".join(self.kafka.source_of(topic) for topic in (settings.queue_topic, settings.markers_topic))
        properties = tables.kept_small() | {
            WINDOW: str(self.window_ms),
            # a batch changes the last few of a day's rows
            "delta.enableDeletionVectors": "true",
        }
        begun = bool(files.names(spark, f"{self.checkpoint}/offsets"))
        for name, schema, by in ((METRICS, METRICS_ROW, "day"), (STATE, STATE_ROW, "partition")):
            path = self.job.path(name)
            if begun and not tables.is_table(spark, path):
                raise PipelineError(
                    f"{path} is gone, but {self.checkpoint} goes on behind what was in it; put the table back, or "
                    f"delete the checkpoint, {self.job.path(METRICS)} and {self.job.path(STATE)} to count anew what "
                    "Kafka still has"
                )
            tables.open_table(
                spark,
                path,
                StructType.fromDDL(schema),
                version=VERSION,
                partition_by=[by],
                source=source,
                properties=properties,
            )
            self._check_window(path, tables.properties_of(spark, path).get(WINDOW))
        self._clean(spark)

    def _check_window(self, path: str, found: str | None) -> None:
        if found is not None and found != str(self.window_ms):
            raise PipelineError(
                f"{path} has windows of {int(found) / 1000:g} s; give --window {int(found) / 1000:g}, or choose "
                "another folder with --data"
            )

    def _clean(self, spark: SparkSession) -> None:
        """Once a day, delete the files that no version needs any more."""
        from delta.tables import DeltaTable

        if self._cleaned == tables.today():
            return
        self._cleaned = tables.today()
        for path in (self.job.path(METRICS), self.job.path(STATE)):
            tables.vacuum_daily(spark, path, DeltaTable.forPath(spark, path))

    # -- running

    def run(self, spark: SparkSession) -> None:
        """Count until all that was there is (`once`), or until stopped.

        A Kafka that goes away while the job runs without `once` is waited for.
        """
        self._open(spark)
        click.echo(
            f"Counting {self.job.settings.name} into {self.job.path(METRICS)} and {self.topic}"
            + ("" if self.once else "  (Ctrl-C stops it)")
        )
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
        self._tell(spark)

    def _tell(self, spark: SparkSession) -> None:
        left = left_of(spark, self.job.path(STATE))
        ends = {n: (one.kept.position, one.kept.markers_position) for n, one in left.items()}
        messages, markers = (sum(end[log] - self._began.get(n, end)[log] for n, end in ends.items()) for log in (0, 1))
        click.echo(f"Counted {messages} messages, {markers} markers")

    def _stream(self, spark: SparkSession) -> None:
        there = bounds(spark, self.kafka)
        positions = self._positions(spark, there)
        self._began = positions | self._began
        self._query = query = self._start(spark, there, positions)
        try:
            while query.isActive and not self.stopped():
                time.sleep(LOOK_S)
            self._raise_failure(spark)
        finally:
            deadline = time.monotonic() + STOP_S
            while time.monotonic() < deadline and query.isActive and query.status["isTriggerActive"]:
                time.sleep(LOOK_S / 4)
            query.stop()

    def _positions(self, spark: SparkSession, there: Mapping[int, Bounds]) -> Positions:
        """Where to go on, in both logs; raises for what is lost."""
        found = {}
        left = left_of(spark, self.job.path(STATE))
        settings = self.job.settings
        for number, bound in there.items():
            if number not in left:
                found[number] = (bound.queue_start, bound.markers_start)
                continue
            begun = left[number].kept
            pairs = (
                (settings.queue_topic, begun.position, bound.queue_start, bound.queue_end),
                (settings.markers_topic, begun.markers_position, bound.markers_start, bound.markers_end),
            )
            for topic, position, start, end in pairs:
                self._refuse_loss(f"{topic} partition {number}", position, start, end)
            found[number] = (
                max(begun.position, bound.queue_start),
                max(begun.markers_position, bound.markers_start),
            )
        return found

    def _refuse_loss(self, where: str, position: int, start: int, end: int) -> None:
        if position > end:
            raise PipelineError(
                f"{self.job.path(STATE)} is at offset {position} of {where}, which ends at {end}: it is of another "
                "topic of that name; choose another folder with --data"
            )
        if position < start and not self.accept_loss:
            raise PipelineError(
                f"lost: offsets {position} to {start - 1} of {where} were deleted from Kafka before they were counted; "
                "--accept-loss goes on without them"
            )

    def _start(self, spark: SparkSession, there: Mapping[int, Bounds], positions: Positions) -> StreamingQuery:
        settings = self.job.settings
        starts = {
            topic: {number: at[log] for number, at in positions.items()}
            for log, topic in enumerate((settings.queue_topic, settings.markers_topic))
        }
        source = (
            spark.readStream.format("kafka")
            .options(**self.kafka.source_options())
            .option("subscribe", ",".join(starts))
            # Only a query without a checkpoint looks at it.
            .option("startingOffsets", offsets_json(starts))
            .option("maxOffsetsPerTrigger", str(BATCH_OFFSETS))
            .option("failOnDataLoss", str(not self.accept_loss).lower())
            .load()
        )
        writer = source.writeStream.queryName("metrics").option("checkpointLocation", self.checkpoint)
        trigger = {"availableNow": True} if self.once else {"processingTime": f"{self.interval_s} seconds"}
        windows = Windows(
            settings,
            self.job.path(METRICS),
            self.job.path(STATE),
            self.checkpoint,
            self.topic,
            self.kafka.sink_options(),
            self.window_ms,
            self.late_ms,
            there,
            self._clean,
        )
        return writer.foreachBatch(windows).trigger(**trigger).start()

    def _raise_failure(self, spark: SparkSession) -> None:
        error = self._query.exception() if self._query is not None else None
        if error is None:
            return
        self._positions(spark, bounds(spark, self.kafka))  # an error of its own if Kafka is away, or records are lost
        raise PipelineError(
            f"counting failed: {explain(error)}; nothing is lost: start it again, --verbose shows Spark's log"
        )

    def _await_kafka(self) -> None:
        while not self.stopped():
            try:
                self.kafka.topics()
            except BrokerError:
                time.sleep(1)
            else:
                return


# ------------------------------------------------------------------ the topic


def _make_topic(kafka: Kafka, topic: str, replication: int | None) -> None:
    """A compacted topic of one partition, so that its rows are in order."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import NewTopic

    config = {"cleanup.policy": "compact,delete", "retention.ms": str(TOPIC_DAYS * 86_400_000)}
    brokers = len(kafka.admin.list_topics(timeout=10).brokers)
    new = NewTopic(topic, 1, replication or min(3, brokers), config=config)
    try:
        kafka.admin.create_topics([new])[topic].result()
    except KafkaException as error:
        raise TopicError(
            f"topic {topic} could not be created: {error.args[0].str()}; create it yourself, or choose another with "
            "--topic"
        ) from None
