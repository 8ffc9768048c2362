"""What waits for an event for a while ends when it is cancelled, also at the moment at which the event comes."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from agents.elsewhere import Elsewhere
from app.engine.takeover import TakeOver

#: Turns of the event loop between the event and the cancellation: of these, some see the waiting half done.
TURNS = range(6)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("between", TURNS)
def test_a_worker_that_stops_as_partitions_change_hands_stops_telling_others_of_its_handlers(between: int) -> None:
    async def run() -> None:
        peers: Any = SimpleNamespace(url="here", others=list, register=lambda part: None)
        elsewhere = Elsewhere(SimpleNamespace(receivers=[], owned={}), peers, ())  # type: ignore[arg-type]
        task = asyncio.ensure_future(elsewhere.renew())
        await turns(5)

        elsewhere.renew_soon()
        await turns(between)
        task.cancel()

        await turns(10)
        assert task.done()

    asyncio.run(run())


@pytest.mark.parametrize("between", TURNS)
def test_a_partition_that_leaves_as_its_claim_is_confirmed_is_not_taken_over(between: int) -> None:
    async def run() -> None:
        confirmed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        outbox = SimpleNamespace(drop_owners=lambda: None, put_confirmed=lambda markers: confirmed, writer=None)
        settings = SimpleNamespace(
            checkpoint_ms=1, window_offsets=1, persist_after_ms=1, step_timeout_ms=1, queue_id=None
        )
        ownership: Any = SimpleNamespace(
            in_group=True,
            settings=settings,
            worker_name="w",
            topics=SimpleNamespace(partitions=1),
            catalog=SimpleNamespace(keys_for=lambda purpose: (), settings_of=None),
            breakers=SimpleNamespace(of=None),
            due=SimpleNamespace(touch=lambda number: None),
            outbox=lambda number: outbox,
        )
        claims = []

        async def claim() -> None:
            claims.append(await TakeOver(ownership, 0)._claim())
            await asyncio.sleep(1_000)  # the rest of the take-over

        task = asyncio.ensure_future(claim())
        await turns(5)

        confirmed.set_result(7)
        await turns(between)
        task.cancel()

        await turns(10)
        assert task.done()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
