"""Cuts a record to the size that a topic takes, and reports what was cut."""

from __future__ import annotations

import json
from collections.abc import Sequence

from marq.core.state import HEADER_OVERHEAD_BYTES

Headers = list[tuple[str, bytes | None]]

#: Bytes that are kept of a key that is cut.
KEY_KEPT_BYTES = 1024
#: Bytes that are kept of a payload, even if headers alone would fill the record.
VALUE_KEPT_BYTES = 64 * 1024
#: Bytes that a record counts besides its fields: headers of the batch and of the record, and the lengths of its fields.
RECORD_OVERHEAD_BYTES = 128


def size_of(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """An upper bound of the bytes of a record that is alone in its batch."""
    return RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"") + sum(map(_header_size, headers))


def _header_size(header: tuple[str, bytes | None]) -> int:
    return HEADER_OVERHEAD_BYTES + len(header[0].encode()) + len(header[1] or b"")


def fit(
    key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]], room_bytes: int
) -> tuple[bytes | None, bytes | None, Headers, bytes | None]:
    """Key, value and headers that take at most `room_bytes` together: the payload is cut first, then headers.

    Returns:
        What is left of them, and their sizes before as JSON: bytes, and the number of headers. The last is None if
        everything fits.
    """
    if size_of(key, value, headers) <= room_bytes:
        return key, value, list(headers), None
    was: dict[str, int] = {}
    room = room_bytes - RECORD_OVERHEAD_BYTES
    if key is not None and len(key) > KEY_KEPT_BYTES:
        was["key_bytes"] = len(key)
        key = key[:KEY_KEPT_BYTES]
    room = max(0, room - len(key or b""))
    headers_bytes = sum(map(_header_size, headers))
    if value is not None and len(value) + headers_bytes > room:
        kept = min(len(value), max(room - headers_bytes, min(VALUE_KEPT_BYTES, room // 2)))
        if kept < len(value):
            was["value_bytes"] = len(value)
            value = value[:kept]
    room -= len(value or b"")
    if headers_bytes <= room:
        return key, value, list(headers), _said(was)
    was |= {"headers": len(headers), "headers_bytes": headers_bytes}
    left: Headers = []
    for name, content in headers:
        size = _header_size((name, content))
        if size > room:
            rest = room - _header_size((name, None))
            if content is not None and rest > 0:
                left.append((name, content[:rest]))
            break
        left.append((name, content))
        room -= size
    return key, value, left, _said(was)


def _said(was: dict[str, int]) -> bytes | None:
    return json.dumps(was).encode() if was else None
