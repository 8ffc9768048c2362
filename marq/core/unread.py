"""What the queue log has beyond the position of its partition: how many messages of which queue, and since when.

A partition is read ahead of its receivers only as far as memory allows. A second reader counts what lies behind, and
keeps no payloads. What the partition reads later is taken out again:

    log   ──── read by the partition ────│──── counted here ────│──── not known ────►
                                     position                  stop

The counts are exact, with these exceptions. A message whose time to live is over counts until it is read, and so does a
second sending of an id if more than `IDS_MAX` ids are unread: `at_most` says so. If there are more than `QUEUES_MAX`
queues, those of the others don't count: `overflowed` says so. Ages are exact to `GRAIN_MS`, or to more if the unread
messages are spread over a long time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from marq.core.dedup import ORIGIN_WINDOW_MS, Recent

#: Queues with unread messages that are told apart in one partition.
QUEUES_MAX = 20_000
#: Ids of unread messages that are remembered, to recognise a second sending: about 15 MB.
IDS_MAX = 100_000
#: Milliseconds of sending that share a run, and runs of one partition: with more, each gets twice as long.
GRAIN_MS, RUNS_MAX = 1_000, 50_000
#: Milliseconds to which the end of the delay of an unread message is known.
DUE_GRAIN_MS = 1_000
#: A time to live that never ends.
_NEVER_MS = 1 << 62


class UnreadQueue:
    """The unread messages of one queue, in runs ``[first offset, timestamp of the first, number]``."""

    __slots__ = ("count", "due", "expires_ms", "runs")

    def __init__(self) -> None:
        self.count = 0
        self.runs: deque[list[int]] = deque()
        self.due: dict[int, int] = {}  # end of the delay, in `DUE_GRAIN_MS` -> messages
        self.expires_ms = _NEVER_MS  # no time to live ends before

    @property
    def first(self) -> int:
        """The offset of the oldest one."""
        return self.runs[0][0]

    @property
    def oldest_ms(self) -> int:
        """When the oldest one was sent."""
        return self.runs[0][1]

    def delay_until(self, due_ms: int) -> None:
        """One of them waits for this time."""
        due = _in_grains(due_ms)
        self.due[due] = self.due.get(due, 0) + 1

    def end_delay(self, due_ms: int) -> None:
        """One that waits for this time is read now."""
        due = _in_grains(due_ms)
        left = self.due.get(due, 0) - 1
        if left > 0:
            self.due[due] = left
        else:
            self.due.pop(due, None)

    def delayed(self, broker_ms: int) -> int:
        """How many wait for the end of a delay."""
        return sum(number for due, number in self.due.items() if due * DUE_GRAIN_MS > broker_ms)


class Unread:
    """Counts of one partition. `stop` is the offset up to which it is counted; at or below the position: nothing is."""

    __slots__ = ("_grain_ms", "_runs", "delivered", "ids", "origins", "overflowed", "queues", "stop")

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, position: int) -> None:
        """Forget everything, and count from ``position`` on."""
        self.stop = position
        self.queues: dict[str, UnreadQueue] = {}
        #: Messages that were delivered before, by another owner: they may end before they are read. With their queue.
        self.delivered: dict[int, str] = {}
        self.ids, self.origins = Recent(most=IDS_MAX), Recent(ORIGIN_WINDOW_MS, IDS_MAX)
        self.overflowed = False
        self._grain_ms = GRAIN_MS
        self._runs = 0

    @property
    def at_most(self) -> bool:
        """True if second sendings may be among what is counted."""
        return max(len(self.ids), len(self.origins)) >= IDS_MAX

    def add(self, queue: str, offset: int, timestamp_ms: int, number: int = 1) -> UnreadQueue | None:
        """Count messages of a queue that begin at ``offset``. Returns the queue; None: there are too many queues."""
        one = self.queues.get(queue)
        if one is None:
            if len(self.queues) >= QUEUES_MAX:
                self.overflowed = True
                return None
            one = self.queues[queue] = UnreadQueue()
        one.count += number
        last = one.runs[-1] if one.runs else None
        if last is not None and -self._grain_ms < timestamp_ms - last[1] < self._grain_ms:
            last[2] += number
            return one
        one.runs.append([offset, timestamp_ms, number])
        self._runs += 1
        if self._runs > RUNS_MAX:
            self._merge_runs()
        return one

    def take(self, queue: str, number: int = 1, due_ms: int | None = None) -> None:
        """The partition has read the next messages of a queue. ``due_ms``: when the delay of one ends."""
        one = self.queues.get(queue)
        if one is None:
            return
        if due_ms is not None:
            one.end_delay(due_ms)
        one.count -= number
        if one.count <= 0:
            self._forget(queue)
            return
        while number:
            first = one.runs[0]
            taken = min(number, first[2])
            first[2] -= taken
            number -= taken
            if not first[2]:
                one.runs.popleft()
                self._runs -= 1

    def end(self, offset: int) -> None:
        """A message ended before it was read."""
        queue = self.delivered.pop(offset, None)
        one = self.queues.get(queue) if queue is not None else None
        if one is None or queue is None:
            return
        one.count -= 1
        if not one.count:
            self._forget(queue)
            return
        run = next(run for run in reversed(one.runs) if run[0] <= offset)
        run[2] -= 1
        if not run[2]:
            one.runs.remove(run)
            self._runs -= 1

    def purge(self, queue: str, before: int, position: int) -> None:
        """Everything of a queue below ``before`` has ended."""
        if before < self.stop:
            self.begin(position)  # how many lie behind is not known, and purges are rare
        elif queue in self.queues:
            self._forget(queue)
            self.delivered = {offset: one for offset, one in self.delivered.items() if one != queue}

    def _forget(self, queue: str) -> None:
        self._runs -= len(self.queues.pop(queue).runs)

    def _merge_runs(self) -> None:
        while self._runs > RUNS_MAX // 2 and self._runs > 2 * len(self.queues):
            self._grain_ms *= 2
            self._runs = 0
            for one in self.queues.values():
                merged: deque[list[int]] = deque()
                for run in one.runs:
                    if merged and run[1] - merged[-1][1] < self._grain_ms:
                        merged[-1][2] += run[2]
                    else:
                        merged.append(run)
                one.runs = merged
                self._runs += len(merged)

    def __iter__(self) -> Iterator[tuple[str, UnreadQueue]]:
        return iter(self.queues.items())


def _in_grains(due_ms: int) -> int:
    """The end of a delay as it is counted: not before it is over."""
    return -(-due_ms // DUE_GRAIN_MS)
