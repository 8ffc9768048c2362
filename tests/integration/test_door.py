"""The front door with three real workers on two partitions: one of them owns nothing, and serves all the same."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, until
from tests.integration.door_client import Client
from tests.kafka import unique


@pytest.fixture(scope="module")
def cluster(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("door")
    with Cluster(kafka, folder, partitions=2, handlers="") as cluster:
        cluster.start_many(3)
        yield cluster


@pytest.fixture(scope="module")
def clients(cluster: Cluster) -> list[Client]:
    return [Client(worker.url) for worker in cluster.workers]


@pytest.fixture
def queue() -> str:
    return unique("q")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_client_that_knows_one_worker_gets_every_message(clients: list[Client], queue: str, at: int) -> None:
    sent = [f"{i}".encode() for i in range(60)]
    for i, client in enumerate(clients):
        for payload in sent[i::3]:
            client.send(queue, payload)
    got = clients[at].drain(queue, len(sent))
    assert sorted(m["payload"] for m in got) == sorted(sent)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_short_polls_at_one_worker_get_every_message(clients: list[Client], queue: str, at: int) -> None:
    for payload in (b"a", b"b", b"c", b"d"):
        clients[(at + 1) % 3].send(queue, payload)
    got: list[Any] = []

    def poll() -> bool:
        got.extend(clients[at].receive(queue, 10))
        return len(got) == 4

    until(poll, "all four arrive")
    assert sorted(m["payload"] for m in got) == [b"a", b"b", b"c", b"d"]


def test_a_waiting_receive_is_answered_within_50_ms_of_a_send_at_another_worker(
    cluster: Cluster, clients: list[Client]
) -> None:
    took_ms: list[float] = []
    for i in range(30):
        queue = unique("wait")
        # made beforehand: the first send to a queue writes it to the catalog
        clients[0].request("PUT", f"/v1/queues/{queue}", {})
        got: list[float] = []
        waiter = Client(cluster.workers[i % 3].url)

        def wait(waiter: Client = waiter, queue: str = queue, got: list[float] = got) -> None:
            assert len(waiter.receive(queue, 1, 10_000)) == 1
            got.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        began = time.monotonic()
        clients[(i + 1) % 3].send(queue, b"x")
        thread.join(15)
        took_ms.append((got[0] - began) * 1000)
    took_ms.sort()
    print("waiting receive answered after ms:", [round(ms, 1) for ms in took_ms])
    assert took_ms[int(len(took_ms) * 0.9)] < 50


def test_acknowledge_extend_and_release_work_at_any_worker(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, b"a", b"b", b"c", b"d")
    got = clients[0].drain(queue, 0) or clients[0].receive(queue, 4, 3000, visibility_timeout_ms=2000)
    while len(got) < 4:
        got += clients[0].receive(queue, 4, 3000, visibility_timeout_ms=2000)
    a, b, c, d = sorted(got, key=lambda m: m["payload"])
    assert clients[1].ack(a) == [{"ok": True}]
    assert clients[2].extend(b, ms=20_000) == [{"ok": True}]
    assert clients[1].release(c) == [{"ok": True}]
    assert clients[2].release(d, counted=False) == [{"ok": True}]
    again = clients[1].receive(queue, 4, 3000)
    while len(again) < 2:
        again += clients[1].receive(queue, 4, 3000)
    assert {m["payload"]: m["attempt"] for m in again} == {b"c": 2, b"d": 1}
    clients[0].ack(*again)
    assert clients[0].receive(queue, 4, 2500) == []  # a is done, b was extended
    assert clients[2].ack(b) == [{"ok": True}]


def test_a_message_that_is_not_acknowledged_comes_again(clients: list[Client], queue: str) -> None:
    clients[1].send(queue, b"x")
    (first,) = clients[2].receive(queue, 1, 3000, visibility_timeout_ms=1000)
    (second,) = clients[0].receive(queue, 1, 5000)
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert (first["partition"], first["offset"]) == (second["partition"], second["offset"])
    clients[0].ack(second)


def test_a_client_that_goes_away_while_it_waits_costs_no_attempt(clients: list[Client], queue: str) -> None:
    host, port = clients[0].url.removeprefix("http://").split(":")
    body = b'{"wait_ms": 20000}'
    for _ in range(5):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"POST /v1/queues/{queue}/receive HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            time.sleep(0.05)
    clients[1].send(queue, b"x")
    (message,) = clients[0].receive(queue, 1, 3000)
    assert message["attempt"] == 1
    clients[0].ack(message)


def test_a_queue_made_at_one_worker_is_known_to_all_within_a_second(clients: list[Client], queue: str) -> None:
    assert clients[0].request("PUT", f"/v1/queues/{queue}", {"visibility_timeout_ms": 4321}).status == 201
    began = time.monotonic()
    for client in clients:
        until(lambda client=client: client.request("GET", f"/v1/queues/{queue}").status == 200, "the queue is known")
    assert time.monotonic() - began < 1


def test_changes_of_one_queue_at_several_workers_at_once_are_all_kept(cluster: Cluster, queue: str) -> None:
    values = {"delay_ms": 7, "ttl_ms": 70_000, "max_receives": 77}
    clients = [Client(worker.url) for worker in cluster.workers]
    clients[0].request("PUT", f"/v1/queues/{queue}", {})
    until(lambda: all(c.request("GET", f"/v1/queues/{queue}").status == 200 for c in clients), "known")
    threads = [
        threading.Thread(target=client.request, args=("PATCH", f"/v1/queues/{queue}", {name: value}))
        for client, (name, value) in zip(clients, values.items(), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:

        def settings(client: Client = client) -> dict[str, Any]:
            return client.request("GET", f"/v1/queues/{queue}").body["settings"]  # type: ignore[no-any-return]

        until(lambda settings=settings: values.items() <= settings().items(), f"all of {values}, not {settings()}", 1)


def test_purge_takes_what_is_there_and_nothing_that_comes_later(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, *(b"old" for _ in range(10)))
    clients[1].send(queue, *(b"old" for _ in range(10)))
    assert clients[2].request("POST", f"/v1/queues/{queue}/purge").status == 202
    clients[0].send(queue, b"new")
    until(lambda: not clients[0].request("GET", f"/v1/queues/{queue}").body["purging"], "the purge is done")
    assert [m["payload"] for m in clients[1].drain(queue, 100, wait_ms=1000)] == [b"new"]


def test_a_deleted_queue_is_gone_and_can_be_made_again(clients: list[Client], queue: str) -> None:
    clients[0].request("PUT", f"/v1/queues/{queue}", {"delay_ms": 1})
    clients[0].send(queue, b"old")
    assert clients[0].request("DELETE", f"/v1/queues/{queue}").status == 200
    assert clients[0].request("GET", f"/v1/queues/{queue}").status == 404
    assert clients[0].request("DELETE", f"/v1/queues/{queue}").status == 404
    answer = clients[0].request("PUT", f"/v1/queues/{queue}", {})
    assert (answer.status, answer.body["settings"]["delay_ms"]) == (201, 0)
    clients[0].send(queue, b"new")
    until(lambda: not clients[0].request("GET", f"/v1/queues/{queue}").body["purging"], "the purge is done")
    assert [m["payload"] for m in clients[1].drain(queue, 100, wait_ms=1000)] == [b"new"]


def test_queues_are_listed_in_pages(clients: list[Client]) -> None:
    prefix = unique("page")
    for i in range(5):
        clients[0].request("PUT", f"/v1/queues/{prefix}.{i}", {})
    names: list[str] = []
    after = ""
    while True:
        page = clients[0].request("GET", f"/v1/queues?prefix={prefix}&after={after}&limit=2").body
        names += [q["name"] for q in page["queues"]]
        after = page["after"]
        if not after:
            break
    assert names == [f"{prefix}.{i}" for i in range(5)]


def test_delay_and_time_to_live_of_a_message(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, b"later", delay_ms=1500)
    clients[0].send(queue, b"short", ttl_ms=100, delay_ms=500)
    began = time.monotonic()
    (message,) = clients[1].receive(queue, 2, 6000)
    assert message["payload"] == b"later"
    assert time.monotonic() - began > 1.0
    clients[1].ack(message)


def test_names_with_any_printable_character(clients: list[Client]) -> None:
    queue = unique("ä/ö %{}?#")
    clients[0].send(queue, b"x")
    (message,) = clients[1].receive(queue, 1, 3000)
    assert message["queue"] == queue
    clients[2].ack(message)


def test_msgpack_carries_raw_bytes(cluster: Cluster, queue: str) -> None:
    client = Client(cluster.workers[0].url, msgpack=True)
    client.send(queue, b"\x00\xff", key=b"\xfe", headers={"h": b"\x80"})
    (message,) = client.receive(queue, 1, 3000)
    assert (message["payload"], message["key"], message["headers"]) == (b"\x00\xff", b"\xfe", {"h": b"\x80"})
    assert client.ack(message) == [{"ok": True}]
