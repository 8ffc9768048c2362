"""No error is swallowed: after an error in a callback or task, the work is repeated, or the worker stops."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiokafka.errors import KafkaTimeoutError
from mode import Service

from app.cluster.peers import Peers
from app.cluster.seals import HEADER, Seals
from app.engine import checkpoints
from app.engine.outbox import Outbox, Writer
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.service.polling import Fetched, PeerPolling, Wake
from app.settings import Settings
from app.streaming.faults import stop_if_reading_ends, stop_on_faults
from app.streaming.faust_app import MarqApp, create_app
from app.streaming.producer import IdempotentProducer
from app.worker import build
from gateway import health
from gateway.auth import Keys
from marq.core.checkpoint_cycle import Retire
from marq.core.markers import Tick
from marq.core.owner import Phase
from marq.errors import BrokerError, InternalError, RowError
from tests.unit.peer_helpers import Network, alone

Failures = list[BaseException]


def run(scenario: Callable[[Failures], Awaitable[None]]) -> Failures:
    """The errors that stop the worker."""
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
    future.set_result(SimpleNamespace(offset=0, timestamp=1, timestamp_type=1))
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
            alone(),
        )
        self.owner = SimpleNamespace(
            phase=Phase.SERVING,
            serving=True,
            take_appends=list,
            reason="a marker could not be folded: planted",
            error=None,
            leave=list,
        )
        self.owned = OwnedPartition(0, 1, self.owner, self.ownership.outbox(0))  # type: ignore[arg-type]
        self.ownership.owned[0] = self.owned


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
        desk.ownership.checkpoints.when_written(desk.owned, [], [])

    (failure,) = run(scenario)
    assert "planted" in str(failure)


def test_a_fold_that_raised_stops_the_worker_and_a_row_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_over = []
    monkeypatch.setattr(Ownership, "_take_over", lambda *args: taken_over.append(args))

    async def scenario(failures: Failures) -> None:
        desk = Desk(failures)
        desk.owner.phase, desk.owner.error = Phase.FAILED, RowError("planted")
        desk.ownership.drain(desk.owned)
        assert not failures
        assert len(taken_over) == 1
        desk = Desk(failures)
        desk.owner.phase, desk.owner.error = Phase.FAILED, KeyError("planted")
        desk.ownership.drain(desk.owned)
        assert 0 not in desk.ownership.owned

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
    monkeypatch.setattr(checkpoints, "WRITE_AGAIN_S", 0.001)
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
        desk.ownership.checkpoints.retire(desk.owned, Retire(["0/1/messages/1"], [], 0, 0))
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


@pytest.mark.parametrize("ended", ["fetches", "metadata"])
def test_a_consumer_of_which_a_task_ended_stops_the_worker(ended: str) -> None:
    async def scenario(failures: Failures) -> None:
        async def run(name: str) -> None:
            if name == ended:
                raise KeyError("planted")
            await asyncio.Event().wait()

        fetches, metadata = (asyncio.ensure_future(run(name)) for name in ("fetches", "metadata"))
        consumer = SimpleNamespace(
            _fetcher=SimpleNamespace(error_future=fetches), _client=SimpleNamespace(_sync_task=metadata)
        )
        stop_if_reading_ends(consumer, failures.append)
        await asyncio.sleep(0.01)
        for task in (fetches, metadata):
            task.cancel()  # as when the consumer is stopped

    (failure,) = run(scenario)
    assert "planted" in str(failure)


def test_ready_says_no_as_soon_as_the_worker_stops_for_an_error() -> None:
    pages: dict[str, Any] = {}

    def page(path: str, name: str) -> Any:
        return lambda function: pages.setdefault(path, function)

    async def scenario(failures: Failures) -> None:
        app: Any = SimpleNamespace(
            page=page,
            failure=None,
            rebalancing=False,
        )
        ownership: Any = SimpleNamespace(
            ready=True, owned={}, unserved={}, worker_name="w", stalls=SimpleNamespace(now=dict)
        )
        health.define(app, ownership, Keys(None))
        view = SimpleNamespace(json=lambda state, status=200: (status, json.dumps(state)))
        assert (await pages["/health/ready"](view, SimpleNamespace(headers={"Host": "localhost"})))[0] == 200
        crashed = []

        async def crash(exc: BaseException) -> None:
            crashed.append(exc)

        app.crash, app.log = crash, SimpleNamespace(error=lambda *_, **__: None)
        app._reason = lambda exc: exc
        MarqApp.fail(app, InternalError("planted"))
        status, body = await pages["/health/ready"](view, SimpleNamespace(headers={"Host": "localhost"}))
        assert status == 503
        assert "planted" in body
        await asyncio.sleep(0)
        assert len(crashed) == 1

    run(scenario)


def test_a_search_at_other_workers_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.service.polling.RENEW_S", 0.001)

    async def scenario(failures: Failures) -> None:
        network, asked = Network(), asyncio.Event()
        fetches: list[str] = []

        async def fetch(queue: str, url: str) -> Fetched:
            fetches.append(url)
            if len(fetches) == 1:
                raise KeyError("planted")
            asked.set()
            return Fetched(1, 0)

        asking: Any = SimpleNamespace(waiting_count=lambda queue: not asked.is_set(), fetch=fetch)
        owning: Any = SimpleNamespace(has_ready=lambda queue: True)
        polling = PeerPolling(asking, network.join("here"), asyncio.ensure_future)
        PeerPolling(owning, network.join("there"), asyncio.ensure_future).close()
        polling.poll_peers("q")
        await asyncio.wait_for(asked.wait(), 5)
        polling.close()
        assert fetches == ["there", "there"]

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


# ---------------------------------------------------------------------- other workers


KEY = b"k" * 32


class Others:
    """Workers at these addresses, each with a partition; this one owns nothing."""

    url = "http://here:1"
    rebalancing = False

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def partitions(self) -> dict[str, set[int]]:
        return {url: {number} for number, url in enumerate(self.urls)} | {self.url: set()}


def polling_of(urls: list[str]) -> tuple[Peers, PeerPolling]:
    """The polling of a worker that waits for messages, with other workers at these addresses."""
    peers = Peers(Settings(kafka="kafka://nowhere:1"), lambda purpose: (KEY,), Others(urls))
    receivers: Any = SimpleNamespace(waiting_count=lambda queue: 0)
    return peers, PeerPolling(receivers, peers, asyncio.ensure_future)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (200, "text/html", b"<html>a proxy</html>"),
        (200, "application/msgpack", b"\x93\x01"),
        (503, "application/problem+json", b"{"),
        (503, "text/html", b"<html>a proxy</html>"),
    ],
)
def test_what_is_no_answer_of_a_worker_is_none(status: int, kind: str, body: bytes, sealed: bool) -> None:
    seals = Seals([KEY], lambda: time.time_ns() // 1_000_000)

    async def answer(request: web.Request) -> web.Response:
        receiver = str(request.url.origin())
        call, key = seals.open(request.headers[HEADER], "POST", request.raw_path, receiver)
        headers = {HEADER: seals.answer(call, key, status, kind, body)} if sealed else {}
        return web.Response(status=status, content_type=kind, body=body, headers=headers)

    async def scenario(failures: Failures) -> None:
        server = TestServer(web.Application())
        server.app.router.add_post("/v1/peer/watch", answer)
        await server.start_server()
        peers, polling = polling_of([str(server.make_url("/"))])
        await peers.on_start()
        assert await polling.ready_at("q") == []
        assert await polling.ready_at("q", last_look=True) == []
        await peers.on_stop()
        await server.close()

    assert not run(scenario)


@pytest.mark.parametrize("what", ["watch", "tell"])
def test_an_error_of_our_own_in_a_call_is_none_of_the_other_worker(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(*_: Any) -> Any:
        raise KeyError("planted")

    monkeypatch.setattr(Peers, "call", call)

    async def scenario(failures: Failures) -> None:
        peers, polling = polling_of(["http://there:1"])
        with pytest.raises(KeyError, match="planted"):
            await (polling.ready_at("q") if what == "watch" else peers.tell(polling.on_wake, Wake([], peers.url)))

    run(scenario)


# ---------------------------------------------------------------------- the worker, really


def a_worker(tmp_path: Path) -> MarqApp:
    """Not started: what ends a worker needs no Kafka."""
    return create_app(app_id="w", bootstrap="127.0.0.1:1", chunked_topics=[], datadir=str(tmp_path))


def test_a_worker_that_fails_is_ended(tmp_path: Path) -> None:
    async def scenario(failures: Failures) -> None:
        app = a_worker(tmp_path)
        process = Service()  # as Faust's worker, which ends the process when it crashes
        app.beacon.reattach(process.beacon)
        app.fail(InternalError("planted"))
        async with asyncio.timeout(5):
            await process.wait(asyncio.Event())  # type: ignore[arg-type]
        assert "planted" in str(process.crash_reason)

    run(scenario)


def test_a_service_whose_task_ended_is_what_the_worker_fails_for(tmp_path: Path) -> None:
    class Dying(Service):
        @Service.task
        async def _run(self) -> None:
            raise KeyError("planted")

    async def scenario(failures: Failures) -> None:
        app = a_worker(tmp_path)
        await Dying(beacon=app.beacon).start()
        async with asyncio.timeout(5):
            await app.wait(asyncio.Event())  # type: ignore[arg-type]
        assert "planted" in str(app.failure)

    run(scenario)


def test_no_attribute_of_ours_hides_a_method_of_fausts() -> None:
    """One that did kept every failed worker alive: a service calls such methods of itself and of its parents."""

    async def scenario(failures: Failures) -> None:
        app = build(Settings(kafka="kafka://127.0.0.1:1"))
        parts = [app, *vars(app).values(), *app.tables.values(), app.consumer, app.consumer._thread, app.producer]
        parts += [app.tables, app.tables.recovery, app.assignor]  # type: ignore[attr-defined]
        hidden = {
            f"{type(part).__name__}.{name}"
            for part in parts
            for name, value in getattr(part, "__dict__", {}).items()
            for base in type(part).__mro__
            if base.__module__.partition(".")[0] in ("faust", "mode")
            and inspect.isfunction(base.__dict__.get(name))
            and not callable(value)
        }
        assert not hidden

    run(scenario)
