"""`/health/live`: the process answers. `/health/ready`: every assigned partition that can be served is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.worker import WorkerApp


def define(app: WorkerApp) -> None:
    """Declare the views."""

    @app.page("/health/live", name="health-live")
    async def live(view: Any, request: Any) -> Any:
        return view.json({"live": True})

    @app.page("/health/ready", name="health-ready")
    async def ready(view: Any, request: Any) -> Any:
        held = app.ownership.held
        state: dict[str, Any] = {"ready": app.ownership.ready}
        if not app.keys:  # whoever asks
            state["worker"] = app.ownership.worker_name
            state["rebalancing"] = bool(app.rebalancing)
            state["partitions"] = {str(n): held[n].owner.phase.value for n in sorted(held)}
            state["unserved"] = {str(n): reason for n, reason in sorted(app.ownership.unserved.items())}
        return view.json(state, status=200 if app.ownership.ready else 503)
