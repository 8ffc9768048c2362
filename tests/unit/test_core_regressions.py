"""Faults that the simulator found in the core, each in its smallest form."""

from __future__ import annotations

from typing import Any

import pytest

from marq.core import lanes
from marq.core import markers as m
from marq.core.digest import digest_of, entries
from marq.core.owner import Owner, Phase
from marq.core.partition import Partition
from marq.core.policies import Limits, QueueSettings
from marq.core.recovery import Edges
from marq.core.rows import Record
from marq.core.starts import DEAD_LEASE_MS, DEAD_RECEIVER
from marq.core.state import MessageState
from marq.errors import RowError
from marq.protocol.limits import MESSAGE_MAX_BYTES
from tests.unit.core_helpers import LEASE_MS, Broker, TwoLogs, Worker

FIFO = QueueSettings(fifo=True)


def test_a_message_whose_lease_was_over_at_once_is_taken_again_when_its_release_is_lost() -> None:
    worker = Worker().serve()
    worker.send()
    worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=0)
    worker.confirm(*worker.append())
    worker.lose()

    worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=1_000)

    assert worker.appends, "the message is in no backlog"


def test_a_message_given_back_uncounted_survives_the_look_for_expired_ones() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(2)
    logs.read()
    assert logs.take(1) == [0]
    logs.partition.unreserve([0])
    logs.release(logs.start(0), counted=False)

    logs.partition.due(lambda queue: QueueSettings(ttl_ms=1_000_000), ["q"])

    assert logs.take_all() == [0, 1]


def test_a_message_given_back_uncounted_keeps_its_place_among_the_fresh() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(4)
    logs.read()
    delivery = logs.start(2, lease_ms=1_000)
    logs.wait(1_000)
    logs.release(delivery, counted=False)

    assert logs.take(2) == [0, 1]


def test_a_release_on_its_way_keeps_a_message_from_the_dead_letters() -> None:
    worker = Worker(settings={"q": QueueSettings(max_receives=1)}).serve()
    worker.send()
    pending = worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=1_000)
    assert pending is not None
    pending.cancel()
    worker.confirm(*worker.append())
    worker.broker.now_ms += 1_000
    worker.broker.append(m.encode([m.Tick()]))
    worker.read_markers()

    due = worker.owner.work(worker.clock_ms)
    assert due is not None and due.dead == [0]
    worker.confirm(*worker.append())

    assert worker.dead == []
    assert [type(marker) for marker in worker.appends] == [m.Release]


def test_what_ended_in_the_chunk_of_its_start_is_not_handed_out() -> None:
    worker = Worker().serve()
    worker.send(2)
    first = worker.receive(limit=1, lease_ms=1_000)[0]
    worker.wait(1_100)
    worker.owner.acquire(["q"], 2, "r", worker.clock_ms, lease_ms=1_000)
    worker.append()
    worker.broker.append(m.encode([m.End(first.receipt[0], [0, 1], "acked", first.receipt[1])]))

    worker.read_markers()

    assert [h.offsets for h in worker.handouts()] == [[1]]


def test_what_ended_between_the_parts_of_its_start_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "RECORD_BYTES", 8192 + 40)
    worker = Worker().serve()
    worker.send(3)
    worker.owner.partition.reserved.add(1)
    first = worker.receive(limit=1, lease_ms=1_000)[0]
    worker.wait(1_100)
    worker.owner.acquire(["q"], 2, "r", worker.clock_ms, lease_ms=5_000)
    parts = worker.owner.take_appends()
    assert len(parts) == 2
    end = m.End(first.receipt[0], [0, 1], "acked", first.receipt[1])
    for seq, marker in ((100, parts[0]), (0, end), (101, parts[1])):
        if seq:
            worker.owner.sent(seq, [marker])
        worker.broker.append(m.encode([marker], worker.owner.nonce if seq else "another", seq))

    worker.read_markers()

    assert [h.offsets for h in worker.handouts()] == [[2]]


def test_a_claim_that_a_later_owner_has_overtaken_is_given_up() -> None:
    broker, table = Broker(), {}
    slow = Worker(broker, name="slow", table=table)
    own_offset = slow.claim()
    fast = Worker(broker, name="fast", table=table).serve()
    fast.send()
    fast.checkpoint()
    assert slow.table

    manifests = {key: value for key, value in table.items() if key.count("/") == 1}
    slow.owner.restore(manifests, [], slow.load, Edges((0, 0)), own_offset)

    assert slow.owner.phase is Phase.LOST


def test_markers_that_were_cut_need_a_manifest() -> None:
    with pytest.raises(RowError, match="no manifest"):
        Owner(0, "w", "n").restore({}, [], lambda key: b"", Edges((0, 5)))


def test_messages_that_were_cut_need_a_manifest_or_markers_that_end_them() -> None:
    worker = Worker()
    worker.claim()
    worker.restore((5, 0))
    worker.read_markers()

    assert worker.owner.phase is Phase.FAILED and "5 messages that are not known to be done" in worker.owner.reason


def test_an_existing_topic_may_begin_anywhere() -> None:
    worker = Worker()
    worker.owner.limits = worker.owner.limits._replace(queue_id="orders")

    worker.owner.restore({}, [], worker.load, Edges((5, 0)))

    assert worker.owner.partition.position == 5


def test_a_dead_letter_is_one_only_after_its_last_delivery() -> None:
    """The other side of the release on its way: without one, the message is a dead letter."""
    worker = Worker(settings={"q": QueueSettings(max_receives=1)}).serve()
    worker.send()
    worker.receive(lease_ms=1_000)
    worker.wait(1_100)

    worker.owner.work(worker.clock_ms)
    starts = [marker for marker in worker.flush() if isinstance(marker, m.Start)]

    assert worker.dead == [0]
    assert (starts[0].receiver, starts[0].redeliver_after_ms) == (DEAD_RECEIVER, DEAD_LEASE_MS)


def test_record_that_is_too_large_for_the_table_is_poison() -> None:
    partition = Partition(0)
    large = Record(0, 1000, b"q", bytes(MESSAGE_MAX_BYTES + 1))

    partition.ingest(0, 2, [large, Record(1, 1000, b"q", b"small")])

    assert [offset for offset, _ in partition.due(lambda _: QueueSettings()).poison] == [0]
    assert partition.take("q", 10, QueueSettings()) == [1]


def test_a_group_waits_for_the_end_of_a_parked_message_that_has_expired() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(2)
    expired = logs.send(ttl_ms=100)
    logs.send()
    logs.read()
    logs.ack(logs.start(*logs.take(1, settings=FIFO)))
    logs.persist()
    logs.partition.shed(1 << 30)
    logs.wait(200)

    assert logs.partition.due(lambda _: FIFO).expired == [expired]

    assert expired + 1 not in logs.take(10, settings=FIFO), "started before the end of the one before it"


def test_a_group_waits_for_the_end_of_what_had_expired_before_its_order_was_kept() -> None:
    logs = TwoLogs()
    logs.own()
    old = logs.send()
    logs.send("other")
    logs.wait(1_000)
    logs.send()
    logs.read()
    settings = QueueSettings(fifo=True, ttl_ms=1_000)
    assert logs.take(queue="other", settings=FIFO) == [1]

    assert logs.partition.due(lambda _: settings, ["q"]).expired == [old]

    assert logs.take(10, settings=settings) == []


def test_a_group_waits_for_what_is_being_ended_and_lost_its_place_before_its_order_was_kept() -> None:
    logs = TwoLogs()
    logs.own()
    group = ("marq-group", b"g")
    old = logs.send(headers=[group, ("marq-ttl-ms", b"1000")])
    logs.send("other")
    logs.send(headers=[group])
    logs.read()
    settings = QueueSettings(fifo=True, ttl_ms=100_000)
    assert logs.take(queue="other", settings=FIFO) == [1]
    logs.wait(1_000)
    assert logs.partition.due(lambda _: settings).expired == [old]

    logs.partition.due(lambda _: settings, ["q"])  # looks at the first ones of each group

    assert logs.take(10, settings=settings) == []


# ---------------------------------------------------------------------- a row that can't be read


def damage(table: dict[str, bytes]) -> dict[str, bytes]:
    """What all rows of messages were, before each of them was damaged."""
    good = {key: value for key, value in table.items() if "/messages/" in key}
    table.update(dict.fromkeys(good, b"damaged"))
    return good


def parked_logs(*queues: str, **headers: object) -> TwoLogs:
    logs = TwoLogs()
    logs.own()
    for queue in queues:
        logs.send(queue, **headers)  # type: ignore[arg-type]
    logs.read()
    logs.persist()
    logs.partition.shed(1 << 30)
    return logs


@pytest.mark.parametrize("settings", [QueueSettings(), FIFO, QueueSettings(ttl_ms=1_000)])
@pytest.mark.parametrize("headers", [{}, {"headers": [("marq-group", b"g")]}])
def test_messages_of_a_row_that_cannot_be_read_stay_unfinished(settings: QueueSettings, headers: Any) -> None:
    logs = parked_logs("q", "q", "q", **headers)
    good = damage(logs.table)

    with pytest.raises(RowError):
        logs.take(3, settings=settings)

    logs.table.update(good)
    later = logs.send("other")
    logs.read()
    logs.ack(logs.start(later))
    logs.persist()
    assert digest_of(list(entries(logs.recovered()))).queues["q"][MessageState.READY] == 3
    assert logs.take(3, settings=settings) == [0, 1, 2]


@pytest.mark.parametrize("settings", [QueueSettings(), FIFO])
@pytest.mark.parametrize("headers", [{}, {"headers": [("marq-group", b"g")]}])
def test_what_was_taken_before_a_row_that_cannot_be_read_goes_back(settings: QueueSettings, headers: Any) -> None:
    """A delivery reads a further row only if it has room for it, so the one before is in memory already."""
    logs = parked_logs("q", "q", **headers)
    logs.send("q", **headers)
    logs.read()
    assert logs.take(1, settings=settings) == [0]
    logs.partition.put_back([0])
    logs.persist()
    logs.partition.shed(1 << 30, ["q"])
    logs.partition.segments.park([2])
    del logs.partition.messages[2]
    good = damage(logs.table)

    with pytest.raises(RowError):
        logs.take(3, settings=settings)
    logs.table.update(good)

    assert not logs.partition.reserved
    assert logs.take(3, settings=settings) == [0, 1, 2]


def test_what_has_expired_is_found_again_after_a_row_could_not_be_read() -> None:
    settings = {"a": QueueSettings(ttl_ms=100), "b": QueueSettings(ttl_ms=100)}
    logs = TwoLogs()
    logs.own()
    logs.send("a")
    logs.send("b")
    logs.read()
    logs.persist()
    logs.ack(logs.start(0))
    first = logs.send("a")
    logs.read()
    logs.partition.messages.pop(1)
    logs.partition.segments.park([1])
    good = damage(logs.table)
    logs.wait(200)

    with pytest.raises(RowError):
        logs.partition.due(settings.__getitem__, ["a", "b"])
    logs.table.update(good)

    assert not logs.partition.reserved
    assert sorted(logs.partition.due(settings.__getitem__, ["a", "b"]).expired) == [1, first]


def failing_worker() -> Worker:
    worker = Worker(limits=Limits(window_offsets=0)).serve()
    worker.send(3)
    worker.checkpoint()
    worker.send(1, "other")
    worker.checkpoint()
    worker.owner.partition.shed(1 << 30)
    return worker


def test_an_owner_that_cannot_read_a_row_has_no_more_effects() -> None:
    worker = failing_worker()
    (held,) = worker.receive(queue="other")
    damage(worker.table)
    worker.owner.acked(held.offsets, held.receipt)
    worker.owner.purge("other", 3)

    assert worker.owner.acquire(["q"], 3, "r", worker.clock_ms, lease_ms=1_000) is None

    assert worker.owner.phase is Phase.FAILED
    assert "checksum" in worker.owner.reason
    assert [type(marker) for marker in worker.appends] == [m.End], "what a receiver said is kept, nothing else"
    worker.clock_ms += 60_000
    assert worker.owner.step(worker.clock_ms) is None
    assert worker.owner.work(worker.clock_ms) is None
    assert not worker.owner.tick(worker.clock_ms)
    assert worker.owner.acquire(["other"], 3, "r", worker.clock_ms, lease_ms=1_000) is None
    position = worker.owner.partition.position
    assert worker.owner.ingest(position, position + 1, [])
    assert worker.owner.partition.position == position


def test_who_reads_a_row_that_is_damaged_stops_the_owner() -> None:
    """Not only deliveries read: a look at a message, the copy of a dead letter."""
    worker = failing_worker()
    damage(worker.table)
    worker.owner.partition._unfinished(0)
    worker.appends.append(m.Tick())
    told: list[bool] = []
    worker.owner.partition.on_damage = lambda: told.append(worker.owner.serving)

    with pytest.raises(RowError):
        worker.owner.partition.record(0)

    assert told == [False], "the timer looks at the partition"
    assert not worker.owner.serving
    assert worker.appends == []


def test_an_owner_that_cannot_read_a_row_releases_the_starts_that_are_on_their_way() -> None:
    worker = failing_worker()
    worker.owner.acquire(["other"], 1, "r", worker.clock_ms, lease_ms=60_000)
    _, start = worker.lose()
    good = damage(worker.table)
    worker.receive(3)
    assert worker.owner.phase is Phase.FAILED
    worker.broker.append(m.encode(start, worker.owner.nonce, 1))
    worker.broker.append(m.encode(worker.owner.leave()))
    worker.table.update(good)

    after = Worker(worker.broker, name="w2", table=worker.table, queue_log=worker.queue_log).serve()

    (handout,) = after.receive(1, "other")
    assert handout.offsets == [3]
    assert after.owner.partition.receives(3) == 1


def test_what_could_not_be_read_is_delivered_by_the_next_owner() -> None:
    worker = failing_worker()
    good = damage(worker.table)
    worker.receive(3)
    assert worker.owner.phase is Phase.FAILED
    worker.table.update(good)

    after = Worker(worker.broker, name="w2", table=worker.table, queue_log=worker.queue_log).serve()

    assert [h.offsets for h in after.receive(3)] == [[0, 1, 2]]


# ---------------------------------------------------------------------- timers


def test_messages_left_in_work_do_not_make_each_start_look_through_all_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each batch one message stays in work: what is looked through again must be those, not all that ever were."""
    monkeypatch.setattr(lanes, "TIMERS_SLACK", 1_000)
    looked_at = 0
    clear = Partition._clear_timers

    def counted(partition: Partition) -> None:
        nonlocal looked_at
        looked_at += partition._timed
        clear(partition)

    monkeypatch.setattr(Partition, "_clear_timers", counted)
    logs = TwoLogs()
    logs.own()
    batches, size = 300, 50
    for _ in range(batches):
        offsets = logs.send_many(size)
        logs.read()
        logs.ack(logs.start(*offsets), *offsets[:-1])

    assert looked_at < 4 * batches * size
    assert logs.partition._timed <= 2 * (batches + size) + 1_000
    logs.wait(LEASE_MS)
    assert logs.take_all() == [size * i + size - 1 for i in range(batches)]
