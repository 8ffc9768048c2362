"""What follows an answer sees it: sends, acks, changes, dead letters and counts, at any worker, with short polls only.

Three workers on two partitions; a request goes to any of them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.integration.cluster import Cluster
from tests.integration.sqs_client import Queue


@pytest.fixture(scope="module")
def cluster(door: Cluster) -> Cluster:
    return door


def at_all(cluster: Cluster, **attributes: Any) -> list[Queue]:
    """A new queue, through each worker."""
    queue = Queue.make(cluster.workers[0], **attributes)
    return [queue.at(worker) for worker in cluster.workers]


def pairs(queues: list[Queue], count: int) -> None:
    """Send and receive in turns, each at another worker: no receive is empty."""
    missed = []
    for i in range(count):
        queues[i % 3].send(f"{i}")
        began_s = time.monotonic()
        got = queues[(i + i // 3) % 3].receive(1, wait_s=0)
        if [message["Body"] for message in got] != [f"{i}"]:
            missed.append((i, time.monotonic() - began_s))
            got += queues[0].receive(1, wait_s=5)
        queues[(i + 1) % 3].delete(*got)
    assert missed == []


def test_a_short_poll_finds_what_was_sent_before_it_at_whatever_worker(cluster: Cluster) -> None:
    pairs(at_all(cluster), 40)


@pytest.mark.slow
def test_a_short_poll_finds_what_was_sent_before_it_500_times_idle_and_under_load(cluster: Cluster) -> None:
    pairs(at_all(cluster), 500)
    over = threading.Event()

    def load(worker: Any) -> None:
        queue = Queue.make(worker)
        while not over.is_set():
            entries = [{"Id": f"{i}", "MessageBody": "x" * 100} for i in range(10)]
            queue.sqs.send_message_batch(QueueUrl=queue.url, Entries=entries)
            queue.delete(*queue.receive(10, wait_s=1))

    threads = [threading.Thread(target=load, args=(worker,)) for worker in (*cluster.workers, *cluster.workers)]
    for thread in threads:
        thread.start()
    try:
        pairs(at_all(cluster), 500)
    finally:
        over.set()
        for thread in threads:
            thread.join()
