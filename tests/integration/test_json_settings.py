"""The settings of a worker with keys and declared queues, which creates no other queues."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client
from tests.kafka import unique

ALL, ORDERS, SENDER = "key-for-everything-0001", "key-for-the-orders-0002", "key-for-senders-only-0003"

CONFIG = """
auto_create = false

[queues.orders]
visibility_timeout_ms = 60000

[queues.limited]
max_in_flight = 2

[queues.slow]
backoff_ms = 1000

[queues.fragile]
breaker_failures = 2
breaker_pause_ms = 1500
"""


@pytest.fixture(scope="module")
def cluster(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("locked")
    config = folder / "marq.toml"
    config.write_text(CONFIG)
    keys = f"{ALL},{ORDERS}=send+receive:orders,{SENDER}=send:*"
    with Cluster(kafka, folder, partitions=1, handlers="", config=config, keys=keys) as cluster:
        cluster.start(ready=False)
        worker = cluster.workers[0]
        until(worker.ready, "the worker is ready", 60)
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Client:
    return Client(cluster.workers[0].url, ALL)


def with_key(cluster: Cluster, key: str | None) -> Client:
    return Client(cluster.workers[0].url, key)


# ---------------------------------------------------------------------- keys


def test_every_route_needs_a_key(cluster: Cluster) -> None:
    document = with_key(cluster, ALL).request("GET", "/v1/openapi.json").body
    stranger, guesser = with_key(cluster, None), with_key(cluster, "key-that-nobody-gave-out")
    paths = [(method, path) for path, methods in document["paths"].items() for method in methods]
    for method, path in [*paths, ("get", "/metrics"), ("get", "/v1/openapi.json"), ("get", "/nope")]:
        path = path.format(queue="orders", partition=0, offset=0, table="progress")
        for client in (stranger, guesser):
            answer = client.request(method.upper(), path)
            assert answer.status == 401, (method, path, answer)
            assert answer.body["type"].endswith("no-key")


def test_workers_alone_may_call_what_is_for_workers(cluster: Cluster) -> None:
    client = with_key(cluster, ALL)
    for name in ("receive", "watch", "worker", "nope"):
        assert client.request("POST", f"/v1/peer/{name}", {}).status == 401


def test_health_is_open_and_says_nothing_more(cluster: Cluster) -> None:
    assert with_key(cluster, None).request("GET", "/health/ready").body == {"ready": True, "serving": [0]}


def test_a_key_reaches_only_its_queues(cluster: Cluster) -> None:
    orders, sender = with_key(cluster, ORDERS), with_key(cluster, SENDER)
    sender.send("orders", b"x")
    (message,) = orders.receive("orders", 1, 3000)
    assert orders.ack(message) == [{"ok": True}]
    for client, method, path, body in (
        (sender, "POST", "/v1/queues/orders/receive", {}),
        (sender, "POST", "/v1/ack", {"receipts": [message["receipt"]]}),
        (orders, "POST", "/v1/queues/limited/messages", {"messages": [{"payload": ""}]}),
        (orders, "DELETE", "/v1/queues/orders", None),
        (orders, "GET", "/v1/state/0", None),
        (orders, "GET", "/metrics", None),
    ):
        assert client.request(method, path, body).status == 403, path
    assert [q["name"] for q in orders.request("GET", "/v1/queues").body["queues"]] == ["orders"]


def test_keys_are_in_no_log(cluster: Cluster) -> None:
    log = cluster.workers[0].log
    assert not any(key in log for key in (ALL, ORDERS, SENDER))


# ---------------------------------------------------------------------- queues of the file, and no others


def test_queues_of_the_file_are_there(client: Client) -> None:
    answer = client.request("GET", "/v1/queues/orders")
    assert answer.body["settings"]["visibility_timeout_ms"] == 60_000


def test_an_unknown_queue_is_refused(client: Client) -> None:
    queue = unique("nope")
    answer = client.request("POST", f"/v1/queues/{queue}/messages", {"messages": [{"payload": ""}]})
    assert (answer.status, answer.body["type"]) == (404, "urn:marq:problem:unknown-queue")
    assert client.request("POST", f"/v1/queues/{queue}/receive", {}).status == 404


def test_a_raw_write_to_an_unknown_queue_is_poison(cluster: Cluster, client: Client) -> None:
    (sent,) = cluster.send(unique("raw"), 1)

    def done() -> bool:
        view = client.request("GET", f"/v1/messages/{sent.partition}/{sent.offset}")
        return view.status == 200 and view.body["state"] == "done"

    until(done, "it was set aside")
    counters = client.request("GET", "/v1/partitions").body["partitions"][0]["counters"]
    assert counters["poison"] >= 1


def test_a_queue_made_right_before_a_raw_write_is_no_poison(cluster: Cluster, client: Client) -> None:
    for _ in range(5):
        queue = unique("fresh")
        assert client.request("PUT", f"/v1/queues/{queue}", {}).status == 201
        cluster.send(queue, 1)
        (message,) = client.receive(queue, 1, 5000)
        client.ack(message)


# ---------------------------------------------------------------------- limits of queues


def test_no_more_than_the_limit_is_in_flight(client: Client) -> None:
    client.send("limited", *(b"%d" % i for i in range(5)))
    first = client.receive("limited", 5, 3000)
    assert len(first) == 2
    assert client.receive("limited", 5) == []
    client.ack(first[0])
    assert len(client.receive("limited", 5, 3000)) == 1


def test_a_release_without_a_delay_takes_the_back_off_of_the_queue(client: Client) -> None:
    client.send("slow", b"x")
    (message,) = client.receive("slow", 1, 3000)
    began = time.monotonic()
    client.release(message)
    (again,) = client.receive("slow", 1, 10_000)
    assert 0.4 < time.monotonic() - began < 5
    client.release(again, delay_ms=0)
    (third,) = client.receive("slow", 1, 1000)
    client.ack(third)


def test_the_circuit_breaker_of_a_queue(client: Client) -> None:
    client.send("fragile", *(b"%d" % i for i in range(6)))
    failed: list[Any] = client.receive("fragile", 2, 3000)
    client.release(*failed, delay_ms=60_000)
    assert client.receive("fragile", 5, 300) == []
    probe = client.receive("fragile", 5, 5000)
    assert len(probe) == 1
    assert client.receive("fragile", 5, 300) == []
    client.ack(*probe)
    assert len(client.receive("fragile", 5, 3000)) == 3


# ---------------------------------------------------------------------- what can't be


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"web_host": "0.0.0.0"}, "MARQ_KEYS"),
        ({"keys": "short"}, "shorter than"),
        ({"web_tls_certificate_file": __file__}, "can't be used"),
    ],
)
def test_unsafe_settings_stop_the_worker_with_a_line(
    kafka: str, tmp_path: Any, settings: dict[str, str], part: str
) -> None:
    import subprocess
    import sys

    env = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_")}
    env |= {"MARQ_KAFKA": f"kafka://{kafka}", "MARQ_NAME": unique("bad"), "MARQ_DATA_DIR": str(tmp_path)}
    env |= {f"MARQ_{name.upper()}": value for name, value in settings.items()}
    done = subprocess.run([sys.executable, "-m", "app", "worker"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    line = next(line for line in done.stderr.splitlines() if line.startswith("marq:"))
    assert part in line
    assert "Traceback" not in done.stderr
