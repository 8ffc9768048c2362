"""A rebalance touches only what moves: three workers, and a fourth one that joins while one of them stands still."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

from marq.core import markers as m
from tests.integration.cluster import Cluster, Worker, until


def owns(cluster: Cluster) -> Counter[int]:
    """How many own markers each partition has."""
    found: Counter[int] = Counter()
    for record in cluster.read(f"{cluster.name}.markers", cluster.partitions):
        found[record.partition] += sum(type(marker) is m.Own for marker in m.decode(record.value).markers)
    return found


def rejoins(worker: Worker) -> bool:
    """True while the group of the workers has not agreed on an assignment."""
    return bool((worker.get("/health/ready")[1] or {}).get("rebalancing"))


def served_by(workers: list[Worker]) -> dict[int, int]:
    """Which process serves which partition."""
    return {number: worker.pid for worker in workers for number in worker.serving()}


def test_partitions_that_stay_are_served_while_the_group_rejoins_and_are_not_taken_anew(
    kafka: str, tmp_path: Path
) -> None:
    with Cluster(kafka, tmp_path, partitions=6, session_timeout_ms=30_000) as cluster:
        a, b, still = cluster.start_many(3)
        cluster.send("parked", 300)  # without a handler
        cluster.send("work-a", 60)
        until(lambda: len(cluster.finished("work-a")) == 60, "all is done")
        before, owned = served_by([a, b, still]), owns(cluster)
        epochs = {number: state["epoch"] for number, state in cluster.partition_states().items()}

        # the group waits for the worker that stands still, for a session, before it assigns partitions to the new one
        still.signal(signal.SIGSTOP)
        joining = cluster.start(ready=False)
        for worker in (a, b):
            until(lambda worker=worker: rejoins(worker), "the worker rejoins")
        for number in sorted(n for n, pid in before.items() if pid != still.pid):
            cluster.send("work-b", 5, partition=number)
        until(lambda: len(cluster.finished("work-b")) == 20, "what was sent meanwhile is done")
        assert rejoins(a) and rejoins(b), "and the group has not agreed yet"
        assert Counter(one.pid for one in cluster.begun("work-b")) == {a.pid: 10, b.pid: 10}

        still.signal(signal.SIGCONT)
        cluster.wait_served()
        workers = [a, b, still, joining]
        with cluster.load(["work-c"], 300):
            time.sleep(1)
            had = joining.serving()
            joining.stop()
            cluster.wait_served()
        assert had
        assert joining.log.count("was taken over by another worker") == len(had), "it served until then"
        after, states = served_by(workers[:3]), cluster.partition_states()
        stayed = [
            n for n in before if before[n] == after[n] and before[n] != still.pid and epochs[n] == states[n]["epoch"]
        ]
        owned_now = owns(cluster)
        assert all(owned_now[n] == owned[n] for n in stayed), "no new own marker"
        assert len(stayed) >= 2, (before, after)
        cluster.send("work-d", 60)
        until(lambda: len(cluster.finished("work-d")) == 60, "the rest is done")
        done = Counter(one.id for one in cluster.finished())
        assert {sent.id for sent in cluster.sent if sent.queue != "parked"} <= set(done)
        assert {one.attempt for one in cluster.begun() if one.queue != "work-a"} == {1}
