"""While a partition has no leader, the client asks for one repeatedly, but not as fast as brokers answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.streaming import paced_client as module
from app.streaming.paced_client import PacedClient

PAUSE_S = 0.1


class Client:
    """Answers at once."""

    def __init__(self) -> None:
        self.asked = 0
        self.cluster = "the brokers"

    def force_metadata_update(self) -> asyncio.Future[Any]:
        self.asked += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_result(True)
        return future


def test_questions_in_a_row_wait_for_their_time_and_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METADATA_PAUSE_S", PAUSE_S)

    async def scenario() -> None:
        client = Client()
        paced = PacedClient(client)
        began, loops = asyncio.get_running_loop().time(), 0
        while (took_s := asyncio.get_running_loop().time() - began) < 3 * PAUSE_S:
            assert await paced.force_metadata_update() is True
            loops += 1
        assert client.asked == loops <= 1 + took_s / PAUSE_S

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_those_who_ask_meanwhile_share_an_answer_and_one_who_goes_leaves_it_to_the_others() -> None:
    async def scenario() -> None:
        client = Client()
        paced = PacedClient(client)
        await paced.force_metadata_update()
        first, second = paced.force_metadata_update(), paced.force_metadata_update()
        first.cancel()
        assert await second is True
        assert client.asked == 2

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_all_else_is_the_clients() -> None:
    assert PacedClient(Client()).cluster == "the brokers"
