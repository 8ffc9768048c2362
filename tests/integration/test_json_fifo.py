"""FIFO queues over the JSON API: the order of groups, duplicates, and what becomes of both in moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from marq.client import Outgoing, Queue, Service
from marq.errors import BadValueError
from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client
from tests.kafka import unique


@pytest.fixture(scope="module")
def service(shared_cluster: Cluster) -> Iterator[Service]:
    with Service([worker.url for worker in shared_cluster.workers]) as service:
        yield service


@pytest.fixture(params=["queue", "group"])
def queue(service: Service, request: pytest.FixtureRequest) -> Queue:
    queue = service.queue(unique("fifo"))
    queue.create(fifo=True, content_deduplication=True, deduplication_scope=request.param)
    return queue


def payloads(messages: list[Any]) -> list[bytes]:
    return [message.payload for message in messages]


def test_a_group_comes_in_order_and_one_delivery_at_a_time(queue: Queue) -> None:
    queue.send_many([Outgoing(b"%b%d" % (g.encode(), i), group=g) for i in range(3) for g in "ab"])
    first = queue.receive(timeout=5)
    assert first is not None
    other = queue.receive(timeout=5)
    assert other is not None
    assert {first.group, other.group} == {"a", "b"}
    assert queue.receive(timeout=0.5) is None
    first.ack()
    second = queue.receive(timeout=5)
    assert second is not None
    assert (second.group, second.payload[1:]) == (first.group, b"1")


def test_what_is_given_back_comes_before_what_is_behind_it(queue: Queue) -> None:
    queue.send_many([Outgoing(b"%d" % i, group="g") for i in range(3)])
    first = queue.receive(timeout=5)
    assert first is not None and first.payload == b"0"
    first.release()
    got = []
    while len(got) < 3:
        message = queue.receive(timeout=5)
        assert message is not None
        got.append((message.payload, message.attempt))
        message.ack()
    assert got == [(b"0", 2), (b"1", 1), (b"2", 1)]


def test_a_second_message_like_one_before_is_taken_and_not_delivered(queue: Queue) -> None:
    queue.send(b"once", group="g")
    queue.send(b"once", group="g")
    queue.send(b"twice", group="g", deduplication_id="1")
    queue.send(b"twice", group="g", deduplication_id="2")
    got = []
    while message := queue.receive(timeout=1):
        got.append(message.payload)
        message.ack()
    assert got == [b"once", b"twice", b"twice"]


def test_a_dead_letter_that_goes_back_is_no_duplicate_of_itself(
    shared_cluster: Cluster, service: Service, queue: Queue
) -> None:
    dead = service.queue(f"{queue.name}.dead")
    dead.create(fifo=True, content_deduplication=True)
    queue.send_many([Outgoing(b"%d" % i, group="g") for i in range(2)])
    for _ in range(2):
        message = queue.receive(timeout=5)
        assert message is not None
        message.reject("bad")
    client, moved = Client(shared_cluster.workers[0].url), []

    def all_moved() -> bool:
        moved.extend(client.request("POST", f"/v1/queues/{dead.name}/move", {"max": 10}).body["results"])
        return len(moved) == 2

    until(all_moved, "both are moved back")
    got = []
    for _ in range(2):
        message = queue.receive(timeout=5)
        assert message is not None
        got.append((message.payload, message.group))
        message.ack()
    assert got == [(b"0", "g"), (b"1", "g")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "needs a group"),
        ({"group": "g", "delay": 5}, "a delay is the queue's"),
    ],
)
def test_a_message_that_does_not_fit_is_refused_with_the_reason(queue: Queue, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(BadValueError, match=said):
        queue.send(b"x", **wrong)


def test_a_queue_can_not_become_fifo_later(service: Service) -> None:
    queue = service.queue(unique("standard"))
    queue.create()
    with pytest.raises(BadValueError, match="standard queue for good"):
        queue.set(fifo=True)
    with pytest.raises(BadValueError, match="for FIFO queues"):
        queue.send(b"x", deduplication_id="1")
