"""The state machine of one partition: ``fold(queue log, markers log)``.

    ingest ──► delayed ──(time)──► ready ──start──► in flight ──end──► done (acked, dead, expired, purged, poison)
                  ▲                  ▲ ▲                │
                  │                  │ └──(deadline)────┤
                  └──release, delay──┴─────release──────┘

Both logs are read independently, so the state is the same in whatever order the two interleave. It needs no settings
and no clock: time is what the broker stamped on the records. Expiry of leases and delays is derived and only makes a
message ready; done happens only through a marker (or a hole in the log: compaction, aborted and control records).

What is not part of the fold, because it is forgotten in a crash: reservations, the order hints of the backlogs, and
which payloads are in memory.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from marq.core import rows
from marq.core.backlog import Backlog
from marq.core.markers import End, Keepalive, Marker, Own, Purge, Release, Start, Tick
from marq.core.policies import QueueSettings, SettingsOf, batch_cap
from marq.core.ranges import RangeSet, count, flat, offsets_in, ranges_of
from marq.core.segments import Segment, Segments, keys_of
from marq.errors import RowError

CLOCK_STEP_MS = 5_000
"""The partition clock advances by at most this much per record: a broker clock that jumps expires nothing early."""

BLOCK_BITS = 10
"""Markers rows cover blocks of 1,024 offsets."""

SEGMENT_MESSAGES = 1_000
SEGMENT_BYTES = 256 * 1024
"""A messages row holds at most this much; a larger message is a row of its own."""

READ_BACK_BYTES = 32 * 1024 * 1024
"""While less than this is in memory beside deliveries, a segment that is read back comes back whole."""

READS_MAX = 8
"""A delivery that has something in it reads no more segments back than this (a millisecond each)."""

ROW_OVERHEAD_BYTES = 40
"""Bytes of a message in a messages row beside key, value and headers."""

MESSAGE_MAX_BYTES = 4 * 1024 * 1024
"""Payload, key and headers of a message. Kafka limits the compressed batch, so a larger one can get into the topic; its
row would not fit the changelog."""

MESSAGE_OVERHEAD_BYTES = 600
"""Counted per message in memory beside its payload (measured: raw record with headers 417 B, dict entry 196 B)."""

TICKS_MAX = 600
"""So many ticks alone are worth a new manifest: they would all be read again after a crash."""

TIMERS_SLACK = 100_000
"""So many more timed messages than there are may be kept before the timers are cleared of what is finished."""

COPIES_MAX = 20_000
"""So many origins of dead letters are remembered at most: the manifest has to fit a record."""

SHED_AGAIN_MS = 1_000
"""So often, on the partition clock, leases may have ended and reservations gone: what could not be shed now can."""

COPY_MEMORY_MS = 600_000
"""How long the origin of a dead letter's copy is remembered, on the partition clock, to recognise a second copy."""

QUEUE_NAME_MAX = 255
"""Longest queue id, in characters."""

H_DELAY = "marq-delay-ms"
H_TTL = "marq-ttl-ms"
H_ORIGIN = "marq-origin"

Row = tuple[str, bytes]


class Hold:
    """The delivery state that some messages share: who has them until when, or until when they wait.

    A start makes one per delivered range; acking, extending or releasing part of it splits it.
    """

    __slots__ = (
        "deadline_ms",
        "delivery",
        "epoch",
        "leased",
        "offsets",
        "receiver",
        "receives",
    )

    def __init__(
        self,
        epoch: int,
        delivery: int,
        receives: int,
        deadline_ms: int,
        leased: bool,
        receiver: str,
        offsets: Sequence[int],
    ) -> None:
        self.epoch = epoch
        self.delivery = delivery
        self.receives = receives
        self.deadline_ms = deadline_ms  # on the partition clock: end of the lease, or of the wait after a release
        self.leased = leased
        self.receiver = receiver
        self.offsets = offsets  # at its making; some may have moved on

    def state(self) -> tuple[int, int, int, int, bool]:
        """What must be equal after any recovery."""
        return (self.epoch, self.delivery, self.receives, self.deadline_ms, self.leased)


class Due(NamedTuple):
    """What the owner has to do now, as offsets. Computed from the state, so a crash neither loses nor repeats it."""

    dead: list[int]
    expired: list[int]
    purged: list[int]
    poison: list[tuple[int, str]]


class Checkpoint(NamedTuple):
    """What to write: new rows first, then the manifest, then (behind the fence) delete ``obsolete`` rows."""

    rows: list[Row]
    manifest: bytes
    obsolete: list[str]
    position: int
    markers_position: int


def _no_rows(key: str) -> bytes:
    raise RowError(f"row {key!r} is needed, but no table was given to read it from")


class Partition:
    """State of partition ``number``.

    Parameters: ``queue_id``: topic mode, all records belong to this queue whatever their keys; ``load``: reads a
    messages row by its key (from the local RocksDB), raising :exc:`RowError` if it is not there.
    """

    def __init__(
        self,
        number: int,
        *,
        queue_id: str | None = None,
        load: Callable[[str], bytes] = _no_rows,
    ) -> None:
        self.number = number
        self.queue_id = queue_id
        self.load = load
        self.position = 0  # next offset of the queue topic
        self.markers_position = 0  # next offset of the markers topic
        self.persisted = 0  # unfinished messages below it have their payload in a segment
        self.clock_ms = 0
        self.last_timestamp_ms = -1  # of the last marker record
        self.max_timestamp_ms = -1  # of any record of either log
        self.own = -1  # offset of the last own marker
        self.delivery = 0  # highest delivery number seen in its epoch
        self.messages: dict[int, Any] = {}  # unfinished offset -> record, or its Segment when the payload is on disk
        self.holds: dict[int, Hold] = {}  # unfinished offset -> its state, once it was delivered
        self.ahead = RangeSet()  # done at or above ``position``
        self.segments = Segments()
        self.purges: dict[str, int] = {}
        self.copied: dict[int, tuple[int, int]] = {}
        self.counters: Counter[str] = Counter()
        self.delays: dict[int, int] = {}  # offset -> ready when max_timestamp_ms gets there
        self.ttls: dict[int, int] = {}  # offset -> expires when max_timestamp_ms gets there
        self.poison: dict[int, str] = {}  # offset -> reason
        self.doubles: set[int] = set()  # second copies of one dead letter
        # beyond the fold
        self.bytes = 0  # payload bytes (with overhead) in memory
        self.reserved: set[int] = set()
        self.backlogs: dict[str, Backlog] = {}
        self.woken: dict[str, None] = {}  # queues in which something became ready, in order
        self.isolated = False  # the last take() was smaller for the sake of a suspicious message
        self._by_key: dict[bytes, Backlog] = {}
        self._suspects: list[int] = []  # back to ready: to be looked at for dead letters and TTL
        self._refused: list[int] = []  # reserved because take() found them past their maximum or TTL
        self._timers: list[tuple[int, int, Hold]] = []
        self._timed = 0  # offsets in the holds of ``_timers``
        self._delayed: list[tuple[int, int]] = []
        self._expiring: list[tuple[int, int]] = []
        self._serial = itertools.count()
        self._highest_hold = -1
        self._again_turn: set[str] = set()
        self._shed_all: object = None  # what there was when nothing more could be shed
        self._loaded: tuple[str, dict[int, rows.Record]] = ("", {})
        self._dirty: set[int] = set()  # blocks whose markers row is out of date
        self._marker_rows: dict[int, tuple[str, int]] = {}  # block -> key, checksum
        self._ticks = 0  # records with nothing but time in them since the last checkpoint
        self._named: frozenset[str] = frozenset()
        self._written: tuple[int, ...] = ()
        self._next_row = 0
        self._seen_at: list[tuple[int, int]] = []  # (monotonic ms, position) of past checkpoints

    # ------------------------------------------------------------------ the queue log

    def start_at(self, position: int, markers_position: int) -> None:
        """Begin a partition that has no manifest at the starts of its logs."""
        assert not self.messages and not self.position
        self.position = self.persisted = position
        self.markers_position = markers_position

    def ingest(self, start: int, stop: int, records: Sequence[Any]) -> bool:
        """Take up a chunk of the queue topic: ``records`` and the fetch positions before and after it.

        False, and nothing changed, if the chunk begins beyond what has been read: the reader has to seek back.
        Offsets absent inside ``[start, stop)`` are done.
        """
        position = self.position
        if start > position:
            return False
        if stop <= position:
            return True
        messages, top, size, expected = (
            self.messages,
            self.max_timestamp_ms,
            0,
            position,
        )
        plain = not self.ahead and self._highest_hold < position and not self.purges
        last_key: Any = self  # equal to no key
        push = None
        for record in records:
            offset = record.offset
            if offset < position:
                continue
            if offset != expected:
                self._absent(expected, offset)
            expected = offset + 1
            if record.timestamp > top:
                top = record.timestamp
            value = record.value
            payload_bytes = len(value) if value is not None else 0
            if not plain or record.headers or payload_bytes > MESSAGE_MAX_BYTES:
                self._take_up(record, top)
                continue
            if record.key != last_key:
                last_key = record.key
                backlog = self._backlog_of(record)
                if backlog is None:
                    self._take_up(record, top)
                    last_key = self
                    continue
                push = backlog.fresh.append
                self.woken[backlog.name] = None
            messages[offset] = record
            push(offset)  # type: ignore[misc]
            size += payload_bytes + MESSAGE_OVERHEAD_BYTES
        if expected < stop:
            self._absent(expected, stop)
        self.bytes += size
        self.position = stop
        if self.ahead:
            self.ahead.discard(0, stop)
        if self.purges:
            self.purges = {queue: before for queue, before in self.purges.items() if before > stop}
        if top > self.max_timestamp_ms:
            self.max_timestamp_ms = top
            self._fire_delays()
        return True

    def _take_up(self, record: Any, now_ms: int) -> None:
        """One record with everything that may be special about it."""
        offset = record.offset
        if offset in self.ahead:
            self._note_copy(record)
            return
        queue = self._describe(record)
        if queue is not None and offset < self.purges.get(queue, 0):
            self._forget(offset)
            if self.holds.pop(offset, None) is not None:
                self._dirty.add(offset >> BLOCK_BITS)
            return
        self.messages[offset] = record
        self.bytes += _size(record)
        if queue is None or offset in self.doubles:
            return
        due = self.delays.get(offset, 0)
        if due > now_ms:
            heappush(self._delayed, (due, offset))
            return
        self.delays.pop(offset, None)
        hold = self.holds.get(offset)
        if hold is None:
            self._backlog(queue).fresh.append(offset)
            self.woken[queue] = None
        elif self.clock_ms >= hold.deadline_ms:
            self._push(offset, hold.receives)

    def _describe(self, record: Any) -> str | None:
        """Note what key and headers of ``record`` say; its queue, or None if it is poison."""
        offset = record.offset
        backlog = self._backlog_of(record)
        if backlog is None:
            self.poison[offset] = "no queue: the key is " + ("null" if record.key is None else "no queue id")
            return None
        if _size(record) > MESSAGE_MAX_BYTES + MESSAGE_OVERHEAD_BYTES:
            self.poison[offset] = f"larger than {MESSAGE_MAX_BYTES} bytes"
            return None
        for name, value in record.headers:
            if name in (H_DELAY, H_TTL):
                amount = _milliseconds(value)
                if amount is None:
                    self.poison[offset] = f"header {name} is not a number of milliseconds"
                    return None
                if name == H_DELAY:
                    self.delays[offset] = record.timestamp + amount
                elif amount:
                    self._expire_at(offset, record.timestamp + amount)
        if self._note_copy(record):
            self.doubles.add(offset)
        return backlog.name

    def _expire_at(self, offset: int, expires_ms: int) -> None:
        self.ttls[offset] = expires_ms
        heappush(self._expiring, (expires_ms, offset))
        if len(self._expiring) > 2 * len(self.ttls) + TIMERS_SLACK:
            self._expiring = [entry for entry in self._expiring if entry[1] in self.ttls]
            heapify(self._expiring)

    def _note_copy(self, record: Any) -> bool:
        """True if ``record`` is a dead letter's copy, and another copy of the same came before it."""
        if self.queue_id is not None:
            return False
        for name, value in record.headers:
            if name == H_ORIGIN:
                origin = _origin(value, self.number)
                if origin is not None:
                    offset: int = record.offset
                    return self.copied.setdefault(origin, (offset, self.clock_ms))[0] != offset
        return False

    def _absent(self, start: int, stop: int) -> None:
        """Offsets that the log does not hold: finished for ever."""
        if self._highest_hold >= start:
            holds = self.holds
            within: Iterable[int] = range(start, stop) if stop - start < len(holds) else list(holds)
            for offset in within:
                if start <= offset < stop and holds.pop(offset, None) is not None:
                    self._dirty.add(offset >> BLOCK_BITS)

    def _backlog(self, queue: str) -> Backlog:
        backlog = self.backlogs.get(queue)
        if backlog is None:
            backlog = self.backlogs[queue] = Backlog(queue)
        return backlog

    def _backlog_of(self, record: Any) -> Backlog | None:
        if self.queue_id is not None:
            return self._backlog(self.queue_id)
        key = record.key
        if not key:
            return None
        backlog = self._by_key.get(key)
        if backlog is None:
            try:
                queue = key.decode()
            except UnicodeDecodeError:
                return None
            if len(queue) > QUEUE_NAME_MAX:
                return None
            backlog = self._by_key[key] = self._backlog(queue)
        return backlog

    # ------------------------------------------------------------------ the markers log

    def fold(self, offset: int, timestamp_ms: int, markers: Iterable[Marker]) -> list[list[int]]:
        """Apply the record at ``offset`` of the markers topic, which must be the next one.

        For each marker: the offsets on which it took effect. A record that is read twice is the caller's to skip.
        """
        assert offset >= self.markers_position, (offset, self.markers_position)
        if self.last_timestamp_ms >= 0:
            step = timestamp_ms - self.last_timestamp_ms
            if step > 0:
                self.clock_ms += min(step, CLOCK_STEP_MS)
        self.last_timestamp_ms = timestamp_ms
        self.markers_position = offset + 1
        if timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = timestamp_ms
            self._fire_delays()
        timers = self._timers
        while timers and timers[0][0] <= self.clock_ms:
            hold = heappop(timers)[2]
            self._timed -= len(hold.offsets)
            self._come_back(hold)
        effects: list[list[int]] = []
        idle = True
        for marker in markers:
            effect: list[int]
            kind = type(marker)
            if kind is Start:
                effect = self._start(marker)  # type: ignore[arg-type]
            elif kind is End:
                effect = self._end(marker)  # type: ignore[arg-type]
            elif kind is Keepalive or kind is Release:
                effect = self._change(marker)  # type: ignore[arg-type]
            elif kind is Purge:
                effect = self._purge(marker)  # type: ignore[arg-type]
            else:
                effect = []
                if kind is Own:
                    self.own = offset
                    self.delivery = 0
            idle = idle and kind is Tick
            effects.append(effect)
        self._ticks += idle
        return effects

    def skip_markers(self, stop: int) -> None:
        """The markers topic holds nothing more below ``stop`` (control records, deleted records)."""
        self.markers_position = max(self.markers_position, stop)

    def _start(self, m: Start) -> list[int]:
        if m.epoch != self.own:
            self.counters["ignored_starts"] += 1
            return []
        self.delivery = max(self.delivery, m.delivery)
        holds, messages, clock_ms = self.holds, self.messages, self.clock_ms
        deadline_ms = clock_ms + m.redeliver_after_ms
        first: list[int] = []
        again: dict[int, list[int]] = {}
        for offset in flat(m.offsets):
            if offset not in messages and not self._unfinished(offset):
                continue
            hold = holds.get(offset)
            if hold is None:
                first.append(offset)
            elif (hold.epoch != m.epoch or hold.delivery < m.delivery) and (
                not hold.leased or hold.deadline_ms <= clock_ms
            ):
                again.setdefault(hold.receives, []).append(offset)
        self._touch(m.offsets)
        effect = first
        if first:
            self._hold(Hold(m.epoch, m.delivery, 1, deadline_ms, True, m.receiver, first))
        if again:
            effect = list(first)
            for receives, offsets in again.items():
                self._hold(
                    Hold(
                        m.epoch,
                        m.delivery,
                        receives + 1,
                        deadline_ms,
                        True,
                        m.receiver,
                        offsets,
                    )
                )
                effect += offsets
                if receives:
                    self.counters["redelivered"] += len(offsets)
            effect.sort()
        self.counters["delivered"] += len(effect)
        return effect

    def _hold(self, hold: Hold) -> None:
        self.holds.update(dict.fromkeys(hold.offsets, hold))
        self._highest_hold = max(self._highest_hold, hold.offsets[-1])
        if hold.deadline_ms > self.clock_ms:
            self._set_timer(hold)
        else:
            self._come_back(hold)

    def _set_timer(self, hold: Hold) -> None:
        heappush(self._timers, (hold.deadline_ms, next(self._serial), hold))
        self._timed += len(hold.offsets)
        if self._timed > 2 * len(self.holds) + TIMERS_SLACK:
            # a long lease of what was acked at once must not be kept until it is over
            lowest = min(self.holds)
            self._timers = [t for t in self._timers if t[2].offsets[-1] >= lowest and self._holds_any(t[2])]
            heapify(self._timers)
            self._timed = sum(len(timer[2].offsets) for timer in self._timers)

    def _holds_any(self, hold: Hold) -> bool:
        holds = self.holds
        return not holds.keys().isdisjoint(hold.offsets) and any(holds.get(o) is hold for o in hold.offsets)

    def _come_back(self, hold: Hold) -> None:
        """The lease or the wait of ``hold`` is over: what it still holds is ready."""
        holds, messages = self.holds, self.messages
        for offset in hold.offsets:
            if holds.get(offset) is hold and offset in messages:
                self._push(offset, hold.receives)

    def _push(self, offset: int, receives: int) -> None:
        if offset in self.reserved:
            return  # the owner puts it back when the reservation ends
        queue = self.queue_of(offset)
        if queue is None:
            return
        self._backlog(queue).push(offset, receives)
        self.woken[queue] = None
        if receives or offset in self.ttls:
            self._suspects.append(offset)

    def _end(self, m: End) -> list[int]:
        effect: list[int] = []
        if m.outcome != "acked":
            if m.epoch != self.own:
                self.counters["ignored_ends"] += count(m.offsets)
                return effect
            for offset in offsets_in(m.offsets):
                if self._unfinished(offset):
                    self._drop(offset)
                    self.holds.pop(offset, None)
                    effect.append(offset)
        else:
            holds, messages, epoch, delivery = self.holds, self.messages, m.epoch, m.delivery
            if not delivery:
                holds = {}  # the receipt of no delivery
            plain = not (self.delays or self.ttls or self.poison or self.doubles)
            persisted, size = self.persisted, 0
            for offset in flat(m.offsets):
                hold = holds.get(offset)
                if hold is None or hold.epoch < epoch or (hold.epoch == epoch and hold.delivery < delivery):
                    continue
                del holds[offset]
                effect.append(offset)
                if plain and offset >= persisted:
                    record = messages.pop(offset, None)
                    if record is not None:
                        value = record.value
                        size += MESSAGE_OVERHEAD_BYTES if value is None else len(value) + MESSAGE_OVERHEAD_BYTES
                        if record.headers:
                            size += _headers_size(record)
                        continue
                self._drop(offset)
            self.bytes -= size
        self._touch(m.offsets)
        self.counters[m.outcome] += len(effect)
        self.counters["ignored_ends"] += count(m.offsets) - len(effect)
        return effect

    def _change(self, m: Keepalive | Release) -> list[int]:
        """Extend or give back the current delivery of each offset; anything else is ignored."""
        holds = self.holds
        groups: dict[Hold, list[int]] = {}
        for offset in offsets_in(m.offsets):
            hold = holds.get(offset)
            if hold is not None and hold.leased and hold.delivery == m.delivery and hold.epoch == m.epoch:
                groups.setdefault(hold, []).append(offset)
        effect: list[int] = []
        for hold, offsets in groups.items():
            receives, leased = hold.receives, isinstance(m, Keepalive)
            if isinstance(m, Keepalive):
                deadline_ms = self.clock_ms + m.redeliver_after_ms
            else:
                deadline_ms = self.clock_ms + m.delay_ms
                if not m.counted:
                    receives -= 1
            self._hold(
                Hold(
                    hold.epoch,
                    hold.delivery,
                    receives,
                    deadline_ms,
                    leased,
                    hold.receiver,
                    offsets,
                )
            )
            effect += offsets
        self._touch(m.offsets)
        return effect

    def _purge(self, m: Purge) -> list[int]:
        if m.epoch != self.own:
            self.counters["ignored_purges"] += 1
            return []
        effect = [o for o in self.messages if o < m.before and self.queue_of(o) == m.queue]
        for segment in self.segments.queues.get(m.queue, ()):
            effect += [o for o in segment.parked_of(m.queue) if o < m.before]
        for offset in effect:
            self._drop(offset)
            self.holds.pop(offset, None)
        self._touch(ranges_of(sorted(effect)))
        if m.before > self.position:
            self.purges[m.queue] = max(m.before, self.purges.get(m.queue, 0))
        self.counters["purged"] += len(effect)
        return effect

    def _touch(self, ranges: Sequence[int]) -> None:
        for i in range(0, len(ranges), 2):
            first, last = ranges[i] >> BLOCK_BITS, (ranges[i + 1] - 1) >> BLOCK_BITS
            if first == last:
                self._dirty.add(first)
            else:
                self._dirty.update(range(first, last + 1))

    def _unfinished(self, offset: int) -> bool:
        """True if ``offset`` is not done. A parked message gets an entry of its own: something happens to it."""
        if offset in self.messages:
            return True
        if offset >= self.position:
            return offset not in self.ahead
        if offset < self.persisted:
            segment = self.segments.unpark(offset)
            if segment is not None:
                self.messages[offset] = segment
                return True
        return False

    def _drop(self, offset: int) -> None:
        """``offset`` is done."""
        record = self.messages.pop(offset, None)
        if record is None:
            if offset >= self.position:
                self.ahead.add(offset, offset + 1)
                return
            self.segments.unpark(offset)
        elif type(record) is not Segment:
            self.bytes -= _size(record)
        if offset < self.persisted:
            self.segments.finish(offset)
        self._forget(offset)

    def _forget(self, offset: int) -> None:
        """Nothing is special about ``offset`` any more."""
        self.delays.pop(offset, None)
        self.ttls.pop(offset, None)
        self.poison.pop(offset, None)
        self.doubles.discard(offset)

    def _fire_delays(self) -> None:
        delayed = self._delayed
        while delayed and delayed[0][0] <= self.max_timestamp_ms:
            _, offset = heappop(delayed)
            if self.delays.pop(offset, None) is not None and offset in self.messages:
                hold = self.holds.get(offset)
                if hold is None:
                    self._push(offset, 0)
                elif self.clock_ms >= hold.deadline_ms:
                    self._push(offset, hold.receives)

    def forget_hints(self) -> None:
        """For a fold that delivers nothing: let go of what only deliveries need, which would grow with the log."""
        self.backlogs.clear()
        self._by_key.clear()
        self._again_turn.clear()
        self.woken.clear()
        self._suspects.clear()
        self._forget_copies()

    # ------------------------------------------------------------------ what is there

    def record(self, offset: int) -> Any:
        """The record of an unfinished message, read from its segment if its payload is not in memory."""
        record = self.messages[offset]
        return self._records(record)[offset] if type(record) is Segment else record

    def records_of(self, segment: Segment) -> dict[int, rows.Record]:
        """The messages of a segment, finished ones too. Raises :exc:`RowError`."""
        return self._records(segment)

    def _records(self, segment: Segment) -> dict[int, rows.Record]:
        if self._loaded[0] != segment.key:
            value = self.load(segment.key)
            if rows.checksum(value) != segment.checksum:
                raise RowError(f"row {segment.key} does not have the checksum that the manifest names")
            self._loaded = (
                segment.key,
                {r.offset: r for r in rows.decode_messages(value).records()},
            )
        return self._loaded[1]

    def queue_of(self, offset: int) -> str | None:
        """The queue of an unfinished message that is not parked; None for poison."""
        if offset in self.poison:
            return None
        if self.queue_id is not None:
            return self.queue_id
        record = self.messages[offset]
        if type(record) is Segment:
            return record.queue_of(offset)
        backlog = self._backlog_of(record)
        return None if backlog is None else backlog.name

    def queues(self) -> Iterator[str]:
        """Queues that may have something ready here (their entries may turn out to be stale)."""
        for queue, backlog in self.backlogs.items():
            if backlog:
                yield queue
        for queue in self.segments.queues:
            if queue not in self.backlogs:
                yield queue

    def has_any(self, queue: str) -> bool:
        """True if ``queue`` has a message that is ready."""
        if queue in self.segments.queues:
            return True
        backlog = self.backlogs.get(queue)
        return backlog is not None and any(self.ready(o) for o in backlog.offsets())

    def set_aside(self, queue: str, reason: str) -> int:
        """The owner decides that what is ready of ``queue`` is poison; how many messages that is.

        It is no fact of the log: another owner, after a crash, decides again.
        """
        backlog = self._backlog(queue)
        while queue in self.segments.queues:
            self._unpark(backlog)
        found = [o for o in backlog.offsets() if self.ready(o)]
        self.poison.update(dict.fromkeys(found, reason))
        return len(found)

    def ready(self, offset: int) -> bool:
        """True if ``offset`` may be delivered now."""
        if offset not in self.messages or offset in self.reserved or offset in self.delays:
            return False
        if offset in self.poison or offset in self.doubles:
            return False
        hold = self.holds.get(offset)
        return hold is None or self.clock_ms >= hold.deadline_ms

    def leased(self, offset: int) -> bool:
        """True if ``offset`` is delivered, and its lease not over."""
        hold = self.holds.get(offset)
        return hold is not None and hold.leased and self.clock_ms < hold.deadline_ms

    def is_current(self, offset: int, epoch: int, delivery: int) -> bool:
        """True if ``offset`` is unfinished, and this its last delivery."""
        hold = self.holds.get(offset)
        return hold is not None and (hold.epoch, hold.delivery) == (epoch, delivery)

    def has_ready(self, queue: str) -> bool:
        """True if ``queue`` may have something to deliver (its entries may turn out to be stale)."""
        backlog = self.backlogs.get(queue)
        return bool(backlog) or queue in self.segments.queues

    def receives(self, offset: int) -> int:
        """Counted deliveries of an unfinished message so far: the number that receivers are told."""
        hold = self.holds.get(offset)
        return hold.receives if hold is not None else 0

    def next_due_ms(self) -> int | None:
        """Milliseconds of log time until something becomes ready or expires by itself; None if nothing will."""
        waits: list[int] = []
        # what is finished by now is nothing to wait for
        while self._timers and not self._holds_any(self._timers[0][2]):
            self._timed -= len(heappop(self._timers)[2].offsets)
        while self._delayed and self._delayed[0][1] not in self.delays:
            heappop(self._delayed)
        while self._expiring and self._expiring[0][1] not in self.ttls:
            heappop(self._expiring)
        if self._timers:
            waits.append(self._timers[0][0] - self.clock_ms)
        if self._delayed:
            waits.append(self._delayed[0][0] - self.max_timestamp_ms)
        if self._expiring:
            waits.append(self._expiring[0][0] - self.max_timestamp_ms)
        return max(0, min(waits)) if waits else None

    # ------------------------------------------------------------------ deliveries

    def take(
        self, queue: str, limit: int, settings: QueueSettings, shared_fate: bool = False, batch: int = 0
    ) -> list[int]:
        """Reserve up to ``limit`` ready messages of ``queue`` for a start (strict: never more).

        Redelivered ones get at most half while first deliveries wait, and the other way round. With ``shared_fate`` a
        batch that has a suspicious message in it is smaller (:func:`~marq.core.policies.batch_cap`), and all that is
        taken; else several batches of ``batch`` (0: one) may be taken at once. Messages that are past their maximum or
        their TTL are left for :meth:`due`.
        """
        self.isolated = False
        backlog = self.backlogs.get(queue)
        if backlog is None:
            if queue not in self.segments.queues:
                return []
            backlog = self._backlog(queue)
        taken: list[int] = []
        cap = limit
        if backlog.again:
            quota = limit // 2
            if limit == 1:
                quota = 1 if queue in self._again_turn else 0
                self._again_turn.symmetric_difference_update((queue,))
            cap = self._take_again(backlog, taken, quota, cap, settings, (batch or limit) if shared_fate else 0)
        if len(taken) < cap:
            self._take_first(backlog, taken, cap, settings)
        if backlog.again and len(taken) < cap:
            self._take_again(backlog, taken, cap, cap, settings, (batch or limit) if shared_fate else 0)
        self.reserved.update(taken)
        taken.sort()
        return taken

    def _take_again(
        self,
        backlog: Backlog,
        taken: list[int],
        quota: int,
        cap: int,
        settings: QueueSettings,
        batch: int,
    ) -> int:
        """Move up to ``quota`` redeliveries into ``taken``; how many there may be in all with them among them.

        ``batch``: size of the batches that share one fate, 0 if messages don't.
        """
        again, maximum = backlog.again, settings.max_receives
        chosen = set(taken)
        while again and len(taken) < min(quota, cap):
            offset = again[0]
            if offset in chosen or not self.ready(offset):
                heappop(again)
                continue
            receives = self.receives(offset)
            if not receives:
                heappop(again)  # given back uncounted: it is among the returned ones, too
                continue
            if (maximum and receives >= maximum) or self._past_ttl(offset, settings):
                self._refuse(heappop(again))
                continue
            if batch and batch_cap(receives + 1, 2, maximum) < 2:
                own_cap = batch_cap(receives + 1, batch, maximum)
                if len(taken) + 1 > own_cap:
                    break
                cap = min(cap, own_cap)
                self.isolated = True
            chosen.add(offset)
            taken.append(heappop(again))
        return cap

    def _take_first(self, backlog: Backlog, taken: list[int], cap: int, settings: QueueSettings) -> None:
        parked = self.segments.queues
        messages, holds, reserved, fresh = (
            self.messages,
            self.holds,
            self.reserved,
            backlog.fresh,
        )
        if not backlog.returned and backlog.name not in parked and not self.ttls and not settings.ttl_ms:
            while fresh and len(taken) < cap:
                offset = fresh.popleft()
                if offset in messages and offset not in holds and offset not in reserved:
                    taken.append(offset)
            return
        chosen = set(taken)
        lowest, reads = self.segments.first_parked(backlog.name), 0
        while len(taken) < cap:
            first = backlog.peek_first()
            if lowest is not None and (first < 0 or lowest < first):
                if taken and (reads >= READS_MAX or not self._has_room()):
                    return
                self._unpark(backlog)
                lowest, reads = self.segments.first_parked(backlog.name), reads + 1
                continue
            if first < 0:
                return
            offset = backlog.pop_first()
            if offset in chosen or not self.ready(offset):
                continue
            hold = holds.get(offset)
            if hold is not None and hold.receives:
                continue
            if self._past_ttl(offset, settings):
                self._refuse(offset)
                continue
            chosen.add(offset)
            taken.append(offset)

    def _refuse(self, offset: int) -> None:
        self.reserved.add(offset)
        self._refused.append(offset)

    def _unpark(self, backlog: Backlog) -> None:
        """Read the lowest parked messages of a queue back.

        Those of other queues in the same segment come along while there is room: else each queue would have the row
        read again, for one message where there are a thousand queues.
        """
        found = self.segments.unpark_next(backlog.name)
        if found is None:
            return
        segment, offsets = found
        records = self._records(segment)
        back = {backlog.name: offsets}
        if self._has_room():
            back |= self.segments.unpark_all(segment)
        for queue, offsets in back.items():
            for offset in offsets:
                record = self.messages[offset] = records[offset]
                self.bytes += _size(record)
            backlog = self._backlog(queue)
            if backlog.fresh and backlog.fresh[0] < offsets[-1]:
                backlog.fresh = deque(sorted([*offsets, *backlog.fresh]))
            else:
                backlog.fresh.extendleft(reversed(offsets))

    def _has_room(self) -> bool:
        """True if more may be read back than a receiver asked for."""
        idle = max(0, len(self.messages) - len(self.holds) - len(self.reserved))
        return self.bytes * idle <= READ_BACK_BYTES * len(self.messages)

    def _past_ttl(self, offset: int, settings: QueueSettings) -> bool:
        expires = self.ttls.get(offset)
        if expires is not None:
            return expires <= self.max_timestamp_ms
        if settings.ttl_ms:
            return bool(self.record(offset).timestamp + settings.ttl_ms <= self.max_timestamp_ms)
        return False

    def reserve(self, queue: str, offsets: Iterable[int]) -> list[int]:
        """Reserve those of ``offsets`` that are ready in ``queue``, ascending, whatever their place in it."""
        found: list[int] = []
        for offset in sorted(set(offsets)):
            parked = offset not in self.messages
            if not self._unfinished(offset) or offset not in self.messages:
                continue
            if self.ready(offset) and self.queue_of(offset) == queue:
                self.reserved.add(offset)
                found.append(offset)
            elif parked:
                self._push(offset, self.receives(offset))  # it lost its place in the segment
        return found

    def put_back(self, offsets: Iterable[int]) -> None:
        """End reservations; what is ready goes back to its place."""
        for offset in offsets:
            self.reserved.discard(offset)
            if self.ready(offset):
                self._push(offset, self.receives(offset))

    def unreserve(self, offsets: Iterable[int]) -> None:
        """End reservations of offsets on which a marker took effect."""
        self.reserved.difference_update(offsets)

    def due(self, settings_of: SettingsOf, ttl_queues: Iterable[str] = ()) -> Due:
        """What is past its maximum receive count or TTL, is a dead letter's double, or poison; reserved until done."""
        dead: list[int] = []
        expired: list[int] = []
        refused, self._refused = self._refused, []
        self.put_back(refused)
        suspects, self._suspects = self._suspects + refused, []
        expiring, top = self._expiring, self.max_timestamp_ms
        while expiring and expiring[0][0] <= top:
            suspects.append(heappop(expiring)[1])
        for queue in ttl_queues:
            suspects += self._stale_heads(queue, settings_of(queue))
        for offset in suspects:
            if offset not in self.messages and self.ttls.get(offset, top + 1) <= top:
                self._unfinished(offset)  # parked: only what is to be ended may lose its place
            if not self.ready(offset):
                continue
            queue_of = self.queue_of(offset)
            if queue_of is None:
                continue
            settings = settings_of(queue_of)
            if self._past_ttl(offset, settings):
                expired.append(offset)
            elif settings.max_receives and self.receives(offset) >= settings.max_receives:
                dead.append(offset)
            else:
                continue
            self.reserved.add(offset)
        purged = [o for o in self.doubles if o not in self.reserved]
        poison = [(o, why) for o, why in self.poison.items() if o not in self.reserved and o in self.messages]
        self.reserved.update(purged)
        self.reserved.update(o for o, _ in poison)
        return Due(dead, expired, purged, poison)

    def _stale_heads(self, queue: str, settings: QueueSettings) -> list[int]:
        """Never delivered messages of ``queue`` whose TTL, by the queue's setting, is over."""
        backlog = self.backlogs.get(queue)
        found: list[int] = []
        if backlog is None and queue in self.segments.queues:
            backlog = self._backlog(queue)
        if backlog is None or not settings.ttl_ms:
            return found
        lowest, reads = self.segments.first_parked(queue), 0
        while True:
            first = backlog.peek_first()
            if lowest is not None and (first < 0 or lowest < first):
                if reads >= READS_MAX:
                    return found
                self._unpark(backlog)
                lowest, reads = self.segments.first_parked(queue), reads + 1
                continue
            if first < 0:
                return found
            if not self.ready(first) or self.receives(first):
                backlog.pop_first()
            elif self._past_ttl(first, settings):
                found.append(backlog.pop_first())
            else:
                return found

    # ------------------------------------------------------------------ memory

    def shed(self, excess_bytes: int, wanted: Iterable[str] = ()) -> int:
        """Drop payloads that are in a segment from memory until ``excess_bytes`` are free; how many bytes were freed.

        Reserved or leased ones stay, and those of ``wanted`` queues (with receivers waiting) unless they have to wait.
        """
        freed = 0
        keep = set(wanted)
        situation = (self.persisted, self.clock_ms // SHED_AGAIN_MS, len(self.segments), keep)
        if self._shed_all == situation:
            return 0  # a look at every message, to find the same nothing
        parked: dict[str, list[int]] = {}
        for offset, record in self.messages.items():
            if freed >= excess_bytes:
                break
            if offset >= self.persisted or type(record) is Segment or offset in self.reserved:
                continue
            hold = self.holds.get(offset)
            waits = hold is not None and self.clock_ms < hold.deadline_ms
            if waits and hold is not None and hold.leased:
                continue
            queue = self.queue_of(offset)
            if queue in keep and not waits and offset not in self.delays:
                continue
            freed += _size(record)
            if hold is None and queue is not None and offset not in self.delays and offset not in self.doubles:
                parked.setdefault(queue, []).append(offset)
            else:
                segment = self.segments.find(offset)
                assert segment is not None
                self.messages[offset] = segment
        else:
            self._shed_all = situation
        for queue, offsets in parked.items():
            for offset in offsets:
                del self.messages[offset]
                self.segments.park(offset)
            # an entry that stays would be a second one when the message is read back
            backlog = self._backlog(queue)
            backlog.fresh = deque(o for o in backlog.fresh if o in self.messages)
            backlog.returned = [o for o in backlog.returned if o in self.messages]
            heapify(backlog.returned)
        self.bytes -= freed
        return freed

    # ------------------------------------------------------------------ checkpoint and restore

    def checkpoint(self, epoch: int, now_ms: int, window_offsets: int, hold_ms: int) -> Checkpoint | None:
        """The state as rows to write and a manifest, captured in this instant; None if nothing changed.

        ``now_ms``: any monotonic clock. Messages that lag ``window_offsets`` behind, or were read ``hold_ms`` ago,
        are written with their payload, so that the position, and what is read again after a crash, stay bounded.
        """
        self._forget_copies()
        new_rows: list[Row] = []
        waiting = self._persist(epoch, self._new_position(now_ms, window_offsets, hold_ms), new_rows)
        self._write_markers(epoch, new_rows)
        self._sweep()
        named = keys_of(self.segments)
        named.update(self._marker_rows.values())
        if not new_rows and self._named == named.keys() and not self.changed():
            return None
        self._ticks = 0
        self._written = self._extent()
        obsolete = sorted(self._named - named.keys())
        self._named = frozenset(named)
        manifest = rows.Manifest(
            v=rows.VERSION,
            epoch=epoch,
            rows=named,
            position=self.persisted,
            markers_position=self.markers_position,
            done=self._done_above(waiting),
            clock_ms=self.clock_ms,
            last_timestamp_ms=self.last_timestamp_ms,
            max_timestamp_ms=self.max_timestamp_ms,
            own=self.own,
            delivery=self.delivery,
            purges=dict(self.purges),
            copied=dict(self.copied),
            counters=dict(self.counters),
        )
        return Checkpoint(
            new_rows,
            rows.encode(manifest),
            obsolete,
            self.persisted,
            self.markers_position,
        )

    def _forget_copies(self) -> None:
        copied = self.copied
        for origin in [o for o, (_, at) in copied.items() if at + COPY_MEMORY_MS < self.clock_ms]:
            del copied[origin]
        for origin in list(itertools.islice(copied, max(0, len(copied) - COPIES_MAX))):
            del copied[origin]

    def changed(self) -> bool:
        """True if a checkpoint would have something to write."""
        return self._ticks >= TICKS_MAX or self._written != self._extent()

    def _extent(self) -> tuple[int, ...]:
        return (self.persisted, self.position, self.markers_position - self._ticks, self.own)

    def _new_position(self, now_ms: int, window_offsets: int, hold_ms: int) -> int:
        """Up to where everything unfinished is to have its payload in a segment."""
        seen = self._seen_at
        seen.append((now_ms, self.position))
        held = 0
        while len(seen) > 1 and seen[1][0] <= now_ms - hold_ms:
            del seen[0]
        if seen[0][0] <= now_ms - hold_ms:
            held = seen[0][1]
        return max(self.persisted, held, self.position - window_offsets)

    def _persist(self, epoch: int, position: int, new_rows: list[Row]) -> list[int]:
        """Write the payloads of what is unfinished below ``position``; the unfinished offsets above, ascending."""
        old = self.persisted
        above = sorted([o for o in self.messages if o >= old])
        lagging = above[: bisect_left(above, position)]
        waiting = above[len(lagging) :]
        # everything below the first message that may still be read again is done or in a segment
        self.persisted = max(position, waiting[0] if waiting else self.position)
        batch: list[Any] = []
        size = 0
        self._dirty.update({offset >> BLOCK_BITS for offset in lagging})
        for offset in lagging:
            record = self.messages[offset]
            in_row = _size(record) - MESSAGE_OVERHEAD_BYTES + len(record.key or b"") + ROW_OVERHEAD_BYTES
            if batch and (len(batch) >= SEGMENT_MESSAGES or size + in_row > SEGMENT_BYTES):
                self._add_segment(epoch, batch, new_rows)
                batch, size = [], 0
            batch.append(record)
            size += in_row
        if batch:
            self._add_segment(epoch, batch, new_rows)
        return waiting

    def _add_segment(self, epoch: int, batch: list[Any], new_rows: list[Row]) -> None:
        key, value = self._row_key(epoch, "messages"), rows.messages_row(batch)
        self.segments.add(
            Segment(
                key,
                rows.checksum(value),
                batch[0].offset,
                batch[-1].offset + 1,
                [(record.offset, self.queue_of(record.offset)) for record in batch],
            )
        )
        new_rows.append((key, value))

    def _row_key(self, epoch: int, kind: rows.Kind) -> str:
        self._next_row += 1
        return rows.row_key(self.number, epoch, kind, self._next_row)

    def _write_markers(self, epoch: int, new_rows: list[Row]) -> None:
        holds, messages = self.holds, self.messages
        dirty, self._dirty = self._dirty, set()
        offsets_of = self._offsets_by_block(dirty)
        for block in sorted(dirty):
            start, stop = block << BLOCK_BITS, (block + 1) << BLOCK_BITS
            groups: dict[Hold, list[int]] = {}
            unfinished: list[int] = []
            for offset in offsets_of(block):
                hold = holds.get(offset)
                if hold is not None:
                    groups.setdefault(hold, []).append(offset)
                if offset in messages and offset < self.persisted:
                    unfinished.append(offset)
            if start < self.persisted and self.segments:
                parked = self.segments.parked_in(start, min(stop, self.persisted))
                if parked:
                    unfinished = sorted(unfinished + parked)
            if not groups and not unfinished:
                self._marker_rows.pop(block, None)
                continue
            hold_rows = [
                rows.HoldRow(
                    h.epoch,
                    h.delivery,
                    h.receives,
                    h.deadline_ms,
                    h.leased,
                    h.receiver,
                    ranges_of(offsets),
                )
                for h, offsets in groups.items()
            ]
            row = rows.MarkersRow(rows.VERSION, block, ranges_of(unfinished), hold_rows)
            key, value = self._row_key(epoch, "markers"), rows.encode(row)
            self._marker_rows[block] = (key, rows.checksum(value))
            new_rows.append((key, value))

    def _offsets_by_block(self, dirty: set[int]) -> Callable[[int], Iterable[int]]:
        """Which offsets of a dirty block to look at: all of them, or, if that is more work, those there are."""
        holds, messages = self.holds, self.messages
        if len(dirty) << BLOCK_BITS < 4 * (len(holds) + len(messages)) or len(dirty) < 8:
            lowest = min(messages, default=self.position)
            lowest = min(lowest, min(holds, default=lowest))
            return lambda block: range(max(block << BLOCK_BITS, lowest), (block + 1) << BLOCK_BITS)
        blocks: dict[int, list[int]] = {}
        for offset in sorted(holds.keys() | messages.keys()):
            blocks.setdefault(offset >> BLOCK_BITS, []).append(offset)
        return lambda block: blocks.get(block, ())

    def _sweep(self) -> None:
        """Structures of a queue exist only while it has something in them."""
        empty = [name for name, backlog in self.backlogs.items() if not backlog]
        if empty:
            for name in empty:
                del self.backlogs[name]
                self._again_turn.discard(name)
            self._by_key = {key: b for key, b in self._by_key.items() if b.name in self.backlogs}

    def _done_above(self, waiting: list[int]) -> list[int]:
        """Done offsets in ``[persisted, position)``, then those that are done ahead of being read."""
        done = RangeSet()
        start = self.persisted
        gaps: list[int] = []
        for offset in waiting:
            if offset > start:
                gaps += (start, offset)
            start = offset + 1
        if start < self.position:
            gaps += (start, self.position)
        done = RangeSet(gaps)
        for start, stop in zip(*[iter(self.ahead.ranges())] * 2, strict=True):
            done.add(start, stop)
        return done.ranges()

    @classmethod
    def restore(
        cls,
        number: int,
        manifest: rows.Manifest,
        load: Callable[[str], bytes],
        *,
        queue_id: str | None = None,
    ) -> Partition:
        """The inverse of :meth:`checkpoint`: the state at the manifest's positions.

        ``load`` reads a row by its key. Raises :exc:`RowError` if a row that the manifest names is missing or damaged.
        """
        self = cls(number, queue_id=queue_id, load=load)
        self.position = self.persisted = manifest.position
        self.markers_position = manifest.markers_position
        self.ahead = RangeSet(manifest.done)
        self.clock_ms = manifest.clock_ms
        self.last_timestamp_ms = manifest.last_timestamp_ms
        self.max_timestamp_ms = manifest.max_timestamp_ms
        self.own = manifest.own
        self.delivery = manifest.delivery
        self.purges = dict(manifest.purges)
        self.copied = dict(manifest.copied)
        self.counters = Counter(manifest.counters)
        self._named = frozenset(manifest.rows)
        unfinished = RangeSet()
        segments: list[tuple[str, int, list[rows.Record]]] = []
        for key, checksum in manifest.rows.items():
            value = load(key)
            if rows.checksum(value) != checksum:
                raise RowError(f"row {key} does not have the checksum that the manifest names")
            if rows.kind_of(key) == "messages":
                segments.append((key, checksum, rows.decode_messages(value).records()))
                continue
            row = rows.decode_markers(value)
            self._marker_rows[row.block] = (key, checksum)
            for start, stop in zip(*[iter(row.unfinished)] * 2, strict=True):
                unfinished.add(start, stop)
            for h in row.holds:
                offsets = list(offsets_in(h.offsets))
                hold = Hold(
                    h.epoch,
                    h.delivery,
                    h.receives,
                    h.deadline_ms,
                    h.leased,
                    h.receiver,
                    offsets,
                )
                self.holds.update(dict.fromkeys(offsets, hold))
                self._highest_hold = max(self._highest_hold, offsets[-1])
                self._set_timer(hold)
        found = 0
        for key, checksum, records in sorted(segments, key=lambda s: s[2][0].offset):
            found += self._restore_segment(key, checksum, records, unfinished)
        if found != len(unfinished):
            raise RowError(
                f"partition {number}: the manifest of epoch {manifest.epoch} names {len(unfinished)} unfinished "
                f"messages, its rows hold {found}"
            )
        while self._timers and self._timers[0][0] <= self.clock_ms:
            hold = heappop(self._timers)[2]
            self._timed -= len(hold.offsets)
            self._come_back(hold)
        return self

    def _restore_segment(self, key: str, checksum: int, records: list[rows.Record], unfinished: RangeSet) -> int:
        held = [r for r in records if r.offset in unfinished]
        if not held:
            # unnamed by the next manifest
            return 0
        described = [(record.offset, self._describe(record)) for record in held]
        segment = Segment(key, checksum, records[0].offset, records[-1].offset + 1, described)
        self.segments.add(segment)
        for offset, queue in described:
            if queue is not None and offset not in self.doubles:
                due = self.delays.get(offset, 0)
                if due > self.max_timestamp_ms:
                    heappush(self._delayed, (due, offset))
                else:
                    self.delays.pop(offset, None)
                    if offset not in self.holds:
                        self.segments.park(offset)
                        self.woken[queue] = None
                        continue
            self.messages[offset] = segment
        return len(held)


def _size(record: Any) -> int:
    value = record.value
    size = MESSAGE_OVERHEAD_BYTES + (len(value) if value is not None else 0)
    return size + _headers_size(record) if record.headers else size


def _headers_size(record: Any) -> int:
    return sum(len(name) + (len(value) if value is not None else 0) for name, value in record.headers)


def _number(digits: bytes) -> int | None:
    """A number as Spark and others read it too: decimal digits, no sign, spaces or underscores; less than 10**15."""
    return int(digits) if digits.isdigit() and len(digits) <= 15 else None


def _milliseconds(value: bytes | None) -> int | None:
    return None if value is None else _number(value)


def _origin(value: bytes | None, partition: int) -> int | None:
    """The offset in an origin header ``b"<partition>:<offset>"`` of this partition; None for any other."""
    if value is None:
        return None
    number, _, offset = value.partition(b":")
    return _number(offset) if _number(number) == partition else None
