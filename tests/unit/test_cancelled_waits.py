"""What waits for an event for a while ends when it is cancelled, also at the moment at which the event comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agents.elsewhere import Elsewhere
from app.engine.takeover import TakeOver
from app.streaming.transport import ChunkConsumer
from app.worker import WorkerApp

#: Turns of the event loop between the event and the cancellation: of these, some see the waiting half done.
TURNS = range(6)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def cancelled_as(event: Callable[[], object], task: asyncio.Task[Any], between: int) -> None:
    """What the task waits for comes, and so many turns later the task is cancelled: it ends."""
    await turns(5)

    event()
    await turns(between)
    task.cancel()

    await turns(10)
    assert task.done()


@pytest.mark.parametrize("between", TURNS)
def test_a_worker_that_stops_as_partitions_change_hands_stops_telling_others_of_its_handlers(between: int) -> None:
    async def run() -> None:
        peers: Any = SimpleNamespace(url="here", others=list, register=lambda part: None)
        elsewhere = Elsewhere(SimpleNamespace(receivers=[], owned={}), peers, ())  # type: ignore[arg-type]
        task = asyncio.ensure_future(elsewhere.renew())
        await cancelled_as(elsewhere.renew_soon, task, between)

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
        await cancelled_as(lambda: confirmed.set_result(7), task, between)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())


@pytest.mark.parametrize("between", TURNS)
def test_a_consumer_that_stops_as_partitions_are_resumed_waits_for_no_more_records(between: int) -> None:
    async def run() -> None:
        consumer: Any = SimpleNamespace(
            app=SimpleNamespace(client_only=False, chunked_topics=()),
            flow_active=True,
            _plain_resumed=asyncio.Event(),
            _get_active_partitions=set,
        )
        rounds = []

        async def fetch() -> None:
            while True:
                rounds.append(await ChunkConsumer._wait_next_records(consumer, 1_000.0))

        task = asyncio.ensure_future(fetch())
        await cancelled_as(consumer._plain_resumed.set, task, between)

    asyncio.run(run())


@pytest.mark.parametrize("between", TURNS)
def test_a_worker_that_is_stopped_as_its_queues_become_known_starts_no_further_part(between: int) -> None:
    async def run() -> None:
        started = asyncio.Event()

        async def at_once() -> None:
            started.set()

        async def share_secret() -> None:
            await asyncio.sleep(1_000)

        catalog = SimpleNamespace(start=at_once, read_up=asyncio.Event(), share_secret=share_secret)
        task = asyncio.ensure_future(WorkerApp.start_parts(SimpleNamespace(catalog=catalog)))  # type: ignore[arg-type]
        await started.wait()
        await cancelled_as(catalog.read_up.set, task, between)

    asyncio.run(run())
