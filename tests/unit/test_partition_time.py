"""Time comes from the log: delays, time to live, leases and the clock."""

from __future__ import annotations

from typing import Any

import pytest

from marq.core.folding import CLOCK_STEP_MS
from marq.core.markers import Tick
from marq.core.policies import QueueSettings
from tests.unit.core_helpers import DEFAULTS, EPOCH_MS, TwoLogs

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def served() -> TwoLogs:
    logs = TwoLogs()
    logs.own()
    return logs


# ---------------------------------------------------------------------- the partition clock


def test_the_clock_advances_with_the_markers_topic() -> None:
    logs = served()

    logs.mark(Tick(), after_ms=700)
    logs.mark(Tick(), after_ms=300)

    assert logs.partition.clock_ms == 1_000


def test_the_first_record_of_all_does_not_move_the_clock() -> None:
    assert served().partition.clock_ms == 0


def test_a_broker_clock_that_steps_back_does_not_move_the_partition_clock() -> None:
    logs = served()
    logs.mark(Tick(), after_ms=1_000)

    logs.mark(Tick(), after_ms=-60_000)
    logs.mark(Tick(), after_ms=500)

    assert logs.partition.clock_ms == 1_500


def test_a_broker_clock_that_jumps_ahead_moves_leases_by_five_seconds_at_most() -> None:
    logs = served()
    message = logs.send()
    logs.read()
    logs.start(message, lease_ms=30_000)

    logs.mark(Tick(), after_ms=3_600_000)

    assert logs.partition.clock_ms == CLOCK_STEP_MS
    assert logs.state(message) == "in flight"


def test_after_an_outage_a_receiver_gets_to_ack_first() -> None:
    logs = served()
    message = logs.send()
    logs.read()
    delivery = logs.start(message, lease_ms=10_000)
    logs.mark(Tick(), after_ms=600_000)

    assert logs.ack(delivery) == [message]


def test_reading_messages_does_not_move_leases() -> None:
    logs = served()
    message = logs.send()
    logs.read()
    logs.start(message, lease_ms=10_000)
    logs.now_ms += 3_600_000
    logs.send()

    logs.read()

    assert logs.state(message) == "in flight"


# ---------------------------------------------------------------------- broker time


def tick(logs: TwoLogs, at_ms: int, **fields: Any) -> int:
    """A tick with this stamp; broker time behind it, from the beginning of the test."""
    logs.now_ms = EPOCH_MS + at_ms
    logs.mark(Tick(**fields))
    return max(-1, logs.partition.broker_ms - EPOCH_MS)


def says(logs: TwoLogs, at_ms: int, time_ms: int, clock_ms: int | None = None, epoch: int | None = None) -> int:
    """A tick with this stamp that tells broker time; broker time behind it."""
    told = {"time_ms": EPOCH_MS + time_ms, "clock_ms": EPOCH_MS + (at_ms if clock_ms is None else clock_ms)}
    return tick(logs, at_ms, epoch=logs.partition.own if epoch is None else epoch, **told)


def test_a_tick_tells_broker_time_forwards_and_back() -> None:
    logs = served()

    assert [says(logs, 100, 70), says(logs, 200, 60_000), says(logs, 300, 40)] == [70, 60_000, 40]


@pytest.mark.parametrize("clock_ms", [-4_901, 5_101, DAY_MS])
def test_a_tick_whose_stamp_its_owner_did_not_expect_tells_nothing(clock_ms: int) -> None:
    logs = served()

    assert [says(logs, 0, 70), says(logs, 100, 170, clock_ms=clock_ms), says(logs, 200, 270)] == [70, 70, 270]


def test_a_tick_of_an_earlier_owner_tells_nothing() -> None:
    logs = served()
    says(logs, 100, 70)
    former = logs.partition.own
    logs.own("next")

    assert [says(logs, 200, 170, epoch=former), says(logs, 300, 270)] == [70, 270]


@pytest.mark.parametrize("clock_ms", [50, 150])
def test_what_the_clock_of_the_markers_showed_then_is_known_to_the_next_owner(clock_ms: int) -> None:
    """The greater figure: the time since then must not seem longer than it is."""
    logs = served()
    says(logs, 100, 70, clock_ms=clock_ms)
    logs.persist()

    assert logs.partition.told_ms == EPOCH_MS + max(100, clock_ms)
    assert logs.recovered().told_ms == logs.partition.told_ms


# those of version 0.2 have nothing but their stamps


def test_broker_time_is_told_by_two_ticks_that_agree() -> None:
    logs = served()

    assert [tick(logs, 100), tick(logs, 200), tick(logs, 5_200)] == [-1, 200, 5_200]


def test_two_ticks_of_one_batch_prove_nothing() -> None:
    logs = served()

    assert [tick(logs, 100), tick(logs, 100), tick(logs, 200), tick(logs, 200)] == [-1, -1, 200, 200]


def test_ticks_that_are_further_apart_than_the_clock_allows_tell_nothing() -> None:
    logs = served()

    assert [tick(logs, 0), tick(logs, 100), tick(logs, 5_101), tick(logs, 5_102)] == [-1, 100, 100, 5_102]


@pytest.mark.parametrize("wrong_ms", [-DAY_MS, DAY_MS, DAY_MS + 1, 10_000])
def test_one_wrong_stamp_counts_for_nothing(wrong_ms: int) -> None:
    logs = served()

    told = [tick(logs, 100), tick(logs, 200), tick(logs, wrong_ms), tick(logs, 400), tick(logs, 500)]

    assert told == [-1, 200, 200, 200, 500]


def test_a_wrong_batch_counts_for_nothing() -> None:
    logs = served()

    told = [tick(logs, 100), tick(logs, 200), tick(logs, DAY_MS), tick(logs, DAY_MS), tick(logs, 400), tick(logs, 500)]

    assert told == [-1, 200, 200, 200, 200, 500]


def test_broker_time_follows_the_broker_back() -> None:
    logs = served()

    told = [tick(logs, HOUR_MS), tick(logs, HOUR_MS + 100), tick(logs, 200), tick(logs, 300)]

    assert told == [-1, HOUR_MS + 100, HOUR_MS + 100, 300]


@pytest.mark.parametrize("fields", [{"sure": False}, {"fence": "w/1"}])
def test_ticks_that_are_for_something_else_tell_nothing(fields: dict[str, Any]) -> None:
    logs = served()

    assert [tick(logs, 0), tick(logs, 50, **fields), tick(logs, 100)] == [-1, -1, 100]
    assert [tick(logs, 200, **fields), tick(logs, 300, **fields)] == [100, 100]


def test_other_markers_and_messages_tell_nothing() -> None:
    logs = served()
    tick(logs, 0), tick(logs, 100)
    logs.now_ms += 1_000
    message = logs.send()
    logs.read()
    logs.ack(logs.start(message))

    assert logs.partition.broker_ms == EPOCH_MS + 100


def test_an_owner_takes_no_tick_of_the_one_before_for_a_proof() -> None:
    logs = served()
    tick(logs, 0), tick(logs, 100)
    logs.own("next")

    assert [tick(logs, 200), tick(logs, 300)] == [100, 300]


def test_nothing_is_over_before_broker_time_is_known() -> None:
    logs = served()
    delayed, kept = logs.send(delay_ms=1), logs.send(ttl_ms=1)
    logs.now_ms += DAY_MS
    logs.own()
    logs.read()

    assert logs.states([delayed, kept]) == ["delayed", "ready"]
    assert expired(logs) == []


@pytest.mark.parametrize("persisted", [False, True])
def test_a_delay_that_was_over_by_a_wrong_clock_goes_on(persisted: bool) -> None:
    logs = served()
    message, behind = logs.send(delay_ms=600_000), logs.send()
    logs.read()
    tick(logs, HOUR_MS), tick(logs, HOUR_MS + 100)
    if persisted:
        logs.persist()
        logs.partition.shed(1 << 30)
    by_the_wrong_clock = logs.state(message)

    tick(logs, 200), tick(logs, 300)

    assert (by_the_wrong_clock, logs.state(message)) == ("ready", "delayed")
    assert logs.take() == [behind]
    logs.wait(600_000)
    assert logs.take() == [message]


@pytest.mark.parametrize("group", [None, b"x"])
@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("persisted", [False, True])
def test_a_delay_that_goes_on_keeps_its_place(group: bytes | None, fifo: bool, persisted: bool) -> None:
    settings = QueueSettings(fifo=fifo)
    logs = served()
    headers = [] if group is None else [("marq-group", group)]
    offsets = [
        logs.send(headers=headers),
        logs.send(delay_ms=600_000, headers=headers),
        logs.send(headers=headers),
    ]
    logs.read()
    tick(logs, HOUR_MS), tick(logs, HOUR_MS + 100)
    logs.partition.put_back(logs.take(settings=settings))
    if persisted:
        logs.persist()
        logs.partition.shed(1 << 30)
    tick(logs, 200), tick(logs, 300)

    now = logs.take(settings=settings)
    logs.partition.put_back(now)
    logs.wait(600_000)

    assert now == (offsets[:1] if fifo else [offsets[0], offsets[2]])
    assert logs.take(settings=settings) == offsets


def test_what_was_started_waits_for_no_delay_any_more() -> None:
    logs = served()
    message = logs.send(delay_ms=600_000)
    logs.read()
    tick(logs, HOUR_MS), tick(logs, HOUR_MS + 100)
    delivery = logs.start(message)
    tick(logs, 200), tick(logs, 300)

    logs.release(delivery)

    assert logs.take() == [message]


def test_a_time_to_live_that_was_over_by_a_wrong_clock_goes_on() -> None:
    logs = served()
    message = logs.send(ttl_ms=600_000)
    logs.read()
    tick(logs, HOUR_MS), tick(logs, HOUR_MS + 100)
    by_the_wrong_clock = expired(logs)
    logs.partition.put_back(by_the_wrong_clock)

    tick(logs, 200), tick(logs, 300)

    assert (by_the_wrong_clock, expired(logs)) == ([message], [])
    logs.wait(600_000)
    assert expired(logs) == [message]


def test_what_has_expired_by_the_estimate_is_kept_until_the_log_says_so() -> None:
    logs = served()
    message = logs.send(ttl_ms=2_000)
    logs.read()
    logs.wait(1_900)
    logs.partition.estimate_ms = EPOCH_MS + 2_000

    assert (logs.take(), expired(logs), logs.take()) == ([], [], [])
    logs.wait(100)
    assert expired(logs) == [message]


def test_an_estimate_that_was_wrong_costs_nothing() -> None:
    logs = served()
    message = logs.send(ttl_ms=2_000)
    logs.read()
    logs.wait(100)
    logs.partition.estimate_ms = EPOCH_MS + DAY_MS
    before = (logs.take(), expired(logs))

    logs.partition.estimate_ms = EPOCH_MS + 200

    assert (before, expired(logs), logs.take()) == (([], []), [], [message])


# ---------------------------------------------------------------------- delays


def test_a_message_with_a_delay_waits_for_it() -> None:
    logs = served()
    message = logs.send(delay_ms=3_000)
    logs.read()

    logs.wait(2_999)
    before = (logs.state(message), logs.take())
    logs.wait(1)

    assert before == ("delayed", [])
    assert (logs.state(message), logs.take()) == ("ready", [message])


def test_the_stamp_of_a_message_moves_no_delay() -> None:
    """In a topic with CreateTime it is any producer's."""
    logs = served()
    logs.wait(0)
    message = logs.send(delay_ms=3_000)
    logs.now_ms += DAY_MS
    logs.send("other")

    logs.read()

    assert logs.state(message) == "delayed"


def test_a_delay_of_zero_is_none() -> None:
    logs = served()
    message = logs.send(delay_ms=0)
    logs.read()

    assert logs.take() == [message]


def test_a_delay_that_was_over_when_the_message_was_read_delays_nothing() -> None:
    logs = served()
    first, second = logs.send(delay_ms=1_000), logs.send()
    logs.wait(1_000)

    logs.read()

    assert logs.take() == [first, second]


def test_a_message_whose_delay_is_over_comes_in_at_its_place() -> None:
    logs = served()
    offsets = [logs.send(), logs.send(delay_ms=1_000), logs.send()]
    logs.read()
    logs.wait(1_000)

    assert logs.take_all() == offsets


def test_a_delayed_message_can_be_finished_by_the_owner() -> None:
    logs = served()
    message = logs.send(delay_ms=1_000)
    logs.read()
    logs.finish("purged", message)
    logs.wait(2_000)

    assert logs.take() == []
    assert logs.partition.next_due_ms() is None


# ---------------------------------------------------------------------- time to live


def expired(logs: TwoLogs, settings: QueueSettings = DEFAULTS, queues: tuple[str, ...] = ()) -> list[int]:
    return logs.partition.due(lambda queue: settings, queues).expired


def test_a_message_past_its_time_to_live_is_due_to_expire() -> None:
    logs = served()
    message = logs.send(ttl_ms=2_000)
    logs.read()

    logs.wait(1_999)
    before = expired(logs)
    logs.wait(1)

    assert (before, expired(logs)) == ([], [message])


def test_expiry_is_no_end_before_its_marker() -> None:
    logs = served()
    message = logs.send(ttl_ms=2_000)
    logs.read()
    logs.wait(2_000)
    due = expired(logs)

    logs.partition.put_back(due)  # the append failed

    assert expired(logs) == [message]
    logs.finish("expired", message)
    assert logs.state(message) == "done"


def test_what_is_past_its_time_to_live_is_not_delivered() -> None:
    logs = served()
    logs.send(ttl_ms=2_000)
    keeps = logs.send()
    logs.read()
    logs.wait(2_000)

    assert logs.take() == [keeps]


def test_a_message_in_flight_does_not_expire_under_its_receiver() -> None:
    logs = served()
    message = logs.send(ttl_ms=2_000)
    logs.read()
    logs.start(message, lease_ms=10_000)
    logs.wait(5_000)
    before = expired(logs)

    logs.wait(5_000)

    assert (before, expired(logs)) == ([], [message])


def test_a_message_given_back_after_its_time_to_live_expires() -> None:
    logs = served()
    message = logs.send(ttl_ms=2_000)
    logs.read()
    delivery = logs.start(message)
    logs.wait(2_000)
    expired(logs)

    logs.release(delivery, counted=False)

    assert expired(logs) == [message]


def test_the_time_to_live_of_the_queue_is_for_messages_without_one() -> None:
    logs = served()
    plain, own = logs.send(), logs.send(ttl_ms=60_000)
    logs.read()
    logs.wait(5_000)

    assert expired(logs, QueueSettings(ttl_ms=5_000), ("q",)) == [plain]
    assert logs.take(settings=QueueSettings(ttl_ms=5_000)) == [own]


def test_the_time_to_live_of_the_queue_holds_for_parked_messages() -> None:
    logs = served()
    offsets = logs.send_many(3)
    logs.read()
    logs.persist()
    logs.partition.shed(1 << 30)
    logs.wait(5_000)

    assert expired(logs, QueueSettings(ttl_ms=5_000), ("q",)) == offsets


def test_the_time_to_live_of_the_queue_holds_for_redeliveries() -> None:
    logs = served()
    message = logs.send()
    logs.read()
    logs.start(message, lease_ms=1_000)
    logs.wait(5_000)
    settings = QueueSettings(ttl_ms=5_000)

    assert logs.take(settings=settings) == []
    assert expired(logs, settings) == [message]


def test_a_message_refused_for_a_setting_that_was_then_taken_back_is_delivered() -> None:
    logs = served()
    message = logs.send()
    logs.read()
    logs.wait(5_000)
    logs.take(settings=QueueSettings(ttl_ms=5_000))

    logs.partition.due(lambda queue: DEFAULTS)

    assert logs.take() == [message]


def test_a_parked_message_with_time_to_live_keeps_its_place() -> None:
    """Its delay was over, so it was looked at; then it was parked: it must not be taken for one in memory."""
    logs = served()
    message = logs.send(delay_ms=1_000, ttl_ms=60_000)
    logs.read()
    logs.persist()
    logs.wait(1_000)
    logs.partition.shed(1 << 30)

    logs.partition.due(lambda queue: DEFAULTS)

    assert logs.take() == [message]


def test_a_parked_message_expires() -> None:
    logs = served()
    message = logs.send(ttl_ms=3_000)
    logs.read()
    logs.persist()
    logs.partition.shed(1 << 30)
    logs.wait(3_000)

    assert expired(logs) == [message]
    logs.finish("expired", message)
    assert logs.state(message) == "done"


# ---------------------------------------------------------------------- when something is due


def test_nothing_is_due_while_nothing_waits() -> None:
    logs = served()
    logs.send()
    logs.read()

    assert logs.partition.next_due_ms() is None


@pytest.mark.parametrize("what", ["lease", "release", "delay", "ttl"])
def test_the_next_thing_due_is_known_in_log_time(what: str) -> None:
    logs = served()
    message = logs.send(delay_ms=4_000 if what == "delay" else None, ttl_ms=4_000 if what == "ttl" else None)
    logs.read()
    if what == "lease":
        logs.start(message, lease_ms=4_000)
    elif what == "release":
        logs.release(logs.start(message, lease_ms=60_000), delay_ms=4_000)
    logs.wait(1_500)

    assert logs.partition.next_due_ms() == 2_500


@pytest.mark.parametrize("what", ["lease", "delay", "ttl"])
def test_a_finished_message_is_nothing_to_wait_for(what: str) -> None:
    logs = served()
    message = logs.send(delay_ms=4_000 if what == "delay" else None, ttl_ms=86_400_000 if what == "ttl" else None)
    logs.read()
    if what == "delay":
        logs.finish("purged", message)
    else:
        logs.ack(logs.start(message, lease_ms=43_200_000))

    assert logs.partition.next_due_ms() is None


def test_an_extended_lease_is_due_at_its_new_end() -> None:
    logs = served()
    message = logs.send()
    logs.read()
    delivery = logs.start(message, lease_ms=4_000)

    logs.extend(delivery, lease_ms=9_000)

    assert logs.partition.next_due_ms() == 9_000
