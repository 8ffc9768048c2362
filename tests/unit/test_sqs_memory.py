"""The SQS gateway's memory of requests is bounded, in time, number and bytes."""

from __future__ import annotations

import time

import pytest

from gateway.sqs import memory
from gateway.sqs.memory import Attempts
from marq.protocol.messages import Received


def received(size: int) -> list[Received]:
    return [Received("r", "q", "t", 0, 0, 1, 0, b"x" * size)]


def kept(attempts: Attempts, count: int) -> int:
    return sum(attempts.given("q", str(i)) is not None for i in range(count))


def test_receives_are_remembered_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BYTES_MAX", 100_000)
    attempts = Attempts()
    for i in range(100):
        attempts.keep("q", str(i), received(9_000))
    assert kept(attempts, 100) == 10
    attempts.keep("q", "large", received(1_000_000))
    assert attempts.given("q", "large") is None
    assert not attempts._given._entries


def test_what_is_too_old_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, now = Attempts(), time.monotonic()
    attempts.keep("q", "0", received(1))
    monkeypatch.setattr(time, "monotonic", lambda: now + memory.SAME_S + 1)
    attempts.keep("q", "1", received(1))
    assert len(attempts._given._entries) == 1


def test_the_same_attempt_takes_the_place_of_its_former_one() -> None:
    attempts = Attempts()
    for _ in range(100):
        attempts.keep("q", "0", received(9_000))
    assert attempts._given._size_bytes == 9_000 + memory.ENTRY_BYTES
