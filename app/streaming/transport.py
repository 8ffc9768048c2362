"""Reads Kafka in chunks: the Faust transport below every agent of marq. `app.streaming.producer` appends.

A *chunk* (`app.streaming.chunks`) is what one fetch returned for one partition, with the fetch positions before and
after it. For the topics in `app.chunked_topics` an agent gets one event per chunk (`event.value` is the `Chunk`), which
costs a Faust event per thousands of records instead of one per record. Changelogs keep Faust's own path.

The way of a chunk, two threads and one hand-over:

    broker -> aiokafka's fetcher -> ChunkThread._pump -> ChunkConsumer.deliver -> queue of the agent -> agent
              (`consumer_thread`)                        (main thread)

The fetcher's records are decoded by `app.streaming.batches`, also where they are damaged. While nobody waits for more,
the next fetch comes some milliseconds later (`app.streaming.gathering`).

Rules, and who keeps them:
- Gate: after an assignment nothing is delivered from a partition until `start_from` was called in this generation and
  the rebalance has ended (Faust clears the agents' queues while it lasts).
- While the group rejoins, reading goes on under the old assignment. Agents stand still then, so chunks go to
  `app.on_chunk_aside`.
- At most `MAX_BUFFERED_CHUNKS` chunks of a partition wait in front of the agent.
- Only `set_commit_position` decides what is committed. A committed position is a hint, and never too high.
- A position outside the log is an error (`app.on_offset_out_of_range`), never a silent reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from aiokafka import TopicPartition
from aiokafka.errors import OffsetOutOfRangeError
from faust.transport.consumer import RecordMap, ensure_TPset
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from faust.types.tuples import ConsumerMessage
from mode import Service

from app.streaming.chunks import Chunk, Reader
from app.streaming.consumer_thread import COMMIT_TIMEOUT_S, ChunkThread
from app.streaming.producer import IdempotentProducer
from marq.errors import MarqError

#: Seconds that the last commit of a worker may take: short, because nothing depends on it.
LAST_COMMIT_TIMEOUT_S = 1.0


class OffsetOutOfRange(MarqError):
    """The log of a partition does not hold the position that is to be read next."""


class ChunkConsumer(driver.Consumer):
    """Faust's consumer, with chunks for the topics in `app.chunked_topics`.

    Call all methods in the main thread. Those that take a partition return False, and do nothing, if it is not assigned
    in the given `generation` (by default the current one).
    """

    app: Any

    _thread: ChunkThread

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._starts: dict[Reader, int] = {}
        self._positions: dict[TP, int] = {}
        self._committed_positions: dict[TP, int] = {}
        self._plain_resumed = asyncio.Event()
        #: Partitions of which a chunk has come, taken or dropped. Whoever looks at them empties this.
        self.stirred: dict[int, None] = {}
        #: Chunks that were fetched and dropped, because of a seek or a rebalance.
        self.chunks_dropped = 0
        #: Offsets that could not be decoded, by topic; counted again when they are read again.
        self.unreadable: Counter[str] = Counter()
        super().__init__(*args, **kwargs)

    def _new_consumer_thread(self) -> ChunkThread:
        return ChunkThread(self, loop=self.loop, beacon=self.beacon)

    @property
    def in_group(self) -> bool:
        """False while this worker can't know whether it is still a member: its coordinator is unknown, or forgot it."""
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
        """Go back (or forth) to `offset`.

        Chunks of the old position are dropped, except those in the agent's queue. A second call for the same offset
        does nothing until a chunk from there was delivered.
        """
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
        """Set the offset to commit next. Everything below it must be durable elsewhere."""
        if self._reader(tp, generation) is None:
            return False
        self._positions[tp] = offset
        return True

    def partition_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """How many partitions each topic has, as far as the last metadata tell; 0: none is known."""
        consumer = self._thread._consumer
        cluster = consumer._client.cluster if consumer is not None else None
        return {topic: len(cluster.partitions_for_topic(topic) or ()) if cluster else 0 for topic in topics}

    def renew_metadata(self) -> None:
        """Ask for the metadata soon: aiokafka does by itself every five minutes."""
        self._thread.call_soon(self._thread.renew_metadata)

    def highwater(self, tp: TP) -> int | None:  # type: ignore[override]
        """The end of a log as the last fetch has told it; None if nothing was fetched, or it is not read here any more.

        The thread may lose a partition between any two steps of the main thread; aiokafka's method fails then.
        """
        state = self._states().get(TopicPartition(*tp))
        return state.highwater if state is not None else None

    def unstable(self) -> dict[TP, tuple[int, int]]:
        """Logs with an open transaction: where it begins, and where the log ends, as the last fetch told."""
        return {
            TP(*tp): (state.lso, state.highwater)
            for tp, state in self._states().items()
            if state.lso is not None and 0 <= state.lso < state.highwater
        }

    def _states(self) -> Mapping[TopicPartition, Any]:
        consumer = self._thread._consumer
        subscription = consumer._subscription.subscription if consumer is not None else None
        assignment = subscription.assignment if subscription is not None else None
        return assignment._tp_state if assignment is not None else {}

    async def read_again(self, tp: TP, start: int, stop: int) -> tuple[int, list[Any]]:
        """What can be read now of `[start, stop)`, from any replica, and the position behind it; reading goes on."""
        return await self._thread.read_again(tp, start, stop)

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

    def hurry(self, *, lasting: bool = True) -> None:
        """Somebody waits for records that are not read yet: see `Gathering.hurry`."""
        self._thread.gathering.hurry(lasting=lasting)

    def leave_group(self) -> None:
        """Leave the group, so that others get the partitions, and read on until somebody takes them."""
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

        They do not go through Faust's conductor. It makes two tasks for each event, adds a gap for each chunk, and
        drops chunks below an offset that it has seen, as after a seek back.
        """
        app = self.app
        aside = app.rebalancing
        live = self.flow_active or aside
        generation = app.consumer_generation_id
        index = app.topics._tp_index
        for chunk in chunks:
            reader = chunk._reader
            self.stirred[chunk.partition] = None
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
        # the error is the answer to the seek: the same offset may be asked for again
        position, reader.pending = reader.state.position, None
        if isinstance(exc, OffsetOutOfRangeError):
            self.app.on_offset_out_of_range(reader.tp, position)
        else:
            self.app.on_read_error(reader.tp, position, exc)

    # -- Faust's bookkeeping, without the chunked topics

    async def verify_all_partitions_active(self) -> None:
        # Faust goes through all of them every 2.5 s, with a turn of the loop for each, for a check that would find
        # nothing here: see `ChunkThread.verify_event_path`
        return None

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
            async with asyncio.timeout(timeout_s):
                done = await self._thread.commit_positions(due, generation)
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
        # Faust's method sleeps for a second if nothing is active, even when a partition is resumed meanwhile
        if self.app.client_only:
            return await super()._wait_next_records(timeout)
        if not self.flow_active:
            await self.can_resume_flow.wait()
        self._plain_resumed.clear()
        chunked = self.app.chunked_topics
        active = {tp for tp in self._get_active_partitions() if tp.topic not in chunked}
        if active:
            return await self._getmany(active, timeout), active
        # an empty set would mean all partitions to aiokafka
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._plain_resumed.wait()
        return {}, active

    @Service.task
    async def _report_alive(self) -> None:
        while not self.should_stop:
            self._thread.call_soon(self._thread.alive)
            await self.sleep(1.0)


def _to_message(chunk: Chunk) -> ConsumerMessage:
    records = chunk.records
    return ConsumerMessage(
        topic=chunk.topic,
        partition=chunk.partition,
        offset=chunk.next - 1,
        timestamp=records[-1].timestamp / 1000 if records else time.time(),
        timestamp_type=1,  # unused
        headers=None,
        key=None,
        value=chunk,  # type: ignore[arg-type]
        checksum=None,
        serialized_key_size=0,
        serialized_value_size=0,
        tp=chunk._reader.tp,
        generation_id=chunk.generation,
    )


class ChunkTransport(driver.Transport):
    """The transport of `MarqApp`."""

    Consumer: ClassVar[type[ChunkConsumer]] = ChunkConsumer
    Producer: ClassVar[type[IdempotentProducer]] = IdempotentProducer
