"""The handlers of `bench restart`: they record each message once its call has returned.

Files and variables as in `bench.gaps`. A line has partition, offset, attempt, monotonic ms at which the call began.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from marq.handlers import handler

#: Seconds that a call takes, so that some are in progress whenever a worker stops.
WORK_S = 0.02

_file = os.open(Path(os.environ.get("BENCH_OUT", ".")) / f"{os.getpid()}.calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


async def _work(*messages: Any) -> None:
    began = time.monotonic_ns() // 1_000_000
    await asyncio.sleep(WORK_S)
    os.write(_file, "".join(f"{m.partition} {m.offset} {m.attempt} {began}\n" for m in messages).encode())


@handler("single", concurrency=50)
async def on_one(message: Any) -> None:
    await _work(message)


@handler("batch", batch=100, concurrency=2)
async def on_batch(messages: list[Any]) -> None:
    await _work(*messages)
