"""After a year, rows, manifest and the work of a checkpoint depend on the unfinished messages, not on the past."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core import checkpoints, restoring, rows
from marq.core.merging import FULL, mergeable
from marq.core.partition import Partition
from marq.core.segment_list import PAGE_SEGMENTS
from tests.unit.core_helpers import TwoLogs, picture

SEGMENT = checkpoints.SEGMENT_MESSAGES

#: Rows that may be there for what fits one segment: of each tier some, each with an index row.
ROWS_A_SEGMENT = 60


class Year:
    """Checkpoints one after the other, every two seconds, of a partition in which something happens in between."""

    def __init__(self) -> None:
        self.logs = TwoLogs()
        self.logs.own()
        self.now_ms = 0
        self.written: list[int] = []  # bytes of each checkpoint
        self.manifests: list[int] = []  # bytes of each manifest

    def pass_over(self, count: int) -> None:
        """Messages that are finished before the next checkpoint, so they never get into the tables."""
        self.logs.hole(count)

    def checkpoint(self) -> None:
        logs, partition = self.logs, self.logs.partition
        assert partition.ingest(partition.position, logs.end, logs.sent)
        logs.sent.clear()
        logs.marked.clear()
        self.now_ms += 2_000
        found = partition.checkpoint(0, self.now_ms, 0, 0)
        assert found is not None
        for key in found.obsolete:
            del logs.table[key]
        logs.table.update(found.rows)
        logs.manifest = found.manifest
        partition.shed(1 << 40)
        self.written.append(sum(len(value) for _, value in found.rows) + len(found.manifest))
        self.manifests.append(len(found.manifest))

    def is_whole(self) -> None:
        """The table has exactly the rows that the manifest names, and they give the present state."""
        manifest = rows.decode_manifest(self.logs.manifest)
        assert {key for key, _ in rows.named_rows(0, manifest, self.logs.load)} == self.logs.table.keys()
        assert picture(self.logs.recovered()) == picture(self.logs.partition)


@pytest.mark.timeout(3_000)
@pytest.mark.parametrize(
    ("count", "others"), [(10_000, 0), (15_000, 5_000), pytest.param(100_000, 5_000, marks=pytest.mark.slow)]
)
def test_a_message_left_at_each_checkpoint_costs_the_last_one_no_more_than_the_first(count: int, others: int) -> None:
    year = Year()
    for _ in range(count):
        year.logs.send("q.dead", b"x" * 100)
        year.pass_over(others)
        year.checkpoint()

    segments = count // checkpoints.SEGMENT_MESSAGES
    early, late = sum(year.written[count // 10 : count // 5]), sum(year.written[-count // 10 :])
    assert late < 3 * early, "bytes written at each"
    assert max(year.manifests) < 2_000
    assert len(year.logs.table) < 2 * segments + ROWS_A_SEGMENT
    assert max(year.written) < 1 << 20
    assert year.logs.partition.segments.parked_total() == count


def acks_all_but_some(year: Year, random: Random) -> None:
    first = year.logs.end
    year.logs.send_many(40)
    year.checkpoint()
    delivery = year.logs.start(*range(first, year.logs.end))
    year.logs.ack(delivery, *[o for o in delivery.offsets if random.random() < 0.95])


def fails_and_waits(year: Year, random: Random) -> None:
    first = year.logs.end
    year.logs.send_many(3)
    year.checkpoint()
    year.logs.release(year.logs.start(*range(first, year.logs.end)), delay_ms=random.choice((0, 1 << 40)))


def sends_with_delay(year: Year, random: Random) -> None:
    for _ in range(3):
        year.logs.send(random.choice(("a", "b")), delay_ms=random.choice((None, 1 << 34)), ttl_ms=1 << 34)
    year.pass_over(500)


def sends_large_ones(year: Year, random: Random) -> None:
    year.logs.send(value=bytes(random.choice((10, 5_000, 90_000))))
    year.pass_over(10)


def finishes_old_ones(year: Year, random: Random) -> None:
    year.logs.send_many(20)
    year.checkpoint()
    unfinished = sorted({*year.logs.partition.messages, *year.logs.partition.segments.parked_in(0, year.logs.end)})
    year.logs.finish("dead", *random.sample(unfinished, min(19, len(unfinished))))


@pytest.mark.parametrize(
    "happens", [acks_all_but_some, fails_and_waits, sends_with_delay, sends_large_ones, finishes_old_ones]
)
def test_rows_are_as_many_as_what_is_unfinished_needs(happens: Callable[[Year, Random], None]) -> None:
    year, random, count = Year(), Random(1), 700
    for _ in range(count):
        happens(year, random)
        year.checkpoint()

    partition = year.logs.partition
    unfinished = len(partition.messages) + partition.segments.parked_total()
    full = unfinished / checkpoints.SEGMENT_MESSAGES
    full += sum(segment.live_bytes for segment in partition.segments) / checkpoints.SEGMENT_BYTES
    assert len(partition.segments) <= 2 * full + ROWS_A_SEGMENT
    assert len(partition.segments.pages) <= 1 + 4 * len(partition.segments) / PAGE_SEGMENTS
    live = sum(segment.live_bytes for segment in partition.segments)
    stored = sum(segment.row_bytes for segment in partition.segments)
    assert stored <= 4 * live + checkpoints.SPARSE_MIN_BYTES * len(partition.segments)
    year.is_whole()


def test_a_checkpoint_writes_a_bounded_part_of_much_and_the_next_ones_the_rest() -> None:
    year = Year()
    for _ in range(100):
        year.logs.send(value=bytes(100_000))
    partition = year.logs.partition
    partition.ingest(0, year.logs.end, year.logs.sent)

    found = [partition.checkpoint(0, 0, 0, 0) for _ in range(4)]

    sizes = [sum(len(value) for _, value in one.rows) for one in found if one is not None]
    assert max(sizes) < checkpoints.PERSIST_BYTES + checkpoints.SEGMENT_BYTES
    assert [one.partial for one in found if one is not None] == [True, True, False]
    assert partition.persisted == 100


def test_a_checkpoint_merges_a_bounded_part_of_much() -> None:
    year = Year()
    for _ in range(2_000):
        year.logs.send_many(20)
        year.pass_over(2_000)
        year.checkpoint()
    year.logs.finish("dead", *[o for o in year.logs.partition.segments.parked_in(0, year.logs.end) if o % 2_020])
    year.written.clear()

    for _ in range(200):
        year.pass_over(1)
        year.checkpoint()

    assert max(year.written) < checkpoints.MERGE_BYTES
    assert len(year.logs.partition.segments) <= 2 + ROWS_A_SEGMENT
    year.is_whole()


def test_a_checkpoint_writes_a_bounded_number_of_messages_however_small_they_are() -> None:
    year = Year()
    count = 3 * checkpoints.WORK_MESSAGES - 10
    year.logs.send_many(count)
    partition = year.logs.partition
    partition.ingest(0, year.logs.end, year.logs.sent)

    found = [partition.checkpoint(0, 0, 0, 0) for _ in range(3)]

    assert [one.partial for one in found if one is not None] == [True, True, False]
    assert max(len(one.rows) for one in found if one is not None) <= 2 * checkpoints.WORK_MESSAGES // SEGMENT + 1
    assert partition.persisted == count


@pytest.mark.parametrize("new", [0, checkpoints.WORK_MESSAGES])
def test_a_checkpoint_reads_a_bounded_number_of_messages_to_merge_them(new: int) -> None:
    """What it writes new counts, too: it may not take twice as long because there is both."""
    year = Year()
    year.logs.send_many(100 * SEGMENT)
    while year.logs.partition.persisted < year.logs.end:
        year.checkpoint()
    year.logs.finish("dead", *range(0, year.logs.end, 2))
    most = checkpoints.WORK_MESSAGES // 4 if new else checkpoints.WORK_MESSAGES

    year.logs.loads = 0
    year.logs.send_many(new)
    year.checkpoint()
    assert 0 < year.logs.loads * SEGMENT <= most

    for _ in range(100):
        year.pass_over(1)
        year.checkpoint()
    assert len(year.logs.partition.segments) <= (50 * SEGMENT + new) / SEGMENT + ROWS_A_SEGMENT
    year.is_whole()


def test_a_partition_is_restored_in_slices_of_some_segments() -> None:
    year = Year()
    year.logs.send_many(100 * SEGMENT)
    while year.logs.partition.persisted < year.logs.end:
        year.checkpoint()

    slices = sum(1 for _ in Partition.restoring(0, rows.decode_manifest(year.logs.manifest), year.logs.load))

    assert slices >= 2 * 100 / restoring.SLICE_SEGMENTS


def test_a_poison_record_is_waited_for_and_never_written() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(2)
    bad = logs.send(None)
    logs.send_many(2)
    logs.read()

    held_up = logs.persist()
    logs.finish("poison", bad)
    after = logs.persist()

    assert held_up is not None and held_up.position == bad
    assert after is not None and after.position == logs.end


# ---------------------------------------------------------------------- what is merged


weights = st.lists(st.integers(1, 2 * FULL), max_size=300)


@given(weights)
def test_what_is_merged_fits_and_is_side_by_side(found: list[int]) -> None:
    runs = mergeable(found)

    assert all(stop - start > 1 and sum(found[start:stop]) <= FULL for start, stop in runs)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(runs))


@given(weights)
def test_merging_comes_to_an_end_and_leaves_few(found: list[int]) -> None:
    rounds = 0
    while runs := mergeable(found):
        for start, stop in reversed(runs):
            found[start:stop] = [sum(found[start:stop])]
        rounds += 1

    assert rounds <= 10
    assert len(found) <= 2 * sum(found) / FULL + ROWS_A_SEGMENT


def test_a_message_is_rewritten_once_for_each_tier() -> None:
    """One by one, as they are left at checkpoints."""
    found: list[int] = []
    rewritten = count = 0
    for _ in range(20 * FULL):
        found.append(1)
        count += 1
        for start, stop in reversed(mergeable(found[-60:])):
            shift = max(0, len(found) - 60)
            rewritten += sum(found[shift + start : shift + stop])
            found[shift + start : shift + stop] = [sum(found[shift + start : shift + stop])]

    assert rewritten <= 5 * count
