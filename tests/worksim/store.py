"""The tables of a worker: `SegmentTable`'s own rules, over a store in memory in the place of RocksDB.

What is on the disk of a machine outlives its workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from faust.types import TP

from app.streaming.raw_table import SegmentTable, TableError

if TYPE_CHECKING:
    from tests.worksim.worker import Worker


#: Writes that a loss of power can undo.
UNDO_MAX = 300
#: As rocksdict says it.
NO_SPACE = "IO error: No space left on device: planted"


class Rows(dict[bytes, bytes]):
    """The store of one partition, with the methods of rocksdict that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[], bool] = lambda: False
        self.is_full: Callable[[], bool] = lambda: False
        #: Keys of rows that can't be read.
        self.rotten: set[bytes] = set()
        #: Of the changelog that it was filled from.
        self.world: str | None = None
        #: What the last writes have replaced, the last one last.
        self._before: deque[list[tuple[bytes, bytes | None]]] = deque(maxlen=UNDO_MAX)

    def get(self, key: bytes) -> bytes | None:  # type: ignore[override]
        if self.fails() or key in self.rotten:
            raise Exception("Corruption: planted")
        return super().get(key)

    def put(self, key: bytes, value: bytes) -> None:
        self._write([(key, value)])

    def delete(self, key: bytes) -> None:
        self._write([(key, None)])

    def write(self, batch: WriteBatch) -> None:
        self._write(batch.rows)

    def _write(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        """All of them or none."""
        if self.is_full():
            raise Exception(NO_SPACE)
        self._before.append([(key, dict.get(self, key)) for key, _ in reversed(rows)])
        self._set(rows)

    def _set(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        for key, value in rows:
            self.rotten.discard(key)
            if value is None:
                self.pop(key, None)
            else:
                self[key] = value

    def comes_from(self, world: str, rows: dict[bytes, bytes]) -> None:
        """As if it had been filled from another changelog, with these rows among others, for much longer."""
        self.world = world
        self.update({**rows, Store.offset_key: b"1000000"})

    def lose_last(self, writes: int) -> None:
        """As if the power had failed before them."""
        for _ in range(min(writes, len(self._before))):
            self._set(self._before.pop())

    def iter(self) -> _Iterator:
        return _Iterator(self)


class WriteBatch:
    def __init__(self, raw_mode: bool) -> None:
        self.rows: list[tuple[bytes, bytes | None]] = []

    def put(self, key: bytes, value: bytes) -> None:
        self.rows.append((key, value))

    def delete(self, key: bytes) -> None:
        self.rows.append((key, None))


class _Iterator:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._keys: list[bytes] = []
        self._at = 0

    def seek_to_first(self) -> None:
        self._keys, self._at = sorted(self._rows), 0

    def valid(self) -> bool:
        return self._at < len(self._keys) and self._keys[self._at] not in self._rows.rotten

    def key(self) -> bytes:
        return self._keys[self._at]

    def value(self) -> bytes:
        return dict.__getitem__(self._rows, self._keys[self._at])

    def next(self) -> None:
        self._at += 1

    def status(self) -> None:
        if self._at < len(self._keys):
            raise Exception("Corruption: planted")


class Store:
    """In the place of `SegmentStore`."""

    offset_key = b"__faust\0offset__"

    def __init__(self, disk: dict[int, Rows], fails: Callable[[], bool], is_full: Callable[[], bool]) -> None:
        self._disk = disk
        self._is_full = is_full
        self._fails = fails
        self.owned: set[int] = set()
        self._open: dict[int, object] = {}
        self._worlds: dict[int, str | None] = {}

    def is_open(self, partition: int) -> bool:
        return partition in self._open

    def incarnation(self, partition: int) -> object | None:
        return self._open.get(partition)

    def _db_for_partition(self, partition: int) -> Rows:
        if partition not in self.owned:
            raise TableError(f"partition {partition} is not owned by this worker")
        if partition not in self._open:
            self._open[partition] = object()
        rows = self._disk.get(partition)
        if rows is None:
            rows = self._disk[partition] = Rows()
            rows.world = self._worlds.get(partition)
        rows.fails, rows.is_full = self._fails, self._is_full
        return rows

    def is_owned(self, partition: int) -> bool:
        return partition in self.owned

    def existing(self, partition: int) -> Rows | None:
        """The store of a partition; None if nothing was ever written to it."""
        if partition in self.owned and partition not in self._disk:
            return None
        return self._db_for_partition(partition)

    def persisted_offset(self, tp: TP) -> int | None:
        rows = self.existing(tp.partition)
        if rows is not None and self.offset_key in rows.rotten:
            self.wipe(tp.partition)
            return None
        found = None if rows is None else dict.get(rows, self.offset_key)
        return None if found is None else int(found)

    def set_persisted_offset(self, tp: TP, offset: int) -> None:
        if self.is_open(tp.partition):
            self._db_for_partition(tp.partition).put(self.offset_key, str(offset).encode())

    async def open(self, partition: int, world: str | None = None) -> bool:
        foreign = world is not None and partition in self._disk and self._disk[partition].world != world
        if foreign:
            self.wipe(partition)
        self._worlds[partition] = world
        self.existing(partition)
        return foreign

    def wipe(self, partition: int) -> None:
        self._open.pop(partition, None)
        self._disk.pop(partition, None)

    def on_rebalance(self, owned: set[int]) -> None:
        self.owned = owned
        for partition in set(self._open) - owned:
            del self._open[partition]


class Table:
    """In the place of `SegmentTable`: its methods, without Faust's table."""

    write = SegmentTable.write
    write_again = SegmentTable.write_again
    _on_written = SegmentTable._on_written
    _advance = SegmentTable._advance
    open = SegmentTable.open
    read = SegmentTable.read
    rows_of = SegmentTable.rows_of
    keys_of = SegmentTable.keys_of
    _rows = SegmentTable._rows
    persisted = SegmentTable.persisted
    apply = SegmentTable.apply
    wipe = SegmentTable.wipe
    _tp = SegmentTable._tp
    _db = SegmentTable._db

    def __init__(self, app: Worker, name: str) -> None:
        self.app: Any = app
        self.name = name
        self.changelog_topic_name = app.topics_in_use.changelogs[name]
        self.data = Store(app.disk.setdefault(name, {}), app.store_fails, app.disk_is_full)
