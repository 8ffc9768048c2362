"""Reads beside the group: the rest of the changelogs in recovery, where logs begin, and the deletion of old records."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.errors import KafkaError

from app.kafka.connection import end_client, kafka_client_args
from marq.clock import now_ms

if TYPE_CHECKING:
    from app.engine.owned_partition import OwnedPartition
    from app.kafka.topics import Topics
    from app.settings import Settings
    from app.streaming.faust_app import MarqApp
    from app.streaming.raw_table import SegmentTable

#: Milliseconds between deletions of old records of one partition.
TRIM_INTERVAL_MS = 30_000
#: Seconds without progress before a read of a changelog to its end is tried again.
READ_TIMEOUT_S = 20.0
#: Partitions whose changelogs are read at once.
READERS = 4
#: Rows that are put into a local store between two looks at everything else.
SLICE_ROWS = 64


class Changelogs:
    """Plain consumers and an admin client of the worker."""

    def __init__(self, app: MarqApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self._consumer: AIOKafkaConsumer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._lock = asyncio.Lock()
        self._readers = asyncio.Semaphore(READERS)
        self._idle: list[AIOKafkaConsumer] = []
        self._ending: set[asyncio.Future[bool]] = set()

    async def _plain(self) -> AIOKafkaConsumer:
        if self._consumer is None:
            self._consumer = await self._new_consumer()
        return self._consumer

    async def _new_consumer(self) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            enable_auto_commit=False, auto_offset_reset="earliest", **kafka_client_args(self.settings)
        )
        try:
            await asyncio.wait_for(consumer.start(), READ_TIMEOUT_S)
        except BaseException:
            await end_client(consumer.stop())
            raise
        return consumer

    async def close(self) -> None:
        """Close the connections."""
        consumer, self._consumer = self._consumer, None
        admin, self._admin = self._admin, None
        idle, self._idle = self._idle, []
        await asyncio.gather(*(end_client(c.stop()) for c in (consumer, *idle) if c is not None), *self._ending)
        if admin is not None:
            await end_client(admin.close())

    async def read_rest(self, tables: Iterable[SegmentTable], number: int) -> None:
        """Bring the local stores of a partition up to the end that their changelogs have now.

        Raises:
            KafkaError, TimeoutError: nothing came for `READ_TIMEOUT_S`. What was read before is in the stores.
        """
        stores = {TopicPartition(table.changelog_topic_name, number): table for table in tables}
        async with self._reader() as consumer:
            asked = asyncio.gather(consumer.end_offsets(list(stores)), consumer.beginning_offsets(list(stores)))
            ends, starts = await asyncio.wait_for(asked, READ_TIMEOUT_S)
            todo: dict[TopicPartition, int] = {}
            for tp, table in stores.items():
                persisted = table.persisted(number)
                position = max(0 if persisted is None else persisted + 1, starts[tp])
                if position < ends[tp]:
                    todo[tp] = position
            if not todo:
                return
            consumer.assign(list(todo))
            for tp, position in todo.items():
                consumer.seek(tp, position)
            now = asyncio.get_running_loop().time
            advanced_s = now()
            while todo:
                for tp, records in (await consumer.getmany(timeout_ms=500)).items():
                    rows = [(r.key, r.value, r.offset) for r in records if r.key is not None]
                    for i in range(0, len(rows), SLICE_ROWS):
                        stores[tp].apply(number, rows[i : i + SLICE_ROWS])
                        await asyncio.sleep(0)
                for tp in list(todo):
                    # the position also passes control records and what was compacted away
                    position = min(await asyncio.wait_for(consumer.position(tp), READ_TIMEOUT_S), ends[tp])
                    if position > todo[tp]:
                        todo[tp], advanced_s = position, now()
                        stores[tp].apply(number, [], upto=position)
                    if position == ends[tp]:
                        del todo[tp]
                if now() - advanced_s > READ_TIMEOUT_S:
                    where = ", ".join(f"{tp.topic} from offset {position} on" for tp, position in todo.items())
                    raise TimeoutError(f"partition {number}: nothing could be read for {READ_TIMEOUT_S:.0f} s: {where}")

    async def warm(self) -> None:
        """Connect before the first partition is taken over."""
        with contextlib.suppress(KafkaError, TimeoutError):
            async with self._reader():
                pass

    async def log_starts(self, topics: Topics, number: int) -> tuple[int, int]:
        """First offsets that the queue and the markers topic of a partition still have."""
        queue, markers = TopicPartition(topics.queue, number), TopicPartition(topics.markers, number)
        async with self._reader() as consumer:
            starts = await asyncio.wait_for(consumer.beginning_offsets([queue, markers]), READ_TIMEOUT_S)
        return starts[queue], starts[markers]

    @contextlib.asynccontextmanager
    async def _reader(self) -> AsyncIterator[AIOKafkaConsumer]:
        """A plain consumer for one partition's recovery: none waits for that of another one."""
        async with self._readers:
            consumer = self._idle.pop() if self._idle else await self._new_consumer()
            try:
                yield consumer
                consumer.unsubscribe()
            except BaseException:
                ending = asyncio.ensure_future(end_client(consumer.stop()))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
                raise
            self._idle.append(consumer)

    async def trim(self, held: OwnedPartition, topics: Topics, position: int, markers_position: int) -> None:
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
