"""`messages`: payloads of messages that stay unfinished for long, in segments of up to 1,000 messages or 256 KiB.

Key `<partition>/<epoch>/messages/<number>`, value `marq.core.rows.MessagesRow`. A row never changes. The table
`markers` says which of its messages are still unfinished.
"""

from __future__ import annotations

from typing import Any

from marq.core.rows import MessagesRow, decode_messages

NAME = "messages"
HELP = "payloads of messages that stay unfinished for long, in segments"


def decode(value: bytes) -> MessagesRow:
    """A row's value. Raises `RowError`."""
    return decode_messages(value)


def describe(key: str, value: bytes) -> list[dict[str, Any]]:
    """A row in readable form, without payloads."""
    return [
        {
            "offset": record.offset,
            "sent_ms": record.timestamp,
            "queue": (record.key or b"").decode(errors="backslashreplace"),
            "size_bytes": len(record.value or b""),
        }
        for record in decode(value).records()
    ]
