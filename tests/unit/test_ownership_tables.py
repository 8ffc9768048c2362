"""The tables of a worker's partitions: partitions write in turns, and a large manifest is logged."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from faust.types import TP

from app.engine import ownership
from app.engine.turns import AT_ONCE
from marq.core.recovery import Edges, LastRead
from marq.core.rows import Record
from marq.protocol.limits import RECORD_MAX_BYTES
from tests.unit.test_ownership import TOPICS, Desk, _no_waiting

__all__ = ["_no_waiting"]  # fixture

PARTITIONS = 6


@pytest.fixture(autouse=True)
def _many_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOPICS, "partitions", PARTITIONS)


def run(scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        desk = Desk()
        desk.kafka.assigned = {TP(topic, number) for topic in ("q", "m") for number in range(PARTITIONS)}
        await scenario(desk)
        desk.ownership.stop_serving()

    asyncio.run(main())


class Slow:
    """A table that Kafka has not confirmed any row of yet."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.open: list[tuple[int, asyncio.Future[Any]]] = []  # partition, and who waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)

    def write(self, key: bytes, value: bytes | None) -> asyncio.Future[Any]:
        self.table.write(key, value)
        future = asyncio.get_running_loop().create_future()
        self.open.append((int(key.split(b"/")[0]), future))
        return future


def test_few_partitions_write_rows_at_once_and_all_in_the_end() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        slow = desk.ownership.tables["messages"] = Slow(desk.tables["messages"])  # type: ignore[assignment]
        for owned in desk.ownership.owned.values():
            owned.owner.ingest(0, 1, [Record(0, owned.owner.partition.clock_ms, b"q", b"x")])
            owned.owner.hurry_checkpoint()
        wrote: list[int] = []
        async with asyncio.timeout(5):
            while len(wrote) < PARTITIONS:
                for number in desk.ownership.owned:
                    desk.read(number)
                assert len({number for number, _ in slow.open}) <= AT_ONCE
                if len({number for number, _ in slow.open}) == min(AT_ONCE, PARTITIONS - len(wrote)):
                    number, _ = slow.open[0]
                    for future in [future for of, future in slow.open if of == number]:
                        future.set_result(None)
                    slow.open = [(of, future) for of, future in slow.open if of != number]
                    wrote.append(number)
                await asyncio.sleep(0)
        assert sorted(wrote) == list(range(PARTITIONS))

    run(scenario)


def test_a_manifest_that_gets_large_is_said_once_long_before_it_is_too_large(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned, written, write = desk.ownership.owned[0], [], desk.tables["progress"].write
        monkeypatch.setattr(desk.tables["progress"], "write", lambda *row: written.append(row) or write(*row))

        def said() -> list[str]:
            return [r.getMessage() for r in caplog.records if "manifest of partition 0 has" in r.getMessage()]

        async def checkpoint(until: Callable[[], object]) -> None:
            """Checkpoints, each of which has something to write."""
            async with asyncio.timeout(5):
                while not until():
                    position = owned.owner.partition.position
                    owned.owner.ingest(position, position + 1, [])
                    desk.read(0)
                    await asyncio.sleep(0.002)

        await checkpoint(lambda: owned.manifest_bytes > 0)
        assert not said()
        for number in range(4_000):
            owned.owner.purge(f"{number:0200}", 1_000_000)  # further than was read
        with monkeypatch.context() as rebalancing:  # no checkpoint in between
            rebalancing.setattr(ownership, "current_event", lambda: None)
            desk.ownership.drain(owned)
            await checkpoint(lambda: len(owned.owner.partition.purges) == 4_000)
        await checkpoint(lambda: said())
        (line,) = said()
        # it may be made before all of the purges are folded
        assert f"{owned.manifest_bytes} bytes" in line and re.search(r", [1-9]\d{3} queues purged", line)
        assert owned.manifest_bytes < RECORD_MAX_BYTES / 4

        before = len(written)
        await checkpoint(lambda: len(written) > before)
        assert len(said()) == 1

    run(scenario)


def test_a_partition_whose_unread_records_were_deleted_is_unserved_with_its_reason_and_the_others_are_served() -> None:
    async def scenario(desk: Desk) -> None:
        async def edges(topics: Any, number: int, read: LastRead | None) -> Edges:
            return Edges((7, 0) if number == 1 else (0, 0))

        desk.changelogs.edges = edges  # type: ignore[method-assign]
        desk.ownership.on_assigned(1)
        await desk.until(lambda: 1 in desk.ownership.unserved and len(desk.ownership.owned) == PARTITIONS - 1)
        await desk.until(lambda: all(owned.serving for owned in desk.ownership.owned.values()))
        reason = desk.ownership.unserved[1]
        assert "deleted unread" in reason and "python -m app repair --partition 1" in reason
        assert desk.ownership.unserved.keys() == {1}
        assert desk.ownership.ready and not desk.failures
        assert not desk.tables["messages"].wiped, "nothing that is left is deleted"

    run(scenario)
