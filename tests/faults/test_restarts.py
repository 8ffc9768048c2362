"""Workers are restarted one after the other under load, as in a deploy. `bench restart` has the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.kafka.broker import LOOPBACK, free_port
from tests.chaos import check
from tests.chaos.history import History, WitnessReader
from tests.chaos.traffic import Traffic, create_queues
from tests.integration.cluster import Cluster, until

NAMES = ("a", "b", "c")
LEASE_S = 15  # longer than a restart takes, and short enough to be waited for
WORK_S = 0.02  # of a call, so that some are under way whenever a worker stops


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_rolling_restart_loses_nothing_and_burns_no_attempt(kafka: str, tmp_path: Path, rounds: int) -> None:
    with Cluster(kafka, tmp_path, partitions=6, session_timeout_ms=6000, WITNESS_WORK_S=WORK_S) as cluster:
        workers = {name: cluster.start(name, ready=False) for name in NAMES}
        cluster.wait_served()
        with cluster.load(["work-a", "bulk-a"], 300):
            for _ in range(rounds):
                for name in NAMES:
                    workers[name].stop()
                    workers[name] = cluster.start(name, ready=False)
                    cluster.wait_served()
        total = cluster.assert_nothing_lost()
        burned = {one.id: one.attempt for one in cluster.begun() if one.attempt > 1}
        print(f"{rounds * len(NAMES)} restarts: {total}")
        assert not burned
        assert {worker.process.returncode for worker in cluster.workers if worker.ending} == {0}


@pytest.mark.slow
def test_a_rolling_restart_burns_no_attempt_of_any_client(kafka: str, tmp_path: Path) -> None:
    """Receives wait, and are answered by way of other workers, when one stops. A lost answer would burn one."""
    settings = {"session_timeout_ms": 6000, "visibility_timeout_ms": 1000 * LEASE_S}
    with Cluster(kafka, tmp_path, partitions=6, **settings) as cluster:
        ports = {name: free_port() for name in NAMES}
        workers = {name: cluster.start(name, ready=False, web_port=port) for name, port in ports.items()}
        cluster.wait_served()
        history, urls = History(), [f"http://{LOOPBACK}:{port}" for port in ports.values()]
        traffic, witness = (
            Traffic(history, urls, kafka, cluster.queue_topic, 6),
            WitnessReader(cluster.witness, history),
        )
        create_queues(urls, LEASE_S)
        traffic.start(200)
        try:
            for name in 2 * NAMES:
                workers[name].stop()
                workers[name] = cluster.start(name, ready=False, web_port=ports[name])
                cluster.wait_served()
            traffic.stop_sending()
            until(lambda: witness.read() or not history.missing(), "all is done", 4 * LEASE_S)
        finally:
            traffic.stop()
        assert not traffic.errors
        assert not check.violations(history)
        assert not [one for one in history.begun if one.attempt > 1]
