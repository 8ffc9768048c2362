"""How a worker takes a partition, loses it, takes it back, and gives up: without Kafka, in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    TopicAuthorizationFailedError,
    UnknownError,
)
from faust.types import TP

from app.engine import checkpoints, progress, takeover
from app.engine import ownership as module
from app.engine.owned_partition import READ_ON_MS
from app.engine.ownership import Ownership
from app.engine.read_ahead import SHED_PAUSE_MAX_MS
from app.kafka.identity import Identity
from app.settings import Settings
from marq.clock import now_ms
from marq.core import markers as m
from marq.core.markers import End, Own, Release, Tick
from marq.core.owner import Owner, Phase
from marq.core.policies import QueueSettings
from marq.core.recovery import Edges, LastRead
from marq.core.rows import Record
from marq.core.versions import VERSIONS, place_of_markers, version_seal
from marq.errors import NewerRowError, RowError
from tests.unit.peer_helpers import alone

CHANGELOGS = {name: f"c-{name}" for name in ("messages", "markers", "progress")}
TOPICS = SimpleNamespace(queue="q", markers="m", partitions=2, changelogs=CHANGELOGS)


class Kafka:
    """The producer and the consumer of the worker: one log per topic and partition."""

    def __init__(self) -> None:
        self.logs: dict[TP, list[Any]] = defaultdict(list)
        self.assigned = {TP("q", 0), TP("m", 0), TP("q", 1), TP("m", 1)}
        self.answers = True
        self.in_group = True
        self.silent: set[TP] = set()
        self.started: dict[TP, tuple[int, int]] = {}  # offset, generation
        self.sought: list[tuple[TP, int]] = []
        self.stirred: dict[int, None] = {}
        self.hurried = 0  # times that somebody waited for what is not read yet
        self.refused: list[Exception] = []  # for the next appends to a table
        self.refusing: dict[int, Exception] = {}  # of a partition, each append to a table

    def append(self, topic: str, partition: int, value: bytes | None, *_: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        if self.answers and TP(topic, partition) not in self.silent:
            log = self.logs[TP(topic, partition)]
            log.append(
                SimpleNamespace(offset=len(log), timestamp=int(time.time() * 1000), timestamp_type=1, value=value)
            )
            future.set_result(log[-1])
        return future

    def assignment(self) -> set[TP]:
        return self.assigned

    def start_from(self, tp: TP, offset: int, generation: int) -> None:
        self.started[tp] = (offset, generation)

    def seek_chunks(self, tp: TP, offset: int, generation: int) -> None:
        self.sought.append((tp, offset))

    def waits(self, longer_s: float) -> dict[TP, float]:
        return {}

    def hurry(self, lasting: bool) -> None:
        self.hurried += 1

    def unstable(self) -> dict[TP, tuple[int, int]]:
        return {}

    def highwater(self, tp: TP) -> int:
        return len(self.logs[tp])

    def __getattr__(self, name: str) -> Any:  # pause_reading, resume_reading, set_commit_position
        return lambda *_: True


class Table:
    """Rows of one table."""

    def __init__(self, name: str, kafka: Kafka) -> None:
        self.changelog_topic_name = f"{name}-changelog"
        self.kafka = kafka
        self.rows: dict[bytes, bytes] = {}
        self.wiped: list[int] = []
        self.again: list[bytes] = []

    async def open(self, number: int, world: str) -> bool:
        return False

    def rows_of(self, number: int) -> list[tuple[bytes, bytes]]:
        return list(self.rows.items())

    def read(self, number: int, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def keys_of(self, number: int) -> list[bytes]:
        return list(self.rows)

    def wipe(self, number: int) -> None:
        self.wiped.append(number)

    def write(self, key: bytes, value: bytes | None) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        number = int(key.split(b"/")[0])
        if number in self.kafka.refusing:
            future.set_exception(self.kafka.refusing[number])
        elif self.kafka.refused:
            future.set_exception(self.kafka.refused.pop())
        else:
            future.set_result(None)
            self.rows[key] = value or b""
        return future

    def write_again(self, number: int, key: bytes, value: bytes | None) -> asyncio.Future[Any]:
        self.again.append(key)
        return self.write(key, value)


class Changelogs:
    """Reads beside the group; each of `errors` once."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.broken: dict[int, Exception] = {}  # of a partition, each time
        self.reading: Callable[[int], None] = lambda number: None

    async def read_rest(self, tables: Any, number: int) -> None:
        self.reading(number)
        if number in self.broken:
            raise self.broken[number]
        if self.errors:
            raise self.errors.pop()

    async def identity(self, topics: Any) -> Identity:
        return Identity("cluster", dict.fromkeys(("q", "m", *topics.changelogs.values()), "id"))

    async def edges(self, topics: Any, number: int, read: LastRead | None) -> Edges:
        return Edges((0, 0))

    async def trim(self, *_: Any) -> None: ...

    async def close(self) -> None: ...


class Desk:
    """An ownership with the parts around it."""

    def __init__(self) -> None:
        self.kafka = Kafka()
        self.failures: list[BaseException] = []
        self.app = SimpleNamespace(
            producer=self.kafka,
            consumer=self.kafka,
            rebalancing=False,
            consumer_generation_id=1,
            fail=self.failures.append,
        )
        self.tables = {name: Table(name, self.kafka) for name in ("messages", "markers", "progress")}
        catalog = SimpleNamespace(
            settings_of=lambda queue: QueueSettings(),
            with_ttl=(),
            settings_changes=0,
            keys_for=lambda purpose: (purpose.ljust(32),) if purpose == VERSIONS else (),
        )
        self.ownership = Ownership(
            self.app,  # type: ignore[arg-type]
            Settings(kafka="kafka://nowhere:1", checkpoint_ms=100),
            lambda: TOPICS,  # type: ignore[arg-type, return-value]
            self.tables,  # type: ignore[arg-type]
            catalog,  # type: ignore[arg-type]
            alone(),
        )
        self.changelogs = self.ownership.changelogs = Changelogs()  # type: ignore[assignment]
        self.ownership.worker_name = "us"

    def read(self, number: int) -> None:
        """The chunk of all markers that are not folded yet arrives."""
        owned = self.ownership.owned[number]
        position = owned.owner.partition.markers_position
        records = self.kafka.logs[TP("m", number)][position:]
        self.ownership.on_markers_chunk(
            SimpleNamespace(  # type: ignore[arg-type]
                partition=number,
                generation=owned.generation,
                start=position,
                next=position + len(records),
                records=records,
            )
        )

    async def until(self, condition: Callable[[], Any]) -> None:
        """Read markers as they come, until `condition` is true."""
        async with asyncio.timeout(2):
            while not condition():
                for number in list(self.ownership.owned):
                    self.read(number)
                await asyncio.sleep(0.002)

    async def serve(self) -> None:
        self.ownership.on_assigned(1)
        await self.until(lambda: self.ownership.ready)

    def foreign_own(self, number: int) -> None:
        """Another worker's own marker is appended."""
        self.kafka.append("m", number, m.encode([Own("other", "other/1")], "other/1", 0))

    def owns(self, number: int) -> int:
        return sum(b"own" in record.value for record in self.kafka.logs[TP("m", number)])


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAKE_BACK_S", 0.01)
    monkeypatch.setattr(checkpoints, "WRITE_AGAIN_S", 0.01)
    monkeypatch.setattr(checkpoints, "REFUSED_AGAIN_S", 0.01)
    for name in ("AGAIN_S", "AGAIN_MAX_S"):
        monkeypatch.setattr(takeover, name, 0.01)
    # the event of an agent
    monkeypatch.setattr(module, "current_event", lambda: True)


def run(scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        desk = Desk()
        await scenario(desk)
        desk.ownership.stop_serving()

    asyncio.run(main())


def test_what_is_assigned_is_claimed_restored_and_served() -> None:
    async def scenario(desk: Desk) -> None:
        assert not desk.ownership.ready
        desk.ownership.on_assigned(1)
        assert not desk.ownership.ready
        await desk.until(lambda: desk.ownership.ready)
        assert set(desk.ownership.owned) == {0, 1}
        assert desk.kafka.started[TP("m", 0)] == (0, 1)

    run(scenario)


def test_the_tables_are_read_before_the_claim_and_to_their_end_after_it() -> None:
    async def scenario(desk: Desk) -> None:
        owns: list[int] = []
        desk.changelogs.reading = lambda number: owns.append(desk.owns(0)) if number == 0 else None
        await desk.serve()
        assert owns == [0, 1]

    run(scenario)


def test_a_restore_lets_everything_else_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "SLICE_S", 0.0)
    monkeypatch.setattr(Owner, "restoring", lambda *_: (done.append("slice") for _ in range(3)))
    done: list[str] = []

    async def something_else() -> None:
        while True:
            done.append("else")
            await asyncio.sleep(0)

    async def scenario(desk: Desk) -> None:
        other = asyncio.ensure_future(something_else())
        desk.kafka.assigned = {TP("q", 0), TP("m", 0)}
        desk.ownership.on_assigned(1)
        await desk.until(lambda: done.count("slice") == 3)
        other.cancel()
        assert "slice,slice" not in ",".join(done)

    run(scenario)


def test_without_a_partition_a_worker_is_ready() -> None:
    async def scenario(desk: Desk) -> None:
        desk.kafka.assigned = set()
        desk.ownership.on_assigned(1)
        assert desk.ownership.ready

    run(scenario)


def test_a_partition_that_another_took_is_taken_back_while_it_is_assigned() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        desk.foreign_own(1)
        await desk.until(lambda: 1 not in desk.ownership.owned)
        assert not desk.ownership.ready
        assert desk.ownership.owned[0].serving
        await desk.until(lambda: desk.ownership.ready)
        assert desk.owns(1) == 3

    run(scenario)


def test_a_worker_that_has_lost_touch_with_its_group_takes_nothing_back() -> None:
    """Others have its partitions by then. It would take them again and again, as would they."""

    async def scenario(desk: Desk) -> None:
        await desk.serve()
        desk.kafka.in_group = False
        desk.foreign_own(1)
        await desk.until(lambda: 1 in desk.ownership.unserved)
        await asyncio.sleep(0.05)
        assert "group" in desk.ownership.unserved[1]
        assert desk.owns(1) == 2
        assert desk.ownership.owned[0].serving
        desk.kafka.in_group = True
        await desk.until(lambda: not desk.ownership.unserved)
        assert desk.owns(1) == 3

    run(scenario)


def test_a_partition_that_another_took_is_not_taken_back_after_a_rebalance() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        desk.foreign_own(1)
        await desk.until(lambda: 1 not in desk.ownership.owned)
        desk.kafka.assigned = {TP("q", 0), TP("m", 0)}
        desk.app.consumer_generation_id = 2
        desk.ownership.on_assigned(2)
        await desk.until(lambda: desk.ownership.ready)
        await asyncio.sleep(0.05)
        assert set(desk.ownership.owned) == {0}
        assert desk.owns(1) == 2

    run(scenario)


def test_a_claim_that_is_confirmed_after_the_partitions_were_revoked_takes_nothing() -> None:
    async def scenario(desk: Desk) -> None:
        desk.kafka.answers = False
        desk.ownership.on_assigned(1)
        await asyncio.sleep(0.01)
        desk.ownership.on_assignment(set())
        desk.kafka.answers = True
        await asyncio.sleep(0.05)
        assert not desk.ownership.owned
        assert not desk.kafka.started
        assert not desk.failures

    run(scenario)


def test_a_claim_without_an_answer_is_made_again_with_a_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "CLAIM_TIMEOUT_S", 0.02)

    async def scenario(desk: Desk) -> None:
        desk.kafka.answers = False
        desk.ownership.on_assigned(1)
        await asyncio.sleep(0.05)
        desk.kafka.answers = True
        await desk.until(lambda: desk.ownership.ready)
        assert not desk.failures

    run(scenario)


def test_recovery_goes_on_when_kafka_is_back() -> None:
    async def scenario(desk: Desk) -> None:
        desk.changelogs.errors = [KafkaConnectionError(), TimeoutError()]
        await desk.serve()
        assert desk.owns(0) == 1
        assert not desk.failures

    run(scenario)


def test_a_partition_whose_markers_are_not_read_is_unserved_and_served_when_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "PROGRESS_MS", 20)

    async def scenario(desk: Desk) -> None:
        desk.ownership.on_assigned(1)
        for _ in range(10):
            await asyncio.sleep(0.01)
            desk.ownership.on_timer()
        assert "can't be read beyond offset 0" in desk.ownership.unserved[0]
        assert not desk.ownership.ready
        await desk.until(lambda: desk.ownership.ready)
        assert not desk.ownership.unserved
        assert not desk.failures

    run(scenario)


def test_a_partition_that_can_not_be_claimed_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "CLAIM_TIMEOUT_S", 0.02)

    async def scenario(desk: Desk) -> None:
        desk.kafka.silent = {TP("m", 1)}
        desk.ownership.on_assigned(1)
        await desk.until(lambda: 0 in desk.ownership.owned and desk.ownership.owned[0].serving)
        await desk.until(lambda: 1 in desk.ownership.unserved)
        assert "has not confirmed" in desk.ownership.unserved[1]
        assert desk.ownership.ready, "what can be served is"
        desk.kafka.silent = set()
        await desk.until(lambda: not desk.ownership.unserved)
        assert desk.ownership.owned[1].serving
        assert not desk.failures

    run(scenario)


def test_a_partition_whose_tables_can_not_be_read_holds_up_no_other() -> None:
    async def scenario(desk: Desk) -> None:
        desk.changelogs.broken = {1: KafkaConnectionError("no leader")}
        desk.ownership.on_assigned(1)
        await desk.until(lambda: 0 in desk.ownership.owned and desk.ownership.owned[0].serving)
        await desk.until(lambda: "no leader" in desk.ownership.unserved.get(1, ""))
        desk.changelogs.broken = {}
        await desk.until(lambda: len(desk.ownership.owned) == 2 and desk.ownership.owned[1].serving)
        assert not desk.ownership.unserved

    run(scenario)


def test_a_claim_that_was_overtaken_while_tables_were_read_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    restoring = Owner.restoring
    overtaken = []

    def restoring_late(owner: Any, *args: Any) -> Iterator[None]:
        if owner.number == 0 and not overtaken:
            overtaken.append(owner)
            owner.phase = Phase.LOST
        else:
            yield from restoring(owner, *args)

    monkeypatch.setattr(Owner, "restoring", restoring_late)

    async def scenario(desk: Desk) -> None:
        await desk.serve()
        assert desk.owns(0) == 2
        assert desk.owns(1) == 1

    run(scenario)


def test_rows_that_stay_wrong_are_read_from_a_wiped_store_and_leave_that_partition_unserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Owner.restoring

    def restoring(owner: Any, *args: Any) -> Iterator[None]:
        if owner.number == 1:
            raise RowError("a row is missing")
        yield from original(owner, *args)

    monkeypatch.setattr(Owner, "restoring", restoring)

    async def scenario(desk: Desk) -> None:
        desk.ownership.on_assigned(1)
        await desk.until(lambda: "a row is missing" in desk.ownership.unserved.get(1, ""))
        assert set(desk.tables["messages"].wiped) == {1}
        assert desk.ownership.owned[0].serving
        assert not desk.failures

    run(scenario)


def test_a_partition_with_a_row_that_cannot_be_read_is_filled_again_and_claimed_anew() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned, other = desk.ownership.owned[0], desk.ownership.owned[1]
        owned.owner.acked([7], (owned.owner.epoch, 1))
        owned.owner.partition.damage = RowError("row 0/1/messages/1 is damaged")
        desk.ownership.on_timer()
        assert 0 not in desk.ownership.owned
        assert all(table.wiped == [0] for table in desk.tables.values())
        await desk.until(lambda: 0 in desk.ownership.owned and desk.ownership.owned[0].serving)
        assert (desk.owns(0), desk.owns(1)) == (2, 1)
        assert desk.ownership.owned[1] is other
        await desk.until(lambda: any(b"acked" in r.value or b"offsets" in r.value for r in desk.kafka.logs[TP("m", 0)]))
        assert not desk.failures

    run(scenario)


def test_records_that_were_deleted_once_they_were_folded_are_not_read() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned = desk.ownership.owned[0]
        position = owned.owner.partition.markers_position
        desk.kafka.sought.clear()

        desk.ownership.on_offset_out_of_range(0, "m", position - 1)

        assert desk.ownership.owned[0] is owned
        assert desk.kafka.sought == [(TP("m", 0), position)]

    run(scenario)


def test_a_partition_whose_next_record_was_deleted_is_taken_over_again() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned = desk.ownership.owned[0]

        desk.ownership.on_offset_out_of_range(0, "m", owned.owner.partition.markers_position)

        assert 0 not in desk.ownership.owned
        await desk.until(lambda: 0 in desk.ownership.owned and desk.ownership.owned[0].serving)

    run(scenario)


def test_a_row_that_kafka_did_not_confirm_is_written_again() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        progress = desk.tables["progress"]
        desk.kafka.refused = [KafkaTimeoutError(), KafkaTimeoutError()]
        await asyncio.sleep(0.11)
        desk.ownership.on_timer()
        await desk.until(lambda: len(progress.rows) == 2)
        assert progress.again
        assert not desk.failures

    run(scenario)


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        (MessageSizeTooLargeError(), "max.message.bytes"),
        (TopicAuthorizationFailedError(), "grant Write"),
        (UnknownError(), "log of the broker"),
    ],
)
def test_a_row_that_kafka_refuses_puts_off_the_checkpoint_of_its_partition_alone(error: KafkaError, mend: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned, other = desk.ownership.owned[0], desk.ownership.owned[1]
        progress = desk.tables["progress"]
        desk.kafka.refusing[0] = error
        await asyncio.sleep(0.11)
        desk.ownership.on_timer()
        await desk.until(lambda: len(progress.again) > 2 and other.checkpoint_s is not None)

        assert not desk.failures
        assert desk.ownership.owned == {0: owned, 1: other}
        assert owned.serving
        assert owned.checkpoint_s is None
        stalled = desk.ownership.stalls.now()
        assert stalled.keys() == {0}
        assert stalled[0].topic == "progress-changelog"
        assert str(error) in stalled[0].reason
        assert mend in stalled[0].reason

        desk.kafka.refusing.clear()  # somebody has mended it
        await desk.until(lambda: owned.checkpoint_s is not None)
        assert desk.ownership.owned[0] is owned
        assert not desk.ownership.stalls.now()

    run(scenario)


def test_a_refused_row_is_no_step_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "REFUSED_AGAIN_S", 3600.0)

    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned = desk.ownership.owned[0]
        desk.kafka.refusing[0] = MessageSizeTooLargeError()
        await asyncio.sleep(0.11)
        desk.ownership.on_timer()
        await desk.until(lambda: desk.ownership.stalls.now())

        assert owned.owner.step(now_ms() + owned.owner.limits.step_timeout_ms + 1) is None

    run(scenario)


def test_a_partition_that_leaves_is_no_longer_listed_with_its_refused_checkpoint() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        desk.kafka.refusing[0] = MessageSizeTooLargeError()
        await asyncio.sleep(0.11)
        desk.ownership.on_timer()
        await desk.until(lambda: desk.ownership.stalls.now())

        desk.ownership.on_assignment({1})

        assert not desk.ownership.stalls.now()

    run(scenario)


def test_an_error_of_our_own_in_writing_a_row_stops_the_worker() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        desk.kafka.refused = [ValueError()]
        await asyncio.sleep(0.11)
        desk.ownership.on_timer()
        await desk.until(lambda: desk.failures)
        assert "was not written" in str(desk.failures[0])

    run(scenario)


def test_reading_ahead_of_a_full_partition_goes_on_for_a_while_after_a_receiver_found_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10_000
    starving = False

    async def scenario(desk: Desk) -> None:
        nonlocal now, starving
        await desk.serve()
        monkeypatch.setattr(module, "now_ms", lambda: now)
        desk.ownership.receivers = [SimpleNamespace(starving=lambda owned: starving, forget=lambda owned: None)]  # type: ignore[list-item]
        owned = desk.ownership.owned[0]

        def pauses(bytes_held: int) -> bool:
            owned.owner.partition.bytes = bytes_held
            desk.ownership.read_ahead.regulate(owned)
            return owned.paused

        full = desk.ownership.settings.read_ahead_bytes
        assert not pauses(0)
        assert pauses(full), "nobody waits"
        starving = True
        assert not pauses(full)
        starving = False
        now += READ_ON_MS - 1
        assert not pauses(full), "the next message finds it being read"
        assert pauses(desk.ownership.settings.memory_bytes), "there is no memory for more"
        assert not pauses(full)
        now += 1
        assert pauses(full)

    run(scenario)


# ---------------------------------------------------------------------- rebalances


def rebalanced(desk: Desk, *numbers: int) -> None:
    """The group has agreed on a new assignment."""
    generation = desk.app.consumer_generation_id + 1
    desk.app.rebalancing = True
    desk.kafka.assigned = {TP(topic, n) for topic in ("q", "m") for n in numbers}
    desk.app.consumer_generation_id = generation
    desk.ownership.on_assignment(set(numbers))
    desk.app.rebalancing = False
    desk.ownership.on_assigned(generation)


class Waits:
    """A receiver that takes what there is."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []

    def handed(self, owned: Any, handout: Any) -> None:
        self.got.append(handout.offsets)

    def wake(self, owned: Any) -> None: ...

    def starving(self, owned: Any) -> bool:
        return False

    def wants(self, queue: str) -> bool:
        return True

    def forget(self, owned: Any) -> None: ...


def messages(desk: Desk, number: int, count: int) -> None:
    """Messages arrive."""
    owned = desk.ownership.owned[number]
    position = owned.owner.partition.position
    records = [Record(position + i, int(time.time() * 1000), b"work", b"x") for i in range(count)]
    desk.ownership.on_queue_chunk(
        SimpleNamespace(  # type: ignore[arg-type]
            partition=number,
            generation=owned.generation,
            start=position,
            next=position + count,
            records=records,
            since_ms=None,
        )
    )


def take(desk: Desk, number: int, receiver: Any, limit: int = 1) -> Any:
    """A receiver asks one partition; the start is on its way when this returns."""
    owned = desk.ownership.owned[number]
    pending = owned.owner.acquire(["work"], limit, receiver, now_ms(), lease_ms=30_000)
    desk.ownership.drain(owned)
    return pending


def markers_of(desk: Desk, number: int) -> list[m.Marker]:
    return [marker for record in desk.kafka.logs[TP("m", number)] for marker in m.decode(record.value).markers]


def test_a_partition_that_stays_is_served_through_a_rebalance_and_claimed_once() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        messages(desk, 0, 3)
        owner, receiver = desk.ownership.owned[0].owner, Waits()
        desk.app.rebalancing = True
        take(desk, 0, receiver)
        await asyncio.sleep(0.01)
        assert receiver.got == [[0]], "while the group rejoins"
        take(desk, 0, receiver)  # on its way when the assignment comes
        rebalanced(desk, 0)
        await asyncio.sleep(0.01)
        assert receiver.got == [[0], [1]]
        assert desk.ownership.owned[0].owner is owner
        assert desk.owns(0) == 1
        assert desk.kafka.started[TP("m", 0)][1] == 2
        assert desk.kafka.started[TP("q", 0)] == (3, 2)
        assert desk.ownership.ready

    run(scenario)


def test_a_partition_that_comes_is_taken_over_while_the_others_stay() -> None:
    async def scenario(desk: Desk) -> None:
        desk.kafka.assigned = {TP("q", 0), TP("m", 0)}
        await desk.serve()
        rebalanced(desk, 0, 1)
        await desk.until(lambda: desk.ownership.ready)
        assert (desk.owns(0), desk.owns(1)) == (1, 1)

    run(scenario)


def test_a_partition_that_leaves_releases_what_was_started_and_drops_what_was_not_sent() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        messages(desk, 1, 2)
        receiver = Waits()
        desk.kafka.silent = {TP("m", 1)}
        taken = take(desk, 1, receiver)
        await asyncio.sleep(0)  # it is sent, Kafka has not confirmed it
        outbox = desk.ownership.outbox(1)
        outbox.put([Own("us", "late"), End(5, [0, 1], "acked", 1)])
        rebalanced(desk, 0)
        desk.kafka.silent = set()
        await asyncio.sleep(0.01)
        assert [type(marker) for marker in markers_of(desk, 1)] == [Own, End, Release]
        release = markers_of(desk, 1)[-1]
        assert isinstance(release, Release)
        assert (release.delivery, release.offsets, release.counted) == (taken.delivery, [0, 1], False)
        assert not receiver.got

    run(scenario)


def test_a_worker_that_has_left_serves_each_partition_until_another_one_takes_it() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        leaving = asyncio.ensure_future(desk.ownership.serve_until_taken(10))
        await asyncio.sleep(0)
        assert not desk.ownership.ready
        messages(desk, 1, 1)
        receiver = Waits()
        desk.ownership.receivers.append(receiver)
        take(desk, 1, receiver)
        await desk.until(lambda: receiver.got)
        desk.foreign_own(1)
        await desk.until(lambda: 1 not in desk.ownership.owned)
        assert desk.ownership.owned[0].serving
        desk.foreign_own(0)
        await desk.until(leaving.done)
        await asyncio.sleep(0.05)
        assert not desk.ownership.owned
        assert (desk.owns(0), desk.owns(1)) == (2, 2), "nothing is taken back"

    run(scenario)


def test_a_start_that_is_read_together_with_the_next_owner_goes_back_uncounted() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        desk.ownership._leaving = True
        messages(desk, 1, 1)
        receiver = Waits()
        desk.kafka.silent = {TP("m", 1)}  # so it is confirmed after it was read
        taken = take(desk, 1, receiver)
        await asyncio.sleep(0)
        owner = desk.ownership.owned[1].owner
        ((_, start),) = owner._sent.items()
        desk.kafka.silent = set()
        desk.kafka.append("m", 1, m.encode(list(start), owner.nonce, 1))
        desk.foreign_own(1)
        desk.read(1)
        await asyncio.sleep(0.01)
        assert not receiver.got
        release = markers_of(desk, 1)[-1]
        assert isinstance(release, Release)
        assert (release.delivery, release.offsets, release.counted) == (taken.delivery, [0, 1], False)

    run(scenario)


def test_a_worker_that_has_left_claims_nothing_and_waits_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "CLAIM_TIMEOUT_S", 0.02)

    async def scenario(desk: Desk) -> None:
        desk.kafka.silent = {TP("m", 1)}
        desk.ownership.on_assigned(1)
        await desk.until(lambda: 0 in desk.ownership.owned and desk.ownership.owned[0].serving)
        await desk.ownership.serve_until_taken(0.02)
        assert set(desk.ownership.owned) == {0}
        desk.kafka.silent = set()
        await asyncio.sleep(0.05)
        assert set(desk.ownership.owned) == {0}
        assert desk.owns(1) == 0

    run(scenario)


def test_a_worker_that_stops_takes_nothing_any_more() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned = desk.ownership.owned[0]
        assert await desk.ownership.hand_over(1.0)
        rebalanced(desk, 0, 1)
        await asyncio.sleep(0.02)
        assert not desk.ownership.owned
        assert owned.owner.phase is Phase.LEFT
        assert not desk.ownership.ready
        assert desk.owns(0) == 1

    run(scenario)


def test_a_damaged_row_concerns_its_partition_alone() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned, other = desk.ownership.owned[0], desk.ownership.owned[1]

        def damaged(*args: Any) -> None:
            raise RowError("checksum")

        owned.owner.work = damaged  # type: ignore[assignment, method-assign]
        desk.ownership.on_timer()
        assert desk.ownership.unserved[0] == "checksum"
        assert desk.tables["messages"].wiped == [0]
        await desk.until(lambda: desk.ownership.ready and not desk.ownership.unserved)
        assert desk.ownership.owned[1] is other
        assert desk.owns(0) == 2

    run(scenario)


def test_a_marker_of_a_later_version_stops_the_worker_with_a_line_that_names_it() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        content = b'{"v":2,"markers":[]'
        desk.kafka.append("m", 1, content + b"}")
        desk.read(1)
        assert not desk.failures
        seal = version_seal(content, place_of_markers(1), VERSIONS.ljust(32))
        desk.kafka.append("m", 1, b'%b,"seal":"%b"}' % (content, seal))
        desk.read(1)
        assert "version 2" in str(desk.failures[0])
        assert "version 2" in desk.ownership.unserved[1]
        assert 1 not in desk.ownership.owned

    run(scenario)


def test_a_fifo_queue_that_is_held_up_makes_its_partition_read_on() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        desk.ownership.receivers = [Waits()]
        owned = desk.ownership.owned[0]
        owned.owner.partition.bytes = desk.ownership.settings.read_ahead_bytes
        desk.ownership.read_ahead.regulate(owned)
        assert owned.paused
        owned.owner.partition._held_up.add("work")
        desk.ownership.read_ahead.regulate(owned)
        assert not owned.paused

    run(scenario)


def test_an_idle_partition_is_asked_nothing_until_something_happens_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    tick = Owner.tick

    def counted(owner: Any, *args: Any) -> bool:
        asked.append(owner.number)
        return tick(owner, *args)

    monkeypatch.setattr(Owner, "tick", counted)

    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owners = [owned.owner for owned in desk.ownership.owned.values()]
        while any(owner.next_ms(now_ms()) is not None for owner in owners):  # its first ticks and checkpoint
            desk.ownership.on_timer()
            for number in desk.ownership.owned:
                desk.read(number)
            await asyncio.sleep(0.005)
        desk.ownership.on_timer()
        asked.clear()
        for _ in range(100):
            desk.ownership.on_timer()
        assert asked == []
        owners[1].release([7], (owners[1].epoch, 1))
        for _ in range(100):
            desk.ownership.on_timer()
        assert set(asked) == {owners[1].number}

    run(scenario)


def test_a_partition_with_a_message_in_flight_is_asked_when_its_lease_may_be_over() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owner = desk.ownership.owned[0].owner
        owner.ingest(0, 1, [Record(0, int(time.time() * 1000), b"q", b"x", ())])
        assert owner.acquire(("q",), 1, NobodyAtAll(), now_ms(), lease_ms=200) is not None
        async with asyncio.timeout(5):
            while not owner.partition.has_ready("q"):
                desk.ownership.on_timer()
                desk.read(0)
                await asyncio.sleep(0.002)

    run(scenario)


class NobodyAtAll:
    """A receiver that keeps what it gets."""

    def handed(self, *_: Any) -> None: ...


def test_changed_settings_of_a_queue_count_for_partitions_that_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTINGS_MS", 0)

    async def scenario(desk: Desk) -> None:
        await desk.serve()
        for number in (0, 1):
            desk.ownership.due.forget(number)
        asked: list[int] = []
        monkeypatch.setattr(Owner, "tick", lambda owner, *_: asked.append(owner.number))
        desk.ownership.on_timer()
        assert asked == []
        desk.ownership.catalog.settings_changes += 1
        desk.ownership.on_timer()
        assert sorted(asked) == [0, 1]

    run(scenario)


def test_the_memory_of_all_partitions_is_a_sum_that_follows_each_and_forgets_those_that_leave() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        read_ahead, owned = desk.ownership.read_ahead, dict(desk.ownership.owned)

        def total() -> int:
            return sum(one.owner.partition.bytes for one in desk.ownership.owned.values())

        for number, count in ((0, 3), (1, 5), (0, 2)):
            position = owned[number].owner.partition.position
            records = [Record(position + i, int(time.time() * 1000), b"q", b"x" * 100, ()) for i in range(count)]
            owned[number].owner.ingest(position, position + count, records)
            desk.ownership.drain(owned[number])
            assert read_ahead._bytes == total() > 0
        rebalanced(desk, 1)
        assert read_ahead._bytes == total() > 0
        read_ahead.regulate(owned[0])
        assert read_ahead._bytes == total(), "one that has left counts no more"

    run(scenario)


def test_a_paused_partition_is_read_on_when_somebody_waits_for_it_though_nothing_happens_to_it() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned = desk.ownership.owned[0]
        starving: list[Any] = []
        receiver = SimpleNamespace(
            starving=lambda one: one in starving,
            wants=lambda queue: False,
            wake=lambda one: None,
            forget=lambda one: None,
        )
        desk.ownership.receivers = [receiver]  # type: ignore[list-item]
        records = [Record(0, int(time.time() * 1000), b"q", b"x" * 100, ())]
        owned.owner.ingest(0, 1, records)
        read_ahead: Any = desk.ownership.read_ahead
        read_ahead._settings = SimpleNamespace(read_ahead_bytes=1, memory_bytes=1 << 20)
        owned.starved_ms = -READ_ON_MS
        desk.ownership.read_ahead.regulate(owned)
        assert owned.paused
        desk.ownership.due.forget(0)
        desk.ownership.on_timer()
        assert owned.paused
        starving.append(owned)
        desk.ownership.on_timer()
        assert not owned.paused

    run(scenario)


def test_answers_that_nobody_has_read_count_in_the_memory_that_reading_ahead_may_use() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        read_ahead = desk.ownership.read_ahead
        assert read_ahead._has_memory()
        read_ahead.unread_bytes = lambda: desk.ownership.settings.memory_bytes
        assert not read_ahead._has_memory()

    run(scenario)


def test_a_full_memory_is_searched_ever_less_often_until_a_checkpoint_may_have_freed_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned = desk.ownership.owned[0]
        records = [Record(i, int(time.time() * 1000), b"q", b"x" * 1_000, ()) for i in range(10)]
        owned.owner.ingest(0, 10, records)
        searches, now = [], 1_000_000
        partition_class = type(owned.owner.partition)
        monkeypatch.setattr(partition_class, "shed", lambda partition, *_: searches.append(now) or 0)
        read_ahead: Any = desk.ownership.read_ahead
        read_ahead._settings = SimpleNamespace(read_ahead_bytes=1, memory_bytes=1_000)
        read_ahead._now_ms = lambda: now
        desk.ownership.receivers = [
            SimpleNamespace(
                starving=lambda one: True,
                wants=lambda queue: True,
                wake=lambda one: None,
                forget=lambda one: None,
            )
        ]  # type: ignore[list-item]

        def in_a_minute() -> int:
            nonlocal now
            searches.clear()
            for _ in range(3_000):
                now += 20
                read_ahead.regulate(owned)
            return len(set(searches))

        assert in_a_minute() <= 6 + 60_000 // SHED_PAUSE_MAX_MS + 2, "what is in flight may stay for hours"
        assert in_a_minute() <= 60_000 // SHED_PAUSE_MAX_MS + 1
        monkeypatch.setattr(owned.owner.partition, "persisted", 5)
        searches.clear()
        for _ in range(10):
            now += 20
            read_ahead.regulate(owned)
        assert searches, "it may be dropped now"

    run(scenario)


@pytest.mark.parametrize("row", ["manifest", "page"])
def test_a_row_of_a_later_version_stops_the_worker_and_says_which_version_is_needed(row: str) -> None:
    async def scenario(desk: Desk) -> None:
        def newer(number: int) -> None:
            raise NewerRowError(f"{row} of version 3, and this worker reads up to version 2: run a marq that …")

        desk.changelogs.reading = newer
        desk.ownership.on_assigned(1)
        await desk.until(lambda: desk.failures)
        assert str(desk.failures[0]).startswith(f"partition 0: {row} of version 3, and this worker reads up to")
        assert all(table.wiped == [] for table in desk.tables.values()), "there is nothing to mend"

    run(scenario)


def test_fetches_are_hurried_for_an_own_record_behind_one_that_is_not_read() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.serve()
        owned = desk.ownership.owned[0]
        ticks = []
        for foreign in (False, True):
            if foreign:
                desk.kafka.append("m", 0, m.encode([End(owned.owner.epoch, [0], "acked", 7)], "other/1", 1))
            before = desk.kafka.hurried
            await owned.outbox.put_confirmed([Tick()])
            ticks.append(desk.kafka.hurried - before)
        assert ticks == [0, 1]

    run(scenario)
