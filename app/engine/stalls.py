"""Partitions in which Kafka confirms nothing, as below the minimum of in-sync replicas: which, where, for how long.

A stall is one partition's. This worker sends nothing more there (`app.service.operations`) and begins no deliveries
(`Owner.stalled`), and the other partitions go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
from faust.types import TP

if TYPE_CHECKING:
    from app.kafka.topics import Topics

log = logging.getLogger(__name__)

#: Seconds that a record of a partition may wait for Kafka: then no more go there, before they pile up.
STALLED_S = 3.0


class Stall(msgspec.Struct):
    """What has waited longest in a partition."""

    topic: str
    seconds: float


class Stalls:
    """Those that this worker sees, of partitions of its own and of others."""

    def __init__(self, waits: Callable[[float], Mapping[TP, float]], topics: Callable[[], Topics]) -> None:
        self._waits = waits  # partitions whose oldest record has waited for longer than so many seconds
        self._topics = topics
        self._named: set[int] = set()

    def now(self) -> dict[int, Stall]:
        """By the number of the partition."""
        waits = self._waits(STALLED_S)
        if not waits:
            return {}
        topics = self._topics()
        ours = {topics.queue, topics.markers, *topics.changelogs.values()}
        found: dict[int, Stall] = {}
        for tp, seconds in waits.items():
            before = found.get(tp.partition)
            if tp.topic in ours and (before is None or before.seconds < seconds):
                found[tp.partition] = Stall(tp.topic, seconds)
        return dict(sorted(found.items()))

    def look(self) -> None:
        """Log those that are new, and those that are over."""
        stalled = self.now()
        for number in sorted(stalled.keys() - self._named):
            log.warning(
                "Partition %s is stalled: Kafka has confirmed nothing in %s for %.0f s. Sends go elsewhere meanwhile",
                number,
                stalled[number].topic,
                stalled[number].seconds,
            )
        for number in sorted(self._named - stalled.keys()):
            log.warning("Partition %s is not stalled any more", number)
        self._named = set(stalled)
