"""The rows that a sending job chose, stored before the first is sent: a Delta table per job, made in one commit.

A run that goes on after a crash sends from the same table, so it sees the same rows in the same order.
Columns: `row` (a number that grows in the order of sending), `queue`, `group`, `payload`, `headers`, `origin` (where
the row comes from, for people), `error` (why it can't be sent, or null), `together` (whether all of the queue goes to
one partition), perhaps `source` (see `dispatch.spread`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from marq.core.reading import SPAN_MAX_MS
from marq.core.state import HEADER_OVERHEAD_BYTES
from marq.errors import PipelineError
from marq.protocol.limits import MESSAGE_MAX_BYTES
from pipeline import files
from pipeline.tables import is_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from pipeline.options import Job

#: Bytes of a message's limit that are reserved for its record, as in the service.
RECORD_ROOM_BYTES = 1024
#: Most characters of a group's name.
GROUP_MAX = 128
#: A delay or time to live has at most 15 decimal digits.
DIGITS = "^[0-9]{1,15}$"


@dataclass(frozen=True)
class Counts:
    """Counts of staged rows: `rows` that can be sent and their bytes, `bad` ones that can't, and the first error."""

    rows: int
    size_bytes: int
    bad: int
    first_error: str | None


class Staging:
    """The staged rows of one job."""

    def __init__(self, spark: SparkSession, job: Job, name: str, fingerprint: str) -> None:
        self._spark = spark
        self.folder = job.path("jobs", name)
        self.path = f"{self.folder}/rows-{fingerprint[:16]}"
        self.rejected_path = f"{self.folder}/rejected"

    def exists(self) -> bool:
        """Whether the table is complete. One that was broken off has no commit, and does not count."""
        return is_table(self._spark, self.path)

    def write(self, rows: DataFrame) -> None:
        """Write the table, unless another run has written it meanwhile."""
        try:
            rows.write.format("delta").mode("errorifexists").save(self.path)
        except Exception:
            if not self.exists():
                raise

    def read(self) -> DataFrame:
        """All rows of the table."""
        return self._spark.read.format("delta").load(self.path)

    def clear(self) -> None:
        """Delete all staged rows of the job: complete or not, of this input or another."""
        for name in files.names(self._spark, self.folder):
            if name.startswith("rows-"):
                files.delete(self._spark, f"{self.folder}/{name}")

    def counts(self, rows: DataFrame) -> Counts:
        """Count `rows`, which are those of the table, with numbers."""
        bad = F.col("error").isNotNull()
        good = F.when(~bad, 1)
        found = rows.agg(
            F.count(good).alias("rows"),
            F.coalesce(F.sum(F.when(~bad, F.octet_length("payload"))), F.lit(0)).alias("bytes"),
            F.count(F.when(bad, 1)).alias("bad"),
            F.min_by(F.concat_ws(": ", "origin", "error"), F.when(bad, F.col("row"))).alias("first"),
        ).first()
        assert found is not None
        return Counts(found["rows"], found["bytes"], found["bad"], found["first"] if found["bad"] else None)

    def reject(self, rows: DataFrame, counts: Counts, *, skip: bool) -> None:
        """Write rows that can't be sent to a table of their own.

        Raises:
            PipelineError: there are some, and `skip` is false.
        """
        if not counts.bad:
            return
        if not skip:
            more = f" (and {counts.bad - 1} more)" if counts.bad > 1 else ""
            raise PipelineError(
                f"{counts.first_error}{more}; nothing was sent: correct it, or --skip-bad sends the others"
            )
        bad = rows.where("error IS NOT NULL").select("row", "origin", "error", "queue", "group", "payload")
        bad.write.format("delta").mode("overwrite").save(self.rejected_path)


def headers_of(entries: Sequence[tuple[str, Column]]) -> Column:
    """The headers of a record. Those whose value is null are left out."""
    if not entries:
        return F.array().cast("array<struct<key string, value binary>>")
    structs = F.array(
        *(F.struct(F.lit(name).alias("key"), value.cast("binary").alias("value")) for name, value in entries)
    )
    return F.filter(structs, lambda entry: entry["value"].isNotNull())


def milliseconds(value: Column) -> Column:
    """A number of milliseconds as text, for a header; null if it is null or not positive."""
    number = value.try_cast("long")
    return F.when(number >= 1, number.cast("string"))


def first_of(checks: Sequence[tuple[Column, Column]]) -> Column:
    """The reason of the first (condition, reason) pair whose condition holds; null if none does."""
    start: Column = F.lit(None).cast("string")
    return reduce(lambda later, check: F.when(check[0], check[1]).otherwise(later), reversed(checks), start)


def checked(rows: DataFrame, queue: Column, fifo: Mapping[str, bool]) -> DataFrame:
    """Add `together` and `error` to rows. The error is their `reason`, else why marq would refuse the message, or null.

    Args:
        queue: the queue that a row goes to.
        fifo: FIFO queues -> whether all messages of the queue go to one partition.
    """
    together = queue.isin([name for name, whole in fifo.items() if whole])
    size = F.octet_length("payload") + F.aggregate(
        "headers",
        F.lit(0),
        lambda total, h: (
            total + F.octet_length(h["key"]) + F.coalesce(F.octet_length(h["value"]), F.lit(0)) + HEADER_OVERHEAD_BYTES
        ),
    )
    most = MESSAGE_MAX_BYTES - RECORD_ROOM_BYTES
    error = first_of(
        [
            (F.col("reason").isNotNull(), F.col("reason")),
            (F.length("group") == 0, F.lit("the group is empty")),
            (F.col("group").isNull() & queue.isin(list(fifo)), F.lit("the queue is FIFO: the message needs a group")),
            (F.length("group") > GROUP_MAX, F.lit(f"the group has more than {GROUP_MAX} characters")),
            (
                size > most,
                F.concat(F.lit("a message of "), size, F.lit(f" bytes; at most {most} with key and headers")),
            ),
        ]
    )
    return rows.withColumns({"error": error, "together": together}).drop("reason")


def not_milliseconds(name: str, value: Column) -> tuple[Column, Column]:
    """A check that a column holds milliseconds, at most a year's, or null."""
    is_number = value.rlike(DIGITS)
    wrong = F.when(is_number, F.lit(f" is more than {SPAN_MAX_MS} milliseconds")).otherwise(
        F.lit(" is not a number of milliseconds")
    )
    reason = F.concat(F.lit(f"{name} "), F.substring(value, 1, 40), wrong)
    return value.isNotNull() & ~F.coalesce(is_number & (value.try_cast("long") <= SPAN_MAX_MS), F.lit(False)), reason
