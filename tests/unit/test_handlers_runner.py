"""How the worker calls a handler: which messages it takes, extends, and gives back without a call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents import runner
from agents.handlers import import_modules
from agents.runner import Ask, Runner
from app.service.meters import Meters
from marq.clock import now_ms
from marq.core.agenda import Handout
from marq.core.markers import End, Keepalive, Marker, Release
from marq.core.policies import Limits, QueueSettings
from marq.core.ranges import offsets_in
from marq.errors import HandlerError
from marq.handlers import Handler
from tests.unit.core_helpers import Worker

LEASE_MS = 60_000
RECEIPT = (5, 1)


class Outbox:
    """Takes markers as the real one does; confirms when the test says so."""

    def __init__(self) -> None:
        self.markers: list[Marker] = []
        self.unconfirmed: list[asyncio.Future[int]] = []

    def put(self, markers: list[Marker]) -> None:
        self.markers += markers

    def put_confirmed(self, markers: list[Marker]) -> asyncio.Future[int]:
        self.markers += markers
        self.unconfirmed.append(asyncio.get_running_loop().create_future())
        return self.unconfirmed[-1]

    def of(self, kind: type) -> list[Any]:
        return [marker for marker in self.markers if type(marker) is kind]


class Desk:
    """A runner with the parts around it."""

    def __init__(self, function: Callable[..., Any], *queues: str, **options: Any) -> None:
        self.outbox = Outbox()
        self.queue = QueueSettings()
        #: What the partition has in flight, by offset, and what others have ended of it.
        self.partition = SimpleNamespace(deliveries={}, ended_by_others=0)
        self.owned = SimpleNamespace(number=0, owner=SimpleNamespace(epoch=RECEIPT[0], partition=self.partition))
        self.service = SimpleNamespace(
            closing=False,
            elsewhere=None,
            meters=Meters(),
            log=logging.getLogger("desk"),
            settings=SimpleNamespace(backoff_ms=100, backoff_max_ms=1000, stop_ms=10),
            ownership=SimpleNamespace(
                owned={},
                hurry=lambda: None,
                outbox=lambda number: self.outbox,
                throttle=SimpleNamespace(room=lambda owned, wanted, lease_ms: wanted),
                catalog=SimpleNamespace(settings_of=lambda queue: self.queue),
            ),
            messages=lambda owned, offsets, settle: [
                SimpleNamespace(offset=offset, attempt=1, settle=settle, queue="q", sent_ms=0) for offset in offsets
            ],
        )
        self.runner = Runner(Handler(function, queues or ("q",), **options), self.service)

    def hand(self, *offsets: int, until_ms: int | None = None) -> None:
        """Hand out a delivery that was asked for."""
        ask = Ask(self.runner, len(offsets) or 1, LEASE_MS)
        self.runner.asked[0] = self.runner.asked.get(0, 0) + ask.calls
        until_ms = now_ms() + LEASE_MS if until_ms is None else until_ms
        self.partition.deliveries.update(dict.fromkeys(offsets))
        self.runner.handed(ask, self.owned, Handout(self.runner, RECEIPT, list(offsets), until_ms))  # type: ignore[arg-type]

    def ended_by_others(self, *offsets: int) -> None:
        """Others end these messages."""
        for offset in offsets:
            del self.partition.deliveries[offset]
        self.partition.ended_by_others += 1


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_what_a_call_returned_from_is_acknowledged() -> None:
    called: list[int] = []

    async def scenario() -> None:
        async def work(message: Any) -> None:
            called.append(message.offset)

        desk = Desk(work, concurrency=2)
        desk.hand(3, 4)
        await asyncio.sleep(0.01)
        assert sorted(called) == [3, 4]
        assert desk.outbox.markers == [End(5, [3, 5], "acked", 1)]
        assert not desk.runner.asked
        assert not desk.runner.settlement.live

    run(scenario)


@pytest.mark.parametrize("served", [True, False])
def test_what_others_have_ended_while_it_waited_is_not_called(served: bool) -> None:
    """An earlier receiver may have acknowledged it late. Who does not own the partition any more can't know."""
    called: list[int] = []

    async def scenario() -> None:
        release = asyncio.Event()

        async def work(messages: list[Any]) -> None:
            called.extend(message.offset for message in messages)
            await release.wait()

        desk = Desk(work, concurrency=1, batch=2)
        if served:
            desk.service.ownership.owned[0] = desk.owned
        desk.hand(1, 2, 3, 4, 5, 6)
        await asyncio.sleep(0.01)
        assert called == [1, 2]
        desk.ended_by_others(1, 3, 4, 6)
        release.set()
        await asyncio.sleep(0.01)
        assert called == ([1, 2, 5] if served else [1, 2, 3, 4, 5, 6])
        assert not desk.runner.settlement.live
        acked = [offset for end in desk.outbox.of(End) for offset in end.offsets]
        assert acked == ([1, 3, 5, 6] if served else [1, 3, 3, 7])

    run(scenario)


def test_a_delivery_that_begins_while_the_worker_stops_is_given_back_uncounted() -> None:
    async def scenario() -> None:
        async def work(message: Any) -> None:
            raise AssertionError("called")

        desk = Desk(work)
        desk.service.closing = True
        desk.hand(3, 4)
        await asyncio.sleep(0.01)
        assert desk.outbox.markers == [Release(5, 1, [3, 5], 0, counted=False)]
        assert not desk.runner.settlement.live

    run(scenario)


def test_closing_gives_back_what_waits_and_lets_the_call_at_work_finish() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def work(message: Any) -> None:
            await release.wait()

        desk = Desk(work, concurrency=1)
        desk.service.settings.stop_ms = 60_000
        desk.hand(3, 4, 5)
        await asyncio.sleep(0.01)
        desk.service.closing = True
        closing = asyncio.ensure_future(desk.runner.close())
        await asyncio.sleep(0.01)
        assert desk.outbox.markers == [Release(5, 1, [4, 6], 0, counted=False)]
        release.set()
        await closing
        assert desk.outbox.of(End) == [End(5, [3, 4], "acked", 1)]

    run(scenario)


def test_a_call_in_a_thread_that_does_not_end_is_released_with_a_delay() -> None:
    end = threading.Event()

    async def scenario() -> None:
        def work(message: Any) -> None:
            end.wait(10)

        desk = Desk(work)
        desk.hand(3)
        await asyncio.sleep(0.01)
        await desk.runner.close()
        assert desk.outbox.markers == [Release(5, 1, [3, 4], runner.THREAD_END_MS)]
        end.set()

    run(scenario)


def test_no_call_begins_after_the_lease_is_over() -> None:
    """As in a process that stood still: others may have the message by now."""

    async def scenario() -> None:
        async def work(message: Any) -> None:
            raise AssertionError("called")

        desk = Desk(work)
        desk.hand(3, until_ms=now_ms() - 1)
        await asyncio.sleep(0.01)
        assert desk.outbox.markers == [Release(5, 1, [3, 4], 0, counted=False)]

    run(scenario)


@pytest.mark.parametrize("confirmed", [True, False])
def test_only_an_extension_that_kafka_has_confirmed_makes_a_lease_longer(confirmed: bool) -> None:
    async def scenario() -> None:
        called: list[int] = []
        first = asyncio.Event()

        async def work(message: Any) -> None:
            called.append(message.offset)
            await first.wait()

        desk = Desk(work, concurrency=1)
        desk.hand(3, 4, until_ms=now_ms() + 50)
        await asyncio.sleep(0.01)
        (delivery,) = desk.runner.settlement.live
        delivery.extend_at_ms = now_ms()
        desk.runner.extend()
        assert desk.outbox.of(Keepalive) == [Keepalive(5, 1, [3, 5], LEASE_MS)]
        if confirmed:
            desk.outbox.unconfirmed[0].set_result(7)
        else:
            desk.outbox.unconfirmed[0].set_exception(RuntimeError("Kafka is away"))
        await asyncio.sleep(0.06)
        first.set()
        await asyncio.sleep(0.01)
        assert called == ([3, 4] if confirmed else [3])

    run(scenario)


def test_a_redelivery_of_a_fifo_message_without_a_group_is_asked_for() -> None:
    fifo = QueueSettings(fifo=True)
    worker = Worker(settings={"q": fifo}).serve()
    worker.send()
    (handout,) = worker.receive()
    worker.owner.release(handout.offsets, handout.receipt)
    worker.flush()

    async def scenario() -> None:
        async def work(message: Any) -> None: ...

        desk = Desk(work)
        desk.queue = fifo
        desk.service.route = lambda queue: desk.runner
        owned = SimpleNamespace(number=0, serving=True, owner=worker.owner)
        desk.service.ownership.owned = {0: owned}
        desk.runner.woken(owned)  # type: ignore[arg-type]
        assert desk.runner.asked == {0: 1}

    run(scenario)


def test_a_parked_message_is_asked_for_also_where_a_later_one_waits_in_memory() -> None:
    worker = Worker(limits=Limits(window_offsets=1, persist_after_ms=1)).serve()
    worker.send()
    for _ in range(3):
        worker.checkpoint()
    partition = worker.owner.partition
    partition.shed(1 << 30)
    assert 0 in {offset for segment in partition.segments.of("q") for offset in segment.parked_of("q")}
    worker.send(headers=[("marq-delay-ms", b"60000")])  # it is known, and not ready

    async def scenario() -> None:
        async def work(message: Any) -> None: ...

        desk = Desk(work)
        desk.service.route = lambda queue: desk.runner
        owned: Any = SimpleNamespace(number=0, serving=True, owner=worker.owner)
        desk.service.ownership.owned = {0: owned}
        desk.runner.woken(owned)
        assert desk.runner.asked == {0: 1}

    run(scenario)


def test_a_handler_of_names_goes_through_no_other_queue() -> None:
    class Many(dict[str, Any]):
        """Queues of others: to ask for one is cheap, to go through them is not."""

        def __iter__(self) -> Any:
            raise AssertionError("all queues were gone through")

        items = keys = values = __iter__

    worker = Worker().serve()
    partition = worker.owner.partition

    async def scenario() -> None:
        async def work(message: Any) -> None: ...

        desk = Desk(work, "one", "two")
        desk.service.route = lambda queue: desk.runner
        owned: Any = SimpleNamespace(number=0, serving=True, owner=worker.owner)
        partition.backlogs = Many()
        partition.segments.queues = Many()
        assert not desk.runner.has_ready(owned)
        assert list(desk.runner._queues_of(owned)) == []
        partition.segments.queues = Many(two={})
        assert desk.runner.has_ready(owned)
        assert list(desk.runner._queues_of(owned)) == ["two"]

    run(scenario)


@pytest.mark.parametrize(("mean_ms", "ahead"), [(0.1, 24), (30.0, 24), (50.0, 16), (99.0, 8), (100.0, 0), (5_000.0, 0)])
def test_a_handler_takes_ahead_what_it_works_off_in_less_than_a_second(mean_ms: float, ahead: int) -> None:
    async def scenario() -> None:
        async def work(messages: list[Any]) -> None: ...

        desk = Desk(work, batch=500)
        desk.runner._mean_ms = mean_ms
        assert desk.runner.room == 1 + ahead

    run(scenario)


def test_room_comes_back_when_nothing_came_of_what_was_asked_for() -> None:
    async def scenario() -> None:
        async def work(message: Any) -> None: ...

        desk = Desk(work, concurrency=4)
        room = desk.runner.room
        desk.hand()
        assert desk.runner.room == room
        desk.runner.asked[2] = 3
        assert desk.runner.room == room - 3
        desk.runner.forget(2)
        assert desk.runner.room == room

    run(scenario)


def test_many_failures_in_a_moment_are_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async def work(message: Any) -> None:
            raise RuntimeError("as it should")

        desk = Desk(work, concurrency=1)
        desk.hand(*range(20))
        await asyncio.sleep(0.02)
        assert len(caplog.records) == 1
        monkeypatch.setattr(runner, "LOG_EVERY_MS", 0)
        desk.hand(21)
        await asyncio.sleep(0.01)
        assert "after 19 more failures" in caplog.records[-1].getMessage()
        assert sum(len(r.offsets) // 2 for r in desk.outbox.of(Release)) == 21

    run(scenario)


# ---------------------------------------------------------------------- the ways a call ends


class Panic(BaseException):
    """As Rust extensions and gevent raise: no `Exception`."""


ENDS: list[BaseException] = [
    ValueError("boom"),
    Panic("boom"),
    StopIteration("boom"),
    StopAsyncIteration("boom"),
    GeneratorExit("boom"),
    KeyboardInterrupt("boom"),
    SystemExit(2),
    SystemExit("boom"),
    asyncio.CancelledError("boom"),
    concurrent.futures.CancelledError("boom"),
    concurrent.futures.TimeoutError("boom"),
    ExceptionGroup("boom", [ValueError()]),
    BaseExceptionGroup("boom", [Panic()]),
]


def ends() -> Any:
    return pytest.mark.parametrize("end", ENDS, ids=lambda end: f"{type(end).__name__}({end})")


def raising(end: BaseException, in_thread: bool) -> Callable[..., Any]:
    def work(argument: Any) -> None:
        raise end

    async def work_in_loop(argument: Any) -> None:
        raise end

    return work if in_thread else work_in_loop


async def released(desk: Desk, count: int = 1) -> list[Release]:
    """The first releases, as soon as they are written."""
    async with asyncio.timeout(10):
        while len(found := desk.outbox.of(Release)) < count:
            await asyncio.sleep(0.001)
    return found


@pytest.mark.parametrize("in_thread", [True, False], ids=["thread", "loop"])
@pytest.mark.parametrize("options", [{}, {"batch": 2}, {"manual": True}], ids=["single", "batch", "manual"])
@ends()
def test_whatever_a_call_raises_is_a_failed_attempt(
    end: BaseException, in_thread: bool, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        desk = Desk(raising(end, in_thread), **options)
        desk.hand(3)
        (release,) = await released(desk)
        assert (release.offsets, release.counted) == ([3, 4], True)
        assert 50 <= release.delay_ms <= 100, "it backs off"
        assert desk.runner.meter.failures == desk.runner.meter.calls == desk.runner.breaker.failures == 1
        assert not desk.runner.settlement.live, "no lease is extended any more"
        assert desk.runner.running == 0, "the place of the call is free again"
        (record,) = caplog.records
        assert record.exc_info is not None
        assert "raise end" in "".join(traceback.format_exception(record.exc_info[1]))

    run(scenario)


@pytest.mark.parametrize("in_thread", [True, False], ids=["thread", "loop"])
@ends()
def test_a_probe_that_fails_in_any_way_opens_the_breaker_again(end: BaseException, in_thread: bool) -> None:
    async def scenario() -> None:
        desk = Desk(raising(end, in_thread), breaker_failures=1, breaker_pause_ms=60_000)
        desk.hand(1)
        await released(desk)
        desk.runner.breaker.open_until_ms = now_ms()  # the pause is over
        assert desk.runner.room == 1
        desk.hand(2)
        await released(desk, 2)
        assert desk.runner.room == 0

    run(scenario)


def test_a_call_that_awaits_a_cancelled_task_of_its_own_backs_off() -> None:
    async def scenario() -> None:
        async def work(message: Any) -> None:
            task = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(task.cancel)
            await task

        desk = Desk(work)
        desk.hand(3)
        (release,) = await released(desk)
        assert release.delay_ms >= 50
        assert desk.runner.meter.failures == 1

    run(scenario)


@pytest.mark.parametrize("waits", [True, False])
def test_a_call_that_cancels_the_task_it_runs_in_ends_no_other_call(waits: bool) -> None:
    called: list[int] = []

    async def scenario() -> None:
        async def work(message: Any) -> None:
            called.append(message.offset)
            if message.offset == 3:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                if not waits:
                    return
            await asyncio.sleep(0)

        desk = Desk(work, concurrency=1)
        desk.hand(3, 4, 5)
        async with asyncio.timeout(10):
            while desk.runner.settlement.live:
                await asyncio.sleep(0.001)
        assert called == [3, 4, 5]
        await asyncio.sleep(0)
        acked = [offset for end in desk.outbox.of(End) for offset in offsets_in(end.offsets)]
        assert acked == ([4, 5] if waits else [3, 4, 5])
        assert [release.offsets for release in desk.outbox.of(Release)] == ([[3, 4]] if waits else [])

    run(scenario)


def test_a_call_that_the_worker_cancels_at_its_end_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async def work(message: Any) -> None:
            await asyncio.sleep(60)

        desk = Desk(work)
        desk.hand(3)
        await asyncio.sleep(0.01)
        desk.service.closing = True
        await desk.runner.close()
        assert desk.outbox.markers == [Release(5, 1, [3, 4], 0)]
        assert desk.runner.meter.failures == 0

    run(scenario)
    assert not caplog.records


def test_a_call_that_is_dropped_with_its_loop_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As when the process ends: Python closes the coroutines that are left."""
    loop = asyncio.new_event_loop()

    async def work(message: Any) -> None:
        await asyncio.sleep(60)

    async def scenario() -> Desk:
        desk = Desk(work)
        desk.hand(3)
        await asyncio.sleep(0.01)
        return desk

    desk = loop.run_until_complete(scenario())
    (task,) = desk.runner.tasks
    task.get_coro().close()  # type: ignore[union-attr]
    loop.close()
    assert desk.runner.meter.failures == 0
    assert not [record for record in caplog.records if record.name == "desk"]


def _generates(message: Any) -> Iterator[int]:
    yield 1


async def _generates_async(message: Any) -> AsyncIterator[int]:
    yield 1


async def _works(message: Any) -> None:
    raise AssertionError("called")


@pytest.mark.parametrize("function", [_generates, _generates_async, lambda message: _works(message)])
def test_a_call_whose_body_did_not_run_is_not_acknowledged(
    function: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        desk = Desk(function)
        desk.hand(3)
        await released(desk)
        assert not desk.outbox.of(End)
        assert "nothing of it ran: use `async def`, and no `yield`" in caplog.text

    run(scenario)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit(2)", "SystemExit: 2"),
        ("import sys; sys.exit('no such option')", "SystemExit: no such option"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("class Panic(BaseException): pass\nraise Panic('boom')", "Panic: boom"),
    ],
)
def test_a_handler_module_that_ends_on_import_is_named_with_the_reason(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"ending_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        HandlerError, match=f"MARQ_HANDLERS names '{name}', which failed when it was imported"
    ) as raised:
        import_modules((name,))
    assert raised.value.lines[-1].endswith(why)


# ---------------------------------------------------------------------- circuit breaker


def test_a_run_of_failed_calls_opens_the_breaker_and_gives_back_what_waits_uncounted() -> None:
    async def scenario() -> None:
        async def fail(message: Any) -> None:
            raise RuntimeError

        desk = Desk(fail, breaker_failures=2, breaker_pause_ms=60_000)
        desk.hand(1, 2, 3, 4)
        await asyncio.sleep(0.05)

        releases = [m for m in desk.outbox.markers if isinstance(m, Release)]
        assert sorted((tuple(m.offsets), m.counted) for m in releases) == [
            ((1, 2), True),
            ((2, 3), True),
            ((3, 5), False),
        ]
        assert desk.runner.room == 0

    run(scenario)


def test_a_delivery_that_was_asked_for_before_the_breaker_opened_is_given_back_uncounted() -> None:
    async def scenario() -> None:
        async def fail(message: Any) -> None:
            assert message.offset == 3, "called"
            raise ValueError

        desk = Desk(fail, breaker_failures=1, breaker_pause_ms=60_000)
        desk.hand(3)
        await asyncio.sleep(0.01)
        desk.hand(4, 5)
        await asyncio.sleep(0.01)

        assert desk.outbox.of(Release)[1:] == [Release(5, 1, [4, 6], 0, counted=False)]
        assert not desk.runner.settlement.live

    run(scenario)


def test_after_the_pause_one_call_is_tried_and_its_success_closes_the_breaker() -> None:
    async def scenario() -> None:
        outcomes = [RuntimeError(), None]

        async def call(message: Any) -> None:
            outcome = outcomes.pop(0)
            if outcome is not None:
                raise outcome

        desk = Desk(call, breaker_failures=1, breaker_pause_ms=60_000)
        desk.hand(1)
        await asyncio.sleep(0.02)
        closed = desk.runner.room
        desk.runner.breaker.open_until_ms = now_ms()  # the pause is over
        probing = desk.runner.room
        desk.hand(2)
        await asyncio.sleep(0.02)

        assert (closed, probing) == (0, 1)
        assert desk.runner.breaker.state == "closed"
        assert desk.runner.room > 0

    run(scenario)


def test_the_back_off_of_the_queue_counts_where_the_handler_names_none() -> None:
    async def scenario() -> None:
        async def fail(message: Any) -> None:
            raise RuntimeError

        desk = Desk(fail)
        desk.queue = QueueSettings(backoff_ms=50_000, backoff_max_ms=50_000)
        desk.hand(1)
        await asyncio.sleep(0.02)

        (release,) = [m for m in desk.outbox.markers if isinstance(m, Release)]
        assert 25_000 <= release.delay_ms <= 50_000

    run(scenario)


def test_a_handler_module_that_fails_on_import_is_named_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_handlers.py").write_text("raise ValueError('boom')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HandlerError, match=r"MARQ_HANDLERS names 'broken_handlers'(?s:.*)boom") as raised:
        import_modules(("broken_handlers",))
    assert "ValueError: boom" in raised.value.lines


def test_a_handler_looks_at_the_partitions_that_have_something_and_at_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[int] = []
    queues_of = Runner._queues_of

    def counted(runner: Runner, owned: Any) -> Iterator[str]:
        looked_at.append(owned.number)
        return queues_of(runner, owned)

    monkeypatch.setattr(Runner, "_queues_of", counted)

    async def scenario() -> None:
        async def work(message: Any) -> None: ...

        desk = Desk(work)
        desk.service.route = lambda queue: desk.runner
        workers = [Worker().serve() for _ in range(20)]
        owned: list[Any] = [SimpleNamespace(number=n, serving=True, owner=w.owner) for n, w in enumerate(workers)]
        desk.service.ownership.owned = dict(enumerate(owned))
        for one in owned:
            desk.runner.woken(one)
        assert sorted(looked_at) == list(range(20))
        looked_at.clear()
        workers[7].send()
        desk.runner.woken(owned[7])
        assert set(looked_at) == {7}
        assert desk.runner.asked == {7: 1}

    run(scenario)


def test_of_many_queues_with_messages_a_handler_of_patterns_looks_at_those_that_it_takes_from() -> None:
    async def scenario() -> None:
        async def work(message: Any) -> None: ...

        desk = Desk(work, "*")
        looked_at: list[str] = []

        def route(queue: str) -> Runner:
            looked_at.append(queue)
            return desk.runner

        desk.service.route = route
        worker = Worker().serve()
        for number in range(500):
            worker.send(queue=f"q{number}")
        owned: Any = SimpleNamespace(number=0, serving=True, owner=worker.owner)
        desk.service.ownership.owned = {0: owned}
        assert list(desk.runner._queues_of(owned)) == [f"q{number}" for number in range(500)], "all, if they are wanted"
        looked_at.clear()
        calls = desk.runner.room
        desk.runner.woken(owned)
        assert desk.runner.asked == {0: calls}
        assert len(looked_at) < 200

    run(scenario)


def test_a_runner_has_something_to_look_after_from_a_delivery_until_its_calls_have_ended() -> None:
    async def scenario() -> None:
        goes_on, busy = asyncio.Event(), list[bool]()

        async def work(message: Any) -> None:
            await goes_on.wait()

        desk = Desk(work, concurrency=1)
        desk.runner.on_busy = lambda: busy.append(desk.runner.is_idle)
        assert desk.runner.is_idle
        desk.hand(3, 4)
        assert busy == [False]
        await asyncio.sleep(0.01)
        assert not desk.runner.is_idle
        goes_on.set()
        await asyncio.sleep(0.01)
        assert desk.runner.is_idle

    run(scenario)


def test_a_runner_whose_breaker_is_open_looks_whether_its_pause_is_over() -> None:
    async def scenario() -> None:
        async def work(message: Any) -> None:
            raise ValueError

        desk = Desk(work, concurrency=1, breaker_failures=1, breaker_pause_ms=60_000)
        desk.hand(3)
        await asyncio.sleep(0.01)
        assert not desk.runner.settlement.live
        assert not desk.runner.is_idle

    run(scenario)
