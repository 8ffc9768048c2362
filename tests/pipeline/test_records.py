"""Columns that decode records agree with the core."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from marq.core import markers as core
from marq.core.partition import Partition
from marq.core.reading import COPY_ROOM_BYTES
from marq.core.state import HEADER_OVERHEAD_BYTES
from marq.errors import MarkerError
from marq.message import Message
from marq.protocol.headers import H_DELAY, H_GROUP, H_ORIGIN, H_TTL, HEADER_KEY
from pipeline import records

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

#: Each example is a Spark job, so it is a batch of many records.
LIMITS: dict[str, Any] = {
    "deadline": None,
    "max_examples": 12,
    # shrinking would run hundreds of jobs
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    "print_blob": True,
}

#: What Kafka's source gives.
SOURCE = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("headers", records.HEADERS),
    ]
)
SENT_MS = 1_700_000_000_123


class Record(NamedTuple):
    """A record as the core gets it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def source(spark: SparkSession, found: list[Record]) -> DataFrame:
    sent = datetime.datetime.fromtimestamp(SENT_MS / 1000, datetime.UTC)
    rows = [(r.key, r.value, "t", 0, r.offset, sent, list(r.headers) or None) for r in found]
    return spark.createDataFrame(rows, SOURCE)


def numbered(contents: list[tuple[Any, Any, Any]]) -> list[Record]:
    return [Record(i, SENT_MS, key, value, tuple(headers)) for i, (key, value, headers) in enumerate(contents)]


digits = st.one_of(
    st.sampled_from(
        [
            b"0",
            b"00",
            b"5",
            b"-5",
            b"+5",
            b" 5",
            b"5\n",
            b"1_0",
            b"9" * 15,
            b"9" * 16,
            b"31622400000",
            b"31622400001",
            b"",
            b"\xb2",
            b"\xff",
        ]
    ),
    st.integers(0, 10**15).map(lambda n: str(n).encode()),
    st.binary(max_size=3),
    st.just("\u0665".encode()),
    st.none(),
)
own_headers = st.tuples(st.sampled_from([H_DELAY, H_TTL, H_ORIGIN, HEADER_KEY, H_GROUP]), digits)
good_headers = st.tuples(st.sampled_from([H_DELAY, H_TTL]), st.sampled_from([b"0", b"7", b"0070"]))
other_headers = st.tuples(
    st.text(st.characters(codec="utf-8"), max_size=5) | st.just("x\ufffd"), st.none() | st.binary(max_size=5)
)
headers = st.lists(st.one_of(own_headers, good_headers, good_headers, other_headers), max_size=4)
keys = st.one_of(
    st.none(),
    st.binary(max_size=4),
    st.text(max_size=4, alphabet=st.characters(codec="utf-8")).map(str.encode),
    st.sampled_from([b"q", "é".encode() * 255, "é".encode() * 256, b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80"]),
)
contents = st.lists(st.tuples(keys, st.none() | st.binary(max_size=4), headers), min_size=30, max_size=120)


@pytest.mark.parametrize("queue_id", [None, "whole"])
@settings(**LIMITS)
@given(contents=contents)
def test_a_queue_record_is_what_the_core_takes_it_for(
    spark: SparkSession, queue_id: str | None, contents: list[Any]
) -> None:
    found = numbered(contents)
    partition = Partition(0, queue_id=queue_id)
    assert partition.ingest(0, len(found), found)

    rows = {row.offset: row for row in records.messages(source(spark, found), queue_id).collect()}

    for record in found:
        offset, row = record.offset, rows[record.offset]
        poison = partition.poison.get(offset)
        assert row.reason == poison, record
        assert row.queue == (None if poison else partition.queue_of(offset)), record
        if poison is None:
            message = Message("t", 0, row.queue, record, 1)
            delay = None if row.delay_ms is None else SENT_MS + row.delay_ms
            # the core forgets a delay that is over at once
            assert delay in (partition.delays.get(offset), SENT_MS), record
            assert (None if row.ttl_ms is None else SENT_MS + row.ttl_ms) == partition.ttls.get(offset), record
            assert (None if row.sender_key is None else bytes(row.sender_key)) == message.key
        assert row.size == (-1 if record.value is None else len(record.value))
        assert [(h.key, None if h.value is None else bytes(h.value)) for h in row.headers] == list(record.headers)
        assert row.payload == record.value
        assert row.timestamp.timestamp() * 1000 == pytest.approx(SENT_MS, abs=0.5)


def test_a_message_that_is_too_large_is_poison_here_too(spark: SparkSession) -> None:
    limit = 4 * 1024 * 1024
    one = HEADER_OVERHEAD_BYTES + 4  # a header of two bytes and two
    found = numbered(
        [
            (b"q", bytes(limit - 1), ()),
            (b"q", bytes(limit), ()),
            (b"q", bytes(limit - 1 - one), (("é", b"12"),)),
            (b"q", bytes(limit - one), (("é", b"12"),)),
            (b"q", bytes(limit), ((H_ORIGIN, b"1:1"),)),
            (b"q", bytes(limit + COPY_ROOM_BYTES), ((H_ORIGIN, b"1:1"),)),
        ]
    )
    partition = Partition(0)
    assert partition.ingest(0, 6, found)
    rows = records.messages(source(spark, found), None).select("offset", "reason").collect()
    assert {row.offset: row.reason for row in rows if row.reason} == partition.poison
    assert sorted(partition.poison) == [1, 3, 5]


# -- markers ------------------------------------------------------------------------------------------------

names = st.text(st.characters(codec="utf-8"), max_size=3)
number = st.integers(0, 1 << 40)
ranges = st.lists(st.integers(1, 50), max_size=6).map(
    lambda steps: [sum(steps[: i + 1]) for i in range(len(steps) // 2 * 2)]
)
marker = st.one_of(
    st.builds(core.Start, number, number, ranges, number, names, st.integers(-5, 5)),
    st.builds(core.Keepalive, number, number, ranges, number),
    st.builds(core.Release, number, number, ranges, number, st.booleans()),
    st.builds(core.End, number, ranges, st.sampled_from(get_args(core.Outcome)), number),
    st.builds(core.Purge, number, names, number),
    st.builds(core.Tick, names),
)
batch = st.one_of(
    st.builds(core.encode, st.lists(marker, max_size=4), names, number),
    st.builds(lambda w, n: core.encode([core.Own(w, n)]), names, names),
)


def _broken(value: bytes, at: int, byte: int) -> bytes:
    at %= len(value)
    return value[:at] + bytes([byte]) + value[at + 1 :]


value = st.one_of(
    batch,
    batch,
    st.none(),
    st.binary(max_size=8),
    st.builds(_broken, batch, st.integers(0, 500), st.integers(32, 126)),
    st.sampled_from(
        [
            b'{"v":2,"markers":[]}',
            b'{"v":1,"markers":[{"type":"tick","later":1}]}',
            b'{"v":1,"markers":[{"type":"own","worker":"w","nonce":"n"},{"type":"tick"}]}',
            b'{"v":1,"markers":[{"type":"end","epoch":0,"offsets":[5,3]}]}',
            b'{"v":1,"by":"\\ud800","markers":[]}',
        ]
    ),
)


@settings(**LIMITS)
@given(values=st.lists(value, min_size=20, max_size=80))
def test_a_marker_record_is_what_the_core_reads(spark: SparkSession, values: list[bytes | None]) -> None:
    found = numbered([(None, value, ()) for value in values])
    rows = {row.offset: row for row in records.markers(source(spark, found)).collect()}
    assert len(rows) == len(values)
    for record in found:
        row = rows[record.offset]
        assert (None if row.value is None else bytes(row.value)) == record.value
        try:
            expected = core.decode(record.value)
        except MarkerError as error:
            assert (row.reason, row.by, row.seq, row.markers) == (str(error), None, None, None)
            continue
        assert (row.reason, row.by, row.seq) == (None, expected.by, expected.seq)
        assert [_marker(m) for m in row.markers] == expected.markers


def _marker(row: Row) -> core.Marker:
    """The core's marker in a row of the table."""
    return msgspec.convert({k: v for k, v in row.asDict(recursive=True).items() if v is not None}, core.Marker)


def test_the_table_has_room_for_every_field_of_every_marker() -> None:
    types: dict[str, Callable[..., Any]] = {}
    for kind in get_args(core.Marker):
        types |= dict.fromkeys(kind.__struct_fields__, kind)
    assert set(types) <= set(records.MARKER.names)
