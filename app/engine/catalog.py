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
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec
from aiokafka.errors import KafkaError
from mode import Service

from app.engine.queue_records import Draft, MoveTask, QueueRecord, decode, encode, next_record
from app.engine.queues_topic import WRITE_TIMEOUT_S, QueuesTopic
from app.engine.secrets import derived
from app.kafka.connection import unreachable
from app.kafka.datadir import resolve_bootstrap
from app.logs import silenced
from marq.core.policies import QueueSettings, name_problem
from marq.core.settings import QueueSettingsError, check_kind, check_name, placed_as, settings_with, told
from marq.errors import UnavailableError, UnknownQueueError

if TYPE_CHECKING:
    from app.settings import Settings

#: Begin the keys of records that are not of a queue with settings.
AUTO_PREFIX = b"\0auto/"
SECRET_PREFIX = b"\0secret/"
#: Times that a change is made again because another one came first.
ATTEMPTS = 20
#: Seconds for which a deleted queue's record is kept.
DELETED_KEPT_S = 3600
#: Seconds that making a queue waits for the end of one of the same name.
DELETE_WAIT_S = 10.0
#: Seconds that the writer of a record that does not count gets to write another.
OVERWRITTEN_S = 15.0
#: What origins of copies are sealed for, as `Catalog.keys_for` takes it.
ORIGINS = b"marq-origin"


class Catalog(Service):
    """All queues, and the secret that workers share."""

    def __init__(self, settings: Settings, topic: Callable[[], str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._settings = settings
        self.topic = QueuesTopic(settings, topic, self.log)
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
        self._mine: dict[str, asyncio.Future[bool]] = {}
        self._overwritten: dict[str, float] = {}  # queue whose last record does not count -> since when
        self._making: dict[str, asyncio.Task[None]] = {}
        self._secrets: list[bytes] = []  # in the order of the log

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
        """How many queues of this name there were before, and purges: ids of messages count in one generation."""
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
            if old is not None and old.active and old.settings == placed_as(old.settings, settings):
                return None
            if old is not None and old.active:
                check_kind(queue, old.settings, settings)
            return next_record(old, settings=settings, state="active")

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
            return next_record(
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
            return next_record(old, settings=settings, state="active")

        await self._change(queue, change)
        return self.records[queue]

    async def purge(self, queue: str, ends: tuple[int, ...], delete: bool = False) -> QueueRecord:
        """Everything of a queue below these offsets, one per partition, is to go; with `delete` the queue as well."""
        self.require(queue)

        def change(old: QueueRecord | None) -> QueueRecord | None:
            settings = old.settings if old is not None and old.active else self.default
            return next_record(old, settings=settings, state="deleting" if delete else "active", purge=ends)

        await self._change(queue, change)
        return self.records[queue]

    async def purged(self, queue: str, by: str) -> None:
        """What the change `by` wanted purged is gone everywhere."""

        def change(old: QueueRecord | None) -> QueueRecord | None:
            if old is None or old.by != by:
                return None
            return next_record(old, settings=old.settings, state="active" if old.active else "deleted", purge=())

        await self._change(queue, change)
        record = self.records.get(queue)
        if record is not None and record.state == "deleted":
            await self.topic.write(AUTO_PREFIX + queue.encode(), None)

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
        await self.topic.write(AUTO_PREFIX + queue.encode(), b"1")
        self.auto.add(queue)
        self._names = None

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
                await self.topic.write(queue.encode(), encode(new))
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

    async def share_secret(self) -> None:
        """Make sure that there is a secret: the first that is in the topic counts, for all workers and for ever."""
        if self._settings.secret is not None or self._secrets:
            return
        # a key of its own, so that compaction keeps all and the first stays the first
        await self.topic.write(SECRET_PREFIX + uuid.uuid4().hex.encode(), secrets.token_bytes(32))
        while not self._secrets:
            await asyncio.sleep(0.01)

    async def declare(self, queues: dict[str, dict[str, Any]]) -> None:
        """Set the queues that the configuration file declares to what it says."""
        for queue, values in queues.items():
            await self.create(queue, values)

    # ------------------------------------------------------------------ the topic

    @property
    def read_up(self) -> asyncio.Event:
        """Set once everything is known that was in the topic at the start."""
        return self.topic.read_up

    async def end_offsets(self, topic: str, partitions: int) -> tuple[int, ...]:
        """Where each partition of a topic ends now. Raises `UnavailableError`."""
        return await self.topic.end_offsets(topic, partitions)

    async def catch_up(self) -> None:
        """Wait until everything is known that is in the topic now. Raises `UnavailableError`."""
        (end,) = await self.end_offsets(self.topic.name, 1)
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        while self.topic.position < end:
            if time.monotonic() > deadline:
                raise UnavailableError(f"{self.topic.name} could not be read to its end")
            await asyncio.sleep(0.005)

    async def on_start(self) -> None:
        await self.topic.start()

    @Service.task
    async def _read(self) -> None:
        await self.topic.read(self._take, lambda: self.should_stop)

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
                return next_record(old, settings=old.settings, state=old.state) if old is not None else None

            await self._change(queue, change)

    async def forget_deleted(self) -> None:
        """Take out of the topic what was deleted long ago."""
        limit_ms = (time.time() - DELETED_KEPT_S) * 1000
        for queue, record in list(self.records.items()):
            if record.state == "deleted" and record.changed_ms < limit_ms:
                await self.topic.write(queue.encode(), None)

    async def on_stop(self) -> None:
        await self.topic.stop()


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
    return told(base)


__all__ = ["ATTEMPTS", "ORIGINS", "Catalog", "Draft", "MoveTask", "QueueRecord", "change_settings", "decode"]
