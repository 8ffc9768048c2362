"""Moves ready messages into another queue. Tasks that move all messages of a queue are in `move_tasks`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from app.cluster.peers import Peers, peer_call
from app.engine.ownership import Ownership
from app.service.owners import OPERATION_TIMEOUT_S, Owners
from app.service.receives import Receives
from marq.errors import BadValueError, MarqError, NotFoundError, NotPossibleError
from marq.protocol import problems
from marq.protocol.messages import Sent

if TYPE_CHECKING:
    from app.settings import Settings


class MoveHere(msgspec.Struct):
    """Messages of one partition to move: those named, or up to `limit`; see `Moves.move`.

    `make`: create the target if it does not exist and sending creates queues.
    """

    partition: int
    queue: str
    offsets: list[int] | None
    limit: int
    to: str | None
    make: bool = True


class Moved(msgspec.Struct):
    """The owner's answer for one message: the place of its copy, or an error."""

    offset: int
    partition: int = -1
    place: int = -1
    error: dict[str, str] | None = None


class Moves:
    """Asks the owners of partitions to move messages."""

    def __init__(self, ownership: Ownership, settings: Settings, receives: Receives, peers: Peers) -> None:
        self._ownership = ownership
        self._catalog = ownership.catalog
        self._settings = settings
        self._receives = receives
        self._owners = Owners(ownership, peers)
        self._partition_turn = random.randrange(1 << 16)
        peers.register(self)

    async def move(self, queue: str, places: Sequence[tuple[int, int]], to: str | None) -> list[Sent | MarqError]:
        """See `app.service.operations.QueueService.move`."""
        await self._check_movable(queue, to)
        partitions: dict[int, list[int]] = {}
        for number, offset in places:
            partitions.setdefault(number, []).append(offset)
        moved = dict(
            zip(
                partitions,
                await asyncio.gather(*(self.move_in(n, queue, o, len(o), to) for n, o in partitions.items())),
                strict=True,
            )
        )
        results: list[Sent | MarqError] = []
        for number, offset in places:
            found = moved[number]
            results.append(found if isinstance(found, MarqError) else found[offset])
        return results

    async def move_some(self, queue: str, limit: int, to: str | None) -> list[Sent | MarqError]:
        """See `app.service.operations.QueueService.move_some`."""
        await self._check_movable(queue, to)
        await self._receives.read_up_everywhere(queue)  # once, not for each partition
        count = self._ownership.topics.partitions
        self._partition_turn += 1
        results: list[Sent | MarqError] = []
        unavailable: MarqError | None = None
        for i in range(count):
            if len(results) >= limit:
                break
            number = (self._partition_turn + i) % count
            found = await self.move_in(number, queue, None, limit - len(results), to)
            if isinstance(found, MarqError):
                unavailable = found
            else:
                results += found.values()
        if unavailable is not None and not results:
            raise unavailable
        return results

    async def _check_movable(self, queue: str, to: str | None) -> None:
        if self._settings.queue_id is not None:
            raise NotPossibleError("in topic mode marq never writes to the topic: messages can't be moved there")
        self._catalog.require_receivable(queue)
        if to == queue:
            raise BadValueError(f"messages of {queue!r} can't be moved to the queue they are in")
        if to is not None:
            await self._catalog.require_or_make(to)

    async def move_in(
        self, number: int, queue: str, offsets: list[int] | None, limit: int, to: str | None, make: bool = True
    ) -> dict[int, Sent | MarqError] | MarqError:
        """Move messages of one partition; see `move`, `move_some`. Returns the result of each offset, or one error.

        Args:
            make: create the target if it does not exist and sending creates queues.
        """
        if number >= self._ownership.topics.partitions:
            return NotFoundError(f"there is no partition {number}")
        asked = MoveHere(number, queue, offsets, limit, to, make)
        try:
            moved = await self._owners.ask(number, self.move_here, asked, OPERATION_TIMEOUT_S)
        except MarqError as exc:
            return exc
        topic = self._ownership.topics.queue
        return {m.offset: problems.error_in(m.error) if m.error else Sent(topic, m.partition, m.place) for m in moved}

    @peer_call("move")
    async def move_here(self, asked: MoveHere) -> list[Moved]:
        """Move messages of a partition of this worker. Messages that are named may have been sent just before."""
        if asked.offsets is not None:
            await self._receives.read_up(asked.queue)
        owned = self._owners.serving_here(asked.partition)
        found = await self._ownership.copies.move(owned, asked.queue, asked.offsets, asked.limit, asked.to, asked.make)
        return [
            Moved(offset, error=problems.entry(place)) if isinstance(place, MarqError) else Moved(offset, *place)
            for offset, place in found.items()
        ]
