"""`python -m bench workers`: the same work done by one worker process, and by several at one address.

handlers  messages in all partitions, for handlers that take batches of 500
sqs       full cycles of Amazon SQS in batches of 10, by clients that are processes of their own (as in `bench sqs`)

The processor time is of all worker processes together, so it tells what a process more costs also where the machine
has no processor for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from app.kafka.broker import EmbeddedBroker
from bench.cycle import PARTITIONS, Bench, result
from bench.service import Clock
from bench.sqs import Clients, cycle, warm_up

#: Seconds until all workers have to be ready, with a part of the partitions each.
READY_S = 120.0
#: Messages before the measured ones.
WARM_UP_MESSAGES = 40_000
CLIENTS = 4
SQS_BATCH = 10
HANDLER_BATCH = 500


class Several:
    """Worker processes of one supervisor, with one address."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as response:
            return json.load(response)

    def acked(self) -> int:
        partitions = self.ask("/v1/partitions?scope=cluster")["partitions"]
        return sum(p["counters"].get("acked", 0) for p in partitions)

    def wait_acked(self, total: int) -> None:
        while (found := self.acked()) < total:
            time.sleep(0.05 if found else 0.2)


def run(*, counts: list[int], messages: int, sqs_messages: int, size: int, runs: int, phases: list[str]) -> None:
    """Measure all numbers of workers in turns, `runs` times; print the medians, and their ratio to the first number."""
    rates: dict[tuple[str, int], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="marq-bench-")))
        broker = stack.enter_context(EmbeddedBroker(folder / "kafka", heap_mib=1024))
        bench = Bench(broker.bootstrap, folder, size)
        clients = stack.enter_context(Clients(CLIENTS, SQS_BATCH, size))
        for phase in phases:
            measured = {"handlers": _handlers, "sqs": _sqs}[phase]
            for _ in range(runs):
                for count in counts:
                    amount = messages if phase == "handlers" else sqs_messages
                    rates.setdefault((phase, count), []).append(measured(bench, clients, count, amount, size))
    for (phase, count), found in rates.items():
        ratios = [one["rate"] / first["rate"] for one, first in zip(found, rates[phase, counts[0]], strict=True)]
        result(
            phase=phase,
            workers=count,
            runs=runs,
            median_rate=round(statistics.median(one["rate"] for one in found)),
            median_worker_us=round(statistics.median(one["worker_us"] for one in found), 1),
            **{f"to_{counts[0]}": round(statistics.median(ratios), 2)},
            lowest=round(min(ratios), 2),
            highest=round(max(ratios), 2),
        )


def _handlers(bench: Bench, clients: Clients, count: int, messages: int, size: int) -> dict[str, float]:
    name = bench.new_name("workers")
    topic = asyncio.run(bench.create(name))
    with _several(bench, name, count, MARQ_HANDLERS="bench.noop", BENCH_BATCH=str(HANDLER_BATCH)) as workers:
        asyncio.run(bench.send(topic, WARM_UP_MESSAGES))
        workers.wait_acked(WARM_UP_MESSAGES)
        clock = Clock(workers)
        asyncio.run(bench.send(topic, messages))
        workers.wait_acked(WARM_UP_MESSAGES + messages)
        rates = clock.rates(messages)
    result(phase="handlers", workers=count, batch=HANDLER_BATCH, **rates)
    return rates


def _sqs(bench: Bench, clients: Clients, count: int, messages: int, size: int) -> dict[str, float]:
    name = bench.new_name("workers")
    asyncio.run(bench.create(name))
    with _several(bench, name, count, MARQ_HANDLERS="") as workers:
        warm_up(workers, SQS_BATCH, WARM_UP_MESSAGES // 4, size)
        return cycle(f"{count} workers", workers, clients, "cycle", SQS_BATCH, messages, size)


@contextmanager
def _several(bench: Bench, name: str, count: int, **environment: str) -> Iterator[Several]:
    """So many workers, each with a part of the partitions."""
    out = bench.folder / name
    out.mkdir()
    env = os.environ | {
        "MARQ_KAFKA": f"kafka://{bench.bootstrap}",
        "MARQ_NAME": name,
        "MARQ_PARTITIONS": str(PARTITIONS),
        "MARQ_DATA_DIR": str(out / "data"),
        "MARQ_WEB_PORT": "0",
        "BENCH_OUT": str(out),
    }
    command = [sys.executable, "-m", "app", "up", "--workers", str(count)]
    with (out / "log").open("w+b") as log:
        process = subprocess.Popen(command, env=env | environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + READY_S
            while (ready := re.search(r"marq is ready: (http\S+?),? ", (out / "log").read_text())) is None:
                _check(process, out, deadline)
            workers = Several(process, ready[1])
            while sum(bool(w["partitions"]) and w["ready"] for w in workers.ask("/v1/workers")["workers"]) < count:
                _check(process, out, deadline)
            yield workers
        finally:
            process.terminate()
            process.wait()


def _check(process: subprocess.Popen[bytes], out: Path, deadline: float) -> None:
    if process.poll() is not None or time.monotonic() > deadline:
        raise SystemExit(f"the workers are not ready:\n{(out / 'log').read_text()[-2000:]}")
    time.sleep(0.1)
