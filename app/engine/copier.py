"""Appends copies of messages, waits until they are in the log, and ends the originals."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Protocol

from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordTooLargeError
from mode.utils.logging import CompositeLogger

from app.engine import fitting
from app.engine.catalog import Catalog
from app.engine.owned_partition import OwnedPartition
from app.kafka.topics import Topics
from app.settings import Settings
from app.streaming.faust_app import MarqApp
from marq.core import markers as m
from marq.core.dedup import origin_seal
from marq.core.placing import fifo_partition
from marq.core.ranges import ranges_of
from marq.core.reading import is_too_large
from marq.core.rows import Record
from marq.core.state import group_name, stored_size
from marq.errors import MarqError
from marq.protocol.headers import (
    H_DEAD_AT_MS,
    H_DEAD_QUEUE,
    H_DEAD_REASON,
    H_DEAD_RECEIVES,
    H_DEAD_SENT_MS,
    H_DEDUP,
    H_DEDUP_WAS,
    H_DELAY,
    H_ORIGIN,
    H_ORIGIN_SEAL,
    H_POISON_CUT,
    H_TTL,
)

#: Seconds to wait for the fold of an end, and between two checks.
FOLD_TIMEOUT_S = 3.0
FOLD_CHECK_S = 0.01
#: Bytes of a reason in a copy at most.
REASON_MAX_BYTES = 1024

#: Headers that belong to the stay of a message in one queue. A copy does not get them.
_OF_THE_STAY = {
    H_DELAY,
    H_TTL,
    H_ORIGIN,
    H_ORIGIN_SEAL,
    H_DEAD_QUEUE,
    H_DEAD_REASON,
    H_DEAD_RECEIVES,
    H_DEAD_SENT_MS,
    H_DEAD_AT_MS,
}

#: A copy on its way, or why there is none.
Copy = tuple[int, "asyncio.Future[Any]"]
#: The target of a copy: topic, partition, key, headers.
Target = tuple[str, int, bytes | None, list[tuple[str, bytes]]]


def own_headers(record: Any) -> list[tuple[str, bytes]]:
    """The headers of a message that its copy keeps."""
    # only the last of several ids counts; with all of them the copy would be larger than its original
    last = max((i for i, header in enumerate(record.headers) if header[0] == H_DEDUP), default=-1)
    return [
        (H_DEDUP_WAS if name == H_DEDUP else name, value)
        for i, (name, value) in enumerate(record.headers)
        if name not in _OF_THE_STAY and (name != H_DEDUP or i == last)
    ]


def reason_value(text: str) -> bytes:
    """A reason as the value of a header, cut to whole characters."""
    return text.encode()[:REASON_MAX_BYTES].decode(errors="ignore").encode()


def too_large(failed: dict[int, Exception]) -> list[int]:
    """The offsets of copies that are too large for Kafka."""
    return [o for o, exc in failed.items() if isinstance(exc, MessageSizeTooLargeError | RecordTooLargeError)]


class Partitions(Protocol):
    """What copies need of the ownership."""

    app: MarqApp
    settings: Settings
    catalog: Catalog
    owned: dict[int, OwnedPartition]

    @property
    def topics(self) -> Topics:
        """The topics in use."""

    @property
    def log(self) -> CompositeLogger:
        """The log of the worker."""

    def drain(self, owned: OwnedPartition) -> None:
        """Carry out the effects of an owner."""


class Copier:
    """Makes the copies for dead letters, moves and poison."""

    def __init__(self, ownership: Partitions) -> None:
        self._ownership = ownership

    def to_queue(self, owned: OwnedPartition, queue: str, headers: list[tuple[str, bytes]]) -> Target:
        """Where a copy in a queue goes: to the same partition, or in a FIFO queue to the partition of its group."""
        topics, settings = self._ownership.topics, self._ownership.catalog.settings_of(queue)
        number, key = owned.number, queue.encode()
        if settings.fifo:
            number = fifo_partition(key, group_name(headers) or b"", settings, topics.partitions)
        return topics.queue, number, key, headers

    def append(
        self, owned: OwnedPartition, offsets: list[int], target: Callable[[Any, int], Target], room: int | None = None
    ) -> list[Copy]:
        """Append a copy of each message, to the `target` for its record and offset.

        `room` is the size in bytes to which a copy is cut; None: it is not cut, and may fail as too large.
        """
        partition, copies = owned.owner.partition, []
        for offset in offsets:
            if offset not in partition.messages:
                continue
            try:
                record = partition.record(offset)
                topic, number, key, own = target(record, offset)
                headers: list[tuple[str, bytes | None]] = [*own]
                origin, value = f"{owned.number}:{offset}", record.value
                if room is not None:
                    *theirs, reason = headers
                    key, value, headers, cut = fitting.fit(key, value, theirs, room)
                    headers += [reason, *([(H_POISON_CUT, cut)] if cut is not None else [])]
                headers.append((H_ORIGIN, origin.encode()))
                if partition.origin_keys:
                    headers.append((H_ORIGIN_SEAL, origin_seal(origin, partition.origin_keys[0])))
                if topic == self._ownership.topics.queue:
                    _check_size(Record(0, 0, key, value, headers))
                future = self._ownership.app.producer.append(topic, number, value, key, headers)
            except (MarqError, KafkaError) as exc:  # a row that can't be read must not hold up the others
                future = asyncio.get_running_loop().create_future()
                future.set_exception(exc)
            copies.append((offset, future))
        return copies

    async def confirmed(self, owned: OwnedPartition, copies: list[Copy]) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Wait for the copies. Returns the metadata of those in the log, and the errors of the others."""
        done: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        for offset, future in copies:
            try:
                done[offset] = await future
            except (KafkaError, MarqError) as exc:
                failed[offset] = exc
                self._ownership.log.warning("Copy of %s:%s failed: %r", owned.number, offset, exc)
        return done, failed

    async def end(self, owned: OwnedPartition, outcome: m.Outcome, offsets: list[int]) -> set[int]:
        """End the messages that were copied. Returns those whose end was folded in time."""
        if not offsets:
            return set()
        messages = owned.owner.partition.messages
        try:
            await owned.outbox.put_confirmed(
                list(m.split(m.End(owned.owner.epoch, ranges_of(sorted(offsets)), outcome)))
            )
        except MarqError:
            return set()
        # it is folded now, or once earlier records of other workers were read
        for _ in itertools.takewhile(
            lambda _: any(o in messages for o in offsets), range(int(FOLD_TIMEOUT_S / FOLD_CHECK_S))
        ):
            await asyncio.sleep(FOLD_CHECK_S)
        return {offset for offset in offsets if offset not in messages}

    def is_served(self, owned: OwnedPartition) -> bool:
        """True if this worker still serves the partition."""
        return self._ownership.owned.get(owned.number) is owned and owned.serving


def _check_size(copy: Record) -> None:
    """Raises `MessageSizeTooLargeError` if the added headers make a copy too large for a message."""
    if is_too_large(stored_size(copy), True):
        raise MessageSizeTooLargeError(f"a copy of {stored_size(copy)} bytes is no message")
