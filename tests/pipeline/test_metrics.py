"""The windows of each queue count every effect exactly once, even if the job is killed or fails."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from marq.core.history import Envelope
from marq.core.markers import End, Keepalive, Own, Purge, Release, Start, Tick, encode
from marq.errors import PipelineError, TopicError
from pipeline import windows
from pipeline.metrics import CHECKPOINT, METRICS, STATE, Counting
from pipeline.metrics_walker import BUCKETS, COUNTS, MetricsWalker, Plan, bucket_of
from pipeline.options import Job
from tests.pipeline.lab import Installation, finish
from tests.pipeline.tables_lab import read

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

Make = Callable[..., Installation]
LEASE_MS = 600_000
MINUTE = 60_000
DAY_S = 86_400


# -- what is counted: the walker alone -----------------------------------------------------------------------------

#: A record of a log: the queue log's envelopes, or markers at a time.
Step = Envelope | tuple[int, int, list[Any]]


def message(offset: int, at_ms: int, queue: bytes | None = b"q", size: int = 10, *headers: Any) -> Envelope:
    return Envelope(offset, at_ms, queue, None, headers, size)


class Counted:
    """What walkers find in steps, cut into batches anywhere."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int, str]] = Counter()
        self.waits: dict[tuple[str, int], tuple[int, int, int]] = {}
        self._state: list[tuple[str, bytes]] = []
        self._positions = (0, 0)

    def batch(self, steps: Sequence[Step]) -> Counted:
        queue, markers = self._positions
        for step in steps:
            if isinstance(step, Envelope):
                queue = max(queue, step.offset + 1)
            else:
                markers = max(markers, step[0] + 1)
        self._positions = (queue, markers)
        walker = MetricsWalker(0, msgspec.msgpack.encode(Plan(0, queue, 0, markers, None, MINUTE)))
        for key, value in self._state:
            walker.row(key, value)
        walker.begin()
        for step in steps:
            if isinstance(step, Envelope):
                walker.read([step], [None])
            else:
                walker.fold(step[0], step[1], encode(step[2], by="test", seq=step[0]))
        walker.end()
        rows = [row for batch in walker.results() for row in batch.to_pylist()]
        self._state = [(row["state_key"], row["state_value"]) for row in rows if row["state_key"] is not None]
        for row in rows:
            if row["state_key"] is None:
                place = (row["queue"], row["start_ms"] // MINUTE)
                self.counts.update({(*place, name): row[name] for name in COUNTS if row[name]})
                count, total, most = self.waits.get(place, (0, 0, 0))
                self.waits[place] = (
                    count + sum(row["waiting_histogram"]),
                    total + row["waiting_sum_ms"],
                    max(most, row["waiting_max_ms"]),
                )
        return self

    def of(self, queue: str, window: int) -> dict[str, int]:
        return {name: count for (q, w, name), count in self.counts.items() if (q, w) == (queue, window)}


def test_what_took_effect_is_counted_in_the_window_in_which_it_did() -> None:
    found = Counted().batch(
        [
            (0, 1_000, [Own("w", "n")]),
            message(0, 1_000),
            message(1, 2_000, b"q", 5),
            message(2, 3_000, b"other", -1, ("marq-delay-ms", b"2000")),
            message(3, 3_000, b"\xff", 7),
            (1, 4_000, [Start(0, 1, [0, 2], 1_000), End(0, [3, 4], "poison")]),
            (2, 59_000, [End(0, [1, 2], "acked", 1)]),
            (3, 61_000, [Tick()]),
            (4, 62_000, [Start(0, 2, [0, 1], 1_000, "", 2), Start(0, 3, [2, 3], 1_000)]),
            (5, 63_000, [Keepalive(0, 2, [0, 1], 9_000), Release(0, 3, [2, 3])]),
            # without effect: it was given back, it is done, it is no receipt
            (6, 64_000, [Keepalive(0, 3, [2, 3], 9_000), End(0, [1, 2], "acked", 1), End(0, [0, 1], "acked", 9)]),
            (7, 130_000, [End(0, [0, 1], "dead"), Purge(0, "other", 3)]),
        ]
    )
    assert found.of("q", 0) == {"sent": 2, "bytes": 15, "deliveries": 2, "first_deliveries": 2, "acked": 1}
    assert found.waits["q", 0] == (2, 3_000 + 2_000, 3_000)
    assert found.of("q", 1) == {"deliveries": 1, "redeliveries": 1, "extensions": 1}
    assert found.of("q", 2) == {"dead": 1}
    assert found.of("other", 0) == {"sent": 1}
    assert found.of("other", 1) == {"deliveries": 1, "first_deliveries": 1, "released": 1}
    assert found.waits["other", 1] == (1, 62_000 - 5_000, 62_000 - 5_000), "from when its delay was over"
    assert found.of("other", 2) == {"purged": 1}
    assert found.of("", 0) == {"sent": 1, "bytes": 7, "poison": 1}


def test_a_delivery_that_was_not_handed_out_does_not_make_the_next_one_a_redelivery() -> None:
    found = Counted().batch(
        [
            (0, 1_000, [Own("w", "n")]),
            message(0, 1_000),
            (1, 2_000, [Start(0, 1, [0, 1], LEASE_MS), Release(0, 1, [0, 1], counted=False)]),
            (2, 3_000, [Start(0, 2, [0, 1], LEASE_MS)]),
        ]
    )
    assert found.of("q", 0) == {"sent": 1, "bytes": 10, "deliveries": 2, "first_deliveries": 2, "uncounted": 1}


def test_what_happened_before_the_message_was_read_is_counted_when_it_is() -> None:
    steps: list[Step] = [
        (0, 1_000, [Own("w", "n")]),
        (1, 2_000, [Start(0, 1, [0, 3], LEASE_MS)]),
        (2, 3_000, [End(0, [0, 1], "acked", 1), Purge(0, "gone", 2)]),
        (3, 4_000, [End(0, [1, 2], "acked", 1)]),
        message(0, 1_500),
        message(1, 1_500, b"gone"),
        message(2, 1_500),
    ]
    found = Counted().batch(steps[:4]).batch(steps[4:5]).batch(steps[5:])
    assert found.of("q", 0) == {"sent": 2, "bytes": 20, "deliveries": 2, "first_deliveries": 2, "acked": 1}
    assert found.waits["q", 0] == (2, 1_000, 500)
    assert found.of("gone", 0) == {"sent": 1, "bytes": 10, "deliveries": 1, "first_deliveries": 1, "purged": 1}


@pytest.mark.parametrize("seed", range(5))
def test_batches_may_be_cut_anywhere(seed: int) -> None:
    rng = random.Random(seed)
    steps: list[Step] = [(0, 0, [Own("w", "n")])]
    at_ms, sent = 1_000, 0
    for offset in range(1, 60):
        deliveries = offset
        at_ms += rng.randrange(5_000)
        for _ in range(rng.randrange(4)):
            steps.append(message(sent, at_ms, rng.choice([b"a", b"b"])))
            sent += 1
        start = rng.randrange(sent + 1)
        some = [start, start + 1 + rng.randrange(4)]
        marker = rng.choice(
            [
                Start(0, deliveries, some, rng.choice([1, LEASE_MS])),
                End(0, some, "acked", rng.randrange(1, deliveries + 1)),
                End(0, some, "dead"),
                Release(0, rng.randrange(1, deliveries + 1), some, counted=rng.random() < 0.7),
                Purge(0, "a", some[0]),
            ]
        )
        steps.append((offset, at_ms, [marker]))
    whole, cut = Counted().batch(steps), Counted()
    while steps:
        count = rng.randrange(1, 12)
        cut.batch(steps[:count])
        steps = steps[count:]
    assert (cut.counts, cut.waits) == (whole.counts, whole.waits), f"seed {seed}"


def test_times_fall_into_buckets_nine_percent_apart() -> None:
    bounds = [2 ** (i / 8) for i in range(BUCKETS)]
    for ms in [1, 2, 3, 10, 999, 1000, 60_000, 86_400_000]:
        bucket = bucket_of(ms)
        assert bounds[bucket - 1] < ms <= bounds[bucket] * 1.000001 or (ms, bucket) == (1, 1)
    assert bucket_of(0) == 0
    assert bucket_of(10**12) == BUCKETS - 1


# -- the job: table and topic ------------------------------------------------------------------------------------


def count_once(spark: SparkSession, here: Installation, **options: Any) -> None:
    job = Counting(here.job, **{"window_ms": DAY_S * 1000, **options})
    job.check()
    job.run(spark)


def totals(spark: SparkSession, here: Installation) -> dict[str, dict[str, int]]:
    """The counts above 0, by queue, over all windows (a test may run over midnight)."""
    found: dict[str, Counter[str]] = {}
    for row in rows(spark, here):
        found.setdefault(row.queue, Counter()).update({name: row[name] for name in COUNTS})
    return {queue: {name: n for name, n in counts.items() if n} for queue, counts in found.items()}


def rows(spark: SparkSession, here: Installation) -> list[Row]:
    return spark.read.format("delta").load(here.job.path(METRICS)).orderBy("queue", "start_ms").collect()


def published(here: Installation) -> dict[str, dict[str, Any]]:
    """The last record of each key in the topic."""
    found = {record.key: record.value for record in read(here, f"{here.settings.name}.metrics", 0)}
    return {(key or b"").decode(): json.loads(value or b"") for key, value in found.items()}


def some_traffic(here: Installation, number: int, count: int, first: int = 0) -> None:
    """`count` messages of a partition, from offset `first` on: all are delivered, the first half is acked."""
    here.send(number, *[(b"orders", b"12345")] * count)
    delivery = first + 1
    here.mark(
        number,
        *([[Own("w", "n")]] if not here.kafka.bounds(here.settings.markers_topic)[number][1] else []),
        [Start(0, delivery, [first, first + count], LEASE_MS)],
        [End(0, [first, first + count // 2], "acked", delivery)],
    )


def expected(count: int) -> dict[str, int]:
    return {
        "sent": count,
        "bytes": 5 * count,
        "deliveries": count,
        "first_deliveries": count,
        "acked": count // 2,
    }


def test_table_and_topic_say_the_same_and_a_batch_that_is_repeated_counts_once(
    spark: SparkSession, installation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = installation(partitions=2)
    some_traffic(here, 0, 10)
    here.send(1, (None, b"poison"))

    count_once(spark, here)
    assert totals(spark, here) == {"orders": expected(10), "": {"sent": 1, "bytes": 6}}

    some_traffic(here, 0, 4, first=10)
    some_traffic(here, 1, 2, first=1)
    here.mark(0, [End(0, [5, 6], "dead")])
    with monkeypatch.context() as patch:
        # killed when table and topic are written, and its state is not
        patch.setattr(windows, "_write_state", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
        with pytest.raises(PipelineError, match="killed here"):
            count_once(spark, here)
    count_once(spark, here)
    count_once(spark, here)
    orders = expected(16) | {"acked": 5 + 2 + 1, "dead": 1}
    assert totals(spark, here) == {"orders": orders, "": {"sent": 1, "bytes": 6}}
    table, topic = rows(spark, here), published(here)
    assert {f"{row.queue}@{row.start_ms}" for row in table} == topic.keys()
    for row in table:
        said = topic[f"{row.queue}@{row.start_ms}"]
        assert said.pop("v") == 1
        assert said == {
            name: value
            for name, value in row.asDict().items()
            if name not in ("day", "batch", "waiting_histogram") and value is not None
        }
        assert row.end_ms - row.start_ms == DAY_S * 1000
        assert sum(row.waiting_histogram) == row.first_deliveries
        if row.first_deliveries:
            assert row.waiting_p50_ms <= row.waiting_p95_ms <= row.waiting_p99_ms <= row.waiting_max_ms


@pytest.mark.slow
def test_a_state_of_a_later_version_is_named_in_a_line(spark: SparkSession, installation: Make) -> None:
    here = installation(partitions=1)
    some_traffic(here, 0, 2)
    count_once(spark, here)
    later = msgspec.msgpack.encode({"v": 2}).hex()
    spark.sql(f"UPDATE delta.`{here.job.path(STATE)}` SET value = X'{later}' WHERE key = 'walker'")
    some_traffic(here, 0, 2, first=2)
    with pytest.raises(PipelineError, match="has a state of version 2, and this marq reads up to 1; upgrade marq"):
        count_once(spark, here)
    assert totals(spark, here) == {"orders": expected(2)}


@pytest.mark.slow
def test_a_window_is_final_once_the_logs_are_behind_its_end_and_what_is_lost_is_named(
    spark: SparkSession, installation: Make
) -> None:
    here = installation(partitions=1)
    count = partial(count_once, spark, here, window_ms=1_000, late_ms=0)
    here.send(0, (b"q", b"1"))
    count()
    assert [row.final for row in rows(spark, here)] == [False]
    time.sleep(1.1)
    here.send(0, *[(b"q", b"2")] * 4)
    here.delete_before({here.settings.queue_topic: 3}, 0)
    with pytest.raises(PipelineError, match=rf"lost: offsets 1 to 2 of {here.settings.queue_topic} partition 0 .*loss"):
        count()
    count(accept_loss=True)
    first, *others = rows(spark, here)
    assert (first.sent, first.final) == (1, True)
    assert (sum(row.sent for row in others), others[-1].final) == (2, False)
    assert published(here)[f"q@{first.start_ms}"]["final"] is True

    with pytest.raises(PipelineError, match=r"windows of 1 s; give --window 1, or choose another folder"):
        count(window_ms=2_000)
    other = installation(partitions=1)
    with pytest.raises(PipelineError, match="belongs to another topic or Kafka"):
        Counting(Job(other.settings, here.data), window_ms=1_000).run(spark)
    shutil.rmtree(here.job.path(STATE))
    with pytest.raises(PipelineError, match=rf"{STATE} is gone, but .*{CHECKPOINT} continues after"):
        count()


@pytest.mark.slow
def test_a_job_that_is_killed_goes_on_where_it_was(spark: SparkSession, installation: Make) -> None:
    here = installation(partitions=2)
    for number in (0, 1):
        some_traffic(here, number, 200)
    process = here.start_job("metrics", "--window", str(DAY_S), "--interval", "0")
    try:
        deadline = time.monotonic() + 250  # within the time of a test, even on a slow machine
        log = Path(here.job.path(METRICS), "_delta_log")
        # the rows are in the table, in its second commit; the topic and the state may or may not be written
        while time.monotonic() < deadline and process.poll() is None and len([*log.glob("*.json")]) < 2:
            time.sleep(0.01)
    finally:
        process.kill()
        _, err = process.communicate()
    assert len([*log.glob("*.json")]) >= 2, err
    for number in (0, 1):
        some_traffic(here, number, 100, first=200)

    count_once(spark, here)

    assert totals(spark, here) == {"orders": expected(600)}
    assert {key.partition("@")[0]: row["sent"] for key, row in published(here).items()}.keys() == {"orders"}
    assert sum(row["sent"] for row in published(here).values()) == 600


# -- what it refuses ------------------------------------------------------------------------------------------------


def test_without_its_topics_nothing_is_made(installation: Make) -> None:
    here = installation(create=False)
    job = finish(here.start_job("metrics", "--once"))
    assert job.returncode == 2
    assert job.stderr.startswith(f"marq: topic {here.settings.queue_topic} does not exist at ")
    assert job.stderr.count("\n") == 1
    assert not Path(here.data).exists()
    assert f"{here.settings.name}.metrics" not in here.kafka.topics()


def test_topics_of_marqs_own_are_not_written_to(installation: Make) -> None:
    here = installation(partitions=1)
    with pytest.raises(PipelineError, match="is one of marq's own topics; choose another with --topic"):
        Counting(here.job, topic=here.settings.queue_topic).check()
    with pytest.raises(TopicError, match="could not be created"):
        Counting(here.job, topic="no/topic").check()
