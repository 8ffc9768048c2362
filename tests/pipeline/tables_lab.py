"""Tables of the records in Kafka, as a worker or the archive would have written them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition

from marq.core import rows
from marq.core.markers import decode
from marq.core.partition import Partition
from marq.core.rows import Record
from pipeline import records
from pipeline.archive import Archiving
from pipeline.options import Job
from tests.pipeline.lab import Installation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

READ_S = 20.0


def read(here: Installation, topic: str, number: int) -> list[Record]:
    """Everything that is committed in one partition of a topic."""
    config = here.kafka.client_config() | {"group.id": "unused", "enable.partition.eof": True}
    start, _ = here.kafka.bounds(topic)[number]
    consumer = Consumer(config)
    found: list[Record] = []
    try:
        consumer.assign([TopicPartition(topic, number, start)])
        while True:
            message = consumer.poll(READ_S)
            assert message is not None, f"{topic} partition {number} was not read within {READ_S} s"
            if message.error() is not None:
                return found
            headers: Any = tuple(message.headers() or ())
            offset = message.offset()
            assert offset is not None
            found.append(Record(offset, message.timestamp()[1], message.key(), message.value(), headers))
    finally:
        consumer.close()


def folded(here: Installation, number: int) -> Partition:
    """The state of a worker that has read everything."""
    partition = Partition(number)
    queue = read(here, here.settings.queue_topic, number)
    if queue:
        assert partition.ingest(0, queue[-1].offset + 1, queue)
    for record in read(here, here.settings.markers_topic, number):
        partition.fold(record.offset, record.timestamp, decode(record.value).markers)
    return partition


def checkpoint(
    here: Installation,
    number: int,
    *,
    partition: Partition | None = None,
    row: Callable[[str, bytes], bytes | None] = lambda key, value: value,
    **manifest: Any,
) -> rows.Manifest:
    """Write the tables of a partition to the changelogs, as a worker's checkpoint does.

    Args:
        partition: the state to write; by default all that is in the logs.
        row: gets a row's value and returns the one to write; None: do not write it.
        manifest: fields of the manifest that are not as they should be.
    """
    state = partition or folded(here, number)
    found = state.checkpoint(max(0, state.own), 0, 0, 0, whole=True)
    assert found is not None
    for key, value in found.rows:
        written = row(key, value)
        if written is not None:
            table = "messages" if rows.kind_of(key) == "messages" else "markers"
            here.write(f"{here.settings.name}-{table}-changelog", number, [(key.encode(), written)])
    good = rows.decode_manifest(found.manifest)
    fields = {name: getattr(good, name) for name in good.__struct_fields__} | manifest
    changed = rows.Manifest(**fields)
    key = rows.manifest_key(number, changed.epoch)
    here.write(f"{here.settings.name}-progress-changelog", number, [(key.encode(), rows.encode_manifest(changed))])
    return changed


def run_archive(spark: SparkSession, job: Job, *, accept_loss: bool = False) -> None:
    """One run of the job `archive`, up to the present end of the topics."""
    archiving = Archiving(job, accept_loss=accept_loss)
    archiving.check()
    archiving.run(spark)


def archive(spark: SparkSession, here: Installation) -> None:
    """Write new records of both topics to the archive, in a commit each: less than the job, and faster."""
    from pyspark.sql import functions as F

    from pipeline.tables import open_table

    settings = here.settings
    for topic, table, schema in (
        (settings.queue_topic, "messages", records.MESSAGES),
        (settings.markers_topic, "markers", records.MARKERS),
    ):
        path = here.job.path("archive", table)
        there = open_table(
            spark,
            path,
            schema,
            version=records.SCHEMA_VERSION,
            partition_by=["day"],
            source=here.kafka.source_of(topic),
        )
        ends = dict(there.toDF().groupBy("partition").agg(F.max("offset") + 1).collect())
        bounds = here.kafka.bounds(topic)
        begin = {number: ends.get(number, start) for number, (start, _) in bounds.items()}
        batch = here.kafka.records(spark, {topic: begin}, {topic: {number: end for number, (_, end) in bounds.items()}})
        decoded = records.messages(batch, settings.queue_id) if table == "messages" else records.markers(batch)
        decoded.select(schema.names).coalesce(1).write.format("delta").mode("append").save(path)
