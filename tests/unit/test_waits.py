"""Waiting for several futures."""

from __future__ import annotations

import asyncio

import pytest

from app.service.waits import all_done
from tests.unit.http_lab import run


def test_it_ends_with_the_last_one_however_they_end() -> None:
    async def wait() -> None:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(4)]
        futures[0].set_result(1)
        waiting = asyncio.ensure_future(all_done(futures, 3_600))
        await asyncio.sleep(0)
        futures[1].set_exception(OSError("lost"))
        futures[2].cancel()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        futures[3].set_result(2)
        await asyncio.wait_for(waiting, 20)
        assert isinstance(futures[1].exception(), OSError)

    run(wait)


@pytest.mark.parametrize("count", [0, 3])
def test_it_does_not_wait_for_what_is_done(count: int) -> None:
    async def wait() -> None:
        futures = [asyncio.get_running_loop().create_future() for _ in range(count)]
        for future in futures:
            future.set_result(None)
        await all_done(futures, 3_600)

    run(wait)


def test_when_the_time_is_over_what_is_not_done_goes_on() -> None:
    async def wait() -> None:
        future = asyncio.get_running_loop().create_future()
        await all_done([future], 0.01)
        assert not future.done()
        future.set_result(7)
        assert await future == 7

    run(wait)


def test_who_gives_up_leaves_the_futures_alone() -> None:
    async def wait() -> None:
        future = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(all_done([future], 3_600))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        future.set_result(7)
        await asyncio.sleep(0)
        assert future.result() == 7

    run(wait)
