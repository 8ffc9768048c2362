"""Views of a message: its line in a list, and everything that its partition knows about it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

from app.engine.owned_partition import OwnedPartition
from app.service.census import entries_in_turns
from app.service.descriptions import DeliveryView, MessageBrief, MessagesWanted, MessageView
from marq.core.digest import Entry
from marq.core.partition import Partition
from marq.core.stamps import is_believable
from marq.core.state import MessageState
from marq.errors import RowError
from marq.protocol.headers import HEADER_KEY

#: Segments that are examined in one turn.
TURN_SEGMENTS = 10
#: Bytes of a payload that is shown.
SHOWN_BYTES = 64 * 1024
#: Characters of a header that is shown in a list.
HEADER_CHARACTERS = 1_000


def own_key(record: Any, queue_id: str | None) -> bytes | None:
    """The key that the sender of a record gave its message. ``queue_id``: topic mode, where it is the record's key."""
    if queue_id is not None:
        return record.key  # type: ignore[no-any-return]
    return next((value for name, value in reversed(record.headers) if name == HEADER_KEY), None)


def describe_message(view: MessageView, partition: Partition, broker_ms: int | None) -> None:
    """Fill in the view of a message that the partition has read. The view of a message that is done stays empty.

    Args:
        broker_ms: the time of the broker, from which the age is counted; None: not known.
    """
    offset = view.offset
    state = partition.state_of(offset)
    if state is MessageState.DONE:
        return
    queue = partition.segments.queue_of(offset)
    if queue is not None:
        segment = partition.segments.find(offset)
        assert segment is not None
        record = partition.records_of(segment)[offset]
    else:
        queue, record = partition.queue_of(offset), partition.record(offset)
    payload = record.value or b""
    view.state, view.queue, view.receives = state, queue or "", partition.receives(offset)
    view.sent_ms = record.timestamp
    if is_believable(record.timestamp):
        view.age_ms = max(0, (broker_ms or record.timestamp) - record.timestamp)
    key = own_key(record, partition.queue_id)
    view.key = None if key is None else _text(key)
    view.headers = [(name, _text(value)) for name, value in record.headers]
    view.payload = base64.b64encode(payload[:SHOWN_BYTES]).decode()
    view.size_bytes = len(payload)
    view.poison = partition.poison.get(offset)
    view.reserved = offset in partition.reserved
    view.ready_at_ms = partition.delays.get(offset)
    view.expires_at_ms = partition.ttls.get(offset)
    view.delivery = _delivery(partition, offset)


async def wanted_entries(partition: Partition, wanted: MessagesWanted, first: int) -> AsyncIterator[Entry]:
    """Messages from offset `first` on, in no order. Other work gets its turns between slices."""
    async for entry in entries_in_turns(partition):
        if entry.queue == wanted.queue and entry.offset >= first and wanted.state in (None, entry.state):
            yield entry
    if wanted.state not in (None, MessageState.READY):
        return
    left = wanted.limit
    for number, segment in enumerate(list(partition.segments), 1):  # in order: those that are parked
        if left <= 0:
            return
        if segment.stop > first:
            for offset in segment.parked_of(wanted.queue):
                if offset >= first:
                    left -= 1
                    yield Entry(offset, wanted.queue, MessageState.READY, 0)
        if not number % TURN_SEGMENTS:
            await asyncio.sleep(0)


def brief_of(owned: OwnedPartition, entry: Entry, payload_bytes: int) -> MessageBrief:
    """A message in a list, with up to `payload_bytes` of its payload; with its state only if its row can't be read."""
    partition, offset = owned.owner.partition, entry.offset
    brief = MessageBrief(owned.number, offset, entry.state, entry.receives, None, None)
    try:
        record = _record_of(partition, offset)
    except RowError:
        return brief
    if record is None:
        return brief
    payload = record.value or b""
    brief.sent_ms, brief.size_bytes = record.timestamp, len(payload)
    if payload_bytes:
        brief.payload = payload[:payload_bytes]
        brief.headers = [(name, _text(value)[:HEADER_CHARACTERS]) for name, value in record.headers]
    delivered = partition.deliveries.get(offset)
    if entry.state is MessageState.IN_FLIGHT and delivered is not None:
        brief.receiver, brief.left_ms = delivered.receiver, max(0, delivered.deadline_ms - partition.clock_ms)
    elif entry.state is MessageState.DELAYED:
        due_ms = partition.delays.get(offset)
        if due_ms is not None:
            brief.left_ms = max(0, due_ms - partition.broker_ms)
        elif delivered is not None:
            brief.left_ms = max(0, delivered.deadline_ms - partition.clock_ms)
    return brief


def _record_of(partition: Partition, offset: int) -> Any:
    """The record of an unfinished message; None if it is done. Raises `RowError`."""
    if offset in partition.messages:
        return partition.record(offset)
    segment = partition.segments.find(offset)
    if segment is None or not segment.is_parked(offset):
        return None
    return partition.records_of(segment)[offset]


def _delivery(partition: Partition, offset: int) -> DeliveryView | None:
    delivered = partition.deliveries.get(offset)
    if delivered is None:
        return None
    return DeliveryView(
        epoch=delivered.epoch,
        delivery=delivered.delivery,
        receiver=delivered.receiver,
        leased=delivered.leased,
        left_ms=max(0, delivered.deadline_ms - partition.clock_ms),
    )


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="backslashreplace")
