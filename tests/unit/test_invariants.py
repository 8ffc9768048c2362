"""A state that breaks any invariant is noticed; it is neither served nor written."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable

import msgspec
import pytest

from marq.core import invariants, rows
from marq.core.checkpoint_cycle import CycleState
from marq.core.history import Envelope, Histories
from marq.core.markers import Start
from marq.core.owner import Phase
from marq.core.partition import Partition
from marq.core.policies import Limits, QueueSettings
from marq.core.segments import DONE, Segment
from marq.core.state import DeliveryState
from marq.errors import InternalError
from tests.unit.core_helpers import TwoLogs, Worker

FIFO = QueueSettings(fifo=True)
GAP = re.escape("{}")


def everything() -> TwoLogs:
    """A partition with something of each kind, at the offsets that the names below stand for.

    0 is in a segment and in flight, 1 to 3 are parked, 4 is in a segment and in memory; above the position that is
    persisted 5 is ready, 6 delayed, 7 was delayed, 8 expires, 9 is in flight, 10 waits, 11 is poison, 12 a duplicate;
    13 to 15 are of groups of a FIFO queue, of which 13 is in flight.
    """
    logs = TwoLogs()
    logs.own()
    logs.send_many(4)
    logs.read()
    logs.start(0)
    logs.persist()
    logs.partition.shed(1 << 30)
    logs.send_many(1)
    logs.read()
    logs.persist()
    logs.send(headers=[("marq-dedup", b"1")])
    logs.send(headers=[("marq-delay-ms", b"60000")])
    logs.send(headers=[("marq-delay-ms", b"5")])
    logs.send(headers=[("marq-ttl-ms", b"60000")])
    logs.send_many(2)
    logs.send(None)
    logs.send(headers=[("marq-dedup", b"1")])
    for group in (b"a", b"a", b"b"):
        logs.send("fifo", headers=[("marq-group", group)])
    logs.read()
    logs.wait(100)
    logs.start(9)
    logs.release(logs.start(10), delay_ms=60_000)
    logs.start(*logs.take(1, "fifo", FIFO))
    return logs


def segment_of(p: Partition) -> Segment:
    return next(iter(p.segments))


def forget(structure: str, key: object) -> Callable[[Partition], None]:
    return lambda p: getattr(p, structure).pop(key) and None


def assign(**attributes: object) -> Callable[[Partition], None]:
    def broken(p: Partition) -> None:
        for name, value in attributes.items():
            setattr(p, name, value)

    return broken


def change(segment_attribute: str, by: int) -> Callable[[Partition], None]:
    def broken(p: Partition) -> None:
        segment = segment_of(p)
        setattr(segment, segment_attribute, getattr(segment, segment_attribute) + by)

    return broken


def swap_rotation(p: Partition) -> None:
    p.backlogs["fifo"].turns.extend([p.backlogs["fifo"].turns[0]] * 2)


def gone_lane(p: Partition) -> None:
    lane = next(iter(p._blockers.values()))
    del lane.backlog.groups[lane.group]


def out_of_date(p: Partition) -> None:
    segment = segment_of(p)
    segment.state()
    segment.set_parked(1, False)
    segment._states[1] = DONE
    segment.remaining -= 1


#: Name of a fault: its effect, and a part of the text of the one rule that it breaks.
BROKEN: dict[str, tuple[Callable[[Partition], object], str]] = {
    "persisted beyond what was read": (lambda p: setattr(p, "persisted", p.position + 1), "persisted up to {}, read"),
    "persisted less than nothing": (assign(persisted=-1), "persisted up to {}, read"),
    "unreadable before it was looked at": (
        lambda p: p.missed.add(p.position, p.position + 1),
        "is noted as unreadable, reading is at",
    ),
    "unreadable and in a segment": (lambda p: p.missed.add(0, 1), "was unreadable, and is in a segment"),
    "done ahead of reading, and read": (lambda p: p.ahead.add(0, 1), "is noted as done ahead of reading"),
    "an own marker that was not folded": (lambda p: setattr(p, "own", p.markers_position), "own marker {}, delivery"),
    "a delivery below the first": (assign(delivery=-1), "own marker {}, delivery"),
    "a purge of what was read": (lambda p: p.purges.update(q=1), "is kept, reading is at"),
    "less than no payload": (assign(bytes=-1), "bytes of payload"),
    "payload that is not counted": (lambda p: setattr(p, "bytes", p.bytes + 1), "bytes of payload are counted"),
    "a message that was not read": (
        lambda p: p.messages.update({p.position: p.messages[5]}),
        "is known, reading is at",
    ),
    "the record of another": (lambda p: p.messages.update({5: p.messages[6]}), "has the record of"),
    "persisted in no segment": (lambda p: p.segments._remove(p.segments.at(4)), "is in no segment"),
    "a segment of what is not persisted": (lambda p: p.messages.update({5: segment_of(p)}), "is in no segment"),
    "an entry of what is parked": (lambda p: p.messages.update({1: p.segments.at(1)}), "its segment {} says otherwise"),
    "an entry in another segment": (
        lambda p: p.messages.update({4: p.segments.at(0)}),
        "its segment {} says otherwise",
    ),
    "neither parked nor done nor known": (forget("messages", 4), "is neither parked nor done nor a message"),
    "a delay of nothing": (lambda p: p.delays.update({1: 1 << 50}), "in {} is no message"),
    "poison that is no message": (lambda p: p.poison.update({99: "why"}), "in {} is no message"),
    "a duplicate that is no message": (lambda p: p.duplicates.add(99), "in {} is no message"),
    "a reservation of nothing": (lambda p: p.reserved.add(99), "in {} is no message"),
    "a time to live of nothing": (lambda p: p.ttls.update({99: 1}), "in {} is no message"),
    "a delay that is over, of nothing": (lambda p: p.elapsed.update({99: 1}), "in {} is no message"),
    "a delay that is over": (lambda p: p.delays.update({6: p.broker_ms}), "waits until"),
    "a delay of what is delivered": (lambda p: p.delays.update({9: 1 << 50}), "waits until"),
    "a delay that nothing ends": (lambda p: p._delayed.clear(), "nothing ends the delays of"),
    "a delay that is over and not": (lambda p: p.elapsed.update({7: p.broker_ms + 1}), "has waited until"),
    "a delay that is over and goes on": (lambda p: p.elapsed.update({6: p.broker_ms}), "has waited until"),
    "a delivery that has waited": (lambda p: p.elapsed.update({9: p.broker_ms}), "has waited until"),
    "a delivery of what is done": (lambda p: p.deliveries.update({1: p.deliveries[9]}), "is done, and has a delivery"),
    "a delivery of what is done, and unread": (
        lambda p: p.deliveries.update({99: p.deliveries[9]}) or p.ahead.add(99, 100),
        "is done, and has a delivery",
    ),
    "a delivery of the future": (lambda p: setattr(p.deliveries[9], "epoch", p.own + 1), "after the last one"),
    "a lease that was never given": (lambda p: setattr(p.deliveries[9], "receives", 0), "was received"),
    "a delivery above the highest": (assign(_highest_delivered=0), "is delivered, the highest is"),
    "the delivery of another": (
        lambda p: p.deliveries.update({9: p.deliveries[10]}),
        "has a delivery that is not of it",
    ),
    "a delivery that no row has": (
        lambda p: (p._dirty.clear(), p._marker_rows.clear()),
        "is in no row, and is not to be",
    ),
    "a lease that nothing ends": (lambda p: p._timers.clear(), "nothing ends the delivery"),
    "messages miscounted": (lambda p: setattr(p.counts["q"], "total", p.counts["q"].total + 1), "messages are counted"),
    "in flight miscounted": (lambda p: setattr(p.counts["q"], "in_flight", 0), "messages are counted as"),
    "timers miscounted": (lambda p: setattr(p, "_timed", p._timed + 1), "offsets are counted in timers"),
    "a lease that was over long ago": (lambda p: setattr(p, "clock_ms", p.clock_ms + (1 << 40)), "was over at"),
    "a backlog under another name": (lambda p: p.backlogs.update(other=p.backlogs["q"]), "has the backlog of"),
    "an order that nobody keeps": (lambda p: p._fifo.clear(), "has the backlog of"),
    "a turn twice": (swap_rotation, "lanes of {} that are"),
    "no turn": (lambda p: p.backlogs["fifo"].turns.clear(), "lanes of {} that are"),
    "a turn of which the lane does not know": (
        lambda p: setattr(p.backlogs["fifo"].turns[0], "queued", False),
        "is in a rotation, and does not know",
    ),
    "a lane that nothing wakes": (lambda p: p._blockers.clear(), "and nothing will tell it"),
    "a lane that waits for something else": (
        lambda p: setattr(next(iter(p._blockers.values())), "blocker", -1),
        "is listed as waiting for",
    ),
    "a lane that waits and takes turns": (
        lambda p: p.backlogs["fifo"].queue_up(next(iter(p._blockers.values()))),
        "and takes turns",
    ),
    "a lane that is gone": (gone_lane, "that is gone waits for"),
    "redeliveries beside the order": (lambda p: p.backlogs["fifo"].push(15, 1), "has redeliveries beside its order"),
    "out, where there is no order": (lambda p: setattr(p.backlogs["q"], "out", [9]), "which has no order, has"),
    "a segment that overlaps": (change("start", -1), "), after"),
    "a segment that ends before its last message": (change("stop", -1), "), after"),
    "a segment beyond what is persisted": (change("stop", 1_000), "), after"),
    "a segment in no page": (lambda p: setattr(segment_of(p), "page", None), "is in no page"),
    "a page that lost its segment": (lambda p: p.segments.pages[0].segments.clear(), "is in no page"),
    "a page that has a segment twice": (
        lambda p: p.segments.pages[0].segments.append(segment_of(p)),
        "segments are in pages",
    ),
    "remaining miscounted": (change("remaining", 1), "segment {}: {}"),
    "parked miscounted": (change("_parked", 1), "segment {}: {}"),
    "a page that would be written as it was": (out_of_date, "segment {}: {}"),
    "parked messages that nothing finds": (lambda p: p.segments.queues.clear(), "that nothing will find"),
    "parked messages listed that are none": (
        lambda p: p.segments.queues["q"][0].append(segment_of(p)),
        "lanes with parked messages are listed",
    ),
}


def rules() -> list[str]:
    """The texts of all rules, with ``{}`` where they name a value."""
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(invariants))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_broken":
            text = node.args[1]
            assert isinstance(text, ast.JoinedStr)
            found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in text.values))
    return found


def test_a_partition_with_something_of_each_kind_breaks_no_rule() -> None:
    partition = everything().partition

    invariants.check(partition)
    invariants.check(partition, 2)

    assert partition.delays.keys() == {6} and partition.elapsed.keys() == {7} and partition.ttls.keys() == {8}
    assert partition.deliveries.keys() == {0, 9, 10, 13} and partition.poison.keys() == {11}
    assert partition.duplicates == {12} and partition.segments.parked_total() == 3 and partition._blockers


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_noticed(name: str) -> None:
    partition = everything().partition
    fault, rule = BROKEN[name]
    fault(partition)

    with pytest.raises(InternalError, match=f"partition 0 breaks a rule: .*{re.escape(rule).replace(GAP, '.*')}"):
        invariants.check(partition)


def test_each_rule_has_a_fault_that_breaks_it() -> None:
    parts = {part for _, part in BROKEN.values()}

    assert [rule for rule in rules() if not any(part in rule for part in parts)] == []


def test_as_much_is_looked_at_as_was_said() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(10)
    logs.read()
    logs.partition.messages[7] = logs.partition.messages[6]

    invariants.check(logs.partition, 7)
    with pytest.raises(InternalError, match="message 7 has the record of 6"):
        invariants.check(logs.partition, 8)


def test_a_state_that_breaks_a_rule_is_not_written_down() -> None:
    worker = Worker(limits=Limits(window_offsets=0)).serve()
    worker.send(3)
    worker.clock_ms += 2_000
    worker.owner.partition.messages[1] = worker.owner.partition.messages[0]

    with pytest.raises(InternalError, match="message 1 has the record of 0"):
        worker.owner.step(worker.clock_ms)
    assert not worker.table


def test_a_state_that_breaks_a_rule_is_not_served() -> None:
    first = Worker(limits=Limits(window_offsets=0)).serve()
    first.send(3)
    first.checkpoint()
    (key,) = [key for key in first.table if key.count("/") == 1]
    manifest = rows.decode_manifest(first.table[key])
    first.table[key] = rows.encode_manifest(msgspec.structs.replace(manifest, own=manifest.markers_position))
    second = Worker(first.broker, name="w2", table=first.table)
    second.claim()

    with pytest.raises(InternalError, match="breaks a rule: own marker"):
        second.restore()
    assert second.owner.phase is Phase.CLAIMING


def test_a_start_of_what_is_not_reserved_any_more_stops_the_owner() -> None:
    worker = Worker().serve()
    worker.send(2)
    worker.owner.acquire(["q"], 2, "r", worker.clock_ms, lease_ms=1_000)
    worker.owner.partition.unreserve([1])

    worker.flush()

    assert worker.owner.phase is Phase.FAILED and isinstance(worker.owner.error, InternalError)
    assert "[1] of a start are not reserved any more" in worker.owner.reason
    assert not worker.handouts(), "nothing is handed out by an owner that can't be trusted"


def test_a_row_that_no_manifest_names_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(limits=Limits(window_offsets=0)).serve()
    worker.send(3)
    worker.receive(1)
    worker.clock_ms += 2_000
    monkeypatch.setattr(Partition, "_named", lambda self, ids: {})

    with pytest.raises(InternalError, match="is written, and no manifest will name it"):
        worker.owner.step(worker.clock_ms)


def test_a_row_that_is_named_does_not_go() -> None:
    worker = Worker(limits=Limits(window_offsets=0)).serve()
    worker.send(1, headers=[("marq-dedup", b"1")])
    worker.checkpoint()
    worker.send(3)
    worker.clock_ms += 2_000
    (ids,) = [key for key in worker.table if "/dedup/" in key]
    worker.owner.partition._garbage.append(ids)

    with pytest.raises(InternalError, match=f"row {ids} is named by the manifest that makes it obsolete"):
        worker.owner.step(worker.clock_ms)


def history_of_nothing(logs: TwoLogs) -> None:
    histories = Histories()
    histories.purges["q"] = []
    histories.read([Envelope(5, 0, b"q", None, (), 1)], logs.blank())


def end_without_payload(logs: TwoLogs) -> None:
    logs.partition.bytes = 0
    logs.ack(logs.start(5))


#: Wrong calls of a partition, and their errors.
REFUSED: dict[str, tuple[Callable[[TwoLogs], object], str]] = {
    "begin what was begun": (lambda logs: logs.partition.start_at(3, 0), "begins at 3, and has been read to 16"),
    "fold a record twice": (lambda logs: logs.partition.fold(0, 0, []), "marker record 0 is folded a second time"),
    "end payload that is not there": (end_without_payload, "bytes of payload are left after an end"),
    "end what nobody told the end of": (history_of_nothing, "message 5 is not unfinished, and no marker has ended it"),
    "put pages into one another": (
        lambda logs: logs.partition.segments.add_page(logs.partition.segments.pages[0]),
        "begins inside segment",
    ),
    "look for what is not persisted": (lambda logs: logs.partition.segments.at(5), "5 is in no segment"),
    "look into another segment": (
        lambda logs: segment_of(logs.partition).queue_of(4),
        r"4 is none of segment .*, \[0, 4\)",
    ),
    "change the page of a segment without one": (
        lambda logs: Segment("key", 0, 0, 1, [(0, "q", 0)]).in_page,
        "segment key is in no page",
    ),
    "finish what is parked": (lambda logs: segment_of(logs.partition).finish(1), "ends, and is done or parked"),
    "park what is parked": (
        lambda logs: logs.partition.segments.park([1]),
        "queue q, can't change to parked: True",
    ),
    "take parked messages of a segment that is not indexed": (
        lambda logs: segment_of(logs.partition).first_parked("q", 0),
        "has no index",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_break_a_partition_is_refused(name: str) -> None:
    call, said = REFUSED[name]

    with pytest.raises(InternalError, match=said):
        call(everything())


def stale_delivery(worker: Worker) -> None:
    start = started(worker)
    worker.owner.partition.deliveries[0] = DeliveryState(worker.owner.epoch, 0, 1, 0, False, "r", [0])
    worker.owner.starts.folded(start, [0, 1], worker.clock_ms)


def started(worker: Worker) -> Start:
    worker.send(2)
    worker.owner.acquire(["q"], 2, "r", worker.clock_ms, lease_ms=1_000)
    (start,) = worker.owner.take_appends()
    assert isinstance(start, Start)
    return start


def nothing_captured(worker: Worker) -> None:
    worker.owner.checkpoints.state = CycleState.ROWS_WRITTEN
    worker.step()


#: Wrong calls of an owner that serves, and their errors.
REFUSED_BY_OWNER: dict[str, tuple[Callable[[Worker], object], str]] = {
    "restore again": (lambda worker: worker.restore(), "is restored while it is serving"),
    "ask what a record will do": (
        lambda worker: worker.owner.took_effect(99, 0, 1, 0),
        "record 99 of its markers is not folded yet",
    ),
    "start others than were chosen": (
        lambda worker: worker.owner.starts.folded(started(worker), [5], worker.clock_ms),
        "start 1 took effect on others",
    ),
    "hand out what an older delivery has": (stale_delivery, r"0 is handed out as \(0, 1\), and its delivery is"),
    "write a manifest of nothing": (nothing_captured, "without a checkpoint"),
}


@pytest.mark.parametrize("name", REFUSED_BY_OWNER)
def test_what_would_break_an_owner_is_refused(name: str) -> None:
    call, said = REFUSED_BY_OWNER[name]

    with pytest.raises(InternalError, match=said):
        call(Worker().serve())
