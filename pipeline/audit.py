"""`audit`: proof, from the logs, the tables and the workers, that no message was lost or duplicated.

Exit status 0: proven; 1: faults were found, and are printed; 2: the audit could not be made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from marq.errors import PipelineError
from pipeline.auditor import ABSENT, FOUND, SUMMARY, Auditor, Plan, Summary
from pipeline.changelogs import Snapshot, snapshot, table_rows
from pipeline.console import say
from pipeline.gaps import lost
from pipeline.options import Job, job_options, key_in
from pipeline.queues import Queues, archived_queues
from pipeline.states import states_of
from pipeline.verdict import Found, Verdict, as_json, lines
from pipeline.walk import walk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from marq.core.ranges import Ranges
    from pipeline.damage import Damaged
    from pipeline.logs import Bounds

#: Most attempts: another one is made if records or rows of tables (compaction) vanish while they are read.
ATTEMPTS = 3
#: Most faults of one partition that are collected; the others are only counted.
FAULTS_MAX = 1_000

States = Mapping[int, Mapping[str, Any]]
"""State of each partition, as its worker reports it."""


class Logs(NamedTuple):
    """The logs to walk."""

    records: DataFrame
    bounds: dict[int, Bounds]
    archived: dict[int, Bounds]  # of the archive, if it is read
    kafka: dict[int, Bounds]  # of Kafka, read after those of the archive; none: it is not read


class _DeletedError(PipelineError):
    """Records that the audit needs were deleted while it ran."""


@click.command()
@click.option("--worker", metavar="URL", help="A worker to compare with, e.g. http://localhost:9324.")
@click.option("--key-file", metavar="FILE", help="File with the key for that worker's HTTP, if it asks for one.")
@click.option("--archive", is_flag=True, help="Read what is archived from the archive, and the rest from Kafka.")
@click.option("--offline", is_flag=True, help="Read the archive alone: no Kafka, no tables, no worker.")
@click.option("--json", "json_file", metavar="FILE", help="Write the result as JSON; - for stdout.")
@click.option("--accept-loss", is_flag=True, help="What was given up is named, and is no fault.")
@click.option("--faults", default=20, show_default=True, type=click.IntRange(1), help="So many faults are printed.")
@job_options
def command(
    job: Job,
    worker: str | None,
    key_file: str | None,
    archive: bool,
    offline: bool,
    json_file: str | None,
    accept_loss: bool,
    faults: int,
) -> None:
    """Prove that no message was lost: fold both logs, and compare with the tables and a worker.

    Exit status 0: proven. 1: something is wrong, each message named. 2: the audit could not be made.
    """
    key = key_in(key_file)
    if offline and worker:
        raise PipelineError("--offline reads no worker; leave out one of --offline and --worker")
    if worker is not None and not worker.startswith(("http://", "https://")):
        raise PipelineError(f"--worker {worker} is no address of HTTP; it is like http://localhost:9324")
    if not offline:
        job.kafka.bounds(job.settings.queue_topic)
    if worker is not None:
        states_of(worker, key, 1)  # whether it answers is known before Java is started
    with job.session("audit") as spark:
        verdict = audit(
            spark,
            job,
            worker=worker,
            key=key,
            archive=archive or offline,
            offline=offline,
            accept_loss=accept_loss,
        )
    result = as_json(verdict)
    for line in lines(verdict, faults):
        say(line, err=json_file == "-")
    if json_file == "-":
        click.echo(json.dumps(result))
    elif json_file is not None:
        try:
            Path(json_file).write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise PipelineError(f"--json {json_file} can't be written: {error.strerror}") from None
    raise SystemExit(0 if verdict.proven else 1)


# ------------------------------------------------------------------ the audit


def audit(
    spark: SparkSession,
    job: Job,
    *,
    worker: str | None = None,
    key: str | None = None,
    archive: bool = False,
    offline: bool = False,
    accept_loss: bool = False,
) -> Verdict:
    """Audit an installation.

    Args:
        worker: address of a worker whose state has to agree. The logs are walked up to its positions.
        archive: read from the archive what is there.
        offline: read nothing but the archive.
        accept_loss: what was given up is no fault.

    Raises:
        MarqError: the audit could not be made.
    """
    from pipeline.damage import find_all

    began = time.monotonic()
    damaged: Damaged = {}
    fifo = _fifo_since(spark, job, offline=offline)
    for attempt in range(1, ATTEMPTS + 1):
        faults: list[Found] = []
        tables = None
        if not offline:
            committed = job.kafka.committed(job.settings.name)
            tables = snapshot(job.kafka)
            faults += _check_committed(job, committed, tables)
        states = states_of(worker, key, job.kafka.partitions(job.settings.queue_topic)) if worker else {}
        try:
            logs = _logs(spark, job, states, damaged, archive=archive, offline=offline)
        except _DeletedError:
            if attempt == ATTEMPTS:
                raise
            continue
        plans = {n: _plan(n, job, logs, tables, states.get(n), accept_loss, fifo or {}) for n in logs.bounds}
        rows = table_rows(spark, job.kafka, tables) if tables is not None else None
        try:
            summaries, found, absent = _collect(walk(spark, logs.records, plans, Auditor, FOUND, rows=rows))
            others, more_others = _rewritten(spark, job, logs, damaged, found)
        except Exception:
            # damage that workers met in the queue topic is known; damage in the markers is looked for only now
            if offline or damaged or attempt == ATTEMPTS:
                raise
            damaged = find_all(job.kafka)
            if not damaged:
                raise
            continue
        missing = any(fault.kind == "tables" and fault.offset < 0 for fault in found)
        if not (missing and tables is not None and _outdated(tables, snapshot(job.kafka))):
            break
    count = len(faults) + sum(summary.faults for summary in summaries)
    found, count = found + others, count + more_others
    if not offline:
        gone, more = _gone(job, absent, found)
        found, count = found + gone, count + more
    found.sort(key=lambda f: (f.partition, f.offset))
    seconds = time.monotonic() - began
    return Verdict(
        summaries,
        faults=faults + found,
        fault_count=count,
        archived=archive,
        tables=tables is not None,
        worker=worker,
        seconds=seconds,
        ordered=fifo is not None,
    )


def _fifo_since(spark: SparkSession, job: Job, *, offline: bool) -> dict[str, int] | None:
    """FIFO queues, and since when they are in order; None: the archive does not have the queues."""
    if not offline:
        return Queues.of(job.kafka).fifo_since()
    records = archived_queues(spark, job)
    return None if records is None else Queues(records).fifo_since()


def _rewritten(
    spark: SparkSession, job: Job, logs: Logs, damaged: Damaged, found: list[Found]
) -> tuple[list[Found], int]:
    """What only the archive has, or Kafka has another record of, unless that was found already."""
    from pipeline.logs import Archive
    from pipeline.rewritten import Sources, rewritten

    if not (logs.archived and logs.kafka):
        return [], 0
    faults, count = rewritten(
        Sources(spark, Archive(job.data), job.kafka, logs.archived, logs.kafka, damaged), FAULTS_MAX
    )
    known = {(fault.partition, fault.offset) for fault in found if fault.kind == "record gone"}
    named = [fault for fault in faults if fault.kind != "record gone" or (fault.partition, fault.offset) not in known]
    return named, count - (len(faults) - len(named))


def _gone(job: Job, absent: Mapping[int, Ranges], found: list[Found]) -> tuple[list[Found], int]:
    """Records of the queue topic that nothing else tells to be lost: those to print, and how many there are."""
    known = {(fault.partition, fault.offset) for fault in found if fault.kind == "record gone"}
    gone: list[Found] = []
    count = 0
    for number, ranges in lost(job.kafka, absent).items():
        named = 0
        for start, stop, what in ranges:
            for offset in range(start, stop):
                if (number, offset) in known:
                    continue
                count += 1
                named += 1
                if named <= FAULTS_MAX:
                    gone.append(Found(number, offset, None, "record gone", what))
    return gone, count


def _check_committed(job: Job, committed: Mapping[str, Mapping[int, int]], tables: Snapshot) -> list[Found]:
    """Check that no committed offset is beyond the tables: records below it are not read again."""
    faults = [Found(number, -1, None, kind, why) for number, kind, why in tables.damaged]
    for topic, attribute in ((job.settings.queue_topic, "position"), (job.settings.markers_topic, "markers_position")):
        starts = job.kafka.bounds(topic)
        for number, offset in committed.get(topic, {}).items():
            newest = tables.newest.get(number)
            if newest is None:
                position, of = starts.get(number, (0, 0))[0], "the beginning of its log, and there is no manifest"
            else:
                position, of = getattr(newest.manifest, attribute), "the position of the newest manifest"
            if offset > position:
                what = f"group {job.settings.name} has committed {offset} of {topic}, beyond {position}, {of}"
                faults.append(Found(number, -1, None, "committed", what))
    return faults


def _outdated(before: Snapshot, now: Snapshot) -> bool:
    return {n: newest.value for n, newest in before.newest.items()} != {
        n: newest.value for n, newest in now.newest.items()
    }


def _logs(spark: SparkSession, job: Job, states: States, damaged: Damaged, *, archive: bool, offline: bool) -> Logs:
    """Both logs with fingerprints, from Kafka, the archive or both, and where they begin and end."""
    from pipeline.logs import Archive, Bounds, bounds, logs

    old = bounds(spark, Archive(job.data)) if archive else {}
    if offline:
        return Logs(logs(spark, Archive(job.data), prints=True), old, old, {})
    there = bounds(spark, job.kafka)
    found: dict[int, Bounds] = {}
    begin: dict[int, tuple[int, int]] = {}
    end: dict[int, tuple[int, int]] = {}
    for number, kafka in there.items():
        stop = _stop(number, kafka, states.get(number))
        starts = switch = (kafka.queue_start, kafka.markers_start)
        if number in old:
            starts, switch = _joined(number, old[number], kafka, stop)
        begin[number], end[number] = switch, stop
        found[number] = Bounds(starts[0], stop[0], starts[1], stop[1])
    stream = logs(spark, job.kafka, begin, end, prints=True, damaged=damaged)
    if old:
        stream = stream.unionByName(logs(spark, Archive(job.data), None, begin, prints=True))
    return Logs(stream, found, old, there)


def _stop(number: int, kafka: Bounds, state: Mapping[str, Any] | None) -> tuple[int, int]:
    """Ends of the walk of a partition: the positions that its worker reported, else the ends of the logs."""
    if state is None:
        return kafka.queue_end, kafka.markers_end
    queue, markers = state["queue_position"], state["markers_position"]
    if queue > kafka.queue_end or markers > kafka.markers_end:
        raise PipelineError(
            f"the worker is at {queue} and {markers} of partition {number}, where the logs end at {kafka.queue_end} "
            f"and {kafka.markers_end}: it belongs to another Kafka, has another MARQ_NAME, or the logs have lost their "
            "ends, which an audit without --worker names"
        )
    if queue < kafka.queue_start or markers < kafka.markers_start:
        raise _DeletedError(
            f"partition {number}: the worker deleted records up to {kafka.queue_start} and {kafka.markers_start} since "
            f"it reported its state at {queue} and {markers}; raise MARQ_RETENTION_HISTORY_MS"
        )
    return queue, markers


def _joined(number: int, old: Bounds, kafka: Bounds, stop: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the walk begins, in the archive, and where it goes on in Kafka."""
    if old.queue_end < kafka.queue_start or old.markers_end < kafka.markers_start:
        raise PipelineError(
            f"the archive ends at {old.queue_end} and {old.markers_end} of partition {number}, Kafka begins at "
            f"{kafka.queue_start} and {kafka.markers_start}: the records between are gone; audit without --archive"
        )
    queue_start = old.queue_start if old.queue_end else kafka.queue_start
    markers_start = old.markers_start if old.markers_end else kafka.markers_start
    return (queue_start, markers_start), (min(old.queue_end, stop[0]), min(old.markers_end, stop[1]))


def _plan(
    number: int,
    job: Job,
    logs: Logs,
    tables: Snapshot | None,
    state: Mapping[str, Any] | None,
    accept_loss: bool,
    fifo: Mapping[str, int],
) -> bytes:
    bound = logs.bounds[number]
    newest = tables.newest.get(number) if tables is not None else None
    return msgspec.msgpack.encode(
        Plan(
            queue_start=bound.queue_start,
            queue_stop=bound.queue_end,
            markers_start=bound.markers_start,
            markers_stop=bound.markers_end,
            queue_id=job.settings.queue_id,
            archived=logs.archived[number].markers_end if number in logs.archived else 0,
            tables=tables is not None,
            manifest=None if newest is None else newest.value,
            live=None if state is None else dict(state),
            faults_max=FAULTS_MAX,
            queue_end=logs.kafka[number].queue_end if logs.kafka else None,
            accept_loss=accept_loss,
            fifo=dict(fifo),
        )
    )


def _collect(found: DataFrame) -> tuple[list[Summary], list[Found], dict[int, Ranges]]:
    """What the auditors found: summaries, faults, and offsets of the queue log without a record, by partition."""
    summaries: list[Summary] = []
    faults: list[Found] = []
    absent: dict[int, Ranges] = {}
    for row in found.collect():
        if row.kind == SUMMARY:
            summaries.append(msgspec.msgpack.decode(bytes(row.data), type=Summary))
        elif row.kind == ABSENT:
            absent[row.partition] = msgspec.msgpack.decode(bytes(row.data), type=list[int])
        else:
            faults.append(Found(row.partition, row.offset, row.queue, row.kind, row.what))
    return sorted(summaries, key=lambda s: s.partition), sorted(faults, key=lambda f: (f.partition, f.offset)), absent
