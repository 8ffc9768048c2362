"""Receives messages ahead of their reader.

    receive ─► unread ─► reader ─► settled
                  └── close: given back, uncounted

A message is held from receive to settled: its lease is extended again and again. It runs in an event loop, beside the
reader. Only `read`, `later` and what they touch (`unread`, `held`, `_later`: each call one atomic step) may be used in
another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from marq.client.operations import ACK, UNREAD, Action, Operations, extend
from marq.client.pace import Ahead
from marq.client.wire import Deliveries, Delivery
from marq.clock import now_s
from marq.errors import (
    BadReceiptError,
    BadValueError,
    ClosedError,
    LeaseOverError,
    MarqError,
    ServiceError,
    UnavailableError,
)
from marq.protocol.limits import CLIENT_BATCH_MAX

logger = logging.getLogger("marq.client")

PREFETCH = 100
"""Most messages received ahead of their reader. There are fewer if it would not get to them soon."""

MAX_IN_FLIGHT = 1_000
"""Most messages held at once: unread, at work, or with an acknowledgement in progress."""

VISIBILITY_TIMEOUT_S = 30.0
"""Seconds of a lease, which is extended again and again: a message is delivered again so long after its reader died."""

KEEP_ALIVES = 3
"""Extensions within one lease, so that one or two may fail."""

CLOSE_TIMEOUT_S = 5.0
"""Most seconds to send the last acknowledgements and give unread messages back."""


class Tracked(Delivery):
    """A delivery that a prefetcher may hold."""

    _owner: Any = None
    _lease_until: float = math.inf  # on our clock, in seconds
    _settled: bool = False


M = TypeVar("M", bound=Tracked)


class Prefetcher(Generic[M]):
    """Reads one queue ahead."""

    def __init__(
        self,
        operations: Operations,
        queue: str,
        decoder: msgspec.msgpack.Decoder[Deliveries[M]],
        owner: Callable[[Prefetcher[M]], Any],
        *,
        prefetch: int = PREFETCH,
        max_in_flight: int = MAX_IN_FLIGHT,
        visibility_timeout: float = VISIBILITY_TIMEOUT_S,
    ) -> None:
        if prefetch < 0 or max_in_flight < 1:
            raise BadValueError(f"prefetch={prefetch} must be 0 or more, max_in_flight={max_in_flight} at least 1")
        if visibility_timeout < 1:
            raise BadValueError(f"visibility_timeout={visibility_timeout} must be at least 1 second: it is extended")
        self.queue = queue
        self.unread: deque[M] = deque()
        self.held: dict[str, M] = {}
        self.closed = False
        self._operations = operations
        self._decoder = decoder
        self.owner = owner(self)
        self._prefetch = prefetch
        self._ahead = Ahead(visibility_timeout, prefetch)
        self._reads = 0
        self._max_in_flight = max_in_flight
        self._lease_s = visibility_timeout
        # acknowledgements are repeated as long as this is open: without them the work would be done twice
        self._settles = operations.settles()
        self._readers = 0  # readers that wait
        self._room = asyncio.Event()
        self._arrived = asyncio.Event()
        self._error: MarqError | None = None
        self._later: deque[M] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._sending_soon = False
        self._unconfirmed = 0  # acknowledgements in progress
        self._failure: MarqError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._fetch()), self._loop.create_task(self._keep_alive())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)
        operations.prefetchers.add(self)

    # ------------------------------------------------------------------ the reader's side, in any thread

    def read(self) -> M | None:
        """The next message, or None if there is none now."""
        now = now_s()
        while True:
            try:
                message = self.unread.popleft()
            except IndexError:
                return None
            self._reads += 1
            if message._lease_until > now:
                return message
            # another receiver may have it by now
            self.held.pop(message.receipt, None)

    def read_many(self, limit: int) -> list[M]:
        """Up to `limit` messages."""
        messages: list[M] = []
        while len(messages) < limit and (message := self.read()) is not None:
            messages.append(message)
        return messages

    @property
    def is_low(self) -> bool:
        """True if more messages should be received: then call `wake` in the event loop."""
        return not self._room.is_set() and self._wanted() > 0

    def later(self, messages: Iterable[M]) -> bool:
        """Acknowledge without waiting. Returns True if `send_later` must be called in the event loop."""
        # in this order: `send_later` lowers the flag before it looks
        self._later.extend(messages)
        if self._sending_soon:
            return False
        self._sending_soon = True
        return True

    # ------------------------------------------------------------------ the reader's side, in the event loop

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for a message. False if none came in `timeout` seconds, or none will. Raises the error of a receive."""
        self._readers += 1
        self.wake()
        try:
            async with asyncio.timeout(timeout):
                while not self.unread and not self.closed and self._error is None:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return False
        finally:
            self._readers -= 1
        if self._error is not None and not self.unread:
            raise self._error
        return bool(self.unread)

    def wake(self) -> None:
        """Called when there may be room again."""
        self._room.set()

    async def settle(self, action: Action, messages: list[M]) -> list[MarqError | None]:
        """Carry out `action`. Returns per message None, or the error."""
        receipts = [m.receipt for m in messages]
        if self.closed:
            return await self._operations.settle(action, receipts)
        began = now_s()
        results = await self._operations.settle(action, receipts, math.inf, self._settles)
        if action.settles:
            self._let_go(messages)
        else:
            lease_s = dict(action.values)["visibility_timeout_ms"] / 1000
            for message, result in zip(messages, results, strict=True):
                if result is None:
                    message._lease_until = began + lease_s
        return results

    def _let_go(self, messages: list[M]) -> None:
        for message in messages:
            self.held.pop(message.receipt, None)
        self.wake()

    def send_later(self) -> None:
        """Send the acknowledgements that `later` gathered."""
        self._sending_soon = False
        if messages := self._drained(self._later):
            task = self._loop.create_task(self._acknowledge(messages))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    @staticmethod
    def _drained(messages: deque[M]) -> list[M]:
        drained = []
        with contextlib.suppress(IndexError):
            while True:
                drained.append(messages.popleft())
        return drained

    async def _acknowledge(self, messages: list[M]) -> None:
        self._unconfirmed += len(messages)
        try:
            results = await self.settle(ACK, messages)
        except Exception as exc:
            # nobody repeats it: let the leases end
            self._let_go(messages)
            error = exc if isinstance(exc, MarqError) else ServiceError(f"not acknowledged: {exc!r}")
            results = [error] * len(messages)
        self._unconfirmed -= len(messages)
        failed = [(m, r) for m, r in zip(messages, results, strict=True) if r is not None]
        if failed:
            self._failure = self._failure or failed[0][1]
            logger.warning("%s acknowledgements failed, the first of %r: %s", len(failed), failed[0][0], failed[0][1])

    async def flush(self) -> None:
        """Wait until all acknowledgements so far are confirmed. Raises the first failure since the last flush."""
        self.send_later()
        while self._sending:
            await asyncio.wait(self._sending)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # ------------------------------------------------------------------ receiving

    def _wanted(self) -> int:
        """How many to receive now. Not a few while there are many: measured, fewer and larger receives are faster."""
        ahead = self._ahead.limit(now_s(), self._reads) if self._prefetch else 0
        missing = ahead + self._readers - len(self.unread)
        if missing < max(1, ahead // 2):
            return 0
        return min(missing, self._max_in_flight - len(self.held), CLIENT_BATCH_MAX)

    async def _fetch(self) -> None:
        try:
            while True:
                limit = self._wanted()
                if limit <= 0:
                    self._room.clear()
                    # a reader in another thread may have made room before it could see that it must wake us
                    if self._wanted() <= 0:
                        await self._room.wait()
                    continue
                messages = await self._operations.receive(
                    self.queue,
                    self._decoder,
                    limit,
                    timeout=None,
                    visibility_timeout=self._lease_s,
                    retry_for=math.inf,
                )
                self._take_in(messages)
        except MarqError as exc:
            self._error = exc
            self._arrived.set()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Report an error in our tasks to the reader: without them no message comes, or leases end unseen."""
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._error = ServiceError(f"reading ahead of {self.queue!r} failed: {exc!r}")
            self._arrived.set()

    def _take_in(self, messages: list[M]) -> None:
        lease_until = now_s() + self._lease_s
        for message in messages:
            message._owner = self.owner
            message._lease_until = lease_until
            self.held[message.receipt] = message
        self.unread.extend(messages)
        self._arrived.set()

    async def _keep_alive(self) -> None:
        pause_s = self._lease_s / KEEP_ALIVES
        action = extend(self._lease_s)
        while True:
            await asyncio.sleep(pause_s)
            held = list(self.held.values())
            for start in range(0, len(held), CLIENT_BATCH_MAX):
                await self._extend(action, held[start : start + CLIENT_BATCH_MAX], pause_s)

    async def _extend(self, action: Action, messages: list[M], retry_for: float) -> None:
        began = now_s()
        try:
            results = await self._operations.post_receipts(action, [m.receipt for m in messages], retry_for)
        except MarqError as exc:
            logger.warning("The leases of %s messages could not be extended: %s", len(messages), exc)
            return
        for message, result in zip(messages, results, strict=True):
            if result is None:
                message._lease_until = began + self._lease_s
            elif isinstance(result, LeaseOverError | BadReceiptError):
                message._lease_until = -math.inf
                if self.held.pop(message.receipt, None) is not None and message not in self.unread:
                    logger.warning("The lease of %r was lost: %s", message, result)

    # ------------------------------------------------------------------ end

    def close_soon(self) -> None:
        """Close without waiting."""
        self._closing = self._loop.create_task(self.close())

    async def close(self) -> None:
        """Send the last acknowledgements and give unread messages back, uncounted. Never raises."""
        if self.closed:
            return
        self.closed = True
        self._operations.prefetchers.discard(self)
        self._arrived.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        unread = [m.receipt for m in self.read_many(self._max_in_flight)]
        later = self._drained(self._later)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(
                    self._operations.settle(UNREAD, unread),
                    *([self._acknowledge(later)] if later else ()),
                    *self._sending,
                )
        except (TimeoutError, UnavailableError, ClosedError) as exc:
            logger.warning(
                "%s unread messages of %r were not given back, and %s acknowledgements not confirmed; they come again "
                "when their leases end: %s",
                len(unread),
                self.queue,
                self._unconfirmed,
                str(exc) or type(exc).__name__,
            )
        except MarqError as exc:
            logger.warning("Closing the reader of %r: %s", self.queue, exc)
        await self._settles.close()
        self.held.clear()
