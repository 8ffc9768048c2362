"""The time that the brokers stamp on records, as this worker knows it: the last stamp, and its own clock since then."""

from __future__ import annotations

from collections.abc import Callable

#: Milliseconds by which a timestamp may differ from the expected time. If it differs by more, it counts once a second
#: timestamp agrees.
PLAUSIBLE_MS = 5_000


class BrokerTime:
    """An estimate that advances while nothing is written, and that a single wrong timestamp does not move."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms  # monotonic
        self._offset_ms: int | None = None
        self._doubtful_ms: int | None = None

    def stamped(self, timestamp_ms: int) -> None:
        """A broker has just stamped a record of ours."""
        offset_ms = timestamp_ms - self._now_ms()
        known = [one for one in (self._offset_ms, self._doubtful_ms) if one is not None]
        if not known or any(abs(offset_ms - one) <= PLAUSIBLE_MS for one in known):
            self._offset_ms, self._doubtful_ms = offset_ms, None
        else:
            self._doubtful_ms = offset_ms

    @property
    def now_ms(self) -> int | None:
        """Milliseconds since 1970; None before the first stamp."""
        return None if self._offset_ms is None else self._now_ms() + self._offset_ms
