"""The time that a report covers, cut into buckets of one width."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from marq.errors import PipelineError

#: Most buckets of a chart: about as many points as it has room for.
BUCKETS_MAX = 240

_SECOND, _MINUTE, _HOUR, _DAY = 1_000, 60_000, 3_600_000, 86_400_000
#: Widths of a bucket in ms, as people count time.
WIDTHS_MS = (
    *(100, 200, 500),
    *(n * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * _MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * _HOUR for n in (1, 2, 3, 6, 12)),
    *(n * _DAY for n in (1, 2, 7, 14, 28)),
)

_AGO = re.compile(r"(\d+)([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True)
class Span:
    """From `start_ms` (inclusive) to `stop_ms` (exclusive), in buckets that begin at multiples of `width_ms`."""

    start_ms: int
    stop_ms: int
    width_ms: int

    @classmethod
    def of(cls, start_ms: int, stop_ms: int, most: int = BUCKETS_MAX) -> Span:
        """A span with the narrowest buckets that are not more than `most`."""
        stop_ms = max(stop_ms, start_ms + 1)
        width_ms = next((w for w in WIDTHS_MS if cls(start_ms, stop_ms, w).count <= most), 0)
        while not width_ms or cls(start_ms, stop_ms, width_ms).count > most:
            width_ms = 2 * (width_ms or WIDTHS_MS[-1])
        return cls(start_ms, stop_ms, width_ms)

    @property
    def origin_ms(self) -> int:
        """Beginning of the first bucket: at or before `start_ms`."""
        return self.start_ms // self.width_ms * self.width_ms

    @property
    def count(self) -> int:
        return -((self.origin_ms - self.stop_ms) // self.width_ms)

    def bucket(self, at_ms: int) -> int:
        """The bucket of a moment within the span."""
        return (at_ms - self.origin_ms) // self.width_ms

    def begin_ms(self, bucket: int) -> int:
        return self.origin_ms + bucket * self.width_ms

    def end_ms(self, bucket: int) -> int:
        """The moment at which levels (backlog, age) are taken."""
        return min(self.begin_ms(bucket + 1), self.stop_ms)


def moment_ms(text: str, now: datetime, option: str) -> int:
    """A moment from `--from` or `--to`: ISO 8601 (UTC unless it has a zone), or how long ago, like `90m`.

    Raises:
        PipelineError: the text is neither.
    """
    ago = _AGO.fullmatch(text.strip())
    try:
        if ago is not None:
            at = now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        else:
            at = datetime.fromisoformat(text.strip())
            at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return round(at.timestamp() * 1000)
    except (ValueError, OverflowError):
        raise PipelineError(
            f"{option} {text} is not a time; give one like 2026-01-31T08:00, or how long ago: 90m, 24h, 7d"
        ) from None
