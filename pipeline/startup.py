"""Makes a job's Java start faster: Spark's classes, loaded and linked ahead of time, in a file.

`python -m pipeline.startup` makes that file (230 MB), once per Java, Spark and place of both: it runs a small archive,
and Java writes what it has loaded. Java checks whether the file fits, and starts without it if not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from app.kafka.broker import EmbeddedBroker
from app.processes import errors_as_lines
from app.settings import Settings
from marq.errors import PipelineError
from pipeline.archive import Archiving
from pipeline.jars import java_home
from pipeline.java import JVM_OPTIONS, class_cache
from pipeline.options import Job
from pipeline.session import start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Most seconds for Java to write the file.
_WRITE_S = 240.0
#: Records of each topic in the recorded run.
_RECORDS = 200


def make() -> Path | None:
    """Make the file for the jobs' Java. Returns None if that Java can't make one (before 25).

    Raises:
        PipelineError, BrokerError: Spark or Kafka could not be started.
    """
    file = class_cache(java_home())
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(prefix="marq-startup-") as name, EmbeddedBroker(name) as broker:
            settings = Settings(kafka=f"kafka://{broker.bootstrap}", name="startup", data_dir=Path(name))
            _watched_run(settings, Path(name), f'{JVM_OPTIONS} "-XX:AOTCacheOutput={draft}" -XX:-AOTClassLinking')
        if not draft.exists():
            return None
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    return file


def _watched_run(settings: Settings, folder: Path, options: str) -> None:
    """Archive a few records, in a Java with these options, and wait for that Java to end."""
    job = Job(settings, str(folder / "tables"))
    _fill(job)
    archiving = Archiving(job)
    archiving.check()
    with _silence():
        spark = start("startup", folder, java_options=options)
        archiving.run(spark)
        _end(spark)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard stdout and stderr, also of processes started in the block: Java prints each class that it skips."""
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(nowhere)


def _fill(job: Job) -> None:
    """Create the topics of an installation and send a few records."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import NewTopic

    from marq.core.markers import Tick, encode

    settings, kafka = job.settings, job.kafka
    topics = (settings.queue_topic, settings.markers_topic, settings.poison_topic)
    for created in kafka.admin.create_topics([NewTopic(topic, 1, 1) for topic in topics]).values():
        created.result(30)
    producer = Producer(kafka.client_config())
    for number in range(_RECORDS):
        producer.produce(settings.queue_topic, b"message", b"orders" if number else None, headers={"name": b"value"})
        producer.produce(settings.markers_topic, encode([Tick()], "startup", number))
    producer.flush(30)


def _end(spark: SparkSession) -> None:
    """Stop Spark, and wait until its Java has ended: it writes the file at its end."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    java = gateway.proc
    spark.stop()
    java.stdin.close()
    try:
        java.wait(_WRITE_S)
    except subprocess.TimeoutExpired:
        java.kill()
        raise PipelineError(f"Java did not end within {_WRITE_S:.0f} s; try again, or go on without") from None


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m pipeline.startup", description=__doc__).parse_args()
    with errors_as_lines():
        made = make()
    print(f"Spark's classes are in {made}" if made else "this Java keeps no classes (25 and later do)")
