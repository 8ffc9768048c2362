"""Limits for each key, so that the requests of one key leave room for those of others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from app.service.receives import WAITING_MAX
from marq.errors import UnavailableError

#: Requests of one key in progress at a worker, not counting receives that wait.
REQUESTS_MAX = 1_000
#: Receives of one key that wait at a worker.
KEY_WAITING_MAX = WAITING_MAX // 2
#: Queues that one key may make in a minute at a worker, all of them at once if it likes.
QUEUES_A_MINUTE = 600


class _AllUnproven:
    """The memory of all requests whose signature is not checked yet, because that needs the whole body."""

    room_parts = 2
    within = None


ALL_UNPROVEN = _AllUnproven()


class Unproven(str):
    """An address, for what its requests have of that memory: to know the ids of many keys gives no more.

    A `str`, because it is made and hashed for each request.
    """

    __slots__ = ()
    room_parts = _AllUnproven.room_parts
    within = ALL_UNPROVEN


class Share:
    """What the requests of one key take of this worker."""

    room_parts = 2
    within = None
    __slots__ = ("_clock", "_made", "_made_s", "requests", "waiting")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.requests = 0  # in progress, without receives that wait
        self.waiting = 0  # receives that wait
        self._made = 0.0  # queues that were made lately; the number falls with time
        self._made_s = 0.0

    def begin(self) -> None:
        """Count a request; call `end` when it has ended. Raises `UnavailableError` if there are too many."""
        if self.requests >= REQUESTS_MAX:
            raise UnavailableError(f"this key has {REQUESTS_MAX} requests under way here; try again later", 1.0)
        self.requests += 1

    def end(self) -> None:
        """Note that a request has ended."""
        self.requests -= 1

    @contextlib.contextmanager
    def wait(self, wait_ms: int) -> Iterator[None]:
        """Context of a receive that may wait. Raises `UnavailableError` if too many of the key wait."""
        if not wait_ms:
            yield
            return
        if self.waiting >= KEY_WAITING_MAX:
            raise UnavailableError(f"{KEY_WAITING_MAX} receives of this key wait here already; try again later", 1.0)
        self.waiting += 1
        self.requests -= 1
        try:
            yield
        finally:
            self.waiting -= 1
            self.requests += 1

    def make_queue(self) -> None:
        """Count a queue that is about to be made. Raises `UnavailableError` if the key makes too many."""
        now, each_s = self._clock(), 60 / QUEUES_A_MINUTE
        self._made = max(0.0, self._made - (now - self._made_s) / each_s)
        self._made_s = now
        if self._made + 1 > QUEUES_A_MINUTE:
            raise UnavailableError(
                f"this key has made {QUEUES_A_MINUTE} queues in a minute; try again later", max(1.0, each_s)
            )
        self._made += 1
