"""The topics, and records on their way to them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from marq.core.ranges import RangeSet
from marq.core.reading import Unreadable
from marq.core.recovery import Edges, last_read, newest
from marq.core.rows import Record


class Log:
    """One partition of a topic: records at ascending offsets, with holes where a control record was."""

    def __init__(self) -> None:
        self.start = 0  # of what DeleteRecords left
        self.end = 0
        self.records: list[Record] = []
        self._offsets: list[int] = []
        self.rotten = RangeSet()  # what no replica has whole at present

    def append(self, record: Record) -> None:
        """``record.offset`` is at or after the end: what is between is a hole."""
        assert record.offset >= self.end
        self.records.append(record)
        self._offsets.append(record.offset)
        self.end = record.offset + 1

    def read(self, position: int, limit: int) -> tuple[int, list[Record]]:
        """Up to ``limit`` records from ``position`` on, and the position after them (behind a hole, if one follows)."""
        i = bisect_left(self._offsets, position)
        found = self.records[i : i + limit]
        i += len(found)
        stop = self._offsets[i] if i < len(self._offsets) else self.end
        rotten = self.rotten.within(position, stop)
        if rotten:
            left: list[Any] = [record for record in found if record.offset not in self.rotten]
            left += [Unreadable(a, -1, b, "planted") for a, b in zip(rotten[::2], rotten[1::2], strict=True)]
            found = sorted(left, key=lambda record: record.offset)
        return stop, found

    def at(self, offset: int) -> Record:
        """The record at ``offset``."""
        return self.records[bisect_left(self._offsets, offset)]


def edges_of(queue: Log, markers: Log, manifests: Iterable[bytes], queue_id: str | None) -> Edges:
    """What `app.engine.changelogs.Changelogs.edges` asks Kafka for."""
    newer, manifest = None, newest(manifests, None)
    if manifest is not None:
        read = last_read(manifest, queue_id)
        below = queue.read(queue.start, max(0, read.position - queue.start))[1]
        newer = next((r.offset for r in below if read.is_newer(r.offset, r.timestamp)), None)
    return Edges((queue.start, markers.start), (queue.end, markers.end), newer)


class Changelog:
    """The changelog of one table: every write in order, and what compaction leaves of them."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, bytes | None]] = []
        self.content: dict[str, bytes] = {}

    def append(self, key: str, value: bytes | None) -> None:
        """A row, or a deletion."""
        self.writes.append((key, value))
        if value is None:
            self.content.pop(key, None)
        else:
            self.content[key] = value


class Table:
    """A worker's local store of one table. Its own writes are there at once, and may be ahead of the changelog."""

    def __init__(self, changelog: Changelog) -> None:
        self.changelog = changelog
        self.content: dict[str, bytes] = {}
        self.applied = 0

    def catch_up(self) -> None:
        """Read the changelog to its end."""
        for key, value in self.changelog.writes[self.applied :]:
            if value is None:
                self.content.pop(key, None)
            else:
                self.content[key] = value
        self.applied = len(self.changelog.writes)

    def wipe(self) -> None:
        """Lose the local store."""
        self.content.clear()
        self.applied = 0


class Sent:
    """A record on its way. ``landed(offset, timestamp)`` is called when its acknowledgement arrives, if it does."""

    __slots__ = ("confirmed", "failed", "key", "value", "what")

    def __init__(
        self,
        value: Any,
        what: str,
        *,
        key: str = "",
        confirmed: Callable[[int, int], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        self.value = value
        self.what = what
        self.key = key
        self.confirmed = confirmed
        self.failed = failed


class Lane:
    """Records of one producer on their way to one topic partition: they land in order, even if the producer dies."""

    __slots__ = ("alive", "owner", "sent", "stalled", "topic")

    def __init__(self, topic: str, owner: int) -> None:
        self.topic = topic
        self.owner = owner  # number of the worker
        self.sent: deque[Sent] = deque()
        self.stalled = False
        self.alive = True  # its worker is: acknowledgements and time-outs mean something to it
