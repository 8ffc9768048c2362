"""`python -m tests.chaos`: the table of all faults. Exit status 1 if a guarantee was broken."""

from __future__ import annotations

import json
import os
import platform
import random
from pathlib import Path

import click

from tests.chaos.faults import FAULTS
from tests.chaos.report import BETWEEN, MIXED_ROW, of_json, table
from tests.chaos.run import Options, Result, run


@click.command()
@click.option("--minutes", default=0.0, help="Go on for so long; without it, each fault happens once.")
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
    about = {"seed": seed, "rate": rate, "processors": os.cpu_count(), "python": platform.python_version()}

    def write(so_far: Result) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(so_far.as_json(**about), indent=1) + "\n")

    result = run(
        Options(seed=seed, minutes=minutes, faults=names, mixed=mixed, rate=rate, keep=keep, after_chapter=write)
    )
    write(result)
    print(result.table())
    causes = "; ".join(f"{count} {cause}" for cause, count in result.total.causes.items())
    print(f"{result.seconds / 60:.1f} minutes, seed {seed}; done twice because: {causes or 'none'}")
    if result.violations:
        print(f"{len(result.violations)} violations; artifacts in {result.artifacts}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
