"""The rows of a local store and of its changelog stay the same rows, whenever the worker dies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import app.streaming.raw_table
from tests.worksim.store import Table

ROW = b"0/1/messages/1"


def test_a_row_leaves_the_store_when_its_deletion_is_confirmed() -> None:
    """Else the owner that follows a crash would not find it, and never delete it from the changelog."""

    async def run() -> None:
        appended: list[asyncio.Future[Any]] = []

        def append(*_: Any) -> asyncio.Future[Any]:
            appended.append(asyncio.get_running_loop().create_future())
            return appended[-1]

        worker: Any = SimpleNamespace(
            topics_in_use=SimpleNamespace(changelogs={"messages": "changelog"}),
            disk={},
            store_fails=lambda: False,
            disk_is_full=lambda: False,
            producer=SimpleNamespace(append=append),
        )
        table = Table(worker, "messages")
        table.data.on_rebalance({0})
        event = SimpleNamespace(message=SimpleNamespace(partition=0))
        with mock.patch.object(app.streaming.raw_table, "current_event", lambda: event):
            table.write(ROW, b"value")
            table.write(ROW, None)
        assert table.read(0, ROW) == b"value"

        for offset, future in enumerate(appended):
            future.set_result(SimpleNamespace(offset=offset))
        await asyncio.sleep(0)

        assert table.read(0, ROW) is None
        assert table.persisted(0) == 1

    asyncio.run(run())
