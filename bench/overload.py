"""`python -m bench overload`: many receives under a short lease, on a machine that is busy with other things.

quiet    nothing else runs
busy     busy loops run beside it
demo     the plain demo, beside more busy loops

A message counts as done each time it is received. The load of the machine must not cause any to be done twice. Each
such case is explained from the log, and from when its receiver got and acknowledged it. Busy loops take their share of
the processors, so rates are compared per second of processor time that the worker, the client and Kafka got.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from app.kafka.broker import EmbeddedBroker
from app.kafka.datadir import running_workers
from app.processes import WorkerProcess
from bench.cycle import PARTITIONS, Bench, result
from bench.service import _cpu_s
from marq.client import AsyncService
from marq.client.asynchronous import AsyncMessage
from marq.errors import MarqError
from tests.integration.duplicates import Done, explain

QUEUE = "overload"
#: Messages of one receive, and seconds of their lease.
BATCH, LEASE_S = 500, 5.0
#: Counters that are read from /metrics.
METRICS = ("marq_withheld_receives_total", "marq_stalls_total")


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that use all the processor time that they get."""
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
    """Run the phases, and print the rate of `busy` per processor second relative to `quiet`."""
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
    """Run a phase. Returns messages per second of processor time."""
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
        await asyncio.sleep(2 * LEASE_S)
        await receiving.rest()
        batches = receiving.batches
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
            of_cpu=round(cpu / seconds / (os.cpu_count() or 1), 2),
            twice=sum(receiving.done.values()) - len(receiving.done),
            batch=round(sum(len(batch.places) for batch in batches) / len(batches)),
            refused=receiving.refused,
            slowest_ack_s=round(max(batch.acked_s - batch.got_s for batch in batches), 2),
            slowest_s=round(max(batch.acked_s - batch.asked_s for batch in batches), 2),
            **await asyncio.to_thread(_metrics, worker),
        )
    await _explain(bench.bootstrap, name, receiving)
    return messages / cpu


@dataclass
class Batch:
    """The messages of one receive. Times are monotonic seconds of this process."""

    asked_s: float
    got_s: float
    places: list[tuple[int, int, int]]  # partition, offset, attempt
    acked_s: float = 0.0
    refused: set[tuple[int, int]] = field(default_factory=set)  # messages whose acknowledgement failed


class Receives:
    """Receivers in this process, which receive messages and acknowledge them."""

    def __init__(self, url: str, messages: int) -> None:
        self.done: Counter[tuple[int, int]] = Counter()
        self.batches: list[Batch] = []
        self.refused = 0
        self._url = url
        self._messages = messages

    async def run(self, receivers: int) -> None:
        """Receive until each message was received."""
        async with AsyncService(self._url, retry_for=120) as service:
            await asyncio.gather(*(self._receive(service) for _ in range(receivers)))

    async def rest(self) -> None:
        """Receive what comes again, because it was not acknowledged, or too late."""
        async with AsyncService(self._url, retry_for=120) as service:
            while await self._take(service):
                pass

    async def _receive(self, service: AsyncService) -> None:
        while len(self.done) < self._messages:
            await self._take(service)

    async def _take(self, service: AsyncService) -> bool:
        queue, asked_s = service.queue(QUEUE), time.monotonic()
        try:
            taken = await queue.receive_many(BATCH, timeout=1, visibility_timeout=LEASE_S)
        except MarqError:
            self.refused += 1
            return True
        if not taken:
            return False
        batch = Batch(asked_s, time.monotonic(), [(m.partition, m.offset, m.attempt) for m in taken])
        self.batches.append(batch)
        self.done.update((m.partition, m.offset) for m in taken)
        batch.refused = await _ack(queue, taken)
        batch.acked_s = time.monotonic()
        return True


async def _ack(queue: Any, taken: list[AsyncMessage]) -> set[tuple[int, int]]:
    """Acknowledge messages. Returns those that could not be."""
    try:
        errors = await queue.ack_many(taken)
    except MarqError as error:
        errors = [error] * len(taken)
    return {(m.partition, m.offset) for m, error in zip(taken, errors, strict=True) if error is not None}


async def _explain(bootstrap: str, name: str, receiving: Receives) -> None:
    """Print why messages were done twice: a line per cause, and one per message without an explanation."""
    twice = {place for place, count in receiving.done.items() if count > 1}
    if not twice:
        return
    topic = f"{name}.markers"
    markers = {number: await records_of(bootstrap, TopicPartition(topic, number)) for number in range(PARTITIONS)}
    done, refused = [], set()
    for batch in receiving.batches:
        refused |= batch.refused
        again = [place for place in batch.places if place[:2] in twice]
        done += [Done(*place) for place in again]
        if again:
            print(
                f"  {len(again)} of {len(batch.places)} twice, attempt {again[0][2]}, asked at {batch.asked_s:.2f}, "
                f"got after {batch.got_s - batch.asked_s:.2f} s, confirmed after {batch.acked_s - batch.got_s:.2f} s, "
                f"{len(batch.refused)} not"
            )
    explained = explain(done, markers, refused=refused)
    for cause, count in explained.causes.items():
        print(f"  {count} {cause}")
    for line in explained.unexplained:
        print(f"  NOT EXPLAINED: {line}")


async def records_of(bootstrap: str, tp: TopicPartition) -> list[Any]:
    """All records of a partition."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)
    await consumer.start()
    try:
        consumer.assign([tp])
        await consumer.seek_to_beginning(tp)
        end = (await consumer.end_offsets([tp]))[tp]
        records: list[Any] = []
        while await consumer.position(tp) < end:
            records += (await consumer.getmany(tp, timeout_ms=200)).get(tp, [])
    finally:
        await consumer.stop()
    return records


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
