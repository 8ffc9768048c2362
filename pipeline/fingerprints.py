"""Fingerprints of messages, and rows of tables that have them in place of payloads: so payloads need not travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

from marq.core import rows
from marq.core.partition import H_ORIGIN
from marq.core.reading import BAD_NAME, is_too_large
from marq.core.state import stored_size
from marq.errors import RowError
from marq.message import RESERVED
from pipeline.walk import TOO_LARGE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

#: Value of a row that does not have the checksum that its manifest names.
DAMAGED = b""


def fingerprint(
    timestamp_ms: int, key: bytes | None, headers: Sequence[tuple[str, bytes | None]], payload: bytes | None
) -> int:
    """A checksum of all of a message; `fingerprint_column` computes the same in Spark."""
    listed = ";".join(f"{name}={'-' if value is None else value.hex().upper()}" for name, value in headers)
    head = f"{timestamp_ms}|{_length(key)}|{_length(payload)}|{listed}|".encode()
    return crc32(payload or b"", crc32(key or b"", crc32(head)))


def _length(value: bytes | None) -> int:
    return -1 if value is None else len(value)


def fingerprint_column(timestamp_ms: Any, key: Any, headers: Any, payload: Any) -> Column:
    """`fingerprint` of the columns of these names, or expressions."""
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
    """A row with fingerprints in place of payloads; `DAMAGED` if it can't be read."""
    try:
        if rows.kind_of(key) != "messages":
            return value
        records = rows.decode_messages(value).records()
    except RowError:
        return DAMAGED
    return rows.messages_row([_without_payload(record) for record in records])


def _without_payload(record: rows.Record) -> rows.Record:
    copied = any(name == H_ORIGIN for name, _ in record.headers)
    number = fingerprint(record.timestamp, record.key, record.headers, record.value)
    special = [header for header in record.headers if header[0].startswith(RESERVED) or BAD_NAME in header[0]]
    value = TOO_LARGE if is_too_large(stored_size(record), copied) else number.to_bytes(4, "big")
    return record._replace(value=value, headers=special)


def stripped_manifest(manifest: rows.Manifest, less: Mapping[str, bytes]) -> rows.Manifest:
    """A manifest that names stripped rows by their own checksums. Raises `RowError` for a row that is not good."""
    checksums: dict[str, int] = {}
    for key in manifest.rows:
        value = less.get(key)
        if value is None:
            raise RowError(f"row {key} is named by the manifest of epoch {manifest.epoch}, but it is not in the table")
        if value == DAMAGED:
            raise RowError(f"row {key} does not have the checksum that the manifest of epoch {manifest.epoch} names")
        checksums[key] = rows.checksum(value)
    changed = {name: getattr(manifest, name) for name in manifest.__struct_fields__} | {"rows": checksums}
    return rows.Manifest(**changed)


def fingerprints(less: Iterable[bytes]) -> dict[int, int | None]:
    """Of every message in stripped rows; None for one that is too large for its fingerprint to be kept."""
    found: dict[int, int | None] = {}
    for value in less:
        for record in rows.decode_messages(value).records():
            body = record.value or b""
            found[record.offset] = int.from_bytes(body, "big") if len(body) == 4 else None
    return found
