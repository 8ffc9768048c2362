"""``python -m tests.simulation``: run seeds that no run had before, print figures; replay one with its trace."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections import Counter

from tests.simulation.simulator import LONG_STEPS, STEPS, Simulator, fresh_seed

LONG_EVERY = 25
"""Each seed of so many is a long run, unless ``--steps`` says otherwise."""


def steps_of(seed: int) -> int:
    """How long the run of ``seed`` is where nothing else is said."""
    return STEPS if seed % LONG_EVERY else LONG_STEPS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=0, help="how many (default: until stopped)")
    parser.add_argument("--start", type=int, help="first seed (default: one that no run had before, printed)")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"events in a run, before everything is drained (default: {STEPS}; {LONG_STEPS} in each {LONG_EVERY}th)",
    )
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print what happens")
    parser.add_argument(
        "--keep-going", action="store_true", help="count failures by rule instead of stopping at the first"
    )
    args = parser.parse_args()
    if args.replay is not None:
        return replay(args.replay, args.steps or steps_of(args.replay))
    first = fresh_seed() if args.start is None else args.start
    seeds = range(first, first + args.seeds) if args.seeds else itertools.count(first)
    print(f"from seed {first} on, {args.steps or f'{STEPS} or {LONG_STEPS}'} steps each", flush=True)
    statistics: Counter[str] = Counter()
    failures: dict[str, list[int]] = {}
    started = time.monotonic()
    done = 0
    try:
        for seed in seeds:
            simulator = Simulator(seed)
            try:
                simulator.run(args.steps or steps_of(seed))
            except Exception as exc:
                if not args.keep_going:
                    replay(seed, args.steps or steps_of(seed))
                    return 1
                failures.setdefault(getattr(exc, "rule", repr(exc)[:60]), []).append(seed)
            statistics.update(simulator.statistics)
            done += 1
            if done % 1_000 == 0:
                report(done, started, statistics, failures)
    except KeyboardInterrupt:
        print()
    report(done, started, statistics, failures)
    for name, value in sorted(statistics.items()):
        print(f"  {name:24}{value:12,}")
    for rule, found in sorted(failures.items()):
        print(f"FAILED {rule}: {len(found)} seeds: {found[:8]}")
    return 1 if failures else 0


def replay(seed: int, steps: int) -> int:
    """Run ``seed`` again, exactly, and print its trace."""
    trace: list[str] = []
    simulator = Simulator(seed, trace)
    failed = 0
    try:
        simulator.run(steps)
    except Exception:
        failed = 1
        print("\n".join(trace))
        traceback.print_exc()
        print(f"seed {seed} failed at step {simulator.at_step}; odds {simulator.odds}", file=sys.stderr)
        print(f"replay: python -m tests.simulation --steps {steps} --replay {seed}", file=sys.stderr)
    else:
        print("\n".join(trace))
        print(f"seed {seed} passed", file=sys.stderr)
    return failed


def report(done: int, started: float, statistics: Counter[str], failures: dict[str, list[int]]) -> None:
    """One line of progress."""
    seconds = time.monotonic() - started
    failed = sum(map(len, failures.values()))
    verdict = f"{failed} seeds failed" if failed else "lost 0, unexpected 0"
    print(
        f"{done:,} seeds in {seconds:,.0f} s, {done / seconds * 60:,.0f} a minute; "
        f"{statistics['messages']:,} messages, {statistics['handed out']:,} handed out, {verdict}, "
        f"duplicates {statistics['handed out again']:,}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
