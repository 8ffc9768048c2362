"""The guarantees hold under random faults: fixed seeds, and new ones each time; each is a run of a whole system."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from tests.conftest import SAID
from tests.simulation.simulator import LONG_STEPS, STEPS, Simulator, Violation, fresh_seed, run

FRESH_S = 20
"""So long, of each length, seeds are run that no run had before: how many depends on the machine, one at least."""

SEEDS = 600
BATCH = 50


@pytest.mark.parametrize("start", range(0, SEEDS, BATCH))
def test_guarantees_hold(start: int) -> None:
    for seed in range(start, start + BATCH):
        run(seed, STEPS)


@pytest.mark.parametrize("steps", [STEPS, LONG_STEPS])
def test_guarantees_hold_for_seeds_that_no_run_had_before(
    steps: int, record_property: Callable[[str, object], None]
) -> None:
    first, until = fresh_seed(), time.monotonic() + FRESH_S
    seed = first
    try:
        for seed in itertools.count(first):
            run(seed, steps)
            if time.monotonic() > until:
                break
    finally:
        record_property(SAID, f"seeds that no run had before: {first} to {seed}, {steps} steps each")


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Simulator, steps: int) -> None:
        self.violated("rule", "it does not hold")

    monkeypatch.setattr(Simulator, "run", fails)
    with pytest.raises(Violation) as caught:
        run(17, 300)
    assert caught.value.__notes__ == ["replay: python -m tests.simulation --steps 300 --replay 17"]


def test_a_seed_replays_exactly() -> None:
    traces: list[list[str]] = []
    for _ in range(2):
        trace: list[str] = []
        run(11, STEPS, trace)
        traces.append(trace)
    assert traces[0] == traces[1]


def test_what_can_happen_does() -> None:
    """Seeds that never crash, lose or expire anything would prove nothing."""
    seen: set[str] = set()
    for seed in range(120):
        simulator = Simulator(seed)
        simulator.run(STEPS)
        seen.update(simulator.statistics)
    assert seen >= {
        "acked",
        "checkpoints",
        "dead",
        "expired",
        "handed out again",
        "left",
        "messages shed",
        "owners lost",
        "poison",
        "purged",
        "recoveries",
        "seeks",
        "steps timed out",
    }
