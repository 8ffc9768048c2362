"""Oldest first, of several partitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core.digest import entries
from marq.core.stamps import LONG_AGO, STEPS, next_stamps, note_lowest, shares_of
from tests.unit.core_helpers import TwoLogs


def taken(limit: int, *stamps: list[int]) -> list[tuple[int, int]]:
    return shares_of(limit, [iter(one) for one in stamps])


def test_each_message_is_taken_where_the_oldest_is() -> None:
    assert taken(5, [1, 4, 5], [2, 3, 9]) == [(0, 3), (1, 2)]
    assert taken(3, [7], [5], [6]) == [(1, 1), (2, 1), (0, 1)]


def test_nothing_is_taken_where_nothing_is() -> None:
    assert taken(5, [], [1]) == [(1, 1)]
    assert taken(5, [], []) == []


@given(st.integers(1, STEPS), st.lists(st.lists(st.integers(0, 50), max_size=20).map(sorted), min_size=1, max_size=5))
def test_a_small_limit_is_shared_as_by_sorting_everything(limit: int, stamps: list[list[int]]) -> None:
    oldest = sorted((stamp, i) for i, one in enumerate(stamps) for stamp in one)[:limit]
    assert sorted(taken(limit, *stamps)) == sorted({i: [k for _, k in oldest].count(i) for _, i in oldest}.items())


@given(st.integers(1, 5_000), st.lists(st.integers(1, 5_000), min_size=1, max_size=4))
def test_a_large_limit_is_filled_while_there_is_something(limit: int, counts: list[int]) -> None:
    shares = taken(limit, *(list(range(count)) for count in counts))
    step = -(-limit // STEPS)
    assert min(limit, sum(counts)) <= sum(share for _, share in shares) <= limit
    assert all(share < counts[i] + step for i, share in shares)


def with_messages(count: int) -> tuple[TwoLogs, int]:
    """So many messages, 10 ms apart, and the stamp of the first."""
    logs = TwoLogs()
    logs.own()
    first = logs.now_ms
    for _ in range(count):
        logs.send()
        logs.now_ms += 10
    logs.read()
    return logs, first


def test_what_is_not_ready_has_no_stamp() -> None:
    logs, first = with_messages(4)
    logs.start(0)
    logs.take(limit=1)
    assert [list(one) for one in next_stamps([logs.partition], "q", 9)] == [[first + 20, first + 30]]


def test_what_comes_back_is_the_oldest_again() -> None:
    logs, first = with_messages(3)
    logs.release(logs.start(0))
    assert next(next_stamps([logs.partition], "q", 1)[0]) == first


def test_partitions_take_turns_where_one_has_groups() -> None:
    logs, _ = with_messages(3)
    grouped = TwoLogs()
    grouped.send(headers=[("marq-group", b"a")])
    grouped.read()
    assert shares_of(5, next_stamps([logs.partition, grouped.partition], "q", 5)) == [(0, 3), (1, 2)]
    assert shares_of(1, next_stamps([grouped.partition, logs.partition], "q", 1)) == [(0, 1)]


def test_what_is_on_disk_was_sent_long_ago() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(3)
    logs.read()
    logs.persist()
    logs.partition.shed(1 << 30)
    assert next(next_stamps([logs.partition], "q", 1)[0]) == LONG_AGO


@pytest.mark.parametrize("limit", [1, 10])
def test_an_unknown_queue_has_no_stamps(limit: int) -> None:
    assert shares_of(limit, next_stamps([TwoLogs().partition], "none", limit)) == []


def test_the_lowest_offset_of_a_queue_is_that_of_its_first_unfinished_message() -> None:
    logs = TwoLogs()
    logs.own()
    for queue in ("b", "a", "a", "b", "c", "a"):
        logs.send(queue=queue)
    logs.read()
    logs.persist()
    logs.partition.shed(1 << 30)  # payloads are on disk; started messages have an entry
    logs.ack(logs.start(0, 2, 4))
    logs.send(queue=None)  # poison, like the next one: it belongs to no queue, whatever its key
    logs.send(queue="d", headers=[("marq-ttl-ms", b"soon")])
    logs.send(queue="d")
    logs.read()
    wanted: dict[str, int] = {}
    in_memory = set(logs.partition.messages)
    for entry in entries(logs.partition):
        if entry.offset in in_memory:
            wanted[entry.queue] = min(entry.offset, wanted.get(entry.queue, entry.offset))
    found: dict[str, int] = {}
    for part in ([8, 7, 6, 5], [0, 1, 2, 3, 4]):  # in any order, in any parts
        note_lowest(logs.partition, part, found)
    assert found == wanted
    assert {"d", ""} <= wanted.keys()
