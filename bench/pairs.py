"""`python -m bench pairs TREE`: what a message costs a worker of this tree and one of another, in processor time.

Both workers run all the time, on one broker and on topics of their own. Each round has the same requests for both, now
the one first and now the other: what else the machine does meets both alike, so the ratio holds where figures don't.

sqs      send, receive and delete over SQS, in batches of 10
client   send, receive and acknowledge with `marq.client`, in batches of 500
json     the same with JSON and an HTTP client, in batches of 100
cycle    records in the topic, and a handler of batches of 500 that does nothing
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from app.kafka.broker import EmbeddedBroker, free_port
from app.processes import WORKER_START_S, WORKER_STOP_S
from bench import service, sqs
from bench.cycle import Bench, result
from marq.client import Service

HERE = Path(__file__).resolve().parent.parent
#: Messages of a request, and of a round.
BATCH = {"sqs": 10, "client": 500, "json": 100, "cycle": 500}
MESSAGES = {"sqs": 8_000, "client": 50_000, "json": 20_000, "cycle": 200_000}
#: Unmeasured rounds at the start.
WARM_UP = 2
#: Seconds in which both do nothing, to see what they take meanwhile: a slow machine adds that to each message.
IDLE_S = 8.0
#: Worker time is counted until it has been done with a round for that long: what follows requests belongs to them.
AFTER_S = 0.5


class Worker:
    """A worker of a tree of ours, in a process of its own."""

    def __init__(self, tree: Path, bench: Bench, phase: str, python: str = sys.executable) -> None:
        self.name = bench.new_name(phase)
        self.topic = asyncio.run(bench.create(self.name))
        self.url = f"http://localhost:{(port := free_port())}"
        out = bench.folder / self.name
        out.mkdir()
        env = os.environ | {
            "PYTHONPATH": str(tree),
            "MARQ_KAFKA": f"kafka://{bench.bootstrap}",
            "MARQ_NAME": self.name,
            "MARQ_PARTITIONS": "4",
            "MARQ_DATA_DIR": str(out / "data"),
            "MARQ_WEB_PORT": str(port),
            "MARQ_HANDLERS": "bench.noop" if phase == "cycle" else "",
            "MARQ_RETENTION_HISTORY_MS": "86400000",
            "BENCH_OUT": str(out),
        }
        self.process = subprocess.Popen([python, "-m", "app", "worker"], cwd=tree, env=env)

    def wait_ready(self) -> None:
        """Return when it serves."""
        deadline = time.monotonic() + WORKER_START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.url}/health/ready", timeout=1).read()
                return
            time.sleep(0.1)
        raise SystemExit(f"the worker of {self.name} was not ready")

    def cpu_s(self) -> float:
        """Processor seconds until now, of all of its threads."""
        nanoseconds = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):
                nanoseconds += int((task / "schedstat").read_text().split()[0])
        return nanoseconds / 1e9

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(WORKER_STOP_S + 3.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(trees: list[tuple[Path, str]], phase: str) -> Iterator[tuple[Bench, list[Worker]]]:
    """A broker, and a worker of each tree, run by its Python."""
    folder = Path(tempfile.mkdtemp(prefix="marq-bench-"))
    try:
        with EmbeddedBroker(folder / "kafka", heap_mib=1024) as broker, ExitStack() as stack:
            bench = Bench(broker.bootstrap, folder, 100)
            workers = []
            for tree, python in trees:
                workers.append(Worker(tree, bench, phase, python))
                stack.callback(workers[-1].stop)
            for worker in workers:
                worker.wait_ready()
            yield bench, workers
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def do_round(bench: Bench, worker: Worker, phase: str, number: int) -> int:
    """A round of requests. Returns how many messages were sent and finished."""
    batch, messages = BATCH[phase], MESSAGES[phase]
    if phase == "sqs":
        asyncio.run(_sqs(worker, f"round-{number % 4}", batch, messages))
    elif phase == "client":
        with Service(worker.url) as client:
            queue = client.queue(f"round-{number}")
            service.send_all(queue, batch, messages, bench.size)
            service.consume_all(queue, batch, messages)
    elif phase == "json":
        asyncio.run(service.json_cycle(worker, f"round-{number}", batch, messages, bench.size))
    else:
        asyncio.run(bench.send(worker.topic, messages))
        bench.wait_acked(worker, messages * (number + 1))
    return messages


def _idle(workers: list[Worker]) -> list[float]:
    """What each takes of a core while it has nothing to do."""
    time.sleep(2 * AFTER_S)
    began, began_s = [worker.cpu_s() for worker in workers], time.monotonic()
    time.sleep(IDLE_S)
    wall_s = time.monotonic() - began_s
    return [(worker.cpu_s() - cpu_s) / wall_s for worker, cpu_s in zip(workers, began, strict=True)]


async def _sqs(worker: Worker, name: str, batch: int, messages: int) -> None:
    queue = sqs.Queue(worker, batch, 100)
    await queue.make(name)
    batches = messages // batch // sqs.CONNECTIONS
    taken = sqs.Taken(messages)
    await asyncio.gather(*(queue.send(c, batches) for c in queue.connections))
    await asyncio.gather(*(queue.receive(c, taken) for c in queue.connections))
    queue.close()


def run(*, other: Path, phases: list[str], rounds: int, python: str = sys.executable) -> None:
    """Run each phase; print the medians of both workers and their ratio.

    Args:
        python: the interpreter of the worker of this tree.
    """
    for phase in phases:
        with running([(other, sys.executable), (HERE, python)], phase) as (bench, workers):
            costs: list[list[float]] = [[], []]
            net: list[list[float]] = [[], []]
            idle = [0.0, 0.0]
            for number in range(WARM_UP + rounds):
                if number == WARM_UP:
                    idle = _idle(workers)
                for which in (0, 1) if number % 2 else (1, 0):
                    began, began_s = workers[which].cpu_s(), time.monotonic()
                    count = do_round(bench, workers[which], phase, number)
                    time.sleep(AFTER_S)
                    if number >= WARM_UP:
                        cpu_s, wall_s = workers[which].cpu_s() - began, time.monotonic() - began_s
                        costs[which].append(cpu_s / count * 1e6)
                        net[which].append((cpu_s - idle[which] * wall_s) / count * 1e6)
            theirs, ours = (statistics.median(cost) for cost in costs)
            net_theirs, net_ours = (statistics.median(cost) for cost in net)
            pairs = sorted(b / a for a, b in zip(*costs, strict=True))
            result(
                phase=phase,
                pairs=rounds,
                other_us=round(theirs, 2),
                here_us=round(ours, 2),
                ratio=round(ours / theirs, 3),
                pairs_median=round(statistics.median(pairs), 3),
                lowest=round(pairs[0], 3),
                highest=round(pairs[-1], 3),
                other_idle=f"{idle[0]:.1%}",
                here_idle=f"{idle[1]:.1%}",
                other_net_us=round(net_theirs, 2),
                here_net_us=round(net_ours, 2),
                net_ratio=round(net_ours / net_theirs, 3),
                load=round(os.getloadavg()[0], 1),
            )
