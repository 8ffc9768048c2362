"""Records that were deleted unread: what was done is no loss; the rest stops an owner, or is recorded as a loss."""

from __future__ import annotations

import pytest

from marq.core import rows
from marq.core.markers import End, encode
from marq.core.owner import Phase
from marq.core.policies import Limits
from marq.core.reading import Unreadable
from marq.core.recovery import Edges, last_read, note_loss
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


def successor(worker: Worker, *, pass_deleted: bool = False) -> Worker:
    limits = Limits(pass_deleted=pass_deleted)
    return Worker(worker.broker, name="w2", table=worker.table, queue_log=worker.queue_log, limits=limits)


def repaired(worker: Worker, queue_start: int, markers_start: int = 0) -> tuple[Worker, list[Loss]]:
    """A new owner that accepts that the logs begin there, and has written that down."""
    owner = successor(worker, pass_deleted=True)
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
    owner.checkpoint()
    return owner, list(owner.owner.partition.lost)


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


def test_no_owner_goes_on_without_markers() -> None:
    owner = successor(history())
    owner.claim()

    with pytest.raises(DeletedError, match="deleted unread"):
        owner.restore((0, 5))


def test_no_owner_goes_on_without_messages_that_were_not_done() -> None:
    owner = successor(history())
    own = owner.claim()
    owner.restore((8, 0), own)
    owner.read_markers()

    assert owner.owner.phase is Phase.FAILED and isinstance(owner.owner.error, DeletedError)
    assert "the queue topic begins at 8, beyond the position 6" in owner.owner.reason
    assert "1 messages that are not known to be done were deleted unread" in owner.owner.reason


def test_deleted_messages_that_were_done_are_no_loss() -> None:
    """The manifest is older than their acknowledgements: only the markers log has them."""
    owner = successor(history())
    own = owner.claim()
    owner.restore((7, 0), own)
    assert owner.owner.passes_deleted
    owner.read_markers()

    assert owner.owner.phase is Phase.SERVING and not owner.owner.passes_deleted
    assert owner.owner.partition.position == 7 and not owner.owner.partition.lost
    owner.read_queue()
    owner.wait(60_000)
    (handout,) = owner.receive(10)
    assert handout.offsets == [2, 7, 8, 9]


def test_without_a_manifest_deleted_messages_that_were_done_are_no_loss() -> None:
    worker = Worker().serve()
    worker.send(5)
    (handout,) = worker.receive(5)
    worker.owner.acked([0, 1, 2], handout.receipt)
    worker.flush()
    worker.table.clear()

    owner = successor(worker)
    owner.claim()
    owner.restore((3, 0))
    owner.read_markers()
    owner.read_queue()
    owner.wait(60_000)

    assert [one.offsets for one in owner.receive(10)] == [[3, 4]] and not owner.owner.partition.lost


def test_acknowledgements_behind_the_own_marker_are_folded_before_anything_is_lost() -> None:
    worker = history()
    owner = successor(worker)
    own = owner.claim()
    late = worker.owner.partition.deliveries[7]
    worker.owner.acked([7], (late.epoch, late.delivery))
    worker.flush()
    end = len(worker.broker.log)
    owner.restore((8, 0), own, end=(10, end))
    owner.read_markers(upto=own + 1)
    assert not owner.owner.serving

    owner.read_markers()
    assert owner.owner.serving and not owner.owner.partition.lost


def test_an_owner_that_a_later_one_has_overtaken_loses_nothing() -> None:
    worker = history()
    owner = successor(worker, pass_deleted=True)
    own = owner.claim()
    later = Worker(worker.broker, name="w3", table=worker.table, queue_log=worker.queue_log)
    later.claim()
    owner.restore((8, 0), own, end=(10, len(worker.broker.log)))
    owner.read_markers()

    assert owner.owner.phase is Phase.LOST and not owner.owner.partition.lost


def test_while_it_serves_an_owner_keeps_what_it_has_read() -> None:
    worker = Worker(limits=Limits(pass_deleted=True)).serve()
    worker.send(4)
    (handout,) = worker.receive(1)
    for _ in range(3):
        worker.queue_log.append(worker.record())
    worker.owner.begins_later(6, len(worker.broker.log), worker.clock_ms)

    partition = worker.owner.partition
    assert not worker.owner.passes_deleted and partition.position == 6
    assert [(loss.start, loss.stop, loss.unfinished) for loss in partition.lost] == [(4, 6, 2)]
    worker.owner.acked(handout.offsets, handout.receipt)
    worker.flush()
    worker.read_queue()
    (rest,) = worker.receive(10)
    assert rest.offsets == [1, 2, 3, 6]


def with_unreadable(*, queue_id: str | None = "q") -> Worker:
    """Eight messages were sent. 2 to 5 are unreadable, 0 is done, and 1, 6 and 7 are in work."""
    worker = Worker(limits=Limits(pass_deleted=queue_id is not None, queue_id=queue_id)).serve()
    while len(worker.queue_log) < 8:
        worker.queue_log.append(worker.record())
    log = worker.queue_log
    assert worker.owner.ingest(0, 8, [*log[:2], Unreadable(2, -1, 6, "rotten"), *log[6:]], worker.clock_ms)
    (handout,) = worker.receive(3)
    worker.owner.acked([0], handout.receipt)
    worker.flush()
    return worker


def lost(worker: Worker) -> list[tuple[int, int, int]]:
    return [(loss.start, loss.stop, loss.unfinished) for loss in worker.owner.partition.lost]


def test_what_retention_deletes_of_an_unreadable_range_is_lost_once_and_the_rest_stays_unreadable() -> None:
    worker = with_unreadable()
    owner, partition, end = worker.owner, worker.owner.partition, len(worker.broker.log)

    owner.begins_later(4, end, worker.clock_ms)
    assert lost(worker) == [(2, 4, 2)] and owner.take_losses() == partition.lost
    assert partition.unreadable_ranges() == [(4, 6)] and partition.counters["deleted_unread"] == 2

    owner.begins_later(4, end, worker.clock_ms)
    assert not owner.lacks(4) and not owner.take_losses()
    owner.begins_later(8, end, worker.clock_ms)
    assert lost(worker) == [(2, 4, 2), (4, 6, 2)] and not partition.missed
    assert partition.position == 8 and sorted(partition.messages) == [1, 6, 7], "what was read is kept"


def test_the_next_owner_loses_what_was_deleted_of_the_ranges_that_the_manifest_names() -> None:
    worker = with_unreadable()
    worker.clock_ms += 20_000
    worker.owner.hurry_checkpoint()
    worker.checkpoint()
    assert manifest_of(worker).unreadable == [2, 6]
    owner = Worker(worker.broker, name="w2", table=worker.table, queue_log=worker.queue_log, limits=worker.owner.limits)
    own = owner.claim()
    owner.restore((5, 0), own, end=(8, len(worker.broker.log)))
    assert owner.owner.passes_deleted and not owner.owner.partition.lost, "their ends may be in the markers"
    owner.read_markers()

    assert owner.owner.serving and lost(owner) == [(2, 5, 3)]
    assert owner.owner.partition.unreadable_ranges() == [(5, 6)]
    owner.clock_ms += 20_000
    owner.owner.hurry_checkpoint()
    owner.checkpoint()
    assert manifest_of(owner).unreadable == [5, 6] and manifest_of(owner).lost == owner.owner.partition.lost


def test_a_purge_ended_what_was_unreadable_before_it_was_deleted() -> None:
    worker = with_unreadable()
    worker.owner.purge("q", 3)
    worker.flush()
    worker.owner.begins_later(8, len(worker.broker.log), worker.clock_ms)

    assert lost(worker) == [(3, 6, 3)]


def test_in_a_topic_of_marqs_own_an_unreadable_range_stays_one_until_it_is_repaired() -> None:
    worker = with_unreadable(queue_id=None)
    worker.owner.begins_later(4, len(worker.broker.log), worker.clock_ms)

    assert worker.owner.serving and not worker.owner.partition.lost
    assert worker.owner.partition.unreadable_ranges() == [(2, 6)]


def test_a_record_that_was_unreadable_when_it_ended_may_be_newer_than_all_that_were_read() -> None:
    """A replica that has it is back: nothing was written anew."""
    worker = with_unreadable(queue_id=None)
    worker.clock_ms += 20_000
    worker.broker.append(encode([End(worker.owner.epoch, [2, 6], "poison")], "repair", 0))
    worker.read_markers()
    worker.owner.hurry_checkpoint()
    worker.checkpoint()

    assert not manifest_of(worker).unreadable
    assert not last_read(manifest_of(worker)).is_newer(3, worker.broker.now_ms + 60_000)


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
    owner = successor(worker, pass_deleted=True)
    owner.claim()
    manifests = {key: value for key, value in owner.table.items() if key.count("/") == 1}
    keys = [key for key in owner.table if key not in manifests]

    owner.owner.restore(manifests, keys, owner.load, Edges((0, end)), accept_loss=True)
    owner.read_markers()
    owner.read_queue()
    (loss,) = owner.owner.partition.lost
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
