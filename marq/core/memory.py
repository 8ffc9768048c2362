"""Decides which payloads are in memory: they are dropped once they are in a segment, and read back when needed."""

from __future__ import annotations

from collections.abc import Iterable

from marq.core import rows
from marq.core.backlog import Lane
from marq.core.folding import Folding
from marq.core.segments import Segment
from marq.core.state import MessageState, size_of

#: Bytes. While less than this is in memory beside deliveries, all messages of a segment are read back, not one lane's.
READ_BACK_BYTES = 32 * 1024 * 1024

#: Segments that a delivery reads back at most once it has a message: each takes a millisecond.
READS_MAX = 8

#: Bytes of the next messages of a queue with receivers that stay in memory when memory is short.
WANTED_BYTES = 4 * 1024 * 1024

#: Bytes that all such queues of a partition may keep together in any case; or a quarter of what is in memory, if more.
WANTED_LEAST_BYTES = 1024 * 1024

#: Milliseconds of the partition clock after which another try to shed is worth while: leases may have ended.
SHED_AGAIN_MS = 1_000


class Memory(Folding):
    """Parks messages and reads them back."""

    def shed(self, excess_bytes: int, wanted: Iterable[str] = ()) -> int:
        """Drop payloads that are in a segment from memory until ``excess_bytes`` are free. Returns the bytes freed.

        Reserved and leased messages stay. Ready messages of ``wanted`` queues, which have receivers, go last, and the
        next :data:`WANTED_BYTES` of each queue stay, or its share of the memory if that is less.
        """
        freed = 0
        keep = set(wanted)
        situation = (self.persisted, self.clock_ms // SHED_AGAIN_MS, len(self.segments), keep)
        if self._shed_all == situation:
            return 0  # a look at every message, to find the same nothing
        going: list[int] = []
        later: dict[str, list[int]] = {}
        for offset, record in self.messages.items():
            if freed >= excess_bytes:
                break
            if offset >= self.persisted or type(record) is Segment or offset in self.reserved:
                continue
            if self.missed and offset in self.missed:
                continue  # it is in no segment
            delivered = self.deliveries.get(offset)
            state = MessageState.READY if delivered is None else delivered.state_at(self.clock_ms)
            if state is MessageState.IN_FLIGHT:
                continue
            queue = self.queue_of(offset)
            waits = state is MessageState.DELAYED or offset in self.delays
            if queue in keep and not waits and not self._behind(queue, offset):
                later.setdefault(str(queue), []).append(offset)
                continue
            freed += size_of(record)
            going.append(offset)
        if freed < excess_bytes:
            # what one slow queue holds must not keep others from being read
            allowed = max(self.bytes - excess_bytes, self.bytes // 4, WANTED_LEAST_BYTES)
            share = min(WANTED_BYTES, allowed // max(1, len(later)))
            for offsets in later.values():
                offsets.sort()
                kept = 0
                for i, offset in enumerate(offsets):
                    kept += size_of(self.messages[offset])
                    if kept > share:
                        # the last of them first: they are wanted last
                        while len(offsets) > i and freed < excess_bytes:
                            freed += size_of(self.messages[offsets[-1]])
                            going.append(offsets.pop())
                        break
        if freed < excess_bytes:
            self._shed_all = situation
        self._let_go(going)
        self.bytes -= freed
        return freed

    def _let_go(self, going: Iterable[int]) -> None:
        """Drop payloads that are in segments. A new message is parked; others keep their entry."""
        parked: dict[tuple[str, int], list[int]] = {}
        for offset in going:
            queue = self.queue_of(offset)
            if queue is None or offset in self.deliveries or offset in self.delays or offset in self.duplicates:
                self.messages[offset] = self.segments.at(offset)
            else:
                parked.setdefault((queue, self.group_of(offset)), []).append(offset)
        for (queue, group), offsets in parked.items():
            for offset in offsets:
                del self.messages[offset]
            self.segments.park(offsets)
            # an entry that stays would be a second one when the message is read back
            backlog = self._backlog(queue)
            lane = self._lane(backlog, group)
            lane.retain(self.messages)
            if group and lane.blocker < 0:
                backlog.queue_up(lane)

    def _behind(self, queue: str | None, offset: int) -> bool:
        """True if an earlier message of its group has to be finished before ``offset`` can be delivered."""
        if queue not in self._fifo:
            return False
        lane = self.backlogs[str(queue)].lane(self.group_of(offset))
        return lane.blocker >= 0 and lane.blocker != offset

    def _unpark(self, lane: Lane) -> None:
        """Read the lowest parked messages of a lane back.

        While there is room, messages of other lanes in the same segment are read back with them. Otherwise each lane
        would read the row again: for one message, where there are a thousand queues. Blocked lanes stay parked.
        """
        name, group = lane.backlog.name, lane.group
        segment = self.segments.lowest_with(name, group)
        if segment is None:
            return
        self._reads += 1
        # read first: a row that can't be read must leave them parked, or they would be taken for done
        records = self._records(segment)
        self._read_back(lane, self.segments.unpark_lane(segment, name, group), records)
        if not self._has_room():
            return
        for queue, group in segment.parked_lanes():
            backlog = self._backlog(queue)
            lane = self._lane(backlog, group)
            if lane.blocker < 0:
                self._read_back(lane, self.segments.unpark_lane(segment, queue, group), records)
                if group:
                    backlog.queue_up(lane)

    def _read_back(self, lane: Lane, offsets: list[int], records: dict[int, rows.Record]) -> None:
        for offset in offsets:
            record = self.messages[offset] = records[offset]
            self.bytes += size_of(record)
        lane.add_sorted(offsets)

    def _may_read(self) -> bool:
        """True if a delivery that has a message may read another segment back."""
        return self._reads < READS_MAX and self._has_room()

    def _has_room(self) -> bool:
        """True if more may be read back than a receiver asked for."""
        idle = max(0, len(self.messages) - len(self.deliveries) - len(self.reserved))
        return self.bytes * idle <= READ_BACK_BYTES * len(self.messages)

    def quarantine(self, queue: str, reason: str) -> int:
        """Treat all ready messages of ``queue`` as poison. Returns how many there are.

        The log does not say so: after a crash, the next owner decides again.
        """
        backlog = self._backlog(queue)
        while queue in self.segments.queues:
            self._unpark(self._lane(backlog, next(iter(self.segments.queues[queue]))))
        found = list(dict.fromkeys(o for o in backlog.offsets() if self.is_ready(o)))
        self.poison.update(dict.fromkeys(found, reason))
        if found:
            self.counted(queue).total -= len(found)
            self.counted("").total += len(found)
        self._moved(found)
        return len(found)
