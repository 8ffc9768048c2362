"""`python -m bench client` and `send`: the service, used through `marq.client` in this process, in a worker process.

cycle    receive and acknowledge messages that were sent before (like `bench cycle` inside a worker)
all      send, receive, acknowledge, all at the same time
single   one message sent, received, acknowledged, then the next
json     as cycle, with only an HTTP client and JSON: what a client in any language can do
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientSession

from app.kafka.broker import EmbeddedBroker
from app.processes import WorkerProcess
from bench.cycle import Bench, percentile, result
from marq.client import AsyncService, Service

#: Unmeasured requests at the start, which warm up code and connections.
WARM_UP = 200
#: Connections of the plain HTTP client.
CONNECTIONS = 8
#: Concurrent sends in the asynchronous mode.
CONCURRENT = 256


class Clock:
    """Wall time, and processor time: of the clients, of the worker with all that it started, of all processes.

    Args:
        worker: with a `process`.
        clients: process ids; without them this process is the client.
    """

    def __init__(self, worker: Any, clients: Sequence[int] = ()) -> None:
        self._pid = worker.process.pid
        self._clients = clients
        self._began = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        mine = resource.getrusage(resource.RUSAGE_SELF)
        clients_s = sum(map(_cpu_s, self._clients)) if self._clients else mine.ru_utime + mine.ru_stime
        return time.monotonic(), clients_s, _cpu_s_of_all(self._pid), _busy_s()

    def rates(self, count: int) -> dict[str, float]:
        """Messages a second, and processor time per message in microseconds."""
        wall, clients, theirs, busy = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return {
            "msgs": count,
            "secs": round(wall, 2),
            "rate": round(count / wall),
            "client_us": round(clients / count * 1e6, 1),
            "worker_us": round(theirs / count * 1e6, 1),
            "all_us": round(busy / count * 1e6, 1),
        }


def _busy_s() -> float:
    """Processor seconds of the machine, with those that its host took away; 0 if /proc does not tell."""
    try:
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _cpu_s(pid: int) -> float:
    """Processor seconds of another process; 0 if /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cpu_s_of_all(pid: int) -> float:
    """Processor seconds of another process and those that it started and that still run."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return _cpu_s(pid) + sum(_cpu_s_of_all(int(child)) for child in children)


@contextmanager
def workers(size: int) -> Iterator[Callable[[str], Any]]:
    """A broker. Yields a function that starts a worker, on topics of its own."""
    folder = Path(tempfile.mkdtemp(prefix="marq-bench-"))
    try:
        with EmbeddedBroker(folder / "kafka", heap_mib=1024) as broker:
            bench = Bench(broker.bootstrap, folder, size)
            yield lambda phase: bench.worker(bench.new_name(phase), MARQ_HANDLERS="")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_client(*, batch: int, messages: int, size: int, phases: list[str], runs: int, singles: int) -> None:
    """Run each phase `runs` times; print the medians."""
    with workers(size) as worker_for:
        for phase in phases:
            values = []
            with worker_for(phase) as worker:
                for i in range(runs):
                    with Service(worker.url) as service:
                        queue = service.queue(f"bench-{i}")
                        if phase == "cycle":
                            values.append(_cycle(worker, queue, batch, messages, size))
                        elif phase == "json":
                            values.append(asyncio.run(json_cycle(worker, f"bench-{i}", batch, messages, size)))
                        elif phase == "all":
                            values.append(_all(worker, queue, batch, messages, size))
                        else:
                            values.append(_single(queue, singles, size))
            if runs > 1:
                result(system="marq-client", phase=phase, batch=batch, runs=runs, median=statistics.median(values))


def send_all(queue: Any, batch: int, messages: int, size: int) -> None:
    payloads = [bytes(size)] * batch
    for _ in range(messages // batch):
        queue.send_many(payloads)


def consume_all(queue: Any, batch: int, messages: int) -> int:
    """Receive and acknowledge. Returns the number of batches."""
    taken = batches = 0
    with queue.consume(prefetch=4 * batch, max_in_flight=16 * batch) as consumer:
        while taken < messages:
            part = consumer.take(batch)
            taken += len(part)
            batches += 1
            consumer.ack_many(part)
        consumer.flush()
    return batches


def _cycle(worker: WorkerProcess, queue: Any, batch: int, messages: int, size: int) -> float:
    clock = Clock(worker)
    send_all(queue, batch, messages, size)
    result(system="marq-client", phase="send", batch=batch, **clock.rates(messages))
    clock = Clock(worker)
    batches = consume_all(queue, batch, messages)
    rates = clock.rates(messages)
    result(system="marq-client", phase="cycle", batch=batch, **rates, taken=round(messages / batches))
    return rates["rate"]


def _all(worker: WorkerProcess, queue: Any, batch: int, messages: int, size: int) -> float:
    clock = Clock(worker)
    sender = threading.Thread(target=send_all, args=(queue, batch, messages, size))
    sender.start()
    batches = consume_all(queue, batch, messages)
    sender.join()
    rates = clock.rates(messages)
    result(system="marq-client", phase="all", batch=batch, **rates, taken=round(messages / batches))
    return rates["rate"]


async def json_cycle(worker: Any, queue: str, batch: int, messages: int, size: int) -> float:
    path = f"{worker.url}/v1/queues/{queue}"
    payload = b64encode(bytes(size)).decode()
    send = msgspec.json.encode({"messages": [{"payload": payload}] * batch})
    receive = msgspec.json.encode({"max": batch, "wait_ms": 1000})
    received = msgspec.json.Decoder(_JsonMessages).decode
    taken = 0
    async with ClientSession(headers={"Content-Type": "application/json"}) as session:

        async def post(url: str, body: bytes) -> bytes:
            async with session.post(url, data=body) as response:
                answer = await response.read()
                assert response.status == 200, answer
                return answer

        async def sender(count: int) -> None:
            for _ in range(count):
                await post(f"{path}/messages", send)

        async def receiver() -> None:
            nonlocal taken
            while taken < messages:
                found = received(await post(f"{path}/receive", receive)).messages
                taken += len(found)
                if found:
                    await post(f"{worker.url}/v1/ack", msgspec.json.encode({"receipts": [m.receipt for m in found]}))

        clock = Clock(worker)
        await asyncio.gather(*(sender(messages // batch // CONNECTIONS) for _ in range(CONNECTIONS)))
        messages = messages // batch // CONNECTIONS * CONNECTIONS * batch
        result(system="http-json", phase="send", batch=batch, **clock.rates(messages))
        clock = Clock(worker)
        receivers = [asyncio.ensure_future(receiver()) for _ in range(CONNECTIONS)]
        await asyncio.wait(receivers, return_when=asyncio.FIRST_COMPLETED)
        rates = clock.rates(taken)
        for one in receivers:  # those that still wait for messages
            one.cancel()
        await asyncio.wait(receivers)
        result(system="http-json", phase="cycle", batch=batch, **rates)
    return rates["rate"]


class _JsonMessage(msgspec.Struct):
    receipt: str
    payload: bytes


class _JsonMessages(msgspec.Struct):
    messages: list[_JsonMessage]


def _single(queue: Any, count: int, size: int) -> float:
    steps: list[list[float]] = []
    for _ in range(count + WARM_UP):
        began = time.perf_counter()
        queue.send(bytes(size))
        sent = time.perf_counter()
        message = queue.receive(timeout=5)
        received = time.perf_counter()
        message.ack()
        acked = time.perf_counter()
        steps.append([(b - a) * 1000 for a, b in ((began, acked), (began, sent), (sent, received), (received, acked))])
    whole, send, receive, ack = zip(*steps[WARM_UP:], strict=True)
    p95 = round(percentile(list(whole), 0.95), 2)
    result(
        system="marq-client",
        phase="single",
        msgs=count,
        p50_ms=round(percentile(list(whole), 0.5), 2),
        p95_ms=p95,
        p99_ms=round(percentile(list(whole), 0.99), 2),
        **{
            f"{name}_p95_ms": round(percentile(list(step), 0.95), 2)
            for name, step in (("send", send), ("receive", receive), ("ack", ack))
        },
    )
    return p95


def run_send(*, sizes: list[int], seconds: float, batch: int, runs: int) -> None:
    """Measure sends of each size: one after another, many at the same time, and in batches."""
    with workers(sizes[0]) as worker_for, worker_for("send") as worker:
        for size in sizes:
            for mode in ("sync", "async", "batch"):
                rates = [_send_for(worker, mode, size, seconds, batch) for _ in range(runs)]
                if runs > 1:
                    median = statistics.median(rates)
                    result(system="marq-client", phase="send", mode=mode, size=size, runs=runs, median=median)


def _send_for(worker: WorkerProcess, mode: str, size: int, seconds: float, batch: int) -> float:
    clock = Clock(worker)
    if mode == "async":
        waits = asyncio.run(_send_async(worker.url, size, seconds))
        count = len(waits)
    else:
        waits, count = [], 0
        end = time.monotonic() + seconds
        payload = bytes(size)
        with Service(worker.url) as service:
            queue = service.queue("bench-send")
            while (began := time.perf_counter()) and time.monotonic() < end:
                if mode == "batch":
                    count += len(queue.send_many([payload] * batch))
                else:
                    queue.send(payload)
                    count += 1
                waits.append((time.perf_counter() - began) * 1000)
    rates = clock.rates(count)
    result(
        system="marq-client",
        phase="send",
        mode=mode,
        size=size,
        **rates,
        mb_s=round(rates["rate"] * size / 1e6, 1),
        p50_ms=round(percentile(waits, 0.5), 2),
        p95_ms=round(percentile(waits, 0.95), 2),
    )
    return rates["rate"]


async def _send_async(url: str, size: int, seconds: float) -> list[float]:
    waits: list[float] = []
    payload = bytes(size)
    end = time.monotonic() + seconds
    async with AsyncService(url) as service:
        queue = service.queue("bench-send")

        async def send() -> None:
            while time.monotonic() < end:
                began = time.perf_counter()
                await queue.send(payload)
                waits.append((time.perf_counter() - began) * 1000)

        await asyncio.gather(*(send() for _ in range(CONCURRENT)))
    return waits
