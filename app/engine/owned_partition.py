"""One partition that is assigned to this worker, and who gets its deliveries."""

from __future__ import annotations

from typing import Protocol

from app.engine.outbox import Outbox
from marq.core.agenda import Handout
from marq.core.owner import Owner

#: Milliseconds for which reading goes on after a receiver found nothing. Pausing and resuming a partition for each
#: message would delay each: the fetch that is under way has to end before the next one includes the partition.
READ_ON_MS = 250
#: Milliseconds within which a message that Kafka has is counted, unless the worker says otherwise.
COUNTED_MS = 1_000


class Receiver(Protocol):
    """Gets deliveries: a handler, or the receives of clients."""

    def handed(self, owned: OwnedPartition, handout: Handout) -> None:
        """A delivery begins now."""

    def wake(self, owned: OwnedPartition) -> None:
        """A message became ready in this partition."""

    def starving(self, owned: OwnedPartition) -> bool:
        """True if a receiver waits, and nothing that was read of this partition is ready for it."""

    def wants(self, queue: str) -> bool:
        """True if messages of this queue should stay in memory when memory is short."""

    def forget(self, owned: OwnedPartition) -> None:
        """The partition is no longer ours: requests there get no answer."""


class OwnedPartition:
    """One partition that is assigned to this worker."""

    __slots__ = (
        "advanced_ms",
        "begins_later",
        "caught_up_to",
        "checkpoint_s",
        "generation",
        "known_end",
        "known_ms",
        "log_end",
        "look_again_ms",
        "look_again_pause_ms",
        "looking",
        "manifest_bytes",
        "number",
        "outbox",
        "owner",
        "paused",
        "queues_seen",
        "retire_at_ms",
        "starved_ms",
        "starving_look_ms",
        "watched",
        "weighed_bytes",
        "weighed_persisted",
    )

    def __init__(self, number: int, generation: int, owner: Owner, outbox: Outbox) -> None:
        self.number = number
        self.generation = generation
        self.owner = owner
        self.outbox = outbox
        self.paused = False  # reading of the queue topic
        self.begins_later = False  # its next record was deleted: the queue topic is not read until the owner goes on
        self.log_end = 0  # where the queue log ended when Kafka was last asked
        self.known_end, self.known_ms = 0, 0  # an end of it up to which everything is or will be counted, and its time
        self.starved_ms = -READ_ON_MS  # when a receiver last found nothing here
        self.starving_look_ms = 0  # earliest time of the next check whether a receiver starves
        # the version of the catalog that its queues were compared with, and the round of housekeeping
        self.queues_seen: tuple[int, int] | None = None
        self.weighed_bytes = 0  # bytes of its messages in memory, when reading was last regulated
        self.weighed_persisted = 0  # up to where they were in the table then
        self.retire_at_ms = 0
        self.caught_up_to = -1
        self.advanced_ms = 0  # when it last came nearer to being served
        # topic -> position at the last look, when it may be read again, and the pause after that
        self.watched: dict[str, tuple[int, int, int]] = {}
        self.checkpoint_s: float | None = None  # monotonic: when the last checkpoint was complete
        self.manifest_bytes = 0  # of the newest manifest
        self.looking = False  # at what was unreadable
        self.look_again_ms = 0  # when it may be looked at again
        self.look_again_pause_ms = 0

    def behind_since_ms(self, end: int, now_ms: int) -> int | None:
        """Since when messages of the queue log are not counted. None: all are, but those of the last `COUNTED_MS`.

        Args:
            end: where the log ends, as far as it is known.
            now_ms: on a monotonic clock, as the result.
        """
        partition = self.owner.partition
        counted = max(partition.position, partition.unread.stop)
        if counted >= self.known_end and not partition.unread.overflowed:
            self.known_end, self.known_ms = max(end, self.log_end), now_ms
        return self.known_ms if now_ms - self.known_ms >= COUNTED_MS else None

    @property
    def serving(self) -> bool:
        """True while this worker may hand out messages of the partition."""
        return self.owner.serving
