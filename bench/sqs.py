"""`python -m bench sqs`: Amazon SQS's JSON protocol, plain HTTP clients against one worker process, and beside a peer.

cycle    send, then receive and delete, in batches of 10 over 8 connections: the rate of all three together
all      the same, all at the same time
single   one message sent, received, deleted, then the next

The clients of `cycle` are processes of their own (`--clients`), so that no system waits for its client.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bench.cycle import Serving, percentile, result
from bench.peers.elasticmq import ElasticMq
from bench.service import Clock, workers

CONNECTIONS = 8
#: Unmeasured round trips, and unmeasured messages in batches, at the start: meanwhile the broker's JVM compiles.
WARM_UP = 100
WARM_UP_MESSAGES = 40_000

_encode = msgspec.json.encode


class _Message(msgspec.Struct):
    ReceiptHandle: str


class _Received(msgspec.Struct):
    Messages: list[_Message] = []


_received = msgspec.json.Decoder(_Received).decode


class Connection:
    """A connection that stays open, with as little work as an HTTP client can do."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, action: str, parameters: dict[str, Any]) -> bytes:
        """The answer to an action. Fails unless the status is 200."""
        if self._streams is None:
            host, _, port = self._host.partition(":")
            self._streams = await asyncio.open_connection(host, int(port))
        reader, writer = self._streams
        body = _encode(parameters)
        writer.write(
            f"POST / HTTP/1.1\r\nHost: {self._host}\r\nX-Amz-Target: AmazonSQS.{action}\r\n"
            "Authorization: AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/sqs/aws4_request, SignedHeaders=host, "
            "Signature=00\r\nX-Amz-Date: 20260101T000000Z\r\n"
            f"Content-Type: application/x-amz-json-1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        answer = await reader.readexactly(length)
        assert head.startswith(b"HTTP/1.1 200"), answer
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class Queue:
    """A queue of one worker, through several connections."""

    def __init__(self, worker: Serving, batch: int, size: int, connections: int = CONNECTIONS) -> None:
        self.connections = [Connection(worker.url) for _ in range(connections)]
        self._batch = batch
        self._body = "x" * size
        self.url = ""

    async def make(self, name: str) -> None:
        answer = await self.connections[0].call("CreateQueue", {"QueueName": name})
        self.url = msgspec.json.decode(answer)["QueueUrl"]

    async def send(self, connection: Connection, batches: int) -> None:
        entries = [{"Id": f"{i}", "MessageBody": self._body} for i in range(self._batch)]
        for _ in range(batches):
            await connection.call("SendMessageBatch", {"QueueUrl": self.url, "Entries": entries})

    async def receive(self, connection: Connection, done: Callable[[int], bool]) -> None:
        """Receive and delete until `done` returns True; it is called with the number of messages just received."""
        wanted = {"QueueUrl": self.url, "MaxNumberOfMessages": self._batch, "WaitTimeSeconds": 1}
        count = 0
        while not done(count):
            found = _received(await connection.call("ReceiveMessage", wanted)).Messages
            count = len(found)
            if found:
                entries = [{"Id": f"{i}", "ReceiptHandle": m.ReceiptHandle} for i, m in enumerate(found)]
                await connection.call("DeleteMessageBatch", {"QueueUrl": self.url, "Entries": entries})

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def run(
    *, batch: int, messages: int, size: int, phases: list[str], runs: int, singles: int, clients: int, peers: list[str]
) -> None:
    """Run each phase `runs` times, all systems beside each other and in turns; print the medians."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="marq-bench-")))
        systems: dict[str, Any] = {"sqs": stack.enter_context(stack.enter_context(workers(size))("sqs"))}
        for peer in peers:
            systems[peer] = stack.enter_context(ElasticMq(folder / peer, disk=peer == "elasticmq-disk"))
        started = stack.enter_context(Clients(clients, batch, size))
        for system in systems.values():
            warm_up(system, batch, WARM_UP_MESSAGES, size)
        for phase in phases:
            values: dict[str, list[float]] = {name: [] for name in systems}
            for i in range(runs):
                for name, system in systems.items():
                    queue = f"bench-{phase}-{i}"
                    if phase == "cycle":
                        value = cycle(name, system, started, queue, batch, messages, size)["rate"]
                    elif phase == "all":
                        value = asyncio.run(_in_queue(_all, name, system, queue, batch, messages, size))
                    else:
                        value = asyncio.run(_in_queue(_single, name, system, queue, batch, singles, size))
                    values[name].append(value)
            for name, found in values.items():
                ratio = statistics.median(a / b for a, b in zip(values["sqs"], found, strict=True))
                result(
                    system=name,
                    phase=phase,
                    batch=batch,
                    runs=runs,
                    median=round(statistics.median(found), 2),
                    lowest=round(min(found), 2),
                    highest=round(max(found), 2),
                    marq_to_it=round(ratio, 2),
                )


def warm_up(server: Serving, batch: int, messages: int, size: int) -> None:
    """Send, receive and delete so many messages."""
    asyncio.run(_in_queue(_warm_up, "", server, "warm-up", batch, messages, size))


async def _in_queue(
    kind: Callable[..., Awaitable[float]], system: str, server: Any, name: str, batch: int, count: int, size: int
) -> float:
    queue = Queue(server, batch, size)
    await queue.make(name)
    try:
        return await kind(system, server, queue, batch, count)
    finally:
        queue.close()


class Taken:
    """Counts down the messages that are still to be taken."""

    def __init__(self, messages: int) -> None:
        self.left = messages

    def __call__(self, count: int) -> bool:
        self.left -= count
        return self.left <= 0


async def _warm_up(system: str, server: Any, queue: Queue, batch: int, messages: int) -> float:
    batches, taken = messages // batch // CONNECTIONS, Taken(messages // batch // CONNECTIONS * batch * CONNECTIONS)
    await asyncio.gather(*(queue.send(c, batches) for c in queue.connections))
    await asyncio.gather(*(queue.receive(c, taken) for c in queue.connections))
    return 0.0


class _Server:
    """Where clients reach it."""

    def __init__(self, url: str) -> None:
        self.url = url


def _client(orders: Any, left: Any, connections: int, batch: int, size: int) -> None:
    """A process of clients: does what it is ordered, and says when that is done."""
    while (order := orders.recv()) is not None:
        server, url, batches = order
        asyncio.run(_carry_out(server, url, batches, left, connections, batch, size))
        orders.send(None)


async def _carry_out(server: str, url: str, batches: int, left: Any, connections: int, batch: int, size: int) -> None:
    """Send so many batches over each connection; without any, receive and delete until nothing is left."""
    queue = Queue(_Server(server), batch, size, connections)
    queue.url = url

    def taken(count: int) -> bool:
        with left.get_lock():
            left.value -= count
            return bool(left.value <= 0)

    if batches:
        await asyncio.gather(*(queue.send(c, batches) for c in queue.connections))
    else:
        await asyncio.gather(*(queue.receive(c, taken) for c in queue.connections))
    queue.close()


class Clients:
    """Processes of clients."""

    def __init__(self, count: int, batch: int, size: int) -> None:
        fresh = multiprocessing.get_context("spawn")
        self.count = count
        self.left = fresh.Value("q", 0)
        self._pipes, self._processes = [], []
        for _ in range(count):
            ours, theirs = fresh.Pipe()
            process = fresh.Process(target=_client, args=(theirs, self.left, CONNECTIONS // count, batch, size))
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Those of the processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def order(self, server: str, url: str, batches: int) -> None:
        """Let all of them begin."""
        for pipe in self._pipes:
            pipe.send((server, url, batches))

    def wait(self) -> None:
        """Return when all are done."""
        for pipe in self._pipes:
            pipe.recv()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


def cycle(
    system: str, server: Any, clients: Clients, name: str, batch: int, messages: int, size: int
) -> dict[str, float]:
    """All messages sent, then received and deleted: rates and processor time of both together."""
    batches = messages // batch // CONNECTIONS
    messages = batches * batch * CONNECTIONS
    queue = Queue(server, batch, size)
    asyncio.run(queue.make(name))
    whole, clock = Clock(server, clients.pids), Clock(server, clients.pids)
    clients.order(server.url, queue.url, batches)
    clients.wait()
    result(system=system, phase="send", batch=batch, **clock.rates(messages))
    clock = Clock(server, clients.pids)
    clients.left.value = messages
    clients.order(server.url, queue.url, 0)
    while clients.left.value > 0:
        time.sleep(0.001)
    result(system=system, phase="process", batch=batch, **clock.rates(messages))
    rates = whole.rates(messages)
    result(system=system, phase="cycle", batch=batch, **rates)
    clients.wait()
    return rates


async def _all(system: str, server: Any, queue: Queue, batch: int, messages: int) -> float:
    half = CONNECTIONS // 2
    batches = messages // batch // half
    messages = batches * batch * half
    clock, taken = Clock(server), Taken(messages)
    await asyncio.gather(
        *(queue.send(c, batches) for c in queue.connections[:half]),
        *(queue.receive(c, taken) for c in queue.connections[half:]),
    )
    rates = clock.rates(messages)
    result(system=system, phase="all", batch=batch, **rates)
    return rates["rate"]


async def _single(system: str, server: Any, queue: Queue, batch: int, count: int) -> float:
    connection = queue.connections[0]
    wanted = {"QueueUrl": queue.url, "MaxNumberOfMessages": 1, "WaitTimeSeconds": 5}
    times: list[float] = []
    for i in range(WARM_UP + count):
        began = time.perf_counter()
        await connection.call("SendMessage", {"QueueUrl": queue.url, "MessageBody": f"{i}".ljust(100, "x")})
        (message,) = _received(await connection.call("ReceiveMessage", wanted)).Messages
        await connection.call("DeleteMessage", {"QueueUrl": queue.url, "ReceiptHandle": message.ReceiptHandle})
        if i >= WARM_UP:
            times.append((time.perf_counter() - began) * 1000)
    times.sort()
    p95 = percentile(times, 0.95)
    result(
        system=system,
        phase="single",
        msgs=count,
        p50_ms=round(percentile(times, 0.5), 2),
        p95_ms=round(p95, 2),
        p99_ms=round(percentile(times, 0.99), 2),
    )
    return p95
