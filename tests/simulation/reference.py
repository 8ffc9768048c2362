"""The fold once more: one dict entry for each offset, no ranges, no shared deliveries, no memory management.

It shares no code with :mod:`marq.core.partition`, so that a mistake there shows as a difference. It folds the complete
logs as they grow and keeps, for each message, every state that it ever had, so that the state at any pair of
positions can be looked up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

from marq.core.markers import Batch, End, Keepalive, Own, Purge, Release, Start, Tick
from marq.core.reading import Undecodable
from marq.core.rows import Record

CLOCK_STEP_MS = 5_000

State = tuple[int, int, int, int, bool]
"""epoch, delivery, receives, deadline, leased: what ``DeliveryState.as_tuple()`` returns."""


class Message(NamedTuple):
    """What key and headers of a record of the queue log say."""

    record: Record | Undecodable
    queue: str | None  # None: poison
    due_ms: int  # of broker time; 0: at once
    expires_ms: int  # 0: never
    poison: bool
    origin: int | None  # of which message of this partition it is the dead letter's copy
    duplicate: bool  # another copy of the same came shortly before it, or another message with its id
    group: bytes  # b"": none


class Started(NamedTuple):
    """A start that took effect on an offset."""

    position: int  # of its record in the markers log
    receives: int
    clock_ms: int
    is_first: bool  # it was never delivered before
    highest_ms: int  # of broker time, as this owner may have known it


class Moment(NamedTuple):
    """The state after a record of the markers log."""

    clock_ms: int
    last_timestamp_ms: int
    own: int
    nonce: str
    broker_ms: int  # broker time
    tick_ms: int  # what the clock of the markers topic showed when that was told; -1: it never was
    highest_ms: int  # greatest broker time since the own marker, and at it
    told_ms: int  # greatest broker time that ticks since the own marker have set; -1: none has


NOTHING_YET = Moment(0, -1, -1, "", -1, -1, -1, -1)


class IdRules(NamedTuple):
    """Milliseconds, and a number."""

    window: int
    back: int
    more: int
    step: int
    most: int


class Id(NamedTuple):
    """An id that was accepted."""

    name: Any
    at_ms: int
    clock_ms: int


class Ids:
    """The ids that are remembered, in order."""

    def __init__(self, rules: IdRules) -> None:
        self.rules = rules
        self.accepted: list[Id] = []
        self.clock_ms = 0
        self.stamps: list[int] = []  # the last two different ones, the last one first

    def repeats(self, name: Any, timestamp_ms: int) -> bool:
        """True if the id was accepted less than the window ago; else it is accepted, and the oldest are forgotten."""
        rules = self.rules
        for one in self.accepted:
            if one.name == name and -rules.back <= timestamp_ms - one.at_ms < rules.window:
                return True
        if self.stamps:
            self.clock_ms += max(0, min(rules.step, timestamp_ms - self.stamps[0]))
        if timestamp_ms not in self.stamps[:1]:
            self.stamps = [timestamp_ms, *self.stamps[:1]]
        while self.accepted and (len(self.accepted) >= rules.most or self._is_over(self.accepted[0])):
            del self.accepted[0]
        self.accepted.append(Id(name, timestamp_ms, self.clock_ms))
        return False

    def _is_over(self, one: Id) -> bool:
        rules, now_ms = self.rules, min(self.stamps)
        if self.clock_ms - one.clock_ms < rules.window + rules.more:
            return False
        return one.at_ms <= now_ms - rules.window or one.at_ms > now_ms + rules.back


class Reference:
    """The truth about one partition."""

    def __init__(
        self,
        number: int,
        queue_id: str | None,
        id_rules: IdRules,
        origin_rules: IdRules,
        on_done: Callable[[int, str, int], None],
    ) -> None:
        self.number = number
        self.ids = Ids(id_rules)
        self.origins = Ids(origin_rules)
        self.groups: dict[tuple[str, bytes], list[int]] = {}
        self.queue_id = queue_id
        self.on_done = on_done
        self.messages: dict[int, Message] = {}
        self.states: dict[int, State] = {}
        self.done: dict[int, str] = {}
        self.ended_at: dict[int, int] = {}
        self.history: dict[int, list[tuple[int, State | str]]] = {}
        self.started: dict[tuple[int, int, int], Started] = {}
        self.copied: set[int] = set()  # messages with a copy in the log
        self.records: list[int] = []  # offsets in the markers log
        self.moments: list[Moment] = []
        self.now = NOTHING_YET

    # ------------------------------------------------------------------ the queue log

    def send(self, record: Record | Undecodable) -> Message:
        """A record was appended to the queue log."""
        poison = isinstance(record, Undecodable)
        queue: str | None = self.queue_id
        if queue is None:
            try:
                queue = record.key.decode() if record.key else None
            except UnicodeDecodeError:
                queue = None
        poison = poison or queue is None
        due = expires = 0
        group = b""
        origin = dedup = None
        for name, value in record.headers:
            if poison:
                break
            value = value or b""
            if name in ("marq-delay-ms", "marq-ttl-ms"):
                if not value.isdigit() or int(value) > 366 * 86_400_000:
                    poison = True
                elif name == "marq-delay-ms":
                    due = record.timestamp + int(value) if int(value) else 0
                elif int(value):
                    expires = record.timestamp + int(value)
            elif name == "marq-group":
                group = value
            elif name == "marq-dedup":
                dedup = value
            elif name == "marq-origin" and self.queue_id is None:
                partition, _, offset = value.decode().partition(":")
                if int(partition) == self.number:
                    origin = int(offset)
        duplicate = False
        if origin is not None and not poison:
            self.copied.add(origin)
            duplicate = self.origins.repeats(origin, record.timestamp)
        if dedup is not None and not poison and queue is not None:
            duplicate |= self.ids.repeats((queue, dedup), record.timestamp)
        message = Message(record, None if poison else queue, due, expires, poison, origin, duplicate, group)
        if not poison and not duplicate and queue is not None:
            self.groups.setdefault((queue, group), []).append(record.offset)
        self.messages[record.offset] = message
        return message

    # ------------------------------------------------------------------ the markers log

    def fold(self, offset: int, timestamp_ms: int, batch: Batch) -> list[list[int]]:
        """A record was appended to the markers log; the offsets on which each marker took effect."""
        now = self.now
        clock = now.clock_ms
        if now.last_timestamp_ms >= 0:
            clock += min(max(timestamp_ms - now.last_timestamp_ms, 0), CLOCK_STEP_MS)
        own, nonce = now.own, now.nonce
        broker, tick, highest, told = now.broker_ms, now.tick_ms, now.highest_ms, now.told_ms
        effects = []
        for marker in batch.markers:
            effect: list[int] = []
            if isinstance(marker, Own):
                own, nonce = offset, marker.nonce
                highest, told = broker, -1
            elif isinstance(marker, Tick):
                if marker.time_ms and marker.epoch == own and abs(timestamp_ms - marker.clock_ms) <= CLOCK_STEP_MS:
                    broker, tick = marker.time_ms, max(timestamp_ms, marker.clock_ms)
                    highest, told = max(highest, broker), max(told, broker)
            elif isinstance(marker, Start):
                if marker.epoch == own:
                    effect = [o for o in _each(marker.offsets) if self._start(o, marker, offset, clock)]
            elif isinstance(marker, End):
                effect = [o for o in _each(marker.offsets) if self._may_end(o, marker, own)]
                for o in effect:
                    self._finish(o, marker.outcome, offset)
            elif isinstance(marker, Keepalive | Release):
                effect = [o for o in _each(marker.offsets) if self._change(o, marker, offset, clock)]
            elif isinstance(marker, Purge) and marker.epoch == own:
                effect = [
                    o
                    for o, message in self.messages.items()
                    if o < marker.before and message.queue == marker.queue and o not in self.done
                ]
                for o in effect:
                    self._finish(o, "purged", offset)
            effects.append(effect)
        self.now = Moment(clock, timestamp_ms, own, nonce, broker, tick, highest, told)
        self.records.append(offset)
        self.moments.append(self.now)
        return effects

    def _start(self, offset: int, m: Start, position: int, clock: int) -> bool:
        if offset in self.done:
            return False
        receives = 0
        state = self.states.get(offset)
        if state is not None:
            epoch, delivery, receives, deadline, leased = state
            if epoch == m.epoch and m.delivery <= delivery:
                return False
            if leased and deadline > clock:
                return False
        self._set(offset, (m.epoch, m.delivery, receives + 1, clock + m.redeliver_after_ms, True), position)
        self.started[m.epoch, m.delivery, offset] = Started(
            position, receives + 1, clock, state is None, self.now.highest_ms
        )
        return True

    def _may_end(self, offset: int, m: End, own: int) -> bool:
        if offset in self.done:
            return False
        if m.outcome != "acked":
            return m.epoch == own
        state = self.states.get(offset)
        return state is not None and (m.epoch, m.delivery) <= state[:2]

    def _change(self, offset: int, m: Keepalive | Release, position: int, clock: int) -> bool:
        state = self.states.get(offset)
        if offset in self.done or state is None:
            return False
        epoch, delivery, receives, _, leased = state
        if not leased or (epoch, delivery) != (m.epoch, m.delivery):
            return False
        if isinstance(m, Keepalive):
            self._set(offset, (epoch, delivery, receives, clock + m.redeliver_after_ms, True), position)
        else:
            self._set(offset, (epoch, delivery, receives - (not m.counted), clock + m.delay_ms, False), position)
        return True

    def _set(self, offset: int, state: State, position: int) -> None:
        self.states[offset] = state
        self.history.setdefault(offset, []).append((position, state))

    def _finish(self, offset: int, outcome: str, position: int) -> None:
        self.states.pop(offset, None)
        self.done[offset] = outcome
        self.ended_at[offset] = position
        self.history.setdefault(offset, []).append((position, outcome))
        self.on_done(offset, outcome, position)

    # ------------------------------------------------------------------ looking back

    def moment(self, markers_position: int) -> Moment:
        """The state when everything below ``markers_position`` had been folded."""
        i = bisect_left(self.records, markers_position) - 1
        return self.moments[i] if i >= 0 else NOTHING_YET

    def at(self, offset: int, markers_position: int) -> State | str | None:
        """The state of ``offset`` at ``markers_position``: None if never delivered, a string if done."""
        history = self.history.get(offset)
        if history is None:
            return None
        for position, state in reversed(history):
            if position < markers_position:
                return state
        return None


def _each(ranges: list[int]) -> list[int]:
    return [o for i in range(0, len(ranges), 2) for o in range(ranges[i], ranges[i + 1])]
