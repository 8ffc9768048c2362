"""The records of the two logs as columns, decoded by the rules of `marq.core`.

Spark's own expressions decode a queue record (no Python per record); they follow `Partition._describe`, and a test
compares them with it. Marker records are few, as they carry ranges: the core's own `decode` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from marq.core.markers import decode
from marq.core.policies import QUEUE_NAME_MAX
from marq.core.reading import BAD_NAME, COPY_ROOM_BYTES, SPAN_MAX_MS, UNDECODABLE
from marq.core.state import HEADER_OVERHEAD_BYTES
from marq.errors import MarkerError
from marq.protocol.headers import H_DELAY, H_GROUP, H_ORIGIN, H_POISON, H_TTL, HEADER_KEY
from marq.protocol.limits import MESSAGE_MAX_BYTES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

#: Version of the tables' rows.
SCHEMA_VERSION = 3

#: Most bytes of a record that is the copy of a message.
COPY_MAX_BYTES = MESSAGE_MAX_BYTES + COPY_ROOM_BYTES

#: Size of a missing payload (a record without value).
NO_PAYLOAD = -1

HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

MARKER = StructType(
    [
        StructField("type", StringType()),
        StructField("epoch", LongType()),
        StructField("delivery", LongType()),
        StructField("offsets", ArrayType(LongType())),
        StructField("redeliver_after_ms", LongType()),
        StructField("delay_ms", LongType()),
        StructField("counted", BooleanType()),
        StructField("outcome", StringType()),
        StructField("receiver", StringType()),
        StructField("receives", LongType()),
        StructField("queue", StringType()),
        StructField("before", LongType()),
        StructField("worker", StringType()),
        StructField("nonce", StringType()),
        StructField("fence", StringType()),
        StructField("sure", BooleanType()),
        StructField("time_ms", LongType()),
        StructField("clock_ms", LongType()),
    ]
)

_PLACE = [
    StructField("schema_version", IntegerType(), False),
    StructField("topic", StringType(), False),
    StructField("partition", IntegerType(), False),
    StructField("offset", LongType(), False),
    StructField("timestamp", TimestampType(), False),
    StructField("day", DateType(), False),
]

MESSAGES = StructType(
    [
        *_PLACE,
        StructField("queue", StringType()),
        StructField("key", BinaryType()),
        StructField("headers", HEADERS),
        StructField("payload", BinaryType()),
        StructField("size", IntegerType(), False),
        StructField("sender_key", BinaryType()),
        StructField("delay_ms", LongType()),
        StructField("ttl_ms", LongType()),
        StructField("group", StringType()),
        StructField("origin", StringType()),
    ]
)

MARKERS = StructType(
    [
        *_PLACE,
        StructField("value", BinaryType()),
        StructField("by", StringType()),
        StructField("seq", LongType()),
        StructField("markers", ArrayType(MARKER)),
    ]
)

MALFORMED = StructType(
    [
        *_PLACE,
        StructField("key", BinaryType()),
        StructField("headers", HEADERS),
        StructField("payload", BinaryType()),
        StructField("reason", StringType(), False),
        StructField("origin", StringType()),
    ]
)


# -- queue records ------------------------------------------------------------------------------------------


def messages(records: DataFrame, queue_id: str | None) -> DataFrame:
    """Records of the queue topic, as Kafka's source gives them, as rows of `MESSAGES` with a column `reason`.

    `reason` is null unless the record is poison. If it is, `queue`, `delay_ms` and `ttl_ms` are null.

    Args:
        queue_id: in topic mode, the queue of the whole topic.
    """
    named = records.withColumn("reason", _reason(queue_id))
    good = F.col("reason").isNull()
    queue = F.lit(queue_id) if queue_id is not None else F.col("key").cast("string")
    return named.select(
        *_place(),
        F.when(good, queue).alias("queue"),
        "key",
        _headers().alias("headers"),
        F.col("value").alias("payload"),
        _size_of("value").alias("size"),
        last_header(HEADER_KEY).alias("sender_key"),
        F.when(good, _number(last_header(H_DELAY))).alias("delay_ms"),
        F.when(good, F.nullif(_number(last_header(H_TTL)), F.lit(0))).alias("ttl_ms"),
        _text(last_header(H_GROUP)).alias("group"),
        _text(last_header(H_ORIGIN)).alias("origin"),
        "reason",
    )


def _place() -> list[Column]:
    return [
        F.lit(SCHEMA_VERSION).alias("schema_version"),
        F.col("topic"),
        F.col("partition"),
        F.col("offset"),
        F.col("timestamp"),
        F.to_date("timestamp").alias("day"),
    ]


def _reason(queue_id: str | None) -> Column:
    """Why a record is poison, or null. The checks are in the core's order."""
    size = (
        F.coalesce(F.length("value"), F.lit(0))
        + F.coalesce(F.length("key"), F.lit(0))
        + F.coalesce(headers_size(), F.lit(0))
    )
    most = F.when(F.exists("headers", lambda header: header["key"] == H_ORIGIN), F.lit(COPY_MAX_BYTES)).otherwise(
        F.lit(MESSAGE_MAX_BYTES)
    )
    malformed = F.when(
        F.size("headers") > 0,
        F.get(
            F.filter(
                "headers",
                lambda header: (
                    F.contains(header["key"], F.lit(BAD_NAME))
                    | (header["key"].isin(H_DELAY, H_TTL) & ~_is_span(header["value"]))
                ),
            ),
            F.lit(0),
        ),
    )
    wrong = F.when(_is_number(malformed["value"]), F.lit(f" is more than {SPAN_MAX_MS} milliseconds")).otherwise(
        F.lit(" is not a number of milliseconds")
    )
    damage = _damage()
    found = (
        F.when(damage.isNotNull(), damage)
        .when(size > most, F.lit(f"larger than {MESSAGE_MAX_BYTES} bytes"))
        .when(F.contains(malformed["key"], F.lit(BAD_NAME)), F.lit("the name of a header is not UTF-8"))
        .when(malformed.isNotNull(), F.concat(F.lit("header "), malformed["key"], wrong))
        .otherwise(F.lit(None).cast("string"))
    )
    if queue_id is not None:
        return found
    text = F.col("key").cast("string")
    return (
        F.when(damage.isNotNull(), damage)
        .when(F.col("key").isNull(), F.lit("no queue: the key is null"))
        .when(
            (F.length("key") == 0) | ~F.is_valid_utf8(text) | (F.length(text) > QUEUE_NAME_MAX),
            F.lit("no queue: the key is no queue id"),
        )
        .otherwise(found)
    )


def _damage() -> Column:
    """Why a record could not be decoded, from the header of its replacement (`pipeline.damage`); else null."""
    value = _text(last_header(BAD_NAME))
    return F.when(value.startswith(UNDECODABLE), value)


def _headers() -> Column:
    """Headers, empty rather than null."""
    return F.coalesce("headers", F.array().cast(HEADERS))


def headers_size() -> Column:
    """Bytes that the headers count for in the core; null if there are none."""
    return F.when(
        F.size("headers") > 0,
        F.aggregate(
            "headers",
            F.lit(0),
            lambda total, h: (
                total + F.octet_length(h["key"]) + F.coalesce(F.length(h["value"]), F.lit(0)) + HEADER_OVERHEAD_BYTES
            ),
        ),
    )


def _size_of(column: str) -> Column:
    return F.coalesce(F.length(column), F.lit(NO_PAYLOAD))


def _with_name(name: str) -> Column:
    return F.filter("headers", lambda header: header["key"] == name)


def last_header(name: str) -> Column:
    """Value of the last header of a name; null if there is none."""
    return F.when(F.size("headers") > 0, F.try_element_at(_with_name(name), F.lit(-1))["value"])


def _is_number(value: Column) -> Column:
    """Whether the core would read a number: 1 to 15 decimal digits, nothing else."""
    return F.coalesce(F.decode(value, "ISO-8859-1").rlike(r"\A[0-9]{1,15}\z"), F.lit(False))


def _is_span(value: Column) -> Column:
    return F.coalesce(_number(value) <= SPAN_MAX_MS, F.lit(False))


def _number(value: Column) -> Column:
    return F.when(_is_number(value), F.decode(value, "ISO-8859-1").cast("long"))


def _text(value: Column) -> Column:
    """A header as text; null if it is not UTF-8."""
    text = value.cast("string")
    return F.when(F.is_valid_utf8(text), text)


# -- records that can't be read ----------------------------------------------------------------------------


def malformed_messages(decoded: DataFrame) -> DataFrame:
    """The poison rows of `messages(...)`, as rows of `MALFORMED`."""
    return decoded.where("reason is not null").select([F.col(name) for name in MALFORMED.names])


def malformed_markers(decoded: DataFrame) -> DataFrame:
    """The rows of `markers(...)` that can't be decoded, as rows of `MALFORMED`."""
    return decoded.where("reason is not null").select(
        *_PLACE_NAMES,
        "key",
        "headers",
        F.col("value").alias("payload"),
        "reason",
        F.lit(None).cast("string").alias("origin"),
    )


def poison(records: DataFrame) -> DataFrame:
    """Records of the poison topic (copies that workers quarantined) as rows of `MALFORMED`."""
    reason = F.coalesce(_damage(), _text(last_header(H_POISON)), F.lit("no reason given"))
    return records.select(
        *_place(),
        "key",
        _headers().alias("headers"),
        F.col("value").alias("payload"),
        reason.alias("reason"),
        _text(last_header(H_ORIGIN)).alias("origin"),
    )


_PLACE_NAMES = [field.name for field in _PLACE]


# -- markers -------------------------------------------------------------------------------------------------

_DECODED = StructType(
    [
        *MARKERS,
        StructField("key", BinaryType()),
        StructField("headers", HEADERS),
        StructField("reason", StringType()),
    ]
)


def markers(records: DataFrame) -> DataFrame:
    """Records of the markers topic, as Kafka's source gives them, as rows of `MARKERS` with `key`, `headers`, `reason`.

    A record that the core can't decode has a `reason`, and null in `by`, `seq` and `markers`.
    """
    raw = records.select(*_place(), "value", "key", _headers().alias("headers"))
    return raw.mapInArrow(_decode_batches, _DECODED)


def _decode_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    marker_type = to_arrow_schema(StructType([MARKERS["markers"]])).field(0).type
    for batch in batches:
        values, headers = (batch.column(name).to_pylist() for name in ("value", "headers"))
        decoded = [_decode(value, of_one) for value, of_one in zip(values, headers, strict=True)]
        columns = {name: batch.column(name) for name in batch.schema.names}
        columns["by"] = pa.array([d[0] for d in decoded], pa.string())
        columns["seq"] = pa.array([d[1] for d in decoded], pa.int64())
        columns["markers"] = pa.array([d[2] for d in decoded], marker_type)
        columns["reason"] = pa.array([d[3] for d in decoded], pa.string())
        yield pa.RecordBatch.from_arrays([columns[name] for name in _DECODED.names], names=_DECODED.names)


def _decode(
    value: bytes | None, headers: list[dict[str, Any]]
) -> tuple[str | None, int | None, list[dict[str, Any]] | None, str | None]:
    """`by`, `seq` and `markers`, or None for these and the reason."""
    for header in headers:
        if header["key"] == BAD_NAME and (header["value"] or b"").startswith(UNDECODABLE.encode()):
            return None, None, None, header["value"].decode(errors="replace")
    try:
        batch = decode(value)
    except MarkerError as error:
        return None, None, None, str(error)
    return batch.by, batch.seq, [marker_row(marker) for marker in batch.markers], None


def marker_row(marker: Any) -> dict[str, Any]:
    """A marker as a row of `MARKER`; fields that its type does not have are left out."""
    return {"type": marker.__struct_config__.tag} | {name: getattr(marker, name) for name in marker.__struct_fields__}
