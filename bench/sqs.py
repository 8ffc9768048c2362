"""`python -m bench sqs`: Amazon SQS's JSON protocol, a plain HTTP client in this process against one worker process.

cycle    send, then receive and delete, in batches of 10 over 8 connections: the rate of all three together
all      the same, all at the same time
single   one message sent, received, deleted, then the next
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from app.processes import WorkerProcess
from bench.cycle import Serving, percentile, result
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

    def __init__(self, worker: Serving, batch: int, size: int) -> None:
        self.connections = [Connection(worker.url) for _ in range(CONNECTIONS)]
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


def run(*, batch: int, messages: int, size: int, phases: list[str], runs: int, singles: int) -> None:
    """Run each phase `runs` times; print the medians."""
    kinds: dict[str, Callable[[WorkerProcess, Queue, int, int], Awaitable[float]]] = {
        "cycle": _cycle,
        "all": _all,
        "single": _single,
    }
    with workers(size) as worker_for:
        for phase in phases:
            values = []
            with worker_for(phase) as worker:
                if phase != "single":
                    asyncio.run(_in_queue(_warm_up, worker, "warm-up", batch, WARM_UP_MESSAGES, size))
                for i in range(runs):
                    count = singles if phase == "single" else messages
                    values.append(asyncio.run(_in_queue(kinds[phase], worker, f"bench-{i}", batch, count, size)))
            if runs > 1:
                result(system="sqs", phase=phase, batch=batch, runs=runs, median=statistics.median(values))


async def _in_queue(
    kind: Callable[..., Awaitable[float]], worker: WorkerProcess, name: str, batch: int, count: int, size: int
) -> float:
    queue = Queue(worker, batch, size)
    await queue.make(name)
    try:
        return await kind(worker, queue, batch, count)
    finally:
        queue.close()


class Taken:
    """Counts down the messages that are still to be taken."""

    def __init__(self, messages: int) -> None:
        self.left = messages

    def __call__(self, count: int) -> bool:
        self.left -= count
        return self.left <= 0


async def _warm_up(worker: WorkerProcess, queue: Queue, batch: int, messages: int) -> float:
    batches, taken = messages // batch // CONNECTIONS, Taken(messages // batch // CONNECTIONS * batch * CONNECTIONS)
    await asyncio.gather(*(queue.send(c, batches) for c in queue.connections))
    await asyncio.gather(*(queue.receive(c, taken) for c in queue.connections))
    return 0.0


async def _cycle(worker: WorkerProcess, queue: Queue, batch: int, messages: int) -> float:
    batches = messages // batch // CONNECTIONS
    messages = batches * batch * CONNECTIONS
    whole = Clock(worker)
    clock = Clock(worker)
    await asyncio.gather(*(queue.send(c, batches) for c in queue.connections))
    result(system="sqs", phase="send", batch=batch, **clock.rates(messages))
    clock, taken = Clock(worker), Taken(messages)
    await asyncio.gather(*(queue.receive(c, taken) for c in queue.connections))
    result(system="sqs", phase="process", batch=batch, **clock.rates(messages))
    rates = whole.rates(messages)
    result(system="sqs", phase="cycle", batch=batch, **rates)
    return rates["rate"]


async def _all(worker: WorkerProcess, queue: Queue, batch: int, messages: int) -> float:
    half = CONNECTIONS // 2
    batches = messages // batch // half
    messages = batches * batch * half
    clock, taken = Clock(worker), Taken(messages)
    await asyncio.gather(
        *(queue.send(c, batches) for c in queue.connections[:half]),
        *(queue.receive(c, taken) for c in queue.connections[half:]),
    )
    rates = clock.rates(messages)
    result(system="sqs", phase="all", batch=batch, **rates)
    return rates["rate"]


async def _single(worker: WorkerProcess, queue: Queue, batch: int, count: int) -> float:
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
        system="sqs",
        phase="single",
        msgs=count,
        p50_ms=round(percentile(times, 0.5), 2),
        p95_ms=round(p95, 2),
        p99_ms=round(percentile(times, 0.99), 2),
    )
    return p95
