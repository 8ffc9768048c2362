"""Walks one partition and emits a row for each of its messages, finished or so far, and the state to go on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pyarrow as pa

from marq.core.history import Envelope, Histories, MessageHistory, visible_ms
from marq.core.markers import Batch
from marq.core.state import group_name
from pipeline import walker
from pipeline.resuming import ResumeState, ResumingWalker, filled, state_batch

#: Version of the rows of the state.
STATE_VERSION = 1

_NAME, _COUNT, _MS, _OFFSET = pa.string(), pa.int32(), pa.int64(), pa.int64()

DELIVERY = pa.struct(
    {
        "attempt": _COUNT,
        "epoch": _OFFSET,
        "delivery": pa.int64(),
        "owner": _NAME,
        "receiver": _NAME,
        "start_ms": _MS,
        "deadline_ms": _MS,
        "extensions": _COUNT,
        "end_ms": _MS,
        "end": _NAME,
    }
)
#: Columns of a row: one row a message.
COLUMNS = {
    "partition": _COUNT,
    "offset": _OFFSET,
    "queue": _NAME,
    "sent_ms": _MS,
    "size": pa.int32(),
    "group": _NAME,
    "state": _NAME,
    "outcome": _NAME,
    "ended_ms": _MS,
    "receives": _COUNT,
    "deliveries": pa.list_(DELIVERY),
    "extensions": _COUNT,
    "releases": _COUNT,
    "redeliveries": _COUNT,
    "waiting_ms": _MS,
    "working_ms": _MS,
}
#: Columns of a walker's results: a history, or a row of the state.
LIFECYCLE = pa.schema(COLUMNS | {"state_key": _NAME, "state_value": pa.binary()})


class Plan(walker.Plan):
    """What the walker of a partition needs to know."""

    run: int


class LifecycleWalker(ResumingWalker):
    """Emits a row for each history that ended, and at the end a row for each other one, and the state."""

    told: Plan
    version = STATE_VERSION

    def __init__(self, number: int, plan: bytes) -> None:
        super().__init__(number, msgspec.msgpack.decode(plan, type=Plan))
        self.histories = Histories(queue_id=self.told.queue_id)
        self._unfinished: list[tuple[list[Envelope], str, MessageHistory]] = []
        self._state: list[tuple[str, bytes]] = []

    def restore(self, resume_state: ResumeState, stored: dict[str, bytes]) -> None:
        histories = sorted(key for key in stored if key.startswith("lives/"))
        self.histories = Histories.load((stored.pop(key) for key in histories), queue_id=self.told.queue_id)

    def on_read(self, envelopes: Sequence[Envelope], prints: Sequence[int | None]) -> None:
        self.histories.read(envelopes, self.partition)

    def on_absent(self, start: int, stop: int) -> None:
        self.histories.absent(start, stop)

    def on_fold(self, offset: int, timestamp_ms: int, batch: Batch | None, effects: list[list[int]]) -> None:
        if batch is not None:
            self.histories.folded(offset, timestamp_ms, batch.markers, effects)

    def end(self) -> None:
        told = self.told
        self.stop_at(told.queue_stop, told.markers_stop)
        groups: dict[tuple[int, str], tuple[list[Envelope], str, MessageHistory]] = {}
        for one in self.histories.unfinished(self.partition):
            groups.setdefault((id(one.history), one.state), ([], one.state, one.history))[0].append(one.envelope)
        self._unfinished = list(groups.values())
        self._state = [*self.state(told.run), *((f"lives/{i:08}", v) for i, v in enumerate(self.histories.dump()))]

    def results(self) -> Iterator[pa.RecordBatch]:
        ended, self.histories.ended = self.histories.ended, []
        if ended:
            yield self._batch([(e.envelopes, "done", e.outcome, e.ended_ms, e.history) for e in ended])
        if self._unfinished:
            yield self._batch(
                [(envelopes, state, None, None, history) for envelopes, state, history in self._unfinished]
            )
            self._unfinished = []
        if self._state:
            yield state_batch(LIFECYCLE, self.number, self._state)
            self._state = []

    def _batch(
        self, groups: list[tuple[list[Envelope], str, str | None, int | None, MessageHistory]]
    ) -> pa.RecordBatch:
        """Rows of messages, in groups that share a history: each history is converted once."""
        counts = [len(group[0]) for group in groups]
        which = pa.array(np.repeat(np.arange(len(groups)), counts))
        envelopes = [envelope for group in groups for envelope in group[0]]
        histories = [group[4] for group in groups]
        queue_of = self.histories.queue_of
        visible = np.array([visible_ms(e) for e in envelopes], np.int64)
        started = [s.deliveries[0].start_ms if s.deliveries else None for s in histories]
        never = np.array([start is None for start in started])
        waiting = np.maximum(np.repeat(np.array([start or 0 for start in started], np.int64), counts) - visible, 0)
        alike = {
            "state": [group[1] for group in groups],
            "outcome": [group[2] for group in groups],
            "ended_ms": [group[3] for group in groups],
            "receives": [s.receives for s in histories],
            "deliveries": [[d._asdict() for d in s.deliveries] for s in histories],
            "extensions": [s.extensions for s in histories],
            "releases": [s.releases for s in histories],
            "redeliveries": [sum(d.attempt > 1 for d in s.deliveries) for s in histories],
            "working_ms": [s.working_ms for s in histories],
        }
        columns = {name: pa.array(values, COLUMNS[name]).take(which) for name, values in alike.items()}
        columns |= {
            "partition": pa.array(np.full(len(envelopes), self.number, np.int32)),
            "offset": pa.array([e.offset for e in envelopes], pa.int64()),
            "queue": pa.array([queue_of(e) for e in envelopes], pa.string()),
            "sent_ms": pa.array([e.timestamp for e in envelopes], pa.int64()),
            "size": pa.array([e.size for e in envelopes], pa.int32()),
            "group": pa.array([_group(e) for e in envelopes], pa.string()),
            "waiting_ms": pa.array(waiting, pa.int64(), mask=np.repeat(never, counts)),
        }
        return filled(LIFECYCLE, columns, len(envelopes))


def _group(envelope: Envelope) -> str | None:
    group = group_name(envelope.headers)
    return None if group is None else group.decode(errors="backslashreplace")
