"""Choosing messages with a SQL predicate, showing them, and asking the user to confirm."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from marq.errors import PipelineError
from marq.protocol.headers import RESERVED
from marq.text import cleaned, plural
from pipeline import progress
from pipeline.console import say
from pipeline.session import explain

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Messages in the sample, queues that are listed, characters of a payload.
SAMPLE_ROWS = 5
QUEUES_SHOWN = 20
TEXT_SHOWN = 60


def choose(rows: DataFrame, predicate: str) -> DataFrame:
    """The rows for which `predicate` is true. Raises `PipelineError` if Spark does not accept it."""
    try:
        chosen = rows.where(F.expr(predicate))
        _ = chosen.schema
    except PySparkException as error:
        raise PipelineError(
            f"--where {predicate!r} is not a valid condition on these messages: {explain(error)}; columns: "
            f"{', '.join(rows.columns)}"
        ) from None
    return chosen


def sender_headers() -> Column:
    """The sender's headers in the column `headers`, without marq's own."""
    return F.filter("headers", lambda header: ~header["key"].startswith(RESERVED))


def with_text(rows: DataFrame) -> DataFrame:
    """Add `payload_text`, and `attributes`: the sender's headers as a map of texts, with the last one of each name."""
    rows.sparkSession.conf.set("spark.sql.mapKeyDedupPolicy", "LAST_WIN")
    entries = F.transform(
        sender_headers(),
        lambda header: F.struct(header["key"].alias("key"), header["value"].cast("string").alias("value")),
    )
    return rows.withColumns(
        {"payload_text": F.col("payload").cast("string"), "attributes": F.map_from_entries(entries)}
    )


def show(chosen: DataFrame) -> int:
    """Print how many messages of which queues were chosen, and a sample. Returns the number of messages."""
    counted = chosen.groupBy("queue").agg(
        F.count("*").alias("rows"), F.sum(F.greatest("size", F.lit(0))).alias("bytes")
    )
    queues = counted.orderBy(F.desc("rows"), "queue").collect()
    total: int = sum(row["rows"] for row in queues)
    say(f"chosen: {plural(total, 'message')}, {plural(sum(row['bytes'] for row in queues), 'byte')}")
    for row in queues[:QUEUES_SHOWN]:
        say(f"  {row['rows']:>10,}  {row['queue']}")
    if len(queues) > QUEUES_SHOWN:
        say(f"  and {plural(len(queues) - QUEUES_SHOWN, 'more queue')}")
    if total:
        sample = chosen.select(
            "partition",
            "offset",
            "queue",
            "timestamp",
            "size",
            F.substring("payload_text", 1, TEXT_SHOWN + 1).alias("text"),
        )
        for row in sample.limit(SAMPLE_ROWS).collect():
            say(f"  {row['partition']}:{row['offset']} {row['timestamp']:%Y-%m-%d %H:%M:%S} {_shown(row['text'])}")
    return total


def _shown(text: str | None) -> str:
    clean = cleaned(text or "")
    return clean[:TEXT_SHOWN] + ("…" if len(clean) > TEXT_SHOWN else "")


def agree(question: str, *, yes: bool) -> None:
    """Ask the user, unless `yes`. Raises `PipelineError` if the user refuses, or there is no terminal to ask at."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise PipelineError("nothing was sent: look at what was chosen, then add --yes")
    with progress.paused():
        agreed = click.confirm(question)
    if not agreed:
        raise PipelineError("nothing was sent")
