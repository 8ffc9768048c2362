"""`marq send`: messages from arguments, a file, or standard input, one a line."""

from __future__ import annotations

import contextlib
import os
import queue as queues
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from marq.cli.console import out, out_json, say
from marq.cli.group import QUEUE, command
from marq.cli.service import Connected
from marq.cli.values import DELAY, Place, number, rate
from marq.client import Outgoing
from marq.errors import BadValueError, MarqError, TooLargeError
from marq.protocol.limits import CLIENT_BATCH_BYTES, CLIENT_BATCH_MAX, MESSAGE_MAX_BYTES

#: Bytes that are read at once, and chunks that are read ahead.
CHUNK_BYTES = 256 * 1024
CHUNKS = 16
#: Refused lines that are named one by one.
NAMED = 10


@command("send")
@click.argument("queue", type=QUEUE)
@click.argument("messages", nargs=-1, metavar="[MESSAGE]...")
@click.option("--file", "files", multiple=True, type=click.Path(), help="A file whose content is one message.")
@click.option("--key", help="The messages' own key.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; may be given several times.")
@click.option("--delay", type=DELAY, help="Received first after this time: 30s, 5m, 2h.")
@click.option("--ttl", type=DELAY, help="Dropped if not finished after this time.")
@click.option("--group", help="Those of a group take turns with others; in a FIFO queue they come in order.")
@click.option("--deduplication-id", help="FIFO: a second message with it within five minutes is dropped.")
def send(
    service: Connected,
    queue: str,
    messages: tuple[str, ...],
    files: tuple[str, ...],
    key: str | None,
    headers: tuple[str, ...],
    delay: float | None,
    ttl: float | None,
    group: str | None,
    deduplication_id: str | None,
) -> int:
    """Send MESSAGEs to QUEUE; - stands for standard input, one message a line.

    \b
    marq send orders '{"book": 7}'
    tail -f events.log | marq send events -
    """
    if not messages and not files:
        raise click.UsageError("no message was given; - stands for lines of standard input")
    if list(messages).count("-") > 1:
        raise click.UsageError("- can be given once")
    template = Outgoing(
        b"", None if key is None else os.fsencode(key), _headers(headers), delay, ttl, group, deduplication_id
    )
    sender = _Sender(service, queue, template)
    for message in messages:
        if message == "-":
            _send_lines(sender, sys.stdin.buffer)
        else:
            sender.send([(0, os.fsencode(message))])
    for file in files:
        sender.send([(0, _content(Path(file)))])
    return sender.end()


def _headers(given: tuple[str, ...]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for one in given:
        name, sign, value = one.partition("=")
        if not sign or not name:
            raise BadValueError(f"{one!r} is not of the form NAME=VALUE, such as source=shop")
        found[name] = os.fsencode(value)
    return found


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadValueError(f"the file {str(file)!r} can't be read: {error.strerror}") from None


class _Sender:
    """Sends, and counts what became of it."""

    def __init__(self, service: Connected, queue: str, template: Outgoing) -> None:
        self.service = service
        self.name = queue
        self.sent = 0
        self.refused = 0
        self.lines = False  # of standard input: only counted, not listed
        self._queue = service.queue(queue)
        self._template = template
        self._began_s = time.monotonic()

    def send(self, messages: list[tuple[int, bytes]]) -> None:
        """Send messages, each with the number of its line (0: none)."""
        t = self._template
        outgoing = [
            Outgoing(payload, t.key, t.headers, t.delay, t.ttl, t.group, t.deduplication_id) for _, payload in messages
        ]
        for (line, _), result in zip(messages, self._queue.send_many(outgoing), strict=True):
            if isinstance(result, MarqError):
                self.refuse(line, result)
                continue
            self.sent += 1
            if self.service.as_json:
                out_json({"topic": result.topic, "partition": result.partition, "offset": result.offset})
            elif not self.lines:
                out(str(Place(result.partition, result.offset)))

    def refuse(self, line: int, error: MarqError) -> None:
        """Say that a message was not sent."""
        self.refused += 1
        if self.refused <= NAMED:
            say(f"{f'line {line}' if line else 'a message'} was refused: {error}")
        elif self.refused == NAMED + 1:
            say("further lines that are refused are only counted")

    def end(self) -> int:
        """The exit status, after a line that says what was done."""
        if self.lines:
            say(self.summary)
        return 1 if self.refused else 0

    @property
    def summary(self) -> str:
        """What was done."""
        seconds = max(time.monotonic() - self._began_s, 0.001)
        said = f"{number(self.sent)} sent to {self.name!r} in {seconds:.1f} s ({rate(self.sent / seconds)})"
        return said + (f", {number(self.refused)} refused" if self.refused else "")


# ---------------------------------------------------------------------- standard input


class _Chunk(NamedTuple):
    data: bytes
    error: OSError | None = None


def _send_lines(sender: _Sender, stream: IO[bytes]) -> None:
    sender.lines = True
    total = _length_of(stream)
    try:
        with _bar(total) as (progress, task):
            for batch, read in _batches(sender, stream):
                if batch:
                    sender.send(batch)
                if progress is not None:
                    progress.update(task, completed=read, sent=sender.sent)
    except KeyboardInterrupt:
        say(f"stopped: {sender.summary}")
        raise


def _batches(sender: _Sender, stream: IO[bytes]) -> Iterator[tuple[list[tuple[int, bytes]], int]]:
    """Lines as soon as they are there, in batches that fit into a request, each with how many bytes were read."""
    lines = _Lines(sender)
    batch: list[tuple[int, bytes]] = []
    held = read = 0
    for chunk in _chunks(stream):
        if chunk is None:  # nothing more is there at the moment
            yield batch, read
            batch, held = [], 0
            continue
        read += len(chunk)
        for line in lines.split(chunk):
            if len(batch) >= CLIENT_BATCH_MAX or (batch and held + len(line[1]) > CLIENT_BATCH_BYTES):
                yield batch, read
                batch, held = [], 0
            batch.append(line)
            held += len(line[1])
    batch += lines.last()
    yield batch, read


def _chunks(stream: IO[bytes]) -> Iterator[bytes | None]:
    """What comes in, read by a thread of its own; None when nothing has come yet."""
    coming: queues.Queue[_Chunk] = queues.Queue(CHUNKS)

    def read() -> None:
        with contextlib.suppress(ValueError):  # closed at the end of the process
            while True:
                try:
                    chunk = _Chunk(os.read(stream.fileno(), CHUNK_BYTES))
                except OSError as error:
                    chunk = _Chunk(b"", error)
                coming.put(chunk)
                if not chunk.data:
                    return

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            chunk = coming.get_nowait()
        except queues.Empty:
            yield None
            chunk = coming.get()
        if chunk.error is not None:
            raise BadValueError(f"standard input can't be read: {chunk.error.strerror}")
        if not chunk.data:
            return
        yield chunk.data


class _Lines:
    """Lines out of chunks. A line that is longer than a message may be is refused, and not kept in memory."""

    def __init__(self, sender: _Sender) -> None:
        self._sender = sender
        self._number = 0
        self._parts: list[bytes] = []
        self._length = 0

    def split(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """The lines that end in a chunk, with their numbers."""
        first, *rest = chunk.split(b"\n")
        self._add(first)
        for part in rest:
            yield from self._line()
            self._add(part)

    def last(self) -> Iterator[tuple[int, bytes]]:
        """A last line without an end."""
        if self._length:
            yield from self._line()

    def _add(self, part: bytes) -> None:
        self._length += len(part)
        if self._length <= MESSAGE_MAX_BYTES:
            self._parts.append(part)
        else:
            self._parts.clear()

    def _line(self) -> Iterator[tuple[int, bytes]]:
        self._number += 1
        if self._length > MESSAGE_MAX_BYTES:
            self._sender.refuse(
                self._number, TooLargeError(f"{number(self._length)} bytes; at most {number(MESSAGE_MAX_BYTES)}")
            )
        else:
            yield self._number, b"".join(self._parts).removesuffix(b"\r")
        self._parts.clear()
        self._length = 0


def _length_of(stream: IO[bytes]) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(stream.fileno())
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    return None


@contextlib.contextmanager
def _bar(total: int | None) -> Iterator[tuple[Progress | None, TaskID]]:
    """A progress bar where a user looks."""
    if not sys.stderr.isatty():
        yield None, TaskID(0)
        return
    columns: list[Any] = [TextColumn("{task.fields[sent]:,} sent"), BarColumn(), DownloadColumn(), TimeElapsedColumn()]
    if total is not None:
        columns.append(TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress, progress.add_task("", total=total, sent=0)
