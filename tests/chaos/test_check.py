"""The check finds each fault that is planted in its input, and nothing in an input without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.check import Window, done_twice, figures, violations
from tests.chaos.history import Asked, History, Name, Seen


def history(stream: str = "json", count: int = 6) -> History:
    """Each message is sent at its number, received a second later, finished and acknowledged."""
    made = History()
    for number in range(count):
        name, place = str(Name(stream, "g" if stream.endswith("fifo") else "", number)), (number % 2, number)
        made.tried.add(name)
        made.confirmed[name] = (number, number + 0.1)
        made.begun.append(Seen(name, place, 1, number + 1.0, asked_s=number + 0.5))
        made.finished.append(Seen(name, place, 1, number + 1.2))
        made.acked[place] = number + 1.3
    return made


def lose(made: History) -> None:
    del made.finished[3]


def invent(made: History) -> None:
    made.begun.append(Seen("json::99", (0, 99), 1, 9.0))


def hand_out_twice(made: History) -> None:
    made.begun.append(made.begun[2]._replace(at_s=9.0, asked_s=None))


def deliver_after_the_ack(made: History) -> None:
    made.begun.append(made.begun[2]._replace(attempt=2, at_s=9.0, asked_s=8.9))


def swap(made: History) -> None:
    second, third = made.begun[2], made.begun[3]
    made.begun[2], made.begun[3] = second._replace(at_s=third.at_s), third._replace(at_s=second.at_s)


def overtake(made: History) -> None:
    """The fourth comes while the third is in work."""
    made.begun[3] = made.begun[3]._replace(at_s=made.finished[2].at_s - 0.05)


def pass_one_over(made: History) -> None:
    del made.begun[2], made.finished[2]


def copy(made: History) -> None:
    made.begun.append(made.begun[2]._replace(place=(1, 50), at_s=9.0, asked_s=None))


@pytest.mark.parametrize(
    ("rule", "plant", "stream"),
    [
        ("lost", lose, "json"),
        ("unknown", invent, "json"),
        ("handed out twice", hand_out_twice, "json"),
        ("after the ack", deliver_after_the_ack, "json"),
        ("order", swap, "sqs-fifo"),
        ("order", overtake, "client-fifo"),
        ("order", pass_one_over, "handler-fifo"),
        ("two copies", copy, "sqs-fifo"),
    ],
)
def test_a_planted_fault_is_found(rule: str, plant: Callable[[History], None], stream: str) -> None:
    made = history(stream)
    plant(made)
    assert rule in {found.rule for found in violations(made)}


@pytest.mark.parametrize("stream", ["json", "sqs-fifo"])
def test_nothing_is_found_where_nothing_is(stream: str) -> None:
    assert violations(history(stream)) == []


def test_what_a_standard_queue_may_do_is_no_violation() -> None:
    """Another order, a second copy of a send that was repeated, a second delivery that was asked for before the ack."""
    made = history("json")
    swap(made)
    copy(made)
    made.begun.append(made.begun[4]._replace(attempt=2, at_s=9.0, asked_s=made.acked[made.begun[4].place] - 0.1))
    assert violations(made) == []


def test_messages_that_were_done_twice_are_found() -> None:
    made = history()
    assert done_twice(made) == {}
    made.finished.append(made.finished[1]._replace(attempt=2, at_s=9.0))
    assert [seen.attempt for seen in done_twice(made)[1, 1]] == [1, 2]


def test_a_request_counts_from_its_first_attempt_to_its_answer() -> None:
    made = history()
    made.asked += [
        Asked("json 0", "send", 1.0, 1.1, True),
        Asked("json 0", "send", 2.0, 4.0, False),
        Asked("json 0", "send", 4.2, 6.0, False),
        Asked("json 0", "send", 6.5, 7.0, True),
        Asked("json 1", "send", 2.0, 2.3, True),  # another client had an answer meanwhile
    ]
    found = figures(made, Window("f", 3.0, 5.0, 10.0))
    assert found.unanswered_s == {"send": {"json": 5.0}}
    made.asked.append(Asked("json 0", "send", 8.0, 14.0, False))
    assert figures(made, Window("f", 10.0, 12.0, 20.0)).unanswered_s == {"send": {"json": 6.0}}
    assert figures(made, Window("f", 0.0, 1.0, 1.5)).unanswered_s["send"]["json"] == pytest.approx(0.1)


def test_recovery_ends_with_the_last_late_message() -> None:
    made = history()
    window = Window("f", 1.5, 4.0, 10.0)
    assert figures(made, window).recovery_s == 0.0
    made.finished[2] = made.finished[2]._replace(at_s=7.5)  # sent at 2, 5.5 s late
    found = figures(made, window)
    assert (found.recovery_s, found.longest_wait_s) == (3.5, 5.5)
    assert found.sent == 4
