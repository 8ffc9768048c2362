"""Faust acknowledges an event even if its agent raised. So an error in our own logic must stop the worker first."""

from __future__ import annotations

from app.engine.ownership import Ownership


class stop_on_error:
    """Stop the worker if the body raises."""

    __slots__ = ("_ownership",)

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._ownership.stop_serving()
        self._ownership.app.fail(error)
        return True
