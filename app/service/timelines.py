"""The history of one message, read from the two logs: sent, each delivery, extensions, its end.

Each request reads the logs again, from the moment at which the message was sent, as far as the limits allow.
"""

from __future__ import annotations

import asyncio
import base64
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from app.engine.ownership import Ownership
from app.kafka.connection import end_client, kafka_client_args
from app.service.message_views import own_key
from app.settings import Settings
from marq.core.history import Delivery, Envelope, Histories
from marq.core.markers import Batch, End, Keepalive, Marker, Own, Purge, Release, Start, decode
from marq.core.partition import Partition
from marq.errors import MarqError, NotFoundError, UnavailableError
from marq.text import reason_of

#: Seconds, and records of the markers log, that are read for one answer.
READ_S = 4.0
RECORDS_MAX = 50_000
#: Histories that a worker reads at the same time, one of each key.
AT_ONCE = 2
#: Milliseconds that the markers log may be ahead of the queue log: their brokers' clocks differ.
CLOCKS_DIFFER_MS = 60_000
#: Bytes of a payload, and events, in the answer.
SHOWN_BYTES = 64 * 1024
EVENTS_MAX = 500


class Happened(msgspec.Struct):
    """A marker that took effect on the message. Milliseconds."""

    kind: str  # start, extended, released, uncounted, or the outcome: acked, dead, …
    at_ms: int
    offset: int  # of the record in the markers log
    worker: str  # that owned the partition
    receiver: str
    span_ms: int  # lease of a start or an extension, delay of a release
    marker: str  # as it is in the log


class DeliveryTold(msgspec.Struct):
    """One delivery. `end` is None while it lasts."""

    attempt: int
    worker: str
    receiver: str
    start_ms: int
    deadline_ms: int
    extensions: int
    end_ms: int | None
    end: str | None


class Timeline(msgspec.Struct):
    """The history of a message. `complete`: the markers log was read to its end, or to the end of the message."""

    topic: str
    partition: int
    offset: int
    queue: str
    sent_ms: int
    size_bytes: int
    payload: str
    headers: list[tuple[str, str]]
    events: list[Happened]
    deliveries: list[DeliveryTold]
    outcome: str | None
    ended_ms: int | None
    complete: bool
    read_until_ms: int
    origin: str | None = None  # header: of which message it is a copy
    key: str | None = None


class Timelines:
    """Reads logs."""

    def __init__(self, ownership: Ownership, settings: Settings) -> None:
        self._ownership = ownership
        self._settings = settings
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._turns_of: defaultdict[object, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(
        self, number: int, offset: int, *, by: object, gone: Callable[[], bool], check: Callable[[str], None]
    ) -> Timeline:
        """The history of a message.

        Args:
            by: the key that asks. Its requests are answered one by one, so that those of others get their turns.
            gone: tells whether the client has gone. Then nothing more is read.
            check: called with the queue before the markers log is read; raises `NotAllowedError`.

        Raises:
            ConnectionAbortedError: the client has gone.
            NotFoundError: there is no such message any more.
            UnavailableError: Kafka does not answer.
        """
        topics = self._ownership.topics
        if not 0 <= number < topics.partitions:
            raise NotFoundError(f"there are partitions 0 to {topics.partitions - 1}, not {number}")
        async with self._turns_of[by], self._turns:
            _require_client(gone)
            consumer = AIOKafkaConsumer(
                enable_auto_commit=False, auto_offset_reset="earliest", **kafka_client_args(self._settings)
            )
            try:
                async with asyncio.timeout(3 * READ_S):
                    await consumer.start()
                    return await self._read(consumer, number, offset, gone, check)
            except (KafkaError, TimeoutError) as exc:
                raise UnavailableError(f"the logs can't be read right now: {reason_of(exc)}") from exc
            finally:
                await end_client(consumer.stop())

    async def _read(
        self,
        consumer: AIOKafkaConsumer,
        number: int,
        offset: int,
        gone: Callable[[], bool],
        check: Callable[[str], None],
    ) -> Timeline:
        queue_tp = TopicPartition(self._ownership.topics.queue, number)
        markers_tp = TopicPartition(self._ownership.topics.markers, number)
        record = await _record_at(consumer, queue_tp, offset, gone)
        reader = _Reader(number, self._settings.queue_id, record)
        check(reader.queue)
        (start,) = (
            await consumer.offsets_for_times({markers_tp: max(0, record.timestamp - CLOCKS_DIFFER_MS)})
        ).values()
        complete = True
        if start is not None:
            complete = False
            async for one in _records(consumer, markers_tp, start.offset, gone):
                if one is None:
                    complete = True
                    break
                reader.fold(one)
                if reader.outcome is not None:
                    complete = True
                    break
        return reader.timeline(queue_tp.topic, complete)


def _require_client(gone: Callable[[], bool]) -> None:
    if gone():
        raise ConnectionAbortedError("the client of a history has gone")


async def _record_at(consumer: AIOKafkaConsumer, tp: TopicPartition, offset: int, gone: Callable[[], bool]) -> Any:
    """The record at an offset. Raises `NotFoundError`."""
    first = (await consumer.beginning_offsets([tp]))[tp]
    end = (await consumer.end_offsets([tp]))[tp]
    if offset < first:
        raise NotFoundError(f"Kafka has deleted the record: the log of partition {tp.partition} begins at {first}")
    if offset < end:
        async for record in _records(consumer, tp, offset, gone, offset + 1):
            if record is not None and record.offset == offset:
                return record
            break
    raise NotFoundError(f"there is no message at offset {offset} of partition {tp.partition}")


async def _records(
    consumer: AIOKafkaConsumer, tp: TopicPartition, start: int, gone: Callable[[], bool], stop: int | None = None
) -> AsyncIterator[Any]:
    """Records from an offset on; None at the end of the log. Ends early when the limits are reached.

    Raises `ConnectionAbortedError` when the client has gone.
    """
    if stop is None:
        stop = (await consumer.end_offsets([tp]))[tp]
    consumer.assign([tp])
    consumer.seek(tp, start)
    deadline, count = time.monotonic() + READ_S, 0
    while (position := await consumer.position(tp)) < stop:
        _require_client(gone)
        if time.monotonic() > deadline or count > RECORDS_MAX:
            return
        for batch in (await consumer.getmany(tp, timeout_ms=300, max_records=1_000)).values():
            for record in batch:
                count += 1
                yield record
        await asyncio.sleep(0)
        if await consumer.position(tp) == position:
            await asyncio.sleep(0.01)
    yield None


class _Reader:
    """Folds the history of one message, and nothing else."""

    def __init__(self, number: int, queue_id: str | None, record: Any) -> None:
        self.record = record
        self.events: list[Happened] = []
        self.outcome: str | None = None
        self.ended_ms: int | None = None
        self.read_until_ms = record.timestamp
        self._partition = Partition(number, queue_id=queue_id)
        self._histories = Histories(queue_id=queue_id)
        value = record.value or b""
        envelope = Envelope(record.offset, record.timestamp, record.key, None, record.headers, len(value))
        self._partition.start_at(record.offset, 0)
        self._partition.ingest(record.offset, record.offset + 1, [envelope])
        self._histories.read([envelope], self._partition)
        self.queue = self._histories.queue_of(envelope) or ""

    def fold(self, record: Any) -> None:
        """Fold a record of the markers log. A record that can't be read had no effect, and is skipped."""
        self.read_until_ms = max(self.read_until_ms, record.timestamp)
        try:
            batch: Batch = decode(record.value)
        except MarqError:
            return
        markers = [marker for marker in batch.markers if self._concerns(marker)]
        for marker in markers:
            if isinstance(marker, Start | End | Release | Keepalive) and self._partition.own < 0:
                # the marker of its owner was written before the message was sent
                self._partition.own = marker.epoch
        effects = self._partition.fold(record.offset, record.timestamp, markers)
        self._histories.folded(record.offset, record.timestamp, markers, effects)
        for marker, effect in zip(markers, effects, strict=True):
            if effect:
                self._note(marker, record)
        for ended in self._histories.ended:
            self.outcome, self.ended_ms = ended.outcome, ended.ended_ms

    def _concerns(self, marker: Marker) -> bool:
        if isinstance(marker, Own):
            return True
        if isinstance(marker, Purge):
            return marker.queue == self.queue and self.record.offset < marker.before
        return isinstance(marker, Start | Keepalive | Release | End) and _is_in(self.record.offset, marker.offsets)

    def _note(self, marker: Marker, record: Any) -> None:
        if len(self.events) >= EVENTS_MAX:
            return
        kind, span_ms, receiver = "purged", 0, ""
        if isinstance(marker, Start):
            kind, span_ms, receiver = "start", marker.redeliver_after_ms, marker.receiver
        elif isinstance(marker, Keepalive):
            kind, span_ms = "extended", marker.redeliver_after_ms
        elif isinstance(marker, Release):
            kind, span_ms = ("released" if marker.counted else "uncounted"), marker.delay_ms
        elif isinstance(marker, End):
            kind = marker.outcome
        worker = self._histories.owners.get(self._partition.own, "")
        text = msgspec.json.encode(_around(marker, self.record.offset)).decode()
        self.events.append(Happened(kind, record.timestamp, record.offset, worker, receiver, span_ms, text))

    def timeline(self, topic: str, complete: bool) -> Timeline:
        """The result."""
        record = self.record
        found: list[Delivery] = []
        if self._histories.ended:
            found = self._histories.ended[0].history.deliveries
        else:
            for one in self._histories.unfinished(self._partition):
                found = one.history.deliveries
        payload, key = record.value or b"", own_key(record, self._partition.queue_id)
        headers = [(name, (value or b"").decode(errors="backslashreplace")) for name, value in record.headers]
        return Timeline(
            topic=topic,
            partition=record.partition,
            offset=record.offset,
            queue=self.queue,
            sent_ms=record.timestamp,
            size_bytes=len(payload),
            payload=base64.b64encode(payload[:SHOWN_BYTES]).decode(),
            headers=headers,
            events=self.events,
            deliveries=[
                DeliveryTold(
                    attempt=d.attempt,
                    worker=d.owner,
                    receiver=d.receiver,
                    start_ms=d.start_ms,
                    deadline_ms=d.deadline_ms,
                    extensions=d.extensions,
                    end_ms=d.end_ms,
                    end=d.end,
                )
                for d in found
            ],
            outcome=self.outcome,
            ended_ms=self.ended_ms,
            complete=complete,
            read_until_ms=self.read_until_ms,
            origin=next((value for name, value in headers if name == "marq-origin"), None),
            key=None if key is None else key.decode(errors="backslashreplace"),
        )


def _is_in(offset: int, ranges: Sequence[int]) -> bool:
    return bisect_right(ranges, offset) % 2 == 1


def _around(marker: Marker, offset: int) -> Any:
    """The marker, without the other messages of its batch: they may be thousands of ranges."""
    if isinstance(marker, Start | Keepalive | Release | End) and len(marker.offsets) > 2:
        return msgspec.structs.replace(marker, offsets=[offset, offset + 1])
    return marker
