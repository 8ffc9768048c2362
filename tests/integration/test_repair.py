"""Records were deleted unread: they are named, and with `repair --accept-loss` the partition goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client

QUEUE = "orders"


@pytest.fixture
def cluster(kafka: str, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(kafka, tmp_path, partitions=2, handlers="", checkpoint_ms=200, persist_after_ms=200) as cluster:
        yield cluster


def repair(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return cluster.command("repair", *arguments)


def delete(cluster: Cluster, number: int, before: int) -> None:
    async def run() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
        await admin.start()
        try:
            await admin.delete_records({TopicPartition(cluster.queue_topic, number): RecordsToDelete(before)})
        finally:
            await admin.close()

    cluster.run(run())


def test_a_partition_whose_unread_records_were_deleted_goes_on_after_a_repair(cluster: Cluster) -> None:
    worker = cluster.start()
    client = Client(worker.url)
    client.send(QUEUE, *(b"old %d" % i for i in range(40)))
    (held,) = client.receive(QUEUE, 1, 5_000, visibility_timeout_ms=600_000)
    number = held["partition"]
    until(
        lambda: worker.partitions()[number]["persisted"] == worker.partitions()[number]["position"],
        "all are in the tables",
    )

    served = repair(cluster, "--partition", str(number), "--accept-loss")
    assert served.returncode == 2, served
    assert f"serves partition {number}" in served.stderr

    worker.stop()
    read = cluster.ends()[number]
    cluster.send(QUEUE, 40)
    gone = cluster.ends()[number] - read - 3
    assert gone > 0
    delete(cluster, number, read + gone)

    named = repair(cluster, "--partition", str(number))
    assert named.returncode == 1, named
    assert (
        f"offsets {read} to {read + gone - 1} of the queue topic ({gone} records) were deleted unread" in named.stdout
    )
    assert f"{gone} messages among them were not known to be done" in named.stdout
    assert "--accept-loss" in named.stdout
    done = repair(cluster, "--partition", str(number), "--accept-loss")
    assert done.returncode == 0, done
    assert "goes on without them" in done.stdout
    other = repair(cluster, "--partition", str(1 - number), "--accept-loss")
    assert other.returncode == 0 and "nothing to repair" in other.stdout

    client = Client(cluster.start().url)
    left = 40 - 1 + 40 - gone
    got = client.drain(QUEUE, left)
    assert len(got) == left
    assert client.ack(held) == [{"ok": True}]
    again = repair(cluster, "--partition", str(number))
    assert again.returncode == 2 and "serves" in again.stderr


def test_a_partition_that_is_not_there_is_one_line(cluster: Cluster) -> None:
    cluster.create_topics()
    found = repair(cluster, "--partition", "7")
    assert found.returncode == 2
    assert "there are partitions 0 to 1, not 7" in found.stderr
