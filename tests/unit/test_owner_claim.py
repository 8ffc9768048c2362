"""Claiming a partition, catching up, serving, and losing it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from marq.core import markers
from marq.core.markers import End, Own, Release, Start, Tick
from marq.core.owner import Phase
from marq.core.policies import Limits
from marq.core.reading import Undecodable
from marq.core.recovery import LastRead, last_read, newest
from marq.core.rows import Manifest, Record, encode_manifest
from marq.core.state import NEVER_MS, SKEW_MS
from marq.core.world import World
from marq.errors import RewrittenError, RowError
from tests.unit.core_helpers import EPOCH_MS, LEASE_MS, Broker, Worker


def test_nothing_is_read_before_the_tables_were() -> None:
    worker = Worker()
    worker.claim()

    assert not worker.owner.read_markers(0, 1, worker.broker.log, 0)
    assert worker.owner.phase is Phase.CLAIMING


def test_a_worker_serves_once_its_own_marker_is_folded() -> None:
    worker = Worker()
    worker.broker.append(markers.encode([Tick()]))
    epoch = worker.claim()
    worker.restore()
    before = worker.owner.phase

    worker.read_markers()

    assert before is Phase.CATCHING_UP
    assert worker.owner.serving
    assert worker.owner.epoch == epoch == 1


def test_while_catching_up_it_delivers_nothing_and_takes_no_effect() -> None:
    worker = Worker()
    worker.send(3)
    worker.claim()
    worker.restore()
    worker.read_queue()

    assert worker.owner.acquire(["q"], 10, "r", 0, lease_ms=LEASE_MS) is None
    assert worker.owner.work(0) is None
    assert not worker.owner.tick(10_000)
    assert worker.owner.step(10_000) is None
    worker.owner.ended_as("dead", [0])
    worker.owner.purge("q", 3)
    assert worker.appends == []


def test_starts_of_the_former_owner_hold_until_their_leases_are_over() -> None:
    first = Worker().serve()
    first.send(2)
    first.receive(1, lease_ms=5_000)

    second = Worker(first.broker, name="w2", queue_log=first.queue_log).serve()
    now = [h.offsets for h in second.receive(10)]
    second.wait(6_000)

    assert now == [[1]]
    assert [h.offsets for h in second.receive(10)] == [[0]]
    assert second.owner.partition.receives(0) == 2


def test_what_the_former_owner_acked_is_done() -> None:
    first = Worker().serve()
    first.send(2)
    (handout,) = first.receive(1)
    first.owner.acked(handout.offsets, handout.receipt)
    first.flush()

    second = Worker(first.broker, name="w2", queue_log=first.queue_log).serve()

    assert [h.offsets for h in second.receive(10)] == [[1]]


def test_a_start_by_the_former_owner_after_the_own_marker_is_ignored() -> None:
    first = Worker().serve()
    first.send(1)
    first.owner.acquire(["q"], 1, "r", first.clock_ms, lease_ms=LEASE_MS)
    second = Worker(first.broker, name="w2", queue_log=first.queue_log)
    second.claim()
    first.append()
    second.restore()
    second.read_markers()
    second.read_queue()

    first.read_markers()

    assert first.owner.phase is Phase.LOST
    assert first.handouts() == []
    assert [h.offsets for h in second.receive()] == [[0]]


def test_a_foreign_own_marker_ends_everything_at_once() -> None:
    worker = Worker().serve()
    worker.send(3)
    worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=LEASE_MS)
    worker.append()
    worker.broker.append(markers.encode([Own("other", "other/1")]))

    worker.read_markers()

    assert worker.owner.phase is Phase.LOST
    assert not worker.owner.serving
    assert worker.handouts() == []
    assert worker.appends == [Release(worker.owner.epoch, 1, [0, 1], counted=False)], "what nobody got"
    assert worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=LEASE_MS) is None
    assert worker.owner.work(worker.clock_ms) is None
    assert worker.owner.step(worker.clock_ms + 60_000) is None
    assert not worker.owner.tick(worker.clock_ms + 60_000)


def test_an_own_marker_of_another_attempt_of_the_same_worker_is_foreign() -> None:
    worker = Worker(nonce="w1/first").serve()

    worker.broker.append(markers.encode([Own("w1", "w1/second")]))
    worker.read_markers()

    assert worker.owner.phase is Phase.LOST


def test_an_own_marker_that_was_appended_twice_ends_the_attempt() -> None:
    """Deliveries of the first are void from the second on: none of them may stay reserved for ever."""
    worker = Worker().serve()

    worker.claim()
    worker.read_markers()

    assert worker.owner.phase is Phase.LOST


def test_older_own_markers_of_others_are_history() -> None:
    broker = Broker()
    for other in ("a", "b"):
        broker.append(markers.encode([Own(other, f"{other}/1")]))

    assert Worker(broker).serve().owner.epoch == 2


# ---------------------------------------------------------------------- reading markers


def test_a_chunk_of_markers_beyond_what_was_folded_is_refused() -> None:
    worker = Worker().serve()

    assert not worker.owner.read_markers(5, 6, [], worker.clock_ms)
    assert worker.owner.partition.markers_position == 1


def test_a_record_that_is_read_twice_is_folded_once() -> None:
    worker = Worker().serve()
    worker.send(1)
    worker.receive(1, lease_ms=0)
    worker.flush()
    before = worker.owner.partition.receives(0)

    assert worker.owner.read_markers(0, len(worker.broker.log), worker.broker.log, worker.clock_ms)

    assert worker.owner.partition.receives(0) == before


def test_control_records_in_the_markers_topic_are_passed_over() -> None:
    worker = Worker().serve()

    assert worker.owner.read_markers(1, 4, [], worker.clock_ms)
    assert worker.owner.partition.markers_position == 4


@pytest.mark.parametrize("value", [None, b"", b"junk", b'{"v": 0, "markers": []}', b'{"v":1,"markers":[{"type":"?"}]}'])
def test_an_unreadable_record_changes_nothing_but_the_clock(value: bytes | None) -> None:
    worker = Worker().serve()
    worker.send(1)
    worker.broker.now_ms += 700
    worker.broker.append(value)

    worker.read_markers()

    assert worker.owner.partition.clock_ms == 700
    assert worker.owner.partition.counters["unreadable_markers"] == 1
    assert [h.offsets for h in worker.receive()] == [[0]]


@pytest.mark.parametrize(("timestamp_ms", "passed_ms"), [(EPOCH_MS + 300, 300), (-1, 0)])
def test_a_record_that_could_not_be_decoded_changes_nothing_but_the_clock(timestamp_ms: int, passed_ms: int) -> None:
    worker = Worker().serve()
    before = worker.owner.partition.clock_ms
    worker.broker.log.append(Undecodable(len(worker.broker.log), timestamp_ms, b"\0raw", "why"))  # type: ignore[arg-type]

    worker.read_markers()

    partition = worker.owner.partition
    assert partition.counters["unreadable_markers"] == 1
    assert partition.markers_position == len(worker.broker.log)
    assert partition.clock_ms - before == passed_ms
    assert partition.last_timestamp_ms == EPOCH_MS + passed_ms


def test_acks_of_receivers_may_come_from_any_server() -> None:
    worker = Worker().serve()
    worker.send(1)
    (handout,) = worker.receive()
    epoch, delivery = handout.receipt

    worker.broker.append(markers.encode([End(epoch, [0, 1], "acked", delivery)], "somebody", 1))
    worker.read_markers()

    assert worker.owner.partition.messages == {}


# ---------------------------------------------------------------------- recovery


def test_in_topic_mode_the_users_log_is_read_from_where_it_begins() -> None:
    worker = Worker(limits=Limits(queue_id="events"))
    worker.claim()

    worker.restore(log_start=(10_000_000, 0))

    assert worker.owner.partition.position == 10_000_000


def test_a_log_whose_beginning_was_deleted_has_a_manifest_or_is_an_error() -> None:
    worker = Worker()
    worker.claim()

    with pytest.raises(RowError, match="there is no manifest"):
        worker.restore(log_start=(0, 7))


def test_a_manifest_of_a_later_epoch_means_that_the_claim_is_lost() -> None:
    first = Worker().serve()
    slow = Worker(first.broker, name="slow")
    claimed = slow.claim()
    second = Worker(first.broker, name="w2").serve()
    second.send(1)
    second.checkpoint()
    slow.table = second.table

    slow.restore(own_offset=claimed)

    assert slow.owner.phase is Phase.LOST


def test_the_newest_manifest_is_taken() -> None:
    first = Worker().serve()
    first.send(3)
    first.checkpoint()
    second = Worker(first.broker, name="w2", queue_log=first.queue_log, table=first.table).serve()
    (handout,) = second.receive(1)
    second.owner.acked(handout.offsets, handout.receipt)
    second.flush()
    stale = dict(first.table)
    second.checkpoint()

    table = {**stale, **second.table}
    third = Worker(first.broker, name="w3", queue_log=first.queue_log, table=table)
    third.claim()
    third.restore()

    assert third.owner.partition.own == second.owner.epoch


def test_markers_that_begin_beyond_the_manifest_are_a_loud_error() -> None:
    """For messages see `test_owner_repair.py`: the markers that end them have to be folded first."""
    first = Worker().serve()
    first.send(2)
    first.checkpoint()
    second = Worker(first.broker, name="w2", table=first.table)
    second.claim()

    with pytest.raises(RowError, match="the markers topic begins at"):
        second.restore((0, 99))


@pytest.mark.parametrize(
    ("end", "newer", "what"),
    [
        ((1, 99), None, "the queue topic ends at 1, before the position 2"),
        ((2, 0), None, "the markers topic ends at 0, before the position"),
        ((9, 99), 1, "record 1 of the queue topic is newer than all that were read there"),
    ],
    ids=["queue", "markers", "written anew"],
)
def test_a_log_that_has_lost_what_was_read_is_a_loud_error(end: tuple[int, int], newer: int | None, what: str) -> None:
    """Whoever went on would pass over the messages that get these offsets now."""
    first = Worker().serve()
    first.send(2)
    first.owner.hurry_checkpoint()
    first.checkpoint()
    second = Worker(first.broker, name="w2", table=first.table)
    second.claim()

    with pytest.raises(RewrittenError, match=what):
        second.restore(end=end, newer=newer)
    second.restore(end=(2, 99), newer=2)  # what comes after it is new, of course


HERE = World("cluster-b", "queue-b", "markers-b")


def manifest_of(worker: Worker, world: World | None = None) -> Manifest:
    """The newest manifest in the worker's table."""
    found = newest((value for key, value in worker.table.items() if key.count("/") == 1), world)
    assert found is not None
    return found


def checkpointed(world: World | None) -> Worker:
    """A worker that has two messages in its tables, which say of which world they are."""
    worker = Worker()
    worker.claim()
    worker.restore(world=world)
    worker.read_markers()
    worker.send(2)
    worker.owner.hurry_checkpoint()
    worker.checkpoint()
    return worker


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (World("cluster-a", "queue-b", "markers-b"), "cluster cluster-a, now cluster-b"),
        (World("cluster-b", "queue-a", "markers-b"), "queue topic queue-a, now queue-b"),
        (World("cluster-b", "queue-b", "markers-a"), "markers topic markers-a, now markers-b"),
        (World("cluster-a"), "cluster cluster-a, now cluster-b"),
    ],
    ids=["cluster", "queue", "markers", "Kafka without ids of topics"],
)
def test_a_state_that_was_made_from_other_logs_is_not_taken(other: World, what: str) -> None:
    """The logs reach as far as its positions, so nothing else tells that these are others."""
    first = checkpointed(other)
    second = Worker(first.broker, name="w2", table=first.table)
    second.claim()

    with pytest.raises(RewrittenError, match=what):
        second.restore(world=HERE)


@pytest.mark.parametrize("told", [None, World("cluster-b"), HERE], ids=["earlier version", "no ids of topics", "same"])
def test_a_state_that_may_be_of_these_logs_is_taken_and_says_so_from_then_on(told: World | None) -> None:
    first = checkpointed(told)
    second = Worker(first.broker, name="w2", queue_log=first.queue_log, table=first.table)
    second.claim()
    second.restore(world=HERE)
    second.read_markers()
    assert [handout.offsets for handout in second.receive(2)] == [[0, 1]]
    second.checkpoint()
    assert manifest_of(second).world == HERE


def test_a_manifest_of_another_world_does_not_count_whatever_its_epoch_and_is_deleted() -> None:
    first = checkpointed(HERE)
    foreign = replace(manifest_of(first), epoch=99, position=77, markers_position=77, world=World("cluster-a"))
    first.table["0/99"] = encode_manifest(foreign)
    assert manifest_of(first, HERE).epoch == first.owner.epoch

    second = Worker(first.broker, name="w2", queue_log=first.queue_log, table=first.table)
    second.claim()
    second.restore(world=HERE)
    second.read_markers()
    assert [handout.offsets for handout in second.receive(2)] == [[0, 1]]
    second.checkpoint()
    assert [key for key in second.table if key.count("/") == 1] == [f"0/{second.owner.epoch}"]


def test_the_newest_of_all_that_was_read_is_remembered() -> None:
    first = Worker().serve()
    times = [5_000, 9_000, 7_000]
    records = [Record(i, at_ms, b"q", b"x") for i, at_ms in enumerate(times)]
    first.owner.partition.ingest(0, 3, records)
    first.owner.hurry_checkpoint()
    first.checkpoint()
    assert last_read(manifest_of(first)) == LastRead(3, 9_000)

    second = Worker(first.broker, name="w2", table=first.table, queue_log=first.queue_log).serve()
    second.owner.partition.ingest(3, 4, [Record(3, 8_000, b"q", b"x")])
    second.owner.hurry_checkpoint()
    second.checkpoint()
    assert last_read(manifest_of(second)) == LastRead(4, 9_000)


@pytest.mark.parametrize(("queue_id", "newest_ms"), [(None, 5_000 + SKEW_MS), ("topic", NEVER_MS)])
def test_a_manifest_of_an_earlier_version_knows_it_at_least(queue_id: str | None, newest_ms: int) -> None:
    first = Worker().serve()
    first.send(2)
    first.owner.hurry_checkpoint()
    first.checkpoint()
    manifest = manifest_of(first)
    manifest.newest_ms, manifest.last_timestamp_ms = None, 5_000
    assert last_read(manifest, queue_id) == LastRead(2, newest_ms)


def test_a_named_row_that_is_missing_is_an_error() -> None:
    first = Worker().serve()
    first.send(2)
    first.owner.hurry_checkpoint()
    first.checkpoint()
    table = {key: value for key, value in first.table.items() if "messages" not in key}
    second = Worker(first.broker, name="w2", table=table)
    second.claim()

    with pytest.raises(RowError, match="not in the table"):
        second.restore()


def test_rows_that_no_manifest_names_are_ignored_and_then_deleted() -> None:
    first = Worker().serve()
    first.send(2)
    first.checkpoint()
    first.table["0/0/messages/77"] = b"half a checkpoint of a worker that died"

    second = Worker(first.broker, name="w2", queue_log=first.queue_log, table=first.table).serve()
    second.receive(1)
    second.checkpoint()

    assert "0/0/messages/77" not in second.table
    assert [key for key in second.table if key.count("/") == 1] == [f"0/{second.owner.epoch}"]


def test_a_delivery_of_a_zombie_in_an_unfolded_epoch_is_not_its_owners() -> None:
    worker = Worker().serve()
    worker.send(1)
    worker.broker.append(markers.encode([Start(99, 1, [0, 1], LEASE_MS)]))

    worker.read_markers()

    assert [h.offsets for h in worker.receive()] == [[0]]
