"""The archive has every record of both topics exactly once, even if the job is killed or fails."""

from __future__ import annotations

import asyncio
import datetime
import logging
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import ArrayType, StructField

from app.engine.changelogs import Changelogs
from app.kafka.connection import until_kafka_takes_it
from app.kafka.topics import ensure_topics
from marq.core.markers import End, Own, Start, Tick
from marq.errors import PipelineError, TopicError
from pipeline import archive, files, queues, records, tables
from pipeline.audit import audit
from pipeline.compacted import records_of
from pipeline.logs import Archive, Bounds, bounds, logs
from pipeline.queues import ARCHIVED
from tests.pipeline.lab import Installation
from tests.pipeline.tables_lab import run_archive

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

Make = Callable[..., Installation]


def rows(spark: SparkSession, here: Installation, table: str = archive.MESSAGES) -> list[Row]:
    return spark.read.format("delta").load(here.job.path(table)).orderBy("partition", "offset").collect()


def offsets(found: list[Row]) -> list[tuple[int, int]]:
    return [(row.partition, row.offset) for row in found]


def test_messages_and_markers_are_archived_as_they_were(spark: SparkSession, installation: Make) -> None:
    here = installation()
    here.send(
        0, (b"orders", b"hello", [("marq-key", b"k"), ("marq-delay-ms", b"50"), ("marq-group", b"g"), ("a", None)])
    )
    here.send(1, (b"orders", None), (None, b"no queue"), (b"mail", b"x", [("marq-ttl-ms", b"soon")]))
    here.mark(0, [Own("w", "n")], [Start(0, 1, [0, 1], 1000, receiver="r"), End(0, [0, 1], "acked", 1)])
    here.write(here.settings.markers_topic, 1, [(b"key", b"no marker")])
    here.write(
        here.settings.poison_topic, 0, [(b"q", b"bad", [("marq-poison-reason", b"why"), ("marq-origin", b"1:7")])]
    )

    run_archive(spark, here.job)

    first, *others = rows(spark, here)
    today = datetime.datetime.now(datetime.UTC).date()
    assert (first.schema_version, first.topic, first.partition, first.offset) == (3, here.settings.queue_topic, 0, 0)
    assert (first.queue, bytes(first.key), bytes(first.payload), first.size) == ("orders", b"orders", b"hello", 5)
    assert (bytes(first.sender_key), first.delay_ms, first.ttl_ms, first.group) == (b"k", 50, None, "g")
    assert [(h.key, h.value) for h in first.headers][2:] == [("marq-group", b"g"), ("a", None)]
    assert abs((first.day - today).days) <= 1
    assert [(row.queue, row.size) for row in others] == [("orders", -1), (None, 8), (None, 1)]

    own, work, broken = rows(spark, here, archive.MARKERS)
    assert [m.type for m in own.markers] == ["own"]
    assert [(m.type, m.epoch, m.delivery, m.offsets, m.receiver) for m in work.markers] == [
        ("start", 0, 1, [0, 1], "r"),
        ("end", 0, 1, [0, 1], None),
    ]
    assert (work.by, work.seq) == ("test", 1)
    assert (bytes(broken.value), broken.markers) == (b"no marker", None)

    aside = {
        (row.topic.partition(".")[2], row.partition, row.offset): row for row in rows(spark, here, archive.MALFORMED)
    }
    assert {place: row.reason[:24] for place, row in aside.items()} == {
        ("queue", 1, 1): "no queue: the key is nul",
        ("queue", 1, 2): "header marq-ttl-ms is no",
        ("markers", 1, 0): "not a marker record: JSO",
        ("poison", 0, 0): "why",
    }
    assert aside["poison", 0, 0].origin == "1:7"
    assert bytes(aside["queue", 1, 1].payload) == b"no queue"
    assert bytes(aside["markers", 1, 0].key) == b"key"


@pytest.mark.slow
def test_nothing_in_the_archive_is_open_to_other_users(spark: SparkSession, installation: Make) -> None:
    here = installation(partitions=1)
    here.send(0, *[(b"a", b"x")] * 3)
    run_archive(spark, here.job)
    files = [file for file in Path(here.data).rglob("*") if file.is_file()]
    assert any(file.suffix == ".parquet" for file in files)
    assert [file for file in files if stat.S_IMODE(file.stat().st_mode) & 0o077] == []


def test_each_run_goes_on_where_the_last_one_ended(spark: SparkSession, installation: Make) -> None:
    here = installation()
    here.send(0, *[(b"q", b"%d" % i) for i in range(5)])
    run_archive(spark, here.job)
    here.send(0, *[(b"q", b"%d" % i) for i in range(5, 8)], (None, b"poison"))
    here.send(1, (b"q", b"other"))
    run_archive(spark, here.job)
    run_archive(spark, here.job)
    assert offsets(rows(spark, here)) == [(0, i) for i in range(9)] + [(1, 0)]
    assert offsets(rows(spark, here, archive.MALFORMED)) == [(0, 8)]


@pytest.mark.slow
def test_in_topic_mode_the_whole_topic_is_one_queue(spark: SparkSession, installation: Make) -> None:
    theirs = installation(partitions=1)
    topic = theirs.settings.queue_topic
    here = installation(queue_topic=topic, queue_id="jobs", partitions=1)
    here.send(0, (None, b"a"), (b"\xff", b"b"))
    run_archive(spark, here.job)
    assert [row.queue for row in rows(spark, here)] == ["jobs", "jobs"]
    assert rows(spark, here, archive.MALFORMED) == []


@pytest.mark.slow
def test_the_logs_of_the_archive_are_those_of_kafka(spark: SparkSession, installation: Make) -> None:
    here = installation()
    here.send(0, *[(b"q", b"x" * i, [("n", b"%d" % i)]) for i in range(6)])
    here.send(1, (None, None))
    here.mark(1, [Own("w", "n")], [Start(0, 1, [0, 1], 1000)])
    run_archive(spark, here.job)
    source = Archive(here.data)
    assert bounds(spark, source) == {0: Bounds(0, 6, 0, 0), 1: Bounds(0, 1, 0, 2)} == bounds(spark, here.kafka)
    for start, stop in ((None, None), ({0: (2, 0)}, {0: (5, 0), 1: (1, 1)})):
        archived = sorted(logs(spark, source, start, stop).collect(), key=lambda r: (r.log, r.partition, r.offset))
        live = sorted(logs(spark, here.kafka, start, stop).collect(), key=lambda r: (r.log, r.partition, r.offset))
        assert archived == live


# -- a batch that is repeated -----------------------------------------------------------------------------


def forget_commit(spark: SparkSession, here: Installation, flow: str) -> None:
    """Make it look as if the job was killed after it wrote the batch, before Spark noted that the batch is complete."""
    checkpoint = here.job.path(archive.CHECKPOINTS, flow)
    number = max(int(name) for name in files.names(spark, f"{checkpoint}/commits") if name.isdigit())
    files.delete(spark, f"{checkpoint}/commits/{number}")
    files.delete(spark, f"{checkpoint}/commits/.{number}.crc")


def test_a_batch_that_was_written_is_not_written_again(spark: SparkSession, installation: Make) -> None:
    here = installation(partitions=1)
    here.send(0, (b"q", b"0"), (None, b"poison"))
    here.mark(0, [Own("w", "n")])
    run_archive(spark, here.job)
    for flow in ("messages", "markers"):
        forget_commit(spark, here, flow)
    here.send(0, (b"q", b"2"))
    run_archive(spark, here.job)
    assert offsets(rows(spark, here)) == [(0, 0), (0, 1), (0, 2)]
    assert offsets(rows(spark, here, archive.MARKERS)) == [(0, 0)]
    assert offsets(rows(spark, here, archive.MALFORMED)) == [(0, 1)]


@pytest.mark.slow
def test_a_batch_that_was_half_written_gets_the_rest(
    spark: SparkSession, installation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = installation(partitions=1)
    run_archive(spark, here.job)
    here.send(0, (b"q", b"0"), (None, b"poison"))
    append = archive._append

    def killed(rows: Any, path: str, app: str, version: int) -> None:
        if path.endswith("malformed"):
            raise OSError("killed here")
        append(rows, path, app, version)

    with monkeypatch.context() as patch:
        patch.setattr(archive, "_append", killed)
        with pytest.raises(PipelineError, match="killed here"):
            run_archive(spark, here.job)
    assert offsets(rows(spark, here)) == [(0, 0), (0, 1)]
    assert rows(spark, here, archive.MALFORMED) == []

    run_archive(spark, here.job)
    assert offsets(rows(spark, here)) == [(0, 0), (0, 1)]
    assert offsets(rows(spark, here, archive.MALFORMED)) == [(0, 1)]


def test_without_its_checkpoints_it_goes_on_behind_what_is_in_the_tables(
    spark: SparkSession, installation: Make
) -> None:
    here = installation()
    here.send(0, (b"q", b"0"), (b"q", b"1"))
    run_archive(spark, here.job)
    shutil.rmtree(here.job.path("checkpoints"))
    here.send(0, (b"q", b"2"))
    here.send(1, (b"q", b"3"))
    run_archive(spark, here.job)
    assert offsets(rows(spark, here)) == [(0, 0), (0, 1), (0, 2), (1, 0)]


# -- what it refuses ----------------------------------------------------------------------------------------


def test_without_its_topic_nothing_is_made(spark: SparkSession, installation: Make) -> None:
    here = installation(create=False)
    with pytest.raises(TopicError, match=r"queue does not exist .*; start a worker"):
        run_archive(spark, here.job)
    assert not files.exists(spark, here.data)


def test_a_folder_with_something_else_in_it_is_left_alone(spark: SparkSession, installation: Make) -> None:
    here = installation()
    (here.folder / "pipeline/archive/messages").mkdir(parents=True)
    (here.folder / "pipeline/archive/messages/diary.txt").write_text("mine")
    with pytest.raises(PipelineError, match="archive/messages is not a table, and not empty"):
        run_archive(spark, here.job)
    assert files.names(spark, here.job.path(archive.MESSAGES)) == ["diary.txt"]


def test_a_delta_table_of_somebody_else_is_left_alone(spark: SparkSession, installation: Make) -> None:
    here = installation()
    spark.range(1).write.format("delta").save(here.job.path(archive.MESSAGES))
    with pytest.raises(PipelineError, match="not one of marq's"):
        run_archive(spark, here.job)


def test_tables_of_another_installation_are_refused(spark: SparkSession, installation: Make) -> None:
    here, there = installation(), installation()
    here.send(0, (b"q", b"0"))
    run_archive(spark, here.job)
    there.job = type(there.job)(there.settings, here.data)
    with pytest.raises(PipelineError, match="belongs to another topic or Kafka"):
        run_archive(spark, there.job)
    # the same checkpoint where the table does not know whose it is
    for table in (archive.MESSAGES, archive.MARKERS):
        spark.sql(f"ALTER TABLE delta.`{here.job.path(table)}` UNSET TBLPROPERTIES ('{tables.SOURCE}')")
    with pytest.raises(PipelineError, match=f"is the checkpoint of {here.settings.queue_topic}, not of"):
        run_archive(spark, there.job)


def test_nothing_is_made_where_one_of_the_tables_can_not_be(spark: SparkSession, installation: Make) -> None:
    here = installation()
    path = here.folder / "pipeline" / archive.MALFORMED
    path.mkdir(parents=True)
    (path / "note.txt").write_text("mine")
    with pytest.raises(PipelineError, match="archive/malformed is not a table, and not empty"):
        run_archive(spark, here.job)
    assert {p.name for p in (here.folder / "pipeline" / "archive").iterdir()} == {"malformed"}


def test_a_topic_that_was_made_anew_is_another_topic(spark: SparkSession, installation: Make) -> None:
    here = installation()
    run_archive(spark, here.job)
    other = installation(name=here.settings.name, queue_topic="x", create=False)
    topic = here.settings.queue_topic
    here.kafka.admin.delete_topics([topic])[topic].result()
    again = Installation(here.settings.kafka.removeprefix("kafka://"), other.folder, name=here.settings.name)
    again.job = here.job
    with pytest.raises(PipelineError, match="belongs to another topic or Kafka"):
        run_archive(spark, again.job)


def test_a_checkpoint_whose_table_is_gone_is_refused(spark: SparkSession, installation: Make) -> None:
    here = installation()
    here.send(0, (b"q", b"0"))
    run_archive(spark, here.job)
    shutil.rmtree(here.job.path(archive.MESSAGES))
    with pytest.raises(
        PipelineError, match=r"archive/messages is gone, but .*checkpoints/archive/messages continues after"
    ):
        run_archive(spark, here.job)
    assert not files.exists(spark, here.job.path(archive.MESSAGES))


def test_a_table_of_a_later_version_is_refused(spark: SparkSession, installation: Make) -> None:
    here = installation()
    run_archive(spark, here.job)
    spark.sql(f"ALTER TABLE delta.`{here.job.path(archive.MARKERS)}` SET TBLPROPERTIES ('{tables.VERSION}' = '4')")
    with pytest.raises(PipelineError, match="has rows of version 4, and this marq reads up to 3; upgrade marq"):
        run_archive(spark, here.job)


@pytest.mark.slow
def test_a_table_of_an_earlier_version_gets_the_columns_that_it_lacks(spark: SparkSession, installation: Make) -> None:
    here = installation()
    path = here.job.path(archive.MESSAGES)
    earlier = type(records.MESSAGES)([f for f in records.MESSAGES if f.name not in ("origin", "headers")])
    tables.open_table(spark, path, earlier, version=0, partition_by=["day"])
    here.send(0, (b"q", b"0", [("marq-origin", b"0:1")]))
    run_archive(spark, here.job)
    assert [row.origin for row in rows(spark, here)] == ["0:1"]
    properties = tables.properties_of(spark, path)
    assert properties[tables.VERSION] == "3"
    assert properties["delta.dataSkippingStatsColumns"] == "partition,offset,timestamp"


def test_a_table_of_an_earlier_version_gets_the_fields_that_its_markers_lack(
    spark: SparkSession, installation: Make
) -> None:
    here = installation()
    path = here.job.path(archive.MARKERS)
    struct = type(records.MARKER)
    fields = [f for f in records.MARKERS if f.name != "markers"]
    marker = struct([f for f in records.MARKER if f.name not in ("sure", "time_ms", "clock_ms")])
    earlier = struct([*fields, StructField("markers", ArrayType(marker))])
    tables.open_table(spark, path, earlier, version=1, partition_by=["day"])
    here.mark(0, [Tick("", False, 0, 5, 6)])
    run_archive(spark, here.job)
    (row,) = spark.read.format("delta").load(path).collect()
    assert [(m.sure, m.time_ms, m.clock_ms) for m in row.markers] == [(False, 5, 6)]


def test_records_that_were_deleted_before_they_were_archived_are_an_error(
    spark: SparkSession, installation: Make
) -> None:
    here = installation(partitions=1)
    here.send(0, (b"q", b"0"))
    run_archive(spark, here.job)
    here.send(0, *[(b"q", b"%d" % i) for i in range(1, 6)])
    here.delete_before({here.settings.queue_topic: 4}, 0)
    with pytest.raises(PipelineError, match=r"^lost: offsets 1 to 3 of .*queue partition 0 .*--accept-loss"):
        run_archive(spark, here.job)
    run_archive(spark, here.job, accept_loss=True)
    assert offsets(rows(spark, here)) == [(0, 0), (0, 4), (0, 5)]


# -- what is kept ---------------------------------------------------------------------------------------------


def test_its_positions_stand_in_kafka(spark: SparkSession, installation: Make) -> None:
    here = installation()
    here.send(1, (b"q", b"0"), (b"q", b"1"))
    here.mark(0, [Own("w", "n")])
    run_archive(spark, here.job)
    found = here.kafka.committed(here.settings.archive_group)
    assert found[here.settings.queue_topic] == {0: 0, 1: 2}
    assert found[here.settings.markers_topic] == {0: 1, 1: 0}


@pytest.mark.parametrize(
    ("archived", "left"), [({0: 3}, 3), ({1: 9}, 0), (None, 5)], ids=["partly", "not yet", "never"]
)
def test_retention_keeps_what_is_not_archived_yet(
    installation: Make, archived: dict[int, int] | None, left: int
) -> None:
    here = installation(retention_history_ms=0)
    topic = here.settings.queue_topic
    here.send(0, *[(b"q", b"%d" % i) for i in range(6)])
    if archived is not None:
        here.kafka.commit(here.settings.archive_group, {topic: archived})

    async def trim() -> None:
        app: Any = SimpleNamespace(log=logging.getLogger("test"))
        changelogs = Changelogs(app, here.settings)
        topics = await ensure_topics(here.settings, here.settings.name)
        try:
            owned: Any = SimpleNamespace(number=0, retire_at_ms=0)
            await changelogs.trim(owned, topics, position=5, markers_position=0)
        finally:
            await changelogs.close()

    asyncio.run(trim())
    assert here.kafka.bounds(topic)[0] == (left, 6)


@pytest.mark.slow
def test_small_files_are_put_together(spark: SparkSession, installation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    here = installation(partitions=1)
    spark.conf.set("spark.databricks.delta.autoCompact.minNumFiles", "4")
    try:
        for i in range(5):
            here.send(0, (b"q", b"%d" % i))
            run_archive(spark, here.job)
    finally:
        spark.conf.unset("spark.databricks.delta.autoCompact.minNumFiles")
    assert offsets(rows(spark, here)) == [(0, i) for i in range(5)]
    path, version = here.job.path(archive.MESSAGES), records.SCHEMA_VERSION
    detail = tables.open_table(spark, path, records.MESSAGES, version=version).detail().first()
    assert detail.numFiles <= 2
    assert Counter(row.offset for row in rows(spark, here)) == Counter(range(5))


def test_how_much_there_is_to_archive_is_known_before_spark_starts(spark: SparkSession, installation: Make) -> None:
    here = installation()
    here.send(0, *[(b"q", b"x")] * 3)
    here.mark(1, [Own("w", "n")])

    def waiting() -> int:
        archiving = archive.Archiving(here.job)
        archiving.check()
        return archiving.waiting()

    assert waiting() == 4
    run_archive(spark, here.job)
    assert waiting() == 0
    here.send(1, (b"q", b"x"))
    assert waiting() == 1


# -- queues


def queue_records(spark: SparkSession, here: Installation) -> dict[str, bytes]:
    return {row.queue: bytes(row.record) for row in spark.read.format("delta").load(here.job.path(ARCHIVED)).collect()}


def test_the_queues_are_archived_as_they_are_now(spark: SparkSession, installation: Make) -> None:
    here = installation(partitions=1)
    topic = here.settings.queues_topic
    here.write(topic, 0, [(b"orders", b"1"), (b"\0auto/mail", b"{}"), (b"old", b"1"), (b"orders", b"2")])
    run_archive(spark, here.job)
    assert queue_records(spark, here) == {"orders": b"2", "old": b"1"}
    run_archive(spark, here.job)
    here.write(topic, 0, [(b"old", None), (b"mail", b"1")])
    run_archive(spark, here.job)
    assert queue_records(spark, here) == {"orders": b"2", "mail": b"1"}
    history = spark.sql(f"DESCRIBE HISTORY delta.`{here.job.path(ARCHIVED)}`").collect()
    assert sum(row.operation == "WRITE" for row in history) == 2, "only what has changed is written"


def test_queues_that_change_all_the_time_are_written_from_time_to_time_and_what_is_known_is_not_read_again(
    spark: SparkSession, installation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = installation(partitions=1)
    topic, read = here.settings.queues_topic, list[int]()

    def noted(client: Any, topic: str, start: int) -> Any:
        read.append(start)
        return records_of(client, topic, start)

    monkeypatch.setattr(queues, "records_of", noted)
    monkeypatch.setattr(queues, "PAUSE_WRITES", 10_000)
    here.write(topic, 0, [(b"orders", b"1"), (b"old", b"1"), (b"mail", b"1")])
    copy = queues.QueuesArchive(here.job, spark)
    copy.open()
    copy.update(at_once=False)
    here.write(topic, 0, [(b"orders", b"2"), (b"old", None)])
    copy.update(at_once=False)
    assert queue_records(spark, here) == {"orders": b"1", "old": b"1", "mail": b"1"}, "not so soon"
    copy.update(at_once=True)
    assert queue_records(spark, here) == {"orders": b"2", "mail": b"1"}
    assert read == [0, 3]
    here.kafka.admin.delete_topics([topic])[topic].result()
    asyncio.run(until_kafka_takes_it(lambda: ensure_topics(here.settings, here.settings.name), 30, print))
    here.write(topic, 0, [(b"new", b"1")])
    copy.update(at_once=True)
    assert queue_records(spark, here) == {"new": b"1"}, "a topic that was made anew is read from its beginning"
    assert read == [0, 3, 0]


def test_queues_of_a_later_version_are_refused_before_anything_is_written(
    spark: SparkSession, installation: Make
) -> None:
    here = installation(partitions=1)
    run_archive(spark, here.job)
    here.send(0, (b"orders", b"1"))
    tables.set_property(spark, here.job.path(ARCHIVED), tables.VERSION, "2")
    later = "archive/queues has rows of version 2, and this marq reads up to 1"
    with pytest.raises(PipelineError, match=later):
        run_archive(spark, here.job)
    with pytest.raises(PipelineError, match=later):
        audit(spark, here.job, archive=True, offline=True)
    assert rows(spark, here) == []
