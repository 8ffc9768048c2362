"""Looks again, from time to time, at what was unreadable when a queue log was read: a replica may be back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from aiokafka.errors import KafkaError
from faust.types import TP
from mode.utils.logging import CompositeLogger

from app.engine.owned_partition import OwnedPartition
from marq.core.segments import Segment
from marq.core.state import size_of

if TYPE_CHECKING:
    from app.kafka.topics import Topics
    from app.streaming.faust_app import MarqApp

#: Milliseconds of the first pause between two looks at what a partition can't read, and of the longest.
AGAIN_MS = 2_000
AGAIN_MAX_MS = 120_000
#: Bytes of messages that were read late in one partition, above which it reads no more of them: they are in no table.
LATE_BYTES = 16 * 1024 * 1024


class Partitions(Protocol):
    """What second looks need of the ownership."""

    app: MarqApp
    owned: dict[int, OwnedPartition]

    @property
    def topics(self) -> Topics:
        """The topics in use."""

    @property
    def log(self) -> CompositeLogger:
        """The log of the worker."""

    def drain(self, owned: OwnedPartition) -> None:
        """Carry out the effects of an owner."""

    async def queue_start(self, owned: OwnedPartition) -> int | None:
        """Where the queue topic begins, which the owner is told if it has not read all below; None: not known."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        """Run a side task of the worker."""


class SecondLooks:
    """Reads unreadable ranges again."""

    def __init__(self, ownership: Partitions, now_ms: Callable[[], int]) -> None:
        self._ownership = ownership
        self._now_ms = now_ms

    def look(self, partitions: Mapping[int, OwnedPartition]) -> None:
        """Begin a look at each partition where one is due. Call it every few seconds."""
        now = self._now_ms()
        for owned in partitions.values():
            partition = owned.owner.partition
            if not partition.missed or not owned.serving or now < owned.look_again_ms or owned.looking:
                continue
            ranges = partition.unreadable_ranges()
            if not ranges:
                continue
            owned.looking = True
            self._ownership.spawn(self._look(owned, ranges))

    async def _look(self, owned: OwnedPartition, ranges: list[tuple[int, int]]) -> None:
        ownership, before = self._ownership, unreadable_in({0: owned}).get(0, 0)
        try:
            first = await ownership.queue_start(owned) or 0
            before = unreadable_in({0: owned}).get(0, 0)
            for start, stop in ranges:
                if stop <= first or _late_bytes(owned) >= LATE_BYTES:
                    continue  # Kafka has deleted it; or there is no room
                if not await self._read(owned, max(start, first), stop):
                    return
        except KafkaError as exc:
            ownership.log.debug("Partition %s: a second look failed: %r", owned.number, exc)
        finally:
            owned.looking = False
        count = unreadable_in({0: owned}).get(0, 0)
        if count < before:
            owned.look_again_pause_ms = 0
            ownership.log.info("Partition %s: %s unreadable offsets were read now", owned.number, before - count)
        pause_ms = owned.look_again_pause_ms = min(max(2 * owned.look_again_pause_ms, AGAIN_MS), AGAIN_MAX_MS)
        owned.look_again_ms = self._now_ms() + pause_ms

    async def _read(self, owned: OwnedPartition, start: int, stop: int) -> bool:
        """Take up what can be read of a range. Returns False if the partition is not ours any more."""
        ownership = self._ownership
        position, records = await ownership.app.consumer.read_again(
            TP(ownership.topics.queue, owned.number), start, stop
        )
        if ownership.owned.get(owned.number) is not owned or not owned.serving:
            return False
        if position > start:
            owned.owner.read_again(start, min(position, stop), records)
            ownership.drain(owned)
        return True


def unreadable_in(partitions: Mapping[int, OwnedPartition]) -> dict[int, int]:
    """The partitions with offsets that no replica has whole, and their number."""
    found = {n: one.owner.partition.unreadable_ranges() for n, one in partitions.items() if one.owner.partition.missed}
    return {n: sum(stop - start for start, stop in ranges) for n, ranges in sorted(found.items()) if ranges}


def _late_bytes(owned: OwnedPartition) -> int:
    """The bytes of messages that were read late, and are not done."""
    partition = owned.owner.partition
    records = (partition.messages.get(offset) for offset in partition.missed)
    return sum(size_of(record) for record in records if record is not None and type(record) is not Segment)
