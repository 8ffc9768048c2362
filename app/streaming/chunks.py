"""Chunks of records, which the consumer thread hands to the agents, and the reading state of a partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from faust.types import TP
from mode.utils.queues import ThrowableQueue

from app.streaming.batches import FetchedRecord

#: Chunks of one partition between the consumer thread and the agent: one to work on, one that waits behind it.
MAX_BUFFERED_CHUNKS = 2


class Pump(Protocol):
    """What a reader needs of the thread that fetches for it."""

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Run a plain function in that thread."""

    def unblock(self, tp: TP) -> None:
        """Look for chunks of this partition to hand over (in that thread)."""


class Chunk:
    """The records of one fetch of one partition.

    Offsets in `[start, next)` that are not among the records do not exist for readers: compacted, aborted, or control
    records. `records` may be empty; then only the position moves. Chunks of a partition need not be contiguous: a
    reader takes a chunk only if `start` is at or below its own position; otherwise it goes back (`seek_chunks`).
    `since_ms` is when the log was last seen to end at `start` or below, on the clock of `marq.clock`; None: never.
    """

    __slots__ = ("_epoch", "_reader", "generation", "next", "partition", "records", "since_ms", "start", "topic")

    def __init__(
        self, reader: Reader, start: int, next: int, records: list[FetchedRecord], since_ms: int | None = None
    ) -> None:
        self.topic: str = reader.tp.topic
        self.partition: int = reader.tp.partition
        self.start = start
        self.next = next
        self.records = records
        self.since_ms = since_ms
        self.generation = reader.generation
        self._reader = reader
        self._epoch = reader.epoch

    def __repr__(self) -> str:
        return f"<Chunk {self.topic}:{self.partition} [{self.start}, {self.next}) {len(self.records)} records>"


class Reader:
    """How one chunked partition is read in one generation, shared by the two threads.

    Each attribute has one writer, so no lock is needed: `M` the main thread, `T` the consumer thread.
    """

    __slots__ = (
        "began",
        "epoch",
        "generation",
        "open",
        "paused",
        "pending",
        "returned",
        "starved",
        "state",
        "taken",
        "thread",
        "tp",
        "want_epoch",
        "want_paused",
    )

    def __init__(self, thread: Pump, tp: TP, generation: int, state: Any) -> None:
        self.thread = thread
        self.tp = tp
        self.generation = generation
        self.state = state  # aiokafka's TopicPartitionState
        self.began = False  # M: it was opened in this generation
        self.open = False  # T: the gate
        self.paused = False  # T
        self.epoch = 0  # T: number of the last seek that was carried out
        self.want_epoch = 0  # M: number of the last seek that was asked for
        self.want_paused = False  # M
        self.pending: int | None = None  # M: the target of the last seek, until a chunk from there was delivered
        self.taken = 0  # T: chunks handed to the main thread
        self.returned = 0  # M: chunks that left the agent's queue
        self.starved = False  # T sets, M clears: unblock the partition when a chunk comes back

    def has_room(self) -> bool:
        if self.taken - self.returned < MAX_BUFFERED_CHUNKS:
            return True
        self.starved = True
        # check again after the flag is set: a chunk that came back in between has not woken the pump
        return self.taken - self.returned < MAX_BUFFERED_CHUNKS

    def give_back(self) -> None:
        """One chunk is out of the buffer (main thread)."""
        self.returned += 1
        if self.starved:
            self.starved = False
            self.thread.call_soon(self.thread.unblock, self.tp)


class ChunkQueue(ThrowableQueue[Any]):
    """The queue between consumer and agent: tells the chunk's reader when a chunk leaves it."""

    _queue: Iterable[Any]  # what `asyncio.Queue` keeps

    def _get(self) -> Any:
        event = super()._get()
        chunk = getattr(event, "value", None)
        if type(chunk) is Chunk:
            chunk._reader.give_back()
        return event

    def clear(self) -> None:
        for event in self._queue:
            chunk = getattr(event, "value", None)
            if type(chunk) is Chunk:
                chunk._reader.give_back()
        super().clear()
