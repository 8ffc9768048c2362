"""Kafka for jobs: options of Spark's source and sink, clients of driver and tasks, where topics begin and end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from app.kafka.datadir import kafka_login, resolve_bootstrap
from app.settings import Settings
from marq.errors import BrokerError, TopicError

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient
    from pyspark.sql import DataFrame, SparkSession

#: Seconds for Kafka to answer a request; after that it counts as unreachable.
TIMEOUT_S = 10.0

#: Replicas of a topic that a job creates, if there are as many brokers.
REPLICATION = 3

#: Errors of a Kafka that has just started, or just created a topic. They pass in a moment.
_PASSING = {
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_FOR_PARTITION",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "COORDINATOR_NOT_AVAILABLE",
    "NOT_COORDINATOR",
}

#: What the client adds to its messages about its own state.
_STATE = re.compile(r" \(after \d+ms in state \w+.*?\)")

Offsets = dict[int, int]
"""An offset for each partition."""


@dataclass(frozen=True)
class Kafka:
    """The Kafka of an installation, from its settings."""

    settings: Settings
    _why: list[str] = field(default_factory=list, repr=False)

    @cached_property
    def bootstrap(self) -> str:
        """`host:port[,host:port]`. Raises `BrokerError` if none is set and no embedded broker runs."""
        return ",".join(resolve_bootstrap(self.settings))

    @property
    def topic_mode(self) -> bool:
        return self.settings.queue_id is not None

    # -- options

    def source_options(self) -> dict[str, str]:
        """Options of `spark.read` and `spark.readStream` with format `kafka`: committed records, with headers."""
        return self._java_options() | {
            "includeHeaders": "true",
            "kafka.isolation.level": "read_committed",
            # A small read does not wait for more records.
            "kafka.fetch.max.wait.ms": "10",
            # A Kafka that can't be reached is an error after seconds, not minutes.
            "kafka.default.api.timeout.ms": "15000",
            "kafka.request.timeout.ms": "10000",
            "fetchOffset.numRetries": "1",
        }

    def sink_options(self) -> dict[str, str]:
        """Options of `write` with format `kafka`: a record is acknowledged by all replicas, and one of 4 MiB fits."""
        return self._java_options() | {
            "kafka.acks": "all",
            "kafka.enable.idempotence": "true",
            "kafka.max.request.size": str(5 * 1024 * 1024),
            "kafka.compression.type": "lz4",
        }

    def client_config(self) -> dict[str, Any]:
        """Configuration of a confluent-kafka client (producer, consumer, admin): plain data, so tasks can have it."""
        settings = self.settings
        config: dict[str, Any] = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self._protocol,
            # errors reach us as exceptions
            "log_level": 0,
            "socket.connection.setup.timeout.ms": 5000,
        }
        if settings.kafka_ca_file is not None:
            config["ssl.ca.location"] = str(settings.kafka_ca_file)
        login = kafka_login(settings)
        if login is not None:
            config |= {
                "sasl.mechanism": login.mechanism,
                "sasl.username": login.username,
                "sasl.password": login.password,
            }
        return config

    @property
    def _protocol(self) -> str:
        sasl = "SASL_" if kafka_login(self.settings) is not None else ""
        return sasl + ("SSL" if self.settings.uses_tls else "PLAINTEXT")

    def _java_options(self) -> dict[str, str]:
        settings = self.settings
        options = {"kafka.bootstrap.servers": self.bootstrap, "kafka.security.protocol": self._protocol}
        if settings.kafka_ca_file is not None:
            # the content, not the path: executors may be on other machines
            options["kafka.ssl.truststore.type"] = "PEM"
            options["kafka.ssl.truststore.certificates"] = settings.kafka_ca_file.read_text()
        login = kafka_login(settings)
        if login is not None:
            module = "plain.Plain" if login.mechanism == "PLAIN" else "scram.Scram"
            options["kafka.sasl.mechanism"] = login.mechanism
            options["kafka.sasl.jaas.config"] = (
                f"org.apache.kafka.common.security.{module}LoginModule required "
                f"username={_quoted(login.username)} password={_quoted(login.password)};"
            )
        return options

    # -- records

    def records(
        self,
        spark: SparkSession,
        begin: Mapping[str, Mapping[int, int]],
        end: Mapping[str, Mapping[int, int]],
        options: Mapping[str, str] | None = None,
    ) -> DataFrame:
        """Records of topics from `begin` up to `end`, as Spark's source gives them.

        Args:
            begin, end: an offset for each partition, by topic.
            options: further options of the source.
        """
        return (
            spark.read.format("kafka")
            .options(**self.source_options(), **(options or {}))
            .option("subscribe", ",".join(begin))
            .option("startingOffsets", offsets_json(begin))
            .option("endingOffsets", offsets_json(end))
            .load()
        )

    # -- what is there

    @cached_property
    def admin(self) -> AdminClient:
        """An admin client, created when first used."""
        from confluent_kafka.admin import AdminClient

        return AdminClient(self.client_config() | {"error_cb": lambda error: self._why.append(error.str())})

    def topics(self) -> dict[str, int]:
        """Number of partitions of every topic.

        Raises:
            BrokerError: Kafka can't be reached, or refuses us.
        """
        # Lists all topics: asking for one by name would create it if Kafka creates topics automatically.
        found = self._ask(lambda: self.admin.list_topics(timeout=TIMEOUT_S))
        return {name: len(topic.partitions) for name, topic in found.topics.items()}

    def partitions(self, topic: str) -> int:
        """Number of partitions of a topic. Raises `TopicError` if it does not exist, `BrokerError`."""
        return self.require(topic, self.topics())

    def require(self, topic: str, there: Mapping[str, int]) -> int:
        """Like `partitions`, from an answer of `topics`."""
        if topic not in there:
            raise TopicError(
                f"topic {topic} does not exist at {self.bootstrap}; start a worker, which creates it, or correct "
                "MARQ_NAME or MARQ_QUEUE_TOPIC"
            )
        return there[topic]

    def source_of(self, topic: str) -> str:
        """What identifies a topic for ever: its name and its id."""
        return f"{topic} {self.topic_id(topic)}".strip()

    def topic_id(self, topic: str) -> str:
        """The id of a topic, which no other topic of that name has; empty if Kafka is too old to have ids."""
        from confluent_kafka import TopicCollection

        found = self._ask(
            lambda: self.admin.describe_topics(TopicCollection([topic]), request_timeout=TIMEOUT_S)[topic].result()
        )
        return str(found.topic_id) if getattr(found, "topic_id", None) is not None else ""

    def bounds(self, topic: str) -> dict[int, tuple[int, int]]:
        """First offset that each partition still has, and the one after its last committed record.

        Raises:
            TopicError: the topic does not exist.
            BrokerError: Kafka can't be reached, or refuses us.
        """
        from confluent_kafka.admin import OffsetSpec

        count = self.partitions(topic)
        starts = self._list_offsets(topic, count, OffsetSpec.earliest())
        ends = self._list_offsets(topic, count, OffsetSpec.latest())
        return {number: (starts[number], ends[number]) for number in range(count)}

    def _list_offsets(self, topic: str, count: int, spec: Any) -> Offsets:
        from confluent_kafka import IsolationLevel, TopicPartition

        wanted = {TopicPartition(topic, number): spec for number in range(count)}
        # The end for a reader of committed records: before any transaction that is still open.
        options = {"isolation_level": IsolationLevel.READ_COMMITTED, "request_timeout": TIMEOUT_S}
        answers = self._ask(
            lambda: {tp.partition: f.result().offset for tp, f in self.admin.list_offsets(wanted, **options).items()}
        )
        return {number: answers[number] for number in range(count)}

    def create(self, topic: str, config: Mapping[str, str]) -> None:
        """Create a topic of one partition, on up to three brokers, or as the settings say. Raises `KafkaException`."""
        from confluent_kafka.admin import NewTopic

        brokers = len(self.admin.list_topics(timeout=TIMEOUT_S).brokers)
        new = NewTopic(topic, 1, self.settings.replication or min(REPLICATION, brokers), config=dict(config))
        self.admin.create_topics([new])[topic].result()

    # -- positions of a reader

    def committed(self, group: str) -> dict[str, Offsets]:
        """The committed offsets of a group, by topic; empty if there is no such group."""
        from confluent_kafka import ConsumerGroupTopicPartitions

        def ask() -> Any:
            futures = self.admin.list_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group)], request_timeout=TIMEOUT_S
            )
            return futures[group].result()

        found: dict[str, Offsets] = {}
        for tp in self._ask(ask).topic_partitions:
            if tp.offset >= 0:
                found.setdefault(tp.topic, {})[tp.partition] = tp.offset
        return found

    def commit(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
        """Commit offsets for a group that has no members."""
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        tps = [TopicPartition(t, n, offset) for t, offsets in positions.items() for n, offset in offsets.items()]
        if tps:
            request = [ConsumerGroupTopicPartitions(group, tps)]
            self._ask(
                lambda: self.admin.alter_consumer_group_offsets(request, request_timeout=TIMEOUT_S)[group].result()
            )

    # -- errors

    def _ask(self, question: Any) -> Any:
        from confluent_kafka import KafkaException

        self._why.clear()
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return question()
            except KafkaException as error:
                if error.args and error.args[0].name() in _PASSING and time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                # Only now does the client pass what went wrong to `error_cb`.
                self.admin.poll(0)
                raise self.unreachable(error.args[0].str() if error.args else str(error)) from None

    def unreachable(self, reason: str) -> BrokerError:
        """The error for a Kafka that does not answer or refuses us, with the errors that its client reported."""
        said = [_STATE.sub("", " ".join(text.split())) for text in self._why if "brokers are down" not in text]
        said = list(dict.fromkeys(said))
        text = f"can't reach Kafka at {self.bootstrap}: {'; '.join(said[:2]) or reason}"
        if self.settings.kafka_username:
            return BrokerError(
                f"{text}; if it runs there, check MARQ_KAFKA_USERNAME, MARQ_KAFKA_PASSWORD, MARQ_KAFKA_MECHANISM "
                f"(now {self.settings.kafka_mechanism}) and MARQ_KAFKA_TLS"
            )
        return BrokerError(
            f"{text}; check that it runs, and MARQ_KAFKA (or --kafka), MARQ_KAFKA_TLS and MARQ_KAFKA_USERNAME"
        )


def offsets_json(positions: Mapping[str, Mapping[int, int]]) -> str:
    """Offsets in the form of Spark's `startingOffsets` and `endingOffsets`."""
    return json.dumps({topic: {str(n): offset for n, offset in o.items()} for topic, o in positions.items()})


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
