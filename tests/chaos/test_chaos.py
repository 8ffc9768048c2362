"""A minute of chaos: what a process can suffer, in random order. `python -m tests.chaos` has all faults and figures."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos import run as chaos
from tests.chaos.run import Options
from tests.conftest import SAID

#: A graceful restart has a test of its own.
FAULTS = ("worker-kill", "worker-stall", "controller-kill")


@pytest.mark.timeout(900)
def test_faults_of_processes_lose_nothing(record_property: Callable[[str, Any], None]) -> None:
    """MARQ_TEST_SEED repeats the order and the targets."""
    seed = int(os.environ.get("MARQ_TEST_SEED") or random.randrange(1 << 30))
    record_property(SAID, f"chaos: MARQ_TEST_SEED={seed}")
    result = chaos.run(Options(seed=seed, faults=FAULTS, rate=200, calm_s=1.0))
    record_property(SAID, f"chaos: {result.seconds:.0f} s\n{result.table()}")
    assert not result.violations, (result.violations[:5], result.artifacts)
    assert result.total.times == len(FAULTS)
    assert result.total.sent > 1_000
