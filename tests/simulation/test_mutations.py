"""Each rule of the design is needed: without it, the simulator fails within a few seeds."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.simulator import Violation, run

SEEDS_MAX = 400
STEPS = 300


def seeds_until_failure(name: str, seeds_max: int = SEEDS_MAX) -> int | None:
    """The first seed that fails with the mutation ``name``; None if all pass."""
    mutation = MUTATIONS[name]
    with mutation.patch():
        for seed in range(seeds_max):
            try:
                run(seed, STEPS, worker_class=mutation.worker)
            except Violation:  # nothing else: an error in the mutation itself proves nothing
                return seed
    return None


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_fails_without_the_rule(name: str) -> None:
    seed = seeds_until_failure(name)
    assert seed is not None, f"{SEEDS_MAX} seeds don't need the rule: {MUTATIONS[name].rule}"
    # the same seed passes with all rules in force
    run(seed, STEPS)
