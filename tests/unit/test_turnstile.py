"""Requests that cost much take turns; what passes by waits for one turn at most."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.service.turnstile import TURN_MESSAGES, Turnstile
from tests.unit.test_service_stalls import Desk, entry


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_what_passes_by_never_waits_behind_more_than_one_turn() -> None:
    async def scenario() -> None:
        turnstile, carried_out = Turnstile(1_000), [0]

        async def receive() -> None:
            await turnstile.turn(500)
            carried_out[0] += 1

        receives = [asyncio.ensure_future(receive()) for _ in range(64)]
        most, before = 0, 0
        while carried_out[0] < 64:
            await asyncio.sleep(0)  # an ack, handled in the next iteration of the loop
            most, before = max(most, carried_out[0] - before), carried_out[0]
        assert most == 2
        await asyncio.gather(*receives)

    run(scenario)


def test_small_requests_go_together_and_large_ones_alone() -> None:
    async def scenario() -> None:
        turnstile, order = Turnstile(100), []

        async def request(name: str, messages: int) -> None:
            await turnstile.turn(messages)
            order.append(name)

        tasks = [asyncio.ensure_future(request(str(i), 1)) for i in range(50)]
        await asyncio.sleep(0)
        assert len(order) == 50
        tasks += [asyncio.ensure_future(request(name, 10_000)) for name in ("x", "y")]
        await asyncio.gather(*tasks)
        assert order[-2:] == ["x", "y"]

    run(scenario)


def test_one_who_went_away_takes_nobodys_turn() -> None:
    async def scenario() -> None:
        turnstile = Turnstile(1)
        await turnstile.turn(1)
        gone, stays = asyncio.ensure_future(turnstile.turn(1)), asyncio.ensure_future(turnstile.turn(1))
        await asyncio.sleep(0)
        gone.cancel()
        await stays
        assert not turnstile.waiting

    run(scenario)


@pytest.mark.parametrize("what", ["send", "receive"])
def test_sends_and_receives_wait_for_their_turn_and_acks_do_not(what: str) -> None:
    async def scenario() -> None:
        desk = Desk()
        service, turnstile = desk.operations, desk.operations.turnstile
        before = [asyncio.ensure_future(turnstile.turn(TURN_MESSAGES)) for _ in range(50)]
        request = service.send("q", [entry()]) if what == "send" else service.receive("q")
        waits = asyncio.ensure_future(request)
        await asyncio.sleep(0)
        assert turnstile.waiting == len(before)

        receipt = service.receipts.make(0, 5, 1, 0, 1, bytes(10))
        assert await service.ack([receipt]) == [None]

        assert desk.said[0]
        assert not desk.sent
        assert not waits.done() and turnstile.waiting > len(before) // 2
        waits.cancel()
        await asyncio.gather(*before)

    run(scenario)
