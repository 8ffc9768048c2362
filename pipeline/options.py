"""Command-line options that all jobs share, and the `Job` that they describe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from app.settings import Settings, load
from marq.errors import BadValueError, PipelineError
from pipeline import progress
from pipeline.kafka import Kafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Job:
    """The input of every job: the installation, the folder of its tables, and how to start Spark."""

    settings: Settings
    data: str
    master: str | None = None
    conf: tuple[tuple[str, str], ...] = ()
    verbose: bool = False

    @cached_property
    def kafka(self) -> Kafka:
        return Kafka(self.settings)

    def path(self, *parts: str) -> str:
        """A path in the data folder, which may be in any file system that Spark knows."""
        return "/".join([self.data.rstrip("/"), *parts])

    @contextmanager
    def session(self, name: str, *, lasting: bool = False) -> Iterator[SparkSession]:
        """A Spark session for the `with` block. `lasting`: the job has work for minutes or more."""
        from pipeline.session import spark_session, starts_slowly

        hint = ", `python -m pipeline.startup` makes that shorter" if starts_slowly() else ""
        progress.step(f"starting Spark{hint}")
        with spark_session(
            name, master=self.master, conf=dict(self.conf), lasting=lasting, verbose=self.verbose
        ) as spark:
            progress.of_spark("reading", spark)
            yield spark


def default_data(settings: Settings) -> str:
    """The folder of the tables without `--data`."""
    return str(settings.data_dir.resolve() / "pipeline")


def job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every job has. The function gets a `Job` as its first argument instead of them."""

    @click.option("--data", metavar="DIR", help="Folder of the tables, or s3a://… (default: MARQ_DATA_DIR/pipeline).")
    @click.option("--kafka", metavar="URL", help="kafka://host:port; default: MARQ_KAFKA, or the embedded broker.")
    @click.option("--master", metavar="URL", help="Spark master (default: of spark-submit, or local[*]).")
    @click.option("--set", "conf", metavar="KEY=VALUE", multiple=True, help="A setting of Spark; may be repeated.")
    @click.option("--verbose", is_flag=True, help="Show Spark's own log.")
    @wraps(function)
    def run(
        *args: Any,
        data: str | None,
        kafka: str | None,
        master: str | None,
        conf: tuple[str, ...],
        verbose: bool,
        **rest: Any,
    ) -> Any:
        if kafka is not None:
            os.environ["MARQ_KAFKA"] = kafka
        with progress.shown(click.get_current_context().info_name or "job"):
            settings = load()
            job = Job(settings, data or default_data(settings), master, tuple(_pair(text) for text in conf), verbose)
            if kafka is not None:
                job.kafka.topics()  # an address that was given is checked, even if the job needs the archive alone
            return function(job, *args, **rest)

    return run


def key_in(file: str | None) -> str | None:
    """The key for a worker's HTTP, from a file: everybody can see a command line. Raises `BadValueError`."""
    if file is None:
        return None
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadValueError(f"--key-file {file} can't be read: {error}") from None


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key.startswith("spark."):
        raise PipelineError(f"--set {text} is not of the form spark.KEY=VALUE")
    return key, value
