"""A Kafka: logs with leaders, replicas, latency and time stamps, and the clients that workers have of it.

Simulated below what `app.streaming` and `app.engine` call: the producer's appends, a plain consumer, the admin client.
The group, and the consumer that belongs to it, are in `group`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    TopicAuthorizationFailedError,
    UnknownError,
)
from aiokafka.structs import OffsetAndTimestamp, RecordMetadata
from faust.types import TP

from app.kafka.identity import Identity
from app.streaming.producer import MAX_PENDING_BYTES, RECORD_BYTES, ProducerFull
from marq.core.ranges import RangeSet
from marq.core.reading import Undecodable, Unreadable
from tests.worksim.clock import EPOCH_S, Process, VirtualLoop, current

#: Seconds until the future of an append fails: as `IdempotentProducer.delivery_timeout_s`.
DELIVERY_TIMEOUT_S = 30.0
#: Seconds before a request is repeated that was refused, or not answered.
RETRY_S = 0.1
REQUEST_TIMEOUT_S = 10.0
#: Bytes of a batch of several records, as of aiokafka's producer.
BATCH_BYTES = 16_384
#: Bytes of a batch that some brokers take at most.
MAX_BYTES = 2 * BATCH_BYTES
#: Why it does not take it.
REFUSALS = (UnknownError, TopicAuthorizationFailedError)


class Stored(NamedTuple):
    """A record in a log, with the attributes of aiokafka's `ConsumerRecord` that marq reads."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Log:
    """One partition of a topic."""

    def __init__(self, kafka: Kafka, topic: str, number: int) -> None:
        self.kafka = kafka
        self.topic = topic
        self.number = number
        self.start = 0
        self.end = 0
        self.records: list[Any] = []
        self.offsets: list[int] = []
        self.rotten = RangeSet()  # what no replica has whole at present
        self.clock_ms = 0  # by which its leader's clock is wrong
        self.away_until = 0.0  # it has no leader
        self.stalled_until = 0.0  # too few replicas are in sync
        self.max_bytes = 0  # of a batch; 0: whatever the producer takes
        self.watchers: dict[object, Callable[[], None]] = {}
        self.on_append: Callable[[Any], None] = lambda record: None

    def __repr__(self) -> str:
        return f"{self.topic}:{self.number}"

    def append(self, rows: Iterable[tuple[Any, Any, Any]]) -> tuple[int, int]:
        """Append one batch; its first offset, and its stamp."""
        kafka = self.kafka
        if self.number >= 0 and kafka.chance(kafka.odds.hole):
            self.end += 1  # a control record
        stamp, first = self.stamp(), self.end
        for key, value, headers in rows:
            record = Stored(self.end, stamp, key, value, tuple(headers or ()))
            self._add(record)
        return first, stamp

    def damage(self) -> int:
        """Append a record that can't be decoded."""
        record = Undecodable(self.end, self.stamp(), b"?", "can't be decoded: planted")
        self._add(record)
        return record.offset

    def _add(self, record: Any) -> None:
        self.records.append(record)
        self.offsets.append(record.offset)
        self.end = record.offset + 1
        self.on_append(record)
        watchers, self.watchers = self.watchers, {}
        for watcher in watchers.values():
            watcher()

    def stamp(self) -> int:
        return int((EPOCH_S + self.kafka.loop.now) * 1000) + self.clock_ms

    def read(self, position: int, limit: int) -> tuple[int, list[Any]]:
        """Records from a position on, and the position after them."""
        i = bisect_left(self.offsets, position)
        found = self.records[i : i + limit]
        i += len(found)
        return (self.offsets[i] if i < len(self.offsets) else self.end), found

    def fetch(self, position: int, limit: int) -> tuple[int, list[Any]]:
        """As `read`, for those that look at checksums."""
        upto, found = self.read(position, limit)
        rotten = self.rotten.within(position, upto)
        left = [record for record in found if record.offset not in self.rotten] if rotten else found
        left += [Unreadable(a, -1, b, "planted") for a, b in zip(rotten[::2], rotten[1::2], strict=True)]
        return upto, sorted(left, key=lambda record: record.offset) if rotten else found

    def delete_before(self, offset: int) -> None:
        """As DeleteRecords does. The records stay here, for the checks."""
        self.start = max(self.start, min(offset, self.end))

    def compact(self) -> None:
        """Keep the last record of each key."""
        last = {record.key: record.offset for record in self.records}
        self.records = [record for record in self.records if last[record.key] == record.offset]
        self.offsets = [record.offset for record in self.records]

    @property
    def is_away(self) -> bool:
        return self.away_until > self.kafka.loop.now


class Odds(NamedTuple):
    """How this Kafka differs from others."""

    latency_s: float = 0.001
    jitter_s: float = 0.002
    slow: float = 0.0  # of requests
    lost_answer: float = 0.0
    forgotten: float = 0.0  # of repeated requests: the broker knows the batch, and not its offset
    hole: float = 0.0
    fetch_max: int = 50
    read_error: float = 0.0
    dropped: float = 0.0  # of chunks, between the thread that fetches and the agent: as Faust does in a rebalance
    busy_s: float = 0.0  # after which the main thread of a worker takes what the one that fetches has for it
    refused: float = 0.0  # of batches: they never land, and of half of those that were not confirmed in time
    max_bytes: int = 0  # of a batch in the topics of messages; 0: whatever the producer takes

    @classmethod
    def draw(cls, r: Random) -> Odds:
        return cls(
            latency_s=r.choice((0.0005, 0.002, 0.02)),
            jitter_s=r.choice((0.001, 0.01, 0.1)),
            slow=r.choice((0.0, 0.01)),
            lost_answer=r.choice((0.0, 0.02, 0.1)),
            forgotten=r.choice((0.0, 0.2)),
            hole=r.choice((0.0, 0.05)),
            fetch_max=r.choice((2, 20, 500)),
            read_error=r.choice((0.0, 0.02)),
            dropped=r.choice((0.0, 0.0, 0.03)),
            busy_s=r.choice((0.0, 0.0, 0.03, 0.3)),
            refused=r.choice((0.0, 0.0, 0.003, 0.03)),
            max_bytes=r.choice((0, 0, MAX_BYTES)),
        )


class Kafka:
    """All brokers."""

    def __init__(self, loop: VirtualLoop, random: Random, odds: Odds) -> None:
        self.loop = loop
        self.random = random
        self.odds = odds
        self.logs: dict[TP, Log] = {}
        self.ahead_ms = 0
        self.slow_s = 0.0  # by which each request may take longer
        self.fetch_s = 0.0  # by which each fetch takes longer
        self.drop_next: str | None = None  # a topic whose next chunk is dropped
        #: Topics in which a batch may have `Odds.max_bytes`.
        self.of_messages: frozenset[str | None] = frozenset()
        self.patience = 1  # by which an empty fetch takes longer than its wait
        self.tell: Callable[..., None] = lambda *_: None

    def chance(self, odds: float) -> bool:
        return odds > 0 and self.random.random() < odds

    def calm(self) -> None:
        """Faults are over."""
        self.odds = Odds(fetch_max=self.odds.fetch_max, max_bytes=self.odds.max_bytes)
        self.slow_s = 0.0
        now_ms = int((EPOCH_S + self.loop.now) * 1000)
        # all clocks agree again, at or after every timestamp so far: everything that was due by these is due now
        ahead_ms = self.ahead_ms = max(
            [0, *(record.timestamp - now_ms for log in self.logs.values() for record in log.records)]
        )
        for log in self.logs.values():
            log.away_until = log.stalled_until = 0.0
            log.clock_ms = ahead_ms

    def log(self, topic: str, number: int) -> Log:
        tp = TP(topic, number)
        found = self.logs.get(tp)
        if found is None:
            found = self.logs[tp] = Log(self, topic, number)
            found.clock_ms = self.ahead_ms
            if topic in self.of_messages:
                found.max_bytes = self.odds.max_bytes
        return found

    def latency(self) -> float:
        odds = self.odds
        if self.chance(odds.slow):
            return self.random.uniform(0.2, 3.0)
        if self.slow_s and self.chance(0.5):
            return self.random.random() * self.slow_s
        return odds.latency_s + self.random.random() * odds.jitter_s

    def later(self, delay_s: float, function: Callable[..., object], *args: Any) -> None:
        """Do something at a broker later, even if the process that asked for it dies."""
        self.loop.call_later(delay_s, function, *args, context=self.loop.outside)

    async def trip(self) -> None:
        """A request and its answer."""
        await asyncio.sleep(2 * self.latency())


# ---------------------------------------------------------------------- writing


class Batch:
    """Records of one request."""

    __slots__ = ("bytes", "expired", "expiry", "futures", "landed", "rows")

    def __init__(self) -> None:
        self.rows: list[tuple[Any, Any, Any]] = []
        self.futures: list[asyncio.Future[RecordMetadata]] = []
        self.bytes = 0
        self.landed: tuple[int, int] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.expired = False


class Line:
    """The batches of a producer for one partition, in order, one request at a time."""

    __slots__ = ("batches", "log", "sending", "since")

    def __init__(self, log: Log) -> None:
        self.log = log
        self.batches: deque[Batch] = deque()
        self.sending = False
        self.since = 0.0  # nothing was confirmed since


class Producer:
    """In the place of `app.streaming.producer.IdempotentProducer`, with its promises.

    Records of one partition land in the order of the calls. A batch is repeated until the broker has confirmed it; the
    futures fail after `DELIVERY_TIMEOUT_S`, though it may land later.
    """

    def __init__(self, kafka: Kafka, process: Process, max_bytes: int, linger_s: float = 0.0) -> None:
        self.kafka = kafka
        self.process = process
        self.max_bytes = max_bytes
        self.lines: dict[TP, Line] = {}
        self.pending_bytes = 0
        self.closed = False

    unconfirmed_bytes = property(lambda self: self.pending_bytes)

    def append(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        timestamp_ms: int | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        future: asyncio.Future[RecordMetadata] = self.kafka.loop.create_future()
        size = len(value or b"") + len(key or b"") + sum(len(n) + len(v or b"") for n, v in headers or ())
        if size > self.max_bytes:
            future.set_exception(MessageSizeTooLargeError(f"{size} bytes"))
            return future
        if self.pending_bytes > MAX_PENDING_BYTES:
            future.set_exception(ProducerFull("full"))
            return future
        tp = TP(topic, partition)
        line = self.lines.get(tp)
        if line is None:
            line = self.lines[tp] = Line(self.kafka.log(topic, partition))
        batch = line.batches[-1] if line.batches else None
        is_full = batch is not None and batch.bytes + size > BATCH_BYTES
        if batch is None or is_full or (line.sending and len(line.batches) == 1):
            batch = Batch()
            batch.expiry = self.kafka.loop.call_later(DELIVERY_TIMEOUT_S, _expire, batch, tp)
            if not line.batches:
                line.since = self.kafka.loop.now
            line.batches.append(batch)
        batch.rows.append((key, value, headers))
        batch.futures.append(future)
        batch.bytes += size + RECORD_BYTES
        self.pending_bytes += size + RECORD_BYTES
        if not line.sending:
            line.sending = True
            self.process.call(self._send, tp, line)
        return future

    def append_run(
        self, topic: str, partition: int, key: bytes, records: list[tuple[bytes, list[tuple[str, bytes]]]]
    ) -> list[tuple[int, asyncio.Future[RecordMetadata]]]:
        runs: list[tuple[int, asyncio.Future[RecordMetadata]]] = []
        before: Batch | None = None
        for value, headers in records:
            future = self.append(topic, partition, value, key, headers)
            line = self.lines.get(TP(topic, partition))
            batch = line.batches[-1] if line is not None and line.batches and not future.done() else None
            if batch is not None and batch is before:
                runs[-1] = (runs[-1][0] + 1, runs[-1][1])
            else:
                runs.append((1, future))
            before = batch
        return runs

    def leader_of(self, topic: str, partition: int) -> int | None:
        return partition

    def waited_s(self, topic: str, partition: int) -> float:
        line = self.lines.get(TP(topic, partition))
        return self.kafka.loop.now - line.since if line is not None and line.batches else 0.0

    def waits(self, longer_s: float) -> dict[TP, float]:
        now = self.kafka.loop.now
        return {tp: now - line.since for tp, line in self.lines.items() if line.batches and now - line.since > longer_s}

    # -- on the way

    def _send(self, tp: TP, line: Line) -> None:
        """The process sends the next request (or the same one again)."""
        if not line.batches:
            line.sending = False
            return
        self.kafka.later(self.kafka.latency(), self._arrive, tp, line, line.batches[0])

    def _arrive(self, tp: TP, line: Line, batch: Batch) -> None:
        """At the broker."""
        kafka, log = self.kafka, line.log
        if log.is_away or log.stalled_until > kafka.loop.now:
            self.process.call(self._send, tp, line, delay_s=RETRY_S)
            return
        offset_known = True
        if batch.landed is None:
            error = self._refusal(log, batch)
            if error is not None:
                self.process.call(self._refused, tp, line, batch, error, delay_s=kafka.latency())
                return
            batch.landed = log.append(batch.rows)
        else:
            offset_known = not kafka.chance(kafka.odds.forgotten)
        if kafka.chance(kafka.odds.lost_answer):
            self.process.call(self._send, tp, line, delay_s=kafka.random.choice((RETRY_S, REQUEST_TIMEOUT_S)))
            return
        self.process.call(self._confirmed, tp, line, batch, offset_known, delay_s=kafka.latency())

    def _refusal(self, log: Log, batch: Batch) -> Exception | None:
        """Why a batch never lands."""
        kafka, odds = self.kafka, self.kafka.odds
        if log.max_bytes and batch.bytes > log.max_bytes:
            return MessageSizeTooLargeError(f"{batch.bytes} bytes for {log}")
        refused = 0.5 if batch.expired and odds.refused else odds.refused
        if not kafka.chance(refused):
            return None
        kafka.tell("%s refuses a batch of %s for ever", log, self.process.name)
        return kafka.random.choice(REFUSALS)("planted")

    def _refused(self, tp: TP, line: Line, batch: Batch, error: Exception) -> None:
        self._is_over(line, batch)
        for future in batch.futures:
            if not future.done():
                future.set_exception(error)
        self._send(tp, line)

    def _is_over(self, line: Line, batch: Batch) -> None:
        assert batch.expiry is not None
        batch.expiry.cancel()
        line.batches.popleft()
        self.pending_bytes -= batch.bytes

    def _confirmed(self, tp: TP, line: Line, batch: Batch, offset_known: bool) -> None:
        assert batch.landed is not None
        self._is_over(line, batch)
        line.since = self.kafka.loop.now
        first, stamp = batch.landed
        for i, future in enumerate(batch.futures):
            if not future.done():
                offset = first + i if offset_known else -1
                future.set_result(RecordMetadata(tp.topic, tp.partition, TopicPartition(*tp), offset, stamp, 1, 0))
        self._send(tp, line)


def _expire(batch: Batch, tp: TP) -> None:
    batch.expired = True
    for future in batch.futures:
        if not future.done():
            future.set_exception(KafkaTimeoutError(f"not confirmed within {DELIVERY_TIMEOUT_S} s: {tp}"))


# ---------------------------------------------------------------------- plain clients


class _Ended:
    """Parts of aiokafka's clients of which only the end is waited for."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.error_future = self._sync_task = self.sender_task = loop.create_future()
        self._client: Any = None
        self._prefetch_backoff = 0.0

    async def _proc_fetch_request(self, *args: Any) -> bool:
        raise AssertionError

    # -- of a client

    async def _wait_on_metadata(self, topic: str) -> None: ...

    def force_metadata_update(self) -> None: ...

    @property
    def cluster(self) -> _Ended:
        return self

    def leader_for_partition(self, tp: TopicPartition) -> int:
        kafka: Kafka = current().world.kafka
        return -1 if kafka.log(*tp).is_away else 0


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class PlainConsumer:
    """In the place of `AIOKafkaConsumer` without a group."""

    def __init__(self, **options: Any) -> None:
        self.process = current()
        self.kafka: Kafka = self.process.world.kafka
        self._fetcher = self._client = _Ended(self.kafka.loop)
        self.positions: dict[TopicPartition, int] = {}

    async def start(self) -> None:
        await self.kafka.trip()

    async def stop(self) -> None:
        await self.kafka.trip()

    def assign(self, tps: Iterable[TopicPartition]) -> None:
        self.positions = dict.fromkeys(tps, 0)

    def unsubscribe(self) -> None:
        self.positions = {}
        self.process.world.faults.has_read(self.process)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self.positions[tp] = offset

    async def seek_to_beginning(self, *tps: TopicPartition) -> None:
        for tp in tps:
            self.positions[tp] = self.kafka.log(*tp).start

    async def position(self, tp: TopicPartition) -> int:
        return self.positions[tp]

    async def _ask(self, tps: Iterable[TopicPartition]) -> list[tuple[TopicPartition, Log]]:
        found = [(tp, self.kafka.log(*tp)) for tp in tps]
        deadline = self.kafka.loop.now + REQUEST_TIMEOUT_S
        await asyncio.sleep(self.kafka.latency())
        while any(log.is_away for _, log in found):
            if self.kafka.loop.now > deadline:
                raise KafkaTimeoutError
            await asyncio.sleep(RETRY_S)
        return found

    async def end_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        ends = {tp: log.end for tp, log in await self._ask(tps)}
        await asyncio.sleep(self.kafka.latency())
        return ends

    async def beginning_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        starts = {tp: log.start for tp, log in await self._ask(tps)}
        await asyncio.sleep(self.kafka.latency())
        return starts

    async def offsets_for_times(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, Any]:
        found: dict[TopicPartition, Any] = {}
        for tp, log in await self._ask(times):
            record = next((r for r in log.records if r.offset >= log.start and r.timestamp >= times[tp]), None)
            found[tp] = None if record is None else OffsetAndTimestamp(record.offset, record.timestamp)
        await asyncio.sleep(self.kafka.latency())
        return found

    async def getmany(self, *, timeout_ms: int, max_records: int | None = None) -> dict[TopicPartition, list[Any]]:
        kafka, loop = self.kafka, self.kafka.loop
        await asyncio.sleep(kafka.latency())
        if kafka.chance(kafka.odds.read_error):
            raise KafkaConnectionError("planted")
        until = loop.now + timeout_ms / 1000 * kafka.patience
        while True:
            found: dict[TopicPartition, list[Any]] = {}
            for tp, position in self.positions.items():
                log = kafka.log(*tp)
                if log.is_away or position >= log.end:
                    continue
                self.positions[tp], records = log.read(position, max_records or kafka.odds.fetch_max)
                if records:
                    found[tp] = records
            if found or loop.now >= until:
                return found
            arrived = loop.create_future()
            for tp in self.positions:
                kafka.log(*tp).watchers[self] = partial(_resolve, arrived)
            timer = loop.call_later(until - loop.now, _resolve, arrived)
            await arrived
            timer.cancel()
            await asyncio.sleep(kafka.latency())


class Edges:
    """In the place of `app.streaming.log_edges.LogEdges`: asks where logs begin and end."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = PlainConsumer()

    async def end(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._consumer.end_offsets(tps)

    async def begin(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._consumer.beginning_offsets(tps)

    async def since(self, tp: TopicPartition, time_ms: int) -> int:
        found = (await self._consumer.offsets_for_times({tp: time_ms}))[tp]
        return -1 if found is None else int(found.offset)

    def close(self) -> None:
        pass


async def identify(client: Any, names: Iterable[str]) -> Identity:
    """In the place of `app.kafka.identity.identify`."""
    kafka: Kafka = current().world.kafka
    await kafka.trip()
    return Identity("cluster", {name: f"id of {name}" for name in names})


class PlainProducer:
    """In the place of `AIOKafkaProducer`."""

    def __init__(self, **options: Any) -> None:
        process = current()
        self.kafka: Kafka = process.world.kafka
        self._producer = Producer(self.kafka, process, 1 << 20)
        self._sender = _Ended(self.kafka.loop)

    async def start(self) -> None:
        await self.kafka.trip()

    async def stop(self) -> None:
        await self.kafka.trip()

    async def send_and_wait(self, topic: str, value: bytes | None, *, key: bytes, partition: int) -> Any:
        return await self._producer.append(topic, partition, value, key)


class Admin:
    """In the place of `AIOKafkaAdminClient`."""

    def __init__(self, **options: Any) -> None:
        self.kafka: Kafka = current().world.kafka

    async def start(self) -> None:
        await self.kafka.trip()

    async def close(self) -> None:
        await self.kafka.trip()

    async def delete_records(self, due: dict[TopicPartition, Any]) -> None:
        await self.kafka.trip()
        for tp, what in due.items():
            self.kafka.log(*tp).delete_before(what.before_offset)

    async def list_consumer_group_offsets(self, group: str) -> dict[TopicPartition, Any]:
        await self.kafka.trip()
        return {}
