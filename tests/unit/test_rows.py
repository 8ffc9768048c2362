"""Rows and manifests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core import rows
from marq.core.rows import DeliveryRow, Manifest, MarkersRow, Record
from marq.errors import RowError

MANIFEST = Manifest(
    v=1, epoch=3, rows={"0/3/markers/1": 5}, position=10, markers_position=20, done=[12, 14], clock_ms=1,
    last_timestamp_ms=2, broker_ms=3, tick_ms=3, own=3, delivery=9, purges={"q": 15},
    counters={"acked": 2},
)  # fmt: skip

binary = st.none() | st.binary(max_size=30)
records = st.builds(
    Record,
    st.integers(0, 2**62),
    st.integers(-1, 2**62),
    binary,
    binary,
    st.lists(st.tuples(st.text(max_size=8), binary), max_size=3).map(tuple),
)


@given(st.lists(records, max_size=5))
def test_messages_come_back_as_kafka_gave_them(given_records: list[Record]) -> None:
    """Null keys, values and header values too: Kafka allows each."""
    assert rows.decode_messages(rows.messages_row(given_records)).records() == given_records


def test_a_markers_row_comes_back() -> None:
    row = MarkersRow(1, 5, [5_120, 5_130], [DeliveryRow(3, 1, 2, 60_000, True, "r", [5_120, 5_122])])

    assert rows.decode_markers(rows.encode(row)) == row


def test_a_manifest_comes_back() -> None:
    assert rows.decode_manifest(rows.encode_manifest(MANIFEST)) == MANIFEST


@pytest.mark.parametrize("version", [0, 3])
def test_a_manifest_of_another_version_is_an_error_that_says_so(version: int) -> None:
    value = rows.encode_manifest(msgspec.structs.replace(MANIFEST, v=version))

    with pytest.raises(RowError, match=f"manifest of version {version}"):
        rows.decode_manifest(value)


@pytest.mark.parametrize("decode", [rows.decode_messages, rows.decode_markers, rows.decode_manifest])
@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode([1, "x", 7, 8])])
def test_a_damaged_value_is_an_error(decode: Any, value: bytes) -> None:
    with pytest.raises(RowError, match="damaged"):
        decode(value)


def test_a_torn_value_does_not_have_its_checksum() -> None:
    value = rows.encode_manifest(MANIFEST)

    assert rows.checksum(value[:-1]) != rows.checksum(value)


def test_keys_name_partition_epoch_table_and_number() -> None:
    key = rows.row_key(4, 17, "messages", 2)

    assert key == "4/17/messages/2"
    assert rows.kind_of(key) == "messages"
    assert rows.kind_of(rows.row_key(4, 17, "markers", 2)) == "markers"
    assert rows.manifest_key(4, 17) == "4/17"


@pytest.mark.parametrize("key", ["", "4/17", "4/17/letters/1", "messages"])
def test_a_key_that_names_no_table_is_an_error(key: str) -> None:
    with pytest.raises(RowError, match="names no table"):
        rows.kind_of(key)
