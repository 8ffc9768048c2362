"""Workers and brokers die, stall and come back while messages are sent and handled: nothing that was confirmed is lost.

Three worker processes share the partitions. Each test ends with the total-queue check, and says how many messages were
handled more than once.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.broker import EmbeddedBroker
from tests.integration.cluster import Cluster, Worker, until

#: Session time-out of the workers: the shortest that the broker permits.
SESSION_S = 6
#: Seconds in which the partitions of a worker that was killed are served by others.
TAKE_OVER_S = 20
QUEUES = ["work-a", "bulk-a", "drop-a", "flaky-a", "work-b"]
SETTINGS = {
    "session_timeout_ms": SESSION_S * 1000,
    "checkpoint_ms": 300,
    "hold_ms": 500,
    "visibility_timeout_ms": 4000,
    "backoff_ms": 100,
    "backoff_max_ms": 500,
}


@pytest.fixture
def cluster(kafka: str, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(kafka, tmp_path, partitions=6, **SETTINGS) as cluster:
        yield cluster


def wait_taken_over(cluster: Cluster, dead: Worker) -> float:
    """Wait until the other workers serve all partitions; seconds it took."""
    began = time.monotonic()
    others = [w for w in cluster.running if w is not dead]
    until(
        lambda: sorted(n for w in others for n in w.serving()) == list(range(cluster.partitions)),
        "the others serve all partitions",
        TAKE_OVER_S,
    )
    return time.monotonic() - began


def kill_and_restart(broker: EmbeddedBroker, away_s: float) -> None:
    broker.kill()
    time.sleep(away_s)
    broker.start()


# -- workers ------------------------------------------------------------------------------------------


def test_the_partitions_of_a_killed_worker_are_served_by_others_within_20_seconds(cluster: Cluster) -> None:
    victim, *_ = cluster.start_many(3)
    with cluster.load(QUEUES, 500):
        time.sleep(1.5)
        assert victim.serving()
        victim.kill()
        taken_s = wait_taken_over(cluster, victim)
        time.sleep(0.5)
    total = cluster.assert_nothing_lost()
    print(f"kill -9 of a worker: taken over after {taken_s:.1f} s, {total}")


def test_a_worker_that_was_stopped_beyond_its_session_harms_nothing_when_it_goes_on(cluster: Cluster) -> None:
    zombie, *_ = cluster.start_many(3)
    with cluster.load(QUEUES, 500):
        time.sleep(1.5)
        zombie.signal(signal.SIGSTOP)
        taken_s = wait_taken_over(cluster, zombie)
        time.sleep(0.5)
        zombie.signal(signal.SIGCONT)
        until(lambda: zombie.serving(), "the stopped worker serves again")
        cluster.wait_served()
        time.sleep(0.5)
    total = cluster.assert_nothing_lost()
    print(f"SIGSTOP of a worker: taken over after {taken_s:.1f} s, {total}")


# -- the broker ---------------------------------------------------------------------------------------


@pytest.fixture
def own_broker() -> Iterator[EmbeddedBroker]:
    with tempfile.TemporaryDirectory(prefix="marq-kafka-") as folder, EmbeddedBroker(folder) as broker:
        yield broker


def outage(broker: EmbeddedBroker, folder: Path, away_s: float) -> None:
    with Cluster(broker.bootstrap, folder, partitions=6, **SETTINGS) as cluster:
        cluster.start_many(3)
        with cluster.load(QUEUES, 300):
            time.sleep(1.5)
            kill_and_restart(broker, away_s)
            back = time.monotonic()
            cluster.wait_served()
            served_s = time.monotonic() - back
            time.sleep(0.5)
        total = cluster.assert_nothing_lost()
        assert len(cluster.running) == 3
        print(f"kill -9 of the broker, {away_s} s away: served {served_s:.1f} s after it was back, {total}")


def test_a_killed_broker_loses_nothing(own_broker: EmbeddedBroker, tmp_path: Path) -> None:
    outage(own_broker, tmp_path, away_s=1)


@pytest.mark.slow
@pytest.mark.parametrize("away_s", [20, 50, 100])
def test_workers_outlive_an_outage(own_broker: EmbeddedBroker, tmp_path: Path, away_s: float) -> None:
    outage(own_broker, tmp_path, away_s)
