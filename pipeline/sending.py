"""Rows into the queue topic, each exactly once: how `load` and `replay` send what they chose.

The rows are *staged* first: written to a Delta table in one commit, numbered and checked. Rows of a target partition
belong to one *slice*, in the order of their numbers. One task sends a slice, in transactions of a few thousand rows;
each transaction also writes the slice's progress to the ledger. The producer of a slice has a fixed transactional id.
So when a later run, or another attempt of the task, begins, Kafka aborts what an earlier one left open and refuses what
that one still sends. Then the ledger says where to go on.

A transaction is open only while its rows are sent, because readers of the queue topic wait at an open one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from marq.errors import MarqError, PipelineError
from marq.protocol.limits import MESSAGE_MAX_BYTES
from pipeline.ledger import Ledger, Progress, State

if TYPE_CHECKING:
    import pyarrow

#: Most slices of a job: with a rate, so many producers exist at once.
MAX_SLICES = 16
#: Most rows and bytes of one transaction.
CHUNK_ROWS = 5_000
CHUNK_BYTES = MESSAGE_MAX_BYTES
#: With a rate: seconds' worth of rows in one transaction.
CHUNK_S = 0.25
#: Milliseconds until Kafka aborts the transaction of a sender that is gone; readers of the queue wait so long.
TRANSACTION_TIMEOUT_MS = 10_000
#: Seconds for which a task repeats what Kafka does not take.
PATIENCE_S = 60.0
#: Most bytes of a record that the producer accepts. A message's own limit is checked when it is staged.
SENT_MAX_BYTES = MESSAGE_MAX_BYTES + 16 * 1024

RESULT_SCHEMA = "slice int, sent long, error string"


class Row(NamedTuple):
    """A message to send: a staged row with its partition and slice."""

    row: int
    slice: int
    partition: int
    queue: str
    payload: bytes
    headers: list[tuple[str, bytes | None]]


class SupersededError(MarqError):
    """Another run of the same job has taken over."""


@dataclass(frozen=True)
class Plan:
    """What a task needs to know. It is sent to the executors."""

    ledger: Ledger
    run: str
    queue_topic: str
    partitions: int
    rate: float | None = None

    @property
    def slices(self) -> int:
        return min(self.partitions, MAX_SLICES)

    def transactional_id(self, number: int) -> str:
        """The id that all senders of a slice share, so that each fences the earlier ones."""
        return f"{self.ledger.topic}/{self.ledger.job}/{number}"


class Sender:
    """Sends the rows of one slice in transactions. Its methods raise `MarqError`."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan = plan
        self._number = number
        self._producer: Any = None
        self.progress = Progress()
        self.sent = 0

    def start(self) -> None:
        """Abort what earlier senders of the slice left open, fence them, and read how far they got."""
        self._patiently(self._renew)

    def send(self, rows: Sequence[Row]) -> None:
        """Send those of the rows that are not sent yet."""
        self._patiently(lambda: self._transact([row for row in rows if row.row >= self.progress.next_row]))

    def _patiently(self, step: Callable[[], None]) -> None:
        """Do a step. If it fails, do it again with a new producer; the ledger says whether it was done already."""
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + PATIENCE_S
        pause_s = 0.1
        fresh = True
        while True:
            try:
                if not fresh:
                    self._renew()
                step()
                return
            except KafkaException as error:
                if time.monotonic() > deadline:
                    raise PipelineError(
                        f"Kafka did not take rows of slice {self._number}: {error.args[0].str()}; run the job again, "
                        "it goes on where it stopped"
                    ) from None
            fresh = False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    def _renew(self) -> None:
        # first of all, before using the transactional id: a task of an earlier run must not disturb the present one
        self._read()
        self._producer = new_producer(self._plan, self._number)
        self._producer.init_transactions(PATIENCE_S)
        self.progress = self._read().slice(self._number)

    def _read(self) -> State:
        state = self._plan.ledger.read()
        if state.run != self._plan.run:
            raise SupersededError(f"another run of job {self._plan.ledger.job} has taken over; this one stops")
        return state

    def _transact(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        producer, ledger, topic = self._producer, self._plan.ledger, self._plan.queue_topic
        keys = {queue: queue.encode() for queue in {row.queue for row in rows}}
        progress = Progress(rows[-1].row + 1, self.progress.sent + len(rows))
        producer.begin_transaction()
        for row in rows:
            _produce(producer, topic, row.payload, keys[row.queue], row.partition, headers=row.headers or None)
        key, value = ledger.record(self._number, progress)
        _produce(producer, ledger.topic, value, key, 0)
        producer.commit_transaction()
        self.progress = progress
        self.sent += len(rows)


def _produce(producer: Any, *record: Any, **values: Any) -> None:
    while True:
        try:
            producer.produce(*record, **values)
            return
        except BufferError:
            producer.poll(0.05)


def new_producer(plan: Plan, number: int) -> Any:
    """The producer of a slice. It does nothing before `init_transactions`."""
    from confluent_kafka import Producer

    # We handle the error of being fenced. A client without a logger of its own also writes it to stderr.
    silent = logging.Logger("silent", logging.CRITICAL + 1)
    return Producer(
        {
            **plan.ledger.client,
            "transactional.id": plan.transactional_id(number),
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "message.max.bytes": SENT_MAX_BYTES,
            "linger.ms": 5,
            "batch.size": 512 * 1024,
        },
        logger=silent,
    )


# -- in the tasks -------------------------------------------------------------------------------------


def rows_of(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[Row]:
    """The rows in Arrow batches that have the columns of `Row`."""
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in ("row", "slice", "partition", "queue", "payload")]
        headers = batch.column("headers").to_pylist()
        for row, number, partition, queue, payload, entries in zip(*columns, headers, strict=True):
            yield Row(row, number, partition, queue, payload, [(h["key"], h["value"]) for h in entries or ()])


def chunks_of(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    """Rows in lists of at most `most`, and of about `CHUNK_BYTES`."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.payload) + sum(len(value or b"") for _, value in row.headers)
        if len(chunk) >= most or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class Pace:
    """Limits rows to a rate per second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._due = time.monotonic()

    def wait(self, count: int) -> None:
        """Wait until `count` more rows may go. Time that was lost is not made up for."""
        now = time.monotonic()
        if self._due > now:
            time.sleep(self._due - now)
        self._due = max(self._due, now) + count / self._rate


def _send_slices(plan: Plan, rows: Iterator[Row]) -> Iterator[tuple[int, int]]:
    """Send one slice after another, as fast as Kafka takes them."""
    for number, of_slice in groupby(rows, attrgetter("slice")):
        sender = Sender(plan, number)
        sender.start()
        left = (row for row in of_slice if row.row >= sender.progress.next_row)
        for chunk in chunks_of(left, CHUNK_ROWS):
            sender.send(chunk)
        yield number, sender.sent


def _send_paced(plan: Plan, rows: Iterator[Row]) -> Iterator[tuple[int, int]]:
    """Send all slices at once, in the order of the rows, at the plan's rate."""
    assert plan.rate is not None
    senders = {number: Sender(plan, number) for number in range(plan.slices)}
    pace = Pace(plan.rate)
    most = max(1, min(CHUNK_ROWS, math.ceil(plan.rate * CHUNK_S)))
    with ThreadPoolExecutor(plan.slices) as pool:
        list(pool.map(Sender.start, senders.values()))
        left = (row for row in rows if row.row >= senders[row.slice].progress.next_row)
        for chunk in chunks_of(left, most):
            pace.wait(len(chunk))
            parts: dict[int, list[Row]] = {}
            for row in chunk:
                parts.setdefault(row.slice, []).append(row)
            list(pool.map(lambda part: senders[part[0]].send(part[1]), parts.items()))
    for number, sender in senders.items():
        yield number, sender.sent


def send_batches(plan: Plan, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Send the rows of a Spark task. Yields `RESULT_SCHEMA`; an error is a row too, so that Spark neither repeats the
    task nor wraps the error into a trace.
    """
    import pyarrow as pa

    results: list[tuple[int, int, str | None]] = []
    send = _send_slices if plan.rate is None else _send_paced
    try:
        results += [(number, sent, None) for number, sent in send(plan, rows_of(batches))]
    except MarqError as error:
        results.append((-1, 0, str(error)))
    numbers, sent, errors = zip(*results, strict=True) if results else ((), (), ())
    yield pa.RecordBatch.from_arrays(
        [pa.array(numbers, pa.int32()), pa.array(sent, pa.int64()), pa.array(errors, pa.string())],
        names=["slice", "sent", "error"],
    )
