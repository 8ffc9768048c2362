"""`python -m pipeline submit-options`: the options of `spark-submit` for our jobs."""

from __future__ import annotations

import shlex

import click


@click.command()
def command() -> None:
    """Print the options that spark-submit needs: spark-submit $(python -m pipeline submit-options) …"""
    from pipeline.session import submit_options

    click.echo(shlex.join(submit_options()))
