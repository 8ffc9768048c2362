"""Bounded memory: payloads that are in the messages table can be dropped, and are read back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from marq.core import memory
from marq.core.policies import QueueSettings
from marq.core.state import MESSAGE_OVERHEAD_BYTES
from marq.errors import RowError
from tests.unit.core_helpers import LEASE_MS, TwoLogs, payload_bytes, picture

ALL = 1 << 40


def waiting(count: int = 10, queue: str = "q") -> TwoLogs:
    """Messages without a receiver yet, written to the table."""
    logs = TwoLogs()
    logs.own()
    logs.send_many(count, queue)
    logs.read()
    logs.persist()
    return logs


# ---------------------------------------------------------------------- bytes


def test_bytes_grow_with_what_is_read_and_shrink_with_what_is_finished() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send(value=b"x" * 100)
    logs.send(value=b"x" * 50)
    logs.read()
    both = logs.partition.bytes

    logs.ack(logs.start(0))

    assert both == 150 + 2 * MESSAGE_OVERHEAD_BYTES
    assert logs.partition.bytes == 50 + MESSAGE_OVERHEAD_BYTES


def test_a_lease_keeps_the_payload() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send()
    logs.read()
    before = logs.partition.bytes

    logs.start(0)

    assert logs.partition.bytes == before


# ---------------------------------------------------------------------- shed


def test_what_is_not_in_the_table_can_not_be_shed() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(5)
    logs.read()

    assert logs.partition.shed(ALL) == 0
    assert logs.take() == [0, 1, 2, 3, 4]


def test_as_much_is_shed_as_asked_for() -> None:
    logs = waiting(10)
    one = logs.partition.bytes // 10

    freed = logs.partition.shed(3 * one)

    assert freed == 3 * one
    assert logs.partition.bytes == 7 * one == payload_bytes(logs.partition)
    assert logs.partition.segments.parked_counts()["q"] == 3


def test_a_parked_message_is_ready_and_comes_back_in_order() -> None:
    logs = waiting(10)
    logs.partition.shed(ALL)

    assert logs.states(range(10)) == ["ready"] * 10
    assert logs.partition.messages == {}
    assert logs.take_all() == list(range(10))


def test_order_holds_when_parked_messages_lie_between_those_in_memory() -> None:
    logs = waiting(100)
    one = logs.partition.bytes // 100
    logs.partition.shed(50 * one)
    logs.partition.put_back(logs.take(1))  # reads the segment back
    logs.wait(1_000)
    logs.partition.shed(60 * one)

    assert logs.take_all() == list(range(100))


def test_what_is_parked_is_not_also_in_the_backlog() -> None:
    logs = waiting(3)
    logs.partition.put_back(logs.take(1))
    logs.partition.shed(ALL)

    assert logs.take_all() == [0, 1, 2]


def test_queues_with_receivers_stay_in_memory() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(3, "wanted")
    logs.send_many(3, "other")
    logs.read()
    logs.persist()

    logs.partition.shed(ALL, wanted=["wanted"])

    assert sorted(logs.partition.messages) == [0, 1, 2]
    assert logs.take(queue="other") == [3, 4, 5]


def test_reserved_and_leased_messages_stay() -> None:
    logs = waiting(4)
    reserved = logs.take(1)
    logs.start(1)

    logs.partition.shed(ALL)

    assert sorted(logs.partition.messages) == [*reserved, 1]


@pytest.mark.parametrize("wanted", [[], ["q"]])
def test_a_delayed_message_leaves_its_payload_even_where_receivers_wait(wanted: list[str]) -> None:
    logs = TwoLogs()
    logs.own()
    message = logs.send(value=b"later", delay_ms=3_000)
    logs.read()
    logs.persist()

    logs.partition.shed(ALL, wanted)
    state, size = logs.state(message), logs.partition.bytes
    logs.wait(3_000)

    assert (state, size) == ("delayed", 0)
    assert logs.take() == [message]
    assert logs.partition.record(message).value == b"later"


def test_a_message_that_waits_after_a_release_leaves_its_payload() -> None:
    logs = waiting(1)
    logs.release(logs.start(0), delay_ms=3_000)

    logs.partition.shed(ALL, ["q"])
    size = logs.partition.bytes
    logs.wait(3_000)

    assert size == 0
    assert logs.take() == [0]
    assert logs.partition.receives(0) == 1


def test_a_failed_message_that_was_shed_is_delivered_again() -> None:
    logs = waiting(3)
    logs.start(1, lease_ms=1_000)
    logs.wait(1_000)

    logs.partition.shed(ALL)

    assert sorted(logs.take()) == [0, 1, 2]


def test_a_message_with_time_to_live_can_be_parked() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send(ttl_ms=3_000)
    logs.send(ttl_ms=9_000)
    logs.read()
    logs.persist()
    logs.partition.shed(ALL)
    logs.wait(3_000)

    due = logs.partition.due(lambda queue: QueueSettings())

    assert due.expired == [0]
    assert logs.take() == [1]


def test_shedding_changes_nothing_that_recovery_would_see() -> None:
    logs = waiting(6)
    logs.start(1, lease_ms=1_000)
    logs.wait(1_000)
    before = picture(logs.partition)

    logs.partition.shed(ALL)

    assert picture(logs.partition) == before


def test_shedding_again_when_there_is_nothing_is_refused_at_once_until_something_changes() -> None:
    logs = waiting(3)
    delivery = logs.start(0, 1, 2)
    first = logs.partition.shed(ALL)

    again = logs.partition.shed(ALL)
    logs.release(delivery, delay_ms=60_000)
    logs.wait(1_000)

    assert (first, again) == (0, 0)
    assert logs.partition.shed(ALL) > 0


# ---------------------------------------------------------------------- what happens to parked messages


def test_a_parked_message_can_be_started_by_a_marker() -> None:
    """A new owner reads the starts of the former one before it reads payloads back."""
    logs = waiting(3)
    logs.crash()

    assert logs.start(1).offsets == [1]
    assert logs.take_all() == [0, 2]
    logs.wait(LEASE_MS)
    assert logs.take_all() == [1]


def test_a_parked_message_can_be_ended_by_a_marker() -> None:
    logs = waiting(3)
    logs.partition.shed(ALL)

    assert logs.finish("purged", 0, 2) == [0, 2]
    assert logs.take_all() == [1]


def test_a_purge_reads_no_payload() -> None:
    logs = waiting(5)
    logs.start(0, lease_ms=1_000)
    logs.wait(1_000)
    logs.partition.shed(ALL)
    logs.loads = 0

    logs.purge("q")

    assert logs.loads == 0


def test_delays_that_end_read_no_payload() -> None:
    logs = TwoLogs()
    logs.own()
    for i in range(2_500):
        logs.send(delay_ms=1_000 + i * 7_919 % 2_500)
    logs.read()
    logs.persist()
    logs.partition.shed(ALL)
    logs.loads = 0

    logs.wait(5_000)

    assert logs.loads == 0
    assert len(logs.take(3_000)) == 2_500


def test_a_parked_payload_that_is_missing_or_damaged_is_an_error() -> None:
    logs = waiting(3)
    logs.partition.shed(ALL)
    logs.table = dict.fromkeys(logs.table, b"damaged")

    with pytest.raises(RowError, match="checksum"):
        logs.take()


def test_a_segment_is_named_until_its_last_message_is_done() -> None:
    logs = waiting(3)
    logs.finish("purged", 0, 1)
    named = logs.persist()
    logs.finish("purged", 2)
    unnamed = logs.persist()

    assert named is not None and unnamed is not None
    assert "0/0/messages/1" not in named.obsolete
    assert "0/0/messages/1" in unnamed.obsolete


# ---------------------------------------------------------------------- queues with receivers


KB = b"x" * 1_000


@pytest.fixture
def _little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WANTED_BYTES", 20 * (1_000 + MESSAGE_OVERHEAD_BYTES))
    monkeypatch.setattr(memory, "WANTED_LEAST_BYTES", 10 * (1_000 + MESSAGE_OVERHEAD_BYTES))


def of_a_slow_queue(count: int, groups: Sequence[bytes] = ()) -> TwoLogs:
    logs = TwoLogs()
    logs.own()
    for i in range(count):
        logs.send("slow", KB, headers=[("marq-group", groups[i % len(groups)])] if groups else [])
    logs.read()
    logs.persist()
    return logs


@pytest.mark.usefixtures("_little_is_kept")
def test_of_a_queue_with_receivers_the_next_messages_stay_and_the_rest_is_parked() -> None:
    logs = of_a_slow_queue(200)

    freed = logs.partition.shed(ALL, ["slow"])

    assert freed == 180 * (1_000 + MESSAGE_OVERHEAD_BYTES)
    assert sorted(logs.partition.messages) == list(range(20))
    assert payload_bytes(logs.partition) == logs.partition.bytes
    assert logs.take_all("slow") == list(range(200))


@pytest.mark.usefixtures("_little_is_kept")
def test_no_more_than_was_asked_for_is_parked_of_a_queue_with_receivers() -> None:
    logs = of_a_slow_queue(200)

    assert logs.partition.shed(5_000, ["slow"]) == 4 * (1_000 + MESSAGE_OVERHEAD_BYTES)

    assert sorted(logs.partition.messages) == list(range(196))


@pytest.mark.usefixtures("_little_is_kept")
def test_what_nobody_waits_for_goes_first() -> None:
    logs = of_a_slow_queue(50)
    logs.send_many(50, "other")
    logs.read()
    logs.persist()

    logs.partition.shed(20 * MESSAGE_OVERHEAD_BYTES, ["slow"])

    assert logs.partition.segments.parked_counts().keys() == {"other"}


@pytest.mark.usefixtures("_little_is_kept")
def test_many_queues_with_receivers_share_what_stays() -> None:
    logs = TwoLogs()
    logs.own()
    for i in range(400):
        logs.send(f"q{i % 20}", KB)
    logs.read()
    logs.persist()

    logs.partition.shed(ALL, [f"q{i}" for i in range(20)])

    # a quarter of what there was, five messages each
    assert sorted(logs.partition.messages) == list(range(100))
    for i in range(20):
        assert logs.take_all(f"q{i}") == list(range(i, 400, 20))


@pytest.mark.usefixtures("_little_is_kept")
def test_parked_messages_of_groups_come_back_in_their_order() -> None:
    fifo = QueueSettings(fifo=True)
    logs = of_a_slow_queue(200, [b"a", b"b", b"c"])
    first = logs.start(*logs.take(2, "slow", fifo))

    assert logs.partition.shed(ALL, ["slow"]) > 100 * len(KB)

    taken = [first.offsets]
    logs.ack(first)
    while got := logs.take(7, "slow", fifo):
        taken.append(got)
        logs.partition.unreserve(got)
        logs.ack(logs.start(*got))
    for group in range(3):
        of_group = [o for got in taken for o in got if o % 3 == group]
        assert of_group == list(range(group, 200, 3))


@pytest.mark.usefixtures("_little_is_kept")
def test_a_queue_behind_a_slow_one_can_be_read() -> None:
    """The slow one has a receiver all the time: what it holds must not keep memory full until that is done."""
    logs = of_a_slow_queue(1_000)
    limit = logs.partition.bytes // 2

    for _ in range(5):
        logs.wait(memory.SHED_AGAIN_MS)
        logs.partition.shed(max(0, logs.partition.bytes - limit), ["slow", "fast"])
        logs.partition.put_back(logs.take(10, "slow"))

    assert logs.partition.bytes <= limit + 10 * (1_000 + MESSAGE_OVERHEAD_BYTES)
