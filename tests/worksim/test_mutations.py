"""Each rule of the plumbing is needed: without it, the simulation of workers fails."""

from __future__ import annotations

import pytest

from tests.worksim.mutations import MUTATIONS, seeds_until_failure
from tests.worksim.world import Shape, World

# the loop of a finished run is closed, so its connections can't be closed in order
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

#: Mutations that are noticed within a few seeds; the others take minutes.
SOON = (
    "counted twice",
    "groups anywhere",
    "nobody asks others",
    "nobody is woken",
    "rows in a rebalance",
    "not read on",
    "owner's markers are kept",
    "rows are lost",
    "not read again",
    "any key will do",
    "forgotten whatever it is",
    "answers with what is read",
    "asks only itself",
    "handed to who is gone",
    "no watch after an empty fetch",
    "releases said once",
)
SOON_SEEDS = 40
SEEDS_MAX = 2_000


@pytest.mark.parametrize("name", SOON)
def test_the_simulation_fails_soon_without_the_rule(name: str) -> None:
    seed = seeds_until_failure(name, SOON_SEEDS)
    assert seed is not None, f"{SOON_SEEDS} seeds don't need the rule: {MUTATIONS[name].rule}"
    World(seed, Shape.of(seed, MUTATIONS[name].theme)).run()  # with all rules in force


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in SOON])
def test_the_simulation_fails_without_the_rule(name: str) -> None:
    seed = seeds_until_failure(name, SEEDS_MAX)
    assert seed is not None, f"{SEEDS_MAX} seeds don't need the rule: {MUTATIONS[name].rule}"
    World(seed, Shape.of(seed, MUTATIONS[name].theme)).run()
