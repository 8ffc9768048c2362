"""Stops the worker at an error of our own in a callback or a task: asyncio only logs it. And goes on where a handler's
task or callback wants to end the process."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any

import uvloop
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from marq.errors import InternalError, MarqError

log = logging.getLogger(__name__)

Fail = Callable[[BaseException], None]
Context = dict[str, Any]

#: Packages whose callbacks change the worker's state, which may be wrong after an error in one of them.
OURS = ("app", "agents", "gateway", "tables", "marq")


class Loop(uvloop.Loop):
    """An event loop that goes on after `sys.exit` in a task or a callback. Only the worker ends itself."""

    def run_until_complete(self, future: Any) -> Any:
        """Run until the future is done."""
        future = asyncio.ensure_future(future, loop=self)
        while True:
            try:
                return super().run_until_complete(future)
            except (SystemExit, KeyboardInterrupt) as exc:
                is_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler
                if future.done() or (is_ctrl_c and isinstance(exc, KeyboardInterrupt)):
                    raise
                # the task has ended with it: a call that awaits the task fails
                log.error("%r in a task or callback of a handler does not end the worker", exc, exc_info=exc)


class LoopPolicy(uvloop.EventLoopPolicy):  # type: ignore[misc]
    """Makes these loops."""

    def _loop_factory(self) -> Loop:
        return Loop()


def stop_on_faults(loop: asyncio.AbstractEventLoop, fail: Fail) -> None:
    """Call `fail` with each error of a callback of ours, and of a task of ours whose result nobody took."""
    before = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: Context) -> None:
        exc = context.get("exception")
        # the error of a task may be an answer that nobody waits for any more
        expected = "future" in context and is_expected(exc)
        if isinstance(exc, Exception) and not expected and _is_ours(exc.__traceback__):
            fail(_fault(context.get("message") or "a callback failed", exc))
        if before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def stop_if_it_fails(task: asyncio.Task[Any], fail: Fail) -> None:
    """Call `fail` with the error of `task` as soon as it ends with one."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and isinstance(exc := task.exception(), Exception):
            fail(_fault(f"{task.get_name()} ended", exc))

    task.add_done_callback(ended)


def stop_if_reading_ends(consumer: Any, fail: Fail) -> None:
    """Call `fail` with the error of a task in which aiokafka fetches, or asks for leaders.

    Without the first a consumer reads nothing. Without the second it looks for leaders for ever. aiokafka reports
    neither.
    """

    def ended(task: asyncio.Future[Any]) -> None:
        if not task.cancelled() and isinstance(exc := task.exception(), Exception):
            fail(_fault("the task that reads from Kafka ended", exc.__cause__ or exc))

    consumer._fetcher.error_future.add_done_callback(ended)
    consumer._client._sync_task.add_done_callback(ended)


def has_ended(producer: AIOKafkaProducer) -> bool:
    """True if the task in which aiokafka sends has ended: the producer would refuse everything from now on."""
    return bool(producer._sender.sender_task.done())


def is_expected(exc: BaseException | None) -> bool:
    """True for an error that Kafka, the network or a request explains."""
    return isinstance(exc, MarqError | KafkaError | OSError) and not isinstance(exc, InternalError)


def _fault(what: str, exc: BaseException) -> InternalError:
    fault = InternalError(f"{what}: {exc!r}")
    fault.__cause__ = exc
    return fault


def _is_ours(trace: TracebackType | None) -> bool:
    """True if asyncio called code of ours, not of a library or a handler."""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package not in ("asyncio", "uvloop", "contextvars"):
            return package in OURS and not module.startswith("marq.client")
        trace = trace.tb_next
    return False
