"""Records that were deleted unread: no owner goes on by accident, and a repair records the loss."""

from __future__ import annotations

import pytest

from marq.core import rows
from marq.core.owner import Phase
from marq.core.recovery import Edges, note_loss
from marq.core.rows import Loss
from marq.errors import DeletedError
from tests.unit.core_helpers import Worker


def history() -> Worker:
    """Six messages below the last manifest, four above it; 0, 1 and 6 are finished, 2 and 7 in work."""
    worker = Worker().serve()
    worker.send(6)
    (first,) = worker.receive(3)
    worker.owner.acked([0, 1], first.receipt)
    worker.flush()
    worker.clock_ms += 20_000
    worker.owner.hurry_checkpoint()
    worker.checkpoint()
    worker.send(4)
    (rest,) = worker.receive(6)
    worker.owner.acked([3, 4, 5, 6], rest.receipt)
    worker.flush()
    return worker


def successor(worker: Worker) -> Worker:
    return Worker(worker.broker, name="w2", table=worker.table, queue_log=worker.queue_log)


def repaired(worker: Worker, queue_start: int, markers_start: int = 0) -> tuple[Worker, list[Loss]]:
    """A new owner that accepts that the logs begin there, and has written that down."""
    owner = successor(worker)
    owner.claim()
    manifests = {key: value for key, value in owner.table.items() if key.count("/") == 1}
    owner.owner.restore(
        manifests,
        [key for key in owner.table if key not in manifests],
        owner.load,
        Edges((queue_start, markers_start)),
        accept_loss=True,
    )
    owner.read_markers()
    assert owner.owner.phase is Phase.SERVING
    losses = owner.owner.give_up(queue_start)
    owner.checkpoint()
    return owner, losses


def next_owner(owner: Worker, queue_start: int) -> Worker:
    """The next owner, once all leases are over."""
    next_one = Worker(owner.broker, name="w3", table=owner.table, queue_log=owner.queue_log)
    next_one.claim()
    next_one.restore((queue_start, 0))
    next_one.read_markers()
    next_one.read_queue()
    next_one.wait(60_000)
    return next_one


def manifest_of(worker: Worker) -> rows.Manifest:
    newest = max(
        (k for k in worker.table if k.count("/") == 1), key=lambda k: rows.decode_manifest(worker.table[k]).epoch
    )
    return rows.decode_manifest(worker.table[newest])


@pytest.mark.parametrize("log_start", [(8, 0), (0, 5)], ids=["messages", "markers"])
def test_nobody_goes_on_by_accident(log_start: tuple[int, int]) -> None:
    owner = successor(history())
    owner.claim()

    with pytest.raises(DeletedError, match="deleted unread"):
        owner.restore(log_start)


def test_what_is_gone_is_named_and_what_was_not_known_to_be_done_counted() -> None:
    owner, losses = repaired(history(), queue_start=8)

    # 6 was acknowledged, 7 was in work
    assert [(loss.log, loss.start, loss.stop, loss.unfinished) for loss in losses] == [("queue", 6, 8, 1)]
    assert owner.owner.partition.counters["deleted_unread"] == 1
    assert manifest_of(owner).lost == losses
    assert manifest_of(owner).position >= 8


def test_what_was_not_deleted_is_served_by_the_next_owner() -> None:
    owner, _ = repaired(history(), queue_start=8)
    next_one = next_owner(owner, queue_start=8)

    (handout,) = next_one.receive(10)

    assert handout.offsets == [2, 8, 9], "2 was in the tables, 8 and 9 are in the log"
    assert next_one.owner.partition.lost, "and it is not forgotten"


def test_finished_messages_whose_progress_was_deleted_come_again_and_are_counted() -> None:
    worker = history()
    end = len(worker.broker.log)
    owner = successor(worker)
    owner.claim()
    manifests = {key: value for key, value in owner.table.items() if key.count("/") == 1}
    keys = [key for key in owner.table if key not in manifests]

    owner.owner.restore(manifests, keys, owner.load, Edges((0, end)), accept_loss=True)
    owner.read_markers()
    owner.read_queue()
    (loss,) = owner.owner.give_up(0)
    owner.wait(60_000)
    (handout,) = owner.receive(10)

    assert (loss.log, loss.stop, loss.unfinished) == ("markers", end, 4)
    assert handout.offsets == [2, 3, 4, 5, 6, 7, 8, 9]


def test_without_any_manifest_all_that_is_not_there_is_named() -> None:
    worker = Worker().serve()
    worker.send(5)
    worker.table.clear()

    owner, losses = repaired(worker, queue_start=3)

    assert [(loss.log, loss.start, loss.stop, loss.unfinished) for loss in losses] == [("queue", 0, 3, 3)]
    owner.read_queue()
    (handout,) = owner.receive(10)
    assert handout.offsets == [3, 4]


def test_so_many_losses_are_kept_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marq.core.recovery.LOSSES_MAX", 3)
    owner = Worker().serve().owner
    for start in range(0, 50, 10):
        note_loss(owner.partition, Loss("queue", start, start + 5, 2, start))

    assert owner.partition.lost == [
        Loss("queue", 0, 25, 6, 20),
        Loss("queue", 30, 35, 2, 30),
        Loss("queue", 40, 45, 2, 40),
    ]


def test_where_nothing_is_gone_nothing_is_given_up() -> None:
    _, losses = repaired(history(), queue_start=0)

    assert losses == []
