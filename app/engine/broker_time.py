"""The time that brokers stamp on records, as this worker knows it: the last stamp, and its own clock since then."""

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


class BrokerClocks:
    """The time of all brokers that lead a partition which this worker reads or writes, and of the last one of them."""

    def __init__(self, now_ms: Callable[[], int], leader_of: Callable[[str, int], int | None]) -> None:
        self._now_ms = now_ms
        self._leader_of = leader_of  # topic, partition -> id of the broker; None: not known
        self._any = BrokerTime(now_ms)
        self._by_id: dict[int, BrokerTime] = {}

    def stamped(self, topic: str, partition: int, timestamp_ms: int) -> None:
        """The leader of a partition has just stamped a record."""
        self._any.stamped(timestamp_ms)
        broker = self._leader_of(topic, partition)
        if broker is not None and broker >= 0:
            self._by_id.setdefault(broker, BrokerTime(self._now_ms)).stamped(timestamp_ms)

    @property
    def now_ms(self) -> int | None:
        """The time of the last broker that stamped; None before the first stamp."""
        return self._any.now_ms

    def by_id(self) -> dict[int, int]:
        """The time of each broker, milliseconds since 1970."""
        return {broker: now for broker, one in sorted(self._by_id.items()) if (now := one.now_ms) is not None}
