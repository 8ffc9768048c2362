"""Makes the calls of one handler: takes deliveries for it, and calls it as often as its concurrency allows.

A *call* is one invocation of the function, with one message or a batch. A runner has as many calls in progress as its
concurrency. It takes a few more ahead, whose starts are in progress or which wait for their turn, so that a fast
handler never waits for Kafka. A slow one takes none ahead: they would wait here while another worker is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, Protocol

from agents.elsewhere import Elsewhere
from agents.remote_handlers import Taken
from agents.settlement import Delivery, Settle, Settlement
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.service.meters import HandlerMeter, Meters
from app.settings import Settings
from app.streaming.faults import stop_if_it_fails
from marq.clock import now_ms
from marq.core.agenda import Handout
from marq.core.backlog import Backlog
from marq.core.flow import Breaker
from marq.core.policies import VISIBILITY_TIMEOUT_MS
from marq.errors import HandlerError, RowError
from marq.handlers import Handler, Retry
from marq.message import Message

#: Calls taken ahead for a handler faster than `SLOW_MS`, above its concurrency: as many as it makes in so many
#: milliseconds, and at most this number; more if they have few messages. A start in each of many partitions is on its
#: way meanwhile.
AHEAD_MS, AHEAD = 800.0, 24
AHEAD_MESSAGES = 2_000
#: Messages in one start, if a call takes fewer.
START_MESSAGES = 500
#: Queues of patterns that are looked for in one go: those behind them are looked for if these bring too little.
QUEUES_AT_ONCE = 64
#: Mean milliseconds of a call from which on nothing is taken ahead.
SLOW_MS = 100.0
#: Seconds for which calls that never wait may keep the event loop.
TURN_S = 0.005
#: Milliseconds without any call ending after which waiting messages are given back.
STALLED_MS = 1_000
#: Milliseconds between logged failures of one handler.
LOG_EVERY_MS = 1_000
#: When the worker stops: seconds for starts in progress to be folded.
ASKED_GRACE_S = 0.5
#: When the worker stops: seconds for other workers to answer what was asked of them.
FETCHED_GRACE_S = 3.0
#: When the worker stops: milliseconds until other receivers get the messages of a call that still runs in a thread.
THREAD_END_MS = 5_000


class Desk(Protocol):
    """What runners share: the source of deliveries, and facts about the worker."""

    ownership: Ownership
    settings: Settings
    meters: Meters
    elsewhere: Elsewhere
    closing: bool

    @property
    def log(self) -> Any: ...

    def route(self, queue: str) -> Runner | None:
        """The runner that gets the messages of `queue`."""

    def messages(self, owned: OwnedPartition, offsets: list[int], settle: Settle | None) -> list[Message]:
        """The handler's messages for `offsets`. With `settle`, they can be acknowledged one by one."""

    def messages_taken(self, taken: Taken, settle: Settle | None) -> list[Message]:
        """The handler's messages of a delivery that another worker started."""


def _may_have(b: Backlog | None) -> bool:
    """Whether something of a queue may be had now, or once a group is free."""
    return b is not None and bool(b.fresh or b.again or b.returned or b.groups or b.out)


def _call_here(function: Callable[[Any], Any], argument: Any) -> BaseException | None:
    """Call a handler in this thread. Returns what it raised: some exceptions can't be the result of a future."""
    try:
        result = function(argument)
    except BaseException as exc:
        return exc
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        kind = type(result).__name__
        if inspect.iscoroutine(result):
            result.close()
        return HandlerError(f"the handler returned a {kind}, so nothing of it ran: use `async def`, and no `yield`")
    return None


class Ask:
    """What a runner asked of a partition."""

    __slots__ = ("calls", "lease_ms", "runner")

    def __init__(self, runner: Runner, calls: int, lease_ms: int) -> None:
        self.runner = runner
        self.calls = calls
        self.lease_ms = lease_ms

    def handed(self, owned: OwnedPartition, handout: Handout) -> None:
        self.runner.handed(self, owned, handout)


class Runner:
    """Runs one handler."""

    def __init__(self, handler: Handler, service: Desk) -> None:
        self.handler = handler
        self.service = service
        #: Called when this is not idle any more.
        self.on_busy: Callable[[], None] = lambda: None
        self.running = 0
        self.waiting: deque[tuple[Delivery, list[Message]]] = deque()  # calls that wait for their turn
        # its queues, the next one in turn first; None: there are patterns, so those of a partition are gone through
        self._names = dict.fromkeys(handler.names) if handler.names is not None else None
        self.settlement = Settlement(handler, service.ownership, service.settings, service.meters)
        # partitions that may have something, the next one to ask first; the others have nothing until they wake us
        self.ready: dict[int, None] = {}
        self.asked: dict[int, int] = {}  # partition -> calls whose start is in progress
        self.fetching: dict[str, int] = {}  # URL of another worker -> calls asked of it
        self.elsewhere: dict[str, None] = {}  # URLs of workers with something ready, the next one to ask first
        self.tasks: set[asyncio.Task[None]] = set()
        self.breaker = Breaker()
        self.meter = HandlerMeter(handler.name, handler.queues, self.breaker)
        self._failures_logged = 0
        self._logged_ms = -LOG_EVERY_MS
        self._mean_ms = SLOW_MS  # nothing is taken ahead until the handler has shown that it is fast
        self._progress_ms = 0
        self._spawning = False
        self._cancels = False  # whether calls that still run are cancelled now
        self._pool = None if handler.is_async else ThreadPoolExecutor(handler.concurrency, handler.function.__name__)

    @property
    def room(self) -> int:
        """Calls for which messages may be asked now."""
        limit = self.handler.concurrency + self._ahead
        if self.breaker.open_until_ms is not None:
            limit = self.breaker.room(now_ms()) or 0
        under_way = sum(self.asked.values()) + sum(self.fetching.values())
        return limit - self.running - len(self.waiting) - under_way

    @property
    def _ahead(self) -> int:
        """Calls for which messages are taken before their turn comes."""
        if self._mean_ms >= SLOW_MS:
            return 0
        calls = min(AHEAD, int(AHEAD_MS / max(1.0, self._mean_ms)))
        return max(calls, AHEAD_MESSAGES // (self.handler.batch or 1))

    def has_ready(self, owned: OwnedPartition) -> bool:
        """Whether the partition may have something for this handler."""
        partition = owned.owner.partition
        backlogs, parked, route = partition.backlogs, partition.segments.queues, self.service.route
        if self._names is not None:
            return any((backlogs.get(q) or q in parked) and route(q) is self for q in self._names)
        for queue, backlog in backlogs.items():
            if backlog and route(queue) is self:
                return True
        return any(route(queue) is self for queue in parked)

    def woken(self, owned: OwnedPartition) -> None:
        """Something became ready in a partition."""
        self.ready[owned.number] = None
        if self.room > 0:
            self.service.ownership.hurry()
            self.ask()

    def ask(self) -> None:
        """Take as much as there is room for, from one partition after another."""
        partitions, tries = self.service.ownership.owned, len(self.ready)
        while tries and self.room > 0:
            number = next(iter(self.ready))
            del self.ready[number]
            owned = partitions.get(number)
            queues = self._queues_of(owned) if owned is not None and owned.serving else iter(())
            first = list(islice(queues, 2))
            if owned is None or not first:
                tries -= 1
                continue
            self.ready[number] = None  # the last one in turn, also if a limit lets nothing out now: nothing tells
            tries = len(self.ready) if self._ask(owned, first, queues) else tries - 1

    def _queues_of(self, owned: OwnedPartition) -> Iterator[str]:
        """The queues of this handler that have something in a partition, as far as they are asked for.

        Of thousands, an ask takes the messages of a few. They are taken while this goes on, so it never stops in the
        middle of what may change then.
        """
        partition, route = owned.owner.partition, self.service.route
        backlogs, parked = partition.backlogs, partition.segments.queues
        if self._names is not None:
            yield from [q for q in self._names if (_may_have(backlogs.get(q)) or q in parked) and route(q) is self]
            return
        queues: list[str] = []
        # not `_may_have`: with thousands of queues that call costs noticeable time
        for q, b in backlogs.items():
            if (b.fresh or b.again or b.returned or b.groups or b.out) and route(q) is self:
                queues.append(q)
                if len(queues) == QUEUES_AT_ONCE:
                    break
        listed = set(queues)
        others = list(backlogs) if len(queues) == QUEUES_AT_ONCE else []
        also_parked = list(parked)
        yield from queues
        for q in others:
            if q not in listed and _may_have(backlogs.get(q)) and route(q) is self:
                listed.add(q)
                yield q
        # a queue may have its messages parked, and something else of it in memory
        for q in also_parked:
            if q not in listed and route(q) is self:
                yield q

    def _ask(self, owned: OwnedPartition, first: list[str], others: Iterator[str]) -> bool:
        """Take from the queues `first`, then from `others`."""
        handler, partition = self.handler, owned.owner.partition
        if len(first) > 1:
            partition.serve_last(first[0])  # next time
            if self._names is not None:
                self._names[first[0]] = self._names.pop(first[0])
        lease_ms = handler.visibility_timeout_ms
        if lease_ms is None:
            settings = self.service.ownership.catalog.settings_of(first[0])
            lease_ms = settings.visibility_timeout_ms or VISIBILITY_TIMEOUT_MS  # which is extended
        if not self.service.ownership.throttle.room(owned, 1, lease_ms):
            return False
        size = handler.batch or 1
        calls = self.calls_of_start(self.room)
        ask = Ask(self, calls, lease_ms)
        try:
            taken = owned.owner.acquire(
                chain(first, others),
                calls * size,
                ask,
                now_ms(),
                lease_ms=lease_ms,
                shared_fate=bool(handler.batch),
                batch=size,
                name=handler.name,
            )
        except RowError as exc:  # what is on disk can't be read back
            self.service.ownership.recover_again(owned, str(exc), wipe=True)
            return False
        if taken is None:
            return False
        ask.calls = -(-len(taken.offsets) // size)
        self.asked[owned.number] = self.asked.get(owned.number, 0) + ask.calls
        return True

    def calls_of_start(self, room: int) -> int:
        """Calls that one start covers."""
        return min(room, max(1, START_MESSAGES // (self.handler.batch or 1)))

    def handed(self, ask: Ask, owned: OwnedPartition, handout: Handout) -> None:
        """What was asked of a partition arrived, or can't be had."""
        left = self.asked.get(owned.number, 0) - ask.calls
        if left > 0:
            self.asked[owned.number] = left
        else:
            self.asked.pop(owned.number, None)
        if handout.offsets:
            delivery = Delivery(owned.number, handout.receipt, ask.lease_ms, handout.until_ms)
            delivery.ended_by_others = owned.owner.partition.ended_by_others
            messages = self.service.messages(owned, handout.offsets, self.settlement.settler(delivery))
            self._begin(delivery, messages, handout.offsets)
        self.run()

    def arrived(self, taken: Taken, until_ms: int) -> None:
        """A delivery from another worker's partition arrived."""
        delivery = Delivery(taken.partition, (taken.epoch, taken.delivery), taken.lease_ms, until_ms)
        messages = self.service.messages_taken(taken, self.settlement.settler(delivery))
        self._begin(delivery, messages, [message.offset for message in messages])

    def _begin(self, delivery: Delivery, messages: list[Message], offsets: list[int]) -> None:
        """Queue the messages of a delivery for their calls."""
        self.settlement.begin(delivery, offsets)
        self.on_busy()
        if not self.waiting:
            self._progress_ms = now_ms()  # nothing has waited until now
        size = self.handler.batch or 1
        self.waiting.extend((delivery, messages[i : i + size]) for i in range(0, len(messages), size))
        if self.service.closing or self.breaker.room(now_ms()) == 0:  # the breaker may have opened meanwhile
            self._return_waiting()
        else:
            self.service.meters.handed(messages)

    def forget(self, number: int) -> None:
        """The partition went away: starts in progress there will never begin."""
        self.asked.pop(number, None)
        self.ready.pop(number, None)

    def run(self) -> None:
        """Start calls as the concurrency allows, and ask for more messages."""
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
        """Take as much as there is room for: here, and elsewhere if there is too little here or it is their turn."""
        if self.elsewhere and self.service.elsewhere.goes_first(self):
            self.service.elsewhere.fetch(self)
        if self.room > 0:
            self.ask()
        if self.elsewhere and self.room > 0:
            self.service.elsewhere.fetch(self)

    async def _work(self) -> None:
        """Make calls, one after another, while there are any. A task per call would cost more than many a handler."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        yield_at = loop.time() + TURN_S
        while self.waiting and not self.service.closing:
            delivery, messages = self.waiting.popleft()
            if now_ms() >= delivery.until_ms:
                # this process stood still, or Kafka was away: other receivers may have these messages by now
                self.settlement.give_back_unread([(delivery, messages)])
                continue
            if delivery.ended_by_others >= 0 and not (messages := self._without_done(delivery, messages)):
                continue
            if not self._spawning:
                # runs as soon as this call waits for something, when another call can be made
                self._spawning = True
                loop.call_soon(self.run)
            self.running += 1
            try:
                await self._call(delivery, messages)
            finally:
                self.running -= 1
                self.meter.calls += 1
                self._progress_ms = now_ms()
            if task.cancelling() and not self._cancels:
                # the handler cancelled the task that calls it: the next call must not get that
                task.uncancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
            if loop.time() > yield_at:
                await asyncio.sleep(0)
                yield_at = loop.time() + TURN_S
        self.tasks.discard(task)  # a delivery that comes before this task is done needs another one
        self.run()

    def _without_done(self, delivery: Delivery, messages: list[Message]) -> list[Message]:
        """The messages of a call, without those that ended while it waited: by a late ack, or a purge."""
        owned = self.service.ownership.owned.get(delivery.number)
        if owned is None or owned.owner.epoch != delivery.receipt[0]:
            return messages  # it is served elsewhere now
        partition = owned.owner.partition
        if partition.ended_by_others == delivery.ended_by_others:
            return messages
        done = [message for message in messages if message.offset not in partition.deliveries]
        if not done:
            return messages
        self.settlement.done(delivery, done)
        return [message for message in messages if message.offset in partition.deliveries]

    async def _call(self, delivery: Delivery, messages: list[Message]) -> None:
        handler, loop = self.handler, asyncio.get_running_loop()
        began = loop.time()
        argument: Any = messages if handler.batch else messages[0]
        self.breaker.tried()
        try:
            if self._pool is None:
                await handler.function(argument)
            else:
                raised = await loop.run_in_executor(self._pool, _call_here, handler.function, argument)
                if raised is not None:
                    try:
                        raise raised
                    finally:
                        del raised  # or its traceback and this frame would keep each other
        except BaseException as exc:
            if self._is_ended_by_us(exc):
                # a call in a thread can't be cancelled: it goes on until the process ends
                self.settlement.give_back(delivery, messages, 0 if self._pool is None else THREAD_END_MS)
                raise
            self._failed(delivery, messages, exc)
        else:
            self.breaker.succeeded()
            if handler.manual:
                self.settlement.done(delivery, messages)  # messages that are left get no more extensions
            else:
                self.settlement.ack(delivery, messages)
        finally:
            seconds = loop.time() - began
            self._mean_ms += (seconds * 1000 - self._mean_ms) * 0.1
            self.meter.took(seconds)

    def _is_ended_by_us(self, exc: BaseException) -> bool:
        """True if this worker cancelled the call, or drops it at its end. A handler may raise the same exceptions."""
        if not isinstance(exc, asyncio.CancelledError | GeneratorExit):
            return False
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs any more
            return True
        return task not in self.tasks or (self._cancels and task.cancelling() > 0)

    def _failed(self, delivery: Delivery, messages: list[Message], exc: BaseException) -> None:
        """Settle a call that raised."""
        delay_ms = None
        if isinstance(exc, Retry):
            delay_ms = exc.delay_ms
        else:
            self.meter.failures += 1
            self._log_failure(messages, exc)
        self.settlement.give_back(delivery, messages, delay_ms)
        self._break()

    def _break(self) -> None:
        """Record a failed call. If that opens the breaker, waiting messages are given back uncounted."""
        handler = self.handler
        if self.breaker.failed(handler.breaker_failures, handler.breaker_pause_ms, now_ms()):
            self.service.log.warning(
                "%s: %s failures in a row, none is called for %s ms",
                handler.name,
                self.breaker.failures,
                handler.breaker_pause_ms,
            )
            self._return_waiting()

    def _log_failure(self, messages: list[Message], exc: BaseException) -> None:
        """Log what a call raised; of many failures in a short time only the first."""
        if now_ms() < self._logged_ms + LOG_EVERY_MS:
            return
        more = self.meter.failures - self._failures_logged - 1
        self._logged_ms, self._failures_logged = now_ms(), self.meter.failures
        also = f", after {more} more failures" if more else ""
        self.service.log.error("%s failed on %s%s", self.handler.name, messages[0], also, exc_info=exc)

    # -- leases, and the end

    @property
    def is_idle(self) -> bool:
        """True if `extend` has nothing to do until messages come: a breaker opens only after a call."""
        return not self.waiting and not self.settlement.live and self.breaker.open_until_ms is None

    def extend(self) -> None:
        """Extend the leases of waiting and running calls. If no call ends, give back the messages that wait."""
        if self.waiting and now_ms() - self._progress_ms > STALLED_MS:
            self._return_waiting()
        if self.breaker.open_until_ms is not None and self.room > 0 and not self.service.closing:
            self.take()
        self.settlement.extend()

    async def close(self) -> None:
        """Give back uncounted what no call was made for. Running calls get some time to finish."""
        self._return_waiting()
        await asyncio.gather(self._end_asking(), self._end_calls())
        self.settlement.send_acks()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _end_asking(self) -> None:
        """Wait for what was asked for: it is given back as it arrives.

        Starts of partitions here are released without it, when these are handed over; those of other workers are not.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while (self.asked and loop.time() < began_s + ASKED_GRACE_S) or (
            self.fetching and loop.time() < began_s + FETCHED_GRACE_S
        ):
            await asyncio.sleep(0.01)

    async def _end_calls(self) -> None:
        if self.tasks:
            _, late = await asyncio.wait(self.tasks, timeout=self.service.settings.stop_ms / 1000)
            self._cancels = True
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)

    def _return_waiting(self) -> None:
        waiting = list(self.waiting)
        self.waiting.clear()
        self.settlement.give_back_unread(waiting)
