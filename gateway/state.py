"""`/v1/partitions`: what this worker knows of the partitions it holds."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.ownership import Held
    from app.worker import WorkerApp


def define(app: WorkerApp) -> None:
    """Declare the view."""

    @app.page("/v1/partitions", name="partitions")
    async def partitions(view: Any, request: Any) -> Any:
        held = app.ownership.held
        return view.json(
            {
                "worker": app.ownership.worker_name,
                "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "partitions": [describe(held[n]) for n in sorted(held)],
            }
        )


def describe(held: Held) -> dict[str, Any]:
    """One partition, as JSON."""
    partition = held.owner.partition
    return {
        "partition": held.number,
        "phase": held.owner.phase.value,
        "epoch": held.owner.epoch,
        "position": partition.position,
        "markers_position": partition.markers_position,
        "persisted": partition.persisted,
        "clock_ms": partition.clock_ms,
        "in_memory": len(partition.messages),
        "held": len(partition.holds),
        "parked": sum(len(r) for s in partition.segments for r in s.parked.values()),
        "segments": len(partition.segments),
        "bytes": partition.bytes,
        "paused": held.paused,
        "counters": dict(partition.counters),
    }
