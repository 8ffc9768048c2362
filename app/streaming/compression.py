"""Decompresses batches of any codec of Kafka, up to a limit."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import cramjam

#: Bytes that the records of one batch may have. Kafka limits only their compressed size, maybe a thousandth of that.
BATCH_MAX_BYTES = 64 * 1024 * 1024
#: First size of the buffer for a decompressed batch, in multiples of the batch; each further one is eight times larger.
_GUESS = 16

_CODECS = {1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
_XERIAL = b"\x82SNAPPY\x00"  # Java's snappy begins its output with this: blocks with their sizes


class DecodingError(ValueError):
    """A batch or a record does not follow Kafka's format."""


def decompress(codec: int, data: bytes, limit: int = BATCH_MAX_BYTES) -> bytes | bytearray | memoryview:
    """The records of a batch, decompressed: at most `limit` bytes. Raises `DecodingError`."""
    name = _CODECS.get(codec)
    if name is None:
        raise DecodingError(f"unknown codec {codec}")
    try:
        if codec == 1:
            return _gunzip(data, limit)
        if codec == 2:
            return _unsnap(data, limit)
        return _decompress_into(getattr(cramjam, name).decompress_into, data, limit)
    except DecodingError:
        raise
    except Exception as exc:  # cramjam raises errors of many kinds
        raise DecodingError(f"its {name} data is damaged ({exc})") from None


def _too_large(limit: int) -> DecodingError:
    return DecodingError(f"its records are larger than {limit} bytes when decompressed")


def _decompress_into(into: Any, data: bytes, limit: int) -> memoryview:
    size = min(limit, max(4096, _GUESS * len(data)))
    while True:
        buffer = bytearray(size)
        try:
            return memoryview(buffer)[: into(data, buffer)]
        except cramjam.DecompressionError as exc:
            if "whole buffer" not in str(exc):
                raise
            if size == limit:
                raise _too_large(limit) from None
        size = min(limit, 8 * size)


def _gunzip(data: bytes, limit: int) -> bytes:
    parts, room = [], limit
    while data:
        stream = zlib.decompressobj(wbits=31)
        parts.append(stream.decompress(data, room + 1))
        room -= len(parts[-1])
        if room < 0:
            raise _too_large(limit)
        if not stream.eof:
            raise DecodingError("its gzip data is damaged (it ends too early)")
        data = stream.unused_data
    return b"".join(parts)


def _unsnap(data: bytes, limit: int) -> bytes:
    blocks = [data]
    if data.startswith(_XERIAL):
        blocks, at = [], 16
        while at < len(data):
            (size,) = struct.unpack_from(">i", data, at)
            if size < 0 or at + 4 + size > len(data):
                raise DecodingError("its snappy data is damaged (the size of a block)")
            blocks.append(data[at + 4 : at + 4 + size])
            at += 4 + size
    if sum(cramjam.snappy.decompress_raw_len(block) for block in blocks) > limit:
        raise _too_large(limit)
    return b"".join(bytes(cramjam.snappy.decompress_raw(block)) for block in blocks)
