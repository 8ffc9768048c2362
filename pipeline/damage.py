"""Damaged batches, which Java's client and so Spark can't read: found, and read around as workers do.

A damaged batch (a wrong checksum, an unknown codec, a record that is longer than its batch) stops Java's reading of its
partition, so Spark is never asked for it. The workers' decoder supplies the records that can be decoded. Each of the
others is replaced by a record that says why; readers treat it as a poison message, or as a record without markers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from marq.core.reading import BAD_NAME, UNDECODABLE, Undecodable, Unreadable
from pipeline.kafka import TIMEOUT_S, Kafka, Offsets
from pipeline.records import poison as malformed_copies

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from app.streaming.batches import Fault

#: Most bytes kept of a record that can't be decoded; workers copy all of it to the poison topic.
KEPT_BYTES = 64 * 1024

#: Some damage makes Java's client drop records that it has read before it in the same poll. So right before damage
#: it polls one record at a time, and this many at a time before that.
POLL_RECORDS = 100
#: Offsets before damage that are polled one record at a time: more than `POLL_RECORDS`, as not all offsets have one.
CAREFUL_OFFSETS = 1_000

_EPOCH = datetime.fromtimestamp(0, UTC)
_LATEST_MS = 253_402_300_799_999  # the last moment that a Python date can have

Range = tuple[int, int]
Ranges = Mapping[str, Mapping[int, Iterable[Range]]]
"""Offsets `[start, stop)`, ascending, by topic and partition."""
Ends = Mapping[str, Mapping[int, int]]
"""An offset for each partition, by topic."""


class Damage(NamedTuple):
    """Offsets `[start, stop)` that Spark must not read, why, and the records there.

    `records` look as those of Kafka's source; `unreadable` of them stand for records that could not be decoded.
    """

    start: int
    stop: int
    reason: str
    records: list[tuple[Any, ...]]
    unreadable: int

    def __str__(self) -> str:
        where = f"offset {self.start}" if self.stop == self.start + 1 else f"offsets {self.start} to {self.stop - 1}"
        if not self.unreadable:
            return f"a damaged batch, of which all records can be decoded, ends with {where} ({self.reason})"
        return f"{self.unreadable} of the records at {where} can't be decoded ({self.reason})"


Damaged = dict[tuple[str, int], list[Damage]]
"""By topic and partition, ascending."""


# ------------------------------------------------------------------ finding it


def find(kafka: Kafka, ranges: Ranges) -> Damaged:
    """Find the damage in these offsets, as far as they exist, with the workers' decoder (millions of records a minute).

    Raises:
        BrokerError: Kafka can't be reached, or does not return the records.
    """
    from aiokafka.errors import KafkaError

    try:
        return asyncio.run(_find(kafka, ranges))
    except (KafkaError, TimeoutError) as error:
        raise kafka.unreachable(str(error) or type(error).__name__) from None


def find_all(kafka: Kafka) -> Damaged:
    """Find the damage in both logs, from their beginnings. Raises `BrokerError`."""
    topics = (kafka.settings.queue_topic, kafka.settings.markers_topic)
    return find(kafka, {topic: {n: [bound] for n, bound in kafka.bounds(topic).items()} for topic in topics})


async def _find(kafka: Kafka, ranges: Ranges) -> Damaged:
    from aiokafka import AIOKafkaConsumer

    from app.kafka.connection import end_client, kafka_client_args
    from app.streaming.fetching import decode_with

    found: Damaged = {}
    faults: list[Fault] = []
    consumer = AIOKafkaConsumer(
        enable_auto_commit=False,
        auto_offset_reset="none",
        isolation_level="read_committed",
        **kafka_client_args(kafka.settings),
    )
    try:
        await consumer.start()
        decode_with(consumer, lambda topic: True, lambda tp, fault: faults.append(fault))
        for topic, partitions in ranges.items():
            bounds = kafka.bounds(topic)
            for number, parts in partitions.items():
                known = found.setdefault((topic, number), [])
                log_start, log_end = bounds.get(number, (0, 0))
                for start, stop in parts:
                    start = max(start, log_start, known[-1].stop if known else 0)
                    look = _Look(kafka, consumer, topic, number, faults)
                    known += await look.through(start, min(stop, log_end), log_end)
    finally:
        await end_client(consumer.stop())
    return {place: damage for place, damage in found.items() if damage}


class _Look:
    """Looks for damage in one partition."""

    def __init__(self, kafka: Kafka, consumer: Any, topic: str, number: int, faults: list[Fault]) -> None:
        from aiokafka import TopicPartition

        self.kafka = kafka
        self.consumer = consumer
        self.tp = TopicPartition(topic, number)
        self.faults = faults
        self.found: list[Damage] = []
        self.last: Any = None  # the last record read so far

    async def through(self, start: int, stop: int, end: int) -> list[Damage]:
        """The damage that begins in `[start, stop)`, up to `end`."""
        consumer, tp = self.consumer, self.tp
        if start >= stop:
            return []
        consumer.assign([tp])
        consumer.seek(tp, start)
        self.faults.clear()
        deadline = time.monotonic() + TIMEOUT_S
        position = start
        while position < stop or (self.found and position < min(self.found[-1].stop, end)):
            for records in (await consumer.getmany(tp, timeout_ms=200)).values():
                self._note(start, stop)
                self._take([record for record in records if record.offset < end])
            self._note(start, stop)
            before, position = position, await consumer.position(tp)
            if position > before:
                deadline = time.monotonic() + TIMEOUT_S
            elif time.monotonic() > deadline:
                raise TimeoutError(f"{tp.topic} partition {tp.partition} could not be read beyond offset {position}")
        return [damage._replace(stop=min(damage.stop, end)) for damage in self.found]

    def _note(self, start: int, stop: int) -> None:
        for fault in self.faults:
            if not fault.batch_stop:
                continue
            # all records of the batch were read, and still there is a fault: Java fails after the last one
            first = max(start, min(fault.start, fault.batch_stop - 1))
            kept = self.found[-1].stop if self.found else start
            if self.found and first <= kept:
                self.found[-1] = self.found[-1]._replace(stop=max(kept, fault.batch_stop))
            elif first < stop:
                self.found.append(Damage(first, fault.batch_stop, fault.reason, [], 0))
            if self.last is not None and self.last.offset >= kept:
                self._keep(self.last)
        self.faults.clear()

    def _take(self, records: list[Any]) -> None:
        for record in records:
            self._keep(record)
        self.last = records[-1] if records else self.last

    def _keep(self, record: Any) -> None:
        if type(record) is Unreadable:
            value, reason = record.value, f"{UNDECODABLE}: {record.reason}"
            for offset in range(record.offset, record.stop):
                self._keep(Undecodable(offset, record.timestamp, value, reason))
                value = None
            return
        for i in range(len(self.found) - 1, -1, -1):
            damage = self.found[i]
            if record.offset >= damage.stop:
                return
            if record.offset >= damage.start:
                damage.records.append(self._row(record))
                if type(record) is Undecodable:
                    self.found[i] = damage._replace(unreadable=damage.unreadable + 1)
                return

    def _row(self, record: Any) -> tuple[Any, ...]:
        topic, number = self.tp
        if type(record) is Undecodable:
            # in the markers topic, its value must not be taken for a marker
            is_marker = topic == self.kafka.settings.markers_topic
            value = None if is_marker or record.value is None else bytearray(record.value[:KEPT_BYTES])
            return unreadable_row(topic, number, record.offset, record.reason, record.timestamp, value)
        headers = [(name, None if value is None else bytearray(value)) for name, value in record.headers]
        return (
            None if record.key is None else bytearray(record.key),
            None if record.value is None else bytearray(record.value),
            topic,
            number,
            record.offset,
            _date(record.timestamp),
            record.timestamp_type or 0,
            headers or None,
        )


def unreadable_row(
    topic: str, number: int, offset: int, reason: str, timestamp_ms: int, value: bytearray | None
) -> tuple[Any, ...]:
    """The record in place of one that can't be decoded. `pipeline.records` reads the reason from its header."""
    header = (BAD_NAME, bytearray(reason.encode()))
    return None, value, topic, number, offset, _date(max(0, timestamp_ms)), 0, [header]


def _date(timestamp_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=min(max(timestamp_ms, -1), _LATEST_MS))


def undecodable(spark: SparkSession, kafka: Kafka) -> dict[int, list[Range]]:
    """Offsets of the queue topic that workers could not decode, by partition, from their copies in the poison topic.

    Raises:
        BrokerError: Kafka can't be reached.
    """
    from pyspark.sql import functions as F

    poison = kafka.settings.poison_topic
    if poison not in kafka.topics():
        return {}
    bounds = kafka.bounds(poison)
    if all(start == stop for start, stop in bounds.values()):
        return {}
    first, last = ({n: pair[i] for n, pair in bounds.items()} for i in (0, 1))
    copies = malformed_copies(kafka.records(spark, {poison: first}, {poison: last}))
    found: dict[int, set[int]] = {}
    for (origin,) in copies.where(F.col("reason").startswith(UNDECODABLE)).select("origin").collect():
        number, _, offset = (origin or "").partition(":")
        if number.isdecimal() and offset.isdecimal():
            found.setdefault(int(number), set()).add(int(offset))
    return {number: [(offset, offset + 1) for offset in sorted(offsets)] for number, offsets in found.items()}


# ------------------------------------------------------------------ reading around it


def records(
    spark: SparkSession, kafka: Kafka, begin: Ends, end: Ends, damaged: Damaged | None = None, **options: str
) -> DataFrame:
    """Like `Kafka.records`, but Spark does not read what is damaged.

    Args:
        damaged: all damage, if it is known; otherwise what workers could not decode of the queue topic is looked up.

    Raises:
        BrokerError: Kafka can't be reached.
    """
    queue = kafka.settings.queue_topic
    if not damaged:
        offsets = undecodable(spark, kafka) if queue in begin else {}
        damaged = find(kafka, {queue: offsets}) if offsets else {}
    return readable(spark, kafka, begin, end, damaged, **options)


def behind(damaged: Damaged, positions: Ends) -> Damaged:
    """The damage that ends above these positions."""
    left = {
        (topic, number): [damage for damage in found if damage.stop > positions.get(topic, {}).get(number, 0)]
        for (topic, number), found in damaged.items()
    }
    return {place: found for place, found in left.items() if found}


def readable(spark: SparkSession, kafka: Kafka, begin: Ends, end: Ends, damaged: Damaged, **options: str) -> DataFrame:
    """The records of topics from `begin` up to `end`, as Spark's source gives them, but Spark does not read damage.

    Args:
        options: further options of the source.
    """
    plain: Pieces = {}
    careful: Pieces = {}
    for topic, firsts in begin.items():
        for number, first in firsts.items():
            place = (topic, number)
            plain[place], careful[place] = around(first, end[topic][number], damaged.get(place, ()))
    poll = "kafka.max.poll.records"
    slow = options | {poll: str(POLL_RECORDS)} if any(careful.values()) else options
    parts = [kafka.records(spark, *bounds, options=slow) for bounds in _reads(plain, begin)]
    parts += [kafka.records(spark, *bounds, options=options | {poll: "1"}) for bounds in _reads(careful, begin)]
    rows = [
        row
        for (topic, number), found in damaged.items()
        for damage in found
        for row in damage.records
        if begin.get(topic, {}).get(number, 0) <= row[4] < end.get(topic, {}).get(number, 0)
    ]
    if rows:
        parts.append(spark.createDataFrame(rows, parts[0].schema))
    return reduce(lambda a, b: a.unionByName(b), parts)


Pieces = dict[tuple[str, int], list[Range]]
"""The ranges that Spark is asked for, by topic and partition."""


def around(start: int, stop: int, damaged: Iterable[Damage]) -> tuple[list[Range], list[Range]]:
    """Split `[start, stop)` without its damage in two: ranges to read as usual (at least one), and the ranges right
    before damage, to be read record by record."""
    plain: list[Range] = []
    careful: list[Range] = []
    for damage in damaged:
        upto = min(damage.start, stop)
        split = min(max(start, damage.start - CAREFUL_OFFSETS), upto)
        if split > start:
            plain.append((start, split))
        if upto > split:
            careful.append((split, upto))
        start = max(start, damage.stop)
    if start < stop or not plain:
        plain.append((min(start, stop), stop))
    return plain, careful


def _reads(pieces: Pieces, begin: Ends) -> Iterator[tuple[dict[str, Offsets], dict[str, Offsets]]]:
    """Bounds of reads that cover all pieces together: one read takes a single range of each partition."""
    for i in range(max(map(len, pieces.values()), default=0)):
        now = {place: found[i] for place, found in pieces.items() if i < len(found)}
        bounds: tuple[dict[str, Offsets], dict[str, Offsets]] = ({}, {})
        for topic in {topic for topic, _ in now}:
            for number, first in begin[topic].items():
                # Spark wants all partitions of a topic: the others get an empty range
                for side, offset in zip(bounds, now.get((topic, number), (first, first)), strict=True):
                    side.setdefault(topic, {})[number] = offset
        yield bounds
