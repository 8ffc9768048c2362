"""``python -m tests.worksim``: run seeds that no run had before, print figures; replay one with its story."""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
import traceback
from collections import Counter
from typing import Any

from tests.simulation.simulator import fresh_seed
from tests.worksim.world import STORY_LINES, World


def _quiet(unraisable: Any) -> None:
    """The loop of a finished run is closed, so its connections can't be closed in order."""
    if "ignored GeneratorExit" not in str(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


def main() -> int:
    sys.unraisablehook = _quiet
    parser = argparse.ArgumentParser(prog="python -m tests.worksim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=0, help="how many (default: until stopped)")
    parser.add_argument("--start", type=int, help="first seed (default: one that no run had before, printed)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print what happens")
    parser.add_argument("--lines", type=int, default=STORY_LINES, help="of the story, at its end (0: all)")
    parser.add_argument(
        "--keep-going", action="store_true", help="count failures by rule instead of stopping at the first"
    )
    args, _ = parser.parse_known_args()  # `make simulate` gives the same to both simulators
    if args.replay is not None:
        return replay(args.replay, args.lines)
    first = fresh_seed() if args.start is None else args.start
    seeds = range(first, first + args.seeds) if args.seeds else itertools.count(first)
    print(f"from seed {first} on", flush=True)
    statistics: Counter[str] = Counter()
    failures: dict[str, list[int]] = {}
    began, cpu, done, said = time.monotonic(), time.process_time(), 0, time.monotonic()
    gc.freeze()
    try:
        for seed in seeds:
            world = World(seed)
            try:
                world.run()
            except Exception as exc:
                if not args.keep_going:
                    return replay(seed, args.lines)
                print(f"FAILED seed {seed}: {exc!r:.300}", flush=True)
                failures.setdefault(getattr(exc, "rule", repr(exc)[:80]), []).append(seed)
            statistics.update(world.statistics)
            del world
            done += 1
            if done % 5 == 0:
                gc.collect()
            if time.monotonic() - said > 20:
                said = time.monotonic()
                report(done, began, cpu, statistics, failures)
    except KeyboardInterrupt:
        print()
    report(done, began, cpu, statistics, failures)
    for name, value in sorted(statistics.items()):
        print(f"  {name:32}{value:12,}")
    for rule, found in sorted(failures.items()):
        print(f"FAILED {rule}: {len(found)} seeds: {found[:8]}")
    return 1 if failures else 0


def replay(seed: int, lines: int) -> int:
    """Run ``seed`` again, exactly, and print its story."""
    story: list[str] = []
    world = World(seed, story=story)
    failed = 0
    try:
        world.run()
    except Exception:
        failed = 1
        print("\n".join(story[-lines:]))
        traceback.print_exc()
        print(f"seed {seed} failed; {world.shape}", file=sys.stderr)
        print(f"replay: python -m tests.worksim --replay {seed}", file=sys.stderr)
    else:
        print("\n".join(story[-lines:]))
        print(f"seed {seed} passed, trace {world.trace}", file=sys.stderr)
    return failed


def report(done: int, began: float, cpu: float, statistics: Counter[str], failures: dict[str, list[int]]) -> None:
    """One line of progress."""
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    failed = sum(map(len, failures.values()))
    print(
        f"{done:,} seeds in {seconds:,.0f} s; {statistics['virtual seconds'] / 3600:.1f} virtual hours, "
        f"{statistics['virtual seconds'] / 60 / max(used, 0.001):.1f} a CPU minute; "
        f"{statistics['messages']:,} messages, {statistics['handed out']:,} handed out, "
        f"{statistics['handed out again']:,} again; {failed} seeds failed",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
