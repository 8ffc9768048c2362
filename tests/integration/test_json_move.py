"""Messages are moved to another queue on demand, mostly dead letters that go back. Each is moved once."""

from __future__ import annotations

import threading
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import pytest

from marq.client import Sent, Service
from marq.errors import BadValueError, LeaseOverError
from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client
from tests.kafka import unique


@pytest.fixture(scope="module")
def clients(shared_cluster: Cluster) -> list[Client]:
    return [Client(worker.url) for worker in shared_cluster.workers]


@pytest.fixture
def queue() -> str:
    return unique("q")


def move(client: Client, queue: str, **body: Any) -> list[Any]:
    answer = client.request("POST", f"/v1/queues/{queue}/move", body)
    assert answer.status == 200, answer
    return answer.body["results"]  # type: ignore[no-any-return]


def place(message: Any) -> dict[str, int]:
    return {"partition": message["partition"], "offset": message["offset"]}


def until_ready(client: Client, queue: str, places: list[dict[str, int]], to: str) -> list[Any]:
    """Move once everything has been read: a message that was just sent may not be read yet."""
    moved: dict[int, Any] = {}

    def all_moved() -> bool:
        left = [i for i in range(len(places)) if i not in moved]
        for i, result in zip(left, move(client, queue, to=to, messages=[places[i] for i in left]), strict=True):
            if "error" not in result:
                moved[i] = result
        return len(moved) == len(places)

    until(all_moved, "everything is moved")
    return [moved[i] for i in range(len(places))]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_named_messages_are_moved_with_all_they_have_by_any_worker(clients: list[Client], queue: str, at: int) -> None:
    other = unique("other")
    values = {"key": b64encode(b"k").decode(), "headers": {"h": b64encode(b"v").decode()}}
    sent = [clients[at].send(queue, b"%d" % i, **values)[0] for i in range(10)]
    chosen = [place(s) for s in sent[::2]]

    moved = until_ready(clients[at], queue, chosen, other)

    assert [m["partition"] for m in moved] == [p["partition"] for p in chosen]
    got = clients[at].drain(other, 5)
    assert {(m["partition"], m["offset"]) for m in got} == {(m["partition"], m["offset"]) for m in moved}
    assert sorted(m["payload"] for m in got) == [b"0", b"2", b"4", b"6", b"8"]
    assert all(b64decode(m["key"]) == b"k" and m["headers"] == values["headers"] for m in got)
    assert [m["attempt"] for m in got] == [1] * 5
    assert sorted(m["payload"] for m in clients[at].drain(queue, 5)) == [b"1", b"3", b"5", b"7", b"9"]


def test_a_message_is_moved_once(clients: list[Client], queue: str) -> None:
    other = unique("other")
    where = [place(s) for s in clients[0].send(queue, *[b"x"] * 20)]
    until_ready(clients[0], queue, where, other)

    again = move(clients[1], queue, to=other, messages=where)

    assert {r["error"]["type"].rpartition(":")[2] for r in again} == {"lease-over"}
    assert len(clients[0].drain(other, 21, 1500)) == 20


def test_dead_letters_go_back_to_where_they_came_from(clients: list[Client], queue: str) -> None:
    for client in clients:
        client.send(queue, b"bad")
    got: list[Any] = []
    while len(got) < 3:
        got += clients[0].receive(queue, 3, 3000)
    clients[1].reject(*got, reason="no good")
    back: list[Any] = []

    def all_back() -> bool:
        back.extend(r for r in move(clients[2], f"{queue}.dead", max=10) if "error" not in r)
        return len(back) == 3

    until(all_back, "all are moved back")
    found = clients[0].drain(queue, 3)
    assert [(m["payload"], m["headers"], m["attempt"]) for m in found] == [(b"bad", {}, 1)] * 3
    assert clients[0].drain(f"{queue}.dead", 1, 500) == []


def test_up_to_so_many_messages_are_moved_in_their_order(clients: list[Client], queue: str) -> None:
    other = unique("other")
    clients[0].send(queue, *[b"%03d" % i for i in range(50)])  # one request: one partition
    moved: list[Any] = []
    until(lambda: moved.extend(move(clients[1], queue, to=other, max=30 - len(moved))) or len(moved) == 30, "30")
    assert [m["payload"] for m in clients[0].drain(other, 30)] == [b"%03d" % i for i in range(30)]
    assert [m["payload"] for m in clients[0].drain(queue, 20)] == [b"%03d" % i for i in range(30, 50)]


def test_what_is_in_work_stays_where_it_is(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, b"x")
    (got,) = clients[0].receive(queue, 1, 3000)

    (result,) = move(clients[0], queue, to=unique("other"), messages=[place(got)])

    assert result["error"]["type"].endswith("lease-over")
    assert clients[1].ack(got) == [{"ok": True}]


def test_what_is_no_dead_letter_needs_a_queue_to_go_to_and_loses_nothing(clients: list[Client], queue: str) -> None:
    sent = [place(s) for s in clients[0].send(queue, b"x")]

    def refused() -> bool:
        (result,) = move(clients[0], queue, messages=sent)
        return bool(result["error"]["type"].endswith("not-possible"))

    until(refused, "it is read, and refused")
    (got,) = clients[0].receive(queue, 1, 3000)
    assert got["attempt"] == 1
    clients[0].ack(got)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"to": "x"}, 400),
        ({"to": "x", "max": 1, "messages": [{"partition": 0, "offset": 0}]}, 400),
        ({"to": "move-from", "max": 1}, 400),
        ({"to": "x" * 256, "max": 1}, 400),
        ({"to": "x", "max": 0}, 400),
        ({"to": "x", "messages": [{"partition": -1, "offset": 0}]}, 400),
    ],
)
def test_a_move_that_makes_no_sense_is_refused(clients: list[Client], body: Any, status: int) -> None:
    clients[0].request("PUT", "/v1/queues/move-from", {})
    assert clients[0].request("POST", "/v1/queues/move-from/move", body).status == status


def test_partitions_and_offsets_that_are_not_there_are_told(clients: list[Client], queue: str) -> None:
    clients[0].request("PUT", f"/v1/queues/{queue}", {})
    found = move(
        clients[0],
        queue,
        to="elsewhere",
        messages=[{"partition": 77, "offset": 0}, {"partition": 0, "offset": 1 << 40}],
    )
    assert [r["error"]["type"].rpartition(":")[2] for r in found] == ["not-found", "lease-over"]


def test_the_client_moves_messages(shared_cluster: Cluster, queue: str) -> None:
    with Service(shared_cluster.workers[0].url) as service:
        source, target = service.queue(queue), service.queue(unique("other"))
        sent = [s for s in source.send_many([b"a", b"b"]) if isinstance(s, Sent)]
        moved: list[Any] = []

        def both() -> bool:
            moved.extend(m for m in source.move(sent, to=target.name) if isinstance(m, Sent))
            return len(moved) == 2

        until(both, "both are moved")
        assert all(isinstance(r, LeaseOverError) for r in source.move(sent, to=target.name))
        assert sorted(m.payload for m in target.receive_many(2, timeout=5)) == [b"a", b"b"]
        with pytest.raises(BadValueError):
            source.move(sent, to=source.name)


def test_each_message_is_moved_once_though_the_worker_is_killed_meanwhile(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=2, handlers="", session_timeout_ms=6000) as cluster:
        workers = cluster.start_many(2)
        with Service([w.url for w in workers], retry_for=60) as service:
            source, target = service.queue("source"), service.queue("target")
            where = [s for s in source.send_many([b"%d" % i for i in range(3_000)]) if isinstance(s, Sent)]
            assert len(where) == 3_000
            some_moved, got = threading.Event(), []

            def kill_when_some_are_moved() -> None:
                some_moved.wait(60)
                workers[0].kill()

            killer = threading.Thread(target=kill_when_some_are_moved)
            killer.start()

            def all_moved() -> bool:
                for i in range(0, len(where), 200):
                    moved = source.move(where[i : i + 200], to="target")
                    if i >= 1_000 and any(isinstance(m, Sent) for m in moved):
                        some_moved.set()
                while messages := target.receive_many(1_000, timeout=1):
                    got.extend(m.payload for m in messages)
                    target.ack_many(messages)
                return len(got) >= 3_000

            until(all_moved, "all are moved", 120)
            killer.join()
            assert target.receive(timeout=2) is None
            assert sorted(got) == sorted(b"%d" % i for i in range(3_000))
