"""The fold once more: one dict entry an offset, no ranges, no shared holds, no memory management.

It shares no code with :mod:`marq.core.partition`, so that a mistake there shows as a difference. It folds the complete
logs as they grow and keeps, for each message, every state that it ever had, so that the state at any pair of
positions can be looked up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from marq.core.markers import Batch, End, Keepalive, Own, Purge, Release, Start
from marq.core.rows import Record

CLOCK_STEP_MS = 5_000

State = tuple[int, int, int, int, bool]
"""epoch, delivery, receives, deadline, leased: what ``Hold.state()`` returns."""


class Message(NamedTuple):
    """What key and headers of a record of the queue log say."""

    record: Record
    queue: str | None  # None: poison
    due_ms: int  # of log time; 0: at once
    expires_ms: int  # 0: never
    poison: bool
    origin: int | None  # of which message of this partition it is the dead letter's copy
    double: bool  # another copy of the same came before it, or another message with its id
    group: bytes  # b"": none


class Started(NamedTuple):
    """A start that took effect on an offset."""

    position: int  # of its record in the markers log
    receives: int
    clock_ms: int


class Moment(NamedTuple):
    """What was true after a record of the markers log."""

    clock_ms: int
    last_timestamp_ms: int
    max_timestamp_ms: int  # of the markers log alone
    own: int
    nonce: str


class Reference:
    """The truth about one partition."""

    def __init__(
        self, number: int, queue_id: str | None, id_window_ms: int, on_done: Callable[[int, str, int], None]
    ) -> None:
        self.number = number
        self.id_window_ms = id_window_ms
        self.ids: list[tuple[str, bytes, int]] = []  # queue, id, timestamp of those that were no duplicates
        self.groups: dict[tuple[str, bytes], list[int]] = {}
        self.queue_id = queue_id
        self.on_done = on_done
        self.messages: dict[int, Message] = {}
        self.states: dict[int, State] = {}
        self.done: dict[int, str] = {}
        self.ended_at: dict[int, int] = {}
        self.history: dict[int, list[tuple[int, State | str]]] = {}
        self.started: dict[tuple[int, int, int], Started] = {}
        self.first_copy: dict[int, int] = {}
        self.records: list[int] = []  # offsets in the markers log
        self.moments: list[Moment] = []
        self.now = Moment(0, -1, -1, -1, "")
        self.queue_timestamp_ms = -1

    # ------------------------------------------------------------------ the queue log

    def send(self, record: Record) -> Message:
        """A record was appended to the queue log."""
        poison = False
        queue: str | None = self.queue_id
        if queue is None:
            try:
                queue = record.key.decode() if record.key else None
            except UnicodeDecodeError:
                queue = None
        poison = queue is None
        due = expires = 0
        group = b""
        origin = dedup = None
        for name, value in record.headers:
            if poison:
                break
            if name in ("marq-delay-ms", "marq-ttl-ms"):
                if not value.isdigit() or int(value) > 366 * 86_400_000:
                    poison = True
                elif name == "marq-delay-ms":
                    due = record.timestamp + int(value)
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
        double = False
        if origin is not None and not poison:
            double = self.first_copy.setdefault(origin, record.offset) != record.offset
        if dedup is not None and not poison and queue is not None:
            double |= self._repeats(queue, dedup, record.timestamp)
        message = Message(record, None if poison else queue, due, expires, poison, origin, double, group)
        if not poison and not double and queue is not None:
            self.groups.setdefault((queue, group), []).append(record.offset)
        self.messages[record.offset] = message
        self.queue_timestamp_ms = max(self.queue_timestamp_ms, record.timestamp)
        return message

    def _repeats(self, queue: str, name: bytes, timestamp_ms: int) -> bool:
        """True if the id was accepted less than the window ago; else it is accepted, and the oldest are forgotten."""
        window = self.id_window_ms
        if any((q, n) == (queue, name) and timestamp_ms - at < window for q, n, at in self.ids):
            return True
        while self.ids and self.ids[0][2] + window <= timestamp_ms:
            del self.ids[0]
        self.ids.append((queue, name, timestamp_ms))
        return False

    # ------------------------------------------------------------------ the markers log

    def fold(self, offset: int, timestamp_ms: int, batch: Batch) -> list[list[int]]:
        """A record was appended to the markers log; the offsets on which each marker took effect."""
        now = self.now
        clock = now.clock_ms
        if now.last_timestamp_ms >= 0:
            clock += min(max(timestamp_ms - now.last_timestamp_ms, 0), CLOCK_STEP_MS)
        own, nonce = now.own, now.nonce
        effects = []
        for marker in batch.markers:
            effect: list[int] = []
            if isinstance(marker, Own):
                own, nonce = offset, marker.nonce
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
        self.now = Moment(clock, timestamp_ms, max(timestamp_ms, now.max_timestamp_ms), own, nonce)
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
        self.started[m.epoch, m.delivery, offset] = Started(position, receives + 1, clock)
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
        """What was true when everything below ``markers_position`` had been folded."""
        i = bisect_left(self.records, markers_position) - 1
        return self.moments[i] if i >= 0 else Moment(0, -1, -1, -1, "")

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
