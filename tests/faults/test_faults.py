"""Workers and brokers die, stall and restart while messages are sent and handled: no confirmed message is lost.

Three worker processes share the partitions. Each test ends with the total-queue check, and says how many messages were
handled more than once.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from app.kafka.broker import EmbeddedBroker
from tests.integration.cluster import Cluster, Worker, by_id, until

#: Session time-out of the workers: the shortest that the broker permits.
SESSION_S = 6
#: Seconds in which the partitions of a worker that was killed are served by others.
TAKE_OVER_S = 20
QUEUES = ["work-a", "bulk-a", "drop-a", "flaky-a", "work-b"]
SETTINGS = {
    "session_timeout_ms": SESSION_S * 1000,
    "checkpoint_ms": 300,
    "persist_after_ms": 500,
    "visibility_timeout_ms": 4000,
    "backoff_ms": 100,
    "backoff_max_ms": 500,
    "WITNESS_WORK_S": 0.02,  # so that some are at work when the fault comes
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


def until_rejoined(cluster: Cluster, stopped: Worker) -> None:
    """Let a worker that was stopped with SIGSTOP go on, and wait until it has a share again."""
    stopped.signal(signal.SIGCONT)
    until(lambda: stopped.serving() and stopped.ready(), "the stopped worker serves again", 30)
    cluster.wait_served()


def report(what: str, cluster: Cluster) -> None:
    print(f"{what}: {cluster.assert_nothing_lost(90)}")


# -- workers ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_worker_killed_and_one_stopped_beyond_its_session_leave_the_third_to_serve_all(cluster: Cluster) -> None:
    killed, stopped, _ = cluster.start_many(3)
    with cluster.load(QUEUES, 500):
        time.sleep(1.0)
        stopped.signal(signal.SIGSTOP)
        killed.kill()
        taken_s = wait_taken_over(cluster, stopped)
        until_rejoined(cluster, stopped)
    report(f"kill -9 and SIGSTOP, all taken over after {taken_s:.1f} s", cluster)


@pytest.mark.slow
def test_the_partitions_of_a_killed_worker_are_served_by_others_within_20_seconds(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=8) as cluster:  # as installed: session time-out of 10 s
        victim, *_ = cluster.start_many(3)
        with cluster.load(QUEUES, 1000):
            time.sleep(3)
            assert victim.serving()
            victim.kill()
            taken_s = wait_taken_over(cluster, victim)
            time.sleep(2)
        report(f"kill -9 of a worker, default settings, taken over after {taken_s:.1f} s", cluster)


@pytest.mark.slow
def test_a_stopped_worker_begins_nothing_that_others_have_when_it_goes_on(kafka: str, tmp_path: Path) -> None:
    """Its handlers had messages waiting for their turn, whose leases are over by then."""
    with Cluster(kafka, tmp_path, partitions=6, **SETTINGS) as cluster:
        zombie, *_ = cluster.start_many(3)
        with cluster.load(["thread-a", *QUEUES], 300):
            time.sleep(2)
            zombie.signal(signal.SIGSTOP)
            wait_taken_over(cluster, zombie)
            time.sleep(5)
            until_rejoined(cluster, zombie)
            time.sleep(1)
        report("SIGSTOP of a worker", cluster)
        late = [b.id for seen in by_id(cluster.begun()).values() for a, b in pairwise(seen) if b.attempt < a.attempt]
        assert late == [], "begun after a later delivery"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments(kafka: str, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Cluster(
        kafka, tmp_path, partitions=6, **SETTINGS | {"checkpoint_ms": 100, "persist_after_ms": 200}
    ) as cluster:
        for name in ("a", "b", "c"):
            cluster.start(name, ready=False)
        cluster.wait_served()
        with cluster.load(QUEUES, 400):
            for _ in range(6):
                time.sleep(rng.uniform(0.1, 5))
                kill_and_start_again(cluster, rng.choice(cluster.running), wipe=rng.random() < 0.3)
        cluster.wait_served(60)
        report(f"kill -9 at random moments, seed {seed}", cluster)


def kill_and_start_again(cluster: Cluster, worker: Worker, wipe: bool) -> None:
    worker.kill()
    if wipe:
        cluster.wipe(worker)
    cluster.start(worker.folder.name, ready=False)


# -- the broker ---------------------------------------------------------------------------------------


@pytest.fixture
def own_broker() -> Iterator[EmbeddedBroker]:
    with tempfile.TemporaryDirectory(prefix="marq-kafka-") as folder, EmbeddedBroker(folder) as broker:
        yield broker


def outage(broker: EmbeddedBroker, folder: Path, away_s: float) -> None:
    with Cluster(broker.bootstrap, folder, partitions=6, **SETTINGS) as cluster:
        cluster.start_many(3)
        with cluster.load(QUEUES, 300):
            time.sleep(1.0)
            broker.kill()
            time.sleep(away_s)
            broker.start()
            began = time.monotonic()
            before = len(cluster.finished())
            until(lambda: len(cluster.finished()) > before + 100, "messages are handled again", 40)
            again_s = time.monotonic() - began
            cluster.wait_served()
        report(f"kill -9 of the broker, {away_s} s away, handling again {again_s:.1f} s after it was back", cluster)
        assert len(cluster.running) == 3


@pytest.mark.slow
def test_a_killed_broker_loses_nothing(own_broker: EmbeddedBroker, tmp_path: Path) -> None:
    outage(own_broker, tmp_path, away_s=0)


@pytest.mark.slow
@pytest.mark.parametrize("away_s", [20, 50, 100])
def test_workers_outlive_an_outage(own_broker: EmbeddedBroker, tmp_path: Path, away_s: float) -> None:
    outage(own_broker, tmp_path, away_s)


@pytest.mark.slow
def test_a_worker_ends_though_kafka_is_away(own_broker: EmbeddedBroker, tmp_path: Path) -> None:
    with Cluster(own_broker.bootstrap, tmp_path, partitions=6, **SETTINGS) as cluster:
        workers = cluster.start_many(2)
        cluster.send("work-a", 500)
        cluster.assert_nothing_lost()
        own_broker.kill()
        time.sleep(3)
        took_s = [worker.stop() for worker in workers]
        print(f"SIGTERM without Kafka: {', '.join(f'{s:.1f} s' for s in took_s)}")
        assert max(took_s) < 9
        assert {worker.process.returncode for worker in workers} == {0}
