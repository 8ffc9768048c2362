"""Read-only views of workers, queues, partitions and tables. Any worker answers for the whole cluster.

Each worker describes its own partitions (functions called `…_here`). The worker that is asked merges the answers, and
names the workers that did not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from msgspec import UNSET

from app.cluster.peers import MemberTrouble, Peers, peer_call
from app.engine.breakers import BreakerState
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.engine.read_up import QUESTION_S, Ends
from app.engine.second_looks import unreadable_in
from app.engine.stalls import Stall
from app.service.census import Census
from app.service.descriptions import (
    DigestView,
    LossView,
    MessageBrief,
    MessagesWanted,
    MessageView,
    PartitionView,
    Place,
    QueueStats,
    RowsWanted,
    RowView,
    State,
    Stats,
    WorkerPartitions,
    WorkerView,
)
from app.service.message_views import brief_of, describe_message, wanted_entries
from app.service.owners import Owners
from app.service.paging import smallest
from app.service.receives import Receives
from app.service.vitals import vitals_of
from app.service.watches import Receivers
from marq.core.digest import STATES, digest_of, entries
from marq.core.state import MessageState
from marq.errors import MarqError, NotFoundError
from tables import markers, messages, progress

#: File in which Linux gives the memory of a process.
_STATM = Path("/proc/self/statm")
#: Bytes of all payloads in a list of messages.
ANSWER_BYTES = 4 * 1024 * 1024

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")

_DESCRIBE: dict[str, Callable[[str, bytes], Any]] = {
    table.NAME: table.describe for table in (messages, markers, progress)
}


class Inspection:
    """Answers questions. Changes nothing."""

    def __init__(
        self, ownership: Ownership, receives: Receives, census: Census, receivers: Receivers, peers: Peers
    ) -> None:
        self._ownership = ownership
        self._catalog = ownership.catalog
        self._receives = receives
        self._census = census
        self._receivers = receivers
        self._peers = peers
        self._owners = Owners(ownership, peers)
        self._began_s = time.monotonic()
        peers.register(self)

    # ------------------------------------------------------------------ workers and partitions

    async def workers(self) -> tuple[list[WorkerView], list[str]]:
        """All workers, and those that did not answer."""
        found, missing = await self._everywhere(self.worker_here, None)
        return sorted(found, key=lambda worker: worker.url), missing

    def troubles(self) -> list[MemberTrouble]:
        """What keeps workers from reaching each other, as far as this one knows."""
        return self._peers.troubles()

    @peer_call("worker")
    async def worker_here(self, _: None) -> WorkerView:
        """This worker."""
        ownership = self._ownership
        return WorkerView(
            worker=ownership.worker_name,
            url=self._peers.shown_url,
            ready=ownership.ready,
            partitions=sorted(ownership.owned),
            uptime_s=round(time.monotonic() - self._began_s, 1),
            peak_memory_bytes=_peak_memory_bytes(),
            payload_bytes=sum(h.owner.partition.bytes for h in ownership.owned.values()),
            pending_bytes=ownership.app.producer.pending_bytes,
            waiting_receives=self._receives.count,
            vitals=vitals_of(ownership, Path(ownership.app.conf.datadir)),
        )

    async def partitions(self) -> tuple[list[PartitionView], list[str]]:
        """All partitions, and the workers that did not answer."""
        found, missing = await self._everywhere(self.partitions_here, None)
        return sorted((p for one in found for p in one.partitions), key=lambda p: p.partition), missing

    @peer_call("partitions")
    async def partitions_here(self, _: None) -> WorkerPartitions:
        """The partitions assigned to this worker, also those that it can't serve."""
        name, ends = self._ownership.worker_name, await self._ends()
        return WorkerPartitions(
            worker=name,
            peak_memory_bytes=_peak_memory_bytes(),
            partitions=[
                *(self._describe(owned, ends) for _, owned in sorted(self._ownership.owned.items())),
                *(PartitionView(n, name, "unserved", reason) for n, reason in sorted(self._unserved().items())),
            ],
        )

    async def unserved(self) -> dict[str, str]:
        """Partitions that nobody serves, with the reason. Their messages are in no count."""
        found, _ = await self._everywhere(self.unserved_here, None)
        return {str(number): reason for one in found for number, reason in sorted(one.items())}

    @peer_call("unserved")
    async def unserved_here(self, _: None) -> dict[int, str]:
        """See `unserved`, of this worker."""
        return self._unserved()

    async def stalled(self) -> dict[str, Stall]:
        """Partitions in which Kafka confirms nothing: the topic, and the longest time for which a worker has waited."""
        found, _ = await self._everywhere(self.stalled_here, None)
        stalled: dict[int, Stall] = {}
        for number, stall in ((number, stall) for one in found for number, stall in one.items()):
            stalled[number] = max(stall, stalled.get(number, stall), key=lambda s: s.seconds)
        return {str(number): stall for number, stall in sorted(stalled.items())}

    @peer_call("stalled")
    async def stalled_here(self, _: None) -> dict[int, Stall]:
        """Partitions, of any owner, in which Kafka confirms nothing that this worker writes."""
        return self._ownership.stalls.now()

    async def unreadable(self) -> dict[str, int]:
        """Partitions with offsets that no replica has whole, and their number. Messages among them are in no count."""
        found, _ = await self._everywhere(self.unreadable_here, None)
        return {str(number): count for one in found for number, count in sorted(one.items())}

    @peer_call("unreadable")
    async def unreadable_here(self, _: None) -> dict[int, int]:
        """See `unreadable`, of this worker."""
        return unreadable_in(self._ownership.owned)

    def _unserved(self) -> dict[int, str]:
        ownership = self._ownership
        return {n: reason for n, reason in ownership.unserved.items() if n not in ownership.owned}

    async def _ends(self) -> Ends:
        """Where the logs of this worker's partitions end, as Kafka says now; nothing if it does not answer."""
        topics, log_ends = self._ownership.topics, self._ownership.log_ends
        tps = [TopicPartition(topic, n) for topic in (topics.queue, topics.markers) for n in self._ownership.owned]
        with contextlib.suppress(KafkaError, OSError, TimeoutError):
            async with asyncio.timeout(QUESTION_S):
                return await log_ends.ask(tps) if tps else {}
        return {}

    def _describe(self, owned: OwnedPartition, ends: Ends) -> PartitionView:
        partition, now = owned.owner.partition, time.monotonic()
        topics = self._ownership.topics
        stall = self._ownership.stalls.now().get(owned.number)
        return PartitionView(
            partition=owned.number,
            owner=self._ownership.worker_name,
            phase=owned.owner.phase.value,
            reason=stall.reason if stall is not None and stall.reason else UNSET,
            epoch=owned.owner.epoch,
            position=partition.position,
            lag=_lag(ends, topics.queue, owned.number, partition.position),
            markers_position=partition.markers_position,
            markers_lag=_lag(ends, topics.markers, owned.number, partition.markers_position),
            persisted=partition.persisted,
            checkpoint_age_ms=None if owned.checkpoint_s is None else round((now - owned.checkpoint_s) * 1000),
            clock_ms=partition.clock_ms,
            in_memory=len(partition.messages),
            held=len(partition.deliveries),
            parked=partition.segments.parked_total(),
            segments=len(partition.segments),
            bytes=partition.bytes,
            paused=owned.paused,
            unsaved=partition.changed(),
            unreadable=partition.unreadable_ranges(),
            counters=dict(partition.counters),
            lost=LossView.recent(partition),
        )

    async def digest(self, number: int) -> DigestView:
        """Counts and digest of one partition. Raises `NotFoundError`, `UnavailableError`."""
        return await self._ask(number, self.digest_here, number)

    @peer_call("digest")
    async def digest_here(self, number: int) -> DigestView:
        """See `digest`."""
        owned = self._owners.serving_here(number)
        partition = owned.owner.partition
        view = DigestView(
            partition=number,
            epoch=owned.owner.epoch,
            queue_position=partition.position,
            markers_position=partition.markers_position,
            clock_ms=partition.clock_ms,
            broker_ms=partition.broker_ms,
            counters=dict(partition.counters),
            queues={},
            digest="",
        )
        found = await asyncio.to_thread(digest_of, list(entries(partition)))
        view.queues = {queue: {s.value: n for s, n in states.items()} for queue, states in found.queues.items()}
        view.digest = found.digest
        return view

    # ------------------------------------------------------------------ queues

    async def stats(self, queues: list[str]) -> Stats:
        """Queues with counts by state, and what makes the counts incomplete."""
        dead_queues = {queue: self._catalog.settings_of(queue).dead_letters_of(queue) for queue in queues}
        wanted = [*dict.fromkeys([*queues, *dead_queues.values()])]
        # at once: each waits for a worker that stands still
        (
            ((counts, missing), ages, breakers, received),
            (unserved, stalled, unreadable, uncounted),
        ) = await asyncio.gather(
            asyncio.gather(
                self._census.total(wanted, fresh=queues[0] if len(queues) == 1 else ""),
                self._census.oldest(queues),
                self._breakers(queues),
                self._receivers.of(queues),
            ),
            asyncio.gather(self.unserved(), self.stalled(), self.unreadable(), self._census.uncounted(wanted)),
        )
        hidden = any(stall.hidden for stall in stalled.values())
        at_least = bool(missing or unserved or unreadable or uncounted.since_ms or hidden)
        none: dict[str, int] = dict.fromkeys(STATES, 0)
        stats: list[QueueStats] = []
        for queue in queues:
            own = counts.get(queue, none)
            dead_letters = counts.get(dead_queues[queue], none)
            unfinished = own["ready"] + own["delayed"] + own["in_flight"]
            stats.append(
                QueueStats(
                    queue=queue,
                    ready=own["ready"],
                    delayed=own["delayed"],
                    in_flight=own["in_flight"],
                    dead=own.get("dead", sum(dead_letters.values())),
                    # ages are half a second old: what they don't know yet is younger than that
                    oldest_ms=ages.get(queue, 0) if unfinished else None,
                    breaker=breakers.get(queue),
                    has_receiver=received[queue],
                    at_least=at_least,
                    at_most=queue in uncounted.at_most or dead_queues[queue] in uncounted.at_most,
                    takes_dead_letters=self._catalog.takes_dead_letters(queue),
                )
            )
        since_ms = {str(n): ms for n, ms in sorted(uncounted.since_ms.items()) if str(n) not in unserved}
        return Stats(stats, missing, unserved, stalled, unreadable, since_ms)

    async def _breakers(self, queues: list[str]) -> dict[str, BreakerState]:
        """The circuit breakers of queues that have one. If workers differ for a moment, the one that is not closed."""
        settings_of, breakers = self._catalog.settings_of, self._ownership.breakers
        found = {queue: BreakerState() for queue in queues if settings_of(queue).breaker_failures}
        for one in (await self._everywhere(breakers.states_here, None))[0] if found else ():
            for queue in found.keys() & one.keys():
                found[queue] = max(found[queue], one[queue], key=lambda b: (b.state != "closed", b.failures))
        return found

    # ------------------------------------------------------------------ messages

    async def messages(
        self, queue: str, state: State | None, after: tuple[int, int], limit: int, payload_bytes: int = 0
    ) -> tuple[list[MessageBrief], list[str]]:
        """Up to `limit` messages of a queue in order, and the workers that did not answer."""
        wanted = MessagesWanted(queue, state, after, limit, payload_bytes)
        found, missing = await self._everywhere(self.messages_here, wanted)
        return sorted((m for one in found for m in one), key=lambda m: (m.partition, m.offset))[:limit], missing

    @peer_call("messages")
    async def messages_here(self, wanted: MessagesWanted) -> list[MessageBrief]:
        """See `messages`, for this worker's partitions. Includes messages that were sent or copied just before."""
        await self._ownership.read_up.wait(wanted.queue, self._ownership.copies)
        found: list[MessageBrief] = []
        room = ANSWER_BYTES
        for number, owned in sorted(self._ownership.owned.items()):
            if not owned.serving or number < wanted.after[0] or len(found) >= wanted.limit:
                continue
            partition, first = owned.owner.partition, wanted.after[1] + 1 if number == wanted.after[0] else 0
            listed = await smallest(
                wanted_entries(partition, wanted, first), wanted.limit - len(found), lambda entry: entry.offset
            )
            for entry in listed:
                # some may have been finished since they were listed
                if partition.state_of(entry.offset) is not MessageState.DONE:
                    brief = brief_of(owned, entry, min(wanted.payload_bytes, room))
                    room -= len(brief.payload) if isinstance(brief.payload, bytes) else 0
                    found.append(brief)
        return found

    async def message(self, number: int, offset: int) -> MessageView:
        """One message. Raises `NotFoundError`, `UnavailableError`."""
        return await self._ask(number, self.message_here, Place(number, offset))

    @peer_call("message")
    async def message_here(self, place: Place) -> MessageView:
        """See `message`."""
        owned, offset = self._owners.serving_here(place.partition), place.offset
        if offset >= owned.owner.partition.position:  # it may have been sent just before
            await self._ownership.read_up.wait("")
            owned = self._owners.serving_here(place.partition)
        partition = owned.owner.partition
        view = MessageView(self._ownership.topics.queue, owned.number, offset)
        if offset >= partition.position:
            raise NotFoundError(
                f"partition {owned.number} has no message at offset {offset} yet: its next one gets "
                f"{partition.position}"
            )
        describe_message(view, partition, self._ownership.broker_time.now_ms)
        return view

    # ------------------------------------------------------------------ tables

    async def rows(self, number: int, table: str, after: str, limit: int) -> list[RowView]:
        """Rows of a table in one partition. Raises `NotFoundError`, `UnavailableError`."""
        return await self._ask(number, self.rows_here, RowsWanted(number, table, after, limit))

    @peer_call("rows")
    async def rows_here(self, wanted: RowsWanted) -> list[RowView]:
        """See `rows`."""
        owned = self._owners.serving_here(wanted.partition)
        table = self._ownership.tables.get(wanted.table)
        if table is None:
            raise NotFoundError(f"there is no table {wanted.table!r}; there are messages, markers, progress")
        describe, found = _DESCRIBE[wanted.table], []
        for key, value in table.rows_of(owned.number):
            name = key.decode()
            if name > wanted.after:
                found.append(RowView(name, len(value), describe(name, value)))
                if len(found) >= wanted.limit:
                    break
        return found

    # ------------------------------------------------------------------ whom to ask

    async def _everywhere(
        self, operation: Callable[[Argument], Awaitable[Answer]], argument: Argument
    ) -> tuple[list[Answer], list[str]]:
        answers = await self._peers.everywhere(operation, argument)
        good = [a for a in answers.values() if not isinstance(a, MarqError)]
        return good, self._peers.missing(answers)

    async def _ask(self, number: int, operation: Callable[[Argument], Awaitable[Answer]], argument: Argument) -> Answer:
        partitions = self._ownership.topics.partitions
        if not 0 <= number < partitions:
            raise NotFoundError(f"there are partitions 0 to {partitions - 1}, not {number}")
        return await self._owners.ask(number, operation, argument)


def _lag(ends: Ends, topic: str, number: int, position: int) -> int | None:
    """Offsets between what was read and the end of a log; None: its end is not known."""
    end = ends.get(TopicPartition(topic, number))
    return None if end is None else max(0, end - position)


def memory_bytes() -> int:
    """Bytes of memory that this process has now."""
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):  # no Linux
        return _peak_memory_bytes()


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
