"""Rules that hold after any sequence of operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marq.core import checkpoints, lanes, memory, reading, state
from marq.core.markers import End, Keepalive, Marker, Purge, Release, Start, Tick
from marq.core.partition import Partition
from marq.core.policies import QueueSettings
from tests.unit.core_helpers import DEFAULTS, TwoLogs, payload_bytes, picture

QUEUES = ("a", "b", "c")
SPAN = 24  # unread offsets that markers may name

FOLD_OPS = (
    "send", "send", "send", "hole", "read", "read", "read some", "own",
    "start", "start", "start", "start unread", "start by a zombie",
    "ack", "ack", "ack late", "ack unstarted", "extend", "release", "release uncounted",
    "end", "end by a zombie", "purge", "wait", "wait", "clock back", "clock ahead", "together",
)  # fmt: skip
MEMORY_OPS = ("checkpoint", "persist", "shed", "take", "put back", "due", "crash")

NUMBER = st.integers(0, 1 << 16)
# a minimum length, because the lists would be five long on average without one
operations = st.lists(st.tuples(st.sampled_from(FOLD_OPS + MEMORY_OPS), NUMBER, NUMBER), min_size=20, max_size=60)
only_logs = st.lists(st.tuples(st.sampled_from(FOLD_OPS), NUMBER, NUMBER), min_size=20, max_size=60)
LIMITS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": True,
}


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["room", "no room"])
def _small_world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Segments and blocks so small that a script crosses their borders; with and without room to read whole ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "SEGMENT_MESSAGES", 4)
        patch.setattr(state, "BLOCK_BITS", 3)
        patch.setattr(state, "CLEAN_SLACK", 4)
        patch.setattr(lanes, "TIMERS_SLACK", 4)
        patch.setattr(reading, "TIMERS_SLACK", 4)
        if request.param:
            patch.setattr(memory, "READ_BACK_BYTES", -1)
            patch.setattr(memory, "READS_MAX", 1)
        yield


class Script(TwoLogs):
    """Carries out generated operations."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[int, int, list[int]]] = []  # every start: epoch, delivery, offsets
        self.taken: list[int] = []
        self.own()

    def act(self, op: str, a: int, b: int) -> None:
        getattr(self, "do_" + op.replace(" ", "_"))(a, b)

    def _range(self, a: int, b: int, beyond: int = 0) -> list[int]:
        """Some consecutive offsets."""
        top = self.partition.position + beyond
        if not top:
            return []
        start = a % top
        return list(range(start, min(top, start + 1 + b % 6)))

    def _ranges(self, offsets: list[int]) -> list[int]:
        return [offsets[0], offsets[-1] + 1]

    def _given(self, a: int, b: int) -> tuple[int, int, list[int]] | None:
        """The receipt of a delivery, the later ones more often, and part of what it was for."""
        if not self.given:
            return None
        epoch, delivery, offsets = self.given[-1 - (a % min(len(self.given), 4))]
        start = b % len(offsets)
        return epoch, delivery, offsets[start : start + 1 + b % 3]

    def do_send(self, a: int, b: int) -> None:
        kind = b % 12
        if kind == 0:
            self.send(QUEUES[a % 3], delay_ms=a % 20_000)
        elif kind == 1:
            self.send(QUEUES[a % 3], ttl_ms=a % 20_000)
        elif kind == 2:
            self.send(QUEUES[a % 3], delay_ms=a % 9_000, ttl_ms=a % 20_000)
        elif kind == 3:
            self.send(None if a % 2 else b"\xff", delay_ms=5)
        elif kind == 4:
            self.send(QUEUES[a % 3], headers=[("marq-ttl-ms", b"5"), ("marq-delay-ms", b"soon"), ("other", None)])
        elif kind == 5:
            self.send(QUEUES[a % 3], headers=[("marq-origin", b"0:%d" % (a % 3))])
        else:
            for i in range(1 + a % 4):
                self.send(QUEUES[(a >> i) % 3], b"v" * (b % 50))

    def do_hole(self, a: int, b: int) -> None:
        self.hole(1 + a % 3 if b % 10 else 3_000)

    def do_read(self, a: int, b: int) -> None:
        self.read()

    def do_read_some(self, a: int, b: int) -> None:
        self.read(min(self.end, self.partition.position + 1 + a % 4))

    def do_own(self, a: int, b: int) -> None:
        self.own()

    def _start(self, offsets: list[int], epoch: int, lease_ms: int) -> None:
        if offsets:
            self.deliveries += 1
            self.given.append((epoch, self.deliveries, offsets))
            self.mark(Start(epoch, self.deliveries, self._ranges(offsets), lease_ms))

    def do_start(self, a: int, b: int) -> None:
        self._start(self._range(a, b), self.partition.own, b % 30_000)

    def do_start_unread(self, a: int, b: int) -> None:
        self._start(self._range(a, b, SPAN), self.partition.own, b % 30_000)

    def do_start_by_a_zombie(self, a: int, b: int) -> None:
        self._start(self._range(a, b), self.partition.own - 1, b % 30_000)

    def do_ack(self, a: int, b: int) -> None:
        if given := self._given(0, b):
            self.mark(End(given[0], self._ranges(given[2]), "acked", given[1]))

    def do_ack_late(self, a: int, b: int) -> None:
        if given := self._given(a, b):
            self.mark(End(given[0], self._ranges(given[2]), "acked", given[1]))

    def do_ack_unstarted(self, a: int, b: int) -> None:
        if offsets := self._range(a, b, SPAN):
            self.mark(End(self.partition.own, self._ranges(offsets), "acked", self.deliveries + 1))

    def do_extend(self, a: int, b: int) -> None:
        if given := self._given(a % 2, b):
            self.mark(Keepalive(given[0], given[1], self._ranges(given[2]), a % 30_000))

    def do_release(self, a: int, b: int, counted: bool = True) -> None:
        if given := self._given(a % 2, b):
            delay_ms = b % 9_000 if a % 3 == 0 else 0
            self.mark(Release(given[0], given[1], self._ranges(given[2]), delay_ms, counted))

    def do_release_uncounted(self, a: int, b: int) -> None:
        self.do_release(a, b, False)

    def do_end(self, a: int, b: int) -> None:
        if offsets := self._range(a, b, SPAN if b % 4 == 0 else 0):
            outcomes = ("dead", "expired", "purged", "poison")
            self.mark(End(self.partition.own, self._ranges(offsets), outcomes[a % 4]))  # type: ignore[arg-type]

    def do_end_by_a_zombie(self, a: int, b: int) -> None:
        if offsets := self._range(a, b):
            self.mark(End(self.partition.own - 1, self._ranges(offsets), "dead"))

    def do_purge(self, a: int, b: int) -> None:
        if b % 3 == 0:
            self.purge(QUEUES[a % 3], b % (self.end + SPAN))

    def do_wait(self, a: int, b: int) -> None:
        self.wait(a % 12_000 if b % 3 else 30_000)

    def do_clock_back(self, a: int, b: int) -> None:
        self.mark(Tick(), after_ms=-(a % 60_000))

    def do_clock_ahead(self, a: int, b: int) -> None:
        self.mark(Tick(), after_ms=a % 3_600_000)

    def do_together(self, a: int, b: int) -> None:
        """Several markers in one record."""
        offsets = self._range(a, b)
        if not offsets:
            return
        own, ranges = self.partition.own, self._ranges(offsets)
        self.deliveries += 2
        markers: list[Marker] = [
            Start(own, self.deliveries - 1, ranges, a % 2 * 20_000),
            Release(own, self.deliveries - 1, ranges, counted=bool(b % 2)),
            Start(own, self.deliveries, ranges, 20_000),
            Purge(own, QUEUES[b % 3], offsets[0]),
        ]
        self.given.append((own, self.deliveries, offsets))
        self.mark(*markers[: 1 + b % 4])

    # -- what is beyond the fold

    def do_checkpoint(self, a: int, b: int) -> None:
        self.checkpoint(window=a % 12)

    def do_persist(self, a: int, b: int) -> None:
        self.persist()

    def do_shed(self, a: int, b: int) -> None:
        self.partition.shed(1 + a % 4_000, QUEUES[: b % 3])

    def do_take(self, a: int, b: int) -> None:
        settings = QueueSettings(max_receives=a % 4, ttl_ms=b % 30_000 if b % 4 == 0 else 0)
        self.taken += self.take(1 + a % 7, QUEUES[b % 3], settings, bool(a % 2))

    def do_put_back(self, a: int, b: int) -> None:
        self.taken, offsets = [], self.taken
        self.partition.put_back(offsets)

    def do_due(self, a: int, b: int) -> None:
        """Effects are found, and then not taken: a failed append."""
        settings = QueueSettings(max_receives=a % 4, ttl_ms=a % 30_000 if b % 4 == 0 else 0)
        due = self.partition.due(lambda queue: settings, QUEUES[: b % 4])
        self.partition.put_back([*due.dead, *due.expired, *due.purged, *(o for o, _ in due.poison)])

    def do_crash(self, a: int, b: int) -> None:
        self.crash()
        self.taken = []


class Plainly:
    """The same fold, one message at a time, over the complete logs. The partition has to agree with it."""

    def __init__(self, script: TwoLogs) -> None:
        p = script.partition
        self.read = {r.offset: r for r in script.sent if r.offset < p.position}
        self.done: set[int] = {o for o in range(p.position) if o not in self.read}
        self.deliveries: dict[int, list[Any]] = {}  # epoch, delivery, receives, deadline, leased
        self.clock_ms = 0
        self.own = -1
        last = None
        for offset, timestamp, markers in script.marked:
            if last is not None:
                self.clock_ms += max(0, min(5_000, timestamp - last))
            last = timestamp
            for marker in markers:
                self.fold(offset, marker)

    def offsets(self, marker: Any) -> list[int]:
        (start, stop) = marker.offsets
        return [o for o in range(start, stop) if o not in self.done]

    def fold(self, offset: int, marker: Marker) -> None:
        kind = type(marker).__name__
        if kind == "Own":
            self.own = offset
        elif isinstance(marker, Start) and marker.epoch == self.own:
            for o in self.offsets(marker):
                delivered = self.deliveries.get(o)
                if delivered is None:
                    self.deliveries[o] = [
                        marker.epoch,
                        marker.delivery,
                        1,
                        self.clock_ms + marker.redeliver_after_ms,
                        True,
                    ]
                    continue
                leased = delivered[4] and delivered[3] > self.clock_ms
                repeated = delivered[0] == marker.epoch and delivered[1] >= marker.delivery
                if not leased and not repeated:
                    deadline_ms = self.clock_ms + marker.redeliver_after_ms
                    self.deliveries[o] = [marker.epoch, marker.delivery, delivered[2] + 1, deadline_ms, True]
        elif isinstance(marker, End):
            for o in self.offsets(marker):
                delivered = self.deliveries.get(o)
                if marker.outcome != "acked":
                    valid = marker.epoch == self.own
                else:
                    valid = delivered is not None and [marker.epoch, marker.delivery] <= delivered[:2]
                if valid:
                    self.done.add(o)
                    self.deliveries.pop(o, None)
        elif isinstance(marker, Keepalive | Release):
            for o in self.offsets(marker):
                delivered = self.deliveries.get(o)
                if delivered is None or delivered[:2] != [marker.epoch, marker.delivery] or not delivered[4]:
                    continue
                if isinstance(marker, Keepalive):
                    delivered[3] = self.clock_ms + marker.redeliver_after_ms
                else:
                    delivered[2] -= not marker.counted
                    delivered[3], delivered[4] = self.clock_ms + marker.delay_ms, False
        elif isinstance(marker, Purge) and marker.epoch == self.own:
            for o, record in self.read.items():
                poison = any(value == b"soon" for _, value in record.headers)
                if o < marker.before and record.key == marker.queue.encode() and not poison:
                    self.done.add(o)
                    self.deliveries.pop(o, None)


def unfinished(partition: Partition) -> set[int]:
    return set(picture(partition)["unfinished"])


@given(only_logs)
@settings(max_examples=100, **LIMITS)
def test_the_state_is_the_plain_fold_of_both_logs(operations: list[tuple[str, int, int]]) -> None:
    script = Script()
    for operation in operations:
        script.act(*operation)

    plain = Plainly(script)

    position = script.partition.position
    deliveries = {o: list(delivered.as_tuple()) for o, delivered in script.partition.deliveries.items()}
    assert unfinished(script.partition) == {o for o in plain.read if o not in plain.done}
    assert {o: h for o, h in deliveries.items() if o < position} == {
        o: h for o, h in plain.deliveries.items() if o < position
    }
    assert script.partition.clock_ms == plain.clock_ms


@given(only_logs, st.lists(st.booleans(), max_size=80))
@settings(max_examples=100, **LIMITS)
def test_any_order_of_reading_the_two_logs_gives_the_same_state(
    operations: list[tuple[str, int, int]], pattern: list[bool]
) -> None:
    script = Script()
    for operation in operations:
        script.act(*operation)
    other = script.blank()

    script.catch_up(other, script.partition.position, script.marked_end, pattern)

    assert picture(other) == picture(script.partition)


@given(operations, st.lists(st.booleans(), max_size=80))
@settings(max_examples=100, **LIMITS)
def test_restore_and_reading_on_gives_the_live_state_at_every_point(
    operations: list[tuple[str, int, int]], pattern: list[bool]
) -> None:
    script = Script()
    for i, operation in enumerate(operations):
        script.act(*operation)
        if i % 5 and i + 1 < len(operations):
            continue
        restored = script.recovered()
        script.catch_up(restored, script.partition.position, script.partition.markers_position, pattern)
        assert picture(restored) == picture(script.partition)


@given(operations)
@settings(max_examples=100, **LIMITS)
def test_whatever_happened_every_unfinished_message_is_delivered_in_the_end_and_once(
    operations: list[tuple[str, int, int]],
) -> None:
    script = Script()
    for operation in operations:
        script.act(*operation)
    partition = script.partition
    partition.put_back(script.taken)
    refused = partition.due(lambda queue: DEFAULTS)
    script.finish("expired", *sorted(refused.expired))
    script.read()
    for _ in range(3):
        script.mark(Tick(), after_ms=7_200_000)  # all delays are over
    script.wait(35_000)  # all leases are over
    expired = partition.due(lambda queue: DEFAULTS).expired
    rest = unfinished(partition) - set(expired) - partition.duplicates - set(partition.poison)

    taken = [offset for queue in QUEUES for offset in iter_take(script, queue)]

    assert len(taken) == len(set(taken)), "twice within the deliveries"
    assert set(taken) == rest - set(refused.expired)


def iter_take(script: TwoLogs, queue: str) -> list[int]:
    taken: list[int] = []
    while got := script.take(3, queue):
        assert len(got) <= 3
        assert got == sorted(got)
        taken += got
    first = [o for o in taken if not script.partition.receives(o)]
    assert first == sorted(first), "first deliveries are in order"
    return taken


@given(operations)
@settings(max_examples=100, **LIMITS)
def test_bytes_are_those_of_the_payloads_in_memory(operations: list[tuple[str, int, int]]) -> None:
    script = Script()
    for operation in operations:
        script.act(*operation)

    assert script.partition.bytes == payload_bytes(script.partition)
