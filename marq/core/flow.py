"""Limits on what one queue has in flight in one partition, and the circuit breaker of a queue. Not in the log.

    closed ──(a run of failures)──► open ──(pause over)──► probing ──success──► closed
                                      ▲                        │
                                      └────────failure─────────┘

Both are decisions of the owner about what to start next; a new owner counts what is in flight from the state. Owners
share the breaker of a queue if they are given the same one; its listener may tell others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from marq.core.markers import End, Marker, Release
from marq.core.policies import QueueSettings, SettingsOf, share
from marq.core.state import State

#: A time that never comes.
FOREVER_MS = 1 << 62

#: Queues with limits that are remembered while they have nothing in flight. When there are more, idle ones are dropped.
FLOWS_SLACK = 1_000


class Breaker:
    """Opens after a number of failures in a row. After a pause one message is tried: the probe.

    The argument ``probe`` of its methods says whether the message was the probe; None: it is not known, and any message
    that is finished while a probe is out counts as the probe.
    """

    __slots__ = ("__weakref__", "failures", "listener", "open_until_ms", "probing", "probing_until_ms")

    def __init__(self, listener: Callable[[Breaker, str, int], None] | None = None) -> None:
        self.failures = 0  # in a row
        self.open_until_ms: int | None = None  # None: closed
        self.probing = False  # one message is being tried
        self.probing_until_ms = 0  # when it is given up, if nothing is heard of it
        self.listener = listener  # told (breaker, event, milliseconds): failed, opened, probing, spared, succeeded

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``probing``."""
        return "closed" if self.open_until_ms is None else ("probing" if self.probing else "open")

    def room(self, now_ms: int) -> int | None:
        """How many messages may be started now; None: any number."""
        if self.open_until_ms is None:
            return None
        return 0 if now_ms < (self.probing_until_ms if self.probing else self.open_until_ms) else 1

    def tried(self, now_ms: int = 0, for_ms: int = FOREVER_MS) -> bool:
        """A message was started. Returns True if it is the probe, because the breaker is open."""
        if self.open_until_ms is None:
            return False
        self.probing, self.probing_until_ms = True, now_ms + for_ms
        self._tell("probing", for_ms)
        return True

    def succeeded(self, probe: bool | None = None) -> None:
        """A message was acknowledged."""
        if self.open_until_ms is not None and not (self.probing if probe is None else probe):
            return  # left over from before it opened
        if self.failures or self.open_until_ms is not None:
            self._close()
            self._tell("succeeded")

    def failed(self, limit: int, pause_ms: int, now_ms: int, probe: bool | None = None) -> bool:
        """A message was given back, or its lease ended. Returns True if that opened the breaker; 0: no ``limit``."""
        if self.open_until_ms is not None:
            if not limit or not (self.probing if probe is None else probe):
                return False  # left over from before it opened
            self.failures += 1
            self._open(now_ms, pause_ms)
            return True
        self.failures += 1
        if not limit or self.failures < limit:
            self._tell("failed")
            return False
        self._open(now_ms, pause_ms)
        return True

    def spared(self, probe: bool | None = None) -> None:
        """A message came back without having been tried."""
        if self.probing and probe is not False:
            self.probing = False
            self._tell("spared")

    def heard(self, event: str, amount: int, limit: int, pause_ms: int, now_ms: int) -> None:
        """Take over what another worker's breaker of the queue told. ``amount``: failures, or milliseconds."""
        if event == "failed" and self.open_until_ms is None:
            self.failures += amount
            if limit and self.failures >= limit:
                self._open(now_ms, pause_ms)
        elif event == "opened":
            self.failures = max(self.failures, limit)
            self.open_until_ms, self.probing = now_ms + amount, False
        elif event == "probing" and self.open_until_ms is not None:
            self.probing, self.probing_until_ms = True, now_ms + amount
        elif event == "spared":
            self.probing = False
        elif event == "succeeded":
            self._close()

    def _open(self, now_ms: int, pause_ms: int) -> None:
        self.open_until_ms, self.probing = now_ms + pause_ms, False
        self._tell("opened", pause_ms)

    def _close(self) -> None:
        self.failures, self.open_until_ms, self.probing = 0, None, False

    def _tell(self, event: str, amount: int = 1) -> None:
        if self.listener is not None:
            self.listener(self, event, amount)


class Flow:
    """What one queue has in flight in one partition."""

    __slots__ = ("breaker", "by_receiver", "offsets", "probe", "refused")

    def __init__(self, breaker: Breaker | None = None) -> None:
        self.offsets: dict[int, str] = {}  # started or about to be -> receiver
        self.by_receiver: Counter[str] = Counter()
        self.breaker = breaker or Breaker()  # of the queue: other partitions may have the same one
        self.probe = -1  # the message by which an open breaker finds out
        self.refused = False  # a receiver got nothing because of the breaker, and waits to be told when that is over

    def add(self, offsets: Sequence[int], receiver: str, now_ms: int = 0, probe_ms: int = FOREVER_MS) -> None:
        """These are being started for ``receiver``. A probe among them is given up after ``probe_ms``."""
        for offset in offsets:
            self.remove(offset)
            self.offsets[offset] = receiver
            self.by_receiver[receiver] += 1
        if self.breaker.tried(now_ms, probe_ms):
            self.probe = offsets[0]

    def is_probe(self, offset: int) -> bool:
        """True if this was the probe. It is only true once."""
        if offset != self.probe:
            return False
        self.probe = -1
        return True

    def remove(self, offset: int) -> bool:
        """Note that a message is not in flight any more. Returns False if it was not."""
        receiver = self.offsets.pop(offset, None)
        if receiver is None:
            return False
        self.by_receiver[receiver] -= 1
        if not self.by_receiver[receiver]:
            del self.by_receiver[receiver]
        return True

    def expired(self, in_flight: Callable[[int], bool]) -> list[int]:
        """Remove and return messages whose lease ended without a word."""
        gone = [offset for offset in self.offsets if not in_flight(offset)]
        for offset in gone:
            self.remove(offset)
        return gone

    def room(self, settings: QueueSettings, receiver: str, wanted: int, number: int, partitions: int) -> int:
        """How many of the ``wanted`` messages the limits of the queue allow ``receiver``."""
        room = wanted
        if settings.max_in_flight:
            room = min(room, share(settings.max_in_flight, number, partitions) - len(self.offsets))
        if settings.max_in_flight_per_receiver:
            limit = share(settings.max_in_flight_per_receiver, number, partitions)
            room = min(room, limit - self.by_receiver[receiver])
        return max(0, room)


class FlowControl:
    """Limits and breakers of the queues in one partition: says how much may be started, and is told how it ended."""

    def __init__(
        self, partition: State, partitions: int, settings_of: SettingsOf, breaker_of: Callable[[str], Breaker]
    ) -> None:
        self.flows: dict[str, Flow] = {}  # of queues with limits
        self.in_flight: dict[int, str] = {}  # offset -> its queue, if that has limits
        self._partition = partition
        self.partitions = partitions  # over which the limits of a queue are spread
        self._settings_of = settings_of
        self._breaker_of = breaker_of
        self._most = FLOWS_SLACK

    def room(self, queue: str, settings: QueueSettings, receiver: str, wanted: int, now_ms: int) -> int:
        """How many of the ``wanted`` messages the limits and the breaker of ``queue`` allow ``receiver``."""
        flow = self.flows.get(queue)
        if flow is None:
            if len(self.flows) >= self._most:
                self._forget(now_ms)
            flow = self.flows[queue] = self._begun(queue)
        if settings.breaker_failures:
            self._expire(flow, settings, now_ms)
            room = flow.breaker.room(now_ms)
            if room is not None:
                wanted = min(wanted, room)
                flow.refused |= not room
        number = self._partition.number
        room = flow.room(settings, receiver, wanted, number, self.partitions)
        if room < wanted:
            self._expire(flow, settings, now_ms)
            room = flow.room(settings, receiver, wanted, number, self.partitions)
        return room

    def add(self, queue: str, offsets: Sequence[int], receiver: str, now_ms: int, probe_ms: int) -> None:
        """These are being started for ``receiver``, after :meth:`room` allowed it."""
        self.flows[queue].add(offsets, receiver, now_ms, probe_ms)
        self.in_flight.update(dict.fromkeys(offsets, queue))

    def landed(self, marker: Marker | None, effect: Iterable[int], now_ms: int) -> None:
        """Messages were acknowledged, given back or ended by ``marker``; None: their start took no effect."""
        for offset in effect:
            queue = self.in_flight.pop(offset, None)
            flow = self.flows.get(queue) if queue is not None else None
            if flow is None or queue is None:
                continue
            flow.remove(offset)
            settings, probe = self._settings_of(queue), flow.is_probe(offset)
            if isinstance(marker, Release) and marker.counted:
                opened = flow.breaker.failed(settings.breaker_failures, settings.breaker_pause_ms, now_ms, probe)
                flow.refused |= opened
            elif isinstance(marker, End) and marker.outcome == "acked":
                flow.breaker.succeeded(probe)
            else:
                flow.breaker.spared(probe)
            self._wake(queue)
            if not flow.offsets and not is_limited(settings):
                del self.flows[queue]

    def wake_probes(self, now_ms: int) -> None:
        """Wake receivers that a breaker refused, once its pause is over or it was closed, here or elsewhere."""
        for queue, flow in self.flows.items():
            if flow.refused and flow.breaker.room(now_ms) != 0:
                flow.refused = False
                self._wake(queue)

    @property
    def refuses(self) -> bool:
        """True if :meth:`wake_probes` may have somebody to wake: a breaker is told of by time, and by other workers."""
        return any(flow.refused for flow in self.flows.values())

    def _wake(self, queue: str) -> None:
        if self._partition.has_ready(queue):
            self._partition.woken[queue] = None

    def _begun(self, queue: str) -> Flow:
        """Count what is in flight of a queue whose limits are new, or whose partition was taken over."""
        flow, partition = Flow(self._breaker_of(queue)), self._partition
        for offset, delivered in partition.deliveries.items():
            if partition.is_leased(offset) and offset in partition.messages and partition.queue_of(offset) == queue:
                flow.offsets[offset] = delivered.receiver
                flow.by_receiver[delivered.receiver] += 1
                self.in_flight[offset] = queue
        return flow

    def _expire(self, flow: Flow, settings: QueueSettings, now_ms: int) -> None:
        """A lease that ended without a word is a failure."""
        partition = self._partition
        for offset in flow.expired(lambda o: o in partition.reserved or partition.is_leased(o)):
            self.in_flight.pop(offset, None)
            probe = flow.is_probe(offset)
            if offset in partition.messages and partition.receives(offset):
                opened = flow.breaker.failed(settings.breaker_failures, settings.breaker_pause_ms, now_ms, probe)
                flow.refused |= opened
            else:
                flow.breaker.spared(probe)

    def _forget(self, now_ms: int) -> None:
        """Drop queues with nothing in flight and no failures that matter. They are made again when they are needed."""
        for queue, flow in list(self.flows.items()):
            breaker = flow.breaker
            failing = breaker.room(now_ms) == 0 or (breaker.failures and self._partition.has_ready(queue))
            failing = failing or flow.refused
            if not flow.offsets and not failing:
                del self.flows[queue]
        self._most = 2 * len(self.flows) + FLOWS_SLACK


def is_limited(settings: QueueSettings) -> bool:
    """True if what the queue has in flight has to be known."""
    return bool(settings.max_in_flight or settings.max_in_flight_per_receiver or settings.breaker_failures)
