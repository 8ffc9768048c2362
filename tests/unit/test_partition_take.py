"""Which ready messages make up a delivery: order, limit, fairness, isolation of poison, reservations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core.policies import QueueSettings
from tests.unit.core_helpers import DEFAULTS, LEASE_MS, TwoLogs


def served(fresh: int = 0, failed: int = 0, attempts: int = 1) -> TwoLogs:
    """``failed`` messages that are due again after ``attempts`` deliveries, then ``fresh`` ones."""
    logs = TwoLogs()
    logs.own()
    offsets = logs.send_many(failed)
    logs.send_many(fresh)
    logs.read()
    fail(logs, *offsets, times=attempts)
    return logs


def fail(logs: TwoLogs, *offsets: int, times: int = 1) -> None:
    """Deliveries without an acknowledgement."""
    for _ in range(times if offsets else 0):
        logs.start(*offsets, lease_ms=1_000)
        logs.wait(1_000)


# ---------------------------------------------------------------------- order and limit


def test_messages_come_in_the_order_of_their_offsets() -> None:
    logs = served(fresh=5)

    assert logs.take(3) + logs.take(3) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("limit", [1, 2, 7, 100])
def test_the_limit_is_strict(limit: int) -> None:
    logs = served(fresh=50, failed=50)

    assert len(logs.take(limit)) == limit


def test_a_queue_that_is_not_there_has_nothing() -> None:
    logs = served(fresh=1)

    assert logs.take(queue="other") == []
    assert not logs.partition.has_ready("other")


def test_queues_do_not_get_each_others_messages() -> None:
    logs = TwoLogs()
    logs.own()
    offsets = [logs.send(queue) for queue in ("a", "b", "a", "b")]
    logs.read()

    assert logs.take(queue="b") == [offsets[1], offsets[3]]


def test_what_is_taken_is_not_taken_again() -> None:
    logs = served(fresh=2)
    logs.take(1)

    assert logs.take() == [1]
    assert logs.take() == []


def test_a_message_comes_once_in_a_delivery_however_often_it_became_ready() -> None:
    logs = served(fresh=1)
    delivery = logs.start(0, lease_ms=1_000)
    logs.wait(1_000)
    logs.extend(delivery, lease_ms=1_000)
    logs.wait(1_000)
    logs.release(delivery)

    assert logs.take() == [0]


def test_entries_for_messages_that_were_finished_meanwhile_are_passed_over() -> None:
    logs = served(fresh=3, failed=1)
    logs.finish("dead", 0, 1)

    assert logs.take() == [2, 3]


# ---------------------------------------------------------------------- reservations


def test_what_is_put_back_comes_at_its_place() -> None:
    logs = served(fresh=4)
    logs.take(2)

    logs.partition.put_back([1])

    assert logs.take_all() == [1, 2, 3]


def test_a_redelivery_that_is_put_back_is_a_redelivery() -> None:
    logs = served(fresh=4, failed=2)

    logs.partition.put_back(logs.take(2))

    assert logs.take(2) == [0, 2]


def test_a_reserved_message_that_becomes_ready_waits_for_the_reservation_to_end() -> None:
    logs = served(failed=1)
    logs.take()
    delivery = logs.start(0, lease_ms=1_000)
    logs.wait(1_000)
    before = logs.take()

    logs.partition.put_back(delivery.offsets)

    assert (before, logs.take()) == ([], [0])


def test_what_was_finished_is_not_put_back() -> None:
    logs = served(fresh=1)
    taken = logs.take()
    logs.finish("dead", 0)

    logs.partition.put_back(taken)

    assert logs.take() == []


@pytest.mark.parametrize("end", ["acked", "dead", "purged"])
def test_the_end_of_a_message_ends_its_reservation(end: str) -> None:
    """A rejected message is reserved while its dead letter is made, and may end meanwhile."""
    logs = served()
    (offset,) = logs.send_many(1)
    logs.read()
    delivery = logs.start(offset)
    assert logs.partition.reserve_current([offset], delivery.epoch, delivery.delivery) == [offset]

    if end == "acked":
        logs.ack(delivery)
    elif end == "dead":
        logs.finish("dead", offset)
    else:
        logs.purge("q")

    assert logs.partition.reserved == set()


# ---------------------------------------------------------------------- fairness


def test_redeliveries_get_half_while_first_deliveries_wait() -> None:
    logs = served(fresh=20, failed=20)

    assert logs.take(10) == [0, 1, 2, 3, 4, 20, 21, 22, 23, 24]


def test_first_deliveries_get_all_when_nothing_is_due_again() -> None:
    assert len(served(fresh=20).take(10)) == 10


def test_redeliveries_get_all_when_nothing_else_waits() -> None:
    assert len(served(failed=20).take(10)) == 10


def test_the_rest_goes_to_who_has_more() -> None:
    assert served(fresh=2, failed=20).take(10) == [0, 1, 2, 3, 4, 5, 6, 7, 20, 21]
    assert served(fresh=20, failed=2).take(10) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_with_a_limit_of_one_they_take_turns() -> None:
    logs = served(fresh=6, failed=6)

    taken = [logs.take(1)[0] for _ in range(6)]

    assert sorted(o < 6 for o in taken) == [False] * 3 + [True] * 3


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 12))
def test_neither_starves_the_other(fresh: int, failed: int, limit: int) -> None:
    logs = served(fresh=fresh, failed=failed)

    taken = logs.take(limit)

    again = sum(o < failed for o in taken)
    first = len(taken) - again
    assert len(taken) == min(limit, fresh + failed)
    if limit > 1:
        assert again >= min(failed, limit // 2)
        assert first >= min(fresh, limit // 2)


# ---------------------------------------------------------------------- isolation of poison messages


def batch(logs: TwoLogs, limit: int = 8, maximum: int = 0) -> list[int]:
    return logs.take(limit, settings=QueueSettings(max_receives=maximum), shared_fate=True)


@pytest.mark.parametrize(("attempts", "size"), [(1, 16), (2, 8), (3, 4), (4, 2), (5, 1), (9, 1)])
def test_a_batch_of_suspicious_messages_is_halved_per_attempt(attempts: int, size: int) -> None:
    logs = served(failed=32, attempts=attempts)

    assert len(batch(logs, 16)) == size


def test_a_suspicious_message_shares_its_smaller_batch_with_fresh_ones() -> None:
    logs = served(fresh=20, failed=1, attempts=2)

    assert batch(logs, 8) == [0, 1, 2, 3]


def test_a_message_at_its_last_permitted_attempt_is_alone() -> None:
    logs = served(fresh=20, failed=3, attempts=3)

    assert [batch(logs, 8, maximum=4) for _ in range(4)] == [[0], [1], [2], [3, 4, 5, 6, 7, 8, 9, 10]]


def test_a_message_at_its_last_permitted_attempt_does_not_join_others() -> None:
    logs = served(fresh=2)
    fail(logs, 0)
    fail(logs, 1, times=3)

    assert batch(logs, 8, maximum=4) == [0]
    assert batch(logs, 8, maximum=4) == [1]


def test_a_poison_message_takes_no_other_to_the_dead_letters() -> None:
    """One message of 64 fails every batch it is in: at the end it is the only one with ten attempts."""
    logs = served(fresh=64)
    settings = QueueSettings(max_receives=10)
    poison = 37
    worst: dict[int, int] = {}
    for _ in range(200):
        taken = logs.take(64, settings=settings, shared_fate=True)
        if not taken:
            break
        delivery = logs.start(*taken, lease_ms=5_000)
        logs.partition.unreserve(taken)
        worst.update({o: logs.partition.receives(o) for o in taken})
        if poison in taken:
            logs.release(delivery)
        else:
            logs.ack(delivery)

    assert {o for o, count in worst.items() if count >= 10} == {poison}
    assert logs.partition.due(lambda queue: settings).dead == [poison]
    assert set(logs.partition.messages) == {poison}


def test_receivers_that_share_no_fate_get_full_batches() -> None:
    logs = served(failed=32, attempts=5)

    assert len(logs.take(16, settings=QueueSettings(max_receives=6))) == 16


# ---------------------------------------------------------------------- past the maximum


def test_what_was_delivered_often_enough_is_not_delivered_again() -> None:
    logs = served(fresh=1, failed=1, attempts=3)

    assert logs.take(settings=QueueSettings(max_receives=3)) == [1]


def test_it_is_due_to_be_dead_lettered() -> None:
    logs = served(failed=2, attempts=3)
    settings = QueueSettings(max_receives=3)

    assert logs.partition.due(lambda queue: settings).dead == [0, 1]
    assert logs.partition.due(lambda queue: settings).dead == []


def test_a_dead_letter_whose_start_failed_is_due_again() -> None:
    logs = served(failed=1, attempts=3)
    settings = QueueSettings(max_receives=3)

    logs.partition.put_back(logs.partition.due(lambda queue: settings).dead)

    assert logs.partition.due(lambda queue: settings).dead == [0]


def test_a_message_in_flight_for_the_last_time_is_not_dead_yet() -> None:
    logs = served(failed=1, attempts=2)
    settings = QueueSettings(max_receives=3)
    logs.start(0)

    assert logs.partition.due(lambda queue: settings).dead == []


def test_an_uncounted_release_of_the_last_attempt_spares_it() -> None:
    logs = served(failed=1, attempts=2)
    settings = QueueSettings(max_receives=3)
    logs.release(logs.start(0), counted=False)

    assert logs.partition.due(lambda queue: settings).dead == []
    assert logs.take(settings=settings) == [0]


def test_a_message_refused_under_a_maximum_that_was_then_raised_is_delivered() -> None:
    logs = served(failed=1, attempts=3)
    logs.take(settings=QueueSettings(max_receives=3))

    logs.partition.due(lambda queue: DEFAULTS)

    assert logs.take() == [0]


# ---------------------------------------------------------------------- who is told


def test_a_queue_is_woken_when_something_becomes_ready_in_it() -> None:
    logs = served(fresh=1)
    logs.partition.woken.clear()

    logs.start(0, lease_ms=1_000)
    before = list(logs.partition.woken)
    logs.wait(1_000)

    assert (before, list(logs.partition.woken)) == ([], ["q"])


def test_has_ready_is_true_while_there_is_something_in_memory_or_parked() -> None:
    logs = served(fresh=2)
    in_memory = logs.partition.has_ready("q")
    logs.persist()
    logs.partition.shed(1 << 30)
    parked = logs.partition.has_ready("q")
    logs.take()

    assert (in_memory, parked, logs.partition.has_ready("q")) == (True, True, False)


def test_what_a_receiver_has_is_reserved_by_its_delivery_so_that_it_does_not_come_back() -> None:
    logs = served(3)
    before = logs.start(0, lease_ms=10)
    logs.wait(10)
    now = logs.start(0, 1)

    assert logs.partition.reserve_current([0, 1, 2], before.epoch, before.delivery) == []
    assert logs.partition.reserve_current([0, 1, 2], now.epoch, now.delivery) == [0, 1]
    assert logs.partition.reserve_current([0, 1, 2], now.epoch, now.delivery) == []
    logs.wait(LEASE_MS)
    assert logs.take() == [2]


def test_a_queue_that_was_served_goes_behind_the_others() -> None:
    logs = TwoLogs()
    for queue in ("a", "b", "c"):
        logs.send(queue)
    logs.read()

    logs.partition.serve_last("a")

    assert list(logs.partition.queues()) == ["b", "c", "a"]
