"""Functions that a worker calls with messages.

    from marq.handlers import handler

    @handler("orders", concurrency=8)
    async def on_order(message):
        await ship(message.json())

    @handler("clicks.*", batch=500)
    def on_clicks(messages):
        store(m.payload for m in messages)

A worker finds them in the modules that ``MARQ_HANDLERS`` names. A handler that returns acknowledges its messages. If it
raises anything, ``sys.exit`` included, the attempt has failed: the error is logged with its traceback, the breaker
counts it, and the messages are given back, after a growing delay. While it runs, its lease is extended. With
``manual=True`` it acknowledges by ``message.ack()``, and what it leaves is delivered again when the lease is over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from marq.core.policies import DEAD_SUFFIX, HANDLER_MAX_RECEIVES, LEASE_MAX_MS, check_delay
from marq.errors import HandlerError

#: Messages in a call of a handler, and calls at a time, at most.
BATCH_MAX = 10_000
CONCURRENCY_MAX = 10_000
#: Shortest lease of a handler, which is extended while it runs.
HANDLER_LEASE_MIN_MS = 1_000

Function = TypeVar("Function", bound=Callable[..., Any])


class Retry(Exception):
    """Raise it in a handler to give the message back for `delay_ms` milliseconds, at most a year (None: back-off)."""

    def __init__(self, delay_ms: int | None = None) -> None:
        if delay_ms is not None:
            check_delay(delay_ms)
        super().__init__(delay_ms)
        self.delay_ms = delay_ms


@dataclass(frozen=True)
class Handler:
    """A function, and the messages that it is called with.

    Args:
        function: called with a message or, if `batch` is not 0, with a list of messages.
        queues: names and patterns of the queues.
        batch: 0: one message a call. Above: a list of at most so many, from all queues that match.
        concurrency: calls at the same time, per worker.
        visibility_timeout_ms: lease, which is extended while a call runs. None: the queue's.
        max_receives: used for queues that set none.
        backoff_ms: delay after the first failure, which then doubles. None: the queue's, or the worker's setting.
        backoff_max_ms: longest delay after a failure. None: the queue's, or the worker's setting.
        manual: messages are acknowledged one by one, by `message.ack()`.
        breaker_failures: failed calls in a row that open the circuit breaker (0: never).
        breaker_pause_ms: time without calls after the breaker opened. Then one call is made; if it succeeds, the
            breaker closes.
    """

    function: Callable[..., Any]
    queues: tuple[str, ...]
    batch: int = 0
    concurrency: int = 1
    visibility_timeout_ms: int | None = None
    max_receives: int = HANDLER_MAX_RECEIVES
    backoff_ms: int | None = None
    backoff_max_ms: int | None = None
    manual: bool = False
    breaker_failures: int = 0
    breaker_pause_ms: int = 30_000

    @property
    def name(self) -> str:
        """Module and name of the function."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def names(self) -> tuple[str, ...] | None:
        """The queues, if these are names alone; None if there is a pattern."""
        return None if any(sign in queue for queue in self.queues for sign in "*?[") else self.queues

    @property
    def is_async(self) -> bool:
        """True for a coroutine function. Other functions run in threads."""
        return inspect.iscoroutinefunction(self.function)

    def matches(self, queue: str) -> bool:
        """True if messages of `queue` go to this handler.

        A pattern matches dead-letter queues only if it ends in `.dead` itself. Otherwise `*` would get the messages
        that it failed on.
        """
        return does_match(self.queues, queue)


def does_match(patterns: Iterable[str], queue: str) -> bool:
    """True if messages of `queue` go to a handler of these names and patterns; see `Handler.matches`."""
    dead = queue.endswith(DEAD_SUFFIX)
    return any(fnmatchcase(queue, p) and (not dead or p.endswith(DEAD_SUFFIX)) for p in patterns)


_registered: list[Handler] = []


def handler(
    *queues: str,
    batch: int = 0,
    concurrency: int = 1,
    visibility_timeout_ms: int | None = None,
    max_receives: int = HANDLER_MAX_RECEIVES,
    backoff_ms: int | None = None,
    backoff_max_ms: int | None = None,
    manual: bool = False,
    breaker_failures: int = 0,
    breaker_pause_ms: int = 30_000,
) -> Callable[[Function], Function]:
    """Register a function as the handler of queues.

    Args:
        queues: names, or patterns with `*` and `?`.

    See `Handler` for the other arguments.

    Raises:
        HandlerError: an option makes no sense.
    """
    if not queues or not all(queues):
        raise HandlerError("a handler needs the name of a queue: @handler('orders')")
    if not 0 <= batch <= BATCH_MAX:
        raise HandlerError(f"batch={batch} of the handler of {queues[0]!r} must be 0 (single messages) to {BATCH_MAX}")
    if not 1 <= concurrency <= CONCURRENCY_MAX:
        raise HandlerError(f"concurrency={concurrency} of the handler of {queues[0]!r} must be 1 to {CONCURRENCY_MAX}")
    if visibility_timeout_ms is not None and not HANDLER_LEASE_MIN_MS <= visibility_timeout_ms <= LEASE_MAX_MS:
        raise HandlerError(
            f"visibility_timeout_ms={visibility_timeout_ms} must be {HANDLER_LEASE_MIN_MS} to {LEASE_MAX_MS} (a week); "
            "it is extended while the handler runs"
        )
    if max_receives < 1:
        raise HandlerError(f"max_receives={max_receives} must be at least 1")
    if breaker_failures < 0 or breaker_pause_ms < 100:
        raise HandlerError("breaker_failures must be at least 0, breaker_pause_ms at least 100")

    def register(function: Function) -> Function:
        _registered.append(
            Handler(
                function=function,
                queues=queues,
                batch=batch,
                concurrency=concurrency,
                visibility_timeout_ms=visibility_timeout_ms,
                max_receives=max_receives,
                backoff_ms=backoff_ms,
                backoff_max_ms=backoff_max_ms,
                manual=manual,
                breaker_failures=breaker_failures,
                breaker_pause_ms=breaker_pause_ms,
            )
        )
        return function

    return register


def registered() -> tuple[Handler, ...]:
    """All handlers registered in this process, in order. The first one that matches a queue gets its messages."""
    return tuple(_registered)


def clear() -> None:
    """Unregister all handlers (for tests)."""
    _registered.clear()
