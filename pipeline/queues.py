"""The queues and their settings, read from the compacted topic of queue settings, or from the archive's copy of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from marq.core.policies import QueueSettings, name_problem
from marq.core.settings import check_record_version
from marq.core.versions import is_of_installation, place_of_queue
from marq.errors import BadValueError, NewerVersionError, NotPossibleError, PipelineError, UnknownQueueError
from pipeline import tables
from pipeline.compacted import records_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from pipeline.kafka import Kafka
    from pipeline.options import Job


#: Table of the archive with the records of queues.
ARCHIVED = "archive/queues"
ARCHIVED_VERSION = 1
#: After the table was written, it is not written again for so many times as long.
PAUSE_WRITES = 20
_AUTO_PREFIX = b"\0auto/"
#: Milliseconds by which the clock of a worker, which dates a queue, may be behind the brokers'.
SKEW_MS = 5_000


class _Record(msgspec.Struct, frozen=True):
    """The part of a queue's record that jobs need."""

    version: int
    settings: QueueSettings
    state: Literal["active", "deleting", "deleted"] = "active"
    created_ms: int = 0
    generation: int = msgspec.field(default=0, name="life")


class Queues:
    """The queues of an installation at one moment.

    Args:
        records: key and value of the records of queues; a later one replaces an earlier one.
        auto_create: whether a message to an unknown queue creates it.

    Raises:
        PipelineError: a record is of a later version.
    """

    def __init__(self, records: Iterable[tuple[bytes, bytes | None]], *, auto_create: bool = True) -> None:
        self._auto_create = auto_create
        self._records: dict[str, _Record] = {}
        self._auto: set[str] = set()
        for key, value in records:
            if key.startswith(_AUTO_PREFIX):
                self._auto.add(key.removeprefix(_AUTO_PREFIX).decode())
            elif is_settings(key) and value is not None:
                self._note(key.decode(), value)

    @classmethod
    def of(cls, kafka: Kafka) -> Queues:
        """The queues as Kafka has them now.

        Raises:
            BrokerError: the topic can't be read.
            PipelineError: a record is of a later version.
        """
        kafka.partitions(kafka.settings.queues_topic)
        records = records_of(kafka.client_config(), kafka.settings.queues_topic)
        return cls(records, auto_create=kafka.settings.auto_create)

    def _note(self, queue: str, value: bytes) -> None:
        try:
            check_record_version(value)
            record = msgspec.json.decode(value, type=_Record)
        except msgspec.MsgspecError:
            return  # workers ignore it too
        except NewerVersionError as error:
            if not is_of_installation(value, place_of_queue(queue), ()):
                return  # workers ignore it too
            raise PipelineError(f"queue {queue!r} has {error}") from None
        known = self._records.get(queue)
        if known is None or record.version > known.version:
            self._records[queue] = record

    def exists(self, queue: str) -> bool:
        """Whether a queue was created, explicitly or by a message, or is another one's dead-letter queue."""
        record = self._records.get(queue)
        if record is not None:
            return record.state == "active"
        return queue in self._auto or any(
            other.settings.dead_letters_of(name) == queue
            for name, other in self._records.items()
            if other.state == "active"
        )

    def require_sendable(self, queue: str) -> None:
        """Raises `RequestError` if nothing can be sent to `queue`."""
        problem = name_problem(queue)
        if problem is not None:
            raise BadValueError(problem)
        if not self._auto_create and not self.exists(queue):
            raise UnknownQueueError(f"there is no queue {queue!r}, and MARQ_AUTO_CREATE is off: create it first")

    def delay_ms(self, queue: str) -> int:
        """Delay of messages that are sent to a queue without one of their own, in milliseconds."""
        record = self._records.get(queue)
        return record.settings.delay_ms if record is not None and record.state == "active" else 0

    def missing(self, queues: Iterable[str]) -> list[str]:
        """Those of `queues` that don't exist, whose messages workers would quarantine as poison."""
        return [] if self._auto_create else [queue for queue in queues if not self.exists(queue)]

    def dead_letter_queues(self) -> frozenset[str]:
        """The dead-letter queues that the settings of queues name."""
        records = self._records.values()
        return frozenset(r.settings.dead_letter_queue for r in records if r.state == "active") - {""}

    def is_fifo(self, queue: str) -> bool:
        """Whether the messages of a queue are delivered in the order of their groups."""
        record = self._records.get(queue)
        return record is not None and record.state == "active" and record.settings.fifo

    def fifo(self) -> dict[str, bool]:
        """FIFO queues -> whether all messages of the queue go to one partition, not only those of a group."""
        return {q: r.settings.deduplication_scope == "queue" for q, r in self._records.items() if self.is_fifo(q)}

    def fifo_since(self) -> dict[str, int]:
        """FIFO queues -> since when all their messages are delivered in order, in milliseconds of the brokers' time.

        Messages that were sent before the queue was made, or to a standard queue of its name, were not.
        """
        return {
            queue: record.created_ms + (SKEW_MS if record.generation else 0)
            for queue, record in self._records.items()
            if self.is_fifo(queue)
        }

    def delays(self) -> dict[str, int]:
        """The delays of all queues that have one, in milliseconds."""
        return {queue: delay for queue in self._records if (delay := self.delay_ms(queue))}


def is_settings(key: bytes) -> bool:
    """Whether a record of this key has the settings of a queue."""
    return not key.startswith(b"\0")


class QueuesArchive:
    """Keeps the records of queues in the archive, where an audit without Kafka finds them.

    The table is a copy of the topic, not its history: it is written anew when a queue has changed, which takes up to a
    twentieth of the time. Of the topic only what is new is read.
    """

    def __init__(self, job: Job, spark: SparkSession) -> None:
        self._kafka = job.kafka
        self._topic = job.settings.queues_topic
        self._path = job.path(ARCHIVED)
        self._spark = spark
        self._end: int | None = None  # of the topic, when it was read last
        self._next_s = 0.0  # when the table may be written again
        tables.check(spark, self._path, version=ARCHIVED_VERSION)
        self._written = dict(archived_queues(spark, job) or ())
        self._records: dict[bytes, bytes] = {}

    def open(self) -> None:
        """Create or check the table. Raises `PipelineError`."""
        properties = tables.kept_small()
        table = tables.open_table(self._spark, self._path, _schema(), version=ARCHIVED_VERSION, properties=properties)
        tables.vacuum_daily(self._spark, self._path, table)

    def update(self, *, at_once: bool) -> None:
        """Copy what has changed, at once or if the time for it has come. Raises `BrokerError`."""
        if not at_once and time.monotonic() < self._next_s:
            return
        start, end = self._kafka.bounds(self._topic)[0]
        if end != self._end:
            self._read(start, end)
        if self._records != self._written:
            began = time.monotonic()
            records = sorted(self._records.items())
            rows = [(ARCHIVED_VERSION, key.decode(), bytearray(value)) for key, value in records]
            self._spark.createDataFrame(rows, _schema()).write.format("delta").mode("overwrite").save(self._path)
            self._written = dict(self._records)
            self._next_s = time.monotonic() + PAUSE_WRITES * (time.monotonic() - began)

    def _read(self, start: int, end: int) -> None:
        """Take up what the topic has gained, or all of it: at first, and where what came last is gone."""
        known, records = self._end, self._records
        if known is None or not start <= known <= end:
            known, records = 0, {}
        for key, value in records_of(self._kafka.client_config(), self._topic, known):
            if not is_settings(key):
                continue
            if value is None:
                records.pop(key, None)
            else:
                records[key] = value
        self._end, self._records = end, records


def _schema() -> StructType:
    from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

    return StructType(
        [
            StructField("schema_version", IntegerType(), False),
            StructField("queue", StringType(), False),
            StructField("record", BinaryType(), False),
        ]
    )


def archived_queues(spark: SparkSession, job: Job) -> list[tuple[bytes, bytes]] | None:
    """The records of queues that are in the archive; None if it was made by a version that did not keep them.

    Raises:
        PipelineError: the table is of a later version.
    """
    path = job.path(ARCHIVED)
    if not tables.is_table(spark, path):
        return None
    table = tables.read_table(spark, path, "python -m pipeline archive", version=ARCHIVED_VERSION)
    return [(row.queue.encode(), bytes(row.record)) for row in table.select("queue", "record").collect()]


def require_ours(kafka: Kafka) -> None:
    """Raises `NotPossibleError` in topic mode, where the topic is the user's."""
    if kafka.topic_mode:
        raise NotPossibleError(
            f"in topic mode marq never writes to the topic: send to {kafka.settings.queue_topic} with a Kafka producer"
        )
