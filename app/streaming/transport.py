"""Reads Kafka in chunks: the Faust transport below every agent of marq. `app.streaming.producer` appends.

A *chunk* is what one fetch returned for one partition, with the fetch positions before and after it. For the topics
in `app.chunked_topics` an agent gets one event per chunk (`event.value` is the `Chunk`), which costs a Faust event per
thousands of records instead of one per record. Changelogs keep Faust's own path.

The way of a chunk, two threads and one hand-over:

    broker -> aiokafka's fetcher -> ChunkThread._pump -> ChunkConsumer.deliver -> queue of the agent -> agent
              (consumer thread)                          (main thread)

The records in what the fetcher gets are decoded by `app.streaming.batches`, which has an answer to what can't be.

Rules, and who keeps them:
- Gate: after an assignment nothing is delivered from a partition until `start_from` was called in this generation and
  the rebalance has ended (Faust clears the agents' queues while it lasts).
- While the group rejoins, reading goes on under the old assignment. Agents stand still then, so chunks go to
  `app.on_chunk_aside`.
- At most `MAX_BUFFERED_CHUNKS` chunks of a partition wait in front of the agent.
- Only `set_commit_position` decides what is committed. A committed position is a hint, never ahead.
- A position outside the log is an error (`app.on_offset_out_of_range`), never a silent reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import aiokafka
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaError,
    OffsetOutOfRangeError,
)
from aiokafka.structs import ConsumerRecord, OffsetAndMetadata
from faust.transport.consumer import RecordMap, ensure_TPset
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from faust.types.tuples import ConsumerMessage
from mode import Service
from mode.utils.queues import ThrowableQueue

from app.kafka.connection import end_client
from app.streaming.batches import Fault, decode_with
from app.streaming.faults import is_expected, stop_if_reading_ends, stop_on_faults
from app.streaming.producer import IdempotentProducer
from marq.errors import InternalError, MarqError

#: Records in one chunk at most: bounds how long an agent's body holds the event loop.
MAX_CHUNK_RECORDS = 5_000
#: Chunks of one partition between the consumer thread and the agent.
MAX_BUFFERED_CHUNKS = 2
#: Milliseconds that the broker holds a fetch without data. aiokafka has one fetch per broker under way, so this is
#: also what a partition that was just resumed waits at most while all others are idle.
FETCH_WAIT_MS = 100
#: Seconds that aiokafka holds up the fetch of a whole broker while data of one of its partitions waits for room.
#: Without it the next fetch would go out without that partition, and last `FETCH_WAIT_MS` when all others are idle.
FETCH_HOLD_S = 0.02
#: Seconds between two questions of the fetcher for who leads what.
METADATA_PAUSE_S = 0.1
#: Seconds that a commit may take before it is left to the next one.
COMMIT_TIMEOUT_S = 5.0
#: The same, when the worker stops.
LAST_COMMIT_TIMEOUT_S = 1.0


class OffsetOutOfRange(MarqError):
    """The log of a partition does not hold the position that is to be read next."""


class Chunk:
    """The records of one fetch of one partition.

    Offsets in `[start, next)` that are not among the records do not exist for readers: compacted, aborted, or control
    records. `records` may be empty, then only the position moves. Chunks of a partition need not be contiguous: a
    reader takes a chunk only if `start` is at or below its own position, and else goes back (`seek_chunks`).
    """

    __slots__ = ("_epoch", "_reader", "generation", "next", "partition", "records", "start", "topic")

    def __init__(self, reader: Reader, start: int, next: int, records: list[ConsumerRecord]) -> None:
        self.topic: str = reader.tp.topic
        self.partition: int = reader.tp.partition
        self.start = start
        self.next = next
        self.records = records
        self.generation = reader.generation
        self._reader = reader
        self._epoch = reader.epoch

    def __repr__(self) -> str:
        return f"<Chunk {self.topic}:{self.partition} [{self.start}, {self.next}) {len(self.records)} records>"


class Reader:
    """How one chunked partition is read in one generation, shared by the two threads.

    Each attribute has one writer, so no lock is needed: `M` the main thread, `T` the consumer thread.
    """

    __slots__ = (
        "began",
        "epoch",
        "generation",
        "open",
        "paused",
        "pending",
        "returned",
        "starved",
        "state",
        "taken",
        "thread",
        "tp",
        "want_epoch",
        "want_paused",
    )

    def __init__(self, thread: ChunkThread, tp: TP, generation: int, state: Any) -> None:
        self.thread = thread
        self.tp = tp
        self.generation = generation
        self.state = state  # aiokafka's TopicPartitionState
        self.began = False  # M: it was opened in this generation
        self.open = False  # T: the gate
        self.paused = False  # T
        self.epoch = 0  # T: number of the last seek that was carried out
        self.want_epoch = 0  # M: number of the last seek that was asked for
        self.want_paused = False  # M
        self.pending: int | None = None  # M: where the last seek goes, until a chunk of it was delivered
        self.taken = 0  # T: chunks handed to the main thread
        self.returned = 0  # M: chunks that left the agent's queue
        self.starved = False  # T sets, M clears: wake the pump when a chunk comes back

    def has_room(self) -> bool:
        if self.taken - self.returned < MAX_BUFFERED_CHUNKS:
            return True
        self.starved = True
        # Looked at again after the flag is up, else a chunk that comes back in between wakes nobody.
        return self.taken - self.returned < MAX_BUFFERED_CHUNKS

    def give_back(self) -> None:
        """One chunk is out of the buffer (main thread)."""
        self.returned += 1
        if self.starved:
            self.starved = False
            self.thread.call_soon(self.thread.wake)


class ChunkQueue(ThrowableQueue[Any]):
    """The queue between consumer and agent: tells the chunk's reader when a chunk leaves it."""

    _queue: Iterable[Any]  # what `asyncio.Queue` keeps

    def _get(self) -> Any:
        event = super()._get()
        chunk = getattr(event, "value", None)
        if type(chunk) is Chunk:
            chunk._reader.give_back()
        return event

    def clear(self) -> None:
        for event in self._queue:
            chunk = getattr(event, "value", None)
            if type(chunk) is Chunk:
                chunk._reader.give_back()
        super().clear()


class PacedClient:
    """aiokafka's client, as its fetcher has it: who leads a partition without a leader is asked from time to time.

    The fetcher would ask again as soon as a broker has answered, hundreds of times a second.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._asked_s = -METADATA_PAUSE_S
        self._later: asyncio.Task[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def force_metadata_update(self) -> asyncio.Future[Any]:
        """A future of the update; those who ask too soon share the next one."""
        if self._later is None or self._later.done():
            loop = asyncio.get_running_loop()
            pause_s = max(0.0, self._asked_s + METADATA_PAUSE_S - loop.time())
            self._asked_s = loop.time() + pause_s
            self._later = asyncio.ensure_future(self._update(pause_s))
        return asyncio.shield(self._later)

    async def _update(self, pause_s: float) -> Any:
        await asyncio.sleep(pause_s)
        return await self._client.force_metadata_update()


class ChunkThread(driver.AIOKafkaConsumerThread):
    """The thread that owns the aiokafka consumer: takes what it fetched and hands it over, once for all partitions."""

    app: Any
    consumer: ChunkConsumer

    def __post_init__(self) -> None:
        super().__post_init__()
        self.readers: dict[TP, Reader] = {}
        self._wake = asyncio.Event()
        self._committing: asyncio.Future[Any] | None = None
        self._leaving: asyncio.Future[None] | None = None

    @property
    def _chunked(self) -> frozenset[str]:
        topics: frozenset[str] = self.app.chunked_topics
        return topics

    # -- called from the main thread

    def call_soon(self, function: Any, *args: Any) -> None:
        """Run a plain function in this thread; nothing happens if the thread has stopped."""
        try:
            self.thread_loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self.thread_loop.is_closed():
                raise

    async def seek_to_committed(self) -> Mapping[TP, int]:
        committed: Mapping[TP, int] = await self.call_thread(self._seek_plain_to_committed)
        return committed

    async def commit_positions(self, offsets: Mapping[TP, int], generation: int) -> bool:
        """Commit positions of chunked topics; False if the generation is over or Kafka refused."""
        done: bool = await self.call_thread(self._commit_positions, offsets, generation)
        return done

    def verify_event_path(self, now: float, tp: TP) -> None:
        # Faust's check compares the wall clock with the monotonic one and reports paused partitions as stuck.
        return None

    # -- in this thread

    def leave_group(self) -> None:
        """Tell the group that this member leaves. Its partitions are read on, and there are no more rebalances."""
        if self._leaving is None and self._consumer is not None:
            self._leaving = asyncio.ensure_future(self._consumer._coordinator.close())

    def wake(self) -> None:
        self._wake.set()

    def alive(self) -> None:
        """Note that the main thread runs: after `broker_max_poll_interval` without it we leave the group."""
        if self._consumer is not None:
            with self._consumer._subscription.fetch_context():
                pass

    async def on_start(self) -> None:
        stop_on_faults(asyncio.get_running_loop(), self._fail_worker)
        await super().on_start()
        stop_if_reading_ends(self._ensure_consumer(), self._fail_worker)
        fetcher = self._ensure_consumer()._fetcher
        fetcher._client = PacedClient(fetcher._client)
        decode_with(fetcher, self._chunked.__contains__, self._on_fault)
        # Chunks are taken in the same step as the response arrives, else the fetcher asks again at once without the
        # partitions that have data, and these wait until that fetch ends.
        fetch = fetcher._proc_fetch_request

        async def fetch_and_hand_over(*args: Any) -> bool:
            has_data: bool = await fetch(*args)
            self._hand_over(fetcher)
            return has_data

        fetcher._proc_fetch_request = fetch_and_hand_over
        fetcher._prefetch_backoff = FETCH_HOLD_S

    def _fail_worker(self, exc: BaseException) -> None:
        if not self.should_stop:
            self.parent_loop.call_soon_threadsafe(self.app.fail, exc)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """aiokafka only logs what its listener raises, and the worker would go on with half of an assignment."""
        try:
            yield
        except Exception as exc:
            if not is_expected(exc):
                self._fail_worker(InternalError(f"a rebalance failed here: {exc!r}"))
            raise

    def _on_fault(self, tp: TopicPartition, fault: Fault) -> None:
        self.consumer.unreadable[tp.topic] += fault.stop - fault.start
        self.log.warning("%s:%s [%s, %s) can't be decoded: %s", tp.topic, tp.partition, *fault[:3])

    def _create_worker_consumer(self, transport: driver.Transport) -> aiokafka.AIOKafkaConsumer:
        # As Faust's, which has no settings for isolation level and wait, and drops the assignor without tables.
        conf = self.app.conf
        self._assignor = self.app.assignor
        return aiokafka.AIOKafkaConsumer(
            client_id=conf.broker_client_id,
            group_id=conf.id,
            group_instance_id=conf.consumer_group_instance_id,
            bootstrap_servers=driver.server_list(transport.url, transport.default_port),
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            max_partition_fetch_bytes=conf.consumer_max_fetch_size,
            max_poll_records=conf.broker_max_poll_records,
            max_poll_interval_ms=int(conf.broker_max_poll_interval * 1000),
            request_timeout_ms=int(conf.broker_request_timeout * 1000),
            check_crcs=conf.broker_check_crcs,
            session_timeout_ms=int(conf.broker_session_timeout * 1000),
            rebalance_timeout_ms=int(conf.broker_rebalance_timeout * 1000),
            heartbeat_interval_ms=int(conf.broker_heartbeat_interval * 1000),
            metadata_max_age_ms=conf.consumer_metadata_max_age_ms,
            connections_max_idle_ms=conf.consumer_connections_max_idle_ms,
            **driver.credentials_to_aiokafka_auth(conf.broker_credentials, conf.ssl_context),
        )

    async def on_thread_stop(self) -> None:
        # aiokafka looks for the coordinator of its group without an end. The task is left to itself, not cancelled: the
        # method queue that it waits for would swallow that.
        if self._committing is not None:
            self._committing.cancel()
        if not await end_client(self._end_consumer()):
            self.log.warning("Kafka could not be told that this worker leaves")
            if self._consumer is not None:
                await self._consumer._client.close()

    async def _end_consumer(self) -> None:
        if self._leaving is not None:
            await self._leaving  # aiokafka does not wait for it a second time
        await super().on_thread_stop()

    def _stopped_set(self) -> None:
        if self.thread_loop.is_closed():  # it crashed
            self._stopped.set()
        else:
            super()._stopped_set()

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        with self._listening():
            await super().on_partitions_revoked(revoked)

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        with self._listening():
            self._renew_readers(assigned, generation_id)
            await super().on_partitions_assigned(assigned, generation_id)

    def _renew_readers(self, assigned: set[TP], generation_id: int) -> None:
        for reader in self.readers.values():
            reader.open = False
        assignment = self._ensure_consumer()._subscription.subscription.assignment
        readers = {}
        for tp in assigned:
            state = assignment.state_value(tp)
            if tp.topic in self._chunked and state is not None:
                reader = readers[tp] = Reader(self, tp, generation_id, state)
                # Paused and with any position, so that aiokafka neither fetches nor looks for a committed offset.
                state.pause()
                state.seek(0)
                # aiokafka calls this when the broker answers that the position is outside of the log.
                state.await_reset = lambda _strategy, reader=reader: self._on_out_of_range(reader)
        self.readers = readers

    def seek_reader(self, reader: Reader, offset: int, epoch: int) -> None:
        """Open the gate of a partition, or move it: the next chunk starts at `offset`."""
        if self.readers.get(reader.tp) is not reader or not reader.state._assignment.active:
            return
        reader.epoch = epoch
        reader.open = True
        self._ensure_consumer()._fetcher.seek_to(TopicPartition(*reader.tp), offset)
        if not reader.paused:
            reader.state.resume()
        self.wake()

    def set_paused(self, reader: Reader, paused: bool) -> None:
        reader.paused = paused
        if paused:
            reader.state.pause()
            result = self._ensure_consumer()._fetcher._records.get(reader.tp)
            if result is not None:
                result._backoff = 0.0
        elif reader.open:
            reader.state.resume()
            self.wake()

    def set_plain_paused(self, tps: set[TP], paused: bool) -> None:
        """Carry Faust's pausing over to aiokafka, else paused changelogs are part of every fetch."""
        consumer = self._consumer
        if consumer is None or consumer._subscription.subscription is None:
            return
        assignment = consumer._subscription.subscription.assignment
        for tp in tps if assignment is not None else ():
            state = assignment.state_value(tp)
            if state is not None and tp.topic not in self._chunked:
                if paused:
                    state.pause()
                else:
                    state.resume()

    @Service.task
    async def _pump(self) -> None:
        if self.app.client_only:
            return
        consumer = self._ensure_consumer()
        fetcher = consumer._fetcher
        waiter = None
        while not self.should_stop and not consumer._closed:
            self._wake.clear()
            if waiter is None or waiter.done():
                if waiter is not None:
                    waiter.result()  # raises what ended the membership, such as a refused authorization
                waiter = fetcher._create_fetch_waiter()
                waiter.add_done_callback(lambda _: self.wake())
            if not self._hand_over(fetcher):
                await self._wake.wait()
            else:
                await asyncio.sleep(0)

    def _hand_over(self, fetcher: Any) -> bool:
        """Give the main thread what can be taken now; one call for all partitions."""
        chunks = self._take(fetcher)
        if chunks:
            self.parent_loop.call_soon_threadsafe(self.consumer.deliver, chunks)
        return bool(chunks)

    def _take(self, fetcher: Any) -> list[Chunk]:
        """Take one chunk of each partition that has data, an open gate and room. Nothing here awaits: the positions
        before and after a chunk are exact only because no seek can come in between."""
        chunks: list[Chunk] = []
        for tp in list(fetcher._records):
            reader = self.readers.get(tp)
            if reader is None or not reader.state._assignment.active:
                continue
            result = fetcher._records[tp]
            if not reader.open or reader.paused:
                result._backoff = 0.0  # may wait for long: holds up nobody
                continue
            if not reader.has_room():
                continue
            start = reader.state.position
            records: list[ConsumerRecord] = []
            try:
                if type(result) is FetchResult:
                    records = result.getall(MAX_CHUNK_RECORDS)
                else:
                    result.check_raise()
            except Exception as exc:
                self._drop(fetcher, tp)
                self._fail(reader, exc)
                continue
            if not result.has_more():
                self._drop(fetcher, tp)
            if reader.state.position > start:
                reader.taken += 1
                chunks.append(Chunk(reader, start, reader.state.position, records))
        return chunks

    def _drop(self, fetcher: Any, tp: TP) -> None:
        del fetcher._records[tp]
        fetcher._notify(fetcher._wait_consume_future)

    def _on_out_of_range(self, reader: Reader) -> None:
        if reader.open:
            self._fail(reader, OffsetOutOfRangeError({reader.tp: reader.state.position}))

    def _fail(self, reader: Reader, exc: Exception) -> None:
        """Close the partition and tell the app; only a new `start_from` or `seek_chunks` opens it again."""
        reader.open = False
        reader.state.pause()
        self.parent_loop.call_soon_threadsafe(self.consumer.on_read_error, reader, reader.epoch, exc)

    async def _seek_plain_to_committed(self) -> Mapping[TP, int]:
        # Chunked topics start where their reader says, changelogs where recovery says.
        consumer = self._ensure_consumer()
        skip = self._chunked | self.app.tables.changelog_topics
        tps = [tp for tp in consumer.assignment() if tp.topic not in skip]
        return await consumer.seek_to_committed(*tps) if tps else {}

    async def _commit_positions(self, offsets: Mapping[TP, int], generation: int) -> bool:
        consumer = self._ensure_consumer()
        assigned = consumer.assignment()
        due = {TopicPartition(*tp): OffsetAndMetadata(o, "") for tp, o in offsets.items() if tp in assigned}
        if not due or consumer._coordinator.generation != generation:
            return False
        self._committing = asyncio.ensure_future(consumer.commit(due))
        try:
            # here as well as in the thread that asked: else an endless one would hold up all later calls of it
            await asyncio.wait_for(self._committing, COMMIT_TIMEOUT_S)
        except TimeoutError:
            return False
        except (CommitFailedError, IllegalStateError) as exc:
            self.log.info("Commit came too late for this generation: %s", exc)
            return False
        except KafkaError as exc:
            self.log.warning("Commit failed, the next one tries again: %r", exc)
            return False
        return True


class ChunkConsumer(driver.Consumer):
    """Faust's consumer, with chunks for the topics in `app.chunked_topics`.

    All methods are for the main thread. Those that take a partition return False, and do nothing, when it is not (or
    not any more) assigned in the `generation` given (by default the current one).
    """

    app: Any

    _thread: ChunkThread

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._starts: dict[Reader, int] = {}
        self._positions: dict[TP, int] = {}
        self._committed_positions: dict[TP, int] = {}
        self._plain_resumed = asyncio.Event()
        #: Chunks that were fetched but thrown away, because of a seek or a rebalance.
        self.chunks_dropped = 0
        #: Offsets that could not be decoded, by topic; counted again when they are read again.
        self.unreadable: Counter[str] = Counter()
        super().__init__(*args, **kwargs)

    def _new_consumer_thread(self) -> ChunkThread:
        return ChunkThread(self, loop=self.loop, beacon=self.beacon)

    @property
    def in_group(self) -> bool:
        """False while this worker can't tell whether it is still a member: its coordinator is unknown, or forgot it."""
        consumer = self._thread._consumer
        coordinator = consumer._coordinator if consumer is not None else None
        return coordinator is not None and coordinator.coordinator_id is not None and coordinator.generation > 0

    # -- for readers of chunks

    def start_from(self, tp: TP, offset: int, generation: int | None = None) -> bool:
        """Open the gate of a partition: the first chunk starts at `offset`. Waits for the end of a rebalance."""
        reader = self._reader(tp, generation)
        if reader is None:
            return False
        reader.want_epoch += 1
        reader.pending = offset
        if self.app.rebalancing and not reader.began:
            self._starts[reader] = offset
        else:
            reader.began = True
            self._thread.call_soon(self._thread.seek_reader, reader, offset, reader.want_epoch)
        return True

    def seek_chunks(self, tp: TP, offset: int, generation: int | None = None) -> bool:
        """Go back (or forth) to `offset`. Chunks of the old position are dropped, but for those already in the agent's
        queue. A second call for the same offset does nothing until a chunk from there was delivered."""
        reader = self._reader(tp, generation)
        if reader is None:
            return False
        return reader.pending == offset or self.start_from(tp, offset, generation)

    def pause_reading(self, tp: TP) -> bool:
        """Read no more of a partition, in this generation; up to `MAX_BUFFERED_CHUNKS` chunks may still come."""
        return self._set_paused(tp, True)

    def resume_reading(self, tp: TP) -> bool:
        return self._set_paused(tp, False)

    def set_commit_position(self, tp: TP, offset: int, generation: int | None = None) -> bool:
        """Offset that the next commit may commit: everything below it has been dealt with durably."""
        if self._reader(tp, generation) is None:
            return False
        self._positions[tp] = offset
        return True

    def _reader(self, tp: TP, generation: int | None) -> Reader | None:
        reader = self._thread.readers.get(tp)
        current = self.app.consumer_generation_id
        if reader is None or reader.generation != current or generation not in (None, current):
            return None
        return reader

    def _set_paused(self, tp: TP, paused: bool) -> bool:
        reader = self._reader(tp, None)
        if reader is None:
            return False
        if reader.want_paused != paused:
            reader.want_paused = paused
            self._thread.call_soon(self._thread.set_paused, reader, paused)
        return True

    def leave_group(self) -> None:
        """Give the partitions to the others of the group, and read them on: until somebody takes them."""
        self._thread.call_soon(self._thread.leave_group)

    # -- called by the app and the consumer thread

    def on_rebalance_end(self) -> None:
        """Open the gates of the partitions that `start_from` was called for while the rebalance lasted."""
        starts, self._starts = self._starts, {}
        for reader, offset in starts.items():
            reader.began = True
            self._thread.call_soon(self._thread.seek_reader, reader, offset, reader.want_epoch)

    def deliver(self, chunks: list[Chunk]) -> None:
        """Put chunks into the queues of the agents.

        Not by way of Faust's conductor, which makes two tasks per event, adds a gap per chunk and drops what lies
        before an offset it has seen, as after a seek back.
        """
        app = self.app
        aside = app.rebalancing
        live = self.flow_active or aside
        generation = app.consumer_generation_id
        index = app.topics._tp_index
        for chunk in chunks:
            reader = chunk._reader
            channels = index.get(reader.tp)
            if not live or not channels or chunk.generation != generation or chunk._epoch != reader.want_epoch:
                reader.give_back()
                self.chunks_dropped += 1
                continue
            reader.pending = None
            if aside:
                reader.give_back()
                app.on_chunk_aside(chunk)
                continue
            message = _to_message(chunk)
            message.refcount = len(channels)
            event = app.create_event(None, chunk, None, message)
            for channel in channels:
                channel.queue.force_put_nowait(event)

    def on_read_error(self, reader: Reader, epoch: int, exc: Exception) -> None:
        if self._reader(reader.tp, reader.generation) is not reader or epoch != reader.want_epoch:
            return
        # The error answers the seek: a reader may ask for the same offset again.
        position, reader.pending = reader.state.position, None
        if isinstance(exc, OffsetOutOfRangeError):
            self.app.on_offset_out_of_range(reader.tp, position)
        else:
            self.app.on_read_error(reader.tp, position, exc)

    # -- Faust's bookkeeping, without the chunked topics

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        await super().on_partitions_revoked(revoked)
        self._starts.clear()
        self._positions.clear()
        self._committed_positions.clear()

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        self._starts.clear()
        self._positions.clear()
        self._committed_positions.clear()
        await super().on_partitions_assigned(assigned, generation_id)

    async def force_commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:
        done = await super().force_commit(topics, start_new_transaction=start_new_transaction)
        return await self._commit_set_positions() or done

    async def _commit_set_positions(self) -> bool:
        generation = self.app.consumer_generation_id
        due = {tp: o for tp, o in self._positions.items() if o != self._committed_positions.get(tp)}
        if not due:
            return False
        try:
            timeout_s = LAST_COMMIT_TIMEOUT_S if self.app.should_stop else COMMIT_TIMEOUT_S
            done = await asyncio.wait_for(self._thread.commit_positions(due, generation), timeout_s)
        except TimeoutError:
            self.log.warning("Commit took more than %s s, the next one tries again", timeout_s)
            return False
        if done and generation == self.app.consumer_generation_id:
            self._committed_positions.update(due)
            self.app.monitor.on_tp_commit(due)
        return done

    def pause_partitions(self, tps: Iterable[TP]) -> None:
        super().pause_partitions(tps)
        self._thread.call_soon(self._thread.set_plain_paused, ensure_TPset(tps), True)

    def resume_partitions(self, tps: Iterable[TP]) -> None:
        super().resume_partitions(tps)
        self._thread.call_soon(self._thread.set_plain_paused, ensure_TPset(tps), False)
        self._plain_resumed.set()

    async def _wait_next_records(self, timeout: float) -> tuple[RecordMap | None, set[TP] | None]:
        # Faust's, which sleeps a second when nothing is active, even if something is resumed meanwhile.
        if self.app.client_only:
            return await super()._wait_next_records(timeout)
        if not self.flow_active:
            await self.can_resume_flow.wait()
        self._plain_resumed.clear()
        chunked = self.app.chunked_topics
        active = {tp for tp in self._get_active_partitions() if tp.topic not in chunked}
        if active:
            return await self._getmany(active, timeout), active
        # Never asked with an empty set: to aiokafka that means all partitions.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._plain_resumed.wait(), timeout)
        return {}, active

    @Service.task
    async def _report_alive(self) -> None:
        while not self.should_stop:
            self._thread.call_soon(self._thread.alive)
            await self.sleep(1.0)


def _to_message(chunk: Chunk) -> ConsumerMessage:
    records = chunk.records
    return ConsumerMessage(
        chunk.topic,
        chunk.partition,
        chunk.next - 1,
        records[-1].timestamp / 1000 if records else time.time(),
        1,  # type of the timestamp: nobody asks
        None,  # headers
        None,  # key
        chunk,  # type: ignore[arg-type]
        None,  # checksum
        0,
        0,
        chunk._reader.tp,
        generation_id=chunk.generation,
    )


class ChunkTransport(driver.Transport):
    """The transport of `MarqApp`."""

    Consumer: ClassVar[type[ChunkConsumer]] = ChunkConsumer
    Producer: ClassVar[type[IdempotentProducer]] = IdempotentProducer


__all__ = [
    "MAX_BUFFERED_CHUNKS",
    "MAX_CHUNK_RECORDS",
    "Chunk",
    "ChunkConsumer",
    "ChunkQueue",
    "ChunkTransport",
    "OffsetOutOfRange",
]
