"""The bodies and queries of the JSON API, with the limits of their values."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from marq.core.policies import QUEUE_NAME_MAX, TTL_MAX_MS, Delay, Lease
from marq.errors import BadValueError, TooLargeError
from marq.protocol.limits import BATCH_MAX, HEADERS_MAX, MOVE_MAX, RECEIVE_MAX, WAIT_MAX_MS
from marq.protocol.messages import Entry, Problem, QueueInfo, Received

#: Bytes of request bodies without messages: `BATCH_MAX` receipts, `MOVE_MAX` places, settings and others.
RECEIPTS_BYTES, PLACES_BYTES, SETTINGS_BYTES = 640 * 1024, 128 * 1024, 64 * 1024
#: Bytes of a `json` in msgpack: each may be a value, which takes a hundred times as much memory.
JSON_IN_MSGPACK_BYTES = 1024 * 1024
#: Bytes of values that are converted before others get a turn.
TURN_BYTES = 256 * 1024

Name = Annotated[str, Meta(max_length=200)]
Receipts = Annotated[list[str], Meta(min_length=1, max_length=BATCH_MAX)]


class Message(Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a send: its payload is `payload`, or `text`, or `json`."""

    payload: bytes | UnsetType = UNSET  # type: ignore[assignment]
    text: str | UnsetType = UNSET
    json: Raw = msgspec.field(default_factory=Raw)
    headers: Annotated[dict[str, bytes], Meta(max_length=HEADERS_MAX)] = {}  # noqa: RUF012 - a struct copies it
    delay_ms: Delay | None = None
    ttl_ms: Annotated[int, Meta(ge=1, le=TTL_MAX_MS)] | None = None
    group: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    deduplication_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class Send(msgspec.Struct, forbid_unknown_fields=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=BATCH_MAX)]


async def entries_of(messages: list[Message], is_msgpack: bool) -> list[Entry]:
    """Messages with their payloads as bytes.

    Raises:
        BadValueError: one has no payload, or several.
        TooLargeError: the `json` of one is too large to be converted.
    """
    entries: list[Entry] = []
    turn = Turn()
    for i, message in enumerate(messages):
        if message.payload is UNSET or message.text is not UNSET or message.json:
            if is_msgpack and message.json:
                await turn.use(memoryview(message.json).nbytes)
            entries.append(_entry_of(message, i, is_msgpack))
        else:
            entries.append(message)
    return entries


class Turn:
    """Gives others a turn after each `TURN_BYTES`."""

    def __init__(self) -> None:
        self._used_bytes = 0

    async def use(self, size_bytes: int) -> None:
        """Call before so many bytes are converted."""
        if self._used_bytes and self._used_bytes + size_bytes > TURN_BYTES:
            self._used_bytes = 0
            await asyncio.sleep(0)
        self._used_bytes += size_bytes


def _entry_of(message: Message, place: int, is_msgpack: bool) -> Entry:
    given = [message.payload is not UNSET, message.text is not UNSET, bool(message.json)]
    if sum(given) != 1:
        raise BadValueError(f"invalid body: messages[{place}]: give one of payload (base64), text, json")
    try:
        if isinstance(message.text, str):
            payload = message.text.encode()
        elif is_msgpack:
            if memoryview(message.json).nbytes > JSON_IN_MSGPACK_BYTES:
                raise TooLargeError(
                    f"messages[{place}].json: more than {JSON_IN_MSGPACK_BYTES} bytes of msgpack; send it as payload"
                )
            payload = msgspec.json.encode(msgspec.msgpack.decode(message.json))
        else:
            payload = bytes(message.json)
            payload.decode()  # its strings were not checked before
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadValueError(f"invalid body: messages[{place}].json: {exc}") from None
    return Entry(
        payload,
        message.key,
        message.headers,
        message.delay_ms,
        message.ttl_ms,
        message.group,
        message.deduplication_id,
    )


#: The form of payloads: base64 or bytes, or for people.
As = Literal["base64", "text", "json"]


class Receive(msgspec.Struct, forbid_unknown_fields=True):
    max: Annotated[int, Meta(ge=1, le=RECEIVE_MAX)] = 1
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MAX_MS)] = 0
    visibility_timeout_ms: Lease | None = None
    receiver: Name = ""
    as_: As = msgspec.field(default="base64", name="as")


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
    reason: str = "rejected"  # cut to what a dead letter carries of it


class Place(msgspec.Struct, forbid_unknown_fields=True):
    """The place of a message."""

    partition: Annotated[int, Meta(ge=0, lt=1 << 31)]
    offset: Annotated[int, Meta(ge=0, lt=1 << 62)]


class Move(msgspec.Struct, forbid_unknown_fields=True):
    """Messages to move: those named, or up to `max` in their order. Without `to`, dead letters go back to where they
    come from."""

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
    after: str  # where the next page begins; empty on the last one


class Done(msgspec.Struct):
    ok: bool = True


class SendResult(msgspec.Struct):
    """The place of the message, or an error."""

    topic: str | msgspec.UnsetType = msgspec.UNSET
    partition: int | msgspec.UnsetType = msgspec.UNSET
    offset: int | msgspec.UnsetType = msgspec.UNSET
    error: Problem | msgspec.UnsetType = msgspec.UNSET


class SettleResult(msgspec.Struct):
    """True, or an error."""

    ok: bool | msgspec.UnsetType = msgspec.UNSET
    error: Problem | msgspec.UnsetType = msgspec.UNSET


class SendResults(msgspec.Struct):
    results: list[SendResult]


class SettleResults(msgspec.Struct):
    results: list[SettleResult]


class Results(msgspec.Struct):
    results: list[Any]


class Told(Received):
    """A delivery. Its payload is text or JSON if the request wants that and the bytes are such."""

    payload: bytes | UnsetType = UNSET  # type: ignore[assignment]
    text: str | UnsetType = UNSET
    json: Any = UNSET


async def told_all(messages: list[Received], how: As, is_msgpack: bool) -> list[Told]:
    """Returns the deliveries with their payloads as text or as JSON."""
    told = []
    turn = Turn()
    for message in messages:
        await turn.use(len(message.payload))
        told.append(told_as(message, how, is_msgpack))
    return told


def told_as(message: Received, how: As, is_msgpack: bool) -> Told:
    """Returns the delivery with its payload as text or as JSON. Other bytes stay as they are."""
    payload = message.payload
    text: str | UnsetType = UNSET
    json: Any = UNSET
    try:
        if how == "json":
            value = msgspec.json.decode(payload)  # also to know that it is some
            # not the value itself: those of many messages would take a hundred times as much memory
            json = Raw(msgspec.msgpack.encode(value)) if is_msgpack else Raw(payload)
        else:
            text = payload.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        with suppress(UnicodeDecodeError):
            text = payload.decode()
    plain = text is not UNSET or json is not UNSET
    return Told(
        receipt=message.receipt,
        queue=message.queue,
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        attempt=message.attempt,
        sent_ms=message.sent_ms,
        payload=UNSET if plain else payload,
        key=message.key,
        headers=message.headers,
        group=message.group,
        text=text,
        json=json,
    )


class Messages(msgspec.Struct):
    messages: list[Told]
