"""A line in the log says that messages died: at most one a queue and minute, and none is left out of the numbers."""

from __future__ import annotations

import asyncio
import logging

import pytest

from app.engine import dead_letter_log
from app.engine.dead_letter_log import DeadLetterLog


def test_the_first_is_logged_at_once_and_the_rest_together(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_log, "PAUSE_S", 0.05)

    async def main() -> None:
        log = DeadLetterLog(logging.getLogger("dead"))
        log.note("orders", "orders.dead", 1, "delivered 5 times without an ack")
        for number in range(40):
            log.note("orders", "orders.dead", 2, f"rejected, reason {number}\n\x1b[2J")
        log.note("mails", "graves", 3, "rejected")
        assert len(caplog.messages) == 2
        while len(caplog.messages) < 3:
            await asyncio.sleep(0.01)
        while log._untold:  # nothing is remembered of queues without news
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert caplog.messages[0] == (
        "1 message of 'orders' became a dead letter in 'orders.dead', the last one because of: "
        "delivered 5 times without an ack"
    )
    assert caplog.messages[1].startswith("3 messages of 'mails' became dead letters in 'graves'")
    assert caplog.messages[2].startswith("80 messages of 'orders'") and "reason 39" in caplog.messages[2]
    assert caplog.messages[2].isprintable() and len(caplog.messages) == 3


def test_queues_beyond_a_number_share_a_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_log, "QUEUES_MAX", 2)

    async def main() -> None:
        log = DeadLetterLog(logging.getLogger("dead"))
        for queue in "abcd":
            log.note(queue, f"{queue}.dead", 1, "rejected")
        assert len(log._untold) == 3

    asyncio.run(main())
    assert len(caplog.messages) == 3
