"""A fetch that nobody answers is given up, and so is its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.client import ConnectionGroup
from aiokafka.errors import RequestTimedOutError

from app.streaming import fetching as module
from app.streaming.fetching import decode_with


class Broker:
    """Answers when the test says so. To the fetcher it is aiokafka's client."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.closed: list[ConnectionGroup] = []
        self._conns = {
            (1, group): SimpleNamespace(close=lambda reason, group=group: self.closed.append(group))
            for group in ConnectionGroup
        }
        fetcher = SimpleNamespace(_client=self, _proc_fetch_request=None)
        decode_with(SimpleNamespace(_fetcher=fetcher), lambda topic: False, lambda *_: None)  # type: ignore[arg-type]
        self.client: Any = fetcher._client

    async def send(self, node_id: int, request: Any) -> str:
        await self.may_answer.wait()
        return "answer"


def run(scenario: Callable[[Broker], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(5):
            await scenario(Broker())

    asyncio.run(main())


def test_a_connection_on_which_nothing_is_answered_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.01)

    async def scenario(broker: Broker) -> None:
        with pytest.raises(RequestTimedOutError):
            await broker.client.send(1, "fetch")
        assert broker.closed == [ConnectionGroup.DEFAULT]  # that of the group waits for rebalances

    run(scenario)


def test_an_answer_that_takes_long_comes_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.01)

    async def scenario(broker: Broker) -> None:
        async def send(node_id: int, request: Any) -> str:
            await asyncio.sleep(0.1)
            return "answer"

        monkeypatch.setattr(broker, "send", send)
        while True:
            try:
                assert await broker.client.send(1, "fetch") == "answer"
                return
            except RequestTimedOutError:
                continue

    run(scenario)
