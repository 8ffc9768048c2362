"""Handlers of the workers under test: they write down what they get before they do anything with it.

The record is one file a process, each line written with one call of the system: it remains after kill -9. What a
handler does depends on the name of the queue (see each), so that one worker serves many tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from marq.handlers import Retry, handler

FOLDER = Path(os.environ.get("WITNESS_FOLDER", "."))
#: Seconds that a handler of `work-*` takes.
WORK_S = float(os.environ.get("WITNESS_WORK_S", "0"))
TIMEOUT_MS = int(os.environ.get("WITNESS_TIMEOUT_MS", "1000"))
_file = os.open(FOLDER / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _id(message: Any) -> str:
    if "id" in message.headers:
        return str(message.headers["id"].decode())
    try:
        return str(message.json()["id"])
    except (ValueError, KeyError, TypeError):
        return message.payload.decode(errors="replace")


def note(event: str, *messages: Any) -> None:
    """One line: the event, and each message."""
    now = time.time()
    rows = [
        [
            m.queue,
            m.partition,
            m.offset,
            m.attempt,
            _id(m),
            now,
            {name: (value or b"").decode(errors="replace") for name, value in m._record.headers},
            zlib.crc32(m.payload),
        ]
        for m in messages
    ]
    os.write(_file, (json.dumps([event, rows]) + "\n").encode())


@handler("work-*", concurrency=50)
async def work(message: Any) -> None:
    """Acknowledged after WITNESS_WORK_S."""
    note("begin", message)
    if WORK_S:
        await asyncio.sleep(WORK_S)
    note("end", message)


@handler("bulk-*", batch=100, concurrency=2)
async def bulk(messages: list[Any]) -> None:
    """Acknowledged in batches after WITNESS_WORK_S."""
    note("begin", *messages)
    if WORK_S:
        await asyncio.sleep(WORK_S)
    note("end", *messages)


@handler("order-*", concurrency=1)
async def in_order(message: Any) -> None:
    """One at a time."""
    note("begin", message)
    note("end", message)


@handler("thread-*", concurrency=4)
def in_thread(message: Any) -> None:
    """In a thread."""
    note("begin", message)
    time.sleep(0.05)
    note("end", message)


@handler("drop-*", concurrency=50, manual=True, visibility_timeout_ms=TIMEOUT_MS, max_receives=1000)
async def drop_first(message: Any) -> None:
    """The first delivery is left alone: not acknowledged."""
    note("begin", message)
    if message.attempt > 1:
        message.ack()
        note("end", message)


@handler("hold-*", concurrency=1000, manual=True, visibility_timeout_ms=600_000, max_receives=1000)
async def hold(message: Any) -> None:
    """Never acknowledged, leased for long."""
    note("begin", message)


@handler("late-*", concurrency=50, manual=True, visibility_timeout_ms=1000)
async def late(message: Any) -> None:
    """The first delivery is acknowledged long after its lease was over, later ones not at all."""
    note("begin", message)
    if message.attempt == 1:
        asyncio.get_running_loop().call_later(1.4, message.ack)


@handler("release-*", concurrency=50, manual=True, visibility_timeout_ms=60_000)
async def release(message: Any) -> None:
    """Gives a message back at once, the first two times."""
    note("begin", message)
    if message.attempt < 3:
        message.release(300)
    else:
        message.ack()
        note("end", message)


@handler("slow-*", concurrency=10, visibility_timeout_ms=1000)
async def slow(message: Any) -> None:
    """Runs for several visibility timeouts."""
    note("begin", message)
    await asyncio.sleep(2.4)
    note("end", message)


@handler("fail-*", concurrency=50, max_receives=3, backoff_ms=200, backoff_max_ms=5000)
async def fail(message: Any) -> None:
    """Fails always."""
    note("begin", message)
    raise RuntimeError("as it should")


@handler("flaky-*", concurrency=50, max_receives=5, backoff_ms=100)
async def flaky(message: Any) -> None:
    """Fails once."""
    note("begin", message)
    if message.attempt == 1:
        raise Retry
    note("end", message)


@handler("later-*", concurrency=50, max_receives=5, backoff_ms=60_000)
async def later(message: Any) -> None:
    """Wants the second delivery half a second after the first."""
    note("begin", message)
    if message.attempt == 1:
        raise Retry(500)


@handler("batch-*", batch=16, max_receives=6, backoff_ms=50, backoff_max_ms=50)
async def batch(messages: list[Any]) -> None:
    """Fails for a batch that has a poisonous message in it."""
    note("begin", *messages)
    if any(b"poison" in m.payload for m in messages):
        raise RuntimeError("as it should")
    note("end", *messages)


@handler("turn-*", concurrency=200, manual=True, visibility_timeout_ms=60_000, max_receives=1000)
async def turns(message: Any) -> None:
    """Gives a message back as often as it says (`"turns"`); then leaves it leased, or finishes it (WITNESS_ACK=1)."""
    note("begin", message)
    if message.attempt <= message.json().get("turns", 0):
        message.release(50)
    elif os.environ.get("WITNESS_ACK") == "1":
        message.ack()
        note("end", message)
