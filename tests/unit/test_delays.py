"""Delays and leases have one limit, in every way to set them; and the partitions of messages with a group."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from app.service.meters import Meters
from app.service.operations import QueueService
from app.settings import Settings
from gateway import schemas
from gateway.sqs.limits import RELAXED
from marq.client.wire import Outgoing, to_wire
from marq.core.policies import DELAY_MAX_MS, LEASE_MAX_MS, LEASE_MIN_MS, QueueSettings
from marq.core.settings import settings_with
from marq.errors import BadValueError, HandlerError
from marq.handlers import HANDLER_LEASE_MIN_MS, Retry, handler
from marq.message import ManualMessage
from marq.protocol.messages import Entry
from tests.unit.core_helpers import TwoLogs
from tests.unit.peer_helpers import alone


def test_a_delay_in_a_header_is_at_most_a_year_and_then_the_message_is_delivered() -> None:
    logs = TwoLogs()
    logs.own()
    message, beyond = logs.send(delay_ms=DELAY_MAX_MS), logs.send(delay_ms=DELAY_MAX_MS + 1)
    logs.read()
    assert logs.states([message, beyond]) == ["delayed", "poison"]

    logs.now_ms += DELAY_MAX_MS - 60_000
    logs.wait(30_000)
    assert logs.state(message) == "delayed"
    logs.wait(40_000)
    assert logs.take() == [message]


@pytest.mark.parametrize("delay_ms", [DELAY_MAX_MS, DELAY_MAX_MS + 1])
@pytest.mark.parametrize(
    "said",
    [
        lambda ms: msgspec.convert({"delay_ms": ms}, QueueSettings),
        lambda ms: msgspec.json.decode(b'{"payload": "", "delay_ms": %d}' % ms, type=schemas.Message),
        lambda ms: msgspec.json.decode(b'{"receipts": ["x"], "delay_ms": %d}' % ms, type=schemas.Release),
        lambda ms: msgspec.convert(sent_by_client(ms), schemas.Message),
        lambda ms: Retry(ms),
        lambda ms: ManualMessage("t", 0, "q", None, 1, False, lambda *_: None).release(ms),
    ],
    ids=["setting", "JSON", "release over JSON", "client", "handler", "manual handler"],
)
def test_a_delay_is_at_most_a_year_wherever_it_is_said(said: Any, delay_ms: int) -> None:
    if delay_ms > DELAY_MAX_MS:
        with pytest.raises((msgspec.ValidationError, BadValueError)):
            said(delay_ms)
    else:
        said(delay_ms)


def sent_by_client(delay_ms: int) -> dict[str, Any]:
    entry: Entry = to_wire(Outgoing(b"x", delay=delay_ms / 1000))
    assert entry.delay_ms == delay_ms
    return msgspec.to_builtins(entry) | {"payload": "eA=="}


def test_a_delay_over_sqs_without_its_limits_is_the_same() -> None:
    assert RELAXED.delay_s * 1000 == DELAY_MAX_MS


@pytest.mark.parametrize("lease_ms", [LEASE_MIN_MS - 1, LEASE_MIN_MS, LEASE_MAX_MS, LEASE_MAX_MS + 1])
@pytest.mark.parametrize(
    "said",
    [
        lambda ms: settings_with("q", QueueSettings(), {"visibility_timeout_ms": ms}),
        lambda ms: msgspec.json.decode(b'{"visibility_timeout_ms": %d}' % ms, type=schemas.Receive),
        lambda ms: msgspec.json.decode(b'{"receipts": ["x"], "visibility_timeout_ms": %d}' % ms, type=schemas.Extend),
        lambda ms: Settings(visibility_timeout_ms=ms),
        lambda ms: handler("q", visibility_timeout_ms=ms + HANDLER_LEASE_MIN_MS - LEASE_MIN_MS if ms < 1_000 else ms),
    ],
    ids=["setting", "receive", "extend", "default", "handler"],
)
def test_a_lease_is_a_tenth_of_a_second_to_a_week_wherever_it_is_said(said: Any, lease_ms: int) -> None:
    """Those of handlers are a second at least: they are extended while the handler runs. A queue may say 0: none."""
    if LEASE_MIN_MS <= lease_ms <= LEASE_MAX_MS:
        said(lease_ms)
    else:
        with pytest.raises((msgspec.ValidationError, ValidationError, BadValueError, HandlerError)):
            said(lease_ms)


# ---------------------------------------------------------------------- groups


class Producer:
    """Takes runs of records."""

    def __init__(self) -> None:
        self.partitions: list[int] = []

    def waited_s(self, topic: str, partition: int) -> float:
        return 0.0

    def append_run(self, topic: str, number: int, key: bytes, records: list[Any]) -> list[Any]:
        self.partitions.append(number)
        future = asyncio.get_running_loop().create_future()
        future.set_result(SimpleNamespace(offset=0))
        return [(len(records), future)]


@pytest.mark.parametrize(("fifo", "partitions"), [(False, 8), (True, 1)])
def test_a_group_of_a_fifo_queue_has_one_partition_and_one_of_a_standard_queue_is_spread(
    fifo: bool, partitions: int
) -> None:
    producer = Producer()
    settings = QueueSettings(fifo=fifo, content_deduplication=fifo, deduplication_scope="group" if fifo else "queue")

    async def known(queue: str) -> None: ...

    catalog = SimpleNamespace(
        secret=b"s", settings_of=lambda queue: settings, generation_of=lambda queue: 0, require_or_make=known
    )
    ownership = SimpleNamespace(
        catalog=catalog,
        owned={},
        receivers=[],
        topics=SimpleNamespace(queue="t", partitions=8),
        app=SimpleNamespace(producer=producer),
        stalls=SimpleNamespace(now=dict),
    )

    async def main() -> None:
        service = QueueService(ownership, SimpleNamespace(queue_id=None), Meters(), alone())  # type: ignore[arg-type]
        for i in range(16):
            await service.send("q", [Entry(b"%d" % i, group="same")])

    asyncio.run(main())
    assert len(set(producer.partitions)) == partitions
