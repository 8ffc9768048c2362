"""`python -m tests.chaos`: the table of all faults. Exit status 1 if a guarantee was broken."""

from __future__ import annotations

import json
import os
import platform
import random
from pathlib import Path

import click

from app.kafka import broker
from tests.chaos import peers
from tests.chaos.faults import FAULTS
from tests.chaos.peers import PEERS
from tests.chaos.report import BETWEEN, MIXED_ROW, of_json, table
from tests.chaos.run import Options, Result, run

#: Seconds for a broker to start: three and all else share a machine.
START_TIMEOUT_S = 180.0


@click.command()
@click.option("--minutes", default=0.0, help="Go on for so long. Each fault happens once at least, also without it.")
@click.option("--seed", type=int, help="Order and targets of the faults; without it, a new one, which is printed.")
@click.option("--faults", default="", help="Only these, comma-separated.")
@click.option("--mixed", default=3, show_default=True, help="Rounds of several faults at once, after each fault alone.")
@click.option("--rate", default=300.0, show_default=True, help="Messages a second, in all protocols together.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="Write the figures to this file, too.",
)
@click.option("--add", multiple=True, type=click.Path(path_type=Path, exists=True), help="Only add up these files.")
@click.option("--peer", type=click.Choice(PEERS), help="Another system under the faults that it can take.")
@click.option("--keep", is_flag=True, help="Keep logs and data, also if nothing is wrong.")
@click.option("--list", "lists", is_flag=True, help="Only print the faults.")
def main(
    minutes: float,
    seed: int | None,
    faults: str,
    mixed: int,
    rate: float,
    json_file: Path | None,
    add: tuple[Path, ...],
    peer: str | None,
    keep: bool,
    lists: bool,
) -> None:
    """Three brokers, three workers, clients of every protocol: faults alone and mixed, and what they cost."""
    if lists:
        for one in FAULTS.values():
            print(f"{one.name:20} {one.kind:9} {one.what}")
        return
    if add:
        print(table(of_json(json.loads(file.read_text()) for file in add), (*FAULTS, MIXED_ROW, BETWEEN)))
        return
    names = [name.strip() for name in faults.split(",") if name.strip()]
    unknown = set(names) - FAULTS.keys()
    if unknown:
        raise click.UsageError(f"no such faults: {', '.join(sorted(unknown))}; --list names them")
    seed = random.randrange(1 << 30) if seed is None else seed
    about = {
        "seed": seed,
        "rate": rate,
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "peer": peer,
    }

    broker.START_TIMEOUT_S = START_TIMEOUT_S

    def write(so_far: Result) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(so_far.as_json(**about), indent=1) + "\n")

    options = Options(seed=seed, minutes=minutes, faults=names, mixed=mixed, rate=rate, keep=keep, after_chapter=write)
    result = peers.run(peer, options) if peer is not None else run(options)
    write(result)
    print(result.table())
    causes = "; ".join(f"{count} {cause}" for cause, count in result.total.causes.items())
    print(f"{result.seconds / 60:.1f} minutes, seed {seed}; done twice because: {causes or 'none'}")
    if result.violations:
        print(f"{len(result.violations)} violations; artifacts in {result.artifacts}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
