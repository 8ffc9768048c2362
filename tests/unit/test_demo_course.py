"""The demo tells how fast it sent and processed apart from how long it waited for the last leases."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.demo.commands import _first_error
from app.demo.ledger import Ledger
from app.demo.progress import Course, in_words, watch
from marq.errors import BrokerError


def test_sending_and_processing_are_told_apart_from_the_wait_for_the_last_leases(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path, 1000)
    now = [0.0]
    course = Course(ledger, 0.1, lambda: now[0])
    for at_s, sent, acked in ((1.0, 1000, 100), (2.0, 1000, 820), (7.0, 1000, 1000)):
        now[0] = at_s
        ledger.sent[:sent] = b"\x01" * sent
        ledger.acked[:acked] = b"\x01" * acked
        course.look()
    found = course.summary()
    assert (found["send_rate"], found["process_rate"], found["rate"]) == (1000, 410, 143)
    assert in_words(found).startswith(
        "1,000 sent at 1,000/s, processed at 410/s; 0 redelivered, 0 done twice, 0 lost; 7.0"
    )


def test_what_was_done_before_does_not_count(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path, 100)
    ledger.sent[:100] = b"\x01" * 100
    ledger.acked[:50] = b"\x01" * 50
    now = [0.0]
    course = Course(ledger, 0.0, lambda: now[0])
    now[0] = 1.0
    course.look()
    found = course.summary()
    assert found["process_rate"] is None
    assert (found["unfinished"], found["lost"]) == (50, None)  # what is not done yet is not lost
    ledger.acked[:100] = b"\x01" * 100
    course.look()
    assert course.summary()["process_rate"] == 50


def test_an_error_of_one_part_is_told_as_it_is() -> None:
    with pytest.raises(BrokerError, match="away"), _first_error():
        raise ExceptionGroup("parts", [BrokerError("away"), ValueError()])
    with pytest.raises(ExceptionGroup), _first_error():
        raise ExceptionGroup("parts", [ValueError()])


def test_in_a_file_the_last_picture_has_a_line_end_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger.open(tmp_path, 10)
    asyncio.run(watch(ledger, lambda: True, Course(ledger, 0.0)))
    assert capsys.readouterr().err.endswith("\n")
