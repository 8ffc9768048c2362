"""A walker folds both logs of one partition, in the order in which `pipeline.walk` passes their records to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from marq.core.history import Envelope
from marq.core.markers import Batch, End, Purge, Start, decode
from marq.core.partition import Partition
from marq.core.versions import is_of_installation, place_of_markers
from marq.errors import MarkerError, NewerVersionError

if TYPE_CHECKING:
    import pyarrow as pa

#: Milliseconds by which the clocks of two brokers may differ.
SKEW_MS = 5_000
#: The core's order hints, which a walk does not need, are dropped after this many records.
HINTS_MAX = 50_000


class Plan(msgspec.Struct):
    """Where the logs of a partition begin, and where their walk ends."""

    queue_start: int
    queue_stop: int
    markers_start: int
    markers_stop: int
    queue_id: str | None  # in topic mode, the queue of the whole topic


class Walker:
    """Folds one partition. A job overrides the methods that it needs, and returns what it found from `results`.

    If the logs don't reach back to their beginning, markers of old messages may be missing. So messages sent before the
    first marker that is still there are left out; `first` is the first message whose whole history is seen.

    A job makes it from the number of the partition and a `Plan`, encoded, from its driver.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.partition = Partition(number)
        self.first: int | None = None
        self._markers_start = 0
        self._since_hints = 0
        self._whole_ms: int | None = None
        self._read_to = 0

    # -- what a job overrides

    def row(self, key: str, value: bytes | None) -> None:
        """Called for each row of a table, before the logs."""

    def begin(self) -> None:
        """Called before the logs: call `start_at`, or set `partition` to a restored one."""
        raise NotImplementedError

    def on_read(self, envelopes: Sequence[Envelope], prints: Sequence[int | None]) -> None:
        """Called after messages were ingested."""

    def on_absent(self, start: int, stop: int) -> None:
        """Called for offsets that the queue log does not have."""

    def on_fold(self, offset: int, timestamp_ms: int, batch: Batch | None, effects: list[list[int]]) -> None:
        """Called after a record of markers was folded; `batch` is None if it can't be read."""

    def on_doubled(self, log: str, offset: int) -> None:
        """Called for a record that is there once more, before it is passed over."""

    def on_newer(self, offset: int, what: str) -> None:
        """Called for a record of markers of a later version, before it is passed over."""

    def on_markers_absent(self, start: int, stop: int) -> None:
        """Called for offsets that the markers log does not have."""

    def on_passed(self, envelopes: Sequence[Envelope], prints: Sequence[int | None]) -> None:
        """Called for messages before `first`, which are not ingested."""

    def before_fold(self, offset: int, timestamp_ms: int, batch: Batch | None) -> None:
        """Called before a record of markers is folded."""

    def end(self) -> None:
        """Called after both logs."""

    def results(self) -> Iterator[pa.RecordBatch]:
        """What was found since the last call."""
        return iter(())

    # -- walking

    def start_at(self, queue_start: int, markers_start: int, queue_id: str | None) -> None:
        """Begin without a state, at the beginning of the logs."""
        self.partition = Partition(self.number, queue_id=queue_id)
        self.partition.start_at(queue_start, markers_start)
        self._markers_start = markers_start
        if not markers_start:
            self.first = queue_start

    def read(self, envelopes: list[Envelope], prints: Sequence[int | None]) -> None:
        """Read the next messages of the queue log."""
        if envelopes[0].offset < self._read_to or len({e.offset for e in envelopes}) < len(envelopes):
            envelopes, prints = self._once(envelopes, prints)
            if not envelopes:
                return
        self._read_to = envelopes[-1].offset + 1
        if self.first is None:
            passed = len(envelopes)
            if self._whole_ms is not None:
                passed = next((i for i, e in enumerate(envelopes) if e.timestamp >= self._whole_ms), passed)
            self.on_passed(envelopes[:passed], prints[:passed])
            envelopes, prints = envelopes[passed:], prints[passed:]
            if not envelopes:
                return
            self.first = envelopes[0].offset
            self._pass_to(self.first)
        partition = self.partition
        position, stop = partition.position, envelopes[-1].offset + 1
        if stop - position != len(envelopes):
            for envelope in envelopes:
                if envelope.offset > position:
                    self.on_absent(position, envelope.offset)
                position = envelope.offset + 1
        partition.ingest(partition.position, stop, envelopes)
        self.on_read(envelopes, prints)
        self._forget_hints(len(envelopes))

    def _once(
        self, envelopes: list[Envelope], prints: Sequence[int | None]
    ) -> tuple[list[Envelope], Sequence[int | None]]:
        """Of messages that are there more than once (in an archive), the first."""
        kept: list[int] = []
        for i, envelope in enumerate(envelopes):
            if envelope.offset < self._read_to:
                self.on_doubled("queue", envelope.offset)
            else:
                self._read_to = envelope.offset + 1
                kept.append(i)
        return [envelopes[i] for i in kept], [prints[i] for i in kept]

    def _pass_to(self, offset: int) -> None:
        """Skip the offsets below `offset`. Markers of these count as void, like those of any message that is done."""
        partition = self.partition
        partition.ingest(partition.position, offset, [])

    def fold(self, offset: int, timestamp_ms: int, value: bytes | None) -> None:
        """Fold the next record of the markers log."""
        if offset < self.partition.markers_position:
            self.on_doubled("markers", offset)
            return
        try:
            batch: Batch | None = decode(value)
        except MarkerError as error:
            batch = None
            if type(error) is NewerVersionError and is_of_installation(value or b"", place_of_markers(self.number), ()):
                self.on_newer(offset, str(error))
        if self._whole_ms is None:
            self._whole_ms = timestamp_ms + SKEW_MS
        if batch is not None and self.partition.own < self._markers_start:
            self._adopt(batch)
        if offset > self.partition.markers_position:
            self.on_markers_absent(self.partition.markers_position, offset)
        self.before_fold(offset, timestamp_ms, batch)
        effects = self.partition.fold(offset, timestamp_ms, batch.markers if batch is not None else ())
        if batch is None:
            self.partition.counters["unreadable_markers"] += 1
        self.on_fold(offset, timestamp_ms, batch, effects)
        self._forget_hints(1)

    def _adopt(self, batch: Batch) -> None:
        """Find the owner at the beginning of a log that lost its own marker: the latest epoch that its markers name."""
        for marker in batch.markers:
            owners = isinstance(marker, Start | Purge) or (isinstance(marker, End) and marker.outcome != "acked")
            if owners and self.partition.own < marker.epoch < self._markers_start:  # type: ignore[union-attr]
                self.partition.own = marker.epoch  # type: ignore[union-attr]

    def _forget_hints(self, records: int) -> None:
        self._since_hints += records
        if self._since_hints >= HINTS_MAX:
            self._since_hints = 0
            self.partition.forget_hints()

    def stop_at(self, queue_stop: int, markers_stop: int) -> None:
        """Go to the end of the walk: offsets that are absent there count as read."""
        partition = self.partition
        if queue_stop > partition.position:
            if self.first is not None:
                self.on_absent(partition.position, queue_stop)
            partition.ingest(partition.position, queue_stop, [])
        if markers_stop > partition.markers_position:
            self.on_markers_absent(partition.markers_position, markers_stop)
        partition.skip_markers(markers_stop)
