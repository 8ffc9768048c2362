"""`python -m pipeline metrics`: counts and times of each queue by windows of time, to a table and a topic.

    queue topic, markers topic -> the walk -> metrics (table), <name>.metrics (topic)

One streaming query reads both topics. Each batch is folded by the core's rules, from the state that the last one left
in the table `metrics_state`, so only markers that took effect are counted. `windows` says how a batch is counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

import click

from app.processes import stop_signals
from marq.errors import PipelineError, TopicError
from marq.text import plural
from pipeline import tables
from pipeline.checkpoints import Checkpoint
from pipeline.kafka import Kafka
from pipeline.logs import Bounds, bounds
from pipeline.options import Job, job_options
from pipeline.resuming import check_manifests
from pipeline.streams import Streaming
from pipeline.windows import METRICS_ROW, STATE_ROW, VERSION, Positions, Windows, left_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

METRICS = "metrics"
STATE = "metrics_state"
CHECKPOINT = "checkpoints/metrics"

#: Property of the tables: length of their windows, in milliseconds.
WINDOW = "marq.window_ms"

#: Days for which the topic keeps a row that no later row replaces.
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
        with job.session("metrics", lasting=not once) as spark:
            counting.run(spark)


class Counting(Streaming):
    """One run of the job."""

    done = "counted"

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
        super().__init__(job, once=once, interval_s=interval_s, accept_loss=accept_loss, stopped=stopped)
        self.topic = topic or f"{job.settings.name}.metrics"
        self.window_ms = window_ms
        self.late_ms = late_ms
        self.checkpoint = job.path(CHECKPOINT)
        self._began: Positions = {}
        self._cleaned = ""

    # -- before anything is written

    def check(self) -> None:
        """Find the topics, and create the one for the rows. Raises `TopicError`, `BrokerError`."""
        settings = self.job.settings
        there = self.kafka.topics()
        ours = (settings.queue_topic, settings.markers_topic, settings.poison_topic, settings.queues_topic)
        for topic in ours[:2]:
            self.kafka.require(topic, there)
        if self.topic in ours:
            raise PipelineError(f"{self.topic} is one of marq's own topics; choose another with --topic")
        if self.topic not in there:
            _make_topic(self.kafka, self.topic)

    def open(self, spark: SparkSession) -> str:
        """Create or check the tables and the checkpoint."""
        from pyspark.sql.types import StructType

        settings = self.job.settings
        source = " ".join(self.kafka.source_of(topic) for topic in (settings.queue_topic, settings.markers_topic))
        properties = tables.kept_small() | {
            WINDOW: str(self.window_ms),
            # a batch changes only the last few rows of a day
            "delta.enableDeletionVectors": "true",
        }
        begun = Checkpoint(spark, self.checkpoint).exists()
        for name in (METRICS, STATE):
            path = self.job.path(name)
            if tables.check(spark, path, version=VERSION, source=source) is None and begun:
                raise PipelineError(
                    f"{path} is gone, but {self.checkpoint} continues after what was in it; restore the table, or "
                    f"delete the checkpoint, {self.job.path(METRICS)} and {self.job.path(STATE)} to count again what "
                    "Kafka still has"
                )
        for name, schema, by in ((METRICS, METRICS_ROW, "day"), (STATE, STATE_ROW, "partition")):
            path = self.job.path(name)
            tables.open_table(
                spark,
                path,
                cast(StructType, StructType.fromDDL(schema)),
                version=VERSION,
                partition_by=[by],
                source=source,
                properties=properties,
            )
            self._check_window(path, tables.properties_of(spark, path).get(WINDOW))
        self._clean(spark)
        return f"Counting {settings.name} into {self.job.path(METRICS)} and {self.topic}"

    def _check_window(self, path: str, found: str | None) -> None:
        if found is not None and found != str(self.window_ms):
            raise PipelineError(
                f"{path} has windows of {int(found) / 1000:g} s; give --window {int(found) / 1000:g}, or choose "
                "another folder with --data"
            )

    def _clean(self, spark: SparkSession) -> None:
        """Once a day, delete the files that no version needs any longer."""
        from delta.tables import DeltaTable

        if self._cleaned == tables.today():
            return
        self._cleaned = tables.today()
        for path in (self.job.path(METRICS), self.job.path(STATE)):
            tables.vacuum_daily(spark, path, DeltaTable.forPath(spark, path))

    # -- running

    def outcome(self, spark: SparkSession) -> str:
        left = left_of(spark, self.job.path(STATE))
        ends = {n: (one.resume_state.position, one.resume_state.markers_position) for n, one in left.items()}
        messages, markers = (sum(end[log] - self._began.get(n, end)[log] for n, end in ends.items()) for log in (0, 1))
        return f"Counted {plural(messages, 'message')}, {plural(markers, 'marker')}"

    def start(self, spark: SparkSession) -> Iterator[StreamingQuery]:
        there = bounds(spark, self.kafka)
        check_manifests(spark.read.format("delta").load(self.job.path(STATE)), self.job.path(STATE))
        positions = self._positions(spark, there)
        self._began = positions | self._began
        starts = {
            topic: {number: at[log] for number, at in positions.items()}
            for log, topic in enumerate((self.job.settings.queue_topic, self.job.settings.markers_topic))
        }
        windows = Windows(
            settings=self.job.settings,
            metrics=self.job.path(METRICS),
            state=self.job.path(STATE),
            checkpoint=self.checkpoint,
            topic=self.topic,
            sink_options=self.kafka.sink_options(),
            window_ms=self.window_ms,
            late_ms=self.late_ms,
            there=there,
            after=self._clean,
        )
        yield self.query(spark, "metrics", starts, self.checkpoint, windows)

    def failed(self, spark: SparkSession, query: StreamingQuery) -> str:
        self._positions(spark, bounds(spark, self.kafka))
        return "counting"

    def _positions(self, spark: SparkSession, there: Mapping[int, Bounds]) -> Positions:
        """Where to go on, in both logs. Raises if records were lost."""
        found = {}
        left = left_of(spark, self.job.path(STATE))
        settings = self.job.settings
        for number, bound in there.items():
            if number not in left:
                found[number] = (bound.queue_start, bound.markers_start)
                continue
            begun = left[number].resume_state
            pairs = (
                (settings.queue_topic, begun.position, bound.queue_start, bound.queue_end),
                (settings.markers_topic, begun.markers_position, bound.markers_start, bound.markers_end),
            )
            for topic, position, start, end in pairs:
                self.refuse_loss(self.job.path(STATE), topic, number, position, start, end)
            found[number] = (
                max(begun.position, bound.queue_start),
                max(begun.markers_position, bound.markers_start),
            )
        return found


# ------------------------------------------------------------------ the topic


def _make_topic(kafka: Kafka, topic: str) -> None:
    """Create a compacted topic of one partition, so that its rows are in order."""
    from confluent_kafka import KafkaException

    config = {"cleanup.policy": "compact,delete", "retention.ms": str(TOPIC_DAYS * 86_400_000)}
    try:
        kafka.create(topic, config)
    except KafkaException as error:
        raise TopicError(
            f"topic {topic} could not be created: {error.args[0].str()}; create it yourself, or choose another with "
            "--topic"
        ) from None
