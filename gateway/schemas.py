"""The bodies and queries of the JSON API, and what values they may have."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from marq.core.policies import QUEUE_NAME_MAX, TTL_MAX_MS, Delay, Lease
from marq.protocol.limits import BATCH_MAX, HEADERS_MAX, MOVE_MAX, RECEIVE_MAX, WAIT_MAX_MS
from marq.protocol.messages import Entry, Problem, QueueInfo, Received

#: Bytes of bodies without messages: of `BATCH_MAX` receipts, of `MOVE_MAX` places, of settings and others.
RECEIPTS_BYTES, PLACES_BYTES, SETTINGS_BYTES = 640 * 1024, 128 * 1024, 64 * 1024

Name = Annotated[str, Meta(max_length=200)]
Receipts = Annotated[list[str], Meta(min_length=1, max_length=BATCH_MAX)]


class Message(Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a send, with what values it may have."""

    headers: Annotated[dict[str, bytes], Meta(max_length=HEADERS_MAX)] = {}  # noqa: RUF012 - a struct copies it
    delay_ms: Delay | None = None
    ttl_ms: Annotated[int, Meta(ge=1, le=TTL_MAX_MS)] | None = None
    group: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    deduplication_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class Send(msgspec.Struct, forbid_unknown_fields=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=BATCH_MAX)]


class Receive(msgspec.Struct, forbid_unknown_fields=True):
    max: Annotated[int, Meta(ge=1, le=RECEIVE_MAX)] = 1
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MAX_MS)] = 0
    visibility_timeout_ms: Lease | None = None
    receiver: Name = ""


class Ack(msgspec.Struct, forbid_unknown_fields=True):
    receipts: Receipts


class Extend(msgspec.Struct, forbid_unknown_fields=True):
    receipts: Receipts
    visibility_timeout_ms: Lease


class Release(msgspec.Struct, forbid_unknown_fields=True):
    receipts: Receipts
    delay_ms: Delay | None = None  # None: the back-off of the queue, if it has one
    counted: bool = True


class Reject(msgspec.Struct, forbid_unknown_fields=True):
    receipts: Receipts
    reason: Name = "rejected"


class Place(msgspec.Struct, forbid_unknown_fields=True):
    """Where a message is."""

    partition: Annotated[int, Meta(ge=0, lt=1 << 31)]
    offset: Annotated[int, Meta(ge=0, lt=1 << 62)]


class Move(msgspec.Struct, forbid_unknown_fields=True):
    """Which messages go where: those named, or up to `max` in their order. Without `to`: dead letters, back to where
    they come from."""

    to: Annotated[str, Meta(min_length=1, max_length=QUEUE_NAME_MAX)] | None = None
    messages: Annotated[list[Place], Meta(min_length=1, max_length=MOVE_MAX)] | None = None
    max: Annotated[int, Meta(ge=1, le=MOVE_MAX)] | None = None


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class ListQueues(msgspec.Struct, forbid_unknown_fields=True):
    prefix: Name = ""
    after: Annotated[str, Meta(max_length=QUEUE_NAME_MAX)] = ""
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class Queues(msgspec.Struct):
    queues: list[QueueInfo]
    after: str  # where the next page begins; empty: this is the last


class Done(msgspec.Struct):
    ok: bool = True


class SendResult(msgspec.Struct):
    """Where the message is, or why it is not there."""

    topic: str | msgspec.UnsetType = msgspec.UNSET
    partition: int | msgspec.UnsetType = msgspec.UNSET
    offset: int | msgspec.UnsetType = msgspec.UNSET
    error: Problem | msgspec.UnsetType = msgspec.UNSET


class SettleResult(msgspec.Struct):
    """Done, or why not."""

    ok: bool | msgspec.UnsetType = msgspec.UNSET
    error: Problem | msgspec.UnsetType = msgspec.UNSET


class SendResults(msgspec.Struct):
    results: list[SendResult]


class SettleResults(msgspec.Struct):
    results: list[SettleResult]


class Results(msgspec.Struct):
    results: list[Any]


class Messages(msgspec.Struct):
    messages: list[Received]
