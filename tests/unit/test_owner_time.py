"""How the owner learns broker time, and what it does not do before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from marq.core.markers import Tick
from marq.core.policies import Limits, QueueSettings
from marq.core.queue_clock import QueueClock
from marq.core.ticker import TICK_MAX_MS, TICK_MIN_MS
from tests.unit.core_helpers import Worker

SECOND_MS = 1_000
MINUTE_MS = 60_000
HOUR_MS = 3_600_000

QUIET = Limits(checkpoint_ms=1 << 40)
"""No checkpoint asks for a tick."""


def served(**options: Any) -> Worker:
    """A worker that knows broker time."""
    worker = Worker(limits=QUIET, **options).serve()
    wait(worker, 300)
    assert worker.owner.ticker.told
    return worker


def wait(worker: Worker, ms: int, ttl_queues: tuple[str, ...] = (), off_ms: int = 0) -> list[Any]:
    """Time passes, and the owner does its work; the ticks that came in it, with how long after the beginning.

    ``off_ms``: the broker's clock is off by so much meanwhile, and right again then.
    """
    found: list[Any] = []
    worker.broker.now_ms += off_ms
    for passed_ms in range(50, ms + 1, 50):
        worker.clock_ms += 50
        worker.broker.now_ms += 50
        worker.owner.tick(worker.clock_ms, ttl_queues)
        worker.owner.work(worker.clock_ms, ttl_queues)
        found += [(passed_ms, marker) for marker in worker.flush() if type(marker) is Tick]
    worker.broker.now_ms -= off_ms
    return found


def ttl(ms: int) -> list[tuple[str, bytes]]:
    return [("marq-ttl-ms", b"%d" % ms)]


def delay(ms: int) -> list[tuple[str, bytes]]:
    return [("marq-delay-ms", b"%d" % ms)]


def received(worker: Worker) -> list[int]:
    return [offset for handout in worker.receive() for offset in handout.offsets]


def outcomes(worker: Worker) -> dict[str, int]:
    return {name: n for name, n in worker.owner.partition.counters.items() if name in ("expired", "dead", "acked")}


# ---------------------------------------------------------------------- a new owner


def test_a_new_owner_knows_broker_time_after_two_ticks() -> None:
    worker = Worker(limits=QUIET).serve()

    assert len(wait(worker, 2 * TICK_MIN_MS + 50)) == 2
    assert worker.owner.ticker.told


@pytest.mark.parametrize("by", ["header", "setting"])
def test_what_may_have_expired_is_handed_out_when_broker_time_is_known(by: str) -> None:
    settings = {"q": QueueSettings(ttl_ms=HOUR_MS if by == "setting" else 0)}
    worker = Worker(limits=QUIET, settings=settings).serve()
    (message,) = worker.send(headers=ttl(HOUR_MS) if by == "header" else ())

    before = received(worker)
    wait(worker, 300)

    assert "q" in worker.owner.partition.woken
    assert (before, received(worker)) == ([], [message])


def test_others_are_handed_out_at_once() -> None:
    worker = Worker(limits=QUIET, settings={"kept": QueueSettings(ttl_ms=HOUR_MS)}).serve()
    worker.send(queue="kept")
    (message,) = worker.send()

    assert received(worker) == [message]


def test_an_hour_without_any_worker_counts_in_full() -> None:
    settings = {"short": QueueSettings(ttl_ms=MINUTE_MS), "long": QueueSettings(ttl_ms=2 * HOUR_MS)}
    first = served(settings=settings)
    first.send(headers=ttl(HOUR_MS - 1))
    first.send(queue="short")
    (long_ttl,), (long_setting,) = first.send(headers=ttl(2 * HOUR_MS)), first.send(queue="long")
    (over,), (pending,) = first.send(headers=delay(HOUR_MS - 1)), first.send(headers=delay(2 * HOUR_MS))
    first.checkpoint()
    first.broker.now_ms += HOUR_MS

    worker = Worker(
        first.broker, name="w2", limits=QUIET, settings=settings, table=first.table, queue_log=first.queue_log
    ).serve()
    wait(worker, 300, ("short", "long"))

    assert outcomes(worker) == {"expired": 2}
    assert received(worker) == [long_ttl, over]
    worker.owner.acquire(["long", "short"], 10, "r", worker.clock_ms, lease_ms=1_000)
    worker.flush()
    assert [h.offsets for h in worker.handouts()] == [[long_setting]]
    assert worker.owner.partition.delays.keys() == {pending}


# ---------------------------------------------------------------------- when ticks are needed


@pytest.mark.parametrize("what", ["delay", "ttl", "queue"])
def test_while_something_waits_for_broker_time_there_is_a_tick_a_second(what: str) -> None:
    worker = served(settings={"q": QueueSettings(ttl_ms=HOUR_MS if what == "queue" else 0)})
    worker.send(headers=delay(HOUR_MS) if what == "delay" else ttl(HOUR_MS) if what == "ttl" else ())

    assert 9 <= len(wait(worker, 10 * TICK_MAX_MS, ("q",) if what == "queue" else ())) <= 12


def test_other_markers_take_no_tick_away() -> None:
    worker = served()
    worker.send(headers=delay(HOUR_MS))
    before = worker.owner.partition.broker_ms
    ticks = 0
    for _ in range(100):
        worker.send()
        (handout,) = worker.receive()
        worker.owner.acked(handout.offsets, handout.receipt)
        worker.flush()
        ticks += len(wait(worker, 100))

    assert 9 <= ticks <= 12
    assert worker.owner.partition.broker_ms - before >= 9_000


def test_a_delay_on_an_idle_partition_is_over_in_time() -> None:
    worker = served()
    worker.clock_ms += HOUR_MS
    worker.broker.now_ms += HOUR_MS
    (message,) = worker.send(headers=delay(1_500))

    wait(worker, 1_450)
    before = received(worker)
    wait(worker, 150)

    assert (before, received(worker)) == ([], [message])


def test_a_time_to_live_on_an_idle_partition_delays_nothing() -> None:
    worker = served()
    worker.clock_ms += HOUR_MS
    worker.broker.now_ms += HOUR_MS
    (message,) = worker.send(headers=ttl(1_000))

    assert received(worker) == [message]


def test_what_has_expired_on_an_idle_partition_is_not_handed_out() -> None:
    """It could not be read for an hour; the last tick is older than that."""
    worker = served()
    worker.queue_log.append(worker.record(headers=ttl(1_000)))
    worker.clock_ms += HOUR_MS
    worker.broker.now_ms += HOUR_MS
    worker.read_queue()

    assert received(worker) == []
    wait(worker, 300)
    assert outcomes(worker) == {"expired": 1}


def test_the_last_message_of_a_queue_expires_though_the_queue_has_nothing_else() -> None:
    settings = {"q": QueueSettings(ttl_ms=1_000)}
    worker = served(settings=settings)
    worker.send()
    worker.clock_ms += HOUR_MS
    worker.broker.now_ms += HOUR_MS

    assert received(worker) == []
    wait(worker, 300, tuple(queue for queue in worker.owner.partition.queues() if queue == "q"))
    assert outcomes(worker) == {"expired": 1}


# ---------------------------------------------------------------------- wrong clocks


def watched() -> Worker:
    """A worker with a message that expires, and one that is delayed, by ten minutes each."""
    worker = served()
    worker.send(headers=ttl(10 * MINUTE_MS))
    worker.send(headers=delay(10 * MINUTE_MS))
    wait(worker, 5_000)
    return worker


def unharmed(worker: Worker) -> bool:
    """Nothing expired, nothing became ready, and time passes."""
    before = worker.owner.partition.broker_ms
    wait(worker, 5_000)
    fine = 4_000 <= worker.owner.partition.broker_ms - before <= 2 * MINUTE_MS
    behind = worker.broker.now_ms - worker.owner.partition.broker_ms
    return fine and behind <= TICK_MAX_MS and not outcomes(worker) and received(worker) == [0]


@pytest.mark.parametrize("off_ms", [HOUR_MS, -HOUR_MS])
def test_one_wrong_stamp_changes_nothing(off_ms: int) -> None:
    worker = watched()

    wait(worker, TICK_MAX_MS, off_ms=off_ms)

    assert unharmed(worker)


@pytest.mark.parametrize("off_ms", [HOUR_MS, -HOUR_MS])
def test_an_hour_off_for_a_minute_changes_nothing(off_ms: int) -> None:
    worker = watched()

    ticks = wait(worker, MINUTE_MS, off_ms=off_ms)

    assert 50 <= len(ticks) <= 70, "leases go on"
    assert unharmed(worker)


@pytest.mark.parametrize("off_ms", [HOUR_MS, -HOUR_MS, -30_000])
def test_a_clock_that_was_set_ends_nothing_early_and_nothing_late(off_ms: int) -> None:
    worker = watched()  # for five seconds
    worker.broker.now_ms += off_ms

    wait(worker, 9 * MINUTE_MS + 54_000)
    before = outcomes(worker), set(worker.owner.partition.delays)
    wait(worker, 3_000)

    assert before == ({}, {1})
    assert outcomes(worker) == {"expired": 1}
    assert received(worker) == [1]


def test_a_worker_that_stood_still_does_not_doubt_the_broker_for_it() -> None:
    """The tick was on its way for a minute."""
    worker = watched()
    worker.clock_ms += TICK_MAX_MS
    worker.broker.now_ms += TICK_MAX_MS
    assert worker.owner.tick(worker.clock_ms)
    worker.clock_ms += MINUTE_MS
    worker.broker.now_ms += MINUTE_MS
    worker.flush()

    wait(worker, 1_500)

    assert unharmed(worker)


# ---------------------------------------------------------------------- two brokers whose clocks differ

SKEW_MS = 30_000


def early(worker: Worker) -> tuple[list[int], dict[str, int]]:
    """What comes or expires of messages with a delay of 15 s, and with 20 s to live, before that is over; then none."""
    delayed, living = worker.send(headers=delay(15_000)), worker.send(headers=ttl(20_000))
    wait(worker, 14_700)
    came, ended = received(worker), outcomes(worker)
    assert came == living or not came
    if came:
        worker.owner.release(came, (worker.owner.epoch, worker.owner.starts._last), counted=False)
        worker.flush()
    wait(worker, 600)
    assert set(received(worker)) <= {*delayed, *living}
    return [offset for offset in came if offset in delayed], ended


@pytest.mark.parametrize("queue_off_ms", [-SKEW_MS, SKEW_MS])
def test_a_clock_of_another_broker_ends_nothing_early(queue_off_ms: int) -> None:
    worker = served()
    worker.broker.queue_off_ms = queue_off_ms

    assert early(worker) == ([], {})


@pytest.mark.parametrize("queue_off_ms", [-SKEW_MS, 0, SKEW_MS])
def test_between_clocks_that_differ_a_time_to_live_ends_in_time(queue_off_ms: int) -> None:
    """The next messages are compared with the clock that has stamped them."""
    worker = served()
    worker.broker.queue_off_ms = queue_off_ms
    for _ in range(3):
        worker.send()
        wait(worker, 100)
    while received(worker):
        worker.owner.acked(list(worker.owner.partition.messages), (worker.owner.epoch, worker.owner.starts._last))
        worker.flush()
    wait(worker, 20_000)
    worker.send(headers=ttl(20_000))

    wait(worker, 19_700)
    before = outcomes(worker).get("expired", 0)
    wait(worker, 600)

    assert (before, outcomes(worker).get("expired", 0)) == (0, 1)


@pytest.mark.parametrize("steps", [(-SKEW_MS, 0), (SKEW_MS, 0), (0, -SKEW_MS, SKEW_MS, 0), (-SKEW_MS, -2 * SKEW_MS)])
def test_a_clock_that_steps_ends_nothing_early(steps: tuple[int, ...]) -> None:
    worker = served()
    sent: dict[int, int] = {}
    for off_ms in steps:
        worker.broker.queue_off_ms = off_ms
        for _ in range(3):
            sent[worker.send(headers=ttl(60_000))[0]] = worker.clock_ms
            wait(worker, 1_000)

    for _ in range(100):
        gone = [offset for offset in sent if offset not in worker.owner.partition.messages]
        assert all(worker.clock_ms - sent[offset] >= 60_000 for offset in gone)
        wait(worker, 1_000)


def test_what_was_just_read_waits_until_the_log_knows_its_clock() -> None:
    """By the time that the log knows, its delay is over."""
    worker = served()
    worker.broker.queue_off_ms = -SKEW_MS
    (message,) = worker.send(headers=delay(1_000))

    assert received(worker) == []
    wait(worker, 500)
    assert worker.owner.partition.delays.keys() == {message}
    wait(worker, 1_000)
    assert received(worker) == [message]


def test_a_tick_that_was_under_way_does_not_settle_it() -> None:
    worker = served()
    worker.send(headers=delay(HOUR_MS))
    wait(worker, 300)
    worker.clock_ms += TICK_MAX_MS
    worker.broker.now_ms += TICK_MAX_MS
    assert worker.owner.tick(worker.clock_ms)
    worker.broker.queue_off_ms = -SKEW_MS
    worker.send(headers=ttl(1_000))

    worker.flush()

    assert not worker.owner.ticker.told
    assert received(worker) == []
    wait(worker, 500)
    assert worker.owner.ticker.told and received(worker) == [1]


@pytest.mark.parametrize("settled", [True, False])
def test_the_next_owner_counts_by_the_clock_that_stamped(settled: bool) -> None:
    first = served()
    first.broker.queue_off_ms = -SKEW_MS
    first.send(headers=ttl(20_000))
    if settled:
        wait(first, 2_000)

    worker = Worker(first.broker, name="w2", limits=QUIET, table=first.table, queue_log=first.queue_log)
    worker.clock_ms = 5 * HOUR_MS  # a clock of its own
    worker.serve()
    (live,) = worker.send(headers=ttl(20_000))
    wait(worker, 17_000)

    assert (outcomes(worker), received(worker)) == ({}, [0, live])


def test_the_next_owner_may_find_another_clock_in_the_markers_topic() -> None:
    """Its leader has changed with the owner. What is read next shows it."""
    first = served()
    first.send(headers=ttl(20_000))
    wait(first, 2_000)
    first.broker.now_ms += SKEW_MS
    first.broker.queue_off_ms = -SKEW_MS

    worker = Worker(first.broker, name="w2", limits=QUIET, table=first.table, queue_log=first.queue_log).serve()
    worker.send()
    wait(worker, 15_000)

    assert outcomes(worker) == {}
    assert received(worker) == [0, 1]


def test_what_waited_to_be_read_is_no_proof_of_a_wrong_clock() -> None:
    """It was in the log for up to an hour, by all that is known."""
    worker = served()
    worker.queue_log.append(worker.record(headers=ttl(HOUR_MS // 2)))
    since_ms = worker.clock_ms
    worker.clock_ms += HOUR_MS
    worker.broker.now_ms += HOUR_MS
    worker.read_queue(since_ms)

    assert received(worker) == []
    wait(worker, 300)
    assert outcomes(worker) == {"expired": 1}


def test_what_memory_does_not_allow_to_keep_is_compared_when_it_is_counted() -> None:
    """It is read again later, when nothing tells how long it has been in the log."""
    worker = served()
    worker.broker.queue_off_ms = -SKEW_MS
    worker.queue_log.append(worker.record(headers=ttl(20_000)))
    assert worker.owner.count_unread(0, 1, worker.queue_log, worker.clock_ms, worker.clock_ms)
    wait(worker, 10_000)
    worker.read_queue()

    assert received(worker) == [0]
    assert outcomes(worker) == {}


def test_the_distance_of_both_clocks_is_known() -> None:
    worker = served()
    before = worker.owner.ticker.behind_ms
    worker.broker.queue_off_ms = -SKEW_MS
    worker.send(headers=ttl(HOUR_MS))
    unknown = worker.owner.ticker.behind_ms
    wait(worker, 1_500)

    assert before is not None and abs(before) < 1_000
    assert unknown is None
    assert abs((worker.owner.ticker.behind_ms or 0) - SKEW_MS) < 1_000


def test_what_was_read_counts_as_young_as_it_is_though_the_clock_of_markers_steps_before_it_is_believed() -> None:
    """Both brokers were 20 s behind when a message came, and the first tick that is believed has the right time."""
    clock = QueueClock()
    clock.begin(980_000, 100)
    clock.read(0, [SimpleNamespace(offset=0, timestamp=980_100)], now_ms=220, since_ms=180)
    clock.begin(1_000_300, 300)
    assert clock.now_ms(300) <= 980_100 + 120
