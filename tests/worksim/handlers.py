"""Handlers that run in the simulated workers: they take time, and fail."""

from __future__ import annotations

import asyncio
from typing import Any

from marq.handlers import Handler, Retry
from tests.worksim.clock import current

#: Most seconds of a call where no attempt may be burned.
CAREFUL_S = 1.0


async def _one(message: Any) -> None:
    await _work([message])


async def _many(messages: list[Any]) -> None:
    await _work(messages)


async def _quick(message: Any) -> None:
    await _work([message], (0.001, 0.02, 0.3))


async def _work(messages: list[Any], at_most_s: tuple[float, ...] = (0.001, 0.1, 4.0)) -> None:
    process = current()
    world = process.world
    for message in messages:
        world.truths[message.partition].called(process.name, message)
    world.tell("%s calls a handler with %s", process.name, [(m.partition, m.offset, m.attempt) for m in messages])
    # a call without an error is an ack
    world.clients.asked.update((m.partition, m.offset) for m in messages)
    calls = [world.truths[message.partition].calls for message in messages]
    for message, running in zip(messages, calls, strict=True):
        running[message.offset] += 1
    try:
        await _take_time(world, at_most_s, messages[0])
    finally:
        for message, running in zip(messages, calls, strict=True):
            running[message.offset] -= 1


class Panic(BaseException):
    """As extensions raise that are written in other languages."""


#: What failing calls raise: one after the other, by offset and attempt.
ENDS = (ValueError, Panic, SystemExit, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)


async def _take_time(world: Any, at_most_s: tuple[float, ...], message: Any) -> None:
    r = world.clients.random
    if world.clients.theme.careful:
        await asyncio.sleep(r.random() * min(r.choice(at_most_s), CAREFUL_S))
    elif not world.healing:
        await asyncio.sleep(r.random() * r.choice(at_most_s))
        if r.random() < 0.1:
            raise Retry(r.choice((None, 100)))
        if r.random() < 0.1:
            raise ENDS[(message.offset + message.attempt) % len(ENDS)]("planted")


#: The queues that have a handler in each worker.
QUEUES = ("work", "batches", "quick")
HANDLERS = [
    Handler(_one, ("work",), 0, 2, 2_000, 5, 200, 1_000),
    Handler(_many, ("batches",), 10, 1, 3_000, None, 200, 1_000),  # type: ignore[arg-type]
    Handler(_quick, ("quick",), 0, 1, 1_000, 5, 200, 1_000),  # so quick that it takes messages ahead
]
