"""Descriptions of workers, partitions, queues, messages and rows, for other workers and for the routes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.engine.breakers import BreakerState
from app.engine.stalls import Stall
from app.service.vitals import Vitals
from marq.core.partition import Partition
from marq.core.recovery import recent_losses

State = Literal["ready", "delayed", "in_flight"]


class WorkerView(msgspec.Struct):
    """A worker."""

    worker: str
    url: str
    ready: bool
    partitions: list[int]
    uptime_s: float
    peak_memory_bytes: int
    payload_bytes: int
    pending_bytes: int
    waiting_receives: int
    vitals: Vitals | None = None  # None: of an earlier version


class LossView(msgspec.Struct):
    """Records that Kafka deleted before they were read, and how many messages among them were not known to be done."""

    log: str
    start: int
    stop: int
    messages: int
    at_ms: int

    @classmethod
    def recent(cls, partition: Partition) -> list[LossView]:
        """What a partition has lost within a day."""
        return [cls(x.log, x.start, x.stop, x.unfinished, x.at_ms) for x in recent_losses(partition)]


class PartitionView(msgspec.Struct):
    """A partition and its owner; `reason` says why it can't be served, or what it waits for."""

    partition: int
    owner: str
    phase: str
    reason: str | UnsetType = UNSET
    epoch: int | UnsetType = UNSET
    position: int | UnsetType = UNSET
    lag: int | UnsetType | None = UNSET
    markers_position: int | UnsetType = UNSET
    markers_lag: int | UnsetType | None = UNSET
    persisted: int | UnsetType = UNSET
    checkpoint_age_ms: int | UnsetType | None = UNSET
    clock_ms: int | UnsetType = UNSET
    in_memory: int | UnsetType = UNSET
    held: int | UnsetType = UNSET
    parked: int | UnsetType = UNSET
    segments: int | UnsetType = UNSET
    bytes: int | UnsetType = UNSET
    paused: bool | UnsetType = UNSET
    unsaved: bool | UnsetType = UNSET  # some changes are in no checkpoint yet
    unreadable: list[tuple[int, int]] | UnsetType = UNSET  # from, and behind: no replica has them whole
    counters: dict[str, int] | UnsetType = UNSET
    lost: list[LossView] | UnsetType = UNSET  # within a day


class WorkerPartitions(msgspec.Struct):
    """The partitions of one worker."""

    worker: str
    peak_memory_bytes: int
    partitions: list[PartitionView]


class DigestView(msgspec.Struct):
    """Counts and digest of a partition, and the positions that it was read to."""

    partition: int
    epoch: int
    queue_position: int
    markers_position: int
    clock_ms: int
    broker_ms: int
    counters: dict[str, int]
    queues: dict[str, dict[str, int]]
    digest: str


class MessagesWanted(msgspec.Struct):
    """Up to `limit` messages of a queue, in one state or in any, behind a partition and offset.

    `payload_bytes`: how much of each payload to return; with 0, no headers either.
    """

    queue: str
    state: State | None
    after: tuple[int, int]
    limit: int
    payload_bytes: int = 0


class MessageBrief(msgspec.Struct):
    """A message in a list, with the beginning of its payload and its headers if they were requested."""

    partition: int
    offset: int
    state: str
    receives: int
    sent_ms: int | None  # None: its row can't be read right now
    size_bytes: int | None
    payload: bytes | UnsetType = UNSET
    headers: list[tuple[str, str]] | UnsetType = UNSET
    receiver: str | UnsetType = UNSET  # the receiver, if it is in flight
    left_ms: int | UnsetType = UNSET  # until it is ready again, if it is in flight or delayed


class Place(msgspec.Struct):
    """The place of a message."""

    partition: int
    offset: int


class DeliveryView(msgspec.Struct):
    """The newest delivery of a message."""

    epoch: int
    delivery: int
    receiver: str
    leased: bool
    left_ms: int


class MessageView(msgspec.Struct):
    """Everything about a message. If it is done, only its place."""

    topic: str
    partition: int
    offset: int
    queue: str | UnsetType = UNSET
    state: str = "done"
    receives: int | UnsetType = UNSET
    sent_ms: int | UnsetType = UNSET
    age_ms: int | UnsetType = UNSET
    key: str | UnsetType | None = UNSET
    headers: list[tuple[str, str]] | UnsetType = UNSET
    payload: str | UnsetType = UNSET
    size_bytes: int | UnsetType = UNSET
    poison: str | UnsetType | None = UNSET
    reserved: bool | UnsetType = UNSET
    ready_at_ms: int | UnsetType | None = UNSET
    expires_at_ms: int | UnsetType | None = UNSET
    delivery: DeliveryView | UnsetType | None = UNSET


class RowsWanted(msgspec.Struct):
    """Up to `limit` rows of a table in one partition, with keys behind `after`."""

    partition: int
    table: str
    after: str
    limit: int


class RowView(msgspec.Struct):
    """A row of a table, decoded."""

    key: str
    size_bytes: int
    row: Any


class QueueStats(msgspec.Struct):
    """A queue with counts by state. `has_receiver` None: a worker that may know did not answer.

    `at_least`: not all partitions are counted. `at_most`: some of what is counted may be done.
    """

    queue: str
    ready: int
    delayed: int
    in_flight: int
    dead: int
    oldest_ms: int | None
    breaker: BreakerState | None
    has_receiver: bool | None
    at_least: bool
    at_most: bool
    takes_dead_letters: bool


class Stats(msgspec.Struct):
    """Queues with counts, and what makes the counts incomplete."""

    queues: list[QueueStats]
    missing: list[str]  # URLs of workers that did not answer
    unserved: dict[str, str]  # partition -> why it is not served: it is not counted
    stalled: dict[str, Stall]  # partition -> what Kafka does not confirm
    unreadable: dict[str, int]  # partition -> offsets that no replica has whole
    uncounted: dict[str, int]  # partition -> milliseconds for which messages there were not counted
