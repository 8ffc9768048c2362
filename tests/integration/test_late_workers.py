"""A worker that stood still, or whose acknowledgements are late: its deliveries, its answers, and its duplicates.

Nothing here is measured: a process is stopped until a lease is over, or Kafka until an acknowledgement is old.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.kafka.broker import EmbeddedBroker
from tests.integration.cluster import Cluster, Worker, until
from tests.integration.json_client import Answer, Client

LEASE_MS = 5_000
#: Under which nothing ends while a test lasts.
LONG_MS = 3_600_000


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def metric(worker: Worker, name: str) -> float:
    """A figure of /metrics without labels."""
    client = Client(worker.url)
    lines = client.request("GET", "/metrics").body.decode().splitlines()
    client.close()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def ask(client: Client, queue: str, limit: int, lease_ms: int, wait_ms: int = 0) -> Answer:
    """A receive; errors are ignored."""
    values = {"max": limit, "wait_ms": wait_ms, "visibility_timeout_ms": lease_ms}
    return client.request("POST", f"/v1/queues/{queue}/receive", values)


def asks_to_come_again(answer: Answer) -> bool:
    return answer.status == 503 and int(answer.headers["Retry-After"]) > 0


def left_in(worker: Worker, queue: str) -> int:
    """Messages of a queue that are not finished."""
    stats = worker.get(f"/v1/queues/{queue}/stats")[1]
    return int(stats["ready"] + stats["delayed"] + stats["in_flight"])


def offsets(messages: list[Any]) -> set[int]:
    return {message["offset"] for message in messages}


def test_a_worker_that_stood_still_hands_out_nothing_before_it_has_read_what_receivers_said(
    kafka: str, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    # a long session: the worker stays the owner, so only its stall has effects
    with Cluster(kafka, tmp_path, partitions=1, handlers="", session_timeout_ms=60_000) as cluster:
        worker = cluster.start()
        clients = [Client(worker.url) for _ in range(5)]
        waiting, acks, extensions, asking, client = clients
        client.send("other", *[b"x"] * 10)
        client.send("q", *[b"x"] * 30)
        assert metric(worker, "marq_stalls_total") == 0
        asking.receive("other", 1, 5_000, visibility_timeout_ms=LONG_MS)  # its connection is there
        began_s = time.monotonic()
        taken = client.receive("q", 30, 5_000, visibility_timeout_ms=LEASE_MS)
        assert len(taken) == 30
        acked, extended, left = taken[:10], taken[10:20], taken[20:]

        waiter = pool.submit(ask, waiting, "q", 30, LONG_MS, 60_000)
        until(lambda: metric(worker, "marq_waiting_receives") == 1, "a receive waits")
        worker.signal(signal.SIGSTOP)
        try:
            said: list[Future[Any]] = [
                pool.submit(acks.ack, *acked),
                pool.submit(extensions.extend, *extended, ms=LONG_MS),
            ]
            asked = pool.submit(ask, asking, "other", 10, LONG_MS)
            time.sleep(max(2.0, began_s + LEASE_MS / 1000 + 1 - time.monotonic()))
        finally:
            worker.signal(signal.SIGCONT)

        assert asks_to_come_again(asked.result(60))
        assert [future.result(60) for future in said] == [[{"ok": True}] * 10] * 2
        assert metric(worker, "marq_stalls_total") >= 1
        assert metric(worker, "marq_withheld_receives_total") >= 1

        # unsettled messages come again; acknowledged and extended ones do not
        again = waiter.result(60).body["messages"]
        while offsets(again) < offsets(left):
            more = client.receive("q", 30, 10_000, visibility_timeout_ms=LONG_MS)
            assert more
            again += more
        assert offsets(again) == offsets(left)
        assert {message["attempt"] for message in again} == {2}
        assert client.receive("q", 30, 1_000) == []
        assert client.ack(*extended, *again) == [{"ok": True}] * 20
        until(lambda: left_in(worker, "q") == 0, "all is done")


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with tempfile.TemporaryDirectory(prefix="marq-kafka-") as folder, EmbeddedBroker(folder) as broker:
        yield broker


def test_a_worker_whose_acknowledgements_are_late_hands_out_less_then_nothing(
    broker: EmbeddedBroker, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with Cluster(broker.bootstrap, tmp_path, partitions=1, handlers="", session_timeout_ms=60_000) as cluster:
        worker = cluster.start()
        held, waiting, client = (Client(worker.url) for _ in range(3))
        client.send("q", *[b"x"] * 101)
        (first,) = held.receive("q", 1, 5_000, visibility_timeout_ms=LONG_MS)
        assert metric(worker, "marq_oldest_ack_seconds") == 0
        assert metric(worker, "marq_withheld_receives_total") == 0
        assert broker.pid is not None
        kafka_pid = broker.pid

        def is_late(ack: Future[Any]) -> bool:
            return ack.done() or metric(worker, "marq_oldest_ack_seconds") > 4.0

        def stopped_with_an_ack() -> Future[Any]:
            os.kill(kafka_pid, signal.SIGSTOP)
            ack = pool.submit(held.ack, first)
            until(lambda: is_late(ack), "an ack is late", 60.0)
            return ack

        try:
            unconfirmed = stopped_with_an_ack()
            for _ in range(5):
                if not unconfirmed.done():
                    break
                # refused: it came so late that Kafka already counted as stalled
                assert not unconfirmed.result()[0]["ok"]
                os.kill(broker.pid, signal.SIGCONT)
                until(lambda: metric(worker, "marq_pending_bytes") == 0, "Kafka confirms again")
                unconfirmed = stopped_with_an_ack()
            assert not unconfirmed.done()
            # more than a third of this lease
            assert asks_to_come_again(ask(client, "q", 100, 10_000))
            assert metric(worker, "marq_withheld_receives_total") == 1
            # a tenth of this one soon, and not for long a third
            until(lambda: metric(worker, "marq_oldest_ack_seconds") > 4.5, "it is later")
            less = pool.submit(ask, waiting, "q", 100, 40_000, 60_000)
            until(lambda: metric(worker, "marq_pending_bytes") > 0, "its start waits for Kafka")
            until(lambda: metric(worker, "marq_waiting_receives") == 1, "it waits")
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        found = less.result(60).body["messages"]
        assert 0 < len(found) < 100
        unconfirmed.result(60)
        until(lambda: metric(worker, "marq_oldest_ack_seconds") == 0, "acks are in time again")
        got: list[Any] = []
        until(lambda: got.extend(client.receive("q", 100, 1_000)) or len(got) == 100 - len(found), "the rest")
        assert {message["attempt"] for message in found + got} == {1}
        assert not offsets(found) & offsets(got)
