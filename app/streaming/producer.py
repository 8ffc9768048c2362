"""Appends to Kafka idempotently: Faust's producer, with a fast path for markers and a limit on waiting bytes.

Records that must not wait behind large ones get a *lane*: a separate producer with its own connection. The sender
(`app.streaming.sender`) ensures that no partition waits for another.

The future of an append always gets a result or an error, even when the broker refuses a batch, the topic is not known
yet, or Kafka is away.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, KafkaTimeoutError, ProducerClosed
from aiokafka.producer.message_accumulator import MessageBatch
from aiokafka.producer.transaction_manager import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, PidAndEpoch
from aiokafka.structs import RecordMetadata
from faust.transport.drivers import aiokafka as driver
from faust.transport.producer import ProducerBuffer
from faust.types import TP, HeadersArg
from faust.types.tuples import FutureMessage

from app.kafka.connection import end_client
from app.streaming.sender import Sender
from marq.errors import InternalError, MarqError

#: Seconds that a flush waits at most: Faust flushes during a rebalance, which has to wait for it.
FLUSH_TIMEOUT_S = 5.0
#: Bytes that may wait in the producer for the broker; further appends fail.
MAX_PENDING_BYTES = 128 * 1024 * 1024
#: Bytes of memory that a waiting record takes beside its own bytes.
RECORD_BYTES = 64


#: A waiting record: topic, partition, value, key, headers, timestamp in milliseconds.
_Record = tuple[str, int, bytes | None, bytes | None, Sequence[tuple[str, bytes | None]] | None, int | None]


class ProducerFull(MarqError):
    """The producer has reached its limit of waiting bytes: Kafka is slower than the senders, or away."""


class _Buffer(ProducerBuffer):
    async def _send_pending(self, fut: FutureMessage) -> None:
        # In Faust, the first message that can't be sent ends this task: its future and all later ones never resolve.
        try:
            await super()._send_pending(fut)
        except Exception as exc:
            if not fut.done():
                fut.set_exception(exc)


class _Batch(MessageBatch):
    """A batch of the idempotent producer, which knows its size and the handling of a refusal."""

    producer: IdempotentProducer
    #: Of each record its future and, as aiokafka tells them, its offset, size and timestamp.
    _msg_futures: list[tuple[asyncio.Future[RecordMetadata], Any]]
    size_bytes = 0
    expiry: asyncio.TimerHandle | None = None

    def done(self, base_offset: int, timestamp: int | None = None, log_start_offset: int | None = None) -> None:
        if base_offset < 0:
            # the broker has the batch already, but no longer its offset: aiokafka would count up from -1
            self._msg_futures = [(future, metadata) for future, metadata in self._msg_futures if not future.done()]
            for future, _ in self._msg_futures:
                future.set_result(RecordMetadata(*self.tp, self.tp, -1, timestamp, 1, log_start_offset))
        super().done(base_offset, timestamp, log_start_offset)

    def failure(self, exception: Exception) -> None:
        super().failure(exception)
        if self.retry_count:
            self.producer._renew_id()

    def expired(self) -> bool:
        # otherwise a batch that waits for a leader would fail with that error, as if Kafka had refused it
        return False

    def expire(self) -> None:
        error = KafkaTimeoutError(f"not confirmed by Kafka within {self.producer.delivery_timeout_s} s: {self.tp}")
        for future, _ in self._msg_futures:
            if not future.done():
                future.set_exception(error)


class IdempotentProducer(driver.Producer):
    """Faust's producer with idempotence, and with `append`, which needs no task and no await per message.

    When a future of `append` fails, the record may still be in the log, or get there later: idempotent batches are
    repeated for ever; only the future gives up.
    """

    app: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffer = _Buffer(loop=self.loop, beacon=self.beacon)
        self.buffer.app = self.app
        #: Seconds until the future of an append fails.
        self.delivery_timeout_s = 3 * self.request_timeout
        #: Bytes of unconfirmed records, including headers.
        self.pending_bytes = 0
        #: Topics whose records another producer writes.
        self.lanes: dict[str, IdempotentProducer] = {}
        self._known: set[TP] = set()
        self._unconfirmed: dict[TP, dict[_Batch, float]] = {}  # in order; since when Kafka may confirm the first
        self._waiting: dict[str, list[tuple[asyncio.Future[RecordMetadata], _Record]]] = {}
        self._learning: set[asyncio.Task[None]] = set()

    async def divide(self, *lanes: Iterable[str]) -> None:
        """Give the topics of each of `lanes` a separate producer, which starts and stops with this one."""
        for topics in lanes:
            lane = type(self)(self.transport, loop=self.loop, beacon=self.beacon)
            self.lanes.update(dict.fromkeys(topics, lane))
            await self.add_runtime_dependency(lane)

    @property
    def unconfirmed_bytes(self) -> int:
        """`pending_bytes`, including those of the lanes."""
        return self.pending_bytes + sum(lane.pending_bytes for lane in set(self.lanes.values()))

    def leader_of(self, topic: str, partition: int) -> int | None:
        """The id of the broker that leads a partition, as far as it is known here."""
        lane = self.lanes.get(topic, self)
        leader = lane._ensure_producer().client.cluster.leader_for_partition(TopicPartition(topic, partition))
        return None if leader is None else int(leader)

    async def on_start(self) -> None:
        await super().on_start()
        producer = self._ensure_producer()
        for task in (producer._sender.sender_task, producer.client._sync_task):
            task.add_done_callback(self._on_sender_end)

    def _on_sender_end(self, task: asyncio.Task[None]) -> None:
        """Stop the worker: without this task, or the one that asks for leaders, aiokafka stops sending."""
        if not task.cancelled() and not self.should_stop:
            self.app.fail(InternalError(f"the task that writes to Kafka has ended: {task.exception()!r}"))

    def _new_producer(self, transactional_id: str | None = None) -> Any:
        producer = super()._new_producer(transactional_id)
        theirs = producer._sender
        producer._sender = Sender(
            theirs.client,
            acks=theirs._acks,
            txn_manager=theirs._txn_manager,
            message_accumulator=theirs._message_accumulator,
            retry_backoff_ms=theirs._retry_backoff * 1000,
            request_timeout_ms=theirs._request_timeout_ms,
        )
        return producer

    def _settings_extra(self) -> Mapping[str, Any]:
        return {"acks": "all", "enable_idempotence": True}

    def append(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        timestamp_ms: int | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Append a record; records of one partition are written in the order of the calls.

        Returns:
            A future of the record's metadata: offset (-1 if the broker can't tell any more, after a repeated request)
            and timestamp in milliseconds. It fails with a KafkaError (too large, refused, not confirmed within
            `delivery_timeout_s`) or `ProducerFull`; nothing is raised here.
        """
        lane = self.lanes.get(topic)
        if lane is not None:
            return lane.append(topic, partition, value, key, headers, timestamp_ms)
        if topic in self._waiting or TP(topic, partition) not in self._known:
            return self._append_later(topic, (topic, partition, value, key, headers, timestamp_ms))
        return self._append_now(topic, partition, value, key, headers, timestamp_ms)

    def append_run(
        self, topic: str, partition: int, key: bytes, records: list[tuple[bytes, list[tuple[str, bytes]]]]
    ) -> list[tuple[int, asyncio.Future[RecordMetadata]]]:
        """Append many `(value, headers)` with one key, in order, like `append`, with one future for each batch.

        Returns:
            For each batch, the number of its records and the future of the first one. The offsets of the others follow.
        """
        if (
            topic in self.lanes
            or topic in self._waiting
            or TP(topic, partition) not in self._known
            or self._producer is None
        ):
            return [(1, self.append(topic, partition, value, key, headers)) for value, headers in records]
        runs: list[tuple[int, asyncio.Future[RecordMetadata]]] = []
        batches = self._producer._message_accumulator._batches
        tp = TopicPartition(topic, partition)
        i, count = 0, len(records)
        while i < count:
            # the first record of a batch is appended like a single one, with all checks
            value, headers = records[i]
            future = self._append_now(topic, partition, value, key, headers, None)
            first, size = i, 0
            i += 1
            if future.done():
                runs.append((1, future))
                continue
            batch = batches[tp][-1]
            append = batch._builder.append
            for value, headers in itertools.islice(records, i, None):
                metadata = append(timestamp=None, key=key, value=value, headers=headers)
                if metadata is None:
                    break
                size += metadata.size + RECORD_BYTES
                i += 1
            batch.size_bytes += size
            self.pending_bytes += size
            runs.append((i - first, future))
        return runs

    def waited_s(self, topic: str, partition: int) -> float:
        """Seconds for which Kafka has confirmed none of the waiting records of a partition; 0 if none waits.

        It grows until Kafka takes a record, also after the futures have failed for lack of time.
        """
        lane = self.lanes.get(topic)
        if lane is not None:
            return lane.waited_s(topic, partition)
        since = next(iter(self._unconfirmed.get(TP(topic, partition), {}).values()), None)
        return 0.0 if since is None else self.loop.time() - since

    def waits(self, longer_s: float) -> dict[TP, float]:
        """Partition -> seconds, where Kafka has confirmed nothing for longer than `longer_s`; including lanes."""
        now, found = self.loop.time(), dict[TP, float]()
        for tp, batches in self._unconfirmed.items():
            waited_s = now - next(iter(batches.values()))
            if waited_s > longer_s:
                found[tp] = waited_s
        for lane in set(self.lanes.values()):
            found |= lane.waits(longer_s)
        return found

    def _append_now(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] | None,
        timestamp_ms: int | None,
    ) -> asyncio.Future[RecordMetadata]:
        producer = self._producer
        if producer is None:
            return self._failed(ProducerClosed())
        accumulator = producer._message_accumulator
        try:
            if accumulator._closed:
                raise ProducerClosed()
            if accumulator._exception is not None:
                raise copy.copy(accumulator._exception)
            if self.pending_bytes > MAX_PENDING_BYTES:
                raise self._full()
            producer._serialize(key, value, headers or [])  # raises MessageSizeTooLargeError
            tp = TopicPartition(topic, partition)
            batches = accumulator._batches.get(tp)
            batch: _Batch | None = batches[-1] if batches else None
            future: asyncio.Future[RecordMetadata] | None = None
            if batch is not None:
                future = batch.append(key, value, timestamp_ms, headers=headers or [])
            if batch is None or future is None:
                # aiokafka would wait until the full batch is sent; queueing another batch keeps the order, too.
                batch = self._new_batch(accumulator, tp)
                future = batch.append(key, value, timestamp_ms, headers=headers or [])
        except Exception as exc:
            return self._failed(exc)
        size = batch._msg_futures[-1][1].size + RECORD_BYTES
        batch.size_bytes += size
        self.pending_bytes += size
        return future

    def _new_batch(self, accumulator: Any, tp: TopicPartition) -> _Batch:
        batch = _Batch(tp, accumulator.create_builder(), accumulator._batch_ttl, accumulator._linger_time)
        batch.producer = self
        batch.expiry = self.loop.call_later(self.delivery_timeout_s, batch.expire)
        batch.future.add_done_callback(lambda _: self._on_batch_done(batch))
        accumulator._batches[tp].append(batch)
        self._unconfirmed.setdefault(TP(*tp), {})[batch] = self.loop.time()
        accumulator._wakeup(accumulator._waiter_future)
        return batch

    def _on_batch_done(self, batch: _Batch) -> None:
        assert batch.expiry is not None
        batch.expiry.cancel()
        self.pending_bytes -= batch.size_bytes
        tp = TP(*batch.tp)
        waiting = self._unconfirmed.get(tp)
        if waiting is None:
            return
        since = waiting.pop(batch, None)
        if not waiting:
            del self._unconfirmed[tp]
        elif since is not None:
            first = next(iter(waiting))
            confirmed = not batch.future.cancelled() and batch.future.exception() is None
            # a confirmation ends the stall; a refusal does not
            waiting[first] = self.loop.time() if confirmed else min(since, waiting[first])

    def _renew_id(self) -> None:
        # The refused batch has used up sequence numbers, so the broker would refuse each later batch as out of order.
        # Batches that were sent once keep their own id and number.
        if self._producer is not None:
            transactions = self._producer._txn_manager
            transactions._pid_and_epoch = PidAndEpoch(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
            transactions._pid_waiter = self.loop.create_future()
            transactions._sequence_numbers.clear()

    def _append_later(self, topic: str, record: _Record) -> asyncio.Future[RecordMetadata]:
        """Queue a record until the partitions of its topic are known."""
        if self.pending_bytes > MAX_PENDING_BYTES:
            return self._failed(self._full())
        future = self.loop.create_future()
        self.pending_bytes += _size_of(record)
        queue = self._waiting.setdefault(topic, [])
        queue.append((future, record))
        if len(queue) == 1:
            task = self.loop.create_task(self._learn_topic(topic))
            self._learning.add(task)
            task.add_done_callback(self._learning.discard)
        return future

    async def _learn_topic(self, topic: str) -> None:
        error: Exception | None = None
        partitions: set[int] = set()
        try:
            async with asyncio.timeout(self.request_timeout):
                client = self._ensure_producer().client
                partitions = await client._wait_on_metadata(topic)
                if any(record[1] not in partitions for _, record in self._waiting[topic]):  # added meanwhile
                    await client.force_metadata_update()
                    partitions = client.cluster.partitions_for_topic(topic) or set()
        except Exception as exc:
            error = exc
        self._known.update(TP(topic, p) for p in partitions)
        for future, record in self._waiting.pop(topic):
            self.pending_bytes -= _size_of(record)
            if future.done():
                continue
            if record[1] not in partitions:
                future.set_exception(error or KafkaError(f"topic {topic} has no partition {record[1]}"))
            else:
                self._append_now(*record).add_done_callback(partial(_copy_result, future))

    def _full(self) -> ProducerFull:
        return ProducerFull(f"{self.pending_bytes} bytes wait for Kafka; it is slow or away, try again later")

    def _failed(self, exc: Exception) -> asyncio.Future[RecordMetadata]:
        future = self.loop.create_future()
        future.set_exception(exc)
        return future

    async def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition: int | None,
        timestamp: float | None,
        headers: HeadersArg | None,
        *,
        transactional_id: str | None = None,
    ) -> Awaitable[RecordMetadata]:
        """Faust's way to send; the same as `append`, so that both keep one order."""
        if isinstance(headers, Mapping):
            headers = list(headers.items())
        self._send_on_produce_message(key=key, value=value, partition=partition, timestamp=timestamp, headers=headers)
        if partition is None:
            await self._ensure_producer().client._wait_on_metadata(topic)
            partition = self.key_partition(topic, key).partition  # type: ignore[arg-type]
        return self.append(topic, partition, value, key, headers, int(timestamp * 1000) if timestamp else None)

    async def on_stop(self) -> None:
        # in parallel: without Kafka each waits for its time-out
        await asyncio.gather(self._end(), *(lane.stop() for lane in set(self.lanes.values())))

    async def _end(self) -> None:
        producer = self._producer
        if not await end_client(super().on_stop()):
            self.log.warning("%s bytes were not confirmed by Kafka when the worker stopped", self.pending_bytes)
            if producer is not None:
                await producer._sender.close()
                await producer.client.close()

    async def flush(self) -> None:
        """Wait until Kafka has confirmed everything, but no longer than `FLUSH_TIMEOUT_S`."""
        try:
            lanes = (lane.flush() for lane in set(self.lanes.values()))
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await asyncio.gather(super().flush(), *lanes)
        except TimeoutError:
            self.log.warning("%s bytes still not confirmed by Kafka after %s s", self.pending_bytes, FLUSH_TIMEOUT_S)


def _size_of(record: _Record) -> int:
    """The bytes of a record that waits for its topic to be known."""
    _, _, value, key, headers, _ = record
    size = RECORD_BYTES + len(value or b"") + len(key or b"")
    return size + sum(len(name.encode()) + len(content or b"") for name, content in headers or ())


def _copy_result(future: asyncio.Future[RecordMetadata], done: asyncio.Future[RecordMetadata]) -> None:
    if future.done():
        return
    if done.cancelled():
        future.cancel()
    elif (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())
