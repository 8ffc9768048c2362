"""How far each sending job is: a compacted topic, written in the transactions that send the messages.

    key                     value
    <job>                   {"run": …}: the latest run of the job; any other run stops
    <job>/input             {"fingerprint": …, "partitions": …}: what the job sends, and over how many partitions
    <job>/<slice>           {"next_row": …, "sent": …}: rows of the slice below `next_row` are in the queue topic
    <job>/done              {"sent": …, "skipped": …}: the job is finished

A record of a slice commits together with the messages that it counts, so neither exists without the other. The topic
is in the same Kafka as the messages, so a Kafka that was wiped has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from marq.errors import BrokerError
from pipeline.compacted import READ_TIMEOUT_S, records_of

if TYPE_CHECKING:
    from pipeline.kafka import Kafka

#: Small segments, so that Kafka compacts the topic although little is written.
_CONFIG = {"cleanup.policy": "compact", "segment.bytes": str(16 * 1024 * 1024), "min.cleanable.dirty.ratio": "0.1"}


class Progress(msgspec.Struct, frozen=True):
    """How far a slice is."""

    next_row: int = 0
    sent: int = 0


class Input(msgspec.Struct, frozen=True):
    """What a job sends."""

    fingerprint: str
    partitions: int


class Done(msgspec.Struct, frozen=True):
    """What a finished job did."""

    sent: int
    skipped: int = 0


class State(msgspec.Struct):
    """The records of one job."""

    run: str = ""
    input: Input | None = None
    done: Done | None = None
    slices: dict[int, Progress] = {}

    def slice(self, number: int) -> Progress:
        """How far a slice is."""
        return self.slices.get(number, Progress())

    @property
    def sent(self) -> int:
        """Rows that are in the queue topic."""
        return sum(progress.sent for progress in self.slices.values())


class Ledger:
    """The records of one job. Has no open connection, so that it can be pickled.

    Args:
        client: settings of librdkafka: where Kafka is, and how to log in.
        topic: has one partition.
    """

    def __init__(self, client: Mapping[str, Any], topic: str, job: str) -> None:
        self.client = dict(client)
        self.topic = topic
        self.job = job

    def record(self, what: str | int | None, value: Any) -> tuple[bytes, bytes]:
        """Key and value of a record; `what` is `input`, `done`, a slice, or None for the start of a run."""
        key = self.job if what is None else f"{self.job}/{what}"
        return key.encode(), msgspec.json.encode(value)

    def write(self, what: str | int | None, value: Any) -> None:
        """Append a record outside of any transaction. Raises `BrokerError`."""
        from confluent_kafka import Producer

        outcomes: list[Any] = []
        timeout = {"enable.idempotence": True, "message.timeout.ms": int(1000 * READ_TIMEOUT_S)}
        producer = Producer({**self.client, **timeout})
        key, encoded = self.record(what, value)
        producer.produce(self.topic, encoded, key, 0, on_delivery=lambda error, _: outcomes.append(error))
        producer.flush(READ_TIMEOUT_S + 5)
        if outcomes != [None]:
            reason = outcomes[0].str() if outcomes else "no answer in time"
            raise BrokerError(f"Kafka did not take a record of {self.topic}: {reason}; try again")

    def claim(self, run: str) -> None:
        """Record that `run` works for the job from now on. Raises `BrokerError`."""
        self.write(None, {"run": run})

    def read(self) -> State:
        """Read the committed records; may have to wait (see `records_of`). Raises `BrokerError`."""
        state = State()
        for key, value in records_of(self.client, self.topic):
            job, _, what = key.decode(errors="replace").partition("/")
            if job != self.job or value is None:
                continue
            if not what:
                state.run = msgspec.json.decode(value)["run"]
            elif what == "input":
                state.input = msgspec.json.decode(value, type=Input)
            elif what == "done":
                state.done = msgspec.json.decode(value, type=Done)
            else:
                state.slices[int(what)] = msgspec.json.decode(value, type=Progress)
        return state


def ledger_topic(kafka: Kafka) -> str:
    """The name of the topic, which is created if it does not exist.

    Raises:
        BrokerError: Kafka can't be reached, or refuses to create it.
    """
    from confluent_kafka import KafkaError, KafkaException

    topic = f"{kafka.settings.name}.jobs"
    if topic in kafka.topics():
        return topic
    try:
        kafka.create(topic, _CONFIG)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise BrokerError(f"Kafka did not create topic {topic}: {error.args[0].str()}") from None
    return topic
