"""The JSON API while Kafka is away, and while the worker that a client talks to is killed."""

from __future__ import annotations

import http.client
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.kafka.broker import EmbeddedBroker
from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client
from tests.kafka import unique

pytestmark = pytest.mark.slow

BODY = {"messages": [{"payload": "eA=="}]}


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with tempfile.TemporaryDirectory(prefix="marq-kafka-") as folder, EmbeddedBroker(folder) as broker:
        yield broker


def test_while_kafka_is_away_sends_are_refused_receives_wait_and_all_goes_on(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    queue = unique("q")
    with Cluster(broker.bootstrap, tmp_path, partitions=2, handlers="") as cluster:
        cluster.start()
        url = cluster.workers[0].url
        client = Client(url)
        client.send(queue, b"held")
        (held,) = client.receive(queue, 1, 5000)
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            waited: list[Any] = []
            waiter = threading.Thread(target=lambda: waited.append(Client(url).receive(queue, 1, 30_000)))
            waiter.start()
            answers: list[Any] = []
            path = f"/v1/queues/{queue}/messages"
            senders = [
                threading.Thread(target=lambda: answers.append(Client(url).request("POST", path, BODY)))
                for _ in range(20)
            ]
            for sender in senders:
                sender.start()
            time.sleep(5)
            began = time.monotonic()
            refused = client.request("POST", path, BODY)
            refused_s = time.monotonic() - began
            results = client.ack(held)
            for sender in senders:
                sender.join(30)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        assert (refused.status, int(refused.headers["Retry-After"]) > 0) == (503, True)
        assert refused_s < 1
        assert results[0]["error"]["type"].endswith("unavailable")
        assert Counter(a.status for a in answers) == {503: 20}

        def sent() -> bool:
            return Client(url).request("POST", path, BODY).status == 200  # type: ignore[no-any-return]

        until(sent, "sends are taken again", 60)
        waiter.join(40)
        assert len(waited[0]) == 1
        assert client.ack(held) == [{"ok": True}]


def test_a_killed_worker_loses_nothing_that_its_clients_were_told(kafka: str, tmp_path: Path) -> None:
    """Three workers, a client at each that sends and one that receives; kill -9 of one of them."""
    queue = unique("q")
    with Cluster(kafka, tmp_path, partitions=4, handlers="", session_timeout_ms=6000) as cluster:
        workers = cluster.start_many(3)
        urls = [worker.url for worker in workers]
        confirmed: set[str] = set()
        acked: Counter[str] = Counter()
        stop = threading.Event()
        done = threading.Event()

        def send(number: int) -> None:
            i = 0
            at = number
            while not stop.is_set():
                payload = f"{number}-{i}"
                try:
                    (result,) = Client(urls[at]).send(queue, payload.encode())
                    if "offset" in result:
                        confirmed.add(payload)
                except (OSError, AssertionError, http.client.HTTPException):
                    at = (at + 1) % 3
                i += 1
                time.sleep(0.005)

        def receive(number: int) -> None:
            at = number
            while not done.is_set():
                try:
                    client = Client(urls[at])
                    messages = client.receive(queue, 20, 500, visibility_timeout_ms=5000)
                    for message, result in zip(messages, client.ack(*messages) if messages else [], strict=True):
                        if "ok" in result:
                            acked[message["payload"].decode()] += 1
                except (OSError, AssertionError, http.client.HTTPException):
                    at = (at + 1) % 3

        threads = [threading.Thread(target=target, args=(n,)) for n in range(3) for target in (send, receive)]
        for thread in threads:
            thread.start()
        until(lambda: len(confirmed) > 100, "clients are at work", 60)
        workers[1].kill()
        cluster.wait_served()
        before = len(confirmed)
        until(lambda: len(confirmed) > before + 200, "clients go on", 60)
        stop.set()
        until(lambda: confirmed <= set(acked), "everything that was confirmed is acknowledged", 60)
        done.set()
        for thread in threads:
            thread.join(30)
        twice = sum(count > 1 for count in acked.values())
        print(f"sent={len(confirmed)} lost={len(confirmed - set(acked))} acknowledged twice={twice}")
        assert twice == 0
