"""The digest of a partition depends on its logs alone, not on how the state was built."""

from __future__ import annotations

from marq.core.digest import Digest, digest_of, entries
from tests.unit.core_helpers import LEASE_MS, Worker


def digest(worker: Worker) -> Digest:
    return digest_of(entries(worker.owner.partition))


def test_counts_by_queue_and_state() -> None:
    worker = Worker().serve()
    worker.send(5, queue="a")
    worker.send(2, queue="b", headers=[("marq-delay-ms", b"60000")])
    worker.receive(2, queue="a")

    counts, _ = digest(worker)

    assert counts == {
        "a": {"ready": 3, "delayed": 0, "in_flight": 2},
        "b": {"ready": 0, "delayed": 2, "in_flight": 0},
    }


def test_an_empty_partition() -> None:
    assert digest(Worker().serve()) == ({}, "0" * 32)


def test_every_change_of_a_message_changes_it() -> None:
    worker = Worker().serve()
    seen = {digest(worker)[1]}
    worker.send(2)
    seen.add(digest(worker)[1])
    (handout,) = worker.receive(1)
    seen.add(digest(worker)[1])
    worker.owner.release(handout.offsets, handout.receipt)
    worker.flush()
    seen.add(digest(worker)[1])
    (handout,) = worker.receive(1)
    seen.add(digest(worker)[1])
    worker.owner.acked(handout.offsets, handout.receipt)
    worker.flush()
    seen.add(digest(worker)[1])

    assert len(seen) == 6


def test_it_is_the_same_after_a_recovery_from_rows() -> None:
    worker = Worker().serve()
    worker.send(50)
    worker.receive(10)
    worker.owner.hurry_checkpoint()
    worker.checkpoint()
    worker.owner.partition.shed(1 << 40)
    again = Worker(worker.broker, name="w2", table=worker.table, queue_log=worker.queue_log)
    again.claim()
    again.restore()
    again.read_markers(worker.owner.partition.markers_position)

    assert digest(again) == digest(worker)
    assert digest(worker)[0]["q"] == {"ready": 40, "delayed": 0, "in_flight": 10}


def test_the_entry_of_a_message_is_as_documented() -> None:
    from hashlib import blake2b

    worker = Worker().serve()
    worker.send(1, queue="ü")
    worker.owner.acquire(["ü"], 1, "r", worker.clock_ms, lease_ms=LEASE_MS)
    worker.flush()

    expected = int.from_bytes(blake2b("0 ü in_flight 1".encode(), digest_size=16).digest(), "big")

    assert digest(worker)[1] == f"{expected:032x}"
