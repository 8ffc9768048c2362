"""A receive in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from app.engine.owned_partition import OwnedPartition
from marq.core.starts import Pending
from marq.core.state import HEADER_OVERHEAD_BYTES
from marq.protocol.messages import Received


class Waiter:
    """A receive in progress."""

    __slots__ = (
        "_woken",
        "away",
        "came_s",
        "done",
        "enough",
        "fifo",
        "gone",
        "has_looked",
        "is_full",
        "is_hastened",
        "is_looking",
        "is_remote",
        "lease_ms",
        "limit",
        "messages",
        "name",
        "over",
        "pending",
        "queue",
        "size_bytes",
        "until",
        "whole",
    )

    def __init__(
        self, queue: str, limit: int, lease_ms: int, name: str, gone: Callable[[], bool], whole: bool, fifo: bool
    ) -> None:
        self.queue = queue
        self.limit = limit
        self.lease_ms = lease_ms
        self.name = name
        self.gone = gone
        self.whole = whole  # it gets marq's own headers too
        self.fifo = fifo
        self.messages: list[Received] = []
        self.size_bytes = 0  # of them, and of what the receiver has from elsewhere
        self.until: list[tuple[int, int]] = []  # in order: until when (`now_ms`) how many of them may leave
        self.pending: list[tuple[OwnedPartition, Pending]] = []  # starts on their way
        self.is_full = False  # a message did not fit
        self.came_s = 0.0  # by the clock of the loop
        self.has_looked = False  # it has looked for all that was confirmed before it came …
        self.is_looking = False  # … or does so now
        self.is_remote = False  # another worker asks for it
        self.away = False  # another worker is being asked for it, as it was the first in line
        self.over = False  # its time is over: it waits only for starts on their way …
        self.enough = False  # … and not for them either
        self.is_hastened = False  # `enough` will be set soon
        self.done = False  # answered or given up: messages that still come are released
        self._woken = asyncio.Event()

    @property
    def room(self) -> int:
        """How many messages it wants beyond those that are there or on their way."""
        if self.is_full:
            return 0
        return self.limit - len(self.messages) - sum(len(pending.offsets) for _, pending in self.pending)

    @property
    def has_some(self) -> bool:
        """True if it has messages, or some are on their way."""
        return bool(self.messages or self.pending)

    def add(self, messages: Sequence[Received], until_ms: int, most_bytes: int) -> int:
        """Add what another worker has handed out, as far as it fits. Returns how many that are."""
        size, room = self.size_bytes, 0 if self.done else self.room
        for count, message in enumerate(messages):
            size += _size_of(message)
            if count >= room or (size > most_bytes and (self.messages or count)):
                break
            self.size_bytes = size
        else:
            count = len(messages)
        if count:
            self.messages += messages[:count]
            self.until.append((until_ms, count))
        return count

    async def sleep(self) -> None:
        """Wait until something happens to it."""
        await self._woken.wait()
        self._woken.clear()

    def wake(self) -> None:
        """Something has happened to it."""
        self._woken.set()


def _size_of(message: Received) -> int:
    size = len(message.payload) + len(message.key or b"")
    return size + sum(HEADER_OVERHEAD_BYTES + len(name) + len(value) for name, value in message.headers.items())
