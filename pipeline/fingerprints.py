"""Fingerprints of messages, and rows of tables in which they replace payloads, so that payloads need not be moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import msgspec

from marq.core import rows
from marq.core.reading import BAD_NAME, is_too_large
from marq.core.state import stored_size
from marq.errors import RowError
from marq.protocol.headers import H_ORIGIN, RESERVED
from pipeline.walk import TOO_LARGE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

#: Replaces a messages row that can't be read.
DAMAGED = b""
#: A messages row without payloads begins with the checksum of the original row, of this many bytes.
CHECKSUM_BYTES = 4


def fingerprint(
    timestamp_ms: int, key: bytes | None, headers: Sequence[tuple[str, bytes | None]], payload: bytes | None
) -> int:
    """A checksum of the whole message; `fingerprint_column` computes the same in Spark."""
    listed = ";".join(f"{name}={'-' if value is None else value.hex().upper()}" for name, value in headers)
    head = f"{timestamp_ms}|{_length(key)}|{_length(payload)}|{listed}|".encode()
    return crc32(payload or b"", crc32(key or b"", crc32(head)))


def _length(value: bytes | None) -> int:
    return -1 if value is None else len(value)


def fingerprint_column(timestamp_ms: Any, key: Any, headers: Any, payload: Any) -> Column:
    """`fingerprint` in Spark, of columns by name or of expressions."""
    from pyspark.sql import functions as F

    key, headers, payload = (F.col(c) if isinstance(c, str) else c for c in (key, headers, payload))
    listed = F.array_join(
        F.transform(headers, lambda h: F.concat(h["key"], F.lit("="), F.coalesce(F.hex(h["value"]), F.lit("-")))),
        ";",
    )
    head = F.concat(
        (F.col(timestamp_ms) if isinstance(timestamp_ms, str) else timestamp_ms).cast("string"),
        F.lit("|"),
        F.coalesce(F.length(key), F.lit(-1)).cast("string"),
        F.lit("|"),
        F.coalesce(F.length(payload), F.lit(-1)).cast("string"),
        F.lit("|"),
        F.coalesce(listed, F.lit("")),
        F.lit("|"),
    ).cast("binary")
    nothing = F.lit(b"")
    return F.crc32(F.concat(head, F.coalesce(key, nothing), F.coalesce(payload, nothing)))


# ------------------------------------------------------------------ rows


def strip_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows with their payloads -> rows without (`stripped`), in batches with the columns ``key`` and ``value``."""
    import pyarrow as pa

    for batch in batches:
        keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
        less = [value if not value else stripped(key.decode(), value) for key, value in zip(keys, values, strict=True)]
        columns = {name: batch.column(name) for name in batch.schema.names} | {"value": pa.array(less, pa.binary())}
        yield pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def stripped(key: str, value: bytes) -> bytes:
    """The row, unless it has payloads: then its checksum and a row of fingerprints, or `DAMAGED` if unreadable."""
    try:
        if rows.kind_of(key) != "messages":
            return value
        records = rows.decode_messages(value).records()
    except RowError:
        return DAMAGED
    less = rows.messages_row([_without_payload(record) for record in records])
    return rows.checksum(value).to_bytes(CHECKSUM_BYTES, "big") + less


def _without_payload(record: rows.Record) -> rows.Record:
    copied = any(name == H_ORIGIN for name, _ in record.headers)
    number = fingerprint(record.timestamp, record.key, record.headers, record.value)
    special = [header for header in record.headers if header[0].startswith(RESERVED) or BAD_NAME in header[0]]
    value = TOO_LARGE if is_too_large(stored_size(record), copied) else number.to_bytes(4, "big")
    return record._replace(value=value, headers=special)


class Tables(NamedTuple):
    """A manifest and the rows that it names: messages rows without payloads, and checksums to match."""

    manifest: rows.Manifest
    rows: dict[str, bytes]


def without_payloads(number: int, manifest: rows.Manifest, less: Mapping[str, bytes]) -> Tables:
    """What a recovery would use of rows that were `stripped`. Raises `RowError` for a missing or damaged row."""
    kept: dict[str, bytes] = {}

    def named(key: str, checksum: int) -> int:
        value = less.get(key)
        if value is None:
            raise RowError(f"row {key} is named by the manifest of epoch {manifest.epoch}, but it is not in the table")
        good = checksum == rows.checksum(value)
        if rows.kind_of(key) == "messages":
            good = value != DAMAGED and checksum == int.from_bytes(value[:CHECKSUM_BYTES], "big")
            value = value[CHECKSUM_BYTES:]
        if not good:
            raise RowError(f"row {key} does not have the checksum that the manifest of epoch {manifest.epoch} names")
        kept[key] = value
        return rows.checksum(value)

    checksums: dict[str, int] = {}
    for key, checksum in manifest.rows.items():
        checksums[key] = named(key, checksum)
        if rows.kind_of(key) == "pages":
            page = rows.decode_page(kept[key])
            for s in page.segments:
                s.checksum = named(rows.row_key(number, s.epoch, "messages", s.number), s.checksum)
                named(rows.row_key(number, s.epoch, "index", s.number), s.index_checksum)
            kept[key] = rows.encode(page)
            checksums[key] = rows.checksum(kept[key])
    return Tables(msgspec.structs.replace(manifest, rows=checksums), kept)


def fingerprints(less: Iterable[bytes]) -> dict[int, int | None]:
    """The fingerprint of each message in stripped rows; None for one that is too large to keep one."""
    found: dict[int, int | None] = {}
    for value in less:
        for record in rows.decode_messages(value).records():
            body = record.value or b""
            found[record.offset] = int.from_bytes(body, "big") if len(body) == 4 else None
    return found
