"""Settings of logical queues: a compacted topic, read whole by every worker with a plain consumer.

Not a global table: that would sit in the co-partition group of the queue and markers topics and move partitions for
nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from mode import Service

from app.datadir import resolve_bootstrap
from app.topics import kafka_client_args
from marq.core.policies import QueueSettings
from marq.errors import MarqError

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.settings import Settings


class QueueSettingsError(MarqError):
    """Settings of a queue that can't be."""


_decoder = msgspec.json.Decoder(QueueSettings)
_encoder = msgspec.json.Encoder()


def encode(settings: QueueSettings) -> bytes:
    """The value of a record of the queues topic."""
    return _encoder.encode(settings)


def decode(value: bytes) -> QueueSettings:
    """Inverse of `encode`. Raises `QueueSettingsError`."""
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError as exc:
        raise QueueSettingsError(f"not the settings of a queue: {exc}") from None


class Catalog(Service):
    """What each queue is set to. `changed` callbacks get the name of a queue whose settings are new."""

    def __init__(self, settings: Settings, topic: Callable[[], str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._settings = settings
        self._topic = topic
        self.known: dict[str, QueueSettings] = {}
        self.with_ttl: set[str] = set()
        #: Maximum receives of queues that name none, by queue; set by the handlers.
        self.max_receives_of: Callable[[str], int] = lambda queue: 0
        self._effective: dict[str, QueueSettings] = {}
        self.default = QueueSettings(
            visibility_timeout_ms=settings.visibility_timeout_ms, max_receives=settings.max_receives or 0
        )
        self._consumer: AIOKafkaConsumer | None = None
        self.read_up = asyncio.Event()

    def settings_of(self, queue: str) -> QueueSettings:
        """What is in force for `queue`."""
        settings = self._effective.get(queue)
        if settings is None:
            settings = self.known.get(queue, self.default)
            if self._settings.queue_id is not None and self._settings.dead_letter_topic is None:
                settings = msgspec.structs.replace(settings, max_receives=0)  # nowhere to put a dead letter
            elif not settings.max_receives and (maximum := self.max_receives_of(queue)):
                settings = msgspec.structs.replace(settings, max_receives=maximum)
            if len(self._effective) > 100_000:
                self._effective.clear()
            self._effective[queue] = settings
        return settings

    def put(self, queue: str, settings: QueueSettings | None) -> None:
        """Take over the settings of a queue (None: it has none of its own)."""
        if settings is None:
            self.known.pop(queue, None)
        else:
            self.known[queue] = settings
        self._effective.pop(queue, None)
        if settings is not None and settings.ttl_ms:
            self.with_ttl.add(queue)
        else:
            self.with_ttl.discard(queue)

    async def on_start(self) -> None:
        consumer = AIOKafkaConsumer(
            enable_auto_commit=False, auto_offset_reset="earliest", **kafka_client_args(self._settings)
        )
        await consumer.start()
        self._consumer = consumer
        tp = TopicPartition(self._topic(), 0)
        consumer.assign([tp])
        await consumer.seek_to_beginning(tp)

    @Service.task
    async def _read(self) -> None:
        consumer = self._consumer
        assert consumer is not None
        tp = TopicPartition(self._topic(), 0)
        end = (await consumer.end_offsets([tp]))[tp]
        while not self.should_stop:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    self._take(record)
            if not self.read_up.is_set() and await consumer.position(tp) >= end:
                self.read_up.set()

    def _take(self, record: Any) -> None:
        if record.key is None:
            return
        try:
            queue = record.key.decode()
            self.put(queue, None if record.value is None else decode(record.value))
        except (UnicodeDecodeError, QueueSettingsError) as exc:
            self.log.warning("Ignored record %s of the queues topic: %s", record.offset, exc)

    async def on_stop(self) -> None:
        if self._consumer is not None:
            await self._consumer.stop()


async def change_settings(settings: Settings, queue: str, values: dict[str, Any]) -> dict[str, Any]:
    """Set some values of a queue and return all of them; without values, only look.

    Raises:
        QueueSettingsError: a name or value that a queue can't have; nothing is changed.
        BrokerError: Kafka can't be reached.
    """
    resolve_bootstrap(settings)
    args = kafka_client_args(settings)
    catalog = Catalog(settings, lambda: settings.queues_topic)
    async with catalog:
        await asyncio.wait_for(catalog.read_up.wait(), 30)
    current = msgspec.structs.asdict(catalog.known.get(queue, catalog.default))
    try:
        changed = msgspec.convert(current | values, QueueSettings)
    except msgspec.ValidationError as exc:
        raise QueueSettingsError(f"queue {queue!r}: {exc}; it can have {', '.join(current)}") from None
    unknown = set(values) - set(current)
    if unknown:
        raise QueueSettingsError(f"queue {queue!r} can't have {unknown.pop()!r}; it can have {', '.join(current)}")
    if values:
        producer = AIOKafkaProducer(enable_idempotence=True, **args)
        await producer.start()
        try:
            await producer.send_and_wait(settings.queues_topic, encode(changed), key=queue.encode(), partition=0)
        finally:
            await producer.stop()
    return msgspec.structs.asdict(changed)
