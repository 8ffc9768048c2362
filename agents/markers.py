"""The markers agent: folds progress, and writes checkpoints in the context of the marker's event.

Faust sends a row to the changelog partition of the event in which it is written, so rows are written nowhere else.
"""

from __future__ import annotations

from typing import Any

from agents.guard import stop_on_error
from app.engine.ownership import Ownership


def define(ownership: Ownership, topic: Any) -> Any:
    """Declare the agent."""

    @ownership.app.agent(topic, name="markers")
    async def markers(stream: Any) -> None:
        async for event in stream.events():
            with stop_on_error(ownership):
                ownership.on_markers_chunk(event.value)

    return markers
