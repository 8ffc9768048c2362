"""Each rule of the design is needed: without it, the simulator fails within a few seeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from marq.core import invariants
from marq.core.checkpoints import Checkpoints
from tests.simulation.mutations import INVARIANTS, MUTATIONS
from tests.simulation.simulator import Violation, run

SEEDS_MAX = 400
STEPS = 300
#: Where the search begins for what few seeds meet: a little before the first one that does.
FIRST = {
    "own after the tables": 1_385,
    "a group waits for all that is in flight": 605,
    "any tick tells that time": 480,
}


def seeds_until_failure(name: str, seeds_max: int = SEEDS_MAX) -> int | None:
    """The first seed that fails with the mutation ``name``; None if all pass."""
    mutation = (MUTATIONS | INVARIANTS)[name]
    with mutation.patch():
        first = FIRST.get(name, 0)
        for seed in range(first, first + seeds_max):
            try:
                run(seed, STEPS, worker_class=mutation.worker)
            except Violation:  # nothing else: an error in the mutation itself proves nothing
                return seed
    return None


@contextmanager
def no_invariants() -> Iterator[None]:
    """Disable the invariants."""
    with (
        mock.patch.object(invariants, "checking", lambda *args: iter(())),
        mock.patch.object(Checkpoints, "_check_rows", lambda *args: None),
    ):
        yield


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_fails_without_the_rule(name: str) -> None:
    with no_invariants():  # by what receivers and recoveries meet
        seed = seeds_until_failure(name)
    assert seed is not None, f"{SEEDS_MAX} seeds don't need the rule: {MUTATIONS[name].rule}"
    # the same seed passes with all rules in force
    run(seed, STEPS)


@pytest.mark.parametrize("name", INVARIANTS)
def test_an_invariant_notices_what_fails_no_guarantee(name: str) -> None:
    with no_invariants():
        assert seeds_until_failure(name, 60) is None, "a guarantee fails: this belongs to the mutations above"
    assert seeds_until_failure(name) is not None, f"{SEEDS_MAX} seeds don't need it: {INVARIANTS[name].rule}"
