"""Which lines of the Kafka client reach the log."""

from __future__ import annotations

import logging

import pytest

from app.logs import PASSING_S, REPEAT_S, Calm


class Log:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.calm = Calm(lambda: self.now_s)

    def shown(self, text: str, *args: object) -> str | None:
        """The logged line; None if it is left out."""
        record = logging.LogRecord("aiokafka", logging.ERROR, "", 0, text, args, None)
        return record.getMessage() if self.calm.filter(record) else None


@pytest.fixture
def log() -> Log:
    return Log()


def test_the_first_line_of_a_kind_is_shown_and_its_repetitions_are_counted(log: Log) -> None:
    assert log.shown("Unable to connect to %s", "a") == "Unable to connect to a"
    for _ in range(5):
        log.now_s += 1
        assert log.shown("Unable to connect to %s", "b") is None
    log.now_s += REPEAT_S - 5
    assert log.shown("Unable to connect to %s", "c") == "Unable to connect to c (and 5 times before)"


def test_kinds_do_not_hide_each_other(log: Log) -> None:
    assert log.shown("one")
    assert log.shown("two")


def test_an_error_that_passes_is_not_shown(log: Log) -> None:
    for _ in range(3):
        assert log.shown("Failed fetch: %s", "[Error 6] NotLeaderForPartitionError") is None
        log.now_s += 1


def test_an_error_that_does_not_pass_is_shown(log: Log) -> None:
    for _ in range(int(PASSING_S)):
        assert log.shown("Failed fetch: %s", "[Error 6] NotLeaderForPartitionError") is None
        log.now_s += 1
    assert log.shown("Failed fetch: %s", "[Error 6] NotLeaderForPartitionError")


def test_a_later_burst_begins_anew(log: Log) -> None:
    assert log.shown("Unable")
    assert log.shown("Unable") is None
    log.now_s += 3 * REPEAT_S
    assert log.shown("Unable") == "Unable"


def test_a_rebalance_is_nothing_to_be_shown(log: Log) -> None:
    assert log.shown("Heartbeat failed for group %s because it is rebalancing", "marq") is None
