"""Entries that share requests: how many are under way, their order, and what becomes of them at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from marq.client.batching import Batching
from marq.errors import ClosedError
from marq.protocol.limits import CLIENT_BATCH_MAX


class Service:
    """Takes requests, and answers when the test says so."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[Any], asyncio.Future[None]]] = []

    async def post(self, kind: Any, entries: list[Any]) -> list[Any]:
        future = asyncio.get_running_loop().create_future()
        self.requests.append((entries, future))
        await future
        return entries

    @property
    def sizes(self) -> list[int]:
        return [len(entries) for entries, _ in self.requests]

    async def answer(self, number: int) -> None:
        self.requests[number][1].set_result(None)
        await turns()


async def turns() -> None:
    """What can go on does."""
    for _ in range(10):
        await asyncio.sleep(0)


def run(scenario: Callable[[Service], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(5):
            await scenario(Service())

    asyncio.run(main())


def puts(batching: Batching, *groups: list[Any]) -> list[asyncio.Task[list[Any]]]:
    return [asyncio.ensure_future(batching.put("ack", group)) for group in groups]


def test_full_requests_go_beside_each_other_and_what_is_left_waits_for_company() -> None:
    async def scenario(service: Service) -> None:
        batching = Batching(service.post, at_once=3)
        asked = puts(batching, [0])
        await turns()
        asked += puts(batching, *([[i] * CLIENT_BATCH_MAX for i in range(1, 5)]), [5])
        await turns()
        assert service.sizes == [1, CLIENT_BATCH_MAX, CLIENT_BATCH_MAX]
        await service.answer(1)
        assert service.sizes == [1, CLIENT_BATCH_MAX, CLIENT_BATCH_MAX, CLIENT_BATCH_MAX]
        await service.answer(0)
        assert service.sizes[4:] == [CLIENT_BATCH_MAX]
        await service.answer(3)
        await service.answer(2)
        assert service.sizes[5:] == []
        await service.answer(4)
        assert service.sizes[5:] == [1]
        await service.answer(5)
        assert [await one for one in asked] == [[0], *([i] * CLIENT_BATCH_MAX for i in range(1, 5)), [5]]

    run(scenario)


def test_requests_that_have_to_keep_their_order_go_one_after_the_other() -> None:
    async def scenario(service: Service) -> None:
        batching = Batching(service.post)
        puts(batching, [0], [1] * CLIENT_BATCH_MAX, [2] * CLIENT_BATCH_MAX)
        await turns()
        sent = 0
        while sent < len(service.requests):
            assert len(service.requests) == sent + 1
            await service.answer(sent)
            sent += 1
        assert [entry for entries, _ in service.requests for entry in entries] == [
            0,
            *[1] * CLIENT_BATCH_MAX,
            *[2] * CLIENT_BATCH_MAX,
        ]

    run(scenario)


def test_what_is_put_in_one_turn_of_the_loop_shares_a_request() -> None:
    async def scenario(service: Service) -> None:
        puts(Batching(service.post, at_once=4), [0], [1], [2])
        await turns()
        assert service.sizes == [3]

    run(scenario)


def test_what_nobody_waits_for_any_more_is_not_sent() -> None:
    async def scenario(service: Service) -> None:
        batching = Batching(service.post, at_once=4)
        (first,) = puts(batching, [0])
        await turns()
        second, third = puts(batching, [1], [2])
        await turns()
        second.cancel()
        await turns()
        await service.answer(0)
        await service.answer(1)
        assert [entries[0] for entries, _ in service.requests] == [0, 2]
        assert (await first, await third) == ([0], [2])

    run(scenario)


def test_whoever_waits_when_it_closes_is_cancelled_and_nothing_is_taken_later() -> None:
    async def scenario(service: Service) -> None:
        batching = Batching(service.post)
        asked = puts(batching, [0], [1] * CLIENT_BATCH_MAX)
        await turns()
        asked += puts(batching, [2])
        await asyncio.sleep(0)
        await batching.close()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in found)
        with pytest.raises(ClosedError):
            await batching.put("ack", [3])

    run(scenario)
