"""The clock that leases are measured with."""

from __future__ import annotations

import time

import pytest

from marq import clock


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
def test_it_is_the_one_that_goes_on_during_suspend() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    seconds, milliseconds = clock.now_s(), clock.now_ms()
    after = time.clock_gettime(time.CLOCK_BOOTTIME)

    assert before <= seconds <= after
    assert int(before * 1000) <= milliseconds <= after * 1000
