"""What requests and answers hold, in JSON and in msgpack."""

from __future__ import annotations

from typing import Any

import msgspec


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message to send."""

    payload: bytes
    key: bytes | None = None
    headers: dict[str, bytes] = {}
    delay_ms: int | None = None
    ttl_ms: int | None = None
    group: str | None = None
    deduplication_id: str | None = None


class Sent(msgspec.Struct, frozen=True):
    """Where a message that was sent is, for its whole life.

    ``offset`` -1: it is in the log, but Kafka can't tell any more where.
    """

    topic: str
    partition: int
    offset: int


class Received(msgspec.Struct, eq=False):
    """One delivery of a message.

    ``(topic, partition, offset)`` identifies the message for its whole life; ``attempt`` counts its deliveries from 1;
    ``sent_ms`` is when Kafka took it, in milliseconds since 1970; ``receipt`` stands for this delivery.
    """

    receipt: str
    queue: str
    topic: str
    partition: int
    offset: int
    attempt: int
    sent_ms: int
    payload: bytes
    key: bytes | None = None
    headers: dict[str, bytes] = {}
    group: str | None = None


class QueueInfo(msgspec.Struct, frozen=True):
    """What the service tells of a queue.

    ``settings`` are those in force, such as ``max_receives``; times in milliseconds, with names that end in ``_ms``.
    ``version`` 0: it was made by a message and has the default settings; ``purging``: a purge is under way.
    """

    name: str
    settings: dict[str, Any]
    version: int = 0
    created_ms: int = 0
    purging: bool = False


class QueueCounts(msgspec.Struct, frozen=True):
    """How a queue stands: messages by state.

    ``dead``: in its dead-letter queue; ``oldest_ms``: age of the oldest message that is not finished, None if there is
    none; ``has_receiver``: whether anybody receives from it, None if a worker that may know did not answer;
    ``at_least``: some messages are not counted, because a worker did not answer, or a partition is not served or not
    counted to its end; ``at_most``: some that are counted may be done.
    """

    queue: str
    ready: int
    delayed: int
    in_flight: int
    dead: int
    oldest_ms: int | None = None
    has_receiver: bool | None = None
    at_least: bool = False
    at_most: bool = False


class Peeked(msgspec.Struct, frozen=True):
    """A message that was looked at, and not received.

    ``state``: ready, delayed or in_flight; ``receives``: how often it was delivered; ``payload``: its beginning, of
    ``size_bytes``; ``headers``: names and values as text.
    """

    partition: int
    offset: int
    state: str
    receives: int
    sent_ms: int | None = None
    size_bytes: int | None = None
    payload: bytes = b""
    headers: list[tuple[str, str]] = []


class Problem(msgspec.Struct):
    """What went wrong (RFC 9457)."""

    type: str = ""
    title: str = ""
    detail: str = ""
