"""The commands: `python -m app …`. `faust -A app …` has them beside Faust's own (`agents`, `tables`, …).

Errors that a user can mend are one line and exit status 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from faust.cli import faust as _faust_commands  # noqa: F401 - registers Faust's commands
from faust.cli.base import cli

from app.folders import UMASK
from app.kafka.broker import EmbeddedBroker
from app.kafka.broker_file import bootstrap_of
from app.kafka.datadir import MAX_WORKERS, free_web_port, running_workers
from app.processes import CanNotStart, embedded_broker, errors_as_lines, stop_signals
from app.settings import Settings, load
from app.streaming import worker_command as _worker_command  # noqa: F401 - registers it instead of Faust's
from app.streaming.faults import LoopPolicy
from app.supervisor import Supervisor, end_for_dead, workers_for
from marq import __version__
from marq.cli.group import SETTINGS, SuggestingGroup
from marq.errors import MarqError
from marq.text import cleaned, plural


class OwnGroup(SuggestingGroup):
    """The commands of `python -m app`: ours, in the order in which a user needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands:
            from marq.cli.commands import cli as operators

            for where, group in ((f"marq {name}", operators), (f"faust -A app {name}", cli)):
                if name in group.commands:
                    raise click.UsageError(f"there is no command {name!r} here; it is `{where}`", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=OwnGroup,
    context_settings=SETTINGS,
    epilog="Queues and messages: `marq --help`. Jobs on the logs: `python -m pipeline --help`. Faust's own commands: "
    "`faust -A app --help`.",
)
@click.version_option(__version__, "--version", prog_name="marq", message="%(prog)s %(version)s")
def own() -> None:
    """Run marq, a message queue on Kafka: its worker, an embedded Kafka, a demo.

    All settings are environment variables: `python -m app.settings` lists them.
    """


def _command(function: Callable[..., Any]) -> click.Command:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with errors_as_lines():
            return function(*args, **kwargs)

    made: click.Command = cli.command(help=function.__doc__)(run)
    own.add_command(made)
    return made


def app_for_faust() -> Any:
    """The app for `faust -A app`."""
    os.umask(UMASK)
    asyncio.set_event_loop_policy(LoopPolicy())
    with errors_as_lines():
        from app.worker import build

        return build()


def main() -> None:
    """`python -m app`."""
    os.umask(UMASK)
    own.main(prog_name="python -m app")


@_command
@click.option(
    "-n",
    "--workers",
    type=click.IntRange(1, MAX_WORKERS),
    help="Worker processes, at one address. By default one less than there are processors, and at least one.",
)
def up(workers: int | None) -> None:
    """Run the embedded Kafka broker, unless MARQ_KAFKA is set, and workers.

    A worker that dies is started again.
    """
    settings = load()
    embedded: EmbeddedBroker | None = None
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(stop_signals())
        if running := running_workers(settings.data_dir):
            click.echo(
                f"The installation in {settings.data_dir.resolve()} already has {plural(len(running), 'worker')}: "
                "adding to it. For a separate one, set MARQ_DATA_DIR to another folder."
            )
        free_web_port(settings)  # an error before Kafka is started for nothing
        if settings.kafka is None and bootstrap_of(settings.data_dir) is None:
            click.echo("Starting Kafka …")
            embedded = stack.enter_context(embedded_broker(settings))
        Supervisor(settings, workers or workers_for(settings.partitions), stopped, embedded).run()


@own.command(context_settings={**SETTINGS, "ignore_unknown_options": True, "allow_extra_args": True})
@click.option("-l", "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="MARQ_LOG_LEVEL.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="MARQ_LOG_FORMAT.")
@click.option(
    "--processes",
    type=click.IntRange(1, MAX_WORKERS),
    default=1,
    help="Several workers, at one address; one that dies is started again.",
)
@click.option("--supervisor", type=int, hidden=True, help="Where to tell that the worker can't start.")
@click.pass_context
def worker(
    context: click.Context, log_level: str | None, log_format: str | None, processes: int, supervisor: int | None
) -> None:
    """Run a worker, until stopped: on the Kafka of MARQ_KAFKA, or the embedded one of the data folder.

    Start it again for another one: workers share the partitions. SIGTERM hands them over.

    Exit status 0: it was stopped. 1: it failed; the last line says why. 2: it could not start, and says why.
    """
    for name, value in (("MARQ_LOG_LEVEL", log_level), ("MARQ_LOG_FORMAT", log_format)):
        if value is not None:
            os.environ[name] = value
    if processes > 1:
        if context.args:
            raise click.UsageError(f"--processes does not go with options of Faust's: {' '.join(context.args)}")
        with errors_as_lines(), stop_signals() as stopped:
            Supervisor(load(), processes, stopped).run()
        return
    if supervisor is not None:
        os.set_inheritable(supervisor, False)
    try:
        # Faust handles the other options, or refuses them
        cli.main(args=["-A", "app", "worker", *context.args], prog_name="python -m app")
    except CanNotStart:
        if supervisor is not None:
            os.write(supervisor, b"\n")
        raise


@_command
def broker() -> None:
    """Run the embedded Kafka broker alone, until stopped."""
    with embedded_broker(load()) as embedded, stop_signals() as stopped:
        click.echo(f"Kafka on {embedded.bootstrap}, data in {load().data_dir.resolve()}")
        while not stopped():
            if not embedded.is_running:
                end_for_dead(embedded)
            time.sleep(0.1)


@_command
@click.argument("queue")
@click.argument("assignments", nargs=-1, metavar="[NAME=VALUE]...")
def queue(queue: str, assignments: tuple[str, ...]) -> None:
    """Show the settings of QUEUE, or change them: `queue orders max_receives=5 ttl_ms=86400000`."""
    from app.engine.queue_command import change_settings

    values: dict[str, Any] = {}
    for assignment in assignments:
        name, sign, value = assignment.partition("=")
        if not sign:
            raise MarqError(f"{assignment!r} is not of the form NAME=VALUE")
        values[name] = _value_of(value)
    click.echo(json.dumps(asyncio.run(change_settings(load(), queue, values))))


def _value_of(text: str) -> Any:
    """Read a value: JSON (a number, true, false, null, a list), anything else is text."""
    if text.lstrip("-").isdigit() or text in ("true", "false", "null") or text.startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


@_command
@click.option("--partition", "number", required=True, type=int, metavar="N", help="The partition that is unserved.")
@click.option("--accept-loss", is_flag=True, help="Go on without the records that are gone.")
@click.option("--accept-copy", is_flag=True, help="These topics are copies with the same offsets.")
def repair(number: int, accept_loss: bool, accept_copy: bool) -> None:
    """Say which records of a partition were deleted unread, and go on without them, or in copied topics.

    Works only while no worker serves the partition. Exit status 0: it goes on, or nothing is missing. 1: something is
    missing, and was named. 2: it could not be done.
    """
    from app.engine.repair import is_loss, lines_of
    from app.engine.repair import repair as mend

    found = asyncio.run(mend(load(), number, accept_loss=accept_loss, accept_copy=accept_copy))
    for line in lines_of(found):
        click.echo(cleaned(line))
    raise SystemExit(1 if any(map(is_loss, found.losses)) and not found.done else 0)


@_command
@click.option("--json", "as_json", is_flag=True, help="Print JSON, an object a line.")
@click.option("--quiet", is_flag=True, help="Only what is wrong.")
def doctor(as_json: bool, quiet: bool) -> None:
    """Look for what is wrong here, in Kafka and in the workers, and say what to do.

    Exit status 0: nothing. 1: something. Changes nothing. From other machines, `marq doctor` looks at the workers.
    """
    from app.doctor import findings
    from gateway.auth import Keys
    from gateway.listening import require_loopback, tls_context
    from marq.cli.doctor import show

    def check_keys(settings: Settings) -> None:
        if not Keys(settings.keys.get_secret_value() if settings.keys is not None else None):
            require_loopback(settings.web_host)

    def check_certificate(settings: Settings) -> None:
        if settings.web_tls_certificate_file is not None:
            tls_context(settings)

    raise SystemExit(
        show(findings({"keys": check_keys, "certificate": check_certificate}), as_json=as_json, quiet=quiet)
    )


@cli.command("demo", add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.pass_context
def demo(context: click.Context) -> None:
    """Send real messages, process them, drop some, and see every one acknowledged."""
    from app.demo.commands import demo as command  # imported only here: its packages are an extra

    command.main(args=context.args, prog_name="python -m app demo")


own.add_command(demo)
