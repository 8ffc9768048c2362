"""There is one row for each message, after any number of runs and kills."""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from marq.core.markers import End, Keepalive, Own, Purge, Release, Start, Tick
from marq.errors import PipelineError
from pipeline.lifecycle import Done, lifecycle, lifecycle_path
from pipeline.tables import SOURCE, set_property
from tests.pipeline.lab import Installation
from tests.pipeline.tables_lab import archive

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

Make = Callable[..., Installation]
LEASE_MS = 600_000


def histories(spark: SparkSession, here: Installation) -> dict[tuple[int, int], Row]:
    rows = spark.read.format("delta").load(lifecycle_path(here.job)).collect()
    found = {(row.partition, row.offset): row for row in rows}
    assert len(found) == len(rows), "a message has two rows"
    return found


def test_a_row_tells_a_life_that_goes_over_several_runs(spark: SparkSession, installation: Make) -> None:
    here = installation(partitions=2)
    here.send(0, (b"q", b"12345", [("marq-group", b"g")]), (b"q", b"1"), (b"other", None), (b"\xff", b"poison"))
    here.send(1, (b"q", b"waits", [("marq-delay-ms", b"600000")]))
    here.mark(0, [Own("w1", "n")], [Start(0, 1, [0, 2], LEASE_MS, "shop.pay")], [Keepalive(0, 1, [0, 1], LEASE_MS)])
    archive(spark, here)

    assert lifecycle(spark, here.job) == Done(1, 0, 5)
    found = histories(spark, here)
    assert {place: row.state for place, row in found.items()} == {
        (0, 0): "in_flight",
        (0, 1): "in_flight",
        (0, 2): "ready",
        (0, 3): "ready",
        (1, 0): "delayed",
    }
    assert lifecycle(spark, here.job) is None

    here.mark(0, [Release(0, 1, [0, 1])], [Start(0, 2, [0, 1], LEASE_MS, "shop.pay", 2), Tick()])
    here.mark(0, [End(0, [0, 2], "acked", 1), End(0, [3, 4], "poison")], [End(0, [0, 1], "acked", 2)])
    here.mark(0, [Purge(0, "other", 3)])
    archive(spark, here)

    assert lifecycle(spark, here.job) == Done(2, 4, 1)
    found = histories(spark, here)
    first = found[0, 0]
    assert (first.state, first.outcome, first.queue, first.size, first.group) == ("done", "acked", "q", 5, "g")
    assert [(d.attempt, d.delivery, d.owner, d.receiver, d.extensions, d.end) for d in first.deliveries] == [
        (1, 1, "w1", "shop.pay", 1, "acked"),
        (2, 2, "w1", "shop.pay", 0, "overtaken"),
    ]
    assert (first.receives, first.redeliveries, first.extensions, first.releases) == (2, 1, 1, 1)
    assert first.ended_ms >= first.deliveries[1].start_ms >= first.deliveries[0].start_ms >= first.sent_ms
    assert first.deliveries[0].deadline_ms > first.deliveries[0].start_ms + LEASE_MS - 1
    assert first.waiting_ms == first.deliveries[0].start_ms - first.sent_ms
    assert first.day == datetime.datetime.fromtimestamp(first.sent_ms / 1000, datetime.UTC).date()
    assert {place: row.outcome for place, row in found.items()} == {
        (0, 0): "acked",
        (0, 1): "acked",
        (0, 2): "purged",
        (0, 3): "poison",
        (1, 0): None,
    }
    assert (found[0, 2].waiting_ms, found[0, 2].size, found[0, 2].deliveries) == (None, -1, [])
    assert found[0, 3].queue is None

    for table in ("lifecycle", "lifecycle_state"):
        shutil.rmtree(here.job.path(table))
    assert lifecycle(spark, here.job) == Done(1, 4, 1)
    assert histories(spark, here) == found, "one run comes to the same as two"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("walker", {"v": 2, "somewhere": [1]}, "has a state of version 2, and this marq reads up to 1; upgrade marq"),
        pytest.param("walker", {"v": "x"}, "has a damaged state: .*restore the table", marks=pytest.mark.slow),
        pytest.param(
            "manifest", {"v": 77}, "manifest of version 77, and this worker reads up to version", marks=pytest.mark.slow
        ),
    ],
)
def test_a_state_of_a_later_version_is_named_in_a_line_and_left_as_it_is(
    spark: SparkSession, installation: Make, key: str, value: dict[str, object], why: str
) -> None:
    here = installation(partitions=1)
    here.send(0, (b"q", b"1"))
    here.mark(0, [Own("w1", "n")])
    archive(spark, here)
    lifecycle(spark, here.job)
    state = f"delta.`{here.job.path('lifecycle_state')}`"
    spark.sql(f"UPDATE {state} SET value = X'{msgspec.msgpack.encode(value).hex()}' WHERE key = '{key}'")
    before = spark.sql(f"SELECT * FROM {state}").collect()
    here.send(0, (b"q", b"2"))
    archive(spark, here)
    with pytest.raises(PipelineError, match=f"lifecycle_state.*{why}"):
        lifecycle(spark, here.job)
    assert spark.sql(f"SELECT * FROM {state}").collect() == before
    assert histories(spark, here).keys() == {(0, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 6])
def test_a_job_that_is_killed_at_any_moment_loses_and_doubles_nothing(
    spark: SparkSession, installation: Make, kills: int
) -> None:
    here = installation(partitions=2)
    count = 300
    for number in (0, 1):
        here.send(number, *[(b"q", b"x") for _ in range(count)])
        here.mark(number, [Own("w1", "n")], [Start(0, 1, [0, count], LEASE_MS)], [End(0, [0, count - 10], "acked", 1)])
    archive(spark, here)

    killed(here, lambda _: rows_are_written(here))
    for _ in range(kills - 1):
        seconds = Random().uniform(2, 15)
        print(f"killed after {seconds:.2f} s")
        killed(here, lambda began, seconds=seconds: time.monotonic() - began > seconds)
    lifecycle(spark, here.job)

    found = histories(spark, here)
    assert found.keys() == {(number, offset) for number in (0, 1) for offset in range(count)}
    undone = [place for place, row in found.items() if row.state != "done"]
    assert sorted(undone) == [(number, count - 10 + i) for number in (0, 1) for i in range(10)]
    assert all(row.receives == 1 and len(row.deliveries) == 1 for row in found.values())

    set_property(spark, here.job.path("lifecycle_state"), SOURCE, "another topic")
    with pytest.raises(PipelineError, match="belongs to another topic or Kafka"):
        lifecycle(spark, here.job)


def killed(here: Installation, is_time: Callable[[float], bool]) -> None:
    """Run the job, and kill it with -9 when it is time; it may have ended."""
    process, began = here.start_job("lifecycle"), time.monotonic()
    while process.poll() is None and not is_time(began):
        time.sleep(0.02)
    process.kill()
    process.communicate()


def rows_are_written(here: Installation) -> bool:
    """True if the table has rows (its first commit only creates it)."""
    return (Path(lifecycle_path(here.job)) / "_delta_log" / f"{1:020}.json").exists()


def test_without_an_archive_there_is_no_lifecycle(spark: SparkSession, installation: Make) -> None:
    with pytest.raises(PipelineError, match="is not a table; `python -m pipeline archive` makes it"):
        lifecycle(spark, installation(partitions=1).job)
