"""The handler that `bench rebalance` measures with: notes when it gets what of which partition, a file a process.

BENCH_QUEUES (pattern), BENCH_OUT (folder). A line is partition, offset, attempt, monotonic ms (one clock on a machine).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from marq.handlers import handler

_file = os.open(Path(os.environ.get("BENCH_OUT", ".")) / f"{os.getpid()}.gaps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@handler(os.environ.get("BENCH_QUEUES", "*"), batch=100, concurrency=2)
async def on_batch(messages: list[Any]) -> None:
    now = time.monotonic_ns() // 1_000_000
    os.write(_file, "".join(f"{m.partition} {m.offset} {m.attempt} {now}\n" for m in messages).encode())
