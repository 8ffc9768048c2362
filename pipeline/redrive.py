"""`python -m pipeline redrive QUEUE`: dead letters, chosen with a SQL predicate, are moved back to work, each once.

Dead letters are messages of a queue, and only the owner of their partition can end them there. So Spark chooses them,
and the service moves them. It does not move a dead letter that was already moved, or is finished or in flight. So a run
that was interrupted is simply repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import click

from app.kafka.datadir import running_workers
from marq.client import Service
from marq.errors import (
    LeaseOverError,
    MarqError,
    NotFoundError,
    PipelineError,
    UnknownQueueError,
    UnreachableError,
)
from marq.protocol.headers import H_DEAD_AT_MS, H_DEAD_QUEUE, H_DEAD_REASON, H_DEAD_RECEIVES, H_DEAD_SENT_MS
from marq.text import plural
from pipeline.console import say
from pipeline.options import Job, job_options, key_in
from pipeline.queues import require_ours
from pipeline.sending import Pace

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: Most messages in one request; with a rate, most seconds' worth of them.
BATCH = 1_000
BATCH_S = 0.5
#: Seconds for which a failed request is repeated: long enough for a worker to restart.
RETRY_S = 20.0
#: The same before anything was moved: then a worker that does not answer is probably a wrong address.
FIRST_RETRY_S = 1.0
#: Records that one Spark task reads. The driver holds what was chosen of one task's records at a time.
PART_RECORDS = 1_000_000


class Place(NamedTuple):
    """The partition and offset of a dead letter."""

    partition: int
    offset: int


@dataclass
class Moved:
    """Counts of the messages that were moved, left alone (finished or in flight), and that could not be moved."""

    moved: int = 0
    left: int = 0
    failed: int = 0
    first_error: str | None = None


def dead_letters(spark: SparkSession, job: Job, queue: str) -> DataFrame:
    """All dead letters in `queue`, finished or not: those in Kafka, and older ones from the archive.

    Raises:
        TopicError, BrokerError: Kafka can't be reached, or has no queue topic.
    """
    from pyspark.sql import functions as F

    from pipeline import damage
    from pipeline.logs import Archive, archived
    from pipeline.records import messages
    from pipeline.selection import with_text
    from pipeline.tables import is_table

    topic, bounds = job.kafka.settings.queue_topic, job.kafka.bounds(job.kafka.settings.queue_topic)
    begin = {topic: {number: start for number, (start, _) in bounds.items()}}
    end = {topic: {number: end for number, (_, end) in bounds.items()}}
    records = damage.records(spark, job.kafka, begin, end, maxRecordsPerPartition=str(PART_RECORDS))
    found = messages(records.where(F.col("key") == F.lit(queue.encode())), None).drop("reason")
    gone = {number: start for number, (start, _) in bounds.items() if start}
    archive = Archive(job.data).messages
    if gone and is_table(spark, archive):
        starts = F.create_map(*(F.lit(value) for pair in gone.items() for value in pair))
        older = archived(spark, archive).where(
            (F.col("queue") == queue) & (F.col("offset") < F.try_element_at(starts, F.col("partition")))
        )
        found = found.unionByName(older.select(found.columns))
    elif gone:
        say("older records are not in Kafka any more, and there is no archive: older dead letters are not seen")
    return with_text(_described(found))


def _described(found: DataFrame) -> DataFrame:
    """Add the columns of a dead letter's headers. Messages without these headers are dropped: they are none."""
    from pyspark.sql import functions as F

    from pipeline.records import last_header

    def header(name: str) -> Column:
        return last_header(name).cast("string")

    rows = found.withColumns(
        {
            "dead_from": header(H_DEAD_QUEUE),
            "reason": header(H_DEAD_REASON),
            "receives": header(H_DEAD_RECEIVES).try_cast("bigint"),
            "first_sent_ms": header(H_DEAD_SENT_MS).try_cast("bigint"),
            "dead_at_ms": header(H_DEAD_AT_MS).try_cast("bigint"),
            "sent": F.col("timestamp"),
        }
    )
    return rows.where("dead_from IS NOT NULL").drop("schema_version", "topic", "day", "key", "origin")


def service_of(job: Job, url: str | None, key_file: str | None, retry_s: float = RETRY_S) -> Service:
    """A client of the worker at `url`, or of one on the data folder. It repeats failed requests for `retry_s` seconds.

    Raises:
        PipelineError: no `url` is given, and no worker runs.
        BadValueError: the key can't be read.
    """
    key = key_in(key_file)
    if url is None:
        workers = running_workers(job.settings.data_dir)
        if not workers:
            raise PipelineError(
                f"no worker runs on {job.settings.data_dir}: give the address of one with --url, or start one"
            )
        scheme = "https" if job.settings.web_tls_certificate_file else "http"
        url = f"{scheme}://127.0.0.1:{workers[0].web_port}"
    return Service(url, key=key, retry_for=retry_s)


def move(service: Service, queue: str, places: Iterator[Place], to: str | None, rate: float | None) -> Moved:
    """Move dead letters, a batch per request.

    Raises:
        MarqError: the service can't be reached, or refuses. What was moved before stays moved.
    """
    outcome = Moved()
    pace = Pace(rate) if rate is not None else None
    size = BATCH if rate is None else max(1, min(BATCH, int(rate * BATCH_S)))
    source = service.queue(queue)
    while batch := list(islice(places, size)):
        if pace is not None:
            pace.wait(len(batch))
        for result in source.move(batch, to):
            if not isinstance(result, MarqError):
                outcome.moved += 1
            elif isinstance(result, LeaseOverError):
                outcome.left += 1
            else:
                outcome.failed += 1
                outcome.first_error = outcome.first_error or str(result)
    return outcome


def run(
    job: Job,
    queue: str,
    where: str,
    *,
    to: str | None = None,
    rate: float | None = None,
    url: str | None = None,
    key_file: str | None = None,
    yes: bool = False,
    dry_run: bool = False,
) -> Moved:
    """Move the dead letters of `queue` that `where` chooses, to `to` or to the queue that each comes from.

    Raises:
        MarqError: not all were moved. Run it again to go on.
    """
    require_ours(job.kafka)
    job.kafka.partitions(job.kafka.settings.queue_topic)
    with service_of(job, url, key_file, FIRST_RETRY_S) as service:
        _check(service, queue)
    with job.session("redrive") as spark, service_of(job, url, key_file) as service:
        from pipeline.selection import agree, choose, show

        chosen = choose(dead_letters(spark, job, queue), where)
        if dry_run or not yes:
            total = show(chosen)
            say("finished ones, and those in work, are counted here, but will be left alone")
            if dry_run:
                return Moved()
            agree(f"Move up to {plural(total, 'message')} to {to or 'the queues that they come from'}?", yes=yes)
        return move(service, queue, _streamed(chosen), to, rate)


def _check(service: Service, queue: str) -> None:
    """Check that the service answers and knows the queue, before Spark is started."""
    try:
        service.queue(queue).get()
    except (NotFoundError, UnknownQueueError):
        raise PipelineError(
            f"there is no queue {queue!r}; dead letters of a queue are in QUEUE.dead, unless it names another"
        ) from None
    except UnreachableError as error:
        raise PipelineError(f"{error}; give the address of a worker with --url") from None


def _streamed(chosen: DataFrame) -> Iterator[Place]:
    """Places of the chosen messages. The driver holds those of one Spark partition at a time."""
    for row in chosen.select("partition", "offset").toLocalIterator():
        yield Place(row["partition"], row["offset"])


@click.command("redrive")
@click.argument("queue")
@click.option("--where", default="true", show_default=True, metavar="SQL", help="Which of its dead letters.")
@click.option("--to", metavar="QUEUE", help="Queue that they go to; default: the one that each comes from.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Messages a second at most.")
@click.option("--url", help="Address of a worker; default: one that runs on MARQ_DATA_DIR.")
@click.option("--key-file", metavar="FILE", help="File with the key to use there.")
@click.option("--dry-run", is_flag=True, help="Show what would be moved, move nothing.")
@click.option("--yes", is_flag=True, help="Move without asking.")
@job_options
def command(
    job: Job,
    queue: str,
    where: str,
    to: str | None,
    rate: float | None,
    url: str | None,
    key_file: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Move dead letters of QUEUE (orders.dead, say) back to the queue that each comes from, each once.

    Columns: dead_from, reason, receives, sent, first_sent_ms, dead_at_ms, partition, offset, size, sender_key, group,
    payload, payload_text, attributes (a map of the sender's headers). For example --where "reason = 'max-receives' AND
    get_json_object(payload_text, '$.dest') = 'LAX'".
    """
    began = time.monotonic()
    outcome = run(job, queue, where, to=to, rate=rate, url=url, key_file=key_file, yes=yes, dry_run=dry_run)
    say(f"moved {outcome.moved}, left alone {outcome.left}, failed {outcome.failed}, {time.monotonic() - began:.1f} s")
    if outcome.failed:
        raise PipelineError(f"{outcome.failed} could not be moved, run it again: {outcome.first_error}")
