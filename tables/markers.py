"""`markers`: the in-progress marker state, and ids of messages.

Keys `<partition>/<epoch>/<kind>/<number>`, values of `marq.core.rows`:

- `pages`: state of some adjacent segments below the manifest's position: messages that are done, and deliveries
- `index`: queue, group, delay and time to live of the messages of a segment
- `markers`: deliveries (epoch, delivery, receives, deadline, receiver) of a block of offsets above the position
- `dedup`, `origins`: ids of accepted messages, origins of accepted copies
"""

from __future__ import annotations

from typing import Any

from marq.core.rows import IndexRow, Kind, MarkersRow, PageRow, decode_dedup, decode_marker_row, kind_of
from tables.plain import plain

NAME = "markers"
HELP = "in-progress marker state of segments and blocks of offsets"


def decode(kind: Kind, value: bytes) -> MarkersRow | PageRow | IndexRow:
    """A row's value, for all kinds but ids. Raises `RowError`."""
    return decode_marker_row(kind, value)


def describe(key: str, value: bytes) -> Any:
    """A row in readable form."""
    kind = kind_of(key)
    if kind in ("dedup", "origins"):
        digests, offsets, timestamps_ms = decode_dedup(value)
        ids = zip(digests, offsets, timestamps_ms, strict=True)
        return [{"id": digest.hex(), "offset": offset, "sent_ms": sent_ms} for digest, offset, sent_ms in ids]
    return plain(decode(kind, value))
