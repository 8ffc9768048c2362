"""`python -m pipeline replay`: archived messages, chosen with a SQL predicate, sent again, each once.

The chosen messages are staged (see `staging`), confirmed by the user, then sent (see `sending`). A run that goes on
after a crash sends the rest of the same messages, whatever was archived since.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
import msgspec

from marq.errors import PipelineError
from marq.protocol.headers import H_DELAY, H_GROUP, H_REPLAYED_FROM, H_TTL, HEADER_KEY
from marq.text import plural
from pipeline.console import say
from pipeline.dispatch import Dispatch, Outcome, echo_outcome
from pipeline.options import Job, job_options
from pipeline.queues import Queues, require_ours

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: Bits for the partition in a row's number, and so the most partitions: 2 to that power.
PARTITION_BITS = 14


class What(msgspec.Struct, frozen=True):
    """Which messages, and how they are sent. Without `to` they go to the queues that they were in."""

    where: str
    to: str | None = None
    delay_ms: int | None = None
    ttl_ms: int | None = None
    archive: str = ""


def archived(spark: SparkSession, job: Job) -> DataFrame:
    """Archived messages, with histories where `lifecycle` wrote them. Raises `PipelineError` if there is no archive."""
    from pipeline import logs
    from pipeline.selection import with_text
    from pipeline.tables import is_table

    messages = logs.archived(spark, logs.Archive(job.data).messages).drop("schema_version")
    place = ["partition", "offset"]
    if is_table(spark, job.path("lifecycle")):
        histories = spark.read.format("delta").load(job.path("lifecycle"))
        extra = [name for name in histories.columns if name in place or name not in messages.columns]
        messages = messages.join(histories.select(extra), place, "left")
    return with_text(messages)


def staged_rows(chosen: DataFrame, what: What, queues: Queues) -> DataFrame:
    """Chosen messages as staged rows, in the order of their offsets, partitions side by side."""
    from pyspark.sql import functions as F

    from pipeline.selection import sender_headers
    from pipeline.staging import checked, headers_of, milliseconds

    gone: list[str] = []
    if what.to is None:
        gone = queues.missing(row["queue"] for row in chosen.select("queue").distinct().toLocalIterator())
    queue = F.lit(what.to) if what.to is not None else F.col("queue")
    own = headers_of(
        [
            (HEADER_KEY, F.col("sender_key")),
            (H_TTL, milliseconds(F.lit(what.ttl_ms))),
            (H_DELAY, milliseconds(_delay(queue, what, queues))),
            (H_GROUP, F.col("group")),
            (H_REPLAYED_FROM, F.concat_ws(":", "topic", "partition", "offset")),
        ]
    )
    rows = chosen.select(
        F.shiftleft("offset", PARTITION_BITS).bitwiseOR(F.col("partition").cast("long")).alias("row"),
        queue.alias("queue"),
        "group",
        F.coalesce("payload", F.lit(b"")).alias("payload"),
        F.concat(sender_headers(), own).alias("headers"),
        F.concat_ws(":", "topic", "partition", "offset").alias("origin"),
        F.col("partition").cast("long").alias("source"),
        F.when(queue.isin(gone), F.lit("its queue does not exist any more")).alias("reason"),
    )
    return checked(rows, F.col("queue"), queues.fifo())


def _delay(queue: Column, what: What, queues: Queues) -> Column:
    from pyspark.sql import functions as F

    if what.delay_ms is not None:
        return F.lit(what.delay_ms)
    delays = queues.delays()
    if what.to is not None or not delays:
        return F.lit(delays.get(what.to or "", 0))
    return F.try_element_at(F.create_map(*(F.lit(x) for pair in delays.items() for x in pair)), queue)


def run(
    job: Job,
    what: What,
    *,
    name: str | None = None,
    rate: float | None = None,
    yes: bool = False,
    dry_run: bool = False,
    skip_bad: bool = False,
) -> Outcome:
    """Send the chosen messages that are not sent yet.

    Raises:
        MarqError: not all were sent. The next run goes on where this one stopped.
    """
    require_ours(job.kafka)
    queues = Queues.of(job.kafka)
    if what.to is not None:
        queues.require_sendable(what.to)
    what = msgspec.structs.replace(what, archive=job.path("archive", "messages"))
    dispatch = Dispatch(job, "replay", name, what, rate)
    state = dispatch.look()
    if state.done is not None:
        say(f"{dispatch.name} is done; --job gives the same choice another name")
        return Outcome(0, state.done.sent, state.done.skipped)
    with job.session("replay") as spark:
        from pipeline.selection import agree, choose, show
        from pipeline.staging import Staging

        staging = Staging(spark, job, dispatch.name, dispatch.fingerprint)
        begun = state.input is not None
        if begun and not staging.exists():
            raise PipelineError(
                f"{dispatch.name} was begun, but what it chose is not in {staging.folder} any more: give the same "
                "--data, or another name with --job"
            )
        if not begun:
            chosen = choose(archived(spark, job), what.where)
            if what.to is None:
                chosen = chosen.where("queue IS NOT NULL")
            if dry_run:
                show(chosen)
                return Outcome(0, 0, 0)
            staging.clear()
            staging.write(staged_rows(chosen, what, queues))
        rows = staging.read()
        counts = staging.counts(rows)
        size = f"{plural(counts.rows, 'message')}, {plural(counts.size_bytes, 'byte')}"
        say(f"{dispatch.name}: {size}; {state.sent:,} sent before")
        if dry_run:
            return Outcome(0, state.sent, counts.bad)
        staging.reject(rows, counts, skip=skip_bad)
        if not begun:
            agree(f"Send {plural(counts.rows, 'message')} to {what.to or 'the queues that they were in'}?", yes=yes)
        state = dispatch.take_over()
        outcome = dispatch.send(rows.where("error IS NULL"), state, counts.bad, counts.rows)
        staging.clear()
    return outcome


@click.command("replay")
@click.option(
    "--where", required=True, metavar="SQL", help="Which messages: a condition on the columns of the archive."
)
@click.option("--to", metavar="QUEUE", help="Queue that they go to; default: the one that each was in.")
@click.option("--delay", "delay_ms", type=click.IntRange(min=0), metavar="MS", help="Milliseconds until delivery.")
@click.option("--ttl", "ttl_ms", type=click.IntRange(min=1), metavar="MS", help="Milliseconds until they expire.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Messages a second at most.")
@click.option("--job", "name", metavar="NAME", help="Name of the job; default: what it sends is its name.")
@click.option("--skip-bad", is_flag=True, help="Put messages aside that have become too large, and send the others.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent, send nothing.")
@click.option("--yes", is_flag=True, help="Send without asking.")
@job_options
def command(
    job: Job,
    where: str,
    to: str | None,
    delay_ms: int | None,
    ttl_ms: int | None,
    rate: float | None,
    name: str | None,
    skip_bad: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Send archived messages again, each once, with payload, headers, key and group.

    Columns: those of the tables archive/messages and, where there is one, lifecycle; payload_text; attributes, a map
    of the sender's headers. For example --where "queue = 'orders' AND size > 900 AND attributes['to'] = 'JFK'".

    Run it again after a crash: it goes on where it stopped.
    """
    began = time.monotonic()
    what = What(where, to, delay_ms, ttl_ms)
    outcome = run(job, what, name=name, rate=rate, yes=yes, dry_run=dry_run, skip_bad=skip_bad)
    echo_outcome(outcome, time.monotonic() - began)
