"""Settles the messages that a handler got: acknowledges them, gives them back, or extends their leases."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterable
from functools import partial

from app.engine.ownership import Ownership
from app.service.meters import Meters
from app.settings import Settings
from marq.clock import now_ms
from marq.core.markers import End, Keepalive, Marker, Release
from marq.core.policies import backoff_ms
from marq.core.ranges import ranges_of
from marq.handlers import Handler
from marq.message import Message

#: Settles a message: None acknowledges it, a number gives it back for so many milliseconds.
Settle = Callable[[Message, int | None], None]

#: Part of a lease after which it is extended.
EXTEND_AFTER = 1 / 3


class Delivery:
    """Messages of one start, for one call or several single calls."""

    __slots__ = ("ended_by_others", "extend_at_ms", "lease_ms", "left", "number", "receipt", "until_ms")

    def __init__(self, number: int, receipt: tuple[int, int], lease_ms: int, until_ms: int) -> None:
        self.number = number
        self.receipt = receipt
        self.left: set[int] = set()  # offsets that are neither acknowledged nor given back
        self.lease_ms = lease_ms
        self.until_ms = until_ms  # no call begins later: another receiver may have the message
        self.extend_at_ms = now_ms() + int(lease_ms * EXTEND_AFTER)
        self.ended_by_others = -1  # that of its partition, when its messages were last looked at; -1: it is elsewhere


def _extended(delivery: Delivery, until_ms: int, confirmed: asyncio.Future[int]) -> None:
    # confirmed is not folded: if the lease ended meanwhile, another receiver may have the message
    if not confirmed.cancelled() and confirmed.exception() is None and now_ms() < delivery.until_ms:
        delivery.until_ms = max(delivery.until_ms, until_ms)


class Settlement:
    """The deliveries of one handler, and the markers that end or extend them."""

    def __init__(self, handler: Handler, ownership: Ownership, settings: Settings, meters: Meters) -> None:
        self.live: dict[Delivery, None] = {}
        self._handler = handler
        self._ownership = ownership
        self._settings = settings
        self._meters = meters
        self._acks: dict[Delivery, list[int]] = {}
        self._random = random.Random()

    def begin(self, delivery: Delivery, offsets: Iterable[int]) -> None:
        """Add messages that the handler gets. Their leases are extended until each is settled."""
        delivery.left.update(offsets)
        self.live[delivery] = None

    def settler(self, delivery: Delivery) -> Settle | None:
        """The function that settles a message of a manual handler, from any thread; None for other handlers."""
        if not self._handler.manual:
            return None

        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def settle(message: Message, delay_ms: int | None) -> None:
            if threading.get_ident() != thread:
                loop.call_soon_threadsafe(settle_here, message, delay_ms)
            else:
                settle_here(message, delay_ms)

        def settle_here(message: Message, delay_ms: int | None) -> None:
            if delay_ms is None:
                self.ack(delivery, [message])
            else:
                self.give_back(delivery, [message], delay_ms)

        return settle

    def done(self, delivery: Delivery, messages: list[Message]) -> list[int]:
        """Stop extending the leases of these messages. Returns their offsets."""
        offsets = [message.offset for message in messages]
        delivery.left.difference_update(offsets)
        if not delivery.left:
            self.live.pop(delivery, None)
        return offsets

    def ack(self, delivery: Delivery, messages: list[Message]) -> None:
        """Acknowledge messages, with one marker for all single calls that end in the same turn of the loop."""
        if not self._acks:
            asyncio.get_running_loop().call_soon(self.send_acks)
        self._acks.setdefault(delivery, []).extend(self.done(delivery, messages))

    def send_acks(self) -> None:
        """Write the acknowledgements that `ack` gathered."""
        acks, self._acks = self._acks, {}
        for delivery, offsets in acks.items():
            offsets.sort()
            epoch, number = delivery.receipt
            self._put(delivery, [End(epoch, ranges_of(offsets), "acked", number)])
        self._count("ack", sum(map(len, acks.values())))

    def give_back(self, delivery: Delivery, messages: list[Message], delay_ms: int | None) -> None:
        """Release, counted. Without a delay, back off by attempt: as set by the handler, else queue, else settings."""
        handler, settings = self._handler, self._settings
        queue = self._ownership.catalog.settings_of(messages[0].queue)
        base_ms, max_ms = settings.backoff_ms, settings.backoff_max_ms
        if queue.backoff_ms:
            base_ms, max_ms = queue.backoff_ms, queue.backoff_max_ms or max(max_ms, queue.backoff_ms)
        base_ms = base_ms if handler.backoff_ms is None else handler.backoff_ms
        max_ms = max_ms if handler.backoff_max_ms is None else handler.backoff_max_ms
        self.done(delivery, messages)
        by_attempt: dict[int, list[int]] = {}
        for message in messages:
            by_attempt.setdefault(message.attempt, []).append(message.offset)
        epoch, number = delivery.receipt
        releases: list[Marker] = []
        for attempt, offsets in by_attempt.items():
            delay = backoff_ms(attempt, base_ms, max_ms, self._random) if delay_ms is None else delay_ms
            releases.append(Release(epoch, number, ranges_of(sorted(offsets)), delay))
        self._put(delivery, releases)
        self._count("release", len(messages))

    def give_back_unread(self, calls: list[tuple[Delivery, list[Message]]]) -> None:
        """Release, uncounted, messages for which no call was made."""
        unread: dict[Delivery, list[int]] = {}
        for delivery, messages in calls:
            unread.setdefault(delivery, []).extend(self.done(delivery, messages))
        for delivery, offsets in unread.items():
            epoch, number = delivery.receipt
            self._put(delivery, [Release(epoch, number, ranges_of(sorted(offsets)), 0, counted=False)])
            self._count("release", len(offsets))

    def extend(self) -> None:
        """Extend the leases of waiting and running calls."""
        now = now_ms()
        for delivery in self.live:
            if delivery.left and now >= delivery.extend_at_ms:
                delivery.extend_at_ms = now + int(delivery.lease_ms * EXTEND_AFTER)
                epoch, number = delivery.receipt
                keepalive = Keepalive(epoch, number, ranges_of(sorted(delivery.left)), delivery.lease_ms)
                confirmed = self._ownership.outbox(delivery.number).put_confirmed([keepalive])
                confirmed.add_done_callback(partial(_extended, delivery, now + delivery.lease_ms))
                self._count("extend", len(delivery.left))

    def _count(self, action: str, count: int) -> None:
        self._meters.settle(action, count)

    def _put(self, delivery: Delivery, markers: list[Marker]) -> None:
        self._ownership.outbox(delivery.number).put(markers)
