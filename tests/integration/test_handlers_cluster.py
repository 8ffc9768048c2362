"""Handlers of one worker are enough for the partitions of all."""

from __future__ import annotations

from pathlib import Path

from marq.client import Service
from tests.integration.cluster import Cluster, until


def test_messages_in_partitions_of_a_worker_without_handlers_are_handled(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=4) as cluster:
        handles = cluster.start(ready=False)
        stores = cluster.start(ready=False, handlers="")
        cluster.wait_served()
        until(lambda: len(stores.serving()) == 2, "each has two partitions")
        for queue in ("work-a", "bulk-a", "thread-a", "flaky-a"):
            cluster.send(queue, 60)
        cluster.assert_nothing_lost()

        assert {seen.pid for seen in cluster.seen()} == {handles.pid}
        assert {seen.partition for seen in cluster.finished("work-a")} == {0, 1, 2, 3}
        # messages that are finished at once may not be there long enough to make their queue
        Service(stores.url).queue("work-a").create()
        until(lambda: stores.get("/v1/stats?prefix=work-a")[1]["queues"], "the queue is listed")
        (stats,) = stores.get("/v1/stats?prefix=work-a")[1]["queues"]
        assert stats["has_receiver"] is True

        cluster.send("nobody", 3)
        until(lambda: stores.get("/v1/queues/nobody/stats")[1].get("ready") == 3, "they are counted")
        for worker in (handles, stores):
            assert worker.get("/v1/queues/nobody/stats")[1]["has_receiver"] is False


def test_a_worker_that_joins_with_the_handlers_takes_what_waits_elsewhere(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=2) as cluster:
        stores = cluster.start(handlers="")
        cluster.send("work-a", 50)
        until(lambda: stores.get("/v1/queues/work-a/stats")[1].get("ready") == 50, "they wait")
        assert stores.get("/v1/queues/work-a/stats")[1]["has_receiver"] is False
        handles = cluster.start(ready=False)
        cluster.wait_served()
        cluster.assert_nothing_lost()
        assert {seen.pid for seen in cluster.seen()} == {handles.pid}
