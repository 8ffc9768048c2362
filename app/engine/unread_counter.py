"""Counts what partitions have not read: a reader beyond the reading ahead, which keeps no payloads.

A partition whose payloads fill their share of memory is paused. From then on its log is read here up to its end, until
the partition itself has got that far; `marq.core.unread` counts. While no partition is paused, nothing runs here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from app.engine.owned_partition import OwnedPartition
from app.engine.read_up import LogEnds
from app.kafka.connection import end_client, start_consumer
from app.kafka.topics import Topics
from app.settings import Settings
from app.streaming.fetching import decode_with
from app.streaming.log_edges import release
from marq.clock import now_ms

log = logging.getLogger(__name__)

#: Records that are counted in one step: about a millisecond.
STEP_RECORDS = 1_000
#: Bytes that a fetch asks for, of all partitions together, and of one at least and at most.
FETCH_BYTES, PART_MIN_BYTES, PART_MAX_BYTES = 16 * 1024 * 1024, 64 * 1024, 1024 * 1024
#: Milliseconds that the broker waits before it answers a fetch without records.
FETCH_WAIT_MS = 500
#: Seconds between two questions where the logs end, and two looks at which partitions have to be counted.
ENDS_S, LOOK_S = 0.5, 0.2
#: The type of a timestamp that is the broker's.
LOG_APPEND_TIME = 1
#: Seconds for which the reader is kept while no partition needs it, and after which it is made anew when it failed.
IDLE_S, AGAIN_S = 10.0, 1.0
#: Deliveries a second from which counting takes this share of the worker's time at most.
BUSY_RATE, BUSY_SHARE = 1_000, 0.03
#: Seconds that a step takes at most by itself; the rest of the time that was measured was that of other work.
STEP_MAX_S = 0.01


class Partitions(Protocol):
    """What counting needs of the ownership."""

    settings: Settings
    owned: dict[int, OwnedPartition]
    log_ends: LogEnds

    @property
    def topics(self) -> Topics:
        """The topics in use."""

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a side task of the worker."""


class UnreadCounter:
    """Counts in the event loop of the worker, a thousand records at a time."""

    def __init__(self, ownership: Partitions) -> None:
        self._ownership = ownership
        self._wanted: dict[int, OwnedPartition] = {}  # partitions that were paused
        self._task: asyncio.Task[None] | None = None
        self._positions: dict[TopicPartition, int] = {}  # of the reader
        self._ended: dict[TopicPartition, tuple[int, int]] = {}  # where a log ended, and when that was asked
        self._used_s = self._asked_s = -1e9  # monotonic
        self._delivered: tuple[float, int] = (-1e9, 0)  # when deliveries were last counted, and their number
        self._busy = False

    def want(self, owned: OwnedPartition) -> None:
        """A partition is paused: count what it does not read."""
        if self._wanted.get(owned.number) is owned or not owned.serving:
            return
        self._wanted[owned.number] = owned
        if self._task is None or self._task.done():
            self._task = self._ownership.spawn(self._run())

    def _needs(self, owned: OwnedPartition) -> bool:
        """True until the partition reads by itself, and has read what was counted."""
        if self._ownership.owned.get(owned.number) is not owned or not owned.serving:
            return False
        partition = owned.owner.partition
        return owned.paused or partition.unread.stop > partition.position

    async def _run(self) -> None:
        """Count while there is something to count, and a while longer."""
        self._used_s = time.monotonic()
        while self._is_used():
            consumer: AIOKafkaConsumer | None = None
            try:
                consumer = await start_consumer(
                    self._ownership.settings,
                    isolation_level="read_committed",
                    auto_offset_reset="earliest",
                    fetch_max_wait_ms=FETCH_WAIT_MS,
                    fetch_max_bytes=FETCH_BYTES,
                )
                # what can't be decoded is reported when its partition reads it
                decode_with(consumer, self._ownership.topics.queue.__eq__, lambda tp, fault: None)
                self._positions = {}
                while self._is_used():
                    await self._step(consumer)
            except (KafkaError, OSError) as exc:
                log.info("What was not read can't be counted now: %r", exc)
                await asyncio.sleep(AGAIN_S)
            finally:
                if consumer is not None:
                    await end_client(consumer.stop())

    def _is_used(self) -> bool:
        if self._wanted:
            self._used_s = time.monotonic()
        return time.monotonic() - self._used_s < IDLE_S

    async def _step(self, consumer: AIOKafkaConsumer) -> None:
        """Count some records, or wait for some."""
        self._wanted = {number: owned for number, owned in self._wanted.items() if self._needs(owned)}
        topic = self._ownership.topics.queue
        owned_of = {TopicPartition(topic, number): owned for number, owned in self._wanted.items()}
        self._assign(consumer, owned_of)
        if not owned_of:
            await asyncio.sleep(LOOK_S)
            return
        if time.monotonic() - self._asked_s >= ENDS_S:
            self._asked_s, asked_ms = time.monotonic(), now_ms()
            for tp, end in (await self._ownership.log_ends.ask(list(owned_of))).items():
                owned_of[tp].log_end = end
                self._ended[tp] = (end, asked_ms)
        began_s = time.thread_time()
        found = await consumer.getmany(timeout_ms=round(LOOK_S * 1000), max_records=STEP_RECORDS)
        for tp, owned in owned_of.items():
            start, stop = self._positions[tp], await consumer.position(tp)
            if stop > start and self._needs(owned):
                records = found.get(tp, ())
                owned.owner.count_unread(start, stop, records, now_ms(), self._since_ms(tp, start, records))
            self._positions[tp] = stop
        spent_s = min(time.thread_time() - began_s, STEP_MAX_S)
        await asyncio.sleep(spent_s / BUSY_SHARE if found and self._is_busy() else 0)

    def _since_ms(self, tp: TopicPartition, start: int, records: Sequence[Any]) -> int | None:
        """When the log was last seen to end at `start` or below; None: not known, or the timestamps are producers'."""
        end, at_ms = self._ended.get(tp, (-1, 0))
        stamped = bool(records) and getattr(records[0], "timestamp_type", LOG_APPEND_TIME) == LOG_APPEND_TIME
        return at_ms if stamped and 0 <= end <= start else None

    def _assign(self, consumer: AIOKafkaConsumer, owned_of: dict[TopicPartition, OwnedPartition]) -> None:
        """Read these partitions, from where each was counted to."""
        if owned_of.keys() != self._positions.keys():
            release(consumer)
            if owned_of:
                consumer.assign(list(owned_of))
            self._positions = dict.fromkeys(owned_of, -1)
            room = FETCH_BYTES // max(1, len(owned_of))
            consumer._fetcher._max_partition_fetch_bytes = max(PART_MIN_BYTES, min(PART_MAX_BYTES, room))
        for tp, owned in owned_of.items():
            partition = owned.owner.partition
            start = max(partition.unread.stop, partition.position)
            if self._positions[tp] != start:
                consumer.seek(tp, start)
                self._positions[tp] = start

    def _is_busy(self) -> bool:
        """True while messages are delivered at a rate at which counting could slow them down."""
        now_s, (then_s, before) = time.monotonic(), self._delivered
        total = sum(owned.owner.partition.counters["delivered"] for owned in self._ownership.owned.values())
        if now_s - then_s >= LOOK_S:
            self._busy = total - before >= BUSY_RATE * (now_s - then_s)
            self._delivered = now_s, total
        return self._busy
