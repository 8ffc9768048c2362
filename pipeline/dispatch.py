"""The driver's part of a sending job: take the job over, hand its staged rows to tasks, record that it is done."""

from __future__ import annotations

import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from marq.errors import BadValueError, BrokerError, PipelineError
from pipeline import progress
from pipeline.console import say
from pipeline.ledger import Done, Input, Ledger, State, ledger_topic
from pipeline.sending import PATIENCE_S, RESULT_SCHEMA, Plan, Row, new_producer, send_batches

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from pipeline.options import Job

#: Rows without a group that go to the same partition one after another.
RUN_ROWS = 100
#: Most rows and bytes that a task gets at once: they become Python objects, several batches at a time.
_BATCH = {"spark.sql.execution.arrow.maxRecordsPerBatch": "2000", "spark.sql.execution.arrow.maxBytesPerBatch": "8m"}

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Outcome:
    """The result of a run: rows that it sent, rows sent by earlier runs, and rows set aside."""

    sent: int
    already_sent: int
    skipped: int


class Dispatch:
    """One run of a job.

    Args:
        kind: kind of job, the first part of its name.
        name: the name from the user; without one the job is named by a hash of what it sends.
        what: what it sends, as plain data.
        rate: most rows a second.

    Raises:
        BrokerError, TopicError: Kafka can't be reached, or has no queue topic.
        BadValueError: the name is invalid.
    """

    def __init__(self, job: Job, kind: str, name: str | None, what: Any, rate: float | None = None) -> None:
        if name is not None and not _NAME.fullmatch(name):
            raise BadValueError(f"--job {name!r}: a name has 1 to 64 letters, digits, '.', '_' or '-'")
        self.fingerprint = sha256(msgspec.json.encode(what)).hexdigest()
        self.name = f"{kind}-{name or self.fingerprint[:12]}"
        kafka = job.kafka
        topic = kafka.settings.queue_topic
        partitions = kafka.partitions(topic)
        ledger = Ledger(kafka.client_config(), ledger_topic(kafka), self.name)
        self.plan = Plan(ledger, uuid.uuid4().hex, topic, partitions, rate)

    def look(self) -> State:
        """How far the job is, without claiming it. Raises `BrokerError`, and `PipelineError` as `take_over` does."""
        state = self.plan.ledger.read()
        self._check(state.input)
        return state

    def take_over(self) -> State:
        """Claim the job from any earlier run, and return how far it is.

        Raises:
            PipelineError: the job was begun with another input or other options.
            BrokerError: Kafka does not answer, or refuses.
        """
        self.plan.ledger.claim(self.plan.run)
        self._fence()
        return self.look()

    def _fence(self) -> None:
        """End the transactions that killed runs left open, and fence producers of those runs that still live."""
        from confluent_kafka import KafkaException

        def end(number: int) -> None:
            new_producer(self.plan, number).init_transactions(PATIENCE_S)

        try:
            with ThreadPoolExecutor(self.plan.slices) as pool:
                list(pool.map(end, range(self.plan.slices)))
        except KafkaException as error:
            raise BrokerError(
                f"Kafka does not let job {self.name} begin transactions: {error.args[0].str()}; try again"
            ) from None

    def _check(self, known: Input | None) -> None:
        if known is None:
            return
        if known.fingerprint != self.fingerprint:
            raise PipelineError(
                f"job {self.name} was begun with another input or other options: give the same again, or another name "
                "with --job"
            )
        if known.partitions != self.plan.partitions:
            raise PipelineError(
                f"job {self.name} was begun when {self.plan.queue_topic} had {known.partitions} partitions; it has "
                f"{self.plan.partitions} now, so the job can't go on: give another name with --job"
            )

    def send(self, staged: DataFrame, state: State, skipped: int = 0, total: int = 0) -> Outcome:
        """Send the staged rows that are not sent yet, and record that the job is done.

        Args:
            staged: the rows that can be sent.
            state: of the job when it was taken over.
            skipped: rows that were set aside, to be recorded.
            total: rows that can be sent; only to show how far it is.

        Raises:
            PipelineError: Kafka did not take them. The next run goes on from there.
            SupersededError: another run took over.
        """
        plan = self.plan
        if state.input is None:
            plan.ledger.write("input", Input(self.fingerprint, plan.partitions))
        rows = left(spread(staged, plan), state).select(*Row._fields)
        if plan.rate is None:
            rows = rows.repartitionById(plan.slices, rows["slice"]).sortWithinPartitions("slice", "row")
        else:
            rows = rows.coalesce(1).sortWithinPartitions("row")
        for key, value in _BATCH.items():
            rows.sparkSession.conf.set(key, value)
        if total:
            progress.of_rows("sending", total, lambda: plan.ledger.read().sent)
        results = rows.mapInArrow(lambda batches: send_batches(plan, batches), RESULT_SCHEMA).collect()
        for result in results:
            if result["error"] is not None:
                raise PipelineError(result["error"])
        sent = sum(result["sent"] for result in results)
        total = plan.ledger.read().sent
        plan.ledger.write("done", Done(total, skipped))
        return Outcome(sent, total - sent, skipped)


def echo_outcome(outcome: Outcome, seconds: float) -> None:
    """Print the last line of a sending job."""
    say(f"sent {outcome.sent}, already sent {outcome.already_sent}, skipped {outcome.skipped}, {seconds:.1f} s")


def spread(staged: DataFrame, plan: Plan) -> DataFrame:
    """Add to staged rows the partition that each goes to, and its slice.

    The rule is that of marq's own sends: a row with a group goes by the checksum of the group, a row of a queue that
    stays `together` by that of the queue. All others are spread evenly: by `source` if there is one, else in runs. A
    row always goes to the same partition, as only staged data decides.
    """
    from pyspark.sql import functions as F

    turn: Column = F.col("source") if "source" in staged.columns else F.floor(F.col("row") / RUN_ROWS)
    together = F.col("together") if "together" in staged.columns else F.lit(False)
    name = F.when(together, F.col("queue")).otherwise(F.col("group"))
    number = F.when(name.isNotNull(), F.crc32(F.encode(name, "UTF-8"))).otherwise(turn) % plan.partitions
    rows = staged.withColumn("partition", number.cast("int"))
    return rows.withColumn("slice", F.col("partition") % plan.slices)


def left(rows: DataFrame, state: State) -> DataFrame:
    """Rows that are not sent yet. This only saves work: each task checks again."""
    from pyspark.sql import functions as F

    ahead = {number: progress.next_row for number, progress in state.slices.items()}
    if not ahead:
        return rows
    entries = [F.lit(value) for pair in ahead.items() for value in pair]
    reached = F.coalesce(F.try_element_at(F.create_map(*entries), F.col("slice")).cast("long"), F.lit(0))
    return rows.where(F.col("row") >= reached)
