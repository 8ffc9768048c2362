"""What a job is doing and how far it is, on a terminal: a line that changes, and goes away at the end.

Without a terminal nothing is shown: what a job prints there is read by programs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from marq.text import cleaned

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.progress import Progress, TaskID

#: Seconds between two looks at how far a job is.
LOOK_S = 0.5


class _Shown:
    """The line. It shows a step, or rows, or else the parts of the stages that Spark has under way."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task(name, total=None, said="")
        self._name = name
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._count: Callable[[], tuple[int, int, str]] | None = None
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def step(self, text: str, count: Callable[[], tuple[int, int, str]] | None = None) -> None:
        """Show a step. `count` tells how much of how much is done, and in what unit."""
        with self._lock:
            self._count = count
            self._progress.reset(self._task, total=None, description=f"{self._name}: {text}", said="")

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            with self._lock:
                count = self._count
            if count is None:
                continue
            # it may ask Kafka or a Spark that is just ending
            with contextlib.suppress(Exception):
                done, total, unit = count()
                with self._lock:
                    if count is self._count:
                        said = f"{done:,} of {total:,} {unit}" if total else ""
                        self._progress.update(self._task, completed=done, total=total or None, said=said)

    def pause(self) -> None:
        """Leave the terminal alone."""
        self._progress.stop()

    def go_on(self) -> None:
        """After a pause."""
        self._progress.start()

    def close(self) -> None:
        """Look no more."""
        self._end.set()
        self._thread.join(2 * LOOK_S)


_shown: _Shown | None = None


@contextlib.contextmanager
def shown(name: str) -> Iterator[None]:
    """Show the steps of a job, if its user looks at a terminal."""
    global _shown
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """Rows or parts a second."""

        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.0f}/s" if task.speed and task.speed >= 1 else "")

    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[said]}", markup=False),
        Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        # what goes into a pipe must not end up on the terminal
        redirect_stdout=sys.stdout.isatty(),
    )
    with progress:
        _shown = _Shown(progress, cleaned(name))
        _shown.step("asking Kafka")
        try:
            yield
        finally:
            _shown.close()
            _shown = None


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Leave the terminal to a question meanwhile."""
    if _shown is not None:
        _shown.pause()
    try:
        yield
    finally:
        if _shown is not None:
            _shown.go_on()


def step(text: str) -> None:
    """Say what comes now."""
    if _shown is not None:
        _shown.step(text)


def of_spark(text: str, spark: SparkSession) -> None:
    """Say what comes now, and how many parts of it Spark has done."""
    if _shown is None:
        return
    tracker: Any = spark.sparkContext.statusTracker()

    def count() -> tuple[int, int, str]:
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        return sum(s.numCompletedTasks for s in known), sum(s.numTasks for s in known), "parts"

    _shown.step(text, count)


def of_rows(text: str, total: int, done: Callable[[], int]) -> None:
    """Say what comes now, and how many rows of it are done."""
    if _shown is not None:
        _shown.step(text, lambda: (done(), total, "rows"))
