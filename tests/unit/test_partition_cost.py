"""Cost grows with the work, not with the size of the state: four times the work takes about four times as long."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from marq.core.lanes import TIMERS_SLACK
from marq.core.markers import End, Marker, Start, Tick
from marq.core.policies import QueueSettings
from marq.core.rows import Record
from marq.core.segments import Segment
from marq.protocol.headers import H_GROUP
from tests.unit.core_helpers import DEFAULTS, LEASE_MS, TwoLogs

QUADRATIC = 10
"""Four times as much takes 4 times as long if the cost is linear, 16 times if it is quadratic."""


TRIES = 5
"""What is linear looks quadratic once in a while on a busy machine; the best of some tries does not."""


def waiting(count: int, queues: int = 1) -> TwoLogs:
    """Messages of many queues, in no order."""
    logs = TwoLogs()
    logs.own()
    logs.sent = [Record(o, logs.now_ms, b"q%d" % (o * 7919 % queues), b"x" * 20) for o in range(count)]
    logs.end = count
    logs.read()
    return logs


def each(logs: TwoLogs, markers: list[Marker]) -> None:
    """Every marker in a record of its own."""
    for marker in markers:
        logs.partition.fold(logs.marked_end, logs.now_ms, [marker])
        logs.marked_end += 1


def take_all(logs: TwoLogs, queues: int, limit: int = 500) -> int:
    """Every queue in turn, until there is nothing left; how many messages that were."""
    left, count = [f"q{i}" for i in range(queues)], 0
    while left:
        for queue in list(left):
            taken = logs.partition.take(queue, limit, DEFAULTS)
            count += len(taken)
            if not taken:
                left.remove(queue)
    return count


def read(count: int) -> Callable[[], object]:
    logs = waiting(count)
    logs.partition = logs.blank()
    return logs.read


def take(count: int) -> Callable[[], object]:
    logs = waiting(count)
    return lambda: take_all(logs, 1, limit=10)


def take_of_a_thousand_queues(count: int) -> Callable[[], object]:
    logs = waiting(count, 1_000)
    return lambda: take_all(logs, 1_000)


def starts(count: int) -> Callable[[], object]:
    logs = waiting(count)
    return lambda: each(logs, [Start(0, o + 1, [o, o + 1], LEASE_MS) for o in range(count)])


def acks_backwards(count: int) -> Callable[[], object]:
    logs = waiting(count)
    each(logs, [Start(0, o + 1, [o, o + 1], LEASE_MS) for o in range(count)])
    return lambda: each(logs, [End(0, [o, o + 1], "acked", o + 1) for o in reversed(range(count))])


def expiry(count: int) -> Callable[[], object]:
    logs = waiting(count)
    each(logs, [Start(0, o + 1, [o, o + 1], 1 + o * 4_999 // count) for o in range(count)])
    return lambda: logs.wait(5_000)


def parking(count: int) -> Callable[[], object]:
    logs = waiting(count, 100)
    logs.persist()
    return lambda: logs.partition.shed(1 << 40)


def parking_nothing(count: int) -> Callable[[], object]:
    logs = waiting(count, 100)
    logs.persist()
    queues = [f"q{i}" for i in range(100)]
    return lambda: [logs.partition.shed(1 << 40, queues) for _ in range(count // 50)]


def reading_back(count: int) -> Callable[[], object]:
    logs = waiting(count, 100)
    logs.persist()
    logs.partition.shed(1 << 40)
    return lambda: take_all(logs, 100)


def starts_of_parked(count: int) -> Callable[[], object]:
    logs = waiting(count, 1_000)
    logs.persist()
    logs.partition.shed(1 << 40)
    return lambda: each(logs, [Start(0, o + 1, [o, o + 1], LEASE_MS) for o in range(count)])


def finishing_parked(count: int) -> Callable[[], object]:
    logs = waiting(count)
    logs.persist()
    logs.partition.shed(1 << 40)
    return lambda: each(logs, [End(0, [o, o + 1], "purged") for o in reversed(range(count))])


def holes_below_markers(count: int) -> Callable[[], object]:
    """The starts were read first, and every third offset is missing."""
    logs = TwoLogs()
    logs.own()
    logs.sent = [Record(o, logs.now_ms, b"q", b"x") for o in range(count) if o % 3]
    logs.end = count
    each(logs, [Start(0, o + 1, [o, o + 1], LEASE_MS) for o in range(count)])
    return logs.read


def checkpoint(count: int) -> Callable[[], object]:
    logs = waiting(count)
    each(logs, [Start(0, o + 1, [o, o + 1], LEASE_MS) for o in range(0, count, 2)])
    return logs.persist


def restore(count: int) -> Callable[[], object]:
    logs = waiting(count, 100)
    logs.persist()
    return logs.recovered


def seconds(make: Callable[[int], Callable[[], object]], count: int) -> float:
    """Of the processor, the best of three."""
    best = 1e9
    for _ in range(3):
        work = make(count)
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


@pytest.mark.parametrize(
    "make",
    [
        read, take, take_of_a_thousand_queues, starts, acks_backwards, expiry, parking, parking_nothing, reading_back,
        starts_of_parked, finishing_parked, holes_below_markers, checkpoint, restore,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_four_times_as_many_messages_take_about_four_times_as_long(make: Callable[[int], Callable[[], object]]) -> None:
    few = many = 1e9
    for _ in range(TRIES):
        few, many = min(few, seconds(make, 2_500)), min(many, seconds(make, 10_000))
        if many < QUADRATIC * few + 0.01:
            return
    pytest.fail(f"2,500: {few * 1e3:.1f} ms, 10,000: {many * 1e3:.1f} ms")


def test_a_segment_with_a_thousand_queues_is_read_once_not_once_per_queue() -> None:
    logs = waiting(5_000, 1_000)
    logs.persist()
    logs.partition.shed(1 << 40)
    logs.loads = 0

    assert take_all(logs, 1_000) == 5_000
    assert logs.loads < 50


def test_a_segment_with_a_thousand_groups_is_looked_through_once_not_once_per_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = TwoLogs()
    logs.own()
    for o in range(5_000):
        logs.send(headers=[(H_GROUP, b"g%d" % (o % 1_000))])
    logs.read()
    logs.persist()
    logs.partition.shed(1 << 40)
    looks = []
    index = Segment.index
    monkeypatch.setattr(Segment, "index", lambda segment: (looks.append(segment), index(segment)))

    fifo = QueueSettings(fifo=True)
    assert sum(len(logs.partition.take("q", 500, fifo)) for _ in range(4)) == 2_000
    assert 0 < len(looks) < 50


def test_a_delivery_reads_only_some_segments_for_the_few_messages_that_they_hold() -> None:
    logs = TwoLogs()
    logs.own()
    for o in range(30_000):
        logs.send("rare" if o % 1_000 == 0 else "common")
    logs.read()
    logs.persist()
    logs.partition.shed(1 << 40)
    logs.loads = 0

    taken = logs.take(500, "rare")

    assert taken == [o * 1_000 for o in range(len(taken))] and taken
    assert logs.loads <= 10


def test_a_checkpoint_looks_through_the_segments_in_which_something_was_done_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = waiting(60_000)
    logs.persist()
    logs.partition.shed(1 << 40)
    logs.finish("dead", 7)
    logs.checkpoint()
    looks = []
    bits = Segment.done_bits
    monkeypatch.setattr(Segment, "done_bits", lambda segment: (looks.append(segment.start), bits(segment))[1])

    logs.finish("dead", 100, 50_000)
    logs.checkpoint()

    assert len(logs.partition.segments) >= 60
    assert len(looks) == 2
    recovered = logs.recovered().segments
    assert [recovered.queue_of(offset) for offset in (7, 99, 100, 50_000, 50_001)] == [None, "q0", None, None, "q0"]


def test_leases_of_finished_messages_are_not_kept_until_they_would_be_over() -> None:
    logs = TwoLogs()
    logs.own()
    for batch in range(10):
        offsets = logs.send_many(TIMERS_SLACK // 4)
        logs.read()
        logs.ack(logs.start(*offsets, lease_ms=43_200_000))
        assert sum(len(delivered.offsets) for _, _, delivered in logs.partition._timers) < 2 * TIMERS_SLACK, batch


def test_times_to_live_of_finished_messages_are_not_kept_until_they_would_be_over() -> None:
    logs = TwoLogs()
    logs.own()
    for _ in range(3):
        offsets = [logs.send(ttl_ms=1_209_600_000) for _ in range(TIMERS_SLACK // 2)]
        logs.read()
        logs.ack(logs.start(*offsets))

    assert len(logs.partition._expiring) < 2 * TIMERS_SLACK


def test_structures_of_a_queue_exist_only_while_it_has_something() -> None:
    logs = waiting(2_000, 1_000)
    logs.mark(Tick(), *(End(0, [o, o + 1], "purged") for o in range(2_000)))
    take_all(logs, 1_000)

    logs.persist()

    assert logs.partition.backlogs == {}
    assert logs.partition.messages == logs.partition.deliveries == {}
    assert len(logs.partition.segments) == 0
