"""Helpers of the core's unit tests: the operations of a queue user, on two logs in lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from marq.core import rows
from marq.core.checkpoint_cycle import Retire, WriteManifest, WriteRows
from marq.core.checkpoints import Checkpoint
from marq.core.markers import End, Keepalive, Marker, Outcome, Own, Purge, Release, Start, Tick
from marq.core.owner import Owner, Phase
from marq.core.partition import Partition
from marq.core.policies import Limits, QueueSettings
from marq.core.ranges import ranges_of
from marq.core.recovery import Edges
from marq.core.rows import Record
from marq.core.segments import Segment
from marq.core.state import HEADER_OVERHEAD_BYTES, MESSAGE_OVERHEAD_BYTES
from marq.core.world import World
from marq.errors import RowError

LEASE_MS = 30_000
EPOCH_MS = 1_700_000_000_000
"""Broker time at which every test begins."""

DEFAULTS = QueueSettings()


class Delivery(NamedTuple):
    """A start that was appended: its receipt, and the offsets on which it took effect."""

    epoch: int
    delivery: int
    offsets: list[int]


class Marked(NamedTuple):
    """One record of the markers log."""

    offset: int
    timestamp: int
    markers: list[Marker]


class TwoLogs:
    """One partition and its two logs. Sending appends to the queue log; only :meth:`read` shows it to the partition.

    Markers are folded as they are appended. ``now_ms`` is the broker's clock, moved by the tests alone.
    """

    def __init__(
        self, *, number: int = 0, queue_id: str | None = None, first: int = 0, origin_keys: tuple[bytes, ...] = ()
    ) -> None:
        self.number = number
        self.queue_id = queue_id
        self.origin_keys = origin_keys
        self.first = first
        self.now_ms = EPOCH_MS
        self.sent: list[Record] = []
        self.end = first  # next offset of the queue log, holes included
        self.marked: list[Marked] = []
        self.marked_end = 0
        self.table: dict[str, bytes] = {}
        self.loads = 0
        self.manifest = b""
        self.deliveries = 0
        self.partition = self.blank()

    # ------------------------------------------------------------------ senders

    def send(
        self,
        queue: str | bytes | None = "q",
        value: bytes | None = b"x",
        *,
        delay_ms: int | None = None,
        ttl_ms: int | None = None,
        headers: Sequence[tuple[str, Any]] = (),
    ) -> int:
        """Append a message; its offset."""
        headers = list(headers)
        if delay_ms is not None:
            headers.append(("marq-delay-ms", str(delay_ms).encode()))
        if ttl_ms is not None:
            headers.append(("marq-ttl-ms", str(ttl_ms).encode()))
        key = queue.encode() if isinstance(queue, str) else queue
        self.sent.append(Record(self.end, self.now_ms, key, value, tuple(headers)))
        self.end += 1
        return self.end - 1

    def send_many(self, count: int, queue: str = "q") -> list[int]:
        """Append ``count`` messages."""
        return [self.send(queue) for _ in range(count)]

    def hole(self, count: int = 1) -> range:
        """Offsets that the log will never hold: a control record, an aborted transaction, compaction."""
        self.end += count
        return range(self.end - count, self.end)

    def read(self, upto: int | None = None) -> bool:
        """Show the partition the queue log up to ``upto`` (default: its end)."""
        return self.read_into(self.partition, self.end if upto is None else upto)

    def read_into(self, partition: Partition, upto: int) -> bool:
        start = partition.position
        return partition.ingest(start, upto, [r for r in self.sent if start <= r.offset < upto])

    # ------------------------------------------------------------------ markers

    def mark(self, *markers: Marker, after_ms: int = 0) -> list[list[int]]:
        """Append one record of markers, ``after_ms`` later; the offsets on which each took effect."""
        self.now_ms += after_ms
        record = Marked(self.marked_end, self.now_ms, list(markers))
        self.marked.append(record)
        self.marked_end += 1
        return self.partition.fold(*record)

    def own(self, worker: str = "w") -> int:
        """A worker takes the partition; its epoch."""
        self.mark(Own(worker, f"{worker}-{self.marked_end}"))
        self.deliveries = 0
        return self.partition.own

    def start(
        self, *offsets: int, lease_ms: int = LEASE_MS, epoch: int | None = None, delivery: int | None = None
    ) -> Delivery:
        """Deliver ``offsets``, by the owner unless ``epoch`` says otherwise."""
        if delivery is None:
            self.deliveries += 1
            delivery = self.deliveries
        epoch = self.partition.own if epoch is None else epoch
        (effect,) = self.mark(Start(epoch, delivery, ranges_of(sorted(offsets)), lease_ms, "r"))
        return Delivery(epoch, delivery, effect)

    def ack(self, delivery: Delivery, *offsets: int) -> list[int]:
        """Acknowledge a delivery, or some offsets with its receipt."""
        ranges = ranges_of(offsets or delivery.offsets)
        return self.mark(End(delivery.epoch, ranges, "acked", delivery.delivery))[0]

    def extend(self, delivery: Delivery, *offsets: int, lease_ms: int = LEASE_MS) -> list[int]:
        """Say that it is still being worked on."""
        ranges = ranges_of(offsets or delivery.offsets)
        return self.mark(Keepalive(delivery.epoch, delivery.delivery, ranges, lease_ms))[0]

    def release(self, delivery: Delivery, *offsets: int, delay_ms: int = 0, counted: bool = True) -> list[int]:
        """Give back."""
        ranges = ranges_of(offsets or delivery.offsets)
        return self.mark(Release(delivery.epoch, delivery.delivery, ranges, delay_ms, counted))[0]

    def finish(self, outcome: Outcome, *offsets: int, epoch: int | None = None) -> list[int]:
        """The owner ends messages."""
        return self.mark(End(self.partition.own if epoch is None else epoch, ranges_of(offsets), outcome))[0]

    def purge(self, queue: str, before: int | None = None, epoch: int | None = None) -> list[int]:
        """Purge ``queue``: the messages that were sent so far."""
        epoch = self.partition.own if epoch is None else epoch
        return sorted(self.mark(Purge(epoch, queue, self.end if before is None else before))[0])

    def wait(self, ms: int) -> None:
        """Let log time pass, tick by tick, all of which broker time has followed in the end."""
        self.mark(Tick())
        while ms > 0:
            step = min(ms, 5_000)
            self.mark(Tick(), after_ms=step)
            ms -= step

    # ------------------------------------------------------------------ what is seen

    def state(self, offset: int) -> str:
        """The state of a message in one word."""
        p = self.partition
        if offset >= p.position and offset not in p.ahead:
            return "unread"
        if offset in p.poison:
            return "poison"
        if offset in p.duplicates:
            return "duplicate"
        return p.state_of(offset).replace("_", " ")

    def states(self, offsets: Iterable[int]) -> list[str]:
        return [self.state(o) for o in offsets]

    def take(
        self, limit: int = 10, queue: str = "q", settings: QueueSettings = DEFAULTS, shared_fate: bool = False
    ) -> list[int]:
        """The messages that the owner would deliver now."""
        return self.partition.take(queue, limit, settings, shared_fate)

    def take_all(self, queue: str = "q") -> list[int]:
        """All that is ready, in the order in which it comes, one by one."""
        taken: list[int] = []
        while got := self.take(1, queue):
            taken += got
        return taken

    # ------------------------------------------------------------------ tables

    def load(self, key: str) -> bytes:
        self.loads += 1
        try:
            return self.table[key]
        except KeyError:
            raise RowError(f"row {key} is missing") from None

    def checkpoint(
        self, *, window: int = 100_000, persist_after_ms: int = 1 << 40, now_ms: int = 0
    ) -> Checkpoint | None:
        """Write a checkpoint into the table (payloads of everything more than ``window`` offsets behind)."""
        checkpoint = self.partition.checkpoint(max(self.partition.own, 0), now_ms, window, persist_after_ms)
        if checkpoint is not None:
            self.table.update(checkpoint.rows)
            self.manifest = checkpoint.manifest
        return checkpoint

    def persist(self) -> Checkpoint | None:
        """Checkpoints with the payload of everything unfinished; the last of them."""
        found = self.checkpoint(window=0)
        while found is not None and found.partial:
            found = self.checkpoint(window=0)
        return found

    def blank(self) -> Partition:
        partition = Partition(self.number, queue_id=self.queue_id, origin_keys=self.origin_keys, load=self.load)
        partition.start_at(self.first, 0)
        return partition

    def recovered(self) -> Partition:
        """The state at the last checkpoint, as another worker reads it from the tables."""
        if not self.manifest:
            return self.blank()
        manifest = rows.decode_manifest(self.manifest)
        return Partition.restore(self.number, manifest, self.load, queue_id=self.queue_id, origin_keys=self.origin_keys)

    def crash(self) -> None:
        """The worker dies; another one restores the last checkpoint and reads both logs as far as the first had."""
        position, markers_position = self.partition.position, self.partition.markers_position
        self.partition = self.recovered()
        self.catch_up(self.partition, position, markers_position)
        self.own("next")

    def catch_up(
        self, partition: Partition, position: int, markers_position: int, pattern: Sequence[bool] = ()
    ) -> None:
        """Read both logs up to the positions. ``pattern``: which log next (True: markers), then the rest of both."""
        unread = [m for m in self.marked if partition.markers_position <= m.offset < markers_position]
        unread.reverse()
        for markers_next in pattern:
            if markers_next and unread:
                partition.fold(*unread.pop())
            elif not markers_next and partition.position < position:
                self.read_into(partition, partition.position + 1)
        while unread:
            partition.fold(*unread.pop())
        if partition.position < position:
            self.read_into(partition, position)


def picture(partition: Partition) -> dict[str, Any]:
    """All of a partition that must be equal after any recovery and for any order in which the logs were read."""
    p = partition
    unfinished: dict[int, Any] = {}
    for offset, record in p.messages.items():
        queue = p.queue_of(offset)
        unfinished[offset] = (queue, p.record(offset).value, p.record(offset).timestamp)
        assert type(record) is Segment or record.offset == offset
    for segment in p.segments:
        for offset in p.segments.parked_in(segment.start, segment.stop):
            assert offset not in p.messages, offset
            record = p._records(segment)[offset]
            unfinished[offset] = (p.segments.queue_of(offset), record.value, record.timestamp)
    return {
        "position": p.position,
        "markers_position": p.markers_position,
        "clock_ms": p.clock_ms,
        "last_timestamp_ms": p.last_timestamp_ms,
        "broker_ms": p.broker_ms,
        "told_ms": p.told_ms,
        "tick_ms": p.tick_ms,
        "own": p.own,
        "unfinished": dict(sorted(unfinished.items())),
        "deliveries": {o: h.as_tuple() for o, h in sorted(p.deliveries.items())},
        "ahead": p.ahead.ranges(),
        "purges": p.purges,
        "delays": dict(sorted(p.delays.items())),
        "elapsed": dict(sorted(p.elapsed.items())),
        "ttls": dict(sorted(p.ttls.items())),
        "poison": dict(sorted(p.poison.items())),
        "duplicates": p.duplicates,
        "origins": p.origins.entries(),
    }


def payload_bytes(partition: Partition) -> int:
    """Bytes in memory, counted message by message."""
    total = 0
    for record in partition.messages.values():
        if type(record) is not Segment:
            total += MESSAGE_OVERHEAD_BYTES + len(record.value or b"")
            total += sum(HEADER_OVERHEAD_BYTES + len(n.encode()) + len(v or b"") for n, v in record.headers)
    return total


class Appended(NamedTuple):
    """A record of the markers topic as a consumer sees it."""

    offset: int
    timestamp: int
    value: bytes | None


class Broker:
    """The markers topic of one partition, and a worker's way of appending to it."""

    def __init__(self) -> None:
        self.now_ms = EPOCH_MS
        self.queue_off_ms = 0  # of this clock, the one of the broker that leads the queue topic
        self.log: list[Appended] = []

    def append(self, value: bytes | None) -> int:
        self.log.append(Appended(len(self.log), self.now_ms, value))
        return len(self.log) - 1


class Worker:
    """One worker's ownership of partition 0, with the plumbing that the real worker has around it, by hand."""

    def __init__(
        self,
        broker: Broker | None = None,
        *,
        name: str = "w1",
        nonce: str = "",
        limits: Limits | None = None,
        settings: dict[str, QueueSettings] | None = None,
        table: dict[str, bytes] | None = None,
        queue_log: list[Record] | None = None,
    ) -> None:
        self.broker = broker or Broker()
        self.settings = settings or {}
        self.table: dict[str, bytes] = {} if table is None else table  # rows and, apart, manifests
        self.queue_log: list[Record] = [] if queue_log is None else queue_log
        self.clock_ms = 10_000  # monotonic
        self.seq = 0
        self.outbox: list[Marker] = []  # markers that were taken from the owner, and are not appended yet
        self.owner = Owner(
            0,
            name,
            nonce or f"{name}/{len(self.broker.log)}",
            limits=limits or Limits(),
            settings_of=lambda queue: self.settings.get(queue, DEFAULTS),
            load=self.load,
        )

    # ------------------------------------------------------------------ what the owner wants done, and nobody took yet

    @property
    def appends(self) -> list[Marker]:
        return self.owner._agenda.appends

    @property
    def dead(self) -> list[int]:
        return self.owner._agenda.dead

    @property
    def poison(self) -> list[tuple[int, str]]:
        return self.owner._agenda.poison

    # ------------------------------------------------------------------ claim

    def load(self, key: str) -> bytes:
        if key not in self.table:
            raise RowError(f"row {key} is missing")
        return self.table[key]

    def claim(self) -> int:
        """Append the own marker; its offset."""
        from marq.core import markers

        return self.broker.append(markers.encode([self.owner.claim()], self.owner.nonce, 0))

    def restore(
        self,
        log_start: tuple[int, int] = (0, 0),
        own_offset: int = -1,
        end: tuple[int, int] | None = None,
        newer: int | None = None,
        world: World | None = None,
    ) -> None:
        manifests = {key: value for key, value in self.table.items() if key.count("/") == 1}
        row_keys = [key for key in self.table if key not in manifests]
        self.owner.restore(manifests, row_keys, self.load, Edges(log_start, end, newer, world), own_offset)

    def serve(self) -> Worker:
        """Claim, restore, catch up."""
        self.claim()
        self.restore()
        self.read_markers()
        self.read_queue()
        assert self.owner.phase is Phase.SERVING
        return self

    # ------------------------------------------------------------------ the logs

    def send(self, count: int = 1, queue: str = "q", value: bytes = b"x", headers: Any = ()) -> list[int]:
        """Messages that arrive and are read."""
        offsets = []
        for _ in range(count):
            offsets.append(len(self.queue_log))
            self.queue_log.append(self.record(queue, value, headers))
        self.read_queue(self.clock_ms)
        return offsets

    def record(self, queue: str = "q", value: bytes = b"x", headers: Any = ()) -> Record:
        """The next message of the queue topic."""
        timestamp_ms = self.broker.now_ms + self.broker.queue_off_ms
        return Record(len(self.queue_log), timestamp_ms, queue.encode(), value, headers)

    def read_queue(self, since_ms: int | None = None) -> None:
        """Read the queue log, which was last seen to end where we are at ``since_ms`` of our clock."""
        start = self.owner.partition.position
        assert self.owner.ingest(start, len(self.queue_log), self.queue_log[start:], self.clock_ms, since_ms)

    def read_markers(self, upto: int | None = None) -> None:
        """Read the markers topic on from where we are."""
        start = self.owner.partition.markers_position
        stop = len(self.broker.log) if upto is None else upto
        assert self.owner.read_markers(start, stop, self.broker.log[start:stop], self.clock_ms)

    def append(self) -> tuple[int, int, list[Marker]]:
        """Append the owner's markers, without an acknowledgement. Returns (seq, offset, markers)."""
        from marq.core import markers

        appends, self.outbox = self.outbox + self.owner.take_appends(), []
        self.seq += 1
        self.owner.sent(self.seq, appends)
        return self.seq, self.broker.append(markers.encode(appends, self.owner.nonce, self.seq)), appends

    def lose(self) -> tuple[int, list[Marker]]:
        """Send the owner's markers to a broker that never gets them. Returns (seq, markers)."""
        appends = self.owner.take_appends()
        self.seq += 1
        self.owner.sent(self.seq, appends)
        return self.seq, appends

    def confirm(self, seq: int, offset: int, appends: list[Marker]) -> None:
        """The broker's acknowledgement of an append arrives."""
        self.owner.acknowledged(seq, offset, self.broker.log[offset].timestamp, appends, self.clock_ms)

    def flush(self) -> list[Marker]:
        """Append and acknowledge until the owner has no more markers. Returns all of them."""
        said: list[Marker] = []
        while self.outbox or self.appends:
            seq, offset, appends = self.append()
            said += appends
            self.confirm(seq, offset, appends)
        return said

    def wait(self, ms: int) -> None:
        """Time passes on all clocks, with the ticks that the owner wants."""
        while ms > 0:
            step = min(ms, 100)
            self.clock_ms += step
            self.broker.now_ms += step
            self.owner.tick(self.clock_ms)
            self.flush()
            ms -= step

    # ------------------------------------------------------------------ receivers

    def receive(self, limit: int = 10, queue: str = "q", lease_ms: int = LEASE_MS, receiver: Any = "r") -> list[Any]:
        """Ask for messages. Returns the deliveries."""
        self.owner.acquire([queue], limit, receiver, self.clock_ms, lease_ms=lease_ms)
        self.flush()
        return self.handouts()

    def handouts(self, empty: bool = False) -> list[Any]:
        """The deliveries that are handed out (``empty``: including empty ones, for requests that got nothing)."""
        agenda = self.owner._agenda
        handouts, agenda.handouts = agenda.handouts, []
        return [h for h in handouts if h.offsets or empty]

    # ------------------------------------------------------------------ tables

    def step(self) -> Any:
        """One step of the checkpoint, its writes acknowledged at once."""
        step = self.owner.step(self.clock_ms)
        if isinstance(step, WriteRows):
            self.table.update(step.rows)
            self.owner.written(self.clock_ms)
        elif isinstance(step, WriteManifest):
            self.table[step.key] = step.value
            self.owner.written(self.clock_ms)
        elif isinstance(step, Retire):
            for key in [*step.rows, *step.manifests]:
                self.table.pop(key, None)
        return step

    def checkpoint(self) -> list[Any]:
        """A whole checkpoint; its steps."""
        self.clock_ms += 2_000
        self.broker.now_ms += 2_000
        steps = []
        for _ in range(8):
            step = self.step()
            self.flush()
            if step is not None:
                steps.append(step)
            if isinstance(step, Retire):
                break
        return steps
