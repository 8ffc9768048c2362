"""The reference fold: the protocol's rules about which markers take effect, kept simple, message by message.

The core folds ranges and shares states between messages. This fold keeps a tuple per message and shares no code with
the core, so a mistake in either shows as a difference. It also reports what no sequence of legal markers contains: two
leases at once, deliveries after the end, missing attempts, vanished records.

An owner can't know what it had not read when it appended a start: such a start is void, and no fault. How long an owner
may lag is measured on its own clock, which stands still while the owner does (`RACE_MS`).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from marq.core.history import Envelope
from marq.core.markers import Batch, End, Keepalive, Own, Purge, Release, Start, Tick
from marq.core.ranges import RangeSet, count, offsets_in
from pipeline.group_order import GroupOrder, Overtaken

#: Most milliseconds that a working owner needs to read what others have appended.
RACE_MS = 30_000
#: An owner that wrote nothing for longer stood still: its clock advances by at most this much at once.
OWNER_STEP_MS = 1_000
#: Most void deliveries that are remembered, in case somebody uses their receipts.
VOID_MAX = 10_000
#: The partition clock advances by at most this much per record. Ticks further apart don't tell broker time.
CLOCK_STEP_MS = 5_000
#: Header with a message's own time to live.
TTL = "marq-ttl-ms"


class Fault(NamedTuple):
    """A fault of one message, or of none (offset -1)."""

    kind: str
    offset: int
    queue: str | None
    what: str


class State(NamedTuple):
    """State of a message that was delivered and is not done. The core's `DeliveryState` has the first five too."""

    epoch: int
    delivery: int
    receives: int
    deadline_ms: int  # on the partition clock
    leased: bool
    known_ms: int  # on the owner's clock: when the lease was last extended; -1: not since its start
    least_ms: int  # lowest deadline that the owner may still assume
    uncounted: bool  # one of its deliveries was given back uncounted


Report = Callable[[Fault], None]


#: Markers that carry a receipt, in words.
_NAMES = {End: "an ack", Keepalive: "an extension", Release: "a release"}


class _Receipts(Mapping[int, tuple[int, int]]):
    """The last receipt of each message that was delivered and is not done."""

    def __init__(self, states: Mapping[int, State]) -> None:
        self._states = states

    def __getitem__(self, offset: int) -> tuple[int, int]:
        state = self._states[offset]
        return state.epoch, state.delivery

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class _Attempt:
    """One attempt: what its start says (all parts in one record together), and what the log has."""

    __slots__ = ("most", "offset", "pairs", "said", "unsure")

    def __init__(self, said: int) -> None:
        self.said = said
        self.most = 0
        self.offset = -1
        self.pairs = 0
        self.unsure = False


class ReferenceFold:
    """Follows one partition. Messages below offset `first` are left out, as their markers may be missing.

    Args:
        queue_of: returns the queue of a message.
        compacted: records may vanish from the queue topic, because it is not ours.
        fifo: FIFO queues, and since when: messages sent earlier are not checked for their order.
    """

    def __init__(
        self,
        *,
        first: int,
        own: int,
        queue_of: Callable[[Envelope], str | None],
        report: Report,
        compacted: bool,
        fifo: Mapping[str, int] | None = None,
    ) -> None:
        self.first = first
        self.position = first
        self.own = own
        self.owner = ""  # nonce of the last own marker
        self.compacted = compacted
        self.open: dict[int, str | None] = {}  # read and not done -> queue
        self.states: dict[int, State] = {}  # delivered and not done, read or not
        self.early: dict[int, str] = {}  # done before they were read -> outcome
        self.absent = RangeSet()
        self.purges: dict[str, int] = {}  # queue -> before
        self.sent: Counter[str | None] = Counter()
        self.done: Counter[tuple[str | None, str]] = Counter()
        self.notes: Counter[str] = Counter()
        self.clock_ms = 0
        self.last_ms = -1
        self.tick_ms = -1  # timestamp of this owner's last tick, as version 0.2 wrote them
        self.told_ms = -1  # greatest broker time that its ticks have told
        self.expires: dict[int, int] = {}  # not done, or expired too early -> when its own time to live ends
        self.expired: dict[int, int] = {}  # expired before it was read -> told_ms at that time
        self.owner_ms = 0
        self._owner_last_ms = -1
        self._queue_of = queue_of
        self._report = report
        self._ends: deque[tuple[int, array[int]]] = deque()  # recent ends, with their time on the owner's clock
        self._void: OrderedDict[tuple[int, int], dict[int, str]] = OrderedDict()
        self._starts: dict[tuple[int, int], _Attempt] = {}  # of the present record
        self._last_starts: frozenset[tuple[int, int]] = frozenset()  # of the last record that had any
        self._order = GroupOrder(fifo or {})

    def forget_below(self, first: int) -> None:
        """Leave out messages below `first`: their markers may be missing, so what they said is dropped."""
        self.first = first
        self.position = max(self.position, first)
        for store in (self.states, self.early, self.expires, self.expired):
            for offset in [o for o in store if o < first]:
                del store[offset]
        self._order.forget_below(first)

    # ------------------------------------------------------------------ the queue log

    def read(self, envelopes: Sequence[Envelope]) -> None:
        """Read the next messages of the queue topic."""
        queue_of = self._queue_of
        names = [queue_of(e) for e in envelopes]
        for envelope in envelopes:
            if envelope.headers:
                self._note_ttl(envelope)
        self.sent.update(names)
        self.position = envelopes[-1].offset + 1
        if not self.early and not self.purges:
            self.open.update(zip([e.offset for e in envelopes], names, strict=True))
            if self._order:
                for envelope, queue in zip(envelopes, names, strict=True):
                    self._order.read(envelope, queue)
            return
        ended: list[int] = []
        for envelope, queue in zip(envelopes, names, strict=True):
            offset = envelope.offset
            outcome = self.early.pop(offset, None)
            if outcome is None and offset < self.purges.get(queue or "", 0):
                outcome = "purged"
                self.states.pop(offset, None)
            if outcome is None:
                self.open[offset] = queue
                self._order.read(envelope, queue)
            else:
                self.expired.pop(offset, None)
                self.done[queue, outcome] += 1
                ended.append(offset)
        if ended:
            self._note_ends(ended)  # the owner may have started it before it knew of the end

    def gone(self, start: int, stop: int) -> None:
        """The queue topic does not hold ``[start, stop)``."""
        self.position = max(self.position, stop)
        self.absent.add(start, stop)
        self.notes["absent"] += stop - start
        for store in (self.states, self.early, self.expired):
            span = range(start, stop) if stop - start < len(store) else list(store)
            for offset in span:
                if start <= offset < stop and store.pop(offset, None) is not None and store is self.states:
                    self._missing(offset)

    def _missing(self, offset: int) -> None:
        if self.compacted:
            self.notes["compacted"] += 1
        else:
            self._fault("record gone", offset, "was delivered, but the queue topic no longer has its record")

    # ------------------------------------------------------------------ the markers log

    def fold(self, offset: int, timestamp_ms: int, batch: Batch | None) -> list[list[int]]:
        """Fold the next record of the markers topic (None: unreadable). Returns the offsets it changed, by marker."""
        if self.last_ms >= 0:
            self.clock_ms += min(max(timestamp_ms - self.last_ms, 0), CLOCK_STEP_MS)
        self.last_ms = timestamp_ms
        if batch is None:
            self.notes["unreadable"] += 1
            return []
        self.notes["markers"] += len(batch.markers)
        if batch.by and batch.by == self.owner:
            if self._owner_last_ms >= 0:
                self.owner_ms += min(max(timestamp_ms - self._owner_last_ms, 0), OWNER_STEP_MS)
            self._owner_last_ms = timestamp_ms
        effects: list[list[int]] = []
        for marker in batch.markers:
            effect: list[int] = []
            if isinstance(marker, Start):
                effect = self._start(marker)
            elif isinstance(marker, End):
                effect = self._end(marker)
            elif isinstance(marker, Keepalive | Release):
                effect = self._change(marker)
            elif isinstance(marker, Purge):
                effect = self._purge(marker)
            elif isinstance(marker, Own):
                self.own, self.owner, self._owner_last_ms = offset, marker.nonce, -1
                self.tick_ms = self.told_ms = -1
            elif isinstance(marker, Tick) and not marker.fence:
                if marker.time_ms:
                    if marker.epoch == self.own and abs(timestamp_ms - marker.clock_ms) <= CLOCK_STEP_MS:
                        self.told_ms = max(self.told_ms, marker.time_ms)
                elif marker.sure:
                    if self.tick_ms >= 0 and self.tick_ms < timestamp_ms <= self.tick_ms + CLOCK_STEP_MS:
                        self.told_ms = max(self.told_ms, timestamp_ms)
                    self.tick_ms = timestamp_ms
            effects.append(effect)
        if self._starts:
            self._check_attempts()
        return effects

    def _start(self, m: Start) -> list[int]:
        if m.epoch != self.own:
            self._stale(m)
            return []
        states, is_open, clock_ms = self.states, self.open, self.clock_ms
        deadline_ms = clock_ms + m.redeliver_after_ms
        effect: list[int] = []
        first: list[int] = []
        most, void, uncounted = 0, False, False
        for offset in offsets_in(m.offsets):
            if offset < self.first:
                void = True
                continue
            state = states.get(offset)
            if state is None:
                if offset in is_open or (offset >= self.position and offset not in self.early):
                    first.append(offset)
                    continue
                void = True
                self._started_when_done(m, offset)
            elif state.epoch == m.epoch and m.delivery <= state.delivery:
                void = True
                self.notes["repeated starts"] += 1
            elif state.leased and state.deadline_ms > clock_ms:
                void = True
                self._started_under_lease(m, offset, state)
            else:
                receives = state.receives + 1
                states[offset] = State(m.epoch, m.delivery, receives, deadline_ms, True, -1, 0, state.uncounted)
                most, uncounted = max(most, receives), uncounted or state.uncounted
                effect.append(offset)
        if first:
            states.update(dict.fromkeys(first, State(m.epoch, m.delivery, 1, deadline_ms, True, -1, 0, False)))
            most = max(most, 1)
            effect = sorted(effect + first) if effect else first
        self._note_attempt(m, effect, most, void or uncounted)
        if self._order and effect:
            receipts = _Receipts(states)
            for overtaken in self._order.start((m.epoch, m.delivery), effect, receipts):
                self._disordered(overtaken)
        return effect

    def _note_attempt(self, m: Start, effect: list[int], most: int, unsure: bool) -> None:
        """A large start is several markers; each states the highest attempt among the messages of all of them."""
        part = self._starts.setdefault((m.epoch, m.delivery), _Attempt(m.receives))
        part.unsure = part.unsure or unsure
        part.pairs += len(m.offsets)
        if most > part.most:
            part.most = most
            part.offset = max(effect, key=lambda o: self.states[o].receives)

    def _check_attempts(self) -> None:
        """Check that the log has all attempts before those that the starts of a record state."""
        for (epoch, delivery), start in self._starts.items():
            if start.unsure or not start.most or start.most == start.said:
                continue
            # else another record may have more of this start, and the highest attempt
            if (epoch, delivery) not in self._last_starts and start.pairs * 20 < 256 * 1024:
                what = f"delivery {epoch}/{delivery} is said to be attempt {start.said}"
                self._fault("attempts", start.offset, f"{what}; the log has {start.most - 1} before it")
        self._last_starts = frozenset(self._starts)
        self._starts.clear()

    def _stale(self, m: Start) -> None:
        self.notes["starts of former owners"] += 1
        if m.epoch > self.own:
            offset = m.offsets[0] if m.offsets else -1
            self._fault("owner", offset, f"delivery {m.epoch}/{m.delivery}: the log has no own marker at {m.epoch}")
        for offset in offsets_in(m.offsets):
            if offset >= self.first:
                self._remember(m, offset, "by a former owner")

    def _started_when_done(self, m: Start, offset: int) -> None:
        self.notes["void starts"] += 1
        if offset < self.position and offset in self.absent:
            self._missing(offset)
            return
        ended_ms = self._ended_ms(offset)
        if ended_ms is None or self.owner_ms - ended_ms > RACE_MS:
            self._fault(
                "delivered after its end",
                offset,
                f"delivery {m.epoch}/{m.delivery} was started more than {RACE_MS // 1000} s after its end",
            )
        self._remember(m, offset, "after its end")

    def _started_under_lease(self, m: Start, offset: int, state: State) -> None:
        self.notes["void starts"] += 1
        if not self._lately(state) or state.least_ms > self.clock_ms:
            self._fault(
                "two leases",
                offset,
                f"delivery {m.epoch}/{m.delivery} was started while {state.epoch}/{state.delivery} had "
                f"{state.deadline_ms - self.clock_ms} ms left",
            )
        self._remember(m, offset, "under another lease")

    def _lately(self, state: State) -> bool:
        """Whether the lease was extended so recently that the owner may not have read it."""
        return state.known_ms >= 0 and self.owner_ms - state.known_ms <= RACE_MS

    def _remember(self, m: Start, offset: int, why: str) -> None:
        self._void.setdefault((m.epoch, m.delivery), {})[offset] = why
        if len(self._void) > VOID_MAX:
            self._void.popitem(last=False)

    def _ended_ms(self, offset: int) -> int | None:
        if offset in self.early:
            return self.owner_ms
        for ended_ms, offsets in reversed(self._ends):
            if offset in offsets:
                return ended_ms
        return None

    def check_order_at_end(self, is_duplicate: Callable[[int], bool]) -> None:
        """Check messages that were overtaken, and never started, at the end: duplicates never are."""
        for overtaken in self._order.unsure():
            if not is_duplicate(overtaken.earlier):
                self._disordered(overtaken)

    def _disordered(self, overtaken: Overtaken) -> None:
        offset, earlier, (epoch, delivery) = overtaken
        what = f"delivery {epoch}/{delivery} was handed out before {earlier}, which is before it in its group, was done"
        self._fault("order", offset, what)

    def _check_receipt(self, m: End | Keepalive | Release) -> None:
        """Check that a used receipt is of a start that took effect: otherwise it must not have been handed out."""
        if self._order:
            for overtaken in self._order.use((m.epoch, m.delivery), offsets_in(m.offsets)):
                self._disordered(overtaken)
        void = self._void.get((m.epoch, m.delivery))
        if not void or not m.delivery:
            return
        for offset in offsets_in(m.offsets):
            why = void.get(offset)
            if why:
                void[offset] = ""  # each is told once
                kind = {"after its end": "delivered after its end", "under another lease": "two leases"}
                self._fault(
                    kind.get(why, "owner"),
                    offset,
                    f"delivery {m.epoch}/{m.delivery}, started {why}, was handed out: its receipt was used",
                )

    def _check_started(self, m: End | Keepalive | Release, offsets: Iterable[int]) -> None:
        """Check that there was a start of this delivery of `offsets`, on which the marker has no effect.

        Void ones have been checked. An owner that leaves releases, uncounted, also what may never reach the log.
        """
        receipt = (m.epoch, m.delivery)
        void = self._void.get(receipt, {})
        for offset in offsets:
            state = self.states.get(offset)
            if offset < self.first or offset in void or (state is not None and state[:2] >= receipt):
                continue
            if offset in self.open or (offset >= self.position and offset not in self.early):
                what = f"{_NAMES[type(m)]} of delivery {m.epoch}/{m.delivery}: the log has no start of that"
                self._fault("no start", offset, what)

    def _end(self, m: End) -> list[int]:
        states, is_open = self.states, self.open
        effect: list[int] = []
        if m.outcome == "acked":
            self._check_receipt(m)
            epoch, delivery = m.epoch, m.delivery
            unstarted: list[int] = []
            for offset in offsets_in(m.offsets):
                state = states.get(offset)
                if state is None or not delivery or state[0] < epoch or (state[0] == epoch and state[1] < delivery):
                    unstarted.append(offset)
                else:
                    effect.append(offset)
            if unstarted:
                self._check_started(m, unstarted)
        elif m.epoch == self.own:
            for offset in offsets_in(m.offsets):
                if offset >= self.first and (
                    offset in is_open or (offset >= self.position and offset not in self.early)
                ):
                    effect.append(offset)
        elif m.epoch > self.own:
            offset = m.offsets[0] if m.offsets else -1
            self._fault("owner", offset, f"an end of epoch {m.epoch}: the log has no own marker at {m.epoch}")
        self.notes["void ends"] += count(m.offsets) - len(effect)
        self._finish(effect, m.outcome)
        return effect

    def _purge(self, m: Purge) -> list[int]:
        if m.epoch != self.own:
            return []
        self.notes["purges"] += 1
        effect = sorted(o for o, queue in self.open.items() if o < m.before and queue == m.queue)
        self._finish(effect, "purged")
        if m.before > self.position:
            self.purges[m.queue] = max(m.before, self.purges.get(m.queue, 0))
        return effect

    def _note_ttl(self, envelope: Envelope) -> None:
        """Remember when a message expires, and check an end that came before the message was read."""
        ttl_ms = 0
        for name, value in envelope.headers:
            if name == TTL and value is not None and value.isdigit():
                ttl_ms = int(value)
        told_ms = self.expired.pop(envelope.offset, None)
        if ttl_ms and told_ms is not None:
            self._check_expired(envelope.offset, envelope.timestamp + ttl_ms, told_ms)
        elif ttl_ms and envelope.offset not in self.early:
            self.expires[envelope.offset] = envelope.timestamp + ttl_ms

    def _check_expired(self, offset: int, expires_ms: int, told_ms: int) -> None:
        """Check an end as expired. The logs lack queue settings, but a message's own time to live overrides them."""
        if expires_ms > told_ms:
            late = (
                "no ticks had told its owner the time" if told_ms < 0 else f"{expires_ms - told_ms} ms before its time"
            )
            self._fault("expired early", offset, f"was ended as expired: {late}")

    def _finish(self, effect: list[int], outcome: str) -> None:
        if not effect:
            return
        if self._order:
            self._order.finish(effect)
        if self.expires or outcome == "expired":
            for offset in effect:
                expires_ms = self.expires.pop(offset, None)
                if outcome != "expired":
                    continue
                if expires_ms is not None:
                    self._check_expired(offset, expires_ms, self.told_ms)
                elif offset >= self.position:
                    self.expired[offset] = self.told_ms
        states, is_open = self.states, self.open
        try:
            queues: Iterable[str | None] = list(map(is_open.__getitem__, effect))
        except KeyError:
            self._finish_early(effect, outcome)
            return
        for offset in effect:
            del is_open[offset]
            states.pop(offset, None)
        for queue, amount in Counter(queues).items():
            self.done[queue, outcome] += amount
        self._note_ends(effect)

    def _finish_early(self, effect: list[int], outcome: str) -> None:
        for offset in effect:
            self.states.pop(offset, None)
            if offset in self.open:
                self.done[self.open.pop(offset), outcome] += 1
            else:
                self.early[offset] = outcome
        self._note_ends(effect)

    def _note_ends(self, effect: list[int]) -> None:
        ends = self._ends
        ends.append((self.owner_ms, array("q", effect)))
        while ends and self.owner_ms - ends[0][0] > RACE_MS:
            ends.popleft()

    def _change(self, m: Keepalive | Release) -> list[int]:
        counted = not isinstance(m, Release) or m.counted
        unstarted: list[int] = []
        if counted:
            self._check_receipt(m)
        effect: list[int] = []
        for offset in offsets_in(m.offsets):
            state = self.states.get(offset)
            if state is None or not state.leased or (state.epoch, state.delivery) != (m.epoch, m.delivery):
                unstarted.append(offset)
                continue
            if isinstance(m, Keepalive):
                self.states[offset] = state._replace(
                    deadline_ms=self.clock_ms + m.redeliver_after_ms,
                    known_ms=self.owner_ms,
                    least_ms=min(state.deadline_ms, state.least_ms) if self._lately(state) else state.deadline_ms,
                )
            else:
                self.states[offset] = state._replace(
                    receives=state.receives - (not m.counted),
                    deadline_ms=self.clock_ms + m.delay_ms,
                    leased=False,
                    uncounted=state.uncounted or not m.counted,
                )
            effect.append(offset)
        if unstarted and counted:
            self._check_started(m, unstarted)
        return effect

    # ------------------------------------------------------------------ reporting

    def _fault(self, kind: str, offset: int, what: str) -> None:
        self._report(Fault(kind, offset, self.open.get(offset), what))
