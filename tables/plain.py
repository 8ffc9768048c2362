"""Rows as plain values with names, for people to read."""

from __future__ import annotations

from typing import Any

import msgspec


def plain(value: Any) -> Any:
    """A value as dicts, lists, text and numbers; bytes as hex."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
