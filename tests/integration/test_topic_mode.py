"""Topic mode: a topic of the user's, whose retention, partitions and records marq does not choose."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete

from tests.integration.cluster import ROOT, Cluster, until
from tests.integration.json_client import Client
from tests.kafka import unique

QUEUE = "orders"


class Theirs(Cluster):
    """Workers on a topic of the user's."""

    def admin(self, act: Any) -> Any:
        """Run `act(admin)`."""

        async def run() -> Any:
            admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
            await admin.start()
            try:
                return await act(admin)
            finally:
                await admin.close()

        return self.run(run())

    def delete_below(self, number: int, offset: int) -> None:
        """What retention does: delete the oldest records of a partition."""
        records = {TopicPartition(self.queue_topic, number): RecordsToDelete(offset)}
        self.admin(lambda admin: admin.delete_records(records))

    def produce(self, key: bytes, timestamp_ms: int | None) -> None:
        """Write a record to partition 0."""

        async def run() -> None:
            await (await self._producing()).send_and_wait(
                self.queue_topic, b"{}", key=key, partition=0, timestamp_ms=timestamp_ms
            )

        self.run(run())

    def add_partitions(self, count: int) -> None:
        """Let the queue topic have so many."""

        async def learn() -> None:
            await (await self._producing()).client.force_metadata_update()

        self.admin(lambda admin: admin.create_partitions({self.queue_topic: NewPartitions(count)}))
        self.run(learn())


@pytest.fixture
def theirs(kafka: str, tmp_path: Path) -> Iterator[Theirs]:
    topic = unique("users")
    settings = {
        "queue_id": QUEUE,
        "queue_topic": topic,
        "handlers": "tests.integration.look_often",
        "checkpoint_ms": 200,
        "session_timeout_ms": 6000,
    }
    with Theirs(kafka, tmp_path, partitions=2, **settings) as cluster:
        cluster.admin(lambda admin: admin.create_topics([NewTopic(topic, 2, 1)]))
        yield cluster


def doctor(url: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "marq.cli", "doctor", "--url", url], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_retention_that_overtakes_is_named_and_what_was_acknowledged_is_no_loss(theirs: Theirs) -> None:
    worker = theirs.start(read_ahead_bytes=65536, memory_bytes=1 << 20, persist_after_ms=60_000)
    client = Client(worker.url)
    theirs.send(None, 1_000, partition=0, size=8_000)
    held = client.receive(QUEUE, 10, 5_000, visibility_timeout_ms=600_000)
    taken = len(held)
    assert [message["offset"] for message in held] == list(range(taken))
    read = worker.partitions()[0]["position"]
    assert read < 980, "the rest is not read yet"

    theirs.delete_below(0, 980)
    got = client.drain(QUEUE, 1_000)
    offsets = sorted(message["offset"] for message in got)
    lost = worker.partitions()[0]["lost"]
    first = lost[0]["start"]
    assert offsets == [*range(taken, first), *range(980, 1_000)], "what was read before is still delivered"
    assert [(one["log"], one["stop"], one["messages"]) for one in lost] == [("queue", 980, 980 - first)]
    assert client.ack(*held) == [{"ok": True}] * taken
    named = f"offsets {first} to 979 of the queue topic were deleted before they were read"
    status, text = doctor(worker.url)
    assert status == 1 and f"partition 0: {named}; {980 - first} messages among them were not done" in text, text
    assert f"offsets {first} to 979 of {theirs.queue_topic}" in worker.log
    trouble = client.request("GET", "/ui/api/overview").body["trouble"]
    assert [(t["partition"], t["count"]) for t in trouble if t["kind"] == "lost"] == [(0, 980 - first)]
    metrics = client.request("GET", "/metrics").body.decode()
    assert f'marq_partition_messages_total{{partition="0",what="deleted_unread"}} {980 - first}.0' in metrics
    until(lambda: worker.partitions()[0]["persisted"] == 1_000, "a manifest has all that")
    worker.stop()

    worker = theirs.start("w0", checkpoint_ms=60_000)
    client = Client(worker.url)
    theirs.send(None, 20, partition=0)
    assert len(client.drain(QUEUE, 20)) == 20
    worker.kill()  # the newest manifest is older than the acknowledgements
    theirs.delete_below(0, 1_020)
    theirs.send(None, 5, partition=0)
    worker = theirs.start("w0")
    assert len(Client(worker.url).drain(QUEUE, 5)) == 5
    assert worker.partitions()[0]["lost"] == lost


def test_partitions_that_are_added_are_served_without_a_restart_and_a_deleted_topic_ends_no_worker(
    theirs: Theirs,
) -> None:
    workers = theirs.start_many(2)
    client = Client(workers[0].url)
    theirs.send(None, 2)
    assert len(client.drain(QUEUE, 2)) == 2

    theirs.add_partitions(5)
    theirs.partitions = 5
    theirs.wait_served()
    theirs.send(None, 10)
    assert sorted(message["partition"] for message in client.drain(QUEUE, 10)) == sorted([0, 1, 2, 3, 4] * 2)
    assert doctor(workers[0].url)[0] == 0

    theirs.admin(lambda admin: admin.delete_topics([theirs.queue_topic]))
    reason = f"topic {theirs.queue_topic} was deleted"

    def all_say_why() -> bool:
        states = client.request("GET", "/v1/partitions?scope=cluster").body["partitions"]
        return [one["phase"] for one in states] == ["unserved"] * 5 and all(reason in one["reason"] for one in states)

    until(all_say_why, "each partition is unserved with its reason")
    assert all(worker.running for worker in workers)


def test_partitions_that_are_added_to_our_own_topic_are_not_read_and_everything_says_so(
    kafka: str, tmp_path: Path
) -> None:
    with Theirs(kafka, tmp_path, partitions=2, handlers="tests.integration.look_often") as cluster:
        worker = cluster.start()
        cluster.add_partitions(3)
        named = f"topic {cluster.queue_topic} has 3 partitions, and only the first 2 are read"
        until(lambda: named in worker.log, "the log says it")
        client = Client(worker.url)
        until(lambda: named in str(client.request("GET", "/ui/api/overview").body["trouble"]), "the page says it")
        status, text = doctor(worker.url)
        assert status == 1 and named in text, text
        cluster.send("q", 4)
        assert len(client.drain("q", 4)) == 4
        worker.stop()

        worker = cluster.start()
        assert named in worker.log and worker.serving() == {0, 1}
        here = cluster.command("doctor", "--quiet")
        assert here.returncode == 1 and named in here.stdout, here


def test_keys_are_kept_and_what_a_topic_can_not_be_is_refused(theirs: Theirs) -> None:
    worker = theirs.start()
    client = Client(worker.url)
    theirs.produce(b"customer-7", 0)
    (message,) = client.receive(QUEUE, 1, 5_000)
    assert b64decode(message["key"]) == b"customer-7" and message["offset"] == 0
    assert client.request("GET", "/v1/messages/0/0").body["key"] == "customer-7"
    assert client.request("GET", "/ui/api/messages/0/0").body["key"] == "customer-7"
    stats = client.request("GET", f"/v1/queues/{QUEUE}/stats").body
    assert 0 <= stats["oldest_ms"] < 600_000, "it is stamped 1970"
    client.ack(message)

    theirs.produce(b"customer-8", None)
    sqs = {"QueueUrl": f"{worker.url}/000000000000/{QUEUE}", "MessageAttributeNames": ["All"], "WaitTimeSeconds": 5}
    target = {"X-Amz-Target": "AmazonSQS.ReceiveMessage", "Content-Type": "application/x-amz-json-1.0"}
    (taken,) = client.request("POST", "/", json.dumps(sqs).encode(), **target).body["Messages"]
    assert taken["MessageAttributes"]["kafka-key"]["StringValue"] == "customer-8"

    for queue, settings, why in (
        ("other", {}, "there is one queue"),
        (QUEUE, {"fifo": True}, "can't be FIFO"),
        (QUEUE, {"max_receives": 3}, "MARQ_DEAD_LETTER_TOPIC"),
    ):
        answer = client.request("PUT", f"/v1/queues/{queue}", settings)
        assert answer.status in (400, 409) and why in str(answer.body), answer
    assert "is poison at once" in worker.log
