"""The partition of a message in a FIFO queue, where it has to be the same for all senders."""

from __future__ import annotations

from zlib import crc32

from marq.core.policies import QueueSettings


def fifo_partition(queue: bytes, group: bytes, settings: QueueSettings, count: int) -> int:
    """One of ``count`` partitions: that of the group, or of a queue that was made for ids to count in all of it."""
    return crc32(group if settings.placement == "group" else queue) % count
