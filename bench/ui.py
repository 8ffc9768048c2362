"""`python -m bench ui`: what ten open pages of the cockpit cost a worker with many queues and messages."""

from __future__ import annotations

import asyncio
import tempfile
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from aiohttp import ClientSession

from app.kafka.broker import EmbeddedBroker
from app.processes import WorkerProcess
from bench import growth
from bench.cycle import PARTITIONS, Bench, percentile, result
from bench.rebalance import READ
from bench.service import _cpu_s
from tests.unit.http_lab import keep_catalog, serving

#: Seconds between two questions of a page, as the page has it.
PAGE_S = 3.0
#: Seconds between two sends that are timed.
SEND_S = 0.05
#: Seconds after which the worker is at rest.
REST_S = 10.0
#: Seconds without progress after which no more is read.
STUCK_S = 15.0
#: What ten people look at.
PAGES = (
    "overview",
    "overview",
    "overview",
    "queues",
    "queues?sort=unfinished&desc=true",
    "queues?sort=sent&desc=true&page=3",
    "queues?search=look-77",
    "queues?sort=oldest&desc=true",
    "queues/look-0",
    "queues/look-9999",
)


def run(*, queues: int, messages: int, size: int, seconds: float) -> None:
    """Measure the processor time of the worker and the time of a send, without pages, with one, and with ten."""
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder, EmbeddedBroker(Path(folder) / "kafka") as broker:
        bench = Bench(broker.bootstrap, Path(folder), size)
        name = bench.new_name("ui")
        topic = asyncio.run(bench.create(name))
        asyncio.run(bench.send(topic, messages, names=[f"look-{i}" for i in range(queues)]))
        # with a handler for another queue: without any, messages that nobody receives are not even read
        with bench.worker(name, MARQ_HANDLERS="bench.gaps", BENCH_QUEUES=READ, MARQ_PERSIST_AFTER_MS="1000") as worker:
            print(f"{_wait_read(bench, worker, messages):,} messages were read", flush=True)
            time.sleep(REST_S)
            for pages in (0, 1, len(PAGES)):
                asyncio.run(_look(worker, pages, seconds))


def _wait_read(bench: Bench, worker: WorkerProcess, messages: int) -> int:
    """Wait until all messages are read, or nothing more is; how many are."""
    read, since_s = 0, time.monotonic()
    while read < messages and time.monotonic() - since_s < STUCK_S:
        now = sum(p.get("position", 0) for p in bench.state(worker)["partitions"])
        if now > read:
            read, since_s = now, time.monotonic()
        time.sleep(0.5)
    return read


async def _look(worker: WorkerProcess, pages: int, seconds: float) -> None:
    async with ClientSession() as session:
        answers: list[float] = []
        lookers = [asyncio.ensure_future(_page(session, worker.url, path, answers)) for path in PAGES[:pages]]
        sends: list[float] = []
        sender = asyncio.ensure_future(_send(session, worker.url, sends))
        await asyncio.sleep(PAGE_S * 2)
        answers.clear()
        sends.clear()
        cpu_s, began_s = _cpu_s(worker.process.pid), time.monotonic()
        await asyncio.sleep(seconds)
        cpu_s, wall_s = _cpu_s(worker.process.pid) - cpu_s, time.monotonic() - began_s
        for task in (*lookers, sender):
            task.cancel()
        await asyncio.gather(*lookers, sender, return_exceptions=True)
    result(
        phase=f"ui:{pages}-pages",
        core_percent=round(100 * cpu_s / wall_s, 1),
        send_p50_ms=round(percentile(sends, 0.5) * 1000, 1),
        send_p95_ms=round(percentile(sends, 0.95) * 1000, 1),
        send_longest_ms=round(max(sends) * 1000, 1),
        answers=len(answers),
        answer_p50_ms=round(percentile(answers, 0.5) * 1000, 1),
        answer_longest_ms=round(max(answers, default=0) * 1000, 1),
    )


async def run_in_process(queues: int, messages: int, seconds: float) -> None:
    """The same without Kafka: a worker's HTTP over partitions that were filled in memory, and ten pages."""
    keys = [f"look-{i}".encode() for i in range(queues)]
    with growth.store() as kept, tempfile.TemporaryDirectory(prefix="marq-bench-") as folder:
        filled = [growth.fill(kept, messages // PARTITIONS, keys, bytes(100))[0] for _ in range(PARTITIONS)]
        async with serving(Path(folder)) as http:
            keep_catalog(http)
            http.app.catalog.auto.update(key.decode() for key in keys)
            held: Any = {
                number: SimpleNamespace(number=number, serving=True, owner=SimpleNamespace(partition=partition))
                for number, partition in enumerate(filled)
            }
            http.app.ownership.held.update(held)
            members: Any = SimpleNamespace(url=http.url, rebalancing=False, partitions=lambda: {http.url: set(held)})
            http.app.peers._members = members
            async with ClientSession() as session:
                answers: list[float] = []
                lookers = [asyncio.ensure_future(_page(session, http.url, path, answers)) for path in PAGES]
                await asyncio.sleep(PAGE_S * 2)
                answers.clear()
                cpu_s, began_s = time.process_time(), time.monotonic()
                await asyncio.sleep(seconds)
                cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - began_s
                for task in lookers:
                    task.cancel()
                await asyncio.gather(*lookers, return_exceptions=True)
    result(
        phase="ui:in-process",
        queues=queues,
        messages=messages,
        core_percent_with_client=round(100 * cpu_s / wall_s, 1),
        answers=len(answers),
        answer_p50_ms=round(percentile(answers, 0.5) * 1000, 1),
        answer_longest_ms=round(max(answers) * 1000, 1),
    )


async def _page(session: ClientSession, url: str, path: str, answers: list[float]) -> None:
    while True:
        began_s = time.monotonic()
        async with session.get(f"{url}/ui/api/{path}") as response:
            assert response.status == 200, await response.text()
            await response.read()
        answers.append(time.monotonic() - began_s)
        await asyncio.sleep(PAGE_S)


async def _send(session: ClientSession, url: str, sends: list[float]) -> None:
    for number in count():
        began_s = time.monotonic()
        path = f"/v1/queues/{quote(f'look-{number % 100}')}/messages"
        async with session.post(url + path, json={"messages": [{"text": "x"}]}) as response:
            assert response.status == 200, await response.text()
        sends.append(time.monotonic() - began_s)
        await asyncio.sleep(SEND_S)
