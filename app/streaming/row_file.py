"""A file with the few and small rows of a table in one partition. A RocksDB costs 220 KiB, 7 open files and 30 ms.

Each change writes the whole file anew under another name, and renames it: a crash leaves the old file or the new one. A
checksum finds a damaged file, as RocksDB finds a damaged block.

What may as well be lost waits for the next row that is put: deletions, and how far the changelog is in the file. After
a crash, the end of the changelog is read again, which repeats them.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

_CHECKSUM_BYTES = 4


class RowFile:
    """The rows, with those methods of a RocksDB that tables use, and with its errors for damaged files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[bytes, bytes] = {}
        self._waiting = False  # something is not in the file yet
        if path.exists():
            content = path.read_bytes()
            body = content[_CHECKSUM_BYTES:]
            if content[:_CHECKSUM_BYTES] != _checksum(body):
                raise Exception(f"Corruption: {path} does not have its checksum")
            self._rows = dict(msgspec.msgpack.decode(body, type=list[tuple[bytes, bytes]]))

    def get(self, key: bytes) -> bytes | None:
        return self._rows.get(key)

    def put(self, key: bytes, value: bytes) -> None:
        self.write_all([(key, value)])

    def put_soon(self, key: bytes, value: bytes) -> None:
        """Put a row that may be lost in a crash."""
        self._rows[key] = value
        self._waiting = True

    def delete(self, key: bytes) -> None:
        """Delete a row. After a crash it may be there again."""
        self._waiting = self._rows.pop(key, None) is not None or self._waiting

    def write_all(self, rows: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Put rows, or delete those without a value: all of them, or none."""
        changed = dict(self._rows)
        for key, value in rows:
            if value is None:
                changed.pop(key, None)
            else:
                changed[key] = value
        body = msgspec.msgpack.encode(list(changed.items()))
        draft = self._path.with_suffix(".tmp")
        draft.write_bytes(_checksum(body) + body)
        draft.rename(self._path)
        self._rows = changed
        self._waiting = False

    def iter_rows(self) -> Iterator[tuple[bytes, bytes]]:
        """The rows in the order of their keys, as they are now."""
        return iter(sorted(self._rows.items()))

    def close(self) -> None:
        """Write what waits, if the disk takes it."""
        if self._waiting:
            with contextlib.suppress(OSError):
                self.write_all([])


def _checksum(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES)
