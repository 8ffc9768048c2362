"""Base of the jobs that stream from Kafka into tables, until stopped or until all that was there is done.

When they stop, batches in progress are finished first. They wait for a Kafka that goes away. If Spark fails at a batch
because of damaged records, the batch is repeated around the damage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from marq.errors import BrokerError, PipelineError
from pipeline.checkpoints import Checkpoint
from pipeline.console import say
from pipeline.damage import CAREFUL_OFFSETS, Damaged, behind, find, readable
from pipeline.kafka import Kafka, Offsets, offsets_json
from pipeline.options import Job
from pipeline.session import explain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: Most offsets of one batch. More would not take more memory, but a stop could take longer.
BATCH_OFFSETS = 500_000
#: Seconds for batches in progress when the job is asked to stop; then they are broken off, and their work is lost.
STOP_S = 20.0
#: Seconds between checks of the queries.
LOOK_S = 0.2


class Streaming:
    """One run of a job.

    Args:
        once: end when all that was there at the beginning is done.
        interval_s: seconds between batches.
        accept_loss: go on although records were deleted from Kafka before they were read.
        stopped: called often; True ends the run.
    """

    #: What the job does with records, as a past participle, for error messages.
    done: str

    def __init__(
        self,
        job: Job,
        *,
        once: bool = True,
        interval_s: float = 0,
        accept_loss: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.job = job
        self.kafka: Kafka = job.kafka
        self.once = once
        self.interval_s = interval_s
        self.accept_loss = accept_loss
        self.stopped = stopped
        self._queries: list[StreamingQuery] = []
        #: By query id: its checkpoint, and the positions where it begins without one.
        self._places: dict[str, tuple[str, Mapping[str, Offsets]]] = {}
        #: By checkpoint: known damage that is still ahead, and the last batch in which damage was looked for.
        self._damaged: dict[str, Damaged] = {}
        self._searched: dict[str, int] = {}

    # -- what a job implements

    def open(self, spark: SparkSession) -> str:
        """Create or check tables and checkpoints. Returns the text to print at the start."""
        raise NotImplementedError

    def start(self, spark: SparkSession) -> Iterator[StreamingQuery]:
        """Start the queries, and yield each as soon as it runs."""
        raise NotImplementedError

    def failed(self, spark: SparkSession, query: StreamingQuery) -> str:
        """What failed, for the error message. Raises its own error if Kafka can't be reached, or records are lost."""
        raise NotImplementedError

    def look(self) -> None:
        """Called often while the queries run."""

    def outcome(self, spark: SparkSession) -> str:
        """The text to print at the end."""
        raise NotImplementedError

    # -- running

    def run(self, spark: SparkSession) -> None:
        """Process all that is there now (`once`), or go on until stopped.

        Without `once`, it waits for a Kafka that goes away.
        """
        say(self.open(spark) + ("" if self.once else "  (Ctrl-C stops it)"))
        while not self.stopped():
            try:
                self._stream(spark)
            except _Damaged:
                continue
            except BrokerError as error:
                if self.once:
                    raise
                say(f"marq: {error}; waiting for it", err=True)
                self._await_kafka()
                continue
            break
        say(self.outcome(spark) + ("; asked to stop" if self.once and self.stopped() else ""))

    def _stream(self, spark: SparkSession) -> None:
        self._queries.clear()
        try:
            for query in self.start(spark):
                self._queries.append(query)
            while any(query.isActive for query in self._queries) and not self.stopped():
                time.sleep(LOOK_S)
                self.look()
                self._raise_failure(spark)
            self._raise_failure(spark)
        finally:
            self._stop()
        self.look()

    def query(
        self,
        spark: SparkSession,
        name: str,
        positions: Mapping[str, Offsets],
        checkpoint: str,
        each: Callable[[DataFrame, int], None],
    ) -> StreamingQuery:
        """Start a query, which reads around the damage that is known.

        Args:
            positions: the topics that it reads, and where it begins if its checkpoint does not say.
            checkpoint: path of its checkpoint.
            each: processes a batch.
        """

        def take(batch: DataFrame, number: int) -> None:
            damaged = self._damaged.get(checkpoint)
            if not damaged:
                each(batch, number)
                return
            begin, end = _range(batch.sparkSession, checkpoint, number, positions)
            # the batch itself is not used, so Spark does not read it
            each(readable(batch.sparkSession, self.kafka, begin, end, damaged, **self._loss_options()), number)
            self._damaged[checkpoint] = behind(damaged, end)

        source = (
            spark.readStream.format("kafka")
            .options(**self.kafka.source_options())
            .option("subscribe", ",".join(positions))
            .option("startingOffsets", offsets_json(positions))
            .option("maxOffsetsPerTrigger", str(BATCH_OFFSETS))
            .options(**self._loss_options())
            .load()
        )
        writer = source.writeStream.queryName(name).option("checkpointLocation", checkpoint).foreachBatch(take)
        trigger = {"availableNow": True} if self.once else {"processingTime": f"{self.interval_s} seconds"}
        query = writer.trigger(**trigger).start()
        self._places[str(query.id)] = (checkpoint, positions)
        return query

    def _loss_options(self) -> dict[str, str]:
        return {"failOnDataLoss": str(not self.accept_loss).lower()}

    def refuse_loss(self, table: str, topic: str, number: int, position: int, start: int, end: int) -> None:
        """Raise if a table at `position` of a partition can't go on there: the topic has offsets `start` to `end`."""
        where = f"{topic} partition {number}"
        if position > end:
            raise PipelineError(
                f"{table} is at offset {position} of {where}, which ends at {end}: it belongs to another topic of that "
                "name; choose another folder with --data"
            )
        if position < start and not self.accept_loss:
            raise PipelineError(
                f"lost: offsets {position} to {start - 1} of {where} were deleted from Kafka before they were "
                f"{self.done}; --accept-loss goes on without them"
            )

    def _raise_failure(self, spark: SparkSession) -> None:
        for query in self._queries:
            error = query.exception()
            if error is not None:
                what = self.failed(spark, query)
                if self._find_damage(spark, query):
                    raise _Damaged
                raise PipelineError(
                    f"{what} failed: {explain(error)}; nothing is lost: start it again, --verbose shows Spark's log"
                )

    def _find_damage(self, spark: SparkSession, query: StreamingQuery) -> bool:
        """Whether a query failed at damage that was not known before. Prints it."""
        path, positions = self._places[str(query.id)]
        batch = Checkpoint(spark, path).broken_off()
        if batch is None or self._searched.get(path) == batch:
            return False
        begin, end = _range(spark, path, batch, positions)
        found = find(
            self.kafka,
            {
                topic: {number: [(first, end[topic][number] + CAREFUL_OFFSETS)] for number, first in firsts.items()}
                for topic, firsts in begin.items()
            },
        )
        self._searched[path] = batch
        known, self._damaged[path] = self._damaged.get(path, {}), found
        for (topic, number), all_of_it in found.items():
            for damage in all_of_it:
                if damage not in known.get((topic, number), ()):
                    say(f"marq: {topic} partition {number}: {damage}; going on behind it", err=True)
        return bool(found)

    def _stop(self) -> None:
        """Stop the queries after their batches in progress, or after `STOP_S`."""
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and any(q.isActive and q.status["isTriggerActive"] for q in self._queries):
            time.sleep(LOOK_S / 4)
        for query in self._queries:
            query.stop()

    def _await_kafka(self) -> None:
        while not self.stopped():
            try:
                self.kafka.topics()
            except BrokerError:
                time.sleep(1)
            else:
                return


class _Damaged(Exception):
    """A query failed at damage, which is known now, so the next one reads around it."""


def _range(
    spark: SparkSession, checkpoint: str, number: int, positions: Mapping[str, Offsets]
) -> tuple[dict[str, Offsets], dict[str, Offsets]]:
    """Where a batch begins and ends, by topic. `positions`: where the first batch begins."""
    known = Checkpoint(spark, checkpoint)
    end = known.ends(number)
    before = known.ends(number - 1) if number else positions
    begin = {
        topic: {n: before.get(topic, {}).get(n, positions.get(topic, {}).get(n, 0)) for n in ends}
        for topic, ends in end.items()
    }
    return begin, end
