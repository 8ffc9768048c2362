"""What must not wait behind large records is written by a producer of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.streaming.producer import IdempotentProducer


class Lane(IdempotentProducer):
    """A producer that only notes what it is given."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.lanes = {}
        self.pending_bytes = 0
        self.noted: list[tuple[str, bytes | None]] = []
        self.children: list[Any] = []
        self._waiting: dict[str, Any] = {}
        self._known: set[Any] = set()
        self.transport = self.loop = self.beacon = None  # type: ignore[assignment, misc]

    loop: Any = None

    async def add_runtime_dependency(self, service: Any) -> Any:
        self.children.append(service)

    def _append_later(self, topic: str, record: tuple[Any, ...]) -> Any:
        self.noted.append((topic, record[2]))
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("run", [False, True])
def test_records_of_a_lane_are_written_by_its_producer(run: bool) -> None:
    async def scenario() -> None:
        producer = Lane()
        await producer.divide(["markers"], ["rows-1", "rows-2"])
        markers, rows = producer.children

        for topic in ("queue", "markers", "rows-1", "rows-2"):
            if run:
                producer.append_run(topic, 0, b"k", [(topic.encode(), [])])
            else:
                producer.append(topic, 0, topic.encode())

        assert producer.noted == [("queue", b"queue")]
        assert markers.noted == [("markers", b"markers")]
        assert rows.noted == [("rows-1", b"rows-1"), ("rows-2", b"rows-2")]

    asyncio.run(scenario())


def test_all_lanes_count_for_what_kafka_has_not_confirmed() -> None:
    async def scenario() -> None:
        producer = Lane()
        await producer.divide(["markers"], ["rows-1", "rows-2"])
        producer.pending_bytes = 1
        producer.children[0].pending_bytes = 10
        producer.children[1].pending_bytes = 100
        assert producer.unconfirmed_bytes == 111

    asyncio.run(scenario())
