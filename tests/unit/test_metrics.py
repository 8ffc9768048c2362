"""What `/metrics` says of handlers and of errors, and that its labels are bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agents.runner import Runner
from app.engine.owned_partition import OwnedPartition
from app.engine.queue_records import QueueRecord
from app.service.meters import DURATIONS_S, Meters
from app.settings import load
from app.worker import WorkerApp, build
from gateway.metrics import QUEUES_MAX, Collector
from marq.core.owner import Owner
from marq.core.policies import QueueSettings
from marq.core.ranges import RangeSet
from marq.errors import BadReceiptError, LeaseOverError, UnavailableError
from marq.handlers import Handler, Retry
from tests.unit.test_handlers_runner import Desk, run

Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(registry: CollectorRegistry) -> Samples:
    """Numbers by the name of the series and the values of its labels, in the order of the labels' names."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerApp:
    """A worker that was never started."""
    monkeypatch.setenv("MARQ_DATA_DIR", str(tmp_path))
    return build(load())


@pytest.fixture
def collector(app: WorkerApp) -> Collector:
    found = Collector(app.ownership, app.meters, app.operations.receives, app.receivers, app.connections)
    app.meters.registry.register(found)
    return found


def desk_of(function: Callable[..., Any], attempt: int = 1, age_s: float = 0.0, **options: Any) -> tuple[Desk, Meters]:
    """A runner whose messages came `age_s` ago, and its meters."""
    desk = Desk(function, **options)
    meters = desk.service.meters
    desk.service.messages = lambda owned, offsets, settle: [
        SimpleNamespace(offset=o, attempt=attempt, queue="q", sent_ms=int((time.time() - age_s) * 1000))
        for o in offsets
    ]
    return desk, meters


# -- queues


def test_queues_beyond_the_largest_are_summed_up(app: WorkerApp, collector: Collector) -> None:
    # the larger its number, the more messages a queue has
    collector.counts = {f"q{i}": {"ready": i, "leased": 1} for i in range(1, QUEUES_MAX + 4)}
    found = {labels: value for (name, labels), value in samples(app.meters.registry).items() if "_queue_mess" in name}
    assert {queue for queue, _ in found} == {"", *(f"q{i}" for i in range(4, QUEUES_MAX + 4))}
    assert found["", "ready"] == 1 + 2 + 3
    assert found["", "leased"] == 3
    assert found["q4", "ready"] == 4


def test_what_can_not_be_decoded_or_copied_is_counted(app: WorkerApp, collector: Collector) -> None:
    app.consumer.unreadable.update({"marq.queue": 3, "marq.markers": 2})
    app.ownership.copies.poison.uncopied = 1

    found = samples(app.meters.registry)

    assert found["marq_unreadable_offsets_total", ("marq.queue",)] == 3
    assert found["marq_unreadable_offsets_total", ("marq.markers",)] == 2
    assert found["marq_poison_without_copy_total", ()] == 1


def test_unreadable_offsets_are_a_gauge_of_the_partitions_that_have_some(app: WorkerApp, collector: Collector) -> None:
    for number, unreadable in ((0, []), (3, [5, 8, 20, 21])):
        owner = Owner(number, "w", "nonce")
        owner.partition.position = 30
        owner.partition.missed = RangeSet(unreadable)
        app.ownership.owned[number] = OwnedPartition(number, 1, owner, Mock())

    found = samples(app.meters.registry)
    assert {key: value for key, value in found.items() if key[0] == "marq_partition_unreadable_offsets"} == {
        ("marq_partition_unreadable_offsets", ("3",)): 4
    }


def test_no_queue_is_summed_up_while_there_are_few(app: WorkerApp, collector: Collector) -> None:
    collector.counts = {f"q{i}": {"ready": i} for i in range(QUEUES_MAX)}
    found = [labels for name, labels in samples(app.meters.registry) if name == "marq_queue_messages"]
    assert len(found) == QUEUES_MAX
    assert ("", "ready") not in found


def test_dead_letters_are_neither_backlog_nor_the_oldest(app: WorkerApp, collector: Collector) -> None:
    app.catalog._put("orders", QueueRecord(1, 1, "", QueueSettings(dead_letter_queue="graves")))
    collector.counts = {queue: {"ready": 2} for queue in ("orders", "graves", "mails.dead")}
    collector.ages = {"orders": 1_000, "graves": 10**9, "mails.dead": 10**9}
    found = samples(app.meters.registry)
    assert {labels: n for (name, labels), n in found.items() if name == "marq_queue_messages"} == {
        ("orders", "ready"): 2
    }
    assert {labels: n for (name, labels), n in found.items() if name == "marq_queue_oldest_seconds"} == {("orders",): 1}
    assert {labels: n for (name, labels), n in found.items() if name == "marq_dead_letters"} == {
        ("graves",): 2,
        ("mails.dead",): 2,
    }


# -- settled


def test_settled_receipts_are_counted_by_action_and_kind_of_error() -> None:
    meters = Meters()
    meters.settle_all("ack", [None, BadReceiptError("x"), None, LeaseOverError("x"), BadReceiptError("y")])
    meters.settle_all("extend", [UnavailableError("x")])
    meters.settle_all("ack", [None])
    found = {labels: value for (name, labels), value in samples(meters.registry).items() if name.endswith("pts_total")}
    assert found == {
        ("ack", "ok"): 3,
        ("ack", "bad-receipt"): 2,
        ("ack", "lease-over"): 1,
        ("extend", "unavailable"): 1,
    }


# -- handlers


def test_messages_of_handlers_count_as_received_and_acknowledged() -> None:
    async def scenario() -> None:
        async def work(message: Any) -> None:
            pass

        desk, meters = desk_of(work, concurrency=2, age_s=100)
        desk.hand(3, 4, 5)
        desk.hand(6)
        await asyncio.sleep(0.01)
        found = samples(meters.registry)
        assert found["marq_received_messages_total", ()] == 4
        assert found["marq_settled_receipts_total", ("ack", "ok")] == 4
        # one of each delivery
        assert found["marq_first_delivery_seconds_count", ()] == 2
        assert 200 <= found["marq_first_delivery_seconds_sum", ()] < 300

    run(scenario)


def test_the_age_is_that_at_the_first_delivery() -> None:
    async def scenario() -> None:
        async def work(message: Any) -> None:
            pass

        desk, meters = desk_of(work, attempt=2)
        desk.hand(3)
        await asyncio.sleep(0.01)
        found = samples(meters.registry)
        assert found["marq_received_messages_total", ()] == 1
        assert found["marq_first_delivery_seconds_count", ()] == 0

    run(scenario)


def test_what_a_handler_gives_back_and_extends_is_counted() -> None:
    async def scenario() -> None:
        at_work = asyncio.Event()

        async def work(messages: list[Any]) -> None:
            if messages[0].offset == 3:
                raise Retry(0)
            await at_work.wait()

        desk, meters = desk_of(work, batch=2, concurrency=2)
        desk.hand(3, 4)
        desk.hand(5, 6)
        await asyncio.sleep(0.01)
        for delivery in desk.runner.settlement.live:
            delivery.extend_at_ms = 0
        desk.runner.extend()
        at_work.set()
        await asyncio.sleep(0.01)
        found = {labels: v for (name, labels), v in samples(meters.registry).items() if name.endswith("pts_total")}
        assert found == {("release", "ok"): 2, ("extend", "ok"): 2, ("ack", "ok"): 2}

    run(scenario)


def test_a_delivery_that_no_call_is_made_for_was_not_received() -> None:
    async def scenario() -> None:
        async def work(message: Any) -> None:
            raise AssertionError("called")

        desk, meters = desk_of(work)
        desk.service.closing = True
        desk.hand(3, 4)
        await asyncio.sleep(0.01)
        found = samples(meters.registry)
        assert found["marq_received_messages_total", ()] == 0
        assert found["marq_settled_receipts_total", ("release", "ok")] == 2

    run(scenario)


def test_calls_of_handlers_are_counted_by_their_time(app: WorkerApp, collector: Collector) -> None:
    runners: list[Runner] = []

    async def scenario() -> None:
        async def work(message: Any) -> None:
            if message.offset == 4:
                raise ValueError("no")
            await asyncio.sleep(0.03 if message.offset == 5 else 0)

        desk, _ = desk_of(work, concurrency=3)
        desk.hand(3, 4, 5)
        await asyncio.sleep(0)
        while desk.runner.meter.calls < 3:
            await asyncio.sleep(0.01)
        runners.append(desk.runner)

    run(scenario)
    app.meters.handlers = [runner.meter for runner in runners]
    found = samples(app.meters.registry)
    name = runners[0].handler.name
    counts = [found["marq_handler_call_seconds_bucket", (name, str(float(bound)), "q")] for bound in DURATIONS_S]
    assert found["marq_handler_call_seconds_count", (name, "q")] == 3
    assert found["marq_handler_call_seconds_bucket", (name, "+Inf", "q")] == 3
    assert counts == sorted(counts)
    assert found["marq_handler_call_seconds_bucket", (name, "0.025", "q")] <= 2  # the one that slept is above
    assert found["marq_handler_call_seconds_sum", (name, "q")] >= 0.025
    assert found["marq_handler_failures_total", (name, "q")] == 1


def test_handlers_of_one_name_are_told_apart_by_their_queues_or_summed_up(app: WorkerApp, collector: Collector) -> None:
    def work(message: Any) -> None:
        pass

    service: Any = SimpleNamespace(ownership=None, settings=None, meters=Meters())
    runners = [Runner(Handler(work, queues), service) for queues in (("a", "b-*"), ("c",), ("c",))]
    app.meters.handlers = [runner.meter for runner in runners]
    for calls, meter in enumerate(app.meters.handlers, 1):
        meter.durations[0] = meter.failures = calls
    text = generate_latest(app.meters.registry).decode()
    found = samples(app.meters.registry)
    name = runners[0].handler.name
    assert found["marq_handler_call_seconds_count", (name, "a,b-*")] == 1
    assert found["marq_handler_call_seconds_count", (name, "c")] == 2 + 3
    assert found["marq_handler_failures_total", (name, "c")] == 2 + 3
    # Prometheus refuses a page that has a series twice
    assert sum(line.startswith("marq_handler_failures_total{") for line in text.splitlines()) == 2
