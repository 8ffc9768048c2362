"""The clock that leases are measured with."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""``CLOCK_MONOTONIC`` of Linux stands still while the system is suspended: leases run out meanwhile, unnoticed."""


def now_s() -> float:
    """Seconds on a clock that never goes back, and goes on while the system is suspended, where there is such."""
    return time.clock_gettime(_CLOCK)


def now_ms() -> int:
    """The same in milliseconds."""
    return time.clock_gettime_ns(_CLOCK) // 1_000_000
