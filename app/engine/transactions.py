"""Finds partitions that wait for an open transaction of some producer.

Readers of committed records get nothing behind the first record of an open transaction, however much Kafka confirms
there. A producer that died leaves its transaction open until Kafka ends it, by default for up to 15 minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from faust.types import TP

from app.engine.stalls import STALLED_S, Stall
from marq.errors import UnavailableError

if TYPE_CHECKING:
    from app.engine.owned_partition import OwnedPartition
    from app.kafka.topics import Topics

log = logging.getLogger(__name__)

#: Seconds for which a partition waits for one transaction before it is named: most are over much sooner.
OPEN_S = STALLED_S
#: Seconds before Kafka is asked again which producer it is.
ASK_AGAIN_S = 10.0


class Begin(NamedTuple):
    """The first record of a transaction."""

    producer_id: int
    broker_ms: int | None  # when the broker wrote it; None: the stamp is the producer's own


class _Wait:
    """A log that can't be read beyond an offset."""

    __slots__ = ("asked_s", "begin", "end", "named", "since_s", "stable", "wall_s")

    def __init__(self, stable: int, now_s: float) -> None:
        self.stable = stable
        self.end = stable
        self.since_s = now_s  # monotonic
        self.wall_s = time.time()
        self.begin: Begin | None = None
        self.asked_s = -ASK_AGAIN_S
        self.named = False  # Kafka was asked for its producer


class OpenTransactions:
    """The open transactions that partitions of this worker wait for.

    Args:
        unstable: where the logs that are read here can't be read on, and where they end, as the last fetch told.
        ask: finds the first record of a transaction; None if it is over. Raises `KafkaError` and `UnavailableError`.
    """

    def __init__(
        self,
        unstable: Callable[[], Mapping[TP, tuple[int, int]]],
        topics: Callable[[], Topics],
        owned: Mapping[int, OwnedPartition],
        ask: Callable[[TopicPartition, int], Awaitable[Begin | None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._unstable = unstable
        self._topics = topics
        self._owned = owned
        self._ask = ask
        self._spawn = spawn
        self._waits: dict[TP, _Wait] = {}

    def look(self) -> None:
        """See which partitions wait. Call it every few seconds."""
        now_s, waits = time.monotonic(), self._waits
        self._waits = {}
        for tp, (stable, end) in self._unstable().items():
            if not self._is_at(tp, stable):
                continue
            wait = waits.get(tp)
            if wait is None or wait.stable != stable:
                wait = _Wait(stable, now_s)
            wait.end = end
            self._waits[tp] = wait
            if wait.begin is None and now_s - wait.since_s >= OPEN_S and now_s - wait.asked_s >= ASK_AGAIN_S:
                wait.asked_s = now_s
                self._spawn(self._find(tp, wait))

    def _is_at(self, tp: TP, stable: int) -> bool:
        """True if a log was read up to there. While it is paused, what the last fetch told may be old."""
        owned, topics = self._owned.get(tp.partition), self._topics()
        if owned is None:
            return False
        if tp.topic == topics.queue:
            return not owned.paused and owned.owner.partition.position >= stable
        return tp.topic == topics.markers and owned.owner.partition.markers_position >= stable

    async def _find(self, tp: TP, wait: _Wait) -> None:
        try:
            wait.begin = await self._ask(TopicPartition(*tp), wait.stable)
        except (KafkaError, OSError, TimeoutError, UnavailableError) as exc:
            log.debug("Kafka does not tell whose transaction begins at %s @%s: %r", tp, wait.stable, exc)
        wait.named = True  # without the producer, until it is known

    def now(self) -> dict[int, Stall]:
        """The partitions that wait, each with the transaction."""
        now_s = time.monotonic()
        waits = ((tp, wait) for tp, wait in self._waits.items() if wait.named and tp.partition in self._owned)
        return {tp.partition: _described(tp, wait, now_s) for tp, wait in waits}


def _described(tp: TP, wait: _Wait, now_s: float) -> Stall:
    waited_s, since_s, producer = now_s - wait.since_s, wait.wall_s, ""
    if wait.begin is not None:
        producer = f" (producer id {wait.begin.producer_id})"
        if wait.begin.broker_ms is not None:
            since_s = wait.begin.broker_ms / 1000
            waited_s = max(waited_s, time.time() - since_s)
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(since_s))
    return Stall(
        tp.topic,
        waited_s,
        f"waits for an open transaction since {since}{producer}, which hides {tp.topic} from offset {wait.stable} on: "
        f"end it, or kafka-transactions.sh --bootstrap-server … abort --topic {tp.topic} --partition {tp.partition} "
        f"--start-offset {wait.stable}",
        hidden=wait.end - wait.stable,
    )
