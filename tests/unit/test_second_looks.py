"""Second looks at what was unreadable: what Kafka has deleted since is not looked at, and the rest is."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from unittest.mock import Mock

import pytest

from app.engine.owned_partition import OwnedPartition
from app.engine.second_looks import SecondLooks, unreadable_in
from marq.core.policies import Limits
from marq.core.reading import Unreadable
from tests.unit.core_helpers import Worker


class Desk:
    """The ownership of one partition, and a Kafka that has all of its log from `start` on whole again."""

    def __init__(self, start: int | None, *, queue_id: str | None) -> None:
        self.worker = Worker(limits=Limits(pass_deleted=queue_id is not None, queue_id=queue_id)).serve()
        log = self.worker.queue_log
        while len(log) < 8:
            log.append(self.worker.record())
        self.worker.owner.ingest(0, 8, [*log[:2], Unreadable(2, -1, 6, "rotten"), *log[6:]], 0)
        self.start, self.asked = start, list[tuple[int, int]]()
        owned = self.entry = OwnedPartition(0, 1, self.worker.owner, Mock())
        self.owned, self.log, self.topics = {0: owned}, logging.getLogger(), Mock(queue="marq.queue")
        self.app = Mock(consumer=self)
        self.tasks: list[asyncio.Task[None]] = []

    async def queue_start(self, owned: OwnedPartition) -> int | None:
        if self.start is not None:
            owned.owner.begins_later(self.start, len(self.worker.broker.log), 0)
        return self.start

    async def read_again(self, _: object, start: int, stop: int) -> tuple[int, list[Any]]:
        self.asked.append((start, stop))
        return stop, self.worker.queue_log[start:stop]

    def drain(self, owned: OwnedPartition) -> None:
        pass

    def spawn(self, coroutine: Any) -> asyncio.Task[None]:
        self.tasks.append(asyncio.ensure_future(coroutine))
        return self.tasks[-1]

    def look(self) -> None:
        async def looking() -> None:
            SecondLooks(self, lambda: 1).look(self.owned)  # type: ignore[arg-type]
            await asyncio.gather(*self.tasks)

        asyncio.run(looking())


@pytest.mark.parametrize(
    ("start", "asked", "lost"),
    [(None, [(2, 6)], []), (0, [(2, 6)], []), (4, [(4, 6)], [(2, 4)]), (7, [], [(2, 6)])],
    ids=["not known", "nothing", "a part", "all"],
)
def test_what_was_deleted_is_lost_and_the_rest_is_read(start: int | None, asked: Any, lost: Any) -> None:
    desk = Desk(start, queue_id="q")
    desk.look()

    assert desk.asked == asked and not unreadable_in(desk.owned) and not desk.entry.looking
    assert [(one.start, one.stop) for one in desk.entry.owner.partition.lost] == lost


def test_in_a_topic_of_marqs_own_what_was_deleted_stays_named() -> None:
    desk = Desk(4, queue_id=None)
    desk.look()

    assert desk.asked == [(4, 6)] and desk.entry.owner.partition.unreadable_ranges() == [(2, 4)]
