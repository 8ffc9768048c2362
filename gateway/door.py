"""The front door: what people do with queues, whatever protocol they speak.

Each protocol (JSON, SQS) translates its requests into calls of `Door` and its results and errors into answers; no rule
of a queue stands there. A receive that finds nothing waits: per queue, those who wait are served first come, first
served, by the partitions of this worker, and by the other workers through `gateway.peers`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordTooLargeError
from mode import Service

from app.ownership import Held, now_ms
from app.topics import MAX_MESSAGE_BYTES
from app.transport import ProducerFull
from gateway.receipts import Receipt, Receipts, queue_crc
from marq.core.markers import End, Keepalive, Marker, Release, split
from marq.core.owner import Handout, Pending
from marq.core.partition import H_DELAY, H_TTL
from marq.core.policies import name_problem
from marq.core.ranges import ranges_of
from marq.core.segments import Segment
from marq.errors import (
    BadValueError,
    BrokerError,
    LeaseOverError,
    MarqError,
    NotPossibleError,
    TooLargeError,
    UnavailableError,
    UnknownQueueError,
)
from marq.message import HEADER_KEY, RESERVED

if TYPE_CHECKING:
    from app.ownership import Ownership
    from app.queues import QueueRecord
    from app.settings import Settings
    from gateway.metrics import Meters
    from gateway.peers import Peers

#: Receives that may wait at one worker.
WAITING_MAX = 10_000
#: Seconds until Kafka has to confirm what a request appended.
CONFIRM_TIMEOUT_S = 10.0
#: A send that waits for so long says that Kafka is away: others are refused instead of piling up.
STALLED_S = 3.0
#: Messages of one request that go to one partition in a row: enough for a full batch, few enough to spread.
RUN_MESSAGES = 500
#: Bytes of a message that are left for its headers' and the record's own.
RECORD_ROOM_BYTES = 1024
#: Of so many receives one looks at the other workers first, so that what is there does not wait for ever.
ELSEWHERE_FIRST = 8
#: Header by which the messages of a group are known.
H_GROUP = "marq-group"
#: Headers of ours that receivers see.
_SHOWN = "marq-dead-"


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A message to send."""

    payload: bytes
    key: bytes | None = None
    headers: dict[str, bytes] = {}
    delay_ms: int | None = None
    ttl_ms: int | None = None
    group: str | None = None


class Sent(msgspec.Struct, frozen=True):
    """Where a message is; offset -1: it is in the log, but Kafka can't tell any more where."""

    topic: str
    partition: int
    offset: int


class Received(msgspec.Struct):
    """One delivery of a message."""

    receipt: str
    queue: str
    topic: str
    partition: int
    offset: int
    attempt: int
    sent_ms: int
    key: bytes | None
    headers: dict[str, bytes]
    payload: bytes


class QueueInfo(msgspec.Struct):
    """A queue. `version` 0: it was made by a message and has the default settings; `purging`: a purge is under way."""

    name: str
    settings: dict[str, Any]
    version: int
    created_ms: int
    purging: bool


class Waiter:
    """A receive under way: the receiver of what it asked partitions for."""

    __slots__ = ("away", "done", "future", "gone", "lease_ms", "limit", "messages", "name", "pending", "queue")

    def __init__(
        self, queue: str, limit: int, lease_ms: int, name: str, gone: Callable[[], bool], future: asyncio.Future[None]
    ) -> None:
        self.queue = queue
        self.limit = limit
        self.lease_ms = lease_ms
        self.name = name
        self.gone = gone
        self.future = future  # done when there is something to answer
        self.messages: list[Received] = []
        self.pending: list[tuple[Held, Pending]] = []  # starts on their way
        self.away = False  # another worker is being asked for it
        self.done = False  # answered or given up: whatever still comes goes back


class Ask:
    """What a waiter asked one partition for."""

    __slots__ = ("door", "waiter")

    def __init__(self, door: Door, waiter: Waiter) -> None:
        self.door = door
        self.waiter = waiter

    def handed(self, held: Held, handout: Handout) -> None:
        self.door.handed_to(self.waiter, held, handout)


def _never() -> bool:
    return False


class Door(Service):
    """The operations. A receiver of the ownership."""

    def __init__(self, ownership: Ownership, settings: Settings, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ownership = ownership
        self.settings = settings
        self.catalog = ownership.catalog
        self.closing = False
        self._receipts: Receipts | None = None
        self._waiting: dict[str, deque[Waiter]] = {}
        self._waiting_count = 0
        self._turn = random.randrange(1 << 16)
        self._partition_turn = random.randrange(1 << 16)
        self._sending: dict[int, float] = {}  # sends under way -> when they began
        self._serial = itertools.count()
        self._crcs: dict[str, int] = {}
        self._random = random.Random()
        self._receives = 0
        self.meters: Meters | None = None
        self.peers: Peers | None = None  # set by the worker; without it, this worker is alone
        ownership.receivers.append(self)

    @property
    def waiting(self) -> int:
        """Receives that wait here."""
        return self._waiting_count

    @property
    def receipts(self) -> Receipts:
        """Makes and reads receipts."""
        if self._receipts is None:
            self._receipts = Receipts(self.catalog.secret)
        return self._receipts

    # ------------------------------------------------------------------ send

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> list[Sent | MarqError]:
        """Append messages; for each where it is, or why it is not there.

        Raises:
            UnavailableError: none was accepted, because Kafka is slow or away. Some may still get there.
            RequestError: the queue can't be sent to.
        """
        await self._check_sendable(queue)
        loop = asyncio.get_running_loop()
        self._refuse_if_stalled(loop.time())
        topic, count = self.ownership.topics.queue, self.ownership.topics.partitions
        key, settings = queue.encode(), self.catalog.settings_of(queue)
        append_run = self.ownership.app.producer.append_run
        results: list[Any] = [None] * len(messages)
        runs: dict[int, tuple[list[int], list[tuple[bytes, list[tuple[str, bytes]]]]]] = {}
        partition = 0
        for i, message in enumerate(messages):
            if i % RUN_MESSAGES == 0:
                self._partition_turn += 1
                partition = self._partition_turn % count
            try:
                headers = self._headers(message, settings.delay_ms)
            except MarqError as exc:
                results[i] = exc
                continue
            number = partition if message.group is None else crc32(message.group.encode()) % count
            run = runs.get(number)
            if run is None:
                run = runs[number] = ([], [])
            run[0].append(i)
            run[1].append((message.payload, headers))
        appended = [
            (number, places, append_run(topic, number, key, records)) for number, (places, records) in runs.items()
        ]
        serial = next(self._serial)
        self._sending[serial] = loop.time()
        try:
            futures = [future for _, _, parts in appended for _, future in parts]
            if futures:
                await asyncio.wait(futures, timeout=CONFIRM_TIMEOUT_S)
        finally:
            del self._sending[serial]
        unavailable: UnavailableError | None = None
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
        if self.meters is not None:
            self.meters.sent.inc(sum(isinstance(result, Sent) for result in results))
            self.meters.sent_bytes.inc(sum(len(message.payload) for message in messages))
        return results

    async def _check_sendable(self, queue: str) -> None:
        if self.settings.queue_id is not None:
            raise NotPossibleError(
                f"in topic mode marq never writes to the topic: send to {self.ownership.topics.queue} with a Kafka "
                "producer"
            )
        if not self.catalog.exists(queue):
            if not self.settings.auto_create:
                self.catalog.require(queue)
            await self.catalog.make(queue)

    def _headers(self, message: Outgoing, delay_ms: int) -> list[tuple[str, bytes]]:
        if not message.headers and message.key is None and message.delay_ms is None and message.ttl_ms is None:
            headers: list[tuple[str, bytes]] = []
            size = len(message.payload)
        else:
            headers = list(message.headers.items())
            size = len(message.payload) + sum(len(name) + len(value) + 8 for name, value in headers)
            for name in message.headers:
                if name.startswith(RESERVED):
                    raise BadValueError(f"header {name!r}: names that begin with {RESERVED!r} are marq's own")
            if message.key is not None:
                headers.append((HEADER_KEY, message.key))
                size += len(message.key)
            if message.delay_ms is not None:
                delay_ms = message.delay_ms
            if message.ttl_ms:
                headers.append((H_TTL, b"%d" % message.ttl_ms))
        if delay_ms:
            headers.append((H_DELAY, b"%d" % delay_ms))
        if message.group is not None:
            headers.append((H_GROUP, message.group.encode()))
        if size > MAX_MESSAGE_BYTES - RECORD_ROOM_BYTES:
            raise TooLargeError(
                f"a message of {size} bytes; at most {MAX_MESSAGE_BYTES - RECORD_ROOM_BYTES} with key and headers"
            )
        return headers

    def _refuse_if_stalled(self, now: float) -> None:
        for began in self._sending.values():
            if now - began > STALLED_S:
                raise UnavailableError("Kafka has not confirmed earlier sends; try again later", 2.0)
            return

    # ------------------------------------------------------------------ receive

    async def receive(
        self,
        queue: str,
        *,
        limit: int = 1,
        wait_ms: int = 0,
        lease_ms: int | None = None,
        name: str = "",
        gone: Callable[[], bool] = _never,
    ) -> list[Received]:
        """Take up to `limit` messages; wait up to `wait_ms` for the first.

        Args:
            lease_ms: how long they are the receiver's; None: as the queue says.
            name: of the receiver, noted in the log.
            gone: tells whether the receiver went away: then it gets nothing, and what was on its way goes back.

        Raises:
            UnavailableError: too many wait already.
            RequestError: there is no such queue.
        """
        if self._waiting_count >= WAITING_MAX:
            raise UnavailableError(f"{WAITING_MAX} receives wait here already; try again later", 1.0)
        self._check_receivable(queue)
        if lease_ms is None:
            lease_ms = self.catalog.settings_of(queue).visibility_timeout_ms
        loop = asyncio.get_running_loop()
        waiter = Waiter(queue, limit, lease_ms, name, gone, loop.create_future())
        self._receives += 1
        if self.peers is not None and self._receives % ELSEWHERE_FIRST == 0 and await self._look_elsewhere(waiter):
            return self._answer(waiter)
        line = self._waiting.get(queue)
        if not line:
            self._take(waiter)
        if not waiter.pending:
            if wait_ms <= 0 or self.closing:
                await self._look_elsewhere(waiter)
                return self._answer(waiter)
            self._waiting.setdefault(queue, deque()).append(waiter)
            if self.peers is not None:
                self.peers.hunt(queue)
        self._waiting_count += 1
        timer = loop.call_later(wait_ms / 1000, self._wait_over, waiter)
        try:
            await waiter.future
        finally:
            timer.cancel()
            self._waiting_count -= 1
            self._finish(waiter)
        return self._answer(waiter)

    def _answer(self, waiter: Waiter) -> list[Received]:
        if waiter.messages and waiter.gone():
            self._give_back(waiter.messages)
            return []
        if self.meters is not None and waiter.messages:
            self.meters.received.inc(len(waiter.messages))
            first = waiter.messages[0]
            if first.attempt == 1:
                # one of a delivery: they were read together
                self.meters.age.observe(max(0.0, time.time() - first.sent_ms / 1000))
        return waiter.messages

    def _check_receivable(self, queue: str) -> None:
        if self.settings.queue_id is not None and queue != self.settings.queue_id:
            raise UnknownQueueError(f"in topic mode there is one queue, {self.settings.queue_id!r}")
        if not self.settings.auto_create or name_problem(queue) is not None:
            self.catalog.require(queue)

    async def receive_here(self, queue: str, limit: int, lease_ms: int, name: str, gone: Callable[[], bool]) -> Any:
        """What this worker has right now, for another one that asks."""
        waiter = Waiter(queue, limit, lease_ms, name, gone, asyncio.get_running_loop().create_future())
        if not self._waiting.get(queue):
            self._take(waiter)
        if not waiter.pending:
            return []
        waiter.away = True  # not to be put in line here
        timer = asyncio.get_running_loop().call_later(CONFIRM_TIMEOUT_S, self._give_up, waiter)
        try:
            await waiter.future
        finally:
            timer.cancel()
            self._finish(waiter)
        return self._answer(waiter)

    # ------------------------------------------------------------------ receive: at other workers

    async def _look_elsewhere(self, waiter: Waiter) -> bool:
        """Take what another worker has right now; False if there is nothing."""
        if self.peers is None:
            return False
        for url in await self.peers.ready_at(waiter.queue, watch=False):
            waiter.messages = await self._fetch(url, waiter)
            if waiter.messages:
                return True
        return False

    async def fetch(self, queue: str, url: str) -> bool:
        """Take what another worker has right now for the first who waits here; False if that was nothing."""
        line = self._waiting.get(queue)
        while line and line[0].gone():
            self._give_up(line.popleft())
        if not line:
            return False
        waiter = line.popleft()
        waiter.away = True
        messages = await self._fetch(url, waiter)
        waiter.away = False
        if messages and (waiter.done or waiter.future.done()):
            self._give_back(messages)
        elif messages:
            waiter.messages = messages
            waiter.future.set_result(None)
        elif not waiter.future.done():
            self._waiting.setdefault(queue, deque()).appendleft(waiter)
            self._serve(queue)
        return bool(messages)

    async def _fetch(self, url: str, waiter: Waiter) -> list[Received]:
        assert self.peers is not None
        argument = {"queue": waiter.queue, "limit": waiter.limit, "lease_ms": waiter.lease_ms, "name": waiter.name}
        try:
            found: list[Received] = await self.peers.call(url, "receive", argument, list[Received])
        except MarqError as exc:
            self.log.info("%s", exc)
            return []
        return found

    def waited_for(self) -> list[str]:
        """Queues that receivers wait for here."""
        return list(self._waiting)

    def waiting_count(self, queue: str) -> int:
        """How many receivers wait here for `queue`."""
        line = self._waiting.get(queue)
        return len(line) if line else 0

    def has_ready(self, queue: str) -> bool:
        """True if a partition of this worker may have something for a receiver of `queue`."""
        return any(h.serving and h.owner.partition.has_ready(queue) for h in self.ownership.held.values())

    # ------------------------------------------------------------------ receive: here

    def _take(self, waiter: Waiter) -> None:
        """Ask the partitions here, one after the other, until the waiter has enough on its way."""
        held = [h for h in self.ownership.held.values() if h.serving]
        if not held:
            return
        self._turn += 1
        first = self._turn % len(held)
        left = waiter.limit
        for one in held[first:] + held[:first]:
            left -= self._take_from(one, waiter, left)
            if left <= 0:
                return

    def _take_from(self, held: Held, waiter: Waiter, limit: int) -> int:
        """How many messages of one partition are on their way to the waiter now."""
        owner = held.owner
        if not owner.partition.has_ready(waiter.queue):
            return 0
        pending = owner.acquire(
            (waiter.queue,), limit, Ask(self, waiter), now_ms(), lease_ms=waiter.lease_ms, name=waiter.name
        )
        if pending is None:
            return 0
        waiter.pending.append((held, pending))
        appends, owner.appends = owner.appends, []
        held.outbox.put(appends)
        return len(pending.offsets)

    def handed_to(self, waiter: Waiter, held: Held, handout: Handout) -> None:
        """A delivery that the waiter asked for begins, or nothing came of it."""
        delivery = handout.receipt[1]
        waiter.pending = [(h, p) for h, p in waiter.pending if h is not held or p.delivery != delivery]
        if handout.offsets:
            if waiter.done or waiter.gone():
                held.owner.release(handout.offsets, handout.receipt, counted=False)
            else:
                self._read(waiter, held, handout)
        if not waiter.pending and not waiter.done:
            self._settled(waiter)

    def _settled(self, waiter: Waiter) -> None:
        """All starts of the waiter came back: it has something, or goes on waiting as the first in line."""
        if waiter.messages or waiter.away:
            if not waiter.future.done():
                waiter.future.set_result(None)
            return
        self._waiting.setdefault(waiter.queue, deque()).appendleft(waiter)
        asyncio.get_running_loop().call_soon(self._serve, waiter.queue)
        if self.peers is not None:
            self.peers.hunt(waiter.queue)

    def _read(self, waiter: Waiter, held: Held, handout: Handout) -> None:
        partition, topic, number = held.owner.partition, self.ownership.topics.queue, held.number
        queue, (epoch, delivery) = waiter.queue, handout.receipt
        make, holds, messages = self.receipts.make, partition.holds, partition.messages
        crc = self._crcs.get(queue)
        if crc is None:
            if len(self._crcs) > 100_000:
                self._crcs.clear()
            crc = self._crcs[queue] = queue_crc(queue)
        add, shown = waiter.messages.append, _SHOWN
        for offset in handout.offsets:
            record = messages[offset]
            if type(record) is Segment:
                record = partition.record(offset)
            attempt = holds[offset].receives
            headers: dict[str, bytes] = {}
            key = None
            for header, value in record.headers:
                if not header.startswith(RESERVED) or header.startswith(shown):
                    headers[header] = value or b""
                elif header == HEADER_KEY:
                    key = value
            receipt = make(number, epoch, delivery, offset, attempt, crc)
            sent_ms, payload = record.timestamp, record.value or b""
            add(Received(receipt, queue, topic, number, offset, attempt, sent_ms, key, headers, payload))

    def _wait_over(self, waiter: Waiter) -> None:
        if waiter.pending or waiter.away:
            # its start is on its way, which takes milliseconds, or Kafka is away
            asyncio.get_running_loop().call_later(CONFIRM_TIMEOUT_S, self._give_up, waiter)
        else:
            self._give_up(waiter)

    def _give_up(self, waiter: Waiter) -> None:
        if not waiter.future.done():
            waiter.future.set_result(None)

    def _finish(self, waiter: Waiter) -> None:
        """The receive ends: what still comes for it goes back uncounted."""
        waiter.done = True
        for _, pending in waiter.pending:
            pending.gone = True
        line = self._waiting.get(waiter.queue)
        if line is not None:
            if waiter in line:
                line.remove(waiter)
            if not line:
                del self._waiting[waiter.queue]

    def _give_back(self, messages: Sequence[Received]) -> None:
        """Nobody is there any more to answer to: as if the messages had never been handed out."""
        for number, markers in self._markers(
            [self.receipts.read(m.receipt) for m in messages], lambda e, d, r: Release(e, d, r, 0, counted=False)
        ).items():
            self.ownership.outbox(number).put(markers)

    def _serve(self, queue: str) -> None:
        """Give those who wait for `queue` what there is here, first come, first served."""
        for held in list(self.ownership.held.values()):
            if held.serving:
                self._serve_from(held, queue)

    def _serve_from(self, held: Held, queue: str) -> None:
        line = self._waiting.get(queue)
        while line:
            waiter = line[0]
            if waiter.gone():
                line.popleft()
                self._give_up(waiter)
            elif self._take_from(held, waiter, waiter.limit):
                line.popleft()
            else:
                return

    # -- receiver of the ownership

    def handed(self, held: Held, handout: Handout) -> None:
        raise AssertionError("deliveries go to the Ask that took them")

    def wake(self, held: Held) -> None:
        """Something became ready in a partition of this worker."""
        has_ready = held.owner.partition.has_ready
        if self._waiting:
            for queue in list(self._waiting):
                if has_ready(queue):
                    self._serve_from(held, queue)
        if self.peers is not None and self.peers.watchers:
            for queue in list(self.peers.watchers):
                if has_ready(queue):
                    self.peers.tell(queue)

    def starving(self, held: Held) -> bool:
        has_ready = held.owner.partition.has_ready
        if any(not has_ready(queue) for queue in self._waiting):
            return True
        return self.peers is not None and any(not has_ready(queue) for queue in self.peers.watchers)

    def wants(self, queue: str) -> bool:
        return queue in self._waiting or (self.peers is not None and queue in self.peers.watchers)

    def forget(self, held: Held) -> None:
        """The partition went away with all that was on its way from it."""
        for waiter in self._asking(held):
            waiter.pending = [(h, p) for h, p in waiter.pending if h is not held]
            if not waiter.pending and not waiter.done:
                self._settled(waiter)

    def _asking(self, held: Held) -> list[Waiter]:
        pendings = held.owner._pending.values()
        return [p.receiver.waiter for p in pendings if isinstance(p.receiver, Ask)]

    # ------------------------------------------------------------------ acknowledge and the like

    async def ack(self, receipts: Sequence[str]) -> list[MarqError | None]:
        """Finished; for each receipt None once that is in the log, or an error."""
        return await self._settle(receipts, lambda epoch, delivery, ranges: End(epoch, ranges, "acked", delivery))

    async def extend(self, receipts: Sequence[str], lease_ms: int) -> list[MarqError | None]:
        """Still at work: the lease ends `lease_ms` from now."""
        return await self._settle(
            receipts, lambda epoch, delivery, ranges: Keepalive(epoch, delivery, ranges, lease_ms)
        )

    async def release(
        self, receipts: Sequence[str], delay_ms: int | None = None, counted: bool = True
    ) -> list[MarqError | None]:
        """Given back, ready again after `delay_ms`. Not `counted`: it was never looked at, and is no attempt.

        Without a delay, the back-off of the queue, if it has one.
        """
        if delay_ms is None and counted and self.catalog.with_backoff:
            return await self._release_with_backoff(receipts)
        delay = delay_ms or 0
        return await self._settle(
            receipts, lambda epoch, delivery, ranges: Release(epoch, delivery, ranges, delay, counted)
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
            for i, result in zip(places, await self.release(chosen, delay), strict=True):
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
        for places, done in zip(deliveries.values(), outcomes, strict=True):
            for offset, entries in places.items():
                for i in entries:
                    if isinstance(done, MarqError):
                        results[i] = done
                    elif offset not in done:
                        results[i] = LeaseOverError("the message is finished, or its lease is over")
        return results

    async def _reject(
        self, number: int, epoch: int, delivery: int, offsets: list[int], reason: str
    ) -> set[int] | MarqError:
        argument = {"partition": number, "epoch": epoch, "delivery": delivery, "offsets": offsets, "reason": reason}
        held = self.ownership.held.get(number)
        if held is not None and held.serving:
            return set(await self.reject_here(argument))
        url = self.peers.owner_of(number) if self.peers is not None else None
        try:
            if url is not None and self.peers is not None and url != self.peers.url:
                found: list[int] = await self.peers.call(url, "reject", argument, list[int], 2 * CONFIRM_TIMEOUT_S)
                return set(found)
        except MarqError as exc:
            return exc
        return UnavailableError(f"partition {number} is served by nobody right now")

    async def reject_here(self, argument: dict[str, Any]) -> list[int]:
        """Dead letters of a partition of this worker: which offsets became some."""
        held = self.ownership.held.get(argument["partition"])
        if held is None or not held.serving:
            raise UnavailableError(f"partition {argument['partition']} is not served here")
        receipt = (argument["epoch"], argument["delivery"])
        return sorted(await self.ownership.letters.reject(held, argument["offsets"], receipt, argument["reason"]))

    async def _settle(
        self, receipts: Sequence[str], marker: Callable[[int, int, list[int]], Marker]
    ) -> list[MarqError | None]:
        results: list[MarqError | None] = [None] * len(receipts)
        read, good, where = self.receipts.read, [], []
        for i, text in enumerate(receipts):
            try:
                receipt = read(text)
            except MarqError as exc:
                results[i] = exc
            else:
                good.append(receipt)
                where.append(i)
        if not good:
            return results
        count = self.ownership.topics.partitions
        confirmed = {
            number: self.ownership.outbox(number).put_confirmed(markers)
            for number, markers in self._markers(good, marker).items()
            if number < count
        }
        if len(confirmed) == 1:
            errors = {number: await _confirmed(future) for number, future in confirmed.items()}
        else:
            outcomes = await asyncio.gather(*(_confirmed(future) for future in confirmed.values()))
            errors = dict(zip(confirmed, outcomes, strict=True))
        if any(errors.values()):
            for i, receipt in zip(where, good, strict=True):
                results[i] = errors[receipt[0]]
        return results

    @staticmethod
    def _markers(
        receipts: Sequence[Receipt], marker: Callable[[int, int, list[int]], Marker]
    ) -> dict[int, list[Marker]]:
        """One marker per delivery, by partition."""
        deliveries: dict[tuple[int, int, int], list[int]] = {}
        for receipt in receipts:
            deliveries.setdefault(receipt[:3], []).append(receipt[3])
        markers: dict[int, list[Marker]] = {}
        for (number, epoch, delivery), offsets in deliveries.items():
            offsets.sort()
            if any(a == b for a, b in itertools.pairwise(offsets)):
                offsets = sorted(set(offsets))
            markers.setdefault(number, []).extend(split(marker(epoch, delivery, ranges_of(offsets))))
        return markers

    # ------------------------------------------------------------------ queues

    async def create_queue(self, queue: str, values: dict[str, Any]) -> tuple[QueueInfo, bool]:
        """Make a queue of exactly these settings, or set it to them; and whether it is new."""
        record, made = await self.catalog.create(queue, values)
        return self._info(queue, record), made

    async def update_queue(self, queue: str, values: dict[str, Any]) -> QueueInfo:
        """Set some values of a queue."""
        return self._info(queue, await self.catalog.update(queue, values))

    def get_queue(self, queue: str) -> QueueInfo:
        """A queue and all its settings. Raises `UnknownQueueError`."""
        self.catalog.require(queue)
        return self._info(queue, self.catalog.records.get(queue))

    def list_queues(
        self, prefix: str = "", after: str = "", limit: int = 100, visible: Callable[[str], bool] = lambda queue: True
    ) -> tuple[list[QueueInfo], str]:
        """Queues in the order of their names, and after which one to go on (empty: there are no more)."""
        names = [n for n in self.catalog.names() if n.startswith(prefix) and n > after and visible(n)]
        page = names[:limit]
        more = page[-1] if len(names) > limit else ""
        return [self._info(name, self.catalog.records.get(name)) for name in page], more

    async def delete_queue(self, queue: str) -> None:
        """The queue is no more; what is in it is purged."""
        self._check_not_topic_mode()
        topics = self.ownership.topics
        await self.catalog.purge(queue, topics.queue, topics.partitions, delete=True)

    async def purge_queue(self, queue: str) -> None:
        """Everything that is in the queue now will be gone."""
        topics = self.ownership.topics
        await self.catalog.purge(queue, topics.queue, topics.partitions)

    def _check_not_topic_mode(self) -> None:
        if self.settings.queue_id is not None:
            raise NotPossibleError("in topic mode the queue is the topic: it can't be deleted here")

    def _info(self, queue: str, record: QueueRecord | None) -> QueueInfo:
        settings = record.settings if record is not None and record.active else self.catalog.default
        return QueueInfo(
            queue,
            msgspec.structs.asdict(settings),
            record.version if record is not None else 0,
            record.created_ms if record is not None else 0,
            bool(record is not None and record.purge),
        )

    # ------------------------------------------------------------------ life

    async def on_start(self) -> None:
        assert self.receipts
        if self.peers is not None:
            self.peers.register("reject", self.reject_here)

    async def close(self) -> None:
        """Answer those who wait: another worker will serve them."""
        self.closing = True
        for line in list(self._waiting.values()):
            for waiter in list(line):
                self._give_up(waiter)


async def _confirmed(future: asyncio.Future[int]) -> MarqError | None:
    try:
        await asyncio.wait_for(future, CONFIRM_TIMEOUT_S)
    except BrokerError as exc:
        return UnavailableError(f"Kafka did not confirm it; it may still take effect: {exc}")
    except TimeoutError:
        return UnavailableError("Kafka did not confirm it in time; it may still take effect")
    return None


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
