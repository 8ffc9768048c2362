"""How things are printed: tables on a terminal, tabs in a pipe, JSON for scripts.

All that others chose (names of queues, payloads, errors) is written without what would do something to a terminal.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marq.errors import BadValueError
from marq.text import cleaned

#: Characters of a payload that a list shows.
SHOWN_CHARACTERS = 200
#: Characters between two columns of a table, and those that a column of text has at least, if it needs them.
COLUMN_GAP, FOLDED_MIN = 3, 12


def fit_for_output(*streams: IO[str]) -> None:
    """Let every text be written, also where the terminal's encoding lacks a character."""
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def say(*lines: str) -> None:
    """What is for the user, beside the output."""
    for line in lines:
        click.echo("marq: " + cleaned(line), err=True)


def out(line: str) -> None:
    """A line of output."""
    sys.stdout.write(cleaned(line) + "\n")


def out_json(value: Any) -> None:
    """An object of output, on a line of its own."""
    # what stands in JSON is ASCII but for this one, which is no printable character
    sys.stdout.write(json.dumps(value, default=_as_json).replace("\x7f", "\\u007f") + "\n")


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} in an answer")


class Column:
    """A column of a table."""

    def __init__(self, title: str, *, right: bool = False) -> None:
        self.title = title
        self.right = right


def column(title: str) -> Column:
    """Of numbers if the title ends in ">"."""
    return Column(title.rstrip(">"), right=title.endswith(">"))


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]], width: int) -> Table:
    """A table for a terminal of this width. The last columns are left out where there is no room for them."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    cells = [[cell if isinstance(cell, Text) else Text(cleaned(str(cell))) for cell in row] for row in rows]
    shown, left = 0, width - 2
    for number, one in enumerate(map(column, titles)):
        widest = max([cell_len(one.title), *(row[number].cell_len for row in cells)])
        # text may be folded, a number may not
        left -= COLUMN_GAP + (widest if one.right else min(widest, FOLDED_MIN))
        if number and left < 0:
            break
        made.add_column(one.title, justify="right" if one.right else "left", overflow="fold", no_wrap=one.right)
        shown += 1
    for row in cells:
        made.add_row(*row[:shown])
    return made


def print_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on a terminal; else lines of cells with tabs between."""
    if sys.stdout.isatty():
        console = Console(file=sys.stdout, highlight=False)
        console.print(table(titles, rows, console.width))
        return
    out_cells([column(one).title for one in titles])
    for row in rows:
        out_cells([cell.plain if isinstance(cell, Text) else str(cell) for cell in row])


def out_cells(cells: Iterable[str]) -> None:
    """A line of cells, with tabs between."""
    sys.stdout.write("\t".join(map(cleaned, cells)) + "\n")


def print_pairs(pairs: Iterable[tuple[str, Any]]) -> None:
    """Names and values, a line each."""
    shown = [(name, str(value)) for name, value in pairs]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        out(f"{name:<{width}}  {value}")


def text_of(payload: bytes) -> str:
    """A payload as text; other bytes as `\\xff`."""
    return payload.decode(errors="backslashreplace")


def shortened(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """The beginning of a text, in one line."""
    line = cleaned(text[: characters + 1])
    return line if len(line) <= characters else line[: characters - 1] + "…"


def confirm(question: str, yes: bool) -> None:
    """Ask before something is destroyed. Raises `click.Abort`, or `BadValueError` where nobody can be asked."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise BadValueError(f"{question} Say --yes if so; there is nobody to ask")
    click.confirm(cleaned(question), abort=True, err=True)
