"""The command group: common options, errors as lines, suggestions for a mistyped name, exit status.

0: done. 1: not all of it was done, or there was nothing to do it to. 2: it could not be done. 130: Ctrl-C. 141: nobody
reads the output any more.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from marq import __version__
from marq.cli.console import fit_for_output, say
from marq.cli.service import Address, Connected
from marq.core.policies import name_problem
from marq.errors import MarqError, UnknownQueueError

#: Names of queues that a shell is offered.
COMPLETED = 100
#: Names that every shell takes literally.
TYPED_AS_IT_IS = re.compile(r"\w[\w.:@%+=,/-]*")
DEFAULT_URL = "http://localhost:9324"
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_PIPE = 128 + signal.SIGPIPE

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


#: Commands by names that others give them.
SYNONYMS = {
    "consume": "receive",
    "dlq": "redrive",
    "get": "receive",
    "help": "--help",
    "list": "queues",
    "ls": "queues",
    "nack": "release",
    "publish": "send",
    "rm": "delete",
    "status": "stats",
    "version": "--version",
}


class SuggestingGroup(click.Group):
    """A group that names the command that was probably meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            known = [name for name in self.list_commands(ctx) if not self._is_hidden(ctx, name)]
            close = (
                [SYNONYMS[args[0]]] if args[0] in SYNONYMS else difflib.get_close_matches(args[0].lower(), known, n=1)
            )
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}", ctx) from None

    def _is_hidden(self, ctx: click.Context, name: str) -> bool:
        command = self.get_command(ctx, name)
        return command is None or command.hidden


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where the service is; the same before and after the name of a command."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON, an object a line."),
        click.option("--ca-file", type=click.Path(), metavar="FILE", help="Certificates to trust (PEM); MARQ_CA_FILE."),
        click.option("--key-file", type=click.Path(), metavar="FILE", help="File with the key; MARQ_KEY_FILE."),
        click.option("--url", metavar="URL[,URL]", help=f"Workers; MARQ_URL, or {DEFAULT_URL}."),
    ):
        function = option(function)
    return function


@click.group(cls=SuggestingGroup, context_settings=SETTINGS)
@_options
@click.version_option(__version__, "--version", prog_name="marq", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context, /, **options: Any) -> None:
    """Work with the queues of a marq service, from any machine that reaches one of its workers.

    \b
    marq send orders '{"book": 7}'      marq stats          marq doctor
    marq receive orders --ack           marq top            marq redrive orders
    """
    context.obj = options


def command(name: str) -> Callable[[Callable[..., int | None]], click.Command]:
    """Register a command; its function gets the service first, and returns the exit status (None: 0)."""

    def decorate(function: Callable[..., int | None]) -> click.Command:
        @click.pass_context
        @wraps(function)
        def run_it(context: click.Context, /, **given: Any) -> None:
            status = 0
            with errors_as_lines():
                with connected(context, given) as service:
                    status = function(service, **given) or 0
                flush()
            raise SystemExit(status)

        said = function.__doc__ or ""
        first = re.split(r"[.:](?:\s|$)", said)[0]
        return cli.command(name, help=said, short_help=first, context_settings=SETTINGS)(_options(run_it))

    return decorate


class QueueName(click.ParamType):
    """The name of a queue on the command line; a shell completes it."""

    name = "queue"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name."""
        problem = name_problem(value)
        if problem is not None:
            self.fail(problem, param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Queues whose names begin like this, if a worker answers.

        Names that a shell would not take literally are left out: anyone who may send can make a queue `a$(reboot)`.
        """
        with contextlib.suppress(MarqError), connected(ctx, dict(ctx.params)) as service:
            page = service.ask("/v1/queues", query={"prefix": incomplete, "limit": COMPLETED})
            return [CompletionItem(one["name"]) for one in page["queues"] if TYPED_AS_IT_IS.fullmatch(one["name"])]
        return []


QUEUE = QueueName()


@contextlib.contextmanager
def connected(context: click.Context, given: dict[str, Any]) -> Iterator[Connected]:
    """The service of a command; takes the common options out of those that were given."""
    above = context.parent.obj if context.parent is not None and context.parent.obj else {}
    common = {name: given.pop(name, None) or above.get(name) for name in ("url", "key_file", "ca_file", "as_json")}
    with Connected(address_of(common), as_json=bool(common["as_json"])) as service:
        yield service


def address_of(options: dict[str, Any]) -> Address:
    """Where the service is, by the options and else by the environment."""
    urls = options.get("url") or os.environ.get("MARQ_URL") or DEFAULT_URL
    key_file = options.get("key_file") or os.environ.get("MARQ_KEY_FILE")
    ca_file = options.get("ca_file") or os.environ.get("MARQ_CA_FILE")
    return Address(
        tuple(url.strip() for url in urls.split(",") if url.strip()),
        Path(key_file).expanduser() if key_file else None,
        Path(ca_file).expanduser() if ca_file else None,
    )


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """End the process with a line for an error that a user can mend."""
    try:
        yield
    except UnknownQueueError as error:
        say(f"{error}; `marq queues` lists those that there are")
        raise SystemExit(2) from None
    except MarqError as error:
        say(*error.lines)
        raise SystemExit(2) from None
    except BrokenPipeError:
        # Python would try again to write what is left, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_PIPE) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def flush() -> None:
    """Write what is left now, where an error still gets to the user."""
    sys.stdout.flush()


class _Lines(logging.Handler):
    """What the client logs: that it tries again, for example."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def run() -> None:
    """The command, with the arguments of this process."""
    fit_for_output(sys.stdout, sys.stderr)
    logging.getLogger("marq.client").addHandler(_Lines())
    try:
        cli.main(prog_name="marq", standalone_mode=False)
    except click.Abort:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        raise SystemExit(2) from None
    except click.ClickException as error:
        say(error.format_message())
        context = getattr(error, "ctx", None)
        if context is not None and isinstance(error, click.UsageError):
            click.echo(f"Try '{context.command_path} --help'.", err=True)
        raise SystemExit(2) from None


@cli.command("completion", context_settings=SETTINGS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete commands, options and names of queues.

    \b
    bash   marq completion bash > ~/.local/share/bash-completion/completions/marq
    zsh    marq completion zsh > "${fpath[1]}/_marq"
    fish   marq completion fish > ~/.config/fish/completions/marq.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "marq", "_MARQ_COMPLETE").source())
