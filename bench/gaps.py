"""The handler of `bench rebalance`: records when it gets which message, in a file per process.

BENCH_QUEUES (pattern), BENCH_OUT (folder). A line of `<pid>.gaps` has partition, offset, attempt, monotonic ms (one
clock on a machine), ms that the event loop's thread has waited for a processor, and when the broker got the message (ms
since 1970). A line of `<pid>.pauses` is a `Pause`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from bench.lag import LoopProbe, Pause
from marq.handlers import handler


def _file(kind: str) -> int:
    path = Path(os.environ.get("BENCH_OUT", ".")) / f"{os.getpid()}.{kind}"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


_gaps, _pauses = _file("gaps"), _file("pauses")


def _note(pause: Pause) -> None:
    os.write(_pauses, f"{pause.at_ms} {pause.ms} {pause.ours_ms}\n".encode())


_probe = LoopProbe(_note)


@handler(os.environ.get("BENCH_QUEUES", "*"), batch=100, concurrency=2)
async def on_batch(messages: list[Any]) -> None:
    _probe.start_once()
    now, waited = time.monotonic_ns() // 1_000_000, round(_probe.waited_ms)
    os.write(
        _gaps, "".join(f"{m.partition} {m.offset} {m.attempt} {now} {waited} {m.sent_ms}\n" for m in messages).encode()
    )
