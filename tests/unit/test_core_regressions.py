"""What the simulator found in the core, each in its smallest form."""

from __future__ import annotations

import pytest

from marq.core import markers as m
from marq.core.owner import DEAD_LEASE_MS, DEAD_RECEIVER, Owner, Phase
from marq.core.partition import MESSAGE_MAX_BYTES, Partition
from marq.core.policies import QueueSettings
from marq.core.rows import Record
from marq.errors import RowError
from tests.unit.core_helpers import Broker, TwoLogs, Worker


def test_a_message_whose_lease_was_over_at_once_is_taken_again_when_its_release_is_lost() -> None:
    worker = Worker().serve()
    worker.send()
    worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=0)
    worker.confirm(*worker.append())
    worker.lose()

    worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=1_000)

    assert worker.owner.appends, "the message is in no backlog"


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
    pending.gone = True
    worker.confirm(*worker.append())
    worker.broker.now_ms += 1_000
    worker.broker.append(m.encode([m.Tick()]))
    worker.read_markers()

    due = worker.owner.work(worker.clock_ms)
    assert due is not None and due.dead == [0]
    worker.confirm(*worker.append())

    assert worker.owner.dead == []
    assert [type(marker) for marker in worker.owner.appends] == [m.Release]


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
    parts, worker.owner.appends = worker.owner.appends, []
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
    slow.owner.restore(manifests, [], slow.load, (0, 0), own_offset)

    assert slow.owner.phase is Phase.LOST


@pytest.mark.parametrize("log_start", [(5, 0), (0, 5)])
def test_logs_that_were_cut_need_a_manifest(log_start: tuple[int, int]) -> None:
    with pytest.raises(RowError, match="no manifest"):
        Owner(0, "w", "n").restore({}, [], lambda key: b"", log_start)


def test_an_existing_topic_may_begin_anywhere() -> None:
    worker = Worker()
    worker.owner.limits = worker.owner.limits._replace(queue_id="orders")

    worker.owner.restore({}, [], worker.load, (5, 0))

    assert worker.owner.partition.position == 5


def test_a_dead_letter_is_one_only_after_its_last_delivery() -> None:
    """The other side of the release on its way: without one, the message is a dead letter."""
    worker = Worker(settings={"q": QueueSettings(max_receives=1)}).serve()
    worker.send()
    worker.receive(lease_ms=1_000)
    worker.wait(1_100)

    worker.owner.work(worker.clock_ms)
    starts = [marker for marker in worker.flush() if isinstance(marker, m.Start)]

    assert worker.owner.dead == [0]
    assert (starts[0].receiver, starts[0].redeliver_after_ms) == (DEAD_RECEIVER, DEAD_LEASE_MS)


def test_record_that_is_too_large_for_the_table_is_poison() -> None:
    partition = Partition(0)
    large = Record(0, 1000, b"q", bytes(MESSAGE_MAX_BYTES + 1))

    partition.ingest(0, 2, [large, Record(1, 1000, b"q", b"small")])

    assert [offset for offset, _ in partition.due(lambda _: QueueSettings()).poison] == [0]
    assert partition.take("q", 10, QueueSettings()) == [1]


FIFO = QueueSettings(fifo=True)


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
    logs.now_ms += 1_000
    logs.send()
    logs.read()
    settings = QueueSettings(fifo=True, ttl_ms=1_000)
    assert logs.take(queue="other", settings=FIFO) == [1]

    assert logs.partition.due(lambda _: settings, ["q"]).expired == [old]

    assert logs.take(10, settings=settings) == []
