"""Tables of raw rows with a store for each partition, a RocksDB or a file, and a changelog: what we need of Faust's.

A row is written in the event of its partition and never changed in place. Keys contain the partition. In these points
the store differs from Faust's, and each has its test:

- The *persisted offset* of a partition says that the store has each changelog record up to there. It advances by one
  record at a time, and only for records that this worker wrote, or read, since it owns the partition. If another worker
  has written in between, it does not advance, and the next recovery reads from there.
- A late acknowledgement, or a late changelog record, of a partition that was given away opens nothing.
- A rebalance opens and closes no store in the event loop, because that takes tens of milliseconds. The take-over of a
  partition opens its store, and a thread closes it.
- A store says in a file of its own which changelog it was filled from, and is deleted, unread, if that is another one.
- A store without files is empty, and reading makes none: so an idle partition has no open files and takes no memory.
- Rows are deleted in one partition only. (Faust's `_del` asks an index of keys, and on a miss deletes everywhere.)
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import rocksdict
from aiokafka.structs import RecordMetadata
from faust import Table
from faust.stores import rocksdb
from faust.streams import current_event
from faust.types import TP, EventT

from app.streaming.row_file import RowFile
from marq.errors import MarqError, RowError

#: Options of each partition's RocksDB. Caches are small, because rows are read only in recovery.
STORE_OPTIONS = {
    "driver": "rocksdict",
    "max_open_files": 64,
    "write_buffer_size": 4 * 1024 * 1024,
    "max_write_buffer_number": 2,
    "target_file_size_base": 16 * 1024 * 1024,
    "block_cache_size": 4 * 1024 * 1024,
}
#: Changelog records that recovery writes to the store at once; each may be a segment of 256 KiB.
RECOVERY_BATCH = 64


class TableError(MarqError):
    """A row was read or written outside of an event, or in a partition that this worker does not own."""


def is_damage(exc: Exception) -> bool:
    """True for the errors of rocksdict that mean damaged files."""
    return type(exc) is Exception and str(exc).startswith("Corruption")


class SegmentStore(rocksdb.Store):
    """Faust's RocksDB store, but it opens only partitions that it was assigned."""

    table: SegmentTable

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owned: set[int] = set()
        #: Partition -> an object that is replaced each time its store is opened or wiped, to recognise late calls.
        self._incarnations: dict[int, object] = {}
        #: Stores that are being closed.
        self._closing: dict[int, Future[None]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._empty: set[int] = set()  # owned partitions that were seen to have no files
        self._worlds: dict[int, str] = {}  # as `open` was told
        #: Rows are in a `RowFile`.
        self.small = False

    def _file_of(self, partition: int) -> Path:
        return self.partition_path(partition).with_suffix(".rows")

    def _world_file(self, partition: int) -> Path:
        return self.partition_path(partition).with_suffix(".world")

    def _is_of(self, partition: int, world: str) -> bool:
        file = self._world_file(partition)
        return file.exists() and file.read_bytes() == world.encode()

    def _has_files(self, partition: int) -> bool:
        if self.small:
            return self._file_of(partition).exists()
        return (self.partition_path(partition) / "CURRENT").exists()

    def is_open(self, partition: int) -> bool:
        return partition in self._dbs

    def is_owned(self, partition: int) -> bool:
        return partition in self._owned

    def incarnation(self, partition: int) -> object | None:
        return self._incarnations.get(partition)

    def existing(self, partition: int) -> Any:
        """The store of a partition, which is opened if needed; None if nothing was ever written to it.

        Raises:
            TableError: the partition is not owned.
        """
        db = self._dbs.get(partition)
        if db is not None:
            return db
        if partition in self._owned:
            if partition not in self._empty and partition not in self._closing and not self._has_files(partition):
                self._empty.add(partition)
            if partition in self._empty:
                return None
        return self._db_for_partition(partition)

    def _open_for_partition(self, partition: int) -> Any:
        if partition not in self._owned:
            raise TableError(f"partition {partition} of table {self.table_name} is not owned by this worker")
        self._end_closing(partition)
        self._empty.discard(partition)
        world = self._worlds.get(partition)
        if world is not None and not self._is_of(partition, world):
            self._world_file(partition).write_bytes(world.encode())
        try:
            db = self._open_db(partition)
        except Exception as exc:
            if not is_damage(exc):
                raise
            self.log.warning("Store of partition %s is damaged and will be filled again: %s", partition, exc)
            self.wipe(partition)
            db = self._open_db(partition)
        self._incarnations[partition] = object()
        return db

    def _open_db(self, partition: int) -> Any:
        return RowFile(self._file_of(partition)) if self.small else super()._open_for_partition(partition)

    def persisted_offset(self, tp: TP) -> int | None:
        if self.existing(tp.partition) is None:
            return None
        try:
            return super().persisted_offset(tp)
        except Exception as exc:
            if not is_damage(exc):
                raise
            self.log.warning("Store of partition %s is damaged and will be filled again: %s", tp.partition, exc)
            self.wipe(tp.partition)
            return None

    async def on_rebalance(
        self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP], generation_id: int = 0
    ) -> None:
        topic = self.table.changelog_topic_name
        self._owned = {tp.partition for tp in assigned if tp.topic == topic}
        self._empty &= self._owned
        for partition in set(self._dbs) - self._owned:
            self._close_soon(partition)
        await super().on_rebalance(assigned, revoked, newly_assigned, generation_id)

    def revoke_partitions(self, table: Any, tps: set[TP]) -> None:
        """Does nothing: `on_rebalance` closes stores. Faust's method runs a garbage collection of the whole process."""

    async def assign_partitions(self, table: Any, tps: set[TP], generation_id: int = 0) -> None:
        """Does nothing; see `open`."""

    async def open(self, partition: int, world: str | None = None) -> bool:
        """As `SegmentTable.open`. Waits until an earlier store of the partition is closed."""
        closing = self._closing.get(partition)
        if closing is not None:
            await asyncio.wrap_future(closing)
        foreign = world is not None and self._has_files(partition) and not self._is_of(partition, world)
        if foreign:
            self.wipe(partition)
            if self._has_files(partition):
                raise TableError(f"{self.partition_path(partition)} is of another Kafka: it must be deleted")
        if world is not None:
            self._worlds[partition] = world
        self.existing(partition)
        return foreign

    def close(self, partition: int) -> None:
        self._close_soon(partition)
        self._end_closing(partition)

    def _close_soon(self, partition: int) -> None:
        self._incarnations.pop(partition, None)
        db = self._dbs.pop(partition, None)
        if db is not None:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, "marq-close")
            self._closing[partition] = self._threads.submit(db.close)

    def _end_closing(self, partition: int) -> None:
        closing = self._closing.pop(partition, None)
        if closing is not None:
            closing.result()

    async def stop(self) -> None:
        for partition in list(self._dbs):
            self._close_soon(partition)
        self._owned.clear()
        await asyncio.gather(*map(asyncio.wrap_future, self._closing.values()))
        self._closing.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
        await super().stop()

    def wipe(self, partition: int) -> None:
        self.close(partition)
        self._file_of(partition).unlink(missing_ok=True)
        shutil.rmtree(self.partition_path(partition), ignore_errors=True)

    def set_persisted_offset(self, tp: TP, offset: int) -> None:
        if not self.is_open(tp.partition):
            return
        if self.small:
            self._dbs[tp.partition].put_soon(self.offset_key, str(offset).encode())
        else:
            super().set_persisted_offset(tp, offset)

    def _del(self, key: bytes) -> NoReturn:
        raise TableError("rows are deleted with SegmentTable.write(key, None)")

    def _set(self, key: bytes, value: bytes | None) -> NoReturn:
        raise TableError("rows are written with SegmentTable.write")


def _row_error(exc: Exception) -> Exception:
    return RowError(f"the local store is damaged: {exc}") if is_damage(exc) else exc


class SegmentTable(Table[bytes, bytes]):
    """A table of bytes to bytes that is read and written by partition.

    Args:
        small: a partition has few and small rows: keep them in a file, without a RocksDB.
    """

    app: Any
    data: SegmentStore

    def __init__(self, app: Any, *, name: str, partitions: int, small: bool = False, **kwargs: Any) -> None:
        self._small = small
        super().__init__(
            app,
            name=name,
            partitions=partitions,
            key_type=bytes,
            value_type=bytes,
            recovery_buffer_size=RECOVERY_BATCH,
            **kwargs,
        )

    def _new_store(self) -> SegmentStore:
        store = SegmentStore(
            self._store or self.app.conf.store,
            self.app,
            self,
            table_name=self.name,
            key_type=self.key_type,
            value_type=self.value_type,
            key_serializer=self.key_serializer,
            value_serializer=self.value_serializer,
            loop=self.loop,
            options=dict(STORE_OPTIONS),
        )
        store.small = self._small
        return store

    # -- writing

    def write(self, key: bytes, value: bytes | None) -> asyncio.Future[RecordMetadata]:
        """Set a row, or delete it (value None), in the partition of the current event.

        Returns:
            The future of the changelog record, see `IdempotentProducer.append`. The row is in the local store at once;
            it is durable only when the future has a result. A deleted row leaves the store only then: after a crash in
            between, nothing else would tell the next owner to delete it from the changelog.

        Raises:
            TableError: called outside of an event, or for a partition that is not owned.
        """
        event = current_event()
        if event is None:
            raise TableError(f"table {self.name} is written only in the event of an agent")
        partition = event.message.partition
        db = self._db(partition)
        if value is not None:
            db.put(key, value)
        incarnation = self.data.incarnation(partition)
        future: asyncio.Future[RecordMetadata] = self.app.producer.append(
            self.changelog_topic_name, partition, value, key
        )
        deleted = key if value is None else None
        future.add_done_callback(lambda done: self._on_written(partition, incarnation, done, deleted))
        return future

    def write_again(self, partition: int, key: bytes, value: bytes | None) -> asyncio.Future[RecordMetadata]:
        """Append to the changelog a row whose `write` was not confirmed; as `write`, but from anywhere."""
        future: asyncio.Future[RecordMetadata] = self.app.producer.append(
            self.changelog_topic_name, partition, value, key
        )
        return future

    def _on_written(
        self, partition: int, incarnation: object, done: asyncio.Future[RecordMetadata], deleted: bytes | None
    ) -> None:
        if done.cancelled() or done.exception() is not None:
            return  # the caller of write knows; the persisted offset stays below the lost record for good
        if self.data.incarnation(partition) is incarnation:
            if deleted is not None:
                self._db(partition).delete(deleted)
            self._advance(partition, done.result().offset)

    def _advance(self, partition: int, offset: int) -> None:
        persisted = self.persisted(partition)
        if offset == (0 if persisted is None else persisted + 1):
            self.data.set_persisted_offset(self._tp(partition), offset)

    # -- reading

    async def open(self, partition: int, world: str | None = None) -> bool:
        """Open the local store of a partition. Reading or writing opens it as well, but may block meanwhile.

        Args:
            world: names the changelog that the store is filled from. A store of another one is deleted first.

        Returns:
            True if there was a store of another changelog, or one that does not say of which it is.

        Raises:
            TableError: the partition is not owned, or its store could not be deleted.
        """
        return await self.data.open(partition, world)

    def read(self, partition: int, key: bytes) -> bytes | None:
        """The value of a row, or None.

        Raises:
            TableError: the partition is not owned.
            RowError: the local store is damaged.
        """
        db = self.data.existing(partition)
        try:
            value: bytes | None = db.get(key) if db is not None else None
        except Exception as exc:
            raise _row_error(exc) from exc
        return value

    def rows_of(self, partition: int) -> Iterator[tuple[bytes, bytes]]:
        """All rows of a partition in the order of their keys. Use them before you write or await anything.

        Raises:
            TableError: the partition is not owned.
            RowError: the local store is damaged.
        """
        return self._rows(partition, True)

    def _rows(self, partition: int, values: bool) -> Iterator[tuple[bytes, bytes]]:
        db = self.data.existing(partition)
        if db is None:
            return
        if isinstance(db, RowFile):
            for key, value in db.iter_rows():
                if key != self.data.offset_key:
                    yield key, value
            return
        rows = db.iter()
        rows.seek_to_first()
        while rows.valid():
            key = rows.key()
            if key != self.data.offset_key:
                yield key, rows.value() if values else b""
            rows.next()
        try:
            rows.status()  # at a damaged block an iterator just ends, as after the last row
        except Exception as exc:
            raise _row_error(exc) from exc

    def keys_of(self, partition: int) -> Iterator[bytes]:
        """The keys of all rows of a partition; like `rows_of`."""
        for key, _ in self._rows(partition, False):
            yield key

    def persisted(self, partition: int) -> int | None:
        """Offset of the last changelog record up to which the local store is complete; None if it has none.

        Raises:
            TableError: the partition is not owned.
        """
        return self.data.persisted_offset(self._tp(partition))

    # -- recovery

    def apply(
        self, partition: int, records: Iterable[tuple[bytes, bytes | None, int]], upto: int | None = None
    ) -> None:
        """Put changelog records `(key, value, offset)`, read by the caller from `persisted() + 1` on, into the store.

        Args:
            upto: the position after the read. With it the store counts as complete up to there, whatever offsets were
                missing (compacted away); without it, only as far as the offsets are contiguous.

        Raises:
            TableError: the partition is not owned.
        """
        db = self._db(partition)
        persisted = self.persisted(partition)
        complete = -1 if persisted is None else persisted
        rows: list[tuple[bytes, bytes | None]] = []
        for key, value, offset in records:
            rows.append((key, value))
            if offset == complete + 1:
                complete = offset
        if upto is not None:
            complete = max(complete, upto - 1)
        if complete >= 0:
            rows.append((self.data.offset_key, str(complete).encode()))
        if isinstance(db, RowFile):
            db.write_all(rows)
            return
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in rows:
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        db.write(batch)

    def wipe(self, partition: int) -> None:
        """Drop the local rows and the persisted offset of a partition, so that it can be filled again."""
        self.data.wipe(partition)

    def apply_changelog_batch(self, batch: Iterable[EventT[Any]]) -> None:
        # Faust's recovery also brings late records of partitions given away, and even of other tables.
        topic = self.changelog_topic_name
        mine = [e for e in batch if e.message.topic == topic and self.data.is_owned(e.message.partition)]
        if mine:
            super().apply_changelog_batch(mine)

    # -- helpers

    def _tp(self, partition: int) -> TP:
        return TP(self.changelog_topic_name, partition)

    def _db(self, partition: int) -> Any:
        return self.data._db_for_partition(partition)
