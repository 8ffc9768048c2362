"""Separate producers for markers and rows, so that acknowledgements wait behind nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_metrics import app

__all__ = ["app"]  # fixture


class Started(Exception):
    """The producer has been divided."""


def test_markers_and_rows_have_a_producer_each_and_messages_neither_of_them(app: Any) -> None:
    lanes: list[set[str]] = []

    async def divide(*topics: Iterable[str]) -> None:
        lanes.extend(map(set, topics))
        raise Started

    async def main() -> None:
        app._topics = SimpleNamespace(queue="queue", markers="markers")
        app.producer = SimpleNamespace(divide=divide)
        with pytest.raises(Started):
            await app.on_start()

    asyncio.run(main())
    markers, rows = lanes
    assert markers == {"markers"}
    assert rows == {table.changelog_topic_name for table in app.tables.values()}
    assert len(rows) == 3 and "queue" not in rows
