"""Record batches as bytes, made by hand, so that they can be wrong in every way."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiokafka.codec import lz4_encode, snappy_encode, zstd_encode
from aiokafka.record.util import calc_crc32c

MS = 1_700_000_000_000
"""Timestamp of the first record of a batch."""

CODECS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "none": (0, lambda data: data),
    "gzip": (1, gzip.compress),
    "snappy": (2, snappy_encode),
    "lz4": (3, lz4_encode),
    "zstd": (4, zstd_encode),
}


def varint(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(value: bytes | None) -> bytes:
    return varint(-1) if value is None else varint(len(value)) + value


class Raw(NamedTuple):
    """A record; names of headers are bytes."""

    value: bytes | None = b"v"
    key: bytes | None = b"q"
    headers: Sequence[tuple[bytes, bytes | None]] = ()
    timestamp_delta: int = 0
    header_count: int | None = None  # what it says
    length: int | None = None  # what it says

    def encode(self, offset_delta: int) -> bytes:
        count = len(self.headers) if self.header_count is None else self.header_count
        body = b"\0" + varint(self.timestamp_delta) + varint(offset_delta) + field(self.key) + field(self.value)
        body += varint(count) + b"".join(field(name) + field(value) for name, value in self.headers)
        return varint(len(body) if self.length is None else self.length) + body


def batch(
    *records: Raw,
    base: int = 0,
    codec: str = "none",
    codec_number: int | None = None,
    magic: int = 2,
    count: int | None = None,
    last_delta: int | None = None,
    body: bytes | None = None,
    flags: int = 0,
    producer_id: int = -1,
    sequence: int = -1,
    bad_crc: bool = False,
    timestamp: int = MS,
) -> bytes:
    """A batch of format 2 with a right checksum, of which single fields may be wrong."""
    number, encode = CODECS[codec]
    if body is None:
        body = encode(b"".join(record.encode(i) for i, record in enumerate(records)))
    last = len(records) - 1 if last_delta is None else last_delta
    most = timestamp + max((record.timestamp_delta for record in records), default=0)
    tail = struct.pack(
        ">hiqqqhii",
        (number if codec_number is None else codec_number) | flags,
        last,
        timestamp,
        most,
        producer_id,
        0 if producer_id >= 0 else -1,
        sequence,
        len(records) if count is None else count,
    )
    tail += body
    crc = calc_crc32c(tail) ^ bad_crc
    return struct.pack(">qiibI", base, len(tail) + 9, 0, magic, crc) + tail


def offsets_from(*batches: tuple[bytes, int], base: int = 0) -> bytes:
    """Consecutive batches from `base` on, with so many offsets each."""
    out = b""
    for raw, count in batches:
        out += struct.pack(">q", base) + raw[8:]
        base += count
    return out
