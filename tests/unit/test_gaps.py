"""Offsets without a record: those that a transaction explains, and those that are lost."""

from __future__ import annotations

import pytest

from marq.core.ranges import Ranges, RangeSet
from pipeline.gaps import NO_BATCH, NOT_READ, Lost, batches, joined, unexplained
from tests.raw_batches import Raw, batch

TRANSACTIONAL, CONTROL = 0x10, 0x30
THREE = (Raw(), Raw(), Raw())


def found(data: bytes, absent: Ranges) -> list[Lost]:
    """What is lost of `absent`, by a log that is read from its beginning."""
    return joined(list(unexplained(data, 0, RangeSet(absent))))


def test_a_transaction_explains_that_a_reader_gets_nothing() -> None:
    aborted = batch(*THREE, base=1, flags=TRANSACTIONAL) + batch(Raw(), base=4, flags=CONTROL)
    assert found(batch(Raw()) + aborted + batch(Raw(), base=5), [1, 5]) == []


def test_offsets_that_no_batch_has_are_lost() -> None:
    log = batch(*THREE) + batch(*THREE, base=6) + batch(*THREE, base=9, flags=TRANSACTIONAL)
    assert found(log, [3, 6, 9, 12]) == [Lost(3, 6, NO_BATCH)]


def test_a_gap_of_which_other_offsets_were_read_has_only_the_others() -> None:
    """The archive may have what Kafka has no longer."""
    assert found(batch(Raw()) + batch(Raw(), base=6), [2, 3, 4, 5]) == [Lost(2, 3, NO_BATCH), Lost(4, 5, NO_BATCH)]


def test_a_record_that_is_missing_in_a_batch_of_no_transaction_is_lost() -> None:
    assert found(batch(*THREE), [1, 2]) == [Lost(1, 2, NOT_READ)]


def test_a_gap_between_two_fetches_is_one() -> None:
    absent = RangeSet([1, 8])
    first = list(unexplained(batch(Raw()) + batch(Raw(), base=4), 0, absent))
    assert absent.ranges() == [5, 8], "what is not decided is left"
    second = list(unexplained(batch(Raw(), base=8), 5, absent))
    assert not absent
    assert joined(first + second) == [Lost(1, 4, NO_BATCH), Lost(4, 5, NOT_READ), Lost(5, 8, NO_BATCH)]
    assert joined([Lost(1, 2, "a"), Lost(2, 3, "a"), Lost(4, 5, "a")]) == [Lost(1, 3, "a"), Lost(4, 5, "a")]


@pytest.mark.parametrize("wrong", [{"bad_crc": True}, {"magic": 1}])
def test_a_batch_whose_offsets_are_not_known_accuses_nobody(wrong: dict[str, int]) -> None:
    log = batch(Raw()) + batch(*THREE, base=3, **wrong) + batch(Raw(), base=6)  # type: ignore[arg-type]
    assert found(log, [1, 3, 4, 6]) == []


def test_what_is_cut_off_is_left_to_the_next_fetch() -> None:
    absent = RangeSet([1, 4])
    data = batch(Raw()) + batch(*THREE, base=1)[:-1]
    assert list(unexplained(data, 0, absent)) == []
    assert absent.ranges() == [1, 4]
    assert [one[:2] for one in batches(data)] == [(0, 1)]
    assert list(batches(b"")) == list(batches(bytes(40))) == []
