"""Copies: poison that always ends, and dead letters that always fit."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaTimeoutError, MessageSizeTooLargeError

from app.engine import fitting
from app.engine.copier import REASON_MAX_BYTES
from app.engine.copies import Copies
from app.engine.quarantine import POISON_ROOM_BYTES
from marq.core.dedup import origin_seal
from marq.core.markers import End, Tick
from marq.core.policies import QueueSettings
from marq.core.ranges import offsets_in
from marq.core.reading import Undecodable
from marq.core.rows import Record
from marq.core.starts import STALLED_MS
from marq.core.state import HEADER_OVERHEAD_BYTES, stored_size
from marq.errors import BrokerError, UnavailableError
from marq.protocol.headers import H_DEAD_QUEUE, H_ORIGIN, H_ORIGIN_SEAL, H_POISON, H_POISON_CUT
from marq.protocol.limits import MESSAGE_MAX_BYTES, RECORD_MAX_BYTES
from tests.unit.core_helpers import LEASE_MS, TwoLogs, Worker

NOTHING_MORE_S = 5
really_sleep = asyncio.sleep


class Kafka:
    """A producer that refuses too large records, or everything for a while."""

    def __init__(self) -> None:
        self.limit = RECORD_MAX_BYTES
        self.refusals: list[Exception] = []
        self.always: Exception | None = None
        self.copies: list[tuple[str, Record]] = []
        self.attempts = 0

    def append(self, topic: str, number: int, value: Any, key: Any, headers: Any) -> asyncio.Future[Any]:
        self.attempts += 1
        future = asyncio.get_running_loop().create_future()
        record = Record(len(self.copies), 0, key, value, tuple(headers))
        if self.refusals:
            future.set_exception(self.refusals.pop(0))
        elif self.always is not None:
            future.set_exception(self.always)
        elif fitting.size_of(key, value, headers) > self.limit:
            future.set_exception(MessageSizeTooLargeError())
        else:
            self.copies.append((topic, record))
            future.set_result(SimpleNamespace(partition=number, offset=record.offset))
        return future


class Desk:
    def __init__(self) -> None:
        self.logs = TwoLogs(number=3)
        self.logs.own()
        self.kafka = Kafka()
        self.clock_ms = 0
        self.ended: dict[str, list[int]] = {}
        owner = SimpleNamespace(partition=self.logs.partition, ended_as=self.end, epoch=0)
        outbox = SimpleNamespace(put_confirmed=self.put_confirmed)
        self.refuses_ends = False
        self.owned: Any = SimpleNamespace(number=3, owner=owner, serving=True, outbox=outbox)
        self.ownership: Any = SimpleNamespace(
            app=SimpleNamespace(producer=self.kafka),
            topics=SimpleNamespace(queue="queue", poison="poison", dead_letter=None, partitions=4),
            catalog=SimpleNamespace(settings_of=lambda queue: QueueSettings()),
            settings=SimpleNamespace(queue_id=None),
            owned={3: self.owned},
            drain=lambda owned: None,
            log=logging.getLogger("desk"),
        )
        self.copies = Copies(self.ownership, lambda: self.clock_ms)

    def end(self, outcome: Any, offsets: list[int]) -> None:
        self.ended.setdefault(outcome, []).extend(offsets)
        if offsets:
            self.logs.finish(outcome, *offsets)

    def put_confirmed(self, markers: list[End]) -> asyncio.Future[int]:
        future = asyncio.get_running_loop().create_future()
        if self.refuses_ends:
            future.set_exception(BrokerError("not confirmed"))
        else:
            for marker in markers:
                self.end(marker.outcome, list(offsets_in(marker.offsets)))
            future.set_result(0)
        return future

    def poison(self) -> list[tuple[int, str]]:
        return self.logs.partition.due(lambda queue: QueueSettings()).poison

    async def quarantine(self) -> None:
        await asyncio.wait_for(self.copies.poison.quarantine(self.owned, self.poison()), NOTHING_MORE_S)


def run(scenario: Any) -> None:
    desk = Desk()
    asyncio.run(scenario(desk))


def headers_of(record: Record) -> dict[str, Any]:
    return dict(record.headers)


@pytest.mark.parametrize(
    ("key", "value", "headers"),
    [
        (b"q", b"v" * (6 << 20), []),
        (b"q", b"v", [("h", b"v" * (5 << 20))]),
        (b"q", b"v", [("k", b"v")] * 400_000),
        (b"q" * (5 << 20), b"v", []),
        (b"q", None, [("n" * (5 << 20), None)]),
        (b"q", b"v" * (6 << 20), [("h", b"v" * (6 << 20)), ("i", b"")]),
    ],
)
def test_a_copy_that_is_too_large_is_made_smaller_and_says_so(key: bytes, value: Any, headers: list[Any]) -> None:
    async def scenario(desk: Desk) -> None:
        offset = desk.logs.send(key, value, headers=headers)
        desk.logs.read()
        await desk.quarantine()

        assert desk.ended["poison"] == [offset]
        ((topic, copy),) = desk.kafka.copies
        assert topic == "poison" and desk.kafka.attempts == 1
        assert fitting.size_of(copy.key, copy.value, copy.headers) <= RECORD_MAX_BYTES
        said = headers_of(copy)
        assert said[H_ORIGIN] == b"3:0" and said[H_POISON]
        cut = json.loads(said[H_POISON_CUT])
        assert cut.get("value_bytes", len(value or b"")) == len(value or b"")
        assert cut.get("headers", len(headers)) == len(headers)
        assert (value or b"").startswith(copy.value or b"")
        assert copy.value or not value

    run(scenario)


def test_a_copy_that_fits_is_whole() -> None:
    async def scenario(desk: Desk) -> None:
        desk.logs.send(None, b"v" * 1000, headers=[("h", None), (H_POISON, b"of another time")])
        desk.logs.read()
        await desk.quarantine()
        ((_, copy),) = desk.kafka.copies
        assert copy.value == b"v" * 1000
        assert [name for name, _ in copy.headers] == ["h", H_POISON, H_ORIGIN]
        assert headers_of(copy)[H_POISON] == b"no queue: the key is null"

    run(scenario)


def test_a_copy_is_sealed_by_whoever_made_it() -> None:
    async def scenario(desk: Desk) -> None:
        desk.logs.partition.origin_keys = (b"k" * 32, b"o" * 32)
        forged = [(H_ORIGIN, b"3:0"), (H_ORIGIN_SEAL, b"forged")]
        desk.logs.send(None, b"v", headers=forged)
        desk.logs.read()
        await desk.quarantine()
        ((_, copy),) = desk.kafka.copies
        assert [(n, v) for n, v in copy.headers if n.startswith(H_ORIGIN)] == [
            (H_ORIGIN, b"3:0"),
            (H_ORIGIN_SEAL, origin_seal("3:0", b"k" * 32)),
        ]

    run(scenario)


def test_what_could_not_be_decoded_is_copied_as_bytes() -> None:
    async def scenario(desk: Desk) -> None:
        desk.logs.sent += [Undecodable(0, -1, b"\0raw", "can't be decoded: why"), Undecodable(1, -1, None, "as before")]  # type: ignore[list-item]
        desk.logs.end = 2
        desk.logs.read()
        await desk.quarantine()
        (_, first), (_, second) = desk.kafka.copies
        assert (first.value, second.value) == (b"\0raw", None)
        assert first.headers == ((H_POISON, b"can't be decoded: why"), (H_ORIGIN, b"3:0"))

    run(scenario)


def test_a_topic_that_takes_less_than_it_should_gets_less() -> None:
    async def scenario(desk: Desk) -> None:
        desk.kafka.limit = 100_000
        desk.logs.send(None, b"v" * (2 << 20))
        desk.logs.read()
        await desk.quarantine()
        ((_, copy),) = desk.kafka.copies
        assert 10_000 < len(copy.value or b"") < 100_000
        assert json.loads(headers_of(copy)[H_POISON_CUT]) == {"value_bytes": 2 << 20}

    run(scenario)


def test_a_copy_that_failed_is_tried_again_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def scenario(desk: Desk) -> None:
        desk.kafka.refusals = [KafkaTimeoutError() for _ in range(9)]
        desk.logs.send(None)
        desk.logs.read()
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await desk.copies.poison.quarantine(desk.owned, desk.poison())
        assert desk.ended == {"poison": [0]}
        assert len(desk.kafka.copies) == 1
        assert desk.copies.poison.uncopied == 0

    run(scenario)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_poison_ends_without_a_copy_if_its_topic_takes_nothing_while_kafka_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(desk: Desk) -> None:
        moves = [True]

        async def sleep(seconds: float) -> None:
            desk.clock_ms += int(seconds * 1000)
            await really_sleep(0)

        confirmed = desk.copies._copier.confirmed

        async def and_time_passes(*args: Any) -> Any:
            if moves[0]:
                desk.logs.mark(Tick())
            return await confirmed(*args)

        monkeypatch.setattr(desk.copies._copier, "confirmed", and_time_passes)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        desk.kafka.always = KafkaTimeoutError()
        desk.logs.send(None)
        desk.logs.read()
        await desk.copies.poison.quarantine(desk.owned, desk.poison())
        assert desk.ended == {"poison": [0]}
        assert 60_000 <= desk.clock_ms <= 66_000
        assert desk.copies.poison.uncopied == 1
        assert "Poison at 3:0 ends without a copy" in caplog.text

        # the next ones are tried once
        attempts = desk.kafka.attempts
        desk.logs.send(None)
        desk.logs.read()
        await desk.copies.poison.quarantine(desk.owned, desk.poison())
        assert desk.kafka.attempts == attempts + 1

        # a Kafka that takes no markers either is away: the copy is made when it is back
        moves[0] = False
        desk.logs.send(None)
        desk.logs.read()
        task = asyncio.ensure_future(desk.copies.poison.quarantine(desk.owned, desk.poison()))
        while desk.clock_ms < 1_000_000:
            await really_sleep(0)
        assert not task.done()
        desk.kafka.always = None
        await task
        assert len(desk.kafka.copies) == 1

    run(scenario)


def test_nothing_is_ended_once_the_partition_is_lost() -> None:
    async def scenario(desk: Desk) -> None:
        desk.kafka.refusals = [KafkaTimeoutError()]
        desk.logs.send(None)
        desk.logs.read()
        task = asyncio.ensure_future(desk.copies.poison.quarantine(desk.owned, desk.poison()))
        await asyncio.sleep(0)
        desk.ownership.owned = {}
        await asyncio.wait_for(task, NOTHING_MORE_S)
        assert not desk.kafka.copies
        assert desk.ended.get("poison", []) == []

    run(scenario)


@pytest.mark.parametrize("refused", ["copy", "end", "partition"])
def test_a_rejection_that_kafka_does_not_confirm_is_unsure_and_the_message_comes_again(refused: str) -> None:
    async def scenario(desk: Desk) -> None:
        message = desk.logs.send()
        desk.logs.read()
        delivery = desk.logs.start(0)
        desk.kafka.refusals = [KafkaTimeoutError()] if refused == "copy" else []
        desk.refuses_ends = refused == "end"
        if refused == "partition":
            desk.ownership.owned = {}
        found = await desk.copies.reject(desk.owned, [message], (delivery.epoch, delivery.delivery), "no")

        assert (found.done, found.unsure) == ([], [message])
        if refused != "partition":
            desk.logs.wait(LEASE_MS)
            assert desk.logs.take() == [message]

    run(scenario)


def test_a_rejected_message_that_is_purged_while_its_copy_is_refused_leaves_nothing_behind() -> None:
    async def scenario(desk: Desk) -> None:
        message = desk.logs.send("q")
        desk.logs.read()
        delivery = desk.logs.start(message)
        desk.kafka.refusals = [MessageSizeTooLargeError()]
        confirmed = desk.copies._copier.confirmed

        async def purged_meanwhile(*args: Any) -> Any:
            desk.logs.purge("q")
            return await confirmed(*args)

        desk.copies._copier.confirmed = purged_meanwhile  # type: ignore[assignment]
        await desk.copies.reject(desk.owned, [message], (delivery.epoch, delivery.delivery), "no")

        assert not desk.logs.partition.reserved and not desk.kafka.copies

    run(scenario)


def test_a_rejected_message_is_done_and_that_of_an_older_delivery_is_neither() -> None:
    async def scenario(desk: Desk) -> None:
        first, second = desk.logs.send(), desk.logs.send()
        desk.logs.read()
        delivery = desk.logs.start(0, 1)
        desk.logs.ack(delivery, second)
        found = await desk.copies.reject(desk.owned, [first, second], (delivery.epoch, delivery.delivery), "no")
        assert (found.done, found.unsure) == ([first], [])
        assert desk.ended == {"dead": [first]}

    run(scenario)


@pytest.mark.parametrize("headers", [0, 1, 1000, (MESSAGE_MAX_BYTES - 2000) // (HEADER_OVERHEAD_BYTES + 2)])
def test_a_dead_letter_of_the_largest_message_is_a_message(headers: int) -> None:
    async def scenario(desk: Desk) -> None:
        queue = "q" * 255
        size = MESSAGE_MAX_BYTES - len(queue) - headers * (HEADER_OVERHEAD_BYTES + 2)
        message = desk.logs.send(queue, b"v" * size, headers=[("h", b"x")] * headers)
        desk.logs.read()
        assert stored_size(desk.logs.partition.record(message)) == MESSAGE_MAX_BYTES
        desk.logs.start(message)
        await desk.copies.dead_letter(desk.owned, [message])

        assert desk.ended == {"dead": [message]}
        ((topic, copy),) = desk.kafka.copies
        assert topic == "queue" and headers_of(copy)[H_DEAD_QUEUE] == queue.encode()
        assert fitting.size_of(copy.key, copy.value, copy.headers) <= RECORD_MAX_BYTES
        other = TwoLogs(number=3)
        other.sent.append(copy)
        other.end = 1
        other.read()
        assert not other.partition.poison

    run(scenario)


def test_dead_letters_are_in_the_log_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(desk: Desk) -> None:
        messages = desk.logs.send_many(3)
        desk.logs.read()
        desk.logs.start(*messages)
        desk.logs.start(*messages[:2])
        await desk.copies.dead_letter(desk.owned, messages[:2])

    run(scenario)
    assert "2 messages of 'q' became dead letters in 'q.dead'" in caplog.text


def test_a_dead_letter_that_is_no_message_any_more_is_poison() -> None:
    async def scenario(desk: Desk) -> None:
        # a copy that says more of itself than ours do
        origin = [("marq-origin", b"1:1"), ("x", b"x" * 17_340)]
        message = desk.logs.send("q", b"v" * (MESSAGE_MAX_BYTES - 1000), headers=origin)
        desk.logs.read()
        desk.logs.start(message)
        await desk.copies.dead_letter(desk.owned, [message])
        assert desk.ended["poison"] == [message]

    run(scenario)


def test_fitting_leaves_room_for_what_a_copy_says() -> None:
    assert POISON_ROOM_BYTES + REASON_MAX_BYTES + 1024 < RECORD_MAX_BYTES


# ---------------------------------------------------------------------- moves


def test_who_moves_messages_of_a_stalled_partition_is_told_so_and_does_not_wait() -> None:
    async def scenario() -> None:
        desk, core = Desk(), Worker().serve()
        core.send(1)
        desk.owned.owner = core.owner
        moved = asyncio.ensure_future(desk.copies.move(desk.owned, "q", None, 1, "other"))
        await asyncio.sleep(0)
        core.append()  # and Kafka takes nothing
        core.clock_ms += STALLED_MS
        core.owner.work(core.clock_ms)
        for handout in core.handouts(empty=True):
            handout.receiver.handed(desk.owned, handout)

        with pytest.raises(UnavailableError):
            await moved
        with pytest.raises(UnavailableError):
            await desk.copies.move(desk.owned, "q", [0], 1, "other")

    asyncio.run(asyncio.wait_for(scenario(), NOTHING_MORE_S))


def test_dead_letters_that_are_done_are_not_remembered_however_many_there_were() -> None:
    copies = Copies(SimpleNamespace(log=None), lambda: 0)  # type: ignore[arg-type]
    messages: dict[int, Any] = {}
    owned: Any = SimpleNamespace(number=0, owner=SimpleNamespace(partition=SimpleNamespace(messages=messages)))
    for offset in range(100_000):  # no receive in between, as when all receivers wait already
        messages[offset] = None
        copies.begin(owned, [offset])
        messages.pop(offset - 5, None)  # its end is folded
    assert len(copies._dying[0]) <= 10
