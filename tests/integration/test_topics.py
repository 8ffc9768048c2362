"""Topics are created as marq needs them, and refused, with what mends it, where they are different."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from app.kafka.broker import EmbeddedBroker
from app.kafka.connection import admin_client, faust_credentials, kafka_client_args
from app.kafka.topics import Topics, ensure_topics
from app.settings import Settings
from marq.errors import BrokerError, TopicError
from marq.protocol.limits import MESSAGE_MAX_BYTES
from tests.kafka import settings_for, unique


def ensure(settings: Settings) -> Topics:
    return asyncio.run(ensure_topics(settings, settings.name))


def error_of(settings: Settings) -> str:
    with pytest.raises(TopicError) as caught:
        ensure(settings)
    return str(caught.value)


def create(settings: Settings, name: str, partitions: int, **config: str) -> None:
    async def run() -> None:
        dotted = {key.replace("_", "."): value for key, value in config.items()}
        async with admin_client(settings) as admin:
            answer = await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=dotted)])
            assert [error[1] for error in answer.topic_errors] == [0]
            while name not in await admin.list_topics():
                await asyncio.sleep(0.05)

    asyncio.run(run())


def config_of(settings: Settings, name: str) -> dict[str, str]:
    async def run() -> dict[str, str]:
        async with admin_client(settings) as admin:
            [answer] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
            return {entry[0]: entry[1] for entry in answer.resources[0][4]}

    return asyncio.run(run())


def test_all_topics_are_created_with_what_the_rest_relies_on(kafka: str) -> None:
    settings = settings_for(kafka, partitions=3, replication=1)
    topics = ensure(settings)
    assert topics.partitions == 3
    assert topics.queue == f"{settings.name}.queue"
    assert set(topics.changelogs) == {"messages", "markers", "progress"}
    for name in (topics.queue, topics.markers):
        config = config_of(settings, name)
        assert config["message.timestamp.type"] == "LogAppendTime"
        assert config["retention.ms"] == "-1"
        assert int(config["max.message.bytes"]) >= MESSAGE_MAX_BYTES
        assert config["unclean.leader.election.enable"] == "false"
    changelog = config_of(settings, topics.changelogs["messages"])
    assert changelog["cleanup.policy"] == "compact"
    assert int(changelog["max.message.bytes"]) > MESSAGE_MAX_BYTES
    assert config_of(settings, topics.queues)["cleanup.policy"] == "compact"


def test_a_second_start_finds_everything_in_order(kafka: str) -> None:
    settings = settings_for(kafka, partitions=2)
    assert ensure(settings) == ensure(settings)


def test_workers_that_start_together_all_succeed(kafka: str) -> None:
    settings = settings_for(kafka, partitions=2)

    async def together() -> list[Topics]:
        return await asyncio.gather(*(ensure_topics(settings, settings.name) for _ in range(3)))

    assert {topics.partitions for topics in asyncio.run(together())} == {2}


def test_the_partition_count_comes_from_the_queue_topic_where_it_is_not_set(kafka: str) -> None:
    settings = settings_for(kafka, partitions=2)
    ensure(settings)
    assert ensure(settings_for(kafka, name=settings.name)).partitions == 2


def test_another_partition_count_than_the_topic_has_is_refused(kafka: str) -> None:
    settings = settings_for(kafka, partitions=2)
    ensure(settings)
    message = error_of(settings_for(kafka, name=settings.name, partitions=4))
    assert "has 2 partitions, but MARQ_PARTITIONS=4" in message
    assert "set MARQ_PARTITIONS=2" in message


def test_every_mismatch_has_a_line_with_the_topic_the_value_and_what_mends_it(kafka: str) -> None:
    settings = settings_for(kafka, partitions=4)
    create(settings, settings.markers_topic, 2, retention_ms="-1", max_message_bytes="1000000")
    changelog = f"{settings.name}-markers-changelog"
    create(settings, changelog, 6, cleanup_policy="delete", max_message_bytes="5000000")
    lines = error_of(settings).splitlines()
    assert len(lines) == 5
    assert f"topic {settings.markers_topic} has 2 partitions, must have 4; mend: kafka-topics.sh" in lines[0]
    assert "--partitions 4" in lines[0]
    assert "message.timestamp.type=CreateTime, must be LogAppendTime; mend: kafka-configs.sh" in lines[1]
    assert f"max.message.bytes=1000000, must be at least {MESSAGE_MAX_BYTES}" in lines[2]
    assert f"topic {changelog} has 6 partitions, must have 4; mend: set MARQ_NAME" in lines[3]
    assert "cleanup.policy=delete, must be compact" in lines[4]


def test_more_copies_than_there_are_brokers_can_not_be_created(kafka: str) -> None:
    message = error_of(settings_for(kafka, replication=32))
    assert "could not be created with 32 copies" in message
    assert "MARQ_REPLICATION" in message


def test_fewer_copies_than_wanted_are_refused(kafka: str) -> None:
    settings = settings_for(kafka, partitions=1, replication=1)
    ensure(settings)
    message = error_of(settings_for(kafka, name=settings.name, replication=2))
    assert "has 1 copies of a partition, must have 2" in message


def test_topic_mode_takes_the_users_topic_as_it_is(kafka: str, caplog: pytest.LogCaptureFixture) -> None:
    mine = unique("orders")
    settings = settings_for(kafka, queue_id="orders", queue_topic=mine, dead_letter_topic=f"{mine}-dead")
    create(settings, mine, 5)
    before = config_of(settings, mine)
    with caplog.at_level(logging.WARNING):
        topics = ensure(settings)
    assert (topics.queue, topics.partitions, topics.dead_letter) == (mine, 5, f"{mine}-dead")
    assert config_of(settings, mine) == before
    assert "CreateTime" in caplog.text


def test_topic_mode_never_creates_the_users_topic(kafka: str) -> None:
    missing = unique("missing")
    assert f"topic {missing} does not exist" in error_of(settings_for(kafka, queue_id="q", queue_topic=missing))


def test_an_absent_kafka_is_one_line_with_address_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BrokerError) as caught:
        ensure(settings_for("127.0.0.1:1"))
    message = str(caught.value)
    assert "\n" not in message
    assert "127.0.0.1:1" in message
    assert "Connection refused" in message
    assert caplog.text == ""


@pytest.fixture(scope="module")
def kafka_with_password(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = {
        "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.plaintext.plain.sasl.jaas.config": (
            "org.apache.kafka.common.security.plain.PlainLoginModule required "
            'username="broker" password="b" user_broker="b" user_ann="right";'
        ),
    }
    with EmbeddedBroker(tmp_path_factory.mktemp("data"), config=config) as broker:
        yield broker.bootstrap


def with_password(kafka: str, password: str) -> Settings:
    return settings_for(kafka, partitions=1, kafka_username="ann", kafka_password=password, kafka_mechanism="PLAIN")


def test_the_right_password_lets_us_in(kafka_with_password: str) -> None:
    assert ensure(with_password(kafka_with_password, "right")).partitions == 1


def test_a_wrong_password_is_named_and_not_shown(kafka_with_password: str) -> None:
    with pytest.raises(BrokerError) as caught:
        ensure(with_password(kafka_with_password, "wrong-secret"))
    message = str(caught.value)
    assert "it refused user 'ann' or the password (PLAIN); check MARQ_KAFKA_USERNAME and MARQ_KAFKA_PASSWORD" in message
    assert "wrong-secret" not in message


def test_clients_and_faust_get_the_same_security() -> None:
    settings = with_password("broker:9092", "right")
    args = kafka_client_args(settings)
    assert (args["security_protocol"], args["sasl_mechanism"]) == ("SASL_PLAINTEXT", "PLAIN")
    credentials = faust_credentials(settings)
    assert (credentials.username, credentials.password) == ("ann", "right")
    assert faust_credentials(settings_for("broker:9092")) is None
    assert kafka_client_args(settings_for("broker:9092"))["security_protocol"] == "PLAINTEXT"


def test_tls_passes_a_context_to_clients_and_faust() -> None:
    settings = settings_for("broker:9092", kafka_tls=True)
    assert kafka_client_args(settings)["security_protocol"] == "SSL"
    assert faust_credentials(settings).context is not None
