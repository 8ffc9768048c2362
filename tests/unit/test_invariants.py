"""A state that breaks a rule is noticed, whichever rule it is; it is neither served nor written down."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from marq.core import invariants, rows
from marq.core.owner import Phase
from marq.core.partition import Partition
from marq.core.policies import Limits, QueueSettings
from marq.core.segments import DONE, Segment
from marq.errors import InternalError
from tests.unit.core_helpers import TwoLogs, Worker

FIFO = QueueSettings(fifo=True)


def everything() -> TwoLogs:
    """A partition with something of each kind; what the names below stand for is at these offsets.

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


BROKEN: dict[str, Callable[[Partition], object]] = {
    "persisted beyond what was read": lambda p: setattr(p, "persisted", p.position + 1),
    "done ahead of reading, and read": lambda p: p.ahead.add(0, 1),
    "an own marker that was not folded": lambda p: setattr(p, "own", p.markers_position),
    "a purge of what was read": lambda p: p.purges.update(q=1),
    "less than no payload": assign(bytes=-1),
    "payload that is not counted": lambda p: setattr(p, "bytes", p.bytes + 1),
    "a message that was not read": lambda p: p.messages.update({p.position: p.messages[5]}),
    "the record of another": lambda p: p.messages.update({5: p.messages[6]}),
    "persisted in no segment": lambda p: p.segments._remove(p.segments.at(4)),
    "an entry of what is parked": lambda p: p.messages.update({1: p.segments.at(1)}),
    "neither parked nor done nor known": forget("messages", 4),
    "a delay of nothing": lambda p: p.delays.update({1: 1 << 50}),
    "a delay that is over": lambda p: p.delays.update({6: p.broker_ms}),
    "a delay that nothing ends": lambda p: p._delayed.clear(),
    "a delay that is over and not": lambda p: p.elapsed.update({7: p.broker_ms + 1}),
    "a time to live of nothing": lambda p: p.ttls.update({99: 1}),
    "poison that is no message": lambda p: p.poison.update({99: "why"}),
    "a duplicate that is no message": lambda p: p.duplicates.add(99),
    "a delivery of what is done": lambda p: p.deliveries.update({99: p.deliveries[9]}) or p.ahead.add(99, 100),
    "a delivery of the future": lambda p: setattr(p.deliveries[9], "epoch", p.own + 1),
    "a lease that was never given": lambda p: setattr(p.deliveries[9], "receives", 0),
    "a delivery above the highest": assign(_highest_delivered=0),
    "the delivery of another": lambda p: p.deliveries.update({9: p.deliveries[10]}),
    "a delivery that no row has": lambda p: (p._dirty.clear(), p._marker_rows.clear()),
    "a lease that nothing ends": lambda p: p._timers.clear(),
    "timers miscounted": lambda p: setattr(p, "_timed", p._timed + 1),
    "a lease that was over long ago": lambda p: setattr(p, "clock_ms", p.clock_ms + (1 << 40)),
    "a backlog under another name": lambda p: p.backlogs.update(other=p.backlogs["q"]),
    "an order that nobody keeps": lambda p: p._fifo.clear(),
    "a turn twice": lambda p: p.backlogs["fifo"].turns.append(p.backlogs["fifo"].turns[0]),
    "no turn": lambda p: p.backlogs["fifo"].turns.clear(),
    "a turn of which the lane does not know": lambda p: setattr(p.backlogs["fifo"].turns[0], "queued", False),
    "a lane that nothing wakes": lambda p: p._blockers.clear(),
    "a lane that waits for something else": lambda p: setattr(next(iter(p._blockers.values())), "blocker", -1),
    "redeliveries beside the order": lambda p: p.backlogs["fifo"].push(15, 1),
    "out, where there is no order": lambda p: setattr(p.backlogs["q"], "out", [9]),
    "a segment that overlaps": change("start", -1),
    "a segment beyond what is persisted": change("stop", 1_000),
    "a segment in no page": lambda p: setattr(segment_of(p), "page", None),
    "a page that lost its segment": lambda p: p.segments.pages[0].segments.clear(),
    "remaining miscounted": change("remaining", 1),
    "parked miscounted": change("_parked", 1),
    "parked messages that nothing finds": lambda p: p.segments.queues.clear(),
    "parked messages listed that are none": lambda p: p.segments.queues["q"][0].append(segment_of(p)),
    "a page that would be written as it was": lambda p: (
        segment_of(p).state(),
        segment_of(p).set_parked(1, False),
        segment_of(p)._states.__setitem__(1, DONE),
        change("remaining", -1)(p),
    ),
}


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
    BROKEN[name](partition)

    with pytest.raises(InternalError, match="partition 0 breaks a rule: "):
        invariants.check(partition)


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
