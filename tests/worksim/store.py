"""The tables of a worker: `SegmentTable`'s own rules, over a store in memory in the place of RocksDB.

What is on the disk of a machine outlives its workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from faust.types import TP

from app.streaming.raw_table import SegmentTable, TableError

if TYPE_CHECKING:
    from tests.worksim.worker import Worker


class Rows(dict[bytes, bytes]):
    """The store of one partition, with the methods of rocksdict that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[], bool] = lambda: False

    def get(self, key: bytes) -> bytes | None:  # type: ignore[override]
        if self.fails():
            raise Exception("Corruption: planted")
        return super().get(key)

    def put(self, key: bytes, value: bytes) -> None:
        self[key] = value

    def delete(self, key: bytes) -> None:
        self.pop(key, None)

    def write(self, batch: WriteBatch) -> None:
        for key, value in batch.rows:
            if value is None:
                self.pop(key, None)
            else:
                self[key] = value

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
        return self._at < len(self._keys)

    def key(self) -> bytes:
        return self._keys[self._at]

    def value(self) -> bytes:
        return dict.__getitem__(self._rows, self._keys[self._at])

    def next(self) -> None:
        self._at += 1

    def status(self) -> None:
        pass


class Store:
    """In the place of `SegmentStore`."""

    offset_key = b"__faust\0offset__"

    def __init__(self, disk: dict[int, Rows], fails: Callable[[], bool]) -> None:
        self._disk = disk
        self._fails = fails
        self.owned: set[int] = set()
        self._open: dict[int, object] = {}

    def is_open(self, partition: int) -> bool:
        return partition in self._open

    def incarnation(self, partition: int) -> object | None:
        return self._open.get(partition)

    def _db_for_partition(self, partition: int) -> Rows:
        if partition not in self.owned:
            raise TableError(f"partition {partition} is not owned by this worker")
        if partition not in self._open:
            self._open[partition] = object()
        rows = self._disk.setdefault(partition, Rows())
        rows.fails = self._fails
        return rows

    def persisted_offset(self, tp: TP) -> int | None:
        found = dict.get(self._db_for_partition(tp.partition), self.offset_key)
        return None if found is None else int(found)

    def set_persisted_offset(self, tp: TP, offset: int) -> None:
        if self.is_open(tp.partition):
            self._db_for_partition(tp.partition).put(self.offset_key, str(offset).encode())

    async def open(self, partition: int) -> None:
        self._db_for_partition(partition)

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
        self.data = Store(app.disk.setdefault(name, {}), app.store_fails)
