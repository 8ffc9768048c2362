"""Logs that are not those that were read: what they have is not passed over. Nothing else is taken for that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from confluent_kafka import Producer

from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client

QUEUE = "orders"
BEFORE, AFTER = 20, 30


@pytest.fixture
def cluster(kafka: str, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(kafka, tmp_path, partitions=1, handlers="", checkpoint_ms=200, persist_after_ms=200) as cluster:
        yield cluster


def delete_topics(cluster: Cluster, *names: str) -> None:
    async def run() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
        await admin.start()
        try:
            await admin.delete_topics(list(names))
            while {*names} & {*await admin.list_topics()}:
                time.sleep(0.1)
        finally:
            await admin.close()

    cluster.run(run())


def test_messages_in_a_topic_that_was_made_anew_wait_until_somebody_sees_to_it(cluster: Cluster) -> None:
    worker = cluster.start()
    client = Client(worker.url)
    client.send(QUEUE, *(b"old %d" % i for i in range(BEFORE)))
    client.ack(*client.drain(QUEUE, BEFORE))
    until(lambda: worker.partitions()[0]["persisted"] == BEFORE, "all are in the tables")
    worker.stop()
    delete_topics(cluster, cluster.queue_topic)

    worker = cluster.start(ready=False)  # makes the topic
    until(lambda: "its state was made from other logs (queue topic " in worker.log, "it says why it waits")
    client = Client(worker.url)
    client.send(QUEUE, *(b"new %d" % i for i in range(AFTER)))
    assert not worker.serving()
    worker.stop()

    for choice, why in (
        ("--accept-loss", "made from other logs"),
        ("--accept-copy", "record 0 of the queue topic is newer"),
    ):
        refused = cluster.command("repair", "--partition", "0", choice)
        assert refused.returncode == 2, refused
        assert why in refused.stderr

    # as docs/operations.md says
    name = cluster.name
    delete_topics(cluster, f"{name}.markers", *(f"{name}-{t}-changelog" for t in ("messages", "markers", "progress")))
    client = Client(cluster.start("w0").url)
    got = client.drain(QUEUE, AFTER)
    assert sorted(m["payload"] for m in got) == sorted(b"new %d" % i for i in range(AFTER))


def test_a_data_folder_that_was_used_with_other_topics_is_not_read(cluster: Cluster) -> None:
    """Neither with those of another installation, nor, of these two, with those that had come further."""
    worker = cluster.start("w")
    client = Client(worker.url)
    client.send(QUEUE, *(b"mine %d" % i for i in range(BEFORE)))
    client.ack(*client.receive(QUEUE, 5, 5_000))
    until(lambda: worker.partitions()[0]["persisted"] == 5, "this is in the tables")
    worker.stop()

    cluster.environment["MARQ_NAME"] = f"{cluster.name}-other"
    worker = cluster.start("w")
    client = Client(worker.url)
    client.send(QUEUE, *(b"other %d" % i for i in range(2 * BEFORE)))
    client.ack(*client.drain(QUEUE, 2 * BEFORE))
    until(lambda: worker.partitions()[0]["persisted"] == 2 * BEFORE, "the manifest there is of a later position")
    worker.stop()

    cluster.environment["MARQ_NAME"] = cluster.name
    worker = cluster.start("w")
    assert worker.log.count("Partition 0: its local store is of another Kafka") == 2
    got = Client(worker.url).drain(QUEUE, BEFORE - 5)
    assert len({m["payload"] for m in got if m["payload"].startswith(b"mine")}) == BEFORE - 5


@pytest.mark.slow
def test_a_copy_with_the_same_offsets_and_times_is_served_once_somebody_says_that_it_is_one(cluster: Cluster) -> None:
    worker = cluster.start()
    client = Client(worker.url)
    client.send(QUEUE, *(b"%d" % i for i in range(BEFORE)))
    (held,) = client.receive(QUEUE, 1, 5_000, visibility_timeout_ms=600_000)
    until(lambda: worker.partitions()[0]["persisted"] == BEFORE, "all are in the tables")
    worker.stop()
    there = f"{cluster.name}-there"
    copy_topics(cluster, there)

    cluster.environment["MARQ_NAME"] = there
    worker = cluster.start("there", ready=False)
    until(lambda: "its state was made from other logs (queue topic " in worker.log, "it says why it waits")
    taken = cluster.command("repair", "--partition", "0", "--accept-copy")
    assert taken.returncode == 0, taken
    assert "partition 0: goes on with these logs" in taken.stdout
    client = Client(worker.wait_ready().url)
    got = client.drain(QUEUE, BEFORE - 1)
    assert len({m["payload"] for m in [*got, held]}) == BEFORE
    assert client.ack(held) == [{"ok": True}]
    again = cluster.command("repair", "--partition", "0", "--accept-copy")
    assert again.returncode == 2 and "serves partition 0" in again.stderr


def copy_topics(cluster: Cluster, there: str) -> None:
    """Copy all topics of the installation under another name: keys, values, headers, offsets and times."""

    async def run() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
        producer = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap)
        consumer = AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest")
        await asyncio.gather(admin.start(), producer.start(), consumer.start())
        try:
            names = [name for name in await admin.list_topics() if name.startswith(cluster.name)]
            copies = {name: name.replace(cluster.name, there) for name in names}
            await admin.create_topics([NewTopic(copy, 1, 1) for copy in copies.values()])
            for name, copy in copies.items():
                tp = TopicPartition(name, 0)
                consumer.assign([tp])
                end = (await consumer.end_offsets([tp]))[tp]
                while await consumer.position(tp) < end:
                    for r in (await consumer.getmany(tp, timeout_ms=500)).get(tp, ()):
                        sent = await producer.send_and_wait(
                            copy, r.value, r.key, 0, timestamp_ms=r.timestamp, headers=r.headers
                        )
                        assert sent.offset == r.offset
                resource = ConfigResource(ConfigResourceType.TOPIC, name)
                (answer,) = await admin.describe_configs([resource])
                ((_, _, _, _, entries),) = answer.resources
                own = {entry[0]: entry[1] for entry in entries if entry[3] == 1}
                await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, copy, own)])
        finally:
            await asyncio.gather(admin.close(), producer.stop(), consumer.stop())

    cluster.run(run())


def test_a_log_that_ends_with_what_nobody_reads_is_not_taken_for_one(cluster: Cluster) -> None:
    """An aborted transaction is newer than all that was read, and below the position."""
    worker = cluster.start()
    client = Client(worker.url)
    client.send(QUEUE, *(b"%d" % i for i in range(BEFORE)))
    taken = client.drain(QUEUE, BEFORE)
    until(lambda: worker.partitions()[0]["position"] == BEFORE, "all are read")
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": cluster.name})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(cluster.queue_topic, b"never", QUEUE.encode(), 0)
    producer.flush(20)
    stalled = until(lambda: worker.get("/v1/stats")[1]["stalled"].get("0"), "somebody says that it is open")
    assert stalled["hidden"] == 1
    assert worker.get(f"/v1/queues/{QUEUE}/stats")[1]["at_least"]
    assert "waits for an open transaction since 2" in stalled["reason"] and "(producer id " in stalled["reason"]
    assert f"hides {cluster.queue_topic} from offset {BEFORE} on" in stalled["reason"]
    until(lambda: "Partition 0 waits for an open transaction" in worker.log, "in the log, too")
    producer.abort_transaction(20)
    until(lambda: worker.partitions()[0]["position"] == BEFORE + 2, "that is passed")
    client.ack(*taken)
    until(lambda: worker.partitions()[0]["persisted"] == BEFORE + 2, "and in the tables")
    worker.stop()

    worker = cluster.start()
    client = Client(worker.url)
    client.send(QUEUE, b"more")
    assert [m["payload"] for m in client.drain(QUEUE, 1)] == [b"more"]
    assert "not served" not in worker.log
