"""What people do with queues, whatever protocol they speak.

Each protocol (JSON, SQS) translates its requests into calls of `QueueService`, and results and errors into answers. The
protocols hold no rule of a queue.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordTooLargeError
from mode import Service

from app.cluster.peers import Peers, peer_call
from app.engine.copies import Rejected
from app.engine.ownership import Ownership
from app.engine.stalls import STALLED_S
from app.service.fifo import check_fit, fifo_headers
from app.service.leases import Leases
from app.service.meters import Meters
from app.service.owners import OPERATION_TIMEOUT_S, Owners
from app.service.paging import page_of
from app.service.purges import Purges
from app.service.receipts import Receipt, Receipts, by_delivery
from app.service.receives import Receives
from app.service.turnstile import Turnstile
from app.service.watches import RecentReceives
from app.streaming.producer import ProducerFull
from marq.core.markers import End, Keepalive, Marker, Release
from marq.core.placing import fifo_partition
from marq.core.settings import told
from marq.core.state import HEADER_OVERHEAD_BYTES
from marq.errors import (
    BadValueError,
    BrokerError,
    LeaseOverError,
    MarqError,
    NotFoundError,
    NotPossibleError,
    TooLargeError,
    UnavailableError,
)
from marq.protocol import problems
from marq.protocol.headers import H_DELAY, H_GROUP, H_TTL, HEADER_KEY, PROTOCOLS, PROTOCOLS_LENGTH, RESERVED
from marq.protocol.limits import HEADERS_MAX, MESSAGE_MAX_BYTES
from marq.protocol.messages import Entry, QueueInfo, Received, Sent

if TYPE_CHECKING:
    from app.engine.catalog import QueueRecord
    from app.settings import Settings
    from marq.core.policies import QueueSettings

#: Seconds until Kafka has to confirm what a request appended.
CONFIRM_TIMEOUT_S = 10.0
#: Messages of one request that go to one partition in a row: enough for a full batch, few enough to spread.
RUN_MESSAGES = 500
#: Bytes of a message that are left for its headers' and the record's own.
RECORD_ROOM_BYTES = 1024
#: What is said of a receipt that is not that of its message's current delivery.
LEASE_OVER = "the message is finished, or its lease is over"


class RejectHere(msgspec.Struct):
    """Messages of one delivery that its receiver rejects."""

    partition: int
    epoch: int
    delivery: int
    offsets: list[int]
    reason: str


class MoveHere(msgspec.Struct):
    """Messages of one partition that are to be moved: those named, or up to `limit`; see `QueueService.move`.

    ``make``: a queue that is not there is made, where sending makes queues.
    """

    partition: int
    queue: str
    offsets: list[int] | None
    limit: int
    to: str | None
    make: bool = True


class FromProtocol(Entry, frozen=True, kw_only=True):
    """A message with headers that its protocol adds to those of its sender.

    ``size_bytes``: its size, as the protocol counts it against the limit of the queue; None: all of it counts.
    """

    protocol_headers: dict[str, bytes] = {}  # noqa: RUF012 - a struct copies it
    size_bytes: int | None = None


class Moved(msgspec.Struct):
    """What the owner of a partition says of a message that was to be moved: where its copy is, or an error."""

    offset: int
    partition: int = -1
    place: int = -1
    error: dict[str, str] | None = None


class QueueService(Service):
    """The operations. A receiver of the ownership."""

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
        self._owners = Owners(ownership, peers)
        self._partition_turn = random.randrange(1 << 16)
        self._random = random.Random()
        self.turnstile = Turnstile()
        peers.register(self)

    # ------------------------------------------------------------------ send

    async def send(self, queue: str, messages: Sequence[Entry]) -> list[Sent | MarqError]:
        """Append messages; for each where it is, or why it is not there.

        Raises:
            UnavailableError: none was accepted, because Kafka is slow or away. Some may still get there.
            RequestError: the queue can't be sent to.
        """
        await self.turnstile.turn(len(messages))
        await self._check_sendable(queue)
        topic, count = self.ownership.topics.queue, self.ownership.topics.partitions
        key, settings, life = queue.encode(), self.catalog.settings_of(queue), self.catalog.generation_of(queue)
        append_run = self.ownership.app.producer.append_run
        results: list[Any] = [None] * len(messages)
        runs: dict[int, tuple[list[int], list[tuple[bytes, list[tuple[str, bytes]]]]]] = {}
        partition = 0
        stalled = {number for number in range(count) if self._is_stalled(topic, number)}
        if len(stalled) == count:
            raise _stalled_error()
        # what Kafka takes there, but not the markers of, is delivered to nobody for now
        avoided = stalled | self.ownership.stalls.now().keys()
        if len(avoided) == count:
            avoided = stalled
        for i, message in enumerate(messages):
            if i % RUN_MESSAGES == 0:
                self._partition_turn += 1
                while self._partition_turn % count in avoided:
                    self._partition_turn += 1
                partition = self._partition_turn % count
            try:
                headers = self._headers(message, settings, life)
            except MarqError as exc:
                results[i] = exc
                continue
            number = partition
            if settings.fifo:
                number = fifo_partition(key, (message.group or "").encode(), settings, count)
                if number in stalled:  # the group keeps its partition
                    results[i] = _stalled_error()
                    continue
            run = runs.get(number)
            if run is None:
                run = runs[number] = ([], [])
            run[0].append(i)
            run[1].append((message.payload, headers))
        appended = [
            (number, places, append_run(topic, number, key, records)) for number, (places, records) in runs.items()
        ]
        futures = [future for _, _, parts in appended for _, future in parts]
        if futures:
            await asyncio.wait(futures, timeout=CONFIRM_TIMEOUT_S)
        unavailable = next((result for result in results if isinstance(result, UnavailableError)), None)
        accepted = False
        for number, places, parts in appended:
            at = 0
            for length, future in parts:
                outcome = _outcome_of(future)
                if isinstance(outcome, UnavailableError):
                    unavailable = outcome
                else:
                    accepted = True
                for k in range(length):
                    if isinstance(outcome, int):
                        results[places[at + k]] = Sent(topic, number, outcome + k if outcome >= 0 else -1)
                    else:
                        results[places[at + k]] = outcome
                at += length
        if unavailable is not None and not accepted:
            raise unavailable
        self.meters.sent.inc(sum(isinstance(result, Sent) for result in results))
        self.meters.sent_bytes.inc(sum(len(message.payload) for message in messages))
        return results

    async def _check_sendable(self, queue: str) -> None:
        if self.settings.queue_id is not None:
            raise NotPossibleError(
                f"in topic mode marq never writes to the topic: send to {self.ownership.topics.queue} with a Kafka "
                "producer"
            )
        await self.catalog.require_or_make(queue)

    def _headers(self, message: Entry, settings: QueueSettings, life: int) -> list[tuple[str, bytes]]:
        if settings.fifo or message.deduplication_id is not None:
            check_fit(message, settings)
        delay_ms = settings.delay_ms
        if (
            not message.headers
            and message.key is None
            and message.delay_ms is None
            and message.ttl_ms is None
            and type(message) is not FromProtocol
        ):
            headers: list[tuple[str, bytes]] = []
            size = len(message.payload)
        else:
            headers = list(message.headers.items())
            for name in message.headers:
                if name.startswith(RESERVED):
                    raise BadValueError(f"header {name!r}: names that begin with {RESERVED!r} are marq's own")
                if name[:PROTOCOLS_LENGTH].lower().startswith(PROTOCOLS):
                    raise BadValueError(
                        f"header {name!r}: names that begin with AWS. or Amazon. are those of protocols"
                    )
            if isinstance(message, FromProtocol):
                headers += message.protocol_headers.items()
            if len(headers) > HEADERS_MAX:
                raise BadValueError(f"a message with {len(headers)} headers; at most {HEADERS_MAX}")
            size = len(message.payload) + sum(len(name.encode()) + len(value) for name, value in headers)
            if message.key is not None:
                headers.append((HEADER_KEY, message.key))
                size += len(message.key)
            if message.delay_ms is not None:
                delay_ms = message.delay_ms
            if message.ttl_ms:
                headers.append((H_TTL, b"%d" % message.ttl_ms))
        if delay_ms:
            headers.append((H_DELAY, b"%d" % delay_ms))
        if settings.fifo:
            headers += fifo_headers(message, settings, life)
        elif message.group is not None:
            headers.append((H_GROUP, message.group.encode()))
        counted = size
        if type(message) is FromProtocol and message.size_bytes is not None:
            counted = message.size_bytes
        if settings.max_message_bytes and counted > settings.max_message_bytes:
            raise TooLargeError(f"a message of {counted} bytes; the queue takes at most {settings.max_message_bytes}")
        if size > MESSAGE_MAX_BYTES // 2:
            size = len(message.payload) + sum(HEADER_OVERHEAD_BYTES + len(n.encode()) + len(v) for n, v in headers)
            if size > MESSAGE_MAX_BYTES - RECORD_ROOM_BYTES:
                raise TooLargeError(
                    f"a message of {size} bytes; at most {MESSAGE_MAX_BYTES - RECORD_ROOM_BYTES} with key and headers "
                    f"({HEADER_OVERHEAD_BYTES} for each)"
                )
        return headers

    def _is_stalled(self, topic: str, partition: int) -> bool:
        """True if what waits for Kafka in a partition has waited for too long: more must not pile up behind it."""
        return self.ownership.app.producer.waited_s(topic, partition) > STALLED_S

    # ------------------------------------------------------------------ receive

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
            lease_ms: how long they are the receiver's; None: as the queue says.
            name: of the receiver, noted in the log.
            gone: tells whether the receiver went away: then it gets nothing, and what was on its way goes back.
            whole: with marq's own headers too.

        Raises:
            UnavailableError: too many wait already.
            RequestError: there is no such queue.
        """
        self.recent.note(queue)
        await self.turnstile.turn(limit)
        return await self.receives.receive(queue, limit, wait_ms, lease_ms, name, gone, whole)

    def is_received(self, queue: str) -> bool:
        """Whether somebody waits here for messages of a queue, or asked for some not long ago."""
        return bool(self.receives.waiting_count(queue)) or self.recent.is_recent(queue)

    # ------------------------------------------------------------------ acknowledge and the like

    async def ack(self, receipts: Sequence[str]) -> list[MarqError | None]:
        """Finished; for each receipt None once that is in the log, or an error."""
        results = await self._settle(receipts, lambda epoch, delivery, ranges: End(epoch, ranges, "acked", delivery))
        return self._counted("ack", results)

    async def extend(self, receipts: Sequence[str], lease_ms: int) -> list[MarqError | None]:
        """Still at work: the lease ends `lease_ms` from now."""
        results = await self._settle(
            receipts, lambda epoch, delivery, ranges: Keepalive(epoch, delivery, ranges, lease_ms), current=True
        )
        return self._counted("extend", results)

    async def release(
        self, receipts: Sequence[str], delay_ms: int | None = None, counted: bool = True
    ) -> list[MarqError | None]:
        """Given back, ready again after `delay_ms`. Not `counted`: it was never looked at, and is no attempt.

        Without a delay, the back-off of the queue, if it has one.
        """
        if delay_ms is None and counted and self.catalog.with_backoff:
            results = await self._release_with_backoff(receipts)
        else:
            results = await self._release(receipts, delay_ms or 0, counted)
        return self._counted("release", results)

    async def _release(self, receipts: Sequence[str], delay_ms: int, counted: bool = True) -> list[MarqError | None]:
        return await self._settle(
            receipts,
            lambda epoch, delivery, ranges: Release(epoch, delivery, ranges, delay_ms, counted),
            current=True,
        )

    async def _release_with_backoff(self, receipts: Sequence[str]) -> list[MarqError | None]:
        results: list[MarqError | None] = [None] * len(receipts)
        groups: dict[tuple[int, int], list[int]] = {}  # attempt, checksum of the queue -> places
        for i, text in enumerate(receipts):
            try:
                groups.setdefault(self.receipts.read(text)[4:], []).append(i)
            except MarqError as exc:
                results[i] = exc

        async def give_back(attempt: int, crc: int, places: list[int]) -> None:
            queue = self.catalog.with_backoff.get(crc)
            delay = self.catalog.settings_of(queue).backoff_of(attempt, self._random) if queue is not None else 0
            chosen = [receipts[i] for i in places]
            for i, result in zip(places, await self._release(chosen, delay), strict=True):
                results[i] = result

        await asyncio.gather(*(give_back(*group, places) for group, places in groups.items()))
        return results

    async def reject(self, receipts: Sequence[str], reason: str = "rejected") -> list[MarqError | None]:
        """Dead letters now, whatever their count; for each receipt None once that is so, or an error."""
        if self.settings.queue_id is not None and self.settings.dead_letter_topic is None:
            raise NotPossibleError("in topic mode, dead letters need a topic: set MARQ_DEAD_LETTER_TOPIC")
        results: list[MarqError | None] = [None] * len(receipts)
        deliveries: dict[tuple[int, int, int], dict[int, list[int]]] = {}
        for i, text in enumerate(receipts):
            try:
                receipt = self.receipts.read(text)
            except MarqError as exc:
                results[i] = exc
            else:
                deliveries.setdefault(receipt[:3], {}).setdefault(receipt[3], []).append(i)
        outcomes = await asyncio.gather(
            *(self._reject(*delivery, sorted(places), reason) for delivery, places in deliveries.items())
        )
        for places, found in zip(deliveries.values(), outcomes, strict=True):
            for offset, entries in places.items():
                if isinstance(found, MarqError):
                    error: MarqError | None = found
                elif offset in found.unsure:
                    error = UnavailableError("Kafka did not confirm its dead letter; try again")
                else:
                    error = None if offset in found.done else LeaseOverError(LEASE_OVER)
                for i in entries:
                    results[i] = error
        return self._counted("reject", results)

    async def _reject(
        self, number: int, epoch: int, delivery: int, offsets: list[int], reason: str
    ) -> Rejected | MarqError:
        asked = RejectHere(number, epoch, delivery, offsets, reason)
        try:
            return await self._owners.ask(number, self.reject_here, asked, OPERATION_TIMEOUT_S)
        except MarqError as exc:
            return exc

    @peer_call("reject")
    async def reject_here(self, asked: RejectHere) -> Rejected:
        """Dead letters of a partition of this worker: what became of these offsets."""
        held, receipt = self._owners.serving_here(asked.partition), (asked.epoch, asked.delivery)
        return await self.ownership.copies.reject(held, asked.offsets, receipt, asked.reason)

    # ------------------------------------------------------------------ move

    async def move(self, queue: str, places: Sequence[tuple[int, int]], to: str | None) -> list[Sent | MarqError]:
        """Put messages that are ready in `queue` into another queue; for each where it is now, or why it was not moved.

        Args:
            places: partition and offset of each.
            to: the queue; None: for each the one of which it is a dead letter.
        """
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
        """Put up to `limit` messages that are ready in `queue`, in their order, into another queue; see `move`.

        Raises:
            UnavailableError: none was moved, because a partition is served by nobody.
        """
        await self._check_movable(queue, to)
        await self.receives.read_up_everywhere(queue)  # once, not for each partition
        count = self.ownership.topics.partitions
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
        if self.settings.queue_id is not None:
            raise NotPossibleError("in topic mode marq never writes to the topic: messages can't be moved there")
        self.catalog.require_receivable(queue)
        if to == queue:
            raise BadValueError(f"messages of {queue!r} can't be moved to the queue they are in")
        if to is not None:
            await self.catalog.require_or_make(to)

    async def move_in(
        self, number: int, queue: str, offsets: list[int] | None, limit: int, to: str | None, make: bool = True
    ) -> dict[int, Sent | MarqError] | MarqError:
        """Move messages of one partition; see `move` and `move_some`. By offset, or why none of them could be.

        Args:
            make: whether a queue that is not there is made, where sending makes queues.
        """
        if number >= self.ownership.topics.partitions:
            return NotFoundError(f"there is no partition {number}")
        asked = MoveHere(number, queue, offsets, limit, to, make)
        try:
            moved = await self._owners.ask(number, self.move_here, asked, OPERATION_TIMEOUT_S)
        except MarqError as exc:
            return exc
        topic = self.ownership.topics.queue
        return {m.offset: problems.error_in(m.error) if m.error else Sent(topic, m.partition, m.place) for m in moved}

    @peer_call("move")
    async def move_here(self, asked: MoveHere) -> list[Moved]:
        """Move messages of a partition of this worker. Those that are named may have been sent just before."""
        if asked.offsets is not None:
            await self.receives.read_up(asked.queue)
        held = self._owners.serving_here(asked.partition)
        found = await self.ownership.copies.move(held, asked.queue, asked.offsets, asked.limit, asked.to, asked.make)
        return [
            Moved(offset, error=problems.entry(place)) if isinstance(place, MarqError) else Moved(offset, *place)
            for offset, place in found.items()
        ]

    def _counted(self, action: str, results: list[MarqError | None]) -> list[MarqError | None]:
        self.meters.settle_all(action, results)
        return results

    async def _settle(
        self, receipts: Sequence[str], marker: Callable[[int, int, list[int]], Marker], *, current: bool = False
    ) -> list[MarqError | None]:
        """Append a marker for each delivery. `current`: a delivery that is not its message's any more is an error."""
        results: list[MarqError | None] = [None] * len(receipts)
        read, good, where = self.receipts.read, [], []
        topics = self.ownership.topics
        stalled: dict[int, bool] = {}
        for i, text in enumerate(receipts):
            try:
                receipt = read(text)
            except MarqError as exc:
                results[i] = exc
                continue
            number = receipt[0]
            if number not in stalled:
                stalled[number] = self._is_stalled(topics.markers, number)
            if stalled[number]:
                results[i] = _stalled_error()
            else:
                good.append(receipt)
                where.append(i)
        if not good:
            return results
        confirmed = {
            number: self.ownership.outbox(number).put_confirmed(markers)
            for number, markers in by_delivery(good, marker).items()
            if number < topics.partitions
        }
        if len(confirmed) == 1:
            outcomes = {number: await _confirmed(future) for number, future in confirmed.items()}
        else:
            found = await asyncio.gather(*(_confirmed(future) for future in confirmed.values()))
            outcomes = dict(zip(confirmed, found, strict=True))
        if any(isinstance(outcome, MarqError) for outcome in outcomes.values()):
            for i, receipt in zip(where, good, strict=True):
                outcome = outcomes.get(receipt[0])
                if isinstance(outcome, MarqError):
                    results[i] = outcome
        if current:
            await self._check_current(outcomes, good, where, results)
        return results

    async def _check_current(
        self,
        outcomes: dict[int, int | MarqError],
        receipts: Sequence[Receipt],
        where: Sequence[int],
        results: list[MarqError | None],
    ) -> None:
        """Fill in an error for each receipt whose marker, which is in the log, came too late; the owners know."""
        places: dict[int, list[int]] = {}
        for k, receipt in enumerate(receipts):
            if isinstance(outcomes.get(receipt[0]), int):
                places.setdefault(receipt[0], []).append(k)
        answers = await asyncio.gather(
            *(
                self.leases.took_effect(number, outcomes[number], [receipts[k][1:4] for k in chosen])  # type: ignore[arg-type]
                for number, chosen in places.items()
            )
        )
        for chosen, answer in zip(places.values(), answers, strict=True):
            for n, k in enumerate(chosen):
                if isinstance(answer, MarqError):
                    results[where[k]] = answer
                elif not answer[n]:
                    results[where[k]] = LeaseOverError(LEASE_OVER)

    # ------------------------------------------------------------------ queues

    async def create_queue(self, queue: str, values: dict[str, Any]) -> tuple[QueueInfo, bool]:
        """Make a queue of exactly these settings, or set it to them; and whether it is new."""
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
        """Names of queues in order, and after which one to go on (empty: there are no more)."""
        return await page_of(self.catalog.names_from(prefix, after), limit, visible)

    async def list_queues(
        self, prefix: str = "", after: str = "", limit: int = 100, visible: Callable[[str], bool] = lambda queue: True
    ) -> tuple[list[QueueInfo], str]:
        """Queues in the order of their names, and after which one to go on (empty: there are no more)."""
        page, more = await self.names(prefix, after, limit, visible)
        return [self._info(name, self.catalog.records.get(name)) for name in page], more

    async def delete_queue(self, queue: str) -> None:
        """The queue is no more; what is in it is purged."""
        self._check_not_topic_mode()
        await self.purges.purge(queue, delete=True)

    async def purge_queue(self, queue: str) -> None:
        """Everything that is in the queue now is gone, and ids of messages that were sent are forgotten."""
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


def _stalled_error() -> UnavailableError:
    return UnavailableError("Kafka has not confirmed what came earlier; try again later", 2.0)


async def _confirmed(future: asyncio.Future[int]) -> int | MarqError:
    """The offset of the record (-1: Kafka can't tell), or why it is not in the log."""
    try:
        return await asyncio.wait_for(future, CONFIRM_TIMEOUT_S)
    except BrokerError as exc:
        return UnavailableError(f"Kafka did not confirm it; it may still take effect: {exc}")
    except TimeoutError:
        return UnavailableError("Kafka did not confirm it in time; it may still take effect")


def _outcome_of(future: asyncio.Future[Any]) -> int | MarqError:
    """The offset of an append, or why there is none."""
    if not future.done():
        future.cancel()
        return UnavailableError("Kafka did not confirm it in time; it may still get there")
    error = future.exception()
    if error is None:
        return int(future.result().offset)
    if isinstance(error, MessageSizeTooLargeError | RecordTooLargeError):
        return TooLargeError("Kafka refuses the message: it is larger than the topic allows")
    if isinstance(error, ProducerFull):
        return UnavailableError(str(error))
    if isinstance(error, KafkaError):
        return UnavailableError(f"Kafka did not take it; it may still get there: {type(error).__name__}")
    return UnavailableError(f"not sent: {type(error).__name__}")
