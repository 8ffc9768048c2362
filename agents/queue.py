"""The queue agent: ingests the messages of the queue topic, a chunk at a time."""

from __future__ import annotations

from typing import Any

from agents.guard import stop_on_error
from app.engine.ownership import Ownership


def define(ownership: Ownership, topic: Any) -> Any:
    """Declare the agent."""

    @ownership.app.agent(topic, name="queue")
    async def queue(stream: Any) -> None:
        async for event in stream.events():
            with stop_on_error(ownership):
                ownership.on_queue_chunk(event.value)

    return queue
