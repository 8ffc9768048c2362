"""Rows and manifests: the form in which the state of a partition is stored.

Rows are immutable. Each has a key of its own, ``<partition>/<epoch>/<kind>/<id>``, and is named with its checksum by
the manifest ``<partition>/<epoch>``, or by a row that the manifest names:

    manifest ─► pages ────► index, messages    segments of messages with their payload, below the position
            ├─► markers                        deliveries of messages above the position, in blocks of offsets
            └─► dedup                          ids of messages

Values are msgpack with a version first; no Faust is needed to read them.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from marq.core.ranges import Ranges
from marq.core.world import World
from marq.errors import NewerRowError, RowError

#: Version of rows.
VERSION = 1
#: Versions of manifests. In version 1 the manifest named each row, and markers rows said what was unfinished.
MANIFEST_VERSION = 2

Kind = Literal["messages", "index", "pages", "markers", "dedup", "origins"]

KINDS: tuple[Kind, ...] = ("messages", "index", "pages", "markers", "dedup", "origins")

#: Numbers in the ranges of done offsets above which a manifest has them compressed.
PACKED_MIN = 64

Table = Literal["messages", "markers"]

#: Length of what an id is remembered by.
DIGEST_BYTES = 16


class Record(NamedTuple):
    """One record of the queue topic, as the core reads it. aiokafka's ConsumerRecord has the same attributes."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


class DeliveryRow(msgspec.Struct, array_like=True):
    """The delivery state that ``offsets`` share."""

    epoch: int
    delivery: int
    receives: int
    deadline_ms: int
    leased: bool
    receiver: str
    offsets: Ranges


class MarkersRow(msgspec.Struct, array_like=True):
    """In-progress state of one block of offsets at or above the manifest's queue position.

    ``deliveries``: those of offsets in the block. ``unfinished`` and ``duplicates``: as in version 1 of the manifest,
    which had no pages, for the offsets below its position; empty since.
    """

    v: int
    block: int
    unfinished: Ranges
    deliveries: list[DeliveryRow]
    duplicates: Ranges = []


class SegmentState(msgspec.Struct, array_like=True):
    """A segment in a page: its messages row is ``<partition>/<epoch>/messages/<number>``, its index row likewise.

    ``done``: which of its messages are done, a bit each, the first one lowest; empty: none is.
    """

    epoch: int
    number: int
    checksum: int
    index_checksum: int
    done: bytes


class PageRow(msgspec.Struct, array_like=True):
    """State of some adjacent segments: what is done, the deliveries, and which of the messages are duplicates."""

    v: int
    segments: list[SegmentState]
    deliveries: list[DeliveryRow]
    duplicates: Ranges


class IndexRow(msgspec.Struct, array_like=True):
    """Everything about the messages of a segment except their payloads. Like the messages row, it never changes.

    ``gaps`` has the distances between the offsets, and is empty if each is 1. ``lanes`` has the queues (None: poison)
    and groups in it; ``of`` has the lane of each message, and is empty if there is one lane. ``delays`` and ``ttls``
    have pairs: the number of a message in the segment, and when its delay or time to live ends.
    """

    v: int
    row_bytes: int
    first: int
    count: int
    gaps: list[int]
    lanes: list[tuple[str | None, int]]
    of: list[int]
    delays: list[int]
    ttls: list[int]

    def offsets(self) -> Sequence[int]:
        """The offsets of the messages, ascending."""
        if not self.gaps:
            return range(self.first, self.first + self.count)
        return array("q", itertools.accumulate(self.gaps, initial=self.first))


class DedupRow(msgspec.Struct, array_like=True):
    """Ids of accepted messages, or origins of copies, in the order of their offsets. The digests are concatenated."""

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
    """Records that were deleted before an owner had read them, and that were given up, by a repair or in topic mode."""

    log: str  # queue, markers
    start: int
    stop: int
    unfinished: int  # messages among them that were not known to be done; of markers: that may be done in truth
    at_ms: int  # of log time


class Manifest(msgspec.Struct):
    """Everything that recovery needs besides the rows that it names, directly or through pages."""

    v: int
    epoch: int  # of the owner that wrote it
    rows: dict[str, int]  # key -> checksum of pages, markers and dedup rows
    position: int  # of the queue topic: below it, what no row names is done
    markers_position: int
    done: Ranges  # at or above ``position``
    clock_ms: int
    last_timestamp_ms: int
    own: int  # last folded own marker
    delivery: int  # highest delivery number folded in that epoch
    purges: dict[str, int]  # queue -> before, where still above ``position``
    counters: dict[str, int]
    ids_skipped: int = 0  # so many of the ids in dedup rows are forgotten already, from the first one on …
    origins_skipped: int = 0  # … and of those in origins rows
    packed_done: bytes = b""  # ``done`` when it is long: zlib of msgpack of the distances between its numbers
    broker_ms: int = -1  # broker time, as ticks have told it
    tick_ms: int = -1  # stamp of the last tick of version 0.2
    # of version 0.1: offset, elsewhere "partition:offset" -> first copy's offset, clock_ms; rows of "origins" since
    copied: dict[int | str, tuple[int, int]] = {}
    lost: list[Loss] = []
    newest_ms: int | None = None  # greatest timestamp of the queue topic's records that were read; None: not known
    world: World | None = None  # of the logs that it was made from; None: not known
    told_ms: int | None = None  # what the clock of the markers topic showed at ``broker_ms``; None: the same
    unreadable: Ranges = []  # below ``position``, unfinished: could not be read in time, and are in no row


_encode = msgspec.msgpack.Encoder().encode
_messages = msgspec.msgpack.Decoder(MessagesRow)
_markers = msgspec.msgpack.Decoder(MarkersRow)
_pages = msgspec.msgpack.Decoder(PageRow)
_index = msgspec.msgpack.Decoder(IndexRow)
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


def encode(row: MarkersRow | PageRow | IndexRow | DedupRow) -> bytes:
    """The value of a row of the markers table."""
    return _encode(row)


def encode_manifest(manifest: Manifest) -> bytes:
    """The value of a manifest."""
    if len(manifest.done) > PACKED_MIN:
        gaps = [manifest.done[0], *(b - a for a, b in itertools.pairwise(manifest.done))]
        packed = zlib.compress(msgspec.msgpack.encode(gaps), 1)
        manifest = msgspec.structs.replace(manifest, done=[], packed_done=packed)
    return _encode(manifest)


def _decode(decoder: Any, value: bytes, what: str, versions: Sequence[int] = (VERSION,)) -> Any:
    try:
        row = decoder.decode(value)
    except msgspec.MsgspecError as exc:
        _check_version(value, what, versions[-1])
        raise RowError(f"damaged {what} of {len(value)} bytes: {exc}") from None
    if row.v not in versions:
        _check_version(value, what, versions[-1])
        raise RowError(f"{what} of version {row.v}; this worker reads version {versions[-1]}")
    return row


def _check_version(value: bytes, what: str, newest: int) -> None:
    """Raises `NewerRowError` for a later version, of which no more than the place of its number is known."""
    try:
        found: Any = msgspec.msgpack.decode(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return
    version = found.get("v") if isinstance(found, dict) else found[0] if isinstance(found, list) and found else None
    if isinstance(version, int) and not isinstance(version, bool) and newest < version < 1 << 16:
        raise NewerRowError(
            f"{what} of version {version}, and this worker reads up to version {newest}: "
            f"run a marq that knows version {version}"
        )


def decode_messages(value: bytes) -> MessagesRow:
    """Inverse of :func:`messages_row`; raises :exc:`RowError`."""
    row: MessagesRow = _decode(_messages, value, "messages row")
    return row


def decode_markers(value: bytes) -> MarkersRow:
    """Inverse of :func:`encode`; raises :exc:`RowError`."""
    row: MarkersRow = _decode(_markers, value, "markers row")
    return row


def decode_page(value: bytes) -> PageRow:
    """Inverse of :func:`encode`; raises :exc:`RowError`."""
    row: PageRow = _decode(_pages, value, "page")
    return row


def decode_index(value: bytes) -> IndexRow:
    """Inverse of :func:`encode`; raises :exc:`RowError`."""
    row: IndexRow = _decode(_index, value, "index row")
    if len(row.gaps) not in (0, row.count - 1) or len(row.of) not in (0, row.count) or not row.lanes:
        raise RowError(f"damaged index row of {len(value)} bytes: its parts are not of the same length")
    return row


def decode_marker_row(kind: Kind, value: bytes) -> MarkersRow | PageRow | IndexRow:
    """A row of the markers table of this kind, except ids; raises :exc:`RowError`."""
    if kind == "pages":
        return decode_page(value)
    return decode_index(value) if kind == "index" else decode_markers(value)


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
    row: Manifest = _decode(_manifest, value, "manifest", (1, MANIFEST_VERSION))
    if row.packed_done:
        try:
            gaps = msgspec.msgpack.decode(zlib.decompress(row.packed_done), type=list[int])
        except (zlib.error, msgspec.MsgspecError) as exc:
            raise RowError(f"damaged manifest of {len(value)} bytes: {exc}") from None
        row.done, row.packed_done = list(itertools.accumulate(gaps)), b""
    return row


def named_rows(partition: int, manifest: Manifest, load: Callable[[str], bytes]) -> Iterator[tuple[str, int]]:
    """Key and checksum of every row that counts: those of the manifest, and those that its pages name.

    ``load`` reads a row by its key. Raises :exc:`RowError`.
    """
    for key, expected in manifest.rows.items():
        yield key, expected
        if kind_of(key) == "pages":
            for s in decode_page(loaded(load, key, expected)).segments:
                yield row_key(partition, s.epoch, "messages", s.number), s.checksum
                yield row_key(partition, s.epoch, "index", s.number), s.index_checksum


def loaded(load: Callable[[str], bytes], key: str, expected: int) -> bytes:
    """The row ``key`` with the checksum that it has to have. Raises :exc:`RowError`."""
    value = load(key)
    if checksum(value) != expected:
        raise RowError(f"row {key} does not have the checksum that the manifest names")
    return value


def checksum(value: bytes) -> int:
    """The checksum by which a manifest names a row: an older or torn row does not match it."""
    return zlib.crc32(value)


def row_key(partition: int, epoch: int, kind: Kind, number: int) -> str:
    """Key of a row. It contains the partition: a table's delete may otherwise hit another partition's row."""
    return f"{partition}/{epoch}/{kind}/{number}"


def index_key_of(messages_key: str) -> str:
    """Key of the index row that belongs to a messages row."""
    return messages_key.replace("/messages/", "/index/")


def epoch_and_number_of(key: str) -> tuple[int, int]:
    """The number of the row ``key`` among those of its kind."""
    _, epoch, _, number = key.split("/")
    return int(epoch), int(number)


def kind_of(key: str) -> Kind:
    """The kind of the row ``key``."""
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
