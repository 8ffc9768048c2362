"""Batches that Java's client, and so Spark, fails at cost the offsets that can't be decoded, and no job."""

from __future__ import annotations

import asyncio
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.kafka.broker import EmbeddedBroker
from marq.core.markers import End, Own, Start, Tick, encode
from marq.errors import PipelineError
from pipeline import archive
from pipeline.audit import audit
from pipeline.damage import Damage, around, find
from pipeline.metrics import Counting
from tests.integration.cluster import until
from tests.pipeline.lab import Installation
from tests.pipeline.tables_lab import run_archive
from tests.pipeline.test_archive import forget_commit, offsets, rows
from tests.pipeline.test_metrics import DAY_S, totals
from tests.raw_batches import Raw, batch
from tests.raw_client import produce

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW_MS = int(time.time() * 1000)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A Kafka whose disk can be written to."""
    with EmbeddedBroker(tmp_path_factory.mktemp("kafka")) as running:
        yield running


@pytest.fixture
def here(broker: EmbeddedBroker, tmp_path: Path) -> Installation:
    return Installation(broker.bootstrap, tmp_path, partitions=2)


class Disk:
    """Appends batches to a partition, and changes them where they lie."""

    def __init__(self, broker: EmbeddedBroker, topic: str, partition: int) -> None:
        self.bootstrap = broker.bootstrap
        self.topic, self.partition = topic, partition
        self.log = broker.home / "logs" / f"{topic}-{partition}" / f"{0:020}.log"

    def append(self, raw: bytes) -> int:
        """Where the batch begins in the log."""
        size = self.log.stat().st_size if self.log.exists() else 0  # the topic may be just made
        assert asyncio.run(produce(self.bootstrap, self.topic, self.partition, raw)) == 0
        return size

    def spoil(self, good: bytes, bad: bytes) -> None:
        """Append a batch that the broker takes, and put another of its length in its place."""
        assert len(good) == len(bad)
        at = self.append(good)
        with self.log.open("r+b") as log:
            log.seek(at)
            base = log.read(8)
            log.seek(at)
            log.write(base + bad[8:12] + struct.pack(">i", 0) + bad[16:])


def message(i: int, **options: object) -> Raw:
    return Raw(b"%03d" % i, b"orders", **options)  # type: ignore[arg-type]


def three(first: int, middle: Raw | None = None, **options: object) -> bytes:
    records = (message(first), middle or message(first + 1), message(first + 2))
    return batch(*records, timestamp=NOW_MS, **options)  # type: ignore[arg-type]


#: Offsets of what `damaged_queue` writes that no client can decode.
UNREADABLE = {3, 4, 5, 10, 11, 15, 16, 17, 19}
COUNT = 25


def damaged_queue(disk: Disk) -> None:
    """Messages `000`, `001`, … in batches of three, each with the number of its offset."""
    disk.append(three(0))
    disk.spoil(three(3), three(3, bad_crc=True))
    disk.append(three(6, codec="zstd"))
    # a broker takes this from any producer
    assert (
        asyncio.run(
            produce(disk.bootstrap, disk.topic, disk.partition, three(9, message(10, length=999), codec="gzip"))
        )
        == 0
    )
    disk.append(three(12))
    disk.spoil(three(15), three(15, codec_number=6))
    disk.spoil(three(18), three(18, message(19, header_count=5)))
    disk.spoil(three(21), three(21, count=4))
    disk.append(batch(message(24), timestamp=NOW_MS))


@pytest.fixture
def queue(broker: EmbeddedBroker, here: Installation) -> Disk:
    return Disk(broker, here.settings.queue_topic, 0)


def test_what_can_be_decoded_is_archived_and_the_rest_is_named(
    broker: EmbeddedBroker, here: Installation, queue: Disk, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged_queue(queue)
    here.send(1, (b"orders", b"hello"))

    run_archive(spark, here.job)

    found = {row.offset: row for row in rows(spark, here) if row.partition == 0}
    assert sorted(found) == list(range(COUNT))
    assert len(rows(spark, here)) == COUNT + 1
    assert {o for o, row in found.items() if row.queue is None} == UNREADABLE
    assert all(bytes(row.payload) == b"%03d" % o for o, row in found.items() if row.queue == "orders")
    aside = {row.offset: row for row in rows(spark, here, archive.MALFORMED)}
    assert aside.keys() == UNREADABLE
    reasons = {3: "its checksum is wrong", 10: "longer than its batch", 15: "unknown codec 6", 19: "has no end"}
    for offset, reason in reasons.items():
        assert aside[offset].reason.startswith("can't be decoded") and reason in aside[offset].reason
        assert aside[offset].payload
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("marq: ")]
    assert len(told) == 5  # each once
    assert all(f"{here.settings.queue_topic} partition 0: " in line for line in told)
    assert "3 of the records at offsets 3 to 5 can't be decoded (its checksum is wrong)" in told[0]
    assert "all records can be decoded, ends with offset 23" in told[4]

    forget_commit(spark, here, "messages")
    queue.append(batch(message(25), timestamp=NOW_MS))
    run_archive(spark, here.job)
    assert offsets(rows(spark, here)) == [(0, i) for i in range(COUNT + 1)] + [(1, 0)]
    assert {o for _, o in offsets(rows(spark, here, archive.MALFORMED))} == UNREADABLE
    assert len(rows(spark, here, archive.MALFORMED)) == len(UNREADABLE)


def test_markers_and_poison_too(broker: EmbeddedBroker, here: Installation, spark: SparkSession) -> None:
    own = encode([Own("w", "n")], by="test", seq=0)
    for topic in (here.settings.markers_topic, here.settings.poison_topic):
        disk = Disk(broker, topic, 0)
        good = batch(Raw(own, None), timestamp=NOW_MS)
        disk.append(good)
        disk.spoil(good, batch(Raw(own, None), timestamp=NOW_MS, bad_crc=True))
        disk.append(good)

    run_archive(spark, here.job)

    found = rows(spark, here, archive.MARKERS)
    assert [(row.offset, row.value and bytes(row.value), row.markers is None) for row in found] == [
        (0, own, False),
        (1, None, True),
        (2, own, False),
    ]
    aside = [row for row in rows(spark, here, archive.MALFORMED) if row.offset == 1]
    assert sorted(row.topic for row in aside) == [here.settings.markers_topic, here.settings.poison_topic]
    assert all("its checksum is wrong" in row.reason for row in aside)


@pytest.mark.slow
def test_the_metrics_count_what_can_be_decoded(
    broker: EmbeddedBroker, here: Installation, queue: Disk, spark: SparkSession
) -> None:
    damaged_queue(queue)
    here.mark(0, [Own("w", "n")], [Start(0, 1, [0, COUNT], 600_000)])
    good = COUNT - len(UNREADABLE)
    for _ in range(2):
        job = Counting(here.job, window_ms=DAY_S * 1000)
        job.check()
        job.run(spark)
        found = totals(spark, here)
        assert found["orders"] == {"sent": good, "bytes": 3 * good, "deliveries": good, "first_deliveries": good}
        assert found[""]["sent"] == len(UNREADABLE)


def test_an_audit_reads_around_damage_in_both_logs(
    broker: EmbeddedBroker, here: Installation, queue: Disk, spark: SparkSession
) -> None:
    """Of that in the queue log workers left copies; here none has run."""
    damaged_queue(queue)
    here.mark(0, [Own("w", "w/1")], [Start(0, 1, [0, COUNT], 600_000, "r")])
    markers = Disk(broker, here.settings.markers_topic, 0)
    tick = batch(Raw(encode([Tick()], by="test", seq=2), None), timestamp=NOW_MS)
    markers.spoil(tick, tick[:17] + bytes([tick[17] ^ 1]) + tick[18:])
    good = sorted(set(range(COUNT)) - UNREADABLE)
    here.mark(0, [End(0, [b for o in good for b in (o, o + 1)], "acked", 1)])

    verdict = audit(spark, here.job)

    (summary,) = (s for s in verdict.summaries if s.partition == 0)
    assert summary.done["orders"] == {"acked": len(good)}
    assert all(fault.offset in UNREADABLE for fault in verdict.faults), verdict.faults

    run_archive(spark, here.job)
    archived = audit(spark, here.job, archive=True)
    assert sorted(archived.faults) == sorted(verdict.faults), "what stands for damage is the same in archive and Kafka"


def test_an_error_that_has_another_cause_ends_the_job(
    here: Installation, queue: Disk, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is damage: it is read around once, not for ever."""
    damaged_queue(queue)

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(archive, "_append", fails)
    with pytest.raises(PipelineError, match="disk full"):
        run_archive(spark, here.job)


def test_damage_is_found_where_it_is_and_nowhere_else(here: Installation, queue: Disk) -> None:
    damaged_queue(queue)
    topic = queue.topic

    def found(*ranges: tuple[int, int]) -> list[tuple[int, int, int]]:
        damaged = find(here.kafka, {topic: {0: ranges, 1: [(0, 100)]}})
        return [(d.start, d.stop, d.unreadable) for d in damaged.get((topic, 0), ())]

    everything = [(3, 6, 3), (10, 12, 2), (15, 18, 3), (19, 21, 1), (23, 24, 0)]
    assert found((0, COUNT)) == found((0, 100)) == everything
    assert found((0, 3), (6, 10), (12, 15), (24, 25)) == []
    assert found((4, 5), (16, 17)) == [(4, 6, 2), (16, 18, 2)]
    assert found((0, 17)) == everything[:3]


@pytest.mark.slow
def test_a_job_that_runs_goes_on_behind_what_comes_damaged(here: Installation, queue: Disk) -> None:
    queue.append(three(0))
    process = here.start_job("archive", "--interval", "0")
    group, topic = here.settings.archive_group, queue.topic

    def archived() -> int:
        return here.kafka.committed(group).get(topic, {}).get(0, 0)

    try:
        until(lambda: archived() == 3, "the first batch", 90)
        queue.spoil(three(3), three(3, bad_crc=True))
        queue.append(three(6))
        until(lambda: archived() == 9, "what is behind", 90)
        queue.spoil(three(9), three(9, codec_number=6))
        until(lambda: archived() == 12, "the next damage", 90)
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err.count("\n") == 2 and "offsets 3 to 5 can't be decoded" in err and "offsets 9 to 11" in err
    assert "Archived 12 messages" in out


def damage(start: int, stop: int) -> Damage:
    return Damage(start, stop, "", [], 0)


@pytest.mark.parametrize(
    ("damaged", "plain", "careful"),
    [
        ([], [(5, 9)], []),
        ([damage(5, 6)], [(6, 9)], []),
        ([damage(6, 7)], [(7, 9)], [(5, 6)]),
        ([damage(8, 9)], [(5, 6)], [(6, 8)]),
        ([damage(6, 7), damage(8, 9)], [(9, 9)], [(5, 6), (7, 8)]),
        ([damage(5, 9)], [(9, 9)], []),
        ([damage(2, 6), damage(8, 12)], [(9, 9)], [(6, 8)]),
        ([damage(2, 5), damage(9, 12)], [(5, 7)], [(7, 9)]),
        ([damage(2, 5), damage(10, 12)], [(5, 8)], [(8, 9)]),
        ([damage(2, 5), damage(11, 12)], [(5, 9)], []),
    ],
    ids=map(str, range(10)),
)
def test_java_is_not_asked_for_what_it_fails_at(
    damaged: list[Damage],
    plain: list[tuple[int, int]],
    careful: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.damage.CAREFUL_OFFSETS", 2)
    assert around(5, 9, damaged) == (plain, careful)
