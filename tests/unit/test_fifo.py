"""FIFO queues: the messages of a group are delivered in order, by one delivery at a time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marq.core import invariants, memory
from marq.core.agenda import Handout
from marq.core.markers import End, Keepalive, encode
from marq.core.policies import QueueSettings
from marq.core.ranges import ranges_of
from marq.protocol.headers import H_GROUP
from tests.unit.core_helpers import LEASE_MS, Broker, TwoLogs, Worker

FIFO = QueueSettings(fifo=True)


def of_groups(*groups: str | None, **options: Any) -> TwoLogs:
    """Messages of these groups, read, in a partition that is owned."""
    logs = TwoLogs()
    logs.own()
    for group in groups:
        send(logs, group, **options)
    logs.read()
    return logs


def send(logs: TwoLogs, group: str | None, **options: Any) -> int:
    headers = [] if group is None else [("marq-group", group.encode())]
    return logs.send(headers=headers, **options)


def take(logs: TwoLogs, limit: int = 10, settings: QueueSettings = FIFO, **options: Any) -> list[int]:
    return logs.partition.take("q", limit, settings, **options)


def deliver(logs: TwoLogs, limit: int = 10, **options: Any) -> Any:
    """Take and start."""
    taken = take(logs, limit)
    delivery = logs.start(*taken, **options)
    logs.partition.unreserve(taken)
    return delivery


def test_messages_of_one_group_come_in_order_and_together() -> None:
    assert take(of_groups("a", "a", "a"), 2) == [0, 1]


def test_nothing_of_a_group_is_taken_while_one_is_reserved() -> None:
    logs = of_groups("a", "a")
    take(logs, 1)
    assert take(logs) == []


def test_nothing_of_a_group_is_taken_while_one_is_in_flight() -> None:
    logs = of_groups("a", "a")
    deliver(logs, 1)
    assert take(logs) == []


def test_a_group_that_takes_turns_waits_for_nothing_when_a_message_of_it_is_put_back() -> None:
    logs = of_groups("a", "a", "a")
    logs.partition.put_back(take(logs, 1))
    logs.partition.reserve("q", [0])
    logs.partition.reserve("q", [1])

    logs.partition.put_back([1])

    invariants.check(logs.partition)
    assert take(logs) == []
    logs.partition.put_back([0])
    assert take(logs) == [0, 1, 2]


def test_other_groups_go_on() -> None:
    logs = of_groups("a", "b", "a", "b")
    assert take(logs, 1) == [0]
    assert take(logs) == [1, 3]


def test_an_ack_lets_the_next_one_go() -> None:
    logs = of_groups("a", "a")
    delivery = deliver(logs, 1)
    logs.partition.woken.clear()
    logs.ack(delivery)
    assert "q" in logs.partition.woken
    assert take(logs) == [1]


def test_part_of_a_delivery_is_not_enough() -> None:
    logs = of_groups("a", "a", "a")
    delivery = deliver(logs, 2)
    logs.ack(delivery, 1)
    assert take(logs) == []
    logs.ack(delivery, 0)
    assert take(logs) == [2]


def test_a_lease_that_ends_brings_back_the_lowest_first() -> None:
    logs = of_groups("a", "a", "a")
    delivery = deliver(logs, 2)
    logs.ack(delivery, 0)
    logs.wait(LEASE_MS)
    assert take(logs) == [1, 2]


def test_an_uncounted_release_goes_back_to_its_place() -> None:
    logs = of_groups("a", "a", "a")
    delivery = deliver(logs, 2)
    logs.release(delivery, counted=False)
    assert take(logs) == [0, 1, 2]


def test_a_release_with_a_delay_holds_the_group_up() -> None:
    logs = of_groups("a", "a", "b")
    delivery = deliver(logs, 1)
    logs.release(delivery, delay_ms=5_000)
    assert take(logs) == [2]
    logs.wait(5_000)
    assert take(logs) == [0, 1]


def test_what_comes_before_one_that_waits_is_delivered() -> None:
    logs = of_groups("a", "a", "a")
    delivery = deliver(logs, 2)
    logs.release(delivery, 0)
    logs.release(delivery, 1, delay_ms=5_000)
    assert take(logs) == [0]


@pytest.mark.parametrize("group", ["a", None])
def test_a_delayed_message_holds_its_group_up(group: str | None) -> None:
    logs = TwoLogs()
    logs.own()
    take(logs)
    send(logs, group, delay_ms=5_000)
    send(logs, group)
    logs.read()
    assert take(logs) == []
    logs.wait(5_000)
    assert take(logs) == [0, 1]


def test_messages_without_a_group_are_one_group() -> None:
    logs = of_groups(None, "", None)
    assert take(logs, 1) == [0]
    assert take(logs) == []


def test_a_message_at_its_maximum_holds_its_group_up_until_it_is_ended() -> None:
    logs = of_groups("a", "a")
    once = QueueSettings(fifo=True, max_receives=1)
    deliver(logs, 1)
    logs.wait(LEASE_MS)
    assert take(logs, settings=once) == []
    assert logs.partition.due(lambda queue: once).dead == [0]
    logs.finish("dead", 0)
    assert take(logs, settings=once) == [1]


def test_expiry_lets_the_next_one_go() -> None:
    logs = of_groups("a", ttl_ms=1_000)
    send(logs, "a")
    logs.read()
    logs.wait(1_000)
    assert take(logs) == []
    assert logs.partition.due(lambda queue: FIFO).expired == [0]
    logs.finish("expired", 0)
    assert take(logs) == [1]


def test_a_purge_empties_groups() -> None:
    logs = of_groups("a", "a", "b")
    deliver(logs, 1)
    logs.purge("q")
    send(logs, "a")
    logs.read()
    assert take(logs) == [3]


def test_redeliveries_of_a_group_do_not_starve_others() -> None:
    logs = of_groups(*["a", "b"] * 5)
    served = []
    for _ in range(4):
        delivery = deliver(logs, 1)
        served += delivery.offsets
        logs.release(delivery)
    assert served == [0, 1, 0, 1]


def test_calls_of_one_message_have_one_of_each_group() -> None:
    logs = of_groups("a", "a", "b", "b")
    assert take(logs, batch=1) == [0, 2]


def test_a_suspicious_message_takes_no_later_one_past_it() -> None:
    logs = of_groups("a", "a", "a", "a")
    for _ in range(3):
        logs.release(deliver(logs, 4))
    assert take(logs, 4, shared_fate=True) == [0]
    assert logs.partition.isolated


def test_a_batch_that_shares_its_fate_is_one_batch_only() -> None:
    assert take(of_groups(*"aabbcc"), 6, shared_fate=True, batch=2) == [0, 1]


def test_order_is_kept_across_a_crash() -> None:
    logs = of_groups("a", "a", "a", "b")
    deliver(logs, 2)
    logs.persist()
    logs.crash()
    assert take(logs) == [3]
    logs.wait(LEASE_MS)
    assert take(logs) == [0, 1, 2]


def test_nothing_is_taken_before_what_is_in_flight_was_read_again() -> None:
    logs = of_groups("a", "a")
    delivery = deliver(logs)
    logs.release(delivery, 0)
    logs.partition = logs.recovered()
    logs.catch_up(logs.partition, 1, logs.marked_end)
    logs.own("next")
    assert take(logs) == []
    logs.read()
    assert "q" in logs.partition.woken
    assert take(logs) == [0]
    logs.partition.put_back([0])
    logs.wait(LEASE_MS)
    assert take(logs) == [0, 1]


def test_what_was_reserved_but_never_started_comes_first_after_a_crash() -> None:
    logs = of_groups("a", "a")
    take(logs, 1)
    logs.crash()
    assert take(logs) == [0, 1]


def test_a_group_that_is_held_up_is_not_read_back() -> None:
    logs = of_groups(*["a"] * 50)
    deliver(logs, 1)
    logs.persist()
    logs.partition.shed(1 << 40, ["q"])
    loads = logs.loads
    for _ in range(20):
        assert take(logs) == []
    assert logs.loads == loads
    assert not logs.partition.has_ready("q")


def test_parked_messages_of_a_group_that_is_held_up_stay_when_others_are_read_back() -> None:
    logs = of_groups(*["a", "b"] * 5)
    deliver(logs, 1)
    logs.persist()
    logs.partition.shed(1 << 40)
    assert take(logs, 2) == [1, 3]
    assert logs.partition.segments.parked_counts()["q"] == 4


def test_a_queue_can_be_made_again_as_the_other_kind() -> None:
    logs = of_groups(*"aab")
    deliver(logs, 1)
    assert take(logs) == [2]
    assert take(logs, settings=QueueSettings()) == [1]
    logs.wait(LEASE_MS)
    assert take(logs, settings=QueueSettings()) == [0]
    logs.partition.put_back([0, 1, 2])
    assert take(logs) == [0, 1, 2]


def test_what_comes_before_the_first_in_flight_is_delivered() -> None:
    logs = of_groups(*"aaaa")
    delivery = deliver(logs, 3)
    logs.extend(delivery, 2, lease_ms=3 * LEASE_MS)
    assert take(logs) == []
    logs.wait(LEASE_MS)
    assert "q" in logs.partition.woken
    assert take(logs) == [0, 1]


def test_a_message_given_back_is_delivered_again_while_one_behind_it_is_in_flight() -> None:
    logs = of_groups(*"aaa")
    delivery = deliver(logs, 2)
    logs.release(delivery, 0)
    again = deliver(logs)
    assert again.offsets == [0]
    logs.ack(again)
    assert take(logs) == []
    logs.ack(delivery, 1)
    assert take(logs) == [2]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_the_order_in_which_messages_are_given_back_makes_no_difference(order: tuple[int, ...]) -> None:
    logs = of_groups(*"aaa")
    delivery = deliver(logs, 3)
    for offset in order:
        logs.release(delivery, offset)
    assert take(logs) == [0, 1, 2]


def test_a_delivery_is_group_by_group_and_a_group_just_delivered_goes_behind_the_others() -> None:
    logs = of_groups(*"abcabcabc")
    assert take(logs, 5) == [0, 3, 6, 1, 4]
    logs.partition.put_back([1, 4])
    logs.partition.put_back([0, 3, 6])
    assert take(logs, 7) == [2, 5, 8, 1, 4, 7, 0]


def test_a_delivery_is_handed_out_group_by_group() -> None:
    worker = Worker(settings={"q": FIFO}).serve()
    for group in (b"a", b"b", b"a", b"b"):
        worker.send(1, headers=(("marq-group", group),))
    (handout,) = worker.receive(4)
    assert handout.offsets == [0, 2, 1, 3]
    worker.owner.acked(handout.offsets[:3], handout.receipt)
    worker.owner.release(handout.offsets[3:], handout.receipt)
    worker.flush()
    assert [h.offsets for h in worker.receive()] == [[3]]


def test_a_lease_revived_before_the_start_sends_what_is_behind_it_back_uncounted() -> None:
    broker = Broker()
    worker = Worker(broker, settings={"q": FIFO}).serve()
    worker.send(3, headers=(("marq-group", b"a"),))
    (first,) = worker.receive(3, lease_ms=1_000)
    worker.wait(1_000)
    worker.owner.acquire(["q"], 2, "r2", worker.clock_ms, lease_ms=LEASE_MS)
    revive = Keepalive(*first.receipt, ranges_of([0]), LEASE_MS)  # type: ignore[call-arg]
    from marq.core import markers

    broker.append(markers.encode([revive]))
    seq, offset, appends = worker.append()
    worker.confirm(seq, offset, appends)
    worker.read_markers()
    worker.flush()
    assert worker.handouts() == []
    assert [worker.owner.partition.receives(offset) for offset in (0, 1)] == [1, 1]
    assert worker.receive(3) == []


def test_a_batch_handler_gets_messages_of_a_fifo_queue_alone() -> None:
    worker = Worker(settings={"q": FIFO}).serve()
    worker.send(2, headers=(("marq-group", b"a"),))
    worker.send(2, queue="p")
    worker.owner.acquire(["q", "p"], 4, "r", worker.clock_ms, lease_ms=LEASE_MS, shared_fate=True, batch=4)
    worker.flush()
    assert [h.offsets for h in worker.handouts()] == [[0, 1]]


# ---------------------------------------------------------------------- against a naive model

NAMES = "abc"
steps = st.lists(
    st.tuples(st.sampled_from(["send", "send", "take", "ack", "release", "delay", "wait", "shed", "crash"]),
              st.integers(0, 1 << 16)), min_size=15, max_size=60,
)  # fmt: skip


@settings(deadline=None)
@given(steps, st.booleans())
def test_what_is_taken_is_what_a_naive_model_of_groups_allows(
    script: list[tuple[str, int]], little_memory: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if little_memory:
            patch.setattr(memory, "READ_BACK_BYTES", -1)
        logs, deliveries = of_groups(), []
        groups: dict[str, list[int]] = {name: [] for name in NAMES}
        done: set[int] = set()
        for what, number in script:
            if what == "send":
                name = NAMES[number % 3]
                groups[name].append(send(logs, name))
                logs.read()
            elif what == "take":
                offered = [_offered(logs, [o for o in found if o not in done]) for found in groups.values()]
                limit = 1 + number % 5
                taken = take(logs, limit)
                assert len(taken) == min(limit, sum(map(len, offered))) or logs.partition.segments.queues
                assert taken or not any(offered)
                for allowed in offered:
                    got = [o for o in taken if o in allowed]
                    assert got == allowed[: len(got)]
                assert set(taken) <= {o for allowed in offered for o in allowed}
                if taken:
                    deliveries.append(logs.start(*taken))
                    logs.partition.unreserve(taken)
            elif what in ("ack", "release", "delay") and deliveries:
                delivery = deliveries[number % len(deliveries)]
                part = [o for o in delivery.offsets if (number >> 3 >> o % 8) % 2] or delivery.offsets
                if what == "ack":
                    done.update(logs.ack(delivery, *part))
                else:
                    logs.release(delivery, *part, delay_ms=3_000 if what == "delay" else 0)
            elif what == "wait":
                logs.wait((1_000, 5_000, LEASE_MS)[number % 3])
            elif what == "shed":
                logs.persist()
                logs.partition.shed(1 << 40, ["q"])
            elif what == "crash":
                logs.checkpoint(window=number % 4)
                logs.crash()


def _offered(logs: TwoLogs, unfinished: list[int]) -> list[int]:
    states = logs.states(unfinished)
    waits = next((i for i, state in enumerate(states) if state in ("in flight", "delayed")), len(states))
    return unfinished[:waits]


# ------------------------------------------------------------------ who waits is told


@pytest.mark.parametrize("before", [True, False], ids=["after others", "the first"])
def test_a_delay_that_ends_wakes_who_waits(before: bool) -> None:
    worker = Worker(settings={"q": FIFO}).serve()
    group = (("marq-group", b"a"),)
    if before:
        worker.send(headers=group)
        (handout,) = worker.receive()
        worker.owner.acked(handout.offsets, handout.receipt)
        worker.flush()
    worker.send(headers=(*group, ("marq-delay-ms", b"500")))
    worker.owner.partition.woken.clear()
    worker.wait(1000)
    assert "q" in worker.owner.partition.woken


# ------------------------------------------------------------------ what the owner holds by offset


def test_nothing_of_a_group_is_taken_while_the_owner_holds_one_that_was_parked() -> None:
    logs = of_groups("h")
    logs.persist()
    for _ in range(3):
        send(logs, "g")
    logs.read()
    logs.persist()
    logs.crash()
    assert deliver(logs, 1).offsets == [0]
    assert logs.partition.reserve("q", [1]) == [1]
    held = logs.start(1)
    logs.partition.unreserve([1])
    assert take(logs) == []
    logs.release(held, 1, counted=False)
    assert take(logs, 1) == [1]


def test_the_owner_may_hold_any_message_of_a_group() -> None:
    worker = Worker(settings={"q": FIFO}).serve()
    worker.send(2, headers=(("marq-group", b"a"),))
    (handout,) = worker.receive()
    worker.owner.release(handout.offsets, handout.receipt)
    worker.flush()
    worker.owner.acquire_to_end("q", [1], 1, "mover", worker.clock_ms, lease_ms=LEASE_MS, name="move")
    worker.flush()
    assert [handout.offsets for handout in worker.handouts()] == [[1]]


def test_a_queue_that_is_no_longer_fifo_gives_back_what_was_released() -> None:
    logs = of_groups(None, None)
    delivery = deliver(logs)
    standard = QueueSettings()
    assert take(logs, settings=standard) == []
    logs.release(delivery, *delivery.offsets)
    for offset in delivery.offsets:
        assert take(logs, 1, settings=standard) == [offset]


def test_of_several_group_headers_the_last_one_counts_everywhere() -> None:
    logs = of_groups()
    both = logs.send(headers=[("marq-group", b"a"), ("marq-group", b"b")])
    of_a, of_b = send(logs, "a"), send(logs, "b")
    logs.read()

    delivery = deliver(logs, 1)
    assert logs.partition.group_of(both) == logs.partition.group_of(of_b) != logs.partition.group_of(of_a)
    assert take(logs) == [of_a]
    logs.release(delivery)
    assert take(logs) == [both, of_b]


def taken_over_with_one_ahead() -> tuple[Worker, list[int], list[Handout]]:
    """A new owner that has not read all: group `a` is in flight at its first message, `b` at the last of the log."""
    w = Worker(settings={"q": FIFO}).serve()
    w.send(1, "q", headers=(("marq-group", b"a"),))
    behind = w.send(30, "q", headers=(("marq-group", b"a"),))
    w.send(1, "q", headers=(("marq-group", b"b"),))
    handouts = w.receive(1, "q", lease_ms=600_000) + w.receive(1, "q", lease_ms=600_000)
    assert [h.offsets for h in handouts] == [[0], [31]]
    n = Worker(w.broker, name="w2", table=w.table, queue_log=w.queue_log, settings=w.settings)
    n.claim()
    n.restore()
    n.read_markers()
    n.owner.ingest(0, 10, w.queue_log[:10])
    return n, behind, handouts


def acknowledge(w: Worker, handout: Handout) -> None:
    w.broker.append(encode([End(handout.receipt[0], ranges_of(handout.offsets), "acked", handout.receipt[1])]))
    w.read_markers()


def test_a_queue_that_is_held_up_by_what_was_not_read_says_so() -> None:
    n, behind, handouts = taken_over_with_one_ahead()
    acknowledge(n, handouts[0])
    partition = n.owner.partition
    assert not n.receive(10, "q"), "31 may be of the same group"
    assert partition.held_up
    assert not partition.has_ready("q"), "a receiver of it counts as one that finds nothing"
    partition.woken.clear()
    n.owner.ingest(10, 32, n.queue_log[10:32])
    assert not partition.held_up
    assert "q" in partition.woken
    assert [h.offsets for h in n.receive(2, "q")] == [behind[:2]]


def test_a_queue_is_held_up_no_longer_than_what_was_not_read_is_in_flight() -> None:
    n, behind, handouts = taken_over_with_one_ahead()
    acknowledge(n, handouts[0])
    assert not n.receive(10, "q")
    n.owner.partition.woken.clear()
    acknowledge(n, handouts[1])
    assert "q" in n.owner.partition.woken
    assert [h.offsets for h in n.receive(2, "q")] == [behind[:2]]


@pytest.mark.parametrize("kept", [True, False], ids=["order kept already", "order kept later"])
def test_a_message_that_waits_when_it_is_read_holds_its_group_up(kept: bool) -> None:
    """Its delivery was given back with a delay, before it was read again."""
    logs = TwoLogs()
    logs.own()
    logs.send("other" if not kept else "q", headers=[(H_GROUP, b"a")])
    waits = logs.send(headers=[(H_GROUP, b"z")])
    behind = logs.send(headers=[(H_GROUP, b"z")])
    logs.release(logs.start(waits), delay_ms=60_000)
    logs.read(1)
    assert logs.take(1, "q" if kept else "other", FIFO) == [0]

    logs.read()

    assert logs.take(10, "q", FIFO) == []
    logs.wait(60_000)
    assert logs.take(10, "q", FIFO) == [waits, behind]


def test_a_parked_message_whose_time_is_over_keeps_its_place_while_nothing_may_expire_yet() -> None:
    """A new owner does not know how late it is: it looks, and ends nothing."""
    logs = TwoLogs()
    logs.own()
    over = logs.send(ttl_ms=1_000, delay_ms=1, headers=[(H_GROUP, b"y")])
    logs.send(headers=[(H_GROUP, b"y")])
    logs.read()
    for _ in range(4):
        logs.wait(500)  # its delay is over, so it is looked at for its time to live, which is over, too
    logs.persist()
    logs.partition.shed(1 << 30)

    logs.partition.due(lambda queue: FIFO, expire=False)

    assert logs.take(10, "q", FIFO) == [], "its group waits for its end"
    assert over in logs.partition.due(lambda queue: FIFO).expired
