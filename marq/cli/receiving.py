"""`marq receive`, and what becomes of what was received: ack, extend, release, reject."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import click

from marq.cli.console import out, out_json, say, text_of
from marq.cli.group import QUEUE, command, flush
from marq.cli.service import Connected
from marq.cli.values import DELAY, DURATION, LEASE, Place, duration, number
from marq.client import Consumer, Message
from marq.client import operations as actions
from marq.client.operations import Action
from marq.errors import BadValueError, MarqError, NotAllowedError
from marq.protocol.limits import RECEIVE_MAX

#: Seconds until a message whose command failed is delivered again.
RETRY_DELAY_S = 5.0
#: Seconds that commands get to end after Ctrl-C.
END_S = 5.0
#: Receipts that are sent at once.
RECEIPTS = 1_000


@command("receive")
@click.argument("queue", type=QUEUE)
@click.option("--max", "limit", type=click.IntRange(1), help="So many messages at most; without --follow, 1.")
@click.option("--wait", type=DURATION, default="0", help="Wait so long for the first one: 20s.")
@click.option("--visibility-timeout", type=LEASE, help="Yours for so long; by default as the queue says.")
@click.option("--follow", is_flag=True, help="Go on until stopped; what is held is kept alive meanwhile.")
@click.option("--ack", is_flag=True, help="Acknowledge each message once it is written out.")
@click.option("--exec", "program", metavar="CMD", help="Run CMD for each, with the payload as its standard input.")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="Commands at a time.")
@click.option("--retry-delay", type=DELAY, default=str(RETRY_DELAY_S), help="Pause after a command that failed: 5s.")
@click.option("--raw", is_flag=True, help="Write payloads only, byte for byte; with --max or --follow, one a line.")
def receive(
    service: Connected,
    queue: str,
    limit: int | None,
    wait: float,
    visibility_timeout: float | None,
    follow: bool,
    ack: bool,
    program: str | None,
    jobs: int,
    retry_delay: float,
    raw: bool,
) -> int:
    """Take messages of QUEUE, and show them with their receipts, which `marq ack` takes.

    With --exec a message is acknowledged if CMD ends with status 0, and given back if not. CMD runs in a shell, and has
    MESSAGE_QUEUE, MESSAGE_PLACE, MESSAGE_ATTEMPT and MESSAGE_SENT_MS in its environment. Without --ack and --exec the
    messages are yours for the visibility timeout; then they are delivered again.

    Exit status 1: no message came, or one was not acknowledged.

    \b
    marq receive orders --follow --exec ./ship.sh
    marq receive orders --max 100 --raw --ack > orders.jsonl
    """
    if raw and service.as_json:
        raise click.UsageError("--raw and --json can't both be had")
    if jobs > 1 and program is None:
        raise click.UsageError("--jobs is for --exec")
    if follow and program is None and not ack:
        raise click.UsageError("--follow needs --ack or --exec CMD; `marq peek` looks without receiving")
    worker = _Receiver(
        service,
        ack=ack,
        program=program,
        raw_end=(b"\n" if follow or limit else b"") if raw else None,
        retry_delay=retry_delay,
        limit=limit or (0 if follow else 1),
    )
    if follow or program is not None:
        timeout = None if follow else wait
        try:
            _consume(worker, service, queue, jobs, visibility_timeout, timeout)
        finally:
            for message in worker.interrupted:
                message.release()
    else:
        _receive_once(worker, service, queue, wait, visibility_timeout)
    if not worker.count and not follow:
        with contextlib.suppress(NotAllowedError):
            service.queue(queue).get()  # a mistyped name is an error here
        say(f"no message in {queue!r}" + (f" within {duration(wait * 1000)}" if wait else ""))
        return 1
    return 1 if worker.failed else 0


class _Receiver:
    """What is done with each message."""

    def __init__(
        self,
        service: Connected,
        *,
        ack: bool,
        program: str | None,
        raw_end: bytes | None,
        retry_delay: float,
        limit: int,
    ) -> None:
        self._service = service
        self.ack = ack
        self._program = program
        self._raw_end = raw_end  # what follows each payload; None: not raw
        self._retry_delay = retry_delay
        self.limit = limit  # 0: none
        self.count = 0
        self.failed = 0
        #: Messages whose commands were interrupted. They are given back when the consumer has closed: one of its own
        #: receives that is still under way would take them again, until the lease ends.
        self.interrupted: list[Message] = []
        self._lock = threading.Lock()

    def admit(self) -> bool:
        """Count one more message; False if there were enough."""
        with self._lock:
            if self.limit and self.count >= self.limit:
                return False
            self.count += 1
            return True

    def take_back(self) -> None:
        """One that was admitted did not come."""
        with self._lock:
            self.count -= 1

    @property
    def runs_a_command(self) -> bool:
        """Whether a command decides what becomes of a message."""
        return self._program is not None

    @property
    def is_full(self) -> bool:
        """True once as many messages as wanted have come."""
        return bool(self.limit) and self.count >= self.limit

    def handle(self, message: Message) -> None:
        """Show a message or run the command for it, and say what became of it."""
        if self._program is None:
            self.show(message)
            if self.ack:
                self._settle(message.ack, message)
            return
        try:
            status = self._run(message)
        except BaseException:
            self.interrupted.append(message)
            raise
        if status == 0:
            self._settle(message.ack, message)
            return
        self.failed += 1
        say(
            f"{Place(message.partition, message.offset)}: the command ended with status {status}; attempt "
            f"{message.attempt} is given back for {duration(self._retry_delay * 1000)}"
        )
        self._settle(lambda: message.release(self._retry_delay), message)

    def show(self, message: Message) -> None:
        """Write a message out."""
        with self._lock:
            self._show(message)
            flush()

    def _settle(self, settle: Callable[[], None], message: Message) -> None:
        error: MarqError | None = None
        try:
            settle()
        except MarqError as exc:
            error = exc
        self.settled(message, error)

    def settled(self, message: Message, error: MarqError | None) -> None:
        """Say why a message was not acknowledged or given back (None: it was)."""
        if error is not None:
            self.failed += 1
            say(f"{Place(message.partition, message.offset)}: {error}")

    def _run(self, message: Message) -> int:
        assert self._program is not None
        environment = os.environ | {
            "MESSAGE_QUEUE": message.queue,
            "MESSAGE_PLACE": str(Place(message.partition, message.offset)),
            "MESSAGE_ATTEMPT": str(message.attempt),
            "MESSAGE_SENT_MS": str(message.sent_ms),
        }
        return subprocess.run(self._program, shell=True, input=message.payload, env=environment, check=False).returncode

    def _show(self, message: Message) -> None:
        if self._service.as_json:
            out_json(as_object(message))
        elif self._raw_end is not None:
            sys.stdout.buffer.write(message.payload + self._raw_end)
        else:
            age = duration(max(0.0, time.time() * 1000 - message.sent_ms))
            group = f", group {message.group}" if message.group else ""
            receipt = "" if self.ack else f", receipt {message.receipt}"
            out(
                f"{Place(message.partition, message.offset)}: attempt {message.attempt}, sent {age} ago{group}{receipt}"
            )
            for name, value in message.headers.items():
                out(f"  {name}: {text_of(value)}")
            out("  " + text_of(message.payload))


def as_object(message: Message) -> dict[str, Any]:
    """A message as JSON: its payload as `text`, or as `payload` in base64 if it is no text."""
    found: dict[str, Any] = {
        "queue": message.queue,
        "partition": message.partition,
        "offset": message.offset,
        "attempt": message.attempt,
        "sent_ms": message.sent_ms,
        "receipt": message.receipt,
        "headers": {name: text_of(value) for name, value in message.headers.items()},
    }
    if message.key is not None:
        found["key"] = text_of(message.key)
    if message.group is not None:
        found["group"] = message.group
    return found | payload_object(message.payload)


def payload_object(payload: bytes) -> dict[str, str]:
    """A payload as `text`, or in base64 as `payload`."""
    try:
        return {"text": payload.decode()}
    except UnicodeDecodeError:
        return {"payload": base64.b64encode(payload).decode()}


def _receive_once(
    worker: _Receiver, service: Connected, queue: str, wait: float, visibility_timeout: float | None
) -> None:
    """Take up to the limit; what could not be shown goes back."""
    taken = service.queue(queue)
    while not worker.is_full:
        limit = min(RECEIVE_MAX, worker.limit - worker.count)
        messages = taken.receive_many(limit, timeout=0 if worker.count else wait, visibility_timeout=visibility_timeout)
        if not messages:
            return
        shown = 0
        try:
            for message in messages:
                worker.show(message)
                shown += 1
        finally:
            worker.count += shown
            if worker.ack and shown:
                for message, error in zip(messages, taken.ack_many(messages[:shown]), strict=False):
                    worker.settled(message, error)
            if shown < len(messages):
                service.settle(actions.UNREAD, [message.receipt for message in messages[shown:]])


def _consume(
    worker: _Receiver,
    service: Connected,
    queue: str,
    jobs: int,
    visibility_timeout: float | None,
    timeout: float | None,
) -> None:
    """Messages one after the other, kept alive while they are held; what is unread at the end goes back."""
    options: dict[str, Any] = {} if visibility_timeout is None else {"visibility_timeout": visibility_timeout}
    if worker.runs_a_command or worker.limit:
        options |= {"prefetch": 0 if worker.limit else jobs, "confirm": True}
    with service.queue(queue).consume(timeout=timeout, **options) as messages:
        if jobs == 1:
            _loop(worker, messages)
            messages.flush()
            return
        failures: list[BaseException] = []

        def run() -> None:
            try:
                _loop(worker, messages)
            except BaseException as error:
                failures.append(error)
                messages.close()

        threads = [threading.Thread(target=run, daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            # their commands got the signal as well
            messages.close()
            for thread in threads:
                thread.join(END_S)
            raise
        if failures:
            raise failures[0]


def _loop(worker: _Receiver, messages: Consumer) -> None:
    while worker.admit():
        message = next(messages, None)
        if message is None:
            worker.take_back()
            return
        worker.handle(message)


# ---------------------------------------------------------------------- what becomes of a delivery


def _settle(service: Connected, action: Action, receipts: tuple[str, ...]) -> int:
    given = [line for one in receipts for line in (_receipts_of_input() if one == "-" else [one])]
    if not given:
        raise BadValueError("no receipt was given; `marq receive` shows them")
    failed = done = 0
    try:
        for start in range(0, len(given), RECEIPTS):
            some = given[start : start + RECEIPTS]
            for receipt, error in zip(some, service.settle(action, some), strict=True):
                failed += error is not None
                done += error is None
                if service.as_json:
                    out_json(
                        {"receipt": receipt, "ok": error is None} | ({} if error is None else {"error": str(error)})
                    )
                elif error is not None:
                    say(str(error))
    finally:
        if done and not service.as_json:
            out(f"{number(done)} {_DONE[action.name]}")
    return 1 if failed else 0


_DONE = {"ack": "acknowledged", "extend": "extended", "release": "given back", "reject": "rejected"}


def _receipts_of_input() -> list[str]:
    return [line.decode(errors="backslashreplace").strip() for line in sys.stdin.buffer if line.strip()]


_receipts = click.argument("receipts", nargs=-1, required=True, metavar="RECEIPT...")


@command("ack")
@_receipts
def ack(service: Connected, receipts: tuple[str, ...]) -> int:
    """Finish messages: they are never delivered again. - stands for standard input, one receipt a line."""
    return _settle(service, actions.ACK, receipts)


@command("extend")
@_receipts
@click.option("--for", "visibility_timeout", type=LEASE, required=True, help="Yours for so long, from now: 10m.")
def extend(service: Connected, receipts: tuple[str, ...], visibility_timeout: float) -> int:
    """Keep messages for longer."""
    return _settle(service, actions.extend(visibility_timeout), receipts)


@command("release")
@_receipts
@click.option("--delay", type=DELAY, help="Delivered again after this time; by default the queue's back-off.")
def release(service: Connected, receipts: tuple[str, ...], delay: float | None) -> int:
    """Give messages back: they are delivered again."""
    action = Action("release", (("counted", True),)) if delay is None else actions.release(delay)
    return _settle(service, action, receipts)


@command("reject")
@_receipts
@click.option("--reason", help="Stands with the dead letter.")
def reject(service: Connected, receipts: tuple[str, ...], reason: str | None) -> int:
    """Turn messages into dead letters: nobody can handle them."""
    return _settle(service, actions.reject(reason), receipts)
