"""The answers to receipts of deliveries that are over, for any owner of the partition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.cluster.peers import Peers
from app.engine.queue_records import id_of_queue
from app.service.meters import Meters
from app.service.operations import QueueService
from marq.core.markers import Marker
from marq.errors import LeaseOverError, MarqError, UnavailableError
from tests.unit.core_helpers import LEASE_MS, Worker
from tests.unit.peer_helpers import Network

NUMBER = 0


class Outbox:
    """Appends to the log of a worker, which folds it at once, or when it reads it."""

    def __init__(self, worker: Worker, reads: bool) -> None:
        self.worker = worker
        self.reads = reads

    def put_confirmed(self, markers: list[Marker]) -> asyncio.Future[int]:
        from marq.core import markers as m

        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(self.worker.broker.append(m.encode(markers)))
        if self.reads:
            asyncio.get_running_loop().call_later(0.01, self.worker.read_markers)
        return future


class Desk:
    """The service, and a partition of its own worker or of another one."""

    def __init__(self, *, own: bool = True, reads: bool = True) -> None:
        self.worker = Worker().serve()
        partition = SimpleNamespace(number=NUMBER, serving=True, owner=self.worker.owner)
        catalog = SimpleNamespace(secret=b"secret", with_backoff={})
        network = Network()
        owned: dict[int, Any] = {NUMBER: partition}
        if not own:
            self._operations(network.join("there", lambda: {NUMBER}), catalog, owned, reads)
            owned = {}
        self.operations = self._operations(network.join("here", lambda: set(owned)), catalog, owned, reads)

    def _operations(self, peers: Peers, catalog: Any, owned: dict[int, Any], reads: bool) -> QueueService:
        ownership = SimpleNamespace(
            catalog=catalog,
            owned=owned,
            receivers=[],
            hurry=lambda: None,
            topics=SimpleNamespace(partitions=1, markers="m"),
            app=SimpleNamespace(producer=SimpleNamespace(waited_s=lambda topic, partition: 0.0)),
            outbox=lambda number: Outbox(self.worker, reads),
        )
        return QueueService(ownership, SimpleNamespace(queue_id=None), Meters(), peers)  # type: ignore[arg-type]

    def receive(self) -> str:
        (handout,) = self.worker.receive(1)
        epoch, delivery = handout.receipt
        return self.operations.receipts.make(NUMBER, epoch, delivery, handout.offsets[0], 1, id_of_queue("q"))

    def received_twice(self) -> tuple[str, str]:
        """Receipts of a delivery whose lease ended, and of the next one."""
        self.worker.send()
        first = self.receive()
        self.worker.wait(LEASE_MS + 100)
        return first, self.receive()


def run(scenario: Callable[[Desk], Awaitable[None]], **options: bool) -> None:
    async def main() -> None:
        await scenario(Desk(**options))

    asyncio.run(main())


def kinds(results: list[MarqError | None]) -> list[type]:
    return [type(result) for result in results]


@pytest.mark.parametrize("own", [True, False], ids=["own partition", "partition of another worker"])
@pytest.mark.parametrize("action", ["extend", "release"])
def test_a_receipt_of_an_older_delivery_is_lease_over_and_changes_nothing(action: str, own: bool) -> None:
    async def scenario(desk: Desk) -> None:
        old, new = desk.received_twice()
        act = getattr(desk.operations, action)

        results = await act([old, new], *([60_000] if action == "extend" else []))

        assert kinds(results) == [LeaseOverError, type(None)]

    run(scenario, own=own)


@pytest.mark.parametrize("own", [True, False], ids=["own partition", "partition of another worker"])
@pytest.mark.parametrize("action", ["extend", "release"])
def test_a_receipt_of_a_finished_message_is_lease_over(action: str, own: bool) -> None:
    async def scenario(desk: Desk) -> None:
        desk.worker.send()
        receipt = desk.receive()
        assert await desk.operations.ack([receipt]) == [None]

        results = await getattr(desk.operations, action)([receipt], *([60_000] if action == "extend" else []))

        assert kinds(results) == [LeaseOverError]

    run(scenario, own=own)


def test_a_release_that_took_effect_is_no_error_though_the_message_is_with_another_receiver_since() -> None:
    async def scenario(desk: Desk) -> None:
        desk.worker.send()
        receipt = desk.receive()
        released = asyncio.ensure_future(desk.operations.release([receipt]))
        await asyncio.sleep(0)
        desk.worker.read_markers()
        desk.receive()

        assert await released == [None]
        assert kinds(await desk.operations.release([receipt])) == [LeaseOverError]

    run(scenario)


def test_a_lease_that_is_over_while_nobody_else_has_the_message_can_be_extended() -> None:
    async def scenario(desk: Desk) -> None:
        desk.worker.send()
        receipt = desk.receive()
        desk.worker.wait(LEASE_MS + 100)

        assert await desk.operations.extend([receipt], 60_000) == [None]

    run(scenario)


def test_where_nobody_can_tell_whether_it_came_in_time_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.service.leases.EFFECT_TIMEOUT_S", 0.02)

    async def scenario(desk: Desk) -> None:
        desk.worker.send()
        assert kinds(await desk.operations.extend([desk.receive()], 60_000)) == [UnavailableError]

    run(scenario, reads=False)


# ---------------------------------------------------------------------- what the owner knows


def test_of_a_record_that_was_folded_before_a_take_over_the_state_tells() -> None:
    worker = Worker().serve()
    offsets = worker.send(2)
    (handout,) = worker.receive(2)
    worker.owner.extend(offsets, handout.receipt, LEASE_MS)
    worker.flush()
    record = len(worker.broker.log) - 1
    worker.owner.acked(offsets[:1], handout.receipt)
    worker.flush()
    worker.checkpoint()

    next_one = Worker(worker.broker, name="w2", table=worker.table, queue_log=worker.queue_log).serve()

    assert [next_one.owner.took_effect(record, *handout.receipt, offset) for offset in offsets] == [False, True]  # type: ignore[call-arg]


def test_what_had_no_effect_is_remembered_for_so_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marq.core.ignored.IGNORED_MAX", 3)
    worker = Worker().serve()
    offsets = worker.send(8)
    (handout,) = worker.receive(8)
    worker.owner.release(offsets, handout.receipt)
    worker.flush()
    for offset in offsets:
        worker.owner.extend([offset], handout.receipt, LEASE_MS)
        worker.flush()

    assert len(worker.owner._ignored._records) == 3
    assert not worker.owner.took_effect(len(worker.broker.log) - 1, *handout.receipt, offsets[-1])  # type: ignore[call-arg]
