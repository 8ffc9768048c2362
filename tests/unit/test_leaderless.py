"""Partitions without a leader do not keep a worker from its start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.kafka import topics
from marq.errors import TopicError


class Admin:
    """Describes one topic, whose second partition has no leader for so many questions."""

    def __init__(self, leaderless_times: int) -> None:
        self.left = leaderless_times

    async def describe_topics(self) -> list[dict[str, Any]]:
        self.left -= 1
        leaders = (1, 1 if self.left < 0 else -1)
        partitions = [{"partition": n, "leader": leader, "replicas": [1]} for n, leader in enumerate(leaders)]
        return [{"topic": "t", "partitions": partitions}]


def describe(admin: Admin, created: set[str]) -> Any:
    return asyncio.run(topics._describe(admin, ["t"], created, False))["t"]


def test_what_was_there_before_is_not_waited_for() -> None:
    """A worker that starts while a broker is away serves the other partitions."""
    found = describe(Admin(1_000_000), set())
    assert found.leaderless == (1,)
    (line,) = topics._leaderless({"t": found})
    assert line == "topic t has partitions without a leader: 1; check that all brokers run"


def test_what_was_just_created_is_waited_for() -> None:
    found = describe(Admin(2), {"t"})
    assert found.leaderless == ()
    assert not [*topics._leaderless({"t": found})]


def test_a_new_topic_that_gets_no_leader_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "VISIBLE_TIMEOUT_S", 0.0)
    with pytest.raises(TopicError, match="without a leader"):
        describe(Admin(1_000_000), {"t"})
