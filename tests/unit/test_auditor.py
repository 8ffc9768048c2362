"""An audit of logs that have lost their beginnings finds nothing wrong with them, and says what it left out."""

from __future__ import annotations

from typing import Any

import msgspec

from marq.core.lives import Envelope
from pipeline.auditor import SUMMARY, Auditor, Plan, Summary
from pipeline.walk import SKEW_MS
from tests.simulation.simulator import Simulator, run

SEEDS = 30


def audited(simulator: Simulator, queue_start: int, markers_start: int) -> tuple[Summary, list[Any]]:
    """The verdict on a simulated run, from these offsets on; its faults."""
    plan = Plan(
        queue_start=queue_start,
        queue_stop=simulator.queue.end,
        markers_start=markers_start,
        markers_stop=simulator.markers.end,
        queue_id=simulator.queue_id,
        archived=0,
        tables=False,
        manifest=None,
        live=None,
        faults_max=10,
    )
    auditor = Auditor(simulator.number, msgspec.msgpack.encode(plan))
    auditor.begin()
    for record, is_marker in in_time_order(simulator, queue_start, markers_start):
        if is_marker:
            auditor.fold(record.offset, record.timestamp, record.value)
        else:
            envelope = Envelope(record.offset, record.timestamp, record.key, None, record.headers, len(record.value))
            auditor.read([envelope], [None])
    auditor.end()
    rows = [row for batch in auditor.results() for row in batch.to_pylist()]
    (summary,) = [msgspec.msgpack.decode(row["data"], type=Summary) for row in rows if row["kind"] == SUMMARY]
    return summary, [row for row in rows if row["kind"] != SUMMARY]


def in_time_order(simulator: Simulator, queue_start: int, markers_start: int) -> list[tuple[Any, bool]]:
    records = [(r, False) for r in simulator.queue.records if r.offset >= queue_start]
    records += [(r, True) for r in simulator.markers.records if r.offset >= markers_start]
    top = {False: -1, True: -1}
    keyed = []
    for record, is_marker in records:
        top[is_marker] = max(top[is_marker], record.timestamp)
        keyed.append(((top[is_marker], is_marker, record.offset), record, is_marker))
    return [(record, is_marker) for _, record, is_marker in sorted(keyed, key=lambda entry: entry[0])]


def test_a_run_with_all_its_records_is_proven() -> None:
    for seed in range(SEEDS):
        simulator = run(seed, 300)
        summary, faults = audited(simulator, 0, 0)
        assert faults == [], f"seed {seed}"
        assert (summary.first, summary.since_ms) == (0, None)
        assert sum(summary.sent.values()) == len(simulator.queue.records)


def test_messages_from_before_the_logs_begin_are_left_out_and_the_rest_is_proven() -> None:
    seen = 0
    for seed in range(SEEDS):
        simulator = Simulator(seed)
        if simulator.odds.jump:
            continue  # clocks that differ by more than SKEW_MS
        simulator.run(1_000)
        for part in (0.05, 0.2, 0.6):
            markers_start = int(simulator.markers.end * part)
            begins_ms = next(r.timestamp for r in simulator.markers.records if r.offset >= markers_start)
            sent = (r.offset for r in simulator.queue.records if r.timestamp >= begins_ms)
            summary, faults = audited(simulator, next(sent, simulator.queue.end), markers_start)
            assert faults == [], f"seed {seed}, from {part}"
            assert summary.since_ms is not None and summary.since_ms >= begins_ms + SKEW_MS
            seen += sum(summary.sent.values())
    assert seen > SEEDS, "something was left to audit"
