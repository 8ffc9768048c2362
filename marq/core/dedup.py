"""Deduplication ids of messages, remembered for five minutes of log time, to recognise a second sending.

A record is a duplicate if an earlier record with the same id was accepted, and the timestamp of that one is less than
the window older, or up to ``BACK_MS`` newer: the clock of the broker may have been put back a little. This is decided
once, when the record is read, from the queue log alone. The state is the list of accepted records, and forgetting is a
part of it. So a worker that reads the log again from a checkpoint's position, with the records that were accepted below
it, decides the same.

Ids are forgotten in the order of their records, when a record with another id is accepted. An id is forgotten when two
things are true. It is out of the window of each of the last two different timestamps. And the window and
``KEEP_MORE_MS`` have passed on a clock that a record moves by ``STEP_MS`` at most. So wrong timestamps, even for a
minute, make no id forgotten that still counts, and an id that was stamped far ahead by mistake does not keep itself or
others. All of this depends only on the accepted records since the oldest one that is remembered: a worker that begins
with that record does the same.

The origins of copies (dead letters, moved messages) are remembered in the same way, for longer. They are sealed with a
key of the installation, if it has one. Otherwise a producer could send the origin of a copy in advance, and the copy
itself would count as the duplicate.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from marq.core.rows import DIGEST_BYTES

#: Milliseconds for which an id counts (Amazon SQS's deduplication interval).
WINDOW_MS = 300_000

#: Milliseconds by which a duplicate may be stamped before the record with the same id.
BACK_MS = 5_000

#: Milliseconds, added to the window, for which an id is kept as the timestamps of accepted records advance.
KEEP_MORE_MS = 60_000

#: Milliseconds that one record adds to that time at most: a clock that jumps makes no id forgotten.
STEP_MS = 5_000

#: Ids that are remembered at most: in a topic that is not ours, all records may have the same timestamp.
IDS_MAX = 4_000_000

#: Milliseconds beyond the window after which an id is dropped though no later id has shown that its time is over.
SLACK_MS = 3_600_000

#: Ids in a row at most: about 256 KiB.
ROW_IDS = 8_000

#: Milliseconds for which the origin of a copy is remembered, to recognise a second copy of the same message.
ORIGIN_WINDOW_MS = 3_600_000

#: Origins that are remembered at most.
ORIGINS_MAX = 20_000

#: Bytes of the seal of an origin. It is written as twice as many hexadecimal digits.
SEAL_BYTES = 12

#: Forgotten ids are removed in pieces of at least this many, because each removal moves all others in memory.
TRIM = 4_096


def digest_of(queue: str, value: bytes) -> bytes:
    """The digest of an id of ``queue``."""
    name = queue.encode()
    return blake2b(b"%d:%b%b" % (len(name), name, value), digest_size=DIGEST_BYTES).digest()


def origin_digest(origin: str) -> bytes:
    """The digest of ``origin``, ``"<partition>:<offset>"``: the message of which a copy was read."""
    return blake2b(origin.encode(), digest_size=DIGEST_BYTES).digest()


#: The purpose of the keys that seal origins of copies (`app.engine.catalog.Catalog.keys_for`).
ORIGINS = b"marq-origin"


def origin_seal(origin: str, key: bytes) -> bytes:
    """The seal of the ``origin`` of a copy, made with ``key``."""
    return blake2b(origin.encode(), key=key, digest_size=SEAL_BYTES).hexdigest().encode()


def is_sealed(origin: str, seal: bytes | None, keys: Iterable[bytes]) -> bool:
    """True if the seal of an ``origin`` was made with one of the ``keys``."""
    return seal is not None and any(compare_digest(seal, origin_seal(origin, key)) for key in keys)


class Written(NamedTuple):
    """A row with the ids of records up to ``last``; ``end`` is the number of the first id behind it."""

    key: str
    checksum: int
    last: int
    end: int
    ids: int


class Recent:
    """The ids of one partition, in the order of their records. Each has a number, counted from the beginning.

    A million ids take about 150 MB: a digest, and a few numbers.

    Args:
        window_ms: how long an id counts; 0: :data:`WINDOW_MS`.
        most: how many ids are remembered at most; 0: all of the window.
    """

    __slots__ = (
        "_base",
        "_before_ms",
        "_by_digest",
        "_clock_ms",
        "_clocks",
        "_digests",
        "_forgotten_at",
        "_last_ms",
        "_live",
        "_most",
        "_offsets",
        "_passed_ms",
        "_quiet_ms",
        "_rows",
        "_times",
        "_unwritten",
        "_window_ms",
    )

    def __init__(self, window_ms: int = 0, most: int = 0) -> None:
        self._window_ms = window_ms or WINDOW_MS
        self._most = most or IDS_MAX
        # -> number of the record that was accepted with it; of several whose time is not over, all
        self._by_digest: dict[bytes, int | tuple[int, ...]] = {}
        self._digests: list[bytes] = []
        self._offsets = array("q")
        self._times = array("q")
        self._clocks = array("q")  # what the clamped clock said
        self._clock_ms = 0
        self._last_ms = -1  # timestamp of the last accepted record …
        self._before_ms: int | None = None  # … and of the last one that had another
        self._passed_ms: int | None = None  # timestamp of the last record of the chunk that was read last
        self._quiet_ms = 0  # on another clamped clock: since the last record was accepted
        self._base = 0  # number of the first in these four
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
        """True if the record at ``offset`` is a duplicate. If not, its id is remembered. Call once each, in order."""
        if self.knows(digest, timestamp_ms):
            return True
        self._accept(digest, offset, timestamp_ms)
        return False

    def knows(self, digest: bytes, timestamp_ms: int) -> bool:
        """True if a record with this id and timestamp, read now, would be a duplicate."""
        found = self._by_digest.get(digest)
        if found is not None:
            for number in (found,) if type(found) is int else found:  # type: ignore[union-attr]
                if -BACK_MS <= timestamp_ms - self._times[number - self._base] < self._window_ms:
                    return True
        return False

    def is_near(self, digest: bytes, timestamp_ms: int) -> bool:
        """True if an id was accepted less than the window before or after this time. Nothing is remembered."""
        found = self._by_digest.get(digest)
        if found is None:
            return False
        numbers = (found,) if type(found) is int else found
        return any(abs(timestamp_ms - self._times[n - self._base]) < self._window_ms for n in numbers)  # type: ignore[union-attr]

    def pass_time(self, offset: int, timestamp_ms: int) -> None:
        """A chunk of the log was read, with this last record."""
        if not self._by_digest:
            return
        before_ms, self._passed_ms = self._passed_ms, timestamp_ms
        if before_ms is not None:
            self._quiet_ms += min(max(timestamp_ms - before_ms, 0), STEP_MS)
            if self._quiet_ms >= self._window_ms + SLACK_MS:
                self._end_silence(min(timestamp_ms, before_ms), offset)

    def _accept(self, digest: bytes, offset: int, timestamp_ms: int, forget: bool = True) -> None:
        self._quiet_ms = 0
        last_ms = self._last_ms
        if timestamp_ms != last_ms:
            if self._offsets:
                self._clock_ms += min(max(timestamp_ms - last_ms, 0), STEP_MS)
                self._before_ms = last_ms
            self._last_ms = timestamp_ms
        if forget:
            self._forget(offset)
        number = self._base + len(self._digests)
        known = self._by_digest.get(digest)
        if known is None:
            self._by_digest[digest] = number
        else:
            self._by_digest[digest] = (*((known,) if type(known) is int else known), number)  # type: ignore[misc]
        self._digests.append(digest)
        self._offsets.append(offset)
        self._times.append(timestamp_ms)
        self._clocks.append(self._clock_ms)

    def _forget(self, offset: int) -> None:
        """Forget the oldest ids whose time is over, because of the record at ``offset``."""
        times, clocks, base, live = self._times, self._clocks, self._base, self._live
        end = base + len(times)
        now_ms = self._last_ms if self._before_ms is None else min(self._last_ms, self._before_ms)
        kept_ms = self._clock_ms - self._window_ms - KEEP_MORE_MS
        first_ms, last_ms = now_ms - self._window_ms, now_ms + BACK_MS
        while live < end and clocks[live - base] <= kept_ms and not first_ms < times[live - base] <= last_ms:
            live += 1
        self._forget_below(max(live, end + 1 - self._most), offset)

    def _end_silence(self, now_ms: int, offset: int) -> None:
        """No id has come for long: forget ids whose time is over without a later id that shows it.

        This does not follow from the log alone, because chunks do not. So it happens an hour after the end of the
        window, by the last two chunks and by a clamped clock.
        """
        times, base, live = self._times, self._base, self._live
        end, first_ms, last_ms = base + len(times), now_ms - self._window_ms - SLACK_MS, now_ms + BACK_MS + SLACK_MS
        while live < end and not first_ms < times[live - base] <= last_ms:
            live += 1
        self._forget_below(live, offset)

    def _forget_below(self, live: int, offset: int) -> None:
        if live <= self._live:
            return
        by_digest = self._by_digest
        for number in range(self._live, live):
            digest = self._digests[number - self._base]
            known = by_digest[digest]
            if known == number:
                del by_digest[digest]
            else:
                rest = known[1:]  # type: ignore[index]
                by_digest[digest] = rest if len(rest) > 1 else rest[0]
        self._live = live
        self._forgotten_at.append((live, offset))
        self._trim()

    def _trim(self) -> None:
        cut = min(self._live, self._unwritten) - self._base
        if cut >= TRIM and cut > len(self._digests) // 4:
            del self._digests[:cut], self._offsets[:cut], self._times[:cut], self._clocks[:cut]
            self._base += cut

    # ------------------------------------------------------------------ checkpoints

    def unwritten(self, position: int) -> list[tuple[list[bytes], list[int], list[int]]]:
        """Digests, offsets and timestamps of the records below ``position`` that are in no row, for one row each.

        The last rows are written again together with them if they are not larger. So there are few rows, and an id is
        written only a few times. Call :meth:`written` for each item.
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
        """Reopen the last rows if they have no more ids than the ``count`` that follow."""
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

    def rows(self, position: int) -> dict[str, int]:
        """Key and checksum of the rows that a worker needs that reads on from ``position``."""
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

    def skipped(self) -> int:
        """How many ids at the beginning of the rows that :meth:`rows` returned last are forgotten already.

        A worker that reads on from the position has to know. By itself it might forget later ids too early: the oldest
        id that counts keeps all ids after it.
        """
        done = self._forgotten_at[0][0] if self._forgotten_at and self._forgotten_at[0][1] < 0 else 0
        return max(0, done - self._rows[0].end + self._rows[0].ids) if self._rows else 0

    def forget_unwritten(self) -> None:
        """For a fold that writes no rows: drop what is remembered only to be written."""
        self._unwritten = max(self._unwritten, self._live)
        self._forgotten_at = deque([(self._live, -1)])
        self._trim()

    def restore(self, key: str, checksum: int, digests: list[bytes], offsets: list[int], times: list[int]) -> None:
        """Take the ids of a row. Call it in the order in which rows were written, then :meth:`skip`."""
        for digest, offset, timestamp_ms in zip(digests, offsets, times, strict=True):
            self._accept(digest, offset, timestamp_ms, forget=False)
        self.written(key, checksum, len(digests))

    def skip(self, count: int) -> None:
        """Forget the first ``count`` ids of the restored rows."""
        self._forget_below(count, -1)

    def offset_of(self, digest: bytes) -> int | None:
        """The offset of the accepted record with an id; None if the id is not remembered."""
        found = self._by_digest.get(digest)
        if found is None:
            return None
        return self._offsets[(found if type(found) is int else found[-1]) - self._base]  # type: ignore[index]

    def entries(self) -> list[tuple[bytes, int, int]]:
        """Digest, offset and timestamp of all remembered ids, in order."""
        return [
            (digest, self._offsets[number - self._base], self._times[number - self._base])
            for number, digest in enumerate(self._digests[self._live - self._base :], self._live)
        ]
