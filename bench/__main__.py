"""Command line of the benchmarks."""

from __future__ import annotations

import click

from bench import cycle as cycle_bench


@click.group()
def bench() -> None:
    """Measure marq. Lines that begin with RESULT are for programs."""


@bench.command()
@click.option("--batch", default=500, show_default=True, help="Messages a handler call takes; 1: single messages.")
@click.option("--messages", default=500_000, show_default=True)
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
@click.option("--queues", default=1, show_default=True, help="Logical queues, of Zipf-distributed size.")
@click.option("--phases", default="process,redeliver,latency", show_default=True)
@click.option("--runs", default=1, show_default=True, help="Repeat each phase and take the median.")
@click.option("--rate", default=2000, show_default=True, help="Messages per second of the latency phase.")
@click.option("--seconds", default=15.0, show_default=True, help="Length of the latency phase.")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(["share", "share-strict"]),
    help="Run a share group beside it: batch_optimized, or record_limit.",
)
def cycle(
    batch: int,
    messages: int,
    size: int,
    queues: int,
    phases: str,
    runs: int,
    rate: int,
    seconds: float,
    peers: tuple[str, ...],
) -> None:
    """The whole cycle in one worker process."""
    cycle_bench.run(
        batch=batch,
        messages=messages,
        size=size,
        queues=queues,
        phases=phases.split(","),
        runs=runs,
        rate=rate,
        seconds=seconds,
        peers=[{"share": "batch_optimized", "share-strict": "record_limit"}[peer] for peer in peers],
    )


if __name__ == "__main__":
    bench(prog_name="python -m bench")
