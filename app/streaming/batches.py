"""Decodes the record batches in the answer to a fetch: those of any client, and damaged ones.

aiokafka stops reading a partition at the first batch that it can't decode. There are two kinds here:
- The checksum is right, but the content is not: a client wrote it so. The damaged records become `Undecodable`, with
  the reason and the bytes, and reading goes on behind them.
- The checksum, the length or the offsets are wrong, or records are missing: a disk or the network has done it, because
  brokers check what clients send. Reading stops in front of such a *flaw*, and another replica may have it whole. Only
  what is given up becomes unreadable.

Of a batch with a flaw no single field is evidence. It ends where the next one begins, or where two fields agree that it
does. Otherwise it counts for one offset, and the next one is fetched. So reading always advances, and each lost offset
is reported.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatch
from msgspec import Struct

from app.streaming.compression import DecodingError, decompress
from marq.core.reading import BAD_NAME, UNDECODABLE, Undecodable, Unreadable

_V2 = struct.Struct(">qiibIhiqqqhii")  # the header of a batch, format 2
_BASE = struct.Struct(">q")
BASE_LENGTH = struct.Struct(">qi")  # offset and length, with which a batch of any format begins
_LENGTH_OFFSET, _MAGIC_OFFSET, _ATTRIBUTES_OFFSET = 8, 16, 21
_CODEC, _LOG_APPEND_TIME = 0x07, 0x08
_LEGACY_CRC_OFFSET, _LEGACY_MIN, _LEGACY_KEY = 12, 26, {0: 18, 1: 26}  # in formats 0 and 1; the key by format


class FetchedRecord(Struct, gc=False):
    """A record, with what is asked of one: aiokafka's own has eleven fields, and takes twice as long and three times
    the memory. It must not get a field that could be part of a cycle, because the garbage collector does not see it.
    """

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_type: int | None


class Fault(NamedTuple):
    """Offsets `[start, stop)` that can't be read, and why. There may be none.

    `batch_stop` is the end of their batch if other readers can't read on inside it; else 0. `is_flaw`: a disk or the
    network has done it; then `read_from` is the broker that had it whole after all, or -1.
    """

    start: int
    stop: int
    reason: str
    batch_stop: int = 0
    is_flaw: bool = False
    read_from: int = -1


# ------------------------------------------------------------------ single records, where a batch has a bad one


def _varint(data: Any, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise DecodingError("a number has no end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7


def _bytes(data: Any, at: int) -> tuple[bytes | None, int]:
    size, at = _varint(data, at)
    if size < 0:
        return None, at
    if at + size > len(data):
        raise DecodingError("a field is longer than its record")
    return bytes(data[at : at + size]), at + size


def _name(raw: bytes | None) -> str:
    if raw is None:
        raise DecodingError("a header has no name")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        # as Java's client does, use a replacement character, which the core knows; but keep the bytes, too
        return BAD_NAME + raw.decode(errors="backslashreplace")


class Flaw(NamedTuple):
    """Why a batch is not as a broker took it, and the offset behind it, as far as that can be told.

    `is_gap`: records in front of the batch are missing, up to `stop`.
    """

    reason: str
    stop: int = 0
    is_gap: bool = False


WHOLE = Flaw("")
#: No batch can be made out.
UNUSABLE = Flaw("the length or the offset of a batch is wrong")


def _batch_end(data: bytes, at: int) -> int:
    """Where the batch at `at` ends in the data; 0 if it does not end there."""
    if len(data) - at < BASE_LENGTH.size:
        return 0
    _, length = BASE_LENGTH.unpack_from(data, at)
    stop = at + BASE_LENGTH.size + int(length)
    return 0 if length <= _MAGIC_OFFSET - BASE_LENGTH.size or stop > len(data) else stop


def below(data: bytes, stop: int) -> tuple[int, bytes]:
    """The first batches, up to the last that begins below `stop`, and the offset behind them. They have no flaw."""
    at = behind = 0
    while end := _batch_end(data, at):
        raw = data[at:end]
        (base,), batch = _BASE.unpack_from(raw), _batch_of(raw)
        if base >= stop:
            break
        at, behind = end, base + 1 if batch is None else batch.next_offset
    return behind, data[:at]


def _batch_of(raw: bytes) -> Any:
    """A batch of format 2; None if it has another format."""
    return DefaultRecordBatch(raw) if raw[_MAGIC_OFFSET] == 2 and len(raw) >= _V2.size else None


class _Place(NamedTuple):
    """The fields of a record before its key."""

    offset: int
    timestamp: int
    at: int


def _place(data: Any, base: int, first_ms: int) -> _Place:
    delta_ms, at = _varint(data, 1)  # behind the attributes
    delta, at = _varint(data, at)
    return _Place(base + delta, first_ms + delta_ms, at)


def _fields(data: Any, at: int) -> tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]:
    key, at = _bytes(data, at)
    value, at = _bytes(data, at)
    count, at = _varint(data, at)
    if not 0 <= count <= len(data):
        raise DecodingError("the number of its headers is wrong")
    headers = []
    for _ in range(count):
        name, at = _bytes(data, at)
        content, at = _bytes(data, at)
        headers.append((_name(name), content))
    if at != len(data):
        raise DecodingError("it has another length than it says")
    return key, value, tuple(headers)


# ------------------------------------------------------------------ what was fetched of one partition


class FetchedRecords:
    """Iterates over the records of one partition in the answer to a fetch.

    It takes the place of aiokafka's `PartitionRecords` in a `FetchResult`, for a reader of committed records. It ends
    in front of a flaw, unless that is given up.

    Args:
        data: the batches; the last one may be cut off.
        aborted: transactions `(producer id, first offset)` in them that were aborted.
        position: the offset that was asked for.
        end: the offset after the last of the log (-1: not known).
        given_up: the offsets at which a flaw becomes records that can't be read.
        contiguous: the log is not compacted, so each batch begins where the one before it ends.
        since_ms: when the log was last seen to end at `position` or below, on the clock of `marq.clock`; None: never.
            It is None behind a timestamp that is its producer's, which tells nothing of the broker's clock.
        on_fault: called with each fault.
    """

    def __init__(
        self,
        data: bytes,
        aborted: Sequence[tuple[int, int]] | None,
        position: int,
        *,
        end: int = -1,
        given_up: Container[int] = (),
        contiguous: bool = False,
        since_ms: int | None = None,
        on_fault: Callable[[Fault], None] = lambda fault: None,
    ) -> None:
        self._data = data
        self._aborted = sorted(aborted or (), key=lambda transaction: transaction[1])
        self._aborted_producers: set[int] = set()
        self._end = end
        self._given_up = given_up
        self._contiguous = contiguous
        self.since_ms = since_ms
        self._on_fault = on_fault
        self._timestamp = -1  # of the last record, for records whose own is unknown
        self._batch_stop = 0  # where this batch ends, if it can be trusted
        #: Position after what was taken so far.
        self.next_fetch_offset = position
        self._records = self._unpack()

    def __iter__(self) -> Iterator[Any]:
        return self._records

    def __next__(self) -> Any:
        return next(self._records)

    def first_flaw(self) -> Flaw | None:
        """What is wrong with the data at the position; None if something can be read there. Call it before iterating.

        `UNUSABLE` is also what an answer looks like that has been cut off within its first batch.
        """
        stop = _batch_end(self._data, 0)
        if not stop:
            return UNUSABLE
        raw = self._data[:stop]
        batch = _batch_of(raw)
        flaw = self._flaw(0, stop, raw, batch)
        if flaw.reason:
            return flaw
        last = batch.next_offset - 1 if batch is not None else _BASE.unpack_from(raw)[0]
        return None if last >= self.next_fetch_offset else UNUSABLE

    def _unpack(self) -> Iterator[Any]:
        data, at, asked = self._data, 0, self.next_fetch_offset
        while stop := _batch_end(data, at):
            raw = data[at:stop]
            batch = _batch_of(raw)
            flaw = self._flaw(at, stop, raw, batch)
            if not flaw.reason:
                yield from self._batch(batch, raw)
            elif self.next_fetch_offset not in self._given_up:
                return
            else:
                yield self._unreadable(flaw.stop, flaw.reason, None if flaw.is_gap else raw)
            if not flaw.is_gap:
                at = stop
        self._data = b""
        if self.next_fetch_offset == asked and asked in self._given_up:
            # the position did not advance, so the next fetch would return the same
            yield self._unreadable(asked + 1, UNUSABLE.reason, data)

    def _flaw(self, at: int, stop: int, raw: bytes, batch: Any) -> Flaw:
        """What is wrong with the batch at `at` in the data, which ends at `stop`."""
        magic = raw[_MAGIC_OFFSET]
        if batch is not None:
            base, position = batch.base_offset, self.next_fetch_offset
            if not batch.validate_crc():
                reason = "its checksum is wrong"
            elif batch.next_offset <= base or (self._contiguous and at and base < position):
                reason = "its offsets are wrong"
            elif self._contiguous and base > position:
                if self._next_base(stop) in (None, batch.next_offset) and not 0 <= self._end <= base:
                    return Flaw("the records before the next batch are missing", base, is_gap=True)
                reason = "its offsets are wrong"
            else:
                return WHOLE
        elif magic in (0, 1) and len(raw) >= _LEGACY_MIN:
            if zlib.crc32(memoryview(raw)[_MAGIC_OFFSET:]) == struct.unpack_from(">I", raw, _LEGACY_CRC_OFFSET)[0]:
                return WHOLE
            reason = "its checksum is wrong"
        else:
            reason = "it is shorter than its header" if magic <= 2 else f"unknown format {magic}"
        return Flaw(reason, self._end_of(raw, stop))

    def _batch(self, batch: Any, raw: bytes) -> Iterator[Any]:
        """The records of one batch without a flaw."""
        self._batch_stop = 0
        if batch is None or not batch.attributes & _LOG_APPEND_TIME:
            self.since_ms = None
        if batch is None:
            yield from self._legacy(raw)
            return
        self._batch_stop = batch.next_offset
        if self._is_message(batch):
            yield from self._records_of(batch, raw)
        # behind the last existing record: later ones may have been compacted away
        self.next_fetch_offset = max(self.next_fetch_offset, batch.next_offset)

    def _is_message(self, batch: Any) -> bool:
        """False for control records and aborted transactions, which readers of committed records do not get."""
        while self._aborted and self._aborted[0][1] <= batch.base_offset:
            self._aborted_producers.add(self._aborted.pop(0)[0])
        if batch.is_control_batch:
            if batch.producer_id in self._aborted_producers and _ends_aborted(batch):
                self._aborted_producers.discard(batch.producer_id)
            return False
        return not (batch.is_transactional and batch.producer_id in self._aborted_producers)

    def _records_of(self, batch: Any, raw: bytes) -> Iterator[Any]:
        body: Any = None
        try:
            if batch.compression_type:
                body = decompress(batch.compression_type, raw[_V2.size :])
                batch = DefaultRecordBatch(_uncompressed(raw, body))
            yield from self._take(batch)
        except Exception as exc:
            # the decoder raises many kinds of errors for damaged records
            if batch.compression_type and body is None:
                yield from self._give_up(batch.base_offset, batch.next_offset, str(exc), raw, batch.max_timestamp)
            else:
                yield from self._singly(batch, raw, memoryview(raw)[_V2.size :] if body is None else body)

    def _take(self, records: Any) -> Iterator[Any]:
        for record in records:
            offset = record.offset
            if offset < self.next_fetch_offset:
                continue  # the batch begins before what was asked for
            timestamp = record.timestamp
            if timestamp is None:
                timestamp = -1  # format 0 has none
            self._timestamp = timestamp
            self.next_fetch_offset = offset + 1
            yield FetchedRecord(
                offset, timestamp, record.key, record.value, tuple(record.headers), record.timestamp_type
            )

    def _singly(self, batch: Any, raw: bytes, body: Any) -> Iterator[Any]:
        """The records of a batch with at least one damaged record, one by one, except those taken already."""
        base, stop = batch.base_offset, batch.next_offset
        broker_time = batch.attributes & _LOG_APPEND_TIME
        count = _V2.unpack_from(raw)[-1]
        expected, at = base, 0
        for _ in range(count):
            try:
                size, begin = _varint(body, at)
                if size <= 0 or begin + size > len(body):
                    raise DecodingError("a record is longer than its batch")
                record = body[begin : begin + size]
                at = begin + size
                place = _place(record, base, batch.first_timestamp)
                if not expected <= place.offset < stop:
                    raise DecodingError("the offset of a record is wrong")
            except DecodingError as exc:
                yield from self._give_up(expected, stop, str(exc), bytes(body[at:]) or raw, batch.max_timestamp)
                return
            expected = place.offset + 1
            if place.offset < self.next_fetch_offset:
                continue
            timestamp = batch.max_timestamp if broker_time else place.timestamp
            try:
                key, value, headers = _fields(record, place.at)
            except DecodingError as exc:
                yield from self._give_up(place.offset, expected, str(exc), bytes(record), timestamp)
                continue
            if any(name.startswith(BAD_NAME) for name, _ in headers):
                self._on_fault(Fault(place.offset, expected, "the name of a header is not UTF-8"))
            self._timestamp = timestamp
            self.next_fetch_offset = expected
            yield FetchedRecord(place.offset, timestamp, key, value, headers, int(bool(broker_time)))
        if at != len(body):
            reason = "the number of its records is wrong"
            yield from self._give_up(expected, stop, reason, bytes(body[at:]), batch.max_timestamp)

    def _legacy(self, raw: bytes) -> Iterator[Any]:
        """A message of format 0 or 1, or a compressed set of messages, which has the offset of its last message."""
        (base,), magic = _BASE.unpack_from(raw), raw[_MAGIC_OFFSET]
        try:
            batch = LegacyRecordBatch(raw, magic)
            if raw[_MAGIC_OFFSET + 1] & _CODEC:
                _check_legacy(raw, magic)
            yield from self._take(batch)
        except Exception as exc:
            # only the last offset of the set is known; it covers the unknown ones before it
            yield from self._give_up(self.next_fetch_offset, base + 1, str(exc), raw)
        self.next_fetch_offset = max(self.next_fetch_offset, base + 1)

    # -- what can't be read

    def _end_of(self, raw: bytes, stop: int) -> int:
        """The offset behind a batch of which no single field can be trusted."""
        start = self.next_fetch_offset  # even if the batch claims to begin later: that field may be the damaged one
        end = self._next_base(stop)
        if end is None and len(raw) >= _V2.size:
            header = _V2.unpack_from(raw)
            base, last, count = header[0], header[6], header[12]
            if count == last + 1 > 0 and base <= start and (self._end < 0 or base + count <= self._end):
                end = base + count
        return start + 1 if end is None or end <= start else end

    def _next_base(self, at: int) -> int | None:
        """The base offset of the batch at `at` in the data, if it is plausible."""
        if len(self._data) - at <= _MAGIC_OFFSET:
            return None
        base, length = BASE_LENGTH.unpack_from(self._data, at)
        beyond = 0 <= self._end <= base
        if base <= self.next_fetch_offset or beyond or length <= 0 or self._data[at + _MAGIC_OFFSET] > 2:
            return None
        return int(base)

    def _unreadable(self, stop: int, reason: str, raw: bytes | None) -> Unreadable:
        """Give up what lies from here up to `stop`, because of a flaw."""
        start, self.next_fetch_offset = self.next_fetch_offset, stop
        self._on_fault(Fault(start, stop, reason, stop, is_flaw=True))
        return Unreadable(start, self._timestamp, stop, reason, raw)

    def _give_up(
        self, start: int, stop: int, reason: str, raw: bytes, timestamp: int | None = None
    ) -> Iterator[Undecodable]:
        """Yield unreadable offsets. The first one carries the bytes."""
        start = max(start, self.next_fetch_offset)
        # A batch may have a fault although all its records can be read: then no offset is lost.
        stop = max(start, stop)
        self._on_fault(Fault(start, stop, reason, max(stop, self._batch_stop)))
        if timestamp is not None:
            self._timestamp = timestamp
        value: bytes | None = raw
        text = f"{UNDECODABLE}: {reason}"
        for offset in range(start, stop):
            self.next_fetch_offset = offset + 1
            yield Undecodable(offset, self._timestamp, value, text)
            value, text = None, f"{UNDECODABLE}, with offset {start}: {reason}"


def _ends_aborted(batch: Any) -> bool:
    # A control record ends its transaction even if it can't be read: the following records must be seen.
    try:
        return bool(ControlRecord.parse(next(iter(batch)).key) == ABORT_MARKER)
    except Exception:
        return True


def _uncompressed(raw: bytes, body: Any) -> bytes:
    """The batch with its records decompressed. Its checksum stays as it was."""
    head = bytearray(raw[: _V2.size])
    struct.pack_into(">i", head, _LENGTH_OFFSET, len(head) + len(body) - BASE_LENGTH.size)
    (attributes,) = struct.unpack_from(">h", head, _ATTRIBUTES_OFFSET)
    struct.pack_into(">h", head, _ATTRIBUTES_OFFSET, attributes & ~_CODEC)
    return b"".join((head, body))


def _check_legacy(raw: bytes, magic: int) -> None:
    """Decompress a set of messages within the limit; aiokafka has none. Raises `DecodingError`."""
    at = _LEGACY_KEY[magic]
    try:
        for _ in range(2):  # the key, then the value
            (size,) = struct.unpack_from(">i", raw, at)
            begin = at + 4
            at = begin + max(size, 0)
    except struct.error:
        raise DecodingError("a field is longer than its record") from None
    decompress(raw[_MAGIC_OFFSET + 1] & _CODEC, raw[begin:at])
