"""The state of deliveries, as the owner of their partition reports it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from app.service.leases import Latest, Lease, latest_of, lease_of
from marq.core.markers import Release, encode
from tests.unit.core_helpers import Worker


def owned(worker: Worker) -> Any:
    return SimpleNamespace(owner=worker.owner)


def test_a_lease_is_held_until_it_is_over_or_its_message_is_done() -> None:
    worker = Worker().serve()
    worker.send(2)
    (handout,) = worker.receive(lease_ms=500)
    epoch, delivery = handout.receipt

    worker.owner.acked([0], handout.receipt)
    worker.flush()
    while_on = [lease_of(owned(worker), epoch, delivery, offset, worker.clock_ms) for offset in (0, 1)]
    worker.wait(1_000)

    assert while_on == [Lease.DONE, Lease.HELD]
    assert lease_of(owned(worker), epoch, delivery, 1, worker.clock_ms) is Lease.OVER


def test_a_message_that_was_given_back_is_not_done_though_the_owner_has_not_read_it_yet() -> None:
    first = Worker().serve()
    first.send(1)
    (handout,) = first.receive()
    second = Worker(first.broker, name="w2", table=first.table)
    second.claim()
    second.restore()
    second.broker.append(encode([Release(*handout.receipt, [0, 1])]))  # type: ignore[call-arg]
    second.read_markers()

    assert second.owner.serving and second.owner.partition.position == 0
    assert lease_of(owned(second), *handout.receipt, 0, second.clock_ms) is Lease.OVER  # type: ignore[call-arg]


def test_a_lease_is_over_with_its_last_millisecond_though_no_record_has_told_so() -> None:
    worker = Worker().serve()
    worker.send(1)
    (handout,) = worker.receive(lease_ms=500)

    def at(later_ms: int) -> Lease:
        return lease_of(owned(worker), *handout.receipt, 0, worker.clock_ms + later_ms)  # type: ignore[call-arg]

    assert [at(0), at(499), at(500), at(501)] == [Lease.HELD, Lease.HELD, Lease.OVER, Lease.OVER]


def test_the_last_delivery_can_be_extended_until_it_is_given_back() -> None:
    worker = Worker().serve()
    worker.send(1)
    (first,) = worker.receive(lease_ms=500)
    while_on = latest_of(owned(worker), 0)
    worker.wait(1_000)
    late = latest_of(owned(worker), 0)
    (second,) = worker.receive()
    newer = latest_of(owned(worker), 0)
    worker.owner.release([0], second.receipt)
    worker.flush()
    given_back = latest_of(owned(worker), 0)
    (third,) = worker.receive()
    worker.owner.acked([0], third.receipt)
    worker.flush()

    assert while_on == late == Latest(Lease.HELD, *first.receipt)
    assert newer == Latest(Lease.HELD, *second.receipt)
    assert given_back == Latest(Lease.OVER)
    assert latest_of(owned(worker), 0) == Latest(Lease.DONE)
