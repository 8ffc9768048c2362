"""Watches the reading of partitions. A partition whose markers can't be read is unserved. A log whose reading does not
advance is read again from its position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from faust.types import TP

from app.engine.owned_partition import OwnedPartition

if TYPE_CHECKING:
    from app.kafka.topics import Topics
    from app.streaming.faust_app import MarqApp

#: Milliseconds without progress in reading up to its own marker after which a partition counts as unserved.
PROGRESS_MS = 10_000
#: Milliseconds after which a partition is read again from its position if it does not advance though its log goes on.
STUCK_MS = 2_000
#: Milliseconds of the longest pause between two such attempts.
STUCK_MAX_MS = 30_000


class Progress:
    """The progress of reading in the partitions of this worker."""

    def __init__(self, app: MarqApp, topics: Callable[[], Topics], on_unserved: Callable[[int, str], None]) -> None:
        """
        Args:
            on_unserved: called with the number of a partition that can't be served at present, and why.
        """
        self._app = app
        self._topics = topics
        self._on_unserved = on_unserved
        self._unread: dict[int, None] = {}  # partitions whose reading may have stopped short of what was fetched
        self._round: list[int] = []  # of these, those that this round has not looked at yet
        self._round_size = 0
        self._round_ms = 0  # when that round began
        self._looked_ms = 0  # when it was looked at some of them last

    def look(self, owned: OwnedPartition, now: int) -> int:
        """Mark a partition as unserved if its own marker is in the log, but has not been folded for long.

        Returns when to look again.
        """
        position = owned.owner.partition.markers_position
        if owned.caught_up_to != position:
            owned.caught_up_to, owned.advanced_ms = position, now
        elif now - owned.advanced_ms > PROGRESS_MS:
            self._on_unserved(owned.number, f"its markers can't be read beyond offset {position}; trying again")
        return now + PROGRESS_MS // 10

    def look_after_some(self, partitions: Mapping[int, OwnedPartition], now: int) -> None:
        """Look for chunks that were dropped: within `STUCK_MS` at all partitions of which something was fetched."""
        if not self._round and now - self._round_ms >= STUCK_MS:
            stirred = self._app.consumer.stirred
            self._unread.update(stirred)
            stirred.clear()
            self._round, self._round_ms = list(self._unread), now
            self._round_size = len(self._round)
        passed_ms, self._looked_ms = min(now - self._looked_ms, STUCK_MS), now
        for _ in range(min(len(self._round), 1 + self._round_size * passed_ms // STUCK_MS)):
            number = self._round.pop()
            owned = partitions.get(number)
            if owned is None or not self.read_again(owned, now):
                self._unread.pop(number, None)

    def read_again(self, owned: OwnedPartition, now: int) -> bool:
        """Read a partition again if it does not advance because its last chunk was dropped, as at a rebalance.

        A dropped chunk is noticed with the next one, but the last chunk of a log has no next one. The pauses grow while
        this does not help: a slow Kafka must have time to answer before it is asked again.

        Returns False if all that was fetched of the partition is read: it need not be looked at until a chunk comes.
        """
        partition, consumer, topics = owned.owner.partition, self._app.consumer, self._topics()
        unread = False
        for topic, position in (
            (topics.queue, partition.position),
            (topics.markers, partition.markers_position),
        ):
            tp = TP(topic, owned.number)
            if position >= (consumer.highwater(tp) or 0):
                continue
            unread = True
            before, again_ms, pause_ms = owned.watched.get(topic, (-1, 0, 0))
            if position != before:
                owned.watched[topic] = (position, 0, STUCK_MS)
            elif now >= again_ms and not (topic == topics.queue and (owned.paused or owned.begins_later)):
                consumer.seek_chunks(tp, position, owned.generation)
                owned.watched[topic] = (position, now + pause_ms, min(2 * pause_ms, STUCK_MAX_MS))
        return unread
