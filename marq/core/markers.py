"""The records of the markers topic: JSON, readable in any Kafka tool and by Spark.

One record is a batch ``{"v": 1, "by": …, "seq": …, "markers": […]}`` whose markers are folded in order, at one moment
of log time. ``by`` names the writer's incarnation and ``seq`` numbers its records, so that a writer recognises its own;
the fold never looks at them. Times are milliseconds, offsets are flat half-open ranges.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from marq.core.ranges import Ranges, count, well_formed
from marq.errors import MarkerError, NewerVersionError

#: Version of the record format; the owner of a partition stops at a sealed record of a later one.
VERSION = 1

#: Bytes of a record at most; a larger batch is split.
RECORD_BYTES = 512 * 1024

#: Offsets that a record may name: a range of billions, made by mistake, must not stop each owner that folds it.
RECORD_OFFSETS = 1 << 24

#: An epoch, a delivery number, an offset.
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

#: A duration.
Millis = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

Outcome = Literal["acked", "dead", "expired", "purged", "poison", "moved"]


class Own(msgspec.Struct, tag="own", tag_field="type", frozen=True):
    """A worker takes the partition. The offset of its record is the epoch. It is always alone in its record.

    ``nonce`` names the attempt, so that a worker does not mistake an older ``own`` of its own for its newest.
    """

    worker: str
    nonce: str


class Start(msgspec.Struct, tag="start", tag_field="type", omit_defaults=True):
    """Delivery of ``offsets`` has started, for ``redeliver_after_ms``.

    ``(epoch, delivery)`` identifies it: receipt and fence. ``receives`` (the highest among its messages) is information
    only; the count that users see is derived in the fold.
    """

    epoch: Number
    delivery: Number
    offsets: Ranges
    redeliver_after_ms: Millis
    receiver: str = ""
    receives: int = 1


class Keepalive(msgspec.Struct, tag="keepalive", tag_field="type"):
    """The receiver is still working: the deadline moves to now + ``redeliver_after_ms``."""

    epoch: Number
    delivery: Number
    offsets: Ranges
    redeliver_after_ms: Millis


class Release(msgspec.Struct, tag="release", tag_field="type", omit_defaults=True):
    """The messages are given back, and ready after ``delay_ms``. ``counted=False``: they were never handed out."""

    epoch: Number
    delivery: Number
    offsets: Ranges
    delay_ms: Millis = 0
    counted: bool = True


class End(msgspec.Struct, tag="end", tag_field="type", omit_defaults=True):
    """The messages are done. An ack has the receiver's ``(epoch, delivery)``, other outcomes have the owner's epoch."""

    epoch: Number
    offsets: Ranges
    outcome: Outcome = "acked"
    delivery: Number = 0


class Purge(msgspec.Struct, tag="purge", tag_field="type"):
    """All messages of ``queue`` below offset ``before`` are done."""

    epoch: Number
    queue: str
    before: Number


class Tick(msgspec.Struct, tag="tick", tag_field="type", omit_defaults=True):
    """Time passes. ``fence`` names the checkpoint whose deletions wait for this tick to be folded.

    A tick with ``time_ms`` tells broker time: what the clock that stamps messages shows, at most. ``clock_ms`` is what
    its writer believes that the clock of the markers topic shows at that moment. If the timestamp of the record differs
    much, one of the two is wrong, and the tick tells nothing. Ticks of version 0.2 have neither: their timestamps tell
    broker time, if they are ``sure``.
    """

    fence: str = ""
    sure: bool = True
    epoch: Number = 0
    time_ms: Number = 0
    clock_ms: Number = 0


Marker = Own | Start | Keepalive | Release | End | Purge | Tick


class Batch(msgspec.Struct, omit_defaults=True):
    """The value of one record of the markers topic."""

    v: int
    markers: list[Marker]
    by: str = ""
    seq: Number = 0


class _Version(msgspec.Struct):
    """The part of a record that is read when the rest can't be read."""

    v: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Batch)
_version_decoder = msgspec.json.Decoder(_Version)


def encode(markers: list[Marker], by: str = "", seq: int = 0) -> bytes:
    """The value of a record that carries ``markers``."""
    return _encoder.encode(Batch(VERSION, markers, by, seq))


def decode(value: bytes | None) -> Batch:
    """The batch in a record's ``value``.

    Raises:
        MarkerError: it is no batch, or has malformed or far too large ranges. Such a record only moves the clock.
        NewerVersionError: it says that it is of a later version. Without a seal of the installation it is only a record
            that can't be read (`marq.core.versions.is_of_installation`).
    """
    if value is None:
        raise MarkerError("a marker record without a value")
    try:
        batch = _decoder.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        _check_version(value)
        raise MarkerError(f"not a marker record: {exc}") from None
    if batch.v > VERSION:
        _check_version(value)
    if batch.v < 1:
        raise MarkerError(f"marker record of version {batch.v}")
    offsets = 0
    for marker in batch.markers:
        ranges = getattr(marker, "offsets", None)
        if ranges:
            if not well_formed(ranges):
                raise MarkerError(f"malformed offset ranges in a {type(marker).__name__.lower()} marker: {ranges[:8]}")
            offsets += count(ranges)
            if offsets > RECORD_OFFSETS or ranges[-1] >= 1 << 62:
                raise MarkerError(f"a marker record for more than {RECORD_OFFSETS} offsets, or beyond all of them")
        if isinstance(marker, Own) and len(batch.markers) > 1:
            raise MarkerError("an own marker must be alone in its record")
    return batch


def _check_version(value: bytes) -> None:
    try:
        version = _version_decoder.decode(value).v
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if version > VERSION:
        raise NewerVersionError(
            f"a marker record of version {version}, and this worker reads up to version {VERSION}: "
            f"run a marq that knows version {version}"
        )


def is_owners(marker: Marker) -> bool:
    """True if only the owner of the partition may write this marker. Any worker writes the others, for receivers."""
    kind = type(marker)
    return kind in (Own, Start, Purge, Tick) or (kind is End and marker.outcome != "acked")  # type: ignore[union-attr]


def weight(marker: Marker) -> int:
    """An upper bound of the bytes that ``marker`` takes in a record."""
    ranges = getattr(marker, "offsets", ())
    names = len(getattr(marker, "receiver", "")) + len(getattr(marker, "queue", ""))
    return 200 + 20 * len(ranges) + 6 * names  # a character takes up to 6 bytes in JSON


def split(marker: Marker) -> list[Marker]:
    """Split ``marker`` into markers that each fit a record. All parts of a delivery have its number."""
    ranges = getattr(marker, "offsets", ())
    step = (RECORD_BYTES - 8192) // 40 * 2
    if len(ranges) <= step:
        return [marker]
    return [msgspec.structs.replace(marker, offsets=ranges[i : i + step]) for i in range(0, len(ranges), step)]
