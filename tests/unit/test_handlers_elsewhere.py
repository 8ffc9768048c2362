"""Handlers of one worker get the messages that lie in the partitions of another one, which has no handlers for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from agents import elsewhere, handlers, remote_handlers
from agents.handlers import Handlers
from agents.runner import Runner
from app.service.meters import Meters
from marq import handlers as registry
from marq.core import markers as m
from marq.core.markers import Marker
from marq.core.policies import QueueSettings
from marq.handlers import handler
from tests.unit.core_helpers import Worker
from tests.unit.peer_helpers import Network


class Log:
    """The markers of all partitions, which any worker writes to; owners fold them at once."""

    def __init__(self) -> None:
        self.owners: dict[int, tuple[Node, Any]] = {}
        self.written: list[tuple[str, int, Marker]] = []


class Outbox:
    def __init__(self, log: Log, writer: str, number: int) -> None:
        self.log, self.writer, self.number = log, writer, number

    def put(self, markers: list[Marker]) -> None:
        if markers:
            self.log.written += [(self.writer, self.number, marker) for marker in markers]
            node, owned = self.log.owners[self.number]
            owned.worker.broker.append(m.encode(markers))
            asyncio.get_running_loop().call_soon(node.fold, owned)

    def put_confirmed(self, markers: list[Marker]) -> asyncio.Future[int]:
        self.put(markers)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(0)
        return future


class Node:
    """One worker: its partitions, handlers, and calls to the others."""

    def __init__(self, name: str, cluster: Cluster, numbers: list[int]) -> None:
        self.url, self.cluster = name, cluster
        self.owned = {number: self._hold(number) for number in numbers}
        catalog = SimpleNamespace(settings_of=cluster.settings_of, max_receives_of=None)
        self.ownership = SimpleNamespace(
            owned=self.owned,
            hurry=lambda: None,
            receivers=[],
            catalog=catalog,
            topics=SimpleNamespace(queue="t"),
            outbox=lambda number: Outbox(cluster.log, name, number),
            spawn=asyncio.ensure_future,
            throttle=SimpleNamespace(room=lambda owned, wanted, lease_ms: wanted),
        )
        settings = SimpleNamespace(queue_id=None, backoff_ms=0, backoff_max_ms=0)
        self.peers = cluster.network.join(name, lambda: set(self.owned))
        self.handlers = Handlers(self.ownership, settings, Meters(), self.peers)  # type: ignore[arg-type]
        self.elsewhere = self.handlers.elsewhere

    def _hold(self, number: int) -> Any:
        worker = Worker(settings=self.cluster.settings).serve()
        owned = SimpleNamespace(
            number=number,
            serving=True,
            owner=worker.owner,
            worker=worker,
            outbox=Outbox(self.cluster.log, self.url, number),
        )
        self.cluster.log.owners[number] = (self, owned)
        return owned

    def fold(self, owned: Any) -> None:
        """Fold the appended markers, as the ownership does."""
        owned.worker.read_markers()
        while (effects := owned.owner.take_effects()) is not None:
            owned.outbox.put(effects.appends)
            for handout in effects.handouts:
                handout.receiver.handed(owned, handout)
        if owned.owner.take_woken():
            self.handlers.wake(owned)
            owned.outbox.put(owned.owner.take_appends())

    def send(self, number: int, count: int = 1, queue: str = "q") -> None:
        owned = self.owned[number]
        owned.worker.send(count, queue=queue)
        self.fold(owned)

    def stop(self) -> None:
        """It takes no more messages."""
        self.handlers.closing = True
        self.elsewhere.close()


class Cluster:
    def __init__(self) -> None:
        self.log = Log()
        self.nodes: dict[str, Node] = {}
        self.settings: dict[str, QueueSettings] = {}
        self.network = Network()
        self._renewing: list[asyncio.Task[None]] = []

    def settings_of(self, queue: str) -> QueueSettings:
        return self.settings.get(queue, QueueSettings())

    def add(self, name: str, numbers: list[int]) -> Node:
        """A worker with the handlers that are registered now."""
        node = self.nodes[name] = Node(name, self, numbers)
        self._renewing.append(asyncio.ensure_future(node.elsewhere.renew()))
        return node

    def stop(self) -> None:
        for task in self._renewing:
            task.cancel()


@pytest.fixture(autouse=True)
def _no_handlers() -> Iterator[None]:
    registry.clear()
    yield
    registry.clear()


def run(scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = Cluster()
        try:
            await scenario(cluster)
        finally:
            cluster.stop()

    asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def handled_by(queue: str = "q", **options: Any) -> list[Any]:
    """Register a handler that notes its messages."""
    seen: list[Any] = []

    @handler(queue, **options)
    async def note(messages: Any) -> None:
        seen.extend(messages if isinstance(messages, list) else [messages])

    return seen


def left(node: Node) -> int:
    return sum(len(owned.owner.partition.messages) for owned in node.owned.values())


def test_messages_in_partitions_of_a_worker_without_handlers_are_handled() -> None:
    async def scenario(cluster: Cluster) -> None:
        stores = cluster.add("b", [1])
        seen = handled_by()
        cluster.add("a", [0])
        stores.send(1, 20)
        await until(lambda: not left(stores))
        assert sorted((s.partition, s.offset, s.queue, s.attempt) for s in seen) == [(1, i, "q", 1) for i in range(20)]
        assert seen[0].payload == b"x"

    run(scenario)


def test_what_becomes_ready_later_is_told_and_nothing_is_asked_for_meanwhile() -> None:
    async def scenario(cluster: Cluster) -> None:
        stores = cluster.add("b", [1])
        seen = handled_by()
        idle = cluster.add("a", [])
        await until(lambda: idle.peers.called == ["handlers"])
        await asyncio.sleep(0.05)
        assert idle.peers.called == ["handlers"]
        stores.send(1)
        await until(lambda: seen)
        await until(lambda: not left(stores))
        assert stores.peers.called == ["ready"]

    run(scenario)


def test_services_with_different_handlers_share_one_cluster() -> None:
    async def scenario(cluster: Cluster) -> None:
        orders = handled_by("orders")
        first = cluster.add("a", [0])
        registry.clear()
        clicks = handled_by("clicks", batch=10)
        second = cluster.add("b", [1])
        for node, number in ((first, 0), (second, 1)):
            node.send(number, 10, "orders")
            node.send(number, 10, "clicks")
        await until(lambda: not left(first) and not left(second))
        assert {s.queue for s in orders} == {"orders"} and len(orders) == 20
        assert {s.queue for s in clicks} == {"clicks"} and len(clicks) == 20

    run(scenario)


def test_a_worker_that_always_has_work_of_its_own_takes_its_turn_elsewhere() -> None:
    async def scenario(cluster: Cluster) -> None:
        stores = cluster.add("b", [1])
        seen = handled_by()
        busy = cluster.add("a", [0])
        stores.send(1, 50)
        while not any(s.partition == 1 for s in seen):
            busy.send(0, 20)
            await asyncio.sleep(0.001)
            assert len(seen) < 5_000

    run(scenario)


def test_the_first_handler_that_matches_gets_the_message_elsewhere_too() -> None:
    async def scenario(cluster: Cluster) -> None:
        stores = cluster.add("b", [1])
        special, rest = handled_by("orders"), handled_by("*")
        cluster.add("a", [0])
        stores.send(1, 3, "orders")
        stores.send(1, 3, "other")
        await until(lambda: not left(stores))
        assert ({s.queue for s in special}, {s.queue for s in rest}) == ({"orders"}, {"other"})

    run(scenario)


def test_an_owner_without_the_handler_knows_its_maximum_of_receives() -> None:
    async def scenario(cluster: Cluster) -> None:
        stores = cluster.add("b", [1])
        handled_by("orders", max_receives=7)
        cluster.add("a", [0])
        await until(lambda: stores.elsewhere.remote_handlers.remotes)
        assert stores.ownership.catalog.max_receives_of("orders") == 7
        assert stores.ownership.catalog.max_receives_of("other") == 0

    run(scenario)


def test_what_was_started_for_a_worker_that_went_away_goes_back_uncounted() -> None:
    async def scenario(cluster: Cluster) -> None:
        stores = cluster.add("b", [1])
        seen = handled_by()
        cluster.network.gone = True
        cluster.add("a", [0])
        stores.send(1)

        def releases() -> list[m.Release]:
            return [marker for _, _, marker in cluster.log.written if isinstance(marker, m.Release)]

        await until(releases)
        assert not seen
        assert not any(release.counted for release in releases())  # it is started for that worker again and again

    run(scenario)


def test_a_handler_that_stops_gives_back_what_comes_from_elsewhere() -> None:
    async def scenario(cluster: Cluster) -> None:
        stores = cluster.add("b", [1])
        seen = handled_by()
        stopping = cluster.add("a", [0])
        await until(lambda: stores.elsewhere.remote_handlers.remotes)
        stores.send(1)
        stopping.stop()
        await asyncio.sleep(0.1)
        assert not seen
        assert stores.owned[1].owner.partition.receives(0) == 0

    run(scenario)


@pytest.mark.parametrize("batch", [0, 10])
@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("end", [BaseException, StopIteration, SystemExit, GeneratorExit])
def test_what_is_handled_elsewhere_and_fails_in_any_way_comes_again_and_is_counted(
    end: type[BaseException], in_thread: bool, batch: int
) -> None:
    async def scenario(cluster: Cluster) -> None:
        stores = cluster.add("b", [1])
        attempts: list[int] = []

        def work(messages: Any) -> None:
            attempts.extend(message.attempt for message in (messages if batch else [messages]))
            if len(attempts) < 3:
                raise end

        async def work_in_loop(messages: Any) -> None:
            work(messages)

        handler("q", batch=batch)(work if in_thread else work_in_loop)
        node = cluster.add("a", [0])
        stores.send(1)
        await until(lambda: not left(stores))
        assert attempts == [1, 2, 3]
        assert node.handlers.runners[0].meter.failures == 2

    run(scenario)


def test_a_limit_that_holds_messages_up_is_no_reason_to_ask_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.settings["q"] = QueueSettings(max_in_flight=1)
        stores = cluster.add("b", [1])
        done = asyncio.Event()

        @handler("q", concurrency=10)
        async def wait(message: Any) -> None:
            await done.wait()

        asks = cluster.add("a", [0])
        stores.send(1, 5)
        await until(lambda: "take" in asks.peers.called)
        await asyncio.sleep(0.3)
        assert asks.peers.called.count("take") < 12
        done.set()
        await until(lambda: not left(stores))

    run(scenario)


def test_handlers_that_are_not_heard_of_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_handlers, "FORGET_S", 0.02)
    monkeypatch.setattr(elsewhere, "RENEW_S", 0.05)

    async def scenario(cluster: Cluster) -> None:
        stores = cluster.add("b", [1])
        handled_by()
        gone = cluster.add("a", [0])
        await until(lambda: stores.elsewhere.remote_handlers.is_handled("q"))
        gone.stop()
        await until(lambda: not stores.elsewhere.remote_handlers.remotes)

    run(scenario)


def test_a_worker_that_does_not_answer_takes_the_place_of_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "SLOW_S", 0.02)

    async def scenario(cluster: Cluster) -> None:
        silent, stores = cluster.add("b", [1]), cluster.add("c", [2])
        seen = handled_by(concurrency=1)
        asked = asyncio.Event()

        answer = silent.peers.answer

        async def answer_all_but_takes(name: str, *call: Any) -> bytes:
            if name == "take":
                asked.set()
                await asyncio.Event().wait()
            return await answer(name, *call)

        silent.peers.answer = answer_all_but_takes  # type: ignore[assignment, method-assign]
        cluster.add("a", [0])
        silent.send(1)
        await asked.wait()
        stores.send(2)
        await until(lambda: seen)
        assert seen[0].partition == 2

    run(scenario)


def test_leases_are_looked_after_only_while_calls_wait_or_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "EXTEND_S", 0.001)
    looked, goes_on = [0], asyncio.Event()
    extend = Runner.extend

    def counted(runner: Runner) -> None:
        looked[0] += 1
        extend(runner)

    monkeypatch.setattr(Runner, "extend", counted)

    async def scenario(cluster: Cluster) -> None:
        @handler("q")
        async def work(message: Any) -> None:
            await goes_on.wait()

        node = cluster.add("a", [0])
        looking = asyncio.ensure_future(Handlers._extend.fun(node.handlers))
        await asyncio.sleep(0.05)
        assert not looked[0]
        for _ in range(2):
            goes_on.clear()
            node.send(0)
            before = looked[0]
            await until(lambda before=before: looked[0] > before + 2)
            goes_on.set()
            await until(lambda: not left(node))
            await asyncio.sleep(0.01)
            before = looked[0]
            await asyncio.sleep(0.05)
            assert looked[0] == before
        looking.cancel()

    run(scenario)
