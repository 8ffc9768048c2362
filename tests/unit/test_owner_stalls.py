"""A partition whose log takes nothing: receivers get messages of others meanwhile."""

from __future__ import annotations

from typing import Any

from marq.core import markers
from marq.core.markers import Release, Start
from marq.core.policies import QueueSettings
from marq.core.starts import STALLED_MS
from tests.unit.core_helpers import LEASE_MS, Worker


def serving(count: int, **options: Any) -> Worker:
    worker = Worker(**options).serve()
    worker.send(count)
    return worker


def ask(worker: Worker, receiver: str = "r", limit: int = 1) -> Any:
    return worker.owner.acquire(("q",), limit, receiver, worker.clock_ms, lease_ms=LEASE_MS)


def stand_still(worker: Worker, ms: int = STALLED_MS) -> None:
    """Time passes, and no marker gets into the log."""
    worker.clock_ms += ms
    worker.owner.work(worker.clock_ms)


def answers(worker: Worker) -> list[tuple[Any, list[int]]]:
    return [(handout.receiver, handout.offsets) for handout in worker.handouts(empty=True)]


def test_receivers_of_a_stalled_partition_hear_that_nothing_came_of_it() -> None:
    worker = serving(2)
    ask(worker, "one")
    worker.lose()
    ask(worker, "two")

    stand_still(worker, STALLED_MS - 1)
    before = answers(worker)
    stand_still(worker, 1)

    assert before == []
    assert answers(worker) == [("one", []), ("two", [])]
    assert worker.owner.stalled


def test_each_receiver_hears_it_once() -> None:
    worker = serving(1)
    ask(worker)
    seq, offset, appends = worker.append()
    stand_still(worker)
    first = answers(worker)

    stand_still(worker, 100)
    worker.confirm(seq, offset, appends)
    worker.flush()

    assert first == [("r", [])]
    assert answers(worker) == []


def test_a_stalled_partition_begins_nothing_more() -> None:
    worker = serving(2)
    ask(worker)
    worker.append()
    stand_still(worker)

    assert ask(worker) is None
    assert not [marker for marker in worker.appends if isinstance(marker, Start)]


def test_what_gets_into_the_log_after_all_is_given_back_uncounted_and_delivered_again() -> None:
    worker = serving(1)
    ask(worker)
    seq, offset, appends = worker.append()
    stand_still(worker)

    worker.confirm(seq, offset, appends)
    said = worker.flush()

    assert [(type(marker), marker.counted) for marker in said] == [(Release, False)]
    assert not worker.owner.stalled
    assert "" in worker.owner.partition.woken, "receivers are told that there is something"
    assert [h.offsets for h in worker.receive()] == [[0]]
    assert worker.owner.partition.receives(0) == 1


def test_a_log_that_takes_what_others_write_is_not_stalled() -> None:
    worker = serving(1)
    ask(worker)
    worker.lose()
    for _ in range(3):
        worker.broker.append(markers.encode([], "somebody", 1))
        worker.read_markers()
        stand_still(worker, STALLED_MS - 1)

    assert not worker.owner.stalled
    assert answers(worker) == []


def test_a_partition_without_starts_on_their_way_is_not_stalled() -> None:
    worker = serving(1)

    stand_still(worker, 60_000)

    assert not worker.owner.stalled


def test_messages_of_a_queue_with_limits_count_as_in_flight_until_it_is_known_what_became_of_them() -> None:
    worker = serving(2, settings={"q": QueueSettings(max_in_flight=1)})
    ask(worker)
    seq, offset, appends = worker.append()
    stand_still(worker)
    flow = worker.owner.flow.flows["q"]
    assert list(flow.offsets) == [0]

    worker.confirm(seq, offset, appends)
    worker.flush()

    assert list(flow.offsets) == []
    assert [h.offsets for h in worker.receive(2)] == [[0]]
