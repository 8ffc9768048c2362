"""`python -m bench queues`: many queues: how fast they are made, what each takes in a worker, what listing costs."""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from pathlib import Path

from aiohttp import ClientSession, TCPConnector

from app.kafka.broker import EmbeddedBroker
from bench.cycle import Bench, result
from bench.partitions import rss_mib

#: Seconds until memory that the requests took is free again.
SETTLE_S = 3.0


def run(*, count: int, connections: int) -> None:
    """Make queues over HTTP, look at the worker, and start it again."""
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder, EmbeddedBroker(Path(folder) / "kafka") as broker:
        bench = Bench(broker.bootstrap, Path(folder), 100)
        name = bench.new_name("queues")
        with bench.worker(name, MARQ_HANDLERS="") as worker:
            asyncio.run(_make(worker.url, "warm-up", connections, connections))
            time.sleep(SETTLE_S)
            before_mib = rss_mib(worker.process.pid)
            took_s = asyncio.run(_make(worker.url, "bench", count, connections))
            time.sleep(SETTLE_S)
            after_mib = rss_mib(worker.process.pid)
            result(
                phase="queues:made",
                queues=count,
                rate=round(count / took_s),
                bytes_each=round((after_mib - before_mib) * 2**20 / count),
                rss_mib=after_mib,
            )
            for path in ("/v1/queues?limit=100", "/v1/queues?limit=1000&after=bench-5", "/metrics"):
                began = time.perf_counter()
                with urllib.request.urlopen(worker.url + path, timeout=60) as answer:
                    size = len(answer.read())
                ms = round((time.perf_counter() - began) * 1000, 1)
                result(phase="queues:read", queues=count, path=path, bytes=size, ms=ms)
        began = time.monotonic()
        with bench.worker(name, MARQ_HANDLERS="") as worker:
            ready_s = round(time.monotonic() - began, 1)
            result(phase="queues:again", queues=count, ready_s=ready_s, rss_mib=rss_mib(worker.process.pid))


async def _make(url: str, prefix: str, count: int, connections: int) -> float:
    """Make queues with empty settings. Returns seconds."""
    numbers = iter(range(count))
    async with ClientSession(connector=TCPConnector(limit=connections)) as session:

        async def make() -> None:
            for number in numbers:
                async with session.put(f"{url}/v1/queues/{prefix}-{number}", json={}) as answer:
                    assert answer.status in (200, 201), await answer.text()
                    await answer.read()

        began = time.monotonic()
        await asyncio.gather(*(make() for _ in range(connections)))
        return time.monotonic() - began
