"""Messages that the owner takes by offset, to end them: they are moved to another queue."""

from __future__ import annotations

from marq.core import markers
from marq.core.markers import End
from tests.unit.core_helpers import LEASE_MS, TwoLogs, Worker


def serving(count: int) -> Worker:
    worker = Worker().serve()
    worker.send(count)
    return worker


def move(worker: Worker, offsets: list[int] | None, limit: int = 10, queue: str = "q") -> list[int]:
    pending = worker.owner.acquire_to_end(
        queue, offsets, limit, "mover", worker.clock_ms, lease_ms=LEASE_MS, name="move"
    )
    return pending.offsets if pending is not None else []


def parked(count: int) -> TwoLogs:
    """Messages whose payloads are in a segment alone."""
    logs = TwoLogs()
    logs.send_many(count)
    logs.read()
    logs.persist()
    assert logs.partition.shed(1 << 30) > 0
    return logs


def test_only_what_is_ready_in_the_queue_is_taken() -> None:
    worker = serving(5)
    worker.receive(limit=1)

    assert move(worker, [0, 1, 3, 99]) == [1, 3]
    assert move(worker, [1, 2], queue="other") == []


def test_what_is_taken_is_handed_to_nobody_else() -> None:
    worker = serving(3)
    move(worker, [1])

    handouts = worker.receive()

    assert [h.offsets for h in handouts if h.receiver != "mover"] == [[0, 2]]


def test_without_offsets_the_first_ones_are_taken() -> None:
    worker = serving(5)
    assert move(worker, None, limit=2) == [0, 1]


def test_what_was_moved_is_done() -> None:
    worker = serving(2)
    move(worker, [0])
    worker.flush()
    worker.owner.ended_as("moved", [0])
    worker.flush()

    assert 0 not in worker.owner.partition.messages
    assert worker.owner.partition.counters["moved"] == 1


def test_a_parked_message_of_another_queue_keeps_its_turn() -> None:
    logs = parked(3)

    assert logs.partition.reserve("other", [1]) == []
    assert logs.take() == [0, 1, 2]


def test_a_parked_message_can_be_taken() -> None:
    logs = parked(3)

    assert logs.partition.reserve("q", [1]) == [1]
    assert logs.take() == [0, 2]
    assert logs.partition.record(1).offset == 1


def test_the_end_of_a_moved_message_of_a_former_owner_is_ignored() -> None:
    worker = serving(1)
    worker.broker.append(markers.encode([End(worker.owner.epoch - 1, [0, 1], "moved")]))
    worker.read_markers()

    assert 0 in worker.owner.partition.messages
