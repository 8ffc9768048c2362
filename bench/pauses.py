"""The module of `bench restore`: no handler; it records pauses of the event loop from the first take-over on.

BENCH_OUT (folder). A line of `<pid>.pauses` is a `Pause`; a line of `<pid>.takeovers` is partition and seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from app.engine.takeover import TakeOver
from bench.lag import LoopProbe, Pause

_out = Path(os.environ.get("BENCH_OUT", "."))
_run = TakeOver.run


def _note(kind: str, line: str) -> None:
    with (_out / f"{os.getpid()}.{kind}").open("a") as file:
        file.write(f"{line}\n")


def _note_pause(pause: Pause) -> None:
    _note("pauses", f"{pause.at_ms} {pause.ms} {pause.ours_ms}")


_probe = LoopProbe(_note_pause)


async def _probed(self: TakeOver, delay_s: float = 0.0) -> None:
    _probe.start_once()
    began_s = time.monotonic()
    await _run(self, delay_s)
    _note("takeovers", f"{self.number} {time.monotonic() - began_s:.3f}")


TakeOver.run = _probed  # type: ignore[method-assign]
