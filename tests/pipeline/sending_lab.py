"""What the tests of `load`, `replay` and `redrive` share: jobs in this process's Spark, messages as workers see."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition

from pipeline.options import Job
from tests.integration.cluster import until
from tests.pipeline.lab import Installation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Of the topics of an installation that is sent to.
PARTITIONS = 3
#: Seconds that a reader waits behind the open transaction of a killed sender.
READ_S = 40.0


@dataclass(frozen=True)
class Here(Job):
    """A job whose Spark is the session of the tests."""

    spark: SparkSession | None = field(default=None, compare=False)

    def session(self, name: str, *, lasting: bool = False) -> Any:
        return contextlib.nullcontext(self.spark)


def here(installation: Installation, spark: SparkSession) -> Here:
    """A job of an installation that runs in this process."""
    return Here(installation.settings, installation.data, spark=spark)


@dataclass(frozen=True)
class Record:
    """A committed record of the queue topic."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes
    headers: dict[str, bytes]


def committed(installation: Installation, least: int = 0, topic: str | None = None) -> list[Record]:
    """All records that a worker sees, in order of partition and offset; waits until there are `least`."""
    topic = topic or installation.settings.queue_topic
    consumer = Consumer(
        installation.kafka.client_config()
        | {
            "group.id": "tests",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 50,
        }
    )
    partitions = installation.kafka.partitions(topic)
    found: list[Record] = []
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
        deadline, quiet = time.monotonic() + READ_S, 0
        while time.monotonic() < deadline and (quiet < 3 or len(found) < least):
            batch = consumer.consume(10_000, 0.3)
            quiet = 0 if batch else quiet + 1
            for message in batch:
                assert message.error() is None, message.error()
                headers: dict[str, Any] = dict(message.headers() or ())
                partition, offset = message.partition(), message.offset()
                assert partition is not None and offset is not None
                found.append(Record(partition, offset, message.key(), message.value() or b"", headers))
    finally:
        consumer.close()
    return sorted(found, key=lambda record: (record.partition, record.offset))


def duplicates(records: list[Record]) -> dict[bytes, int]:
    """Payloads that are there more than once."""
    return {value: count for value, count in Counter(record.value for record in records).items() if count > 1}


def ends(installation: Installation) -> int:
    """Where the partitions of the queue topic end, added up; transactions that are open count."""
    return sum(end for _, end in installation.kafka.bounds(installation.settings.queue_topic).values())


#: Wait until a condition is true: a job in a separate process takes its time.
wait_for = partial(until, timeout_s=90.0)
