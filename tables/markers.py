"""`markers`: the in-progress marker state, and ids of messages.

Keys `<partition>/<epoch>/<kind>/<number>`, values of `marq.core.rows`:

- `pages`: state of some adjacent segments below the manifest's position: what is done, who has what until when
- `index`: queue, group, delay and time to live of the messages of a segment
- `markers`: deliveries (epoch, delivery, receives, deadline, receiver) of a block of offsets above the position
- `dedup`: ids of messages that were accepted
"""

from __future__ import annotations

from marq.core.rows import IndexRow, Kind, MarkersRow, PageRow, decode_marker_row

NAME = "markers"
HELP = "in-progress marker state of segments and blocks of offsets"


def decode(kind: Kind, value: bytes) -> MarkersRow | PageRow | IndexRow:
    """A row's value, but for ids. Raises `RowError`."""
    return decode_marker_row(kind, value)
