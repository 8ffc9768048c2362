"""Requests of the last minutes, so that a repeated request gets the same answer, as it does at AWS.

Only requests of this worker are known, and a limited number of them, so no guarantee rests on it. Whether a message is
a duplicate is decided by the core, from the log.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Generic, TypeVar

from marq.protocol.messages import Received, Sent

#: Seconds within which a message or a receive counts as a repetition of an earlier one.
SAME_S = 300.0
#: Entries of each kind that are remembered.
ENTRIES_MAX = 50_000
#: Bytes of all entries that are remembered.
BYTES_MAX = 64 * 1024 * 1024

#: Bytes that a message takes besides its payload, about.
ENTRY_BYTES = 1_000

Value = TypeVar("Value")


class _Recent(Generic[Value]):
    """Values by key, each kept for `SAME_S`. The oldest is forgotten first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Any, tuple[float, Value, int]] = OrderedDict()
        self._size_bytes = 0

    def get(self, key: Any) -> Value | None:
        entry = self._entries.get(key)
        return entry[1] if entry is not None and time.monotonic() - entry[0] < SAME_S else None

    def put(self, key: Any, value: Value, size_bytes: int = 1) -> None:
        now, entries = time.monotonic(), self._entries
        if (old := entries.pop(key, None)) is not None:
            self._size_bytes -= old[2]
        entries[key] = (now, value, size_bytes)
        self._size_bytes += size_bytes
        while (
            len(entries) > ENTRIES_MAX or self._size_bytes > BYTES_MAX or next(iter(entries.values()))[0] < now - SAME_S
        ):
            self._size_bytes -= entries.popitem(last=False)[1][2]
            if not entries:
                return


class Sends:
    """The places of messages by their deduplication ids."""

    def __init__(self) -> None:
        self._sends: _Recent[Sent] = _Recent()

    def first(self, key: tuple[str, int, str | None, str], sent: Sent) -> Sent:
        """The place of the first message with this key: `sent` itself, if there was none before.

        Args:
            key: queue and its generation, group where the scope is the group, deduplication id.
        """
        known = self._sends.get(key)
        if known is not None:
            return known
        self._sends.put(key, sent)
        return sent


class Attempts:
    """The messages that receives with an attempt id were given."""

    def __init__(self) -> None:
        self._given: _Recent[list[Received]] = _Recent()

    def given(self, queue: str, attempt: str) -> list[Received] | None:
        return self._given.get((queue, attempt))

    def keep(self, queue: str, attempt: str, received: list[Received]) -> None:
        size_bytes = sum(len(one.payload) + ENTRY_BYTES for one in received)
        self._given.put((queue, attempt), received, size_bytes)


class FirstReceives:
    """The times at which messages were first received."""

    def __init__(self) -> None:
        self._times: OrderedDict[tuple[int, int], int] = OrderedDict()

    def of(self, one: Received, now_ms: int) -> int:
        """Milliseconds since 1970; the time of sending, if another worker handed it out first."""
        key = (one.partition, one.offset)
        if one.attempt > 1:
            return self._times.get(key, one.sent_ms)
        self._times[key] = now_ms
        if len(self._times) > ENTRIES_MAX:
            self._times.popitem(last=False)
        return now_ms
