"""Which queues there are and what each is set to: a compacted topic, read whole by every worker with a plain consumer.

Not a global table: that would sit in the co-partition group of the queue and markers topics and move partitions for
nothing.

    key                 value
    <queue>             QueueRecord: settings, and a purge or deletion that is under way
    \\0auto/<queue>      b"1": made by a message, with defaults; never stands in the way of a record with settings
    \\0secret/<random>   32 bytes; the first of them in the log is the installation's secret

A record counts only if its version is higher than that of the one before: of two changes that were made of the same
one, all workers take the first. A writer reads its own record back and makes its change again on top of what counts, so
no change is lost. Because compaction keeps the last record of a queue, one that does not count must not stay the last:
if its writer dies, the owner of partition 0 writes what counts once more.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
import uuid
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from zlib import crc32

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from mode import Service

from app.engine.secrets import derived
from app.kafka.connection import end_client, kafka_client_args, unreachable
from app.kafka.datadir import resolve_bootstrap
from app.logs import silenced
from app.streaming.batches import decode_with
from app.streaming.faults import stop_if_reading_ends
from marq.core.policies import QueueSettings, name_problem
from marq.core.settings import QueueSettingsError, check_kind, check_name, settings_with
from marq.errors import UnavailableError, UnknownQueueError

if TYPE_CHECKING:
    from app.settings import Settings

#: Begin the keys of records that are not of a queue with settings.
AUTO_PREFIX = b"\0auto/"
SECRET_PREFIX = b"\0secret/"
#: Seconds until a change has to be in the topic, and read back.
WRITE_TIMEOUT_S = 10.0
#: Times that a change is made again because another one came first.
ATTEMPTS = 20
#: Seconds for which a deleted queue's record is kept.
DELETED_KEPT_S = 3600
#: Seconds that making a queue waits for the end of one of the same name.
DELETE_WAIT_S = 10.0
#: Seconds that the writer of a record that does not count gets to write another.
OVERWRITTEN_S = 15.0
#: Attribute in which records of 0.1 have a policy that is a setting now.
OLD_POLICY = "sqs.RedriveAllowPolicy"
#: What origins of copies are sealed for, as `Catalog.keys_for` takes it.
ORIGINS = b"marq-origin"
#: Format of a record.
VERSION = 1


class MoveTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """Messages of a queue that are to be moved to others, as many a second as are wished."""

    id: str
    to: str  # "": each to the queue of which it is a dead letter
    started_ms: int
    before: tuple[int, ...]  # those below these offsets, one per partition
    per_second: int = 0  # 0: as fast as can be
    total: int = 0  # about so many there were
    moved: int = 0
    state: Literal["running", "cancelling", "cancelled", "completed", "failed"] = "running"
    reason: str = ""  # of the failure

    @property
    def active(self) -> bool:
        """True if it is not over."""
        return self.state in ("running", "cancelling")


class QueueRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the topic says of one queue."""

    v: int
    version: int  # grows with each change
    by: str  # names the change
    settings: QueueSettings
    state: Literal["active", "deleting", "deleted"] = "active"
    purge: tuple[int, ...] = ()  # everything below these offsets, one per partition, is to go; (): nothing is
    created_ms: int = 0
    changed_ms: int = 0
    purged_ms: int = 0  # when a purge was last asked for; 0: never
    attributes: dict[str, str] = {}  # what protocols keep beside the settings
    tags: dict[str, str] = {}
    moves: tuple[MoveTask, ...] = ()  # the last ones, the newest first
    life: int = 0  # how many queues of this name there were before it

    @property
    def active(self) -> bool:
        """True if the queue is there for its users."""
        return self.state == "active"


class _OldPolicy(msgspec.Struct):
    redrivePermission: str = "allowAll"
    sourceQueueArns: tuple[str, ...] = ()


class Draft(NamedTuple):
    """What a queue is to be."""

    settings: QueueSettings
    attributes: dict[str, str]
    tags: dict[str, str]
    moves: tuple[MoveTask, ...] = ()


_decoder = msgspec.json.Decoder(QueueRecord)
_encode = msgspec.json.Encoder().encode


def decode(value: bytes) -> QueueRecord:
    """The record in a value. Raises `QueueSettingsError`."""
    try:
        return _with_policy(_decoder.decode(value))
    except msgspec.MsgspecError as exc:
        raise QueueSettingsError(f"not the record of a queue: {exc}") from None


def _with_policy(record: QueueRecord) -> QueueRecord:
    """The record with the policy of SQS that stood beside the settings before it was one of them."""
    text = record.attributes.get(OLD_POLICY)
    if text is None or record.settings.dead_letters_from is not None:
        return record
    try:
        policy = msgspec.json.decode(text, type=_OldPolicy)
    except msgspec.MsgspecError:
        return record
    if policy.redrivePermission == "allowAll":
        return record
    sources = tuple(arn.rpartition(":")[2] for arn in policy.sourceQueueArns) if policy.sourceQueueArns else ()
    return msgspec.structs.replace(record, settings=msgspec.structs.replace(record.settings, dead_letters_from=sources))


class Catalog(Service):
    """All queues, and the secret that workers share."""

    def __init__(self, settings: Settings, topic: Callable[[], str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._settings = settings
        self._topic = topic
        self.records: dict[str, QueueRecord] = {}
        self.auto: set[str] = set()
        self._names: list[str] | None = None  # in order; None: something has changed
        self.with_ttl: set[str] = set()
        #: Queues that have a back-off, by the checksum that receipts name them by.
        self.with_backoff: dict[int, str] = {}
        #: Queues of which something is to be purged.
        self.purging: dict[str, QueueRecord] = {}
        #: Queues whose messages are being moved.
        self.moving: dict[str, QueueRecord] = {}
        #: Maximum receives of queues that name none, by queue; set by the handlers.
        self.max_receives_of: Callable[[str], int] = lambda queue: 0
        self._effective: dict[str, QueueSettings] = {}
        self._dead_targets: Counter[str] = Counter()
        self.default = QueueSettings(
            visibility_timeout_ms=settings.visibility_timeout_ms, max_receives=settings.max_receives or 0
        )
        self._consumer: AIOKafkaConsumer | None = None
        self._producer: AIOKafkaProducer | None = None
        self._producer_lock = asyncio.Lock()
        self._mine: dict[str, asyncio.Future[bool]] = {}
        self._overwritten: dict[str, float] = {}  # queue whose last record does not count -> since when
        self._making: dict[str, asyncio.Task[None]] = {}
        self._secrets: list[bytes] = []  # in the order of the log
        self._position = 0
        self.read_up = asyncio.Event()

    # ------------------------------------------------------------------ what is known

    @property
    def secret(self) -> bytes:
        """What all workers of the installation share, and nobody else knows."""
        if self._settings.secret is not None:
            return derived(self._settings.secret.get_secret_value(), self._settings.name)
        return self._secrets[0]

    @property
    def previous_secrets(self) -> tuple[bytes, ...]:
        """Others that are accepted."""
        previous = self._settings.secret_previous
        return (derived(previous.get_secret_value(), self._settings.name),) if previous is not None else ()

    def keys_for(self, purpose: bytes) -> tuple[bytes, ...]:
        """Keys of 32 bytes made of the secret: the first is used, all are accepted. `purpose`: at most 16 bytes."""
        secrets = (self.secret, *self.previous_secrets)
        return tuple(blake2b(secret, digest_size=32, person=purpose).digest() for secret in secrets)

    def generation_of(self, queue: str) -> int:
        """How many queues of this name there were before."""
        record = self.records.get(queue)
        return record.life if record is not None else 0

    def settings_of(self, queue: str) -> QueueSettings:
        """What is in force for `queue`."""
        settings = self._effective.get(queue)
        if settings is None:
            record = self.records.get(queue)
            settings = record.settings if record is not None and record.active else self.default
            if self._settings.queue_id is not None and self._settings.dead_letter_topic is None:
                settings = msgspec.structs.replace(settings, max_receives=0)  # nowhere to put a dead letter
            elif not settings.max_receives and (maximum := self.max_receives_of(queue)):
                settings = msgspec.structs.replace(settings, max_receives=maximum)
            if len(self._effective) > 100_000:
                self._effective.clear()
            self._effective[queue] = settings
        return settings

    def exists(self, queue: str) -> bool:
        """True if a queue was made, by its settings or by a message, or takes the dead letters of another."""
        record = self.records.get(queue)
        if record is not None:
            return record.active
        return queue in self.auto or self._dead_targets[queue] > 0 or queue == self._settings.queue_id

    def names(self) -> list[str]:
        """All queues, in order. The list is not to be changed."""
        if self._names is not None:
            return self._names
        found = {queue for queue, record in self.records.items() if record.active}
        found.update(queue for queue in self.auto if queue not in self.records)
        if self._settings.queue_id is not None:
            found.add(self._settings.queue_id)
        self._names = sorted(found)
        return self._names

    def names_from(self, prefix: str, after: str) -> Iterator[str]:
        """Queues whose names begin with `prefix` and come after `after`, in order."""
        names = self.names()
        for name in itertools.islice(names, max(bisect_left(names, prefix), bisect_right(names, after)), None):
            if not name.startswith(prefix):
                return
            yield name

    def require(self, queue: str) -> None:
        """Raises `UnknownQueueError` if there is no such queue, and `QueueSettingsError` if there can't be one."""
        if not self.exists(queue):
            check_name(queue)
            raise UnknownQueueError(f"there is no queue {queue!r}")

    # ------------------------------------------------------------------ changes

    async def create(self, queue: str, values: dict[str, Any]) -> tuple[QueueRecord, bool]:
        """Make a queue of exactly these settings, or set it to them; the record, and whether it is new."""
        check_name(queue)
        await self.until_deleted(queue)
        settings = settings_with(queue, self.default, values)
        made = False

        def change(old: QueueRecord | None) -> QueueRecord | None:
            nonlocal made
            made = old is None or not old.active
            if old is not None and old.active and old.settings == settings:
                return None
            if old is not None and old.active:
                check_kind(queue, old.settings, settings)
            return self._next(old, settings=settings, state="active")

        await self._change(queue, change)
        return self.records[queue], made

    async def until_deleted(self, queue: str) -> None:
        """Wait while a queue is being deleted: made again at once, it would have what was in it.

        Raises:
            UnavailableError: a partition's owner, who has to do it, is not there.
        """
        deadline = time.monotonic() + DELETE_WAIT_S
        while (record := self.records.get(queue)) is not None and record.state == "deleting":
            if time.monotonic() > deadline:
                raise UnavailableError(f"queue {queue!r} is still being deleted; try again later", 2.0)
            await asyncio.sleep(0.05)

    async def edit(
        self,
        queue: str,
        draft_of: Callable[[QueueRecord | None], Draft | None],
    ) -> QueueRecord:
        """Make or change a queue with what protocols keep beside its settings.

        Args:
            draft_of: what it is to be, of the record that counts now (None: there is none); None: as it is. May raise.
        """
        check_name(queue)

        def change(old: QueueRecord | None) -> QueueRecord | None:
            base = old if old is not None and old.active else None
            draft = draft_of(base)
            if draft is None:
                return None
            return self._next(
                old,
                settings=draft.settings,
                state="active",
                attributes=draft.attributes,
                tags=draft.tags,
                moves=draft.moves,
            )

        await self._change(queue, change)
        return self.records[queue]

    async def update(self, queue: str, values: dict[str, Any]) -> QueueRecord:
        """Set some values of a queue that is there. Raises `UnknownQueueError`, `QueueSettingsError`."""
        self.require(queue)

        def change(old: QueueRecord | None) -> QueueRecord | None:
            base = old.settings if old is not None and old.active else self.default
            settings = settings_with(queue, base, values)
            if old is not None and old.active:
                check_kind(queue, base, settings)
            return self._next(old, settings=settings, state="active")

        await self._change(queue, change)
        return self.records[queue]

    async def purge(self, queue: str, queue_topic: str, partitions: int, delete: bool = False) -> QueueRecord:
        """Everything that is in a queue now is to go, and with `delete` the queue as well."""
        self.require(queue)
        ends = await self.end_offsets(queue_topic, partitions)

        def change(old: QueueRecord | None) -> QueueRecord | None:
            settings = old.settings if old is not None and old.active else self.default
            return self._next(old, settings=settings, state="deleting" if delete else "active", purge=ends)

        await self._change(queue, change)
        return self.records[queue]

    async def purged(self, queue: str, by: str) -> None:
        """What the change `by` wanted purged is gone everywhere."""

        def change(old: QueueRecord | None) -> QueueRecord | None:
            if old is None or old.by != by:
                return None
            return self._next(old, settings=old.settings, state="active" if old.active else "deleted", purge=())

        await self._change(queue, change)
        record = self.records.get(queue)
        if record is not None and record.state == "deleted":
            await self._write(AUTO_PREFIX + queue.encode(), None)

    async def make(self, queue: str) -> None:
        """A message makes a queue, with defaults; nothing if it is there."""
        record = self.records.get(queue)
        if queue == self._settings.queue_id or (record.active if record is not None else queue in self.auto):
            return
        task = self._making.get(queue)
        if task is None:
            check_name(queue)
            task = self._making[queue] = asyncio.ensure_future(self._make(queue))
            task.add_done_callback(lambda _: self._making.pop(queue, None))
        await asyncio.shield(task)

    def require_receivable(self, queue: str) -> None:
        """Somebody wants messages of `queue`; where sending makes queues, one that nobody sent to yet is just empty.

        Raises:
            UnknownQueueError: there is no such queue.
            QueueSettingsError: there can't be one.
        """
        if self._settings.queue_id is not None and queue != self._settings.queue_id:
            raise UnknownQueueError(f"in topic mode there is one queue, {self._settings.queue_id!r}")
        if not self._settings.auto_create or name_problem(queue) is not None:
            self.require(queue)

    async def require_or_make(self, queue: str) -> None:
        """A message is about to be put in `queue`. Raises `UnknownQueueError` where that does not make a queue."""
        if not self.exists(queue):
            if not self._settings.auto_create:
                self.require(queue)
            await self.make(queue)

    async def _make(self, queue: str) -> None:
        record = self.records.get(queue)
        if record is not None and not record.active:
            await self.create(queue, {})
        await self._write(AUTO_PREFIX + queue.encode(), b"1")
        self.auto.add(queue)
        self._names = None

    @staticmethod
    def _next(
        old: QueueRecord | None,
        *,
        settings: QueueSettings,
        state: Literal["active", "deleting", "deleted"],
        purge: tuple[int, ...] | None = None,
        attributes: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        moves: tuple[MoveTask, ...] | None = None,
    ) -> QueueRecord:
        now_ms = int(time.time() * 1000)
        kept = old.purge if old is not None else ()
        before = old if old is not None and old.active else None
        if attributes is None:
            attributes = before.attributes if before is not None else {}
        if tags is None:
            tags = before.tags if before is not None else {}
        if moves is None:
            moves = before.moves if before is not None else ()
        purged_ms = before.purged_ms if before is not None else 0
        life = old.life if old is not None else 0
        if old is not None and not old.active and state == "active":
            life += 1
        return QueueRecord(
            VERSION,
            (old.version if old is not None else 0) + 1,
            uuid.uuid4().hex,
            settings,
            state,
            kept if purge is None else purge,
            before.created_ms if before is not None else now_ms,
            now_ms,
            now_ms if purge else purged_ms,
            attributes,
            tags,
            moves,
            life,
        )

    async def _change(self, queue: str, change: Callable[[QueueRecord | None], QueueRecord | None]) -> None:
        """Write what `change` makes of the queue's record, until that counts."""
        loop = asyncio.get_running_loop()
        for _ in range(ATTEMPTS):
            old = self.records.get(queue)
            new = change(old)
            if new is None:
                return
            if new.active:
                self._check_dead_letters(queue, old.settings if old is not None and old.active else None, new.settings)
            future: asyncio.Future[bool] = loop.create_future()
            self._mine[new.by] = future
            try:
                await self._write(queue.encode(), _encode(new))
                if await asyncio.wait_for(future, WRITE_TIMEOUT_S):
                    return
            except TimeoutError:
                raise UnavailableError("the change of a queue was written, but not read back in time") from None
            finally:
                del self._mine[new.by]
        raise UnavailableError(f"queue {queue!r} is being changed by too many at once; try again")

    def _check_dead_letters(self, queue: str, old: QueueSettings | None, new: QueueSettings) -> None:
        """Raises `QueueSettingsError` if dead letters are to go where they are not wanted, and did not go before."""
        target = new.dead_letters_of(queue)
        if old is not None and old.dead_letters_of(queue) == target:
            return
        record = self.records.get(target)
        if record is not None and record.active and not record.settings.takes_dead_letters_of(queue):
            raise QueueSettingsError(
                f"queue {target!r} takes no dead letters of {queue!r}: its dead_letters_from does not name it"
            )

    async def _write(self, key: bytes, value: bytes | None) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                async with self._producer_lock:
                    if self._producer is not None and self._producer._sender.sender_task.done():
                        # it would refuse everything from now on
                        ended, self._producer = self._producer, None
                        self.log.error("What writes changes of queues has ended, and begins anew")
                        await end_client(ended.stop())
                    if self._producer is None:
                        producer = AIOKafkaProducer(enable_idempotence=True, **kafka_client_args(self._settings))
                        await producer.start()
                        self._producer = producer
                await self._producer.send_and_wait(self._topic(), value, key=key, partition=0)
        except (KafkaError, TimeoutError) as exc:
            raise UnavailableError(f"Kafka did not take the change of a queue: {exc or type(exc).__name__}") from exc

    async def share_secret(self) -> None:
        """Make sure that there is a secret: the first that is in the topic counts, for all workers and for ever."""
        if self._settings.secret is not None or self._secrets:
            return
        # a key of its own, so that compaction keeps all and the first stays the first
        await self._write(SECRET_PREFIX + uuid.uuid4().hex.encode(), secrets.token_bytes(32))
        while not self._secrets:
            await asyncio.sleep(0.01)

    async def declare(self, queues: dict[str, dict[str, Any]]) -> None:
        """Set the queues that the configuration file declares to what it says."""
        for queue, values in queues.items():
            await self.create(queue, values)

    # ------------------------------------------------------------------ the topic

    async def end_offsets(self, topic: str, partitions: int) -> tuple[int, ...]:
        """Where each partition of a topic ends now. Raises `UnavailableError`."""
        assert self._consumer is not None
        tps = [TopicPartition(topic, n) for n in range(partitions)]
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                ends = await self._consumer.end_offsets(tps)
        except (KafkaError, TimeoutError) as exc:
            raise UnavailableError(f"Kafka does not tell where {topic} ends: {exc or type(exc).__name__}") from exc
        return tuple(ends[tp] for tp in tps)

    async def catch_up(self) -> None:
        """Wait until everything is known that is in the topic now. Raises `UnavailableError`."""
        (end,) = await self.end_offsets(self._topic(), 1)
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        while self._position < end:
            if time.monotonic() > deadline:
                raise UnavailableError(f"{self._topic()} could not be read to its end")
            await asyncio.sleep(0.005)

    async def on_start(self) -> None:
        consumer = AIOKafkaConsumer(
            enable_auto_commit=False, auto_offset_reset="earliest", **kafka_client_args(self._settings)
        )
        try:
            await consumer.start()
        except BaseException:
            await consumer.stop()
            raise
        self._consumer = consumer
        tp = TopicPartition(self._topic(), 0)
        # others may write here too: what can't be decoded must not keep the rest from being read
        decode_with(
            consumer._fetcher,
            tp.topic.__eq__,
            lambda tp, fault: self.log.warning("%s [%s, %s) can't be decoded: %s", tp.topic, *fault[:3]),
        )
        consumer.assign([tp])
        await consumer.seek_to_beginning(tp)

    @Service.task
    async def _read(self) -> None:
        consumer = self._consumer
        assert consumer is not None
        tp = TopicPartition(self._topic(), 0)
        end = (await consumer.end_offsets([tp]))[tp]
        ended: list[BaseException] = []
        stop_if_reading_ends(consumer, ended.append)
        while not self.should_stop:
            if ended:
                raise ended[0]
            try:
                self._position = await consumer.position(tp)
                if self._position >= end:
                    self.read_up.set()
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    for record in records:
                        self._take(record)
            except KafkaError as exc:
                self.log.warning("The queues topic can't be read: %r", exc)
                await asyncio.sleep(0.5)

    def _take(self, record: Any) -> None:
        key = record.key
        if key is None:
            return
        if key.startswith(SECRET_PREFIX):
            if record.value:
                self._secrets.append(record.value)
            return
        try:
            if key.startswith(AUTO_PREFIX):
                queue = key[len(AUTO_PREFIX) :].decode()
                (self.auto.discard if record.value is None else self.auto.add)(queue)
                self._names = None
                return
            self._put(key.decode(), None if record.value is None else decode(record.value))
        except (UnicodeDecodeError, QueueSettingsError) as exc:
            self.log.warning("Ignored record %s of the queues topic: %s", record.offset, exc)

    def _put(self, queue: str, record: QueueRecord | None) -> None:
        old = self.records.get(queue)
        counts = record is None or old is None or record.version > old.version
        mine = self._mine.get(record.by) if record is not None else None
        if mine is not None and not mine.done():
            mine.set_result(counts)
        if not counts:
            self._overwritten[queue] = time.monotonic()
            return
        self._overwritten.pop(queue, None)
        self._names = None
        if old is not None:
            del self.records[queue]
            if old.active:
                self._dead_targets[old.settings.dead_letters_of(queue)] -= 1
        self._effective.pop(queue, None)
        self.with_ttl.discard(queue)
        self.with_backoff.pop(crc32(queue.encode()), None)
        self.purging.pop(queue, None)
        self.moving.pop(queue, None)
        if record is None:
            return
        self.records[queue] = record
        if record.active:
            self._dead_targets[record.settings.dead_letters_of(queue)] += 1
            if any(task.active for task in record.moves):
                self.moving[queue] = record
            if record.settings.ttl_ms:
                self.with_ttl.add(queue)
            if record.settings.backoff_ms:
                self.with_backoff[crc32(queue.encode())] = queue
        if record.purge:
            self.purging[queue] = record

    async def repeat_overwritten(self) -> None:
        """Write what counts once more where a record that does not was left the last one."""
        limit = time.monotonic() - OVERWRITTEN_S
        for queue in [queue for queue, since in self._overwritten.items() if since < limit]:

            def change(old: QueueRecord | None) -> QueueRecord | None:
                return self._next(old, settings=old.settings, state=old.state) if old is not None else None

            await self._change(queue, change)

    async def forget_deleted(self) -> None:
        """Take out of the topic what was deleted long ago."""
        limit_ms = (time.time() - DELETED_KEPT_S) * 1000
        for queue, record in list(self.records.items()):
            if record.state == "deleted" and record.changed_ms < limit_ms:
                await self._write(queue.encode(), None)

    async def on_stop(self) -> None:
        await asyncio.gather(*(end_client(c.stop()) for c in (self._producer, self._consumer) if c is not None))


async def change_settings(settings: Settings, queue: str, values: dict[str, Any]) -> dict[str, Any]:
    """Set some values of a queue and return all of them; without values, only look.

    Raises:
        QueueSettingsError: a name or value that a queue can't have; nothing is changed.
        UnknownQueueError: there is no such queue to look at.
        BrokerError: Kafka can't be reached.
    """
    resolve_bootstrap(settings)
    check_name(queue)
    catalog = Catalog(settings, lambda: settings.queues_topic)
    try:
        with silenced("aiokafka"):
            await catalog.start()
    except KafkaError as error:
        raise await unreachable(settings, error) from None
    try:
        await asyncio.wait_for(catalog.read_up.wait(), 30)
        record = catalog.records.get(queue)
        base = record.settings if record is not None and record.active else catalog.default
        if not values and not catalog.exists(queue):
            raise UnknownQueueError(f"there is no queue {queue!r}; a message makes it, or NAME=VALUE does")
        if values:
            settings_with(queue, base, values)
            if record is None or not record.active:
                await catalog.create(queue, values)
            else:
                await catalog.update(queue, values)
            base = catalog.records[queue].settings
    finally:
        await catalog.stop()
    return msgspec.structs.asdict(base)
