"""Figures are true, or say that they are not known: of backlogs that are not read, of workers that stand still."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client
from tests.kafka import unique
from tests.ui.cockpit import looking

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_counts_are_exact_whatever_memory_allows_and_say_so_when_a_worker_stands_still(
    kafka: str, browser: Browser, tmp_path: Path
) -> None:
    queue = unique("q")
    settings = {"handlers": "", "memory_bytes": 1 << 20, "read_ahead_bytes": 64 * 1024}
    with Cluster(kafka, tmp_path, partitions=2, **settings) as cluster:
        workers = cluster.start_many(2)
        cluster.wait_served()
        client = Client(workers[0].url)
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

        with looking(browser, workers[0].url) as page, looking(browser, workers[1].url) as other:
            page.open("/ui/overview").until_figure("Backlog", "800")
            other.queue(queue).until_figure("Ready", "800")
            workers[1].signal(signal.SIGSTOP)
            try:
                page.page.locator(".figure", has_text="Backlog").get_by_text("at least").wait_for(timeout=60_000)
                page.sees("does not answer")
                other.sees("all figures are")  # this worker says nothing: how old they are is seen
                other.page.wait_for_url(f"{workers[0].url}/ui/queue?name={queue}", timeout=60_000)
                other.sees("Live")
            finally:
                workers[1].signal(signal.SIGCONT)
            page.until_figure("Backlog", "800")
            other.asked.remove(urlsplit(workers[0].url).netloc)

        workers[1].signal(signal.SIGSTOP)
        try:
            found = until(lambda: (now := stats())["at_least"] and now, "the figures say that they are not complete")
            assert [one.split()[0] for one in found["missing"]] == [workers[1].url] and 0 < found["ready"] < 800
            assert len(found["uncounted"]) == 1
        finally:
            workers[1].signal(signal.SIGCONT)
        until(lambda: not stats()["at_least"] and stats()["ready"] == 800, "all is known again")

        received = 0

        def drained() -> bool:
            nonlocal received
            batch = client.receive(queue, 500, 3_000)
            if batch:
                client.ack(*batch)
            received += len(batch)
            return stats()["ready"] == 0 and not stats()["at_least"]

        until(drained, "all is received", 60)
        assert received == 800
