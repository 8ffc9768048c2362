"""The embedded broker: starts by itself, keeps its data and address, and is found through its data folder."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from app.kafka.broker import EmbeddedBroker, free_port, install_kafka
from app.kafka.broker_file import bootstrap_of
from app.kafka.jars import own
from app.kafka.topics import ensure_topics
from marq.errors import BrokerError
from marq.protocol.limits import RECORD_MAX_BYTES
from tests.kafka import settings_for

#: The tests of this file share one broker, and depend on their order, because each start costs seconds.


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(tmp_path_factory.mktemp("data"))
    broker.start()
    yield broker
    broker.kill()


async def write(bootstrap: str, topic: str, value: bytes) -> int:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, max_request_size=RECORD_MAX_BYTES)
    await producer.start()
    try:
        return int((await producer.send_and_wait(topic, value, key=b"k", partition=0)).offset)
    finally:
        await producer.stop()


async def read(bootstrap: str, topic: str) -> bytes:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    consumer.assign([TopicPartition(topic, 0)])
    await consumer.start()
    try:
        record = await asyncio.wait_for(consumer.getone(), 15)
        return bytes(record.value)
    finally:
        await consumer.stop()


def test_it_is_found_through_the_data_folder_while_it_runs(broker: EmbeddedBroker) -> None:
    assert bootstrap_of(broker.data_dir) == broker.bootstrap
    info = json.loads((broker.data_dir / "broker.json").read_text())
    assert info == {"bootstrap": broker.bootstrap, "pid": broker.pid, "asks_password": False}


def test_it_is_out_of_reach_of_the_terminal(broker: EmbeddedBroker) -> None:
    assert broker.pid is not None
    assert os.getsid(broker.pid) != os.getsid(0)


def test_a_second_broker_on_the_same_folder_is_refused(broker: EmbeddedBroker) -> None:
    with pytest.raises(BrokerError, match=f"another broker at {broker.bootstrap}"):
        EmbeddedBroker(broker.data_dir).start()
    assert bootstrap_of(broker.data_dir) == broker.bootstrap


def test_data_and_address_outlive_a_kill(broker: EmbeddedBroker) -> None:
    settings = settings_for(broker.bootstrap, partitions=1)
    topics = asyncio.run(ensure_topics(settings, settings.name))
    asyncio.run(write(broker.bootstrap, topics.queue, b"kept"))
    address = broker.bootstrap

    broker.kill()
    assert bootstrap_of(broker.data_dir) is None

    assert broker.start() == address
    assert asyncio.run(read(address, topics.queue)) == b"kept"


def test_the_largest_changelog_record_fits(broker: EmbeddedBroker) -> None:
    settings = settings_for(broker.bootstrap, partitions=1)
    topics = asyncio.run(ensure_topics(settings, settings.name))
    value = os.urandom(RECORD_MAX_BYTES - 1024)
    assert asyncio.run(write(broker.bootstrap, topics.changelogs["messages"], value)) == 0


def test_a_clean_stop_takes_the_address_away(broker: EmbeddedBroker) -> None:
    broker.stop()
    assert not broker.is_running
    assert not (broker.data_dir / "broker.json").exists()


def test_a_broker_that_dies_at_its_start_shows_the_end_of_its_log(broker: EmbeddedBroker) -> None:
    broken = EmbeddedBroker(broker.data_dir, config={"node.id": "7"})
    with pytest.raises(BrokerError, match=r"stopped with status(.|\n)*node id 7"):
        broken.start()
    assert not broken.is_running
    assert bootstrap_of(broker.data_dir) is None


def test_jars_that_are_installed_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("asked for the network")

    monkeypatch.setattr("socket.socket.connect", no_network)
    assert len(install_kafka()) > 80


def test_jars_that_can_not_be_fetched_are_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*_args: object, **_kwargs: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("app.kafka.jars._ATTEMPTS", 1)
    with pytest.raises(BrokerError, match=r"Network is unreachable>?; check the network; or point MARQ_KAFKA"):
        install_kafka(tmp_path)
    assert not list(tmp_path.rglob("*.jar"))


def test_a_changed_jar_stops_the_broker_and_is_named(tmp_path: Path) -> None:
    jars = install_kafka()
    folder = own(tmp_path / jars[0].parents[1].name / "jars")
    for jar in jars:
        (folder / jar.name).symlink_to(jar)
    (folder / jars[3].name).unlink()
    (folder / jars[3].name).write_bytes(jars[3].read_bytes() + b"\0")
    with pytest.raises(BrokerError, match=f"{folder / jars[3].name} is not the file that marq was made with"):
        EmbeddedBroker(tmp_path / "data", cache_dir=tmp_path).start()
    assert not (tmp_path / "data" / "kafka" / "logs").exists()


def test_an_installation_without_java_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.kafka.broker.find_spec", lambda _: None)
    with pytest.raises(BrokerError, match=r"no embedded broker .* point MARQ_KAFKA at a Kafka"):
        install_kafka(tmp_path)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    import socket

    with socket.socket() as server:
        port = free_port()
        server.bind(("127.0.0.1", port))
        server.listen()
        with pytest.raises(BrokerError, match=f"port {port}"):
            EmbeddedBroker(tmp_path, port=port).start()
