"""Limits on what one queue has in flight in one partition, and the circuit breaker. Kept by the owner, not in the log.

    closed ──(a run of failures)──► open ──(pause over)──► probing ──success──► closed
                                      ▲                        │
                                      └────────failure─────────┘

Both are decisions of the owner about what to start next; a new owner counts what is in flight from the state, and
begins with a closed breaker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from marq.core.policies import QueueSettings, share


class Breaker:
    """Opens after so many failures in a row; after a pause one message is tried."""

    __slots__ = ("failures", "open_until_ms", "probing")

    def __init__(self) -> None:
        self.failures = 0  # in a row
        self.open_until_ms: int | None = None  # None: closed
        self.probing = False  # one message is being tried

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``probing``."""
        return "closed" if self.open_until_ms is None else ("probing" if self.probing else "open")

    def room(self, now_ms: int) -> int | None:
        """How many messages may be started now; None: as many as there are."""
        if self.open_until_ms is None:
            return None
        return 0 if self.probing or now_ms < self.open_until_ms else 1

    def tried(self) -> None:
        """A message was started. If the breaker is open, it is the probe."""
        if self.open_until_ms is not None:
            self.probing = True

    def succeeded(self) -> None:
        """A message was acknowledged."""
        if self.open_until_ms is not None and not self.probing:
            return  # left over from before it opened
        self.failures = 0
        self.open_until_ms = None
        self.probing = False

    def failed(self, limit: int, pause_ms: int, now_ms: int) -> bool:
        """A message was given back, or its lease ended; True if that opened the breaker (never for ``limit`` 0)."""
        self.failures += 1
        if not limit or (self.failures < limit and not self.probing):
            return False
        if self.open_until_ms is not None and not self.probing:
            return False  # left over from before it opened
        self.open_until_ms = now_ms + pause_ms
        self.probing = False
        return True

    def spared(self) -> None:
        """The probe came back without having been tried."""
        self.probing = False


class Flow:
    """What one queue has in flight in one partition."""

    __slots__ = ("breaker", "by_receiver", "offsets", "woken")

    def __init__(self) -> None:
        self.offsets: dict[int, str] = {}  # started or about to be -> receiver
        self.by_receiver: Counter[str] = Counter()
        self.breaker = Breaker()
        self.woken = False  # receivers were told that the pause of the breaker is over

    def add(self, offsets: Iterable[int], receiver: str) -> None:
        """These are being started for ``receiver``."""
        for offset in offsets:
            self.remove(offset)
            self.offsets[offset] = receiver
            self.by_receiver[receiver] += 1
        self.breaker.tried()
        self.woken = False

    def remove(self, offset: int) -> bool:
        """This one is not in flight any more; False if it was not."""
        receiver = self.offsets.pop(offset, None)
        if receiver is None:
            return False
        self.by_receiver[receiver] -= 1
        if not self.by_receiver[receiver]:
            del self.by_receiver[receiver]
        return True

    def expired(self, in_flight: Callable[[int], bool]) -> list[int]:
        """Take out, and return, what is not in flight any more without anybody having said so."""
        gone = [offset for offset in self.offsets if not in_flight(offset)]
        for offset in gone:
            self.remove(offset)
        return gone

    def room(self, settings: QueueSettings, receiver: str, wanted: int, number: int, partitions: int) -> int:
        """How many of the ``wanted`` messages the limits of the queue leave to ``receiver``."""
        room = wanted
        if settings.max_in_flight:
            room = min(room, share(settings.max_in_flight, number, partitions) - len(self.offsets))
        if settings.max_in_flight_per_receiver:
            limit = share(settings.max_in_flight_per_receiver, number, partitions)
            room = min(room, limit - self.by_receiver[receiver])
        return max(0, room)


def is_limited(settings: QueueSettings) -> bool:
    """True if what the queue has in flight has to be known."""
    return bool(settings.max_in_flight or settings.max_in_flight_per_receiver or settings.breaker_failures)
