"""What an owner wants done: markers to append, deliveries to hand out, messages to copy."""

from __future__ import annotations

from typing import Any, NamedTuple

from marq.core import markers as m
from marq.core.markers import Marker, Release
from marq.core.ranges import ranges_of


class Handout(NamedTuple):
    """A delivery to hand out now. Without offsets it tells the receiver that its request brought nothing.

    ``receipt`` is ``(epoch, delivery)``; ``until_ms`` is the end of the lease on the owner's monotonic clock.
    """

    receiver: Any
    receipt: tuple[int, int]
    offsets: list[int]
    until_ms: int


class Effects(NamedTuple):
    """What to do, in this order. Doing it may lead to more."""

    appends: list[Marker]
    handouts: list[Handout]
    dead: list[int]  # started for their dead letter: copy them, then end them with ended_as()
    poison: list[tuple[int, str]]  # no messages, and why: copy them to the poison topic, then end them with ended_as()


class Agenda:
    """Gathers effects until they are taken."""

    def __init__(self) -> None:
        self.appends: list[Marker] = []
        self.handouts: list[Handout] = []
        self.dead: list[int] = []
        self.poison: list[tuple[int, str]] = []

    @property
    def is_open(self) -> bool:
        """True if something is to be done."""
        return bool(self.appends or self.handouts or self.dead or self.poison)

    def take(self) -> Effects | None:
        """Returns all effects since the last call, or None."""
        if not self.is_open:
            return None
        effects = Effects(self.appends, self.handouts, self.dead, self.poison)
        self.appends, self.handouts, self.dead, self.poison = [], [], [], []
        return effects

    def release(self, offsets: list[int], receipt: tuple[int, int], delay_ms: int, counted: bool) -> None:
        """Append that a folded delivery of ``offsets`` is given back."""
        self.appends += m.split(Release(receipt[0], receipt[1], ranges_of(sorted(offsets)), delay_ms, counted))

    def withdraw(self, ended: list[int]) -> None:
        """Drop offsets from the hand-outs that ended after their start was folded."""
        gone = set(ended)
        self.handouts = [
            h if gone.isdisjoint(h.offsets) else h._replace(offsets=[o for o in h.offsets if o not in gone])
            for h in self.handouts
        ]
