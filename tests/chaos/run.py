"""A run: chapters with some faults each, and the total-queue check at the end of each chapter."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.chaos import check, report
from tests.chaos.check import Violation, Window
from tests.chaos.faults import FAULTS, Fault, mixed
from tests.chaos.network import Network, NoProxy
from tests.chaos.parts import LEASE_S, Chapter, Exit, Lab
from tests.chaos.report import BETWEEN, MIXED_ROW, Row
from tests.faults.clock import LIBRARY
from tests.integration.duplicates import explain

#: Seconds without a fault after each recovery: what was in flight has come again by then.
CALM_S = LEASE_S + 4.0
#: Seconds of traffic before the first fault of a chapter.
WARM_S = 5.0
#: Seconds for all messages to be done at the end of a chapter.
SETTLE_S = 120.0
#: Chapters in a row that may fail as a whole.
TRIES = 3
#: Faults that can happen beside others: they need no preparation, and hit one part.
MIXED = (
    *("worker-kill", "worker-restart", "worker-pause", "worker-stall"),
    *("broker-kill", "broker-restart", "broker-pause", "broker-stall", "controller-kill", "controller-stall"),
    *("leaders-moved", "net-worker-cut", "net-worker-refused", "net-half-open", "net-lossy", "net-slow-50ms"),
    *("net-peers-cut", "net-clients-cut"),
)


@dataclass
class Options:
    """What is asked for."""

    seed: int
    minutes: float = 0.0  # of faults, each of which happens once at least; 0: not more than that
    faults: Sequence[str] = ()  # all that this machine can make
    mixed: int = 0  # rounds of several faults, after all faults alone
    rate: float = 300.0  # messages a second
    per_chapter: int = 8
    calm_s: float = CALM_S
    keep: bool = False
    after_chapter: Callable[[Result], None] = lambda _: None


@dataclass
class Result:
    """What came out."""

    rows: dict[str, Row] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # faults, and why
    artifacts: Path | None = None
    seconds: float = 0.0

    def row(self, name: str) -> Row:
        kind = FAULTS[name].kind if name in FAULTS else ""
        return self.rows.setdefault(name, Row(name, kind))

    @property
    def total(self) -> Row:
        return report.total(self.rows.values())

    def table(self) -> str:
        return report.table(self.rows.values(), (*FAULTS, MIXED_ROW, BETWEEN))

    def as_json(self, **about: Any) -> dict[str, Any]:
        return report.as_json(self.rows.values(), left_out=self.left_out, seconds=self.seconds, **about)


def run(options: Options) -> Result:
    """Make the faults, and say what happened."""
    began = time.monotonic()
    result = Result()
    folder = Path(tempfile.mkdtemp(prefix="marq-chaos-"))
    print(f"chaos: --seed {options.seed}, artifacts in {folder}", flush=True)
    whole = False
    try:
        with contextlib.ExitStack() as stack:
            network = None
            try:
                wanted = _possible(options, result)
                if any("network" in FAULTS[name].needs for name in wanted):
                    network = stack.enter_context(Network(folder))
            except NoProxy as error:
                wanted = [name for name in wanted if "network" not in FAULTS[name].needs]
                result.left_out.update((n, str(error)) for n, f in FAULTS.items() if "network" in f.needs)
            for name, why in result.left_out.items():
                print(f"  left out: {name}, {why}", flush=True)
            lab = Lab(folder, network, options.seed)
            stack.enter_context(lab.brokers)
            _chapters(lab, options, plan(options, wanted), len(wanted) + options.mixed, result)
        whole = True
    finally:
        result.seconds = time.monotonic() - began
        if whole and not result.violations and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            result.artifacts = folder
    return result


def _possible(options: Options, result: Result) -> list[str]:
    """The faults that are wanted and that this machine can make."""
    lacks = {}
    if os.geteuid() != 0:
        lacks["root"] = "a small disk can only be made by root"
    if not LIBRARY:
        lacks["faketime"] = "libfaketime is not installed"
    found = []
    for name in options.faults or FAULTS:
        missing = [lacks[need] for need in FAULTS[name].needs if need in lacks]
        if missing:
            result.left_out[name] = missing[0]
        else:
            found.append(name)
    return found


def plan(options: Options, names: Sequence[str]) -> Iterator[list[Fault]]:
    """What happens, in order: all faults in random order, then some at the same time, then again."""
    rng = random.Random(options.seed)
    choices = [FAULTS[name] for name in names if name in MIXED]
    while True:
        yield from ([FAULTS[name]] for name in rng.sample(list(names), len(names)))
        for _ in range(options.mixed):
            parts = rng.sample(["worker", "broker", "network"], rng.choice([2, 2, 3]))
            found = [[one for one in choices if one.part == part] for part in parts]
            several = [rng.choice(of_part) for of_part in found if of_part]
            if len(several) > 1:
                yield several
        if not options.minutes:
            return


def _chapters(lab: Lab, options: Options, rounds: Iterator[list[Fault]], least: int, result: Result) -> None:
    """Chapter after chapter, until the time is over and each fault was made once (`least` of `rounds`).

    Trouble with one chapter is written down, and what it has not made is made in the next.
    """
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    todo: list[list[Fault]] = []
    made = failures = 0
    for number in itertools.count(1):
        todo += itertools.islice(rounds, options.per_chapter - len(todo))
        if not todo or failures == TRIES or (time.monotonic() > end and made >= least):
            return
        folder, before = lab.folder / f"chapter-{number}", len(todo)
        try:
            lab.mend()
            with Chapter(lab, folder) as chapter:
                _chapter(chapter, todo, options, end, least - made, result)
            failures = 0
        except Exception as error:
            traceback.print_exc()
            result.violations.append(Violation("chapter", repr(error), time.time()))
            failures += 1
        made += before - len(todo)
        options.after_chapter(result)
        if not result.violations and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _chapter(
    chapter: Chapter, todo: list[list[Fault]], options: Options, end: float, least: int, result: Result
) -> None:
    """Make faults, the first of `todo` first, until there are no more or one can't be mended. Then check."""
    chapter.traffic.start(options.rate)
    windows: list[Window] = []
    try:
        time.sleep(min(options.calm_s, WARM_S))
        while todo and (len(windows) < least or time.monotonic() < end):
            windows.append(fault_of(chapter, todo.pop(0), options, result))
    except Exception as error:
        # what happened so far still counts
        traceback.print_exc()
        result.violations.append(Violation("not recovered", repr(error), time.time()))
    finally:
        _conclude(chapter, windows, result)


def fault_of(chapter: Chapter, faults: list[Fault], options: Options, result: Result) -> Window:
    """Make a fault, or several at once, and wait until all is in order again. Returns when that was."""
    name = faults[0].name if len(faults) == 1 else MIXED_ROW
    steps = faults[0].steps(chapter) if len(faults) == 1 else mixed(chapter, faults)
    hit = next(steps)
    began_s = time.time()
    next(steps)
    mended_s = time.time()
    try:
        served_s = chapter.wait_recovered()
        time.sleep(options.calm_s)
    finally:
        window = Window(name, began_s, mended_s, time.time())
        row = result.row(name)
        row.times += 1
        row.hit.append(hit)
        for _ in steps:
            pass
    chapter.read_witness()
    late = len(chapter.history.missing())
    print(
        f"  {time.strftime('%H:%M:%S', time.gmtime(began_s))} {name}: {hit}; {mended_s - began_s:.1f} s, all served "
        f"{served_s:.1f} s later; {len(chapter.history.confirmed)} sent so far, {late} not done yet",
        flush=True,
    )
    return window


def _conclude(chapter: Chapter, windows: list[Window], result: Result) -> None:
    """Wait for the rest, then the check."""
    history = chapter.history
    chapter.traffic.stop_sending()
    chapter.wait_finished(SETTLE_S)
    time.sleep(1.0)
    chapter.traffic.stop()
    chapter.read_witness()
    if windows:
        windows[-1] = replace(windows[-1], ended_s=time.time())
    found = check.violations(history)
    found += [Violation("client", repr(error), time.time()) for error in chapter.traffic.errors]
    left = chapter._left()
    if left:
        found.append(Violation("left", left, time.time()))

    def name_at(at_s: float) -> str:
        return next((window.fault for window in windows if window.has(at_s)), BETWEEN)

    twice = check.done_twice(history)
    markers = chapter.markers() if twice else {}
    for name in {name_at(seen[-1].at_s) for seen in twice.values()}:
        row = result.row(name)
        done = [one for seen in twice.values() if name_at(seen[-1].at_s) == name for one in check.as_done(seen)]
        explained = explain(done, markers, killed=chapter.killed, refused=history.refused)
        row.causes.update(explained.causes)
        found += [
            Violation("twice", text, max((w.began_s for w in windows if w.fault == name), default=0.0))
            for text in explained.unexplained
        ]
    for seen in twice.values():
        result.row(name_at(seen[-1].at_s)).twice += len(seen) - 1
    for window in windows:
        result.row(window.fault).add(check.figures(history, window))
    for one in chapter.exits:
        result.row(name_at(one.at_s)).exits += 1
        print(f"  {one}", flush=True)
    for violation in found:
        result.row(name_at(violation.at_s)).violations[violation.rule] += 1
    for violation in found[:20]:
        print(f"  VIOLATION {violation}", flush=True)
    result.violations += found
    result.exits += chapter.exits
    causes: Counter[str] = sum((row.causes for row in result.rows.values()), Counter())
    print(
        f"  chapter: {len(history.confirmed)} confirmed, {len(history.missing())} lost, "
        f"{sum(len(seen) - 1 for seen in twice.values())} done twice, {len(found)} violations; "
        f"so far because: {'; '.join(f'{n} {cause}' for cause, n in causes.items()) or 'none'}",
        flush=True,
    )
    (chapter.folder / "windows.json").write_text(json.dumps([vars(window) for window in windows]))
    (chapter.folder / "late.txt").write_text("\n".join(check.late(history, windows)))
