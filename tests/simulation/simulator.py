"""What happens next: the events of one partition's whole system, chosen by a seed.

Nothing here knows the rules of the core; it lets things happen in every order that a Kafka, a group of workers and
their receivers allow, and asks ``checks`` what to think of it. The same seed gives the same run, event by event.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, NamedTuple, NoReturn, TypeVar
from unittest import mock

from marq.core import checkpoints, dedup, invariants, markers, memory, queue_clock, segment_list, starts, state, ticker
from marq.core.owner import Owner
from marq.core.policies import Limits, QueueSettings
from marq.core.rows import Record
from marq.errors import InternalError
from tests.simulation.checks import Checks
from tests.simulation.logs import Changelog, Lane, Log
from tests.simulation.receivers import Receivers
from tests.simulation.reference import IdRules, Reference
from tests.simulation.worker import TABLES, Worker

T = TypeVar("T")

STEPS = 300
"""Events of a run: most of what can go wrong does within so many."""

LONG_STEPS = 6_000
"""Events of a long run: what is remembered is forgotten meanwhile."""

DRAIN_ROUNDS = 400
"""Within so many rounds of good health some message has to be finished: delays, leases and clocks are shorter."""

ID_RULES = IdRules(window=3_000, back=1_000, more=1_000, step=2_000, most=1 << 60)
"""So long a message's id is remembered."""

ORIGIN_RULES = ID_RULES._replace(window=30_000, most=12)
"""So long the origin of a dead letter's copy is remembered, while no more copies than this came behind it."""

SMALL: dict[Any, dict[str, int]] = {
    state: {"BLOCK_BITS": 3, "CLEAN_SLACK": 10},
    checkpoints: {
        "SEGMENT_MESSAGES": 4,
        "TICKS_MAX": 15,
        "PERSIST_BYTES": 500,
        "WORK_MESSAGES": 40,
        "PAGE_BYTES": 300,
        "SCAN_SEGMENTS": 6,
        "MERGE_SEGMENTS": 5,
        "SPARSE_MIN_BYTES": 30,
    },
    segment_list: {"PAGE_SEGMENTS": 4},
    memory: {"SHED_AGAIN_MS": 20, "WANTED_BYTES": 3_000, "WANTED_LEAST_BYTES": 1_500},
    dedup: {
        "WINDOW_MS": ID_RULES.window,
        "BACK_MS": ID_RULES.back,
        "KEEP_MORE_MS": ID_RULES.more,
        "STEP_MS": ID_RULES.step,
        "ORIGIN_WINDOW_MS": ORIGIN_RULES.window,
        "ORIGINS_MAX": ORIGIN_RULES.most,
        "SLACK_MS": 60_000,
        "ROW_IDS": 3,
        "TRIM": 2,
    },
    starts: {"DEAD_LEASE_MS": 800},
    ticker: {"FORGET_MS": 500},
    queue_clock: {"RUNS_MAX": 3},
    markers: {"RECORD_BYTES": 8192 + 3 * 40},
}
"""Limits of the core, scaled down so that a run of some hundred steps reaches them."""


class Violation(Exception):
    """A guarantee does not hold."""

    def __init__(self, rule: str, text: str, seed: int, step: int) -> None:
        super().__init__(f"{rule}: {text} (seed {seed}, step {step})")
        self.rule = rule
        self.text = text
        self.seed = seed
        self.step = step


class Odds(NamedTuple):
    """How this run differs from others: probabilities and weights, drawn once."""

    dropped_chunk: float
    seek_back: float
    lost_ack: float
    timeout: float
    rebalance: float
    notice: float
    crash: float
    pause: float
    stall: float
    jump: float
    hole: float
    gone: float
    forgets: float
    acks: float
    serve: float
    shed: float
    rot: float
    unreadable: float
    expiry: float
    fetch: float
    send: float
    act: float
    batch: int
    step_ms: int

    @classmethod
    def draw(cls, r: Random) -> Odds:
        return cls(
            dropped_chunk=r.choice((0, 0.02, 0.1)),
            seek_back=r.choice((0, 0.05)),
            lost_ack=r.choice((0, 0.05, 0.3)),
            timeout=r.choice((0.05, 0.3, 1.0)),
            rebalance=r.choice((0.05, 0.2, 0.5)),
            notice=r.choice((0.2, 0.6, 3.0)),
            crash=r.choice((0.0, 0.05, 0.2)),
            pause=r.choice((0.0, 0.1, 0.3)),
            stall=r.choice((0.0, 0.2, 0.6)),
            jump=r.choice((0.0, 0.05, 0.3)),
            hole=r.choice((0.0, 0.15)),
            gone=r.choice((0.1, 0.5)),
            forgets=r.choice((0.02, 0.1, 0.3)),
            acks=r.choice((0.2, 0.5)),
            serve=r.choice((1.0, 2.0)),
            shed=r.choice((0.0, 0.5, 2.0)),
            rot=r.choice((0.0, 0.0, 0.1, 0.5)),
            unreadable=r.choice((0.0, 0.0, 0.2)),
            expiry=r.choice((0.08, 0.08, 0.08, 0.4)),
            fetch=r.choice((0.5, 2.0, 6.0)),
            send=r.choice((0.5, 2.0)),
            act=r.choice((0.1, 0.5, 2.5)),
            batch=r.choice((1, 3, 8)),
            step_ms=r.choice((20, 60, 200)),
        )


class Simulator:
    """One run. ``run(steps)`` raises :exc:`Violation`; ``trace`` collects what happened if it is a list."""

    def __init__(self, seed: int, trace: list[str] | None = None, worker_class: type[Worker] = Worker) -> None:
        self.seed = seed
        self.trace = trace
        self.at_step = 0
        r = self.random = Random(seed)
        self.odds = Odds.draw(r)
        self.statistics: Counter[str] = Counter()
        self.number = r.choice((0, 3))
        self.queue_id = "all" if r.random() < 0.1 else None
        self.queues = ["a", "b", "c"][: r.choice((1, 2, 3))] if self.queue_id is None else [self.queue_id]
        self.settings: dict[str, QueueSettings] = {}
        for name in self.queues:
            self.settings[name] = QueueSettings(
                max_receives=r.choice((0, 1, 2, 3)),
                ttl_ms=r.choice((0, 0, 0, 0, 4_000)),
                # an unreadable range breaks the order of groups, and hides ids
                fifo=r.random() < 0.4 and not self.odds.unreadable and self.queue_id is None,  # the product refuses it
            )
        for name in list(self.queues):
            self.settings[name + ".dead"] = QueueSettings(
                max_receives=r.choice((0, 0, 0, 2)), fifo=self.settings[name].fifo
            )
            self.settings[name + ".dead.dead"] = QueueSettings()
        self.settings[""] = QueueSettings()
        self.served = list(self.settings)[:-1] if self.queue_id is None else self.queues
        self.groups: Sequence[bytes | None] = r.choice(((None,), (None, b"", b"x"), (b"x", b"y", b"z", b"x")))
        self.ids = r.choice((0, 0, 3, 8)) if not self.odds.unreadable else 0  # deduplication ids in use
        self.ttl_queues = [name for name, settings in self.settings.items() if settings.ttl_ms]
        self.limits = Limits(
            checkpoint_ms=r.choice((100, 500)),
            window_offsets=r.choice((0, 4, 30)),
            persist_after_ms=r.choice((50, 1_000)),
            step_timeout_ms=r.choice((2_000, 30_000)),
            queue_id=self.queue_id,
            pass_deleted=self.queue_id is not None,
        )
        self.now_ms = 1_000_000
        self.skew_ms = {"queue": 0, "markers": 0}
        self.skewed = {"queue": -1, "markers": -1}  # so many more records are; -1: until the clock is set again
        self.has_jumped = False  # a clock was off at some time
        self.sent_ms: dict[int, int] = {}  # when a message was appended, by the true time
        # nonce of an owner -> message that it saw arrive -> how long it may have been in the log then
        self.arrivals: dict[str, dict[int, int]] = {}
        self.queue = Log()
        self.markers = Log()
        self.changelogs = {name: Changelog() for name in TABLES}
        self.dead_letters: set[int] = set()  # topic mode: origins in the dead letter topic
        self.purges: dict[str, int] = {}
        self.lanes: list[Lane] = []
        self.deletions: list[tuple[int, int]] = []
        self.retained: list[tuple[int, int]] = []  # topic mode: where retention let the queue log begin, and the
        # markers log ended then
        self.nonces = 0
        self.sends = 0
        self.assigned = 0
        self.checks = Checks(self)
        self.receivers = Receivers(self)
        self.reference = Reference(self.number, self.queue_id, ID_RULES, ORIGIN_RULES, self.checks.done)
        self.workers = [worker_class(self, i) for i in range(r.choice((2, 3)))]

    # ------------------------------------------------------------------ small things

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def below(self, n: int) -> int:
        return int(self.random.random() * n)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.random.random() * len(choices))]

    def note(self, text: str, *args: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.at_step:4} {self.now_ms:8}  " + text % args)

    def count(self, name: str, amount: int = 1) -> None:
        if amount:
            self.statistics[name] += amount

    def violated(self, rule: str, text: str) -> NoReturn:
        self.note("VIOLATED %s: %s", rule, text)
        raise Violation(rule, text, self.seed, self.at_step)

    def make_owner(self, worker: Worker, nonce: str) -> Owner:
        return Owner(
            self.number,
            f"w{worker.number}",
            nonce,
            limits=self.limits,
            settings_of=self.settings.__getitem__,
            load=worker.load,
        )

    def lease_ms(self) -> int:
        steps = self.pick((0, 5, 20, 60, 60, 200))
        return steps * self.odds.step_ms // 2

    def some_queues(self) -> list[str]:
        served = self.served
        i = self.below(len(served))
        return [served[i]] if self.chance(0.7) else served[i:] + served[:i]

    def least_max_receives(self, queue: str) -> int:
        """Fewest deliveries after which a message of ``queue`` may be dead-lettered."""
        return self.settings[queue].max_receives or 1 << 30

    def stamp(self, topic: str) -> int:
        """The broker's timestamp for the next record."""
        stamp_ms = self.now_ms + self.skew_ms[topic]
        if self.skewed[topic] > 0:
            self.skewed[topic] -= 1
            if not self.skewed[topic]:
                self.skew_ms[topic] = 0
        return stamp_ms

    # ------------------------------------------------------------------ the logs

    def append_message(self, record: Record) -> int:
        offset = self.queue.end
        if self.chance(self.odds.hole):
            offset += 1 + self.below(3)
        record = record._replace(offset=offset, timestamp=self.stamp("queue"))
        self.queue.append(record)
        self.sent_ms[offset] = self.now_ms
        message = self.reference.send(record)
        self.note("queue @%d %s", offset, message)
        return offset

    def append_markers(self, value: bytes) -> tuple[int, int]:
        offset = self.markers.end
        if self.chance(self.odds.hole * 0.3):
            offset += 1
        timestamp = self.stamp("markers")
        record = Record(offset, timestamp, None, value)
        self.markers.append(record)
        batch = markers.decode(value)
        self.note("markers @%d t%d by %s#%d: %s", offset, timestamp, batch.by, batch.seq, batch.markers)
        self.reference.fold(offset, timestamp, batch)
        self.checks.appended(offset, batch)
        return offset, timestamp

    def land_some(self, lane: Lane) -> None:
        for _ in range(1 + self.below(len(lane.sent))):
            self.land(lane)

    def land(self, lane: Lane) -> None:
        """The next record of ``lane`` gets to its topic; its acknowledgement may be lost."""
        sent = lane.sent.popleft()
        topic = lane.topic
        offset = timestamp = 0
        if topic == "markers":
            offset, timestamp = self.append_markers(sent.value)
        elif topic == "queue":
            offset = self.append_message(sent.value)
        elif topic == "dead letters":
            self.dead_letters.add(int(sent.what.split()[-1]))
        elif topic.endswith(" table"):
            table = topic.removesuffix(" table")
            self.note("%s: %s %s", topic, sent.key, "deleted" if sent.value is None else "written")
            self.changelogs[table].append(sent.key, sent.value)
            self.checks.tables()
            if table == "progress" and sent.value is not None:
                self.checks.recovery()
        if topic == "markers" and not lane.sent:
            self.checks.landed(lane)
        confirmed = sent.confirmed
        if not lane.alive or confirmed is None:
            return
        if topic in ("markers", "queue") and self.chance(self.odds.lost_ack):
            self.note("  its acknowledgement is lost")
            self._failed(lane, sent)
            return
        self.workers[lane.owner].acks.append(lambda: confirmed(offset, timestamp))

    def _failed(self, lane: Lane, sent: Any) -> None:
        failed = sent.failed
        sent.confirmed = sent.failed = None
        if failed is not None:
            self.workers[lane.owner].acks.append(failed)

    def time_out(self, lane: Lane) -> None:
        """The producer gives up on a record. It is lost, or lands all the same, in its place."""
        sent = self.pick(lane.sent)
        if sent.confirmed is None and sent.failed is None:
            return
        self.note("w%d gives up on %s to %s", lane.owner, sent.what, lane.topic)
        self._failed(lane, sent)
        if self.chance(0.5):
            lane.sent.remove(sent)

    # ------------------------------------------------------------------ events

    def step(self) -> None:
        """One event, chosen by weight among those that are possible."""
        self.now_ms += self.below(self.odds.step_ms)
        odds = self.odds
        events: list[tuple[float, Callable[..., None], Any]] = [
            (odds.send, self.send, None),
            (odds.rebalance, self.rebalance, None),
            (odds.jump, self.jump, None),
        ]
        add = events.append
        if odds.unreadable:
            add((odds.unreadable, self.rots, None))
            if self.queue.rotten:
                add((odds.unreadable, self.is_whole_again, None))
        if self.receivers.holding:
            add((odds.act, self.act, None))
        if self.deletions:
            add((0.5, self.delete_records, None))
        if self.queue_id is not None and not self.ids and self.changelogs["progress"].content:  # a lost id is not known
            add((0.1, self.retain, None))
        self.lanes = [lane for lane in self.lanes if lane.sent or lane.alive]
        for lane in self.lanes:
            if not lane.sent:
                continue
            if not lane.stalled:
                add((5.0, self.land_some, lane))
                add((odds.stall, self.stall, lane))
            else:
                add((0.5, self.stall, lane))
            if lane.alive and lane.topic in ("markers", "queue") and not self.workers[lane.owner].paused:
                add((odds.timeout, self.time_out, lane))
        for worker in self.workers:
            self._events_of(worker, events)
        x = self.random.random() * sum([event[0] for event in events])
        chosen = events[0]
        for chosen in events:
            x -= chosen[0]
            if x < 0:
                break
        for worker in self.workers:
            if worker.serving:
                worker.in_hand = {*worker.owner.starts.pending}  # type: ignore[union-attr]
        _, act, arg = chosen
        if arg is None:
            act()
        else:
            act(arg)

    def _events_of(self, worker: Worker, events: list[tuple[float, Callable[..., None], Any]]) -> None:
        add = events.append
        odds = self.odds
        if not worker.alive:
            add((1.0, Worker.restart, worker))
            return
        if worker.paused:
            add((0.4, self.wake, worker))
            return
        add((odds.crash, self.crash, worker))
        add((odds.pause, self.pause, worker))
        if worker.acks:
            add((8.0, self.acknowledge, worker))
        if worker.assigned != (self.assigned == worker.number):
            add((odds.notice, self.notice, worker))
        if not worker.assigned:
            if worker.serving:  # the group rejoins: it goes on, and writes no rows
                self._reading_events(worker, events)
                self._serving_events(worker, events)
            return
        stage = worker.stage
        if stage == "idle":
            add((4.0, type(worker).claim, worker))
        elif stage == "reading":
            add((6.0, type(worker).read_table, worker))
        elif stage == "owner":
            self._reading_events(worker, events)
            if odds.shed:
                add((odds.shed * 0.5, Worker.shed, worker))
            if odds.rot:
                add((odds.rot, Worker.rot, worker))
            if worker.serving:
                add((2.5, type(worker).step, worker))
                self._serving_events(worker, events)

    def _reading_events(self, worker: Worker, events: list[tuple[float, Callable[..., None], Any]]) -> None:
        core = worker.owner
        assert core is not None
        if worker.markers_next != self.markers.end or worker.markers_next != core.partition.markers_position:
            events.append((self.odds.fetch if worker.serving else 6.0, self.fetch_markers, worker))
        if worker.queue_next != self.queue.end or worker.queue_next != core.partition.position:
            events.append((3.0, self.fetch_queue, worker))
        if core.partition.missed:
            events.append((0.5, Worker.look_again, worker))

    def _serving_events(self, worker: Worker, events: list[tuple[float, Callable[..., None], Any]]) -> None:
        add = events.append
        odds, core = self.odds, worker.owner
        assert core is not None
        add((3.0 * odds.serve, self.acquire, worker))
        add((1.5, Worker.work, worker))
        add((1.0, Worker.tick, worker))
        add((0.08, self.purge, worker))
        if worker.appends:
            add((8.0, type(worker).flush, worker))
        if worker.pendings:
            add((odds.gone, Worker.receiver_goes, worker))

    def send(self) -> None:
        """Somebody sends a message; the send is confirmed."""
        self.sends += 1
        key: bytes | None = self.pick(self.queues).encode()
        headers: list[tuple[str, bytes]] = []
        x = self.random.random()
        if x < 0.12:
            headers.append(("marq-delay-ms", b"%d" % self.pick((0, 100, 1_500))))
        elif x < 0.12 + self.odds.expiry:
            headers.append(("marq-ttl-ms", b"%d" % self.pick((0, 300, 3_000))))
        elif x < 0.16 + self.odds.expiry:
            headers += [("marq-ttl-ms", b"600"), ("marq-delay-ms", b"%d" % self.pick((100, 900)))]
        elif x < 0.18 + self.odds.expiry:
            headers.append(("marq-delay-ms", b"soon"))
        elif x < 0.2 + self.odds.expiry:
            key = self.pick((None, b"", b"\xff"))
        elif x < 0.24 + self.odds.expiry:
            headers.append(("shop", b"1"))
        group = self.pick(self.groups)
        if group is not None:
            headers.insert(0, ("marq-group", group))
        if self.ids and self.chance(0.4):
            headers.append(("marq-dedup", b"%d" % self.below(self.ids)))
        self.append_message(Record(-1, -1, key, b"%d" % self.sends + b"x" * self.pick((0, 10, 500)), tuple(headers)))

    def act(self) -> None:
        self.receivers.act()

    def rots(self) -> None:
        """No replica has a part of the queue log whole any more. Copies of other messages are spared: see `ids`."""
        start = self.queue.start + self.below(self.queue.end - self.queue.start + 1)
        stop = min(start + 1 + self.below(6), self.queue.end)
        copies = [o for o, message in self.reference.messages.items() if message.origin is not None]
        if start < stop and not any(start <= offset < stop for offset in copies):
            self.note("queue [%d, %d) can't be read", start, stop)
            self.count("unreadable", stop - start)
            self.queue.rotten.add(start, stop)

    def is_whole_again(self) -> None:
        """A replica that has it whole is back."""
        found = self.queue.rotten.ranges()
        i = 2 * self.below(len(found) // 2)
        self.note("queue [%d, %d) can be read again", found[i], found[i + 1])
        self.queue.rotten.discard(found[i], found[i + 1])

    def rebalance(self) -> None:
        self.assigned = self.below(len(self.workers))
        self.note("the group assigns the partition to w%d", self.assigned)

    def notice(self, worker: Worker) -> None:
        self.note("w%d hears of it", worker.number)
        worker.hears(self.assigned == worker.number)

    def jump(self) -> None:
        topic = self.pick(("queue", "markers"))
        self.skew_ms[topic] = self.pick((-20_000, -2_000, 0, 0, 2_000, 30_000))
        self.skewed[topic] = self.pick((1, 1, 4, -1, -1))
        self.has_jumped = True
        self.note("the clock of %s is off by %d, for %d records", topic, self.skew_ms[topic], self.skewed[topic])

    def delete_records(self) -> None:
        below, markers_below = self.deletions.pop(self.below(len(self.deletions)))
        self.note("records below %d and %d are deleted", below, markers_below)
        self.queue.start = max(self.queue.start, below)
        self.markers.start = max(self.markers.start, markers_below)
        self.checks.tables()

    def retain(self) -> None:
        """Retention, which knows of no reader, deletes the oldest records of a topic of the user's."""
        self.queue.start += self.below(self.queue.end - self.queue.start + 1)
        self.retained.append((self.queue.start, self.markers.end))
        self.note("retention: the queue log begins at %d", self.queue.start)
        self.count("retentions")

    def stall(self, lane: Lane) -> None:
        lane.stalled = not lane.stalled

    def crash(self, worker: Worker) -> None:
        worker.crash()
        if self.assigned == worker.number and self.chance(0.7):
            self.rebalance()

    def pause(self, worker: Worker) -> None:
        self.note("w%d is paused", worker.number)
        worker.paused = True
        if self.assigned == worker.number and self.chance(0.7):
            self.rebalance()

    def wake(self, worker: Worker) -> None:
        self.note("w%d wakes", worker.number)
        worker.paused = False

    def acknowledge(self, worker: Worker) -> None:
        for _ in range(1 + self.below(len(worker.acks))):
            worker.acks.popleft()()
        if worker.owner is not None:
            worker.collect()

    def fetch_markers(self, worker: Worker) -> None:
        worker.fetch_markers(1 + self.below(6))

    def fetch_queue(self, worker: Worker) -> None:
        worker.fetch_queue(1 + self.below(6))

    def acquire(self, worker: Worker) -> None:
        worker.acquire()
        if self.chance(0.5) and worker.owner is not None and worker.appends:
            worker.flush()

    def purge(self, worker: Worker) -> None:
        worker.purge()

    # ------------------------------------------------------------------ a run

    def run(self, steps: int) -> None:
        """``steps`` events with everything going wrong, then good health until all is finished."""
        try:
            self._run(steps)
        except InternalError as exc:
            self.violated("invariant", str(exc))

    def _run(self, steps: int) -> None:
        with small_limits():
            for step in range(steps):
                self.at_step = step
                self.step()
                self._check_invariants(step)
                self._look(step)
            self._drain()

    def _check_invariants(self, step: int) -> None:
        """Check one worker in turn: most events concern one, and its next check finds the fault."""
        worker = self.workers[step % len(self.workers)]
        if worker.owner is not None and worker.stage == "owner":
            invariants.check(worker.owner.partition)

    def _look(self, step: int) -> None:
        worker = self.workers[step % len(self.workers)]
        if step % 4 == 0 and worker.owner is not None and worker.stage == "owner":
            self.checks.partition(worker.owner.partition, f"w{worker.number}")
            self.checks.reservations(worker)
            self.checks.fence(worker)
        if step % 100 == 99:
            self.checks.recovery()

    def _drain(self) -> None:
        """Without faults, with one worker and receivers that acknowledge, every accepted message must be finished."""
        self.note("drain")
        while self.queue.rotten:
            self.is_whole_again()
        self.odds = self.odds._replace(rot=0, unreadable=0, dropped_chunk=0, seek_back=0, lost_ack=0, hole=0, batch=20)
        self.assigned = self.below(len(self.workers))
        for worker in self.workers:
            if not worker.alive:
                worker.restart()
            worker.paused = False
            worker.hears(self.assigned == worker.number)
            worker.seek()
        server = self.workers[self.assigned]
        finished = done = idle = 0
        while idle < DRAIN_ROUNDS:
            self.at_step += 1
            self.now_ms += 150
            self._round(server)
            idle = 0 if len(self.reference.done) > done else idle + 1
            done = len(self.reference.done)
            if done == len(self.reference.messages):
                finished += 1
                if finished > 12:
                    break
        self.checks.recovery()
        if server.stage == "owner":
            assert server.owner is not None
            self.checks.partition(server.owner.partition, "at the end")
            self.checks.reservations(server)
            self.checks.fence(server)
        self.checks.drained()

    def _round(self, server: Worker) -> None:
        for lane in self.lanes:
            while lane.sent:
                self.land(lane)
        for worker in self.workers:
            while worker.acks:
                self.acknowledge(worker)
        while self.deletions:
            self.delete_records()
        holding, self.receivers.holding = self.receivers.holding, []
        for receipt, offsets in holding:
            self.receivers.finish(receipt, offsets)
        if server.stage == "idle":
            server.claim()
        while server.stage == "reading":
            server.read_table()
        if server.stage == "owner":
            server.fetch_queue(50)
        if server.stage == "owner" and server.owner is not None and server.owner.partition.missed:
            server.look_again()
        if server.stage == "owner":
            server.fetch_markers(50)
        for act in (server.work, server.acquire, server.tick, server.step):
            if server.serving:
                act()
        if server.serving and server.appends:
            server.flush()


@contextmanager
def small_limits() -> Iterator[None]:
    """The core with :data:`SMALL` limits."""
    with ExitStack() as stack:
        for module, values in SMALL.items():
            stack.enter_context(mock.patch.multiple(module, **values))  # type: ignore[call-overload]
        yield


def fresh_seed() -> int:
    """The first of some thousand seeds that no run had before."""
    return time.time_ns() // 1_000_000_000 * 10_000


def run(
    seed: int, steps: int = STEPS, trace: list[str] | None = None, worker_class: type[Worker] = Worker
) -> Simulator:
    """One seed. Raises :exc:`Violation`; whatever it raises says how to see it again."""
    simulator = Simulator(seed, trace, worker_class)
    try:
        simulator.run(steps)
    except Exception as exc:
        exc.add_note(f"replay: python -m tests.simulation --steps {steps} --replay {seed}")
        raise
    return simulator
