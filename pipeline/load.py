"""`python -m pipeline load QUEUE PATH`: the rows of Parquet, CSV or JSON files as messages, each exactly once.

Rows are read, checked and staged (see `staging`), then sent (see `sending`). What a job sends identifies it: the same
files to the same queue with the same options are the same job, which goes on where it stopped, or is done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING
from urllib.parse import unquote

import click
import msgspec

from marq.errors import BadValueError, PipelineError
from marq.protocol.headers import H_DELAY, H_GROUP, H_TTL, HEADER_KEY, RESERVED
from marq.text import plural
from pipeline import inputs, progress
from pipeline.console import say
from pipeline.dispatch import Dispatch, Outcome, echo_outcome
from pipeline.ledger import State
from pipeline.options import Job, job_options
from pipeline.queues import Queues, require_ours

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from pipeline.staging import Counts

_CORRUPT = "_corrupt_record"
#: Rows that are searched first for the columns of JSON lines, before all rows are.
_FIRST_ROWS = 1_000


class What(msgspec.Struct, frozen=True):
    """How a row becomes a message. `delay` and `ttl`: milliseconds, or the column that holds them."""

    queue: str
    payload: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    key: str | None = None
    group: str | None = None
    delay: str | None = None
    ttl: str | None = None
    format: str = ""
    options: tuple[tuple[str, str], ...] = ()

    @property
    def columns(self) -> set[str]:
        """Columns of the input that it refers to."""
        named = [self.payload, self.key, self.group, *(column for _, column in self.headers)]
        named += [text for text in (self.delay, self.ttl) if text is not None and not text.isdigit()]
        return {name for name in named if name is not None}


@dataclass(frozen=True)
class Source:
    """Rows of the input, and its columns by name, as bytes or text."""

    rows: DataFrame
    columns: Mapping[str, Column]
    whole: Column  # the whole row, which is sent if no payload column is named
    malformed: Column | None
    hint: str


# -- reading --------------------------------------------------------------------------------------------


def open_source(spark: SparkSession, path: str, what: What) -> Source:
    """The rows of `path`. Raises `PipelineError` for a missing column, and for files that can't be read."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from pipeline.session import explain

    reader = {"parquet": _parquet, "csv": _csv, "json": _json}[what.format]
    try:
        source = reader(spark, inputs.address(path), what)
    except (PySparkException, Py4JError) as error:
        raise PipelineError(f"{path} can't be read as {what.format}: {explain(error)}") from None
    for name in sorted(what.columns - source.columns.keys()):
        known = ", ".join(source.columns)
        raise PipelineError(f"{path} has no column {name!r}; it has {known or 'none'}")
    return source


def _tabular(rows: DataFrame, hint: str = "") -> Source:
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType, VariantType

    columns = {}
    for field in rows.schema:
        if field.name == _CORRUPT:
            continue
        column = F.col(f"`{field.name.replace('`', '``')}`")
        nested = isinstance(field.dataType, (ArrayType, MapType, StructType, VariantType))
        binary = isinstance(field.dataType, BinaryType)
        columns[field.name] = F.to_json(column) if nested else column if binary else column.cast("string")
    plain = [F.col(f"`{name.replace('`', '``')}`") for name in columns]
    whole = F.to_json(F.struct(*plain), {"ignoreNullFields": "false"}) if plain else F.lit(None).cast("string")
    malformed = F.col(_CORRUPT).isNotNull() if _CORRUPT in rows.columns else None
    return Source(rows, columns, whole, malformed, hint)


def _parquet(spark: SparkSession, path: str, what: What) -> Source:
    return _tabular(spark.read.options(**{"mergeSchema": "true", **dict(what.options)}).parquet(path))


def _csv(spark: SparkSession, path: str, what: What) -> Source:
    # Columns are matched by name in each file, and a row with too many or too few cells is an error.
    options = {"header": "true", "enforceSchema": "false", **dict(what.options)}
    schema = spark.read.options(**options).csv(path).schema.add(_CORRUPT, "string")
    rows = spark.read.options(**{**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT})
    return _tabular(rows.schema(schema).csv(path), "--option multiLine=true reads cells with line breaks")


def _json(spark: SparkSession, path: str, what: What) -> Source:
    from pyspark.sql import functions as F

    options = dict(what.options)
    if options.get("multiLine", "false").lower() == "true":
        return _tabular(spark.read.options(**options).json(path))
    # A line is sent unchanged; only the columns that are asked for are looked up.
    lines = spark.read.options(**options).text(path).where(F.trim("value") != "")
    parsed = lines.withColumn("_parsed", F.from_json("value", "map<string,string>"))
    columns = {name: F.try_element_at("_parsed", F.lit(name)) for name in _json_columns(parsed, what.columns)}
    hint = "--option multiLine=true reads one document over many lines"
    return Source(parsed, columns, F.col("value"), F.col("_parsed").isNull(), hint)


def _json_columns(parsed: DataFrame, wanted: set[str]) -> list[str]:
    """Column names in the first lines, and those of `wanted` that occur anywhere."""
    from pyspark.sql import functions as F

    if not wanted:
        return []
    names = F.array_sort(F.flatten(F.collect_set(F.map_keys("_parsed"))))
    row = parsed.limit(_FIRST_ROWS).agg(F.array_distinct(names).alias("names")).first()
    found = list(row["names"]) if row is not None else []
    for name in sorted(wanted.difference(found)):
        if not parsed.where(F.map_contains_key("_parsed", name)).isEmpty():
            found.append(name)
    return found


# -- staging --------------------------------------------------------------------------------------------


def staged_rows(source: Source, what: What, delay_ms: int, fifo: Mapping[str, bool]) -> DataFrame:
    """The rows of a source as staged rows. Instead of `row` they have the file, its block, and their place in that.

    Args:
        delay_ms: delay of the queue, for rows that name none.
        fifo: FIFO queues (see `staging.checked`).
    """
    from pyspark.sql import functions as F

    from pipeline.staging import checked, first_of, headers_of, milliseconds, not_milliseconds

    def value(name: str | None) -> Column:
        return F.lit(None).cast("string") if name is None else source.columns[name]

    def amount(text: str | None) -> Column:
        if text is None or text.isdigit():
            return F.lit(text).cast("string")
        return source.columns[text].cast("string")

    payload = source.whole if what.payload is None else value(what.payload)
    group = value(what.group).cast("string")
    delay, ttl = amount(what.delay), amount(what.ttl)
    headers = [
        *((name, value(column)) for name, column in what.headers),
        (HEADER_KEY, value(what.key)),
        (H_TTL, milliseconds(ttl)),
        (H_DELAY, milliseconds(F.coalesce(delay, F.lit(str(delay_ms))))),
        (H_GROUP, group),
    ]
    checks = [not_milliseconds("delay", delay), not_milliseconds("time to live", ttl)]
    if what.payload is not None:
        checks.insert(0, (payload.isNull(), F.lit(f"no payload: column {what.payload!r} is null")))
    if source.malformed is not None:
        checks.insert(0, (source.malformed, F.lit(f"malformed {what.format.upper()} ({source.hint})")))
    rows = source.rows.select(
        F.col("_metadata.file_path").alias("file"),
        F.col("_metadata.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("place"),
        payload.cast("binary").alias("payload"),
        headers_of(headers).alias("headers"),
        group.alias("group"),
        first_of(checks).alias("reason"),
    )
    return checked(rows, F.lit(what.queue), fifo)


def numbered(staged: DataFrame, queue: str) -> tuple[DataFrame, Counts]:
    """Staged rows with numbers in the order of the files and an origin (file and row), and the counts of all rows."""
    from pyspark.sql import functions as F

    from pipeline.staging import Counts

    bad = F.col("error").isNotNull()
    found = staged.groupBy("file", "block").agg(
        F.min("place").alias("first"),
        F.count("*").alias("rows"),
        F.count("error").alias("bad"),
        F.coalesce(F.sum(F.when(~bad, F.octet_length("payload"))), F.lit(0)).alias("size"),
        F.min(F.when(bad, F.struct("place", "error"))).alias("first_bad"),
    )
    # A block is some 100 MB, so there are few.
    blocks: list[tuple[str, int, int, int, int]] = []
    total = size = bad_count = within = 0
    file, first_error = None, None
    for block in sorted(found.collect(), key=itemgetter("file", "block")):
        within = within if block["file"] == file else 0
        file = block["file"]
        blocks.append((file, block["block"], block["first"], total, within))
        if block["first_bad"] is not None and first_error is None:
            row = within + block["first_bad"]["place"] - block["first"] + 1
            first_error = f"{_file_name(file)} row {row}: {block['first_bad']['error']}"
        total, within = total + block["rows"], within + block["rows"]
        size, bad_count = size + block["size"], bad_count + block["bad"]
    schema = "file string, block long, first long, before long, within long"
    starts = F.broadcast(staged.sparkSession.createDataFrame(blocks, schema))
    here = F.col("place") - F.col("first")
    rows = staged.join(starts, ["file", "block"]).select(
        (F.col("before") + here).alias("row"),
        F.lit(queue).alias("queue"),
        "group",
        "payload",
        "headers",
        "together",
        F.concat(_decoded(F.element_at(F.split("file", "/"), -1)), F.lit(" row "), F.col("within") + here + 1).alias(
            "origin"
        ),
        "error",
    )
    return rows, Counts(total - bad_count, size, bad_count, first_error)


def _decoded(name: Column) -> Column:
    from pyspark.sql import functions as F

    return F.url_decode(F.regexp_replace(name, r"\+", "%2B"))


def _file_name(address: str) -> str:
    return unquote(address.rpartition("/")[2])


# -- the job --------------------------------------------------------------------------------------------


def run(
    job: Job,
    path: str,
    what: What,
    *,
    name: str | None = None,
    rate: float | None = None,
    skip_bad: bool = False,
    dry_run: bool = False,
) -> Outcome:
    """Send the rows of `path` that are not sent yet.

    Raises:
        MarqError: not all rows were sent. The next run goes on where this one stopped.
    """
    require_ours(job.kafka)
    queues = Queues.of(job.kafka)
    queues.require_sendable(what.queue)
    if queues.is_fifo(what.queue):
        if what.group is None:
            raise BadValueError(f"queue {what.queue!r} is FIFO: name the column of the group with --group")
        if what.delay is not None:
            raise BadValueError(f"queue {what.queue!r} is FIFO: a delay is the queue's, leave out --delay")
    from pipeline.staging import Staging

    with ExitStack() as stack:
        spark = None
        if inputs.is_local(path):
            found = inputs.local_files(path)
        else:
            spark = stack.enter_context(job.session("load"))
            found = inputs.remote_files(spark, path)
        what = msgspec.structs.replace(what, format=what.format or inputs.format_of(found, path))
        dispatch = Dispatch(job, "load", name, [what, found], rate)
        say(f"{dispatch.name}: {len(found)} file(s), {sum(file.size_bytes for file in found):,} bytes")
        state = dispatch.look() if dry_run else dispatch.take_over()
        if state.done is not None:
            return Outcome(0, state.done.sent, state.done.skipped)
        spark = spark or stack.enter_context(job.session("load"))
        staging = Staging(spark, job, dispatch.name, dispatch.fingerprint)
        if not staging.exists():
            progress.of_spark("reading and checking rows", spark)
            source = open_source(spark, path, what)
            staging.write(staged_rows(source, what, queues.delay_ms(what.queue), queues.fifo()))
        rows, counts = numbered(staging.read(), what.queue)
        if dry_run:
            return _tell(counts, what.queue, state)
        staging.reject(rows, counts, skip=skip_bad)
        outcome = dispatch.send(rows.where("error IS NULL"), state, counts.bad, counts.rows)
        staging.clear()
    return outcome


def _tell(counts: Counts, queue: str, state: State) -> Outcome:
    what = f"{plural(counts.rows, 'message')} of {plural(counts.size_bytes, 'byte')}"
    say(f"{what} for {queue!r}; {plural(counts.bad, 'row')} can't be sent")
    if counts.first_error:
        say(f"the first: {counts.first_error}")
    return Outcome(0, state.sent, counts.bad)


@click.command("load")
@click.argument("queue")
@click.argument("path")
@click.option("--format", "format_", type=click.Choice(inputs.FORMATS), help="Default: as the names of the files say.")
@click.option("--payload", metavar="COLUMN", help="Column that is the payload; default: the whole row, as JSON.")
@click.option("--header", "headers", metavar="NAME=COLUMN", multiple=True, help="A header; COLUMN alone: of that name.")
@click.option("--key", metavar="COLUMN", help="Column that is the sender's key.")
@click.option("--group", metavar="COLUMN", help="Column that names the message's group.")
@click.option("--delay", metavar="MS|COLUMN", help="Milliseconds until delivery; default: as the queue says.")
@click.option("--ttl", metavar="MS|COLUMN", help="Milliseconds until it expires.")
@click.option("--option", "options", metavar="KEY=VALUE", multiple=True, help="An option of Spark's reader (sep, …).")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Messages a second at most.")
@click.option("--job", "name", metavar="NAME", help="Name of the job; default: what it sends is its name.")
@click.option("--skip-bad", is_flag=True, help="Put rows aside that can't be sent, and send the others.")
@click.option("--dry-run", is_flag=True, help="Read and check, send nothing.")
@job_options
def command(
    job: Job,
    queue: str,
    path: str,
    format_: str | None,
    payload: str | None,
    headers: tuple[str, ...],
    key: str | None,
    group: str | None,
    delay: str | None,
    ttl: str | None,
    options: tuple[str, ...],
    rate: float | None,
    name: str | None,
    skip_bad: bool,
    dry_run: bool,
) -> None:
    """Send the rows of PATH (a Parquet, CSV or JSON file, or a folder of them) to QUEUE, each exactly once.

    Run it again after a crash: it goes on where it stopped. Files that were sent are not sent again, unless --job gives
    the sending another name.
    """
    began = time.monotonic()
    what = What(
        queue=queue,
        payload=payload,
        headers=_headers(headers),
        key=key,
        group=group,
        delay=delay,
        ttl=ttl,
        format=format_ or "",
        options=tuple(_pair(text) for text in options),
    )
    outcome = run(job, path, what, name=name, rate=rate, skip_bad=skip_bad, dry_run=dry_run)
    echo_outcome(outcome, time.monotonic() - began)


def _headers(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = []
    for text in texts:
        name, sign, column = text.partition("=")
        if not name or (sign and not column):
            raise BadValueError(f"--header {text!r} is not of the form NAME=COLUMN, or COLUMN")
        if name.startswith(RESERVED):
            raise BadValueError(f"--header {text!r}: names that begin with {RESERVED!r} are marq's own")
        found.append((name, column or name))
    return tuple(found)


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise BadValueError(f"--option {text!r} is not of the form KEY=VALUE")
    return key, value
