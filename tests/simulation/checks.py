"""The guarantees of the design, each as code that looks at the whole system from outside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from marq.core import rows
from marq.core.agenda import Handout
from marq.core.checkpoint_cycle import CycleState
from marq.core.markers import Batch, End, Tick, decode
from marq.core.owner import Owner, Phase
from marq.core.partition import Partition
from marq.core.queue_clock import DRIFT_MS
from marq.core.ranges import RangeSet, offsets_in
from marq.core.recovery import pass_deleted
from marq.core.segments import Segment
from marq.core.starts import Pending
from marq.core.state import size_of
from marq.errors import RowError
from tests.simulation.logs import edges_of

if TYPE_CHECKING:
    from tests.simulation.logs import Lane
    from tests.simulation.reference import Message, Started
    from tests.simulation.simulator import Simulator
    from tests.simulation.worker import Worker


#: A delivery whose lease is over at once is handed out within this time.
HAND_OUT_MS = 10_000


class Offer(NamedTuple):
    """The messages that a queue can deliver, by group and offset: never delivered (FIFO: all), and delivered before."""

    first: dict[bytes, list[int]]
    again: dict[bytes, list[int]]
    whole: bool  # nothing of it has to be read back first
    sure: bool = True  # nothing of it waits for an end that its owner has decided upon


def lost_of(losses: Iterable[rows.Loss]) -> RangeSet:
    """The offsets among which messages were given up, because their records were deleted unread."""
    gone = RangeSet()
    for loss in losses:
        gone.add(loss.start, loss.stop)
    return gone


class Checks:
    """Raises through ``sim.violated`` at the first violation."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.handed: dict[tuple[int, int, int], int] = {}  # (epoch, delivery, offset) -> worker
        self.leased_until: dict[tuple[int, int], int] = {}  # receipt -> end of the lease since its start was sent
        self.times_handed: dict[int, int] = {}
        self.left: list[tuple[Lane, int, set[int], set[int]]] = []  # owners that left: their epochs, deliveries, copies

    def _bad(self, rule: str, text: str) -> NoReturn:
        self.sim.violated(rule, text)

    # ------------------------------------------------------------------ what is appended

    def appended(self, position: int, batch: Batch) -> None:
        """A record of the markers log was folded by the reference."""
        done = self.sim.reference.done
        for marker in batch.markers:
            if type(marker) is End and marker.outcome == "acked":
                undone = [o for o in offsets_in(marker.offsets) if o not in done]
                if undone:
                    self._bad("G2 ack", f"the end at {position} of a delivery that was handed out leaves {undone}")

    def done(self, offset: int, outcome: str, position: int) -> None:
        """``offset`` is finished: there must be a reason."""
        sim = self.sim
        message = sim.reference.messages[offset]
        if outcome == "acked":
            good = offset in sim.receivers.acked
        elif outcome == "expired":
            good = message.queue is not None and self._expired(offset)
        elif outcome == "dead":
            copied = offset in (sim.reference.copied if sim.queue_id is None else sim.dead_letters)
            history = sim.reference.history[offset]
            receives = history[-2][1][2] if len(history) > 1 else 0
            good = copied and receives > sim.least_max_receives(message.queue or "")  # type: ignore[operator]
        elif outcome == "poison":
            good = message.poison
        else:
            good = message.duplicate or offset < sim.purges.get(message.queue or "", 0)
        if not good:
            self._bad(
                "G1 done",
                f"offset {offset} is {outcome} at {position} without a reason: {message}, "
                f"{sim.reference.history[offset]}",
            )

    def _expired(self, offset: int) -> bool:
        sim = self.sim
        expires, now = self._expires(offset), sim.reference.now
        if expires:
            self._not_early(offset, expires, now.nonce)
        return 0 < expires <= now.told_ms

    def _not_early(self, offset: int, due_ms: int, nonce: str) -> None:
        """By true time, too, the delay or time to live of a message that this owner saw arrive is over."""
        sim = self.sim
        sent_ms, doubt_ms = sim.sent_ms[offset], sim.arrivals.get(nonce, {}).get(offset)
        if doubt_ms is None:
            if sim.has_jumped:
                return  # it was in the log already: nothing tells how long, but clocks that may be wrong
            doubt_ms = 0
        sim.count("times compared")
        early_ms = due_ms - sim.reference.messages[offset].record.timestamp - (sim.now_ms - sent_ms)
        if early_ms > doubt_ms + DRIFT_MS:
            self._bad("early by true time", f"offset {offset}, sent {sim.now_ms - sent_ms} ms ago, by {early_ms} ms")

    def leaves(self, lane: Lane | None, epoch: int, deliveries: set[int], copying: set[int]) -> None:
        """An owner lets go of the partition in good order. These deliveries were on their way to receivers."""
        if lane is not None and lane.sent:
            self.left.append((lane, epoch, deliveries, copying))
        else:
            self._none_is_stranded(epoch, deliveries, copying)

    def landed(self, lane: Lane) -> None:
        """All that a worker had on its way is in the log: nothing is left with it."""
        for left in [entry for entry in self.left if entry[0] is lane]:
            self.left.remove(left)
            if lane.alive:
                self._none_is_stranded(*left[1:])

    def _none_is_stranded(self, epoch: int, deliveries: set[int], copying: set[int]) -> None:
        """Each message that an owner started and left is with a receiver, was given back, or has a copy in the log."""
        sim = self.sim
        copied = sim.reference.copied if sim.queue_id is None else sim.dead_letters
        for offset, state in sim.reference.states.items():
            if state[0] != epoch or state[1] not in deliveries or not state[4] or offset in copying or offset in copied:
                continue
            if (epoch, state[1], offset) not in self.handed:
                self._bad("stranded", f"offset {offset} is with nobody: {state}, its owner has left")

    # ------------------------------------------------------------------ serving

    def serves(self, worker: Worker) -> None:
        """G5: serving is to have folded one's own own marker last."""
        owner = worker.owner
        assert owner is not None
        if owner.phase is not Phase.SERVING:
            if owner._agenda.handouts or owner._agenda.dead or owner._agenda.poison:
                self._bad("G5", f"w{worker.number} has effects while {owner.phase.value}")
            return
        moment = self.sim.reference.moment(owner.partition.markers_position)
        if moment.nonce != owner.nonce or moment.own != owner.epoch:
            self._bad("G5", f"w{worker.number} serves as {owner.nonce}, the log at its position says {moment.nonce}")

    def rests(self, worker: Worker, did: bool, what: str) -> None:
        """Fail if an owner that need not be asked yet did something when it was asked."""
        if did:
            self._bad("G9 idle", f"w{worker.number} need not be asked before its next time, and then there was {what}")

    def before_acquire(self, owner: Owner, queues: list[str]) -> Offer | None:
        """Note the messages that the first of ``queues`` can deliver."""
        sim = self.sim
        wanted = sim.chance(0.3) or sim.settings[queues[0]].fifo
        if not wanted or len(queues) > 1 or owner.phase is not Phase.SERVING:
            return None
        p, queue = owner.partition, queues[0]
        if not owner.ticker.told and (p.ttls or p.elapsed or sim.settings[queue].ttl_ms):
            return None
        owner.ticker.estimate(sim.now_ms)
        if sim.settings[queue].fifo:
            return self._offer_in_order(owner, queue)
        maximum = sim.settings[queue].max_receives
        offer = Offer({}, {}, True)
        found = [o for segment in p.segments.of(queue) for o in segment.parked_of(queue)]
        found += [o for o in p.messages if p.is_ready(o) and p.queue_of(o) == queue]
        for offset in sorted(found):
            if not self._lives(p, offset):
                continue
            group = sim.reference.messages[offset].group
            if not p.receives(offset):
                offer.first.setdefault(group, []).append(offset)
            elif not maximum or p.receives(offset) < maximum:
                offer.again.setdefault(group, []).append(offset)
        return offer

    def _offer_in_order(self, owner: Owner, queue: str) -> Offer:
        """The next messages of each group: none behind one that is in flight or delayed."""
        sim, ref, p = self.sim, self.sim.reference, owner.partition
        maximum = sim.settings[queue].max_receives
        about_to_be = {o for pending in owner.starts.pending.values() for o in pending.offsets}
        ending = any(p.queue_of(o) == queue for o in p.reserved - about_to_be if o in p.messages)
        offer = Offer({}, {}, not p.segments.of(queue), not ending)
        if any(o >= p.position and delivered.leased for o, delivered in p.deliveries.items()):
            return offer
        parked = {o for segment in p.segments.of(queue) for o in segment.parked_of(queue)}
        for (name, group), offsets in ref.groups.items():
            unfinished = [o for o in offsets if o in parked or (o in p.messages and o < p.position)]
            for offset in unfinished if name == queue else ():
                if offset not in parked and not p.is_ready(offset):
                    break
                if not self._lives(p, offset) or (maximum and p.receives(offset) >= maximum):
                    break
                offer.first.setdefault(group, []).append(offset)
        return offer

    def _lives(self, p: Partition, offset: int) -> bool:
        expires = self._expires(offset)
        return not expires or expires > max(p.broker_ms, p.estimate_ms)

    def _expires(self, offset: int) -> int:
        message = self.sim.reference.messages[offset]
        ttl_ms = self.sim.settings[message.queue or ""].ttl_ms
        return message.expires_ms or (message.record.timestamp + ttl_ms if ttl_ms else 0)

    def _in_time(self, owner: Owner, taken: list[int]) -> None:
        """Deliveries are neither too early nor too late, by the broker time in the log."""
        ref, position = self.sim.reference, owner.partition.markers_position
        moment = ref.moment(position)
        for offset in taken:
            message, expires = ref.messages[offset], self._expires(offset)
            if message.due_ms and ref.at(offset, position) is None:
                if message.due_ms > moment.broker_ms:
                    self._bad("time early", f"took {message} at {moment}")
                self._not_early(offset, message.due_ms, owner.nonce)
            if expires and (moment.told_ms < 0 or expires <= moment.broker_ms):
                self._bad("time late", f"took {message}, which expires at {expires}, at {moment}")

    def acquired(
        self,
        owner: Owner,
        queues: list[str],
        pending: Pending | None,
        limit: int,
        offer: Offer | None,
        shared_fate: bool,
        batch: int,
    ) -> None:
        """Strict limit; in each group by offset; groups take turns; redeliveries and first deliveries share."""
        sim = self.sim
        taken = [] if pending is None else pending.offsets
        if len(taken) > limit:
            self._bad("limit", f"{len(taken)} messages for a limit of {limit}")
        self._in_time(owner, taken)
        if pending is not None:
            self.leased_until[owner.epoch, pending.delivery] = sim.now_ms + (pending.lease_ms or HAND_OUT_MS)
        self._none_is_ending(owner, taken)
        if owner.stalled:
            sim.count("stalled")
            if taken or not owner.starts.pending:
                self._bad(
                    "G1 obtainable", f"{owner.number} is stalled, with {len(owner.starts.pending)} starts, took {taken}"
                )
            return
        if offer is None or owner.phase is not Phase.SERVING:
            return
        if (offer.first or offer.again) and offer.sure and not taken and not self._waits_for_reading(owner, queues[0]):
            self._bad("G1 obtainable", f"{queues[0]} has {offer} ready, and nothing was taken")
        fifo = sim.settings[queues[0]].fifo
        new: dict[bytes, list[int]] = {}
        old: dict[bytes, list[int]] = {}
        for offset in taken:
            again = owner.partition.receives(offset) and not fifo
            (old if again else new).setdefault(sim.reference.messages[offset].group, []).append(offset)
        for got, offered in ((new, offer.first), (old, offer.again)):
            for group, offsets in got.items():
                if offsets != offered.get(group, [])[: len(offsets)]:
                    self._bad("order", f"took {offsets} of group {group!r}, which has {offered.get(group)}")
        if fifo:
            whole = offer.whole and offer.sure and not shared_fate and not self._waits_for_reading(owner, queues[0])
            missed = sum(1 if batch == 1 else len(found) for found in offer.first.values()) - len(taken)
            if whole and len(taken) < limit and missed > 0:
                self._bad("G1 obtainable", f"{missed} of {offer} were not taken, only {taken} of {limit}")
            if batch == 1 and any(len(offsets) > 1 for offsets in new.values()):
                self._bad("order", f"took {new}, which would be worked on at the same time")
            return
        first_count, old_count = sum(map(len, offer.first.values())), sum(map(len, old.values()))
        if limit > 1 and sum(map(len, new.values())) < first_count and old_count > limit // 2:
            self._bad("fairness", f"took {old_count} redeliveries of {limit} while {first_count} waited")
        most = max(map(len, new.values()), default=0)
        for group, offsets in offer.first.items():
            count = len(new.get(group, ()))
            if count < len(offsets) and count < most - 1:
                self._bad("fairness", f"took {most} of one group and {count} of {group!r}, which has {offsets}")

    def _none_is_ending(self, owner: Owner, taken: list[int]) -> None:
        """No message of a FIFO group is taken while an earlier one is being ended, because that may fail."""
        ref, highest = self.sim.reference, dict[tuple[str | None, bytes], int]()
        for offset in taken:
            message = ref.messages[offset]
            if self.sim.settings[message.queue or ""].fifo:
                highest[message.queue, message.group] = offset
        if not highest:
            return
        for offset in owner.partition.reserved.difference(taken):
            message = ref.messages[offset]
            lower = offset in owner.partition.messages and offset < highest.get((message.queue, message.group), -1)
            if lower and not message.duplicate and not message.poison:
                self._bad("order", f"took {taken}, though {offset} of the same group is reserved")

    def _waits_for_reading(self, owner: Owner, queue: str) -> bool:
        """True if a message in flight may not have been read yet, so that nothing of a FIFO queue is delivered."""
        p = owner.partition
        return self.sim.settings[queue].fifo and p._highest_delivered >= p.position

    def _in_order(self, offset: int, started: Started, receipt: tuple[int, int], gone: RangeSet) -> None:
        """When the start took effect, all earlier messages of the group were done, or are in the same delivery."""
        ref = self.sim.reference
        message = ref.messages[offset]
        for other in ref.groups[message.queue or "", message.group]:
            state = ref.at(other, started.position + 1)
            if type(state) is str or (type(state) is tuple and state[:2] == receipt):
                continue
            if other < offset and other not in gone:
                self._bad("order", f"{offset} is handed out as {receipt} before {other} of its group: {state}")

    def _group_by_group(self, offsets: list[int]) -> None:
        """Deliveries of FIFO queues do not mix groups, and keep the order of each."""
        sim = self.sim
        messages = [sim.reference.messages[offset] for offset in offsets]
        groups = [(one.queue, one.group) for one in messages if sim.settings[one.queue or ""].fifo]
        runs = [group for i, group in enumerate(groups) if not i or groups[i - 1] != group]
        if len(runs) != len(set(runs)):
            self._bad("order", f"{offsets} are handed out, of groups {groups}")
        highest: dict[Any, int] = {}
        for one in messages:
            if highest.get((one.queue, one.group), -1) > one.record.offset and sim.settings[one.queue or ""].fifo:
                self._bad("order", f"{offsets} are handed out, which is not the order of group {one.group!r}")
            highest[one.queue, one.group] = one.record.offset

    def handout(self, worker: Worker, handout: Handout, records: dict[int, Any]) -> None:
        """G2, G3, G4: a delivery is on its way to a receiver, with these records."""
        sim, ref = self.sim, self.sim.reference
        owner = worker.owner
        assert owner is not None
        p = owner.partition
        if not handout.offsets:
            return
        epoch, delivery = handout.receipt
        sim.note("w%d hands out %s as %d/%d", worker.number, handout.offsets, epoch, delivery)
        if self.leased_until[handout.receipt] <= sim.now_ms:
            self._bad("G3 late", f"{handout} is handed out at {sim.now_ms}, after its lease")
        self._group_by_group(handout.offsets)
        gone = lost_of(p.lost)
        for offset in handout.offsets:
            name = (epoch, delivery, offset)
            started = ref.started.get(name)
            if started is None:
                self._bad("G3 valid", f"offset {offset} is handed out as {epoch}/{delivery}, which never took effect")
            if started.position >= p.markers_position:
                self._bad(
                    "G3 folded", f"offset {offset} is handed out before its start at {started.position} is folded"
                )
            if name in self.handed:
                self._bad("G3 twice", f"offset {offset} is handed out again as {epoch}/{delivery}")
            self.handed[name] = worker.number
            if ref.ended_at.get(offset, 1 << 60) < started.position:
                self._bad("G2", f"offset {offset} ended at {ref.ended_at[offset]}, its start is at {started.position}")
            if p.receives(offset) != started.receives:
                self._bad("G4 told", f"offset {offset}: told {p.receives(offset)}, the log says {started.receives}")
            message = ref.messages[offset]
            if sim.settings[message.queue or ""].fifo:
                self._in_order(offset, started, handout.receipt, gone)
            early = started.is_first and message.due_ms > max(0, started.highest_ms)
            if message.poison or message.duplicate or early:
                self._bad("G3 early", f"handed out: {message}")
            if records[offset].value != message.record.value:
                self._bad("G1 payload", f"offset {offset} has another payload")
            self.times_handed[offset] = self.times_handed.get(offset, 0) + 1
            sim.count("handed out again", self.times_handed[offset] > 1)
        sim.count("handed out", len(handout.offsets))

    # ------------------------------------------------------------------ memory against the log

    def partition(self, p: Partition, who: str) -> None:
        """G4: the state in memory is the fold of the logs below its positions."""
        ref = self.sim.reference
        moment = ref.moment(p.markers_position)
        if (p.clock_ms, p.last_timestamp_ms, p.own) != (moment.clock_ms, moment.last_timestamp_ms, moment.own):
            self._bad("G4 clock", f"{who}: {(p.clock_ms, p.last_timestamp_ms, p.own)}, the log says {moment}")
        if (p.broker_ms, p.told_ms) != (moment.broker_ms, moment.tick_ms):
            self._bad("G4 time", f"{who}: {(p.broker_ms, p.told_ms)}, the log says {moment}")
        messages, deliveries, position = p.messages, p.deliveries, p.position
        gone = lost_of(p.lost)
        parked: dict[int, str] = {}
        for queue in p.segments.queues:
            for segment in p.segments.of(queue):
                for offset in segment.parked_of(queue):
                    parked[offset] = queue
        listed = {name: {*b.offsets()} for name, b in p.backlogs.items()}
        suspects = {*p._suspects}
        history, at, size, unfinished, held = ref.history, ref.at, 0, 0, 0
        counts: dict[str, list[int]] = {}
        for offset, message in ref.messages.items():
            state = at(offset, p.markers_position) if offset in history else None
            delivered = deliveries.get(offset)
            here = offset in messages
            unread = offset >= position or (offset in p.missed and not here)
            if type(state) is str:
                if unread and offset < p.purges.get(message.queue or "", 0):
                    held += delivered is not None
                    continue  # it will be dropped when it is read
                if here or delivered is not None or offset in parked or (unread and offset not in p.ahead):
                    where = f"here: {here}, delivered: {delivered}, ahead: {offset in p.ahead}, position {position}"
                    self._bad("G2 undead", f"{who}: offset {offset} is {state} in the log, not in memory ({where})")
                continue
            if offset in gone and not here and delivered is None and offset not in parked:
                continue
            if self._is_unknowable(offset, message) and not here:
                continue
            if offset >= position:
                if here or offset in p.ahead:
                    self._bad("G1 lost", f"{who}: offset {offset} is not read yet, but known")
            elif not here and offset not in parked and not unread:
                self._bad("G1 lost", f"{who}: offset {offset} is unfinished in the log, but not in memory: {message}")
            if (delivered.as_tuple() if delivered is not None else None) != state:
                self._bad(
                    "G4 state", f"{who}: offset {offset} is {delivered and delivered.as_tuple()}, the log says {state}"
                )
            held += delivered is not None
            if unread:
                continue
            unfinished += 1
            delayed = bool(message.due_ms) and state is None and not message.duplicate and not message.poison
            waits = delayed and message.due_ms > moment.broker_ms
            if not message.duplicate:
                lasts = type(state) is tuple and state[3] > moment.clock_ms
                kind = 0 if not lasts and not waits else 1 if lasts and state[4] else 2  # type: ignore[index]
                counts.setdefault(message.queue or "", [0, 0, 0])[kind] += 1
            if (waits, delayed and not waits) != (offset in p.delays, offset in p.elapsed):
                self._bad("G4 delay", f"{who}: offset {offset} waits: {waits}, in memory {offset in p.delays}")
            if (offset in p.poison, offset in p.duplicates) != (message.poison, message.duplicate):
                self._bad(
                    "G4 special",
                    f"{who}: offset {offset} is poison {offset in p.poison}, duplicate {offset in p.duplicates}",
                )
            if here:
                record = messages[offset]
                if type(record) is not Segment:
                    size += size_of(record)
                known = listed.get(message.queue or "", ())
                if message.queue is not None and offset not in known and offset not in suspects and p.is_ready(offset):
                    self._bad("G1 stuck", f"{who}: offset {offset} is ready, and nothing will take it: {state}")
            elif parked[offset] != message.queue:
                self._bad("G4 special", f"{who}: offset {offset} is parked for {parked[offset]}")
        if unfinished != len(messages) + len(parked) or held != len(deliveries):
            self._bad(
                "G2 undead",
                f"{who}: {len(messages)}+{len(parked)} messages, {len(deliveries)} delivered; not {unfinished}, {held}",
            )
        kept = {q: [one.ready, one.in_flight, one.delayed] for q, one in p.counts.items() if any(one.as_tuple())}
        if kept != counts:
            self._bad("counts", f"{who}: ready, in flight and delayed are {kept} in memory, {counts} in the log")
        if size != p.bytes:
            self._bad("bytes", f"{who}: counts {p.bytes} bytes in memory, there are {size}")

    def reservations(self, worker: Worker) -> None:
        """Each reservation belongs to an operation that is under way."""
        owner = worker.owner
        assert owner is not None
        p = owner.partition
        if not p.reserved:
            return
        known = worker.copying.union(p._refused)
        for pending in owner.starts.pending.values():
            known.update(pending.offsets)
        for markers in (worker.appends, *owner._sent.values()):
            for marker in markers:
                if type(marker) is End:
                    known.update(offsets_in(marker.offsets))
        leaked = p.reserved - known
        if leaked:
            self._bad("reserved", f"w{worker.number} has {sorted(leaked)} reserved for nobody")

    def fence(self, worker: Worker) -> None:
        """The fence that a checkpoint waits for is on its way."""
        owner = worker.owner
        assert owner is not None
        if not owner.serving or owner.checkpoints.state is not CycleState.FENCING:
            return
        on_its_way = (worker.appends, owner._agenda.appends, *owner._sent.values())
        if not any(
            type(one) is Tick and owner.checkpoints.is_awaited(one) for markers in on_its_way for one in markers
        ):
            self._bad("fence", f"w{worker.number} waits for {owner.checkpoints._fence}, and nothing will bring it")

    # ------------------------------------------------------------------ recovery

    def tables(self) -> None:
        """G1: the newest manifest names rows that are there, and the logs reach back to it."""
        sim = self.sim
        newest = self._newest()
        if newest is None:
            if (sim.queue.start and not sim.retained) or sim.markers.start:
                self._bad("G1 log start", "records were deleted, and there is no manifest")
            return
        for key, checksum in newest.rows.items():
            value = sim.changelogs[rows.table_of(key)].content.get(key)
            if value is None or rows.checksum(value) != checksum:
                self._bad("G1 rows", f"the manifest of epoch {newest.epoch} names {key}, which is gone")
        needed = min([newest.position, *newest.unreadable])
        if (sim.queue.start > needed and not sim.retained) or sim.markers.start > newest.markers_position:
            self._bad("G1 log start", f"the logs begin at {sim.queue.start}, {sim.markers.start}, beyond {newest}")

    def _newest(self) -> rows.Manifest | None:
        content = self.sim.changelogs["progress"].content
        if not content:
            return None
        manifests = [rows.decode_manifest(value) for value in content.values()]
        return max(manifests, key=lambda manifest: manifest.epoch)

    def recovery(self) -> None:
        """G1, G4: a worker that recovered now would know all there is to know."""
        sim = self.sim
        sim.count("recoveries imagined")
        content = sim.changelogs["progress"].content
        both = {**sim.changelogs["messages"].content, **sim.changelogs["markers"].content}

        def load(key: str) -> bytes:
            if key not in both:
                raise RowError(f"no row {key!r}")
            return both[key]

        probe = Owner(sim.number, "probe", "probe", limits=sim.limits, load=load)
        try:
            edges = edges_of(sim.queue, sim.markers, content.values(), sim.limits.queue_id)
            probe.restore(dict(content), list(both), load, edges)
        except RowError as exc:
            self._bad("G1 rows", f"a recovery fails: {exc}")
        p = probe.partition
        if not probe.passes_deleted:
            self._read_all(p)
        for record in sim.markers.read(p.markers_position, 1 << 30)[1]:
            p.fold(record.offset, record.timestamp, decode(record.value).markers)
        p.skip_markers(sim.markers.end)
        if probe._deleted is not None:
            pass_deleted(p, probe._deleted, probe._deleted.losses_of(p))
            self._read_all(p)
        self.partition(p, "a recovery now")

    def _read_all(self, p: Partition) -> None:
        stop, records = self.sim.queue.read(p.position, 1 << 30)
        p.ingest(p.position, max(stop, p.position), records)

    def losses(self, p: Partition, losses: list[rows.Loss]) -> None:
        """G1: only what is not done, by any marker that was in the log when its record was deleted, counts as lost.

        It counts once.
        """
        sim, ref = self.sim, self.sim.reference
        before = lost_of(p.lost[: -len(losses)])
        for loss in losses:
            sim.count("losses")
            lost = [
                o
                for o in range(loss.start, loss.stop)
                if o not in before and type(ref.at(o, p.markers_position)) is not str
            ]
            messages = [o for o in lost if o in ref.messages]  # an owner may know that the rest are holes
            if not len(messages) <= loss.unfinished <= len(lost):
                self._bad("G1 loss", f"{loss} says {loss.unfinished} are lost, the log says {lost}")
            for offset in lost:
                markers_end = next(end for start, end in sim.retained if start > offset)
                if ref.ended_at.get(offset, markers_end) < markers_end:
                    self._bad("G1 loss", f"{offset} is {ref.done[offset]}, and counts as lost")

    def _is_unknowable(self, offset: int, message: Message) -> bool:
        """True for poison that retention deleted in topic mode. To an owner that has not read it, a purge of the topic
        ended it like any other record."""
        return message.poison and self.sim.queue_id is not None and offset < self.sim.queue.start

    # ------------------------------------------------------------------ the end

    def drained(self) -> None:
        """The total-queue check, and that nothing is left behind in memory."""
        sim, ref = self.sim, self.sim.reference
        owner = sim.workers[sim.assigned].owner
        gone = lost_of(owner.partition.lost) if owner is not None else ()
        lost = [
            o for o, m in ref.messages.items() if o not in ref.done and o not in gone and not self._is_unknowable(o, m)
        ]
        if lost:
            self._bad("G1 total", f"lost: {lost}: {[(ref.messages[o], ref.states.get(o)) for o in lost[:2]]}")
        unexpected = [o for o in self.times_handed if o not in ref.messages]
        if unexpected:
            self._bad("G1 total", f"unexpected: {unexpected}")
        if owner is not None:
            p = owner.partition
            left = {
                "messages": p.messages,
                "deliveries": p.deliveries,
                "ahead": list(p.ahead),
                "missed": list(p.missed),
                "reserved": p.reserved,
                "bytes": p.bytes,
                "segments": list(p.segments),
                "parked": p.segments.queues,
                "delays": p.delays,
                "elapsed": p.elapsed,
                "ttls": p.ttls,
                "poison": p.poison,
                "duplicates": p.duplicates,
                "pending": owner.starts.pending,
            }
            left = {name: value for name, value in left.items() if value}
            if left:
                self._bad("quiescence", f"w{sim.assigned} still has {left}")
        sim.count("messages", len(ref.messages))
        for outcome in ref.done.values():
            sim.count(outcome)
