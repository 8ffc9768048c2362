"""FIFO queues: which messages they accept, and the headers with the group and the deduplication id of a message."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from marq.errors import BadValueError
from marq.protocol.headers import H_DEDUP, H_GROUP

if TYPE_CHECKING:
    from marq.core.policies import QueueSettings
    from marq.protocol.messages import Entry


class UnfitError(BadValueError):
    """A message that does not fit the type of its queue (FIFO or standard). `field` is the value that does not fit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def check_fit(message: Entry, settings: QueueSettings) -> None:
    """Check that a message fits the type of its queue. Raises `UnfitError`."""
    if settings.fifo:
        if message.group is None:
            raise UnfitError("group", "the queue is FIFO: the message needs a group")
        if message.deduplication_id is None and not settings.content_deduplication:
            raise UnfitError(
                "deduplication_id",
                "the queue is FIFO without content_deduplication: the message needs a deduplication_id",
            )
        if message.delay_ms is not None:
            raise UnfitError("delay_ms", "the queue is FIFO: a delay is the queue's, not a message's")
    elif message.deduplication_id is not None:
        raise UnfitError("deduplication_id", "deduplication_id is for FIFO queues")


def fifo_headers(message: Entry, settings: QueueSettings, generation: int) -> list[tuple[str, bytes]]:
    """The headers of a message in a FIFO queue: its group, and the id by which a duplicate is recognised.

    Args:
        generation: of the queue. An id that was used in an earlier one does not count.
    """
    assert message.group is not None
    name, group = deduplication_id_of(message).encode(), message.group.encode()
    if settings.id_scope == "group":
        name = group + b"\0" + name
    if generation:
        name = b"%d\0" % generation + name
    return [(H_GROUP, group), (H_DEDUP, name)]


def deduplication_id_of(message: Entry) -> str:
    """The deduplication id of a message: the one it was sent with, else the hash of its payload."""
    return message.deduplication_id or sha256(message.payload).hexdigest()
