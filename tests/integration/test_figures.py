"""Figures are true, or say that they are not known: of backlogs that are not read, of workers that stand still."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.integration.cluster import Cluster, Worker, until
from tests.integration.json_client import Client
from tests.kafka import unique
from tests.ui.cockpit import looking

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def cluster(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"handlers": "", "memory_bytes": 1 << 20, "read_ahead_bytes": 64 * 1024}
    with Cluster(kafka, tmp_path_factory.mktemp("figures"), partitions=2, **settings) as running:
        running.start_many(2)
        running.wait_served()
        yield running


@contextmanager
def standing_still(worker: Worker) -> Iterator[None]:
    worker.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.signal(signal.SIGCONT)


def test_counts_are_exact_whatever_memory_allows_and_say_so_when_a_worker_stands_still(
    cluster: Cluster, browser: Browser
) -> None:
    queue, (first, second) = unique("q"), cluster.workers
    client = Client(first.url)
    messages = [{"text": "x" * 4_096} for _ in range(200)]
    for _ in range(4):
        client.request("POST", f"/v1/queues/{queue}/messages", {"messages": messages})

    def stats() -> dict[str, Any]:
        return client.request("GET", f"/v1/queues/{queue}/stats").body  # type: ignore[no-any-return]

    until(lambda: stats()["ready"] == 800, "all messages are counted")
    assert not stats()["at_least"] and stats()["uncounted"] == {}
    partitions = client.request("GET", "/v1/partitions?scope=cluster").body["partitions"]
    assert sum(one["position"] for one in partitions) < 400  # the rest is not read
    assert sum(one["position"] + one["lag"] for one in partitions) == 800
    text = client.request("GET", "/metrics").body.decode()
    lags = [float(line.split()[1]) for line in text.splitlines() if line.startswith("marq_partition_lag{")]
    assert lags == [one["lag"] for one in client.request("GET", "/v1/partitions").body["partitions"]]

    with looking(browser, first.url) as page:
        page.open("/ui/overview").until_figure("Backlog", "800")
        page.sees("2 workers serve 2 partitions")
        with standing_still(second):
            found = until(lambda: (now := stats())["at_least"] and now, "the figures say that they are not complete")
            assert [one.split()[0] for one in found["missing"]] == [second.url] and 0 < found["ready"] < 800
            assert len(found["uncounted"]) == 1
            page.page.locator(".figure", has_text="Backlog").get_by_text("at least").wait_for(timeout=60_000)
            page.page.locator(".figure", has_text="In flight").get_by_text("unknown since").wait_for()
            page.sees("does not answer")
            page.sees("1 of 2 workers answers")
        page.until_figure("Backlog", "800")
    until(lambda: not stats()["at_least"] and stats()["ready"] == 800, "all is known again")

    received = 0

    def drained() -> bool:
        nonlocal received
        batch = client.receive(queue, 500, 500)
        if batch:
            client.ack(*batch)
        received += len(batch)
        return stats()["ready"] == 0 and not stats()["at_least"]

    until(drained, "all is received", 60)
    assert received == 800


@pytest.mark.slow
def test_a_page_whose_worker_stands_still_says_how_old_it_is_and_turns_to_another(
    cluster: Cluster, browser: Browser
) -> None:
    queue, (first, second) = unique("q"), cluster.workers
    Client(first.url).request("POST", f"/v1/queues/{queue}/messages", {"messages": [{"text": "x"}] * 5})
    with looking(browser, second.url) as page:
        page.queue(queue).until_figure("Ready", "5")
        with standing_still(second):
            page.sees("all figures are")
            page.page.wait_for_url(f"{first.url}/ui/queue?name={queue}", timeout=60_000)
            page.sees("Live")
        page.asked.remove(urlsplit(first.url).netloc)
