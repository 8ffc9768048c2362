"""The thread that owns the aiokafka consumer: it fetches, hands over chunks, commits, and leaves the group."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

import aiokafka
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    InconsistentGroupProtocolError,
    KafkaError,
    OffsetOutOfRangeError,
)
from aiokafka.structs import OffsetAndMetadata
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode import Service

from app.kafka.connection import end_client
from app.streaming.batches import Fault, FetchedRecord
from app.streaming.chunks import Chunk, Reader
from app.streaming.faults import is_expected, stop_if_reading_ends, stop_on_faults
from app.streaming.fetch_plan import FetchPlan
from app.streaming.fetching import Decoder, decode_with, said_of
from app.streaming.gathering import Gathering
from app.streaming.paced_client import PacedClient
from marq.errors import BrokerError, InternalError

#: Records in one chunk at most: bounds how long an agent blocks the event loop.
MAX_CHUNK_RECORDS = 5_000
#: Milliseconds that the broker waits before it answers a fetch without data. aiokafka has one fetch per broker under
#: way, so a partition that was just resumed may wait as long while all others are idle.
FETCH_WAIT_MS = 100
#: The same for a fetch that leaves out none of our partitions, so that nobody can be waiting for the next one.
WHOLE_FETCH_WAIT_MS = 500
#: Seconds that aiokafka delays the fetch of a whole broker while data of one of its partitions waits for its reader.
#: Otherwise the next fetch would leave that partition out, and take `FETCH_WAIT_MS` when all others are idle.
FETCH_HOLD_S = 0.02
#: Seconds after which a commit is given up; the next one includes it.
COMMIT_TIMEOUT_S = 5.0


class ChunkThread(driver.AIOKafkaConsumerThread):
    """The thread that owns the aiokafka consumer: it hands over what was fetched, in one call for all partitions."""

    app: Any
    consumer: Any  # the `ChunkConsumer` in the main thread; `transport` imports this module

    def __post_init__(self) -> None:
        super().__post_init__()
        self.readers: dict[TP, Reader] = {}
        #: Partitions with data that can't be taken now, until something happens to them: their readers have no room, or
        #: are paused. A thousand that wait must not be gone through for each that has news.
        self._blocked: set[TP] = set()
        self._wake = asyncio.Event()
        self._committing: asyncio.Future[Any] | None = None
        self._leaving: asyncio.Future[None] | None = None
        self.plan: FetchPlan | None = None
        self.decoder: Decoder | None = None
        self.gathering = Gathering(self.call_soon)

    @property
    def _chunked(self) -> frozenset[str]:
        topics: frozenset[str] = self.app.chunked_topics
        return topics

    def renew_metadata(self) -> None:
        if self._consumer is not None:
            self._consumer._client.force_metadata_update()

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

    async def read_again(self, tp: TP, start: int, stop: int) -> tuple[int, list[Any]]:
        """See `Decoder.read_again`. Raises `KafkaError`, `RuntimeError` if the thread has stopped."""
        if self.decoder is None:
            return start, []
        reading = self.decoder.read_again(TopicPartition(*tp), start, stop)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(reading, self.thread_loop))

    # -- in this thread

    def leave_group(self) -> None:
        """Tell the group that this member leaves. Its partitions are read on, and there are no more rebalances."""
        if self._leaving is None and self._consumer is not None:
            self._leaving = asyncio.ensure_future(self._consumer._coordinator.close())

    def wake(self) -> None:
        self._wake.set()

    def unblock(self, tp: TP) -> None:
        """Something happened to a partition: its data may be taken now."""
        self._blocked.discard(tp)
        self.wake()

    def _touch(self, tp: TP) -> None:
        """Tell the fetch plan that a partition was paused, resumed or moved."""
        if self.plan is not None:
            self.plan.touch(tp)

    def alive(self) -> None:
        """Note that the main thread runs. Without a call for `broker_max_poll_interval`, it leaves the group."""
        if self._consumer is not None:
            with self._consumer._subscription.fetch_context():
                pass

    async def on_start(self) -> None:
        stop_on_faults(asyncio.get_running_loop(), self._fail_worker)
        await super().on_start()
        stop_if_reading_ends(self._ensure_consumer(), self._fail_worker)
        fetcher = self._ensure_consumer()._fetcher
        fetcher._client = PacedClient(fetcher._client)
        self.decoder = decode_with(
            self._ensure_consumer(), self._chunked.__contains__, self._on_fault, self.app.contiguous_topics.__contains__
        )
        self.plan = FetchPlan(fetcher, self._chunked, WHOLE_FETCH_WAIT_MS)
        # Chunks are taken in the step in which the response arrives. Otherwise the fetcher would ask again at once,
        # without the partitions that have data, and these would wait until that fetch ends.
        fetcher._proc_fetch_request = partial(self._fetch_and_hand_over, fetcher, fetcher._proc_fetch_request)
        fetcher._prefetch_backoff = FETCH_HOLD_S

    def _fail_worker(self, exc: BaseException) -> None:
        if not self.should_stop:
            self.parent_loop.call_soon_threadsafe(self.app.fail, exc)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Stop the worker if a listener of rebalances fails: aiokafka only logs it, with half of an assignment done."""
        try:
            yield
        except Exception as exc:
            if not is_expected(exc):
                self._fail_worker(InternalError(f"a rebalance failed here: {exc!r}"))
            raise

    def _on_fault(self, tp: TopicPartition, fault: Fault) -> None:
        self.consumer.unreadable[tp.topic] += fault.stop - fault.start
        self.log.warning(said_of(tp, fault))

    def _create_worker_consumer(self, transport: driver.Transport) -> aiokafka.AIOKafkaConsumer:
        # Like Faust's method, which lacks settings for isolation level and wait, and drops the assignor without tables.
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
        # aiokafka may look for the coordinator of its group for ever. The task is not cancelled, but left alone: the
        # method queue that it waits for would swallow the cancellation.
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
            if self.plan is not None:
                self.plan.expects_partitions = True
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
                # Paused, with an arbitrary position: so aiokafka neither fetches nor looks for a committed offset.
                state.pause()
                state.seek(0)
                self._touch(tp)
                # aiokafka calls this when the broker answers that the position is outside of the log.
                state.await_reset = lambda _strategy, reader=reader: self._on_out_of_range(reader)
        self.readers = readers
        self._blocked.clear()

    def seek_reader(self, reader: Reader, offset: int, epoch: int) -> None:
        """Open the gate of a partition, or move it: the next chunk starts at `offset`."""
        if self.readers.get(reader.tp) is not reader or not reader.state._assignment.active:
            return
        reader.epoch = epoch
        reader.open = True
        self._ensure_consumer()._fetcher.seek_to(TopicPartition(*reader.tp), offset)
        if not reader.paused:
            reader.state.resume()
        self._touch(reader.tp)
        self.unblock(reader.tp)

    def set_paused(self, reader: Reader, paused: bool) -> None:
        reader.paused = paused
        self._touch(reader.tp)
        if paused:
            reader.state.pause()
            result = self._ensure_consumer()._fetcher._records.get(reader.tp)
            if result is not None:
                result._backoff = 0.0
        elif reader.open:
            reader.state.resume()
            self.unblock(reader.tp)

    def set_plain_paused(self, tps: set[TP], paused: bool) -> None:
        """Pause in aiokafka what Faust pauses: otherwise each fetch would ask for paused changelogs."""
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
                self._touch(tp)

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
                    self._check_member(waiter)
                waiter = fetcher._create_fetch_waiter()
                waiter.add_done_callback(lambda _: self.wake())
            if not self._hand_over(fetcher):
                await self._wake.wait()
            else:
                await asyncio.sleep(0)

    def _check_member(self, waiter: asyncio.Future[Any]) -> None:
        """Raises what ended the membership in the group, such as a refused authorization."""
        try:
            waiter.result()
        except InconsistentGroupProtocolError as exc:
            group = self.app.conf.id
            raise BrokerError(
                f"a program that is no marq worker is in the consumer group {group!r}: end it, or set MARQ_NAME to a "
                "name that nothing else uses"
            ) from exc

    async def _fetch_and_hand_over(self, fetcher: Any, fetch: Callable[..., Awaitable[bool]], *args: Any) -> bool:
        """Carry out a fetch; the broker gets no other one until this has returned."""
        has_data = await fetch(*args)
        if self._hand_over(fetcher) and not fetcher._records:
            # while data is left, its readers wait for room, and Faust's own readers for the end of this call
            await self.gathering.pause()
        return has_data

    def _hand_over(self, fetcher: Any) -> bool:
        """Give the main thread what can be taken now; one call for all partitions."""
        chunks = self._take(fetcher)
        if chunks:
            self.parent_loop.call_soon_threadsafe(self.consumer.deliver, chunks)
        return bool(chunks)

    def _take(self, fetcher: Any) -> list[Chunk]:
        """Take one chunk of each partition that has data, an open gate and room.

        Nothing here awaits, so that no seek comes in between and the positions before and after a chunk are exact.
        """
        chunks: list[Chunk] = []
        for tp in fetcher._records.keys() - self._blocked if self._blocked else list(fetcher._records):
            reader = self.readers.get(tp)
            if reader is None or not reader.state._assignment.active:
                continue
            result = fetcher._records[tp]
            if not reader.open or reader.paused:
                result._backoff = 0.0  # may wait for long without delaying others
                self._blocked.add(tp)
                continue
            if not reader.has_room():
                self._blocked.add(tp)
                continue
            start = reader.state.position
            records: list[FetchedRecord] = []
            fetched: Any = None
            try:
                if type(result) is FetchResult:
                    fetched = result._partition_records  # which the result forgets at its end
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
                chunks.append(Chunk(reader, start, reader.state.position, records, getattr(fetched, "since_ms", None)))
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
        self._touch(reader.tp)
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
            # also limited in the thread that asked: an endless commit would hold up all its later calls
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                await self._committing
        except TimeoutError:
            return False
        except (CommitFailedError, IllegalStateError) as exc:
            self.log.info("Commit came too late for this generation: %s", exc)
            return False
        except KafkaError as exc:
            self.log.warning("Commit failed, the next one tries again: %r", exc)
            return False
        return True
