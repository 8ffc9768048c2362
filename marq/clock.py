"""The clock that leases are measured with."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux's `CLOCK_MONOTONIC` stands still while the system is suspended, so leases would end unnoticed meanwhile."""


def now_s() -> float:
    """Seconds on a clock that never goes back and, where the system has one, goes on while it is suspended."""
    return time.clock_gettime(_CLOCK)


def now_ms() -> int:
    """Milliseconds on the same clock."""
    return time.clock_gettime_ns(_CLOCK) // 1_000_000
