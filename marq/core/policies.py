"""Decisions that depend on settings. The owner takes each once and writes it down as a marker; a replay never asks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

VISIBILITY_TIMEOUT_MS = 30_000
"""Lease of a delivery when nothing else is said (Amazon SQS's default)."""

HANDLER_MAX_RECEIVES = 10
"""Deliveries to an in-worker handler before a message is dead-lettered, where its queue names no maximum."""

SUSPECT_FROM_ATTEMPT = 3
"""From this attempt on a batch is halved per attempt (KIP-1206's bisection of poison records)."""

DEAD_SUFFIX = ".dead"
"""Dead letters of a queue that names no dead-letter queue go to the queue of its name with this suffix."""


class QueueSettings(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one logical queue is set to; the record of the compacted queues topic. Times in milliseconds."""

    visibility_timeout_ms: int = VISIBILITY_TIMEOUT_MS
    delay_ms: int = 0
    ttl_ms: int = 0  # 0: kept until finished
    max_receives: int = 0  # 0: no maximum
    dead_letter_queue: str = ""  # "": the queue's name + DEAD_SUFFIX

    def dead_letters_of(self, queue: str) -> str:
        """The queue that takes the dead letters of ``queue``."""
        return self.dead_letter_queue or queue + DEAD_SUFFIX


SettingsOf = Callable[[str], QueueSettings]


def batch_cap(attempt: int, limit: int, max_receives: int) -> int:
    """How many messages may share a delivery with one that is on its ``attempt``-th (1 = first).

    For receivers whose messages share one fate: full batches at first, halved per attempt from the third, alone at the
    last permitted one, so that a poison message ends up by itself and takes no others to the dead letters.
    """
    if max_receives and attempt >= max_receives > 1:
        return 1
    if attempt < SUSPECT_FROM_ATTEMPT:
        return limit
    return max(1, limit >> min(attempt - SUSPECT_FROM_ATTEMPT + 1, 62))


def backoff_ms(attempt: int, base_ms: int, max_ms: int, random: Random) -> int:
    """Delay before attempt ``attempt + 1``: exponential, with full jitter in its upper half."""
    ceiling = min(max_ms, base_ms << min(attempt - 1, 40))
    return ceiling // 2 + random.randint(0, ceiling - ceiling // 2)
