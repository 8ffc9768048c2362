"""What one partition knows: its messages, their deliveries, and the questions that can be asked of it.

Reservations, the order hints of the backlogs, and which payloads are in memory are not part of the fold: a crash
forgets them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

from marq.core import dedup, rows
from marq.core.backlog import Backlog, Lane, group_number
from marq.core.dedup import Recent
from marq.core.policies import QUEUE_NAME_MAX
from marq.core.ranges import RangeSet, ranges_of
from marq.core.segment_list import SegmentList
from marq.core.segments import Segment
from marq.core.unread import Unread
from marq.core.world import World
from marq.errors import RowError
from marq.protocol.headers import H_GROUP

#: A markers row covers a block of 2**10 offsets.
BLOCK_BITS = 10

#: New entries in lanes after which stale ones are removed, if there are also as many as the last pass kept.
CLEAN_SLACK = 10_000

#: Names of queues that are kept for requests that list queues, which come many times a second.
NAMED_MAX = 10_000

#: Bytes that a message counts in memory besides its payload (measured: raw record with headers 417, dict entry 196).
MESSAGE_OVERHEAD_BYTES = 600

#: Milliseconds by which the clocks of brokers may differ, while it is not known how new the read messages are.
SKEW_MS = 3_600_000
#: Later than any timestamp.
NEVER_MS = 1 << 62

#: Bytes that a header counts besides its name and value: what a row adds to them at most (Kafka's format adds less).
HEADER_OVERHEAD_BYTES = 11


def group_name(headers: Iterable[tuple[str, bytes | None]]) -> bytes | None:
    """The group that a message is in by its headers; None for none."""
    group = None
    for name, value in headers:
        if name == H_GROUP:
            group = value
    return group


class MessageState(StrEnum):
    """The state of a message. How a message ended is its outcome (:data:`~.markers.Outcome`)."""

    DELAYED = "delayed"  # its delay, or that of its release, is not over
    READY = "ready"  # it can be delivered
    IN_FLIGHT = "in_flight"  # a receiver has it, under a lease that is not over
    DONE = "done"  # it is never delivered again


class DeliveryState:
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

    def is_over(self, clock_ms: int) -> bool:
        """True once the lease, or the wait after a release, is over."""
        return clock_ms >= self.deadline_ms

    def is_leased(self, clock_ms: int) -> bool:
        """True if a receiver has the messages, and its lease is not over."""
        return self.leased and clock_ms < self.deadline_ms

    def state_at(self, clock_ms: int) -> MessageState:
        """The state of its messages: in flight or delayed until it is over, then ready."""
        if clock_ms >= self.deadline_ms:
            return MessageState.READY
        return MessageState.IN_FLIGHT if self.leased else MessageState.DELAYED

    def as_tuple(self) -> tuple[int, int, int, int, bool]:
        """The fields that must be equal after any recovery."""
        return (self.epoch, self.delivery, self.receives, self.deadline_ms, self.leased)


class QueueCounts:
    """How many unfinished messages a queue has: in all, and of them in flight, and delayed. The others are ready."""

    __slots__ = ("delayed", "in_flight", "total")

    def __init__(self, total: int = 0, in_flight: int = 0, delayed: int = 0) -> None:
        self.total = total
        self.in_flight = in_flight
        self.delayed = delayed

    @property
    def ready(self) -> int:
        """Those that are neither."""
        return self.total - self.in_flight - self.delayed

    def as_tuple(self) -> tuple[int, int, int]:
        """All three."""
        return self.total, self.in_flight, self.delayed


def no_rows(key: str) -> bytes:
    """Stands for the reader of rows of a partition without tables."""
    raise RowError(f"row {key!r} is needed, but no table was given to read it from")


class State:
    """The attributes of a partition, and all questions whose answers change nothing."""

    def __init__(
        self,
        number: int,
        *,
        queue_id: str | None = None,
        load: Callable[[str], bytes] = no_rows,
        origin_keys: tuple[bytes, ...] = (),
    ) -> None:
        self.number = number
        self.queue_id = queue_id
        self.origin_keys = origin_keys
        self.load = load
        self.position = 0  # next offset of the queue topic
        self.markers_position = 0  # next offset of the markers topic
        self.persisted = 0  # unfinished messages below it have their payload in a segment
        self.clock_ms = 0
        self.last_timestamp_ms = -1  # of the last marker record
        self.broker_ms = -1  # broker time, as the last tick told it: delays and times to live
        self.told_ms = -1  # what the clock of the markers topic showed at that moment
        self.told_at = -1  # ``markers_position`` behind that tick; not kept
        self.tick_ms = -1  # stamp of the last tick of version 0.2; -1: none since the last own marker
        self.queue_timestamp_ms = -1  # of the queue log's record that was read last; not kept
        self.newest_ms = -1  # greatest timestamp of the queue log's records that were read
        self.own = -1  # offset of the last own marker
        self.delivery = 0  # highest delivery number seen in its epoch
        self.messages: dict[int, Any] = {}  # unfinished offset -> record, or its Segment when the payload is on disk
        self.deliveries: dict[int, DeliveryState] = {}  # unfinished offset -> its state, once it was delivered
        self.ahead = RangeSet()  # done at or above ``position``
        # below ``position``, unfinished, and could not be read when reading got there: in no segment. Those that were
        # read since are in ``messages``, too
        self.missed = RangeSet()
        self.segments = SegmentList()
        self.purges: dict[str, int] = {}
        self.counters: Counter[str] = Counter()
        self.world: World | None = None  # of both logs
        self.lost: list[rows.Loss] = []  # what was deleted unread and given up, in order
        self.delays: dict[int, int] = {}  # offset -> ready when broker_ms gets there, or when it is started
        self.elapsed: dict[int, int] = {}  # the same, got there: it waits again should broker_ms fall below
        self.ttls: dict[int, int] = {}  # offset -> expires when broker_ms gets there
        self.poison: dict[int, str] = {}  # offset -> reason
        self.duplicates: set[int] = set()  # second copies of one dead letter, and second sendings of one message
        self.recent = Recent()  # ids of messages
        self.origins = Recent(dedup.ORIGIN_WINDOW_MS, dedup.ORIGINS_MAX)  # of which messages copies were read
        # beyond the fold
        self.estimate_ms = -1  # broker time now, by the owner's own clock since it was told; -1: not known
        # a row could not be read, or a fold raised: what is in memory is no state to go on from
        self.damage: Exception | None = None
        self.on_damage: Callable[[], None] = lambda: None
        self.counts: dict[str, QueueCounts] = {}
        self.unread = Unread()
        self.bytes = 0  # payload bytes (with overhead) in memory
        self.reserved: set[int] = set()
        self.backlogs: dict[str, Backlog] = {}
        self.woken: dict[str, None] = {}  # queues in which something became ready, in order
        # queues whose messages were read since somebody asked -> where the last run of them began
        self.named: dict[str, int] = {}
        self.ended_by_others = 0  # grows when messages end whose present delivery did not end them
        self.isolated = False  # the last take() was smaller for the sake of a suspicious message
        self._by_key: dict[bytes, Backlog] = {}
        self._fifo: set[str] = set()  # queues that were taken from in the order of their groups
        self._blockers: dict[int, Lane] = {}  # what lanes of such queues wait for
        self._held_up: set[str] = set()  # such queues, while what is in flight was not read yet
        self._apart: dict[str, list[int]] | None = None  # what was not new then, by queue
        self._mixed: set[str] = set()  # queues that were taken from in any order since
        self._reads = 0  # segments that the last take() read back
        self._suspects: list[int] = []  # back to ready: to be looked at for dead letters and TTL
        self._refused: list[int] = []  # reserved because take() found them past their maximum or TTL
        self._timers: list[tuple[int, int, DeliveryState]] = []
        self._timed = 0  # offsets in the deliveries of ``_timers``
        self._delayed: list[tuple[int, int]] = []
        self._expiring: list[tuple[int, int]] = []
        self._listed = 0  # entries made in lanes and timers since stale ones were last cleared away …
        self._listed_max = CLEAN_SLACK  # … and how many may be until they are again
        self._dirty_max = CLEAN_SLACK
        self._serial = itertools.count()
        self._highest_delivered = -1  # no delivery is above it
        self._one_ahead = -1  # of what is in flight and was not read yet, when it was last looked for
        self._again_turn: set[str] = set()
        self._shed_all: object = None  # what there was when nothing more could be shed
        self._loaded: tuple[str, dict[int, rows.Record]] = ("", {})
        self._dirty: set[int] = set()  # blocks whose markers row is out of date
        self._marker_rows: dict[int, tuple[str, int]] = {}  # block -> key, checksum
        self._ticks = 0  # records with nothing but time in them since the last checkpoint
        self._id_rows: dict[str, int] = {}  # key -> checksum of the dedup rows that the last manifest names
        self._garbage: list[str] = []  # keys of rows that the next manifest does not name
        self._scanned = 0  # number of the segment up to which it was looked for what is worth merging
        self._written: tuple[int, ...] = ()
        self._next_row = 0
        self._seen_at: list[tuple[int, int]] = []  # (monotonic ms, position) of past checkpoints

    # ------------------------------------------------------------------ what is there

    def record(self, offset: int) -> Any:
        """The record of an unfinished message, read from its segment if its payload is not in memory."""
        record = self.messages[offset]
        return self._records(record)[offset] if type(record) is Segment else record

    def copy_of(self, offset: int) -> int | None:
        """The offset of the copy of a message of this partition; None if no copy is remembered."""
        return self.origins.offset_of(dedup.origin_digest(f"{self.number}:{offset}"))

    def records_of(self, segment: Segment) -> dict[int, rows.Record]:
        """The messages of a segment, including done ones. Raises :exc:`RowError`."""
        return self._records(segment)

    def _records(self, segment: Segment) -> dict[int, rows.Record]:
        if self._loaded[0] != segment.key:
            try:
                value = rows.loaded(self.load, segment.key, segment.checksum)
                self._loaded = (segment.key, {r.offset: r for r in rows.decode_messages(value).records()})
            except RowError as exc:
                self.damage = exc
                self.on_damage()  # whoever has asked for the record may only pass the error on
                raise
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

    def group_of(self, offset: int) -> int:
        """The number of the group of an unfinished message that is not parked; 0 for none."""
        record = self.messages[offset]
        if type(record) is Segment:
            return record.group_of(offset)
        return group_number(group_name(record.headers))

    def queues(self) -> Iterator[str]:
        """Queues that may have something ready here (their entries may turn out to be stale)."""
        for queue, backlog in self.backlogs.items():
            if backlog:
                yield queue
        for queue in self.segments.queues:
            if queue not in self.backlogs or (not self.backlogs[queue] and self.has_ready(queue)):
                yield queue

    def serve_last(self, queue: str) -> None:
        """Put ``queue`` behind all others in :meth:`queues`, of those that have something in memory."""
        backlog = self.backlogs.pop(queue, None)
        if backlog is not None:
            self.backlogs[queue] = backlog

    def has_any(self, queue: str) -> bool:
        """True if ``queue`` has a message that is ready."""
        if queue in self.segments.queues:
            return True
        backlog = self.backlogs.get(queue)
        return backlog is not None and any(self.is_ready(o) for o in backlog.offsets())

    def has_ready(self, queue: str) -> bool:
        """True if ``queue`` may have something to deliver (its entries may turn out to be stale)."""
        if queue in self._held_up:
            return False
        backlog = self.backlogs.get(queue)
        if backlog:
            return True
        if queue not in self.segments.queues:
            return False
        if backlog is None:
            return True
        return self.segments.has_parked(queue) and not (backlog.fifo and backlog.blocker >= 0)

    @property
    def held_up(self) -> bool:
        """True if FIFO queues deliver nothing until more of the queue log has been read."""
        return bool(self._held_up)

    def state_of(self, offset: int) -> MessageState:
        """The state of a message. For an unread message it follows from markers alone: its delay is not known."""
        delivered = self.deliveries.get(offset)
        if delivered is not None and not delivered.is_over(self.clock_ms):
            return delivered.state_at(self.clock_ms)
        if offset in self.delays:
            return MessageState.DELAYED
        if offset in self.messages or self.is_unread(offset):
            return MessageState.READY
        return MessageState.DONE if self.segments.queue_of(offset) is None else MessageState.READY

    def is_unread(self, offset: int) -> bool:
        """True if ``offset`` is not done, and its record, if there is one, was not read."""
        if offset >= self.position:
            return offset not in self.ahead
        return bool(self.missed) and offset in self.missed and offset not in self.messages

    def _ended_unread(self) -> None:
        """An unreadable message is done. Its record may be back one day, and be newer than all that was read."""
        self.newest_ms = max(self.newest_ms, newest_possible_ms(self.last_timestamp_ms, self.queue_id))

    def unreadable_ranges(self) -> list[tuple[int, int]]:
        """What can't be read at present, below the position: neither delivered nor done. Each from, and behind."""
        if not self.missed:
            return []
        left = self.missed.ranges()
        if not self.messages.keys().isdisjoint(self.missed):
            left = ranges_of([offset for offset in self.missed if offset not in self.messages])
        return list(zip(left[::2], left[1::2], strict=True))

    @property
    def needed_from(self) -> int:
        """The first offset of the queue topic that may have to be read again by whoever restores what was written."""
        return min(self.persisted, self.missed.first()) if self.missed else self.persisted

    def is_ready(self, offset: int) -> bool:
        """True if ``offset`` may be delivered now: it is ready, not reserved, no duplicate and no poison."""
        if offset not in self.messages or offset in self.reserved or offset in self.delays:
            return False
        if offset in self.poison or offset in self.duplicates:
            return False
        delivered = self.deliveries.get(offset)
        return delivered is None or delivered.is_over(self.clock_ms)

    def is_leased(self, offset: int) -> bool:
        """True if ``offset`` is in flight: a receiver has it, and its lease is not over."""
        delivered = self.deliveries.get(offset)
        return delivered is not None and delivered.is_leased(self.clock_ms)

    def is_current(self, offset: int, epoch: int, delivery: int) -> bool:
        """True if ``offset`` is unfinished, and this its last delivery."""
        delivered = self.deliveries.get(offset)
        return delivered is not None and (delivered.epoch, delivered.delivery) == (epoch, delivery)

    def receives(self, offset: int) -> int:
        """The counted deliveries of an unfinished message: its receive count."""
        delivered = self.deliveries.get(offset)
        return delivered.receives if delivered is not None else 0

    @property
    def undecided(self) -> bool:
        """True if a message waits for the log to tell whether its time to live is over."""
        return bool(self._refused)

    @property
    def latest_ms(self) -> int:
        """The newest of the timestamps that were read last: exact enough to tell the age of a message."""
        return max(self.broker_ms, self.last_timestamp_ms, self.queue_timestamp_ms)

    def lowest(self) -> int:
        """No unfinished message is below it. A search: it takes longer the more there are."""
        lowest = min(self.messages, default=self.position)
        return min([lowest, *(segment.start for segment in self.segments[:1])])

    def _backlog(self, queue: str) -> Backlog:
        backlog = self.backlogs.get(queue)
        if backlog is None:
            backlog = self.backlogs[queue] = Backlog(queue, queue in self._fifo)
        return backlog

    def _backlog_of(self, record: Any) -> Backlog | None:
        if self.queue_id is not None:
            return self._backlog(self.queue_id)
        key = record.key
        backlog = self._by_key.get(key)
        if backlog is None:
            queue = queue_of_key(key)
            if queue is None:
                return None
            backlog = self._by_key[key] = self._backlog(queue)
        return backlog


def newest_possible_ms(last_timestamp_ms: int, queue_id: str | None) -> int:
    """At least the timestamp of each message that ended before the last marker record, whether it was read or not."""
    if queue_id is not None or last_timestamp_ms < 0:
        return NEVER_MS  # its producers may write any
    return last_timestamp_ms + SKEW_MS


def queue_of_key(key: bytes | None) -> str | None:
    """The queue that a key names; None if it names none."""
    if not key:
        return None
    try:
        queue = key.decode()
    except UnicodeDecodeError:
        return None
    return queue if len(queue) <= QUEUE_NAME_MAX else None


def size_of(record: Any) -> int:
    """The bytes that a record counts in memory, without its key, which messages of a queue share."""
    value = record.value
    size = MESSAGE_OVERHEAD_BYTES + (len(value) if value is not None else 0)
    return size + headers_size(record) if record.headers else size


def headers_size(record: Any) -> int:
    """The bytes that the headers of a record take in a row."""
    size = HEADER_OVERHEAD_BYTES * len(record.headers)
    for name, value in record.headers:
        size += len(name) if name.isascii() else len(name.encode())
        if value is not None:
            size += len(value)
    return size


def stored_size(record: Any) -> int:
    """The bytes that a record takes in a row: at least as many as in Kafka, uncompressed."""
    key = record.key
    size = size_of(record) - MESSAGE_OVERHEAD_BYTES
    return size if key is None else size + len(key)


def block_of(offset: int) -> int:
    """The block whose markers row has the state of ``offset``."""
    return offset >> BLOCK_BITS
