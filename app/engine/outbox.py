"""Gathers markers into records and appends them: few large records under load, and no delay when idle.

A partition has at most `IN_FLIGHT` records on their way. Markers that come meanwhile go into the next record. Acks,
extensions and releases of receivers go first. All other markers are written in the order of the calls, on which the
owner relies for its reservations.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from marq.core import markers as m
from marq.core.markers import End, Marker, Own, Release
from marq.errors import BrokerError

if TYPE_CHECKING:
    from aiokafka.structs import RecordMetadata

    from app.streaming.producer import IdempotentProducer

log = logging.getLogger(__name__)

#: Records of one partition that are on their way at once.
IN_FLIGHT = 4
#: Seconds until an append that Kafka did not confirm counts as failed (it may still land).
APPEND_TIMEOUT_S = 15.0
#: Seconds before acks and releases that Kafka did not confirm, and that nobody waits for, are appended again.
AGAIN_S = 0.5
#: The type of a timestamp that is not the broker's. Leases must not count by the clocks of workers.
CREATE_TIME = 0
NO_BROKER_TIME = "has message.timestamp.type=CreateTime, must be LogAppendTime"

_Waiter = tuple[asyncio.Future[int], bool]  # and whether the marker is the last that it waits for
_Entry = tuple[Marker, _Waiter | None]


class Writer:
    """The owner that appends to a partition. It numbers its records, and learns whether they are in the log."""

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


#: The writer for partitions of other workers. Only acks, extensions and releases are written there.
NOBODY = Writer("", lambda *_: None, lambda *_: None, lambda *_: None)


class Outbox:
    """Markers of one partition on their way to the log."""

    def __init__(
        self,
        producer: Callable[[], IdempotentProducer],
        topic: str,
        partition: int,
        stamped: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self._producer = producer
        self._stamped = stamped  # told topic, partition and the broker's timestamp of each record
        self.topic = topic
        self.partition = partition
        self.writer = NOBODY
        self._open: deque[_Entry] = deque()  # markers that only the owner writes
        self._first: deque[_Entry] = deque()  # acks, extensions, releases
        self._first_s = 0.0  # since when the first of them waits
        self._again: list[Marker] = []  # acks and releases that were not confirmed
        self._receivers_s: dict[int, float] = {}  # records with such markers on their way -> since when
        self._in_flight = 0
        self._seq = 0
        self._scheduled = False

    def put(self, markers: list[Marker]) -> None:
        """Append `markers`, in one record if they fit. Acks and releases are repeated until Kafka confirms them."""
        for marker in markers:
            self._add((marker, None))
        self._schedule()

    def put_confirmed(self, markers: list[Marker]) -> asyncio.Future[int]:
        """As `put`; the future has the offset of the (last) record once all of them are durable.

        It fails with `BrokerError` if Kafka did not confirm: the markers may still take effect.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        last = len(markers) - 1
        for i, marker in enumerate(markers):
            self._add((marker, (future, i == last)))
        self._schedule()
        return future

    def drop_owners(self) -> None:
        """Drop unsent markers that only the owner of the partition may write: another worker will own it soon.

        A late own marker would take the partition from its next owner. Callers that wait get `BrokerError`.
        """
        for _, waiter in self._open:
            if waiter is not None and not waiter[0].done():
                waiter[0].set_exception(BrokerError(f"{self.topic}:{self.partition} has gone to another worker"))
        self._open.clear()

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing is on its way."""
        return not (self._open or self._first or self._again or self._in_flight)

    @property
    def late_s(self) -> float:
        """Seconds that the oldest ack, extension or release has waited for Kafka to confirm it; 0 if none waits."""
        now = asyncio.get_running_loop().time()
        began = min(self._receivers_s.values(), default=now)
        return now - (min(began, self._first_s) if self._first else began)

    def _add(self, entry: _Entry) -> None:
        if m.is_owners(entry[0]):
            self._open.append(entry)
            return
        if not self._first:
            self._first_s = asyncio.get_running_loop().time()
        self._first.append(entry)

    def _schedule(self) -> None:
        if not self._scheduled and self._in_flight < IN_FLIGHT:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        while (self._first or self._open) and self._in_flight < IN_FLIGHT:
            entries: list[_Entry] = []
            size, receivers_s = 0, self._first_s if self._first else None
            while source := self._first or self._open:
                marker, _ = source[0]
                size += m.weight(marker)
                if entries and (size > m.RECORD_BYTES or isinstance(marker, Own)):
                    break
                entries.append(source.popleft())
                if isinstance(marker, Own):
                    break
            self._append(entries, receivers_s)

    def _append(self, entries: list[_Entry], receivers_s: float | None) -> None:
        markers = [marker for marker, _ in entries]
        waiters = [waiter for _, waiter in entries if waiter is not None]
        self._seq += 1
        seq, writer = self._seq, self.writer
        writer.sent(seq, markers)
        self._in_flight += 1
        if receivers_s is not None:
            self._receivers_s[seq] = receivers_s
        future = self._producer().append(self.topic, self.partition, m.encode(markers, writer.nonce, seq))
        timer = asyncio.get_running_loop().call_later(APPEND_TIMEOUT_S, writer.failed, seq)

        def done(result: asyncio.Future[RecordMetadata]) -> None:
            timer.cancel()
            self._in_flight -= 1
            self._receivers_s.pop(seq, None)
            try:
                if result.cancelled() or result.exception() is not None:
                    self._refused(entries, "cancelled" if result.cancelled() else result.exception())
                    writer.failed(seq)
                    return
                metadata = result.result()
                own_clock = metadata.offset >= 0 and metadata.timestamp_type == CREATE_TIME
                for waiter, last in waiters:
                    if own_clock and not waiter.done():
                        waiter.set_exception(BrokerError(f"{self.topic} {NO_BROKER_TIME}"))
                    elif last and not waiter.done():
                        waiter.set_result(metadata.offset)
                if metadata.offset < 0 or not metadata.timestamp or metadata.timestamp < 0:
                    writer.failed(seq)
                else:
                    self._stamped(self.topic, self.partition, metadata.timestamp)
                    writer.took(seq, metadata.offset, metadata.timestamp, markers)
            finally:
                if self._first or self._open:
                    self._schedule()

        future.add_done_callback(done)

    def _refused(self, entries: list[_Entry], error: BaseException | str | None) -> None:
        """Kafka did not confirm a record. Tell waiting callers; append again acks and releases that nobody waits for.

        If the record is in the log after all, they change nothing the second time.
        """
        reason = str(error) or type(error).__name__
        for _, waiter in entries:
            if waiter is not None and not waiter[0].done():
                waiter[0].set_exception(BrokerError(f"{self.topic}:{self.partition} was not confirmed: {reason}"))
        again = [mk for mk, waiter in entries if waiter is None and type(mk) in (End, Release) and not m.is_owners(mk)]
        if not again:
            return
        if not self._again:
            log.warning("%s:%s: acks were not confirmed, trying again: %s", self.topic, self.partition, reason)
            asyncio.get_running_loop().call_later(AGAIN_S, self._say_again)
        self._again += again

    def _say_again(self) -> None:
        again, self._again = self._again, []
        if not self._first:
            self._first_s = asyncio.get_running_loop().time() - AGAIN_S
        self._first.extendleft((marker, None) for marker in reversed(again))
        self._schedule()
