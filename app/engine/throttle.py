"""Hands out less while this worker is late, so that acks arrive before their leases end (`marq.core.lateness`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from marq.core.lateness import STALL_MS, Lateness

if TYPE_CHECKING:
    from app.engine.owned_partition import OwnedPartition

#: Milliseconds before receivers are served again that got nothing because this worker was late.
AGAIN_MS = 100


class Throttle:
    """Decides how many messages this worker may hand out, and which receivers to wake when it may hand out more."""

    def __init__(self, now: Callable[[], int], timer_ms: Callable[[], int]) -> None:
        self.lateness = Lateness()
        self.withheld = 0  # requests that got nothing because this worker was late
        self._now = now
        self._timer_ms = timer_ms  # between two calls of `timer_fired`
        self._fired_ms = -1
        self._rest_ms = 0  # how much longer than usual the timer sleeps
        self._again_ms = -1  # when to wake refused receivers
        self._refused: dict[int, None] = {}  # partitions with refused receivers

    def timer_fired(self, now: int) -> None:
        """Note by how much the timer is late. Called many times a second."""
        self.lateness.woke(now, self._late_ms(now) if self._fired_ms >= 0 else 0)
        self._fired_ms, self._rest_ms = now, 0

    def rests(self, now: int, longer_ms: int) -> None:
        """The timer woke up, has nothing to do, and sleeps on: that is not late."""
        self.timer_fired(now)
        self._rest_ms = longer_ms - self._timer_ms()

    @property
    def is_calm(self) -> bool:
        """True if nobody was refused, so that the timer has nobody to wake."""
        return self._again_ms < 0

    def held_back(self, now: int) -> bool:
        """True for a while after a stall: append no ticks, so that acks are read before any lease ends."""
        return self.lateness.held_back(now)

    def room(self, owned: OwnedPartition, wanted: int, lease_ms: int) -> int:
        """How many of `wanted` messages may be handed out under this lease: fewer, or none, while acks are late."""
        now = self._now()
        if self._fired_ms >= 0 and self._late_ms(now) >= STALL_MS:
            self.timer_fired(now)  # after a stall of this process, a request may come before the timer
        room = self.lateness.room(now, wanted, lease_ms, owned.outbox.late_s * 1000)
        if room == 0 and wanted:
            self.withheld += 1
            self._refused[owned.number] = None
            if self._again_ms < 0:
                self._again_ms = now + AGAIN_MS
        return room

    def is_late(self, owned: OwnedPartition, lease_ms: int) -> bool:
        """True if a partition hands out nothing under this lease at present, because acks are late."""
        return self.lateness.share(self._now(), lease_ms, owned.outbox.late_s * 1000) == 0.0

    def wake_refused(self, now: int, partitions: Mapping[int, OwnedPartition]) -> None:
        """A while after something was refused, wake those that got nothing: this worker may be less late by now."""
        if not 0 <= self._again_ms <= now:
            return
        self._again_ms = -1
        refused, self._refused = self._refused, {}
        for number in refused:
            owned = partitions.get(number)
            if owned is not None and owned.serving:
                owned.owner.wake()

    def _late_ms(self, now: int) -> int:
        return max(0, now - self._fired_ms - self._timer_ms() - self._rest_ms)
