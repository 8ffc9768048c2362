"""Finds partitions in which Kafka confirms nothing, for example below the minimum of in-sync replicas.

A stall concerns one partition. This worker sends nothing more there (`app.service.sends`) and starts no deliveries
(`Owner.stalled`). The other partitions go on. With a reason two more kinds are listed: a partition whose checkpoints
Kafka refuses (`app.engine.checkpoints`), and one that waits for an open transaction (`app.engine.transactions`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
from faust.types import TP

from marq.errors import UnavailableError

if TYPE_CHECKING:
    from app.kafka.topics import Topics
    from app.streaming.producer import IdempotentProducer

log = logging.getLogger(__name__)

#: Seconds that a record may wait for Kafka before its partition counts as stalled, so that no more pile up.
STALLED_S = 3.0


def is_stalled(producer: IdempotentProducer, topic: str, partition: int) -> bool:
    """True if a record has waited for Kafka in a partition for too long: more must not pile up behind it."""
    return producer.waited_s(topic, partition) > STALLED_S


def stalled_error() -> UnavailableError:
    """The error for a request that a stalled partition would have to take."""
    return UnavailableError("Kafka has not confirmed what came earlier; try again later", 2.0)


class Stall(msgspec.Struct):
    """The oldest waiting record of a partition, or what else a partition waits for."""

    topic: str
    seconds: float
    reason: str = ""  # what the partition does not do, and why, then what to do; empty: Kafka confirms nothing
    hidden: int = 0  # offsets that can't be read


class Stalls:
    """The stalls that this worker sees, in its own partitions and in others."""

    def __init__(
        self,
        waits: Callable[[float], Mapping[TP, float]],
        topics: Callable[[], Topics],
        others: Callable[[], dict[int, Stall]] = dict,
    ) -> None:
        self._waits = waits  # (seconds) -> partitions whose oldest record has waited for longer
        self._topics = topics
        self._others = others  # partitions that wait for something else, with the reason
        self._named: dict[int, str] = {}  # with the reason

    def now(self) -> dict[int, Stall]:
        """The present stalls, by the number of the partition."""
        found = self._others()
        waits = self._waits(STALLED_S)
        if not waits and not found:
            return {}
        topics = self._topics()
        ours = {topics.queue, topics.markers, *topics.changelogs.values()} if waits else set()
        for tp, seconds in waits.items():
            before = found.get(tp.partition)
            if tp.topic in ours and (before is None or before.reason or before.seconds < seconds):
                found[tp.partition] = Stall(tp.topic, seconds, hidden=0 if before is None else before.hidden)
        return dict(sorted(found.items()))

    def look(self) -> None:
        """Log stalls that are new, and stalls that are over."""
        stalled = self.now()
        for number, stall in stalled.items():
            if self._named.get(number) == stall.reason:
                continue
            if stall.reason:
                log.warning("Partition %s %s", number, stall.reason)
                continue
            log.warning(
                "Partition %s is stalled: Kafka has confirmed nothing in %s for %.0f s. Sends go elsewhere meanwhile",
                number,
                stall.topic,
                stall.seconds,
            )
        for number, reason in sorted(self._named.items()):
            if number not in stalled:
                what, _, _ = reason.rpartition(": ")
                over = f"is well again (was: {what})" if reason else "is not stalled any more"
                log.warning("Partition %s %s", number, over)
        self._named = {number: stall.reason for number, stall in stalled.items()}
