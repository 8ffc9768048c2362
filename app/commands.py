"""The commands: Faust's own (`worker`, `agents`, `tables`, …) with ours added.

`python -m app …` is `faust -A app …`. Errors that a user can mend are one line and exit status 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import click
import uvloop
from faust.cli import faust as _faust_commands  # noqa: F401 - registers Faust's commands
from faust.cli.base import cli

from app.broker import EmbeddedBroker, bootstrap_of
from app.datadir import running_workers
from app.settings import load
from marq.errors import MarqError

#: Seconds that a worker gets to hand its partitions over before it is killed.
WORKER_STOP_S = 10.0
#: Seconds until a worker that was just started has to be ready.
WORKER_START_S = 90.0


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """End the process with status 2 and one line for an error that a user can mend."""
    try:
        yield
    except MarqError as error:
        click.echo(f"marq: {error}", err=True)
        raise SystemExit(2) from None


def _command(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with errors_as_lines():
            return function(*args, **kwargs)

    return cli.command(help=function.__doc__)(run)


def app_for_faust() -> Any:
    """What `faust -A app` gets."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with errors_as_lines():
        from app.worker import build

        return build()


def main() -> None:
    """`python -m app`."""
    cli.main(args=["-A", "app", *sys.argv[1:]], prog_name="python -m app")


@_command
def broker() -> None:
    """Run the embedded Kafka broker alone, until stopped."""
    with EmbeddedBroker(load().data_dir) as embedded, _stop_signals() as stopped:
        click.echo(f"Kafka on {embedded.bootstrap}, data in {load().data_dir.resolve()}")
        while not stopped() and embedded.is_running:
            time.sleep(0.1)
    if not stopped():
        raise SystemExit(1)


@_command
def up() -> None:
    """Run the embedded Kafka broker, unless MARQ_KAFKA is set, and one worker."""
    settings = load()
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(_stop_signals())
        if settings.kafka is None and bootstrap_of(settings.data_dir) is None:
            click.echo("Starting Kafka …")
            stack.enter_context(EmbeddedBroker(settings.data_dir))
        worker = stack.enter_context(WorkerProcess())
        worker.wait_ready(stopped)
        if not stopped():
            click.echo(f"marq is ready: {worker.url}  (Ctrl-C stops it)")
        while not stopped() and worker.process.poll() is None:
            time.sleep(0.1)
        if not stopped():
            raise SystemExit(worker.process.returncode or 1)
        click.echo("Stopping …")


class WorkerProcess:
    """A worker as a process of its own: started, waited for, stopped by pid."""

    def __init__(self, **environment: str) -> None:
        # a session of its own: Ctrl-C reaches us, and we stop things in their order
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "worker"], env=os.environ | environment, start_new_session=True
        )
        self.url = ""

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until `/health/ready` answers 200. Raises `MarqError` if the worker ends or takes too long."""
        settings = load()
        deadline = time.monotonic() + WORKER_START_S
        before = settings.data_dir
        while not stopped():
            if self.process.poll() is not None:
                raise SystemExit(self.process.returncode or 1)
            if time.monotonic() > deadline:
                raise MarqError(f"the worker was not ready within {WORKER_START_S:.0f} s; see what it logged above")
            for place in running_workers(before):
                if not _is_of(place.folder, self.process.pid):
                    continue
                self.url = (
                    f"http://{'localhost' if settings.web_host == '127.0.0.1' else settings.web_host}:{place.web_port}"
                )
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(f"{self.url}/health/ready", timeout=1).read()
                    return
            time.sleep(0.1)

    def stop(self) -> None:
        """SIGTERM, which hands the partitions over; SIGKILL if that takes too long."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(WORKER_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _is_of(folder: Any, pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "pid").read_text()) == pid
    return False


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM only set a flag meanwhile; the value says whether one came."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@_command
@click.argument("queue")
@click.argument("assignments", nargs=-1, metavar="[NAME=VALUE]...")
def queue(queue: str, assignments: tuple[str, ...]) -> None:
    """Show the settings of QUEUE, or change them: `queue orders max_receives=5 ttl_ms=86400000`."""
    from app.queues import change_settings

    values: dict[str, Any] = {}
    for assignment in assignments:
        name, sign, value = assignment.partition("=")
        if not sign:
            raise MarqError(f"{assignment!r} is not of the form NAME=VALUE")
        values[name] = int(value) if value.lstrip("-").isdigit() else value
    click.echo(json.dumps(asyncio.run(change_settings(load(), queue, values))))
