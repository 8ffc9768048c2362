"""The guarantees hold, whatever happens: a fixed set of seeds, each a run of a whole system."""

from __future__ import annotations

import pytest

from tests.simulation.simulator import Simulator, run

STEPS = 300
SEEDS = 600
BATCH = 50


@pytest.mark.parametrize("start", range(0, SEEDS, BATCH))
def test_guarantees_hold(start: int) -> None:
    for seed in range(start, start + BATCH):
        run(seed, STEPS)


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
