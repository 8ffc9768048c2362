"""`python -m bench overload`: many receives under a short lease, on a machine that is busy with other things.

quiet    nothing else runs
busy     so many busy loops run beside it
demo     the plain demo beside more of them

A message counts as done each time that it was received; done twice is what the rest of the machine must not cause. Busy
loops take their share of the processors, so rates are compared for each second of processor time that the worker, the
client and Kafka got.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.kafka.broker import EmbeddedBroker
from app.kafka.datadir import running_workers
from app.processes import WorkerProcess
from bench.cycle import Bench, result
from bench.operations import _cpu_s
from marq.client import AsyncService
from marq.errors import MarqError

QUEUE = "overload"
#: Messages of one receive, and their lease.
BATCH, LEASE_S = 500, 5.0
#: What is read of /metrics.
METRICS = ("marq_withheld_receives_total", "marq_stalls_total")


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that take all the processor time that they get."""
    loops = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


def run(*, messages: int, receivers: int, loops: int, demo_loops: int, phases: list[str]) -> None:
    """The phases; the rate of `busy` for each processor second beside that of `quiet`."""
    folder = Path(tempfile.mkdtemp(prefix="marq-bench-"))
    rates: dict[str, float] = {}
    try:
        if {"quiet", "busy"} & set(phases):
            with EmbeddedBroker(folder / "kafka", heap_mib=1024) as broker:
                bench = Bench(broker.bootstrap, folder, 100)
                for phase in phases:
                    if phase != "demo":
                        count = loops if phase == "busy" else 0
                        rates[phase] = asyncio.run(_phase(bench, broker, phase, messages, receivers, count))
        if "quiet" in rates and "busy" in rates:
            result(system="marq", phase="overload", of_quiet=round(rates["busy"] / rates["quiet"], 2))
        if "demo" in phases:
            _demo(folder / "demo", demo_loops)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _phase(bench: Bench, broker: EmbeddedBroker, phase: str, messages: int, receivers: int, loops: int) -> float:
    """Messages done in a second of processor time."""
    name = bench.new_name(phase)
    topic = await bench.create(name)
    await bench.send(topic, messages, names=[QUEUE])
    with bench.worker(name, MARQ_HANDLERS="") as worker, busy_loops(loops):
        receiving = Receives(worker.url, messages)
        pids = [worker.process.pid, broker.pid or 0]
        cpu, began = _cpu_of(pids), time.monotonic()
        load = os.getloadavg()[0]
        await receiving.run(receivers)
        seconds, cpu = time.monotonic() - began, _cpu_of(pids) - cpu
        await asyncio.sleep(2 * LEASE_S)  # what is not acknowledged comes again
        result(
            system="marq",
            phase=phase,
            msgs=messages,
            receivers=receivers,
            loops=loops,
            load=f"{load:.1f}-{os.getloadavg()[0]:.1f}",
            secs=round(seconds, 1),
            rate=round(messages / seconds),
            cpu_rate=round(messages / cpu),
            twice=sum(receiving.done.values()) - len(receiving.done),
            refused=receiving.refused,
            slowest_ack_s=round(receiving.slowest_s, 2),
            **await asyncio.to_thread(_metrics, worker),
        )
    return messages / cpu


class Receives:
    """Receivers in this process: each takes some, and acknowledges them."""

    def __init__(self, url: str, messages: int) -> None:
        self.done: Counter[tuple[int, int]] = Counter()
        self.refused = 0
        self.slowest_s = 0.0
        self._url = url
        self._messages = messages

    async def run(self, receivers: int) -> None:
        async with AsyncService(self._url, retry_for=120) as service:
            await asyncio.gather(*(self._receive(service) for _ in range(receivers)))

    async def _receive(self, service: AsyncService) -> None:
        queue = service.queue(QUEUE)
        while len(self.done) < self._messages:
            try:
                taken = await queue.receive_many(BATCH, timeout=1, visibility_timeout=LEASE_S)
            except MarqError:
                self.refused += 1
                continue
            self.done.update((message.partition, message.offset) for message in taken)
            began = time.monotonic()
            if taken:
                await queue.ack_many(taken)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)


def _cpu_of(pids: list[int]) -> float:
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return mine.ru_utime + mine.ru_stime + sum(map(_cpu_s, pids))


def _metrics(worker: WorkerProcess) -> dict[str, int]:
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("marq_").removesuffix("_total"): round(float(found.get(name, 0))) for name in METRICS}


def _demo(data_dir: Path, loops: int) -> None:
    env = os.environ | {"MARQ_DATA_DIR": str(data_dir)}
    with busy_loops(loops):
        command = [sys.executable, "-m", "app", "demo"]
        found = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    assert not running_workers(data_dir)
    totals: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    result(system="marq", phase="demo", loops=loops, load=f"{os.getloadavg()[0]:.1f}", **totals)
