"""Those who send and receive, through any worker, over a network that may lose their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from app.service.receipts import Receipts
from marq.errors import MarqError
from marq.protocol.messages import Entry, Received, Sent

if TYPE_CHECKING:
    from tests.worksim.worker import Worker
    from tests.worksim.world import World

Answer = TypeVar("Answer")


class Lost(Exception):
    """There is no answer."""


class Clients:
    """All clients together: what they were told."""

    def __init__(self, world: World, random: Random) -> None:
        self.world = world
        self.random = random
        self.queues = ["plain", "other", "order.fifo"]
        self.sent = 0
        self.accepted: dict[bytes, str] = {}  # payload -> queue
        self.places: dict[bytes, list[tuple[int, int]]] = {}
        self.outcomes: dict[tuple[int, int], str] = {}
        self.asked: set[tuple[int, int]] = set()  # some client has sent an ack for it, or something as final
        self.acked: set[tuple[int, int]] = set()
        self.open: dict[Any, Worker] = {}
        self._receipts = Receipts(lambda: b"")
        #: Queues that a good receiver is taking from.
        self.drains: set[str] = set()

    def add_queue(self, queue: str) -> None:
        if queue not in self.queues:
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

    def lost(self, worker: Worker) -> None:
        """A worker is no more."""
        for answer, asked in list(self.open.items()):
            if asked is worker and not answer.done():
                answer.set_exception(Lost())

    async def receive(self, worker: Worker, queue: str, gone: Callable[[], bool], **how: Any) -> list[Received]:
        """In a worker: what leaves it is looked at."""
        found = await worker.operations.receive(queue, gone=gone, **how)
        for one in found:
            receipt = worker.operations.receipts.read(one.receipt)
            self.world.truths[one.partition].handed_out(worker, one, receipt)
        self.world.tell("%s hands out %s", worker.process.name, [(o.partition, o.offset, o.attempt) for o in found])
        return found

    # -- a client

    async def live(self, number: int) -> None:
        """Send and receive, until the end."""
        while True:
            try:
                if self.random.random() < 0.5:
                    await self._send()
                else:
                    await self._receive()
            except (Lost, MarqError) as exc:
                self.world.count(f"client: {type(exc).__name__}")
            await asyncio.sleep(self.random.random() * self.random.choice((0.01, 0.3, 2.0)))

    async def _send(self) -> None:
        r, queue = self.random, self.random.choice(self.queues)
        entries = []
        for _ in range(r.choice((1, 1, 3, 20))):
            self.sent += 1
            group = f"g{r.randrange(3)}" if queue.endswith(".fifo") else None
            entries.append(
                Entry(
                    b"m%d" % self.sent,
                    delay_ms=r.choice((200, 3_000)) if r.random() < 0.1 and group is None else None,
                    group=group,
                    deduplication_id=str(self.sent) if group is not None else None,
                )
            )
        results = await self.call(lambda worker: worker.operations.send(queue, entries))
        for entry, result in zip(entries, results, strict=True):
            if isinstance(result, Sent):
                self.accepted[entry.payload] = queue
                self.world.count("accepted")
                if result.offset >= 0 and (result.partition, result.offset) not in self.places[entry.payload]:
                    self.world.violated("G1 place", f"{entry} is said to be at {result}: {self.places[entry.payload]}")

    async def _receive(self) -> None:
        r, queue = self.random, self.random.choice(self.queues)
        lease_ms = r.choice((300, 2_000, 10_000))
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
                )
            )
        finally:
            over.append(1)
        if not found:
            return
        self.world.count("received", len(found))
        await asyncio.sleep(r.random() * r.choice((0.01, 0.3, 2.0 * lease_ms / 1000)))
        what = r.random()
        receipts = [one.receipt for one in found]
        if what < 0.7:
            await self._ack(found)
        elif what < 0.8:
            await self.call(lambda worker: worker.operations.extend(receipts, 1_000))
            await self._ack(found)
        elif what < 0.9:
            delay_ms, counted = r.choice((0, 500)), r.random() < 0.7
            await self.call(lambda worker: worker.operations.release(receipts, delay_ms, counted))

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
        self.places.setdefault(record.value, []).append((number, record.offset))

    def is_done(self, number: int, offset: int, outcome: str) -> None:
        place = (number, offset)
        self.outcomes[place] = outcome
        message = self.world.truths[number].reference.messages.get(offset)
        good = outcome == "acked" and place in self.asked
        good |= outcome == "poison" and message is not None and message.poison
        good |= outcome == "purged" and message is not None and message.double
        if not good:
            self.world.violated("G1 done", f"{number}@{offset} is {outcome} without a reason: {message}")

    # -- the end

    def drain(self) -> None:
        """Receivers that do as they should, at each worker."""
        for queue in self.queues:
            if queue not in self.drains:
                self.drains.add(queue)
                task = asyncio.ensure_future(self._drain(queue))
                task.add_done_callback(lambda _, queue=queue: self.drains.discard(queue))

    async def _drain(self, queue: str) -> None:
        try:
            found = await self.call(
                lambda worker: self.receive(worker, queue, lambda: False, limit=10, wait_ms=1_000, lease_ms=20_000)
            )
            if found:
                await self._ack(found)
        except (Lost, MarqError):
            pass

    def end(self) -> None:
        for payload, queue in self.accepted.items():
            places = self.places.get(payload, [])
            if not places or not all(place in self.outcomes for place in places):
                self.world.violated("G1 total", f"{payload!r} for {queue} is lost: {places}")
