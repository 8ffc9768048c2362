"""Reads small compacted topics of one partition, whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from marq.errors import BrokerError

#: Most seconds for reading such a topic to its end, without the wait for open transactions.
READ_TIMEOUT_S = 30.0
#: Most seconds for which a dead sender's transaction can block a reader: its timeout, and until Kafka checks for it.
OPEN_TIMEOUT_S = 40.0
#: Most seconds until all brokers know a new topic.
LEADER_TIMEOUT_S = 10.0


def records_of(client: Mapping[str, Any], topic: str, start: int = 0) -> Iterator[tuple[bytes, bytes | None]]:
    """Key and value of all records from an offset on that are committed now, in order.

    Records behind an open transaction can't be read before it ends, so this waits for those that are open now: a
    moment for those of living senders, at most `OPEN_TIMEOUT_S` for those of dead ones.

    Args:
        client: settings of librdkafka: where Kafka is, and how to log in.

    Raises:
        BrokerError: Kafka does not answer, or the topic does not exist.
    """
    from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

    began = time.monotonic()
    consumer = Consumer(
        {
            **client,
            "group.id": "unused",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
        }
    )
    try:
        end, position = _end(client, topic), start
        consumer.assign([TopicPartition(topic, 0, start)])
        while position < end:
            if time.monotonic() - began > READ_TIMEOUT_S + OPEN_TIMEOUT_S:
                raise BrokerError(f"{topic} could not be read to its end; try again")
            message = consumer.poll(0.2)
            if message is None:
                continue
            error, offset = message.error(), message.offset()
            assert offset is not None  # None only for a message that a producer has not sent yet
            if error is None:
                position = offset + 1
                yield message.key() or b"", message.value()
            elif error.code() == KafkaError._PARTITION_EOF:
                position = offset
            elif not error.retriable():
                raise BrokerError(f"Kafka refuses to let us read {topic}: {error.str()}")
    except KafkaException as error:
        raise BrokerError(f"Kafka refuses to let us read {topic}: {error.args[0].str()}; try again") from None
    finally:
        consumer.close()


def _end(client: Mapping[str, Any], topic: str) -> int:
    """The end of a topic, records of open transactions included."""
    from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec

    tp = TopicPartition(topic, 0)
    admin = AdminClient(dict(client))  # in a variable, or it would be collected before the answer comes
    deadline = time.monotonic() + LEADER_TIMEOUT_S
    while True:
        futures = admin.list_offsets(
            {tp: OffsetSpec.latest()}, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=READ_TIMEOUT_S
        )
        try:
            return int(futures[tp].result(READ_TIMEOUT_S + 5).offset)
        except KafkaException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
