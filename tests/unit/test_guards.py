"""The effects of an error in the work on a partition."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from agents.guard import stop_on_error
from app.engine.owned_partition import OwnedPartition
from marq.errors import RowError
from tests.unit.http_lab import run, serving


def test_an_error_of_our_own_stops_the_worker_before_faust_acknowledges_the_event(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path) as http:
            error = ValueError("a rule is broken")
            with stop_on_error(http.app.ownership):
                raise error
            assert http.app.failure is error
            assert not http.app.ownership.ready
            assert http.app._crashing is not None
            with contextlib.suppress(Exception):
                await http.app._crashing

    run(check)


def test_what_is_no_error_goes_on(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path) as http:
            with stop_on_error(http.app.ownership):
                pass
            with pytest.raises(asyncio.CancelledError), stop_on_error(http.app.ownership):
                raise asyncio.CancelledError
            assert http.app.failure is None

    run(check)


def test_a_row_that_cant_be_read_concerns_its_partition_alone(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path) as http:
            ownership = http.app.ownership
            nothing: Any = None
            owned = OwnedPartition(0, 1, nothing, nothing)
            left: list[Any] = []
            ownership.recover_again = lambda *about, **how: left.append((*about, how))  # type: ignore[method-assign]
            with ownership._alone(owned):
                raise RowError("the row is damaged")
            assert left == [(owned, "the row is damaged", {"wipe": True})]
            with pytest.raises(ValueError, match="of our own"), ownership._alone(owned):
                raise ValueError("of our own")
            assert len(left) == 1

    run(check)
