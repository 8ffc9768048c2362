"""The queue agent: takes the messages of the queue topic up, a chunk at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agents.guard import stop_on_error

if TYPE_CHECKING:
    from app.worker import WorkerApp


def define(app: WorkerApp, topic: Any) -> Any:
    """Declare the agent."""

    @app.agent(topic, name="queue")
    async def queue(stream: Any) -> None:
        async for event in stream.events():
            with stop_on_error(app):
                app.ownership.on_queue_chunk(event.value)

    return queue
