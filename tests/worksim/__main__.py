"""``python -m tests.worksim``: run seeds that no run had before, print figures; replay one, and make it smaller."""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

from tests.simulation.simulator import fresh_seed
from tests.worksim.faults import THEMES
from tests.worksim.mutations import MUTATIONS
from tests.worksim.shrink import Shrinker, short_story
from tests.worksim.truth import Violation
from tests.worksim.world import STORY_LINES, Cut, Shape, World

#: Seeds that one child process runs. It collects no garbage, which takes a sixth of the time, and ends instead.
BATCH = 10
#: Batches that are given out at once.
WINDOW = 50


class Ran(NamedTuple):
    """What a child process says of its seeds."""

    statistics: Counter[str]
    failures: list[tuple[int, str, str]]  # seed, rule, error
    cpu_s: float


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
    parser.add_argument("--theme", choices=sorted(THEMES), help="of all runs (default: drawn)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run seeds side by side (default: 1)")
    parser.add_argument("--lines", type=int, default=STORY_LINES, help="of the story, at its end (0: all)")
    parser.add_argument("--whole", action="store_true", help="do not make a failing run smaller")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="break this rule")
    parser.add_argument(
        "--keep-going", action="store_true", help="count failures by rule instead of stopping at the first"
    )
    args, _ = parser.parse_known_args()  # `make simulate` gives the same to both simulators
    with MUTATIONS[args.mutation].patch() if args.mutation is not None else nullcontext():
        return run(args)


def run(args: argparse.Namespace) -> int:
    if args.replay is not None:
        return replay(args.replay, args.lines, args.whole, args.theme)
    first = fresh_seed() if args.start is None else args.start
    seeds = range(first, first + args.seeds) if args.seeds else itertools.count(first)
    print(f"from seed {first} on", flush=True)
    statistics: Counter[str] = Counter()
    failures: dict[str, list[int]] = {}
    began, said, cpu, done = time.monotonic(), time.monotonic(), 0.0, 0
    gc.freeze()
    with multiprocessing.get_context("fork").Pool(args.jobs, _begin, maxtasksperchild=1) as pool:
        try:
            for window in _slices(_slices(iter(seeds), BATCH), WINDOW):
                for ran in pool.imap_unordered(run_batch, [(batch, args.theme) for batch in window]):
                    statistics.update(ran.statistics)
                    cpu += ran.cpu_s
                    done += ran.statistics["seeds"]
                    for seed, rule, error in ran.failures:
                        if not args.keep_going:
                            pool.terminate()
                            return replay(seed, args.lines, args.whole, args.theme)
                        print(f"FAILED seed {seed}: {error}", flush=True)
                        failures.setdefault(rule, []).append(seed)
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


def _begin() -> None:
    """In a child process: Ctrl-C is for its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()


def run_batch(batch: tuple[list[int], str | None]) -> Ran:
    """Run some seeds, in a child process."""
    seeds, theme = batch
    statistics: Counter[str] = Counter(seeds=0)
    failures = []
    began = time.process_time()
    for seed in seeds:
        world = World(seed, Shape.of(seed, theme))
        try:
            world.run()
        except Exception as exc:
            failures.append((seed, getattr(exc, "rule", repr(exc)[:80]), f"{exc!r:.300}"))
        statistics.update(world.statistics)
        statistics["seeds"] += 1
    return Ran(statistics, failures, time.process_time() - began)


def _slices(of: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size`, the last one perhaps shorter."""
    while some := list(itertools.islice(of, size)):
        yield some


def replay(seed: int, lines: int, whole: bool, theme: str | None = None) -> int:
    """Run ``seed`` again, exactly. Print its story, or the short one of the smallest run that fails like it.

    A run whose theme was not drawn is not made smaller.
    """
    shape = Shape.of(seed, theme) if theme is not None else None
    cut: Cut | None = None
    if not whole and theme is None:
        found = Shrinker(seed, say=lambda line: print(line, file=sys.stderr, flush=True)).shrink()
        if found is not None:
            shape, cut = found.shape, found.cut
    story: list[str] = []
    world = World(seed, shape, story, cut)
    failed = 0
    try:
        world.run()
    except Exception as exc:
        failed = 1
        print("\n".join((story if whole else short_story(story, str(exc)))[-lines:]))
        if not isinstance(exc, Violation) or exc.__cause__ is not None:
            traceback.print_exception(exc.__cause__ or exc)
        print(f"{exc}", file=sys.stderr)
        print(f"seed {seed} failed; {world.shape}", file=sys.stderr)
        if cut is not None:
            print(f"this is the smallest run that was found: {shape!r}, {cut!r}", file=sys.stderr)
        of_theme = f" --theme {theme}" if theme is not None else ""
        print(f"replay: python -m tests.worksim --replay {seed}{of_theme}", file=sys.stderr)
    else:
        print("\n".join(story[-lines:]))
        print(f"seed {seed} passed, trace {world.trace}", file=sys.stderr)
    return failed


def report(done: int, began: float, used: float, statistics: Counter[str], failures: dict[str, list[int]]) -> None:
    """One line of progress."""
    seconds = time.monotonic() - began
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
