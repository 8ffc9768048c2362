"""Calls the user's handlers: takes deliveries, keeps their leases alive, acknowledges or gives back.

A *call* is one invocation of the function, with one message or a batch. A runner has as many calls under way as its
concurrency, and a few more whose starts are on their way or that wait for their turn, so that a fast handler never
waits for Kafka. A slow one takes none ahead: they would wait here while another worker is idle.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mode import Service

from agents.elsewhere import Elsewhere, Taken
from app.cluster.peers import Peers
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.service.meters import HandlerMeter, Meters
from app.settings import Settings
from app.streaming.faults import stop_if_it_fails
from marq import handlers as registry
from marq.clock import now_ms
from marq.core.agenda import Handout
from marq.core.flow import Breaker
from marq.core.markers import End, Keepalive, Marker, Release
from marq.core.policies import VISIBILITY_TIMEOUT_MS, backoff_ms
from marq.core.ranges import ranges_of
from marq.core.segments import Segment
from marq.errors import HandlerError, RowError
from marq.handlers import Handler, Retry
from marq.message import ManualMessage, Message

#: Calls taken ahead by a handler that is faster than SLOW_MS, beside its concurrency; more if they are small.
AHEAD = 8
AHEAD_MESSAGES = 2_000
#: Messages in one start, where a call takes fewer.
START_MESSAGES = 500
#: Mean duration of a call from which on nothing is taken ahead.
SLOW_MS = 100.0
#: Seconds that calls which never wait may hold the event loop.
TURN_S = 0.005
#: Milliseconds without a call that ends, after which messages that wait for their turn are given back.
STALLED_MS = 1_000
#: Milliseconds between failures of one handler that are logged.
LOG_EVERY_MS = 1_000
#: A lease is extended when this part of it is over.
EXTEND_AFTER = 1 / 3
#: Seconds that starts on their way get to be folded when the worker stops.
ASKED_GRACE_S = 0.5
#: Seconds that running calls get to finish when the worker stops.
STOP_GRACE_S = 3.0
#: Milliseconds before others get the messages of a call in a thread that had to be left behind.
THREAD_END_MS = 5_000


class Delivery:
    """Messages of one start that one call, or several single calls, work on."""

    __slots__ = ("extend_at_ms", "lease_ms", "left", "number", "receipt", "until_ms")

    def __init__(self, number: int, receipt: tuple[int, int], lease_ms: int, until_ms: int) -> None:
        self.number = number
        self.receipt = receipt
        self.left: set[int] = set()  # offsets that are neither acknowledged nor given back
        self.lease_ms = lease_ms
        self.until_ms = until_ms  # no call begins after that: the message may be with another receiver
        self.extend_at_ms = now_ms() + int(lease_ms * EXTEND_AFTER)


def _extended(delivery: Delivery, until_ms: int, confirmed: asyncio.Future[int]) -> None:
    # confirmed is not folded: a lease that was over meanwhile may have gone to another receiver
    if not confirmed.cancelled() and confirmed.exception() is None and now_ms() < delivery.until_ms:
        delivery.until_ms = max(delivery.until_ms, until_ms)


class Ask:
    """What a runner asked a partition for."""

    __slots__ = ("calls", "lease_ms", "runner")

    def __init__(self, runner: Runner, calls: int, lease_ms: int) -> None:
        self.runner = runner
        self.calls = calls
        self.lease_ms = lease_ms

    def handed(self, held: OwnedPartition, handout: Handout) -> None:
        self.runner.handed(self, held, handout)


class Runner:
    """One handler."""

    def __init__(self, handler: Handler, service: Handlers) -> None:
        self.handler = handler
        self.service = service
        self.running = 0
        self.waiting: deque[tuple[Delivery, list[Message]]] = deque()  # calls that wait for their turn
        self.live: dict[Delivery, None] = {}
        self.asked: dict[int, int] = {}  # partition -> calls whose start is on its way
        self.fetching: dict[str, int] = {}  # URL of another worker -> calls that it was asked for
        self.elsewhere: dict[str, None] = {}  # URLs of workers that have something ready, the next one first
        self.tasks: set[asyncio.Task[None]] = set()
        self.breaker = Breaker()
        self.meter = HandlerMeter(handler.name, handler.queues, self.breaker)
        self._failures_logged = 0
        self._logged_ms = -LOG_EVERY_MS
        self._mean_ms = SLOW_MS  # nothing is taken ahead before the handler has shown that it is fast
        self._progress_ms = 0
        self._turn = 0
        self._spawning = False
        self._acks: dict[Delivery, list[int]] = {}
        self._pool = None if handler.is_async else ThreadPoolExecutor(handler.concurrency, handler.function.__name__)

    @property
    def room(self) -> int:
        """Calls that may be asked for now."""
        ahead = max(AHEAD, AHEAD_MESSAGES // (self.handler.batch or 1)) if self._mean_ms < SLOW_MS else 0
        limit = self.handler.concurrency + ahead
        if self.breaker.open_until_ms is not None:
            limit = self.breaker.room(now_ms()) or 0
        under_way = sum(self.asked.values()) + sum(self.fetching.values())
        return limit - self.running - len(self.waiting) - under_way

    def has_ready(self, held: OwnedPartition) -> bool:
        """True if the partition may have something for this handler."""
        partition = held.owner.partition
        route = self.service.route
        for queue, backlog in partition.backlogs.items():
            if backlog and route(queue) is self:
                return True
        return any(route(queue) is self for queue in partition.segments.queues)

    def ask(self) -> None:
        """Take what there is room for, one partition after the other."""
        held = [h for h in self.service.ownership.held.values() if h.serving]
        tries = len(held)
        while tries and self.room > 0:
            self._turn += 1
            if self._ask(held[self._turn % len(held)]):
                tries = len(held)
            else:
                tries -= 1

    def _ask(self, held: OwnedPartition) -> bool:
        handler, partition = self.handler, held.owner.partition
        route = self.service.route
        # not bool(backlog): with a thousand queues the call shows
        queues = [
            q
            for q, b in partition.backlogs.items()
            if (b.fresh or b.again or b.returned or b.groups or b.out) and route(q) is self
        ]
        queues += [q for q in partition.segments.queues if q not in partition.backlogs and route(q) is self]
        if not queues:
            return False
        if len(queues) > 1:
            partition.serve_last(queues[0])  # the next time
        lease_ms = handler.visibility_timeout_ms
        if lease_ms is None:
            settings = self.service.ownership.catalog.settings_of(queues[0])
            lease_ms = settings.visibility_timeout_ms or VISIBILITY_TIMEOUT_MS  # which is extended
        if not self.service.ownership.room(held, 1, lease_ms):
            return False
        size = handler.batch or 1
        calls = self.calls_of_start(self.room)
        ask = Ask(self, calls, lease_ms)
        try:
            taken = held.owner.acquire(
                queues,
                calls * size,
                ask,
                now_ms(),
                lease_ms=lease_ms,
                shared_fate=bool(handler.batch),
                batch=size,
                name=handler.name,
            )
        except RowError as exc:  # what is on disk can't be read back
            self.service.ownership.recover_again(held, str(exc), wipe=True)
            return False
        if taken is None:
            return False
        ask.calls = -(-len(taken.offsets) // size)
        self.asked[held.number] = self.asked.get(held.number, 0) + ask.calls
        return True

    def calls_of_start(self, room: int) -> int:
        """Calls that one start is for."""
        return min(room, max(1, START_MESSAGES // (self.handler.batch or 1)))

    def handed(self, ask: Ask, held: OwnedPartition, handout: Handout) -> None:
        """What was asked for has come, or not."""
        left = self.asked.get(held.number, 0) - ask.calls
        if left > 0:
            self.asked[held.number] = left
        else:
            self.asked.pop(held.number, None)
        if handout.offsets:
            delivery = Delivery(held.number, handout.receipt, ask.lease_ms, handout.until_ms)
            self._begin(delivery, self.service.messages(held, handout.offsets, self._settler(delivery)))
        self.run()

    def arrived(self, taken: Taken, until_ms: int) -> None:
        """A delivery of a partition of another worker."""
        delivery = Delivery(taken.partition, (taken.epoch, taken.delivery), taken.lease_ms, until_ms)
        self._begin(delivery, self.service.messages_taken(taken, self._settler(delivery)))

    def _begin(self, delivery: Delivery, messages: list[Message]) -> None:
        """Messages of a delivery wait for their calls."""
        delivery.left.update(message.offset for message in messages)
        self.live[delivery] = None
        if not self.waiting:
            self._progress_ms = now_ms()  # nobody has waited until now
        size = self.handler.batch or 1
        self.waiting.extend((delivery, messages[i : i + size]) for i in range(0, len(messages), size))
        if self.service.closing or self.breaker.room(now_ms()) == 0:  # which opened since these were asked for
            self._return_waiting()
        else:
            self.service.meters.handed(messages)

    def forget(self, number: int) -> None:
        """The partition went away: what is on its way there never comes."""
        self.asked.pop(number, None)

    def run(self) -> None:
        """See that calls are under way, as many as the concurrency allows, and ask for more messages."""
        self._spawning = False
        if self.service.closing:
            return
        if self.waiting and len(self.tasks) < self.handler.concurrency:
            task = asyncio.ensure_future(self._work())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            stop_if_it_fails(task, lambda exc: self.service.ownership.app.fail(exc))
        if self.room > 0:
            self.take()

    def take(self) -> None:
        """Take what there is room for: here, and of other workers where there is nothing here, or it is their turn."""
        if self.elsewhere and self.service.elsewhere.goes_first(self):
            self.service.elsewhere.fetch(self)
        if self.room > 0:
            self.ask()
        if self.elsewhere and self.room > 0:
            self.service.elsewhere.fetch(self)

    async def _work(self) -> None:
        """Make calls one after the other while there are any: a task per call would cost more than many a handler."""
        loop = asyncio.get_running_loop()
        yield_at = loop.time() + TURN_S
        while self.waiting and not self.service.closing:
            delivery, messages = self.waiting.popleft()
            if now_ms() >= delivery.until_ms:
                # this process stood still, or Kafka was away: others may have these messages by now
                self._return([(delivery, messages)])
                continue
            if not self._spawning:
                # runs as soon as this call waits for something: then there is time for a further one
                self._spawning = True
                loop.call_soon(self.run)
            self.running += 1
            try:
                await self._call(delivery, messages)
            finally:
                self.running -= 1
                self.meter.calls += 1
                self._progress_ms = now_ms()
            if loop.time() > yield_at:
                await asyncio.sleep(0)
                yield_at = loop.time() + TURN_S
        self.run()

    async def _call(self, delivery: Delivery, messages: list[Message]) -> None:
        handler, loop = self.handler, asyncio.get_running_loop()
        began = loop.time()
        argument: Any = messages if handler.batch else messages[0]
        self.breaker.tried()
        try:
            if self._pool is None:
                await handler.function(argument)
            else:
                await loop.run_in_executor(self._pool, handler.function, argument)
        except asyncio.CancelledError:
            # a call in a thread can't be broken off: it goes on until the process is gone
            self._give_back(delivery, messages, 0 if self._pool is None else THREAD_END_MS)
            raise
        except Retry as retry:
            self._give_back(delivery, messages, retry.delay_ms)
            self._break()
        except Exception:
            self.meter.failures += 1
            self._log_failure(messages)
            self._give_back(delivery, messages, None)
            self._break()
        else:
            self.breaker.succeeded()
            if handler.manual:
                self._done(delivery, messages)  # what is left gets no more extensions
            else:
                self._ack(delivery, messages)
        finally:
            seconds = loop.time() - began
            self._mean_ms += (seconds * 1000 - self._mean_ms) * 0.1
            self.meter.took(seconds)

    def _break(self) -> None:
        """A call failed. If that opens the breaker, what waits for its turn is given back as never looked at."""
        handler = self.handler
        if self.breaker.failed(handler.breaker_failures, handler.breaker_pause_ms, now_ms()):
            self.service.log.warning(
                "%s: %s failures in a row, none is called for %s ms",
                handler.name,
                self.breaker.failures,
                handler.breaker_pause_ms,
            )
            self._return_waiting()

    def _log_failure(self, messages: list[Message]) -> None:
        """Log the exception at hand; of many in a short time only the first."""
        if now_ms() < self._logged_ms + LOG_EVERY_MS:
            return
        more = self.meter.failures - self._failures_logged - 1
        self._logged_ms, self._failures_logged = now_ms(), self.meter.failures
        also = f", after {more} more failures" if more else ""
        self.service.log.exception("%s failed on %s%s", self.handler.name, messages[0], also)

    # ------------------------------------------------------------------ what becomes of messages

    def _settler(self, delivery: Delivery) -> Callable[[Message, int | None], None] | None:
        if not self.handler.manual:
            return None

        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def settle(message: Message, delay_ms: int | None) -> None:
            if threading.get_ident() != thread:
                loop.call_soon_threadsafe(settle_here, message, delay_ms)
            else:
                settle_here(message, delay_ms)

        def settle_here(message: Message, delay_ms: int | None) -> None:
            if delay_ms is None:
                self._ack(delivery, [message])
            else:
                self._give_back(delivery, [message], delay_ms)

        return settle

    def _done(self, delivery: Delivery, messages: list[Message]) -> list[int]:
        offsets = [message.offset for message in messages]
        delivery.left.difference_update(offsets)
        if not delivery.left:
            self.live.pop(delivery, None)
        return offsets

    def _ack(self, delivery: Delivery, messages: list[Message]) -> None:
        # single calls that end in the same turn of the loop share a marker
        if not self._acks:
            asyncio.get_running_loop().call_soon(self._send_acks)
        self._acks.setdefault(delivery, []).extend(self._done(delivery, messages))

    def _send_acks(self) -> None:
        acks, self._acks = self._acks, {}
        for delivery, offsets in acks.items():
            offsets.sort()
            epoch, number = delivery.receipt
            self._put(delivery, [End(epoch, ranges_of(offsets), "acked", number)])
        self._count("ack", sum(map(len, acks.values())))

    def _give_back(self, delivery: Delivery, messages: list[Message], delay_ms: int | None) -> None:
        """Release, counted. Without a delay, the back-off of each message's attempt: the handler's, or the queue's."""
        handler, settings = self.handler, self.service.settings
        queue = self.service.ownership.catalog.settings_of(messages[0].queue)
        base_ms, max_ms = settings.backoff_ms, settings.backoff_max_ms
        if queue.backoff_ms:
            base_ms, max_ms = queue.backoff_ms, queue.backoff_max_ms or max(max_ms, queue.backoff_ms)
        base_ms = base_ms if handler.backoff_ms is None else handler.backoff_ms
        max_ms = max_ms if handler.backoff_max_ms is None else handler.backoff_max_ms
        self._done(delivery, messages)
        by_attempt: dict[int, list[int]] = {}
        for message in messages:
            by_attempt.setdefault(message.attempt, []).append(message.offset)
        epoch, number = delivery.receipt
        releases: list[Marker] = []
        for attempt, offsets in by_attempt.items():
            delay = backoff_ms(attempt, base_ms, max_ms, self.service.random) if delay_ms is None else delay_ms
            releases.append(Release(epoch, number, ranges_of(sorted(offsets)), delay))
        self._put(delivery, releases)
        self._count("release", len(messages))

    def _count(self, action: str, count: int) -> None:
        self.service.meters.settle(action, count)

    def _put(self, delivery: Delivery, markers: list[Marker]) -> None:
        self.service.ownership.outbox(delivery.number).put(markers)

    def extend(self) -> None:
        """Keep the leases of what waits and runs alive; give back what waits behind calls that do not end."""
        now = now_ms()
        if self.waiting and now - self._progress_ms > STALLED_MS:
            self._return_waiting()
        if self.breaker.open_until_ms is not None and self.room > 0 and not self.service.closing:
            self.take()
        for delivery in self.live:
            if delivery.left and now >= delivery.extend_at_ms:
                delivery.extend_at_ms = now + int(delivery.lease_ms * EXTEND_AFTER)
                epoch, number = delivery.receipt
                keepalive = Keepalive(epoch, number, ranges_of(sorted(delivery.left)), delivery.lease_ms)
                confirmed = self.service.ownership.outbox(delivery.number).put_confirmed([keepalive])
                confirmed.add_done_callback(partial(_extended, delivery, now + delivery.lease_ms))
                self._count("extend", len(delivery.left))

    async def close(self) -> None:
        """Give back, uncounted, what no call was made for; let running calls finish for a while."""
        self._return_waiting()
        deadline = asyncio.get_running_loop().time() + ASKED_GRACE_S
        while (self.asked or self.fetching) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)  # starts on their way: given back as they come
        if self.tasks:
            _, late = await asyncio.wait(self.tasks, timeout=STOP_GRACE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)
        if self._acks:
            self._send_acks()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _return_waiting(self) -> None:
        waiting = list(self.waiting)
        self.waiting.clear()
        self._return(waiting)

    def _return(self, calls: list[tuple[Delivery, list[Message]]]) -> None:
        """Release, uncounted, what no call was made for."""
        unread: dict[Delivery, list[int]] = {}
        for delivery, messages in calls:
            unread.setdefault(delivery, []).extend(self._done(delivery, messages))
        for delivery, offsets in unread.items():
            epoch, number = delivery.receipt
            self._put(delivery, [Release(epoch, number, ranges_of(sorted(offsets)), 0, counted=False)])
            self._count("release", len(offsets))


class Handlers(Service):
    """All handlers of this worker; a receiver of the ownership."""

    def __init__(self, ownership: Ownership, settings: Settings, meters: Meters, peers: Peers, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ownership = ownership
        self.settings = settings
        self.meters = meters
        self.random = random.Random()
        self.closing = False
        self.runners = [Runner(handler, self) for handler in registry.registered()]
        meters.handlers += [runner.meter for runner in self.runners]
        self.elsewhere = Elsewhere(ownership, peers, self.runners)
        self._routes: dict[str, Runner | None] = {}
        self._names: dict[bytes, str] = {}
        ownership.receivers.append(self)
        ownership.catalog.max_receives_of = self._max_receives_of

    def route(self, queue: str) -> Runner | None:
        """The runner of the first handler that matches `queue`."""
        try:
            return self._routes[queue]
        except KeyError:
            if len(self._routes) > 100_000:
                self._routes.clear()
            found = next((r for r in self.runners if r.handler.matches(queue)), None)
            self._routes[queue] = found
            return found

    def _max_receives_of(self, queue: str) -> int:
        runner = self.route(queue)
        return runner.handler.max_receives if runner is not None else self.elsewhere.max_receives_of(queue)

    def messages_taken(self, taken: Taken, settle: Callable[..., None] | None) -> list[Message]:
        """What the handler gets of a delivery that began at another worker."""
        topic, number = self.ownership.topics.queue, taken.partition
        if settle is None:
            return [Message(topic, number, queue, record, receives) for record, queue, receives in taken.messages]
        return [
            ManualMessage(settle, topic, number, queue, record, receives) for record, queue, receives in taken.messages
        ]

    def messages(self, held: OwnedPartition, offsets: list[int], settle: Callable[..., None] | None) -> list[Message]:
        """What the handler gets for `offsets`; with `settle`, messages that can be acknowledged one by one."""
        partition, names = held.owner.partition, self._names
        topic, number, topic_mode = self.ownership.topics.queue, held.number, self.settings.queue_id
        deliveries, records = partition.deliveries, partition.messages
        made: list[Message] = []
        for offset in offsets:
            record = records[offset]
            if type(record) is Segment:  # its payload is on disk
                record = partition.record(offset)
            queue = topic_mode
            if queue is None:
                queue = names.get(record.key)
                if queue is None:
                    if len(names) > 100_000:
                        names.clear()
                    queue = names[record.key] = record.key.decode()
            receives = deliveries[offset].receives
            if settle is None:
                made.append(Message(topic, number, queue, record, receives))
            else:
                made.append(ManualMessage(settle, topic, number, queue, record, receives))
        return made

    # -- receiver

    def handed(self, held: OwnedPartition, handout: Handout) -> None:
        raise AssertionError("deliveries go to the Ask that took them")

    def wake(self, held: OwnedPartition) -> None:
        if not self.closing:
            for runner in self.runners:
                if runner.room > 0:
                    runner.ask()
            self.elsewhere.wake()

    def starving(self, held: OwnedPartition) -> bool:
        if any(runner.room > 0 and not runner.has_ready(held) for runner in self.runners):
            return True
        return self.elsewhere.starving(held)

    def wants(self, queue: str) -> bool:
        return self.is_handled(queue) or self.elsewhere.is_handled(queue)

    def is_handled(self, queue: str) -> bool:
        """Whether a handler of this worker gets the messages of `queue`."""
        return self.route(queue) is not None

    def forget(self, held: OwnedPartition) -> None:
        for runner in self.runners:
            runner.forget(held.number)
        self.elsewhere.forget(held)

    # -- service

    @Service.task
    async def _extend(self) -> None:
        while not self.should_stop:
            await asyncio.sleep(0.2)
            for runner in self.runners:
                runner.extend()

    @Service.task
    async def _renew(self) -> None:
        await self.elsewhere.renew()

    async def close(self) -> None:
        """Stop taking messages and settle what was taken."""
        self.closing = True
        self.elsewhere.close()
        await asyncio.gather(*(runner.close() for runner in self.runners))


def import_modules(names: tuple[str, ...]) -> None:
    """Import the modules that register handlers. Raises `HandlerError`."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as exc:
            raise HandlerError(f"MARQ_HANDLERS names {name!r}, which can't be imported: {exc}") from exc
        except Exception as exc:
            trace = traceback.format_exc(limit=-3)
            raise HandlerError(f"MARQ_HANDLERS names {name!r}, which failed when it was imported:\n{trace}") from exc
