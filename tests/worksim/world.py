"""What happens: workers, clients and faults, chosen by a seed, and the end, at which all must be well."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import mode

import agents.handlers
import agents.housekeeping
import agents.redelivery
import app.cluster.peers
import app.engine.catalog
import app.engine.changelogs
import app.engine.ownership
import app.engine.queues_topic
import app.engine.unread_counter
import app.kafka.connection
import app.service.move_tasks
import app.streaming.raw_table
import app.worker
import marq.handlers
from app.engine.changelogs import TRIM_INTERVAL_MS
from app.engine.outbox import Outbox
from app.engine.ownership import TIMER_MS
from app.service.receives import Receives
from app.settings import Settings
from app.streaming.faults import is_expected
from marq.clock import now_ms
from marq.core.owner import Owner
from marq.errors import MarqError
from tests.worksim import given_back
from tests.worksim.audit import faults_of
from tests.worksim.clients import Clients, Lost
from tests.worksim.clock import Entropy, Process, Stuck, VirtualLoop, virtual
from tests.worksim.faults import DRAWN_THEMES, THEMES, Faults
from tests.worksim.group import Group
from tests.worksim.handlers import HANDLERS
from tests.worksim.kafka import MAX_BYTES, Admin, Edges, Kafka, Odds, PlainConsumer, PlainProducer, identify
from tests.worksim.network import Network, Session
from tests.worksim.store import NO_SPACE, Rows, WriteBatch
from tests.worksim.truth import Truth, Violation
from tests.worksim.worker import Worker, topics_of

#: Seconds of a run before its faults stop.
RUN_S = 60.0
#: Seconds within which all must be delivered once the faults have stopped.
HEAL_S = 240.0
#: Seconds after which no worker hands out less because it was late: `marq.core.lateness`.
SETTLED_S = 12.0
#: Milliseconds that a step of a checkpoint may take while nothing is wrong.
STEP_MAX_MS = 10_000
#: The queue of a topic that is not marq's own.
TOPIC_QUEUE = "everything"
#: In the reason why a partition is not served whose log begins beyond what is known of it.
DELETED = "deleted unread"
#: Lines of a story.
STORY_LINES = 60


class Shape(NamedTuple):
    """How large the installation is."""

    workers: int
    partitions: int
    clients: int
    seconds: float
    faults: bool
    theme: str = "mixed"
    topic_mode: bool = False

    @classmethod
    def of(cls, seed: int, theme: str | None = None) -> Shape:
        """The shape of a seed's run, in which all is drawn but the theme if that is given."""
        return cls.draw(Entropy(seed).stream("shape"), theme)

    @classmethod
    def draw(cls, r: Random, theme: str | None = None) -> Shape:
        drawn = r.choice(DRAWN_THEMES)
        theme = theme or drawn
        return cls(
            workers=r.choice((1, 2, 2, 3)),
            partitions=r.choice((1, 2, 3, 4)),
            clients=r.choice((1, 2, 4)),
            seconds=THEMES[theme].seconds or r.choice((10.0, 30.0, RUN_S)),
            faults=(r.random() < 0.9 or theme not in ("mixed", "long", "hours")) and bool(THEMES[theme].weights),
            theme=theme,
            topic_mode=r.random() < 0.1,
        )


class Cut(NamedTuple):
    """What is left out of a run, which makes the story of a failure shorter."""

    faults: frozenset[int] = frozenset()  # their numbers
    operations: frozenset[tuple[int, int]] = frozenset()  # of clients: who, and the number
    odds: frozenset[str] = frozenset()  # of Kafka and the network
    ambushes: bool = True
    salt: int = 0  # another order of events


class World:
    """One run."""

    def __init__(
        self, seed: int, shape: Shape | None = None, story: list[str] | None = None, cut: Cut | None = None
    ) -> None:
        self.seed = seed
        self.cut = cut or Cut()
        draws = Entropy(seed).stream("shape")
        drawn = Shape.draw(draws)
        self.shape = shape or drawn
        self.entropy = Entropy(seed, self.cut.salt)
        self.random = self.entropy.stream("world")
        self.statistics: Counter[str] = Counter()
        #: Calls between workers, by name.
        self.calls: Counter[str] = Counter()
        self.story = story
        self._hash = blake2b(digest_size=16)
        self.violation: Violation | None = None
        theme = THEMES[self.shape.theme]
        self.loop = VirtualLoop()
        self.loop.on_error = self.callback_failed
        self.starts = 0
        self.healing = False
        dead_letters = "dead-letters" if self.shape.topic_mode and draws.random() < 0.7 else None
        self.settings = Settings(
            _env_file=None,  # type: ignore[call-arg]
            kafka="kafka://10.0.0.1:9092",
            partitions=self.shape.partitions,
            queues={
                "order.fifo": {"fifo": True, "deduplication_scope": draws.choice(("queue", "group"))},
                "few": {"max_receives": 2},
            }
            if not self.shape.topic_mode
            else {TOPIC_QUEUE: {"max_receives": 2}}
            if dead_letters
            else {},
            queue_id=TOPIC_QUEUE if self.shape.topic_mode else None,
            dead_letter_topic=dead_letters,
            data_dir=Path("/nowhere"),
            checkpoint_ms=draws.choice((300, 2_000)),
            persist_after_ms=draws.choice((500, 10_000)),
            window_offsets=draws.choice((20, 100_000)),
            retention_history_ms=0 if theme.deletes else draws.choice((0, 5_000)),
        )
        #: Workers look less often at due times and new queues than real ones, which costs less.
        self.lazy = draws.random() < 0.9 or self.shape.theme in ("long", "hours")
        self.timer_ms = 200 if self.lazy else TIMER_MS
        self.topics = topics_of(self.settings)
        odds = Odds.draw(draws)
        if theme.refused:
            odds = odds._replace(refused=theme.refused, max_bytes=MAX_BYTES)
        odds = odds._replace(**{name: Odds._field_defaults[name] for name in self.cut.odds & {*Odds._fields}})
        careful = theme.careful
        if not self.shape.faults or careful:
            odds = Odds()
        self.kafka = Kafka(self.loop, self.entropy.stream("kafka"), odds)
        self.kafka.tell = self.tell
        self.kafka.of_messages = frozenset((self.topics.queue, self.topics.poison, self.topics.dead_letter))
        if self.shape.faults:
            self.kafka.slow_s = theme.slow
        self.kafka.patience = 25 if self.lazy else 1
        self.net = Network(self.entropy.stream("network"))
        if self.shape.faults:
            self.net.jitter_s = draws.choice((0.001, 0.001, 0.05, 0.8))
            self.net.loss = draws.choice((0.0, 0.0, 0.05))
        if "network" in self.cut.odds or careful:
            self.net.jitter_s, self.net.loss = draws.choice((0.001, 0.05, 0.5)) if careful else 0.001, 0.0
        self.disks: list[dict[str, dict[int, Rows]]] = [{} for _ in range(self.shape.workers)]
        self.workers: list[Worker | None] = [None] * self.shape.workers
        self.truths = [Truth(self, number) for number in range(self.shape.partitions)]
        self.clients = Clients(self, self.entropy.stream("clients"))
        if self.topics.dead_letter is not None:
            self.kafka.log(self.topics.dead_letter, 0).on_append = self.clients.is_dead_letter
        self.kafka.log(self.topics.poison, 0).on_append = self.clients.is_poison
        self.faults = Faults(self, self.entropy.stream("faults"))
        self.group: Group

    # -- what is told

    def tell(self, text: str, *args: Any) -> None:
        """Note an event: in the hash of the run, and in its story."""
        line = f"{self.loop.now:10.4f} {text % args}"
        self._hash.update(line.encode())
        if self.story is not None:
            self.story.append(line)

    @property
    def trace(self) -> str:
        """A hash of all that happened."""
        return self._hash.hexdigest()

    def count(self, what: str, times: int = 1) -> None:
        self.statistics[what] += times

    def count_of(self, what: str) -> int:
        return self.statistics[what]

    def violated(self, rule: str, text: str) -> NoReturn:
        found = Violation(rule, text)
        if self.violation is None:
            self.violation = found
            self.tell("VIOLATED %s", found)
        raise found

    # -- workers

    def start(self, slot: int) -> None:
        self.starts += 1
        worker = self.workers[slot] = Worker(self, slot)
        self.tell("%s starts", worker.process.name)
        worker.start_process()

    def at(self, url: str) -> Worker | None:
        return next((w for w in self.workers if w is not None and w.url == url), None)

    def up(self) -> list[Worker]:
        return [w for w in self.workers if w is not None and w.listens]

    def kill(self, worker: Worker) -> None:
        self.tell("%s is killed", worker.process.name)
        worker.process.kill()
        self._gone(worker)

    def _gone(self, worker: Worker) -> None:
        if self.workers[worker.slot] is worker:
            self.workers[worker.slot] = None
        worker.listens = False
        for exchange in worker.open_exchanges:
            self.kafka.later(self.net.latency(), exchange.broken)
        self.clients.lost(worker)

    def worker_ended(self, worker: Worker) -> None:
        for truth in self.truths:
            truth.nothing_is_stranded()
        self.tell("%s has ended", worker.process.name)
        worker.process.kill()
        self._gone(worker)
        self.faults.ended(worker)

    def worker_failed(self, worker: Worker, exc: BaseException) -> None:
        if self.loop.over:
            return
        self.tell("%s fails: %r", worker.process.name, exc)
        if not worker.is_up and (is_expected(exc) or isinstance(exc, TimeoutError)):
            self.count("starts given up")  # Kafka is away; the supervisor starts it again
            self.worker_ended(worker)
            return
        if NO_SPACE in repr(exc):
            self.count("stops for want of room")  # and the supervisor starts it again
            self.worker_ended(worker)
            return
        try:
            self.violated("worker stops", f"{worker.process.name}: {exc!r}")
        except Violation as violation:
            violation.__cause__ = exc

    def callback_failed(self, exc: BaseException, process: Process | None) -> None:
        """It stops a worker, as `app.streaming.faults` does."""
        worker = next((w for w in self.workers if w is not None and w.process is process), None)
        if worker is not None and not isinstance(exc, Violation):
            worker.fail(exc)
        elif not self.loop.over and self.violation is None:
            self.violation = Violation("callback", repr(exc))
            self.violation.__cause__ = exc
            self.tell("VIOLATED %s", self.violation)

    def store_fails(self, worker: Worker) -> bool:
        return not self.healing and self.faults.store_fails(worker)

    def is_fifo(self, queue: str) -> bool:
        # an unreadable range breaks the order of its groups
        return queue in self.clients.fifo and self.shape.theme != "bits"

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run something beside the rest."""
        task: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
        self.loop.kept.append(task)
        return task

    # -- what is in the logs

    def message_is_in(self, number: int, record: Any) -> None:
        self.count("messages")
        self.clients.is_in(number, record)

    def message_is_done(self, number: int, offset: int, outcome: str) -> None:
        self.count(outcome)
        self.clients.is_done(number, offset, outcome)

    # -- a run

    def run(self) -> None:
        """Raises `Violation`."""
        with self._simulated(), virtual(self.loop, self.entropy):
            try:
                self.loop.run_until_complete(self._run())
            except Stuck:
                self._raise_first()
                raise
            finally:
                self.loop.throw_away()
            self._raise_first()

    def _raise_first(self) -> None:
        if self.violation is not None:
            raise self.violation

    async def _run(self) -> None:
        self.group = Group(self.kafka, self.shape.partitions)
        for slot in range(self.shape.workers):
            if self.workers[slot] is None:
                self.start(slot)
            await asyncio.sleep(self.random.random() * self.random.choice((0.0, 0.1, 3.0)))
        clients = [asyncio.ensure_future(self.clients.live(number)) for number in range(self.shape.clients)]
        if self.shape.faults:
            faults = asyncio.ensure_future(self.faults.live())
            clients.append(faults)
        until = self.loop.now + self.shape.seconds
        while self.loop.now < until and self.violation is None:
            await asyncio.sleep(0.5 * max(1.0, self.clients.theme.pause / 2))
            self.look()
        self.healing = True
        self.tell("faults are over")
        self.kafka.calm()
        self.net.loss, self.net.jitter_s = 0.0, 0.001
        for client in clients:
            client.cancel()
        await self.faults.heal()
        await self._heal()
        if self.violation is None:
            try:
                await self.clients.acceptance()
            except (Lost, MarqError) as exc:
                self._raise_first()
                self.violated("well", f"no fault is left, and a worker answers {exc!r}")
            await asyncio.sleep(3.0)
        if self.violation is None:
            self.look(all_of_them=True)
            self.end()
        self.count("virtual seconds", int(self.loop.now))
        self.count("steps", self.loop.steps)

    async def _heal(self) -> None:
        """Wait until all is delivered and nothing has changed for a while. Good receivers take what there is."""
        until, since = self.loop.now + HEAL_S, self.loop.now
        while self.violation is None and self.loop.now < since + SETTLED_S:
            await asyncio.sleep(0.5)
            left = self._left()
            if left:
                since = self.loop.now
                self.clients.drain()
            elif self.clients.drains:
                since = self.loop.now
            if self.loop.now > until:
                self.violated("liveness", f"{HEAL_S:.0f} s after the last fault: {left}")

    def _left(self) -> str:
        left = {truth.number: truth.unfinished() for truth in self.truths}
        left = {number: offsets for number, offsets in left.items() if offsets}
        if left:
            return f"not done: { {n: offsets[:5] for n, offsets in left.items()} }"
        if any(worker.ends for worker in self.up()):
            return "a worker is ending"
        if any(line.batches for worker in self.up() for line in worker.producer.lines.values()):  # type: ignore[attr-defined]
            return "something is on its way"
        serving = sorted(n for w in self.up() for n, owned in w.ownership.owned.items() if owned.serving)
        if serving != list(range(self.shape.partitions)):
            return f"served are {serving}"
        if not all(worker.ownership.ready and not worker.rebalancing for worker in self.up()):
            return "a worker is not ready"
        if len(self.up()) < self.shape.workers or len({str(worker.peers.members()) for worker in self.up()}) > 1:
            return "workers do not know each other"
        return ""

    def look(self, all_of_them: bool = False) -> None:
        """Compare workers with the truth."""
        for truth in self.truths:
            truth.nothing_is_stranded()
        for worker in self.workers:
            if worker is None or worker.process.state == Process.DEAD:
                continue
            for number, reason in worker.ownership.unserved.items():
                if DELETED in reason:  # nobody but owners deletes records here
                    self.violated("G1 deleted", f"{worker.process.name}, partition {number}: {reason}")
            for truth in self.truths:
                if all_of_them or self.random.random() < 0.5:
                    truth.look(worker, all_of_them)

    def end(self) -> None:
        """All is done: nothing is left in memory, nothing is lost."""
        self.clients.end()
        for worker in self.up():
            for owned in worker.ownership.owned.values():
                p = owned.owner.partition
                left = {
                    "messages": p.messages,
                    "deliveries": p.deliveries,
                    "reserved": p.reserved,
                    "bytes": p.bytes,
                    "parked": p.segments.queues,
                    "delays": p.delays,
                    "pending": owned.owner.starts.pending,
                    "counts": [q for q, one in p.counts.items() if any(one.as_tuple())],
                }
                left = {name: value for name, value in left.items() if value}
                if left:
                    self.violated("quiescence", f"{worker.process.name}, partition {owned.number}: {left}")
                cycle = owned.owner.checkpoints
                if cycle.under_way and now_ms() - cycle._since_ms > STEP_MAX_MS:
                    self.violated("checkpoint", f"{worker.process.name}, partition {owned.number}: a step does not end")
            self._stores_are_complete(worker)
            given_back.look(self, worker)
            late = [n for n, outbox in worker.ownership._outboxes.items() if not outbox.idle]
            if late:
                self.violated("quiescence", f"{worker.process.name} has markers to say in {late}")
            if worker.operations.receives.count or worker.operations.receives._asking:
                self.violated("quiescence", f"{worker.process.name} has receives under way")

        for truth in self.truths:
            for fault in faults_of(self, truth.number):
                self.violated("audit", f"partition {truth.number}: @{fault.offset} {fault.kind}: {fault.what}")

    def _stores_are_complete(self, worker: Worker) -> None:
        """An owner's store has all rows of its changelog up to the persisted offset, and none that was deleted."""
        for name, table in worker.ownership.tables.items():
            for number, rows in list(self.disks[worker.slot].get(name, {}).items()):
                if number not in worker.ownership.owned:
                    continue
                persisted = table.persisted(number)
                last = {record.key: record for record in self.kafka.log(table.changelog_topic_name, number).records}
                for key, record in last.items():
                    if persisted is not None and record.offset <= persisted and dict.get(rows, key) != record.value:
                        what = f"{name} is said to be complete up to @{persisted}, and has no @{record.offset}: {key!r}"
                        self.violated("store", f"{worker.process.name}, partition {number}: {what}")

    def _soon_forgotten(self) -> list[tuple[Any, str, Any]]:
        """In runs with jobs, the records of deleted queues are removed after seconds."""
        if not THEMES[self.shape.theme].jobs:
            return []
        return [(app.engine.catalog, "DELETED_KEPT_S", 1.0), (agents.housekeeping, "FORGET_EVERY", 2)]

    def _noting_arrivals(self, ingest: Any) -> Any:
        """`Owner.ingest` that tells the truth which messages the owner saw arrive."""

        def noting(
            owner: Owner, start: int, stop: int, records: Any, now_ms: int = 0, since_ms: int | None = None
        ) -> bool:
            position = owner.partition.position
            if since_ms is not None and start <= position:
                arrived = self.truths[owner.number].arrivals.setdefault(owner.nonce, {})
                arrived.update((r.offset, now_ms - since_ms) for r in records if r.offset >= position)
            return bool(ingest(owner, start, stop, records, now_ms, since_ms))

        return noting

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        """Kafka, the disk and the network are ours."""
        get_tasks = mode.Service._get_tasks
        patches: list[tuple[Any, str, Any]] = [
            (app.kafka.connection, "AIOKafkaConsumer", PlainConsumer),
            (app.engine.changelogs, "LogEdges", Edges),
            (app.engine.changelogs, "TRIM_INTERVAL_MS", 0 if self.clients.theme.deletes else TRIM_INTERVAL_MS),
            (app.engine.changelogs, "identify", identify),
            (app.engine.changelogs, "release", PlainConsumer.unsubscribe),
            (app.engine.changelogs, "AIOKafkaAdminClient", Admin),
            (app.engine.queues_topic, "AIOKafkaProducer", PlainProducer),
            (app.engine.queues_topic, "decode_with", lambda *_: None),
            (app.engine.changelogs, "decode_with", lambda *_: None),
            (app.engine.unread_counter, "decode_with", lambda *_: None),
            (app.engine.unread_counter, "release", PlainConsumer.unsubscribe),
            (app.streaming.raw_table, "rocksdict", SimpleNamespace(WriteBatch=WriteBatch)),
            (app.cluster.peers, "ClientSession", Session),
            (app.cluster.peers, "TCPConnector", lambda **_: None),
            (app.cluster.peers, "DummyCookieJar", lambda: None),
            (app.worker, "memory_bytes", lambda: 0),
            (Outbox, "put", given_back.put),
            (Receives, "_fetch", given_back.fetch),
            (marq.handlers, "_registered", HANDLERS),
            # a set of names, whose order would depend on the hash seed of this process
            (
                mode.Service,
                "_get_tasks",
                lambda service: sorted(get_tasks(service), key=lambda task: task.fun.__name__),
            ),
            (agents.redelivery, "INTERVAL_S", self.timer_ms / 1000),
            (agents.handlers, "EXTEND_S", 0.5 if self.lazy else agents.handlers.EXTEND_S),
            (agents.housekeeping, "INTERVAL_S", 0.5 if self.lazy else agents.housekeeping.INTERVAL_S),
            (app.service.move_tasks, "INTERVAL_S", 1.0 if self.lazy else app.service.move_tasks.INTERVAL_S),
            (app.engine.ownership, "TIMER_MS", self.timer_ms),
            *self._soon_forgotten(),
            (Owner, "ingest", self._noting_arrivals(Owner.ingest)),
        ]
        with ExitStack() as stack:
            for where, name, value in patches:
                stack.enter_context(mock.patch.object(where, name, value))
            if self.story is None:
                stack.callback(logging.disable, logging.root.manager.disable)
                logging.disable(logging.CRITICAL)
            yield
