"""A real broker whose clock is wrong, or goes on while no worker runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from app.kafka.broker import EmbeddedBroker
from app.settings import Settings
from marq.errors import BrokerError
from tests.faults.brokers import Brokers
from tests.faults.clock import FAKE, LIBRARY, Clock
from tests.integration.cluster import Cluster
from tests.integration.json_client import Client
from tests.integration.marq_command import Command

HOUR_S = 3_600
HOUR_MS = 1_000 * HOUR_S
MINUTE_MS = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LIBRARY, reason="libfaketime is not installed"),
]


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "faketimerc")


@pytest.fixture
def cluster(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Workers without handlers, at a broker of their own."""
    broker = EmbeddedBroker(tmp_path / "broker")
    with monkeypatch.context() as patch:
        for name, value in {**FAKE, "FAKETIME_TIMESTAMP_FILE": str(clock.file)}.items():
            patch.setenv(name, value)
        try:
            broker.start()
        except BrokerError as error:
            pytest.skip(f"this Java does not run under this libfaketime: {error}")
    with broker, Cluster(broker.bootstrap, tmp_path, partitions=2, handlers="", checkpoint_ms=300) as cluster:
        yield cluster


#: Leaders of the queue and markers topics. Broker 2 is behind.
SKEWED, SKEW_S = 2, -30
QUEUE_LEADERS, MARKERS_LEADERS = (1, 2, 3, 2), (3, 1, 2, 2)


@pytest.fixture
def skewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Workers without handlers, at three brokers, one of which is 30 s behind."""
    clock = Clock(tmp_path / "faketimerc")
    clock.set(SKEW_S)
    brokers = Brokers(tmp_path / "kafka", environment={SKEWED: {**FAKE, "FAKETIME_TIMESTAMP_FILE": str(clock.file)}})
    try:
        brokers.__enter__()
    except BrokerError as error:
        pytest.skip(f"this Java does not run under this libfaketime: {error}")
    with brokers, Cluster(brokers.bootstrap, tmp_path, handlers="", replication=2) as cluster:
        settings = Settings(kafka=f"kafka://{brokers.bootstrap}", name=cluster.name)
        markers = {settings.markers_topic: [[n, n % 3 + 1] for n in MARKERS_LEADERS]}
        cluster.run(brokers.create(settings, [[n, n % 3 + 1] for n in QUEUE_LEADERS], 1, markers))
        yield cluster


def payloads(client: Client, queue: str, count: int = 100, wait_ms: int = 3_000) -> set[bytes]:
    return {message["payload"] for message in client.drain(queue, count, wait_ms)}


def test_a_broker_that_is_an_hour_off_for_a_while_expires_and_delays_nothing(cluster: Cluster, clock: Clock) -> None:
    client = Client(cluster.start().url)
    client.send("first", *[b"%d" % i for i in range(20)], ttl_ms=10 * MINUTE_MS)
    assert len(payloads(client, "first", 20)) == 20  # so the time is known in both partitions
    client.send("kept", *[b"%d" % i for i in range(20)], ttl_ms=10 * MINUTE_MS)
    client.send("later", *[b"%d" % i for i in range(20)], delay_ms=10 * MINUTE_MS)
    client.send("soon", b"soon", delay_ms=40_000)
    first = payloads(client, "kept", 10)

    clock.set(HOUR_S)
    time.sleep(15)  # far more than two ticks
    meanwhile = payloads(client, "later", wait_ms=0)
    clock.set(0)
    time.sleep(3)

    assert meanwhile == set()
    assert len(first | payloads(client, "kept")) == 20
    assert payloads(client, "later", wait_ms=500) == set()
    assert payloads(client, "soon", 1, wait_ms=60_000) == {b"soon"}
    assert payloads(client, "later", wait_ms=500) == set()


def test_an_hour_without_any_worker_counts_in_full(cluster: Cluster, clock: Clock) -> None:
    worker = cluster.start()
    client = Client(worker.url)
    client.send("q", b"expired", ttl_ms=HOUR_MS // 2)
    client.send("q", b"kept", ttl_ms=2 * HOUR_MS)
    client.send("q", b"over", delay_ms=HOUR_MS // 2)
    client.send("q", b"delayed", delay_ms=2 * HOUR_MS)
    worker.stop()

    clock.set(HOUR_S)
    client = Client(cluster.start().url)

    assert payloads(client, "q", 2) == {b"kept", b"over"}
    assert payloads(client, "q", wait_ms=500) == set()


def test_a_broker_that_is_behind_ends_nothing_and_brings_nothing_early(skewed: Cluster) -> None:
    worker = skewed.start()
    client = Client(worker.url)
    for n in range(24):
        client.send("living", b"%d" % n, ttl_ms=20_000)
        client.send("delayed", b"%d" % n, delay_ms=15_000)
    sent_s = time.monotonic()

    living = payloads(client, "living", 24, wait_ms=2_000)
    early = payloads(client, "delayed", wait_ms=0)
    took_s = time.monotonic() - sent_s
    late = payloads(client, "delayed", 24, wait_ms=30_000)

    assert took_s > 14 or early == set()
    assert len(living) == 24
    assert len(early | late) == 24
    said = Command(worker.url)("doctor", "--quiet").out
    assert f"the clock of broker {SKEWED} is 30 s behind" in said, said
    with urlopen(f"{worker.url}/metrics", timeout=30) as answer:
        told = answer.read().decode()
    assert 'marq_broker_clock_offset_seconds{broker="2"} -' in told
