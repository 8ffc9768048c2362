"""Faust acknowledges an event whose agent raised: an error in our own logic must stop the worker before that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.worker import WorkerApp


@contextmanager
def stop_on_error(app: WorkerApp) -> Iterator[None]:
    """Stop the worker if the body raises."""
    try:
        yield
    except Exception as exc:
        app.log.exception("Stopping: %r", exc)
        app.ownership.stop_serving()
        app.fail(exc)
