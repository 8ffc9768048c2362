"""Ids that senders give their messages, remembered for five minutes of log time, to recognise a second sending.

A record is a duplicate if its id was in a record before it that was none itself, and whose timestamp is less than the
window before its own (and less than ``BACK_MS`` behind it: the clock of the broker may have been put back a little).
That is decided once, when the record is read, from the queue log alone: what has been accepted since is all the state
there is, and forgetting is a part of it. So a worker that reads the log again from a checkpoint's position, with what
was accepted below that position, decides the same.

Ids are forgotten in the order of their records, when a record with another id is accepted: as far as they are out of
the window of each of the last two different timestamps, and the window and ``KEEP_MORE_MS`` have passed on a clock that
a record moves by no more than ``STEP_MS``. So a wrong timestamp, or a minute of them, makes none forgotten that counts;
and an id that was stamped far ahead by mistake neither stays nor makes the others stay. All of this depends on nothing
but accepted records behind the oldest that is remembered: a worker that begins with that one does the same.

The origins of copies (dead letters, moved messages) are such ids, too, with a window and a number of their own. They
are sealed with a key of the installation, where it has one: else a producer could name the origin of a copy that is to
come, which would then be the second one.
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

WINDOW_MS = 300_000
"""An id is remembered for so long (Amazon SQS's deduplication interval)."""

BACK_MS = 5_000
"""A record that is stamped so much before the one with the same id is still a duplicate."""

KEEP_MORE_MS = 60_000
"""An id is kept for so much longer than the window, as the timestamps of accepted records move on …"""

STEP_MS = 5_000
"""… of which each counts for at most this much: a clock that jumps makes nothing forgotten."""

IDS_MAX = 4_000_000
"""So many ids are remembered at most (in a topic that is not ours, all records may have one timestamp)."""

SLACK_MS = 3_600_000
"""An id that is older by so much than the window is dropped though no later id says that its time is over."""

ROW_IDS = 8_000
"""A row has at most so many ids: about 256 KiB."""

ORIGIN_WINDOW_MS = 3_600_000
"""The origin of a copy is remembered for so long, to recognise a second copy of the same message …"""

ORIGINS_MAX = 20_000
"""… while no more copies than this came behind it."""

SEAL_BYTES = 12
"""Bytes of the seal of an origin, which is written in twice as many characters."""

TRIM = 4_096
"""Ids that are forgotten are cut off in pieces of at least this many."""


def digest_of(queue: str, value: bytes) -> bytes:
    """What an id of ``queue`` is remembered by."""
    name = queue.encode()
    return blake2b(b"%d:%b%b" % (len(name), name, value), digest_size=DIGEST_BYTES).digest()


def origin_digest(origin: str) -> bytes:
    """What the message ``origin``, ``"<partition>:<offset>"``, is remembered by once a copy of it was read."""
    return blake2b(origin.encode(), digest_size=DIGEST_BYTES).digest()


def origin_seal(origin: str, key: bytes) -> bytes:
    """What is written beside the ``origin`` of a copy, by whoever has the ``key``."""
    return blake2b(origin.encode(), key=key, digest_size=SEAL_BYTES).hexdigest().encode()


def is_sealed(origin: str, seal: bytes | None, keys: Iterable[bytes]) -> bool:
    """True if the seal beside an ``origin`` was made with one of the ``keys``."""
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

    A million ids take about 150 MB: a digest, and a few numbers. ``window_ms``: how long an id counts (0:
    :data:`WINDOW_MS`); ``most``: no more than the last so many are remembered (0: all of the window).
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
        """True if the record at ``offset`` is one; else its id is remembered from now on. Call in order, once each."""
        found = self._by_digest.get(digest)
        if found is not None:
            for number in (found,) if type(found) is int else found:  # type: ignore[union-attr]
                if -BACK_MS <= timestamp_ms - self._times[number - self._base] < self._window_ms:
                    return True
        self._accept(digest, offset, timestamp_ms)
        return False

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
        """The oldest are forgotten as far as their time is over, for the record at ``offset``."""
        times, clocks, base, live = self._times, self._clocks, self._base, self._live
        end = base + len(times)
        now_ms = self._last_ms if self._before_ms is None else min(self._last_ms, self._before_ms)
        kept_ms = self._clock_ms - self._window_ms - KEEP_MORE_MS
        first_ms, last_ms = now_ms - self._window_ms, now_ms + BACK_MS
        while live < end and clocks[live - base] <= kept_ms and not first_ms < times[live - base] <= last_ms:
            live += 1
        self._forget_below(max(live, end + 1 - self._most), offset)

    def _end_silence(self, now_ms: int, offset: int) -> None:
        """No id has come for long: those are forgotten that no later one is needed to tell that their time is over.

        That is no function of the log, because chunks are not. So it takes an hour more than the window, by the last
        two chunks and by a clamped clock.
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

    def rows(self, position: int) -> dict[str, int]:
        """Key and checksum of the rows from which a worker that reads on from ``position`` has to begin."""
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
        """How many of the ids in the rows that :meth:`rows` returned last are forgotten there, from the first one on.

        One who reads on from the position has to be told. By itself it might forget those behind them too early: the
        oldest id that counts keeps all behind it.
        """
        done = self._forgotten_at[0][0] if self._forgotten_at and self._forgotten_at[0][1] < 0 else 0
        return max(0, done - self._rows[0].end + self._rows[0].ids) if self._rows else 0

    def forget_unwritten(self) -> None:
        """For a fold that writes no rows: let go of what is remembered only to be written."""
        self._unwritten = max(self._unwritten, self._live)
        self._forgotten_at = deque([(self._live, -1)])
        self._trim()

    def restore(self, key: str, checksum: int, digests: list[bytes], offsets: list[int], times: list[int]) -> None:
        """Take a row up again, in the order in which they were written; :meth:`skip` has to follow the last one."""
        for digest, offset, timestamp_ms in zip(digests, offsets, times, strict=True):
            self._accept(digest, offset, timestamp_ms, forget=False)
        self.written(key, checksum, len(digests))

    def skip(self, count: int) -> None:
        """The first ``count`` ids of what was restored are forgotten already."""
        self._forget_below(count, -1)

    def offset_of(self, digest: bytes) -> int | None:
        """Where the record is that an id was accepted with; None if it is not remembered."""
        found = self._by_digest.get(digest)
        if found is None:
            return None
        return self._offsets[(found if type(found) is int else found[-1]) - self._base]  # type: ignore[index]

    def entries(self) -> list[tuple[bytes, int, int]]:
        """Digest, offset and timestamp of all that are remembered, in order."""
        return [
            (digest, self._offsets[number - self._base], self._times[number - self._base])
            for number, digest in enumerate(self._digests[self._live - self._base :], self._live)
        ]
