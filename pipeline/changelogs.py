"""The workers' tables, read from their changelog topics without a worker.

The newest manifest of a partition, the rows that it names, and what a recovery would make of them. Payloads are
replaced by fingerprints, which can be computed from the logs too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from marq.core import rows
from marq.errors import BrokerError, NewerRowError, RowError
from pipeline.fingerprints import strip_batches
from pipeline.kafka import Kafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Tables of rows; below, the table of manifests. See `app.kafka.topics`.
ROW_TABLES = ("messages", "markers")
MANIFESTS = "progress"

#: Most seconds for reading the manifests.
READ_TIMEOUT_S = 60.0
#: Most attempts to read all bounds without a manifest written meanwhile.
ATTEMPTS = 50


def topic_of(kafka: Kafka, table: str) -> str:
    """The changelog topic of a table: Faust puts the id of the app, which is the installation's name, in front."""
    return f"{kafka.settings.name}-{table}-changelog"


class Newest(NamedTuple):
    """The manifest that a recovery would start from."""

    key: str
    value: bytes
    manifest: rows.Manifest


class Snapshot(NamedTuple):
    """The tables at one moment: no manifest was written between the manifests and `ends`."""

    newest: dict[int, Newest]  # by partition; partitions without a manifest are left out
    damaged: list[tuple[int, str, str]]  # manifests that can't be read, or are elsewhere: partition, kind of fault, why
    bounds: dict[str, dict[int, tuple[int, int]]]  # row topic -> partition -> start, end


def snapshot(kafka: Kafka) -> Snapshot:
    """Read the manifests, and how far their rows have to be read.

    Raises:
        TopicError: there are no changelog topics.
        BrokerError: Kafka can't be reached, or is too slow.
    """
    with _Manifests(kafka) as manifests:
        manifests.read()
        for _ in range(ATTEMPTS):
            # Rows are written before the manifest that names them and deleted after the next one. So if two reads in
            # a row find the same manifests, all the rows that they name were there in between.
            bounds = {topic: kafka.bounds(topic) for topic in (topic_of(kafka, table) for table in ROW_TABLES)}
            if not manifests.read():
                newest, damaged = manifests.newest()
                return Snapshot(newest, damaged, bounds)
    raise BrokerError(f"the manifests in {topic_of(kafka, MANIFESTS)} change faster than they can be read; try again")


class _Manifests:
    """Content of the manifests' topic. Each read goes on where the last one ended."""

    def __init__(self, kafka: Kafka) -> None:
        from confluent_kafka import Consumer

        self._kafka = kafka
        self._topic = topic_of(kafka, MANIFESTS)
        self._positions: dict[int, int] = {}
        self._content: dict[int, dict[bytes, bytes]] = {}
        self._consumer = Consumer(
            kafka.client_config()
            | {"group.id": "unused", "enable.auto.commit": False, "enable.partition.eof": True, "fetch.wait.max.ms": 10}
        )

    def __enter__(self) -> _Manifests:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def read(self) -> bool:
        """Read up to the present ends of the topic. Returns True if there was a manifest."""
        from confluent_kafka import KafkaError, KafkaException, TopicPartition

        todo: dict[int, int] = {}
        for number, (start, end) in self._kafka.bounds(self._topic).items():
            if self._positions.setdefault(number, start) < end:
                todo[number] = end
        if not todo:
            return False
        found = False
        deadline = time.monotonic() + READ_TIMEOUT_S
        self._consumer.assign([TopicPartition(self._topic, n, self._positions[n]) for n in todo])
        while todo:
            if time.monotonic() > deadline:
                raise BrokerError(f"{self._topic} could not be read within {READ_TIMEOUT_S:.0f} s; try again")
            try:
                messages = self._consumer.consume(500, 0.2)
            except KafkaException as exception:
                raise self._kafka.unreachable(str(exception)) from None
            for message in messages:
                number, error = message.partition() or 0, message.error()
                if error is None:
                    found |= self._take(number, message.key() or b"", message.value())
                    self._positions[number] = (message.offset() or 0) + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    self._positions[number] = max(self._positions[number], message.offset() or 0)
                else:
                    raise self._kafka.unreachable(error.str())
                if self._positions[number] >= todo.get(number, 1 << 62):
                    del todo[number]
        self._consumer.unassign()
        return found

    def _take(self, number: int, key: bytes, value: bytes | None) -> bool:
        content = self._content.setdefault(number, {})
        if value is None:
            content.pop(key, None)
            return False
        content[key] = value
        return True

    def newest(self) -> tuple[dict[int, Newest], list[tuple[int, str, str]]]:
        """The manifests that a recovery would choose (highest epoch), and what is wrong with others."""
        newest: dict[int, Newest] = {}
        damaged: list[tuple[int, str, str]] = []
        for number, content in self._content.items():
            for key, value in content.items():
                name = key.decode(errors="replace")
                if not name.startswith(f"{number}/"):
                    damaged.append((number, "misplaced", f"manifest {name} is in partition {number} of the changelog"))
                    continue
                try:
                    manifest = rows.decode_manifest(value)
                except NewerRowError as error:
                    damaged.append((number, "newer version", f"manifest {name}: {error}"))
                    continue
                except RowError as error:
                    damaged.append((number, "tables", f"manifest {name}: {error}"))
                    continue
                if number not in newest or manifest.epoch > newest[number].manifest.epoch:
                    newest[number] = Newest(name, value, manifest)
        return newest, damaged


# ------------------------------------------------------------------ rows


def table_rows(spark: SparkSession, kafka: Kafka, tables: Snapshot) -> DataFrame:
    """Every record of the row tables, of partitions that have a manifest, as (partition, key, value, offset).

    Values come without their payloads (see `fingerprints.stripped`). Null: the row was deleted.
    """
    from pyspark.sql import functions as F

    if not tables.newest:
        return spark.createDataFrame([], _ROWS)
    begin = {topic: {n: start for n, (start, _) in found.items()} for topic, found in tables.bounds.items()}
    end = {topic: {n: stop for n, (_, stop) in found.items()} for topic, found in tables.bounds.items()}
    records = kafka.records(spark, begin, end).where(F.col("partition").isin(list(tables.newest)))
    return records.select("partition", "key", "value", "offset").mapInArrow(strip_batches, _ROWS)


_ROWS = "partition int, key binary, value binary, offset long"
