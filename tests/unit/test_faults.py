"""No error is swallowed: what goes wrong in callbacks, tasks and behind them is repeated, or stops the worker."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaTimeoutError

from app.cluster.peers import Peers
from app.engine import ownership as ownership_module
from app.engine.faults import stop_on_faults
from app.engine.outbox import Outbox, Writer
from app.engine.ownership import OwnedPartition, Ownership
from app.settings import Settings
from app.streaming.faust_app import MarqApp
from app.streaming.producer import IdempotentProducer
from gateway import health
from marq.core.checkpoint_cycle import Retire
from marq.core.markers import Tick
from marq.core.owner import Phase
from marq.errors import BrokerError, InternalError, RowError

Failures = list[BaseException]


def run(scenario: Callable[[Failures], Awaitable[None]]) -> Failures:
    """What the worker stops for."""
    failures: Failures = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # no noise
        stop_on_faults(loop, failures.append)
        await scenario(failures)
        await asyncio.sleep(0.02)

    asyncio.run(main())
    return failures


def resolved() -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(SimpleNamespace(offset=0, timestamp=1))
    return future


def refused(error: Exception) -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


def raises(*_: Any) -> Any:
    raise KeyError("planted")


class Desk:
    """An ownership with one partition, and what its worker stops for."""

    def __init__(self, failures: Failures, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.app = SimpleNamespace(fail=failures.append, consumer=SimpleNamespace(set_commit_position=lambda *_: None))
        topics = SimpleNamespace(queue="q", markers="m", partitions=1)
        self.ownership = Ownership(
            self.app,  # type: ignore[arg-type]
            Settings(kafka="kafka://nowhere:1"),
            lambda: topics,  # type: ignore[arg-type, return-value]
            {},
            SimpleNamespace(settings_of=None),  # type: ignore[arg-type]
        )
        self.owner = SimpleNamespace(
            phase=Phase.SERVING,
            serving=True,
            take_appends=list,
            reason="a marker could not be folded: planted",
            error=None,
            leave=list,
        )
        self.held = OwnedPartition(0, 1, self.owner, self.ownership.outbox(0))  # type: ignore[arg-type]
        self.ownership.held[0] = self.held


def test_an_error_in_a_callback_of_ours_stops_the_worker() -> None:
    async def scenario(failures: Failures) -> None:
        outbox = Outbox(lambda: SimpleNamespace(append=lambda *_: resolved()), "m", 0)  # type: ignore[arg-type, return-value]
        outbox.writer = Writer("nonce", lambda *_: None, raises, lambda *_: None)
        outbox.put([Tick()])

    (failure,) = run(scenario)
    assert isinstance(failure, InternalError)
    assert "planted" in str(failure)


def test_an_error_in_took_keeps_back_nothing_else() -> None:
    sent = []

    async def scenario(failures: Failures) -> None:
        def append(*args: Any) -> Any:
            sent.append(args)
            return resolved()

        outbox = Outbox(lambda: SimpleNamespace(append=append), "m", 0)  # type: ignore[arg-type, return-value]
        outbox.writer = Writer("nonce", lambda *_: None, raises, lambda *_: None)
        outbox.put([Tick()])
        await asyncio.sleep(0)
        outbox.put([Tick()])

    run(scenario)
    assert len(sent) == 2


def test_an_error_in_a_callback_of_a_library_or_of_a_user_stops_nothing() -> None:
    async def scenario(failures: Failures) -> None:
        asyncio.get_running_loop().call_soon(raises)  # this module is none of ours

    assert not run(scenario)


def test_an_error_after_rows_were_written_stops_the_worker() -> None:
    async def scenario(failures: Failures) -> None:
        desk = Desk(failures)
        desk.owner.written = raises
        desk.ownership._when_written(desk.held, [], [])

    (failure,) = run(scenario)
    assert "planted" in str(failure)


def test_a_fold_that_raised_stops_the_worker_and_a_row_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_over = []
    monkeypatch.setattr(Ownership, "_take_over", lambda *args: taken_over.append(args))

    async def scenario(failures: Failures) -> None:
        desk = Desk(failures)
        desk.owner.phase, desk.owner.error = Phase.FAILED, RowError("planted")
        desk.ownership.drain(desk.held)
        assert not failures
        assert len(taken_over) == 1
        desk = Desk(failures)
        desk.owner.phase, desk.owner.error = Phase.FAILED, KeyError("planted")
        desk.ownership.drain(desk.held)
        assert 0 not in desk.ownership.held

    (failure,) = run(scenario)
    assert "could not be folded" in str(failure)
    assert len(taken_over) == 1


@pytest.mark.parametrize(
    ("error", "stops"),
    [(KeyError("x"), True), (InternalError("x"), True), (BrokerError("x"), False), (KafkaTimeoutError(), False)],
)
def test_a_side_task_that_fails_for_no_known_reason_stops_the_worker(error: Exception, stops: bool) -> None:
    async def scenario(failures: Failures) -> None:
        async def side() -> None:
            raise error

        Desk(failures).ownership.spawn(side())

    assert len(run(scenario)) == stops


def test_rows_are_deleted_until_kafka_confirms_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership_module, "WRITE_AGAIN_S", 0.001)
    again = []

    async def scenario(failures: Failures) -> None:
        def write_again(number: int, key: bytes, value: bytes | None) -> asyncio.Future[Any]:
            again.append((key, value))
            return refused(KafkaTimeoutError()) if len(again) == 1 else resolved()

        table = SimpleNamespace(write=lambda *_: refused(KafkaTimeoutError()), write_again=write_again)
        desk = Desk(failures)
        desk.ownership.tables = {"messages": table, "progress": table}  # type: ignore[dict-item]

        async def trim(*_: Any) -> None: ...

        desk.ownership.changelogs = SimpleNamespace(trim=trim)  # type: ignore[assignment]
        desk.ownership._retire(desk.held, Retire(["0/1/messages/1"], [], 0, 0))
        async with asyncio.timeout(10):
            while len(again) < 2:
                await asyncio.sleep(0.001)

    assert not run(scenario)
    assert again == [(b"0/1/messages/1", None)] * 2


def test_a_producer_whose_sender_ended_stops_the_worker() -> None:
    async def scenario(failures: Failures) -> None:
        producer: Any = SimpleNamespace(app=SimpleNamespace(fail=failures.append), should_stop=False)

        async def sender() -> None:
            raise KeyError("planted")

        task = asyncio.ensure_future(sender())
        task.add_done_callback(lambda done: IdempotentProducer._on_sender_end(producer, done))

    (failure,) = run(scenario)
    assert "writes to Kafka" in str(failure)


def test_ready_says_no_as_soon_as_the_worker_stops_for_an_error() -> None:
    pages: dict[str, Any] = {}

    def page(path: str, name: str) -> Any:
        return lambda function: pages.setdefault(path, function)

    async def scenario(failures: Failures) -> None:
        app: Any = SimpleNamespace(
            page=page,
            failure=None,
            keys=(),
            rebalancing=False,
            ownership=SimpleNamespace(ready=True, held={}, unserved={}, worker_name="w"),
        )
        health.define(app)
        view = SimpleNamespace(json=lambda state, status=200: (status, json.dumps(state)))
        assert (await pages["/health/ready"](view, None))[0] == 200
        crashed = []

        async def crash(exc: BaseException) -> None:
            crashed.append(exc)

        app.crash, app.log = crash, SimpleNamespace(error=lambda *_: None)
        MarqApp.fail(app, InternalError("planted"))
        status, body = await pages["/health/ready"](view, None)
        assert status == 503
        assert "planted" in body
        await asyncio.sleep(0)
        assert len(crashed) == 1

    run(scenario)


def test_a_search_at_other_workers_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cluster.peers.RENEW_S", 0.001)

    async def scenario(failures: Failures) -> None:
        hunted: list[str] = []
        receiving = SimpleNamespace(waiting_count=lambda queue: 1)
        peers: Any = SimpleNamespace(
            _polls={},
            _woken={},
            log=SimpleNamespace(error=lambda *_: None),
            app=SimpleNamespace(operations=SimpleNamespace(receives=receiving)),
            should_stop=False,
            poll_peers=hunted.append,
        )
        peers._poll_again = lambda queue: Peers._poll_again(peers, queue)
        task = asyncio.get_running_loop().create_future()
        task.set_exception(KeyError("planted"))
        Peers._end_poll(peers, "q", task)  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        assert hunted == ["q"]

    run(scenario)


@pytest.mark.parametrize(("error", "stops"), [(KeyError("x"), True), (BrokerError("x"), False)])
def test_a_task_of_ours_that_nobody_waits_for_stops_the_worker_by_an_error_of_our_own(
    error: Exception, stops: bool
) -> None:
    async def scenario(failures: Failures) -> None:
        ownership: Any = SimpleNamespace(_outboxes=Raising(error), stop_serving=lambda: None)
        task = asyncio.ensure_future(Ownership.hand_over(ownership, 1.0))
        await asyncio.sleep(0.01)
        del task
        gc.collect()

    assert len(run(scenario)) == stops


class Raising:
    """Raises when it is looked into."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def values(self) -> Any:
        raise self.error
