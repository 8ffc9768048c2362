"""Ids that senders give their messages, remembered for five minutes of log time, to recognise a second sending.

A record is a duplicate if its id was in a record before it that was none itself, and whose timestamp is less than the
window before its own. That is decided once, when the record is read, from the queue log alone: what has been accepted
since is all the state there is, and forgetting is a part of it. So a worker that reads the log again from a
checkpoint's position, with what was accepted below that position, decides the same.

The origins of copies (dead letters, moved messages) are such ids, too, with a window and a number of their own.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from hashlib import blake2b
from typing import NamedTuple

from marq.core.rows import DIGEST_BYTES

WINDOW_MS = 300_000
"""An id is remembered for so long (Amazon SQS's deduplication interval)."""

SLACK_MS = 3_600_000
"""An id that is older by so much than the window is dropped though no later id says that its time is over."""

ROW_IDS = 8_000
"""A row has at most so many ids: about 256 KiB."""

ORIGIN_WINDOW_MS = 3_600_000
"""The origin of a copy is remembered for so long, to recognise a second copy of the same message …"""

ORIGINS_MAX = 20_000
"""… while no more copies than this came behind it."""

TRIM = 4_096
"""Ids that are forgotten are cut off in pieces of at least this many."""


def digest_of(queue: str, value: bytes) -> bytes:
    """What an id of ``queue`` is remembered by."""
    name = queue.encode()
    return blake2b(b"%d:%b%b" % (len(name), name, value), digest_size=DIGEST_BYTES).digest()


def origin_digest(origin: str) -> bytes:
    """What the message ``origin``, ``"<partition>:<offset>"``, is remembered by once a copy of it was read."""
    return blake2b(origin.encode(), digest_size=DIGEST_BYTES).digest()


class Written(NamedTuple):
    """A row with the ids of records up to ``last``; ``end`` is the number of the first id behind it."""

    key: str
    checksum: int
    last: int
    end: int
    ids: int


class Recent:
    """The ids of one partition, in the order of their records. Each has a number, counted from the beginning.

    A million ids take about 150 MB: a digest, and a few numbers. ``window_ms``: how long an id counts (0:
    :data:`WINDOW_MS`); ``most``: no more than the last so many are remembered (0: all of the window).
    """

    __slots__ = (
        "_base",
        "_by_digest",
        "_digests",
        "_forgotten_at",
        "_live",
        "_most",
        "_offsets",
        "_rows",
        "_times",
        "_unwritten",
        "_window_ms",
    )

    def __init__(self, window_ms: int = 0, most: int = 0) -> None:
        self._window_ms = window_ms or WINDOW_MS
        self._most = most
        self._by_digest: dict[bytes, int] = {}  # -> number of the last record with it
        self._digests: list[bytes] = []
        self._offsets = array("q")
        self._times = array("q")
        self._base = 0  # number of the first in these three
        self._live = 0  # number of the first that is not forgotten
        self._unwritten = 0  # number of the first that is in no row
        self._rows: list[Written] = []
        # (number of the first that is not forgotten, offset of the record that it was forgotten for)
        self._forgotten_at: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._by_digest)

    def __bool__(self) -> bool:
        return bool(self._by_digest or self._rows or self._offsets)

    def is_duplicate(self, digest: bytes, offset: int, timestamp_ms: int) -> bool:
        """True if the record at ``offset`` is one; else its id is remembered from now on. Call in order, once each."""
        number = self._by_digest.get(digest)
        if number is not None and timestamp_ms - self._times[number - self._base] < self._window_ms:
            return True
        self._accept(digest, offset, timestamp_ms)
        return False

    def _accept(self, digest: bytes, offset: int, timestamp_ms: int) -> None:
        self._forget(timestamp_ms - self._window_ms, offset, self._most - 1 if self._most else 1 << 60)
        self._by_digest[digest] = self._base + len(self._digests)
        self._digests.append(digest)
        self._offsets.append(offset)
        self._times.append(timestamp_ms)

    def _forget(self, upto_ms: int, offset: int, most: int) -> None:
        """The oldest are forgotten, for the record at ``offset``, as far as they are of ``upto_ms`` or before, and
        until there are no more than ``most``."""
        times, digests, base, live = self._times, self._digests, self._base, self._live
        end = base + len(times)
        while live < end and (times[live - base] <= upto_ms or end - live > most):
            digest = digests[live - base]
            if self._by_digest.get(digest) == live:
                del self._by_digest[digest]
            live += 1
        if live > self._live:
            self._live = live
            self._forgotten_at.append((live, offset))
            self._trim()

    def _trim(self) -> None:
        cut = min(self._live, self._unwritten) - self._base
        if cut >= TRIM and cut > len(self._digests) // 4:
            del self._digests[:cut], self._offsets[:cut], self._times[:cut]
            self._base += cut

    # ------------------------------------------------------------------ checkpoints

    def unwritten(self, position: int) -> list[tuple[list[bytes], list[int], list[int]]]:
        """Digests, offsets and timestamps of the records below ``position`` that are in no row, a row's worth each.

        The last rows are written again with them while they have no more ids: so there are few rows, and an id is
        written a few times. :meth:`written` has to follow for each of what is returned.
        """
        found = []
        offsets = self._offsets
        self._merge(bisect_left(offsets, position, self._unwritten - self._base) + self._base - self._unwritten)
        start = self._unwritten - self._base
        while start < len(offsets) and offsets[start] < position:
            stop = start
            while stop < len(offsets) and offsets[stop] < position and stop - start < ROW_IDS:
                stop += 1
            found.append((self._digests[start:stop], list(offsets[start:stop]), list(self._times[start:stop])))
            start = stop
        return found

    def _merge(self, count: int) -> None:
        """Take up rows again that have no more ids than the ``count`` behind them."""
        written = self._rows
        while count and written:
            last = written[-1]
            if last.ids > count or last.ids + count > ROW_IDS or last.end - last.ids < self._base:
                return
            count += last.ids
            self._unwritten = last.end - last.ids
            del written[-1]

    def written(self, key: str, checksum: int, count: int) -> None:
        """The next ``count`` are in this row."""
        self._unwritten += count
        last = self._offsets[self._unwritten - 1 - self._base]
        self._rows.append(Written(key, checksum, last, self._unwritten, count))
        self._trim()

    def rows(self, position: int, log_ms: int) -> dict[str, int]:
        """Key and checksum of the rows from which a worker that reads on from ``position`` has to begin.

        ``log_ms``: timestamp of the last record of the queue log that was read. No other clock: a reader that is behind
        must not forget ids that the records ahead of it have again.
        """
        self._forget(log_ms - self._window_ms - SLACK_MS, position - 1, 1 << 60)
        # only what was forgotten for a record below the position is forgotten for one who reads on from there
        forgotten = self._forgotten_at
        done = 0
        while forgotten and forgotten[0][1] < position:
            done = forgotten.popleft()[0]
        if done:
            forgotten.appendleft((done, -1))
        gone = sum(row.end <= done for row in self._rows)
        del self._rows[:gone]
        return {row.key: row.checksum for row in self._rows}

    def forget_unwritten(self) -> None:
        """For a fold that writes no rows: let go of what is remembered only to be written."""
        self._unwritten = max(self._unwritten, self._live)
        self._forgotten_at.clear()
        self._trim()

    def restore(self, key: str, checksum: int, digests: list[bytes], offsets: list[int], times: list[int]) -> None:
        """Take a row up again, in the order in which they were written."""
        for digest, offset, timestamp_ms in zip(digests, offsets, times, strict=True):
            self._accept(digest, offset, timestamp_ms)
        self.written(key, checksum, len(digests))

    def offset_of(self, digest: bytes) -> int | None:
        """Where the record is that an id was accepted with; None if it is not remembered."""
        number = self._by_digest.get(digest)
        return None if number is None else self._offsets[number - self._base]

    def entries(self) -> list[tuple[bytes, int, int]]:
        """Digest, offset and timestamp of all that are remembered, in order."""
        return [
            (digest, self._offsets[number - self._base], self._times[number - self._base])
            for digest, number in sorted(self._by_digest.items(), key=lambda item: item[1])
        ]
