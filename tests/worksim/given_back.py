"""What a worker gives back, or gets from another one, is noted, so that the end of a run shows what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.engine.outbox import Outbox
from app.service.receives import Receives
from marq.core.markers import Marker, Release
from marq.core.ranges import offsets_in

if TYPE_CHECKING:
    from tests.worksim.worker import Worker
    from tests.worksim.world import World

_put = Outbox.put
_fetch = Receives._fetch


def put(outbox: Outbox, markers: list[Marker]) -> None:
    """In the place of `Outbox.put`."""
    noted: set[tuple[int, int, int]] = outbox.__dict__.setdefault("noted", set())
    for marker in markers:
        if isinstance(marker, Release):
            noted.update((marker.epoch, marker.delivery, offset) for offset in offsets_in(marker.offsets))
    _put(outbox, markers)


async def fetch(receives: Receives, *asked: Any) -> Any:
    """In the place of `Receives._fetch`."""
    found = await _fetch(receives, *asked)
    receives.__dict__.setdefault("noted", []).extend(found or ())
    return found


def look(world: World, worker: Worker) -> None:
    """All that a worker gave back is in the log; what it fetched it has answered or given back."""
    for number, outbox in worker.ownership._outboxes.items():
        missing = outbox.__dict__.get("noted", set()) - world.truths[number].given_back
        if missing:
            world.violated(
                "given back", f"{worker.process.name}, partition {number}: {sorted(missing)} is not in the log"
            )
    receives = worker.operations.receives
    for one in receives.__dict__.get("noted", ()):
        truth = world.truths[one.partition]
        _, epoch, delivery, offset, *_ = receives.receipts.read(one.receipt)
        if (epoch, delivery, offset) not in truth.deliveries | truth.given_back:
            world.violated("fetched", f"{worker.process.name} has got {one.partition}@{offset}, and kept it")
