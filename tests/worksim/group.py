"""The consumer group: a coordinator, and in each worker the member that reads for it.

The consumer itself is real (`app.streaming.transport.ChunkConsumer`, `chunks.Reader`, and of `ChunkThread` what opens,
seeks, pauses and takes chunks, on aiokafka's own state of an assignment). Simulated is what fetches, and what joins.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.consumer.subscription_state import Assignment
from faust.types import TP

from app.streaming.assignor import share_out
from app.streaming.chunks import Chunk
from app.streaming.consumer_thread import FETCH_HOLD_S, WHOLE_FETCH_WAIT_MS, ChunkThread
from app.streaming.transport import ChunkConsumer
from marq.clock import now_ms
from marq.core.reading import Unreadable
from tests.worksim.clock import Process

if TYPE_CHECKING:
    from tests.worksim.kafka import Kafka, Log
    from tests.worksim.worker import Worker

#: Seconds: as the settings of a worker say.
SESSION_S, HEARTBEAT_S = 10.0, 0.5
REBALANCE_S = 30.0
#: Seconds between looks for members that are silent.
LOOK_S = 1.0


class Member:
    """A member of the group, as the coordinator sees it."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker = worker
        self.id = f"{worker.process.name}-{number:03}"
        self.url = worker.peers.url
        self.seen_s = 0.0
        self.had: tuple[int, ...] = ()  # partitions that it says it has
        self.joined: asyncio.Future[Any] | None = None  # what it waits for


class Group:
    """The coordinator. A rebalance begins when a member joins, leaves or is silent, and ends when all have joined."""

    def __init__(self, kafka: Kafka, partitions: int) -> None:
        self.kafka = kafka
        self.partitions = partitions
        self.members: dict[str, Member] = {}
        self.generation = 0
        self.rebalancing = False
        self._began_s = 0.0
        self._count = 0
        self._look()

    # -- requests, as they arrive

    def join(self, worker: Worker, member_id: str, had: tuple[int, ...]) -> tuple[Member, asyncio.Future[Any]]:
        member = self.members.get(member_id)
        if member is None:
            self._count += 1
            member = Member(worker, self._count)
            self.members[member.id] = member
        member.seen_s = self.kafka.loop.now
        member.had = had
        joined = member.joined = self.kafka.loop.create_future()
        self._begin()
        self._finish()
        return member, joined

    def heartbeat(self, member_id: str, generation: int) -> str:
        member = self.members.get(member_id)
        if member is None or generation != self.generation:
            return "unknown"
        member.seen_s = self.kafka.loop.now
        return "rebalance" if self.rebalancing else "ok"

    def leave(self, member_id: str) -> None:
        member = self.members.pop(member_id, None)
        if member is not None:
            self._refuse(member)
            self._begin()
            self._finish()

    def _refuse(self, member: Member) -> None:
        """Tell a member that was removed while it waits for others that it is no member."""
        if member.joined is not None and not member.joined.done():
            member.joined.set_result(None)

    # -- what follows

    def _begin(self) -> None:
        if not self.rebalancing:
            self.rebalancing = True
            self._began_s = self.kafka.loop.now

    def _look(self) -> None:
        now = self.kafka.loop.now
        for member in list(self.members.values()):
            waits = member.joined is not None and member.worker.process.state == Process.RUNS
            if not waits and member.seen_s < now - SESSION_S:
                self.kafka.tell("the group gives %s up", member.id)
                self.leave(member.id)
        if self.rebalancing and now - self._began_s > REBALANCE_S:
            for member in list(self.members.values()):
                if member.joined is None:
                    del self.members[member.id]
            self._finish()
        self.kafka.later(LOOK_S, self._look)

    def _finish(self) -> None:
        if not self.rebalancing or not all(member.joined for member in self.members.values()):
            return
        if self._began_s + 0.05 > self.kafka.loop.now and self.members:
            self.kafka.later(0.06, self._finish)  # others may come as well
            return
        self.rebalancing = False
        self.generation += 1
        if not self.members:
            return
        shares = share_out(self.partitions, {member.id: member.had for member in self.members.values()})
        by_url: dict[str, list[int]] = {}
        for member in self.members.values():
            by_url[member.url] = shares[member.id]
        self.kafka.tell("generation %s: %s", self.generation, by_url)
        for member in self.members.values():
            assert member.joined is not None
            answer, member.joined = member.joined, None
            member.seen_s = self.kafka.loop.now
            if not answer.done():
                answer.set_result((self.generation, tuple(shares[member.id]), by_url))


class _Fetched:
    """The records of one fetch, as `FetchResult` takes them."""

    def __init__(self, records: list[Any], start: int, stop: int, since_ms: int | None) -> None:
        self._records = iter(records)
        self.since_ms = since_ms
        self._stop = stop
        self.next_fetch_offset = start

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        for record in self._records:
            self.next_fetch_offset = record.stop if type(record) is Unreadable else record.offset + 1
            return record
        self.next_fetch_offset = self._stop
        raise StopIteration


class _Main:
    """The event loop of the main thread, as the thread that fetches knows it. It may be busy for a while."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._free_s = 0.0

    def call_soon_threadsafe(self, function: Any, *args: Any) -> None:
        kafka = self._worker.kafka
        now, busy_s = kafka.loop.now, kafka.odds.busy_s
        if busy_s:
            self._free_s = max(self._free_s, now + kafka.random.random() * busy_s)
        self._worker.process.call(function, *args, delay_s=self._free_s - now)


class Thread:
    """The thread that fetches: the rules are `ChunkThread`'s, the fetches are not."""

    set_paused = ChunkThread.set_paused
    seek_reader = ChunkThread.seek_reader
    _renew_readers = ChunkThread._renew_readers
    _take = ChunkThread._take
    _drop = ChunkThread._drop
    _fail = ChunkThread._fail
    _on_out_of_range = ChunkThread._on_out_of_range
    _hand_over = ChunkThread._hand_over
    _chunked = ChunkThread._chunked
    _touch = ChunkThread._touch
    unblock = ChunkThread.unblock

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.app = worker
        self.kafka = worker.kafka
        self.parent_loop = _Main(worker)
        self.readers: dict[TP, Any] = {}
        self._blocked: set[TP] = set()
        self.consumer: Any = None
        self.fetching: dict[TP, object] = {}
        self.ends: dict[TP, tuple[int, int]] = {}  # where a log was last seen to end, and when
        self.left = False
        self.plan = None
        self._fetcher = SimpleNamespace(
            _records={}, seek_to=self._seek_to, _notify=lambda _: self.fetch(), _wait_consume_future=None
        )
        self._consumer = SimpleNamespace(
            _fetcher=self._fetcher,
            _subscription=SimpleNamespace(subscription=SimpleNamespace(assignment=Assignment([]))),
            _coordinator=SimpleNamespace(coordinator_id=None, generation=-1),
        )

    def _ensure_consumer(self) -> Any:
        return self._consumer

    @property
    def assignment(self) -> Any:
        return self._consumer._subscription.subscription.assignment

    gathering = SimpleNamespace(hurry=lambda lasting: None)  # its fetches are late at random

    def call_soon(self, function: Any, *args: Any) -> None:
        self.worker.process.call(function, *args, delay_s=self.kafka.random.random() * 0.0005)

    def wake(self) -> None:
        self._hand_over(self._fetcher)
        self.fetch()

    def _seek_to(self, tp: TopicPartition, offset: int) -> None:
        self.assignment.state_value(tp).seek(offset)
        self._fetcher._records.pop(tp, None)
        self.fetching.pop(tp, None)

    def assign(self, numbers: tuple[int, ...], generation: int) -> None:
        if self.assignment.active:
            self.assignment._unassign()
        topics = self.worker.topics_in_use
        tps = [TP(topic, n) for topic in (topics.queue, topics.markers) for n in numbers]
        self._consumer._subscription.subscription.assignment = Assignment([TopicPartition(*tp) for tp in tps])
        self._fetcher._records.clear()
        self.fetching.clear()
        self._renew_readers(tps, generation)  # type: ignore[arg-type]

    # -- fetches

    def fetch(self) -> None:
        """Fetch each open partition that has no data here and no fetch under way."""
        for tp in self.readers:
            self._fetch(tp)

    def _fetch(self, tp: TP) -> None:
        if tp in self.fetching:
            return
        reader = self.readers.get(tp)
        if reader is None or not reader.open or reader.paused or tp in self._fetcher._records:
            return
        asked = self.fetching[tp] = object()
        self.kafka.later(self.kafka.latency(), self._at_broker, tp, asked, reader.state.position)

    def _at_broker(self, tp: TP, asked: object, position: int) -> None:
        if self.fetching.get(tp) is not asked:
            return
        log: Log = self.kafka.log(*tp)
        if log.is_away or self.kafka.chance(self.kafka.odds.read_error):
            self.kafka.later(0.1, self._at_broker, tp, asked, position)
        elif log.start <= position < log.end or not log.start <= position <= log.end:
            delay_s = self.kafka.latency() + self.kafka.fetch_s
            self.worker.process.call(self._answered, tp, asked, position, delay_s=delay_s)
        else:
            log.watchers[self, tp] = partial(self._has_come, tp, asked, position)

    def _has_come(self, tp: TP, asked: object, position: int) -> None:
        """There are records where there were none. The broker has said so again and again until now."""
        self.ends[tp] = (position, now_ms() - self.kafka.random.choice((0, WHOLE_FETCH_WAIT_MS)))
        self._at_broker(tp, asked, position)

    def _answered(self, tp: TP, asked: object, position: int) -> None:
        if self.fetching.get(tp) is not asked:
            return
        del self.fetching[tp]
        reader, log = self.readers.get(tp), self.kafka.log(*tp)
        if reader is None:
            return
        if reader.state.position != position:
            self._fetch(tp)
            return
        reader.state.highwater = log.end
        if not log.start <= position <= log.end:
            reader.state.await_reset(None)
            return
        upto, records = log.fetch(position, self.kafka.odds.fetch_max)
        end, since_ms = self.ends.get(tp, (-1, 0))
        self.ends[tp] = (log.end, now_ms())
        if upto > position:
            self._fetcher._records[tp] = FetchResult(
                tp,
                assignment=reader.state._assignment,
                partition_records=_Fetched(records, position, upto, since_ms if 0 <= end <= position else None),
                backoff=FETCH_HOLD_S,
            )
            self._hand_over(self._fetcher)  # type: ignore[arg-type]
        self._fetch(tp)

    # -- the group

    def leave_group(self) -> None:
        self.left = True

    async def live(self) -> None:
        """Be a member of the group."""
        worker, kafka, group = self.worker, self.kafka, self.worker.world.group
        coordinator = self._consumer._coordinator
        member_id, generation, had = "", -1, ()
        while not self.left:
            await self._revoke()
            await asyncio.sleep(kafka.latency())
            member, joined = group.join(worker, member_id, had)
            answer = await joined
            if answer is None:
                member_id = ""
                continue
            member_id = member.id
            generation, had, by_url = answer
            await asyncio.sleep(kafka.latency())
            coordinator.coordinator_id, coordinator.generation = 1, generation
            await self._assign(generation, had, by_url)
            while not self.left:
                await asyncio.sleep(HEARTBEAT_S * (0.8 + 0.4 * kafka.random.random()) + kafka.latency())
                said = group.heartbeat(member_id, generation)
                if said == "unknown":
                    coordinator.generation, member_id = -1, ""
                    kafka.tell("%s learns that it is no member", worker.process.name)
                if said != "ok":
                    break
        await asyncio.sleep(kafka.latency())
        group.leave(member_id)

    async def _revoke(self) -> None:
        worker = self.worker
        worker.on_rebalance_start()
        await asyncio.sleep(self.kafka.random.random() * 0.005)

    async def _assign(self, generation: int, numbers: tuple[int, ...], by_url: dict[str, list[int]]) -> None:
        worker = self.worker
        worker.consumer_generation_id = generation
        self.assign(numbers, generation)
        await asyncio.sleep(self.kafka.random.random() * 0.002)
        await worker.on_group_assigned(generation, numbers, by_url)


class Consumer(ChunkConsumer):
    """The consumer in the main thread, without Faust's part of it."""

    def __init__(self, worker: Worker, thread: Thread) -> None:
        self.app = worker
        self._thread = thread  # type: ignore[assignment]
        self._starts = {}
        self._positions = {}
        self._committed_positions = {}
        self.stirred = {}
        self.chunks_dropped = 0
        self.unreadable = Counter()
        self.flow_active = False
        thread.consumer = self

    def assignment(self) -> set[TP]:  # type: ignore[override]
        return {TP(*tp) for tp in self._thread.assignment.tps}  # type: ignore[attr-defined]

    def deliver(self, chunks: list[Chunk]) -> None:
        kafka = self._thread.kafka  # type: ignore[attr-defined]
        for chunk in list(chunks):
            if kafka.chance(kafka.odds.dropped) or kafka.drop_next == chunk.topic:
                kafka.drop_next = None
                self.app.world.count("chunks dropped")
                chunks.remove(chunk)
                self.stirred[chunk.partition] = None
                chunk._reader.pending = None
                chunk._reader.give_back()
        super().deliver(chunks)

    async def read_again(self, tp: TP, start: int, stop: int) -> tuple[int, list[Any]]:
        await asyncio.sleep(0.01)
        kafka = self._thread.kafka  # type: ignore[attr-defined]
        upto, records = kafka.log(tp.topic, tp.partition).fetch(start, stop - start)
        return min(upto, stop), records

    def forget_starts(self) -> None:
        """What `on_partitions_revoked` and `on_partitions_assigned` do beside Faust's bookkeeping."""
        self._starts.clear()
        self._positions.clear()
        self._committed_positions.clear()
