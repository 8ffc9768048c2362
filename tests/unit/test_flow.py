"""The limits of messages in flight and the circuit breaker of a queue, as the owner enforces them."""

from __future__ import annotations

from typing import Any

from marq.core.flow import Breaker
from marq.core.policies import Limits, QueueSettings, share
from tests.unit.core_helpers import LEASE_MS, Worker


def serving(count: int, partitions: int = 1, **settings: Any) -> Worker:
    worker = Worker(settings={"q": QueueSettings(**settings)}, limits=Limits(partitions=partitions)).serve()
    worker.send(count)
    return worker


def take(worker: Worker, limit: int = 10, name: str = "r", lease_ms: int = LEASE_MS) -> list[int]:
    worker.owner.acquire(["q"], limit, name, worker.clock_ms, lease_ms=lease_ms, name=name)
    worker.flush()
    return [offset for handout in worker.handouts() for offset in handout.offsets]


def finish(worker: Worker, offsets: list[int]) -> None:
    for offset in offsets:
        delivered = worker.owner.partition.deliveries[offset]
        worker.owner.acked([offset], (delivered.epoch, delivered.delivery))
    worker.flush()


def give_back(worker: Worker, offsets: list[int], **options: Any) -> None:
    for offset in offsets:
        delivered = worker.owner.partition.deliveries[offset]
        worker.owner.release([offset], (delivered.epoch, delivered.delivery), **options)
    worker.flush()


# ---------------------------------------------------------------------- limits


def test_no_more_than_the_maximum_is_in_flight() -> None:
    worker = serving(10, max_in_flight=4)

    assert len(take(worker, 3)) == 3
    assert len(take(worker, 3)) == 1
    assert take(worker, 3) == []


def test_an_acknowledgement_makes_room_and_wakes_receivers() -> None:
    worker = serving(10, max_in_flight=2)
    taken = take(worker, 2)
    worker.owner.partition.woken.clear()

    finish(worker, taken[:1])

    assert "q" in worker.owner.partition.woken
    assert len(take(worker, 5)) == 1


def test_a_release_makes_room() -> None:
    worker = serving(5, max_in_flight=2)

    give_back(worker, take(worker, 2), delay_ms=60_000)

    assert len(take(worker, 5)) == 2


def test_a_lease_that_ends_makes_room() -> None:
    worker = serving(5, max_in_flight=2)
    take(worker, 2, lease_ms=1_000)

    worker.wait(2_000)

    assert len(take(worker, 5)) == 2


def test_a_delivery_whose_start_is_on_its_way_counts() -> None:
    worker = serving(5, max_in_flight=2)
    worker.owner.acquire(["q"], 2, "r", worker.clock_ms, lease_ms=LEASE_MS)

    assert worker.owner.acquire(["q"], 2, "r", worker.clock_ms, lease_ms=LEASE_MS) is None


def test_each_receiver_has_its_own_limit() -> None:
    worker = serving(10, max_in_flight_per_receiver=2)

    assert len(take(worker, 5, "a")) == 2
    assert take(worker, 5, "a") == []
    assert len(take(worker, 5, "b")) == 2


def test_what_was_in_flight_before_a_new_owner_counts() -> None:
    first = serving(5, max_in_flight=2)
    take(first, 2)
    second = Worker(
        first.broker, name="w2", settings=first.settings, table=first.table, queue_log=first.queue_log
    ).serve()

    assert take(second, 5) == []


def test_the_shares_of_a_limit_add_up_to_it_and_none_is_zero() -> None:
    assert [share(10, n, 4) for n in range(4)] == [3, 3, 2, 2]
    assert [share(2, n, 4) for n in range(4)] == [1, 1, 1, 1]


def test_a_partition_keeps_its_share() -> None:
    worker = serving(10, partitions=4, max_in_flight=8)

    assert len(take(worker, 10)) == 2


def test_other_queues_are_not_limited() -> None:
    worker = serving(3, max_in_flight=1)
    worker.send(3, queue="other")
    take(worker, 3)

    worker.owner.acquire(["q", "other"], 3, "r", worker.clock_ms, lease_ms=LEASE_MS)
    worker.flush()

    assert [len(h.offsets) for h in worker.handouts()] == [3]


def test_nothing_is_kept_of_what_was_finished() -> None:
    worker = serving(4, max_in_flight=4)

    finish(worker, take(worker, 4))

    assert not worker.owner.flow.flows["q"].offsets
    assert not worker.owner.flow.in_flight


# ---------------------------------------------------------------------- circuit breaker

BROKEN = {"breaker_failures": 3, "breaker_pause_ms": 10_000}


def test_a_run_of_failures_stops_deliveries() -> None:
    worker = serving(10, **BROKEN)

    for _ in range(3):
        give_back(worker, take(worker, 1), delay_ms=60_000)

    assert worker.owner.flow.flows["q"].breaker.state == "open"
    assert take(worker, 5) == []


def test_a_success_ends_the_run() -> None:
    worker = serving(10, **BROKEN)

    for _ in range(4):
        give_back(worker, take(worker, 1), delay_ms=60_000)
        finish(worker, take(worker, 1))

    assert worker.owner.flow.flows["q"].breaker.state == "closed"


def test_after_the_pause_one_message_is_tried_and_its_success_closes_the_breaker() -> None:
    worker = serving(10, **BROKEN)
    give_back(worker, take(worker, 3), delay_ms=60_000)
    worker.owner.partition.woken.clear()
    worker.wait(10_000)
    worker.owner.work(worker.clock_ms)
    woken = "q" in worker.owner.partition.woken

    probe = take(worker, 5)
    others = take(worker, 5)
    finish(worker, probe)

    assert (woken, len(probe), others) == (True, 1, [])
    assert len(take(worker, 5)) == 5


def test_a_success_of_before_the_breaker_opened_does_not_close_it() -> None:
    breaker = Breaker()
    breaker.tried()
    assert breaker.failed(1, 1_000, now_ms=0)

    breaker.succeeded()

    assert breaker.state == "open"
    assert breaker.room(999) == 0 and breaker.room(1_000) == 1


def test_a_probe_that_fails_opens_it_again() -> None:
    worker = serving(10, **BROKEN)
    give_back(worker, take(worker, 3), delay_ms=60_000)
    worker.wait(10_000)

    give_back(worker, take(worker, 1), delay_ms=60_000)
    worker.wait(9_000)
    early = take(worker, 1)
    worker.wait(1_000)

    assert early == []
    assert len(take(worker, 5)) == 1


def test_a_probe_that_was_never_looked_at_is_replaced() -> None:
    worker = serving(10, **BROKEN)
    give_back(worker, take(worker, 3), delay_ms=60_000)
    worker.wait(10_000)

    give_back(worker, take(worker, 1), counted=False)

    assert len(take(worker, 5)) == 1


def test_leases_that_end_are_failures() -> None:
    worker = serving(10, **BROKEN)
    take(worker, 3, lease_ms=1_000)

    worker.wait(2_000)

    assert take(worker, 5) == []


def test_a_breaker_without_a_limit_never_opens() -> None:
    breaker = Breaker()

    assert not any(breaker.failed(0, 1000, 0) for _ in range(100))
    assert breaker.room(0) is None
