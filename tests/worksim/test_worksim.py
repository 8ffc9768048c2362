"""Whole workers keep the guarantees under every fault: fixed seeds, and new ones each time."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.conftest import SAID
from tests.simulation.simulator import fresh_seed
from tests.worksim.world import Shape, World

# the loop of a finished run is closed, so its connections can't be closed in order
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

#: Seconds for seeds that no run had before: how many they are depends on the machine, one at least.
FRESH_S = 10
FIXED = 8
#: Some of these fail where a worker that stops drops what others have handed out to it.
RESTARTED = (33, 36, 89)
TRACE = "from tests.worksim.world import World\nw = World(5)\nw.run()\nprint(w.trace, w.loop.steps)"


def run(seed: int, shape: Shape | None = None) -> World:
    world = World(seed, shape)
    try:
        world.run()
    except Exception as exc:
        exc.add_note(f"replay: python -m tests.worksim --replay {seed}")
        raise
    return world


def test_one_worker_delivers_all_that_it_accepts() -> None:
    world = run(1, Shape(workers=1, partitions=1, clients=2, seconds=10.0, faults=False))
    assert world.statistics["accepted"] > 0
    assert world.statistics["acceptances"] == 1


def test_the_guarantees_hold_for_fixed_seeds_and_what_can_happen_does() -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIXED):
        seen.update(run(seed).statistics)
    assert {"accepted", "acked", "handed out again", "poison", "fault: kill", "fault: stand long"} <= seen.keys()


def test_restarts_burn_no_attempt() -> None:
    seen: Counter[str] = Counter()
    for seed in RESTARTED:
        seen.update(run(seed, Shape.of(seed, "restarts")).statistics)
    assert seen["fault: end"] > 20 and seen["received"] and seen["handled"]


def test_the_guarantees_hold_for_seeds_that_no_run_had_before(record_property: Callable[[str, object], None]) -> None:
    first, until = fresh_seed(), time.monotonic() + FRESH_S
    seed = first
    try:
        for seed in itertools.count(first):
            run(seed)
            if time.monotonic() > until:
                break
    finally:
        record_property(SAID, f"seeds of workers that no run had before: {first} to {seed}")


def test_a_seed_is_the_same_run_in_any_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "3"}
    done = subprocess.run(
        [sys.executable, "-c", TRACE], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    world = run(5)
    assert done.stdout == f"{world.trace} {world.loop.steps}\n"


def test_a_failure_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: World) -> None:
        self.violated("rule", "it does not hold")

    monkeypatch.setattr(World, "run", fails)
    with pytest.raises(Exception, match="it does not hold") as caught:
        run(17)
    assert caught.value.__notes__ == ["replay: python -m tests.worksim --replay 17"]
