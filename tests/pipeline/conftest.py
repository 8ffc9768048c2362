"""Fixtures of the tests of the pipeline: one Spark session for each process, separate installations on a real Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.lab import Installation
from tests.pipeline.sending_lab import PARTITIONS, Here, here

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Spark, started by the first test that needs it."""
    from pipeline.session import start

    session = start("tests", tmp_path_factory.mktemp("spark"), master="local[2]", conf={"spark.driver.memory": "1g"})
    yield session
    session.stop()


@pytest.fixture
def installation(kafka: str, tmp_path: Path) -> Callable[..., Installation]:
    """Makes installations: `installation(partitions=2, queue_id=…)`."""
    count = iter(range(1000))

    def make(**values: Any) -> Installation:
        folder = tmp_path / f"installation-{next(count)}"
        folder.mkdir()
        return Installation(kafka, folder, **values)

    return make


@pytest.fixture
def target(installation: Callable[..., Installation]) -> Installation:
    """An installation that a sending job sends to."""
    return installation(partitions=PARTITIONS)


@pytest.fixture
def job(target: Installation, spark: SparkSession) -> Here:
    """A job of `target` that runs in this process."""
    return here(target, spark)
