"""Decisions that depend on settings. The owner takes each once and writes it down as a marker; a replay never asks."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from random import Random
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from marq.errors import BadValueError

VISIBILITY_TIMEOUT_MS = 30_000
"""Lease of a delivery when nothing else is said (Amazon SQS's default)."""

HANDLER_MAX_RECEIVES = 10
"""Deliveries to an in-worker handler before a message is dead-lettered, where its queue names no maximum."""

SUSPECT_FROM_ATTEMPT = 3
"""From this attempt on a batch is halved per attempt (KIP-1206's bisection of poison records)."""

DEAD_SUFFIX = ".dead"
"""Dead letters of a queue that names no dead-letter queue go to the queue of its name with this suffix."""


LEASE_MIN_MS = 100
"""Shortest lease that can be asked for: a shorter one would be over before the answer arrives."""

TIME_MAX_MS = 7 * 24 * 3600 * 1000
"""Longest lease: a week. It can be extended without an end."""

DELAY_MAX_MS = 366 * 24 * 3600 * 1000
"""Longest delay of a message, a release or a back-off: a year, however it is said."""

TTL_MAX_MS = DELAY_MAX_MS
"""Longest time that a message is kept unfinished: a year."""

QUEUE_NAME_MAX = 255
"""Longest name of a queue, in characters."""

MESSAGE_BYTES_MIN = 1024
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
"""Least and greatest limit that a queue can set for its messages."""

SOURCES_MAX = 100
"""Queues that a dead-letter queue can name as those that may use it."""

Lease = Annotated[int, Meta(ge=LEASE_MIN_MS, le=TIME_MAX_MS)]
Visibility = Annotated[int, Meta(ge=0, le=TIME_MAX_MS)]
Delay = Annotated[int, Meta(ge=0, le=DELAY_MAX_MS)]
Ttl = Annotated[int, Meta(ge=0, le=TTL_MAX_MS)]
Receives = Annotated[int, Meta(ge=0, le=1_000_000)]
MessageBytes = Annotated[int, Meta(ge=0, le=MESSAGE_BYTES_MAX)]
Sources = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=QUEUE_NAME_MAX)], ...], Meta(max_length=SOURCES_MAX)
]
InFlight = Annotated[int, Meta(ge=0, le=1_000_000_000)]


class QueueSettings(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one logical queue is set to. Times in milliseconds.

    ``max_in_flight`` and ``max_in_flight_per_receiver`` hold for the queue as a whole: the owner of each partition
    keeps its :func:`share` of them, which is at least 1.
    """

    visibility_timeout_ms: Visibility = VISIBILITY_TIMEOUT_MS  # 0: a message is ready again as soon as it was received
    delay_ms: Delay = 0
    ttl_ms: Ttl = 0  # 0: kept until finished
    max_receives: Receives = 0  # 0: no maximum
    dead_letter_queue: Annotated[str, Meta(max_length=QUEUE_NAME_MAX)] = ""  # "": the queue's name + DEAD_SUFFIX
    max_in_flight: InFlight = 0  # 0: no limit
    max_in_flight_per_receiver: InFlight = 0  # 0: no limit; receivers are told apart by the name that they give
    backoff_ms: Delay = 0  # delay of a release that names none, doubled per attempt; 0: at once
    backoff_max_ms: Delay = 0  # 0: a week
    breaker_failures: Receives = 0  # so many failures in a row open the circuit breaker; 0: there is none
    breaker_pause_ms: Annotated[int, Meta(ge=100, le=TIME_MAX_MS)] = 30_000  # until one message is tried
    fifo: bool = False  # the messages of a group are delivered in order; fixed when the queue is made
    content_deduplication: bool = False  # a message without a deduplication id gets a hash of its payload as one
    deduplication_scope: Literal["queue", "group"] = "queue"  # in which an id counts as the same
    max_message_bytes: MessageBytes = 0  # 0: the topic's limit
    dead_letters_from: Sources | None = None  # the queues whose dead letters may come here; None: any, (): none

    def dead_letters_of(self, queue: str) -> str:
        """The queue that takes the dead letters of ``queue``."""
        return self.dead_letter_queue or queue[: QUEUE_NAME_MAX - len(DEAD_SUFFIX)] + DEAD_SUFFIX

    def takes_dead_letters_of(self, queue: str) -> bool:
        """Whether ``queue`` may name this one as its dead-letter queue."""
        return self.dead_letters_from is None or queue in self.dead_letters_from

    def backoff_of(self, attempt: int, random: Random) -> int:
        """Delay after the failure of ``attempt`` where whoever gives the message back names none."""
        if not self.backoff_ms:
            return 0
        return backoff_ms(attempt, self.backoff_ms, self.backoff_max_ms or TIME_MAX_MS, random)


def check_delay(delay_ms: int) -> None:
    """Raises `BadValueError` for a delay that can't be."""
    if not 0 <= delay_ms <= DELAY_MAX_MS:
        raise BadValueError(f"a delay of {delay_ms} ms; at least 0, at most {DELAY_MAX_MS} (366 days)")


def share(limit: int, number: int, partitions: int) -> int:
    """What partition ``number`` of ``partitions`` may use of a limit that holds for a whole queue; at least 1."""
    return max(1, limit // partitions + (number < limit % partitions))


def name_problem(queue: str) -> str | None:
    """Why ``queue`` can't be the name of a queue; None if it can."""
    if not queue:
        return "the name of a queue is empty"
    if len(queue) > QUEUE_NAME_MAX:
        return f"the name of a queue has at most {QUEUE_NAME_MAX} characters, this one {len(queue)}"
    for character in queue:
        if unicodedata.category(character)[0] == "C":
            return f"the name of a queue can't contain the control character {character!r}"
    return None


class Limits(NamedTuple):
    """What the owner of a partition is set to. Milliseconds, offsets."""

    checkpoint_ms: int = 2_000
    window_offsets: int = 100_000
    persist_after_ms: int = 10_000
    step_timeout_ms: int = 30_000
    queue_id: str | None = None  # topic mode
    partitions: int = 1  # over which the limits of a queue are spread
    origin_keys: tuple[bytes, ...] = ()  # with which origins of copies are sealed; none: they are not


DEFAULT_LIMITS = Limits()


SettingsOf = Callable[[str], QueueSettings]


def is_exhausted(receives: int, settings: QueueSettings) -> bool:
    """True if a message that was delivered ``receives`` times may not be delivered again: it is a dead letter."""
    return 0 < settings.max_receives <= receives


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
