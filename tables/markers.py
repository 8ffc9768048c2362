"""`markers`: the in-progress marker state, a row for each block of 1,024 offsets that has any.

Key `<partition>/<epoch>/markers/<number>`, value `marq.core.rows.MarkersRow`: what is unfinished below the manifest's
position, and the deliveries (epoch, delivery, receives, deadline, receiver) of offsets in the block.
"""

from __future__ import annotations

from marq.core.rows import MarkersRow, decode_markers

NAME = "markers"
HELP = "in-progress marker state of blocks of offsets"


def decode(value: bytes) -> MarkersRow:
    """A row's value. Raises `RowError`."""
    return decode_markers(value)
