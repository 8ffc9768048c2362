"""A receive in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.engine.owned_partition import OwnedPartition
from marq.core.starts import Pending
from marq.protocol.messages import Received


class Waiter:
    """A receive in progress."""

    __slots__ = (
        "away",
        "done",
        "future",
        "gone",
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
        self,
        queue: str,
        limit: int,
        lease_ms: int,
        name: str,
        gone: Callable[[], bool],
        future: asyncio.Future[None],
        whole: bool,
    ) -> None:
        self.queue = queue
        self.limit = limit
        self.lease_ms = lease_ms
        self.name = name
        self.gone = gone
        self.whole = whole  # it gets marq's own headers too
        self.future = future  # done when there is something to answer
        self.messages: list[Received] = []
        self.size_bytes = 0
        self.until: list[tuple[int, int]] = []  # in order: until when (`now_ms`) how many of them may leave
        self.pending: list[tuple[OwnedPartition, Pending]] = []  # starts on their way
        self.away = False  # another worker is being asked for it
        self.over = False  # its time is over: it waits only for starts on their way
        self.done = False  # answered or given up: messages that still come are released
