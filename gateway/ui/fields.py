"""The form of a queue's settings: the meaning, unit and limits of each."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.inspect import BoolType, IntType, LiteralType, StrType, type_info

from marq.core.policies import QueueSettings

_MEANINGS = {
    "visibility_timeout_ms": (
        "Delivery",
        "Visibility timeout",
        "How long a receiver has a message before it is delivered again, unless it asks for another time.",
    ),
    "max_receives": (
        "Delivery",
        "Maximum receives",
        "After so many deliveries a message becomes a dead letter. 0: never.",
    ),
    "dead_letter_queue": (
        "Delivery",
        "Dead-letter queue",
        "Where dead letters go. Empty: the name of the queue with .dead behind it.",
    ),
    "dead_letters_from": (
        "Delivery",
        "Takes dead letters of",
        "The queues that may name this one as their dead-letter queue, one a line. Empty: any queue.",
    ),
    "delay_ms": ("Time", "Delay", "How long a message waits before it can be received first, unless it says so."),
    "ttl_ms": ("Time", "Time to live", "A message that is not finished by then expires. 0: it is kept."),
    "backoff_ms": (
        "Time",
        "Back-off",
        "Delay of a message that is given back without one; doubles with each attempt. 0: at once.",
    ),
    "backoff_max_ms": ("Time", "Longest back-off", "The back-off doubles up to this. 0: a week."),
    "max_in_flight": ("Limits", "In flight at most", "Messages delivered and not finished, in the queue. 0: no limit."),
    "max_in_flight_per_receiver": (
        "Limits",
        "In flight per receiver",
        "The same for each receiver, told apart by the name it gives. 0: no limit.",
    ),
    "max_message_bytes": (
        "Limits",
        "Largest message",
        "Payload, key and headers, in bytes; at least 1024. 0: the limit of the topic.",
    ),
    "breaker_failures": (
        "Circuit breaker",
        "Failures that open it",
        "After so many failures in a row nothing is delivered for a while. 0: there is no breaker.",
    ),
    "breaker_pause_ms": ("Circuit breaker", "Pause", "Until one message is tried after the breaker has opened."),
    "fifo": ("Order", "FIFO", "Messages of a group are delivered in order. Fixed when the queue is made."),
    "content_deduplication": (
        "Order",
        "Deduplicate by content",
        "A message without a deduplication id gets a hash of its payload as one.",
    ),
    "deduplication_scope": ("Order", "Deduplication scope", "Within which a deduplication id counts as the same."),
}


def _field(field: msgspec.inspect.Field) -> dict[str, Any]:
    group, label, meaning = _MEANINGS[field.encode_name]
    found: dict[str, Any] = {"name": field.encode_name, "group": group, "label": label, "meaning": meaning}
    kind = field.type
    if isinstance(kind, BoolType):
        return found | {"kind": "bool"}
    if isinstance(kind, LiteralType):
        return found | {"kind": "choice", "choices": list(kind.values)}
    if isinstance(kind, IntType):
        unit = "ms" if field.encode_name.endswith("_ms") else "bytes" if field.encode_name.endswith("_bytes") else ""
        return found | {"kind": "number", "unit": unit, "min": kind.ge, "max": kind.le}
    if isinstance(kind, StrType):
        return found | {"kind": "text", "max_length": kind.max_length}
    return found | {"kind": "names"}


def _fields() -> list[dict[str, Any]]:
    info = type_info(QueueSettings)
    assert isinstance(info, msgspec.inspect.StructType)
    by_name = {field.encode_name: field for field in info.fields}
    return [_field(by_name[name]) for name in _MEANINGS]


#: Set by marq itself.
OURS = frozenset({"placed_by"})
#: Of all other settings, in the order of the form.
FIELDS = _fields()
