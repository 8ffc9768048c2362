"""Counts the messages that were read of each queue. Charts show them as "sent"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

#: Queues that are told apart until somebody takes the counts.
QUEUES_MAX = 100_000

_key = attrgetter("key")


class Intake:
    """Counts records by their key as they are read. Half a microsecond a chunk, and 60 ns a record."""

    def __init__(self) -> None:
        self.total = 0
        self._by_key: Counter[bytes | None] = Counter()
        self._by_queue: Counter[str] = Counter()

    def read(self, queue_id: str | None, records: Sequence[Any]) -> None:
        """A partition that is served has read `records`; ``queue_id``: topic mode."""
        self.total += len(records)
        if queue_id is not None:
            self._by_queue[queue_id] += len(records)
            return
        self._by_key.update(map(_key, records))
        if len(self._by_key) > QUEUES_MAX:
            self._by_key.clear()

    def take(self) -> dict[str, int]:
        """Records by queue since this was last asked."""
        found, self._by_queue, by_key = self._by_queue, Counter(), self._by_key
        self._by_key = Counter()
        for key, count in by_key.items():
            if key:
                found[key.decode(errors="replace")] += count
        return found
