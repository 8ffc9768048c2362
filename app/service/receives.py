"""Receives: they get messages from the partitions of this worker and from other workers, or wait.

    take what is ready here ──full──────────────────────────────────────────────────► answer
            │ less than asked for                                                        ▲
            ├─ something, or it does not wait: look, take the rest here and elsewhere ───┤
            └─ nothing: wait in line ──something comes: look, if it came just now────────┘

A *look* waits until everything that was confirmed before is folded, here and at the other workers (DESIGN 9.7). So a
receive that is answered with less than it asked for has got all that was confirmed before it came. One that has waited
for `LONG_S` need not look: the logs are read meanwhile. The first messages of a FIFO group keep the following ones
from being taken, so from a FIFO queue a receive takes after the look, unless it gets as many as it asked for at once.

The receives that wait for a queue are served in their order. `app.service.polling` looks for messages at the other
workers for them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec

from app.cluster.peers import Gone, Peers, peer_call
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.service.meters import Meters
from app.service.polling import Fetched, PeerPolling
from app.service.receipts import Receipts, by_delivery, queue_id
from app.service.waiter import Waiter
from marq.clock import now_ms
from marq.core.agenda import Handout
from marq.core.markers import Release
from marq.core.segments import Segment
from marq.core.stamps import next_stamps, shares_of
from marq.core.starts import HAND_OUT_MS
from marq.core.state import HEADER_OVERHEAD_BYTES
from marq.errors import MarqError, RowError, UnavailableError
from marq.protocol.headers import DEAD, H_GROUP, HEADER_KEY, RESERVED
from marq.protocol.messages import Received

log = logging.getLogger(__name__)

#: Receives that may wait at one worker.
WAITING_MAX = 10_000
#: Seconds, beyond its own time, that a receive waits for a start that is on its way.
GRACE_S = 10.0
#: Seconds after which a receiver should try again if it got nothing because this worker is late.
LATE_S = 1.0
#: Seconds that a receive with some messages waits for more: for those that are not read yet, and for starts.
ANSWER_AFTER_S = 0.2
#: Seconds of waiting from which on a receive need not look for what was confirmed before it came: it is read by then.
LONG_S = 0.25
#: One of this many receives asks the other workers first, so that their messages don't wait for ever.
ELSEWHERE_FIRST = 8
#: When the worker stops: most seconds for answers of other workers that were asked for messages.
ASKED_S = 3.0
#: Bytes of messages in one answer; the first message may be larger. Further messages are released uncounted.
ANSWER_BYTES = 32 * 1024 * 1024
#: Refused receivers, by name and lease, and skipped receives, after which a partition is not asked for more.
REFUSED_MAX, PASSED_MAX = 16, 1_000


_in_order = attrgetter("sent_ms", "partition", "offset")


class ReceiveHere(msgspec.Struct):
    """A request of another worker, for a receiver of its own.

    `whole`: with our own headers. `read_up`: take once everything is folded that was confirmed before. `url`: of the
    worker that asks, if it wants to know when there is more. `size_bytes`: of messages that the receiver has already.
    """

    queue: str
    limit: int
    lease_ms: int
    name: str
    whole: bool = False
    read_up: bool = False
    url: str = ""
    size_bytes: int = 0


class Ask:
    """The request of a waiter to one partition."""

    __slots__ = ("receives", "waiter")

    def __init__(self, receiving: Receives, waiter: Waiter) -> None:
        self.receives = receiving
        self.waiter = waiter

    def handed(self, owned: OwnedPartition, handout: Handout) -> None:
        self.receives.handed_to(self.waiter, owned, handout)


class Receives:
    """All receives of this worker. A receiver of the ownership."""

    def __init__(self, ownership: Ownership, receipts: Receipts, meters: Meters, peers: Peers) -> None:
        self.ownership = ownership
        self.catalog = ownership.catalog
        self.closing = False
        self.count = 0  # receives in progress
        self.meters = meters
        self.receipts = receipts
        self.peers = peers
        self.polling = PeerPolling(self, peers, lambda coroutine: ownership.spawn(coroutine))
        self._waiting: dict[str, deque[Waiter]] = {}
        self._looking: dict[str, int] = {}  # queue -> receives that look
        self._asking: dict[Waiter, None] = {}  # those with starts on their way
        self._fetching = 0  # calls to other workers whose answers may have messages
        self._turn = random.randrange(1 << 16)
        self._receives = 0
        ownership.receivers.append(self)
        peers.register(self)

    async def receive(
        self,
        queue: str,
        limit: int,
        wait_ms: int,
        lease_ms: int | None,
        name: str,
        gone: Callable[[], bool],
        whole: bool = False,
    ) -> list[Received]:
        """See `app.service.operations.QueueService.receive`."""
        if self.count >= WAITING_MAX:
            raise UnavailableError(f"{WAITING_MAX} receives wait here already; try again later", 1.0)
        self.catalog.require_receivable(queue)
        settings = self.catalog.settings_of(queue)
        if lease_ms is None:
            lease_ms = settings.visibility_timeout_ms
        loop = asyncio.get_running_loop()
        waiter = Waiter(queue, limit, lease_ms, name, gone, whole, settings.fifo)
        waiter.came_s, waiter.over = loop.time(), wait_ms <= 0
        timer = loop.call_later(wait_ms / 1000 if wait_ms > 0 else GRACE_S, self._wait_over, waiter)
        self.count += 1
        try:
            await self._fill(waiter, wait_ms)
        finally:
            timer.cancel()
            self.count -= 1
            self._finish(waiter)
        return self._answer_in_time(waiter)

    async def _fill(self, waiter: Waiter, wait_ms: int) -> None:
        """Get what the waiter asked for, or wait for something."""
        queue, line = waiter.queue, deque.append
        self._receives += 1
        url = self.polling.elsewhere(queue) if self._receives % ELSEWHERE_FIRST == 0 else None
        if url is not None:
            await self._fetch_from(waiter, [url], read_up=waiter.fifo)
        if not waiter.fifo or self._is_plenty(waiter):
            self._take_in_turn(waiter)
        if waiter.pending:
            self.polling.served_here(queue)
        else:
            self.ownership.hurry()
        looks_for_nothing = wait_ms < LONG_S * 1000
        while True:
            if self._is_new(waiter) and (looks_for_nothing or waiter.has_some or self.has_ready(queue)):
                waiter.has_looked = True
                await self._look(waiter)
            while (waiter.pending or waiter.away) and not waiter.enough:
                await waiter.sleep()
            if waiter.messages or waiter.over or self.closing or waiter.gone():
                return
            line(self._waiting.setdefault(queue, deque()), waiter)
            line = deque.appendleft  # who was served already, and got nothing, keeps its place
            self._serve(queue)
            self.polling.poll_peers(queue)
            if not (waiter.pending or waiter.away):
                await waiter.sleep()
            self._leave_line(waiter)

    def _is_new(self, waiter: Waiter) -> bool:
        """True if something that was confirmed before a receive came may be unread, and it wants more."""
        if waiter.has_looked or waiter.room <= 0 or self.closing:
            return False
        return asyncio.get_running_loop().time() - waiter.came_s < LONG_S

    async def _look(self, waiter: Waiter) -> None:
        """Wait until everything that was confirmed before is folded, here and elsewhere, and take it."""
        queue = waiter.queue
        if self._is_withheld(waiter):  # messages are here; asking a slow Kafka would only delay the answer
            await self._fetch_from(waiter, await self.polling.ready_at(queue))
            return
        self._looking[queue] = self._looking.get(queue, 0) + 1
        waiter.is_looking = True
        elsewhere = asyncio.ensure_future(
            self.polling.ready_at(queue, last_look=True, found=lambda: waiter.has_some or self.has_ready(queue))
        )
        here = asyncio.ensure_future(self.read_up(queue))
        try:
            await asyncio.wait((here,), timeout=ANSWER_AFTER_S)
            if here.done() or not (waiter.has_some or self.has_ready(queue)):
                await here
            self._take(waiter)
            await self._fetch_from(waiter, await elsewhere)
        finally:
            elsewhere.cancel()
            here.cancel()
            waiter.is_looking = False
            self._looking[queue] -= 1
            if not self._looking[queue]:
                del self._looking[queue]
            if queue in self._waiting:  # the next one in line, if this one leaves something
                self._serve(queue)
        self._hasten(waiter)

    async def read_up_everywhere(self, queue: str) -> None:
        """Wait until what was confirmed before is folded at all workers that answer."""
        await self.peers.everywhere(self.read_up, queue)

    @peer_call("read_up")
    async def read_up(self, queue: str) -> None:
        """Wait until what was confirmed before is folded in this worker's partitions."""
        await self.ownership.read_up.wait(queue, self.ownership.copies)

    def _answer_in_time(self, waiter: Waiter) -> list[Received]:
        if not waiter.messages and self._is_withheld(waiter):
            raise UnavailableError(
                f"this worker is too busy to hand out messages for {waiter.lease_ms} ms: acks would be late", LATE_S
            )
        return self._answer(waiter)

    def _is_withheld(self, waiter: Waiter) -> bool:
        """True if a partition here has messages that it does not hand out because acks would be late."""
        is_late = self.ownership.throttle.is_late
        return any(
            h.owner.partition.has_ready(waiter.queue) and h.serving and is_late(h, waiter.lease_ms)
            for h in self.ownership.owned.values()
        )

    def _answer(self, waiter: Waiter) -> list[Received]:
        """The messages for the waiter, without those whose lease is over. Called just before they leave."""
        self._drop_late(waiter)
        if len(waiter.until) > 1 and not waiter.fifo:
            waiter.messages.sort(key=_in_order)
        if waiter.messages and waiter.gone():
            self.give_back(waiter.messages)
            return []
        if waiter.messages and not waiter.is_remote:  # those for another worker are counted there
            self.meters.handed(waiter.messages)
        return waiter.messages

    def _drop_late(self, waiter: Waiter) -> None:
        now = now_ms()
        if all(now < until_ms for until_ms, _ in waiter.until):
            return
        in_time: list[Received] = []
        late: list[Received] = []
        at = 0
        for until_ms, count in waiter.until:
            (in_time if now < until_ms else late).extend(waiter.messages[at : at + count])
            at += count
        waiter.messages = in_time
        self.give_back(late)

    @peer_call("receive")
    async def receive_here(self, asked: ReceiveHere, gone: Gone = lambda: False) -> list[Received]:
        """Messages that this worker has now, for a receive at another worker."""
        found: list[Received] = []
        try:
            found = await self._receive_here(asked, gone)
        finally:
            if asked.url:
                self.polling.has_taken(asked.queue, asked.url, len(found))
        return found

    async def _receive_here(self, asked: ReceiveHere, gone: Gone) -> list[Received]:
        fifo = self.catalog.settings_of(asked.queue).fifo
        waiter = Waiter(asked.queue, asked.limit, asked.lease_ms, asked.name, gone, asked.whole, fifo)
        waiter.size_bytes, waiter.is_remote = asked.size_bytes, True
        if asked.read_up:
            await self.read_up(asked.queue)
        self._take_in_turn(waiter)
        if not waiter.pending:
            return []
        timer = asyncio.get_running_loop().call_later(GRACE_S, self._wait_over, waiter)
        try:
            while waiter.pending and not waiter.enough:
                await waiter.sleep()
        finally:
            timer.cancel()
            self._finish(waiter)
        return self._answer(waiter)

    # ------------------------------------------------------------------ receive: at other workers

    async def _fetch_from(self, waiter: Waiter, urls: Sequence[str], read_up: bool = False) -> None:
        """Take what other workers have, as far as there is room."""
        for url in urls:
            if waiter.room > 0:
                fetch = self.ownership.spawn(self._fetch_for(waiter, url, read_up))
                await asyncio.wait((fetch,), timeout=ANSWER_AFTER_S if waiter.has_some else None)

    async def _fetch_for(self, waiter: Waiter, url: str, read_up: bool = False, watch: bool = False) -> int | None:
        """Take what another worker has, for a receive. Returns how much that was; None if it does not answer.

        What comes too late, or is more than there is room for by now, is given back.
        """
        asked_ms = now_ms()  # their leases began later
        found = await self._fetch(url, waiter, read_up, watch)
        if found:
            count = waiter.add(found, asked_ms + (waiter.lease_ms or HAND_OUT_MS), ANSWER_BYTES)
            if count < len(found):
                self.give_back(found[count:])
            waiter.wake()
        return None if found is None else len(found)

    async def fetch(self, queue: str, url: str) -> Fetched:
        """Take what another worker has now, for the first receive that waits here."""
        line = self._waiting.get(queue)
        while line and line[0].gone():
            line.popleft().wake()
        if not line:
            return Fetched(0, 0)
        waiter = line.popleft()
        wanted = waiter.room
        waiter.away = True
        got = await self._fetch_for(waiter, url, read_up=waiter.fifo and self._is_new(waiter), watch=True)
        waiter.away = False
        if not waiter.done and not got:
            waiter.wake()  # it waits on, as the first in line
        return Fetched(wanted, got)

    async def _fetch(self, url: str, waiter: Waiter, read_up: bool, watch: bool) -> list[Received] | None:
        """What another worker has now; None if it does not answer, or this worker stops."""
        if self.closing:
            return None
        asked = ReceiveHere(
            waiter.queue,
            waiter.room,
            waiter.lease_ms,
            waiter.name,
            whole=waiter.whole,
            read_up=read_up,
            url=self.peers.url if watch else "",
            size_bytes=waiter.size_bytes,
        )
        self._fetching += 1
        try:
            return await self.peers.call(url, self.receive_here, asked)
        except MarqError as exc:
            log.info("%s", exc)
            return None
        finally:
            self._fetching -= 1

    def waited_for(self) -> list[str]:
        """Queues that receivers wait for here."""
        return list(self._waiting)

    def waiting_count(self, queue: str) -> int:
        """How many receivers wait here for `queue`."""
        line = self._waiting.get(queue)
        return len(line) if line else 0

    def has_ready(self, queue: str) -> bool:
        """True if a partition of this worker may have something for a receiver of `queue`."""
        owned = self.ownership.owned.values()
        return any(h.serving and not h.owner.stalled and h.owner.partition.has_ready(queue) for h in owned)

    # ------------------------------------------------------------------ receive: here

    def _take_in_turn(self, waiter: Waiter) -> None:
        """Let the receives that wait already go first, then take what is left for this one."""
        if waiter.queue in self._waiting:
            self._serve(waiter.queue)
        self._take(waiter)

    def _is_plenty(self, waiter: Waiter) -> bool:
        """True if the partitions here have as much ready in a FIFO queue as the waiter has room for."""
        found = 0
        for owned in self.ownership.owned.values():
            if owned.serving and not owned.owner.stalled:
                found += owned.owner.partition.at_hand(waiter.queue, waiter.room - found)
                if found >= waiter.room:
                    return True
        return False

    def _take(self, waiter: Waiter) -> None:
        """Ask the partitions here until enough is on its way. Oldest messages first, except where groups are."""
        queue, left = waiter.queue, waiter.room
        # most of many partitions have nothing, which costs least to find out
        owned = [h for h in self.ownership.owned.values() if h.owner.partition.has_ready(queue) and h.serving]
        if not owned or left <= 0 or self.closing:
            return
        exhausted: set[int] = set()
        self._turn += 1
        first = self._turn % len(owned)
        owned = owned[first:] + owned[:first]
        if len(owned) > 1 and not waiter.fifo:
            for i, share in shares_of(left, next_stamps([h.owner.partition for h in owned], queue, left)):
                count = self._take_from(owned[i], waiter, share)
                left -= count
                if count < share:
                    exhausted.add(i)
        for one in (one for i, one in enumerate(owned) if i not in exhausted):
            if left <= 0:
                return
            left -= self._take_from(one, waiter, left)

    def _take_from(self, owned: OwnedPartition, waiter: Waiter, limit: int) -> int:
        """Ask one partition. Returns how many of its messages are on their way to the waiter."""
        owner = owned.owner
        if not owner.partition.has_ready(waiter.queue):
            return 0
        limit = self.ownership.throttle.room(owned, limit, waiter.lease_ms)
        if not limit:
            return 0
        try:
            pending = owner.acquire(
                (waiter.queue,), limit, Ask(self, waiter), now_ms(), lease_ms=waiter.lease_ms, name=waiter.name
            )
        except RowError as exc:  # what is on disk can't be read back
            self.ownership.recover_again(owned, str(exc), wipe=True)
            return 0
        if pending is None:
            return 0
        waiter.pending.append((owned, pending))
        self._asking[waiter] = None
        owned.outbox.put(owner.take_appends())
        return len(pending.offsets)

    def handed_to(self, waiter: Waiter, owned: OwnedPartition, handout: Handout) -> None:
        """Called when a delivery that the waiter asked for begins, or has failed (then without offsets)."""
        delivery = handout.receipt[1]
        waiter.pending = [(h, p) for h, p in waiter.pending if h is not owned or p.delivery != delivery]
        if not waiter.pending:
            self._asking.pop(waiter, None)
        if handout.offsets:
            if waiter.done or waiter.gone():
                owned.owner.release(handout.offsets, handout.receipt, counted=False)
            else:
                count = self._read(waiter, owned, handout)
                if count < len(handout.offsets):
                    owned.owner.release(handout.offsets[count:], handout.receipt, counted=False)
                    waiter.is_full = True
                waiter.until.append((handout.until_ms, count))
                self._hasten(waiter)
        if not waiter.pending:
            waiter.wake()

    def _hasten(self, waiter: Waiter) -> None:
        """Once there is something to answer, a receive waits only a little for starts of other partitions."""
        if waiter.pending and waiter.messages and not waiter.is_looking and not waiter.is_hastened:
            waiter.is_hastened = True
            asyncio.get_running_loop().call_later(ANSWER_AFTER_S, self._enough, waiter)

    def _read(self, waiter: Waiter, owned: OwnedPartition, handout: Handout) -> int:
        """Add messages of a delivery to the waiter's answer, as long as they fit. Returns how many."""
        partition, topic, number = owned.owner.partition, self.ownership.topics.queue, owned.number
        queue, (epoch, delivery) = waiter.queue, handout.receipt
        make, deliveries, messages = self.receipts.make, partition.deliveries, partition.messages
        named = queue_id(queue)
        add, shown, whole = waiter.messages.append, DEAD, waiter.whole
        topic_mode = partition.queue_id is not None
        size, count = waiter.size_bytes, 0
        for offset in handout.offsets:
            record = messages[offset]
            if type(record) is Segment:
                record = partition.record(offset)
            attempt, payload = deliveries[offset].receives, record.value or b""
            headers: dict[str, bytes] = {}
            key, group = record.key if topic_mode else None, None
            if record.headers:
                for header, value in record.headers:
                    if whole or not header.startswith(RESERVED) or header.startswith(shown):
                        headers[header] = value or b""
                    elif header == HEADER_KEY and not topic_mode:
                        key = value
                    elif header == H_GROUP:
                        group = value.decode(errors="replace") if value is not None else None
                size += sum(HEADER_OVERHEAD_BYTES + len(name) + len(value) for name, value in headers.items())
            size += len(payload) + (len(key) if key is not None else 0)
            if size > ANSWER_BYTES and (waiter.messages or waiter.size_bytes):
                break
            receipt = make(number, epoch, delivery, offset, attempt, named)
            add(
                Received(receipt, queue, topic, number, offset, attempt, record.timestamp, payload, key, headers, group)
            )
            count += 1
        waiter.size_bytes = size
        return count

    def _wait_over(self, waiter: Waiter) -> None:
        if waiter.over:
            self._enough(waiter)
            return
        waiter.over = True
        if waiter.pending or waiter.away or waiter.is_looking:  # it takes milliseconds, or Kafka is away
            asyncio.get_running_loop().call_later(GRACE_S, self._enough, waiter)
        waiter.wake()

    def _enough(self, waiter: Waiter) -> None:
        """Wait for no start any more."""
        waiter.enough = True
        waiter.wake()

    def _finish(self, waiter: Waiter) -> None:
        """End the receive. Messages that still come for it are released, and do not count as received."""
        waiter.done = True
        self._asking.pop(waiter, None)
        for _, pending in waiter.pending:
            pending.cancel()
        self._leave_line(waiter)

    def _leave_line(self, waiter: Waiter) -> None:
        line = self._waiting.get(waiter.queue)
        if line is not None:
            if waiter in line:
                line.remove(waiter)
            if not line:
                del self._waiting[waiter.queue]

    def give_back(self, messages: Sequence[Received]) -> None:
        """Release messages that can't be answered any more. They do not count as received."""
        receipts = [self.receipts.read(message.receipt) for message in messages]
        for number, markers in by_delivery(receipts, lambda e, d, r: Release(e, d, r, 0, counted=False)).items():
            self.ownership.outbox(number).put(markers)

    def _serve(self, queue: str) -> None:
        """Serve the receives that wait for `queue`, in their order."""
        if self.closing:
            return
        for owned in list(self.ownership.owned.values()):
            if owned.owner.partition.has_ready(queue) and owned.serving:
                self._serve_from(owned, queue)

    def _serve_from(self, owned: OwnedPartition, queue: str) -> None:
        """Serve waiting receives from one partition, in order. Skips those that a limit or a short lease refuses."""
        line, partition = self._waiting.get(queue), owned.owner.partition
        if not line or owned.owner.stalled or not partition.has_ready(queue):
            return
        refused: set[tuple[str, int]] = set()
        passed: list[Waiter] = []
        while line and len(refused) < REFUSED_MAX and len(passed) < PASSED_MAX:
            waiter = line.popleft()
            terms = waiter.name, waiter.lease_ms
            if waiter.gone():
                waiter.wake()
            elif waiter.fifo and self._is_new(waiter):
                waiter.wake()  # it looks first
                break
            elif terms in refused:
                passed.append(waiter)
            elif self._take_from(owned, waiter, waiter.room):
                waiter.wake()
            else:
                passed.append(waiter)
                if not partition.has_ready(queue):
                    break
                refused.add(terms)
        line.extendleft(reversed(passed))

    # -- receiver of the ownership

    def handed(self, owned: OwnedPartition, handout: Handout) -> None:
        raise AssertionError("deliveries go to the Ask that took them")

    def wake(self, owned: OwnedPartition) -> None:
        """Called when something became ready in a partition of this worker."""
        if self.closing or owned.owner.stalled:  # its stall ends with another call
            return
        has_ready = owned.owner.partition.has_ready
        if self._waiting:
            for queue in list(self._waiting):
                if has_ready(queue):
                    self.ownership.hurry()  # who waited for this may want more
                    self._serve_from(owned, queue)
        if self.polling.watchers:
            for queue in list(self.polling.watchers):
                if has_ready(queue):
                    self.ownership.hurry()
                    self.polling.tell(queue)

    def starving(self, owned: OwnedPartition) -> bool:
        has_ready = owned.owner.partition.has_ready
        return any(
            not has_ready(queue) for queues in (self._waiting, self._looking, self.polling.watchers) for queue in queues
        )

    def wants(self, queue: str) -> bool:
        return queue in self._waiting or queue in self._looking or queue in self.polling.watchers

    def forget(self, owned: OwnedPartition) -> None:
        """Called when a partition left this worker, and with it all starts there."""
        for waiter in list(self._asking):
            waiter.pending = [(h, p) for h, p in waiter.pending if h is not owned]
            if not waiter.pending:
                del self._asking[waiter]
                waiter.wake()

    async def close(self) -> None:
        """Answer all receives that wait: another worker will serve them.

        Those that wait for the answer of another worker get what is in it: its messages count as received.
        """
        self.closing = True
        for line in list(self._waiting.values()):
            for waiter in list(line):
                waiter.wake()
        deadline = asyncio.get_running_loop().time() + ASKED_S
        while self._fetching and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # what nobody waited for is given back
