"""The reference fold reports markers that are not allowed, and does not report races."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from marq.core.history import Envelope
from marq.core.markers import Batch, End, Keepalive, Marker, Own, Purge, Release, Start, Tick
from pipeline.reference import RACE_MS, Fault, ReferenceFold

LEASE_MS = 1_000
OWNER = "w1/a"


class Log:
    """A log that the reference reads as it grows: messages 0 to 9 of the queue `q`, owned by w1 since marker 0."""

    def __init__(self, *, compacted: bool = False, fifo: Mapping[str, int] | None = None) -> None:
        self.faults: list[Fault] = []
        self.now_ms = 0
        self.next = 0
        self.reference = ReferenceFold(
            first=0, own=-1, queue_of=lambda _: "q", report=self.faults.append, compacted=compacted, fifo=fifo
        )
        self.read(0, 10)
        self.write(Own("w1", OWNER))

    def read(self, start: int, stop: int) -> None:
        self.reference.read([Envelope(offset, 0, b"q", None, (), 1) for offset in range(start, stop)])

    def write(self, *markers: Marker, by: str = OWNER) -> list[list[int]]:
        self.next += 1
        return self.reference.fold(self.next - 1, self.now_ms, Batch(1, list(markers), by))

    def wait(self, ms: int) -> None:
        """Time passes, with a tick each half second: the owner is at work."""
        for _ in range(ms // 500):
            self.now_ms += 500
            self.write(Tick())

    def start(self, delivery: int, *offsets: int, receives: int = 1, lease_ms: int = LEASE_MS, epoch: int = 0) -> Any:
        return self.write(Start(epoch, delivery, list(offsets), lease_ms, "r", receives))

    def only(self) -> Fault:
        (fault,) = self.faults
        return fault


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_life_that_follows_the_rules_is_no_fault(log: Log) -> None:
    log.start(1, 0, 5)
    log.write(Keepalive(0, 1, [0, 1], 3_000), by="")
    log.write(Release(0, 1, [1, 2]), by="")
    log.start(2, 1, 2, receives=2)
    log.write(End(0, [0, 5], "acked", 1), by="")
    assert log.faults == []
    assert log.reference.done == {("q", "acked"): 5}


# ------------------------------------------------------------------ expiry


def send(log: Log, ttl_ms: int) -> int:
    """A message with a time to live, sent now."""
    offset = log.reference.position
    headers = [("marq-ttl-ms", b"%d" % ttl_ms)]
    log.reference.read([Envelope(offset, log.now_ms, b"q", None, headers, 1)])
    return offset


def expire(log: Log, offset: int) -> None:
    log.write(End(0, [offset, offset + 1], "expired"))


def test_an_end_after_the_time_to_live_is_none(log: Log) -> None:
    offset = send(log, 1_000)
    log.wait(1_000)
    expire(log, offset)
    assert log.faults == []


def test_an_end_before_the_time_to_live_is_over_is_a_fault(log: Log) -> None:
    offset = send(log, 1_001)
    log.wait(1_000)
    expire(log, offset)
    assert (log.only().kind, log.only().offset) == ("expired early", offset)


def test_so_it_is_for_a_message_that_is_read_later(log: Log) -> None:
    log.wait(1_000)
    expire(log, 10)
    log.now_ms = 0
    send(log, 1_001)
    assert (log.only().kind, log.only().offset) == ("expired early", 10)


def test_one_stamp_is_no_reason_for_an_end(log: Log) -> None:
    offset = send(log, 60_000)
    log.wait(1_000)
    log.now_ms += 3_600_000
    log.write(Tick())
    log.now_ms -= 3_600_000
    expire(log, offset)
    assert log.only().kind == "expired early"


def test_a_tick_says_itself_what_the_time_is(log: Log) -> None:
    """By the clock that stamps messages, which is 30 s behind."""
    offset = send(log, 1_000)
    log.now_ms += 31_000
    log.write(Tick(epoch=log.reference.own, time_ms=log.now_ms - 30_001, clock_ms=log.now_ms))
    expire(log, offset)
    assert log.only().kind == "expired early"


@pytest.mark.parametrize(("epoch", "off_ms"), [(7, 0), (0, 5_001), (0, -5_001)])
def test_unless_its_stamp_or_its_epoch_is_wrong(log: Log, epoch: int, off_ms: int) -> None:
    offset = send(log, 1_000)
    log.now_ms += 31_000
    log.write(Tick(epoch=log.reference.own + epoch, time_ms=log.now_ms, clock_ms=log.now_ms + off_ms))
    expire(log, offset)
    assert log.only().kind == "expired early"


def test_nor_are_ticks_of_the_owner_before(log: Log) -> None:
    offset = send(log, 1_000)
    log.wait(2_000)
    log.write(Own("w2", "w2/a"))
    log.write(Tick(), by="w2/a")
    log.write(End(log.next - 2, [offset, offset + 1], "expired"), by="w2/a")
    assert log.only().kind == "expired early"


def test_a_time_to_live_by_the_setting_of_its_queue_can_not_be_checked(log: Log) -> None:
    expire(log, 0)
    assert log.faults == []


# ------------------------------------------------------------------ two leases


def test_a_start_under_a_lease_of_another_start_is_a_fault(log: Log) -> None:
    log.start(1, 0, 2)
    log.start(2, 1, 2, receives=2)
    assert (log.only().kind, log.only().offset) == ("two leases", 1)


def test_a_start_that_crossed_an_extension_is_none(log: Log) -> None:
    log.start(1, 0, 1)
    log.wait(2_000)
    log.write(Keepalive(0, 1, [0, 1], 5_000), by="another worker")
    assert log.start(2, 0, 1, receives=2) == [[]]
    assert log.faults == []


def test_a_start_long_after_the_extension_that_it_ignores_is_a_fault(log: Log) -> None:
    log.start(1, 0, 1)
    log.wait(2_000)
    log.write(Keepalive(0, 1, [0, 1], 10 * RACE_MS), by="another worker")
    log.wait(RACE_MS + 1_000)
    log.start(2, 0, 1, receives=2)
    assert log.only().kind == "two leases"


def test_a_start_before_the_extended_lease_could_be_over_is_a_fault(log: Log) -> None:
    log.start(1, 0, 1)
    log.write(Keepalive(0, 1, [0, 1], 5_000), by="another worker")
    log.start(2, 0, 1, receives=2)
    assert log.only().kind == "two leases"


def test_a_void_start_whose_receipt_is_used_was_handed_out(log: Log) -> None:
    log.start(1, 0, 1)
    log.wait(2_000)
    log.write(Keepalive(0, 1, [0, 1], 5_000), by="another worker")
    log.start(2, 0, 1, receives=2)
    log.write(End(0, [0, 1], "acked", 2), by="another worker")
    assert log.only().kind == "two leases" and "receipt was used" in log.only().what


# ------------------------------------------------------------------ after the end


def test_a_start_that_crossed_an_ack_is_no_fault(log: Log) -> None:
    log.start(1, 0, 1)
    log.wait(2_000)
    log.write(End(0, [0, 1], "acked", 1), by="another worker")
    assert log.start(2, 0, 1, receives=2) == [[]]
    assert log.faults == []


def test_a_start_long_after_the_end_is_a_fault(log: Log) -> None:
    log.start(1, 0, 1)
    log.write(End(0, [0, 1], "acked", 1), by="another worker")
    log.wait(RACE_MS + 1_000)
    log.start(2, 0, 1, receives=2)
    assert (log.only().kind, log.only().offset) == ("delivered after its end", 0)


def test_the_time_for_which_an_owner_stands_still_does_not_count(log: Log) -> None:
    log.start(1, 0, 1)
    log.write(End(0, [0, 1], "acked", 1), by="another worker")
    log.now_ms += 10 * RACE_MS  # stopped, then continued, with a start that it had ready
    log.start(2, 0, 1, receives=2)
    assert log.faults == []


def test_an_ack_of_a_delivery_that_started_after_the_end_is_a_fault(log: Log) -> None:
    log.start(1, 0, 1)
    log.wait(2_000)
    log.write(End(0, [0, 1], "acked", 1), by="another worker")
    log.start(2, 0, 1, receives=2)
    log.write(End(0, [0, 1], "acked", 2), by="another worker")
    assert log.only().kind == "delivered after its end"


# ------------------------------------------------------------------ owners, attempts, records


def test_a_start_by_a_former_owner_is_void_and_no_fault_unless_it_is_handed_out(log: Log) -> None:
    log.write(Own("w2", "w2/b"))
    assert log.start(1, 0, 1) == [[]]
    assert log.faults == []
    log.write(End(0, [0, 1], "acked", 1), by="")
    assert log.only().kind == "owner"


def test_a_start_or_an_end_of_an_owner_that_the_log_does_not_know_is_a_fault(log: Log) -> None:
    log.start(1, 0, 1, epoch=77)
    log.write(End(77, [1, 2], "dead"))
    assert [fault.kind for fault in log.faults] == ["owner", "owner"]


@pytest.mark.parametrize("said", [1, 3])
def test_an_attempt_that_the_log_does_not_lead_up_to_is_a_fault(log: Log, said: int) -> None:
    log.start(1, 0, 1)
    log.write(Release(0, 1, [0, 1]), by="")
    log.start(2, 0, 1, receives=said)
    assert log.only().kind == "attempts"


def test_an_uncounted_delivery_leaves_no_hole(log: Log) -> None:
    log.start(1, 0, 1)
    log.write(Release(0, 1, [0, 1], counted=False))
    log.start(2, 0, 1)
    assert log.faults == []


def test_a_record_that_vanishes_while_it_is_worked_on_is_a_fault(log: Log) -> None:
    log.start(1, 9, 12)
    log.reference.gone(10, 11)
    assert (log.only().kind, log.only().offset) == ("record gone", 10)


def test_a_start_of_a_record_that_is_not_there_is_a_fault(log: Log) -> None:
    log.reference.gone(10, 12)
    log.start(1, 11, 12)
    assert (log.only().kind, log.only().offset) == ("record gone", 11)


def test_in_a_topic_of_the_users_records_may_vanish() -> None:
    log = Log(compacted=True)
    log.start(1, 10, 11)
    log.reference.gone(10, 11)
    assert log.faults == []


def test_a_purge_counts_for_what_is_read_later_too(log: Log) -> None:
    log.write(Purge(0, "q", 12))
    log.read(10, 13)
    assert log.reference.done == {("q", "purged"): 12}
    assert list(log.reference.open) == [12]


def test_an_unreadable_record_changes_nothing_but_the_clock(log: Log) -> None:
    log.start(1, 0, 1)
    log.now_ms += 2_000
    log.next += 1
    assert log.reference.fold(log.next - 1, log.now_ms, None) == []
    assert log.reference.notes["unreadable"] == 1
    assert log.start(2, 0, 1, receives=2) == [[0]]


# ------------------------------------------------------------------ receipts without a start


def test_an_ack_of_a_delivery_that_the_log_does_not_have_is_a_fault(log: Log) -> None:
    log.write(End(0, [3, 4], "acked", 1), by="")
    assert (log.only().kind, log.only().offset) == ("no start", 3)
    assert 3 in log.reference.open


@pytest.mark.parametrize("marker", [End(0, [3, 4], "acked", 2), Keepalive(0, 2, [3, 4], 1), Release(0, 2, [3, 4])])
def test_so_is_a_receipt_of_a_later_one_than_the_last(log: Log, marker: Marker) -> None:
    log.start(1, 3, 4)
    log.write(marker, by="")
    assert (log.only().kind, log.only().offset) == ("no start", 3)


def test_a_receipt_of_an_earlier_one_is_none_nor_one_of_what_is_done(log: Log) -> None:
    log.start(1, 3, 4)
    log.wait(2_000)
    log.start(2, 3, 4, receives=2)
    log.write(Keepalive(0, 1, [3, 4], 1), by="")
    log.write(End(0, [3, 4], "acked", 1), by="")
    log.write(End(0, [3, 4], "acked", 2), by="")
    assert log.faults == []


def test_an_owner_that_leaves_may_release_what_never_reached_the_log(log: Log) -> None:
    log.write(Release(0, 9, [3, 4], counted=False))
    assert log.faults == []


# ------------------------------------------------------------------ FIFO groups


@pytest.fixture
def ordered() -> Log:
    """Messages 10, 11 and 12 are of the group g of a FIFO queue, 13 is of h."""
    log = Log(fifo={"q": 1})
    for offset, group in ((10, b"g"), (11, b"g"), (12, b"g"), (13, b"h")):
        log.reference.read([Envelope(offset, 5, b"q", None, [("marq-group", group)], 1)])
    return log


def ack(log: Log, delivery: int, *offsets: int) -> None:
    log.write(End(0, list(offsets), "acked", delivery), by="")


def test_a_group_in_its_order_is_no_fault(ordered: Log) -> None:
    ordered.start(1, 10, 12)
    ordered.start(2, 13, 14)
    ack(ordered, 1, 10, 12)
    ordered.start(3, 12, 13)
    ack(ordered, 2, 13, 14)
    ack(ordered, 3, 12, 13)
    assert ordered.faults == []


def test_a_message_handed_out_before_one_of_its_group_is_done_is_a_fault(ordered: Log) -> None:
    ordered.start(1, 10, 11)
    ordered.start(2, 11, 12)
    assert ordered.faults == [], "it may be taken back"
    ack(ordered, 2, 11, 12)
    assert (ordered.only().kind, ordered.only().offset) == ("order", 11)


def test_one_that_is_taken_back_uncounted_is_none(ordered: Log) -> None:
    ordered.start(1, 10, 11)
    ordered.start(2, 11, 12)
    ordered.write(Release(0, 2, [11, 12], counted=False))
    ack(ordered, 1, 10, 11)
    ordered.start(3, 11, 12)
    ack(ordered, 3, 11, 12)
    assert ordered.faults == []


def test_one_that_was_never_started_is_overtaken_unless_it_is_a_duplicate(ordered: Log) -> None:
    ordered.start(1, 11, 12)
    ack(ordered, 1, 11, 12)
    assert ordered.faults == []
    ordered.reference.check_order_at_end(lambda offset: True)
    assert ordered.faults == []
    ordered.reference.check_order_at_end(lambda offset: False)
    assert (ordered.only().kind, ordered.only().offset) == ("order", 11)


def test_one_that_is_started_later_was_overtaken(ordered: Log) -> None:
    ordered.start(1, 11, 12)
    ack(ordered, 1, 11, 12)
    ordered.start(2, 10, 11)
    assert (ordered.only().kind, ordered.only().offset) == ("order", 11)


def test_a_duplicate_that_is_ended_was_not_overtaken(ordered: Log) -> None:
    ordered.start(1, 11, 12)
    ack(ordered, 1, 11, 12)
    ordered.write(End(0, [10, 11], "purged"))
    ordered.reference.check_order_at_end(lambda offset: False)
    assert ordered.faults == []
