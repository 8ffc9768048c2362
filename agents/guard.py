"""Faust acknowledges an event even if its agent raised. So an error in our own logic must stop the worker first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from app.engine.ownership import Ownership


@contextmanager
def stop_on_error(ownership: Ownership) -> Iterator[None]:
    """Stop the worker if the body raises."""
    try:
        yield
    except Exception as exc:
        ownership.log.exception("Stopping: %r", exc)
        ownership.stop_serving()
        ownership.app.fail(exc)
