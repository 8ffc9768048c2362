"""What jobs print: names and texts of others never do anything to a terminal."""

from __future__ import annotations

import click

from marq.text import cleaned


def say(line: str, err: bool = False) -> None:
    """Print one line."""
    click.echo(cleaned(line), err=err)
