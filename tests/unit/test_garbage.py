"""Memory of answers that clients did not read."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from app.faust_worker import COLLECT
from gateway.garbage import LOOK_BYTES, collected

ANSWER_BYTES = 4 * 1024 * 1024


class Body(bytes):
    """Bytes that are counted."""

    alive = 0

    def __init__(self, _: int) -> None:
        Body.alive += 1

    def __del__(self) -> None:
        Body.alive -= 1


@pytest.fixture
def as_in_a_worker() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(*COLLECT)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("as_in_a_worker")
def test_answers_that_a_cycle_holds_do_not_come_together() -> None:
    async def handle(request: web.Request) -> web.Response:
        body = Body(ANSWER_BYTES)
        cycle: list[object] = [body]  # like the exception and its frames when the client has gone away
        cycle.append(cycle)
        return web.Response(body=body)

    async def run() -> None:
        middleware, most = collected(), 0
        for _ in range(60):
            await middleware(make_mocked_request("GET", "/"), handle)
            most = max(most, Body.alive)
        assert 1 < most <= LOOK_BYTES / ANSWER_BYTES + 2

    asyncio.run(run())
