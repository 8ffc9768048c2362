"""The least that a message can take from its send to a handler, if its start is durable in Kafka before.

A consumer and a producer of aiokafka in a process of their own do what no worker can do without: fetch messages,
append one record for a batch of them, and wait until Kafka has confirmed it; another record follows, as an end does.
There is no state, no lease and no queue.
"""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import time
from typing import Any

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

#: Bytes of a start with its headers, and of an end.
MARKER_BYTES = 150


class Floor:
    """The process; it ends when so many messages were handled.

    With `batch` messages at most for each start, it measures how long a backlog takes; without, each message's latency.
    """

    def __init__(self, bootstrap: str, topic: str, markers: str, batch: int = 0) -> None:
        command = [sys.executable, "-m", "bench.peers.floor", bootstrap, topic, markers, str(batch)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it reads

    def found(self, total: int) -> list[float]:
        """When `total` messages have been handled: their latencies in ms, or the seconds from the first to the end."""
        out, _ = self._process.communicate(f"{total}\n")
        found: list[float] = json.loads(out)
        return found


async def _main(bootstrap: str, topic: str, markers: str, batch: str) -> None:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest", fetch_max_wait_ms=100)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, acks="all")
    await consumer.start()
    await producer.start()
    at_most = int(batch) or None
    latencies_ms: list[float] = []
    starting: set[asyncio.Task[None]] = set()
    done, first_s, last_s = 0, 0.0, 0.0

    async def handle(partition: int, records: Any) -> None:
        nonlocal done, last_s
        marker = bytes(MARKER_BYTES)
        await (await producer.send(markers, marker, partition=partition))
        if not at_most:
            now = time.time_ns()
            latencies_ms.extend((now - struct.unpack_from("<q", record.value)[0]) / 1e6 for record in records)
        await (await producer.send(markers, marker, partition=partition))
        done += len(records)
        last_s = time.monotonic()

    async def read() -> None:
        nonlocal first_s
        while True:
            for tp, records in (await consumer.getmany(timeout_ms=1_000, max_records=at_most)).items():
                first_s = first_s or time.monotonic()
                task = asyncio.ensure_future(handle(tp.partition, records))
                starting.add(task)
                task.add_done_callback(starting.discard)

    await consumer.seek_to_beginning()
    reading = asyncio.ensure_future(read())
    print("reading", flush=True)
    total = int(await asyncio.to_thread(sys.stdin.readline))
    while done < total:
        await asyncio.sleep(0.05)
    reading.cancel()
    await asyncio.gather(reading, *starting, return_exceptions=True)
    await producer.stop()
    await consumer.stop()
    print(json.dumps([last_s - first_s] if at_most else latencies_ms), flush=True)


if __name__ == "__main__":
    uvloop.run(_main(*sys.argv[1:]))
