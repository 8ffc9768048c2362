"""An audit of logs without their beginnings finds no fault, and reports what it left out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from marq.core import rows
from marq.core.history import Envelope
from marq.core.markers import End, Marker, Own, Start, Tick, encode
from pipeline.auditor import ABSENT, SUMMARY, Auditor, Plan, Summary
from pipeline.verdict import Found, Verdict, as_json, lines
from pipeline.walker import SKEW_MS
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
    # the simulated log skips offsets, as if others had transactions there; a real one that does is a fault
    return summary, [row for row in rows if row["kind"] not in (SUMMARY, ABSENT, "markers gone")]


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


def audited_from(
    queue_start: int,
    markers_start: int,
    manifest: rows.Manifest | None,
    last: Marker | None = None,
    *,
    owned: bool = False,
    **more: Any,
) -> Verdict:
    """The verdict on logs that begin there, and hold nothing but ticks, and perhaps an own marker and one more."""
    plan = Plan(
        queue_start=queue_start,
        queue_stop=max(queue_start, 10),
        markers_start=markers_start,
        markers_stop=max(markers_start, 10),
        queue_id=more.pop("queue_id", None),
        archived=0,
        tables=True,
        manifest=None if manifest is None else rows.encode_manifest(manifest),
        live=None,
        faults_max=10,
        **more,
    )
    auditor = Auditor(3, msgspec.msgpack.encode(plan))
    auditor.begin()
    for offset in range(markers_start, 10):
        own = Own("w", "n") if owned and offset == 2 else Tick()
        auditor.fold(offset, 0, encode([last if last is not None and offset == 9 else own]))
    auditor.end()
    found = [row for batch in auditor.results() for row in batch.to_pylist()]
    summaries = [msgspec.msgpack.decode(row["data"], type=Summary) for row in found if row["kind"] == SUMMARY]
    faults = [Found(r["partition"], r["offset"], r["queue"], r["kind"], r["what"]) for r in found if r["what"]]
    return Verdict(summaries, faults, len(faults), False, True, None, 1.0)


def manifest_at(position: int, markers_position: int, *, done: Any = (), lost: Any = ()) -> rows.Manifest:
    return rows.Manifest(
        v=rows.VERSION,
        epoch=2,
        rows={},
        position=position,
        markers_position=markers_position,
        done=list(done),
        clock_ms=0,
        last_timestamp_ms=0,
        own=2,
        delivery=0,
        purges={},
        counters={},
        lost=list(lost),
    )


def said(verdict: Verdict) -> str:
    return "\n".join(lines(verdict, 20))


def test_nothing_is_proven_since_the_beginning_of_a_partition_whose_records_are_gone() -> None:
    """Though they were read, and finished, before they were deleted; and though nothing was sent since."""
    verdict = audited_from(7_550, 0, manifest_at(7_550, 10))

    assert verdict.proven and not verdict.whole
    assert "since the beginning" not in said(verdict)
    assert "partition 3: audited from offset 7550 on, no message since (its queue topic begins at offset 7550" in said(
        verdict
    )
    assert "PROVEN, as far back as the logs reach" in said(verdict)


def test_nothing_is_proven_since_the_beginning_of_a_topic_of_the_users_that_begins_later() -> None:
    verdict = audited_from(50, 0, None, queue_id="theirs")

    assert verdict.proven and not verdict.whole


@pytest.mark.parametrize(
    ("manifest", "named", "unfinished"),
    [
        (manifest_at(100, 10, done=[110, 120]), "3:100 to 3:149 (50 records, 40 messages not known to be done)", 40),
        (None, "3:0 to 3:149 (150 records, 150 messages not known to be done)", 150),
    ],
)
def test_records_that_were_deleted_unread_are_counted_and_named(
    manifest: rows.Manifest | None, named: str, unfinished: int
) -> None:
    verdict = audited_from(150, 0, manifest)

    assert not verdict.proven
    assert [fault.kind for fault in verdict.faults] == ["deleted unread"]
    assert f"DELETED UNREAD in the queue topic: {named}, never read" in said(verdict)
    assert as_json(verdict)["partitions"][0]["deleted"][0]["unfinished"] == unfinished


def test_records_that_were_deleted_unread_are_no_loss_if_a_later_marker_has_ended_them() -> None:
    verdict = audited_from(150, 0, manifest_at(148, 9), last=End(2, [148, 150], "expired"), owned=True)

    assert verdict.proven and not verdict.faults


@pytest.mark.parametrize("accepted", [False, True])
def test_what_a_repair_gave_up_is_a_fault_unless_that_is_accepted(accepted: bool) -> None:
    loss = rows.Loss("queue", 100, 150, 40, 0)
    verdict = audited_from(150, 0, manifest_at(150, 10, lost=[loss]), accept_loss=accepted)

    assert verdict.proven is accepted
    assert [fault.kind for fault in verdict.faults] == ([] if accepted else ["given up"])
    assert "3:100 to 3:149 (50 records, 40 messages not known to be done), given up" in said(verdict)
    assert as_json(verdict)["deleted_unread"] == 50
    assert not accepted or "nothing is lost but the 50 records that were given up" in said(verdict)


def test_a_lost_end_is_named_though_the_logs_have_no_message_that_is_seen_whole() -> None:
    """All that was sent since the markers begin is lost."""
    verdict = audited_from(100, 5, None, last=Start(2, 1, [100, 103], 30_000), queue_end=100, queue_id="theirs")

    assert [(f.offset, f.kind) for f in verdict.faults if f.offset >= 0] == [
        (n, "record gone") for n in (100, 101, 102)
    ]
    assert verdict.summaries[0].faults == len(verdict.faults)


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
