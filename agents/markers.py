"""The markers agent: folds progress, and writes checkpoints in the context of the marker's event.

Faust sends a row to the changelog partition of the event in which it is written, so rows are written nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agents.guard import stop_on_error

if TYPE_CHECKING:
    from app.worker import WorkerApp


def define(app: WorkerApp, topic: Any) -> Any:
    """Declare the agent."""

    @app.agent(topic, name="markers")
    async def markers(stream: Any) -> None:
        async for event in stream.events():
            with stop_on_error(app):
                app.ownership.on_markers_chunk(event.value)

    return markers
