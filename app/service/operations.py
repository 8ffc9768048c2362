"""The operations of users on queues and messages, for all protocols.

Each protocol (JSON, SQS) translates its requests into calls of `QueueService`, and results and errors into answers. The
protocols have no rules of queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mode import Service

from app.cluster.peers import Peers
from app.engine.ownership import Ownership
from app.service.leases import Leases
from app.service.meters import Meters
from app.service.moves import Moves
from app.service.paging import page_of
from app.service.purges import Purges
from app.service.receipts import Receipts
from app.service.receives import Receives
from app.service.sends import Sends
from app.service.settlements import Settlements
from app.service.turnstile import Turnstile
from app.service.watches import RecentReceives
from marq.core.settings import told
from marq.errors import MarqError, NotPossibleError
from marq.protocol.messages import Entry, QueueInfo, Received, Sent

if TYPE_CHECKING:
    from app.engine.queue_records import QueueRecord
    from app.settings import Settings


class QueueService(Service):
    """All operations of users. Each is carried out by a part: `sends`, `receives`, `settlements`, `moves`, `purges`."""

    def __init__(self, ownership: Ownership, settings: Settings, meters: Meters, peers: Peers, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ownership = ownership
        self.settings = settings
        self.meters = meters
        self.catalog = ownership.catalog
        self.receipts = Receipts(lambda: self.catalog.secret, lambda: self.catalog.previous_secrets)
        self.receives = Receives(ownership, self.receipts, meters, peers)
        self.leases = Leases(ownership, self.receipts, peers)
        self.purges = Purges(ownership, peers)
        self.recent = RecentReceives()
        self.turnstile = Turnstile()
        self.sends = Sends(ownership, settings, meters, self.turnstile)
        self.settlements = Settlements(ownership, settings, self.receipts, self.leases, meters, peers)
        self.moves = Moves(ownership, settings, self.receives, peers)

    # ------------------------------------------------------------------ messages

    async def send(self, queue: str, messages: Sequence[Entry]) -> list[Sent | MarqError]:
        """Append messages. Returns the place of each, or an error.

        Raises:
            UnavailableError: Kafka confirmed none of them in time. Some may still get into the log.
            RequestError: the queue can't be sent to.
        """
        return await self.sends.send(queue, messages)

    async def receive(
        self,
        queue: str,
        *,
        limit: int = 1,
        wait_ms: int = 0,
        lease_ms: int | None = None,
        name: str = "",
        gone: Callable[[], bool] = lambda: False,
        whole: bool = False,
    ) -> list[Received]:
        """Take up to `limit` messages; wait up to `wait_ms` for the first.

        Args:
            lease_ms: milliseconds of the lease; None: the visibility timeout of the queue.
            name: the receiver's, for the log.
            gone: returns True once the receiver has gone away. Messages that were on their way are released then.
            whole: return marq's own headers too.

        Raises:
            UnavailableError: too many wait already.
            RequestError: there is no such queue.
        """
        self.recent.note(queue)
        await self.turnstile.turn(limit)
        return await self.receives.receive(queue, limit, wait_ms, lease_ms, name, gone, whole)

    def give_back(self, messages: Sequence[Received]) -> None:
        """Release messages whose answer did not reach the receiver. They do not count as received."""
        self.receives.give_back(messages)

    def is_received(self, queue: str) -> bool:
        """True if a receive of a queue waits here, or began here not long ago."""
        return bool(self.receives.waiting_count(queue)) or self.recent.is_recent(queue)

    async def ack(self, receipts: Sequence[str]) -> list[MarqError | None]:
        """End messages as processed. Returns for each receipt None once that is in the log, or an error."""
        return await self.settlements.ack(receipts)

    async def extend(self, receipts: Sequence[str], lease_ms: int) -> list[MarqError | None]:
        """Set leases to end `lease_ms` from now. Returns for each receipt None, or an error."""
        return await self.settlements.extend(receipts, lease_ms)

    async def release(
        self, receipts: Sequence[str], delay_ms: int | None = None, counted: bool = True
    ) -> list[MarqError | None]:
        """Give messages back, to be ready again after a delay. Returns for each receipt None, or an error.

        Args:
            delay_ms: milliseconds; None: the back-off of the queue, if it has one, else 0.
            counted: False if the messages were never looked at: the delivery does not count as a receive.
        """
        return await self.settlements.release(receipts, delay_ms, counted)

    async def reject(self, receipts: Sequence[str], reason: str = "rejected") -> list[MarqError | None]:
        """Make dead letters of messages now, whatever their receive count. Returns for each receipt None, or an error.

        Raises:
            NotPossibleError: topic mode without a topic for dead letters.
        """
        return await self.settlements.reject(receipts, reason)

    async def move(self, queue: str, places: Sequence[tuple[int, int]], to: str | None) -> list[Sent | MarqError]:
        """Put messages that are ready in `queue` into another queue. Returns for each where it is now, or an error.

        Args:
            places: partition and offset of each.
            to: the queue; None: for each the one of which it is a dead letter.
        """
        return await self.moves.move(queue, places, to)

    async def move_some(self, queue: str, limit: int, to: str | None) -> list[Sent | MarqError]:
        """Put up to `limit` messages that are ready in `queue`, in their order, into another queue; see `move`.

        Raises:
            UnavailableError: none was moved, because a partition is served by nobody.
        """
        return await self.moves.move_some(queue, limit, to)

    # ------------------------------------------------------------------ queues

    async def create_queue(self, queue: str, values: dict[str, Any]) -> tuple[QueueInfo, bool]:
        """Make a queue with exactly these settings, or set it to them. Returns the queue, and True if it is new."""
        record, made = await self.catalog.create(queue, values)
        return self._info(queue, record), made

    async def update_queue(self, queue: str, values: dict[str, Any]) -> QueueInfo:
        """Set some values of a queue."""
        return self._info(queue, await self.catalog.update(queue, values))

    def dead_letter_queue_of(self, queue: str) -> str:
        """The dead-letter queue that the settings of a queue name; empty if they name none."""
        record = self.catalog.records.get(queue)
        return record.settings.dead_letter_queue if record is not None and record.active else ""

    def get_queue(self, queue: str) -> QueueInfo:
        """A queue and all its settings. Raises `UnknownQueueError`."""
        self.catalog.require(queue)
        return self._info(queue, self.catalog.records.get(queue))

    async def names(self, prefix: str, after: str, limit: int, visible: Callable[[str], bool]) -> tuple[list[str], str]:
        """A page of names of queues in order, and the name after which the next page begins (empty: there is none)."""
        return await page_of(self.catalog.names_from(prefix, after), limit, visible)

    async def list_queues(
        self, prefix: str = "", after: str = "", limit: int = 100, visible: Callable[[str], bool] = lambda queue: True
    ) -> tuple[list[QueueInfo], str]:
        """A page of queues by name, and the name after which the next page begins (empty: there is none)."""
        page, more = await self.names(prefix, after, limit, visible)
        return [self._info(name, self.catalog.records.get(name)) for name in page], more

    async def delete_queue(self, queue: str) -> None:
        """Delete a queue and purge its messages."""
        self._check_not_topic_mode()
        await self.purges.purge(queue, delete=True)

    async def purge_queue(self, queue: str) -> None:
        """End all messages that are in the queue now, and forget their deduplication ids."""
        await self.purges.purge(queue)

    def _check_not_topic_mode(self) -> None:
        if self.settings.queue_id is not None:
            raise NotPossibleError("in topic mode the queue is the topic: it can't be deleted here")

    def _info(self, queue: str, record: QueueRecord | None) -> QueueInfo:
        settings = record.settings if record is not None and record.active else self.catalog.default
        return QueueInfo(
            queue,
            told(settings),
            record.version if record is not None else 0,
            record.created_ms if record is not None else 0,
            bool(record is not None and record.purge),
        )

    # ------------------------------------------------------------------ life

    async def on_stop(self) -> None:
        self.receives.polling.close()
