"""What the consumer thread looks at when it hands chunks over: partitions with news, not all that wait."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from faust.types import TP

from app.streaming import consumer_thread
from app.streaming.chunks import MAX_BUFFERED_CHUNKS, Chunk, Reader
from app.streaming.consumer_thread import ChunkThread


class Fetched:
    """What was fetched of a partition: records of one chunk each."""

    _partition_records = None

    def __init__(self, reader: Reader, chunks: int) -> None:
        self.looks, self.left, self._reader = 0, chunks, reader
        self._backoff = 0.02

    def getall(self, limit: int) -> list[Any]:
        self._reader.state.position += 1
        self.left -= 1
        return []

    def has_more(self) -> bool:
        return self.left > 0


class Lab:
    """A consumer thread without Kafka, and what it fetched."""

    def __init__(self, count: int, chunks: int) -> None:
        self.thread = ChunkThread.__new__(ChunkThread)
        self.thread._blocked = set()
        self.thread._wake = SimpleNamespace(set=lambda: None)  # type: ignore[assignment]
        self.thread.plan = None
        self.thread.call_soon = lambda function, *args: function(*args)  # type: ignore[method-assign]
        self.thread.readers = {}
        self.looked: list[TP] = []
        self.fetcher: Any = SimpleNamespace(
            _records={}, _wait_consume_future=None, _notify=lambda future: None, seek_to=lambda tp, offset: None
        )
        self.thread._ensure_consumer = lambda: SimpleNamespace(_fetcher=self.fetcher)  # type: ignore[method-assign]
        for number in range(count):
            state = SimpleNamespace(
                position=0, _assignment=SimpleNamespace(active=True), pause=lambda: None, resume=lambda: None
            )
            tp = TP("q", number)
            reader = Reader(self.thread, tp, 1, state)
            reader.open = True
            self.thread.readers[tp] = reader
            self.fetcher._records[tp] = Fetched(reader, chunks)

    def take(self) -> list[Chunk]:
        looked = self.looked

        class Looked(dict[TP, Reader]):
            def get(self, tp: TP, default: Any = None) -> Any:
                looked.append(tp)
                return super().get(tp, default)

        looked.clear()
        self.thread.readers = Looked(self.thread.readers)
        return self.thread._take(self.fetcher)


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_thread, "FetchResult", Fetched)


def filled(lab: Lab) -> None:
    for _ in range(MAX_BUFFERED_CHUNKS):
        assert len(lab.take()) == len(lab.thread.readers)
    assert lab.take() == []


def test_those_without_room_are_not_looked_at_again_until_a_chunk_of_theirs_came_back() -> None:
    lab = Lab(1_000, chunks=10)
    filled(lab)
    assert lab.take() == [] and not lab.looked
    lab.thread.readers[TP("q", 7)].give_back()
    (chunk,) = lab.take()
    assert chunk.partition == 7 and lab.looked == [TP("q", 7)]


def test_a_paused_partition_is_read_on_when_it_is_resumed_and_holds_up_no_fetch_meanwhile() -> None:
    lab = Lab(3, chunks=10)
    reader = lab.thread.readers[TP("q", 1)]
    lab.thread.set_paused(reader, True)
    assert {chunk.partition for chunk in lab.take()} == {0, 2}
    assert lab.fetcher._records[TP("q", 1)]._backoff == 0.0
    lab.take()
    assert TP("q", 1) not in lab.looked
    lab.thread.set_paused(reader, False)
    assert 1 in {chunk.partition for chunk in lab.take()}


def test_a_partition_that_is_moved_is_looked_at_again() -> None:
    lab = Lab(2, chunks=10)
    filled(lab)
    reader = lab.thread.readers[TP("q", 1)]
    reader.returned = reader.taken
    lab.thread.seek_reader(reader, 0, 2)
    assert [chunk.partition for chunk in lab.take()] == [1]


@pytest.mark.parametrize(
    ("chunks", "is_paused", "pauses"),
    [(1, False, 1), (2, False, 0), (1, True, 0)],
    ids=["all is handed over", "some is left", "nobody takes it"],
)
def test_the_next_fetch_comes_later_only_if_all_was_handed_over(chunks: int, is_paused: bool, pauses: int) -> None:
    lab = Lab(1, chunks)
    delivered: list[Any] = []
    paused: list[bool] = []

    async def fetch(*args: Any) -> bool:
        return True

    async def pause() -> None:
        paused.append(True)

    lab.thread.gathering = SimpleNamespace(pause=pause)  # type: ignore[assignment]
    lab.thread.consumer = SimpleNamespace(deliver=delivered)
    lab.thread.parent_loop = SimpleNamespace(call_soon_threadsafe=lambda deliver, found: deliver.extend(found))  # type: ignore[assignment]
    if is_paused:
        lab.thread.set_paused(lab.thread.readers[TP("q", 0)], True)

    assert asyncio.run(lab.thread._fetch_and_hand_over(lab.fetcher, fetch))

    assert (len(delivered), len(paused)) == (0 if is_paused else 1, pauses)
