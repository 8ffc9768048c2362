"""Decisions that depend on settings. The owner makes each once and writes it down as a marker; a replay makes none."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Container
from random import Random
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from marq.errors import BadValueError
from marq.protocol.limits import MESSAGE_MAX_BYTES

#: Milliseconds of a lease where neither queue nor receiver names one (Amazon SQS's default).
VISIBILITY_TIMEOUT_MS = 30_000

#: Deliveries to an in-worker handler before a message is dead-lettered, where its queue names no maximum.
HANDLER_MAX_RECEIVES = 10

#: Attempt from which on a batch is halved with each attempt (as KIP-1206 finds poison records by bisection).
SUSPECT_FROM_ATTEMPT = 3

#: Suffix of the dead-letter queue of a queue that names none.
DEAD_SUFFIX = ".dead"
#: Digits of a name's end that count as the number of a dead-letter queue; see `default_dead_letter_queue`.
DEAD_NUMBER_DIGITS = 10


#: Milliseconds of the shortest lease: a shorter one would be over before the answer arrives.
LEASE_MIN_MS = 100

#: Milliseconds of the longest lease, a week. It can be extended any number of times.
LEASE_MAX_MS = 7 * 24 * 3600 * 1000

#: Milliseconds of the longest delay of a message, a release or a back-off: a year.
DELAY_MAX_MS = 366 * 24 * 3600 * 1000

#: Milliseconds of the longest time to live: a year.
TTL_MAX_MS = DELAY_MAX_MS

#: Characters of the longest name of a queue.
QUEUE_NAME_MAX = 255

#: Bytes of the lowest limit that a queue can set for the size of its messages. The highest is `MESSAGE_MAX_BYTES`.
MESSAGE_LIMIT_MIN_BYTES = 1024

#: Queues that a dead-letter queue can name as those that may use it.
SOURCES_MAX = 100

Lease = Annotated[int, Meta(ge=LEASE_MIN_MS, le=LEASE_MAX_MS)]
Visibility = Annotated[int, Meta(ge=0, le=LEASE_MAX_MS)]
Delay = Annotated[int, Meta(ge=0, le=DELAY_MAX_MS)]
Ttl = Annotated[int, Meta(ge=0, le=TTL_MAX_MS)]
Receives = Annotated[int, Meta(ge=0, le=1_000_000)]
MessageBytes = Annotated[int, Meta(ge=0, le=MESSAGE_MAX_BYTES)]
Sources = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=QUEUE_NAME_MAX)], ...], Meta(max_length=SOURCES_MAX)
]
InFlight = Annotated[int, Meta(ge=0, le=1_000_000_000)]


class QueueSettings(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The settings of one queue. Times are milliseconds.

    ``max_in_flight`` and ``max_in_flight_per_receiver`` hold for the whole queue: the owner of each partition gets a
    :func:`share` of them, which is at least 1.
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
    breaker_pause_ms: Annotated[int, Meta(ge=100, le=LEASE_MAX_MS)] = 30_000  # until one message is tried
    fifo: bool = False  # the messages of a group are delivered in order; fixed when the queue is made
    content_deduplication: bool = False  # a message without a deduplication id gets a hash of its payload as one
    deduplication_scope: Literal["queue", "group"] = "queue"  # in which an id counts as the same
    placed_by: Literal["", "queue", "group"] = ""  # the scope that the queue was made with, if it was changed since
    max_message_bytes: MessageBytes = 0  # 0: the topic's limit
    dead_letters_from: Sources | None = None  # the queues whose dead letters may come here; None: any, (): none

    @property
    def placement(self) -> Literal["queue", "group"]:
        """What has a partition of its own: the whole FIFO queue, or each group. It never changes."""
        return self.placed_by or self.deduplication_scope

    @property
    def id_scope(self) -> Literal["queue", "group"]:
        """In which an id counts as the same: the group also where groups are in different partitions."""
        return "group" if self.placement == "group" else self.deduplication_scope

    def dead_letters_of(self, queue: str) -> str:
        """The queue that takes the dead letters of ``queue``."""
        return self.dead_letter_queue or default_dead_letter_queue(queue)

    def takes_dead_letters_of(self, queue: str) -> bool:
        """True if ``queue`` may name this one as its dead-letter queue."""
        return self.dead_letters_from is None or queue in self.dead_letters_from

    def backoff_of(self, attempt: int, random: Random) -> int:
        """Milliseconds of delay after the failure of ``attempt``, where the release names none."""
        if not self.backoff_ms:
            return 0
        return backoff_ms(attempt, self.backoff_ms, self.backoff_max_ms or LEASE_MAX_MS, random)


def check_delay(delay_ms: int) -> None:
    """Raises `BadValueError` for a delay that is negative or too long."""
    if not 0 <= delay_ms <= DELAY_MAX_MS:
        raise BadValueError(f"a delay of {delay_ms} ms; at least 0, at most {DELAY_MAX_MS} (366 days)")


def share(limit: int, number: int, partitions: int) -> int:
    """The part of a queue's limit that partition ``number`` of ``partitions`` may use; at least 1."""
    return max(1, limit // partitions + (number < limit % partitions))


def default_dead_letter_queue(queue: str) -> str:
    """The name of ``queue`` with the suffix. Names that are too long for it are cut.

    If a dead-letter queue has such a name, its own dead letters go to ``…~2.dead``, and theirs to ``…~3.dead``: cut
    alone, its name would be its own.
    """
    if len(queue) + len(DEAD_SUFFIX) <= QUEUE_NAME_MAX:
        return queue + DEAD_SUFFIX
    if queue.endswith(DEAD_SUFFIX):
        stem, sign, number = queue.removesuffix(DEAD_SUFFIX).rpartition("~")
        if sign and number.isascii() and number.isdigit() and len(number) < DEAD_NUMBER_DIGITS:
            tag = f"~{int(number) + 1}"
        else:
            stem, tag = queue.removesuffix(DEAD_SUFFIX), "~2"
    else:
        stem, tag = queue, ""
    return stem[: QUEUE_NAME_MAX - len(tag) - len(DEAD_SUFFIX)] + tag + DEAD_SUFFIX


def takes_dead_letters(queue: str, named: Container[str]) -> bool:
    """True if ``queue`` is there for dead letters. They wait to be looked at: they are no backlog.

    Args:
        named: the dead-letter queues that the settings of queues name.
    """
    return queue.endswith(DEAD_SUFFIX) or queue in named


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
    """The limits of the owner of a partition, in milliseconds and offsets."""

    checkpoint_ms: int = 2_000
    window_offsets: int = 100_000
    persist_after_ms: int = 10_000
    step_timeout_ms: int = 30_000
    queue_id: str | None = None  # topic mode
    partitions: int = 1  # over which the limits of a queue are spread
    pass_deleted: bool = False  # go on at the start of the queue log, though unfinished messages were deleted unread
    origin_keys: tuple[bytes, ...] = ()  # with which origins of copies are sealed; none: they are not
    version_keys: tuple[bytes, ...] = ()  # that seal records of later versions; none: the seals can't be checked


DEFAULT_LIMITS = Limits()


SettingsOf = Callable[[str], QueueSettings]


def is_exhausted(receives: int, settings: QueueSettings) -> bool:
    """True if a message that was delivered ``receives`` times may not be delivered again: it is a dead letter."""
    return 0 < settings.max_receives <= receives


def batch_cap(attempt: int, limit: int, max_receives: int) -> int:
    """How many messages a delivery may have if one of them is on its ``attempt``-th attempt (1 = first).

    This is for receivers whose messages fail together. Batches are full at first, halved with each attempt from the
    third on, and a single message at the last permitted attempt. So a poison message ends up by itself and takes no
    others to the dead-letter queue.
    """
    if max_receives and attempt >= max_receives > 1:
        return 1
    if attempt < SUSPECT_FROM_ATTEMPT:
        return limit
    return max(1, limit >> min(attempt - SUSPECT_FROM_ATTEMPT + 1, 62))


def backoff_ms(attempt: int, base_ms: int, max_ms: int, random: Random) -> int:
    """Milliseconds of delay before attempt ``attempt + 1``: exponential, with jitter in its upper half."""
    ceiling = min(max_ms, base_ms << min(attempt - 1, 40))
    return ceiling // 2 + random.randint(0, ceiling - ceiling // 2)
