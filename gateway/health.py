"""`/health/live`: 200 while the process answers.

`/health/ready`: 200 while every assigned partition that can be served is served, and no error stops the worker.
"""

from __future__ import annotations

from typing import Any

from app.engine.ownership import Ownership
from app.streaming.faust_app import MarqApp
from gateway.auth import Keys, is_answered


def define(app: MarqApp, ownership: Ownership, keys: Keys) -> None:
    """Register the routes."""

    @app.page("/health/live", name="health-live")
    async def live(view: Any, request: Any) -> Any:
        return view.json({"live": True})

    @app.page("/health/ready", name="health-ready")
    async def ready(view: Any, request: Any) -> Any:
        owned = ownership.owned
        serving = [number for number in sorted(owned) if owned[number].serving]
        ready = ownership.ready and app.failure is None
        state: dict[str, Any] = {"ready": ready, "serving": serving}
        if ownership.unserved:
            state["unserved"] = sorted(ownership.unserved)
        if stalled := ownership.stalls.now():
            state["stalled"] = list(stalled)
        if not keys and is_answered(request.headers.get("Host", "")):
            state["worker"] = ownership.worker_name
            state["rebalancing"] = bool(app.rebalancing)
            if ownership.unserved:
                state["unserved"] = {str(n): reason for n, reason in sorted(ownership.unserved.items())}
            state["partitions"] = {str(n): owned[n].owner.phase.value for n in sorted(owned)}
            if app.failure is not None:
                state["stopping"] = str(app.failure)
        return view.json(state, status=200 if ready else 503)
