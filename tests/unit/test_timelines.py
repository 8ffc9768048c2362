"""Histories of messages: what they cost is the cost of the key that asks, as long as its client waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition

from app.service import timelines
from app.streaming.batches import FetchedRecord
from tests.unit.http_lab import Http, head_of, run, serving

NARROW, OTHER = "narrow-key-of-enough-length", "other-key-of-enough-length"
#: The key of the message at an offset.
QUEUES = [b"evil-a", b"orders"]


class Logs:
    """Kafka: a few messages, and a markers log that goes on for as long as `busy` lasts."""

    def __init__(self) -> None:
        self.busy = False
        self.begun: list[int] = []  # offsets of messages that were read
        self.reading = 0  # readers of the markers log now
        self.most = 0  # at once
        self.polls = 0  # of the markers log

    def consumer(self, **_: Any) -> Consumer:
        return Consumer(self)


class Consumer:
    """Reads them."""

    def __init__(self, logs: Logs) -> None:
        self.logs, self.tp, self.at = logs, TopicPartition("", 0), 0
        self.reads_markers = False

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.logs.reading -= self.reads_markers

    async def beginning_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 0)

    async def end_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: 10_000 if tp.topic == "marq.markers" else len(QUEUES) for tp in tps}

    async def offsets_for_times(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, Any]:
        self.reads_markers = True
        self.logs.reading += 1
        self.logs.most = max(self.logs.most, self.logs.reading)
        return {tp: FetchedRecord(0, 0, None, None, (), 0) for tp in times}

    def assign(self, tps: list[TopicPartition]) -> None:
        (self.tp,) = tps

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self.at = offset

    async def position(self, tp: TopicPartition) -> int:
        return self.at

    async def getmany(self, *tps: TopicPartition, **_: Any) -> dict[TopicPartition, list[Any]]:
        at = self.at
        if self.tp.topic == "marq.queue":
            self.at += 1
            self.logs.begun.append(at)
            record = FetchedRecord(at, 1_000, QUEUES[at], b"x", (), 0)
            record_of = _Record(record, self.tp.partition)
            return {self.tp: [record_of]}
        self.logs.polls += 1
        if self.logs.busy:
            await asyncio.sleep(0.01)
            return {}
        self.at = 10_000
        return {}


class _Record:
    """A record, as aiokafka has it."""

    def __init__(self, record: FetchedRecord, partition: int) -> None:
        self.record, self.partition = record, partition

    def __getattr__(self, name: str) -> Any:
        return getattr(self.record, name)


def ask_of(key: str, offset: int) -> bytes:
    return head_of("GET", f"/ui/api/messages/0/{offset}", Authorization=f"Bearer {key}")


def attack(folder: Path, monkeypatch: pytest.MonkeyPatch, test: Callable[[Http, Logs], Awaitable[None]]) -> None:
    async def main() -> None:
        logs = Logs()
        monkeypatch.setattr(timelines, "AIOKafkaConsumer", logs.consumer)
        monkeypatch.setattr(timelines, "READ_S", 600.0)
        keys = f"{NARROW}=inspect:evil*,{OTHER}"
        async with serving(folder, keys=keys, kafka="kafka://nowhere:1") as http:
            await test(http, logs)

    run(main)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_abandoned_histories_hold_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(http: Http, logs: Logs) -> None:
        logs.busy = True
        held = [await http.send(ask_of(NARROW, 0)) for _ in range(50)]
        await until(lambda: logs.polls)
        for _, writer in held:
            writer.close()
        await until(lambda: not logs.reading)  # the one that was read ends, though its log does not
        logs.busy = False

        status, _, body = await http.ask(ask_of(OTHER, 1))
        assert (status, json.loads(body)["queue"]) == (200, "orders")
        assert logs.begun == [0, 1]  # those that had to wait for their turn were not begun

    attack(tmp_path, monkeypatch, test)


def test_one_key_has_one_history_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(http: Http, logs: Logs) -> None:
        logs.busy = True
        held = [await http.send(ask_of(NARROW, 0)) for _ in range(5)]
        await until(lambda: logs.polls)
        held.append(await http.send(ask_of(OTHER, 1)))
        await until(lambda: logs.reading == 2)
        assert logs.begun == [0, 1]
        logs.busy = False
        for reader, _ in held:
            assert (await reader.readline()).split()[1] == b"200"
        assert logs.most == 2

    attack(tmp_path, monkeypatch, test)


def test_without_the_permission_the_markers_log_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(http: Http, logs: Logs) -> None:
        status, _, body = await http.ask(ask_of(NARROW, 1))
        assert status == 403, body
        assert b"orders" not in body
        assert logs.polls == 0

    attack(tmp_path, monkeypatch, test)
