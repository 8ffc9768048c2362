"""Rows and manifests: what a partition's state is written as, and how it is read back.

Rows are immutable: each has a key of its own, ``<partition>/<epoch>/<kind>/<id>``, and is named with its checksum by
the manifest ``<partition>/<epoch>``. Values are msgpack with a version first; no Faust is needed to read them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from marq.core.ranges import Ranges
from marq.errors import RowError

VERSION = 1

Kind = Literal["messages", "markers"]


class Record(NamedTuple):
    """One record of the queue topic, as the core reads it. aiokafka's ConsumerRecord has the same attributes."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


class HoldRow(msgspec.Struct, array_like=True):
    """The delivery state that ``offsets`` share."""

    epoch: int
    delivery: int
    receives: int
    deadline_ms: int
    leased: bool
    receiver: str
    offsets: Ranges


class MarkersRow(msgspec.Struct, array_like=True):
    """In-progress state of one block of offsets.

    ``unfinished``: the offsets below the manifest's queue position that are not done (their payload is in a messages
    row); ``holds``: the deliveries of offsets in the block, below and above it.
    """

    v: int
    block: int
    unfinished: Ranges
    holds: list[HoldRow]


class MessagesRow(msgspec.Struct, array_like=True):
    """Payloads of a segment: ``(offset, timestamp_ms, key, value, headers)`` each."""

    v: int
    messages: list[tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]]

    def records(self) -> list[Record]:
        """The messages as records of the queue topic."""
        return [Record(o, ts, key, value, tuple(headers)) for o, ts, key, value, headers in self.messages]


class Manifest(msgspec.Struct):
    """All that recovery needs beside the rows it names. Offsets; milliseconds."""

    v: int
    epoch: int  # of the owner that wrote it
    rows: dict[str, int]  # key -> checksum
    position: int  # of the queue topic: below it, what no row names is done
    markers_position: int
    done: Ranges  # at or above ``position``
    clock_ms: int
    last_timestamp_ms: int
    max_timestamp_ms: int
    own: int  # last folded own marker
    delivery: int  # highest delivery number folded in that epoch
    purges: dict[str, int]  # queue -> before, where still above ``position``
    copied: dict[int, tuple[int, int]]  # origin offset -> (offset of its copy, clock_ms when read)
    counters: dict[str, int]


_encode = msgspec.msgpack.Encoder().encode
_messages = msgspec.msgpack.Decoder(MessagesRow)
_markers = msgspec.msgpack.Decoder(MarkersRow)
_manifest = msgspec.msgpack.Decoder(Manifest)


def messages_row(records: Sequence[Any]) -> bytes:
    """The messages row of ``records`` (anything with the attributes of :class:`Record`)."""
    return _encode(
        MessagesRow(
            VERSION,
            [(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in records],
        )
    )


def encode(row: MarkersRow | Manifest) -> bytes:
    """The value of a markers row or a manifest."""
    return _encode(row)


def _decode(decoder: Any, value: bytes, what: str) -> Any:
    try:
        row = decoder.decode(value)
    except msgspec.MsgspecError as exc:
        raise RowError(f"damaged {what} of {len(value)} bytes: {exc}") from None
    if row.v != VERSION:
        raise RowError(f"{what} of version {row.v}; this worker reads version {VERSION}: upgrade it")
    return row


def decode_messages(value: bytes) -> MessagesRow:
    """Inverse of :func:`messages_row`; raises :exc:`RowError`."""
    row: MessagesRow = _decode(_messages, value, "messages row")
    return row


def decode_markers(value: bytes) -> MarkersRow:
    """Inverse of :func:`encode`; raises :exc:`RowError`."""
    row: MarkersRow = _decode(_markers, value, "markers row")
    return row


def decode_manifest(value: bytes) -> Manifest:
    """Inverse of :func:`encode`; raises :exc:`RowError`."""
    row: Manifest = _decode(_manifest, value, "manifest")
    return row


def checksum(value: bytes) -> int:
    """What a manifest says of a row's value: a row of an older write, or a torn one, doesn't match."""
    return zlib.crc32(value)


def row_key(partition: int, epoch: int, kind: Kind, number: int) -> str:
    """Key of a row. It contains the partition: a table's delete may otherwise hit another partition's row."""
    return f"{partition}/{epoch}/{kind}/{number}"


def kind_of(key: str) -> Kind:
    """The table that holds the row ``key``."""
    parts = key.split("/")
    if len(parts) == 4 and parts[2] == "messages":
        return "messages"
    if len(parts) == 4 and parts[2] == "markers":
        return "markers"
    raise RowError(f"row key {key!r} names no table")


def manifest_key(partition: int, epoch: int) -> str:
    """Key of a manifest."""
    return f"{partition}/{epoch}"
