"""The module of `bench partitions`: no handler unless BENCH_QUEUES is set; it notes when a worker has come how far.

BENCH_OUT (folder). A line of `<pid>.phases` is a phase and the monotonic time in seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from app.engine.ownership import Ownership
from app.worker import WorkerApp

_file = (Path(os.environ.get("BENCH_OUT", ".")) / f"{os.getpid()}.phases").open("a", buffering=1)
_seen: set[str] = set()


def _note(phase: str) -> None:
    _file.write(f"{phase} {time.monotonic():.3f}\n")


def _noted(owner: type, name: str, phase: str, *, after: bool = True) -> None:
    """Note the first time that a method is called, or has returned."""
    method = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not after and phase not in _seen:
            _seen.add(phase)
            _note(phase)
        found = method(self, *args, **kwargs)
        if after and phase not in _seen:
            _seen.add(phase)
            _note(phase)
        return found

    setattr(owner, name, call)


_note("imported")
_noted(WorkerApp, "prepare", "topics")
_noted(Ownership, "on_assignment", "joined", after=False)
_noted(Ownership, "on_assigned", "assigned", after=False)
_noted(Ownership, "enter", "entered")
_noted(Ownership, "on_markers_chunk", "read")

if os.environ.get("BENCH_QUEUES"):
    import bench.noop  # noqa: F401
