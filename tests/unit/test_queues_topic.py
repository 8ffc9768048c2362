"""The errors when Kafka does not answer, and changes of queues that cross each other on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine import catalog as module
from app.engine.catalog import AUTO_PREFIX, Catalog
from app.engine.queues_topic import ends_of
from app.settings import Settings
from marq.errors import UnavailableError


def test_an_error_without_words_is_named() -> None:
    async def silent(_: Any) -> Any:
        raise TimeoutError

    with pytest.raises(UnavailableError, match="ends: TimeoutError"):
        asyncio.run(ends_of("topic", 1, silent))


class Topic:
    """The topic of queues, in memory. A record is on its way until the test lets it arrive, or for a moment."""

    name = "queues"
    position = 0

    def __init__(self) -> None:
        self.log: list[tuple[bytes, bytes | None]] = []
        self.readers: list[Catalog] = []
        self.before: Callable[[bytes, bytes | None], Awaitable[None]] | None = None

    async def write(self, key: bytes, value: bytes | None) -> None:
        if self.before is not None:
            await self.before(key, value)
        self.log.append((key, value))
        for reader in self.readers:
            reader._take(SimpleNamespace(key=key, value=value, offset=len(self.log) - 1))

    def worker(self, upto: int | None = None) -> Catalog:
        """The catalog of one more worker, which has read the log."""
        catalog = Catalog(Settings(), lambda: "queues")
        catalog.topic = self  # type: ignore[assignment]
        for offset, (key, value) in enumerate(self.log[:upto]):
            catalog._take(SimpleNamespace(key=key, value=value, offset=offset))
        self.readers.append(catalog)
        return catalog

    async def make_and_delete(self, catalog: Catalog, queue: str) -> None:
        await catalog.create(queue, {"fifo": False})
        await catalog.purge(queue, (1,), delete=True)
        await catalog.purged(queue, catalog.records[queue].by)


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    monkeypatch.setattr(module, "DELETED_KEPT_S", -1.0)
    monkeypatch.setattr(module, "OVERWRITTEN_S", -1.0)
    return Topic()


@pytest.mark.parametrize("moment", ["a", "b"], ids=["while others are forgotten", "while it is forgotten"])
def test_a_queue_that_is_made_anew_while_deleted_ones_are_forgotten_keeps_its_settings(
    topic: Topic, moment: str
) -> None:
    async def scenario() -> None:
        owner, other = topic.worker(), topic.worker()
        for queue in ("a", "b"):
            await topic.make_and_delete(owner, queue)

        async def make_anew(key: bytes, value: bytes | None) -> None:
            if key.decode() == moment and value is None:
                topic.before = None
                await other.create("b", {"max_receives": 3})

        topic.before = make_anew
        await owner.forget_deleted()
        assert [one.settings_of("b").max_receives for one in (owner, other, topic.worker())] == [3, 3, 3]
        assert not owner.exists("a") and "a" not in owner.records

        # what compaction keeps is the last record of the queue
        await owner.repeat_overwritten()
        _, value = [record for record in topic.log if record[0] == b"b"][-1]
        assert value is not None and b"max_receives" in value

    asyncio.run(scenario())


def test_a_queue_that_was_forgotten_does_not_come_back_because_a_message_had_made_it(topic: Topic) -> None:
    async def scenario() -> None:
        owner = topic.worker()
        await topic.make_and_delete(owner, "a")
        await topic.write(AUTO_PREFIX + b"a", b"1")  # the worker that deleted it has not removed this
        await owner.forget_deleted()
        assert not owner.exists("a") and not topic.worker().exists("a")

    asyncio.run(scenario())
