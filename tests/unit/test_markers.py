"""Records of the markers topic."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core import markers
from marq.core.markers import Batch, End, Keepalive, Marker, Own, Purge, Release, Start, Tick
from marq.core.ranges import offsets_in
from marq.errors import MarkerError

EVERY_KIND: list[Marker] = [
    Start(7, 1, [0, 5, 9, 10], 30_000, "r", 2),
    Keepalive(7, 1, [0, 2], 60_000),
    Release(7, 1, [2, 3], 500, False),
    End(7, [0, 2], "acked", 1),
    End(7, [3, 4], "dead"),
    Purge(7, "orders", 100),
    Tick("w/1"),
    Tick(),
]


KEEPALIVE = {"type": "keepalive", "epoch": 1, "delivery": 1, "offsets": [0, 1]}


def record(**fields: object) -> bytes:
    return json.dumps({"v": 1, **fields}).encode()


@pytest.mark.parametrize("marker", [*EVERY_KIND, Own("w", "w/1")], ids=lambda m: type(m).__name__.lower())
def test_a_marker_comes_back_as_it_was_written(marker: Marker) -> None:
    assert markers.decode(markers.encode([marker], "w/1", 3)) == Batch(1, [marker], "w/1", 3)


def test_a_record_keeps_the_order_of_its_markers() -> None:
    assert markers.decode(markers.encode(EVERY_KIND)).markers == EVERY_KIND


def test_a_record_is_plain_json_with_a_version_and_named_types() -> None:
    written = json.loads(markers.encode([End(7, [0, 2], "acked", 1)], "w", 3))

    assert written == {
        "v": 1,
        "by": "w",
        "seq": 3,
        "markers": [{"type": "end", "epoch": 7, "offsets": [0, 2], "delivery": 1}],
    }


def test_fields_that_are_not_known_are_passed_over() -> None:
    value = record(markers=[{"type": "tick", "colour": "red"}], more=1)

    assert markers.decode(value).markers == [Tick()]


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"no json",
        b'{"v": 1, "by": "\xc2", "markers": []}',
        b'{"v": 1, "later": ' + b"[" * 100_000,
        b"[]",
        b'{"v": 1}',
        record(markers=[{"type": "unheard of"}]),
        record(markers=[{"type": "end", "epoch": 1, "offsets": [5, 5]}]),
        record(markers=[{"type": "end", "epoch": 1, "offsets": [3]}]),
        record(markers=[{"type": "end", "epoch": 1, "offsets": [-3, 4]}]),
        record(markers=[{"type": "end", "epoch": 1, "offsets": [0, 1], "outcome": "eaten"}]),
        record(markers=[{"type": "end", "epoch": -1, "offsets": [0, 1]}]),
        record(markers=[{**KEEPALIVE, "redeliver_after_ms": -1}]),
        record(markers=[{**KEEPALIVE, "redeliver_after_ms": 2**63}]),
        record(markers=[{"type": "own", "worker": "w", "nonce": "n"}, {"type": "tick"}]),
    ],
)
def test_what_is_no_batch_of_markers_is_refused(value: bytes | None) -> None:
    with pytest.raises(MarkerError):
        markers.decode(value)


@pytest.mark.parametrize("version", [0, 2, 99])
def test_a_version_that_is_not_known_is_refused(version: int) -> None:
    with pytest.raises(MarkerError, match="version"):
        markers.decode(record(v=version, markers=[]))


def test_ranges_of_billions_are_refused_because_every_owner_would_walk_them() -> None:
    with pytest.raises(MarkerError, match="offsets"):
        markers.decode(record(markers=[{"type": "end", "epoch": 1, "delivery": 1, "offsets": [0, 10**12]}]))


def test_a_small_marker_is_not_split() -> None:
    marker = Start(7, 1, [0, 500], 30_000)

    assert markers.split(marker) == [marker]


def test_a_large_marker_is_split_into_records_of_at_most_512_kib() -> None:
    top = 10**18  # offsets as long as they get
    start = Start(7, 1, [top + i for i in range(200_000)], 30_000, "receiver", 3)

    parts = markers.split(start)

    assert len(parts) > 1
    assert all(len(markers.encode([part], "w" * 100, 1)) <= markers.RECORD_BYTES for part in parts)
    assert [o for part in parts for o in offsets_in(part.offsets)] == list(offsets_in(start.offsets))  # type: ignore[union-attr]
    assert all(part.delivery == 1 and part.receives == 3 for part in parts)  # type: ignore[union-attr]


@given(st.sampled_from(["start", "purge"]), st.integers(0, 400), st.text(max_size=60))
def test_the_weight_of_a_marker_is_no_less_than_its_bytes(kind: str, length: int, name: str) -> None:
    marker: Marker = Purge(2**61, name, 2**61)
    if kind == "start":
        marker = Start(2**61, 2**61, [2**61 + i for i in range(2 * length)], 2**52, name, 2**52)

    assert len(markers.encode([marker])) - len(markers.encode([])) <= markers.weight(marker)
