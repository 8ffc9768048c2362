"""Gathers markers into records and appends them: few, large produces under load, none delayed when idle.

A partition has at most `IN_FLIGHT` records on their way; what comes meanwhile goes into the next one. Records of one
partition are written in the order of the calls, which the fold's view of reservations depends on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from marq.core import markers as m
from marq.core.markers import Marker, Own
from marq.errors import BrokerError

if TYPE_CHECKING:
    from aiokafka.structs import RecordMetadata

    from app.producer import IdempotentProducer

#: Records of one partition that are on their way at once.
IN_FLIGHT = 4
#: Seconds until an append that Kafka did not confirm counts as failed (it may still land).
APPEND_TIMEOUT_S = 15.0


_Waiter = tuple[asyncio.Future[int], bool]  # and whether the marker is the last that it waits for


class Writer:
    """Who appends to a partition: names its records, and is told what became of them."""

    __slots__ = ("failed", "nonce", "sent", "took")

    def __init__(
        self,
        nonce: str,
        sent: Callable[[int, list[Marker]], None],
        took: Callable[[int, int, int, list[Marker]], None],
        failed: Callable[[int], None],
    ) -> None:
        self.nonce = nonce
        self.sent = sent  # (seq, markers): on its way
        self.took = took  # (seq, offset, timestamp_ms, markers): in the log
        self.failed = failed  # (seq): nobody knows


#: Writes for receivers of a partition that is not ours.
NOBODY = Writer("", lambda *_: None, lambda *_: None, lambda *_: None)


class Outbox:
    """Markers of one partition on their way to the log."""

    def __init__(self, producer: Callable[[], IdempotentProducer], topic: str, partition: int) -> None:
        self._producer = producer
        self.topic = topic
        self.partition = partition
        self.writer = NOBODY
        self._open: deque[tuple[Marker, _Waiter | None]] = deque()
        self._in_flight = 0
        self._seq = 0
        self._scheduled = False

    def put(self, markers: list[Marker]) -> None:
        """Append `markers`, in one record if they fit."""
        self._open.extend((marker, None) for marker in markers)
        self._schedule()

    def put_confirmed(self, markers: list[Marker]) -> asyncio.Future[int]:
        """As `put`; the future has the offset of the (last) record once all of them are durable.

        It fails with `BrokerError` if Kafka did not confirm: the markers may still take effect.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        last = len(markers) - 1
        self._open.extend((marker, (future, i == last)) for i, marker in enumerate(markers))
        self._schedule()
        return future

    def drop_owners(self) -> None:
        """Forget what was not sent and only the owner of the partition may say: it is somebody else soon.

        A late own marker would take the partition from its next owner. Their waiters get `BrokerError`.
        """
        kept: deque[tuple[Marker, _Waiter | None]] = deque()
        for marker, waiter in self._open:
            if not m.is_owners(marker):
                kept.append((marker, waiter))
            elif waiter is not None and not waiter[0].done():
                waiter[0].set_exception(BrokerError(f"{self.topic}:{self.partition} has gone to another worker"))
        self._open = kept

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing is on its way."""
        return not self._open and not self._in_flight

    def _schedule(self) -> None:
        if not self._scheduled and self._in_flight < IN_FLIGHT:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        while self._open and self._in_flight < IN_FLIGHT:
            markers: list[Marker] = []
            waiters: list[_Waiter] = []
            size = 0
            while self._open:
                marker, waiter = self._open[0]
                size += m.weight(marker)
                if markers and (size > m.RECORD_BYTES or isinstance(marker, Own)):
                    break
                self._open.popleft()
                markers.append(marker)
                if waiter is not None:
                    waiters.append(waiter)
                if isinstance(marker, Own):
                    break
            self._append(markers, waiters)

    def _append(self, markers: list[Marker], waiters: list[_Waiter]) -> None:
        self._seq += 1
        seq, writer = self._seq, self.writer
        writer.sent(seq, markers)
        self._in_flight += 1
        future = self._producer().append(self.topic, self.partition, m.encode(markers, writer.nonce, seq))
        timer = asyncio.get_running_loop().call_later(APPEND_TIMEOUT_S, writer.failed, seq)

        def done(result: asyncio.Future[RecordMetadata]) -> None:
            timer.cancel()
            self._in_flight -= 1
            error = None if result.cancelled() else result.exception()
            if result.cancelled() or error is not None:
                writer.failed(seq)
                reason = str(error) or type(error).__name__
                for waiter, _ in waiters:
                    if not waiter.done():
                        waiter.set_exception(BrokerError(f"{self.topic}:{self.partition} was not confirmed: {reason}"))
            else:
                metadata = result.result()
                for waiter, last in waiters:
                    if last and not waiter.done():
                        waiter.set_result(metadata.offset)
                if metadata.offset < 0 or not metadata.timestamp or metadata.timestamp < 0:
                    writer.failed(seq)
                else:
                    writer.took(seq, metadata.offset, metadata.timestamp, markers)
            if self._open:
                self._schedule()

        future.add_done_callback(done)
