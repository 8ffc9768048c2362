"""Handlers get messages of every partition in the cluster: from owners elsewhere, if this worker has too few.

    worker with handlers                  owner
      handlers(specs) ─────────────────►    records who handles what; answers for which handlers something is ready
                      ◄─────────────────  ready(handlers)   something became ready (nothing is reserved)
      take(spec, …)   ─────────────────►    starts deliveries and answers with their messages

So workers with different handlers can share one cluster. Acknowledgements, extensions and releases are markers, which
any worker writes. A lost call costs time, never a message: specs are sent again and again, and deliveries that were
started but not answered are released uncounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from app.cluster.peers import Gone, Peers, peer_call
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from marq.clock import now_ms
from marq.core.agenda import Handout
from marq.core.markers import Release
from marq.core.policies import VISIBILITY_TIMEOUT_MS
from marq.core.ranges import ranges_of
from marq.core.rows import Record
from marq.core.segments import Segment
from marq.core.starts import Pending
from marq.errors import MarqError
from marq.handlers import Handler, does_match

log = logging.getLogger(__name__)

#: Seconds after which specs are sent again …
RENEW_S = 2.0
#: … and after which an owner forgets specs that were not.
FORGET_S = 10.0
#: Seconds that an owner waits for more deliveries of a take after the first one began; below, for the first one.
REST_S = 0.02
FIRST_S = 3.0
#: Seconds for gathering what becomes ready, before other workers are told.
GATHER_S = 0.01
#: Seconds until an owner offers messages again after a take that got none (because of a limit, say); doubles.
FRUITLESS_S = 0.005
#: Seconds after which an unanswered take no longer counts against a handler's room.
SLOW_S = 0.25
#: Most queues whose route a worker's specs cache.
ROUTES_MAX = 100_000


class Spec(msgspec.Struct):
    """A handler as other workers know it."""

    name: str
    queues: tuple[str, ...]
    batch: int
    lease_ms: int | None
    max_receives: int


class Taken(msgspec.Struct, array_like=True):
    """A delivery that its owner started."""

    partition: int
    epoch: int
    delivery: int
    lease_ms: int
    messages: list[tuple[Record, str, int]]  # record, queue, receives


class Introduction(msgspec.Struct):
    """The handlers of a worker and its URL."""

    url: str
    specs: list[Spec]


class Ready(msgspec.Struct):
    """Handlers for which a worker has something ready, as indexes in their worker's specs."""

    ready: list[int]
    url: str = ""


class Take(msgspec.Struct):
    """How many calls' worth of messages a worker wants for a handler, given by its index."""

    url: str
    number: int
    calls: int


class Taker(Protocol):
    """A handler of this worker, as `agents.handlers` runs it."""

    handler: Handler
    fetching: dict[str, int]  # URL of another worker -> calls asked of it
    elsewhere: dict[str, None]  # URLs of workers with something ready, the next one to ask first

    @property
    def room(self) -> int:
        """Calls for which messages may be asked now."""

    def calls_of_start(self, room: int) -> int:
        """Calls that one start covers."""

    def arrived(self, taken: Taken, until_ms: int) -> None:
        """A delivery from another worker's partition arrived."""

    def run(self) -> None:
        """Start calls as the concurrency allows, and ask for more messages."""


class Remote:
    """The handlers of another worker, as an owner knows them."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self.until_s = 0.0
        self.hungry: set[int] = set()  # handlers that found nothing here and want to be told
        self.fruitless: dict[int, int] = {}  # takes in a row that got nothing
        self._routes: dict[str, int] = {}

    def take_over(self, specs: list[Spec], until_s: float) -> None:
        if specs != self.specs:
            self.specs, self._routes = specs, {}
        self.until_s = until_s

    def route(self, queue: str) -> int:
        """Index of the handler that gets the messages of `queue`; -1 if there is none."""
        number = self._routes.get(queue)
        if number is None:
            if len(self._routes) > ROUTES_MAX:
                self._routes.clear()
            found = (i for i, s in enumerate(self.specs) if does_match(s.queues, queue))
            number = self._routes[queue] = next(found, -1)
        return number


class Taking:
    """A take in progress."""

    def __init__(self, gone: Gone) -> None:
        self.gone = gone
        self.done = False
        self.pending: list[tuple[OwnedPartition, Pending]] = []
        self.taken: list[Taken] = []
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self) -> None:
        """Answer with the deliveries that began. Those that begin later are released."""
        self.done = True
        for _, pending in self.pending:
            pending.cancel()
        if not self.future.done():
            self.future.set_result(None)


class RemoteAsk:
    """What a take asked of one partition. To the owner it is a receiver."""

    __slots__ = ("elsewhere", "lease_ms", "taking")

    def __init__(self, elsewhere: Elsewhere, taking: Taking, lease_ms: int) -> None:
        self.elsewhere = elsewhere
        self.taking = taking
        self.lease_ms = lease_ms

    def handed(self, held: OwnedPartition, handout: Handout) -> None:
        taking, (epoch, delivery) = self.taking, handout.receipt
        taking.pending = [(h, p) for h, p in taking.pending if h is not held or p.delivery != delivery]
        if handout.offsets:
            if taking.done or taking.gone():
                held.owner.release(handout.offsets, handout.receipt, counted=False)
            else:
                if not taking.taken:
                    asyncio.get_running_loop().call_later(REST_S, taking.finish)
                messages = self.elsewhere.read(held, handout.offsets)
                taking.taken.append(Taken(held.number, epoch, delivery, self.lease_ms, messages))
        if not taking.pending:
            taking.finish()


class Elsewhere:
    """Both sides: handlers here that take from other workers, and partitions here that other workers take from."""

    def __init__(self, ownership: Ownership, peers: Peers, takers: Sequence[Taker]) -> None:
        self.ownership = ownership
        self.peers = peers
        self._takers = takers
        self._closing = False
        self.remotes: dict[str, Remote] = {}  # URL -> its handlers
        self._specs = [
            Spec(h.name, h.queues, h.batch, h.visibility_timeout_ms, h.max_receives)
            for h in (taker.handler for taker in takers)
        ]
        self._takings: set[Taking] = set()
        self._told = asyncio.Event()
        self._looking = False
        self._turn = 0
        peers.register(self)

    # ------------------------------------------------------------------ a worker with handlers

    async def renew(self) -> None:
        """Tell all owners what is handled here, now and again every `RENEW_S`."""
        while True:
            self._told.clear()
            if self._specs and not self._closing:
                urls = self.peers.others()
                for taker in self._takers:
                    for url in taker.elsewhere.keys() - set(urls):
                        del taker.elsewhere[url]
                await asyncio.gather(*(self._introduce(url) for url in urls))
            self._expire()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), RENEW_S)

    def close(self) -> None:
        """Stop taking from other workers, and letting them take from here."""
        self._closing = True

    def renew_soon(self) -> None:
        """Called when partitions changed hands."""
        self._told.set()

    async def _introduce(self, url: str) -> None:
        try:
            answer = await self.peers.call(url, self.on_handlers, Introduction(self.peers.url, self._specs))
        except MarqError as exc:
            log.debug("%s", exc)
            return
        self._became_ready(url, answer.ready)

    @peer_call("ready")
    async def on_ready(self, told: Ready) -> None:
        """Called by another worker that has something for handlers here."""
        self._became_ready(told.url, told.ready)

    def _became_ready(self, url: str, numbers: list[int]) -> None:
        for number in numbers:
            taker = self._takers[number]
            taker.elsewhere[url] = None
            taker.run()

    def goes_first(self, taker: Taker) -> bool:
        """Whether it is the turn of partitions elsewhere, whose workers don't have this handler themselves."""
        members = self.peers.members()
        theirs = sum(
            len(members.get(url, ()))
            for url in taker.elsewhere
            if not any(spec.name == taker.handler.name for spec in self._specs_of(url))
        )
        self._turn += 1
        return self._turn % (theirs + max(1, len(self.ownership.held))) < theirs

    def _specs_of(self, url: str) -> list[Spec]:
        remote = self.remotes.get(url)
        return remote.specs if remote is not None else []

    def fetch(self, taker: Taker) -> None:
        """Ask other workers for as much as there is room for, with one call at a time to each."""
        for url in list(taker.elsewhere):
            room = taker.room
            if room <= 0:
                return
            if url not in taker.fetching:
                taker.fetching[url] = taker.calls_of_start(room)
                self.ownership.spawn(self._fetch(taker, url))

    async def _fetch(self, taker: Taker, url: str) -> None:
        calls, asked_ms = taker.fetching[url], now_ms()
        slow = asyncio.get_running_loop().call_later(SLOW_S, self._is_slow, taker, url)
        found: list[Taken] = []
        try:
            found = await self.peers.call(url, self.on_take, Take(self.peers.url, self._takers.index(taker), calls))
        except MarqError as exc:
            log.info("%s", exc)
        finally:
            slow.cancel()
            taker.fetching.pop(url, None)
        if not found:
            taker.elsewhere.pop(url, None)  # it will say when there is more
        else:
            taker.elsewhere[url] = taker.elsewhere.pop(url, None)  # next time others go first
        for taken in found:
            # counted from before the call: the lease began later
            taker.arrived(taken, asked_ms + taken.lease_ms)
        taker.run()

    def _is_slow(self, taker: Taker, url: str) -> None:
        """A worker that is slow to answer no longer takes room from others."""
        taker.fetching[url] = 0
        taker.run()

    # ------------------------------------------------------------------ an owner

    @peer_call("handlers")
    async def on_handlers(self, told: Introduction) -> Ready:
        """Record what another worker handles. Returns for which of its handlers something is ready here."""
        remote = self.remotes.setdefault(told.url, Remote())
        specs = told.specs
        remote.take_over(specs, asyncio.get_running_loop().time() + FORGET_S)
        ready = [number for number in range(len(specs)) if self._has_ready(remote, number)]
        remote.hungry = set(range(len(specs))).difference(ready)
        return Ready(ready)

    def _has_ready(self, remote: Remote, number: int) -> bool:
        return any(True for held in self._serving() for _ in self._queues_of(held, remote, number))

    def _serving(self) -> list[OwnedPartition]:
        return [held for held in self.ownership.held.values() if held.serving and not held.owner.stalled]

    def _queues_of(self, held: OwnedPartition, remote: Remote, number: int) -> Iterator[str]:
        route = remote.route
        return (queue for queue in held.owner.partition.queues() if route(queue) == number)

    def wake(self) -> None:
        """Something became ready in a partition here."""
        if not self._looking and any(remote.hungry for remote in self.remotes.values()):
            self._looking = True
            asyncio.get_running_loop().call_later(GATHER_S, self._look)

    def _look(self) -> None:
        self._looking = False
        for url, remote in self.remotes.items():
            ready = [number for number in remote.hungry if self._has_ready(remote, number)]
            if ready:
                remote.hungry.difference_update(ready)
                self.ownership.spawn(self._tell(url, ready))

    async def _tell(self, url: str, ready: list[int]) -> None:
        try:
            await self.peers.call(url, self.on_ready, Ready(ready, self.peers.url))
        except MarqError as exc:
            log.debug("%s", exc)  # it will introduce itself again

    @peer_call("take")
    async def on_take(self, asked: Take, gone: Gone = lambda: False) -> list[Taken]:
        """Start deliveries for a handler of another worker, of what is ready now."""
        remote, number = self.remotes.get(asked.url), asked.number
        if remote is None or number >= len(remote.specs) or self._closing:
            return []  # it will introduce itself again
        taking = Taking(gone)
        self._take(taking, remote, number, asked.calls)
        if not taking.pending and not taking.taken:
            times = remote.fruitless[number] = remote.fruitless.get(number, 0) + 1
            pause_s = min(FRUITLESS_S * 2 ** min(times, 10), RENEW_S)
            asyncio.get_running_loop().call_later(pause_s, self._tell_again, remote, number)
            return []
        remote.fruitless.pop(number, None)
        timer = asyncio.get_running_loop().call_later(FIRST_S, taking.finish)
        self._takings.add(taking)
        try:
            await taking.future
        finally:
            timer.cancel()
            self._takings.discard(taking)
            taking.finish()
        if taking.gone():
            self._give_back(taking.taken)
            return []
        return taking.taken

    def _tell_again(self, remote: Remote, number: int) -> None:
        if number < len(remote.specs):
            remote.hungry.add(number)
            self.wake()

    def _take(self, taking: Taking, remote: Remote, number: int, calls: int) -> None:
        spec, held = remote.specs[number], self._serving()
        left = calls * (spec.batch or 1)
        self._turn += 1
        for i in range(len(held)):
            one = held[(self._turn + i) % len(held)]
            queues = list(self._queues_of(one, remote, number))
            if not queues:
                continue
            queues = queues[self._turn % len(queues) :] + queues[: self._turn % len(queues)]
            settings = self.ownership.catalog.settings_of(queues[0])
            lease_ms = spec.lease_ms or settings.visibility_timeout_ms or VISIBILITY_TIMEOUT_MS
            if not self.ownership.room(one, 1, lease_ms):
                continue
            pending = one.owner.acquire(
                queues,
                left,
                RemoteAsk(self, taking, lease_ms),
                now_ms(),
                lease_ms=lease_ms,
                shared_fate=bool(spec.batch),
                batch=spec.batch or 1,
                name=spec.name,
            )
            if pending is None:
                continue
            taking.pending.append((one, pending))
            one.outbox.put(one.owner.take_appends())
            left -= len(pending.offsets)
            if left <= 0:
                return

    def _give_back(self, taken: list[Taken]) -> None:
        for one in taken:
            offsets = sorted(record.offset for record, _, _ in one.messages)
            release = Release(one.epoch, one.delivery, ranges_of(offsets), 0, counted=False)
            self.ownership.outbox(one.partition).put([release])

    def read(self, held: OwnedPartition, offsets: list[int]) -> list[tuple[Record, str, int]]:
        """The messages of a delivery."""
        partition = held.owner.partition
        found: list[tuple[Record, str, int]] = []
        for offset in offsets:
            record = partition.messages[offset]
            queue = partition.queue_of(offset) or ""
            if type(record) is Segment:
                record = partition.record(offset)
            receives = partition.deliveries[offset].receives
            copy = Record(offset, record.timestamp, record.key, record.value, list(record.headers))
            found.append((copy, queue, receives))
        return found

    def max_receives_of(self, queue: str) -> int:
        """Maximum receives of the handler elsewhere that gets `queue`; 0 if there is none."""
        for _, remote in sorted(self.remotes.items()):
            number = remote.route(queue)
            if number >= 0:
                return remote.specs[number].max_receives
        return 0

    def is_handled(self, queue: str) -> bool:
        """Whether a handler elsewhere gets the messages of `queue`."""
        return any(remote.route(queue) >= 0 for remote in self.remotes.values())

    def starving(self, held: OwnedPartition) -> bool:
        """Whether a handler elsewhere waits for messages that this partition has not read yet."""
        return any(
            not any(True for _ in self._queues_of(held, remote, number))
            for remote in self.remotes.values()
            for number in remote.hungry
        )

    def forget(self, held: OwnedPartition) -> None:
        """The partition went away: starts in progress there will never begin."""
        for taking in self._takings:
            taking.pending = [(h, p) for h, p in taking.pending if h is not held]
            if not taking.pending:
                taking.finish()

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for url in [url for url, remote in self.remotes.items() if remote.until_s < now]:
            del self.remotes[url]
