"""Counts of messages by queue and state, and the age of the oldest message: in this worker, and in all workers.

They include what was not read yet (`marq.core.unread`). `Census.uncounted` names what they leave out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import msgspec
from faust.types import TP

from app.cluster.peers import Peers, peer_call
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from marq.clock import now_ms
from marq.core.digest import STATES, Entry, entries_among
from marq.core.partition import Partition
from marq.core.segments import Segment
from marq.core.stamps import is_believable, note_lowest
from marq.errors import MarqError

#: Milliseconds for which ages are reused: finding them takes a look at every message.
OLDEST_KEPT_MS = 500
#: Messages that are examined before other work gets its turn.
TURN_MESSAGES = 2_000
#: Queues, or groups of FIFO queues, that are looked at before other work has its turn.
TURN_QUEUES = 500

_READY, _DELAYED, _IN_FLIGHT = STATES

Counts = dict[str, dict[str, int]]
"""Messages by queue and state."""


class CountsWanted(msgspec.Struct):
    """Queues of which another worker wants counts; see `Census.total`."""

    queues: list[str]
    fresh: str = ""


class Uncounted(msgspec.Struct):
    """What the counts of a worker leave out, or may hold in excess."""

    since_ms: dict[int, int]  # partition -> for how long messages there were not counted: counts are "at least"
    at_most: list[str]  # queues of which some counted messages may be second sendings, or past their time to live
    served: list[int]  # the partitions that are counted at all


class _Oldest(NamedTuple):
    """The oldest messages in the partitions of this worker."""

    at_s: float  # monotonic
    sent_ms: dict[str, int]  # queue -> when its oldest unfinished message was sent


class Census:
    """Counts as they are now; ages as they were at most half a second ago."""

    def __init__(self, ownership: Ownership, peers: Peers) -> None:
        self._ownership = ownership
        self._peers = peers
        self._oldest = _Oldest(-1e9, {})
        self._sent_ms: dict[tuple[int, int], int] = {}  # of the messages that were the oldest the last time
        self._seen_ms: dict[tuple[int, int], int] = {}  # when they were first seen, if that can't be right
        self._looking = asyncio.Lock()
        self._nowhere_ms: dict[int, int] = {}  # partitions that no worker serves -> since when that was seen
        peers.register(self)

    # ------------------------------------------------------------------ here

    def counts(self, queues: Sequence[str] | None = None) -> Counts:
        """Messages of this worker's partitions, in some queues or in all. Queues without messages are left out."""
        counts: Counts = {}
        for owned in self._serving():
            partition = owned.owner.partition
            kept = partition.counts
            if partition.unread.queues:
                _add_unread(counts, partition, queues)
            some = kept.items() if queues is None else [(q, kept[q]) for q in queues if q in kept]
            # nobody has a turn meanwhile: with many queues each name that is looked up here holds up the others
            for queue, one in some:
                total = one.total
                if not total:
                    continue
                in_flight, delayed = one.in_flight, one.delayed
                there = counts.get(queue)
                if there is None:
                    counts[queue] = {_READY: total - in_flight - delayed, _DELAYED: delayed, _IN_FLIGHT: in_flight}
                else:
                    there[_READY] += total - in_flight - delayed
                    there[_IN_FLIGHT] += in_flight
                    there[_DELAYED] += delayed
            if partition.queue_id is not None and (queues is None or partition.queue_id in queues):
                # dead letters are in a topic of the user, which nobody counts
                dead = counts.setdefault(partition.queue_id, dict.fromkeys(STATES, 0))
                dead["dead"] = dead.get("dead", 0) + partition.counters["dead"]
        return counts

    async def ages(self) -> dict[str, int]:
        """Milliseconds since the oldest unfinished message of each queue was sent, by the brokers' time now."""
        oldest, now = (await self._now()).sent_ms, self._ownership.broker_time.now_ms
        return {queue: max(0, (now or sent_ms) - sent_ms) for queue, sent_ms in oldest.items()}

    @peer_call("counts")
    async def counts_here(self, wanted: CountsWanted) -> Counts:
        """See `counts`."""
        if wanted.fresh:
            await self._ownership.read_up.wait(wanted.fresh, self._ownership.copies)
        return self.counts(wanted.queues)

    @peer_call("oldest")
    async def oldest_here(self, queues: list[str]) -> dict[str, int]:
        """See `ages`, of some queues."""
        ages = await self.ages()
        return {queue: ages[queue] for queue in queues if queue in ages}

    @peer_call("uncounted")
    async def uncounted_here(self, queues: list[str]) -> Uncounted:
        """Partitions of this worker that are not counted to their end, and those of `queues` that may have fewer."""
        found, now, topic = Uncounted({}, [], []), now_ms(), self._ownership.topics.queue
        at_most: set[str] = set()
        for owned in self._serving():
            partition = owned.owner.partition
            found.served.append(owned.number)
            since_ms = owned.behind_since_ms(self._ownership.app.consumer.highwater(TP(topic, owned.number)) or 0, now)
            if since_ms is not None:
                found.since_ms[owned.number] = now - since_ms
            for queue in queues if partition.unread.queues else ():
                if queue not in at_most and self._may_be_fewer(partition, queue):
                    at_most.add(queue)
        found.at_most = sorted(at_most)
        return found

    def _may_be_fewer(self, partition: Partition, queue: str) -> bool:
        one = partition.unread.queues.get(queue)
        if one is None:
            return False
        ttl_ms = self._ownership.catalog.settings_of(queue).ttl_ms
        expires_ms = min(one.expires_ms, one.oldest_ms + ttl_ms) if ttl_ms else one.expires_ms
        return partition.unread.at_most or expires_ms <= partition.broker_ms

    def _serving(self) -> list[OwnedPartition]:
        return [owned for _, owned in sorted(self._ownership.owned.items()) if owned.serving]

    async def _now(self) -> _Oldest:
        async with self._looking:
            if time.monotonic() - self._oldest.at_s > OLDEST_KEPT_MS / 1000:
                self._oldest = await self._look()
        return self._oldest

    async def _look(self) -> _Oldest:
        """Find the oldest message of each queue and partition, among all messages, and read its timestamp."""
        lowest: dict[tuple[int, str], int] = {}
        for owned in self._serving():
            partition, number = owned.owner.partition, owned.number
            async for queue, offset in _lowest_parked_in_turns(partition):
                lowest[number, queue] = offset
            async for queue, offset in _lowest_in_turns(partition):
                place = number, queue
                if offset < lowest.get(place, offset + 1):
                    lowest[place] = offset
        known, self._seen_ms = self._seen_ms, {}
        oldest = await self._oldest_of(lowest, known)
        for owned in self._serving():
            for queue, one in list(owned.owner.partition.unread):
                sent_ms = self._believed((owned.number, one.first), one.oldest_ms, known)
                oldest[queue] = min(sent_ms, oldest.get(queue, sent_ms))
        return _Oldest(time.monotonic(), oldest)

    def _believed(self, place: tuple[int, int], sent_ms: int, known: dict[tuple[int, int], int]) -> int:
        """When a message was sent; if its timestamp can't be right, when it was first seen as the oldest one."""
        if is_believable(sent_ms):
            return sent_ms
        now = self._ownership.broker_time.now_ms
        seen_ms = self._seen_ms[place] = known.get(place, round(time.time() * 1000) if now is None else now)
        return seen_ms

    async def _oldest_of(
        self, lowest: dict[tuple[int, str], int], seen_ms: dict[tuple[int, int], int]
    ) -> dict[str, int]:
        """When the oldest message of each queue was sent, from the lowest offsets of its partitions."""
        known, self._sent_ms = self._sent_ms, {}
        oldest: dict[str, int] = {}
        for looked_at, ((number, queue), offset) in enumerate(lowest.items(), 1):
            if not looked_at % TURN_QUEUES:
                await asyncio.sleep(0)
            sent_ms = known.get((number, offset))
            if sent_ms is None:
                owned = self._ownership.owned.get(number)
                if owned is None or not owned.serving:
                    continue
                sent_ms = _sent_ms(owned.owner.partition, offset)
                await asyncio.sleep(0)  # a segment may have been read
                if sent_ms is None:
                    continue
            self._sent_ms[number, offset] = sent_ms
            sent_ms = self._believed((number, offset), sent_ms, seen_ms)
            oldest[queue] = min(sent_ms, oldest.get(queue, sent_ms))
        return oldest

    # ------------------------------------------------------------------ of the cluster

    async def counts_of(self, queue: str) -> dict[str, int]:
        """Messages of a queue by state, in all workers that answer. All that was confirmed before is counted."""
        counts, _ = await self.total([queue], fresh=queue)
        found = counts.get(queue, {})
        return {state: found.get(state, 0) for state in STATES}

    async def total(self, queues: list[str], fresh: str = "") -> tuple[Counts, list[str]]:
        """Messages of some queues by state in all workers, and those that did not answer, with their partitions.

        Args:
            queues: names; those without messages are left out of the answer.
            fresh: a queue of which everything is counted that was confirmed before.
        """
        counts: Counts = {}
        answers = await self._peers.everywhere(self.counts_here, CountsWanted(queues, fresh))
        for answer in answers.values():
            if isinstance(answer, MarqError):
                continue
            for name, states in answer.items():
                total = counts.setdefault(name, dict.fromkeys(STATES, 0))
                for state, count in states.items():
                    total[state] = total.get(state, 0) + count
        return counts, self._peers.missing(answers)

    async def uncounted(self, queues: list[str]) -> Uncounted:
        """See `uncounted_here`, of all workers that answer. Also the partitions that none of them serves."""
        total, now = Uncounted({}, [], []), now_ms()
        for answer in (await self._peers.everywhere(self.uncounted_here, queues)).values():
            if not isinstance(answer, MarqError):
                total.since_ms |= answer.since_ms
                total.at_most += answer.at_most
                total.served += answer.served
        nowhere = set(range(self._ownership.topics.partitions)).difference(total.served)
        self._nowhere_ms = {number: self._nowhere_ms.get(number, now) for number in sorted(nowhere)}
        total.since_ms |= {number: now - since_ms for number, since_ms in self._nowhere_ms.items()}
        return total

    async def oldest(self, queues: list[str]) -> dict[str, int]:
        """Milliseconds since the oldest unfinished message of each was sent, in all workers that answer."""
        ages: dict[str, int] = {}
        for answer in (await self._peers.everywhere(self.oldest_here, queues)).values():
            for queue, age in answer.items() if not isinstance(answer, MarqError) else ():
                ages[queue] = max(ages.get(queue, 0), age)
        return ages


def _add_unread(counts: Counts, partition: Partition, queues: Sequence[str] | None) -> None:
    for queue, (total, in_flight, delayed) in partition.unread_counts().items():
        if queues is None or queue in queues:
            there = counts.setdefault(queue, dict.fromkeys(STATES, 0))
            there[_READY] += total - in_flight - delayed
            there[_IN_FLIGHT] += in_flight
            there[_DELAYED] += delayed


def _sent_ms(partition: Partition, offset: int) -> int | None:
    """When a message was sent; None if it is done by now."""
    if offset in partition.messages:
        return int(partition.record(offset).timestamp)
    segment = partition.segments.find(offset)
    if segment is None or not segment.is_parked(offset):
        return None
    return int(partition.records_of(segment)[offset].timestamp)


async def _lowest_parked_in_turns(partition: Partition) -> AsyncIterator[tuple[str, int]]:
    """Queues and their lowest parked offsets, with turns of other work between.

    Each segment is gone through once, for all queues that begin in it: to ask it for one queue takes an index, and for
    thousands of queues that would make the same indexes again and again.
    """
    queues_of: dict[Segment, list[str]] = {}
    looked_at = 0
    for queue, groups in list(partition.segments.queues.items()):
        lowest: Segment | None = None
        for segments in list(groups.values()):
            looked_at += 1
            if not looked_at % TURN_QUEUES:
                await asyncio.sleep(0)
            # its messages may have been taken meanwhile
            if segments and (lowest is None or segments[0] < lowest):
                lowest = segments[0]
        if lowest is not None:
            queues_of.setdefault(lowest, []).append(queue)
    for segment, queues in queues_of.items():
        for found in segment.lowest_parked(queues).items():
            yield found
        await asyncio.sleep(0)


async def _lowest_in_turns(partition: Partition) -> AsyncIterator[tuple[str, int]]:
    """Queues and their lowest offsets in memory: where there are many messages, other work has its turns between."""
    offsets, lowest = list(partition.messages), dict[str, int]()
    wanted = {queue for queue, counts in partition.counts.items() if counts.total}
    highest: int | None = None  # of those that were found, once there is one of each queue
    for start in range(0, len(offsets), TURN_MESSAGES):
        part = offsets[start : start + TURN_MESSAGES]
        # nearly always the first part has the lowest of all; but messages that were read back may be anywhere
        if highest is None or min(part) < highest:
            note_lowest(partition, part, lowest)
            highest = max(lowest.values()) if lowest and wanted <= lowest.keys() else None
        await asyncio.sleep(0)
    for found in lowest.items():
        yield found


async def entries_in_turns(partition: Partition) -> AsyncIterator[Entry]:
    """The messages in memory, in slices: other work runs between them, so the result is not of one moment."""
    offsets = list(partition.messages)
    for start in range(0, len(offsets), TURN_MESSAGES):
        for entry in list(entries_among(partition, offsets[start : start + TURN_MESSAGES])):
            yield entry
        await asyncio.sleep(0)
