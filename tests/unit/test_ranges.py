"""Offset ranges and the set made of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core.ranges import RangeSet, count, offsets_in, ranges_of, well_formed

offsets = st.sets(st.integers(0, 60))
edits = st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 12)), max_size=40)


@given(offsets)
def test_ranges_hold_exactly_their_offsets(given_offsets: set[int]) -> None:
    ranges = ranges_of(sorted(given_offsets))

    assert list(offsets_in(ranges)) == sorted(given_offsets)
    assert count(ranges) == len(given_offsets)
    assert well_formed(ranges)


def test_consecutive_offsets_cost_one_pair() -> None:
    assert ranges_of(range(7, 5_007)) == [7, 5_007]


@pytest.mark.parametrize("ranges", [[1], [5, 5], [5, 4], [0, 3, 2, 9], [4, 6, 0, 1], [-1, 3]])
def test_what_is_not_ascending_disjoint_and_non_empty_is_malformed(ranges: list[int]) -> None:
    assert not well_formed(ranges)


@given(edits)
def test_a_range_set_is_a_set(given_edits: list[tuple[bool, int, int]]) -> None:
    found, expected = RangeSet(), set()
    for add, start, length in given_edits:
        (found.add if add else found.discard)(start, start + length)
        (expected.update if add else expected.difference_update)(range(start, start + length))

    assert list(found) == sorted(expected)
    assert len(found) == len(expected)
    assert bool(found) == bool(expected)
    assert all((o in found) == (o in expected) for o in range(75))
    assert not expected or found.first() == min(expected)


@given(edits)
def test_a_range_set_is_kept_in_as_few_ranges_as_possible(given_edits: list[tuple[bool, int, int]]) -> None:
    found = RangeSet()
    for add, start, length in given_edits:
        (found.add if add else found.discard)(start, start + length)

    assert found.ranges() == ranges_of(found)


@given(offsets, st.integers(0, 60), st.integers(0, 60))
def test_within_is_the_part_between_two_offsets(given_offsets: set[int], start: int, stop: int) -> None:
    part = RangeSet(ranges_of(sorted(given_offsets))).within(start, stop)

    assert list(offsets_in(part)) == [o for o in sorted(given_offsets) if start <= o < stop]


@given(offsets)
def test_a_range_set_comes_back_from_its_ranges(given_offsets: set[int]) -> None:
    ranges = ranges_of(sorted(given_offsets))

    assert RangeSet(ranges).ranges() == ranges
