"""What a partition holds, as counts and a digest that does not depend on the order in which it is computed.

An audit that folds the two logs up to the same offsets by itself must come to the same counts and digest:

    entry(message)  = "<offset> <queue> <state> <receives>", UTF-8
    digest          = sum of blake2b(entry, digest_size=16), as big-endian numbers, modulo 2^128; 32 hex digits

over all messages that were read and are not done. States are ``delayed``, ``ready`` and ``in_flight``; a record without
a queue counts for the queue ``""``. The digest does not depend on settings, and its time is that of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from marq.core.partition import Partition
from marq.core.segments import Segment
from marq.core.state import MessageState

#: The states of unfinished messages.
STATES = (MessageState.READY, MessageState.DELAYED, MessageState.IN_FLIGHT)

_MODULUS = 1 << 128


class Entry(NamedTuple):
    """One unfinished message."""

    offset: int
    queue: str
    state: MessageState
    receives: int


class Digest(NamedTuple):
    """Counts by queue and state, and the digest."""

    queues: dict[str, dict[MessageState, int]]
    digest: str


def entries(partition: Partition) -> Iterator[Entry]:
    """Each message of the partition that was read and is not done, in no particular order.

    The partition must not change meanwhile: make a list if it might.
    """
    yield from entries_among(partition, partition.messages)
    for segment in partition.segments:
        for queue, offsets in segment.parked.items():
            for offset in offsets:
                yield Entry(offset, queue, MessageState.READY, 0)


def entries_among(partition: Partition, offsets: Iterable[int]) -> Iterator[Entry]:
    """Those of ``offsets`` that are not done and not parked."""
    deliveries, delays = partition.deliveries, partition.delays
    ready, delayed = MessageState.READY, MessageState.DELAYED
    topic_mode = partition.queue_id
    names: dict[bytes, str] = {}
    messages = partition.messages
    for offset in offsets:
        record = messages.get(offset)
        if record is None:
            continue
        if topic_mode is not None:
            queue: str | None = topic_mode
        else:
            # poison counts as of no queue, also where its key is a queue id and a header is what is wrong
            key = None if type(record) is Segment or offset in partition.poison else record.key
            if key is None or (queue := names.get(key)) is None:
                queue = partition.queue_of(offset) or ""
                if key is not None:
                    names[key] = queue
        delivered = deliveries.get(offset)
        # most were never delivered: to ask state_of() for each takes a quarter longer
        if delivered is not None:
            yield Entry(offset, queue or "", partition.state_of(offset), delivered.receives)
        else:
            yield Entry(offset, queue or "", delayed if offset in delays else ready, 0)


def digest_of(found: Iterable[Entry]) -> Digest:
    """The counts and the digest of ``entries``."""
    queues: dict[str, dict[MessageState, int]] = {}
    total = 0
    for offset, queue, state, receives in found:
        counts = queues.get(queue)
        if counts is None:
            counts = queues[queue] = dict.fromkeys(STATES, 0)
        counts[state] += 1
        entry = f"{offset} {queue} {state} {receives}".encode()
        total += int.from_bytes(blake2b(entry, digest_size=16).digest(), "big")
    return Digest(queues, f"{total % _MODULUS:032x}")
