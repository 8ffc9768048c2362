"""After an error in a fold, a record may have taken effect only in part. Such a state must have no effects."""

from __future__ import annotations

from typing import Any

import pytest

from marq.core.markers import Batch
from marq.core.owner import Phase
from marq.core.partition import Partition
from tests.unit.core_helpers import LEASE_MS, Worker


def broken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on this part of every fold raises, after it has changed something."""

    def raises(partition: Partition, *args: Any) -> Any:
        partition.counters["delivered"] += 1
        raise KeyError("planted")

    monkeypatch.setattr(Partition, name, raises)


def test_a_fold_that_raises_stops_the_owner_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker().serve()
    worker.send(2)
    worker.receive(1)
    broken(monkeypatch, "_end")

    worker.owner.acked([0], (worker.owner.epoch, 1))
    worker.flush()
    worker.read_markers()

    assert worker.owner.phase is Phase.FAILED
    assert "planted" in worker.owner.reason
    assert isinstance(worker.owner.error, KeyError)


def test_nothing_follows_a_fold_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker().serve()
    worker.send(3)
    broken(monkeypatch, "_start")
    worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=LEASE_MS)
    worker.flush()
    worker.read_markers()
    before = worker.owner.partition.markers_position, dict(worker.owner.partition.counters)
    monkeypatch.undo()

    position = worker.owner.partition.markers_position
    worker.owner.read_markers(position, position + 1, [], worker.clock_ms)
    worker.owner.acknowledged(9, position, worker.broker.now_ms, [], worker.clock_ms)
    worker.owner.ingest(3, 4, [])

    assert worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=LEASE_MS) is None
    assert worker.owner.work(worker.clock_ms + 60_000) is None
    assert worker.owner.step(worker.clock_ms + 60_000) is None
    assert not worker.owner.tick(worker.clock_ms + 60_000)
    assert not worker.handouts()
    assert (worker.owner.partition.markers_position, dict(worker.owner.partition.counters)) == before


def test_a_record_folded_at_once_stops_the_owner_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker().serve()
    worker.send(1)
    broken(monkeypatch, "_start")
    worker.owner.acquire(["q"], 1, "r", worker.clock_ms, lease_ms=LEASE_MS)
    markers = worker.owner.take_appends()
    worker.owner.sent(1, markers)

    position = worker.owner.partition.markers_position
    worker.owner.acknowledged(1, position, worker.broker.now_ms, markers, worker.clock_ms)

    assert worker.owner.phase is Phase.FAILED


def test_what_comes_after_the_fold_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker().serve()

    def raises(*args: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(worker.owner, "_settle", raises)
    worker.owner._sent[1] = []
    worker.owner._fold(
        worker.owner.partition.markers_position, worker.broker.now_ms, Batch(1, [], worker.owner.nonce, 1), 0
    )
    assert worker.owner.phase is Phase.FAILED
