"""Offsets of the queue topic at which a reader of committed records finds nothing: of a transaction, or lost.

A reader gets no record of a transaction that was aborted, nor of the end of any transaction. Both are in the log all
the same: a broker gives out offsets only with batches, and takes no batch with a hole. So a record was lost where no
batch has its offset, and where its batch is of no transaction, even if no marker and no table knows of it.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from marq.core.ranges import Ranges, RangeSet
from pipeline.kafka import TIMEOUT_S, Kafka

if TYPE_CHECKING:
    from aiokafka.client import AIOKafkaClient

#: So begins a batch of format 2: offset, length, leader epoch, format, checksum, attributes, delta of the last offset.
_HEADER = struct.Struct(">qiibIhi")
_PREFIX_BYTES = 12  # offset and length, with which a batch of any format begins
_FORMAT_AT = 16
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
_READ_COMMITTED = 1
_OUT_OF_RANGE = 1
#: Bytes that one fetch asks for. A larger batch is returned whole all the same.
FETCH_BYTES = 4 * 1024 * 1024

NO_BATCH = "the queue topic has neither a record nor a transaction here"
NOT_READ = "nothing was read here, and the batch that the queue topic has is of no transaction"


class Lost(NamedTuple):
    """Offsets `[start, stop)` without a record that no transaction explains, and how that shows."""

    start: int
    stop: int
    what: str


class Batch(NamedTuple):
    """The offsets `[start, stop)` of a batch, and whether it explains that a reader gets no record."""

    start: int
    stop: int
    explains: bool
    trusted: bool = True  # False: it is damaged, or of an old format, so it may begin earlier and end later


def lost(kafka: Kafka, absent: Mapping[int, Ranges]) -> dict[int, list[Lost]]:
    """Look at the batches around offsets without a record, by partition. What was deleted meanwhile is left out.

    Raises:
        BrokerError: Kafka can't be reached, or does not return the batches.
    """
    from aiokafka.errors import KafkaError

    if not absent:
        return {}
    bounds = kafka.bounds(kafka.settings.queue_topic)
    there = {number: RangeSet(ranges).within(*bounds[number]) for number, ranges in absent.items() if number in bounds}
    try:
        return asyncio.run(_lost(kafka, {number: ranges for number, ranges in there.items() if ranges}))
    except (KafkaError, TimeoutError) as error:
        raise kafka.unreachable(str(error) or type(error).__name__) from None


async def _lost(kafka: Kafka, absent: Mapping[int, Ranges]) -> dict[int, list[Lost]]:
    from aiokafka.client import AIOKafkaClient

    from app.kafka.connection import end_client, kafka_client_args

    client = AIOKafkaClient(**kafka_client_args(kafka.settings))
    found: dict[int, list[Lost]] = {}
    try:
        await client.bootstrap()
        await client.set_topics([kafka.settings.queue_topic])
        for number, ranges in absent.items():
            found[number] = await _of_partition(client, kafka.settings.queue_topic, number, RangeSet(ranges))
    finally:
        await end_client(client.close())
    return {number: ranges for number, ranges in found.items() if ranges}


async def _of_partition(client: AIOKafkaClient, topic: str, number: int, absent: RangeSet) -> list[Lost]:
    found: list[Lost] = []
    position = absent.first()
    while absent:
        data = await _fetch(client, topic, number, position)
        if data is None:
            break
        found += unexplained(data, position, absent)
        if absent:
            position = absent.first()
    return joined(found)


def unexplained(data: bytes, position: int, absent: RangeSet) -> Iterator[Lost]:
    """Of `absent`, what the batches in the answer to a fetch from `position` do not explain.

    Offsets up to the end of these batches are taken out of `absent`.
    """
    trusted = True
    for batch in batches(data):
        if trusted and batch.trusted:
            for start, stop in _pairs(absent, position, batch.start):
                yield Lost(start, stop, NO_BATCH)
        if not batch.explains:
            for start, stop in _pairs(absent, max(position, batch.start), batch.stop):
                yield Lost(start, stop, NOT_READ)
        trusted, position = batch.trusted, max(position, batch.stop)
    absent.discard(0, position)  # once: each time moves all that is left, and there may be a million


def batches(data: bytes) -> Iterator[Batch]:
    """The whole batches in the answer to a fetch, which may end within one."""
    from aiokafka.record.default_records import DefaultRecordBatch

    at = 0
    while len(data) - at > _FORMAT_AT:
        base, length = struct.unpack_from(">qi", data, at)
        stop = at + _PREFIX_BYTES + length
        if length <= 0 or stop > len(data):
            return
        if data[at + _FORMAT_AT] == 2 and length > _HEADER.size and DefaultRecordBatch(data[at:stop]).validate_crc():
            *_, attributes, last = _HEADER.unpack_from(data, at)
            yield Batch(base, base + last + 1, bool(attributes & (_TRANSACTIONAL | _CONTROL)))
        else:
            yield Batch(base, base + 1, explains=True, trusted=False)
        at = stop


def joined(found: list[Lost]) -> list[Lost]:
    """Neighbours of one kind together: a fetch may end between them."""
    out: list[Lost] = []
    for one in found:
        if out and out[-1].stop == one.start and out[-1].what == one.what:
            out[-1] = out[-1]._replace(stop=one.stop)
        else:
            out.append(one)
    return out


async def _fetch(client: AIOKafkaClient, topic: str, number: int, position: int) -> bytes | None:
    """At least one batch, from the one that has `position`, or the first one after it; None: all was deleted.

    Raises:
        KafkaError, TimeoutError: there was none for `TIMEOUT_S`.
    """
    from aiokafka import TopicPartition
    from aiokafka.errors import KafkaError, LeaderNotAvailableError, for_code
    from aiokafka.protocol.fetch import FetchRequest

    deadline = time.monotonic() + TIMEOUT_S
    wanted = [(topic, [(number, position, FETCH_BYTES)])]
    why = f"{topic} partition {number} has nothing at offset {position}"
    while time.monotonic() < deadline:
        node = client.cluster.leader_for_partition(TopicPartition(topic, number))
        try:
            if node is None or node < 0:
                raise LeaderNotAvailableError(f"{topic} partition {number} has no leader")
            answer = await client.send(node, FetchRequest(100, 1, FETCH_BYTES, _READ_COMMITTED, wanted))
            code, data = _part(answer)
            if code == _OUT_OF_RANGE:
                return None
            if code:
                raise for_code(code)(f"{topic} partition {number}")
        except KafkaError as error:
            if not error.retriable:
                raise
            why = str(error)
            client.force_metadata_update()
            await asyncio.sleep(0.1)
            continue
        if next(batches(data), None) is not None:
            return data
    raise TimeoutError(why)


def _part(answer: Any) -> tuple[int, bytes]:
    """The error and the batches of the only partition in an answer."""
    ((_, ((_, code, *_, data),)),) = answer.topics
    return code, data or b""


def _pairs(offsets: RangeSet, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ranges of `offsets` in `[start, stop)`, which may be empty."""
    ranges = offsets.within(start, stop) if start < stop else []
    return zip(ranges[::2], ranges[1::2], strict=True)
