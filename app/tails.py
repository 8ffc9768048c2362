"""Reads beside the group: the rest of the changelogs in recovery, where logs begin, and the deletion of old records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.errors import KafkaError

from app.connection import end_client, kafka_client_args
from marq.clock import now_ms

if TYPE_CHECKING:
    from app.ownership import Held
    from app.settings import Settings
    from app.streaming import MarqApp
    from app.table import SegmentTable
    from app.topics import Topics

#: Milliseconds between deletions of old records of one partition.
TRIM_INTERVAL_MS = 30_000
#: Seconds without a record before a read of a changelog to its end is tried again.
READ_TIMEOUT_S = 20.0


class Tails:
    """A plain consumer and an admin client of the worker."""

    def __init__(self, app: MarqApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self._consumer: AIOKafkaConsumer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._lock = asyncio.Lock()

    async def _plain(self) -> AIOKafkaConsumer:
        if self._consumer is None:
            consumer = AIOKafkaConsumer(
                enable_auto_commit=False, auto_offset_reset="earliest", **kafka_client_args(self.settings)
            )
            try:
                await consumer.start()
            except BaseException:
                await end_client(consumer.stop())
                raise
            self._consumer = consumer
        return self._consumer

    async def close(self) -> None:
        """Close the connections."""
        consumer, self._consumer = self._consumer, None
        admin, self._admin = self._admin, None
        if consumer is not None:
            await end_client(consumer.stop())
        if admin is not None:
            await end_client(admin.close())

    async def read_rest(self, tables: Iterable[SegmentTable], numbers: Iterable[int]) -> None:
        """Bring the local stores of these partitions up to the end that their changelogs have now."""
        async with self._lock:
            consumer = await self._plain()
            stores = {
                TopicPartition(table.changelog_topic_name, number): table for table in tables for number in numbers
            }
            ends = await consumer.end_offsets(list(stores))
            starts = await consumer.beginning_offsets(list(stores))
            todo: dict[TopicPartition, int] = {}
            for tp, table in stores.items():
                persisted = table.persisted(tp.partition)
                position = max(0 if persisted is None else persisted + 1, starts[tp])
                if position < ends[tp]:
                    todo[tp] = position
            if not todo:
                return
            consumer.assign(list(todo))
            try:
                for tp, position in todo.items():
                    consumer.seek(tp, position)
                while todo:
                    batches = await asyncio.wait_for(consumer.getmany(timeout_ms=500), READ_TIMEOUT_S)
                    for tp, records in batches.items():
                        if tp in todo:
                            position = records[-1].offset + 1
                            rows = [(r.key, r.value, r.offset) for r in records if r.key is not None]
                            stores[tp].apply(tp.partition, rows, upto=min(position, ends[tp]))
                    for tp in list(todo):
                        # the position also passes control records and what was compacted away
                        position = await consumer.position(tp)
                        if position >= ends[tp]:
                            stores[tp].apply(tp.partition, [], upto=ends[tp])
                            del todo[tp]
            finally:
                consumer.unsubscribe()

    async def log_starts(self, topics: Topics, numbers: Iterable[int]) -> Mapping[int, tuple[int, int]]:
        """First offsets that the queue and the markers topic still have, for each partition."""
        numbers = list(numbers)
        async with self._lock:
            consumer = await self._plain()
            starts = await consumer.beginning_offsets(
                [TopicPartition(topic, n) for n in numbers for topic in (topics.queue, topics.markers)]
            )
        return {
            n: (starts[TopicPartition(topics.queue, n)], starts[TopicPartition(topics.markers, n)]) for n in numbers
        }

    async def trim(self, held: Held, topics: Topics, position: int, markers_position: int) -> None:
        """Delete records below the positions of a manifest behind its fence, if they are old enough and archived.

        Where there is no archive, or Kafka has forgotten its positions, only age counts.
        """
        now = now_ms()
        if now < held.retire_at_ms:
            return
        held.retire_at_ms = now + TRIM_INTERVAL_MS
        upto = {TopicPartition(topics.markers, held.number): markers_position}
        if self.settings.queue_id is None:  # the topic is not ours in topic mode
            upto[TopicPartition(topics.queue, held.number)] = position
        try:
            async with self._lock:
                if self.settings.retention_history_ms:
                    consumer = await self._plain()
                    before_ms = int(time.time() * 1000) - self.settings.retention_history_ms
                    found = await consumer.offsets_for_times(dict.fromkeys(upto, before_ms))
                    upto = {tp: min(o, found[tp].offset) for tp, o in upto.items() if found.get(tp) is not None} | {
                        tp: o for tp, o in upto.items() if found.get(tp) is None
                    }
                if self._admin is None:
                    admin = AIOKafkaAdminClient(**kafka_client_args(self.settings))
                    try:
                        await admin.start()
                    except BaseException:
                        await end_client(admin.close())
                        raise
                    self._admin = admin
                upto = await self._without_unarchived(self._admin, upto)
                due: Any = {tp: RecordsToDelete(before_offset=o) for tp, o in upto.items() if o > 0}
                if due:
                    await self._admin.delete_records(due)
        except KafkaError as exc:
            # old records cost only space; the next checkpoint tries again
            self.app.log.warning("Old records of partition %s were not deleted: %r", held.number, exc)

    async def _without_unarchived(
        self, admin: AIOKafkaAdminClient, upto: dict[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """`upto`, lowered to where the archive is, if there is one."""
        found = await admin.list_consumer_group_offsets(self.settings.archive_group)
        archived = {tp: position.offset for tp, position in found.items() if position.offset >= 0}
        topics = {tp.topic for tp in archived}
        return {tp: min(o, archived.get(tp, 0)) if tp.topic in topics else o for tp, o in upto.items()}
