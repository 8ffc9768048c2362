"""The receivers of a queue right now: receives that wait, handlers, and the receivers of messages in flight."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase

import msgspec

from app.cluster.peers import Peers, peer_call
from app.engine.ownership import Ownership
from app.service.meters import Meters
from app.service.operations import QueueService
from marq.core.partition import Partition
from marq.errors import MarqError

#: Messages in flight that are examined, and receivers that are named.
LOOKED_AT_MAX = 50_000
NAMED_MAX = 100
#: Messages that are examined before other work gets its turn.
TURN_MESSAGES = 2_000


class Taking(msgspec.Struct):
    """The receivers of a queue, as one worker knows them."""

    worker: str
    waiting: int  # receives
    recent: bool  # a receive began in the last minute
    handlers: list[str]
    in_flight: dict[str, int]  # by the name of the receiver, in this worker's partitions


class Takers:
    """Finds receivers here, and asks the other workers for theirs."""

    def __init__(
        self,
        ownership: Ownership,
        operations: QueueService,
        meters: Meters,
        peers: Peers,
        is_handled: Callable[[str], bool],
    ) -> None:
        self._ownership = ownership
        self._operations = operations
        self._meters = meters
        self._peers = peers
        self._is_handled = is_handled
        peers.register(self)

    async def of(self, queue: str) -> list[Taking]:
        """The receivers that all answering workers know."""
        answers = (await self._peers.everywhere(self.taking_here, queue)).values()
        return [answer for answer in answers if not isinstance(answer, MarqError)]

    @peer_call("taking")
    async def taking_here(self, queue: str) -> Taking:
        """See `of`, for this worker."""
        operations = self._operations
        handlers: list[str] = []
        if self._is_handled(queue):
            meters = self._meters.handlers
            handlers = sorted({m.name for m in meters if any(fnmatchcase(queue, p) for p in m.queues)})
        found: Counter[str] = Counter()
        left = LOOKED_AT_MAX
        for owned in list(self._ownership.owned.values()):
            if owned.serving and left > 0:
                left -= await _count_in_flight(owned.owner.partition, queue, left, found)
        return Taking(
            self._ownership.worker_name,
            operations.receives.waiting_count(queue),
            operations.recent.is_recent(queue),
            handlers,
            dict(found.most_common(NAMED_MAX)),
        )


async def _count_in_flight(partition: Partition, queue: str, limit: int, found: Counter[str]) -> int:
    """Add the receivers of a queue's messages in one partition. Returns how many messages were examined."""
    offsets = list(partition.deliveries)[-limit:]
    for start in range(0, len(offsets), TURN_MESSAGES):
        for offset in offsets[start : start + TURN_MESSAGES]:
            delivered = partition.deliveries.get(offset)
            if (
                delivered is not None
                and offset in partition.messages
                and delivered.is_leased(partition.clock_ms)
                and partition.queue_of(offset) == queue
            ):
                found[delivered.receiver] += 1
        await asyncio.sleep(0)
    return len(offsets)
