"""A worker: `app.worker.WorkerApp` with all its parts, on a simulated Kafka, store and network, without Faust's app."""

from __future__ import annotations

import asyncio
import logging
import weakref
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from faust import streams
from faust.types import TP
from mode.utils.queues import FlowControlEvent

from app.kafka.topics import TABLES, Topics
from app.service.meters import Meters
from app.settings import Settings
from app.streaming.chunks import ChunkQueue
from app.worker import ANSWERS_S, WorkerApp
from gateway.auth import Keys
from marq.protocol.limits import RECORD_MAX_BYTES
from tests.worksim.clock import Process
from tests.worksim.group import Consumer, Thread
from tests.worksim.kafka import Producer
from tests.worksim.keyholders import Gateway
from tests.worksim.store import Table

if TYPE_CHECKING:
    from tests.worksim.world import World

log = logging.getLogger(__name__)


class Event:
    """In the place of Faust's event."""

    def __init__(self, chunk: Any, message: Any) -> None:
        self.value = chunk
        self.message = message


async def _nothing() -> None:
    pass


class Leavings:
    """A receiver that takes nothing, and is told of partitions that leave."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def wake(self, owned: Any) -> None:
        pass

    def starving(self, owned: Any) -> bool:
        return False

    def wants(self, queue: str) -> bool:
        return False

    def forget(self, owned: Any) -> None:
        worker = self._worker
        worker.world.truths[owned.number].left(worker, owned)
        for waiter in worker.operations.receives._asking:
            if any(one is owned for one, _ in waiter.pending):
                worker.world.violated("receives", f"{worker.process.name}: one waits for {owned.number}, that left")


class Worker(WorkerApp):
    """One worker, from its start to its end."""

    abstract = True

    def __init__(self, world: World, slot: int) -> None:  # nothing of Faust's
        self.world = world
        self.kafka = world.kafka
        self.slot = slot
        self.process = process = Process(world.loop, f"w{slot}")
        process.world = world
        self.disk = world.disks[slot]
        self.url = f"http://w{slot}"
        self.log = log  # type: ignore[assignment]
        self.failure = None
        self._crashing = None
        self.listens = False
        self.open_exchanges: dict[Any, None] = {}
        self.rebalancing = True
        self.consumer_generation_id = 0
        self.stopping = False
        self.is_up = False
        self.tasks: list[Any] = []
        self.ends = False
        self.assignor = SimpleNamespace(changelog_distribution={})  # type: ignore[assignment]
        self._topics = world.topics
        self._agents: list[tuple[Any, str]] = []
        self.reads: asyncio.Task[Any] | None = None
        self.sensors = SimpleNamespace(on_rebalance_end=lambda *_: None)  # type: ignore[assignment]
        self._rebalancing_span = None
        self._rebalancing_sensor_state = self.sensors
        process.context.run(self._make, world.settings)

    def _make(self, settings: Settings) -> None:
        self._beacon = None  # type: ignore[assignment]
        self.flow = FlowControlEvent()
        self.queues: dict[str, ChunkQueue] = {}
        self.keys = Keys(None)
        self.meters = Meters()
        self.chunked_topics = frozenset({self._topics.queue, self._topics.markers})  # type: ignore[union-attr]
        self._index: dict[TP, list[Any]] = {}
        self._producer = Producer(self.kafka, self.process, RECORD_MAX_BYTES)  # type: ignore[assignment]
        self.__dict__["web"] = SimpleNamespace(close_to_all=_nothing)
        self.set_up(settings)
        self.ownership.receivers.append(Leavings(self))
        self.ownership.worker_name = f"{self.process.name}-{self.world.starts}"
        self.thread = Thread(self)
        self._consumer = Consumer(self, self.thread)  # type: ignore[assignment]
        self._conf = SimpleNamespace(canonical_url=self.url, datadir=".")  # type: ignore[assignment]

    # -- what the parts ask of Faust's app

    beacon = property(lambda self: None)
    conf = property(lambda self: self._conf)
    topics = property(lambda self: SimpleNamespace(_tp_index=self._index))
    should_stop = property(lambda self: self.stopping)

    def segment_table(self, name: str, **options: Any) -> Any:
        return Table(self, name)

    def topic(self, *topics: str, **options: Any) -> Any:
        return topics[0]

    def agent(self, topic: Any, *, name: str) -> Any:
        def declared(function: Any) -> Any:
            self._agents.append((function, topic))
            return function

        return declared

    def page(self, path: str, **options: Any) -> Any:
        return lambda function: function

    def create_event(self, key: Any, value: Any, headers: Any, message: Any) -> Any:
        return Event(value, message)

    def fail(self, exc: BaseException) -> None:
        if self.failure is None:
            self.failure = exc
            self.world.worker_failed(self, exc)

    @cached_property
    def gateway(self) -> Gateway:
        return Gateway(self)

    def store_fails(self) -> bool:
        return self.world.store_fails(self)

    def disk_is_full(self) -> bool:
        return self.world.faults.is_full(self.slot)

    def has_said_all(self, number: int) -> bool:
        """True if none of its markers for a partition is on its way."""
        line = self._producer.lines.get(TP(self.topics_in_use.markers, number))  # type: ignore[attr-defined]
        return self.ownership.outbox(number).idle and (line is None or not line.batches)

    # -- life

    def start_process(self) -> None:
        self.process.spawn(self.guarded(self._live()))

    async def guarded(self, coroutine: Any) -> None:
        try:
            await coroutine
        except Exception as exc:
            if self.failure is None:
                self.fail(exc)

    async def _live(self) -> None:
        for function, topic in self._agents:
            queue = self.queues[topic] = ChunkQueue(maxsize=64, flow_control=self.flow, clear_on_resume=True)
            stream = SimpleNamespace(events=lambda queue=queue: self._events(queue))
            self.tasks.append(asyncio.ensure_future(self.guarded(function(stream))))
        await self.start_parts()
        self.listens = True
        self.reads = asyncio.ensure_future(self.guarded(self.thread.live()))
        self.is_up = True

    async def _events(self, queue: ChunkQueue) -> Any:
        while True:
            event = await queue.get()
            if event.message.generation_id != self.consumer_generation_id:
                continue
            streams._current_event.set(weakref.ref(event))
            try:
                yield event
            finally:
                streams._current_event.set(None)

    async def end(self) -> None:
        """Stop in order, as a signal does."""
        await self.leave()
        self.stopping = True
        await self.stop_parts()
        if self.reads is not None and not self.thread.left:
            self.thread.leave_group()
        await asyncio.gather(self.ownership.stop(), self.catalog.stop())
        self.listens = False
        until = self.world.loop.now + ANSWERS_S
        while (self.open_exchanges or self.world.clients.wait_for(self)) and self.world.loop.now < until:
            await asyncio.sleep(0.01)
        self.world.worker_ended(self)

    # -- rebalances: in the order in which Faust and `WorkerApp` do it

    def on_rebalance_start(self) -> None:
        self.rebalancing = True
        self.process.call(self._revoked)

    def _revoked(self) -> None:
        if self._consumer.assignment():
            self._consumer.flow_active = False
            self.flow.suspend()
            self.flow.clear()
        self._consumer.forget_starts()

    async def on_group_assigned(self, generation: int, numbers: tuple[int, ...], by_url: dict[str, list[int]]) -> None:
        if self.stopping:
            return
        topics = self.topics_in_use
        self._consumer.forget_starts()
        for topic, queue in self.queues.items():
            for number in range(topics.partitions):
                self._index[TP(topic, number)] = [SimpleNamespace(queue=queue)]
        self.ownership.on_assignment(set(numbers))
        changelog = topics.changelogs["progress"]
        self.assignor.changelog_distribution = {url: {changelog: found} for url, found in by_url.items()}
        await asyncio.sleep(0)
        for table in self.ownership.tables.values():
            table.data.on_rebalance(set(numbers))
        await asyncio.sleep(self.world.random.random() * 0.01)
        if generation != self.consumer_generation_id or self.stopping:
            return
        self.flow.resume()
        self._consumer.flow_active = True
        self._rebalancing_sensor_state = self.sensors
        self.on_rebalance_end()

    async def crash(self, reason: BaseException) -> NoReturn:
        raise AssertionError("Faust's")


def topics_of(settings: Settings) -> Topics:
    """The topics, as `ensure_topics` would name them."""
    return Topics(
        settings.queue_topic,
        settings.markers_topic,
        settings.poison_topic,
        settings.queues_topic,
        settings.dead_letter_topic,
        {name: f"{settings.name}-{name}-changelog" for name in TABLES},
        settings.partitions,
    )
