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

Kind = Literal["messages", "markers", "dedup"]

KINDS: tuple[Kind, ...] = ("messages", "markers", "dedup")

Table = Literal["messages", "markers"]

DIGEST_BYTES = 16
"""Length of what an id is remembered by."""


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
    row); ``holds``: the deliveries of offsets in the block, below and above it; ``doubles``: those of the unfinished
    that are duplicates, and were not ended yet.
    """

    v: int
    block: int
    unfinished: Ranges
    holds: list[HoldRow]
    doubles: Ranges = []


class DedupRow(msgspec.Struct, array_like=True):
    """Ids of messages that were accepted, in the order of their offsets; the digests one behind the other."""

    v: int
    digests: bytes
    offsets: list[int]
    timestamps_ms: list[int]


class MessagesRow(msgspec.Struct, array_like=True):
    """Payloads of a segment: ``(offset, timestamp_ms, key, value, headers)`` each."""

    v: int
    messages: list[tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]]

    def records(self) -> list[Record]:
        """The messages as records of the queue topic."""
        return [Record(o, ts, key, value, tuple(headers)) for o, ts, key, value, headers in self.messages]


class Loss(msgspec.Struct, array_like=True, frozen=True):
    """Records that were deleted before an owner had read them, and that somebody has decided to go on without."""

    log: str  # queue, markers
    start: int
    stop: int
    unfinished: int  # messages among them that were not known to be done; of markers: that may be done in truth
    at_ms: int  # of log time


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
    copied: dict[int | str, tuple[int, int]]  # offset, elsewhere "partition:offset" -> first copy's offset, clock_ms
    counters: dict[str, int]
    lost: list[Loss] = []


_encode = msgspec.msgpack.Encoder().encode
_messages = msgspec.msgpack.Decoder(MessagesRow)
_markers = msgspec.msgpack.Decoder(MarkersRow)
_dedup = msgspec.msgpack.Decoder(DedupRow)
_manifest = msgspec.msgpack.Decoder(Manifest)


def messages_row(records: Sequence[Any]) -> bytes:
    """The messages row of ``records`` (anything with the attributes of :class:`Record`)."""
    return _encode(
        MessagesRow(
            VERSION,
            [(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in records],
        )
    )


def encode(row: MarkersRow | DedupRow | Manifest) -> bytes:
    """The value of a row of the markers table, or of a manifest."""
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


def decode_dedup(value: bytes) -> tuple[list[bytes], list[int], list[int]]:
    """Digests, offsets and timestamps of a dedup row; raises :exc:`RowError`."""
    row: DedupRow = _decode(_dedup, value, "dedup row")
    count = len(row.offsets)
    if len(row.timestamps_ms) != count or len(row.digests) != count * DIGEST_BYTES:
        raise RowError(f"damaged dedup row of {len(value)} bytes: its parts are not of the same length")
    digests = [row.digests[i : i + DIGEST_BYTES] for i in range(0, len(row.digests), DIGEST_BYTES)]
    return digests, row.offsets, row.timestamps_ms


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
    """What kind of row ``key`` is of."""
    parts = key.split("/")
    if len(parts) == 4:
        for kind in KINDS:
            if parts[2] == kind:
                return kind
    raise RowError(f"row key {key!r} names no table")


def table_of(key: str) -> Table:
    """The table that holds the row ``key``."""
    return "messages" if kind_of(key) == "messages" else "markers"


def manifest_key(partition: int, epoch: int) -> str:
    """Key of a manifest."""
    return f"{partition}/{epoch}"
