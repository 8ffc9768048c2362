"""The partitions that this worker owns: connects `marq.core.owner` with Kafka.

    assigned ─► claim (own marker) ─► read the changelogs to their end ─► restore ─► read both logs ─► serve

All of it runs in the event loop of the worker, so an owner is never entered twice. Agents call `on_queue_chunk` and
`on_markers_chunk`, the timer agent `on_timer`; none of them waits for anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from faust.types import TP
from mode import Service

from app.letters import Letters
from app.outbox import NOBODY, Outbox, Writer
from app.tails import Tails
from marq.core.markers import Marker
from marq.core.owner import Handout, Limits, Owner, Phase, Retire, WriteManifest, WriteRows
from marq.errors import InternalError, MarqError, RowError

if TYPE_CHECKING:
    from app.queues import Catalog
    from app.settings import Settings
    from app.streaming import MarqApp
    from app.table import SegmentTable
    from app.topics import Topics
    from app.transport import Chunk

#: Seconds for Kafka to confirm an own marker before the claim is tried again, with a new nonce.
CLAIM_TIMEOUT_S = 10.0
#: Seconds from assignment to serving before the worker gives up: another may do better.
SERVE_TIMEOUT_S = 60.0
#: Recoveries from the local store that fail before the store is wiped, and from the wiped store before we stop.
ATTEMPTS = 3


class Receiver(Protocol):
    """Who gets deliveries."""

    def handed(self, held: Held, handout: Handout) -> None:
        """A delivery begins now."""

    def wake(self, held: Held) -> None:
        """Something became ready in this partition."""

    def starving(self, held: Held) -> bool:
        """True if a receiver waits and this partition has nothing ready for it in what was read so far."""

    def wants(self, queue: str) -> bool:
        """True if messages of this queue should stay in memory when it is short."""

    def forget(self, held: Held) -> None:
        """The partition is no longer ours: what was asked for there never comes."""


def now_ms() -> int:
    """The worker's monotonic clock, in milliseconds."""
    return time.monotonic_ns() // 1_000_000


class Held:
    """One partition that is assigned to this worker."""

    __slots__ = ("generation", "number", "outbox", "owner", "paused", "restored", "retire_at_ms")

    def __init__(self, number: int, generation: int, owner: Owner, outbox: Outbox) -> None:
        self.number = number
        self.generation = generation
        self.owner = owner
        self.outbox = outbox
        self.restored = False
        self.paused = False  # reading of the queue topic
        self.retire_at_ms = 0

    @property
    def serving(self) -> bool:
        """True while this worker may hand out messages of the partition."""
        return self.owner.serving


class Ownership(Service):
    """All partitions assigned to this worker, and the markers it writes (to any partition)."""

    def __init__(
        self,
        app: MarqApp,
        settings: Settings,
        topics: Callable[[], Topics],
        tables: dict[str, SegmentTable],
        catalog: Catalog,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.app = app
        self.settings = settings
        self._topics = topics
        self.tables = tables
        self.catalog = catalog
        self.held: dict[int, Held] = {}
        self.receivers: list[Receiver] = []
        self.worker_name = ""
        self.handed_out = 0
        self._outboxes: dict[int, Outbox] = {}
        self._recovery: asyncio.Task[None] | None = None
        self._again: set[int] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._random = random.Random()
        self.letters = Letters(self)
        self.tails = Tails(app, settings)

    @property
    def topics(self) -> Topics:
        """The topics in use (known once the worker has checked them)."""
        return self._topics()

    @property
    def ready(self) -> bool:
        """True if every assigned partition is served."""
        return (
            self._recovery is not None
            and self._recovery.done()
            and not self.app.rebalancing
            and all(held.serving for held in self.held.values())
        )

    # ------------------------------------------------------------------ markers

    def outbox(self, partition: int) -> Outbox:
        """Where markers for `partition` go, owned by us or not."""
        outbox = self._outboxes.get(partition)
        if outbox is None:
            outbox = Outbox(lambda: self.app.producer, self.topics.markers, partition)
            self._outboxes[partition] = outbox
        return outbox

    def drain(self, held: Held) -> None:
        """Carry out what the owner has to say, after each call of it."""
        owner = held.owner
        if owner.phase is Phase.LOST:
            self._lost(held)
            return
        while owner.handouts:
            handouts, owner.handouts = owner.handouts, []
            for handout in handouts:
                self.handed_out += len(handout.offsets)
                handout.receiver.handed(held, handout)
        if owner.dead:
            offsets, owner.dead = owner.dead, []
            self.spawn(self.letters.bury(held, offsets))
        if owner.poison:
            poison, owner.poison = owner.poison, []
            self.spawn(self.letters.set_aside(held, poison))
        if owner.appends:
            appends, owner.appends = owner.appends, []
            held.outbox.put(appends)
        woken = owner.partition.woken
        if woken and owner.serving:
            woken.clear()
            for receiver in self.receivers:
                receiver.wake(held)
            if owner.appends:
                appends, owner.appends = owner.appends, []
                held.outbox.put(appends)
        self.regulate(held)

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a side task of the worker; its failure is logged."""
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.log.error("%s failed: %r", task.get_name(), task.exception())

    # ------------------------------------------------------------------ what the agents call

    def on_queue_chunk(self, chunk: Chunk) -> None:
        """A chunk of the queue topic."""
        held = self._held_of(chunk)
        if held is None:
            return
        if not held.owner.ingest(chunk.start, chunk.next, chunk.records):
            self._seek(held, self.topics.queue, held.owner.partition.position)
        self.drain(held)

    def on_markers_chunk(self, chunk: Chunk) -> None:
        """A chunk of the markers topic; must run in the context of its event, because rows may be written."""
        held = self._held_of(chunk)
        if held is None:
            return
        was_serving = held.serving
        if not held.owner.read_markers(chunk.start, chunk.next, chunk.records, now_ms()):
            self._seek(held, self.topics.markers, held.owner.partition.markers_position)
        if held.serving and not was_serving:
            self.log.info("Serving partition %s, epoch %s", held.number, held.owner.epoch)
            held.owner.partition.woken[""] = None
        self._step(held)
        self.drain(held)

    def on_timer(self) -> None:
        """Time passes: ticks, dead letters, expiry. Many times a second."""
        now = now_ms()
        for held in list(self.held.values()):
            if not held.serving:
                continue
            held.owner.tick(now)
            held.owner.work(now, self.catalog.with_ttl)
            self.drain(held)

    def _held_of(self, chunk: Chunk) -> Held | None:
        held = self.held.get(chunk.partition)
        if held is None or not held.restored or held.generation != chunk.generation:
            return None
        return held

    def _seek(self, held: Held, topic: str, offset: int) -> None:
        self.app.consumer.seek_chunks(TP(topic, held.number), offset, held.generation)

    # ------------------------------------------------------------------ memory

    def regulate(self, held: Held) -> None:
        """Read on or pause: a partition reads ahead of its receivers by so many bytes, the worker holds so many."""
        partition = held.owner.partition
        wanted = partition.bytes < self.settings.read_ahead_bytes
        if not wanted and held.serving and any(r.starving(held) for r in self.receivers):
            wanted = self._has_memory()
        if held.serving and wanted and partition.bytes >= self.settings.memory_bytes:
            wanted = False
        if wanted == held.paused:
            held.paused = not wanted
            tp = TP(self.topics.queue, held.number)
            if wanted:
                self.app.consumer.resume_reading(tp)
            else:
                self.app.consumer.pause_reading(tp)

    def _has_memory(self) -> bool:
        """Keep the worker under its limit by leaving payloads to the messages table; False if that is not enough."""
        excess = sum(h.owner.partition.bytes for h in self.held.values()) - self.settings.memory_bytes
        if excess < 0:
            return True
        # a tenth more, so that this does not run again for every chunk
        excess += self.settings.memory_bytes // 10
        for held in sorted(self.held.values(), key=lambda h: -h.owner.partition.bytes):
            partition = held.owner.partition
            freed = partition.shed(excess, [queue for queue in partition.backlogs if self._is_wanted(queue)])
            excess -= freed
            if excess <= 0:
                return True
            held.owner.under_pressure = True
        return False

    def _is_wanted(self, queue: str) -> bool:
        return any(receiver.wants(queue) for receiver in self.receivers)

    # ------------------------------------------------------------------ checkpoints

    def _step(self, held: Held) -> None:
        owner = held.owner
        step = owner.step(now_ms())
        futures: list[asyncio.Future[Any]] = []
        if isinstance(step, WriteRows):
            for key, value in step.rows:
                table = self.tables[key.split("/")[2]]
                futures.append(table.write(key.encode(), value))
        elif isinstance(step, WriteManifest):
            futures.append(self.tables["progress"].write(step.key.encode(), step.value))
        elif isinstance(step, Retire):
            self._retire(held, step)
        if futures:
            asyncio.gather(*futures).add_done_callback(lambda done: self._written(held, owner, done))

    def _written(self, held: Held, owner: Owner, done: asyncio.Future[Any]) -> None:
        if done.cancelled() or not owner.serving:
            return
        if done.exception() is not None:
            self.app.fail(InternalError(f"partition {held.number}: a changelog write failed: {done.exception()!r}"))
            return
        owner.written(now_ms())
        self.drain(held)

    def _retire(self, held: Held, step: Retire) -> None:
        for key in step.rows:
            self.tables[key.split("/")[2]].write(key.encode(), None)
        for key in step.manifests:
            self.tables["progress"].write(key.encode(), None)
        consumer = self.app.consumer
        consumer.set_commit_position(TP(self.topics.queue, held.number), step.position, held.generation)
        consumer.set_commit_position(TP(self.topics.markers, held.number), step.markers_position, held.generation)
        self.spawn(self.tails.trim(held, self.topics, step.position, step.markers_position))

    # ------------------------------------------------------------------ assignment and recovery

    def on_revoked(self) -> None:
        """The rebalance takes everything first: nothing of it may have effects from here on."""
        if self._recovery is not None:
            self._recovery.cancel()
        for held in list(self.held.values()):
            self._leave(held)

    def _leave(self, held: Held) -> None:
        del self.held[held.number]
        held.outbox.writer = NOBODY
        for receiver in self.receivers:
            receiver.forget(held)

    def on_assigned(self, generation: int) -> None:
        """The rebalance has ended, Faust has recovered the tables: take over what is assigned."""
        self.on_revoked()
        numbers = {tp.partition for tp in self.app.consumer.assignment() if tp.topic == self.topics.markers}
        self._recovery = asyncio.ensure_future(self._recover_all(generation, sorted(numbers)))

    def _lost(self, held: Held) -> None:
        """Another worker's own marker was folded. If the partition is still assigned to us, we take it back."""
        if self.held.get(held.number) is not held:
            return
        self.log.warning("Partition %s was taken over by another worker", held.number)
        self._leave(held)
        generation = held.generation

        async def take_back() -> None:
            await self.sleep(1.0)
            if generation == self.app.consumer_generation_id and not self.app.rebalancing:
                await self._recover(generation, [held.number])

        self.spawn(take_back())

    async def _recover_all(self, generation: int, numbers: list[int]) -> None:
        try:
            await asyncio.wait_for(self._recover(generation, numbers), SERVE_TIMEOUT_S)
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            missing = [n for n in numbers if n not in self.held or not self.held[n].serving]
            self.app.fail(
                InternalError(f"partitions {missing} are assigned but not served after {SERVE_TIMEOUT_S:.0f} s")
            )
        except Exception as exc:
            self.app.fail(exc)

    async def _recover(self, generation: int, numbers: list[int]) -> None:
        claims = await asyncio.gather(*(self._claim(n) for n in numbers))
        todo = dict(zip(numbers, claims, strict=True))
        for attempt in range(2 * ATTEMPTS):
            if not todo:
                break
            await self.tails.read_rest(self.tables.values(), todo)
            starts = await self.tails.log_starts(self.topics, todo)
            for number, (owner, outbox) in list(todo.items()):
                try:
                    owner.restore(*self._rows_of(number), self._loader(number), starts[number])
                except RowError as exc:
                    self.log.warning("Recovery of partition %s, attempt %s: %s", number, attempt + 1, exc)
                    if attempt == 2 * ATTEMPTS - 1:
                        raise
                    if attempt >= ATTEMPTS - 1:
                        for table in self.tables.values():
                            table.wipe(number)
                    continue
                del todo[number]
                self._enter(Held(number, generation, owner, outbox))
            if todo:
                await asyncio.sleep(0.2)
        while not all(n in self.held and self.held[n].serving for n in numbers):
            await asyncio.sleep(0.01)

    def _enter(self, held: Held) -> None:
        """State is restored: open both logs at its positions."""
        partition = held.owner.partition
        held.restored = True
        self.held[held.number] = held
        consumer = self.app.consumer
        consumer.start_from(TP(self.topics.markers, held.number), partition.markers_position, held.generation)
        consumer.start_from(TP(self.topics.queue, held.number), partition.position, held.generation)

    async def _claim(self, number: int) -> tuple[Owner, Outbox]:
        """Append an own marker and wait until it is durable: before the tables are read, not after."""
        limits = self.settings
        while True:
            owner = Owner(
                number,
                self.worker_name,
                uuid.uuid4().hex,
                limits=Limits(
                    checkpoint_ms=limits.checkpoint_ms,
                    window_offsets=limits.window_offsets,
                    hold_ms=limits.hold_ms,
                    step_timeout_ms=limits.step_timeout_ms,
                    queue_id=limits.queue_id,
                ),
                settings_of=self.catalog.settings_of,
            )
            outbox = self.outbox(number)
            outbox.writer = self._writer(number, owner)
            claimed = outbox.put_confirmed([owner.claim()])
            try:
                await asyncio.wait_for(claimed, CLAIM_TIMEOUT_S)
                return owner, outbox
            except (TimeoutError, MarqError) as exc:
                self.log.warning("Partition %s: claim not confirmed (%r), trying again", number, exc)

    def _writer(self, number: int, owner: Owner) -> Writer:
        def took(seq: int, offset: int, timestamp_ms: int, markers: list[Marker]) -> None:
            held = self.held.get(number)
            if held is not None and held.owner is owner:
                owner.acknowledged(seq, offset, timestamp_ms, markers, now_ms())
                self.drain(held)

        return Writer(owner.nonce, owner.sent, took, owner.failed)

    def _rows_of(self, number: int) -> tuple[dict[str, bytes], list[str]]:
        prefix = f"{number}/".encode()
        manifests = {k.decode(): v for k, v in self.tables["progress"].items(number) if k.startswith(prefix)}
        keys: list[str] = []
        for name in ("messages", "markers"):
            keys += [k.decode() for k, _ in self.tables[name].items(number) if k.startswith(prefix)]
        return manifests, keys

    def _loader(self, number: int) -> Callable[[str], bytes]:
        def load(key: str) -> bytes:
            value = self.tables[key.split("/")[2]].read(number, key.encode())
            if value is None:
                raise RowError(f"row {key} is named by the manifest, but it is not in the table")
            return value

        return load

    # ------------------------------------------------------------------ stopping

    async def hand_over(self, timeout_s: float) -> None:
        """Before leaving: wait until what receivers have acknowledged is in the log."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not all(outbox.idle for outbox in self._outboxes.values()):
                    await asyncio.sleep(0.01)

    async def on_stop(self) -> None:
        self.on_revoked()
        for task in list(self._background):
            task.cancel()
        await self.tails.close()
