"""The order in which the messages of one queue are delivered.

Entries are hints: whether an offset may be delivered is the partition's knowledge, asked when it is taken. So nothing
has to be searched and removed here when a message is finished or taken elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush


class Backlog:
    """Ready messages of one queue in one partition, by offset in three rows.

    ``fresh``: never delivered, as read. ``returned``: not counted as delivered, back at its place (an uncounted
    release, a delay that is over). ``again``: delivered before and due again.
    """

    __slots__ = ("again", "fresh", "name", "returned")

    def __init__(self, name: str) -> None:
        self.name = name
        self.fresh: deque[int] = deque()
        self.returned: list[int] = []
        self.again: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.fresh or self.returned or self.again)

    def push(self, offset: int, receives: int) -> None:
        """``offset`` is ready again after ``receives`` counted deliveries."""
        heappush(self.again if receives else self.returned, offset)

    def offsets(self) -> Iterator[int]:
        """All entries, in no order, stale ones too."""
        yield from self.fresh
        yield from self.returned
        yield from self.again

    def peek_first(self) -> int:
        """The lowest offset among those never delivered; -1 if there is none."""
        if self.returned and (not self.fresh or self.returned[0] <= self.fresh[0]):
            return self.returned[0]
        return self.fresh[0] if self.fresh else -1

    def pop_first(self) -> int:
        """Take that offset."""
        if self.returned and (not self.fresh or self.returned[0] <= self.fresh[0]):
            return heappop(self.returned)
        return self.fresh.popleft()
