"""How late a worker is, against the leases that it gives: how much it may hand out.

A worker that hands out more than can be acknowledged in time causes duplicates. So the *share* of the requested
messages that it hands out falls while the worker is late, and is 0 before leases end for that reason:

    late = lag of the event loop, for each turn that an ack takes there,
           + age of the oldest ack that is not confirmed                            share
    up to a tenth of the lease                                                      1
    from there on, evenly less                                                      1 … 0
    from a third of the lease on                                                    0

Lag counts in full when it is seen, and fades. A *stall* is a time in which this process stood still. For as long
as it lasted, nothing is handed out afterwards and no tick is appended: acks that arrived meanwhile are read first.
"""

from __future__ import annotations

#: Part of a lease by which acks may be late without any effect.
FREE = 0.1

#: Part of a lease from which on nothing is handed out.
LATE = 1 / 3

#: Turns of the event loop between the arrival of an ack and its append: read, decoded, appended.
LAG_TURNS = 3

#: Milliseconds of lag that count as a stall: more than a busy event loop has.
STALL_MS = 1_000

#: Milliseconds for which anything is held back after a stall at most.
STALL_HOLD_MAX_MS = 10_000

#: Milliseconds after which a lag counts half.
HALF_LIFE_MS = 500


class Lateness:
    """Measures how late one worker is. Times are monotonic milliseconds."""

    def __init__(self) -> None:
        self.lag_ms = 0.0
        self.stalls = 0
        self._seen_ms = -1
        self._held_until_ms = -1

    def woke(self, now_ms: int, lag_ms: int) -> None:
        """A timer fired `lag_ms` late. Call often, also when it was in time."""
        if self._seen_ms >= 0:
            self.lag_ms *= 0.5 ** (max(0, now_ms - self._seen_ms - lag_ms) / HALF_LIFE_MS)
        self._seen_ms = now_ms
        self.lag_ms = max(self.lag_ms, float(lag_ms))
        if lag_ms >= STALL_MS:
            self.stalls += 1
            self._held_until_ms = max(self._held_until_ms, now_ms + min(lag_ms, STALL_HOLD_MAX_MS))

    def held_back(self, now_ms: int) -> bool:
        """True for a while after a stall: append no ticks and hand nothing out."""
        return now_ms < self._held_until_ms

    def share(self, now_ms: int, lease_ms: int, ack_age_ms: float = 0.0) -> float:
        """The part of the requested messages that may be handed out under a lease of `lease_ms`: 0 to 1.

        Args:
            ack_age_ms: age of the oldest ack, extension or release that is not confirmed.
        """
        if self.held_back(now_ms):
            return 0.0
        if not lease_ms:
            return 1.0  # it is over before any ack
        late = (LAG_TURNS * self.lag_ms + ack_age_ms) / max(1, lease_ms)
        return min(1.0, max(0.0, (LATE - late) / (LATE - FREE)))

    def room(self, now_ms: int, wanted: int, lease_ms: int, ack_age_ms: float = 0.0) -> int:
        """How many of `wanted` messages may be handed out: at least one while the share is not 0."""
        share = self.share(now_ms, lease_ms, ack_age_ms)
        return min(wanted, max(1, int(wanted * share))) if share > 0 and wanted > 0 else 0
