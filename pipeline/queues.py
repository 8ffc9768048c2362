"""The queues and their settings, read from the compacted topic of queue settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from marq.core.policies import QueueSettings, name_problem
from marq.core.settings import check_record_version
from marq.errors import BadValueError, NewerVersionError, NotPossibleError, PipelineError, UnknownQueueError
from pipeline.compacted import records_of

if TYPE_CHECKING:
    from pipeline.kafka import Kafka

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

    Raises:
        BrokerError: the topic can't be read.
    """

    def __init__(self, kafka: Kafka) -> None:
        self._auto_create = kafka.settings.auto_create
        self._records: dict[str, _Record] = {}
        self._auto: set[str] = set()
        kafka.partitions(kafka.settings.queues_topic)
        for key, value in records_of(kafka.client_config(), kafka.settings.queues_topic):
            if key.startswith(_AUTO_PREFIX):
                self._auto.add(key.removeprefix(_AUTO_PREFIX).decode())
            elif not key.startswith(b"\0") and value is not None:
                self._note(key.decode(), value)

    def _note(self, queue: str, value: bytes) -> None:
        try:
            check_record_version(value)
            record = msgspec.json.decode(value, type=_Record)
        except msgspec.MsgspecError:
            return  # workers ignore it too
        except NewerVersionError as error:
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


def require_ours(kafka: Kafka) -> None:
    """Raises `NotPossibleError` in topic mode, where the topic is the user's."""
    if kafka.topic_mode:
        raise NotPossibleError(
            f"in topic mode marq never writes to the topic: send to {kafka.settings.queue_topic} with a Kafka producer"
        )
