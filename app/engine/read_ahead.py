"""How far partitions are read ahead of their receivers, and how much all of them keep in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from faust.types import TP

from app.engine.owned_partition import READ_ON_MS, OwnedPartition, Receiver
from app.engine.unread_counter import UnreadCounter
from app.kafka.topics import Topics
from app.settings import Settings
from app.streaming.faust_app import MarqApp

#: Milliseconds before memory is searched again after too little was freed: each search is a pass over all messages.
#: Twice as long after each that freed nothing, up to the second figure, until a checkpoint: leases may last for hours.
SHED_PAUSE_MS, SHED_PAUSE_MAX_MS = 100, 6_400
#: Paused partitions that are checked at a time: a receiver may have begun to wait for one of them.
PAUSED_AT_ONCE = 64
#: The pause between two checks for starving receivers grows by a millisecond for each so many queues of a partition.
QUEUES_A_MS = 100


class Partitions(Protocol):
    """What reading ahead needs of the ownership."""

    app: MarqApp
    settings: Settings
    owned: dict[int, OwnedPartition]
    receivers: list[Receiver]
    unread_counter: UnreadCounter

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
        self._shed_pause_ms = SHED_PAUSE_MS
        self._paused: dict[int, None] = {}  # partitions, in the order in which they are looked at
        self._bytes = 0  # bytes in all partitions, as of the last time that each was regulated
        #: Bytes of messages that leave memory last: answers that receivers have not read.
        self.unread_bytes: Callable[[], int] = lambda: 0

    @property
    def is_calm(self) -> bool:
        """True if all partitions are read, so that `look` has nothing to do."""
        return not self._paused

    def regulate(self, owned: OwnedPartition) -> None:
        """Pause or resume the reading of a partition, by what it has read ahead and what the worker has in memory."""
        if self._ownership.owned.get(owned.number) is not owned:
            return  # no longer ours, so it must not count
        partition = owned.owner.partition
        self._weigh(owned)
        share = self._settings.memory_bytes // max(1, len(self._ownership.owned))
        wanted = partition.bytes < min(self._settings.read_ahead_bytes, share)
        if not wanted and owned.serving:
            now = self._now_ms()
            if partition.held_up:
                owned.starved_ms = now
            elif now >= owned.starving_look_ms:
                # a check goes through all queues; a late check only pauses, or reads on, a little longer
                queues = len(partition.backlogs) + len(partition.segments.queues)
                owned.starving_look_ms = now + queues // QUEUES_A_MS
                if any(r.starving(owned) for r in self._ownership.receivers):
                    owned.starved_ms = now
            wanted = now - owned.starved_ms < READ_ON_MS and self._has_memory()
        if wanted == owned.paused:
            owned.paused = not wanted
            if owned.paused:
                self._paused[owned.number] = None
            tp = TP(self._ownership.topics.queue, owned.number)
            if wanted:
                self._ownership.app.consumer.resume_reading(tp)
            else:
                self._ownership.app.consumer.pause_reading(tp)
        if owned.paused:
            self._ownership.unread_counter.want(owned)

    def look(self) -> None:
        """Resume paused partitions that a receiver waits for. No event tells of it."""
        for number in list(self._paused)[:PAUSED_AT_ONCE]:
            del self._paused[number]
            owned = self._ownership.owned.get(number)
            if owned is not None and owned.paused:
                self._paused[number] = None  # the last in turn
                self.regulate(owned)
                if not owned.paused:
                    self._paused.pop(number, None)

    def let_go(self, owned: OwnedPartition) -> None:
        """A partition is not ours any more."""
        self._bytes -= owned.weighed_bytes
        owned.weighed_bytes = 0
        self._paused.pop(owned.number, None)

    def _weigh(self, owned: OwnedPartition) -> None:
        # a running sum, so that a full partition does not cost a pass over all of them
        self._bytes += owned.owner.partition.bytes - owned.weighed_bytes
        owned.weighed_bytes = owned.owner.partition.bytes
        if owned.weighed_persisted != owned.owner.partition.persisted:
            owned.weighed_persisted = owned.owner.partition.persisted
            self._shed_pause_ms = SHED_PAUSE_MS
            self._shed_at_ms = min(self._shed_at_ms, self._now_ms() + SHED_PAUSE_MS)

    def _has_memory(self) -> bool:
        """Drop payloads that are in the messages table while memory is over its limit. Returns False if it still is."""
        excess = self._bytes + self.unread_bytes() - self._settings.memory_bytes
        if excess < 0:
            return True
        if self._now_ms() < self._shed_at_ms:
            return False
        # a tenth more, so that this does not run again for every chunk
        excess += self._settings.memory_bytes // 10
        freed_any = False
        for owned in sorted(self._ownership.owned.values(), key=lambda h: -h.owner.partition.bytes):
            partition = owned.owner.partition
            freed = partition.shed(excess, [queue for queue in partition.backlogs if self._is_wanted(queue)])
            self._weigh(owned)
            excess -= freed
            freed_any = freed_any or freed > 0
            if excess <= 0:
                return True
            owned.owner.hurry_checkpoint()
        # the rest is freed by a checkpoint, or when receivers take it; each search is a pass over everything
        self._shed_pause_ms = SHED_PAUSE_MS if freed_any else min(2 * self._shed_pause_ms, SHED_PAUSE_MAX_MS)
        self._shed_at_ms = self._now_ms() + self._shed_pause_ms
        return False

    def _is_wanted(self, queue: str) -> bool:
        return any(receiver.wants(queue) for receiver in self._ownership.receivers)
