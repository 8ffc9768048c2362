"""How far partitions are read ahead of their receivers, and how much all of them keep in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from faust.types import TP

from app.engine.owned_partition import READ_ON_MS, OwnedPartition, Receiver
from app.kafka.topics import Topics
from app.settings import Settings
from app.streaming.faust_app import MarqApp

#: Milliseconds before memory is searched again after too little could be freed: a search is a pass over all messages.
SHED_PAUSE_MS = 100


class Partitions(Protocol):
    """What reading ahead needs of the ownership."""

    app: MarqApp
    settings: Settings
    held: dict[int, OwnedPartition]
    receivers: list[Receiver]

    @property
    def topics(self) -> Topics:
        """The topics in use."""


class ReadAhead:
    """Pauses and resumes the reading of queue topics, and keeps the worker under its memory limit."""

    def __init__(self, ownership: Partitions, now_ms: Callable[[], int]) -> None:
        self._ownership = ownership
        self._settings = ownership.settings
        self._now_ms = now_ms
        self._shed_at_ms = 0  # earliest time of the next look

    def regulate(self, held: OwnedPartition) -> None:
        """Pause or resume the reading of a partition, by what it has read ahead and what the worker has in memory."""
        partition = held.owner.partition
        share = self._settings.memory_bytes // max(1, len(self._ownership.held))
        wanted = partition.bytes < min(self._settings.read_ahead_bytes, share)
        if not wanted and held.serving:
            now = self._now_ms()
            if partition.held_up or any(r.starving(held) for r in self._ownership.receivers):
                held.starved_ms = now
            wanted = now - held.starved_ms < READ_ON_MS and self._has_memory()
        if wanted == held.paused:
            held.paused = not wanted
            tp = TP(self._ownership.topics.queue, held.number)
            if wanted:
                self._ownership.app.consumer.resume_reading(tp)
            else:
                self._ownership.app.consumer.pause_reading(tp)

    def _has_memory(self) -> bool:
        """Drop payloads that are in the messages table while the worker is over its limit. False: it still is."""
        excess = sum(h.owner.partition.bytes for h in self._ownership.held.values()) - self._settings.memory_bytes
        if excess < 0:
            return True
        if self._now_ms() < self._shed_at_ms:
            return False
        # a tenth more, so that this does not run again for every chunk
        excess += self._settings.memory_bytes // 10
        for held in sorted(self._ownership.held.values(), key=lambda h: -h.owner.partition.bytes):
            partition = held.owner.partition
            freed = partition.shed(excess, [queue for queue in partition.backlogs if self._is_wanted(queue)])
            excess -= freed
            if excess <= 0:
                return True
            held.owner.hurry_checkpoint()
        # what could not be freed waits for a checkpoint, or for receivers; looking again costs a pass over everything
        self._shed_at_ms = self._now_ms() + SHED_PAUSE_MS
        return False

    def _is_wanted(self, queue: str) -> bool:
        return any(receiver.wants(queue) for receiver in self._ownership.receivers)
