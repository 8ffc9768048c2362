"""Workers are restarted one after the other under load, as in a deploy. `bench restart` has the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cluster import Cluster

NAMES = ("a", "b", "c")
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
