"""A record that a broker has lost, and nobody had read, is told from those of transactions.

A broker is stopped, and a batch is cut out of the file of its log, as if a disk had lost it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from pipeline.audit import audit
from pipeline.gaps import NO_BATCH, NOT_READ
from pipeline.kafka import Kafka
from tests.integration.cluster import until
from tests.other_kafka import broker_for_tests
from tests.pipeline.lab import Installation
from tests.pipeline.tables_lab import run_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from app.kafka.broker import EmbeddedBroker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with broker_for_tests(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


def in_transaction(here: Installation, number: int, *values: bytes, commit: bool) -> None:
    producer = Producer(here.kafka.client_config() | {"transactional.id": f"{here.settings.name}-{number}-{commit}"})
    _, before = here.kafka.bounds(here.settings.queue_topic)[number]
    producer.init_transactions(20)
    producer.begin_transaction()
    for value in values:
        producer.produce(here.settings.queue_topic, value, b"q", number)
    producer.flush(20)
    (producer.commit_transaction if commit else producer.abort_transaction)(20)
    stop = before + len(values) + 1
    # the record of its end may come later than the answer
    until(lambda: here.kafka.bounds(here.settings.queue_topic)[number][1] == stop, "the end of a transaction")


def cut_out(broker: EmbeddedBroker, topic: str, number: int, offset: int) -> None:
    """Take the batch that begins with an offset out of the log of a stopped broker."""
    (folder,) = broker.home.glob(f"logs/{topic}-{number}")
    (log,) = folder.glob("*.log")
    data, at = log.read_bytes(), 0
    while at < len(data):
        base, length = struct.unpack_from(">qi", data, at)
        if base == offset:
            break
        at += 12 + length
    assert base == offset, f"no batch begins with {offset}"
    log.write_bytes(data[:at] + data[at + 12 + length :])
    for file in (*folder.glob("*.index"), *folder.glob("*.timeindex")):
        file.unlink()  # made anew from the log


def test_a_record_that_nobody_had_read_is_named_and_a_transaction_is_not(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    here = Installation(broker.bootstrap, tmp_path, partitions=2)
    topic = here.settings.queue_topic
    for number in (0, 1):
        here.send(number, (b"q", b"0"))
        in_transaction(here, number, b"1", b"2", commit=False)  # its end has offset 3
        here.send(number, (b"q", b"4"))
        here.send(number, (b"q", b"5"))
        in_transaction(here, number, b"6", b"7", commit=True)
        here.send(number, (b"q", b"9"))
    verdict = audit(spark, here.job)
    assert verdict.faults == []
    assert [summary.notes["absent"] for summary in verdict.summaries] == [4, 4]

    broker.stop()
    cut_out(broker, topic, 1, 5)
    broker.start()

    verdict = audit(spark, Installation(broker.bootstrap, tmp_path, name=here.settings.name, create=False).job)
    assert [(f.partition, f.offset, f.kind, f.what) for f in verdict.faults] == [(1, 5, "record gone", NO_BATCH)]
    assert verdict.fault_count == 1 and not verdict.proven


@pytest.mark.slow
def test_a_record_that_the_archive_lacks_and_kafka_has_is_named(spark: SparkSession, installation: Any) -> None:
    here: Installation = installation(partitions=1)
    here.send(0, (b"q", b"0"))
    in_transaction(here, 0, b"1", commit=False)
    here.send(0, (b"q", b"3"), (b"q", b"4"))
    run_archive(spark, here.job)
    assert audit(spark, here.job, archive=True).faults == []
    spark.sql(f"DELETE FROM delta.`{here.job.path('archive', 'messages')}` WHERE offset = 3")
    (fault,) = audit(spark, here.job, archive=True).faults
    assert (fault.partition, fault.offset, fault.kind, fault.what) == (0, 3, "record gone", NOT_READ)


def test_an_audit_without_gaps_asks_kafka_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.gaps import lost

    monkeypatch.setattr(Kafka, "bounds", None)
    assert lost(Kafka(None), {}) == {}  # type: ignore[arg-type]
