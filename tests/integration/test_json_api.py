"""The JSON API of three real workers on two partitions: one of them owns nothing, and answers like the others."""

from __future__ import annotations

import socket
import threading
import time
from base64 import b64decode, b64encode
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client
from tests.kafka import unique


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


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
    # the median, because the machine that runs the tests may be busy; idle, all are below 50
    assert took_ms[len(took_ms) // 2] < 50


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


def test_an_extension_or_release_of_an_older_delivery_is_lease_over_at_any_worker(
    clients: list[Client], queue: str
) -> None:
    clients[1].send(queue, b"x")
    (first,) = clients[2].receive(queue, 1, 3000, visibility_timeout_ms=1000)
    (second,) = clients[0].receive(queue, 1, 5000)

    for client in clients:
        for (result,) in (client.extend(first), client.release(first)):
            assert result["error"]["type"].endswith("lease-over")
        assert client.extend(second) == [{"ok": True}]
    assert clients[2].release(second, delay_ms=60_000) == [{"ok": True}]


def test_the_circuit_breaker_of_a_queue_is_one_in_all_workers(clients: list[Client], queue: str) -> None:
    settings = {"breaker_failures": 4, "breaker_pause_ms": 60_000}
    assert clients[0].request("PUT", f"/v1/queues/{queue}", settings).status == 201
    for client in clients:
        until(lambda client=client: client.request("GET", f"/v1/queues/{queue}").status == 200, "the queue is known")
    clients[0].send(queue, *(b"%d" % i for i in range(30)))

    failed = 0
    while got := clients[failed % 3].receive(queue, 1, 1_000):
        clients[(failed + 1) % 3].release(*got, delay_ms=600_000)
        failed += len(got)

    assert 4 <= failed <= 4 + len(clients), "and not four in each partition"
    for client in clients:
        breaker = client.request("GET", f"/v1/queues/{queue}/stats").body["breaker"]
        assert (breaker["state"], breaker["pause_ms"] > 0) == ("open", True)
    metrics = [client.request("GET", "/metrics").body.decode() for client in clients]
    # one of the workers may have no partition, and so no breaker of its own
    assert any(f'marq_queue_breaker_open{{queue="{queue}"}} 1.0' in text for text in metrics)
    told = {"kind": "breaker", "queue": queue}
    for client in clients:  # the cockpit's overview, and its page of the queue
        until(lambda client=client: told in client.request("GET", "/ui/api/overview").body["trouble"], "it is told")
        assert client.request("GET", f"/ui/api/queues/{queue}").body["breaker_open"]


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


def test_messages_in_an_answer_that_was_not_read_whole_come_again_at_once_and_cost_no_attempt(
    clients: list[Client], queue: str
) -> None:
    for _ in range(6):
        clients[0].send(queue, b"x" * 3_000_000)
    until(lambda: clients[0].request("GET", f"/v1/queues/{queue}/stats").body["ready"] == 6, "all are counted")
    body = b'{"max": 6, "wait_ms": 3000, "visibility_timeout_ms": 600000}'
    head = f"POST /v1/queues/{queue}/receive HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = clients[0].url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as receiver:
        receiver.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert receiver.recv(1_000)

    messages = clients[1].drain(queue, 6)
    assert [message["attempt"] for message in messages] == [1] * 6
    clients[1].ack(*messages)


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


# ---------------------------------------------------------------------- views


@pytest.mark.parametrize("at", [0, 1, 2])
def test_any_worker_answers_for_the_whole_cluster(clients: list[Client], at: int) -> None:
    workers = clients[at].request("GET", "/v1/workers").body
    assert [w["ready"] for w in workers["workers"]] == [True] * 3
    assert sorted(n for w in workers["workers"] for n in w["partitions"]) == [0, 1]
    partitions = clients[at].request("GET", "/v1/partitions?scope=cluster").body["partitions"]
    assert [p["partition"] for p in partitions] == [0, 1]
    assert all(p["lag"] is not None and p["phase"] == "serving" for p in partitions)


def test_counts_and_messages_of_a_queue_by_state(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, b"a", b"b", b"c")
    clients[1].send(queue, b"later", delay_ms=60_000)
    (held,) = clients[0].receive(queue, 1, 3000)

    def stats() -> dict[str, Any]:
        return clients[2].request("GET", f"/v1/queues/{queue}/stats").body  # type: ignore[no-any-return]

    until(lambda: (stats()["ready"], stats()["delayed"], stats()["in_flight"]) == (2, 1, 1), f"counted: {stats()}")
    assert stats()["oldest_ms"] >= 0
    listed = clients[1].request("GET", f"/v1/queues/{queue}/messages?state=in_flight").body["messages"]
    assert [(m["partition"], m["offset"]) for m in listed] == [(held["partition"], held["offset"])]
    pages, after = [], ""
    while True:
        page = clients[1].request("GET", f"/v1/queues/{queue}/messages?limit=1&after={after}").body
        pages += page["messages"]
        after = page["after"]
        if not after:
            break
    assert len(pages) == 4
    found = [s for s in clients[0].request("GET", f"/v1/stats?prefix={queue}").body["queues"] if s["queue"] == queue]
    assert found[0]["ready"] + found[0]["in_flight"] == 3
    clients[0].ack(held)


def test_one_message_with_everything(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, b"payload", key=b64encode(b"k").decode())
    (held,) = clients[1].receive(queue, 1, 3000, receiver="me")
    path = f"/v1/messages/{held['partition']}/{held['offset']}"
    for client in clients:
        view = client.request("GET", path).body
        assert (view["queue"], view["state"], view["receives"]) == (queue, "in_flight", 1)
        assert (b64decode(view["payload"]), view["delivery"]["receiver"]) == (b"payload", "me")
    clients[2].ack(held)
    until(lambda: clients[0].request("GET", path).body["state"] == "done", "it is done")
    assert clients[0].request("GET", "/v1/messages/0/999999999").status == 404
    assert clients[0].request("GET", "/v1/messages/77/0").status == 404


def test_the_state_of_a_partition_is_stamped_and_equal_at_any_worker(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, *(b"x" for _ in range(20)))
    until(lambda: clients[0].request("GET", f"/v1/queues/{queue}/stats").body["ready"] == 20, "all are read")
    for number in (0, 1):
        # ticks and checkpoints move the markers position: compare two views of the same positions
        def same(number: int = number) -> bool:
            first, second = (c.request("GET", f"/v1/state/{number}").body for c in clients[1:])
            stamps = [(v["queue_position"], v["markers_position"]) for v in (first, second)]
            return stamps[0] == stamps[1] and first == second

        until(same, "two equal views")


def test_rows_of_the_tables_are_shown_decoded(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, b"x")
    until(lambda: clients[0].request("GET", "/v1/tables/progress/0").body["rows"], "a manifest is there")
    (row,) = clients[1].request("GET", "/v1/tables/progress/0?limit=1").body["rows"]
    assert row["row"]["v"] == 2
    assert clients[2].request("GET", "/v1/tables/messages/0").status == 200
    assert clients[2].request("GET", "/v1/tables/markers/1").status == 200
    assert clients[2].request("GET", "/v1/tables/nope/0").status == 404


def series(*clients: Client) -> defaultdict[str, float]:
    """Numbers by series, summed over the workers."""
    found: defaultdict[str, float] = defaultdict(float)
    for client in clients:
        text = client.request("GET", "/metrics").body.decode()
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name] += float(value)
    return found


def grown(before: defaultdict[str, float], *clients: Client) -> defaultdict[str, float]:
    """By how much those series grew that did."""
    found = series(*clients)
    return defaultdict(float, {name: n - before[name] for name, n in found.items() if n != before[name]})


def test_metrics(clients: list[Client]) -> None:
    clients[0].request("POST", "/v1/ack", {"receipts": ["x"]})
    found = series(clients[0])
    assert found['marq_http_request_seconds_count{action="",method="POST",route="/v1/ack",status="200"}'] >= 1
    assert "marq_received_messages_total" in found
    assert len(found) < 3000


def test_metrics_count_what_became_of_receipts(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, b"a", b"b", b"c", b"d")
    got: list[Any] = []
    while len(got) < 4:
        got += clients[0].receive(queue, 4, 3000)
    before = series(clients[1])
    clients[1].extend(*got[:3], ms=30_000)
    clients[1].ack(got[0], got[1])
    clients[1].release(got[2])
    clients[1].reject(got[3])
    clients[1].reject(got[3])
    clients[1].request("POST", "/v1/ack", {"receipts": ["x", "y"]})
    found = grown(before, clients[1])
    settled = {name.partition("{")[2]: n for name, n in found.items() if "settled_receipts_total" in name}
    assert settled == {
        'action="extend",result="ok"}': 3,
        'action="ack",result="ok"}': 2,
        'action="ack",result="bad-receipt"}': 2,
        'action="release",result="ok"}': 1,
        'action="reject",result="ok"}': 1,
        'action="reject",result="lease-over"}': 1,
    }


def test_metrics_count_a_release_with_back_off_once(clients: list[Client], queue: str) -> None:
    clients[0].request("PUT", f"/v1/queues/{queue}", {"backoff_ms": 1000})
    clients[0].send(queue, b"a")
    (got,) = clients[0].receive(queue, 1, 5000)
    before = series(clients[0])
    clients[0].release(got, {"receipt": "x"})
    found = grown(before, clients[0])
    settled = {name.partition("{")[2]: n for name, n in found.items() if "settled_receipts_total" in name}
    assert settled == {'action="release",result="ok"}': 1, 'action="release",result="bad-receipt"}': 1}


def test_metrics_count_a_message_once_that_came_through_another_worker(clients: list[Client], queue: str) -> None:
    before = series(*clients)
    for client in clients:
        # one of the three owns no partition
        client.send(queue, b"x")
        until(lambda client=client: client.receive(queue, 1, 3000), "it comes")
    found = grown(before, *clients)
    assert found["marq_received_messages_total"] == 3
    assert found["marq_first_delivery_seconds_count"] == 3


def test_metrics_name_the_actions_of_sqs(clients: list[Client], queue: str) -> None:
    def call(target: str, body: Any) -> None:
        headers = {"X-Amz-Target": f"AmazonSQS.{target}", "Authorization": "x"}
        clients[0].request("POST", "/", body, **headers)

    before = series(clients[0])
    call("CreateQueue", {"QueueName": queue})
    call("CreateQueue", {"Nothing": 1})
    call("Whatever", {})
    form = f"Action=GetQueueUrl&QueueName={queue}".encode()
    clients[0].request("POST", "/", form, **{"Content-Type": "application/x-www-form-urlencoded"})
    found = grown(before, clients[0])
    start = 'marq_http_request_seconds_count{action="'
    asked = {name.removeprefix(start): n for name, n in found.items() if name.startswith(start) and 'route="/"' in name}
    assert asked == {
        'CreateQueue",method="POST",route="/",status="200"}': 1,
        'CreateQueue",method="POST",route="/",status="400"}': 1,
        '",method="POST",route="/",status="404"}': 1,
        'GetQueueUrl",method="POST",route="/",status="200"}': 1,
    }


def test_metrics_count_what_handlers_do(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=1) as cluster:
        client = Client(cluster.start().url)
        for i in range(30):
            client.send(f"work-{i % 3}", b"x")
        until(lambda: series(client)['marq_settled_receipts_total{action="ack",result="ok"}'] == 30, "all are done")
        found = series(client)
    assert found["marq_received_messages_total"] == 30
    assert 1 <= found["marq_first_delivery_seconds_count"] <= 30
    labels = '{handler="tests.integration.witness.work",queues="work-*"}'
    assert found[f"marq_handler_call_seconds_count{labels}"] == 30
    assert f"marq_handler_failures_total{labels}" in found
    assert found[f"marq_handler_failures_total{labels}"] == 0


def test_faust_pages_are_off(clients: list[Client]) -> None:
    for path in ("/table", "/table/", "/router", "/router/", "/graph", "/stats/", "/production_index"):
        assert clients[0].request("GET", path).status == 404, path


# ---------------------------------------------------------------------- reject


def test_a_rejected_message_is_a_dead_letter_at_once(clients: list[Client], queue: str) -> None:
    for client in clients:
        client.send(queue, b"bad", headers={"h": b64encode(b"v").decode()})
    got: list[Any] = []
    while len(got) < 3:
        got += clients[0].receive(queue, 3, 3000)
    assert clients[1].reject(*got, reason="no good") == [{"ok": True}] * 3
    dead_letters = clients[2].drain(f"{queue}.dead", 3)
    assert len(dead_letters) == 3
    headers = {name: b64decode(value) for name, value in dead_letters[0]["headers"].items()}
    assert headers["marq-dead-reason"] == b"no good"
    assert headers["marq-dead-receives"] == b"1"
    assert headers["h"] == b"v"
    again = clients[1].reject(got[0])
    assert again[0]["error"]["type"].endswith("lease-over")


def test_the_reason_of_a_rejection_is_cut(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, b"bad")
    (got,) = clients[0].receive(queue, 1, 3000)
    assert clients[1].reject(got, reason="x" + 2_000 * "é") == [{"ok": True}]
    (dead_letter,) = clients[2].drain(f"{queue}.dead", 1)
    assert b64decode(dead_letter["headers"]["marq-dead-reason"]).decode() == "x" + 511 * "é"


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nope", None, 404),
        ("GET", "/v1/queues/unknown-queue", None, 404),
        ("POST", "/v1/queues/q/messages", b"{", 400),
        ("POST", "/v1/queues/q/messages", b"\xff\xfe", 400),
        ("POST", "/v1/queues/q/messages", {"messages": []}, 400),
        ("POST", "/v1/queues/q/messages", {"messages": [{"payload": "***"}]}, 400),
        ("POST", "/v1/queues/q/messages", {"messages": [{"payload": "aGk=", "delay_ms": -1}]}, 400),
        ("POST", "/v1/queues/q/messages", {"messages": [{"payload": "aGk=", "what": 1}]}, 400),
        ("POST", "/v1/queues/%00/messages", {"messages": [{"payload": "aGk="}]}, 400),
        ("POST", "/v1/queues/" + "x" * 256 + "/messages", {"messages": [{"payload": "aGk="}]}, 400),
        ("POST", "/v1/queues/q/receive", {"max": 0}, 400),
        ("POST", "/v1/queues/q/receive", {"max": 1001}, 400),
        ("POST", "/v1/queues/q/receive", {"wait_ms": 1e99}, 400),
        ("POST", "/v1/queues/q/receive", [1], 400),
        ("POST", "/v1/ack", {"receipts": []}, 400),
        ("POST", "/v1/ack", {}, 400),
        ("POST", "/v1/extend", {"receipts": ["x"]}, 400),
        ("PUT", "/v1/queues/q", {"max_receives": -1}, 400),
        ("PUT", "/v1/queues/q", {"nope": 1}, 400),
        ("PUT", "/v1/queues/q", {"dead_letter_queue": "q"}, 400),
        ("PATCH", "/v1/queues/unknown-queue", {"delay_ms": 1}, 404),
        ("DELETE", "/v1/ack", None, 405),
        ("GET", "/v1/queues?limit=0", None, 400),
        ("GET", "/v1/queues?what=0", None, 400),
        ("GET", "/v1/state/x", None, 400),
        ("GET", "/v1/state/-1", None, 400),
        ("GET", "/v1/state/5", None, 404),
    ],
)
def test_bad_input_is_a_problem_that_says_what_is_wrong(
    clients: list[Client], method: str, path: str, body: Any, status: int
) -> None:
    answer = clients[0].request(method, path, body)
    assert answer.status == status, answer
    assert answer.headers["Content-Type"].startswith("application/problem+json")
    assert answer.body["status"] == status
    assert answer.body["detail"]


def test_a_receipt_that_was_never_given_out_is_an_error_of_its_entry(clients: list[Client], queue: str) -> None:
    clients[0].send(queue, b"x")
    (message,) = clients[0].receive(queue, 1, 3000)
    receipt = message["receipt"]
    forged = receipt[:20] + ("A" if receipt[20] != "A" else "B") + receipt[21:]
    results = clients[1].ack(forged, receipt, "", "é" * 52, receipt[:-4])
    assert [("ok" in r) for r in results] == [False, True, False, False, False]
    assert results[0]["error"]["type"].endswith("bad-receipt")


def test_other_content_types_and_pages_of_other_origins_are_refused(clients: list[Client]) -> None:
    body = b'{"messages": [{"payload": ""}]}'
    send = "/v1/queues/q/messages"
    assert clients[0].request("POST", send, body, **{"Content-Type": "text/plain"}).status == 415
    assert clients[0].request("POST", "/v1/queues/q/purge", None, Origin="http://evil.example").status == 403
    assert clients[0].request("GET", "/v1/queues", None, Host="evil.example").status == 403


def test_a_message_that_is_too_large_is_an_error_of_its_entry(cluster: Cluster, queue: str) -> None:
    client = Client(cluster.workers[0].url, msgpack=True)
    small, large = client.send(queue, b"x", b"x" * (4 * 1024 * 1024))
    assert small["offset"] >= 0
    assert large["error"]["type"].endswith("too-large")
    largest = client.send(queue, b"x" * (4 * 1024 * 1024 - 2048))
    assert largest[0]["offset"] >= 0
    big = b"x" * (33 * 1024 * 1024)
    answer = Client(cluster.workers[0].url).request("POST", f"/v1/queues/{queue}/messages", big)
    assert answer.status == 413
