"""The check of the fault tests explains a duplicate from the log, and fails if it can't."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from marq.core.markers import End, Keepalive, Marker, Own, Release, Start, Tick, encode
from tests.integration.duplicates import KILLED, LATE, LEFT, REFUSED, Done, Explained, explain

LEASE_MS = 1_000
PID, OTHER = 11, 12


class Log:
    """The markers of partition 0, owned since record 0."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.now_ms = 1_000_000
        self.write(Own("w", "w/1"))

    def write(self, *markers: Marker) -> None:
        self.records.append(
            SimpleNamespace(offset=len(self.records), timestamp=self.now_ms, value=encode(list(markers)))
        )

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.write(Tick())

    def start(self, delivery: int, receives: int = 1) -> None:
        self.write(Start(0, delivery, [7, 8], LEASE_MS, "r", receives))

    def ack(self, delivery: int) -> None:
        self.write(End(0, [7, 8], "acked", delivery))

    def explain(self, *done: Done, **options: Any) -> Explained:
        return explain(done, {0: self.records}, **options)


def done(attempt: int, pid: int = PID, in_thread: bool = False) -> Done:
    return Done(0, 7, attempt, pid, in_thread)


@pytest.fixture
def twice() -> Log:
    """Started twice, the second time after the lease was over."""
    log = Log()
    log.start(1)
    log.wait(LEASE_MS)
    log.start(2, 2)
    return log


def test_what_was_done_once_needs_no_explanation(twice: Log) -> None:
    twice.ack(2)
    assert twice.explain(done(2), Done(0, 8, 1)) == Explained()


def test_an_acknowledgement_after_the_lease_explains_it(twice: Log) -> None:
    twice.ack(1)
    assert twice.explain(done(1), done(2)) == Explained(Counter({LATE: 1}))


def test_what_a_killed_process_had_finished_and_not_written_explains_it(twice: Log) -> None:
    assert twice.explain(done(1), done(2, OTHER), killed=[PID]) == Explained(Counter({KILLED: 1}))


def test_an_acknowledgement_that_the_receiver_knows_to_have_failed_explains_it(twice: Log) -> None:
    assert twice.explain(done(1, 0), done(2, 0), refused={(0, 7)}) == Explained(Counter({REFUSED: 1}))


def test_a_call_in_a_thread_that_was_given_back_when_its_worker_stopped_explains_it() -> None:
    log = Log()
    log.start(1)
    log.write(Release(0, 1, [7, 8]))
    log.start(2, 2)
    assert log.explain(done(1, in_thread=True), done(2)) == Explained(Counter({LEFT: 1}))


# ---------------------------------------------------------------------- planted: each of them must fail


def unexplained(log: Log, *found: Done, **options: Any) -> str:
    result = log.explain(*found, **options)
    assert not result.causes
    (why,) = result.unexplained
    return why


def test_an_acknowledgement_that_is_missing_without_a_kill_is_a_fault(twice: Log) -> None:
    assert "though its process was not killed" in unexplained(twice, done(1), done(2), killed=[OTHER])


def test_an_attempt_that_the_log_does_not_have_is_a_fault() -> None:
    log = Log()
    log.start(1)
    log.ack(1)
    log.start(2, 2)  # void: the message is done
    assert "no later delivery is in the log" in unexplained(log, done(1), done(2))


def test_a_delivery_that_was_void_is_a_fault(twice: Log) -> None:
    assert "handed out though it was void" in unexplained(twice, done(3), done(4))


def test_a_delivery_in_the_log_under_the_lease_of_another_was_not_handed_out_by_the_rules() -> None:
    log = Log()
    log.start(1)
    log.write(Keepalive(0, 1, [7, 8], 10 * LEASE_MS))
    log.wait(2 * LEASE_MS)
    log.start(2, 2)  # void
    assert "no later delivery is in the log" in unexplained(log, done(1), done(2), killed=[PID])


def test_one_attempt_done_twice_is_a_fault(twice: Log) -> None:
    twice.ack(1)
    result = twice.explain(done(1), done(1, OTHER), done(2))
    assert result.unexplained == ["0:7: attempt 1 was done 2 times"]
