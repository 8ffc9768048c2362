"""Topic mode: a topic of the user's, whose retention, partitions and records marq does not choose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete

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


@pytest.fixture
def theirs(kafka: str, tmp_path: Path) -> Iterator[Theirs]:
    topic = unique("users")
    settings = {
        "queue_id": QUEUE,
        "queue_topic": topic,
        "handlers": "",
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
