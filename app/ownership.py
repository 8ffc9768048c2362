"""The partitions that this worker owns: connects `marq.core.owner` with Kafka.

    assigned ─► claim (own marker) ─► read the changelogs to their end ─► restore ─► read both logs ─► serve

All of it runs in the event loop of the worker, so an owner is never entered twice. Agents call `on_queue_chunk` and
`on_markers_chunk`, the timer agent `on_timer`; none of them waits for anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aiokafka.errors import KafkaError, KafkaTimeoutError
from faust.types import TP
from mode import Service

from app.letters import Letters
from app.outbox import NOBODY, Outbox, Writer
from app.producer import ProducerFull
from app.tails import Tails
from app.turns import Turns
from marq.clock import now_ms
from marq.core.lateness import Lateness
from marq.core.markers import Marker
from marq.core.owner import Handout, Limits, Owner, Phase, Retire, WriteManifest, WriteRows
from marq.core.rows import table_of
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
#: Seconds before a partition that another worker took is taken back, and between attempts of a recovery.
TAKE_BACK_S = 1.0
RECOVER_AGAIN_S = 0.2
#: Seconds before rows of a checkpoint that Kafka did not confirm are written again.
WRITE_AGAIN_S = 1.0
#: Milliseconds before memory is looked through again after nothing more could be freed.
SHED_PAUSE_MS = 100
#: Milliseconds that reading goes on after a receiver found nothing. A partition that is paused and resumed for every
#: message is late each time: a fetch that is under way has to end before the partition is part of one again.
READ_ON_MS = 250
#: Milliseconds after which a partition that does not advance, though its log goes on, is read again from its position.
STUCK_MS = 2_000
#: Longest time between two such readings while nothing comes of them.
STUCK_MAX_MS = 30_000
#: Milliseconds between calls of `Ownership.on_timer`.
TIMER_MS = 20
#: Milliseconds before those who were given nothing, because this worker was late, are served again.
AGAIN_MS = 100
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


class Held:
    """One partition that is assigned to this worker."""

    __slots__ = (
        "checkpoint_s",
        "generation",
        "number",
        "outbox",
        "owner",
        "paused",
        "restored",
        "retire_at_ms",
        "starved_ms",
        "watched",
    )

    def __init__(self, number: int, generation: int, owner: Owner, outbox: Outbox) -> None:
        self.number = number
        self.generation = generation
        self.owner = owner
        self.outbox = outbox
        self.restored = False
        self.paused = False  # reading of the queue topic
        self.starved_ms = -READ_ON_MS  # when a receiver last found nothing here
        self.retire_at_ms = 0
        # topic -> position when it was last looked at; when it may be read again, and the pause after that
        self.watched: dict[str, tuple[int, int, int]] = {}
        self.checkpoint_s: float | None = None  # monotonic: when the last checkpoint was complete

    @property
    def serving(self) -> bool:
        """True while this worker may hand out messages of the partition."""
        return self.owner.serving


#: A row of a checkpoint: table, key, value.
_Row = tuple["SegmentTable", bytes, bytes]


class _Claim(NamedTuple):
    """A partition whose own marker is durable, at ``own_offset`` (-1: Kafka can't tell)."""

    owner: Owner
    outbox: Outbox
    own_offset: int


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
        self._shed_at_ms = 0
        self._watched_ms = 0
        self._turns = Turns()
        self.lateness = Lateness()
        self.withheld = 0  # times that something was asked for and nothing was given, because this worker was late
        self._timer_ms = -1
        self._again_ms = -1  # when to serve those again
        self._outboxes: dict[int, Outbox] = {}
        self._assigned: set[int] | None = None  # None: no assignment was taken over yet
        self._recoveries: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self.letters = Letters(self, now_ms)
        self.tails = Tails(app, settings)

    @property
    def topics(self) -> Topics:
        """The topics in use (known once the worker has checked them)."""
        return self._topics()

    @property
    def ready(self) -> bool:
        """True if every assigned partition is served."""
        if self._assigned is None or self.app.rebalancing:
            return False
        return all(number in self.held and self.held[number].serving for number in self._assigned)

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
        if owner.phase in (Phase.LOST, Phase.FAILED):
            self._lost(held)
            return
        while owner.handouts:
            handouts, owner.handouts = owner.handouts, []
            for handout in handouts:
                try:
                    handout.receiver.handed(held, handout)
                except RowError:  # the owner has failed by it: what was not handed out counts for nobody
                    owner.release(handout.offsets, handout.receipt, counted=False)
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
        """Run a side task of the worker.

        A failure that Kafka or a request explains is logged, as the next checkpoint or timer does the same again; any
        other stops the worker.
        """
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        exc = task.exception()
        self.log.error("%s failed: %r", task.get_name(), exc)
        if not isinstance(exc, MarqError | KafkaError | OSError) or isinstance(exc, InternalError):
            self.app.fail(InternalError(f"{task.get_coro()} failed: {exc!r}"))

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
        self.lateness.woke(now, max(0, now - self._timer_ms - TIMER_MS) if self._timer_ms >= 0 else 0)
        self._timer_ms = now
        again = 0 <= self._again_ms <= now
        if again:
            self._again_ms = -1
        for held in list(self.held.values()):
            if again and held.serving:
                held.owner.partition.woken[""] = None
            if not held.serving:
                if held.owner.phase is Phase.FAILED:
                    self.drain(held)
                continue
            if self.lateness.held_back(now):
                continue  # acks that came while this process stood still are read before any lease ends
            with_ttl = self._with_ttl(held)
            held.owner.tick(now, with_ttl)
            held.owner.work(now, with_ttl)
            self.drain(held)
        if now - self._watched_ms >= STUCK_MS:
            self._watched_ms = now
            for held in self.held.values():
                self._read_again(held, now)

    def _read_again(self, held: Held, now: int) -> None:
        """A chunk that was dropped, as at a rebalance, is noticed with the next one; this is for the last of a log.

        Less and less often while nothing comes of it: a Kafka that is slow would be asked anew before it has answered.
        """
        partition, consumer = held.owner.partition, self.app.consumer
        for topic, position in (
            (self.topics.queue, partition.position),
            (self.topics.markers, partition.markers_position),
        ):
            before, again_ms, pause_ms = held.watched.get(topic, (-1, 0, 0))
            if position != before:
                held.watched[topic] = (position, 0, STUCK_MS)
                continue
            if now < again_ms or (held.paused and topic == self.topics.queue):
                continue
            tp = TP(topic, held.number)
            with contextlib.suppress(KafkaError):  # not assigned any more
                if position < (consumer.highwater(tp) or 0):
                    consumer.seek_chunks(tp, position, held.generation)
                    held.watched[topic] = (position, now + pause_ms, min(2 * pause_ms, STUCK_MAX_MS))

    def _with_ttl(self, held: Held) -> list[str]:
        """Queues with a TTL that have something here: of thousands in the catalog, few do."""
        with_ttl = self.catalog.with_ttl
        return [queue for queue in held.owner.partition.queues() if queue in with_ttl] if with_ttl else []

    def _held_of(self, chunk: Chunk) -> Held | None:
        held = self.held.get(chunk.partition)
        if held is None or not held.restored or held.generation != chunk.generation:
            return None
        return held

    def _seek(self, held: Held, topic: str, offset: int) -> None:
        self.app.consumer.seek_chunks(TP(topic, held.number), offset, held.generation)

    # ------------------------------------------------------------------ lateness

    def room(self, held: Held, wanted: int, lease_ms: int) -> int:
        """How many of `wanted` messages may be handed out under such a lease: fewer, or none, while acks are late."""
        room = self.lateness.room(now_ms(), wanted, lease_ms, held.outbox.late_s * 1000)
        if room == 0 and wanted:
            self.withheld += 1
            if self._again_ms < 0:
                self._again_ms = now_ms() + AGAIN_MS
        return room

    def is_late(self, held: Held, lease_ms: int) -> bool:
        """True if a partition hands out nothing under such a lease at the moment."""
        return self.lateness.share(now_ms(), lease_ms, held.outbox.late_s * 1000) == 0.0

    @property
    def ack_age_s(self) -> float:
        """Seconds that the oldest ack, extension or release has waited for Kafka."""
        return max((outbox.late_s for outbox in self._outboxes.values()), default=0.0)

    # ------------------------------------------------------------------ memory

    def regulate(self, held: Held) -> None:
        """Read on or pause: a partition reads ahead of its receivers by so many bytes, the worker holds so many."""
        partition = held.owner.partition
        share = self.settings.memory_bytes // max(1, len(self.held))
        wanted = partition.bytes < min(self.settings.read_ahead_bytes, share)
        if not wanted and held.serving:
            now = now_ms()
            if any(r.starving(held) for r in self.receivers):
                held.starved_ms = now
            wanted = now - held.starved_ms < READ_ON_MS and self._has_memory()
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
        if now_ms() < self._shed_at_ms:
            return False
        # a tenth more, so that this does not run again for every chunk
        excess += self.settings.memory_bytes // 10
        for held in sorted(self.held.values(), key=lambda h: -h.owner.partition.bytes):
            partition = held.owner.partition
            freed = partition.shed(excess, [queue for queue in partition.backlogs if self._is_wanted(queue)])
            excess -= freed
            if excess <= 0:
                return True
            held.owner.under_pressure = True
        # what could not be freed waits for a checkpoint, or for receivers; looking again costs a pass over everything
        self._shed_at_ms = now_ms() + SHED_PAUSE_MS
        return False

    def _is_wanted(self, queue: str) -> bool:
        return any(receiver.wants(queue) for receiver in self.receivers)

    # ------------------------------------------------------------------ checkpoints

    def _step(self, held: Held) -> None:
        owner, now = held.owner, now_ms()
        begins = owner.checkpoint_is_due(now)
        if begins and not self._turns.take(held.number, now):
            return
        step = owner.step(now)
        if begins and not isinstance(step, WriteRows):
            self._turns.end(held.number)
        if isinstance(step, WriteRows):
            rows = [(self.tables[table_of(key)], key.encode(), value) for key, value in step.rows]
        elif isinstance(step, WriteManifest):
            rows = [(self.tables["progress"], step.key.encode(), step.value)]
        else:
            if isinstance(step, Retire):
                self._retire(held, step)
            return
        self._when_written(held, rows, [table.write(key, value) for table, key, value in rows])

    def _when_written(self, held: Held, rows: list[_Row], futures: list[asyncio.Future[Any]]) -> None:
        done = asyncio.gather(*futures, return_exceptions=True)
        done.add_done_callback(lambda done: None if done.cancelled() else self._written(held, rows, done.result()))

    def _written(self, held: Held, rows: list[_Row], results: list[Any]) -> None:
        if self.held.get(held.number) is not held or not held.serving:
            return
        failed = [(row, error) for row, error in zip(rows, results, strict=True) if isinstance(error, BaseException)]
        if not failed:
            self._turns.end(held.number)
            held.owner.written(now_ms())
            self.drain(held)
            return
        for row, error in failed:
            if not isinstance(error, (KafkaTimeoutError, ProducerFull)):
                self.app.fail(InternalError(f"partition {held.number}: row {row[1]!r} was not written: {error!r}"))
                return
        self.log.warning("Partition %s: Kafka has not confirmed %s rows, writing them again", held.number, len(failed))
        self.spawn(self._write_again(held, [row for row, _ in failed]))

    async def _write_again(self, held: Held, rows: list[_Row]) -> None:
        """Kafka was away. A row that is written twice is the same row; the next ones wait for it."""
        await asyncio.sleep(WRITE_AGAIN_S)
        if self.held.get(held.number) is held and held.serving:
            self._when_written(held, rows, [t.write_again(held.number, key, value) for t, key, value in rows])

    def _retire(self, held: Held, step: Retire) -> None:
        held.checkpoint_s = time.monotonic()
        tables = [(self.tables[table_of(key)], key.encode()) for key in step.rows]
        tables += [(self.tables["progress"], key.encode()) for key in step.manifests]
        deleted = [(table, key, table.write(key, None)) for table, key in tables]
        self.spawn(self._see_deleted(held, deleted))
        consumer = self.app.consumer
        consumer.set_commit_position(TP(self.topics.queue, held.number), step.position, held.generation)
        consumer.set_commit_position(TP(self.topics.markers, held.number), step.markers_position, held.generation)
        self.spawn(self.tails.trim(held, self.topics, step.position, step.markers_position))

    async def _see_deleted(self, held: Held, deleted: list[tuple[SegmentTable, bytes, asyncio.Future[Any]]]) -> None:
        """Delete again what Kafka did not confirm: nothing names these rows, and they would stay for ever."""
        while deleted:
            results = await asyncio.gather(*(future for _, _, future in deleted), return_exceptions=True)
            failed = [d for d, result in zip(deleted, results, strict=True) if isinstance(result, BaseException)]
            if not failed:
                return
            await asyncio.sleep(WRITE_AGAIN_S)
            if self.held.get(held.number) is not held:
                return  # the next owner finds them
            deleted = [(table, key, table.write_again(held.number, key, None)) for table, key, _ in failed]

    # ------------------------------------------------------------------ assignment and recovery

    def on_revoked(self) -> None:
        """The rebalance takes everything first: nothing of it may have effects from here on."""
        self._assigned = None
        for task in self._recoveries:
            task.cancel()
        for held in list(self.held.values()):
            self._leave(held)
        for outbox in self._outboxes.values():
            outbox.writer = NOBODY  # claims that were under way

    def _leave(self, held: Held) -> None:
        del self.held[held.number]
        self._turns.end(held.number)
        held.outbox.writer = NOBODY
        for receiver in self.receivers:
            receiver.forget(held)

    def on_assigned(self, generation: int) -> None:
        """The rebalance has ended, Faust has recovered the tables: take over what is assigned."""
        self.on_revoked()
        self._assigned = {tp.partition for tp in self.app.consumer.assignment() if tp.topic == self.topics.markers}
        self._take_over(generation, sorted(self._assigned))

    def _lost(self, held: Held) -> None:
        """A foreign own marker was folded, or a row can't be read. While it is assigned to us, we take it back."""
        if self.held.get(held.number) is not held:
            return
        failed = held.owner.phase is Phase.FAILED
        if failed and not isinstance(held.owner.error, RowError):
            # an error of our own: the next recovery would meet it again
            held.outbox.put(held.owner.appends)
            self._leave(held)
            self.app.fail(InternalError(f"partition {held.number}: {held.owner.reason}"))
            return
        if failed:
            reason = held.owner.reason
            self.log.error("Partition %s is filled again from its changelogs: %s", held.number, reason)
            held.outbox.put(held.owner.appends)  # what receivers said
        else:
            self.log.warning("Partition %s was taken over by another worker", held.number)
        self._leave(held)
        for table in self.tables.values() if failed else ():
            table.wipe(held.number)
        self._take_over(held.generation, [held.number], TAKE_BACK_S)

    def _take_over(self, generation: int, numbers: list[int], delay_s: float = 0) -> None:
        task = asyncio.ensure_future(self._recover_in_time(generation, numbers, delay_s))
        self._recoveries.add(task)
        task.add_done_callback(self._recoveries.discard)

    async def _recover_in_time(self, generation: int, numbers: list[int], delay_s: float) -> None:
        """Ends when the partitions are served, when a rebalance cancels it, or with the worker."""
        await asyncio.sleep(delay_s)
        if generation != self.app.consumer_generation_id:
            return
        try:
            async with asyncio.timeout(SERVE_TIMEOUT_S):
                await self._recover(generation, numbers)
        except TimeoutError:
            missing = [n for n in numbers if n not in self.held or not self.held[n].serving]
            self.app.fail(
                InternalError(f"partitions {missing} are assigned but not served after {SERVE_TIMEOUT_S:.0f} s")
            )
        except Exception as exc:
            self.app.fail(exc)

    async def _recover(self, generation: int, numbers: list[int]) -> None:
        unclaimed, claims = set(numbers), dict[int, _Claim]()
        attempts: Counter[int] = Counter()
        while unclaimed or claims:
            for claim in await asyncio.gather(*(self._claim(number) for number in unclaimed)):
                claims[claim.owner.number] = claim
            unclaimed.clear()
            try:
                await self.tails.read_rest(self.tables.values(), claims)
                starts = await self.tails.log_starts(self.topics, claims)
            except (KafkaError, TimeoutError) as exc:
                self.log.warning("Recovery of partitions %s: %r, trying again", sorted(claims), exc)
                await asyncio.sleep(RECOVER_AGAIN_S)
                continue
            for number, (owner, outbox, own_offset) in list(claims.items()):
                try:
                    owner.restore(*self._rows_of(number), self._loader(number), starts[number], own_offset)
                except RowError as exc:
                    attempts[number] += 1
                    self.log.warning("Recovery of partition %s, attempt %s: %s", number, attempts[number], exc)
                    if attempts[number] == 2 * ATTEMPTS:
                        raise
                    if attempts[number] >= ATTEMPTS:
                        for table in self.tables.values():
                            table.wipe(number)
                    continue
                del claims[number]
                if owner.phase is Phase.LOST:
                    unclaimed.add(number)
                else:
                    self._enter(Held(number, generation, owner, outbox))
            if unclaimed or claims:
                await asyncio.sleep(RECOVER_AGAIN_S)
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

    async def _claim(self, number: int) -> _Claim:
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
                    partitions=self.topics.partitions,
                ),
                settings_of=self.catalog.settings_of,
            )
            outbox = self.outbox(number)
            outbox.writer = self._writer(number, owner)
            claimed = outbox.put_confirmed([owner.claim()])
            try:
                return _Claim(owner, outbox, await asyncio.wait_for(claimed, CLAIM_TIMEOUT_S))
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
            value = self.tables[table_of(key)].read(number, key.encode())
            if value is None:
                raise RowError(f"row {key} is named by the manifest, but it is not in the table")
            return value

        return load

    # ------------------------------------------------------------------ stopping

    async def hand_over(self, timeout_s: float) -> bool:
        """Before leaving: wait until what receivers have acknowledged is in the log. False if Kafka did not take it."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not all(outbox.idle for outbox in self._outboxes.values()):
            if asyncio.get_running_loop().time() > deadline:
                self.log.warning("Stopping, but Kafka has not taken all acknowledgements within %s s", timeout_s)
                return False
            await asyncio.sleep(0.01)
        return True

    async def on_stop(self) -> None:
        self.on_revoked()
        for task in list(self._background):
            task.cancel()
        await self.tails.close()
