"""The queues topic: one consumer that reads it from its beginning, and one producer, made when it is first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from mode.utils.logging import CompositeLogger

from app.kafka.connection import end_client, kafka_client_args, start_consumer
from app.settings import Settings
from app.streaming.faults import has_ended, stop_if_reading_ends
from app.streaming.fetching import decode_with, said_of
from marq.core.reading import Unreadable
from marq.errors import InternalError, UnavailableError
from marq.text import reason_of

#: Seconds that Kafka may take to write a record, or to answer.
WRITE_TIMEOUT_S = 10.0
#: Seconds before the topic is read again after Kafka refused to be read.
READ_AGAIN_S = 0.5


async def ends_of(
    topic: str, partitions: int, ask: Callable[[list[TopicPartition]], Awaitable[Mapping[TopicPartition, int]]]
) -> tuple[int, ...]:
    """Where each partition of a topic ends now, as Kafka answers ``ask``. Raises `UnavailableError`."""
    tps = [TopicPartition(topic, number) for number in range(partitions)]
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            ends = await ask(tps)
    except (KafkaError, TimeoutError) as exc:
        raise UnavailableError(f"Kafka does not tell where {topic} ends: {reason_of(exc)}") from exc
    return tuple(ends[tp] for tp in tps)


class QueuesTopic:
    """Reads and writes the topic."""

    def __init__(self, settings: Settings, name: Callable[[], str], log: CompositeLogger) -> None:
        self._settings = settings
        self._name = name
        self._log = log
        self._consumer: AIOKafkaConsumer | None = None
        self._producer: AIOKafkaProducer | None = None
        self._producer_lock = asyncio.Lock()
        #: Next offset to read.
        self.position = 0
        #: Set once everything has been read that was in the topic at the start.
        self.read_up = asyncio.Event()

    @property
    def name(self) -> str:
        """The topic (known once the worker has checked it)."""
        return self._name()

    @property
    def consumer(self) -> AIOKafkaConsumer:
        """The consumer, once `start` was called."""
        if self._consumer is None:
            raise InternalError("the queues topic is read before it is opened")
        return self._consumer

    async def start(self) -> None:
        """Connect to Kafka, at the beginning of the topic. Raises `KafkaError`."""
        consumer = self._consumer = await start_consumer(self._settings, auto_offset_reset="earliest")
        tp = TopicPartition(self.name, 0)
        # others may write here too: a record that can't be decoded must not hold up the rest
        decode_with(
            consumer,
            tp.topic.__eq__,
            lambda tp, fault: self._log.warning(said_of(tp, fault)),
        )
        consumer.assign([tp])
        await consumer.seek_to_beginning(tp)

    async def read(self, take: Callable[[Any], None], stopping: Callable[[], bool]) -> None:
        """Call `take` with each record, in order, until `stopping`. Raises what ended the consumer."""
        consumer = self.consumer
        tp = TopicPartition(self.name, 0)
        end = (await consumer.end_offsets([tp]))[tp]
        ended: list[BaseException] = []
        stop_if_reading_ends(consumer, ended.append)
        while not stopping():
            if ended:
                raise ended[0]
            try:
                self.position = await consumer.position(tp)
                if self.position >= end:
                    self.read_up.set()
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    for record in records:
                        if type(record) is not Unreadable:
                            take(record)
            except KafkaError as exc:
                self._log.warning("The queues topic can't be read: %r", exc)
                await asyncio.sleep(READ_AGAIN_S)

    async def end_offsets(self, topic: str, partitions: int) -> tuple[int, ...]:
        """Where each partition of a topic ends now. Raises `UnavailableError`."""
        return await ends_of(topic, partitions, self.consumer.end_offsets)

    async def write(self, key: bytes, value: bytes | None) -> None:
        """Append a record, and wait until Kafka has it. Raises `UnavailableError`."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                async with self._producer_lock:
                    if self._producer is not None and has_ended(self._producer):
                        # it would refuse everything from now on
                        ended, self._producer = self._producer, None
                        self._log.error("The producer of the queues topic has failed and is made anew")
                        await end_client(ended.stop())
                    if self._producer is None:
                        producer = AIOKafkaProducer(enable_idempotence=True, **kafka_client_args(self._settings))
                        await producer.start()
                        self._producer = producer
                await self._producer.send_and_wait(self.name, value, key=key, partition=0)
        except (KafkaError, TimeoutError) as exc:
            raise UnavailableError(f"Kafka did not take the change of a queue: {reason_of(exc)}") from exc

    async def stop(self) -> None:
        """Close both clients."""
        await asyncio.gather(*(end_client(c.stop()) for c in (self._producer, self._consumer) if c is not None))
