"""Access to Kafka outside of the consumer group: changelogs in recovery, first offsets, deletion of old records."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.errors import KafkaError

from app.kafka.connection import end_client, kafka_client_args, start_consumer
from app.kafka.identity import Identity, identify
from app.streaming.fetching import decode_with, said_of
from app.streaming.log_edges import LogEdges, release
from marq.clock import now_ms
from marq.core.reading import Undecodable, Unreadable
from marq.core.recovery import Edges, LastRead
from marq.errors import UnreadableError

if TYPE_CHECKING:
    from app.engine.owned_partition import OwnedPartition
    from app.kafka.topics import Topics
    from app.settings import Settings
    from app.streaming.faust_app import MarqApp
    from app.streaming.raw_table import SegmentTable

#: Milliseconds between deletions of old records of one partition.
TRIM_INTERVAL_MS = 30_000
#: Seconds that a deletion may take before it is left to the next one.
TRIM_TIMEOUT_S = 20.0
#: Seconds without progress before a read of a changelog to its end is tried again.
READ_TIMEOUT_S = 20.0
#: Partitions whose changelogs are read at the same time: more would share the same processor.
READERS = 4
#: Seconds without progress after which a read, which only waits for Kafka, gives up its place to another partition.
TURN_S = 1.0
#: Rows, and their bytes, that are written to a local store before the event loop may do other work; at least one row.
SLICE_ROWS = 64
SLICE_BYTES = 256 * 1024
#: Rows that are decoded before the event loop may do other work.
DECODED_ROWS = 500
#: Seconds for which Kafka's word on which cluster and topics these are is used again, for other partitions.
IDENTITY_S = 5.0
#: Seconds before another broker is asked.
IDENTITY_AGAIN_S = 0.2
#: Milliseconds that Kafka may wait before it answers a fetch; later requests on the same connection wait as long.
FETCH_WAIT_MS = 10


_Row = tuple[bytes, bytes | None, int]


def _sliced(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """`rows` in lists that are written in a few milliseconds each."""
    found: list[_Row] = []
    size = 0
    for row in rows:
        found.append(row)
        size += len(row[1] or b"")
        if len(found) == SLICE_ROWS or size >= SLICE_BYTES:
            yield found
            found, size = [], 0
    if found:
        yield found


def check_rows(tp: TopicPartition, records: Iterable[Any]) -> None:
    """Raises `UnreadableError` if some of these records of a changelog can't be read: they may be rows that count."""
    for record in records:
        if type(record) in (Undecodable, Unreadable):
            where = f"{tp.topic}, partition {tp.partition}, from offset {record.offset} on"
            raise UnreadableError(f"{where}: no replica has the rows whole ({record.reason})")


async def first_newer(consumer: AIOKafkaConsumer, tp: TopicPartition, start: int, read: LastRead) -> int | None:
    """The first record from `start` on, and below what was read, that is newer than all that was read, or None."""
    consumer.assign([tp])
    consumer.seek(tp, start)
    while await consumer.position(tp) < read.position:
        for record in (await consumer.getmany(timeout_ms=500)).get(tp, ()):
            if read.is_newer(record.offset, record.timestamp):
                return int(record.offset)
    return None


class _Reader:
    """A plain consumer, and its place among those that may read at the same time."""

    def __init__(self, consumer: AIOKafkaConsumer, leave: Callable[[], None]) -> None:
        self.consumer = consumer
        self._leave: Callable[[], None] | None = leave
        self._timer: asyncio.TimerHandle | None = None
        self.advanced()

    def advanced(self) -> None:
        """Note progress: the reader keeps its place."""
        if self._timer is not None:
            self._timer.cancel()
        if self._leave is not None:
            self._timer = asyncio.get_running_loop().call_later(TURN_S, self.leave)

    def leave(self) -> None:
        """Give the place to another reader, once."""
        if self._timer is not None:
            self._timer.cancel()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Changelogs:
    """Plain consumers and an admin client of the worker."""

    def __init__(self, app: MarqApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self._consumer: AIOKafkaConsumer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._lock = asyncio.Lock()
        self._edges = LogEdges(self._plain_locked)
        self._readers = asyncio.Semaphore(READERS)
        self._idle: list[AIOKafkaConsumer] = []
        self._ending: set[asyncio.Future[bool]] = set()
        self._identifying = asyncio.Lock()
        self._identity: Identity | None = None
        self._identified_s = 0.0
        self._process_id = uuid.uuid4().hex

    async def _plain_locked(self) -> AIOKafkaConsumer:
        async with self._lock:
            return await self._plain()

    async def _plain(self) -> AIOKafkaConsumer:
        if self._consumer is None:
            self._consumer = await self._new_consumer()
        return self._consumer

    async def _new_consumer(self) -> AIOKafkaConsumer:
        async with asyncio.timeout(READ_TIMEOUT_S):  # not `wait_for`: see `TakeOver._claim`
            consumer = await start_consumer(
                self.settings, auto_offset_reset="earliest", fetch_max_wait_ms=FETCH_WAIT_MS
            )
        decode_with(consumer, lambda topic: True, lambda tp, fault: self.app.log.warning(said_of(tp, fault)))
        return consumer

    async def close(self) -> None:
        """Close the connections."""
        self._edges.close()
        consumer, self._consumer = self._consumer, None
        admin, self._admin = self._admin, None
        idle, self._idle = self._idle, []
        await asyncio.gather(*(end_client(c.stop()) for c in (consumer, *idle) if c is not None), *self._ending)
        if admin is not None:
            await end_client(admin.close())

    async def read_rest(self, tables: Iterable[SegmentTable], number: int) -> None:
        """Bring the local stores of a partition up to the end that their changelogs have now.

        Raises:
            KafkaError, TimeoutError: nothing came for `READ_TIMEOUT_S`. Rows that were read before are in the stores.
            UnreadableError: no replica of a changelog has it whole.
        """
        stores = {TopicPartition(table.changelog_topic_name, number): table for table in tables}
        async with asyncio.timeout(READ_TIMEOUT_S):
            ends, starts = await asyncio.gather(self._edges.end(stores), self._edges.begin(stores))
        todo: dict[TopicPartition, int] = {}
        for tp, table in stores.items():
            persisted = table.persisted(number)
            if persisted is not None and persisted >= ends[tp]:
                self.app.log.warning(
                    "Partition %s: its local store has more than %s, which ends at %s: that was restored from an older "
                    "copy, or has lost its end. The store is filled again",
                    number,
                    tp.topic,
                    ends[tp],
                )
                table.wipe(number)
                persisted = None
            position = max(0 if persisted is None else persisted + 1, starts[tp])
            if position < ends[tp]:
                todo[tp] = position
        if not todo:
            return
        async with self._reader() as reader:
            consumer = reader.consumer
            consumer.assign(list(todo))
            for tp, position in todo.items():
                consumer.seek(tp, position)
            now = asyncio.get_running_loop().time
            advanced_s = now()
            while todo:
                for tp, records in (await consumer.getmany(timeout_ms=500, max_records=DECODED_ROWS)).items():
                    check_rows(tp, records)
                    for rows in _sliced((r.key, r.value, r.offset) for r in records if r.key is not None):
                        stores[tp].apply(number, rows)
                        await asyncio.sleep(0)
                for tp in list(todo):
                    # the position also passes control records and what was compacted away
                    async with asyncio.timeout(READ_TIMEOUT_S):
                        position = min(await consumer.position(tp), ends[tp])
                    if position > todo[tp]:
                        todo[tp], advanced_s = position, now()
                        reader.advanced()
                        stores[tp].apply(number, [], upto=position)
                    if position == ends[tp]:
                        del todo[tp]
                if now() - advanced_s > READ_TIMEOUT_S:
                    where = ", ".join(f"{tp.topic} from offset {position} on" for tp, position in todo.items())
                    raise TimeoutError(f"partition {number}: nothing could be read for {READ_TIMEOUT_S:.0f} s: {where}")

    async def warm(self, tables: Iterable[SegmentTable], topics: Topics) -> None:
        """Connect, and learn where the topics are, before the first partition is taken over."""
        names = [table.changelog_topic_name for table in tables] + [topics.queue, topics.markers]
        with contextlib.suppress(KafkaError, TimeoutError):
            async with asyncio.timeout(READ_TIMEOUT_S):
                await self._edges.end([TopicPartition(name, 0) for name in names])

    @property
    def cluster(self) -> str:
        """The id of the Kafka cluster; empty until a partition was taken over."""
        return "" if self._identity is None else self._identity.cluster

    async def identity(self, topics: Topics) -> Identity:
        """Which cluster this is, and which topics.

        Where topics have no ids, a store can't tell whether its changelog was deleted and made anew. Then each process
        reads the manifests from the changelog: they name all other rows, with checksums.

        Raises:
            KafkaError, TimeoutError: Kafka did not answer.
        """
        now = asyncio.get_running_loop().time
        async with asyncio.timeout(READ_TIMEOUT_S), self._identifying:
            found = self._identity
            if found is None or now() > self._identified_s + IDENTITY_S:
                found = await self._identify(topics)
                self._identity, self._identified_s = found, now()
            return found

    async def _identify(self, topics: Topics) -> Identity:
        consumer = await self._plain_locked()
        names = (topics.queue, topics.markers, *topics.changelogs.values())
        while True:
            try:
                found = await identify(consumer._client, names)
            except KafkaError as exc:
                if not exc.retriable:
                    raise
                await asyncio.sleep(IDENTITY_AGAIN_S)
                continue
            progress = topics.changelogs["progress"]
            return Identity(found.cluster, {**found.topics, progress: found.topics[progress] or self._process_id})

    async def edges(self, topics: Topics, number: int, read: LastRead | None) -> Edges:
        """Where both logs of a partition begin and end, and whether the queue topic has other records than were read.

        Raises:
            KafkaError, TimeoutError: Kafka did not answer.
        """
        queue, markers = TopicPartition(topics.queue, number), TopicPartition(topics.markers, number)
        async with asyncio.timeout(READ_TIMEOUT_S):
            starts, ends, newer = await asyncio.gather(
                self._edges.begin((queue, markers)), self._edges.end((queue, markers)), self._newer(queue, read)
            )
        return Edges((starts[queue], starts[markers]), (ends[queue], ends[markers]), newer)

    async def _newer(self, tp: TopicPartition, read: LastRead | None) -> int | None:
        """The first record below what was read that is newer than all that was read; None: there is none."""
        if read is None:
            return None
        offset = await self._edges.since(tp, read.newest_ms + 1)
        if not 0 <= offset < read.position:
            return None
        # it may be of a transaction that was aborted, which nobody reads
        consumer = await start_consumer(self.settings, auto_offset_reset="none", isolation_level="read_committed")
        try:
            return await first_newer(consumer, tp, offset, read)
        except TimeoutError:
            raise
        except Exception as exc:
            if isinstance(exc, KafkaError) and exc.retriable:
                raise
            return None  # damaged, in whichever way, or deleted meanwhile: it proves nothing
        finally:
            self._end(consumer)

    @contextlib.asynccontextmanager
    async def _reader(self) -> AsyncIterator[_Reader]:
        """A consumer for the recovery of one partition alone, so that recoveries do not wait for each other."""
        await self._readers.acquire()
        try:
            consumer = self._idle.pop() if self._idle else await self._new_consumer()
        except BaseException:
            self._readers.release()
            raise
        reader = _Reader(consumer, self._readers.release)
        try:
            yield reader
            release(consumer)
        except BaseException:
            self._end(consumer)
            raise
        else:
            if len(self._idle) < READERS:
                self._idle.append(consumer)
            else:
                self._end(consumer)
        finally:
            reader.leave()

    def _end(self, consumer: AIOKafkaConsumer) -> None:
        ending = asyncio.ensure_future(end_client(consumer.stop()))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def trim(self, owned: OwnedPartition, topics: Topics, position: int, markers_position: int) -> None:
        """Delete records below the positions of a manifest behind its fence, if they are old enough and archived.

        Where there is no archive, or Kafka has forgotten its positions, only age counts.
        """
        now = now_ms()
        if now < owned.retire_at_ms or "Delete" in self.settings.kafka_without:
            return
        owned.retire_at_ms = now + TRIM_INTERVAL_MS
        upto = {TopicPartition(topics.markers, owned.number): markers_position}
        if self.settings.queue_id is None:  # the topic is not ours in topic mode
            upto[TopicPartition(topics.queue, owned.number)] = position
        try:
            # each by itself: Kafka may keep what is asked of a partition whose replicas don't follow
            async with asyncio.timeout(TRIM_TIMEOUT_S):
                await self._trim(upto)
        except (KafkaError, TimeoutError) as exc:
            # old records cost only space; the next checkpoint tries again
            self.app.log.warning("Old records of partition %s were not deleted: %r", owned.number, exc)

    async def _trim(self, upto: dict[TopicPartition, int]) -> None:
        async with self._lock:
            consumer, admin = await self._plain(), await self._plain_admin()
        if self.settings.retention_history_ms:
            before_ms = int(time.time() * 1000) - self.settings.retention_history_ms
            found = await consumer.offsets_for_times(dict.fromkeys(upto, before_ms))
            upto = {tp: min(o, found[tp].offset) for tp, o in upto.items() if found.get(tp) is not None} | {
                tp: o for tp, o in upto.items() if found.get(tp) is None
            }
        upto = await self._without_unarchived(admin, upto)
        due: Any = {tp: RecordsToDelete(before_offset=o) for tp, o in upto.items() if o > 0}
        if due:
            await admin.delete_records(due)

    async def _plain_admin(self) -> AIOKafkaAdminClient:
        if self._admin is None:
            admin = AIOKafkaAdminClient(**kafka_client_args(self.settings))
            try:
                await admin.start()
            except BaseException:
                await end_client(admin.close())
                raise
            self._admin = admin
        return self._admin

    async def _without_unarchived(
        self, admin: AIOKafkaAdminClient, upto: dict[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """`upto`, or the position of the archive if there is one and it is lower."""
        found = await admin.list_consumer_group_offsets(self.settings.archive_group)
        archived = {tp: position.offset for tp, position in found.items() if position.offset >= 0}
        topics = {tp.topic for tp in archived}
        return {tp: min(o, archived.get(tp, 0)) if tp.topic in topics else o for tp, o in upto.items()}
