"""The commands of the demo."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator

import click

from app.demo.ledger import Ledger
from app.demo.progress import Course, in_words, watch
from app.demo.traffic import process, send
from app.kafka.broker_file import bootstrap_of
from app.kafka.datadir import running_workers
from app.processes import WorkerProcess, embedded_broker, errors_as_lines, stop_signals
from app.settings import Settings, load
from marq.errors import BrokerError, MarqError
from marq.text import plural


def _worker_url(settings: Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.web_host, settings.url_host)
    workers = running_workers(settings.data_dir)
    if workers:
        return f"http://{host}:{workers[0].web_port}"
    if settings.kafka is not None or bootstrap_of(settings.data_dir) is not None:
        return f"http://{host}:{settings.web_port}"
    raise BrokerError("no worker runs on this data folder; start one with `python -m app up`, or give its --url")


_messages = click.option("--messages", default=336_776, show_default=True, type=click.IntRange(1))
_drop = click.option("--drop", default=0.1, show_default=True, type=click.FloatRange(0, 0.9), help="Part never acked.")
_timeout = click.option("--timeout", default=5.0, show_default=True, help="Visibility timeout, seconds.")
_url = click.option("--url", default=None, help="A worker's address; by default one of this data folder.")


@click.group(invoke_without_command=True)
@_messages
@_drop
@_timeout
@click.pass_context
def demo(context: click.Context, messages: int, drop: float, timeout: float) -> None:
    """Send real messages, process them, drop some, and see every one acknowledged.

    Uses a broker and worker that run on the data folder, else starts its own. Stopped and run again, it goes on.
    """
    if context.invoked_subcommand is not None:
        return
    with errors_as_lines(), stop_signals() as stopped:
        settings = load()
        with contextlib.ExitStack() as stack:
            url = _running_or_own(settings, stack, stopped)
            click.echo(f"Look at {url}/ in a browser, or run: marq top --url {url}", err=True)
            ledger = Ledger.open(settings.data_dir, messages)
            course = Course(ledger, drop)
            with _first_error():
                asyncio.run(_all(ledger, settings, url, drop, timeout, stopped, course))
            found = course.summary()
        if ledger.missing:
            click.echo(f"{plural(ledger.missing, 'flight')} not done yet; run it again to go on", err=True)
        else:
            click.echo(in_words(found), err=True)
        click.echo(json.dumps(found))
    raise SystemExit(1 if ledger.missing else 0)


@contextlib.contextmanager
def _first_error() -> Iterator[None]:
    """Of errors that come together, the first that a user can mend."""
    try:
        yield
    except BaseExceptionGroup as group:
        known, _ = group.split(MarqError)
        while isinstance(known, BaseExceptionGroup):
            known = known.exceptions[0]  # type: ignore[assignment]
        if known is None:
            raise
        raise known from None


async def _all(
    ledger: Ledger,
    settings: Settings,
    url: str,
    drop: float,
    timeout_s: float,
    stopped: Callable[[], bool],
    course: Course,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send(ledger, settings, stopped))
        tasks.create_task(process(ledger, url, drop, timeout_s, stopped))
        tasks.create_task(watch(ledger, stopped, course))


def _running_or_own(settings: Settings, stack: contextlib.ExitStack, stopped: Callable[[], bool]) -> str:
    if running_workers(settings.data_dir):
        return _worker_url(settings)
    if settings.kafka is None and bootstrap_of(settings.data_dir) is None:
        click.echo("Starting Kafka …", err=True)
        stack.enter_context(embedded_broker(settings))
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    click.echo("Starting a worker …", err=True)
    log = stack.enter_context((settings.data_dir / "demo-worker.log").open("ab"))
    worker = stack.enter_context(WorkerProcess(output=log))
    try:
        worker.wait_ready(stopped)
    except SystemExit:
        raise MarqError(f"the demo's worker ended; {log.name} says why") from None
    return worker.url


@demo.command("send")
@_messages
def demo_send(messages: int) -> None:
    """Only send; what was confirmed before is not sent again."""
    with errors_as_lines(), stop_signals() as stopped:
        settings = load()
        ledger = Ledger.open(settings.data_dir, messages)
        asyncio.run(send(ledger, settings, stopped))
        click.echo(json.dumps(ledger.totals()))


@demo.command("process")
@_drop
@_timeout
@_url
def demo_process(drop: float, timeout: float, url: str | None) -> None:
    """Only process, through a worker's HTTP, until every message is acknowledged."""
    with errors_as_lines(), stop_signals() as stopped:
        settings = load()
        ledger = Ledger.open(settings.data_dir, None)
        asyncio.run(process(ledger, url or _worker_url(settings), drop, timeout, stopped))
        click.echo(json.dumps(ledger.totals()))


@demo.command("watch")
def demo_watch() -> None:
    """Only watch; exit status 0 once every message is acknowledged."""
    with errors_as_lines(), stop_signals() as stopped:
        ledger = Ledger.open(load().data_dir, None)
        course = Course(ledger, 0.0)
        asyncio.run(watch(ledger, stopped, course))
        click.echo(json.dumps(course.summary()))
    raise SystemExit(0 if not ledger.missing else 1)
