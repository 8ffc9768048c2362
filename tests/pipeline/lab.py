"""What the tests of the pipeline share: an installation with records that they choose, jobs as processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Producer, TopicPartition

from app.kafka.topics import ensure_topics
from app.settings import Settings
from marq.core.markers import encode
from pipeline.kafka import Kafka
from pipeline.options import Job
from tests.integration.cluster import Cluster
from tests.kafka import unique

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that a job may take, with the start of its Java.
JOB_S = 120.0

Header = tuple[str, bytes | None]


class Installation:
    """Separate topics on the Kafka under test, without a worker, and a folder for the tables."""

    def __init__(
        self, bootstrap: str, folder: Path, *, partitions: int = 2, create: bool = True, **values: Any
    ) -> None:
        self.settings = Settings(
            **{"kafka": f"kafka://{bootstrap}", "name": unique("p"), "partitions": partitions, **values}
        )
        self.folder = folder
        self.job = Job(self.settings, str(folder / "pipeline"))
        self._values = {"kafka": f"kafka://{bootstrap}", "name": self.settings.name, **values}
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "log_level": 0,
                "message.max.bytes": 8 * 1024 * 1024,
            }
        )
        if create:
            asyncio.run(ensure_topics(self.settings, self.settings.name))

    @property
    def kafka(self) -> Kafka:
        return self.job.kafka

    @property
    def data(self) -> str:
        """The data folder of the pipeline."""
        return self.job.data

    @property
    def environment(self) -> dict[str, str]:
        """For processes of this installation."""
        return {f"MARQ_{key.upper()}": str(value) for key, value in self._values.items()} | {
            "MARQ_DATA_DIR": str(self.folder)
        }

    def write(
        self,
        topic: str,
        partition: int,
        records: Iterable[tuple[bytes | None, bytes | None] | tuple[bytes | None, bytes | None, Sequence[Header]]],
    ) -> list[int]:
        """Append `(key, value[, headers])`; the offsets they got."""
        offsets: list[int] = []
        errors: list[Any] = []

        def confirmed(error: Any, message: Any) -> None:
            errors.append(error) if error is not None else offsets.append(message.offset())

        for key, value, *headers in records:
            self._producer.produce(
                topic, value, key, partition, headers=list(headers[0]) if headers else [], on_delivery=confirmed
            )
            self._producer.poll(0)
        assert self._producer.flush(30) == 0
        assert not errors, errors
        return offsets

    def send(self, partition: int, *records: Any) -> list[int]:
        """Append to the queue topic."""
        return self.write(self.settings.queue_topic, partition, records)

    def mark(self, partition: int, *batches: Sequence[Any]) -> list[int]:
        """Append to the markers topic, each batch as a record."""
        values = [(None, encode(list(batch), by="test", seq=i)) for i, batch in enumerate(batches)]
        return self.write(self.settings.markers_topic, partition, values)

    def delete_before(self, positions: Mapping[str, int], partition: int) -> None:
        """Delete records of a partition from Kafka, in each topic those before an offset."""
        before = [TopicPartition(topic, partition, offset) for topic, offset in positions.items()]
        for future in self.kafka.admin.delete_records(before).values():
            future.result(20)

    def cluster(self, **settings: Any) -> Cluster:
        """Real workers on the topics of this installation (a context manager; see `tests.integration.cluster`)."""
        assert self.settings.kafka is not None
        folder = self.folder / "cluster"
        folder.mkdir(exist_ok=True)
        cluster = Cluster(
            self.settings.kafka.removeprefix("kafka://"), folder, partitions=self.settings.partitions, **settings
        )
        cluster.name = self.settings.name
        cluster.environment["MARQ_NAME"] = self.settings.name
        return cluster

    def start_job(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start `python -m pipeline …` on this installation, a process with its own Java. The caller has to end it."""
        return start_job(*arguments, **(self.environment | environment))

    def run_job(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`python -m pipeline …` on this installation, to its end."""
        return finish(self.start_job(*arguments, **environment))


def start_job(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`python -m pipeline …` as a process that is the caller's to end; nothing of our environment's settings in it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_") or k == "MARQ_CACHE_DIR"}
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=ROOT,
        env=clean | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = JOB_S) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a job."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{process.args!r} did not end within {timeout_s} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
