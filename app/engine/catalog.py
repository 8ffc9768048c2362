"""The queues and their settings: a compacted topic that each worker reads as a whole, with a plain consumer.

A global table of Faust would be in the co-partition group of the queue and markers topics, and move their partitions.

    key                 value
    <queue>             QueueRecord: settings, and a purge or deletion that is under way
    \\0auto/<queue>      b"1": made by a message, with defaults; a record with settings replaces it
    \\0secret/<random>   32 bytes; the first of them in the log is the installation's secret

A record counts only if its version is higher than that of the record before: of two changes to the same record, all
workers take the first. A removal (a record without a value) counts only for a queue that is deleted: it may have been
made anew while the removal was on its way. A writer reads its own record back. If it does not count, the writer repeats
its change on top of the current record, so no change is lost. Compaction keeps the last record of a queue, which must
be one that counts: else the owner of partition 0 writes the current record again.
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

import msgspec
from mode import Service

from app.engine.queue_records import Draft, QueueRecord, decode, encode, id_of_queue, next_record
from app.engine.queues_topic import WRITE_TIMEOUT_S, QueuesTopic
from app.engine.secrets import derived
from marq.core.policies import DEAD_SUFFIX, QueueSettings, name_problem, takes_dead_letters
from marq.core.settings import QueueSettingsError, check_kind, check_name, placed_as, settings_with
from marq.core.versions import VERSIONS, is_of_installation, place_of_queue
from marq.errors import NewerVersionError, UnavailableError, UnknownQueueError

if TYPE_CHECKING:
    from app.settings import Settings

#: Prefixes of keys that are not names of queues.
AUTO_PREFIX = b"\0auto/"
SECRET_PREFIX = b"\0secret/"
#: How often a change is tried again because another one came first. More means that something is wrong.
ATTEMPTS = 20
#: Seconds that a worker which starts, or a command, waits for the records of queues; and a worker for their secret.
READ_UP_S = 30.0
#: Seconds for which the record of a deleted queue is kept, so that all workers have read it.
DELETED_KEPT_S = 3600
#: Seconds that the creation of a queue waits for the deletion of one with the same name.
DELETE_WAIT_S = 10.0
#: Queues whose settings in force are kept at hand.
EFFECTIVE_KEPT = 10_000
#: Seconds after which the current record is written again if a record that does not count is the last one.
OVERWRITTEN_S = 15.0


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
        #: Grows with each record that counts.
        self.changes = 0
        #: Grows whenever settings of a queue may have changed.
        self.settings_changes = 0
        #: Queues that have a back-off, by their ids in receipts.
        self.with_backoff: dict[bytes, str] = {}
        #: Queues with a purge under way.
        self.purging: dict[str, QueueRecord] = {}
        #: Queues whose messages are being moved.
        self.moving: dict[str, QueueRecord] = {}
        #: The maximum receive count of a queue whose settings name none; set by the handlers.
        self.max_receives_of: Callable[[str], int] = lambda queue: 0
        self._effective: dict[str, QueueSettings] = {}
        #: Queues that take dead letters by name: of how many others. Those with the default name are found by it.
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
        """The secret that all workers of the installation share."""
        if self._settings.secret is not None:
            return derived(self._settings.secret.get_secret_value(), self._settings.name)
        return self._secrets[0]

    @property
    def previous_secrets(self) -> tuple[bytes, ...]:
        """Older secrets that are still accepted."""
        previous = self._settings.secret_previous
        return (derived(previous.get_secret_value(), self._settings.name),) if previous is not None else ()

    def keys_for(self, purpose: bytes) -> tuple[bytes, ...]:
        """Keys of 32 bytes derived from the secrets. Use the first, accept all. `purpose` has at most 16 bytes."""
        secrets = (self.secret, *self.previous_secrets)
        return tuple(blake2b(secret, digest_size=32, person=purpose).digest() for secret in secrets)

    def generation_of(self, queue: str) -> int:
        """The number of earlier queues of this name, and of purges. Ids of messages count within one generation."""
        record = self.records.get(queue)
        return record.generation if record is not None else 0

    def settings_of(self, queue: str) -> QueueSettings:
        """The settings that are in force for `queue`."""
        settings = self._effective.get(queue)
        if settings is None:
            record = self.records.get(queue)
            settings = record.settings if record is not None and record.active else self.default
            if self._settings.queue_id is not None and self._settings.dead_letter_topic is None:
                settings = msgspec.structs.replace(settings, max_receives=0)  # nowhere to put a dead letter
            elif not settings.max_receives and (maximum := self.max_receives_of(queue)):
                settings = msgspec.structs.replace(settings, max_receives=maximum)
            if len(self._effective) >= EFFECTIVE_KEPT:
                self._effective.clear()
            self._effective[queue] = settings
        return settings

    def exists(self, queue: str) -> bool:
        """True if a queue was made, by its settings or by a message, or takes the dead letters of another."""
        record = self.records.get(queue)
        if record is not None:
            return record.active
        return (
            queue in self.auto
            or queue in self._dead_targets
            or queue == self._settings.queue_id
            or self._is_default_target(queue)
        )

    def takes_dead_letters(self, queue: str) -> bool:
        """True if a queue is there for dead letters; see `marq.core.policies`."""
        return takes_dead_letters(queue, self._dead_targets)

    def _is_default_target(self, queue: str) -> bool:
        if not queue.endswith(DEAD_SUFFIX):
            return False
        source = queue.removesuffix(DEAD_SUFFIX)
        record = self.records.get(source)
        return record is not None and record.active and record.settings.dead_letters_of(source) == queue

    def names(self) -> list[str]:
        """The names of all queues, in order. Do not change the list."""
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
        """Make a queue with exactly these settings, or set it to them. Returns the record, and True if it is new."""
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
        """Wait while a queue is being deleted. A queue that is made again too early would have its old messages.

        Raises:
            UnavailableError: the deletion takes too long, because a partition has no owner.
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
        """Make or change a queue, its settings and its attributes.

        Args:
            draft_of: gets the current record, or None, and returns the new values, or None to leave it. It may raise.
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
        """Set some values of an existing queue. Raises `UnknownQueueError`, `QueueSettingsError`."""
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
        """Begin to drop a queue's messages below these offsets, one per partition; with `delete` the queue as well."""
        self.require(queue)

        def change(old: QueueRecord | None) -> QueueRecord | None:
            settings = old.settings if old is not None and old.active else self.default
            return next_record(old, settings=settings, state="deleting" if delete else "active", purge=ends)

        await self._change(queue, change)
        return self.records[queue]

    async def purged(self, queue: str, by: str) -> None:
        """Note that the purge that the change `by` began is complete in all partitions."""

        def change(old: QueueRecord | None) -> QueueRecord | None:
            if old is None or old.by != by:
                return None
            return next_record(old, settings=old.settings, state="active" if old.active else "deleted", purge=())

        await self._change(queue, change)
        record = self.records.get(queue)
        if record is not None and record.state == "deleted":
            await self.topic.write(AUTO_PREFIX + queue.encode(), None)

    async def make(self, queue: str) -> None:
        """Make a queue with defaults, because of a message. Does nothing if the queue exists."""
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
        """Check that messages of `queue` can be received. Where sending makes queues, an unknown queue is an empty one.

        Raises:
            UnknownQueueError: there is no such queue.
            QueueSettingsError: the name is invalid.
        """
        if self._settings.queue_id is not None and queue != self._settings.queue_id:
            raise UnknownQueueError(f"in topic mode there is one queue, {self._settings.queue_id!r}")
        if not self._settings.auto_create or name_problem(queue) is not None:
            self.require(queue)

    async def require_or_make(self, queue: str) -> None:
        """Make `queue` for a message, if needed. Raises `UnknownQueueError` where messages do not make queues."""
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
        """Apply `change` to the queue's record and write it, again and again until the new record counts."""
        loop = asyncio.get_running_loop()
        for _ in range(ATTEMPTS):
            old = self.records.get(queue)
            new = change(old)
            if new is None:
                return
            if new.active:
                self._check_topic_mode(queue, old, new.settings)
                self._check_dead_letters(queue, old.settings if old is not None and old.active else None, new.settings)
            future: asyncio.Future[bool] = loop.create_future()
            self._mine[new.by] = future
            try:
                await self.topic.write(queue.encode(), encode(new))
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    if await future:
                        return
            except TimeoutError:
                raise UnavailableError("the change of a queue was written, but not read back in time") from None
            finally:
                del self._mine[new.by]
        raise UnavailableError(f"queue {queue!r} is being changed by too many at once; try again")

    def _check_topic_mode(self, queue: str, old: QueueRecord | None, new: QueueSettings) -> None:
        """Raises `QueueSettingsError` for what a topic of the user's can't be."""
        only = self._settings.queue_id
        if only is None:
            return
        if queue != only:
            raise QueueSettingsError(f"in topic mode there is one queue, {only!r}: no other can be made")
        if new.fifo and not (old is not None and old.active and old.settings.fifo):
            raise QueueSettingsError(
                "in topic mode a queue can't be FIFO: without groups in the records of the topic, each partition would "
                "be one group; leave fifo unset"
            )
        if new.max_receives and self._settings.dead_letter_topic is None:
            raise QueueSettingsError(
                f"max_receives={new.max_receives} needs a topic for dead letters in topic mode: set "
                "MARQ_DEAD_LETTER_TOPIC, or leave max_receives at 0"
            )

    def _check_dead_letters(self, queue: str, old: QueueSettings | None, new: QueueSettings) -> None:
        """Raises `QueueSettingsError` if the new dead-letter queue does not accept dead letters of this queue."""
        target = new.dead_letters_of(queue)
        if old is not None and old.dead_letters_of(queue) == target:
            return
        record = self.records.get(target)
        if record is not None and record.active and not record.settings.takes_dead_letters_of(queue):
            raise QueueSettingsError(
                f"queue {target!r} takes no dead letters of {queue!r}: its dead_letters_from does not name it"
            )

    async def share_secret(self) -> None:
        """Make sure that there is a secret. The first one in the topic counts for all workers, for ever."""
        if self._settings.secret is not None or self._secrets:
            return
        # a key of its own, so that compaction keeps all and the first stays the first
        await self.topic.write(SECRET_PREFIX + uuid.uuid4().hex.encode(), secrets.token_bytes(32))
        while not self._secrets:
            await asyncio.sleep(0.01)

    async def declare(self, queues: dict[str, dict[str, Any]]) -> None:
        """Make the queues that the configuration file declares, with the settings there."""
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
        """Wait until all records are read that are in the topic now. Raises `UnavailableError`."""
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
                self.changes += 1
                return
            self._put(key.decode(), None if record.value is None else decode(record.value))
        except (UnicodeDecodeError, QueueSettingsError, NewerVersionError) as exc:
            queue = key.decode(errors="replace")
            if isinstance(exc, NewerVersionError) and self._is_ours(queue, record.value):
                raise NewerVersionError(f"record {record.offset} of {self.topic.name}: {exc}") from None
            self.log.warning("Ignored record %s of the queues topic: %s", record.offset, exc)
            if queue in self.records:  # compaction would keep only the record that was ignored
                self._overwritten[queue] = time.monotonic()

    def _is_ours(self, queue: str, value: bytes) -> bool:
        """Tells whether the installation has sealed a record of a later version. Before it has a secret, it has not."""
        return (self._settings.secret is not None or bool(self._secrets)) and is_of_installation(
            value, place_of_queue(queue), self.keys_for(VERSIONS)
        )

    def _counts(self, old: QueueRecord | None, record: QueueRecord | None) -> bool:
        """Tells whether a record takes the place of the one before; None: the removal of a record."""
        return old is None or (record.version > old.version if record is not None else old.state == "deleted")

    def _put(self, queue: str, record: QueueRecord | None) -> None:
        old = self.records.get(queue)
        counts = self._counts(old, record)
        mine = self._mine.get(record.by) if record is not None else None
        if mine is not None and not mine.done():
            mine.set_result(counts)
        if not counts:
            self._overwritten[queue] = time.monotonic()
            return
        self._overwritten.pop(queue, None)
        self._names = None
        self.changes += 1
        before, after = [None if r is None else (r.settings, r.active) for r in (old, record)]
        if before != after:
            self.settings_changes += 1
        if old is not None:
            del self.records[queue]
            if old.active and (target := _named_target(queue, old.settings)) is not None:
                self._dead_targets[target] -= 1
                if not self._dead_targets[target]:
                    del self._dead_targets[target]
        self._effective.pop(queue, None)
        self.with_ttl.discard(queue)
        self.with_backoff.pop(id_of_queue(queue), None)
        self.purging.pop(queue, None)
        self.moving.pop(queue, None)
        if record is None:
            return
        self.records[queue] = record if record.purge else msgspec.structs.replace(record, by="")
        if record.active:
            if (target := _named_target(queue, record.settings)) is not None:
                self._dead_targets[target] += 1
            if any(task.active for task in record.moves):
                self.moving[queue] = record
            if record.settings.ttl_ms:
                self.with_ttl.add(queue)
            if record.settings.backoff_ms:
                self.with_backoff[id_of_queue(queue)] = queue
        if record.purge:
            self.purging[queue] = record

    async def repeat_overwritten(self) -> None:
        """Write the current record of a queue again if the last one in the topic does not count."""
        limit = time.monotonic() - OVERWRITTEN_S
        for queue in [queue for queue, since in self._overwritten.items() if since < limit]:

            def change(old: QueueRecord | None) -> QueueRecord | None:
                return next_record(old, settings=old.settings, state=old.state) if old is not None else None

            await self._change(queue, change)

    async def forget_deleted(self) -> None:
        """Delete the records of queues that were deleted long ago."""
        limit_ms = (time.time() - DELETED_KEPT_S) * 1000
        for queue, record in list(self.records.items()):
            if record.state != "deleted" or record.changed_ms >= limit_ms:
                continue
            if queue in self.auto:  # the worker that deleted the queue ended before it wrote this
                await self.topic.write(AUTO_PREFIX + queue.encode(), None)
            if self.records.get(queue) is record:  # it was not made anew while others were forgotten
                await self.topic.write(queue.encode(), None)

    async def on_stop(self) -> None:
        await self.topic.stop()


def _named_target(queue: str, settings: QueueSettings) -> str | None:
    """The dead-letter queue of `queue`, unless it is the queue's name with the suffix."""
    target = settings.dead_letters_of(queue)
    return None if target == queue + DEAD_SUFFIX else target
