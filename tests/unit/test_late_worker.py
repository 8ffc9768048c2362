"""A worker that is late: its deliveries, its answers to receivers, and its recovery after it stood still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine import ownership as ownership_module
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import TIMER_MS, Ownership
from app.engine.throttle import AGAIN_MS
from app.service import receives as receiving_module
from app.service.meters import Meters
from app.service.receipts import Receipts
from app.service.receives import Receives
from app.settings import Settings
from marq.core.lateness import STALL_MS
from marq.core.markers import End, Start, Tick
from marq.core.ranges import ranges_of
from marq.errors import UnavailableError
from tests.unit.core_helpers import DEFAULTS, Worker
from tests.unit.peer_helpers import alone

LEASE_MS = 5_000


class Desk:
    """A worker with one partition, whose log takes everything at once; its clock is moved by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
        self.core = Worker().serve()
        self.core.send(messages)
        for module in (ownership_module, receiving_module):
            monkeypatch.setattr(module, "now_ms", lambda: self.core.clock_ms)
        topics = SimpleNamespace(queue="q", markers="m", partitions=1)
        peers = alone()
        catalog = SimpleNamespace(
            settings_of=lambda queue: DEFAULTS,
            with_ttl=(),
            settings_changes=0,
            require_receivable=lambda queue: None,
        )
        self.ownership = Ownership(
            SimpleNamespace(  # type: ignore[arg-type]
                fail=lambda exc: None,
                producer=SimpleNamespace(waits=lambda s: {}),
                consumer=SimpleNamespace(hurry=lambda lasting: None, unstable=dict),
            ),
            Settings(kafka="kafka://nowhere:1"),
            lambda: topics,  # type: ignore[arg-type, return-value]
            {},
            catalog,  # type: ignore[arg-type]
            peers,
        )
        monkeypatch.setattr(self.ownership.read_ahead, "regulate", lambda owned: None)
        monkeypatch.setattr(self.ownership.progress, "look_after_some", lambda partitions, now: None)
        self.said: list[Any] = []
        self.outbox = SimpleNamespace(late_s=0.0, put=lambda markers: self.core.outbox.extend(markers))
        self.owned = OwnedPartition(0, 1, self.core.owner, self.outbox)  # type: ignore[arg-type]
        self.ownership.owned[0] = self.owned
        receipts = Receipts(lambda: b"secret")
        self.receives = Receives(self.ownership, receipts, Meters(), peers)

    def pass_time(self, ms: int) -> None:
        self.core.clock_ms += ms
        self.core.broker.now_ms += ms
        self.ownership.on_timer()
        self.settle()

    def settle(self) -> None:
        """The log takes the markers."""
        self.said += self.core.flush()
        self.ownership.drain(self.owned)
        self.said += self.core.flush()

    async def receive(self, limit: int, wait_ms: int = 0, lease_ms: int = LEASE_MS) -> list[Any]:
        asked = asyncio.ensure_future(self.receives.receive("q", limit, wait_ms, lease_ms, "r", lambda: False))
        await asyncio.sleep(0)
        self.settle()
        return await asked


Scenario = Callable[[Desk], Awaitable[None]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(scenario: Scenario, messages: int = 100) -> None:
        async def main() -> None:
            async with asyncio.timeout(3):
                await scenario(Desk(monkeypatch, messages))

        asyncio.run(main())

    return run


def test_the_later_acks_are_the_less_is_handed_out(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        desk.outbox.late_s = 0.2
        assert len(await desk.receive(20)) == 20
        desk.outbox.late_s = 1.1
        assert 1 < len(await desk.receive(20)) < 20
        desk.outbox.late_s = 1.8
        with pytest.raises(UnavailableError) as refused:
            await desk.receive(20)
        assert refused.value.retry_after_s >= 1
        assert desk.ownership.throttle.withheld == 1

    run(scenario)


def test_a_long_lease_is_given_where_a_short_one_is_not(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        desk.outbox.late_s = 1.8
        assert len(await desk.receive(10, lease_ms=60_000)) == 10

    run(scenario)


def test_a_late_worker_with_nothing_to_hand_out_says_so(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        desk.outbox.late_s = 1.8
        assert await desk.receive(10) == []

    run(scenario, messages=0)


def test_who_waits_is_served_as_soon_as_the_worker_is_in_time_again(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        desk.outbox.late_s = 1.8
        asked = asyncio.ensure_future(desk.receives.receive("q", 10, 60_000, LEASE_MS, "r", lambda: False))
        await asyncio.sleep(0)
        desk.pass_time(TIMER_MS)
        assert not asked.done()
        desk.outbox.late_s = 0.0
        for _ in range(0, 2 * AGAIN_MS, TIMER_MS):
            desk.pass_time(TIMER_MS)
        assert len(await asked) == 10

    run(scenario)


def test_lag_of_the_event_loop_counts_as_well(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        desk.pass_time(TIMER_MS)
        desk.pass_time(TIMER_MS + STALL_MS - 1)
        with pytest.raises(UnavailableError):
            await desk.receive(10)

    run(scenario)


def test_after_it_stood_still_acks_come_before_any_lease_ends(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        desk.pass_time(TIMER_MS)
        (message,) = await desk.receive(1)
        for _ in range(150):
            desk.pass_time(TIMER_MS)
        desk.said.clear()
        desk.pass_time(4_000)  # this process stood still, and the lease ended meanwhile
        for _ in range(3_900 // TIMER_MS):
            desk.pass_time(TIMER_MS)
        assert not [marker for marker in desk.said if isinstance(marker, Tick | Start)]
        assert await desk.receive(1) == []

        epoch, delivery = desk.core.owner.epoch, 1
        desk.core.appends.append(End(epoch, ranges_of([message.offset]), "acked", delivery))
        desk.settle()
        for _ in range(0, 5_000, TIMER_MS):
            desk.pass_time(TIMER_MS)

        assert any(isinstance(marker, Tick) for marker in desk.said)
        assert await desk.receive(1) == []

    run(scenario, messages=1)


def test_a_request_that_comes_before_the_timer_after_a_stall_gets_nothing(run: Any) -> None:
    async def scenario(desk: Desk) -> None:
        desk.pass_time(TIMER_MS)
        desk.core.clock_ms += 4_000  # and the timer is not called yet
        with pytest.raises(UnavailableError):
            await desk.receive(10, lease_ms=3_600_000)
        for _ in range(0, 3_900, TIMER_MS):
            desk.pass_time(TIMER_MS)
        with pytest.raises(UnavailableError):
            await desk.receive(10)
        for _ in range(0, 3_900, TIMER_MS):
            desk.pass_time(TIMER_MS)
        assert len(await desk.receive(10)) == 10
        assert desk.ownership.throttle.lateness.stalls == 1

    run(scenario)
