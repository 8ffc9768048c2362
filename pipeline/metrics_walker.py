"""What `metrics` runs on the executors: a walker that counts events of each queue by windows of time.

It remembers of a message only what later counts need: its queue, when it was first visible, and its receive count.
The two logs are not read in step, so a marker can take effect before its message is read. It then waits for the
message, which alone knows its queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from pyspark.sql.types import ArrayType, BinaryType, IntegerType, LongType, StringType, StructField, StructType

from marq.core.history import Envelope, Histories, visible_ms
from marq.core.markers import Batch, End, Keepalive, Purge, Release, Start
from pipeline import resuming, walker

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
"""Of the state between batches."""

#: Buckets of times per doubling: their bounds are 9 % apart. The last bucket has all longer times (about 49 days on).
BUCKETS_PER_DOUBLING = 8
BUCKETS = 1 + 32 * BUCKETS_PER_DOUBLING

#: What is counted, in the order of `_WindowCounts.counts`.
COUNTS = (
    *("sent", "bytes", "deliveries", "first_deliveries", "redeliveries", "extensions", "released", "uncounted"),
    *("acked", "dead", "expired", "purged", "poison", "moved"),
)
_AT = {name: at for at, name in enumerate(COUNTS)}

#: Columns of a walker's results: the counts of a queue and window, or a row of its state.
WALKED = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("queue", StringType()),
        StructField("start_ms", LongType()),
        *[StructField(name, LongType()) for name in COUNTS],
        StructField("waiting_sum_ms", LongType()),
        StructField("waiting_max_ms", LongType()),
        StructField("waiting_histogram", ArrayType(LongType())),
        StructField("state_key", StringType()),
        StructField("state_value", BinaryType()),
    ]
)

#: Most messages in one value of the state.
CHUNK_MESSAGES = 20_000


def bucket_of(ms: int) -> int:
    """The bucket of a time: 0 for 0 ms, else the first from 1 on whose bound, `2 ** (i / 8)` ms, is not below it."""
    return min(max(1, math.ceil(BUCKETS_PER_DOUBLING * math.log2(ms))), BUCKETS - 1) if ms else 0


class Plan(walker.Plan):
    """What the walker of a partition needs to know."""

    window_ms: int


class ResumeState(resuming.ResumeState):
    """State of a walker between batches."""

    latest_ms: int  # greatest timestamp read


class Purged(NamedTuple):
    """A purge up to an offset that is not read yet."""

    before: int
    at: int  # running number of the marker
    at_ms: int


class Early(NamedTuple):
    """An event of a message that is not read yet."""

    what: int  # index in COUNTS
    at: int  # running number of the marker
    at_ms: int


class _Chunk(msgspec.Struct, array_like=True):
    queues: list[str]
    messages: list[tuple[int, int, int, int]]  # offset, index in queues, visible_ms, receives


class _Rest(msgspec.Struct, array_like=True):
    marker: int
    early: dict[int, list[Early]]
    early_receives: dict[int, int]
    purges: dict[str, list[Purged]]


class MetricsWalker(resuming.ResumingWalker):
    """Emits the counts of each queue and window in which something happened in this batch, and the state."""

    told: Plan
    state_type = ResumeState
    version = VERSION

    def __init__(self, number: int, plan: bytes) -> None:
        super().__init__(number, msgspec.msgpack.decode(plan, type=Plan))
        self._names = Histories(queue_id=self.told.queue_id)
        self._latest_ms = 0
        self._open: dict[int, tuple[str, int]] = {}  # unfinished and read -> queue, visible_ms
        self._receives: dict[int, int] = {}  # unfinished and delivered -> receive count
        self._early: dict[int, list[Early]] = {}
        self._purges: dict[str, list[Purged]] = {}
        self._marker = 0
        self._windows: dict[tuple[str, int], _WindowCounts] = {}
        self._out: list[pa.RecordBatch] = []

    # ------------------------------------------------------------------ state

    def goes_on(self, resume_state: resuming.ResumeState) -> bool:
        return (
            self.told.queue_start <= resume_state.position and self.told.markers_start <= resume_state.markers_position
        )

    def restore(self, resume_state: ResumeState, stored: dict[str, bytes]) -> None:
        self._latest_ms = resume_state.latest_ms
        rest = msgspec.msgpack.decode(stored.pop("rest"), type=_Rest)
        self._marker, self._early, self._receives, self._purges = (
            rest.marker,
            rest.early,
            rest.early_receives,
            rest.purges,
        )
        for key in [key for key in stored if key.startswith("open/")]:
            chunk = msgspec.msgpack.decode(stored.pop(key), type=_Chunk)
            for offset, queue, visible, receives in chunk.messages:
                self._open[offset] = (chunk.queues[queue], visible)
                if receives:
                    self._receives[offset] = receives

    def resume_state(self) -> ResumeState:
        return ResumeState(**msgspec.structs.asdict(super().resume_state()), latest_ms=self._latest_ms)

    def end(self) -> None:
        self.stop_at(self.told.queue_stop, self.told.markers_stop)
        self._out.append(self._counts_batch())
        epoch = self.partition.markers_position + self.partition.position
        state = [*self.state(epoch), *self._own_state()]
        self._out.append(resuming.state_batch(_schema(), self.number, state))

    def _own_state(self) -> Iterator[tuple[str, bytes]]:
        early = {offset: self._receives[offset] for offset in self._receives if offset not in self._open}
        yield "rest", msgspec.msgpack.encode(_Rest(self._marker, self._early, early, self._purges))
        offsets = list(self._open)
        for start in range(0, len(offsets), CHUNK_MESSAGES):
            queues: dict[str, int] = {}
            messages = []
            for offset in offsets[start : start + CHUNK_MESSAGES]:
                queue, visible = self._open[offset]
                place = queues.setdefault(queue, len(queues))
                messages.append((offset, place, visible, self._receives.get(offset, 0)))
            yield f"open/{start:010}", msgspec.msgpack.encode(_Chunk(list(queues), messages))

    # ------------------------------------------------------------------ messages

    def on_read(self, envelopes: Sequence[Envelope], prints: Sequence[int | None]) -> None:
        self._latest_ms = max(self._latest_ms, envelopes[-1].timestamp)
        unfinished = self.partition.messages
        for envelope in envelopes:
            queue = self._names.queue_of(envelope) or ""
            counts = self._window(queue, envelope.timestamp).counts
            counts[0] += 1
            counts[1] += max(envelope.size, 0)
            offset = envelope.offset
            visible = visible_ms(envelope) if envelope.headers else envelope.timestamp
            if offset in unfinished:
                self._open[offset] = (queue, visible)
                for what in self._early.pop(offset, ()):
                    self._count(what.what, queue, visible, what.at_ms)
            else:
                self._finished_unread(envelope, queue, visible)
        position = envelopes[-1].offset + 1
        for queue in [q for q, purges in self._purges.items() if all(p.before <= position for p in purges)]:
            del self._purges[queue]

    def _finished_unread(self, envelope: Envelope, queue: str, visible: int) -> None:
        """Count a message that ended before it was read. If a purge came first, that was its end: drop later events."""
        early = self._early.pop(envelope.offset, [])
        end = early[-1].at if early and early[-1].what >= _AT["acked"] else None
        purge = next(
            (p for p in self._purges.get(queue, ()) if envelope.offset < p.before and (end is None or p.at < end)), None
        )
        if purge is not None:
            early = [what for what in early if what.at < purge.at]
            early.append(Early(_AT["purged"], purge.at, max(purge.at_ms, envelope.timestamp)))
        for what in early:
            self._count(what.what, queue, visible, what.at_ms)
        self._receives.pop(envelope.offset, None)

    def on_absent(self, start: int, stop: int) -> None:
        if self._early:
            for offset in [offset for offset in self._early if start <= offset < stop]:
                del self._early[offset]
                self._receives.pop(offset, None)

    # ------------------------------------------------------------------ markers

    def on_fold(self, offset: int, timestamp_ms: int, batch: Batch | None, effects: list[list[int]]) -> None:
        self._latest_ms = max(self._latest_ms, timestamp_ms)
        if batch is None:
            return
        for marker, effect in zip(batch.markers, effects, strict=True):
            self._marker += 1
            if type(marker) is Purge:
                if marker.epoch == self.partition.own:
                    self._purges.setdefault(marker.queue, []).append(Purged(marker.before, self._marker, timestamp_ms))
                self._ended(effect, "purged", timestamp_ms)
            elif not effect:
                continue
            elif type(marker) is Start:
                self._started(effect, timestamp_ms)
            elif type(marker) is End:
                self._ended(effect, marker.outcome, timestamp_ms)
            elif type(marker) is Keepalive:
                self._happened(effect, "extensions", timestamp_ms)
            elif type(marker) is Release:
                self._happened(effect, "released" if marker.counted else "uncounted", timestamp_ms)
                if not marker.counted:
                    for one in effect:
                        self._receives[one] = self._receives.get(one, 1) - 1

    def _started(self, effect: Iterable[int], at_ms: int) -> None:
        receives = self._receives
        for offset in effect:
            before = receives.get(offset, 0)
            receives[offset] = before + 1
            self._note(offset, "redeliveries" if before else "first_deliveries", at_ms)

    def _happened(self, effect: Iterable[int], what: str, at_ms: int) -> None:
        for offset in effect:
            self._note(offset, what, at_ms)

    def _ended(self, effect: Iterable[int], outcome: str, at_ms: int) -> None:
        for offset in effect:
            self._note(offset, outcome, at_ms)
            if self._open.pop(offset, None) is not None:
                self._receives.pop(offset, None)

    def _note(self, offset: int, what: str, at_ms: int) -> None:
        """Count an event now, or when its message is read."""
        known = self._open.get(offset)
        if known is None:
            self._early.setdefault(offset, []).append(Early(_AT[what], self._marker, at_ms))
        else:
            self._count(_AT[what], *known, at_ms)

    def _count(self, what: int, queue: str, visible: int, at_ms: int) -> None:
        window = self._window(queue, at_ms)
        window.counts[what] += 1
        if what == _FIRST:
            window.add_waiting(max(at_ms - visible, 0))

    def _window(self, queue: str, at_ms: int) -> _WindowCounts:
        key = (queue, at_ms - at_ms % self.told.window_ms)
        found = self._windows.get(key)
        if found is None:
            found = self._windows[key] = _WindowCounts()
        return found

    # ------------------------------------------------------------------ what comes of it

    def results(self) -> Iterator[pa.RecordBatch]:
        out, self._out = self._out, []
        return iter(out)

    def _counts_batch(self) -> pa.RecordBatch:
        windows, self._windows = self._windows, {}
        columns: dict[str, list[Any]] = {
            "partition": [self.number] * len(windows),
            "queue": [queue for queue, _ in windows],
            "start_ms": [start_ms for _, start_ms in windows],
            "waiting_sum_ms": [window.sum_ms for window in windows.values()],
            "waiting_max_ms": [window.max_ms for window in windows.values()],
            "waiting_histogram": [window.histogram for window in windows.values()],
        }
        counts = [window.finished() for window in windows.values()]
        columns |= {name: [count[at] for count in counts] for name, at in _AT.items()}
        return resuming.filled(_schema(), columns, len(windows))


_FIRST, _AGAIN, _DELIVERIES = _AT["first_deliveries"], _AT["redeliveries"], _AT["deliveries"]


class _WindowCounts:
    """Counts and waiting times of one queue and window."""

    __slots__ = ("counts", "histogram", "max_ms", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * len(COUNTS)
        self.sum_ms = self.max_ms = 0
        self.histogram: list[int] = []

    def add_waiting(self, ms: int) -> None:
        """Add a first delivery, which came so many milliseconds after the message was visible."""
        self.sum_ms += ms
        self.max_ms = max(self.max_ms, ms)
        bucket = bucket_of(ms)
        if bucket >= len(self.histogram):
            self.histogram += [0] * (bucket + 1 - len(self.histogram))
        self.histogram[bucket] += 1

    def finished(self) -> list[int]:
        self.counts[_DELIVERIES] = self.counts[_FIRST] + self.counts[_AGAIN]
        return self.counts


def _schema() -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(WALKED)
