"""`progress`: the manifest of each partition, which names the rows that count.

Key `<partition>/<epoch>`, value `marq.core.rows.Manifest`. Recovery takes the manifest with the highest epoch, and
ignores every row that it does not name.
"""

from __future__ import annotations

from typing import Any

from marq.core.rows import Manifest, decode_manifest
from tables.plain import plain

NAME = "progress"
HELP = "manifest of each partition: live rows, positions, clock, owner"


def decode(value: bytes) -> Manifest:
    """A row's value. Raises `RowError`."""
    return decode_manifest(value)


def describe(key: str, value: bytes) -> Any:
    """A row in readable form."""
    return plain(decode(value))
