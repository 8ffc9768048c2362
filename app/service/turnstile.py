"""Expensive requests take turns. Acks pass without waiting, so they wait for one turn at most."""

from __future__ import annotations

import asyncio
from collections import deque

#: Messages in the requests of one turn. A request with more has a turn of its own.
TURN_MESSAGES = 1_000


class Turnstile:
    """Lets requests through in their order: a number of messages in each iteration of the event loop."""

    def __init__(self, turn_messages: int = TURN_MESSAGES) -> None:
        self._turn_messages = turn_messages
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    async def turn(self, messages: int) -> None:
        """Wait until a request with so many messages may be carried out."""
        if not self._waiting and self._fits(messages):
            self._use(messages)
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((messages, future))
        await future

    def _fits(self, messages: int) -> bool:
        return not self._used or self._used + messages <= self._turn_messages

    def _use(self, messages: int) -> None:
        if not self._used:
            asyncio.get_running_loop().call_soon(self._next)
        self._used += max(1, messages)

    def _next(self) -> None:
        self._used = 0
        while self._waiting and self._fits(self._waiting[0][0]):
            messages, future = self._waiting.popleft()
            if not future.done():  # else its client went away
                future.set_result(None)
                self._use(messages)
