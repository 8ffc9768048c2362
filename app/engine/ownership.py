"""The partitions that this worker owns: connects `marq.core.owner` with Kafka.

    assigned ─► taken over (`app.engine.takeover`) ─► served ─► released

The log decides who owns a partition, so a rebalance is no reason to stop serving. Partitions that stay with this worker
are not touched; those that leave are released when the new assignment is known. Everything runs in the event loop of
the worker, so an owner is never entered twice. Agents call `on_queue_chunk` and `on_markers_chunk`, the timer agent
calls `on_timer`; none of these waits for anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiokafka.errors import KafkaError
from faust.streams import current_event
from faust.types import TP
from mode import Service

from app.engine.breakers import Breakers
from app.engine.broker_time import BrokerClocks
from app.engine.changelogs import Changelogs
from app.engine.checkpoints import CheckpointWriter
from app.engine.copies import Copies
from app.engine.due_times import DueTimes
from app.engine.intake import Intake
from app.engine.outbox import NOBODY, Outbox
from app.engine.owned_partition import OwnedPartition, Receiver
from app.engine.progress import STUCK_MS, Progress
from app.engine.read_ahead import ReadAhead
from app.engine.read_up import LogEnds, ReadUp
from app.engine.second_looks import SecondLooks
from app.engine.stalls import Stalls
from app.engine.takeover import TakeOver
from app.engine.throttle import Throttle
from app.engine.transactions import OpenTransactions
from app.engine.unread_counter import UnreadCounter
from app.streaming.faults import is_expected
from marq.clock import now_ms
from marq.core.markers import Marker
from marq.core.owner import Owner, Phase
from marq.errors import (
    DeletedError,
    InternalError,
    NewerRowError,
    NewerVersionError,
    RowError,
    UnreadableError,
)

if TYPE_CHECKING:
    from app.cluster.peers import Peers
    from app.engine.catalog import Catalog
    from app.kafka.topics import Topics
    from app.settings import Settings
    from app.streaming.chunks import Chunk
    from app.streaming.faust_app import MarqApp
    from app.streaming.raw_table import SegmentTable

#: Seconds before a partition is taken over again after another worker took it, or after an error.
TAKE_BACK_S = 1.0
#: Seconds of the longest such pause, and milliseconds within which another unreadable row doubles the pause.
TAKE_BACK_MAX_S = 60.0
DAMAGE_MEMORY_MS = 300_000
#: Milliseconds between calls of `Ownership.on_timer`, and at most while nothing is due and nothing happens.
TIMER_MS = 20
REST_MS = 250
#: Partitions that one call of the timer looks at. Each takes some ten microseconds.
DUE_AT_ONCE = 200
#: Milliseconds that a record may have been in its log when it is read, so that its timestamp tells the broker's time.
LIVE_MS = 1_000
#: Milliseconds before the timer applies changed settings of queues.
SETTINGS_MS = 200


def _gone(topic: str, number: int, position: int) -> str:
    return f"{topic}:{number} does not hold offset {position} any more"


class _Alone:
    """See `Ownership._alone`. A class, because a generator costs three times as much for each chunk and record."""

    __slots__ = ("_held", "_ownership")

    def __init__(self, ownership: Ownership, owned: OwnedPartition) -> None:
        self._ownership = ownership
        self._held = owned

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, RowError):
            return False
        self._ownership.recover_again(self._held, str(error), wipe=True)
        return True


class Ownership(Service):
    """All partitions assigned to this worker, and the markers it writes (to any partition)."""

    def __init__(
        self,
        app: MarqApp,
        settings: Settings,
        topics: Callable[[], Topics],
        tables: dict[str, SegmentTable],
        catalog: Catalog,
        peers: Peers,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.app = app
        self.settings = settings
        self._topics = topics
        self.tables = tables
        self.catalog = catalog
        self.owned: dict[int, OwnedPartition] = {}
        #: Partitions that are assigned to this worker but can't be served at present: why.
        self.unserved: dict[int, str] = {}
        #: Partitions that a topic has no more: why.
        self.gone: dict[int, str] = {}
        #: What is wrong with the partitions of topics (`app.engine.partition_counts`), a line each.
        self.topic_lines: list[str] = []
        #: Called when a partition is served from now on (True), or is known not to be.
        self.on_settled: Callable[[int, bool], None] = lambda number, serving: None
        self.receivers: list[Receiver] = []
        self.intake = Intake()
        self.worker_name = ""
        self._watched_ms = 0
        self.due = DueTimes()
        #: Partitions to which something happened. Housekeeping looks for new queues in them, and empties this.
        self.stirred: dict[int, None] = {}
        self._settings_seen, self._settings_ms = 0, 0
        self.throttle = Throttle(lambda: now_ms(), lambda: TIMER_MS)
        self._outboxes: dict[int, Outbox] = {}
        # partition -> failures in a row to read a row, and until when a further one counts as in a row
        self._damages: dict[int, tuple[int, int]] = {}
        self._assigned: set[int] | None = None  # None: no assignment was taken over yet
        self._recoveries: dict[int, asyncio.Task[None]] = {}
        self._generation = -1
        self._leaving = False
        self._closing = False
        self._background: set[asyncio.Task[Any]] = set()
        self.broker_time = BrokerClocks(lambda: now_ms(), lambda topic, number: app.producer.leader_of(topic, number))
        self.breakers = Breakers(catalog.settings_of, lambda: now_ms(), peers, self.spawn)
        self.copies = Copies(self, now_ms)
        self.read_ahead = ReadAhead(self, lambda: now_ms())
        self.checkpoints = CheckpointWriter(self, lambda: now_ms())
        self.log_ends = LogEnds(settings)
        self.transactions = OpenTransactions(
            lambda: app.consumer.unstable(), topics, self.owned, self.log_ends.begin_of, self.spawn
        )
        self.stalls = Stalls(
            lambda longer_s: app.producer.waits(longer_s),
            topics,
            lambda: {**self.checkpoints.refusals(), **self.transactions.now()},
        )
        self.progress = Progress(app, topics, self.is_unserved)
        self.second_looks = SecondLooks(self, lambda: now_ms())
        self.changelogs = Changelogs(app, settings)
        self.unread_counter = UnreadCounter(self)
        self.read_up = ReadUp(self.log_ends.ask, topics, self.owned, self.end_due, self.spawn, self.hurry)

    @property
    def topics(self) -> Topics:
        """The topics in use (known once the worker has checked them)."""
        return self._topics()

    @property
    def in_group(self) -> bool:
        """False once the consumer group has given this worker up."""
        return bool(self.app.consumer.in_group)

    @property
    def ready(self) -> bool:
        """True if each assigned partition is served, except those that can't be served. At least one is served."""
        if self._assigned is None or self._leaving or self._closing:
            return False
        served = sum(number in self.owned and self.owned[number].serving for number in self._assigned)
        return served == len(self._assigned) or 0 < served == len(self._assigned - self.unserved.keys())

    @property
    def ack_age_s(self) -> float:
        """Seconds that the oldest ack, extension or release has waited for Kafka."""
        return max((outbox.late_s for outbox in self._outboxes.values()), default=0.0)

    def hurry(self, *, lasting: bool = True) -> None:
        """Somebody waits for records that are not read yet: see `app.streaming.gathering`."""
        self.app.consumer.hurry(lasting=lasting)

    # ------------------------------------------------------------------ markers

    def outbox(self, partition: int) -> Outbox:
        """The outbox for markers of `partition`, whoever owns it."""
        outbox = self._outboxes.get(partition)
        if outbox is None:
            outbox = Outbox(lambda: self.app.producer, self.topics.markers, partition, self.broker_time.stamped)
            self._outboxes[partition] = outbox
        return outbox

    def drain(self, owned: OwnedPartition) -> None:
        """Carry out the effects of an owner. Call this after each call of the owner."""
        owner = owned.owner
        self.due.touch(owned.number)
        self.stirred[owned.number] = None
        if self.read_up.rounds:
            self.read_up.advanced(owned)
        if owner.phase in (Phase.LOST, Phase.FAILED):
            self._lost(owned)
            return
        if owner.phase is Phase.STOPPED:
            self._stop_at_newer(owned)
            return
        if owned.begins_later and not owner.passes_deleted:
            self._read_queue_on(owned)
        while (effects := owner.take_effects()) is not None:
            if effects.appends:
                owned.outbox.put(effects.appends)
            for handout in effects.handouts:
                try:
                    handout.receiver.handed(owned, handout)
                except RowError:  # the owner has failed: a delivery that was not handed out does not count
                    owner.release(handout.offsets, handout.receipt, counted=False)
            if effects.dead:
                self.copies.begin(owned, effects.dead)
                self.spawn(self.copies.dead_letter(owned, effects.dead))
            if effects.poison:
                self.spawn(self.copies.poison.quarantine(owned, effects.poison))
        if owner.take_woken():
            for receiver in self.receivers:
                receiver.wake(owned)
            if appends := owner.take_appends():
                owned.outbox.put(appends)
        self.read_ahead.regulate(owned)

    def _stop_at_newer(self, owned: OwnedPartition) -> None:
        if self.owned.get(owned.number) is owned:
            self._leave(owned)
            self.is_unserved(owned.number, owned.owner.reason)
            self.app.fail(NewerVersionError(owned.owner.reason))

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a side task of the worker.

        A failure that Kafka or a request explains is only logged, because the next checkpoint or timer tries again. Any
        other failure stops the worker.
        """
        task: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        exc = task.exception()
        self.log.error("%s failed: %r", task.get_name(), exc)
        if not is_expected(exc):
            self.app.fail(InternalError(f"{task.get_coro()} failed: {exc!r}"))

    # ------------------------------------------------------------------ what the agents call

    def on_queue_chunk(self, chunk: Chunk) -> None:
        """Take up a chunk of the queue topic."""
        owned = self._held_of(chunk)
        if owned is None:
            return
        with self._alone(owned):
            now = now_ms()
            stamp_ms = chunk.records[-1].timestamp if chunk.records else -1  # -1, too, if it can't be read
            if chunk.since_ms is not None and stamp_ms >= 0 and now - chunk.since_ms <= LIVE_MS:
                self.broker_time.stamped(self.topics.queue, owned.number, stamp_ms)
            if not owned.owner.ingest(chunk.start, chunk.next, chunk.records, now, chunk.since_ms):
                self._seek(owned, self.topics.queue, owned.owner.partition.position)
            elif owned.serving:  # an owner that does not serve yet reads again what its predecessor has read
                self.intake.read(self.settings.queue_id, chunk.records)
            self.drain(owned)

    def on_markers_chunk(self, chunk: Chunk) -> None:
        """Fold a chunk of the markers topic, and make a step of the checkpoint in the context of its event."""
        owned = self._held_of(chunk)
        if owned is None:
            return
        was_serving = owned.serving
        with self._alone(owned):
            if not owned.owner.read_markers(chunk.start, chunk.next, chunk.records, now_ms()):
                self._seek(owned, self.topics.markers, owned.owner.partition.markers_position)
            if not was_serving:
                self.hurry()
            if owned.serving and not was_serving:
                self.log.debug("Serving partition %s, epoch %s", owned.number, owned.owner.epoch)
                self.on_settled(owned.number, True)
                self.unserved.pop(owned.number, None)
                owned.owner.wake()
            if current_event() is not None:  # else the group rebalances, and rows have to wait
                self.checkpoints.step(owned)
            self.drain(owned)

    def on_timer(self) -> None:
        """Do what is due by time: ticks, dead letters, expiry. Called many times a second.

        It only looks at partitions to which something happened, or whose time has come.
        """
        now = now_ms()
        self.throttle.timer_fired(now)
        self.throttle.wake_refused(now, self.owned)
        if self.catalog.settings_changes != self._settings_seen and now - self._settings_ms >= SETTINGS_MS:
            self._settings_seen, self._settings_ms = self.catalog.settings_changes, now
            for number in self.owned:
                self.due.touch(number)  # a queue may have a new time to live
        held_back = self.throttle.held_back(now)
        due = self.due.take(now)
        for number in due[DUE_AT_ONCE:]:
            self.due.touch(number)
        for number in due[:DUE_AT_ONCE]:
            owned = self.owned.get(number)
            if owned is None:
                continue
            if not owned.serving:
                self._look_at_unserved(owned, now)
            elif held_back:
                self.due.touch(number)  # acks that came while this process stood still are read before any lease ends
            else:
                self._do_due(owned, now)
        if now - self._watched_ms >= STUCK_MS:
            self._watched_ms = now
            self.transactions.look()
            self.stalls.look()
            self.second_looks.look(self.owned)
        self.read_ahead.look()
        self.progress.look_after_some(self.owned, now)

    def rest_ms(self) -> int:
        """How long `on_timer` need not be called unless something happens to a partition (`due.on_touch`).

        Call this some time after `on_timer`: whatever was in its turn is known by then.
        """
        now = now_ms()
        changed = self.catalog.settings_changes != self._settings_seen
        if changed or not (self.throttle.is_calm and self.read_ahead.is_calm) or self.throttle.held_back(now):
            return 0
        rest_ms = self.due.wait_ms(now, REST_MS)
        if rest_ms <= TIMER_MS:
            return 0
        self.throttle.rests(now, rest_ms)
        return rest_ms

    def _do_due(self, owned: OwnedPartition, now: int) -> None:
        with self._alone(owned):
            with_ttl = self._with_ttl(owned)
            self.checkpoints.may_begin(owned, now)
            owned.owner.tick(now, with_ttl)
            owned.owner.work(now, with_ttl)
            self.drain(owned)
            self.due.set(owned.number, owned.owner.next_ms(now, bool(with_ttl)))

    def _look_at_unserved(self, owned: OwnedPartition, now: int) -> None:
        if owned.owner.phase is Phase.FAILED:
            self.drain(owned)
            return
        self.due.set(owned.number, self.progress.look(owned, now))

    def end_due(self) -> None:
        """Begin to end messages past their maximum receive count or time to live, without waiting for the timer."""
        now = now_ms()
        for number in self.due.take(now):
            owned = self.owned.get(number)
            if owned is None:
                continue
            if owned.serving:
                with self._alone(owned):
                    owned.owner.work(now, self._with_ttl(owned))
                    self.drain(owned)
            self.due.touch(number)  # the rest is for the timer

    def _with_ttl(self, owned: OwnedPartition) -> list[str]:
        """Queues with a time to live in their settings that have messages in this partition."""
        with_ttl = self.catalog.with_ttl
        return [queue for queue in owned.owner.partition.queues() if queue in with_ttl] if with_ttl else []

    def _held_of(self, chunk: Chunk) -> OwnedPartition | None:
        owned = self.owned.get(chunk.partition)
        if owned is None or owned.generation != chunk.generation:
            return None
        return owned

    def _seek(self, owned: OwnedPartition, topic: str, offset: int) -> None:
        self.app.consumer.seek_chunks(TP(topic, owned.number), offset, owned.generation)

    # ------------------------------------------------------------------ assignment

    def on_assignment(self, numbers: set[int]) -> None:
        """Take up a new assignment: release partitions that leave, at once, and do not touch the others.

        Called before Faust closes the tables of partitions that leave.
        """
        if self._closing:
            return
        self._assigned = set(numbers)
        for number in list(self._recoveries):
            if number not in numbers:
                self._recoveries.pop(number).cancel()
        for number in list(self.owned):
            if number not in numbers:
                self._leave(self.owned[number])
        for number in set(self._outboxes) - numbers:
            self._outboxes[number].drop_owners()  # of claims that were under way
            self._outboxes[number].writer = NOBODY
        for number in set(self.unserved) - numbers:
            del self.unserved[number]

    def on_assigned(self, generation: int) -> None:
        """Called when a rebalance has ended: read on in partitions that stay, and take over new ones."""
        if self._closing:
            return
        numbers = {tp.partition for tp in self.app.consumer.assignment() if tp.topic == self.topics.markers}
        self.on_assignment(numbers)
        self._generation = generation
        for number in sorted(numbers):
            owned = self.owned.get(number)
            if owned is not None:
                self._read_on(owned)
            elif number not in self._recoveries:
                self._take_over(number)

    def _read_on(self, owned: OwnedPartition) -> None:
        """Open both logs at the positions of the state."""
        consumer, markers = self.app.consumer, TP(self.topics.markers, owned.number)
        owned.generation = self._generation
        owned.watched.clear()
        owned.paused = False
        consumer.resume_reading(TP(self.topics.queue, owned.number))
        consumer.start_from(markers, owned.owner.partition.markers_position, owned.generation)
        self._read_queue_on(owned)
        if owned.serving:
            self.read_ahead.regulate(owned)

    def _read_queue_on(self, owned: OwnedPartition) -> None:
        """Read the queue topic from where the owner is, unless that was deleted and the owner has yet to pass it."""
        owner, queue = owned.owner, TP(self.topics.queue, owned.number)
        for loss in owner.take_losses():
            self.log.error(
                "Partition %s: Kafka has deleted %s messages that were neither done nor read (offsets %s to %s of %s): "
                "they are lost, and the partition goes on behind them. Raise the retention of the topic",
                *(owned.number, f"{loss.unfinished:,}", loss.start, loss.stop - 1, self.topics.queue),
            )
        owned.begins_later = owner.passes_deleted
        if not owned.begins_later:
            self.app.consumer.start_from(queue, owner.partition.position, owned.generation)

    def _take_over(self, number: int, delay_s: float = 0.0) -> None:
        take_over = TakeOver(self, number)
        task = self._recoveries[number] = asyncio.ensure_future(take_over.run(delay_s))
        task.add_done_callback(lambda done: self._taken_over(number, done))

    def _taken_over(self, number: int, done: asyncio.Task[None]) -> None:
        if self._recoveries.get(number) is done:
            del self._recoveries[number]
        if not done.cancelled() and (error := done.exception()) is not None:
            self.app.fail(error)

    def enter(self, number: int, owner: Owner, outbox: Outbox) -> None:
        """Called when the state of a partition is restored: read both logs from its positions on."""
        owned = self.owned[number] = OwnedPartition(number, self._generation, owner, outbox)
        owned.advanced_ms = now_ms()
        self.due.touch(number)
        self._read_on(owned)

    def on_appended(
        self, number: int, owner: Owner, seq: int, offset: int, timestamp_ms: int, markers: list[Marker]
    ) -> None:
        """Called when a record of an owner is in the log."""
        owned = self.owned.get(number)
        if owned is not None and owned.owner is owner:
            with self._alone(owned):
                owner.acknowledged(seq, offset, timestamp_ms, markers, now_ms())
                if owner.is_behind:
                    self.hurry(lasting=False)
                self.drain(owned)

    def stop_at_newer(self, error: NewerRowError) -> None:
        """Stop the worker: a later version has owned a partition, and this one can't."""
        self.app.fail(error)

    def is_unserved(self, number: int, reason: str) -> None:
        """Called when a partition that is assigned to this worker can't be served at present."""
        if self.unserved.get(number) != reason:
            self.log.warning("Partition %s is not served: %s", number, reason)
            self.on_settled(number, False)
        self.unserved[number] = reason

    def _leave(self, owned: OwnedPartition) -> None:
        """Stop serving a partition, and send the last markers for it."""
        del self.owned[owned.number]
        self.due.forget(owned.number)
        self.read_ahead.let_go(owned)
        self.checkpoints.let_go(owned.number)
        self.read_up.advanced(owned)
        self.copies.forget(owned)
        owned.outbox.drop_owners()
        last = owned.owner.leave()
        owned.outbox.writer = NOBODY
        if last:
            owned.outbox.put(last)
        for receiver in self.receivers:
            receiver.forget(owned)

    def _lost(self, owned: OwnedPartition) -> None:
        """A foreign own marker was folded, or a row can't be read. Take the partition back if it is still assigned."""
        if self.owned.get(owned.number) is not owned:
            return
        failed, error = owned.owner.phase is Phase.FAILED, owned.owner.error
        if failed and not isinstance(error, RowError):
            # our own error: it would happen again after the next recovery
            owned.outbox.put(owned.owner.take_appends())
            self._leave(owned)
            self.app.fail(InternalError(f"partition {owned.number}: {owned.owner.reason}"))
            return
        if failed:
            reason, damaged = owned.owner.reason, not isinstance(error, DeletedError | UnreadableError)
            if damaged:
                self.log.error("Partition %s is filled again from its changelogs: %s", owned.number, reason)
            owned.outbox.put(owned.owner.take_appends())  # acks, extensions, releases
            self.recover_again(owned, reason, wipe=damaged, again=True)
            return
        level = logging.INFO if self._leaving else logging.WARNING
        self.log.log(level, "Partition %s was taken over by another worker", owned.number)
        self._leave(owned)
        if not (self._leaving or self._closing):
            self._take_over(owned.number, TAKE_BACK_S)

    def recover_again(self, owned: OwnedPartition, reason: str, *, wipe: bool = False, again: bool = False) -> None:
        """Release a partition whose state or log is wrong, and take it over again.

        Args:
            wipe: the local store may be damaged: fill it from the changelogs.
            again: the same may happen each time: wait longer each time.
        """
        if self.owned.get(owned.number) is not owned:
            return
        self._leave(owned)
        self.is_unserved(owned.number, reason)
        delay_s = TAKE_BACK_S
        if wipe:
            for table in self.tables.values():
                table.wipe(owned.number)
        if wipe or again:
            # a row may be damaged in the changelog, too, and would fail each time it is read
            count, until_ms = self._damages.get(owned.number, (0, 0))
            count = count + 1 if now_ms() < until_ms else 0
            delay_s = min(TAKE_BACK_S * 2**count, TAKE_BACK_MAX_S)
            self._damages[owned.number] = (count, now_ms() + DAMAGE_MEMORY_MS)
        if not (self._leaving or self._closing):
            self._take_over(owned.number, delay_s)

    def on_offset_out_of_range(self, number: int, topic: str, position: int) -> None:
        """The next record of a log was deleted: another owner has gone on, or a user or retention deleted records."""
        owned = self.owned.get(number)
        if owned is None:
            return
        partition = owned.owner.partition
        reached = partition.markers_position if topic == self.topics.markers else partition.position
        if position < reached:
            # this owner folds its own records before they are read, and its checkpoint may have deleted them
            self._seek(owned, topic, reached)
        elif topic == self.topics.markers:
            self.recover_again(owned, _gone(topic, number, position))
        else:
            self.spawn(self._look_at_start(owned))

    async def _look_at_start(self, owned: OwnedPartition) -> None:
        """The queue topic does not have the next record: tell the owner where it begins."""
        position = owned.owner.partition.position
        start = await self.queue_start(owned)
        if self.owned.get(owned.number) is owned and (start is None or start <= position):
            self.recover_again(owned, _gone(self.topics.queue, owned.number, position))

    async def queue_start(self, owned: OwnedPartition) -> int | None:
        """Where the queue topic begins, which the owner is told if it has not read all below; None: not known."""
        try:
            edges = await self.changelogs.edges(self.topics, owned.number, None)
        except (KafkaError, TimeoutError):
            return None
        if edges.end is None:
            return None
        if self.owned.get(owned.number) is owned and owned.owner.lacks(edges.start[0]):
            with self._alone(owned):
                owned.begins_later = True
                owned.owner.begins_later(edges.start[0], edges.end[1], now_ms())
                self.drain(owned)
        return edges.start[0]

    def _alone(self, owned: OwnedPartition) -> _Alone:
        """Wraps work on a partition: if a row can't be read, the partition is taken over again, and others go on."""
        return _Alone(self, owned)

    # ------------------------------------------------------------------ stopping

    async def serve_until_taken(self, timeout_s: float) -> None:
        """This worker has left the group: serve each partition until another worker has taken it over."""
        self._leaving = True
        for number, task in self._recoveries.items():
            task.cancel()
            self.outbox(number).drop_owners()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.owned and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if self.owned:
            self.log.info("Partitions %s were not taken over within %s s", sorted(self.owned), timeout_s)

    def stop_serving(self) -> None:
        """Release all partitions, and take over no more."""
        self._closing = True
        for task in self._recoveries.values():
            task.cancel()
        for owned in list(self.owned.values()):
            self._leave(owned)
        for outbox in self._outboxes.values():
            outbox.drop_owners()
            outbox.writer = NOBODY

    async def hand_over(self, timeout_s: float) -> bool:
        """Release all partitions, and wait until all acks of receivers are in the log.

        Returns False if Kafka did not take them in time.
        """
        self.stop_serving()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not all(outbox.idle for outbox in self._outboxes.values()):
            if asyncio.get_running_loop().time() > deadline:
                self.log.warning("Stopping, but Kafka has not taken all acknowledgements within %s s", timeout_s)
                return False
            await asyncio.sleep(0.01)
        return True

    async def on_start(self) -> None:
        await self.log_ends.start()

    async def on_stop(self) -> None:
        self.stop_serving()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(self.changelogs.close(), self.log_ends.stop())
