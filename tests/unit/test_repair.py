"""`repair`: what it writes, in which order, and what it refuses (`tests/integration/test_repair.py`: with Kafka)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from app.engine import repair as module
from app.engine.repair import Repair, lines_of
from marq.core import markers as m
from marq.core.markers import Own
from marq.core.recovery import Edges, LastRead
from marq.core.rows import Loss, decode_manifest, encode_manifest
from marq.core.world import World
from marq.errors import NotPossibleError, RewrittenError
from tests.unit.core_helpers import Worker
from tests.unit.test_owner_repair import history, next_owner

TOPICS = SimpleNamespace(
    queue="q",
    markers="m",
    partitions=1,
    changelogs={"messages": "c-messages", "markers": "c-markers", "progress": "c-progress"},
)
SETTINGS = SimpleNamespace(queue_id=None)


class Logs:
    """The logs and tables of a worker's partition."""

    topics = TOPICS

    def __init__(self, worker: Worker, queue_start: int, markers_start: int = 0) -> None:
        self.worker = worker
        self.begin = queue_start, markers_start
        self.here = World("cluster", "queue", "markers")
        self.written: list[tuple[str, str]] = []
        self.meanwhile: Any = lambda: None  # happens after the own marker was appended

    async def tables(self) -> dict[str, bytes]:
        return dict(self.worker.table)

    async def world(self) -> World:
        return self.here

    async def edges(self, read: LastRead | None) -> Edges:
        return Edges(self.begin)

    async def end(self, topic: str) -> int:
        return len(self.worker.broker.log)

    async def read(self, topic: str, start: int, stop: int) -> list[Any]:
        return list(self.worker.broker.log[start:stop])

    async def append(self, topic: str, key: bytes | None, value: bytes) -> int:
        self.written.append((topic, (key or b"").decode()))
        if key is None:
            offset = self.worker.broker.append(value)
            self.meanwhile()
            return offset
        self.worker.table[key.decode()] = value
        return 0


def repair(logs: Logs, accept_loss: bool, accept_copy: bool = False) -> Repair:
    return asyncio.run(module._repair(SETTINGS, TOPICS, logs, 0, accept_loss, accept_copy))  # type: ignore[arg-type]


def made_elsewhere(worker: Worker) -> None:
    """Its manifests say that they are of another cluster."""
    for key, value in worker.table.items():
        if key.count("/") == 1:
            worker.table[key] = encode_manifest(replace(decode_manifest(value), world=World("elsewhere")))


def test_what_is_gone_is_named_and_nothing_is_written_without_being_accepted() -> None:
    logs = Logs(history(), queue_start=8)
    found = repair(logs, accept_loss=False)

    assert not found.done and [(loss.start, loss.stop, loss.unfinished) for loss in found.losses] == [(6, 8, 1)]
    assert logs.written == []
    assert "nothing was changed" in lines_of(found)[-1]


def test_accepted_it_is_an_own_marker_then_rows_then_the_manifest() -> None:
    logs = Logs(history(), queue_start=8)
    found = repair(logs, accept_loss=True)

    assert found.done and len(found.losses) == 1
    topics = [topic for topic, _ in logs.written]
    assert (topics[0], topics[-1]) == ("m", "c-progress")
    assert topics.count("m") == topics.count("c-progress") == 1
    (handout,) = next_owner(logs.worker, queue_start=8).receive(10)
    assert handout.offsets == [2, 8, 9]


def test_a_second_loss_is_told_alone_and_both_are_kept() -> None:
    worker = history()
    repair(Logs(worker, queue_start=8), accept_loss=True)
    found = repair(Logs(worker, queue_start=9), accept_loss=True)

    assert [(loss.start, loss.stop) for loss in found.losses] == [(8, 9)]
    assert repair(Logs(worker, queue_start=9), accept_loss=True) == Repair(0, [], False)


def test_where_nothing_is_missing_nothing_is_written() -> None:
    logs = Logs(history(), queue_start=0)

    assert repair(logs, accept_loss=True) == Repair(0, [], False)
    assert logs.written == []


def test_records_whose_messages_were_done_need_no_repair() -> None:
    logs = Logs(history(), queue_start=7)
    found = repair(logs, accept_loss=True)

    assert not found.done and logs.written == []
    assert lines_of(found) == [
        "partition 0: offsets 6 to 6 of the queue topic (1 records) were deleted unread, or are whole on no "
        "replica; all messages among them are done: 0 lost",
        "partition 0: there is nothing to repair, workers go on by themselves",
    ]


def test_a_worker_that_wrote_a_manifest_meanwhile_has_the_partition() -> None:
    worker = history()
    logs = Logs(worker, queue_start=8)

    def take_over() -> None:
        logs.begin = 0, 0
        other = Worker(worker.broker, name="w9", table=worker.table, queue_log=worker.queue_log)
        worker.broker.append(m.encode([Own("w9", other.owner.nonce)], other.owner.nonce, 0))
        other.restore()
        other.read_markers()
        other.read_queue()
        other.checkpoint()

    logs.meanwhile = take_over
    with pytest.raises(NotPossibleError, match="has taken partition 0 meanwhile"):
        repair(logs, accept_loss=True)
    assert [topic for topic, _ in logs.written] == ["m"]


def test_a_state_of_other_logs_is_taken_only_as_a_copy_and_then_is_of_these() -> None:
    worker = history()
    made_elsewhere(worker)
    logs = Logs(worker, queue_start=0)
    with pytest.raises(RewrittenError, match="cluster elsewhere, now cluster"):
        repair(logs, accept_loss=True)
    assert logs.written == []

    found = repair(logs, accept_loss=False, accept_copy=True)
    assert found == Repair(0, [], True, copied=True)
    assert lines_of(found) == ["partition 0: goes on with these logs, which is written down in its manifest"]
    (manifest,) = [decode_manifest(value) for key, value in worker.table.items() if key in manifests_of(logs)]
    assert manifest.world == logs.here
    assert repair(logs, accept_loss=False, accept_copy=True) == Repair(0, [], False), "there is nothing more to accept"


def manifests_of(logs: Logs) -> set[str]:
    return {key for topic, key in logs.written if topic == "c-progress"}


def test_logs_with_other_offsets_are_no_copy() -> None:
    worker = history()
    made_elsewhere(worker)
    worker.broker.log.insert(0, worker.broker.log[1])  # no own marker is where it was
    logs = Logs(worker, queue_start=0)
    with pytest.raises(NotPossibleError, match="offset 0 of the markers topic is no own marker"):
        repair(logs, accept_loss=False, accept_copy=True)
    assert logs.written == []


def test_lost_markers_are_told_as_messages_that_come_again() -> None:
    (line, _) = lines_of(Repair(3, [Loss("markers", 5, 9, 4, 0)], False))

    assert line == (
        "partition 3: offsets 5 to 8 of the markers topic (4 records) were deleted unread, or are whole on no "
        "replica; of 4 messages, those that they said are done come again"
    )
