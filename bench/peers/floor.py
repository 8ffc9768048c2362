"""The least that a message can take from its send to a handler, if its start is durable in Kafka before.

A consumer and a producer of aiokafka in a process of their own do what no worker can do without: fetch a message,
append one record, and wait until Kafka has confirmed it; another record follows, as an end does. There is no state, no
lease and no queue.
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
    """The process; it ends when so many messages were handled, and prints their latencies in milliseconds."""

    def __init__(self, bootstrap: str, topic: str, markers: str) -> None:
        command = [sys.executable, "-m", "bench.peers.floor", bootstrap, topic, markers]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it reads

    def latencies_ms(self, total: int) -> list[float]:
        """Those of `total` messages, when all of them have been handled."""
        out, _ = self._process.communicate(f"{total}\n")
        found: list[float] = json.loads(out)
        return found


async def _main(bootstrap: str, topic: str, markers: str) -> None:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest", fetch_max_wait_ms=100)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, acks="all")
    await consumer.start()
    await producer.start()
    latencies_ms: list[float] = []
    starting: set[asyncio.Task[None]] = set()

    async def start(partition: int, records: Any) -> None:
        marker = bytes(MARKER_BYTES)
        await (await producer.send(markers, marker, partition=partition))
        now = time.time_ns()
        latencies_ms.extend((now - struct.unpack_from("<q", record.value)[0]) / 1e6 for record in records)
        await producer.send(markers, marker, partition=partition)

    async def read() -> None:
        while True:
            for tp, records in (await consumer.getmany(timeout_ms=1_000)).items():
                task = asyncio.ensure_future(start(tp.partition, records))
                starting.add(task)
                task.add_done_callback(starting.discard)

    await consumer.seek_to_beginning()
    reading = asyncio.ensure_future(read())
    print("reading", flush=True)
    total = int(await asyncio.to_thread(sys.stdin.readline))
    while len(latencies_ms) < total:
        await asyncio.sleep(0.05)
    reading.cancel()
    await asyncio.gather(reading, *starting, return_exceptions=True)
    await producer.stop()
    await consumer.stop()
    print(json.dumps(latencies_ms), flush=True)


if __name__ == "__main__":
    uvloop.run(_main(*sys.argv[1:]))
