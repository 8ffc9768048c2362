"""Nothing grows with time: every structure of a partition and its owner has a bound, as a function of its contents."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

import pytest

from marq.core import dedup, flow, ignored, lanes, queue_clock, reading, recovery, starts, state
from marq.core.agenda import Agenda
from marq.core.backlog import Backlog, Lane
from marq.core.checkpoint_cycle import CheckpointCycle, CycleState
from marq.core.checkpoints import Checkpoint
from marq.core.flow import FlowControl
from marq.core.ignored import IgnoredMarkers
from marq.core.markers import End, Keepalive, Release
from marq.core.owner import Owner, Phase
from marq.core.partition import Partition
from marq.core.policies import Limits, QueueSettings
from marq.core.queue_clock import QueueClock
from marq.core.ranges import RangeSet
from marq.core.rows import Record
from marq.core.segment_list import SegmentList
from marq.core.segments import Segment
from marq.core.starts import Starts
from marq.core.ticker import Ticker
from marq.core.unread import Unread, UnreadQueue
from marq.errors import RowError
from tests.unit.core_helpers import TwoLogs, Worker

SLACK = 20
"""What the core's own slacks are set to here."""


def size(value: Any) -> int:
    """How many entries ``value`` has, with all that is in it."""
    if isinstance(value, dict):
        return len(value) + sum(size(inner) for inner in value.values())
    if isinstance(value, list | deque | set | frozenset | tuple | array | bytearray) and not isinstance(value, Record):
        plain = isinstance(value, array | bytearray)
        return len(value) + (0 if plain else sum(size(inner) for inner in value))
    if isinstance(value, RangeSet):
        return len(value.ranges())
    if isinstance(value, Lane):
        own = size(value.fresh) + size(value.returned) + size(value.again) + size(value.out)
        if not isinstance(value, Backlog):
            return own
        return own + len(value.groups) + sum(map(size, value.groups.values())) + len(value.turns) + len(value.looked_at)
    if isinstance(value, Segment):
        return 1  # which many messages share; its offsets count where it is
    if isinstance(value, SegmentList):
        known = len(value.pages) + len(value.changed) + len(value.dropped) + len(value._indexed)
        return (
            known
            + sum(1 + len(segment.offsets) for segment in value)
            + sum(len(groups) for groups in value.queues.values())
        )
    if isinstance(value, Unread | UnreadQueue | dedup.Recent | flow.Flow | state.DeliveryState | starts.Pending):
        return sum(size(getattr(value, name)) for name in value.__slots__)
    return 0


class Here:
    """The counts from which the bounds are computed."""

    def __init__(self, owner: Owner, queues: int) -> None:
        p = owner.partition
        parked = p.segments.parked_total()
        self.owner = owner
        self.unfinished = len(p.messages) + parked
        self.queues = queues  # that have something unfinished
        self.ids = len(p.recent) + len(p.origins)
        self.pending = sum(len(pending.offsets) for pending in owner.starts.pending.values())
        self.blocks = len({state.block_of(o) for o in p.messages} | {s.start for s in p.segments})


# messages, with a few entries each, and a slack
PER_MESSAGE: Callable[[Here], int] = lambda h: 5 * h.unfinished + 6 * SLACK  # noqa: E731
PER_ID: Callable[[Here], int] = lambda h: 16 * h.ids + 16 * SLACK  # noqa: E731
ROWS: Callable[[Here], int] = lambda h: 10 * h.unfinished + h.ids + 200  # noqa: E731
CONSTANT: Callable[[Here], int] = lambda h: 60  # noqa: E731

PARTITION = {
    "messages": PER_MESSAGE,
    "deliveries": PER_MESSAGE,
    "missed": CONSTANT,  # ranges that no replica has whole
    "ahead": CONSTANT,  # ranges above the position: messages that were finished before they were read again
    "segments": lambda h: 30 * h.unfinished + 60,
    "lost": lambda h: recovery.LOSSES_MAX,
    "unread": CONSTANT,  # what was counted, until it is read
    "purges": CONSTANT,  # one for each queue, until the purged messages are read
    "recent": PER_ID,
    "origins": PER_ID,
    "origin_keys": lambda h: 2,  # the keys of the secret and of the previous one
    "counters": CONSTANT,
    "counts": lambda h: 8 * h.unfinished + 12 * SLACK,  # queues that had something a while ago
    "delays": PER_MESSAGE,
    "elapsed": PER_MESSAGE,
    "_id_rows": PER_ID,
    "_garbage": PER_MESSAGE,
    "ttls": PER_MESSAGE,
    "poison": PER_MESSAGE,
    "duplicates": PER_MESSAGE,
    "reserved": PER_MESSAGE,
    "backlogs": lambda h: 8 * h.unfinished + 12 * SLACK,
    "woken": PER_MESSAGE,
    "named": lambda h: state.NAMED_MAX,
    "_by_key": lambda h: 8 * h.unfinished + 12 * SLACK,
    "_fifo": PER_MESSAGE,
    "_blockers": lambda h: 8 * h.unfinished + 12 * SLACK,
    "_held_up": PER_MESSAGE,
    "_apart": PER_MESSAGE,
    "_mixed": PER_MESSAGE,
    "_suspects": PER_MESSAGE,
    "_refused": PER_MESSAGE,
    "_timers": lambda h: 10 * h.unfinished + 20 * SLACK,
    "_delayed": lambda h: 15 * h.unfinished + 20 * SLACK,  # a pair each
    "_expiring": lambda h: 15 * h.unfinished + 20 * SLACK,
    "_again_turn": PER_MESSAGE,
    "_loaded": lambda h: 3_000,  # one row
    "_dirty": PER_MESSAGE,
    "_marker_rows": ROWS,
    "_written": CONSTANT,
    "_seen_at": CONSTANT,  # checkpoints within `persist_after_ms`
    "_shed_all": CONSTANT,
}

OWNER = {
    "_sent": CONSTANT,
    "_acked": CONSTANT,
    "_losses": CONSTANT,  # taken after each call
}

AGENDA = {
    "appends": CONSTANT,
    "handouts": CONSTANT,
    "dead": PER_MESSAGE,
    "poison": PER_MESSAGE,
}

STARTS = {
    "pending": lambda h: 2 * h.pending + SLACK,
}

TICKER = {
    "on_its_way": CONSTANT,
    "_made": CONSTANT,
}

QUEUE_CLOCK = {
    "_early": CONSTANT,
    "_runs": lambda h: queue_clock.RUNS_MAX,
}

IGNORED = {
    "_records": lambda h: ignored.IGNORED_MAX,
}

CYCLE = {
    "_orphans": CONSTANT,
    "_old_manifests": CONSTANT,
}

FLOW = {
    "flows": lambda h: 10 * len(h.owner.flow.in_flight) + 3 * SLACK,
    "in_flight": PER_MESSAGE,
}

NO_STRUCTURES = (
    int, str, bool, type(None), count, Partition, RowError, Phase, Limits, Checkpoint, CycleState,
    FlowControl, CheckpointCycle, QueueClock, Ticker, Starts, Agenda, IgnoredMarkers,
)  # fmt: skip


def unbounded(thing: object, bounds: dict[str, Callable[[Here], int]], here: Here) -> list[str]:
    """Attributes that are larger than their bound, or that have none."""
    found = []
    for name, value in vars(thing).items():
        if name in bounds:
            if size(value) > bounds[name](here):
                found.append(f"{name}: {size(value)} > {bounds[name](here)}")
        elif not isinstance(value, NO_STRUCTURES) and not callable(value):
            found.append(f"{name} has no bound")
    return found


@pytest.fixture(autouse=True)
def _small_slacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "CLEAN_SLACK", SLACK)
    monkeypatch.setattr(state, "NAMED_MAX", SLACK)
    monkeypatch.setattr(lanes, "TIMERS_SLACK", SLACK)
    monkeypatch.setattr(reading, "TIMERS_SLACK", SLACK)
    monkeypatch.setattr("marq.core.backlog.PRUNE_SLACK", SLACK)
    monkeypatch.setattr(lanes, "PRUNE_SLACK", SLACK)
    monkeypatch.setattr(flow, "FLOWS_SLACK", SLACK)
    monkeypatch.setattr(dedup, "TRIM", SLACK)
    monkeypatch.setattr(dedup, "ROW_IDS", 50)
    monkeypatch.setattr(dedup, "WINDOW_MS", 5_000)
    monkeypatch.setattr(dedup, "KEEP_MORE_MS", 1_000)
    monkeypatch.setattr(dedup, "ORIGINS_MAX", 30)


KINDS = (
    QueueSettings(),
    QueueSettings(ttl_ms=2_000),
    QueueSettings(fifo=True),
    QueueSettings(fifo=True, ttl_ms=2_000, max_receives=2),
    QueueSettings(max_in_flight=10, breaker_failures=3, breaker_pause_ms=1_000),
    QueueSettings(max_receives=1),
)


class Workload:
    """Queues of every kind are created and deleted; randomly, receivers take from them or not."""

    def __init__(self, seed: int) -> None:
        self.r = Random(seed)
        self.worker = Worker(limits=Limits(checkpoint_ms=500, window_offsets=50, persist_after_ms=2_000))
        self.worker.owner.settings_of = lambda queue: KINDS[int(queue) % len(KINDS)]
        self.worker.serve()
        self.holding: list[tuple[tuple[int, int], list[int]]] = []

    def round(self, number: int) -> None:
        r, worker, owner = self.r, self.worker, self.worker.owner
        queue = str(number // 3 + r.randrange(6))  # a new one every few rounds; each lives for a while
        headers = []
        for name, chance, value in (
            ("marq-ttl-ms", 0.7, r.choice((0, 50, 2_000))),
            ("marq-delay-ms", 0.2, r.choice((0, 500, 3_600_000))),
            ("marq-dedup", 0.2, r.randrange(10**6)),
            ("marq-group", 0.3, r.randrange(10**6)),
            ("marq-origin", 0.1, f"0:{number}"),
        ):
            if r.random() < chance:
                headers.append((name, str(value).encode()))
        if r.random() < 0.3:  # counted before it is read
            start = owner.partition.position
            worker.queue_log.append(worker.record(queue, headers=tuple(headers)))
            owner.partition.count_unread(start, start + 1, worker.queue_log[start:])
        worker.send(r.randrange(3), queue, headers=tuple(headers))
        if r.random() < 0.02:
            worker.send(1, "", b"poison")
        if r.random() < 0.6:
            owner.acquire([queue], 3, "r", worker.clock_ms, lease_ms=r.choice((200, 3_000, 600_000)), name=f"r{number}")
            worker.flush()
            self.holding += [(h.receipt, h.offsets) for h in worker.handouts()]
        while len(self.holding) > 3:
            self.settle(*self.holding.pop(r.randrange(len(self.holding))))
        worker.wait(r.choice((0, 0, 100, 200)))
        owner.work(worker.clock_ms, [q for q in owner.partition.queues() if owner.settings_of(q).ttl_ms])
        self.effects()
        if number % 50 == 49:
            # in the end unfinished messages are purged, so their number stays about the same
            for old in {q for q in owner.partition.queues() if int(q) < number // 3 - 20}:
                owner.purge(old, owner.partition.position)
            self.finish_old()
            worker.flush()
        if number % 20 == 19:
            worker.checkpoint()
            owner.partition.shed(r.choice((0, 1 << 30)))
        owner.partition.woken.clear()  # as the worker does that wakes its receivers

    def settle(self, receipt: tuple[int, int], offsets: list[int]) -> None:
        what = self.r.randrange(5)
        if what < 2:
            self.worker.owner.acked(offsets, receipt)
        elif what == 2:
            self.worker.owner.release(offsets, receipt, self.r.choice((0, 1_000)))
        elif what == 3:
            self.worker.owner.acked(offsets[:1], receipt)
            self.worker.owner.extend(offsets[1:] or offsets, receipt, 5_000)
        self.worker.flush()

    def effects(self) -> None:
        owner = self.worker.owner
        self.worker.flush()
        effects = owner.take_effects()
        if effects is not None:
            owner.ended_as("dead", effects.dead)
            owner.ended_as("poison", [offset for offset, _ in effects.poison])
        self.worker.flush()

    def finish_old(self) -> None:
        """An operator finishes messages that have waited long, or were never given back."""
        p = self.worker.owner.partition
        old = [o for o in p.messages if o < p.position - 400]
        self.worker.owner.ended_as("purged", old)

    def here(self) -> Here:
        p = self.worker.owner.partition
        return Here(self.worker.owner, len(p.backlogs))


def live_long(rounds: int) -> None:
    workload = Workload(rounds)
    most = 0
    for number in range(rounds):
        workload.round(number)
        if number % 100 == 99:
            here = workload.here()
            most = max(most, here.unfinished)
            owner = workload.worker.owner
            wrong = unbounded(owner.partition, PARTITION, here) + unbounded(owner, OWNER, here)
            for part, bounds in (
                (owner.flow, FLOW),
                (owner.checkpoints, CYCLE),
                (owner.ticker, TICKER),
                (owner.ticker._clock, QUEUE_CLOCK),
                (owner.starts, STARTS),
                (owner._agenda, AGENDA),
                (owner._ignored, IGNORED),
            ):
                wrong += unbounded(part, bounds, here)
            assert not wrong, f"round {number}, {here.unfinished} unfinished: {wrong}"
        if number % 1_000 == 999:
            # attributes of the helpers
            workload.worker.broker.log[:-10] = [None] * (len(workload.worker.broker.log) - 10)  # type: ignore[list-item]
    assert 20 < most < 2_000, "the test itself would show nothing"
    marks = {type(marker) for marker in workload.worker.appends}
    assert not marks - {End, Keepalive, Release}


def test_nothing_grows_with_time() -> None:
    live_long(3_000)


@pytest.mark.slow
def test_nothing_grows_in_100_000_rounds() -> None:
    live_long(100_000)


def test_a_fold_that_writes_no_rows_gathers_no_blocks() -> None:
    logs = TwoLogs()
    logs.own()
    kept = logs.send()
    for _ in range(5 * SLACK):
        logs.hole(2_000)
        logs.read()
        logs.ack(logs.start(logs.send()))
        logs.read()

    assert len(logs.partition._dirty) < 2 * SLACK
    logs.start(kept)
    logs.checkpoint()
    assert logs.recovered().deliveries.keys() == {kept}


def test_a_queue_whose_structures_were_cleared_away_keeps_the_order_of_its_groups() -> None:
    worker = Worker().serve()
    fifo = worker.settings["fifo"] = QueueSettings(fifo=True)
    worker.send(3, "fifo")
    (owned,) = worker.receive(1, "fifo")
    for number in range(10 * SLACK):
        worker.settings[f"{number}"] = fifo
        worker.send(1, f"{number}")
        (other,) = worker.receive(1, f"{number}")
        worker.owner.acked(other.offsets, other.receipt)
        worker.flush()

    assert len(worker.owner.partition._fifo) < 3 * SLACK
    assert worker.receive(1, "fifo") == []
    worker.owner.acked(owned.offsets, owned.receipt)
    worker.flush()
    assert [h.offsets for h in worker.receive(1, "fifo")] == [[1]]


def test_what_nobody_receives_leaves_nothing_behind() -> None:
    """Messages with a time to live in a queue that nobody takes from, and groups of it."""
    worker = Worker().serve()
    for turn in range(300):
        headers = (("marq-ttl-ms", b"50"), ("marq-group", b"%d" % turn))
        worker.send(5, "telemetry", headers=headers[:1])
        worker.send(1, "telemetry", headers=headers)
        worker.wait(100)
        worker.owner.work(worker.clock_ms)
        worker.flush()

    assert not worker.owner.partition.messages
    assert size(worker.owner.partition.backlogs) < 20 * SLACK
