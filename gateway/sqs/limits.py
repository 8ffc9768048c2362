"""The limits of requests: AWS's, or those of marq."""

from __future__ import annotations

from typing import Literal, NamedTuple

from app.service.sends import RECORD_ROOM_BYTES
from marq.core.policies import DELAY_MAX_MS, LEASE_MAX_MS, TTL_MAX_MS
from marq.protocol.limits import HEADERS_MAX, MESSAGE_MAX_BYTES

Mode = Literal["strict", "relaxed"]

#: Headers that this package adds to the attributes' own.
OUR_HEADERS = 3
KIB, MIB = 1024, 1024 * 1024


class Limits(NamedTuple):
    """One set of limits. Times are in seconds."""

    strict: bool
    delay_s: int
    visibility_s: int
    retention_s: tuple[int, int]
    wait_s: int
    body_bytes: int | None  # of a request; None: only the limit of all requests
    message_bytes: int
    batch_bytes: int | None  # of all bodies and attributes of a request; None: only the limit of all requests
    entries: int  # in a batch
    receive: int  # messages of a receive
    attributes: int  # of a message
    max_receives: int
    again_s: int  # between purges of a queue, and until a deleted one can be made again


STRICT = Limits(
    strict=True,
    delay_s=900,
    visibility_s=43_200,
    retention_s=(60, 1_209_600),
    wait_s=20,
    body_bytes=4 * MIB,  # 1 MiB of text that is not ASCII is 3 MiB of JSON as SDKs write it, and of a form
    message_bytes=MIB,
    batch_bytes=MIB,
    entries=10,
    receive=10,
    attributes=10,
    max_receives=1_000,
    again_s=60,
)
RELAXED = Limits(
    strict=False,
    delay_s=DELAY_MAX_MS // 1000,
    visibility_s=LEASE_MAX_MS // 1000,
    retention_s=(1, TTL_MAX_MS // 1000),
    wait_s=60,
    body_bytes=None,
    message_bytes=MESSAGE_MAX_BYTES - RECORD_ROOM_BYTES,
    batch_bytes=None,
    entries=1_000,
    receive=1_000,
    attributes=HEADERS_MAX - OUR_HEADERS,
    max_receives=1_000_000,
    again_s=0,
)


def limits_of(mode: Mode) -> Limits:
    """The limits of a setting."""
    return STRICT if mode == "strict" else RELAXED
