"""Tasks that move the messages of a queue: which queues they may connect, and how many a queue has."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.queue_records import Draft, QueueRecord
from app.service.move_tasks import MoveTasks, OtherTypeError, SameQueueError, UnderWayError
from marq.core.policies import QueueSettings
from marq.errors import NotPossibleError, UnknownQueueError

ENDS = (7, 9)


class Catalog:
    """Queues `a` and `b`, FIFO queues `a.fifo` and `b.fifo`, and the records of those that were changed."""

    default = QueueSettings()

    def __init__(self) -> None:
        self.records: dict[str, QueueRecord] = {}
        self.moving: dict[str, QueueRecord] = {}

    def require(self, queue: str) -> None:
        if queue.removesuffix(".fifo") not in ("a", "b"):
            raise UnknownQueueError(queue)

    def settings_of(self, queue: str) -> QueueSettings:
        return QueueSettings(fifo=queue.endswith(".fifo"))

    async def end_offsets(self, topic: str, partitions: int) -> tuple[int, ...]:
        return ENDS

    async def edit(self, queue: str, draft_of: Any) -> None:
        old = self.records.get(queue)
        draft: Draft | None = draft_of(old)
        if draft is not None:
            self.records[queue] = QueueRecord(1, 1, "by", draft.settings, moves=draft.moves)


def tasks(queue_id: str | None = None) -> MoveTasks:
    async def counts_of(queue: str) -> dict[str, int]:
        return {"ready": 3, "delayed": 2}

    topics = SimpleNamespace(queue="queue", partitions=2)
    operations: Any = SimpleNamespace(
        ownership=SimpleNamespace(topics=topics), catalog=Catalog(), settings=SimpleNamespace(queue_id=queue_id)
    )
    census: Any = SimpleNamespace(counts_of=counts_of)
    return MoveTasks(operations, census)


@pytest.mark.parametrize(("queue", "to"), [("a", "b"), ("a.fifo", "b.fifo"), ("a", ""), ("a.fifo", "")])
def test_a_task_moves_what_was_in_the_queue_when_it_began(queue: str, to: str) -> None:
    async def scenario() -> None:
        desk = tasks()
        task = await desk.begin(queue, to, 5)

        assert (task.to, task.before, task.per_second, task.total, task.state) == (to, ENDS, 5, 5, "running")
        assert desk.tasks_of(queue) == (task,)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("queue", "to", "error"),
    [
        ("a", "b.fifo", OtherTypeError),
        ("a.fifo", "b", OtherTypeError),
        ("a", "a", SameQueueError),
        ("a", "none", UnknownQueueError),
        ("none", "a", UnknownQueueError),
    ],
)
def test_a_task_needs_two_queues_of_the_same_type(queue: str, to: str, error: type[Exception]) -> None:
    async def scenario() -> None:
        desk = tasks()
        with pytest.raises(error):
            await desk.begin(queue, to)
        assert not desk.tasks_of(queue)

    asyncio.run(scenario())


def test_a_queue_has_one_task_at_a_time() -> None:
    async def scenario() -> None:
        desk = tasks()
        first = await desk.begin("a", "b")
        with pytest.raises(UnderWayError):
            await desk.begin("a", "b")
        assert desk.tasks_of("a") == (first,)

    asyncio.run(scenario())


def test_in_topic_mode_nothing_is_moved() -> None:
    async def scenario() -> None:
        with pytest.raises(NotPossibleError):
            await tasks(queue_id="a").begin("a", "b")

    asyncio.run(scenario())
