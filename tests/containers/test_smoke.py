"""The basic path on a Kafka in a container: topics as we need them, and a record there and back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from app.kafka.topics import ensure_topics
from tests.kafka import docker_has_image, kafka_container, settings_for

pytestmark = pytest.mark.containers


@pytest.fixture(scope="module")
def kafka_in_container() -> Iterator[str]:
    if not docker_has_image():
        pytest.skip("no Docker engine with the image; `make test-containers` builds it")
    with kafka_container() as bootstrap:
        yield bootstrap


def test_topics_are_created_and_found_again(kafka_in_container: str) -> None:
    settings = settings_for(kafka_in_container, partitions=4)
    first = asyncio.run(ensure_topics(settings, settings.name))
    assert asyncio.run(ensure_topics(settings, settings.name)) == first
    assert first.partitions == 4


def test_a_message_comes_back_with_the_brokers_time(kafka_in_container: str) -> None:
    settings = settings_for(kafka_in_container, partitions=1)

    async def there_and_back() -> tuple[bytes, int]:
        topics = await ensure_topics(settings, settings.name)
        producer = AIOKafkaProducer(bootstrap_servers=kafka_in_container, enable_idempotence=True)
        consumer = AIOKafkaConsumer(bootstrap_servers=kafka_in_container, auto_offset_reset="earliest")
        consumer.assign([TopicPartition(topics.queue, 0)])
        await producer.start()
        await consumer.start()
        try:
            await producer.send_and_wait(topics.queue, b"hello", key=b"q", timestamp_ms=1)
            record = await asyncio.wait_for(consumer.getone(), 15)
            return record.value, record.timestamp
        finally:
            await producer.stop()
            await consumer.stop()

    value, timestamp = asyncio.run(there_and_back())
    assert value == b"hello"
    assert timestamp > 1
