"""Handlers of other workers that take from partitions here: what they want, and the deliveries started for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator

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
from marq.handlers import does_match

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

    __slots__ = ("lease_ms", "remote_handlers", "taking")

    def __init__(self, remote_handlers: RemoteHandlers, taking: Taking, lease_ms: int) -> None:
        self.remote_handlers = remote_handlers
        self.taking = taking
        self.lease_ms = lease_ms

    def handed(self, owned: OwnedPartition, handout: Handout) -> None:
        taking, (epoch, delivery) = self.taking, handout.receipt
        taking.pending = [(h, p) for h, p in taking.pending if h is not owned or p.delivery != delivery]
        if handout.offsets:
            if taking.done or taking.gone():
                owned.owner.release(handout.offsets, handout.receipt, counted=False)
            else:
                if not taking.taken:
                    asyncio.get_running_loop().call_later(REST_S, taking.finish)
                messages = self.remote_handlers.read(owned, handout.offsets)
                taking.taken.append(Taken(owned.number, epoch, delivery, self.lease_ms, messages))
        if not taking.pending:
            taking.finish()


class RemoteHandlers:
    """The handlers of all other workers. Called by these workers, and by this one when something became ready."""

    def __init__(self, ownership: Ownership, peers: Peers, on_ready: Callable[[Ready], Awaitable[None]]) -> None:
        """
        Args:
            on_ready: the peer call by which other workers are told that something is ready here.
        """
        self.ownership = ownership
        self.peers = peers
        self._on_ready = on_ready
        self._closing = False
        self.remotes: dict[str, Remote] = {}  # URL -> its handlers
        self._takings: set[Taking] = set()
        self._looking = False
        self._turn = 0
        peers.register(self)

    def close(self) -> None:
        """Let other workers take no more."""
        self._closing = True

    def specs_of(self, url: str) -> list[Spec]:
        """The handlers of another worker, as far as it has told them."""
        remote = self.remotes.get(url)
        return remote.specs if remote is not None else []

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
        return any(True for owned in self._serving() for _ in self._queues_of(owned, remote, number))

    def _serving(self) -> list[OwnedPartition]:
        return [owned for owned in self.ownership.owned.values() if owned.serving and not owned.owner.stalled]

    def _queues_of(self, owned: OwnedPartition, remote: Remote, number: int) -> Iterator[str]:
        route = remote.route
        return (queue for queue in owned.owner.partition.queues() if route(queue) == number)

    def wake(self) -> None:
        """Something became ready in a partition here."""
        if not self._looking and any(remote.hungry for remote in self.remotes.values()):
            self._looking = True
            self.ownership.hurry()
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
            await self.peers.call(url, self._on_ready, Ready(ready, self.peers.url))
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
        spec, owned = remote.specs[number], self._serving()
        left = calls * (spec.batch or 1)
        self._turn += 1
        for i in range(len(owned)):
            one = owned[(self._turn + i) % len(owned)]
            queues = list(self._queues_of(one, remote, number))
            if not queues:
                continue
            queues = queues[self._turn % len(queues) :] + queues[: self._turn % len(queues)]
            settings = self.ownership.catalog.settings_of(queues[0])
            lease_ms = spec.lease_ms or settings.visibility_timeout_ms or VISIBILITY_TIMEOUT_MS
            if not self.ownership.throttle.room(one, 1, lease_ms):
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

    def read(self, owned: OwnedPartition, offsets: list[int]) -> list[tuple[Record, str, int]]:
        """The messages of a delivery."""
        partition = owned.owner.partition
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

    def starving(self, owned: OwnedPartition) -> bool:
        """Whether a handler elsewhere waits for messages that this partition has not read yet."""
        return any(
            not any(True for _ in self._queues_of(owned, remote, number))
            for remote in self.remotes.values()
            for number in remote.hungry
        )

    def forget(self, owned: OwnedPartition) -> None:
        """The partition went away: starts in progress there will never begin."""
        for taking in self._takings:
            taking.pending = [(h, p) for h, p in taking.pending if h is not owned]
            if not taking.pending:
                taking.finish()

    def expire(self) -> None:
        """Forget workers that have not sent their specs for long."""
        now = asyncio.get_running_loop().time()
        for url in [url for url, remote in self.remotes.items() if remote.until_s < now]:
            del self.remotes[url]
