"""From a receiver's request to its delivery, and what happens when an append goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from marq.core import markers
from marq.core.markers import End, Release, Start
from marq.core.owner import Phase
from marq.core.policies import QueueSettings
from marq.core.starts import DEAD_LEASE_MS
from tests.unit.core_helpers import LEASE_MS, Worker


def serving(count: int = 0, **options: Any) -> Worker:
    worker = Worker(**options).serve()
    if count:
        worker.send(count)
    return worker


def ask(worker: Worker, limit: int = 10, queues: tuple[str, ...] = ("q",), receiver: Any = "r", **options: Any) -> Any:
    options.setdefault("lease_ms", LEASE_MS)
    return worker.owner.acquire(queues, limit, receiver, worker.clock_ms, **options)


def given(worker: Worker) -> list[list[int]]:
    """The offsets that are handed out."""
    return [h.offsets for h in worker.handouts() if h.offsets]


# ---------------------------------------------------------------------- durable before it is handed out


def test_nothing_is_handed_out_before_its_start_is_in_the_log() -> None:
    worker = serving(3)
    ask(worker)
    seq, offset, appends = worker.append()
    before = given(worker)

    worker.confirm(seq, offset, appends)

    assert before == []
    assert given(worker) == [[0, 1, 2]]


def test_an_own_append_is_folded_at_once_when_it_is_the_next_record() -> None:
    worker = serving(1)

    (handout,) = worker.receive()

    assert handout.receipt == (worker.owner.epoch, 1)
    assert worker.owner.partition.receives(0) == 1


def test_an_own_append_behind_an_unread_record_is_folded_when_that_is_read() -> None:
    worker = serving(1)
    ask(worker)
    worker.broker.append(markers.encode([], "somebody", 1))
    seq, offset, appends = worker.append()
    worker.confirm(seq, offset, appends)
    before = given(worker)

    worker.read_markers(upto=offset)

    assert before == []
    assert given(worker) == [[0]]


def test_appends_that_were_acknowledged_out_of_order_are_folded_in_order() -> None:
    worker = serving(2)
    ask(worker, 1)
    first = worker.append()
    ask(worker, 1)
    second = worker.append()

    worker.confirm(*second)
    before = given(worker)
    worker.confirm(*first)

    assert before == []
    assert given(worker) == [[0], [1]]


def test_an_owner_whose_append_comes_behind_an_unread_record_says_so_until_that_is_read() -> None:
    worker = serving(1)
    worker.broker.append(markers.encode([End(worker.owner.epoch, [0], "acked", 7)], "another worker", 1))
    ask(worker, 1)
    behind = [worker.owner.is_behind]

    worker.confirm(*worker.append())
    behind.append(worker.owner.is_behind)
    worker.read_markers()
    behind.append(worker.owner.is_behind)

    assert behind == [False, True, False]


def test_an_own_record_that_is_read_after_it_was_folded_is_skipped() -> None:
    worker = serving(2)
    worker.receive(1, lease_ms=5_000)
    before = worker.owner.partition.markers_position

    assert worker.owner.read_markers(1, len(worker.broker.log), worker.broker.log[1:], worker.clock_ms)

    assert worker.owner.partition.markers_position == before
    assert worker.handouts() == []
    assert worker.owner.partition.receives(0) == 1


def test_an_own_record_that_is_read_before_its_acknowledgement_is_folded_once() -> None:
    worker = serving(1)
    ask(worker)
    seq, offset, appends = worker.append()
    worker.read_markers()

    worker.confirm(seq, offset, appends)

    assert given(worker) == [[0]]
    assert worker.owner.partition.receives(0) == 1


def test_only_what_the_start_took_effect_on_is_handed_out() -> None:
    """A late keepalive got into the log first."""
    worker = serving(2)
    (handout,) = worker.receive(1, lease_ms=1_000)
    worker.wait(1_200)
    ask(worker)
    epoch, delivery = handout.receipt
    worker.broker.append(markers.encode([markers.Keepalive(epoch, delivery, [0, 1], LEASE_MS)], "x", 1))
    worker.append()

    worker.read_markers()

    assert given(worker) == [[1]]
    worker.wait(LEASE_MS + 200)
    assert [h.offsets for h in worker.receive()] == [[0, 1]]


def test_what_a_late_ack_ended_before_the_start_is_not_handed_out() -> None:
    worker = serving(2)
    (handout,) = worker.receive(1, lease_ms=1_000)
    worker.wait(1_200)
    ask(worker)
    epoch, delivery = handout.receipt
    worker.broker.append(markers.encode([End(epoch, [0, 1], "acked", delivery)], "x", 1))
    worker.append()

    worker.read_markers()

    assert given(worker) == [[1]]


@pytest.mark.parametrize("how", ["late ack", "purge", "owner's end"])
def test_what_ended_after_its_start_but_before_it_was_handed_out_is_not_handed_out(how: str) -> None:
    """Its payload is gone."""
    worker = serving(2)
    (handout,) = worker.receive(1, lease_ms=1_000)
    worker.wait(1_200)
    ask(worker)
    worker.append()
    epoch, delivery = handout.receipt
    end = {
        "late ack": End(epoch, [0, 1], "acked", delivery),
        "purge": markers.Purge(epoch, "q", 1),
        "owner's end": End(epoch, [0, 1], "dead"),
    }[how]
    worker.broker.append(markers.encode([end], "x", 1))  # type: ignore[list-item]

    worker.read_markers()

    assert given(worker) == [[1]]


def test_the_receipt_names_epoch_and_delivery_and_numbers_are_not_used_again() -> None:
    worker = serving(3)
    ask(worker, 1)
    seq, _ = worker.lose()
    worker.owner.failed(seq)

    (second,) = worker.receive(1)
    (third,) = worker.receive(1)

    assert (second.receipt, third.receipt) == ((0, 2), (0, 3))


def test_a_start_names_its_receiver_and_the_highest_count() -> None:
    worker = serving(2)
    worker.receive(1, lease_ms=1_000)
    worker.wait(1_200)

    ask(worker, name="shop.handle")

    (start,) = worker.appends
    assert isinstance(start, Start)
    assert (start.receiver, start.receives, start.offsets) == ("shop.handle", 2, [0, 2])


def test_one_delivery_may_hold_messages_of_several_queues() -> None:
    worker = serving()
    worker.send(2, "a")
    worker.send(2, "b")

    ask(worker, 3, ("a", "b"))
    worker.flush()

    assert given(worker) == [[0, 1, 2]]


def with_a_suspicious_message() -> Worker:
    """A message of "a" that failed twice, and five others of "b"."""
    worker = serving()
    worker.send(1, "a")
    for _ in range(2):
        worker.receive(1, "a", lease_ms=1_000)
        worker.wait(1_200)
    worker.send(5, "b")
    return worker


def test_a_suspicious_message_shares_its_delivery_with_no_other_queue() -> None:
    worker = with_a_suspicious_message()

    first = ask(worker, 6, ("a", "b"), shared_fate=True)
    second = ask(worker, 6, ("b", "a"), shared_fate=True)

    assert (first.offsets, second.offsets) == ([0], [1, 2, 3, 4, 5])


def test_a_suspicious_message_does_not_join_a_delivery_of_other_queues() -> None:
    worker = with_a_suspicious_message()

    first = ask(worker, 6, ("b", "a"), shared_fate=True)
    second = ask(worker, 6, ("b", "a"), shared_fate=True)

    assert (first.offsets, second.offsets) == ([1, 2, 3, 4, 5], [0])


def test_nothing_is_appended_when_nothing_is_ready() -> None:
    worker = serving()

    assert ask(worker) is None
    assert worker.appends == []


# ---------------------------------------------------------------------- appends that fail


def test_a_failed_append_keeps_its_messages_reserved() -> None:
    worker = serving(1)
    ask(worker)
    seq, _ = worker.lose()

    worker.owner.failed(seq)

    assert ask(worker) is None


def test_a_failed_append_frees_its_messages_when_a_later_own_one_is_folded() -> None:
    worker = serving(1)
    ask(worker)
    seq, _ = worker.lose()
    worker.owner.failed(seq)

    worker.wait(1_100)  # a tick, because something of ours is on its way

    assert [h.offsets for h in worker.receive()] == [[0]]
    assert worker.owner.partition.receives(0) == 1


def test_a_record_of_another_writer_frees_nothing() -> None:
    worker = serving(1)
    ask(worker)
    seq, _ = worker.lose()
    worker.owner.failed(seq)

    worker.broker.append(markers.encode([], "somebody else", 99))
    worker.read_markers()

    assert ask(worker) is None


def test_an_append_that_seemed_to_fail_but_landed_is_given_back_uncounted() -> None:
    worker = serving(1)
    ask(worker)
    seq, _, _ = worker.append()
    worker.owner.failed(seq)

    worker.read_markers()
    released = worker.flush()

    assert given(worker) == []
    assert released == [Release(0, 1, [0, 1], 0, False)]
    assert worker.owner.partition.receives(0) == 0
    assert [h.offsets for h in worker.receive()] == [[0]]


def test_an_end_of_the_owner_that_was_lost_is_decided_again() -> None:
    worker = serving(settings={"q": QueueSettings(ttl_ms=1_000)})
    worker.send(1)
    worker.wait(1_500)
    worker.owner.work(worker.clock_ms, ["q"])
    lost, _ = worker.lose()
    worker.owner.failed(lost)
    worker.wait(1_100)

    worker.owner.work(worker.clock_ms, ["q"])
    worker.flush()

    assert worker.owner.partition.messages == {}


# ---------------------------------------------------------------------- receivers that are gone, leases that are over


def test_a_delivery_for_a_receiver_that_is_gone_is_given_back_uncounted() -> None:
    worker = serving(2)
    pending = ask(worker)
    pending.cancel()

    said = worker.flush()

    assert given(worker) == []
    assert isinstance(said[-1], Release) and not said[-1].counted
    assert [h.offsets for h in worker.receive()] == [[0, 1]]
    assert worker.owner.partition.receives(0) == 1


def test_a_delivery_whose_lease_is_over_on_our_clock_is_not_handed_out() -> None:
    worker = serving(1)
    ask(worker, lease_ms=5_000)
    seq, offset, appends = worker.append()
    worker.clock_ms += 5_000

    worker.confirm(seq, offset, appends)
    worker.flush()

    assert given(worker) == []
    assert worker.owner.partition.receives(0) == 0


def test_a_delivery_with_a_lease_of_0_is_handed_out_and_ready_again_at_once_and_counted() -> None:
    worker = serving(1)

    for attempt in (1, 2, 3):
        (handout,) = worker.receive(lease_ms=0)
        assert handout.offsets == [0]
        assert worker.owner.partition.receives(0) == attempt
        assert worker.owner.partition.has_ready("q")

    worker.owner.acked([0], handout.receipt)
    worker.flush()
    assert not worker.owner.partition.messages


def test_a_fifo_group_is_ready_again_at_once_after_a_lease_of_0() -> None:
    worker = serving(3, settings={"q": QueueSettings(fifo=True)})

    assert [h.offsets for _ in range(2) for h in worker.receive(limit=2, lease_ms=0)] == [[0, 1], [0, 1]]


def test_a_delivery_with_a_lease_of_0_that_nobody_waits_for_is_not_counted() -> None:
    worker = serving(1)
    pending = ask(worker, lease_ms=0)
    pending.cancel()
    worker.flush()

    assert given(worker) == []
    assert worker.owner.partition.receives(0) == 0


def test_a_delivery_says_until_when_it_may_be_handed_out() -> None:
    worker = serving(1)
    sent_ms = worker.clock_ms

    (handout,) = worker.receive(lease_ms=5_000)

    assert handout.until_ms == sent_ms + 5_000


def test_the_receiver_hears_that_nothing_came_of_its_request() -> None:
    worker = serving(1)
    ask(worker)
    seq, _ = worker.lose()
    worker.owner.failed(seq)

    worker.wait(1_100)

    assert [(h.receiver, h.offsets) for h in worker.handouts(empty=True)] == [("r", [])]


def test_a_lease_of_no_length_leaves_the_message_to_the_next() -> None:
    worker = serving(1)
    worker.receive(lease_ms=0)
    worker.appends.clear()  # the release is lost too

    assert [h.offsets for h in worker.receive()] == [[0]]


# ---------------------------------------------------------------------- deliveries too large for a record


def scattered(worker: Worker, count: int) -> list[int]:
    """``count`` ready messages, no two of them neighbours."""
    for _ in range(count):
        worker.send(1, "q")
        worker.send(1, "other")
    return list(range(0, 2 * count, 2))


@pytest.fixture
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markers, "RECORD_BYTES", 8192 + 400)  # ten ranges a record


@pytest.mark.usefixtures("small_records")
def test_a_split_start_is_one_delivery_handed_out_when_all_of_it_is_folded() -> None:
    worker = serving()
    offsets = scattered(worker, 25)
    ask(worker, 25)
    parts = worker.owner.take_appends()
    worker.appends.extend(parts[:1])
    first = worker.append()
    worker.appends.extend(parts[1:])
    rest = worker.append()

    worker.confirm(*first)
    before = given(worker)
    worker.confirm(*rest)

    assert len(parts) == 3
    assert before == []
    assert given(worker) == [offsets]


@pytest.mark.usefixtures("small_records")
def test_a_split_start_of_which_a_part_was_lost_is_given_back_uncounted() -> None:
    worker = serving()
    offsets = scattered(worker, 15)
    ask(worker, 15)
    first, second = worker.owner.take_appends()
    worker.appends.append(first)
    worker.flush()
    worker.appends.append(second)
    seq, _ = worker.lose()
    worker.owner.failed(seq)

    worker.wait(1_100)

    assert given(worker) == []
    assert [h.offsets for h in worker.receive(15)] == [offsets]
    assert worker.owner.partition.receives(0) == 1


# ---------------------------------------------------------------------- dead letters


def failing(worker: Worker, times: int) -> None:
    for _ in range(times):
        worker.receive(1, lease_ms=1_000)
        worker.wait(1_200)


def test_a_dead_letter_is_started_copied_and_ended() -> None:
    worker = serving(1, settings={"q": QueueSettings(max_receives=2)})
    failing(worker, 2)

    worker.owner.work(worker.clock_ms)
    (start,) = worker.flush()
    to_copy = worker.dead[:]
    worker.dead.clear()
    before = dict(worker.owner.partition.messages)
    worker.owner.ended_as("dead", to_copy)
    worker.flush()

    assert isinstance(start, Start) and start.receiver == "dlq"
    assert to_copy == [0] and list(before) == [0]
    assert worker.owner.partition.messages == {}
    assert worker.owner.partition.counters["dead"] == 1


def test_a_dead_letter_that_could_not_be_copied_comes_up_again() -> None:
    worker = serving(1, settings={"q": QueueSettings(max_receives=2)})
    failing(worker, 2)
    worker.owner.work(worker.clock_ms)
    worker.flush()
    worker.dead.clear()

    worker.wait(61_000)
    worker.owner.work(worker.clock_ms)
    worker.flush()

    assert worker.dead == [0]


def test_a_dead_letter_whose_start_was_lost_comes_up_again() -> None:
    worker = serving(1, settings={"q": QueueSettings(max_receives=2)})
    failing(worker, 2)
    worker.owner.work(worker.clock_ms)
    seq, _ = worker.lose()
    worker.owner.failed(seq)
    worker.wait(1_100)

    worker.owner.work(worker.clock_ms)
    worker.flush()

    assert worker.dead == [0]


@pytest.mark.parametrize("together", [True, False])
def test_an_end_that_was_lost_leaves_a_message_to_the_start_that_has_it_by_now(together: bool) -> None:
    worker = serving(1, settings={"q": QueueSettings(max_receives=2)})
    failing(worker, 2)
    worker.owner.work(worker.clock_ms)
    worker.flush()
    worker.dead.clear()
    worker.wait(DEAD_LEASE_MS + 1_000)
    worker.owner.ended_as("dead", [0])
    if together:
        worker.owner.work(worker.clock_ms)
    worker.lose()
    worker.clock_ms += 1_000
    worker.owner.tick(worker.clock_ms)
    later = worker.append()
    worker.owner.work(worker.clock_ms)

    worker.confirm(*later)
    worker.owner.work(worker.clock_ms)

    assert ask(worker) is None
    assert [start.receiver for start in worker.flush() if isinstance(start, Start)] == ["dlq"]
    assert worker.owner.phase is Phase.SERVING and worker.dead == [0]


def test_a_message_that_was_acked_late_is_not_dead_lettered() -> None:
    worker = serving(1, settings={"q": QueueSettings(max_receives=1)})
    (handout,) = worker.receive(1, lease_ms=1_000)
    worker.wait(1_200)
    worker.owner.work(worker.clock_ms)
    epoch, delivery = handout.receipt
    worker.broker.append(markers.encode([End(epoch, [0, 1], "acked", delivery)], "x", 1))
    worker.append()

    worker.read_markers()

    assert worker.dead == []


def test_poison_is_listed_for_its_copy_and_ended_after_it() -> None:
    worker = serving()
    worker.send(1, headers=[("marq-delay-ms", b"soon")])

    worker.owner.work(worker.clock_ms)
    worker.owner.work(worker.clock_ms)
    listed = list(worker.poison)
    worker.owner.ended_as("poison", [0])
    worker.flush()

    assert listed == [(0, "header marq-delay-ms is not a number of milliseconds")]
    assert worker.owner.partition.messages == {}


def test_a_double_of_a_dead_letter_is_purged_once() -> None:
    worker = serving()
    worker.send(2, "q.dead", headers=[("marq-origin", b"0:77")])

    worker.owner.work(worker.clock_ms)
    said = worker.flush()
    worker.owner.work(worker.clock_ms)

    assert said == [End(0, [1, 2], "purged")]
    assert worker.appends == []


def test_a_purge_is_appended_and_folded() -> None:
    worker = serving(3)

    worker.owner.purge("q", 2)
    worker.flush()

    assert [h.offsets for h in worker.receive()] == [[2]]


# ---------------------------------------------------------------------- receivers' markers


def test_an_extension_and_a_release_are_markers_with_the_receipt() -> None:
    worker = serving(2)
    (handout,) = worker.receive(2, lease_ms=5_000)

    worker.owner.extend([0], handout.receipt, 60_000)
    worker.owner.release([1], handout.receipt, delay_ms=100)
    worker.flush()
    worker.wait(6_000)

    assert [h.offsets for h in worker.receive()] == [[1]]


# ---------------------------------------------------------------------- what the owner wants done


def test_each_effect_is_taken_once() -> None:
    worker = serving(2)
    worker.owner.acquire(["q"], 2, "r", worker.clock_ms, lease_ms=LEASE_MS)

    effects = worker.owner.take_effects()

    assert effects is not None and [type(marker) for marker in effects.appends] == [Start]
    assert worker.owner.take_effects() is None


def test_markers_can_be_taken_without_being_handed_anything() -> None:
    worker = serving(2)
    worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=LEASE_MS)
    worker.flush()
    worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=LEASE_MS)

    appends = worker.owner.take_appends()

    assert [type(marker) for marker in appends] == [Start]
    effects = worker.owner.take_effects()
    assert effects is not None and not effects.appends
    assert [handout.offsets for handout in effects.handouts] == [[0]]


def test_receivers_are_woken_once_for_all_that_became_ready() -> None:
    worker = serving(0)
    worker.owner.take_woken()
    worker.send(3)

    assert [worker.owner.take_woken() for _ in range(2)] == [True, False]
    worker.owner.wake()
    assert worker.owner.take_woken()


def test_who_serves_no_more_wakes_nobody() -> None:
    worker = serving(3)
    worker.owner.leave()

    assert not worker.owner.take_woken()
