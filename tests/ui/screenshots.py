"""Pictures of the cockpit for the documentation: `python -m tests.ui.screenshots [--seconds 240] [--to docs/images]`.

Two workers on an embedded Kafka, some shops' queues with a load that comes and goes, and a browser.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tests.integration.cluster import Cluster
from tests.integration.json_client import Client
from tests.kafka import kafka_for_tests
from tests.ui.browser import opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

QUEUES = {
    "orders": (40, 1.0), "payments": (25, 1.0), "invoices": (12, 0.97), "emails": (60, 1.0), "shipments.eu": (9, 1.0),
    "shipments.us": (14, 0.9), "thumbnails": (30, 0.85), "search-index": (22, 1.0), "webhooks": (18, 1.0),
    "reports.nightly": (1, 0.2), "fraud-check": (8, 1.0), "loyalty-points": (5, 1.0),
}  # fmt: skip
#: Width and height of the pictures.
DESK, PHONE = (1280, 860), (390, 844)
PICTURE_BYTES = 150 * 1024
PICTURES: tuple[tuple[str, tuple[int, int], Any], ...] = (
    ("overview", DESK, "light"),
    ("overview", DESK, "dark"),
    ("overview", PHONE, "dark"),
    ("queues", DESK, "light"),
    ("queues", PHONE, "light"),
    ("queue", DESK, "dark"),
    ("dead", DESK, "light"),
    ("message", DESK, "light"),
)


class Shop:
    """Sends and receives, until it is closed."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.closing = threading.Event()
        self.threads = [
            threading.Thread(target=self._run, args=(work,), daemon=True) for work in (self._send, self._take)
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        self.closing.set()
        for thread in self.threads:
            thread.join(15)

    def _run(self, work: Any) -> None:
        client, chance, began = Client(self.urls[0]), random.Random(7), time.monotonic()
        while not self.closing.wait(0.05):
            try:
                work(client, chance, time.monotonic() - began)
            except OSError:
                client = Client(self.urls[0])

    def _send(self, client: Client, chance: random.Random, at_s: float) -> None:
        for i, (queue, (pace, _)) in enumerate(QUEUES.items()):
            wave = 1 + 0.5 * math.sin(at_s / 37 + i) + 0.2 * math.sin(at_s / 11 + 2 * i)
            count = sum(chance.random() < pace * wave / 20 for _ in range(3))
            if count:
                messages = [{"json": order(chance)} for _ in range(count)]
                client.request("POST", f"/v1/queues/{quote(queue)}/messages", {"messages": messages})
        time.sleep(0.05)

    def _take(self, client: Client, chance: random.Random, at_s: float) -> None:
        for queue, (pace, part) in QUEUES.items():
            if chance.random() > min(0.9, pace / 20):
                continue
            body = {
                "max": 12,
                "receiver": f"{queue.split('.')[0]}-{chance.randint(1, 3)}",
                "visibility_timeout_ms": 20_000,
            }
            answer = client.request("POST", f"/v1/queues/{quote(queue)}/receive", body)
            receipts = [message["receipt"] for message in answer.body.get("messages", ())]
            done = [receipt for receipt in receipts if chance.random() < part]
            if queue == "invoices" and receipts and chance.random() < 0.2:
                client.request("POST", "/v1/reject", {"receipts": receipts[:1], "reason": "no such customer"})
                done = done[1:]
            if done:
                client.request("POST", "/v1/ack", {"receipts": done})
        time.sleep(0.02)


def order(chance: random.Random) -> dict[str, Any]:
    """Something that a shop would send."""
    number = chance.randint(10_000, 99_999)
    return {
        "order": f"A-{number}",
        "customer": chance.choice(["Ada Lovelace", "Grace Hopper", "Alan Turing", "Edsger Dijkstra"]),
        "items": [
            {"sku": f"BK-{chance.randint(100, 999)}", "count": chance.randint(1, 4), "price": chance.randint(5, 90)}
        ],
        "paid": chance.random() < 0.8,
    }


def prepare(client: Client) -> None:
    """Queues with settings, a FIFO queue, delayed messages, dead letters."""
    for queue in QUEUES:
        client.request("PUT", f"/v1/queues/{quote(queue)}", {"max_receives": 5})
    client.request("PUT", "/v1/queues/ledger", {"fifo": True})
    messages = [{"json": {"entry": i}, "group": f"account-{i % 7}"} for i in range(40)]
    client.request("POST", "/v1/queues/ledger/messages", {"messages": messages})
    later = [{"text": f"reminder {i}", "delay_ms": 3_600_000} for i in range(25)]
    client.request("POST", "/v1/queues/reminders/messages", {"messages": later})
    chance = random.Random(1)
    client.request("POST", "/v1/queues/invoices/messages", {"messages": [{"json": order(chance)} for _ in range(30)]})
    for reason in ("no such customer", "amount is negative", "no such customer", "tax id is missing"):
        answer = client.request("POST", "/v1/queues/invoices/receive", {"max": 4, "receiver": "billing-1"})
        receipts = [message["receipt"] for message in answer.body.get("messages", ())]
        if receipts:
            client.request("POST", "/v1/reject", {"receipts": receipts, "reason": reason})


def taken(client: Client, path: str, **wanted: Any) -> list[str]:
    """The receipt of a message, once a worker that may be busy has one."""
    while True:
        answer = client.request("POST", path, {"wait_ms": 5000, **wanted})
        if answer.status == 200 and answer.body["messages"]:
            return [answer.body["messages"][0]["receipt"]]
        time.sleep(1)


def life(client: Client) -> str:
    """A message that something happened to: its page."""
    messages = [{"json": order(random.Random(3))}]
    sent = client.request("POST", "/v1/queues/fraud-check.audit/messages", {"messages": messages})
    place = sent.body["results"][0]
    path = "/v1/queues/fraud-check.audit/receive"
    taken(client, path, receiver="auditor-1", visibility_timeout_ms=1500)
    time.sleep(2.5)
    receipt = taken(client, path, receiver="auditor-2", visibility_timeout_ms=4000)
    client.request("POST", "/v1/extend", {"receipts": receipt, "visibility_timeout_ms": 9000})
    time.sleep(0.7)
    client.request("POST", "/v1/release", {"receipts": receipt, "delay_ms": 800})
    last = taken(client, path, receiver="auditor-1")
    time.sleep(0.4)
    client.request("POST", "/v1/ack", {"receipts": last})
    return f"/ui/message?partition={place['partition']}&offset={place['offset']}"


def shoot(browser: Browser, url: str, pages: dict[str, str], folder: Path) -> None:
    """The pictures that are wanted."""
    folder.mkdir(parents=True, exist_ok=True)
    for title, size, scheme in PICTURES:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, timezone_id="Europe/Berlin"
        )
        page = context.new_page()
        page.on("console", lambda message: print("console:", message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: print("error:", error))
        page.goto(url + pages[title])
        settle(page)
        save(page, folder / f"cockpit-{title}{'-phone' if size is PHONE else ''}-{scheme}.png")
        context.close()


def settle(page: Page) -> None:
    """Wait until the loaded data is drawn."""
    page.wait_for_selector("main h1")
    page.wait_for_selector(".bone", state="detached")
    page.wait_for_timeout(400)


def save(page: Page, path: Path) -> None:
    """A picture that is small enough for the repository."""
    page.screenshot(path=path)
    assert path.stat().st_size < PICTURE_BYTES, path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240, help="load before the pictures are taken")
    parser.add_argument("--to", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    with (
        kafka_for_tests() as kafka,
        tempfile.TemporaryDirectory() as folder,
        Cluster(kafka, Path(folder), partitions=4, handlers="", name="shop") as cluster,
    ):
        cluster.start_many(2)
        url = cluster.workers[0].url
        client = Client(url)
        prepare(client)
        shop = Shop([worker.url for worker in cluster.workers])
        try:
            message = life(client)
            time.sleep(arguments.seconds)
            pages = {
                "overview": "/",
                "queues": "/ui/queues?sort=unfinished&desc=true",
                "queue": "/ui/queue?name=thumbnails",
                "dead": "/ui/queue?name=invoices.dead&tab=messages",
                "message": message,
            }
            with opened() as browser:
                shoot(browser, url, pages, arguments.to)
        finally:
            shop.close()
    print(json.dumps({path.name: path.stat().st_size for path in sorted(arguments.to.glob("cockpit-*.png"))}, indent=1))


if __name__ == "__main__":
    main()
