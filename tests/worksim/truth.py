"""The truth, from the logs alone: a reference for each partition, and the guarantees as code."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from marq.core import dedup, invariants
from marq.core.markers import Batch, Keepalive, Own, Release, Start, Tick, decode, is_owners
from marq.core.owner import Phase
from marq.core.ranges import offsets_in
from marq.errors import InternalError, MarqError
from marq.protocol.messages import Received
from tests.simulation.checks import Checks as CoreChecks
from tests.simulation.reference import IdRules, Reference
from tests.worksim.clock import Process

if TYPE_CHECKING:
    from tests.worksim.kafka import Log
    from tests.worksim.worker import Worker
    from tests.worksim.world import World

#: Of looks at a state in which nothing seems to have happened since the last one: how many are left out.
UNCHANGED = 0.9
#: Bytes of a payload that a story tells.
VALUE_BYTES = 40
NO_MARKERS = Batch(v=1, by="", seq=0, markers=[])


class Violation(Exception):
    """A guarantee does not hold."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Truth:
    """One partition."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        rules = IdRules(dedup.WINDOW_MS, dedup.BACK_MS, dedup.KEEP_MORE_MS, dedup.STEP_MS, 1 << 60)
        origins = rules._replace(window=dedup.ORIGIN_WINDOW_MS, most=dedup.ORIGINS_MAX)
        self.reference = Reference(number, world.settings.queue_id, rules, origins, self._done)
        topics = world.topics
        self.queue: Log = world.kafka.log(topics.queue, number)
        self.markers: Log = world.kafka.log(topics.markers, number)
        self.queue.on_append = self._sent
        self.markers.on_append = self._marked
        #: (epoch, delivery, offset) -> when its start was appended, and the milliseconds of its lease.
        self.starts: dict[tuple[int, int, int], tuple[float, int]] = {}
        #: Deliveries that were extended or released, and it took effect.
        self.changed: set[tuple[int, int, int]] = set()
        #: Deliveries that somebody gave back, whether or not it took effect.
        self.given_back: set[tuple[int, int, int]] = set()
        self._epochs: dict[str, int] = {}  # of each owner, by its nonce
        self._left: list[tuple[Worker, int, set[int]]] = []
        self.handed: Counter[int] = Counter()
        self.calls: Counter[int] = Counter()  # of handlers, that run now
        self.deliveries: set[tuple[int, int, int]] = set()
        self._looked: dict[str, tuple[Any, ...]] = {}
        #: Nonce of an owner -> message that it saw arrive -> milliseconds for which that may have been in the log then.
        self.arrivals: dict[str, dict[int, int]] = {}
        self._sim = SimpleNamespace(
            reference=self.reference,
            queue_id=world.settings.queue_id,
            queue=self.queue,
            violated=self._violated,
            arrivals=self.arrivals,
            sent_ms={},
            now_ms=0,
            has_jumped=True,
            count=world.count,
        )
        self._core = CoreChecks(self._sim)  # type: ignore[arg-type]

    def _violated(self, rule: str, text: str) -> NoReturn:
        self.world.violated(rule, f"partition {self.number}: {text}")

    @property
    def _now_ms(self) -> int:
        return int(self.world.loop.now * 1000)

    def _not_early(self, offset: int, due_ms: int, nonce: str) -> None:
        self._sim.now_ms = self._now_ms
        self._core._not_early(offset, due_ms, nonce)

    def _sent(self, record: Any) -> None:
        self.reference.send(record)
        self._sim.sent_ms[record.offset] = self._now_ms
        self.world.tell("queue %s @%s %s", self.number, record.offset, (record.value or b"")[:VALUE_BYTES])
        self.world.message_is_in(self.number, record)

    def _marked(self, record: Any) -> None:
        try:
            batch = decode(record.value)
        except (MarqError, AttributeError):
            batch = NO_MARKERS
        self.world.tell("markers %s @%s by %s: %s", self.number, record.offset, batch.by[:4], batch.markers)
        self._is_of_its_writer(record.offset, batch)
        now = self.world.loop.now
        effects = self.reference.fold(record.offset, record.timestamp, batch)
        if any(isinstance(marker, Start) for marker in batch.markers):
            self.world.faults.started(self.number)
        for marker, effect in zip(batch.markers, effects, strict=True):
            if isinstance(marker, Start | Keepalive):
                for offset in effect:
                    self.starts[marker.epoch, marker.delivery, offset] = (now, marker.redeliver_after_ms)
            if isinstance(marker, Release):
                self.given_back.update((marker.epoch, marker.delivery, o) for o in offsets_in(marker.offsets))
            if isinstance(marker, Keepalive | Release):
                self.changed.update((marker.epoch, marker.delivery, offset) for offset in effect)

    def _is_of_its_writer(self, offset: int, batch: Batch) -> None:
        """What only an owner may say is said by the owner that it names: nothing outlives its writer."""
        for marker in batch.markers:
            if isinstance(marker, Own):
                self._epochs[marker.nonce] = offset
                said, by = marker.nonce, batch.by
            elif not is_owners(marker) or isinstance(marker, Tick):
                if isinstance(marker, Tick) and not batch.by:
                    self._violated("writer", f"@{offset} of the markers, a tick, is of no owner: {batch}")
                continue
            else:
                said, by = str(marker.epoch), str(self._epochs.get(batch.by))  # type: ignore[union-attr]
            if said != by:
                self._violated("writer", f"@{offset} of the markers is of {batch.by or 'no owner'}: {marker}")

    def _done(self, offset: int, outcome: str, position: int) -> None:
        message = self.reference.messages.get(offset)
        if outcome == "expired" and message is not None and message.expires_ms:
            self._not_early(offset, message.expires_ms, self.reference.now.nonce)
        self.world.message_is_done(self.number, offset, outcome)

    # -- what owners leave

    def left(self, worker: Worker, owned: Any) -> None:
        """An owner gives the partition up. Its started messages must be handed out or given back."""
        if owned.owner.phase is Phase.LEFT:
            self._left.append((worker, owned.owner.epoch, set(owned.owner.starts.pending)))

    def nothing_is_stranded(self) -> None:
        """Where all that an owner which left had to say is in the log, its deliveries are with a receiver or over."""
        for left in list(self._left):
            worker, epoch, deliveries = left
            if worker.process.state is Process.DEAD:
                self._left.remove(left)
            elif worker.process.state is Process.RUNS and worker.has_said_all(self.number):
                self._left.remove(left)
                for offset, state in self.reference.states.items():
                    theirs = state[0] == epoch and state[1] in deliveries and state[4]
                    if theirs and (epoch, state[1], offset) not in self.deliveries:
                        self._violated("stranded", f"@{offset} is with nobody: {state}; {worker.process.name} left")

    # -- what receivers get

    def handed_out(self, worker: Worker, one: Received, receipt: tuple[Any, ...]) -> None:
        """An answer leaves a worker."""
        _, epoch, delivery, offset, *_ = receipt
        name, ref = (epoch, delivery, offset), self.reference
        started = ref.started.get(name)
        who = f"{worker.process.name} hands out @{offset} as {epoch}/{delivery}"
        if started is None:
            self._violated("G3 valid", f"{who}, which never took effect")
        if name in self.deliveries:
            self._violated("G3 twice", f"{who}, again")
        self.deliveries.add(name)
        began_s, lease_ms = self.starts[name]
        lease_ms = lease_ms or 10_000
        if self.world.loop.now >= began_s + lease_ms / 1000:
            self._violated(
                "G3 late", f"{who}, {self.world.loop.now - began_s:.3f} s after its start, for {lease_ms} ms"
            )
        if ref.ended_at.get(offset, 1 << 60) < started.position:
            self._violated("G2", f"{who}, which ended at {ref.ended_at[offset]}, before {started.position}")
        if one.attempt != started.receives:
            self._violated("G4 told", f"{who}, attempt {one.attempt}; the log says {started.receives}")
        self._burned(who, one.attempt)
        message = ref.messages[offset]
        if message.poison or message.duplicate:
            self._violated("G3 early", f"{who}: {message}")
        if started.is_first and message.due_ms > max(0, started.highest_ms):
            self._violated("G3 early", f"{who}, before its delay is over: {message}")
        if started.is_first and message.due_ms:
            self._not_early(offset, message.due_ms, next((n for n, at in self._epochs.items() if at == epoch), ""))
        if message.record.value != one.payload:
            self._violated("G1 payload", f"{who} with another payload")
        if self.world.is_fifo(one.queue):
            for other in ref.groups[one.queue, message.group]:
                state = ref.at(other, started.position + 1)
                if other < offset and type(state) is not str and not (state and state[:2] == (epoch, delivery)):
                    self._violated("order", f"{who} before @{other} of its group: {state}")
        self.handed[offset] += 1
        self.world.count("handed out")
        self.world.count("handed out again", self.handed[offset] > 1)

    def _is_folded(self, who: str, position: int) -> bool:
        """Whether a worker owns the partition, and has folded that record of the markers."""
        for worker in self.world.workers:
            if worker is not None and worker.process.name == who:
                owned = worker.ownership.owned.get(self.number)
                return owned is not None and owned.serving and owned.owner.partition.markers_position > position
        return False

    def called(self, who: str, message: Any) -> None:
        """A handler is called."""
        ref, offset, now = self.reference, message.offset, self.world.loop.now
        names = [n for n, started in ref.started.items() if n[2] == offset and started.receives == message.attempt]
        if not names:
            self._violated("G3 valid", f"{who} calls a handler with @{offset}, attempt {message.attempt}; no start")
        began_s, lease_ms = self.starts[names[-1]]
        ended_at = ref.ended_at.get(offset)
        if ended_at is not None and self._is_folded(who, ended_at):
            self._violated("done", f"{who} calls a handler with @{offset}, which it knows to be done")
        if ended_at is None and now >= began_s + lease_ms / 1000:
            self._violated("G3 late", f"{who} calls a handler with @{offset}, {now - began_s:.3f} s of {lease_ms} ms")
        if ref.ended_at.get(offset, 1 << 60) < ref.started[names[-1]].position:
            self._violated("G2", f"{who} calls a handler with @{offset}, which ended before")
        if ref.messages[offset].record.value != message.payload:
            self._violated("G1 payload", f"{who} calls a handler with @{offset} and another payload")
        self._burned(f"{who} calls a handler with @{offset}", message.attempt)
        if self.calls[offset] and not self.world.shape.faults:
            self._violated("duplicate", f"{who} calls a handler with @{offset} beside another call, without any fault")
        self.handed[offset] += 1
        self.world.count("handled")
        self.world.count("handed out again", self.handed[offset] > 1)

    def _burned(self, who: str, attempt: int) -> None:
        """Where each receiver finishes what it gets, only an answer that got lost costs an attempt."""
        clients = self.world.clients
        if attempt > 1 and clients.theme.careful and not clients.accepts:
            self._violated("G4 burned", f"{who}, attempt {attempt}")

    # -- what workers know

    def look(self, worker: Worker, thoroughly: bool = False) -> None:
        """The state in a worker's memory is the fold of the logs."""
        owned = worker.ownership.owned.get(self.number)
        if owned is None or owned.owner.phase is not Phase.SERVING:
            return
        p = owned.owner.partition
        # what is as it was at the last look, and was right then, need not be counted again each time
        seen = (owned, p.position, p.markers_position, len(p.messages), len(p.deliveries), len(self.reference.done))
        if not thoroughly and self._looked.get(worker.url) == seen and self.world.random.random() < UNCHANGED:
            return
        self._looked[worker.url] = seen
        moment = self.reference.moment(p.markers_position)
        if (moment.nonce, moment.own) != (owned.owner.nonce, owned.owner.epoch):
            self._violated("G5", f"{worker.process.name} serves as {owned.owner.nonce}, the log says {moment.nonce}")
        try:
            invariants.check(p)
        except InternalError as exc:
            self._violated("invariant", f"{worker.process.name}: {exc}")
        self._core.partition(p, worker.process.name)

    def unfinished(self) -> list[int]:
        return [offset for offset in self.reference.messages if offset not in self.reference.done]
