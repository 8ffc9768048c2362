"""What a worker remembers of the last minutes, for answers that AWS gives alike to requests that are made twice.

Only this worker's requests are known, and a bounded number of them: nothing rests on it. What counts as a second
message is the core's decision, and is in the log.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Generic, TypeVar

from marq.protocol.messages import Received, Sent

#: Seconds within which a message or a receive is the same as an earlier one.
SAME_S = 300.0
#: Entries of each kind that are remembered.
ENTRIES_MAX = 50_000
#: Bytes of them that are.
BYTES_MAX = 64 * 1024 * 1024

#: About what a message takes beside its payload.
ENTRY_BYTES = 1_000

Value = TypeVar("Value")


class _Recent(Generic[Value]):
    """Values by key, each for `SAME_S`, the oldest forgotten first."""

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
    """Where the first of messages with one deduplication id is."""

    def __init__(self) -> None:
        self._sends: _Recent[Sent] = _Recent()

    def first(self, key: tuple[str, int, str | None, str], sent: Sent) -> Sent:
        """The first message like the one that was just sent; that one itself if there was none.

        Args:
            key: queue and its life, group where that counts, deduplication id.
        """
        known = self._sends.get(key)
        if known is not None:
            return known
        self._sends.put(key, sent)
        return sent


class Attempts:
    """What receives were given that named their attempt."""

    def __init__(self) -> None:
        self._given: _Recent[list[Received]] = _Recent()

    def given(self, queue: str, attempt: str) -> list[Received] | None:
        return self._given.get((queue, attempt))

    def keep(self, queue: str, attempt: str, received: list[Received]) -> None:
        size_bytes = sum(len(one.payload) + ENTRY_BYTES for one in received)
        self._given.put((queue, attempt), received, size_bytes)


class FirstReceives:
    """When messages were received for the first time."""

    def __init__(self) -> None:
        self._times: OrderedDict[tuple[int, int], int] = OrderedDict()

    def of(self, one: Received, now_ms: int) -> int:
        """Milliseconds since 1970; when it was sent, if it was another worker that gave it out first."""
        key = (one.partition, one.offset)
        if one.attempt > 1:
            return self._times.get(key, one.sent_ms)
        self._times[key] = now_ms
        if len(self._times) > ENTRIES_MAX:
            self._times.popitem(last=False)
        return now_ms
