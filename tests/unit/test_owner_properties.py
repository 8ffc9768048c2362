"""An owner folds the markers log once and in order, in whatever order it gets to know the records."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marq.core import markers
from tests.unit.core_helpers import Appended, Worker, picture

requests = st.lists(
    st.tuples(st.sampled_from(["receive", "ack", "extend", "release", "wait", "send", "work"]), st.integers(0, 999)),
    min_size=10,
    max_size=40,
)
reads = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=60)


def lived(steps: list[tuple[str, int]]) -> Worker:
    """A worker that did all this."""
    worker = Worker().serve()
    worker.send(5)
    given_out = []
    for step, number in steps:
        if step == "receive":
            given_out += worker.receive(1 + number % 4, lease_ms=number * 10)
        elif step == "send":
            worker.send(1 + number % 3)
        elif step == "wait":
            worker.wait(100 + number % 5 * 400)
        elif step == "work":
            worker.owner.work(worker.clock_ms)
        elif given_out:
            handout = given_out[number % len(given_out)]
            if step == "ack":
                worker.owner.acked(handout.offsets, handout.receipt)
            elif step == "extend":
                worker.owner.extend(handout.offsets, handout.receipt, number * 10)
            else:
                worker.owner.release(handout.offsets[:1], handout.receipt, number % 3 * 500, counted=bool(number % 2))
        worker.flush()
    return worker


@given(requests, reads)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_chunks_that_overlap_repeat_or_come_too_early_change_nothing(
    steps: list[tuple[str, int]], chunks: list[tuple[int, int]]
) -> None:
    worker = lived(steps)
    log = worker.broker.log
    other = Worker(worker.broker, name="w2", queue_log=worker.queue_log)
    other.restore()
    other.read_queue()

    for back, length in chunks:
        position = other.owner.partition.markers_position
        start = min(len(log), max(0, position - 3 + back))
        accepted = other.owner.read_markers(start, min(len(log), start + length), log[start : start + length], 0)
        assert accepted == (start <= position)
    other.read_markers()

    assert picture(other.owner.partition) == picture(worker.owner.partition)


@given(requests, st.lists(st.booleans(), max_size=60))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_was_folded_when_it_was_acknowledged_is_skipped_when_it_is_read(
    steps: list[tuple[str, int]], eager: list[bool]
) -> None:
    """The same log, folded once from acknowledgements where ``eager``, and read otherwise."""
    worker = lived(steps)
    own, *log = worker.broker.log
    other = Worker(worker.broker, nonce=worker.owner.nonce, queue_log=worker.queue_log)
    other.restore()
    other.read_queue()
    other.owner.read_markers(0, 1, [own], 0)

    for i, record in enumerate(log):
        batch = markers.decode(record.value)
        if i < len(eager) and eager[i]:
            other.owner.acknowledged(batch.seq, record.offset, record.timestamp, batch.markers, 0)
        if i % 3 == 0:
            other.owner.read_markers(1, record.offset + 1, log[: i + 1], 0)
    other.read_markers()

    assert picture(other.owner.partition) == picture(worker.owner.partition)


@given(st.lists(st.binary(max_size=40) | st.none(), max_size=10))
def test_no_record_whatever_it_holds_stops_an_owner(values: list[bytes | None]) -> None:
    worker = Worker().serve()
    worker.send(2)
    records = [Appended(1 + i, worker.broker.now_ms, value) for i, value in enumerate(values)]

    assert worker.owner.read_markers(1, 1 + len(values), records, 0)
    assert worker.owner.partition.markers_position == 1 + len(values)
    assert worker.owner.partition.counters["unreadable_markers"] == len(values)
