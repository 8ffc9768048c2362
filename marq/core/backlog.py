"""The order in which the messages of one queue are delivered.

Entries are hints: the partition decides whether an offset may be delivered, at the moment it is taken. So nothing has
to be searched for and removed here when a message is finished or taken elsewhere.

A queue has one lane for messages without a group, and one lane for each group. Lanes take turns, so that no group
starves another. A lane is kept small, because a queue may have a hundred thousand groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from hashlib import blake2b
from heapq import heapify, heappop, heappush, merge
from typing import Any

#: Messages. A lane keeps up to this many new messages in a list: an empty deque alone takes 760 bytes.
LIST_MAX = 64

#: Groups. Lanes without messages are dropped once there are this many more lanes than the last pass left: a pass looks
#: at all of them, so it must be rare.
PRUNE_SLACK = 1_000

#: The list that all empty rows share; it is never changed.
_NONE: list[int] = []


def group_number(name: bytes | None) -> int:
    """The number of a message group: 0 for no name, else 64 bits of a hash.

    Two groups of one queue with the same number (one in 10**10 among a hundred thousand) count as one group: they wait
    for each other, and nothing else happens.
    """
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "big") or 1 if name else 0


class Lane:
    """Messages of one group of a queue, by offset in three rows.

    ``fresh``: never delivered, as read. ``returned``: not counted as delivered, back at its place (an uncounted
    release, a delay that is over). ``again``: delivered before and due again. Where the order of a group is kept
    (FIFO), the latter two are empty, and ``out`` has, ascending, what was taken and is not known to be done: whether
    in flight, waiting, or ready again; ``blocker`` is the one that the lane waits for.
    """

    __slots__ = ("again", "backlog", "blocker", "fresh", "group", "out", "queued", "queued_again", "returned")

    def __init__(self, backlog: Backlog | None, group: int, fresh: list[int] | deque[int] = _NONE) -> None:
        self.backlog: Backlog = backlog if backlog is not None else self  # type: ignore[assignment]
        self.group = group
        self.fresh = fresh
        self.returned = _NONE
        self.again = _NONE
        self.out = _NONE
        self.blocker = -1  # nothing of the lane can be taken before this one is done or ready; -1: none
        self.queued = False  # in ``backlog.turns``
        self.queued_again = False  # in ``backlog.again_turns``

    def add(self, offset: int) -> None:
        """``offset`` was read."""
        fresh = self.fresh
        if isinstance(fresh, list):
            if not fresh:
                self.fresh = [offset]
                return
            if len(fresh) == LIST_MAX:
                fresh = self.fresh = deque(fresh)
        fresh.append(offset)

    def add_sorted(self, offsets: list[int]) -> None:
        """``offsets``, ascending, were read back from the messages table."""
        fresh = self.fresh
        if isinstance(fresh, deque) and (not fresh or fresh[0] > offsets[-1]):
            fresh.extendleft(reversed(offsets))
        else:
            self.set_fresh(list(merge(offsets, fresh)))

    def set_fresh(self, offsets: list[int]) -> None:
        """Replace the new messages by these, ascending."""
        few = self.group and len(offsets) <= LIST_MAX
        self.fresh = (offsets or _NONE) if few else deque(offsets)

    def next_fresh(self) -> int:
        """Take the lowest new message; there must be one."""
        fresh = self.fresh
        return fresh.pop(0) if isinstance(fresh, list) else fresh.popleft()

    def push(self, offset: int, receives: int) -> None:
        """``offset`` is ready again after ``receives`` counted deliveries."""
        if receives:
            if self.again is _NONE:
                self.again = []
            heappush(self.again, offset)
        else:
            if self.returned is _NONE:
                self.returned = []
            heappush(self.returned, offset)

    def entries(self) -> Iterator[int]:
        """All entries of the lane, in no particular order, including stale ones."""
        yield from self.fresh
        yield from self.returned
        yield from self.again
        yield from self.out

    def peek_first(self) -> int:
        """The lowest offset among those never delivered; -1 if there is none."""
        if self.returned and (not self.fresh or self.returned[0] <= self.fresh[0]):
            return self.returned[0]
        return self.fresh[0] if self.fresh else -1

    def pop_first(self) -> int:
        """Take that offset."""
        if self.returned and (not self.fresh or self.returned[0] <= self.fresh[0]):
            return heappop(self.returned)
        return self.next_fresh()

    def remove(self, offsets: Container[int]) -> None:
        """Forget these entries of messages that were never delivered."""
        if any(o in offsets for o in self.fresh):
            self.set_fresh([o for o in self.fresh if o not in offsets])
        if self.returned:
            self.returned = [o for o in self.returned if o not in offsets] or _NONE
            heapify(self.returned)

    def retain(self, messages: dict[int, Any]) -> None:
        """Forget entries that are not in ``messages``, and duplicate entries."""
        here = messages.__contains__
        self.set_fresh(list(filter(here, self.fresh)))
        self.returned = sorted(set(filter(here, self.returned))) or _NONE
        self.again = sorted(set(filter(here, self.again))) or _NONE
        self.out = list(filter(here, self.out)) or _NONE


class Backlog(Lane):
    """One queue in one partition: the lane of messages without a group, and the lanes of its groups.

    ``turns`` has the lanes that may have something to deliver, the next one first; ``again_turns`` those with
    redeliveries. The lane without a group enters them only when it is looked at, so that appending to it costs nothing.
    """

    __slots__ = ("again_turns", "fifo", "groups", "looked_at", "name", "prune_at", "turns")

    fresh: deque[int]

    def __init__(self, name: str, fifo: bool = False) -> None:
        super().__init__(None, 0, deque())
        self.name = name
        self.fifo = fifo
        self.groups: dict[int, Lane] = {}
        self.turns: deque[Lane] = deque()
        self.again_turns: deque[Lane] = deque()
        self.prune_at = PRUNE_SLACK
        self.looked_at: list[int] = []  # groups whose first message is still to be looked at for its TTL

    def __bool__(self) -> bool:
        """True if something that is in memory may be ready."""
        if self.fifo:
            return bool(self.turns or (self.blocker < 0 and (self.fresh or self.out)))
        return bool(self.fresh or self.returned or self.again or self.turns or self.again_turns)

    @property
    def idle(self) -> bool:
        """True if this backlog can be dropped without losing anything."""
        return not (self.fresh or self.returned or self.again or self.out or self.groups)

    def lane(self, group: int) -> Lane:
        """The lane of a group; it is made if there is none."""
        if not group:
            return self
        lane = self.groups.get(group)
        if lane is None:
            lane = self.groups[group] = Lane(self, group)
        return lane

    def lanes(self) -> Iterator[Lane]:
        """All lanes."""
        yield self
        yield from self.groups.values()

    def queue_up(self, lane: Lane) -> None:
        """``lane`` may have something to deliver."""
        if not lane.queued:
            lane.queued = True
            self.turns.append(lane)

    def queue_up_again(self, lane: Lane) -> None:
        """``lane`` has redeliveries."""
        if not lane.queued_again:
            lane.queued_again = True
            self.again_turns.append(lane)

    def offsets(self) -> Iterator[int]:
        """All entries, in no particular order, including stale ones."""
        for lane in self.lanes():
            yield from lane.entries()
