"""`python -m bench ui`: what ten open pages of the cockpit cost a worker with many queues and messages."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import ClientSession

from app.faust_worker import COLLECT
from app.kafka.broker import EmbeddedBroker
from app.processes import WorkerProcess
from bench import growth
from bench.cycle import PARTITIONS, Bench, percentile, result
from bench.lag import TOLD_MS, LoopProbe, Pause
from bench.rebalance import READ
from bench.service import _cpu_s
from tests.unit.http_lab import keep_catalog, serving

#: Seconds between two questions of a page, as the page has it.
PAGE_S = 3.0
#: Seconds between two sends that are timed.
SEND_S = 0.05
#: The queue of what is timed.
PROBE = "probe"
#: The worker is at rest once it took at most this part of a core for so many seconds; it is waited for so long.
REST_PART, REST_S, REST_MAX_S = 0.15, 5.0, 120.0
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


def run(*, queues: int, messages: int, size: int, seconds: float, rounds: int) -> None:
    """Measure the worker's processor time, sends and deliveries: without a page, with ten, and so on, in turns."""
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder, EmbeddedBroker(Path(folder) / "kafka") as broker:
        bench = Bench(broker.bootstrap, Path(folder), size)
        name = bench.new_name("ui")
        topic = asyncio.run(bench.create(name))
        asyncio.run(bench.send(topic, messages, names=[f"look-{i}" for i in range(queues)]))
        # with a handler for another queue: without any, messages that nobody receives are not even read
        with bench.worker(name, MARQ_HANDLERS="bench.gaps", BENCH_QUEUES=READ, MARQ_PERSIST_AFTER_MS="1000") as worker:
            print(f"{_wait_read(bench, worker, messages):,} messages were read", flush=True)
            print(f"at rest: {_wait_rest(worker)}", flush=True)
            asyncio.run(bench.send(topic, 1, names=[READ]))  # the handler starts the probe of the loop
            pauses = Path(folder) / name / f"{worker.process.pid}.pauses"
            turns: dict[int, list[Turn]] = {0: [], len(PAGES): []}
            for number in range(2 * rounds):
                # now the one and now the other begins: what grows with time is on both sides
                pages = 0 if number % 4 in (0, 3) else len(PAGES)
                turns[pages].append(asyncio.run(_look(worker, pages, seconds, pauses)))
    for pages, those in turns.items():
        result(phase="ui:all", pages=pages, **_figures(those))
    without, with_pages = (_figures(those)["core_percent"] for those in turns.values())
    result(phase="ui:cost", pages_core_percent=round(with_pages - without, 1))


@dataclass
class Turn:
    """What was measured in a stretch of time."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    load: float = 0.0
    sends: list[float] = field(default_factory=list)  # seconds until a send was confirmed
    deliveries: list[float] = field(default_factory=list)  # seconds from a send to its message's receiver
    answers: list[float] = field(default_factory=list)  # seconds until a page was answered
    held_ms: list[float] = field(default_factory=list)  # each time that the worker's loop held up all others, itself


def _figures(turns: list[Turn]) -> dict[str, float]:
    """Of several stretches together."""
    shown: dict[str, float] = {
        "core_percent": round(100 * sum(t.cpu_s for t in turns) / sum(t.wall_s for t in turns), 1),
        "load": round(sum(t.load for t in turns) / len(turns), 1),
    }
    held_ms = [ms for turn in turns for ms in turn.held_ms]
    shown |= {
        "held_longest_ms": max(held_ms, default=0),
        "held_ms_a_second": round(sum(held_ms) / sum(t.wall_s for t in turns), 1),
    }
    for name in ("sends", "deliveries", "answers"):
        values = [value for turn in turns for value in getattr(turn, name)]
        if values:
            shown[name] = len(values)
            shown |= {f"{name}_p{part}_ms": round(percentile(values, part / 100) * 1000, 1) for part in (50, 95, 99)}
            shown[f"{name}_longest_ms"] = round(max(values) * 1000, 1)
    return shown


def _wait_read(bench: Bench, worker: WorkerProcess, messages: int) -> int:
    """Wait until all messages are read, or nothing more is; how many are."""
    read, since_s = 0, time.monotonic()
    while read < messages and time.monotonic() - since_s < STUCK_S:
        now = sum(p.get("position", 0) for p in bench.state(worker)["partitions"])
        if now > read:
            read, since_s = now, time.monotonic()
        time.sleep(0.5)
    return read


def _wait_rest(worker: WorkerProcess) -> bool:
    """Wait until what was read is in the tables, and the worker has nothing to do."""
    deadline = time.monotonic() + REST_MAX_S
    while time.monotonic() < deadline:
        cpu_s, began_s = _cpu_s(worker.process.pid), time.monotonic()
        time.sleep(REST_S)
        if _cpu_s(worker.process.pid) - cpu_s < REST_PART * (time.monotonic() - began_s):
            return True
    return False


async def _look(worker: WorkerProcess, pages: int, seconds: float, pauses: Path) -> Turn:
    async with ClientSession() as session:
        turn = Turn()
        tasks = [asyncio.ensure_future(_page(session, worker.url, path, turn.answers)) for path in PAGES[:pages]]
        tasks += [asyncio.ensure_future(_send(session, worker.url, turn.sends))]
        tasks += [asyncio.ensure_future(_receive(session, worker.url, turn.deliveries))]
        await asyncio.sleep(PAGE_S * 2)
        for measured in (turn.answers, turn.sends, turn.deliveries):
            measured.clear()
        cpu_s, began_s = _cpu_s(worker.process.pid), time.monotonic()
        await asyncio.sleep(seconds)
        turn.cpu_s, turn.wall_s = _cpu_s(worker.process.pid) - cpu_s, time.monotonic() - began_s
        turn.load = os.getloadavg()[0]
        for line in pauses.read_text().splitlines():
            pause = Pause(*map(int, line.split()))
            if pause.at_ms > began_s * 1000 and pause.ours_ms >= TOLD_MS:
                turn.held_ms.append(pause.ours_ms)
        failed = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in failed:
        task.result()
    result(phase="ui", pages=pages, **_figures([turn]))
    return turn


async def run_in_process(queues: int, messages: int, seconds: float, rounds: int) -> None:
    """The same without Kafka: a worker's HTTP over partitions that were filled in memory, with the client beside it."""
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
            http.app.ownership.owned.update(held)
            members: Any = SimpleNamespace(url=http.url, rebalancing=False, partitions=lambda: {http.url: set(held)})
            http.app.peers._members = members
            gc.collect()  # as a worker does
            gc.freeze()
            gc.set_threshold(*COLLECT)
            turns: dict[int, list[Turn]] = {0: [], len(PAGES): []}
            for number in range(2 * rounds):
                pages = 0 if number % 4 in (0, 3) else len(PAGES)
                turns[pages].append(await _look_in_process(http.url, pages, seconds))
    for pages, those in turns.items():
        result(phase="ui:in-process", queues=queues, messages=messages, pages=pages, **_figures(those))


async def _look_in_process(url: str, pages: int, seconds: float) -> Turn:
    turn = Turn(load=os.getloadavg()[0])

    def note(pause: Pause) -> None:
        if measuring and pause.ours_ms >= TOLD_MS:
            turn.held_ms.append(pause.ours_ms)

    measuring = False
    LoopProbe(note).start_once()
    async with ClientSession() as session:
        lookers = [asyncio.ensure_future(_page(session, url, path, turn.answers)) for path in PAGES[:pages]]
        await asyncio.sleep(PAGE_S * 2)
        turn.answers.clear()
        measuring, cpu_s, began_s = True, time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        measuring = False
        turn.cpu_s, turn.wall_s = time.process_time() - cpu_s, time.monotonic() - began_s
        for task in lookers:
            task.cancel()
        await asyncio.gather(*lookers, return_exceptions=True)
    return turn


async def _page(session: ClientSession, url: str, path: str, answers: list[float]) -> None:
    while True:
        began_s = time.monotonic()
        async with session.get(f"{url}/ui/api/{path}") as response:
            assert response.status == 200, await response.text()
            await response.read()
        answers.append(time.monotonic() - began_s)
        await asyncio.sleep(PAGE_S)


async def _send(session: ClientSession, url: str, sends: list[float]) -> None:
    while True:
        began_s = time.monotonic()
        body = {"messages": [{"text": str(began_s)}]}
        async with session.post(f"{url}/v1/queues/{PROBE}/messages", json=body) as response:
            assert response.status == 200, await response.text()
        sends.append(time.monotonic() - began_s)
        await asyncio.sleep(SEND_S)


async def _receive(session: ClientSession, url: str, deliveries: list[float]) -> None:
    wanted = {"wait_ms": 5000, "max": 10, "as": "text"}
    while True:
        async with session.post(f"{url}/v1/queues/{PROBE}/receive", json=wanted) as response:
            got = (await response.json())["messages"]
        now_s = time.monotonic()
        deliveries += [now_s - float(message["text"]) for message in got]
        if got:
            receipts = [message["receipt"] for message in got]
            async with session.post(f"{url}/v1/ack", json={"receipts": receipts}) as response:
                assert response.status == 200, await response.text()
