"""Real workers in this process: topics of their own, agents that note the chunks they get, and waiting with an end."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from faust.types import TP

from app.streaming.chunks import Chunk
from app.streaming.faust_app import MarqApp, create_app
from app.streaming.raw_table import SegmentTable

TIMEOUT_S = 60.0


async def until(condition: Callable[[], Any], what: str = "", timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a condition holds; an error that says which if it does not in time."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        await asyncio.sleep(0.01)


class Worker:
    """One worker: an app with an agent for queue and markers, and optionally a table.

    `on_chunk(chunk)` is awaited in the body of the agents, after the chunk was noted.
    """

    def __init__(
        self,
        lab: Lab,
        number: int,
        on_chunk: Callable[[Chunk], Awaitable[None]] | None = None,
        table: bool = False,
        **settings: Any,
    ) -> None:
        self.lab = lab
        self.app: MarqApp = create_app(
            app_id=lab.name,
            bootstrap=lab.bootstrap,
            chunked_topics=[lab.queue, lab.markers],
            datadir=str(lab.folder / f"worker-{number}"),
            **settings,
        )
        self.table: SegmentTable | None = None
        self.chunks: dict[TP, list[Chunk]] = defaultdict(list)
        self.crashes: list[BaseException] = []
        self.on_chunk = on_chunk
        if table:
            self.table = self.app.segment_table("rows", partitions=lab.partitions)

        async def note(stream: Any) -> None:
            async for chunk in stream:
                self.chunks[TP(chunk.topic, chunk.partition)].append(chunk)
                if self.on_chunk is not None:
                    await self.on_chunk(chunk)

        self.app.agent(self.app.topic(lab.queue), name="queue")(note)
        self.app.agent(self.app.topic(lab.markers), name="markers")(note)
        crash = self.app.crash

        async def noted_crash(reason: BaseException) -> None:
            self.crashes.append(reason)
            await crash(reason)

        self.app.crash = noted_crash

    async def start(self) -> Worker:
        self.lab.workers.append(self)
        await self.app.start()
        return self

    async def ready(self, count: int | None = None) -> None:
        """Wait until a rebalance has ended and the worker owns `count` queue partitions (default: all)."""
        wanted = self.lab.partitions if count is None else count
        await until(
            lambda: not self.app.rebalancing and len(self.owned()) == wanted,
            f"worker owns {wanted}, has {self.owned()}",
        )

    def owned(self) -> set[int]:
        readers = self.app.consumer._thread.readers.values()
        current = self.app.consumer_generation_id
        return {r.tp.partition for r in readers if r.tp.topic == self.lab.queue and r.generation == current}

    def open_all(self, offset: int = 0) -> None:
        for tp in list(self.app.consumer._thread.readers):
            assert self.app.consumer.start_from(tp, offset)

    def offsets(self, tp: TP) -> list[int]:
        return [record.offset for chunk in self.chunks[tp] for record in chunk.records]

    def values(self, tp: TP) -> list[bytes]:
        return [record.value for chunk in self.chunks[tp] for record in chunk.records]

    def position(self, tp: TP) -> int:
        return self.chunks[tp][-1].next if self.chunks[tp] else 0

    def assert_contiguous(self, tp: TP, start: int) -> None:
        for chunk in self.chunks[tp]:
            assert chunk.start == start, (chunk, start)
            assert all(chunk.start <= r.offset < chunk.next for r in chunk.records)
            start = chunk.next

    async def stop(self) -> None:
        self.lab.workers.remove(self)
        await asyncio.wait_for(self.app.stop(), TIMEOUT_S)


class Lab:
    """Topics with a random name, a plain producer, and the workers that were started; cleans up at the end."""

    def __init__(self, bootstrap: str, folder: Path, partitions: int = 2) -> None:
        self.bootstrap = bootstrap
        self.folder = folder
        self.partitions = partitions
        self.name = "lab-" + uuid.uuid4().hex[:8]
        self.queue = f"{self.name}.queue"
        self.markers = f"{self.name}.markers"
        self.changelog = f"{self.name}-rows-changelog"
        self.workers: list[Worker] = []

    def q(self, partition: int = 0) -> TP:
        return TP(self.queue, partition)

    def m(self, partition: int = 0) -> TP:
        return TP(self.markers, partition)

    async def __aenter__(self) -> Lab:
        self.admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await self.admin.start()
        log_append = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(4 * 1024 * 1024)}
        compact = {"cleanup.policy": "compact", "max.message.bytes": str(4 * 1024 * 1024 + 64 * 1024)}
        await self.admin.create_topics(
            [
                NewTopic(self.queue, self.partitions, 1, topic_configs=log_append),
                NewTopic(self.markers, self.partitions, 1, topic_configs=log_append),
                NewTopic(self.changelog, self.partitions, 1, topic_configs=compact),
            ]
        )
        await self.visible(dict.fromkeys((self.queue, self.markers, self.changelog), self.partitions))
        self.producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap, acks="all")
        await self.producer.start()
        return self

    async def visible(self, counts: dict[str, int]) -> None:
        """Wait until the broker knows so many partitions of topics: a busy one answers before that, and a worker that
        misses a topic asks again after minutes."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                found = {t["topic"]: len(t["partitions"]) for t in await self.admin.describe_topics()}
                if counts.items() <= found.items():
                    return
                await asyncio.sleep(0.02)

    async def __aexit__(self, *_: object) -> None:
        for worker in list(self.workers):
            await worker.stop()
        await self.producer.stop()
        await self.admin.delete_topics([self.queue, self.markers, self.changelog])
        await self.admin.close()

    async def worker(self, **options: Any) -> Worker:
        return await Worker(self, len(list(self.folder.iterdir())), **options).start()

    async def send(self, topic: str, partition: int, *values: bytes, key: bytes | None = b"k") -> None:
        futures = [await self.producer.send(topic, v, key=key, partition=partition) for v in values]
        await asyncio.gather(*futures)

    async def send_transaction(self, topic: str, partition: int, *values: bytes, commit: bool) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap, transactional_id=uuid.uuid4().hex)
        await producer.start()
        try:
            await producer.begin_transaction()
            for value in values:
                await producer.send_and_wait(topic, value, partition=partition)
            await (producer.commit_transaction() if commit else producer.abort_transaction())
        finally:
            await producer.stop()

    async def end_offset(self, tp: TP) -> int:
        consumer = AIOKafkaConsumer(bootstrap_servers=self.bootstrap)
        await consumer.start()
        try:
            return (await consumer.end_offsets([TopicPartition(*tp)]))[TopicPartition(*tp)]
        finally:
            await consumer.stop()

    async def committed(self, tp: TP) -> int | None:
        offsets = await self.admin.list_consumer_group_offsets(self.name)
        found = offsets.get(TopicPartition(*tp))
        return found.offset if found is not None and found.offset >= 0 else None

    async def read(self, tp: TP) -> list[tuple[bytes | None, bytes | None]]:
        """All (key, value) of a partition."""
        end, rows = await self.end_offset(tp), []
        consumer = AIOKafkaConsumer(bootstrap_servers=self.bootstrap, auto_offset_reset="earliest")
        await consumer.start()
        try:
            consumer.assign([TopicPartition(*tp)])
            while await consumer.position(TopicPartition(*tp)) < end:
                for records in (await consumer.getmany(timeout_ms=1000)).values():
                    rows += [(r.key, r.value) for r in records]
        finally:
            await consumer.stop()
        return rows
