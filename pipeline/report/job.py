"""The command `report`."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from marq.errors import PipelineError
from pipeline.console import say
from pipeline.options import Job, job_options
from pipeline.report.span import Span, moment_ms

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession


@click.command()
@click.option("--out", default="report.html", show_default=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--queue", "queues", multiple=True, metavar="PATTERN", help="Only these: * and ? stand for any; repeatable."
)
@click.option(
    "--from", "start", metavar="TIME", help="First moment: 2026-01-31T08:00 (UTC), or how long ago: 90m, 24h, 7d."
)
@click.option("--to", "stop", metavar="TIME", help="The moment before which it ends; likewise.")
@click.option("--top", default=12, show_default=True, type=click.IntRange(0, 100), help="Queues with a section each.")
@click.option("--no-update", is_flag=True, help="Show the table `lifecycle` as it is, without what was archived since.")
@job_options
def command(
    job: Job,
    out: Path,
    queues: tuple[str, ...],
    start: str | None,
    stop: str | None,
    top: int,
    no_update: bool,
) -> None:
    """One self-contained HTML page with plots of how the queues did, from the archive."""
    now = datetime.now(UTC)
    limits = (
        moment_ms(start, now, "--from") if start else None,
        moment_ms(stop, now, "--to") if stop else None,
    )
    if limits[0] is not None and limits[1] is not None and limits[0] >= limits[1]:
        raise PipelineError(f"--from {start} is not before --to {stop}")
    _check_place(out)
    with job.session("report") as spark:
        html = report(spark, job, queues=queues, limits=limits, top=top, update=not no_update)
    _write(out, html)
    say(f"{out}: {len(html) / 1e6:.1f} MB")


def report(
    spark: SparkSession,
    job: Job,
    *,
    queues: tuple[str, ...] = (),
    limits: tuple[int | None, int | None] = (None, None),
    top: int = 12,
    update: bool = True,
) -> str:
    """Make the page.

    Args:
        queues: patterns of names; none: all queues.
        limits: first moment, and the moment after the last, in ms; None: from the first event, or to the last one.

    Raises:
        PipelineError: there is nothing to report on.
    """
    from pipeline.lifecycle import VERSION, lifecycle, lifecycle_path
    from pipeline.queues import Queues, archived_queues
    from pipeline.report.counting import extent
    from pipeline.report.measures import measure
    from pipeline.report.page import page
    from pipeline.session import FEW_BYTES, interpreted
    from pipeline.tables import is_table, read_table, size_bytes

    path = lifecycle_path(job)
    if update and lifecycle(spark, job) is None and not is_table(spark, path):
        raise PipelineError(f"{job.path('archive')} has no messages; `python -m pipeline archive --once` adds new ones")
    every = read_table(spark, path, "python -m pipeline lifecycle", version=VERSION)
    wanted = matching(queues)
    few = size_bytes(every) <= FEW_BYTES
    with interpreted(spark, few):
        first_ms, last_ms = extent(every, wanted)
    if first_ms is None or last_ms is None:
        what = f"no message of {' or '.join(queues)}" if queues and last_ms is not None else "no message"
        raise PipelineError(f"there is {what} in {path}; `python -m pipeline archive --once` adds new ones")
    # the last event of all queues: in a queue where nothing happens messages grow older all the same
    start_ms = first_ms if limits[0] is None else limits[0]
    stop_ms = last_ms + 1 if limits[1] is None else limits[1]
    if start_ms >= stop_ms or start_ms > last_ms or stop_ms <= first_ms:
        raise PipelineError(
            f"nothing happened between --from and --to: the first message is from {_iso(first_ms)}, the last "
            f"known event from {_iso(last_ms)}"
        )
    span = Span.of(start_ms, min(stop_ms, last_ms + 1))
    about = {
        "name": job.settings.name,
        "data": job.data,
        "queues": queues,
        "made_ms": int(time.time() * 1000),
        "until_ms": last_ms,
    }
    with interpreted(spark, few):
        named = Queues(archived_queues(spark, job) or ()).dead_letter_queues()
        return page(measure(every.where(wanted), span, top, dead_letter_queues=named, few=few), about=about)


def matching(patterns: tuple[str, ...]) -> Column:
    """Whether a queue's name matches one of the patterns; true if there are none."""
    from pyspark.sql import functions as F

    if not patterns:
        return F.lit(True)
    return F.coalesce(F.col("queue").rlike("|".join(f"\\A{_expression(p)}\\z" for p in patterns)), F.lit(False))


def _expression(pattern: str) -> str:
    """A pattern with `*` and `?` as a regular expression of Java; any other character stands for itself."""
    special = {"*": "[\\s\\S]*", "?": "[\\s\\S]"}
    return "".join(special.get(c) or f"\\x{{{ord(c):x}}}" for c in pattern)


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _check_place(out: Path) -> None:
    """Check that the page can be written, before minutes are spent on it."""
    folder = out.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise PipelineError(f"{folder} is not a folder that we can write to; correct --out")


def _write(out: Path, html: str) -> None:
    """Write the page whole, or leave what was there before."""
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.write_text(html, encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise PipelineError(f"{out} can't be written: {error.strerror}; correct --out") from None
    finally:
        part.unlink(missing_ok=True)
