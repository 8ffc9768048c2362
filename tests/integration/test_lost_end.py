"""The topic of messages was made anew: what is written there then is not passed over. Nothing else is taken for it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
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
    until(lambda: f"the queue topic ends at 0, before the position {BEFORE}" in worker.log, "it says why it waits")
    client = Client(worker.url)
    client.send(QUEUE, *(b"new %d" % i for i in range(AFTER)))
    until(lambda: "record 0 of the queue topic is newer than all that were read there" in worker.log, "and still waits")
    assert not worker.serving()
    worker.stop()

    refused = cluster.command("repair", "--partition", "0", "--accept-loss")
    assert refused.returncode == 2, refused
    assert "record 0 of the queue topic is newer" in refused.stderr

    # as docs/operations.md says
    name = cluster.name
    delete_topics(cluster, f"{name}.markers", *(f"{name}-{t}-changelog" for t in ("messages", "markers", "progress")))
    shutil.rmtree(worker.data_dir)
    client = Client(cluster.start().url)
    got = client.drain(QUEUE, AFTER)
    assert sorted(m["payload"] for m in got) == sorted(b"new %d" % i for i in range(AFTER))


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
