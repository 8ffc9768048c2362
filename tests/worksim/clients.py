"""Senders and receivers, through any worker, over a network that may lose their answers."""

from __future__ import annotations

import asyncio
import itertools
from binascii import a2b_base64
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from app.service.receipts import _BODY, Receipt, Receipts
from marq.errors import MarqError, TooLargeError
from marq.protocol.messages import Entry, Received, Sent
from tests.worksim.faults import THEMES
from tests.worksim.handlers import QUEUES
from tests.worksim.jobs import Jobs
from tests.worksim.keyholders import Keyholders

if TYPE_CHECKING:
    from tests.worksim.worker import Worker
    from tests.worksim.world import World

Answer = TypeVar("Answer")

#: Seconds within which a gap in what was read is closed, and within which the end of a log that was not read is.
GAP_S = 0.5
END_S = 6.0
#: Seconds that Kafka may take for a fetch, and a receive sees all that was confirmed all the same: it waits for 0.2 s.
FETCH_S = 0.06
#: Bytes that headers and copies may add to a payload.
ADDED_BYTES = 1_024
#: Milliseconds of the lease of receivers that finish all that they get.
CAREFUL_LEASE_MS = 60_000
#: Of the operation that a client carries out now.
_chance: ContextVar[Random] = ContextVar("chance")


class Lost(Exception):
    """There is no answer."""


class _Receipts(Receipts):
    """Reads receipts without the secret."""

    def __init__(self) -> None:
        super().__init__(lambda: b"")

    def read(self, text: str) -> Receipt:
        return _BODY.unpack(a2b_base64(text)[: _BODY.size])


def _origin_of(copy: Any) -> tuple[int, int]:
    left, _, right = dict(copy.headers)["marq-origin"].decode().partition(":")
    return int(left), int(right)


class Clients:
    """All clients together, with the answers that they got."""

    def __init__(self, world: World, random: Random) -> None:
        self.world = world
        self._random = random
        #: The operations of this run: client and number.
        self.happened: list[tuple[int, int]] = []
        self.queues = ["plain", "other", "order.fifo", "few", *QUEUES]
        self.fifo: tuple[str, ...] = ("order.fifo",)
        #: The queue of a topic that others write to with producers of their own; None: senders use the workers.
        self.topic_queue = world.settings.queue_id
        if self.topic_queue is not None:
            self.queues, self.fifo = [self.topic_queue], ()
        self.theme = THEMES[world.shape.theme]
        self.purged: set[str] = set()
        self.rejected: set[tuple[int, int]] = set()
        self.moving = False
        self.accepts = False  # the acceptance at the end has begun …
        self.is_well = False  # … and nothing of Kafka's answers is lost on purpose
        self.copies: dict[tuple[int, int], tuple[int, int]] = {}  # of a message -> where its copy is
        self.group_at: dict[tuple[str, bytes], int] = {}
        self.sent = 0
        self.accepted: dict[bytes, str] = {}  # payload -> queue
        self.refused: set[bytes] = set()  # payloads that are said to be in no log
        self.quarantined: set[tuple[int, int]] = set()  # messages with a copy in the topic for poison
        self.places: dict[bytes, list[tuple[int, int]]] = {}
        self.outcomes: dict[tuple[int, int], str] = {}
        self.asked: set[tuple[int, int]] = set()  # some client has sent an ack for it, or something as final
        self.acked: set[tuple[int, int]] = set()
        self.open: dict[Any, Worker] = {}
        self.receipts = _Receipts()
        self.keyholders = Keyholders(self)
        self.jobs = Jobs(self)
        #: Queues that a good receiver is taking from.
        self.drains: set[str] = set()

    @property
    def random(self) -> Random:
        return _chance.get(self._random)

    def add_queue(self, queue: str) -> None:
        if queue not in self.queues and self.topic_queue is None:
            self.queues.append(queue)

    # -- calls

    async def call(
        self, operation: Callable[[Worker], Awaitable[Answer]], *, timeout_s: float = 30.0, worker: Worker | None = None
    ) -> Answer:
        """The answer of some worker. Raises `Lost`, or the `MarqError` that it answered."""
        world = self.world
        if worker is None:
            up = world.up()
            if not up:
                await asyncio.sleep(0.2)
                raise Lost
            worker = self.random.choice(up)
        answer: asyncio.Future[Any] = world.loop.create_future()
        lost = not world.healing and self.random.random() < self.world.faults.client_loss

        async def serve() -> None:
            try:
                found: Any = await operation(worker)
            except MarqError as exc:
                found = exc
            if not lost:
                world.kafka.later(world.net.latency(), lambda: answer.done() or answer.set_result(found))

        await asyncio.sleep(world.net.latency())
        if not worker.listens:
            raise Lost
        self.open[answer] = worker
        worker.process.spawn(serve())
        try:
            async with asyncio.timeout(timeout_s):
                found = await answer
        except TimeoutError:
            raise Lost from None
        finally:
            del self.open[answer]
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    def wait_for(self, worker: Worker) -> bool:
        """True if a client waits for an answer of a worker."""
        return worker in self.open.values()

    def lost(self, worker: Worker) -> None:
        """A worker is no more."""
        for answer, asked in list(self.open.items()):
            if asked is worker and not answer.done():
                answer.set_exception(Lost())

    async def receive(self, worker: Worker, queue: str, gone: Callable[[], bool], **how: Any) -> list[Received]:
        """In a worker: what leaves it is looked at."""
        ready = self._ready(queue)
        found = await worker.operations.receive(queue, gone=gone, **how)
        if found and gone():
            self.world.violated("gone", f"{worker.process.name} answers {queue} to a client that is gone")
        if ready and len(found) < how["limit"] and not gone():
            self._is_whole(worker, queue, ready, found)
        for one in found:
            receipt = worker.operations.receipts.read(one.receipt)
            self.world.truths[one.partition].handed_out(worker, one, receipt)
        self.keyholders.receipts.extend(found)
        self.world.tell("%s hands out %s", worker.process.name, [(o.partition, o.offset, o.attempt) for o in found])
        return found

    def _ready(self, queue: str) -> dict[tuple[int, int], Any]:
        """What a receive that comes now has to find if nothing goes wrong, and the owner of each.

        These messages are in the log, and were never delivered. None of them waits for its delay or another message.
        """
        world, ready = self.world, dict[tuple[int, int], Any]()
        if world.shape.faults and not self.is_well:
            return ready
        for truth in world.truths:
            owned = self._owned(truth.number)
            if owned is None:
                continue
            waiting: set[bytes] = set()  # groups of which a message is not done
            for offset, message in truth.reference.messages.items():
                if message.queue != queue or offset in truth.reference.done:
                    continue
                new = offset not in truth.reference.states and not message.duplicate
                if new and not (message.due_ms or message.expires_ms) and message.group not in waiting:
                    ready[truth.number, offset] = owned
                elif queue in self.fifo:
                    waiting.add(message.group)
        return ready

    def _owned(self, number: int) -> Any:
        """A partition at the worker that serves it."""
        found = (worker.ownership.owned.get(number) for worker in self.world.up())
        return next((owned for owned in found if owned is not None and owned.serving), None)

    def _is_whole(self, worker: Worker, queue: str, ready: dict[tuple[int, int], Any], found: list[Received]) -> None:
        """A receive that got less than it asked for leaves nothing behind, but what others got meanwhile."""
        got = {(one.partition, one.offset) for one in found}
        blocked: set[tuple[int, bytes]] = set()  # groups of which somebody else got a message
        for (number, offset), owned in ready.items():
            if (number, offset) in got:
                continue
            ref = self.world.truths[number].reference
            group = (number, ref.messages[offset].group)
            if offset in ref.done or offset in ref.states or offset in owned.owner.partition.reserved:
                blocked.add(group)
            elif self._owned(number) is owned and not (queue in self.fifo and group in blocked):
                self.world.violated(
                    "whole",
                    f"{worker.process.name} answers {sorted(got)} to a receive from {queue}, "
                    f"and {number}@{offset} was ready before it came",
                )
        self.world.count("whole receives")

    # -- a client

    async def live(self, number: int) -> None:
        """Send and receive, until the end."""
        for count in itertools.count():
            _chance.set(self.world.entropy.of("client", number, count))
            if (number, count) not in self.world.cut.operations:
                self.happened.append((number, count))
                if self.theme.careful:  # what has begun goes on when the faults are over
                    await asyncio.shield(self.world.spawn(self._do()))
                else:
                    await self._do()
            await asyncio.sleep(self.random.random() * self.random.choice((0.01, 0.3, 2.0)) * self.theme.pause)

    async def _do(self) -> None:
        try:
            what = self.random.random()
            if self.theme.jobs and what < 0.6 and self.topic_queue is None:
                await self.jobs.change()
            elif what < 0.5:
                await self._send()
            elif what < 0.93 or self.theme.careful:
                await self._receive()
            elif what < 0.97:
                await self.keyholders.ask()
            else:
                await self._manage()
        except (Lost, MarqError) as exc:
            self.world.count(f"client: {type(exc).__name__}")

    async def _send(self) -> None:
        r, queue = self.random, self.random.choice(self.queues)
        entries = [self._entry(queue) for _ in range(r.choice((1, 1, 3, 20)))]
        try:
            await self._deliver(queue, entries)
        except (Lost, MarqError):
            if queue not in self.fifo or r.random() < 0.3:
                raise
            await asyncio.sleep(r.choice((0.1, 3.0)))
            await self._deliver(queue, entries)  # with the same ids: they count once

    def _entry(self, queue: str, large: bool = True) -> Entry:
        r = self.random
        self.sent += 1
        group = f"g{r.randrange(3)}" if queue in self.fifo else None
        payload, most = b"m%d" % self.sent, self.world.kafka.odds.max_bytes
        if large and most and r.random() < self.theme.large:
            payload = payload.ljust(most + r.randrange(-ADDED_BYTES, 200), b".")
        return Entry(
            payload,
            delay_ms=r.choice((200, 3_000)) if r.random() < 0.1 and group is None else None,
            ttl_ms=r.choice((300, 5_000)) if r.random() < 0.05 else None,
            group=group,
            deduplication_id=str(self.sent) if group is not None else None,
        )

    def plain_entry(self) -> Entry:
        self.sent += 1
        return Entry(b"m%d" % self.sent)

    async def _deliver(self, queue: str, entries: list[Entry], worker: Worker | None = None) -> None:
        if self.topic_queue is not None:
            await self._produce(entries)
            return
        results = await self.call(lambda worker: worker.operations.send(queue, entries), worker=worker)
        for entry, result in zip(entries, results, strict=True):
            if isinstance(result, TooLargeError):
                self.refused.add(entry.payload)
                self.world.count("too large")
                if not self._may_be_too_large(len(entry.payload)) or self.places.get(entry.payload):
                    self.world.violated("said", f"{entry.payload[:20]!r} is refused as too large: {result}")
            elif isinstance(result, Sent):
                self.accepted[entry.payload] = queue
                self.world.count("accepted")
                if result.offset >= 0 and (result.partition, result.offset) not in self.places[entry.payload]:
                    self.world.violated("G1 place", f"{entry} is said to be at {result}: {self.places[entry.payload]}")

    def _may_be_too_large(self, size: int) -> bool:
        """For Kafka, with the headers that a message or its copy has."""
        return 0 < self.world.kafka.odds.max_bytes < size + ADDED_BYTES

    async def _produce(self, entries: list[Entry]) -> None:
        """Write to the topic without marq."""
        world, r = self.world, self.random
        log = world.kafka.log(world.topics.queue, r.randrange(world.topics.partitions))
        await world.kafka.trip()
        if log.is_away or log.stalled_until > world.loop.now:
            raise Lost
        entries = [entry for entry in entries if not self._may_be_too_large(len(entry.payload) - ADDED_BYTES)]
        rows = []
        for entry in entries:
            headers = [("marq-delay-ms", b"%d" % entry.delay_ms)] if entry.delay_ms is not None else []
            headers += [("marq-ttl-ms", b"%d" % entry.ttl_ms)] if entry.ttl_ms is not None else []
            rows.append((r.choice((None, b"", b"key", b"\xff")), entry.payload, headers))
        for entry in entries:
            self.accepted[entry.payload] = self.queues[0]
            world.count("accepted")
        log.append(rows)

    async def _receive(self) -> None:
        r, queue = self.random, self.random.choice([queue for queue in self.queues if queue not in QUEUES])
        lease_ms = CAREFUL_LEASE_MS if self.theme.careful else r.choice((300, 2_000, 10_000))
        over: list[int] = []
        try:
            found = await self.call(
                lambda worker: self.receive(
                    worker,
                    queue,
                    lambda: bool(over),
                    limit=r.choice((1, 3, 10)),
                    wait_ms=r.choice((0, 0, 500, 5_000)),
                    lease_ms=lease_ms,
                ),
                timeout_s=30.0 if self.theme.careful else r.choice((30.0, 30.0, 30.0, 0.5, 0.02)),
            )
        finally:
            over.append(1)
        if not found:
            return
        self.world.count("received", len(found))
        what = r.random()
        if self.theme.careful:
            await self._ack_at_last(found)
            return
        if self.theme.late_clients:
            await asyncio.sleep(lease_ms / 1000 * r.uniform(0.8, 1.05))
            what = r.choice((what, 0.7))
        else:
            await asyncio.sleep(r.random() * r.choice((0.01, 0.3, 2.0 * lease_ms / 1000)))
        receipts = [one.receipt for one in found]
        if what < 0.65:
            await self._ack(found)
        elif what < 0.75:
            results = await self.call(lambda worker: worker.operations.extend(receipts, 1_000))
            self._took_effect("extension", found, results)
            await self._ack(found)
        elif what < 0.85:
            delay_ms, counted = r.choice((0, 500)), r.random() < 0.7
            results = await self.call(lambda worker: worker.operations.release(receipts, delay_ms, counted))
            self._took_effect("release", found, results)
        elif what < 0.9:
            self.rejected.update((one.partition, one.offset) for one in found)
            await self.call(lambda worker: worker.operations.reject(receipts))

    async def _ack_at_last(self, found: list[Received]) -> None:
        """Acknowledge, again and again while no worker takes it."""
        for pause_s in (0.1,) * 300:
            try:
                await self._ack(found)
                return
            except (Lost, MarqError):
                await asyncio.sleep(pause_s)

    def _took_effect(self, what: str, found: list[Received], results: list[MarqError | None]) -> None:
        for one, result in zip(found, results, strict=True):
            _, epoch, delivery, offset, *_ = self.receipts.read(one.receipt)
            self.world.count(f"{what}: {type(result).__name__}")
            if result is None and (epoch, delivery, offset) not in self.world.truths[one.partition].changed:
                self.world.violated("said", f"{what} of {one.partition}@{offset} as {epoch}/{delivery} had no effect")

    async def _manage(self) -> None:
        """Purge, and move."""
        r, world = self.random, self.world
        if r.random() < 0.5:
            queue = r.choice(("other", "order.fifo")) if self.topic_queue is None else self.topic_queue
            self.purged.add(queue)
            world.tell("%s is to be purged", queue)
            await self.call(lambda worker: worker.operations.purge_queue(queue))
            world.count("purges")
        else:
            to = r.choice((None, "other"))
            self.moving = True
            await self.call(lambda worker: worker.operations.move_some("few.dead", 10, to))
            world.count("moves")

    async def _ack(self, found: list[Received]) -> None:
        self.asked.update((one.partition, one.offset) for one in found)
        results = await self.call(lambda worker: worker.operations.ack([one.receipt for one in found]))
        for one, result in zip(found, results, strict=True):
            if result is None:
                self.acked.add((one.partition, one.offset))
                self.world.count("acks confirmed")
                if (one.partition, one.offset) not in self.outcomes:
                    self.world.violated("G2 ack", f"the ack of {one.partition}@{one.offset} is confirmed, and not done")

    # -- what became of it

    def is_in(self, number: int, record: Any) -> None:
        if record.value in self.refused:
            self.world.violated("G1 refused", f"{number}@{record.offset} was refused")
        self.places.setdefault(record.value, []).append((number, record.offset))
        truth = self.world.truths[number]
        message = truth.reference.messages[record.offset]
        if message.queue in self.fifo and message.group:
            here = self.group_at.setdefault((message.queue, message.group), number)
            if here != number:
                self.world.violated("FIFO place", f"{number}@{record.offset} is of a group that is in {here}: {record}")
        if "marq-origin" in dict(record.headers) and not message.duplicate:
            place = _origin_of(record)
            if place in self.copies:
                self.world.violated("one copy", f"{number}@{record.offset} is of {place}, as {self.copies[place]} is")
            self.copies[place] = (number, record.offset)

    def is_dead_letter(self, record: Any) -> None:
        """In topic mode, which has a topic for them."""
        self.copies.setdefault(_origin_of(record), (-1, record.offset))

    def is_poison(self, record: Any) -> None:
        """A copy is in the topic for poison."""
        self.quarantined.add(_origin_of(record))

    def is_done(self, number: int, offset: int, outcome: str) -> None:
        place = (number, offset)
        self.outcomes[place] = outcome
        message = self.world.truths[number].reference.messages.get(offset)
        if outcome == "acked":
            good = place in self.asked
        elif message is None:
            good = False
        elif outcome == "poison":
            size = len(message.record.value or b"")
            good = place in self.quarantined and (message.poison or self._may_be_too_large(size))
        elif outcome == "purged":
            good = message.duplicate or message.queue in self.purged
        elif outcome == "expired":
            good = 0 < message.expires_ms <= self.world.truths[number].reference.now.told_ms
        else:
            few = message.queue in ("few", self.topic_queue, *QUEUES) or place in self.rejected or self.moving
            good = place in self.copies and (few if outcome == "dead" else outcome == "moved" and self.moving)
        if not good:
            self.world.violated("G1 done", f"{number}@{offset} is {outcome} without a reason: {message}")

    # -- the end

    def drain(self) -> None:
        """Receivers that do as they should, at each worker."""
        for queue in (*self.queues, *(f"{queue}.dead" for queue in self.queues)):
            if queue not in self.drains and queue not in QUEUES:
                self.drains.add(queue)
                task = asyncio.ensure_future(self._drain(queue))
                task.add_done_callback(lambda _, queue=queue: self.drains.discard(queue))

    async def _drain(self, queue: str) -> None:
        try:
            found = await self.call(
                lambda worker: self.receive(worker, queue, lambda: False, limit=10, wait_ms=1_000, lease_ms=20_000)
            )
            if found:
                await self._ack_at_last(found)
        except (Lost, MarqError):
            pass

    async def acceptance(self) -> None:
        """Without faults, the promises to users are kept at every worker."""
        world, r, queue = self.world, self.random, self.queues[0]
        self.accepts = self.is_well = True
        up = world.up()
        world.kafka.fetch_s = r.choice((0.0, FETCH_S))
        if self.fifo:
            await self._groups(self.fifo[0])
        for _ in range(r.choice((1, 5))):  # one by one: to different partitions
            await self._deliver(queue, [self.plain_entry()], r.choice(up))
        if r.random() < 0.5:
            await self._counts_are(queue)
        found = await self._take(queue, 0, r.choice(up))
        if not found:
            world.violated("read your writes", f"{queue} has {self._unfinished(queue)}, and a receive finds nothing")
        await self._counts_are(queue)
        results = await self.call(lambda worker: worker.operations.release([one.receipt for one in found]))
        self._took_effect("release", found, results)
        if not await self._take(queue, 0, r.choice(up)):
            world.violated("read your writes", f"{queue} has {self._unfinished(queue)}, and a receive finds nothing")
        self.purged.add(queue)
        await self.call(lambda worker: worker.operations.purge_queue(queue))
        if left := self._unfinished(queue):
            world.violated("purge", f"{queue} is purged, and has {left}")
        await self._counts_are(queue)
        waits = asyncio.ensure_future(self._take(queue, 5_000, r.choice(up)))
        await asyncio.sleep(r.random() * 2)
        if r.random() < 0.5:
            for worker in up:  # as if others took the message first: who waits comes for nothing
                worker.process.call(worker.operations.receives.polling._wake_some, queue, 1)
            await asyncio.sleep(0.1)
        began_s = world.loop.now
        await self._deliver(queue, [self.plain_entry()], r.choice(up))
        found = await waits
        if not found or world.loop.now > began_s + 1.0:
            world.violated("wake", f"a receive waits, and gets {found}, {world.loop.now - began_s:.1f} s after a send")
        await self._ack(found)
        await self._counts_are(queue)
        self.is_well = False
        if self.fifo:
            await self._gap(self.fifo[0])
        await self._end_of_log(queue)
        self.jobs.look()
        world.count("acceptances")

    async def _groups(self, queue: str) -> None:
        """A receive gets all messages of each group that were sent before, one by one: read or not yet."""
        r, up = self.random, self.world.up()
        for _ in range(3):
            await asyncio.sleep(r.choice((0.0, 2 * FETCH_S)))
            await self._deliver(queue, [self._entry(queue, large=False)], r.choice(up))
        await self._ack(await self._take(queue, r.choice((0, 1_000)), r.choice(up), limit=10))

    async def _gap(self, queue: str) -> None:
        """What was lost between the thread that reads and an agent is read again once the next chunk shows the gap."""
        world, entries = self.world, []
        for _ in range(2):
            self.sent += 1
            entries.append(Entry(b"m%d" % self.sent, group="g0", deduplication_id=str(self.sent)))
        dropped = world.count_of("chunks dropped")
        world.kafka.drop_next = world.topics.queue
        await self._deliver(queue, entries[:1])
        await asyncio.sleep(0.1)
        if world.count_of("chunks dropped") == dropped:
            world.kafka.drop_next = None
        began_s = world.loop.now
        await self._deliver(queue, entries[1:])
        found = await self._take(queue, 5_000, self.random.choice(world.up()))
        if not found or world.loop.now > began_s + GAP_S:
            world.violated(
                "gap", f"{queue}: a receive gets {found}, {world.loop.now - began_s:.1f} s after the next send"
            )
        await self._ack(found)
        await self._ack(await self._take(queue, 1_000, self.random.choice(world.up())))

    async def _end_of_log(self, queue: str) -> None:
        """What was lost between the thread that reads and an agent is read again, though nothing shows a gap."""
        world = self.world
        world.kafka.drop_next = world.topics.queue
        began_s = world.loop.now
        await self._deliver(queue, [self.plain_entry()])
        found = await self._take(queue, 10_000, self.random.choice(world.up()))
        if not found or world.loop.now > began_s + END_S:
            world.violated("gap", f"{queue}: a receive gets {found}, {world.loop.now - began_s:.1f} s after a send")
        await self._ack(found)
        world.kafka.drop_next = None

    def _unfinished(self, queue: str) -> list[tuple[int, int]]:
        return [
            (truth.number, offset)
            for truth in self.world.truths
            for offset in truth.unfinished()
            if truth.reference.messages[offset].queue == queue and not truth.reference.messages[offset].duplicate
        ]

    async def _take(self, queue: str, wait_ms: int, worker: Worker, limit: int = 3) -> list[Received]:
        return await self.call(
            lambda worker: self.receive(worker, queue, lambda: False, limit=limit, wait_ms=wait_ms, lease_ms=60_000),
            worker=worker,
        )

    async def _counts_are(self, queue: str) -> None:
        """Each worker counts what there is, once."""
        for worker in self.world.up():
            counts = await self.call(lambda worker: worker.census.counts_of(queue), worker=worker)
            counts.pop("dead", None)
            if sum(counts.values()) != len(self._unfinished(queue)):
                self.world.violated(
                    "counts", f"{worker.process.name} counts {counts} of {queue}, there are {self._unfinished(queue)}"
                )

    def end(self) -> None:
        for payload, queue in self.accepted.items():
            places = self.places.get(payload, [])
            if not places or not all(place in self.outcomes for place in places):
                self.world.violated("G1 total", f"{payload!r} for {queue} is lost: {places}")
