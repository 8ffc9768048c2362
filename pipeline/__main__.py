"""`python -m pipeline JOB`, or `spark-submit … pipeline/__main__.py JOB`.

Exit status: 0 done, 2 an error that a user can mend (one line on stderr), 1 what a job itself calls a failure.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

if not __package__:
    # As a script (spark-submit), its own folder is on the path, where modules hide those of other packages.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click

from pipeline.console import say

#: Job -> its module, which has a click command called `command`; imported when it is asked for.
JOBS = {
    "archive": ("pipeline.archive", "Stream both topics into tables."),
    "audit": ("pipeline.audit", "Prove that nothing was lost; status 1 if something was."),
    "lifecycle": ("pipeline.lifecycle", "One row a message: its deliveries, times and outcome."),
    "load": ("pipeline.load", "Send the rows of a Parquet, CSV or JSON file."),
    "metrics": ("pipeline.metrics", "Counts and times of each queue, by the minute, to a topic and a table."),
    "redrive": ("pipeline.redrive", "Send dead letters again."),
    "replay": ("pipeline.replay", "Send archived messages again."),
    "report": ("pipeline.report", "One HTML page that shows how the queues did."),
    "submit-options": ("pipeline.submit", "Print the options that spark-submit needs for these jobs."),
}


class _Jobs(click.Group):
    """A group whose commands are imported when they are used, so that help is there at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(JOBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in JOBS:
            return None
        command: click.Command = importlib.import_module(JOBS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Jobs"):
            formatter.write_dl([(name, text) for name, (_, text) in JOBS.items()])


@click.command(cls=_Jobs)
def pipeline() -> None:
    """Spark jobs over the logs of marq."""


@contextlib.contextmanager
def _errors_as_lines() -> Iterator[None]:
    from marq.errors import MarqError

    try:
        yield
    except MarqError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "app", "marq", "pipeline"):
            raise
        _fail(f"this job needs the package {package}, which `make run` does not install; `make setup` does")
    except Exception as error:
        if not _is_sparks(error):
            raise
        from pipeline.session import explain

        _fail(f"Spark failed: {explain(error)}; --verbose shows its log")


def _fail(text: str) -> NoReturn:
    say(f"marq: {text}", err=True)
    raise SystemExit(2) from None


def _is_sparks(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] in ("py4j", "pyspark", "delta")


def main() -> None:
    from app.folders import UMASK

    os.umask(UMASK)
    # Spark's bridge to Java logs, with traces and partly as root, what it raises as well
    logging.basicConfig(level=logging.CRITICAL + 1)
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    with _errors_as_lines():
        pipeline.main(prog_name="python -m pipeline")


if __name__ == "__main__":
    main()
