"""States of a message, and what moves it from one to the next."""

from __future__ import annotations

import pytest

from marq.core.markers import End, Own, Purge, Release, Start, Tick
from marq.core.state import MessageState
from tests.unit.core_helpers import LEASE_MS, TwoLogs

# ---------------------------------------------------------------------- the life of a message


def served(count: int = 1, queue: str = "q") -> tuple[TwoLogs, list[int]]:
    """A partition with an owner and ``count`` messages that were read."""
    logs = TwoLogs()
    logs.own()
    offsets = logs.send_many(count, queue)
    logs.read()
    return logs, offsets


def test_a_message_that_was_read_is_ready() -> None:
    logs, (message,) = served()

    assert logs.state(message) == "ready"
    assert logs.partition.receives(message) == 0


def test_a_start_puts_it_in_flight() -> None:
    logs, (message,) = served()

    delivery = logs.start(message)

    assert delivery.offsets == [message]
    assert logs.state(message) == "in flight"


def test_an_ack_finishes_it() -> None:
    logs, (message,) = served()
    delivery = logs.start(message)

    assert logs.ack(delivery) == [message]
    assert logs.state(message) == "done"


def test_messages_that_others_end_are_noted() -> None:
    """Who has them waits for nothing any more: by a late ack of an earlier delivery, or a purge."""
    logs, offsets = served(6)
    early = logs.start(*offsets[:4], lease_ms=10)
    logs.wait(10)
    late = logs.start(*offsets[:3])
    logs.ack(late, offsets[0])
    assert logs.partition.ended_by_others == 0

    logs.ack(early, *offsets[1:])
    assert logs.partition.ended_by_others == 1

    logs.start(*offsets[4:])
    logs.mark(Purge(logs.partition.own, "q", offsets[-1] + 1))
    assert logs.partition.ended_by_others == 2


def test_when_its_lease_is_over_it_is_ready_again() -> None:
    logs, (message,) = served()
    logs.start(message, lease_ms=10_000)

    logs.wait(9_999)
    before = logs.state(message)
    logs.wait(1)

    assert (before, logs.state(message)) == ("in flight", "ready")
    assert logs.take() == [message]


def test_a_release_makes_it_ready_at_once() -> None:
    logs, (message,) = served()
    delivery = logs.start(message)

    logs.release(delivery)

    assert logs.state(message) == "ready"
    assert logs.take() == [message]


def test_a_release_with_a_delay_makes_it_ready_later() -> None:
    logs, (message,) = served()
    delivery = logs.start(message)

    logs.release(delivery, delay_ms=7_000)
    before = logs.state(message)
    logs.wait(7_000)

    assert (before, logs.state(message)) == ("delayed", "ready")


@pytest.mark.parametrize("outcome", ["dead", "expired", "purged", "poison"])
def test_the_owner_finishes_a_message_that_was_never_delivered(outcome: str) -> None:
    logs, (message,) = served()

    assert logs.finish(outcome, message) == [message]  # type: ignore[arg-type]
    assert logs.state(message) == "done"


def test_a_lease_of_no_length_is_over_at_once_and_counts() -> None:
    logs, (message,) = served()

    logs.start(message, lease_ms=0)

    assert logs.state(message) == "ready"
    assert logs.partition.receives(message) == 1


def test_of_a_message_that_was_not_read_yet_the_state_is_what_its_markers_say() -> None:
    logs, _ = served(0)
    first, second, third, fourth = logs.send_many(4)
    delivery = logs.start(first, second, third)

    logs.release(delivery, second, delay_ms=1_000)
    logs.ack(delivery, third)

    states = [logs.partition.state_of(offset) for offset in (first, second, third, fourth)]
    assert states == [MessageState.IN_FLIGHT, MessageState.DELAYED, MessageState.DONE, MessageState.READY]


def test_a_parked_message_is_ready() -> None:
    logs, (message,) = served()
    logs.persist()
    logs.partition.shed(1 << 30)

    assert message not in logs.partition.messages
    assert logs.partition.state_of(message) is MessageState.READY


# ---------------------------------------------------------------------- which starts take effect


def test_a_start_by_a_former_owner_is_ignored() -> None:
    logs, (message,) = served()
    zombie = logs.partition.own
    logs.own("next")

    assert logs.start(message, epoch=zombie).offsets == []
    assert logs.state(message) == "ready"
    assert logs.partition.counters["ignored_starts"] == 1


def test_a_start_before_any_owner_is_ignored() -> None:
    logs = TwoLogs()
    message = logs.send()
    logs.read()

    assert logs.start(message, epoch=0).offsets == []


def test_a_start_in_the_log_before_its_own_marker_is_ignored() -> None:
    logs = TwoLogs()
    message = logs.send()
    logs.read()

    logs.mark(Start(1, 1, [0, 1], LEASE_MS))
    logs.own()

    assert logs.state(message) == "ready"


def test_a_start_of_a_message_under_an_unexpired_lease_is_ignored() -> None:
    logs, (message,) = served()
    logs.start(message)

    assert logs.start(message).offsets == []
    assert logs.partition.receives(message) == 1


def test_a_new_owner_does_not_end_leases() -> None:
    logs, (message,) = served()
    logs.start(message)
    logs.own("next")

    assert logs.start(message).offsets == []
    assert logs.state(message) == "in flight"


def test_a_start_with_a_number_that_was_used_before_is_ignored() -> None:
    logs, (message,) = served()
    logs.start(message, delivery=5, lease_ms=1_000)
    logs.wait(1_000)

    assert logs.start(message, delivery=5).offsets == []
    assert logs.start(message, delivery=4).offsets == []
    assert logs.start(message, delivery=6).offsets == [message]


def test_delivery_numbers_begin_anew_in_each_epoch() -> None:
    logs, (message,) = served()
    logs.start(message, delivery=900, lease_ms=1_000)
    logs.own("next")
    logs.wait(1_000)

    assert logs.start(message, delivery=1).offsets == [message]


def test_a_start_takes_effect_offset_by_offset() -> None:
    logs, (leased, finished, free) = served(3)
    logs.start(leased)
    logs.finish("dead", finished)

    assert logs.start(leased, finished, free).offsets == [free]


def test_a_start_that_was_read_before_its_message_takes_effect() -> None:
    logs = TwoLogs()
    logs.own()
    message = logs.send()

    delivery = logs.start(message)
    logs.read()

    assert delivery.offsets == [message]
    assert logs.state(message) == "in flight"


def test_a_lease_that_ended_before_its_message_was_read_leaves_it_ready() -> None:
    logs = TwoLogs()
    logs.own()
    message = logs.send()
    logs.start(message, lease_ms=1_000)
    logs.wait(1_000)

    logs.read()

    assert logs.take() == [message]
    assert logs.partition.receives(message) == 1


# ---------------------------------------------------------------------- which ends take effect


def test_an_ack_of_a_message_that_was_never_started_is_ignored() -> None:
    logs, (message,) = served()

    assert logs.mark(End(logs.partition.own, [message, message + 1], "acked", 1)) == [[]]
    assert logs.state(message) == "ready"
    assert logs.partition.counters["ignored_ends"] == 1


def test_an_ack_without_a_delivery_is_ignored() -> None:
    logs, (message,) = served()
    logs.start(message)

    assert logs.mark(End(0, [message, message + 1])) == [[]]
    assert logs.state(message) == "in flight"


def test_an_ack_with_a_receipt_from_the_future_is_ignored() -> None:
    logs, (message,) = served()
    delivery = logs.start(message)

    assert logs.ack(delivery._replace(delivery=delivery.delivery + 1)) == []
    assert logs.ack(delivery._replace(epoch=delivery.epoch + 1)) == []
    assert logs.state(message) == "in flight"


def test_a_late_ack_of_an_older_delivery_finishes_the_message() -> None:
    logs, (message,) = served()
    older = logs.start(message, lease_ms=1_000)
    logs.wait(1_000)
    logs.start(message)

    assert logs.ack(older) == [message]
    assert logs.state(message) == "done"


def test_a_late_ack_of_a_delivery_by_a_former_owner_finishes_the_message() -> None:
    logs, (message,) = served()
    older = logs.start(message, lease_ms=1_000)
    logs.own("next")
    logs.wait(1_000)
    logs.start(message)

    assert logs.ack(older) == [message]


def test_an_ack_after_the_lease_is_over_finishes_the_message() -> None:
    logs, (message,) = served()
    delivery = logs.start(message, lease_ms=1_000)
    logs.wait(1_000)

    assert logs.ack(delivery) == [message]
    assert logs.take() == []


def test_a_late_ack_of_a_reserved_message_makes_its_start_void() -> None:
    logs, (message,) = served()
    older = logs.start(message, lease_ms=1_000)
    logs.wait(1_000)
    reserved = logs.take()

    logs.ack(older)

    assert reserved == [message]
    assert logs.start(message).offsets == []


def test_an_acked_message_is_never_started_again() -> None:
    logs, (message,) = served()
    logs.ack(logs.start(message))

    assert logs.start(message).offsets == []


def test_a_second_ack_is_ignored_and_counted() -> None:
    logs, (message,) = served()
    delivery = logs.start(message)
    logs.ack(delivery)

    assert logs.ack(delivery) == []
    assert logs.partition.counters["acked"] == 1
    assert logs.partition.counters["ignored_ends"] == 1


def test_an_ack_that_was_read_before_its_message_finishes_it() -> None:
    logs = TwoLogs()
    logs.own()
    message, other = logs.send(), logs.send()
    logs.ack(logs.start(message))

    logs.read()

    assert logs.states([message, other]) == ["done", "ready"]
    assert logs.take() == [other]


def test_an_end_by_a_former_owner_is_ignored() -> None:
    logs, (message,) = served()
    zombie = logs.partition.own
    logs.own("next")

    assert logs.finish("dead", message, epoch=zombie) == []
    assert logs.state(message) == "ready"


# ---------------------------------------------------------------------- part of a lease


def test_acking_part_of_a_batch_leaves_the_rest_in_flight() -> None:
    logs, offsets = served(5)
    delivery = logs.start(*offsets)

    logs.ack(delivery, 1, 3)

    assert logs.states(offsets) == ["in flight", "done", "in flight", "done", "in flight"]


def test_a_batch_times_out_together() -> None:
    logs, offsets = served(3)
    logs.start(*offsets, lease_ms=5_000)

    logs.wait(5_000)

    assert logs.take() == offsets


def test_extending_a_single_offset_splits_its_lease_off() -> None:
    logs, offsets = served(3)
    delivery = logs.start(*offsets, lease_ms=5_000)

    logs.extend(delivery, 1, lease_ms=8_000)
    logs.wait(5_000)
    first = logs.take()
    logs.wait(3_000)

    assert first == [0, 2]
    assert logs.take() == [1]


def test_releasing_a_single_offset_leaves_the_rest_under_their_lease() -> None:
    logs, offsets = served(3)
    delivery = logs.start(*offsets, lease_ms=5_000)

    logs.release(delivery, 1)

    assert logs.states(offsets) == ["in flight", "ready", "in flight"]
    assert logs.partition.receives(1) == 1


def test_a_batch_is_extended_by_one_marker() -> None:
    logs, offsets = served(3)
    delivery = logs.start(*offsets, lease_ms=5_000)

    assert logs.extend(delivery, lease_ms=5_000) == offsets
    logs.wait(4_999)

    assert logs.states(offsets) == ["in flight"] * 3


def test_an_extension_may_shorten_a_lease() -> None:
    logs, (message,) = served()
    delivery = logs.start(message, lease_ms=60_000)

    logs.extend(delivery, lease_ms=1_000)
    logs.wait(1_000)

    assert logs.take() == [message]


def test_a_keepalive_revives_a_lease_that_is_over_until_a_later_start() -> None:
    logs, (message,) = served()
    delivery = logs.start(message, lease_ms=1_000)
    logs.wait(1_000)

    assert logs.extend(delivery) == [message]
    assert logs.state(message) == "in flight"
    assert logs.take() == []


def test_a_keepalive_of_an_older_delivery_is_ignored() -> None:
    logs, (message,) = served()
    older = logs.start(message, lease_ms=1_000)
    logs.wait(1_000)
    logs.start(message, lease_ms=2_000)

    assert logs.extend(older) == []
    logs.wait(2_000)

    assert logs.state(message) == "ready"


def test_a_release_of_an_older_delivery_is_ignored() -> None:
    logs, (message,) = served()
    older = logs.start(message, lease_ms=1_000)
    logs.wait(1_000)
    logs.start(message)

    assert logs.release(older) == []
    assert logs.state(message) == "in flight"


def test_what_was_released_can_not_be_extended() -> None:
    logs, (message,) = served()
    delivery = logs.start(message)
    logs.release(delivery)

    assert logs.extend(delivery) == []
    assert logs.release(delivery) == []
    assert logs.state(message) == "ready"


def test_a_receiver_marker_with_the_number_of_another_epoch_is_ignored() -> None:
    logs, (message,) = served()
    older = logs.start(message, lease_ms=1_000)
    logs.own("next")
    logs.wait(1_000)
    logs.start(message, delivery=older.delivery)

    assert logs.release(older) == []
    assert logs.extend(older) == []


# ---------------------------------------------------------------------- the receive count


def test_the_count_is_that_of_the_starts_that_took_effect() -> None:
    logs, (message,) = served()
    for _ in range(3):
        logs.start(message, lease_ms=1_000)
        logs.start(message)  # void: there is a lease
        logs.wait(1_000)

    assert logs.partition.receives(message) == 3


def test_a_counted_release_counts() -> None:
    logs, (message,) = served()

    logs.release(logs.start(message))

    assert logs.partition.receives(message) == 1


def test_an_uncounted_release_takes_its_start_back() -> None:
    logs, (message,) = served()
    logs.release(logs.start(message))

    logs.release(logs.start(message), counted=False)

    assert logs.partition.receives(message) == 1


def test_an_uncounted_first_delivery_goes_back_to_its_place() -> None:
    logs, offsets = served(4)
    delivery = logs.start(0, 1)
    logs.release(delivery, counted=False)

    assert logs.take(4) == offsets
    assert logs.partition.receives(0) == 0


def test_the_number_in_a_start_is_information_only() -> None:
    logs, (message,) = served()

    logs.mark(Start(logs.partition.own, 1, [0, 1], LEASE_MS, "r", receives=77))

    assert logs.partition.receives(message) == 1


def test_messages_of_different_counts_keep_them_within_one_delivery() -> None:
    logs, (old, new) = served(2)
    logs.start(old, lease_ms=1_000)
    logs.wait(1_000)

    logs.start(old, new)

    assert [logs.partition.receives(o) for o in (old, new)] == [2, 1]


# ---------------------------------------------------------------------- purge


def test_a_purge_finishes_what_is_ready_in_flight_and_delayed() -> None:
    logs, (ready, flying) = served(2)
    logs.start(flying)
    delayed = logs.send(delay_ms=60_000)
    logs.read()

    assert logs.purge("q") == [ready, flying, delayed]
    assert logs.states([ready, flying, delayed]) == ["done"] * 3


def test_a_purge_leaves_other_queues_and_later_messages() -> None:
    logs, _ = served(2)
    other = logs.send("other")
    logs.read()

    logs.purge("q")
    later = logs.send()
    logs.read()

    assert logs.states([0, 1, other, later]) == ["done", "done", "ready", "ready"]


def test_a_purge_finishes_what_was_not_read_yet() -> None:
    logs = TwoLogs()
    logs.own()
    before = [*logs.send_many(2), logs.send(delay_ms=5), logs.send(ttl_ms=5, headers=[("marq-origin", b"0:9")])]
    logs.purge("q")
    after = logs.send()

    logs.read()

    assert logs.states([*before, after]) == ["done"] * 4 + ["ready"]
    assert (logs.partition.delays, logs.partition.ttls) == ({}, {})


def test_a_purge_finishes_parked_messages() -> None:
    logs, offsets = served(5)
    logs.persist()
    logs.partition.shed(1 << 30)

    assert logs.purge("q", before=3) == offsets[:3]
    assert logs.take() == offsets[3:]


def test_a_purge_by_a_former_owner_is_ignored() -> None:
    logs, (message,) = served()
    zombie = logs.partition.own
    logs.own("next")

    assert logs.purge("q", epoch=zombie) == []
    assert logs.state(message) == "ready"


def test_a_purge_leaves_poison_for_the_poison_topic_whether_it_was_read_or_not() -> None:
    read, unread = TwoLogs(), TwoLogs()
    for logs in (read, unread):
        logs.own()
        logs.send(headers=[("marq-delay-ms", b"soon")])
    read.read()

    for logs in (read, unread):
        logs.purge("q")
        logs.read()

    assert (read.state(0), unread.state(0)) == ("poison", "poison")


def test_an_ack_after_a_purge_is_ignored() -> None:
    logs, (message,) = served()
    delivery = logs.start(message)
    logs.purge("q")

    assert logs.ack(delivery) == []


# ---------------------------------------------------------------------- several markers in a record


def test_the_markers_of_a_record_are_folded_in_order_at_one_moment() -> None:
    logs, (message,) = served()
    own = logs.partition.own

    effects = logs.mark(
        Start(own, 1, [0, 1], LEASE_MS),
        Release(own, 1, [0, 1]),
        Start(own, 2, [0, 1], LEASE_MS),
        End(own, [0, 1], "acked", 1),
    )

    assert effects == [[message]] * 4
    assert logs.state(message) == "done"


def test_an_own_marker_makes_its_offset_the_epoch() -> None:
    logs = TwoLogs()
    logs.mark(Tick(), Tick())
    logs.mark(Own("w", "w/1"))

    assert logs.partition.own == 1
