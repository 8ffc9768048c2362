"""The handlers of `bench cycle`, in a worker of its own. What they saw is written to a file.

BENCH_QUEUES (pattern), BENCH_BATCH, BENCH_DROP (share of messages that are not acknowledged at first),
BENCH_TIMEOUT_MS, BENCH_OUT (folder), BENCH_LATENCY=1 (payloads begin with their time of sending, in ns).
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from marq.handlers import handler

QUEUES = os.environ.get("BENCH_QUEUES", "*")
BATCH = int(os.environ.get("BENCH_BATCH", "500"))
DROP = float(os.environ.get("BENCH_DROP", "0"))
TIMEOUT_MS = int(os.environ.get("BENCH_TIMEOUT_MS", "30000"))
LATENCY = os.environ.get("BENCH_LATENCY") == "1"
OUT = Path(os.environ.get("BENCH_OUT", "."))

sys.setswitchinterval(0.001)

seen = {"messages": 0, "calls": 0, "redelivered": 0, "first_ns": 0, "last_ns": 0}
latencies_ms: list[float] = []
late_ms: list[float] = []
dropped_at: dict[tuple[int, int], float] = {}


def _count(messages: list[Any]) -> None:
    now = time.time_ns()
    if not seen["first_ns"]:
        seen["first_ns"] = now
    seen["last_ns"] = now
    seen["messages"] += len(messages)
    seen["calls"] += 1
    if LATENCY:
        latencies_ms.extend((now - struct.unpack_from("<q", m.payload)[0]) / 1e6 for m in messages)


def _drop_some(messages: list[Any]) -> None:
    every = round(1 / DROP)
    now = time.monotonic()
    for m in messages:
        if m.attempt == 1 and m.offset % every == 0:
            dropped_at[m.partition, m.offset] = now
        else:
            if m.attempt > 1:
                seen["redelivered"] += 1
                began = dropped_at.pop((m.partition, m.offset), None)
                if began is not None:
                    late_ms.append((now - began) * 1000 - TIMEOUT_MS)
            m.ack()


if BATCH > 1:

    @handler(QUEUES, batch=BATCH, manual=DROP > 0, visibility_timeout_ms=TIMEOUT_MS)
    async def on_batch(messages: list[Any]) -> None:
        _count(messages)
        if DROP:
            _drop_some(messages)

else:

    @handler(QUEUES, concurrency=500, manual=DROP > 0, visibility_timeout_ms=TIMEOUT_MS)
    async def on_message(message: Any) -> None:
        _count([message])
        if DROP:
            _drop_some([message])


def _report() -> None:
    """Write what was seen, only on request: writing all the time would distort the figures."""
    wanted, target = OUT / "wanted", OUT / "seen.json"
    while True:
        time.sleep(0.1)
        if wanted.exists():
            wanted.unlink()
            draft = target.with_suffix(".tmp")
            draft.write_text(json.dumps(seen | {"latencies_ms": latencies_ms, "late_ms": late_ms}))
            draft.rename(target)


threading.Thread(target=_report, daemon=True).start()
