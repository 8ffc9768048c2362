"""Receivers of messages: they finish, extend, give back, do nothing, come late, and ask any worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marq.core import markers as m
from marq.core.agenda import Handout
from marq.core.ranges import ranges_of

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator


class Receivers:
    """All receivers together, with the deliveries that they have, as far as they know."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.holding: list[tuple[tuple[int, int], list[int]]] = []  # receipt, offsets
        self.acked: set[int] = set()  # some receiver has sent an ack for these

    def take(self, handout: Handout) -> None:
        """A delivery arrives."""
        if handout.offsets:
            self.holding.append((handout.receipt, handout.offsets))

    def act(self) -> None:
        """One receiver does something about one delivery, soon or long after its lease is over."""
        sim = self.sim
        i = sim.below(len(self.holding))
        receipt, offsets = self.holding[i]
        part = offsets if sim.chance(0.6) else [o for o in offsets if sim.chance(0.5)]
        what = sim.random.random()
        if what < sim.odds.forgets:
            self.holding.pop(i)
            return
        if not part:
            return
        if what > 1 - sim.odds.acks:
            self.finish(receipt, part)
        elif what > 1 - sim.odds.acks - 0.15:
            self.tell(m.Release(*receipt, ranges_of(sorted(part)), sim.pick((0, 0, 200, 3_000))))
        else:
            self.tell(m.Keepalive(*receipt, ranges_of(sorted(part)), sim.lease_ms()))
            return
        if sim.chance(0.85):
            rest = [o for o in offsets if o not in part]
            if rest:
                self.holding[i] = (receipt, rest)
            else:
                self.holding.pop(i)

    def finish(self, receipt: tuple[int, int], offsets: list[int]) -> None:
        """Acknowledge."""
        self.acked.update(offsets)
        self.tell(m.End(receipt[0], ranges_of(sorted(offsets)), "acked", receipt[1]))

    def tell(self, marker: m.Marker) -> None:
        """Any worker will do; now and then two."""
        sim = self.sim
        workers = [w for w in sim.workers if w.alive and not w.paused]
        for _ in range(2 if sim.chance(0.1) else 1):
            if not workers:
                return
            worker = sim.pick(workers)
            owner = worker.owner
            sim.note("receiver tells w%d %s", worker.number, marker)
            if owner is None or not worker.serving or not worker.assigned or sim.chance(0.2):
                worker.forward(marker)
                continue
            offsets = [o for i in range(0, len(marker.offsets), 2) for o in range(*marker.offsets[i : i + 2])]
            receipt = (marker.epoch, marker.delivery)
            if isinstance(marker, m.End):
                owner.acked(offsets, receipt)
            elif isinstance(marker, m.Release):
                owner.release(offsets, receipt, marker.delay_ms)
            else:
                owner.extend(offsets, receipt, marker.redeliver_after_ms)
