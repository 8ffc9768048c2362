"""Processes: a worker as a child process, signals that stop in order, errors as one line."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import click

from app.folders import disk_error
from app.kafka.broker import EmbeddedBroker
from app.kafka.datadir import running_workers
from app.settings import Settings, load
from marq.errors import MarqError
from marq.text import cleaned

#: Seconds for a stopping worker to hand its partitions over, beside `MARQ_STOP_MS`; then it is killed.
WORKER_STOP_S = 7.0
#: Most seconds for a new worker to become ready: a busy Kafka takes minutes to create some thousand partitions.
WORKER_START_S = 600.0

#: For asking our own child whether it is ready.
_UNVERIFIED = ssl._create_unverified_context()


class CanNotStart(SystemExit):
    """Ends a process that could not start, or not do what it was asked for, and has said why."""

    def __init__(self) -> None:
        super().__init__(2)


def say(*lines: str) -> None:
    """Print lines for the person at the terminal."""
    click.echo("marq: " + "\n".join(map(cleaned, lines)), err=True)


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """End the process with status 2 and one line for an error that a user can mend."""
    try:
        with disk_errors():
            yield
    except MarqError as error:
        say(*error.lines)
        raise CanNotStart from None


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn the system's errors about folders and disks into `DataDirError`, which says what to do."""
    try:
        yield
    except Exception as error:
        if (line := disk_error(error)) is None:
            raise
        raise line from None


def embedded_broker(settings: Settings) -> EmbeddedBroker:
    """The broker of a data folder. It asks for a password if HTTP asks for keys."""
    return EmbeddedBroker(settings.data_dir, asks_password=settings.keys is not None)


class WorkerProcess:
    """A worker as a child process, which is stopped by its pid."""

    def __init__(self, output: IO[bytes] | None = None, **environment: str) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._told = os.fdopen(read, "rb", buffering=0)
        # in a session of its own: Ctrl-C reaches only us, and we stop things in order
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "worker", "--supervisor", str(write)],
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=(write,),
        )
        os.close(write)
        self.url = ""
        self._data_dir = Path(environment["MARQ_DATA_DIR"]) if "MARQ_DATA_DIR" in environment else None

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until `/health/ready` answers 200. Raises `MarqError` if it takes too long; exits if the worker ends."""
        deadline = time.monotonic() + WORKER_START_S
        while not stopped() and not self.is_ready():
            if self.process.poll() is not None:
                raise SystemExit(self.process.returncode or 1)
            check_start(deadline)
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """True if `/health/ready` answers 200."""
        settings = load()
        for place in running_workers(self._data_dir or settings.data_dir):
            if not _is_of(place.folder, self.process.pid):
                continue
            self.url = settings.url_at(place.web_port)
            with contextlib.suppress(urllib.error.URLError, OSError):
                # its certificate may be for another name than the one in our URL
                urllib.request.urlopen(f"{self.url}/health/ready", timeout=1, context=_UNVERIFIED).read()
                return True
        return False

    def could_not_start(self) -> bool:
        """True if the worker, which has ended, said that it can't start. Its status may come from code of handlers."""
        with self._told:
            return bool(self._told.read(1))

    def ask_to_stop(self) -> None:
        """Send SIGTERM, on which the worker hands its partitions over."""
        if self.process.poll() is None:
            self.process.terminate()

    def stop(self) -> None:
        """Ask it to stop, and kill it if that takes too long."""
        self.ask_to_stop()
        try:
            self.process.wait(WORKER_STOP_S + load().stop_ms / 1000)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._told.close()


def check_start(deadline_s: float) -> None:
    """Raise `MarqError` if a worker was not ready by then."""
    if time.monotonic() > deadline_s:
        raise MarqError(f"the worker was not ready within {WORKER_START_S:.0f} s; see what it logged above")


def _is_of(folder: Any, pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "pid").read_text()) == pid
    return False


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """In the block, SIGINT and SIGTERM only set a flag. Yields a function that tells whether one came."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
