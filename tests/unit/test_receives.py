"""When a receive is answered, and with what, if its messages come from several partitions."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.cluster.peers import Peers
from app.engine import read_up
from app.engine.queue_records import id_of_queue
from app.engine.read_up import ReadUp
from app.service import receives as module
from app.service.meters import Meters
from app.service.receipts import Receipts
from app.service.receives import ReceiveHere, Receives
from app.service.waiter import Waiter
from marq.core.markers import End, Release, encode
from marq.core.policies import QueueSettings
from marq.core.starts import STALLED_MS
from marq.errors import RowError
from marq.protocol.headers import H_GROUP
from marq.protocol.messages import Received
from tests.unit.core_helpers import DEFAULTS, LEASE_MS, Worker
from tests.unit.peer_helpers import Network, alone

#: Names of the topics.
TOPICS: Any = SimpleNamespace(queue="marq.queue", markers="marq.markers")


class Partition:
    """A partition of this worker, served by a real core; its starts are confirmed when the test says so."""

    def __init__(self, number: int, settings: QueueSettings = DEFAULTS) -> None:
        self.number = number
        self.core = Worker(settings={"q": settings}).serve()
        self.core.send(1)
        self.owner = self.core.owner
        self.outbox = SimpleNamespace(put=lambda markers: self.core.outbox.extend(markers))
        self.serving = True
        self.said: list[Any] = []

    def ends(self, topic: str) -> int:
        """Where one of the two logs ends."""
        return len(self.core.queue_log if topic == TOPICS.queue else self.core.broker.log)

    def confirm(self, clock_ms: int) -> None:
        """The owner's markers get into the log, and its deliveries are handed out."""
        self.core.clock_ms = clock_ms
        said = self.core.flush()
        for handout in self.core.handouts(empty=True):
            handout.receiver.handed(self, handout)
        self.said = said + self.core.flush()

    def stall(self, clock_ms: int) -> None:
        """Its log has taken nothing for a while."""
        self.core.clock_ms = clock_ms
        self.owner.work(clock_ms)
        for handout in self.core.handouts(empty=True):
            handout.receiver.handed(self, handout)


class Desk:
    """Receives of two partitions with one message each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, peers: Peers | None = None) -> None:
        self.clock_ms = 10_000
        monkeypatch.setattr(module, "now_ms", lambda: self.clock_ms)
        self.partitions = [Partition(0), Partition(1)]
        self.questions = 0  # where the logs end
        self.hurried = 0  # times that somebody waited for what is not read yet
        receipts = Receipts(lambda: b"secret")
        self.given_back: list[Any] = []
        self.settings = DEFAULTS
        catalog = SimpleNamespace(require_receivable=lambda queue: None, settings_of=lambda queue: self.settings)
        owned: Any = dict(enumerate(self.partitions))
        self.read_up = ReadUp(self.ask, lambda: TOPICS, owned, lambda: None, asyncio.ensure_future)
        self.receives = Receives(
            SimpleNamespace(  # type: ignore[arg-type]
                owned=owned,
                hurry=self.hurry,
                read_up=self.read_up,
                copies=SimpleNamespace(are_dying=lambda owned, queue: False),
                spawn=asyncio.ensure_future,
                receivers=[],
                catalog=catalog,
                topics=TOPICS,
                outbox=lambda number: SimpleNamespace(put=self.given_back.extend),
                throttle=SimpleNamespace(
                    room=lambda owned, wanted, lease_ms: wanted,
                    is_late=lambda owned, lease_ms: False,
                ),
            ),
            receipts,
            Meters(),
            peers or alone(),
        )

    def hurry(self) -> None:
        self.hurried += 1

    async def ask(self, tps: Any) -> Any:
        self.questions += 1
        await asyncio.sleep(0)
        return {tp: self.partitions[tp.partition].ends(tp.topic) for tp in tps}

    def read(self, number: int) -> None:
        """A partition is read to its end."""
        partition = self.partitions[number]
        partition.core.read_queue()
        partition.core.read_markers()
        self.read_up.advanced(partition)  # type: ignore[arg-type]
        if partition.owner.take_woken():
            self.receives.wake(partition)  # type: ignore[arg-type]

    def confirm(self, number: int) -> None:
        self.partitions[number].confirm(self.clock_ms)

    def stall(self) -> Partition:
        """One of the partitions that were asked for something stalls."""
        (stalled,) = [partition for partition in self.partitions if partition.core.outbox or partition.core.appends]
        stalled.core.append()
        self.clock_ms += STALLED_MS
        stalled.stall(self.clock_ms)
        return stalled

    async def receive(self, wait_ms: int = 5_000, lease_ms: int = LEASE_MS, limit: int = 10, name: str = "r") -> Any:
        return await self.receives.receive("q", limit, wait_ms, lease_ms, name, lambda: False)

    def limit(self, **settings: Any) -> Partition:
        """One partition, whose queue has limits."""
        self.receives.ownership.owned.clear()
        self.settings = QueueSettings(**settings)
        partition = self.receives.ownership.owned[0] = Partition(0, self.settings)  # type: ignore[assignment]
        self.partitions = [partition]
        return partition

    async def take(self, **options: Any) -> Any:
        """A receive while Kafka confirms all."""
        return await answered(asyncio.ensure_future(self.receive(**options)), self)


def run(scenario: Callable[[Desk], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with asyncio.timeout(5):
            await scenario(Desk(monkeypatch))

    asyncio.run(main())


def test_a_receive_that_has_something_does_not_wait_for_a_slow_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        asked = asyncio.ensure_future(desk.receive())
        await asyncio.sleep(0)
        desk.confirm(0)
        messages = await asked
        assert [(one.partition, one.offset) for one in messages] == [(0, 0)]

    run(scenario, monkeypatch)


def test_what_comes_later_goes_back_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        asked = asyncio.ensure_future(desk.receive())
        await asyncio.sleep(0)
        desk.confirm(0)
        await asked
        desk.confirm(1)
        (release,) = [marker for marker in desk.partitions[1].said if isinstance(marker, Release)]
        assert not release.counted
        assert desk.partitions[1].owner.partition.receives(0) == 0

    run(scenario, monkeypatch)


def test_what_comes_at_once_is_answered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        asked = asyncio.ensure_future(desk.receive())
        await asyncio.sleep(0)
        desk.confirm(0)
        desk.confirm(1)
        assert sorted((one.partition, one.offset) for one in await asked) == [(0, 0), (1, 0)]

    run(scenario, monkeypatch)


def test_an_answer_has_a_largest_size_and_what_does_not_fit_goes_back_uncounted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES", 100)

    async def scenario(desk: Desk) -> None:
        (first,) = desk.partitions[:1]
        first.core.send(2, value=b"x" * 60)
        asked = asyncio.ensure_future(desk.receive())
        await asyncio.sleep(0)
        desk.confirm(1)
        desk.confirm(0)
        assert sorted((one.partition, one.offset) for one in await asked) == [(0, 0), (0, 1), (1, 0)]
        (release,) = [marker for marker in first.said if isinstance(marker, Release)]
        assert (release.offsets, release.counted) == ([2, 3], False)

    run(scenario, monkeypatch)


def test_a_message_larger_than_an_answer_is_answered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES", 0)

    async def scenario(desk: Desk) -> None:
        asked = asyncio.ensure_future(desk.receive())
        await asyncio.sleep(0)
        desk.confirm(0)
        desk.confirm(1)
        assert [(one.partition, one.offset) for one in await asked] == [(0, 0)]

    run(scenario, monkeypatch)


def test_nothing_leaves_after_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        asked = asyncio.ensure_future(desk.receive(lease_ms=300))
        await asyncio.sleep(0)
        desk.confirm(0)
        desk.confirm(1)
        desk.clock_ms += 300  # this process stands still before it answers
        assert await asked == []
        assert [(type(marker), marker.counted) for marker in desk.given_back] == [(Release, False)] * 2

    run(scenario, monkeypatch)


def test_who_waits_for_a_stalled_partition_is_served_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        asked = asyncio.ensure_future(desk.receive(limit=1))
        await asyncio.sleep(0)
        stalled = desk.stall()
        await asyncio.sleep(0)
        other = 1 - stalled.number
        desk.confirm(other)
        assert [one.partition for one in await asked] == [other]

    run(scenario, monkeypatch)


def test_a_receive_does_not_wait_for_a_stalled_partition_beyond_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        desk.partitions.pop()
        del desk.receives.ownership.owned[1]
        asked = asyncio.ensure_future(desk.receive(wait_ms=1))
        await asyncio.sleep(0.01)
        assert not asked.done()
        desk.stall()
        assert await asked == []

    run(scenario, monkeypatch)


def test_other_workers_hear_nothing_of_what_lies_in_a_stalled_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        asked = asyncio.ensure_future(desk.receive(wait_ms=1, limit=1))
        await asyncio.sleep(0)
        stalled = desk.stall()
        stalled.core.send(1)
        del desk.receives.ownership.owned[1 - stalled.number]
        assert await asked == []
        told: list[str] = []
        desk.receives.peers = SimpleNamespace(watchers={"q": {}}, tell=told.append)  # type: ignore[assignment]
        desk.receives.wake(stalled)  # type: ignore[arg-type]
        assert not desk.receives.has_ready("q")
        assert told == []

    run(scenario, monkeypatch)


def test_a_receiver_that_may_have_no_more_keeps_none_from_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        partition = desk.limit(max_in_flight_per_receiver=1)
        assert len(await desk.take(name="full")) == 1
        full = [asyncio.ensure_future(desk.receive(name="full")) for _ in range(3)]
        behind = asyncio.ensure_future(desk.receive(name="other"))
        await asyncio.sleep(0)
        partition.core.send(2)
        desk.receives.wake(partition)  # type: ignore[arg-type]
        desk.confirm(0)
        assert len(await behind) == 1
        assert len(await desk.take(name="third")) == 1
        assert not any(one.done() for one in full)
        assert desk.receives.waiting_count("q") == 3
        for one in full:
            one.cancel()

    run(scenario, monkeypatch)


@pytest.mark.parametrize("here", [True, False])
def test_who_comes_later_gets_what_those_who_wait_may_not_have(monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    async def scenario(desk: Desk) -> None:
        partition = desk.limit(max_in_flight_per_receiver=1)
        await desk.take(name="full")
        full = asyncio.ensure_future(desk.receive(name="full"))
        await asyncio.sleep(0)
        partition.core.send(1)
        if here:
            asked = asyncio.ensure_future(desk.receive(name="other", wait_ms=0))
        else:
            asked = asyncio.ensure_future(desk.receives.receive_here(ReceiveHere("q", 1, LEASE_MS, "other")))
        await asyncio.sleep(0)
        desk.confirm(0)
        assert len(await asked) == 1
        full.cancel()

    run(scenario, monkeypatch)


def test_those_who_wait_are_served_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        partition = desk.limit()
        await desk.take()
        line = [asyncio.ensure_future(desk.receive(limit=1, name=f"r{i}")) for i in range(4)]
        await asyncio.sleep(0)
        partition.core.send(2)
        desk.receives.wake(partition)  # type: ignore[arg-type]
        desk.confirm(0)
        await asyncio.sleep(0)
        assert [one.done() for one in line] == [True, True, False, False]
        for one in line:
            one.cancel()

    run(scenario, monkeypatch)


def test_a_worker_that_stops_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.receives.close()
        assert await desk.receive() == []
        assert await desk.receives.receive_here(ReceiveHere("q", 10, LEASE_MS, "r")) == []
        assert not any(p.core.outbox or p.core.appends for p in desk.partitions)

    run(scenario, monkeypatch)


def test_a_row_that_can_not_be_read_back_concerns_its_partition_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        def damaged(*args: Any, **options: Any) -> None:
            raise RowError("checksum")

        let_go: list[Any] = []

        def recover_again(owned: Any, reason: str, wipe: bool) -> None:
            let_go.append((owned.number, reason, wipe))
            owned.serving = False

        desk.receives.ownership.recover_again = recover_again  # type: ignore[assignment]
        monkeypatch.setattr(desk.partitions[0].owner, "acquire", damaged)
        asked = asyncio.ensure_future(desk.receive())
        await asyncio.sleep(0)
        desk.confirm(1)
        assert [one.partition for one in await asked] == [1]
        assert let_go == [(0, "checksum", True)]

    run(scenario, monkeypatch)


# -- what was sent just before


def test_an_old_backlog_of_a_group_keeps_no_other_partition_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        empty(desk)
        noisy, quiet = (partition.core for partition in desk.partitions)
        noisy.send(50, headers=[(H_GROUP, b"noisy")])
        quiet.broker.now_ms += 60_000
        quiet.send(1, headers=[(H_GROUP, b"quiet")])
        received = [places(await desk.take(limit=1))[0] for _ in range(3)]
        assert (1, 1) in received

    run(scenario, monkeypatch)


def unread(desk: Desk, number: int, count: int = 1) -> None:
    """Messages of a partition that Kafka has, and that were not read yet."""
    core = desk.partitions[number].core
    for _ in range(count):
        core.queue_log.append(core.record())


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def answered(asked: asyncio.Future[list[Received]], *desks: Desk) -> list[Received]:
    """The answer; Kafka confirms all that is sent until then."""
    while not asked.done():
        for desk in desks:
            for partition in desk.partitions:
                partition.confirm(desk.clock_ms)
        await asyncio.sleep(0.001)
    return await asked


def places(messages: list[Received]) -> list[tuple[int, int]]:
    return [(one.partition, one.offset) for one in messages]


def empty(desk: Desk) -> None:
    for partition in desk.partitions:
        partition.core.owner.partition.take("q", 10, DEFAULTS)


def test_a_receive_that_does_not_wait_finds_what_is_in_the_log_and_was_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(desk: Desk) -> None:
        empty(desk)
        unread(desk, 1)
        asked = asyncio.ensure_future(desk.receive(wait_ms=0))
        await turns()
        assert not asked.done()
        desk.read(1)
        assert places(await answered(asked, desk)) == [(1, 1)]

    run(scenario, monkeypatch)


def test_who_gets_something_before_all_was_read_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        empty(desk)
        unread(desk, 0)
        unread(desk, 1)
        asked = asyncio.ensure_future(desk.receive(wait_ms=0))
        await turns()
        desk.read(1)  # and 0 is not
        assert places(await answered(asked, desk)) == [(1, 1)]
        await turns()
        gc.collect()
        await turns()
        assert not complaints

    run(scenario, monkeypatch)


def test_a_receive_that_does_not_wait_finds_what_an_ack_in_the_log_makes_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        partition = desk.limit(fifo=True)
        partition.core.settings["q"] = QueueSettings(fifo=True)
        partition.core.send(1)
        (first,) = await desk.take(limit=1)
        epoch, delivery = desk.receives.receipts.read(first.receipt)[1:3]
        partition.core.broker.append(encode([End(epoch, [0, 1], "acked", delivery)]))
        asked = asyncio.ensure_future(desk.receive(wait_ms=0))
        await turns()
        assert not asked.done()
        desk.read(0)
        assert places(await answered(asked, desk)) == [(0, 1)]

    run(scenario, monkeypatch)


def test_when_all_was_read_nothing_is_waited_for_and_receives_share_one_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(desk: Desk) -> None:
        empty(desk)
        assert await asyncio.gather(*(desk.receive(wait_ms=0) for _ in range(20))) == [[]] * 20
        assert desk.questions == 1
        assert not desk.read_up.rounds and not desk.receives.waited_for()

    run(scenario, monkeypatch)


def test_who_finds_enough_or_waits_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        asked = asyncio.ensure_future(desk.receive(wait_ms=0, limit=2))
        await asyncio.sleep(0)
        for number in (0, 1):
            desk.confirm(number)
        assert await asked
        waits = asyncio.ensure_future(desk.receive(wait_ms=5_000))
        await turns()
        assert desk.questions == 0
        waits.cancel()

    run(scenario, monkeypatch)


def test_a_question_that_was_sent_before_says_nothing_to_who_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        empty(desk)
        answers: list[asyncio.Future[None]] = []

        async def ask(tps: Any) -> Any:
            ends = {tp: desk.partitions[tp.partition].ends(tp.topic) for tp in tps}
            answers.append(asyncio.get_running_loop().create_future())
            await answers[-1]
            return ends

        desk.read_up._ask = ask
        early = asyncio.ensure_future(desk.receive(wait_ms=0))
        await turns()
        unread(desk, 0)
        late = asyncio.ensure_future(desk.receive(wait_ms=0, name="late"))
        await turns()
        answers[0].set_result(None)
        assert await early == []
        await turns()
        answers[1].set_result(None)
        await turns()
        assert not late.done()
        desk.read(0)
        assert places(await answered(late, desk)) == [(0, 1)]

    run(scenario, monkeypatch)


def test_a_receive_waits_for_what_is_not_read_no_longer_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_up, "READ_UP_S", 0.01)

    async def scenario(desk: Desk) -> None:
        empty(desk)
        unread(desk, 0)
        assert await desk.receive(wait_ms=0) == []
        assert not desk.receives.waited_for()

    run(scenario, monkeypatch)


def test_a_partition_that_goes_to_another_worker_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        empty(desk)
        unread(desk, 0)
        asked = asyncio.ensure_future(desk.receive(wait_ms=0))
        await turns()
        desk.partitions[0].serving = False
        desk.read_up.advanced(desk.partitions[0])  # type: ignore[arg-type]
        assert await asked == []

    run(scenario, monkeypatch)


def test_what_another_worker_has_not_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_: Desk) -> None:
        network = Network()
        here, other = (Desk(monkeypatch, network.join(url)) for url in ("http://a", "http://b"))
        empty(here)
        empty(other)
        unread(other, 0)
        asked = asyncio.ensure_future(here.receive(wait_ms=0))
        await turns()
        assert not asked.done()
        other.read(0)
        assert places(await answered(asked, here, other)) == [(0, 1)]

    run(scenario, monkeypatch)


# -- a receive is whole


def late_to(desk: Desk) -> None:
    """Partition 0 has a message that is ready, and both have one that was not read yet."""
    empty(desk)
    desk.partitions[0].core.send(1)
    unread(desk, 0)
    unread(desk, 1)


@pytest.mark.parametrize("wait_ms", [0, 5_000])
def test_a_receive_with_room_gets_everything_that_was_confirmed_before_it_came(
    monkeypatch: pytest.MonkeyPatch, wait_ms: int
) -> None:
    async def scenario(desk: Desk) -> None:
        late_to(desk)
        asked = asyncio.ensure_future(desk.receive(wait_ms=wait_ms))
        await turns()
        desk.confirm(0)
        await turns()
        assert not asked.done()
        desk.read(0)
        desk.read(1)
        assert sorted(places(await answered(asked, desk))) == [(0, 1), (0, 2), (1, 1)]
        assert desk.questions == 1

    run(scenario, monkeypatch)


def test_who_waits_for_a_moment_gets_with_the_first_message_what_was_confirmed_before_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(desk: Desk) -> None:
        empty(desk)
        unread(desk, 0)
        unread(desk, 1)
        asked = asyncio.ensure_future(desk.receive())
        await turns()
        desk.read(0)
        desk.confirm(0)
        await turns()
        assert not asked.done()
        desk.read(1)
        assert sorted(places(await answered(asked, desk))) == [(0, 1), (1, 1)]

    run(scenario, monkeypatch)


def test_who_has_waited_for_long_is_answered_with_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG_S", 0.0)

    async def scenario(desk: Desk) -> None:
        empty(desk)
        asked = asyncio.ensure_future(desk.receive())
        await turns()
        unread(desk, 0)
        unread(desk, 1)
        desk.read(0)
        assert places(await answered(asked, desk)) == [(0, 1)]
        assert not desk.questions

    run(scenario, monkeypatch)


def test_a_partition_that_is_not_read_in_time_holds_up_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        late_to(desk)
        desk.read(0)
        assert places(await answered(asyncio.ensure_future(desk.receive(wait_ms=0)), desk)) == [(0, 1), (0, 2)]
        assert not desk.receives.wants("q")

    run(scenario, monkeypatch)


def test_while_a_receive_looks_reading_goes_on_for_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        late_to(desk)
        asked = asyncio.ensure_future(desk.receive(wait_ms=0))
        await turns()
        assert desk.receives.wants("q") and desk.receives.starving(desk.partitions[1])  # type: ignore[arg-type]
        asked.cancel()
        await turns()
        assert not desk.receives.wants("q")

    run(scenario, monkeypatch)


@pytest.mark.parametrize("wait_ms", [0, 5_000])
def test_a_receive_gets_as_many_of_a_group_as_were_confirmed(monkeypatch: pytest.MonkeyPatch, wait_ms: int) -> None:
    async def scenario(desk: Desk) -> None:
        partition = desk.limit(fifo=True)
        headers = [("marq-group", b"g")]
        partition.core.send(1, headers=headers)
        partition.core.queue_log.append(partition.core.record(headers=headers))
        asked = asyncio.ensure_future(desk.receive(wait_ms=wait_ms))
        await turns()
        assert not partition.core.appends, "the second one could not be taken after the first"
        desk.read(0)
        assert places(await answered(asked, desk)) == [(0, 1), (0, 2), (0, 0)]

    run(scenario, monkeypatch)


def test_who_waits_for_a_fifo_queue_looks_when_the_first_of_a_group_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        partition = desk.limit(fifo=True)
        await desk.take()
        asked = asyncio.ensure_future(desk.receive())
        behind = asyncio.ensure_future(desk.receive(limit=1, name="behind"))
        await turns()
        partition.core.send(1, headers=[("marq-group", b"g")])
        for group in (b"g", b"h"):
            partition.core.queue_log.append(partition.core.record(headers=[("marq-group", group)]))
        desk.receives.wake(partition)  # type: ignore[arg-type]
        await turns()
        assert not partition.core.appends
        desk.read(0)
        assert places(await answered(asked, desk)) == [(0, 1), (0, 2), (0, 3)]
        assert not behind.done()
        behind.cancel()

    run(scenario, monkeypatch)


def test_who_waits_for_a_fifo_queue_of_a_stalled_partition_lets_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        partition = desk.limit(fifo=True)
        partition.owner.starts.stalled = True
        asked = asyncio.ensure_future(desk.receive())
        await turns()
        assert desk.receives.waiting_count("q") == 1
        partition.owner.starts.stall_is_over()
        desk.receives.wake(partition)  # type: ignore[arg-type]
        assert places(await answered(asked, desk)) == [(0, 0)]

    run(scenario, monkeypatch)


def test_from_a_fifo_queue_with_enough_a_receive_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        partition = desk.limit(fifo=True)
        await desk.take()  # now its order is kept
        for group in (b"g", b"g", b"h"):
            partition.core.send(1, headers=[("marq-group", group)])
        assert places(await desk.take(limit=2, wait_ms=0)) == [(0, 1), (0, 2)]
        questions = desk.questions
        assert places(await desk.take(limit=1, wait_ms=0)) == [(0, 3)]
        assert desk.questions == questions

    run(scenario, monkeypatch)


def test_a_receive_with_room_gets_what_other_workers_have_and_have_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_: Desk) -> None:
        network = Network()
        here, other = (Desk(monkeypatch, network.join(url)) for url in ("http://a", "http://b"))
        empty(other)
        other.partitions[0].core.send(1)
        unread(other, 1)
        asked = asyncio.ensure_future(here.receive(wait_ms=0))
        await turns()
        other.read(1)
        found = await answered(asked, here, other)
        assert sorted(places(found)) == [(0, 0), (0, 1), (1, 0), (1, 1)]

    run(scenario, monkeypatch)


def test_an_answer_has_a_largest_size_wherever_its_messages_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES", 100)

    async def scenario(_: Desk) -> None:
        network = Network()
        here, other = (Desk(monkeypatch, network.join(url)) for url in ("http://a", "http://b"))
        empty(here)
        empty(other)
        here.partitions[0].core.send(1, value=b"x" * 60)
        other.partitions[0].core.send(2, value=b"x" * 30)
        assert len(await answered(asyncio.ensure_future(here.receive(wait_ms=0)), here, other)) == 2
        # the other worker keeps what does not fit, if it was asked after the first message had come here
        assert [(one.offsets, one.counted) for one in here.given_back] in ([], [([2, 3], False)])

    run(scenario, monkeypatch)


async def at_once(found: Any) -> Any:
    return found


# -- what another worker has handed out is answered or given back


class Elsewhere:
    """Another worker with a message, which answers when the test says so."""

    def __init__(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        empty(desk)
        self.answer: asyncio.Future[list[Received]] = asyncio.get_running_loop().create_future()
        self.message = Received(desk.receives.receipts.make(7, 1, 1, 5, 1, id_of_queue("q")), "q", "t", 7, 5, 1, 0, b"")
        monkeypatch.setattr(desk.receives.peers, "call", self.call)

    async def call(self, *_: Any, **__: Any) -> list[Received]:
        return await self.answer

    def hand_out(self) -> None:
        self.answer.set_result([self.message])


def test_what_comes_from_another_worker_for_a_receive_that_is_over_goes_back_uncounted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(desk: Desk) -> None:
        elsewhere = Elsewhere(desk, monkeypatch)
        asked = asyncio.ensure_future(desk.receive())
        await turns()
        fetch = asyncio.ensure_future(desk.receives.fetch("q", "http://b"))
        await turns()
        asked.cancel()
        await turns()
        elsewhere.hand_out()
        await fetch
        (release,) = desk.given_back
        assert not release.counted

    run(scenario, monkeypatch)


def test_a_worker_that_is_slow_holds_up_no_messages_and_what_it_hands_out_too_late_goes_back_uncounted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ANSWER_AFTER_S", 0.01)

    async def scenario(desk: Desk) -> None:
        elsewhere = Elsewhere(desk, monkeypatch)
        monkeypatch.setattr(desk.receives.polling, "ready_at", lambda *_, **__: at_once(["http://b"]))
        desk.partitions[0].core.send(1)
        assert places(await answered(asyncio.ensure_future(desk.receive(wait_ms=0)), desk)) == [(0, 1)]
        assert not desk.given_back
        elsewhere.hand_out()
        await turns()
        (release,) = desk.given_back
        assert not release.counted

    run(scenario, monkeypatch)


def test_of_messages_from_elsewhere_those_beyond_the_limit_go_back_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        elsewhere = Elsewhere(desk, monkeypatch)
        waiter = Waiter("q", 1, LEASE_MS, "r", lambda: False, False, False)
        elsewhere.hand_out()
        for _ in range(2):
            await desk.receives._fetch_for(waiter, "http://b")
        assert waiter.messages == [elsewhere.message]
        (release,) = desk.given_back
        assert not release.counted

    run(scenario, monkeypatch)


def test_a_worker_that_stops_waits_for_what_others_have_handed_out_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        elsewhere = Elsewhere(desk, monkeypatch)
        asked = asyncio.ensure_future(desk.receive())
        await turns()
        fetch = asyncio.ensure_future(desk.receives.fetch("q", "http://b"))
        await turns()
        closing = asyncio.ensure_future(desk.receives.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        elsewhere.hand_out()
        assert await asked == [elsewhere.message]
        await closing
        assert fetch.done()

    run(scenario, monkeypatch)


def test_what_comes_to_a_worker_that_stops_for_nobody_goes_back_before_it_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(desk: Desk) -> None:
        elsewhere, gone = Elsewhere(desk, monkeypatch), False
        asked = asyncio.ensure_future(desk.receives.receive("q", 10, 5_000, LEASE_MS, "r", lambda: gone))
        await turns()
        fetch = asyncio.ensure_future(desk.receives.fetch("q", "http://b"))
        await turns()
        gone = True
        closing = asyncio.ensure_future(desk.receives.close())
        elsewhere.hand_out()
        await closing
        (release,) = desk.given_back
        assert not release.counted
        assert (await asked, fetch.done()) == ([], True)

    run(scenario, monkeypatch)


# -- oldest first


def test_a_receive_gives_the_oldest_messages_of_all_partitions_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        empty(desk)
        for number in (1, 0, 0, 1, 0, 1, 1, 0):  # one after the other
            broker = desk.partitions[number].core.broker
            broker.now_ms = desk.clock_ms = desk.clock_ms + 1
            desk.partitions[number].core.send(1)
        got: list[Any] = []
        for limit in (3, 1, 10):
            asked = asyncio.ensure_future(desk.receive(limit=limit))
            await asyncio.sleep(0)
            for number in (1, 0):
                desk.confirm(number)
            got += await asked
        stamps = [one.sent_ms for one in got]
        assert len(stamps) == 8
        assert stamps == sorted(stamps)

    run(scenario, monkeypatch)


def test_who_finds_nothing_hurries_the_fetches_and_who_finds_something_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(desk: Desk) -> None:
        asked = asyncio.ensure_future(desk.receive())
        await asyncio.sleep(0)
        desk.confirm(0)
        desk.confirm(1)
        assert len(await asked) == 2
        counts = [desk.hurried]
        waiting = asyncio.ensure_future(desk.receive())
        await asyncio.sleep(0)
        counts.append(desk.hurried)
        desk.partitions[0].core.send()
        desk.read(0)
        counts.append(desk.hurried)  # who waited wants more
        assert counts == [0, 1, 2]
        desk.confirm(0)
        assert len(await waiting) == 1

    run(scenario, monkeypatch)
