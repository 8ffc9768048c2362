"""Receives and counts see everything that was confirmed before, at any worker, with short polls only.

Three workers on two partitions; a request goes to any of them.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from marq.client import Service
from tests.integration.cluster import Cluster
from tests.integration.sqs_client import Queue, ask


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


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


@pytest.mark.parametrize("fifo", [False, True])
def test_a_receive_gets_all_that_was_sent_before_it_at_whatever_workers(cluster: Cluster, fifo: bool) -> None:
    queues, whole = at_all(cluster, **({"FifoQueue": "true"} if fifo else {})), 0
    for i in range(8):
        bodies = [f"{i}-{n}" for n in range(5)]
        for n, body in enumerate(bodies):
            group = {"MessageGroupId": f"{n % 2}", "MessageDeduplicationId": body} if fifo else {}
            queues[n % 3].send(body, **group)
        got = queues[i % 3].receive(10, wait_s=i % 2)
        if fifo and len(got) == 5:
            groups = [[body for body in bodies if int(body[-1]) % 2 == group] for group in (0, 1)]
            assert [message["Body"] for message in got] in (groups[0] + groups[1], groups[1] + groups[0])
        whole += len(got) == 5
        while got:
            queues[0].delete(*got)
            got = queues[1].receive(10, wait_s=0)
    assert whole >= 7  # a busy machine may not read within 200 ms; without the rule it is 2


def test_every_protocol_reads_what_was_answered_in_every_other(cluster: Cluster) -> None:
    first, second, third = (worker.url for worker in cluster.workers)
    boto = Queue.make(first)
    with Service(second) as client, Service(third) as other:
        for i in range(5):
            ask(third, "SendMessage", QueueUrl=boto.url, MessageBody=f"query {i}")
            (message,) = boto.receive(1, wait_s=0)
            boto.delete(message)
            boto.send(f"json {i}")
            received = client.queue(boto.name).receive()
            assert received is not None
            assert received.payload == b"json %d" % i
            received.reject()
            dead_letter = other.queue(f"{boto.name}.dead").receive()
            assert dead_letter is not None
            dead_letter.ack()
            client.queue(boto.name).send(f"client {i}")
            answer = ask(first, "ReceiveMessage", QueueUrl=boto.url, VisibilityTimeout=0)
            assert f"<Body>client {i}</Body>" in answer.text
            received = other.queue(boto.name).receive()
            assert received is not None
            assert received.attempt == 2
            received.ack()
            assert boto.receive(1, wait_s=0) == []


def test_what_follows_a_delete_a_change_or_a_batch_sees_it(cluster: Cluster) -> None:
    first, second, third = at_all(cluster, FifoQueue="true", ContentBasedDeduplication="true")
    entries = [{"Id": f"{i}", "MessageBody": f"{i}", "MessageGroupId": "g"} for i in range(3)]
    first.sqs.send_message_batch(QueueUrl=first.url, Entries=entries)
    for i in range(3):
        (message,) = (second, third, first)[i].receive(1, wait_s=0)
        assert message["Body"] == f"{i}"
        third.change(message, 0)
        (message,) = second.receive(1, wait_s=0)
        assert (message["Body"], message["Attributes"]["ApproximateReceiveCount"]) == (f"{i}", "2")
        third.delete(message)
    assert first.receive(1, wait_s=0) == []


def test_the_receive_that_exceeds_the_maximum_finds_the_message_in_the_dead_letters_afterwards(
    cluster: Cluster,
) -> None:
    dead = at_all(cluster)
    policy = json.dumps({"deadLetterTargetArn": dead[0].arn, "maxReceiveCount": 1})
    queues = at_all(cluster, RedrivePolicy=policy)
    for i in range(6):
        queues[i % 3].send(f"{i}")
        (message,) = queues[(i + 1) % 3].receive(1, wait_s=0, VisibilityTimeout=0)
        assert queues[(i + 2) % 3].receive(1, wait_s=0) == []
        (dead_letter,) = dead[i % 3].receive(1, wait_s=0)
        assert dead_letter["MessageId"] == message["MessageId"]
        dead[0].delete(dead_letter)


def test_a_visibility_timeout_of_0_makes_a_message_visible_at_once_and_counts(cluster: Cluster) -> None:
    queues = at_all(cluster, VisibilityTimeout=0)
    queues[0].send()
    for i in range(1, 6):
        (message,) = queues[i % 3].receive(1, wait_s=0)
        assert message["Attributes"]["ApproximateReceiveCount"] == f"{i}"
    queues[0].delete(message)
    assert queues[1].receive(1, wait_s=0) == []
    assert queues[2].attribute("VisibilityTimeout") == "0"


def test_a_purge_is_in_force_when_it_is_answered(cluster: Cluster) -> None:
    queues = at_all(cluster, FifoQueue="true", ContentBasedDeduplication="true")
    first, second, third = queues
    for body in ("0", "1"):
        first.send(body, MessageGroupId="g")
    (held,) = first.receive(1, wait_s=0)
    second.sqs.purge_queue(QueueUrl=second.url)
    for queue in queues:
        assert queue.receive(1, wait_s=0) == []
    # the message in flight does not block its group, and ids of messages are forgotten at every worker
    for i, queue in enumerate(queues):
        queue.send(f"{i}", MessageGroupId="g")
        (message,) = third.receive(1, wait_s=0)
        assert (message["Body"], message["MessageId"] != held["MessageId"]) == (f"{i}", True)
        first.delete(message)


def test_counts_are_those_of_now_at_whatever_worker(cluster: Cluster) -> None:
    queues = at_all(cluster, FifoQueue="true", ContentBasedDeduplication="true")
    turn = 0

    def counts() -> tuple[int, ...]:
        nonlocal turn
        turn += 1
        found = queues[turn % 3].attributes()
        return tuple(int(found[f"ApproximateNumberOfMessages{state}"]) for state in ("", "NotVisible", "Delayed"))

    for i, body in enumerate(("a", "b", "a", "c")):  # the third is a duplicate
        queues[i % 3].send(body, MessageGroupId=body)
    assert counts() == (3, 0, 0)
    first, second = queues[0].receive(2, wait_s=0)
    assert counts() == (1, 2, 0)
    queues[1].change(first, 0)
    assert counts() == (2, 1, 0)
    queues[2].delete(second)
    assert counts() == (2, 0, 0)
    queues[0].set(DelaySeconds=60)
    queues[0].send("d", MessageGroupId="d")
    assert counts() == (2, 0, 1)
    queues[0].sqs.purge_queue(QueueUrl=queues[0].url)
    assert counts() == (0, 0, 0)


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
