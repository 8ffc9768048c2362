"""How the command `marq` reads its arguments, and shows numbers."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from marq.cli import queues, values
from marq.cli.messages import as_object
from marq.cli.sending import _Lines
from marq.cli.top import Rates, Sample, rates_between
from marq.errors import BadValueError, MarqError


@pytest.mark.parametrize("module", [values, queues], ids=lambda module: module.__name__)
def test_the_examples_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("text", ["", "soon", "-1", "1e9", "5 weeks", "٣s", "1" * 50])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(BadValueError, match="is no duration"):
        values.seconds_of(text)


@pytest.mark.parametrize("text", ["", "3", "3:", ":4", "3:4:5", "-1:2", "٣:٤", "1:" + "9" * 30])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(BadValueError, match="is no place"):
        values.place_of(text)


@pytest.mark.parametrize("text", ["", "=5", "max_receives"])
def test_a_setting_has_a_name_and_a_value(text: str) -> None:
    with pytest.raises(BadValueError, match="NAME=VALUE"):
        values.settings_of([text])


@pytest.mark.parametrize("told", [b"caf\xc3\xa9", "Y2Fmw6k="], ids=["bytes", "base64"])
def test_a_payload_is_text_however_it_is_told(told: bytes | str) -> None:
    assert as_object({"payload": told, "size_bytes": 5}) == {"text": "caf\xe9", "size_bytes": 5}
    assert as_object({"payload": told, "size_bytes": 9})["cut"] is True
    assert as_object({"payload": b"\xff", "size_bytes": 1}) == {"payload": "/w==", "size_bytes": 1}
    assert as_object({"size_bytes": None}) == {"size_bytes": None}


# -- rates ----------------------------------------------------------------------------------------------


def sample(at_s: float, **partitions: tuple[str, int, int]) -> Sample:
    """Partitions by name, with owner, position and the number of acknowledged messages."""
    found = {
        number: {"owner": owner, "position": position, "counters": {"acked": acked, "delivered": acked}}
        for number, (owner, position, acked) in enumerate(partitions.values())
    }
    return Sample(at_s, [], [], 1, found)


def test_rates_are_those_between_two_looks() -> None:
    assert rates_between(None, sample(1.0, a=("w", 0, 0))) == Rates()
    found = rates_between(sample(1.0, a=("w", 0, 0), b=("w", 10, 5)), sample(3.0, a=("w", 20, 0), b=("w", 30, 9)))
    assert found == Rates(sent=20.0, delivered=2.0, finished=2.0, redelivered=0.0)


def test_a_partition_that_changed_its_owner_makes_no_rate() -> None:
    found = rates_between(sample(1.0, a=("w1", 0, 0)), sample(2.0, a=("w2", 1_000_000, 0)))
    assert found.sent == 0.0


# -- lines of standard input ----------------------------------------------------------------------------


class Refusals:
    """Records the refusals that a sender is told of."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def refuse(self, line: int, error: MarqError) -> None:
        self.lines.append(line)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_however_they_come_in(size: int) -> None:
    data = b"one\r\n\ntwo\nlast"
    lines = _Lines(Refusals())  # type: ignore[arg-type]
    found = [line for start in range(0, len(data), size) for line in lines.split(data[start : start + size])]
    assert [*found, *lines.last()] == [(1, b"one"), (2, b""), (3, b"two"), (4, b"last")]


def test_a_line_that_no_message_can_be_is_refused_and_takes_no_memory() -> None:
    refusals = Refusals()
    lines = _Lines(refusals)  # type: ignore[arg-type]
    chunk = b"x" * (1 << 20)
    assert [line for _ in range(6) for line in lines.split(chunk)] == []
    assert lines._parts == []
    assert list(lines.split(b"\nshort\n")) == [(2, b"short")]
    assert refusals.lines == [1]
