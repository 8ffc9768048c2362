"""The position of a streaming query, from its checkpoint: the last line of Spark's `offsets/N` says where batch N
ends, and the file `commits/N` that it is complete.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pipeline import files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pipeline.kafka import Offsets


class Checkpoint:
    """The checkpoint at a path, which may not exist."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self.path = path

    def exists(self) -> bool:
        """Whether a batch was begun."""
        return bool(files.names(self._spark, f"{self.path}/offsets"))

    def complete(self) -> int | None:
        """The last complete batch; None if there is none."""
        return max(self._numbers("commits"), default=None)

    def broken_off(self) -> int | None:
        """The batch that was begun but not completed, which Spark will repeat; None if there is none."""
        last = max(self._numbers("offsets"), default=None)
        return None if last in self._numbers("commits") else last

    def ends(self, number: int) -> dict[str, Offsets]:
        """Where a batch ends, by topic."""
        line = files.read_text(self._spark, f"{self.path}/offsets/{number}").splitlines()[-1]
        return {topic: {int(n): offset for n, offset in ends.items()} for topic, ends in json.loads(line).items()}

    def _numbers(self, log: str) -> set[int]:
        return {int(name) for name in files.names(self._spark, f"{self.path}/{log}") if name.isdigit()}
