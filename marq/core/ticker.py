"""Decides when the log has to tell the time, and whether the owner believes it.

Log time passes only with records. So when nothing else is appended, the owner appends a tick: if a lease, a delay or
a time to live may be over, or if a step of a checkpoint waits for a marker. Ticks also tell broker time. The owner
compares it with its own clock. When a broker's clock jumps, the owner believes it only after :data:`DOUBT_MS`; the next
owner believes it at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from marq.core.checkpoint_cycle import CheckpointCycle
from marq.core.folding import CLOCK_STEP_MS
from marq.core.markers import Marker, Tick
from marq.core.partition import Partition

#: Milliseconds between two ticks of a partition at least: each is a record in Kafka.
TICK_MIN_MS = 100

#: Milliseconds between two ticks at most while a lease, a delay or a time to live is pending.
TICK_MAX_MS = 1_000

#: Milliseconds for which the timestamps of ticks have to disagree with the owner's clock before they are believed.
DOUBT_MS = 120_000


class Ticker:
    """The ticks of one owner. Times are its monotonic clock, except broker times."""

    def __init__(self, partition: Partition) -> None:
        self.told = False  # this owner's own ticks have told broker time
        self._partition = partition
        self._ticked_ms = 0  # when the last tick was made
        self.is_out = False  # it has not been folded yet
        self.on_its_way: dict[int, int] = {}  # own record with a tick, not folded yet -> when it was sent, or before
        self._told_ms = 0  # when the last tick was sent that told broker time
        self._ahead_ms = 0  # of our clock, broker time, as it is believed
        self._doubt_since_ms: int | None = None  # when the stamps of ticks began to be at odds with our clock

    def sent(self, seq: int, markers: Iterable[Marker]) -> None:
        """An own record is on its way, while a tick is out."""
        if any(type(marker) is Tick for marker in markers):
            self.on_its_way[seq] = self._ticked_ms

    def settled(self, seq: int) -> None:
        """Own record ``seq`` was folded, or never will be."""
        self.on_its_way.pop(seq, None)

    def folded(self, seq: int, timestamp_ms: int, now_ms: int) -> None:
        """An own record with this timestamp was folded by an owner that serves."""
        sent_ms = self.on_its_way.get(seq)
        if sent_ms is None:
            return
        self.is_out = False
        partition, ahead_ms = self._partition, timestamp_ms - sent_ms
        if self.told and abs(ahead_ms - self._ahead_ms) > CLOCK_STEP_MS:
            if self._doubt_since_ms is None:
                self._doubt_since_ms = now_ms
            if now_ms - self._doubt_since_ms < DOUBT_MS:
                return
        self._doubt_since_ms = None
        self._ahead_ms = ahead_ms
        if partition.agreed and partition.tick_ms == timestamp_ms:
            self._told_ms = sent_ms
            if not self.told:
                self.told = True
                partition.woken.update(dict.fromkeys(list(partition.queues())))

    def estimate(self, now_ms: int) -> None:
        """Tell the partition the broker time by our own clock: it delivers no message that has expired by then."""
        partition = self._partition
        partition.estimate_ms = partition.broker_ms + now_ms - self._told_ms if self.told else -1

    def tick(
        self, now_ms: int, folded_ms: int, checkpoints: CheckpointCycle, *, has_sent: bool, has_ttl: bool
    ) -> Tick | None:
        """The tick to append now, or None. The rate of ticks is limited.

        Args:
            folded_ms: when a marker was folded last.
            has_sent: own records are on their way.
            has_ttl: a queue with a time to live of its own has something here.
        """
        partition = self._partition
        since_tick = now_ms - self._ticked_ms
        if since_tick < (TICK_MAX_MS if self.is_out else TICK_MIN_MS):
            return None
        since_fold = now_ms - folded_ms
        due_ms = partition.next_lease_ms()
        if not (
            self._wants_time(now_ms, has_ttl)
            or (due_ms is not None and since_fold >= min(due_ms, TICK_MAX_MS))
            or checkpoints.wants_event(now_ms)
            or (since_fold >= TICK_MAX_MS and (checkpoints.under_way or has_sent))
        ):
            return None
        # two that are sent at once would prove each other right
        sure = self._doubt_since_ms is None and (not self.is_out or since_tick > CLOCK_STEP_MS)
        self._ticked_ms = now_ms
        self.is_out = True
        return Tick(sure=sure)

    def next_ms(self, now_ms: int, folded_ms: int, checkpoints: CheckpointCycle, *, has_sent: bool) -> int | None:
        """The time before which :meth:`tick` has none without ``has_ttl``, unless something happens; None: for ever.

        It may be too early, which costs a question; it must never be too late.
        """
        partition, lease_ms = self._partition, self._partition.next_lease_ms()
        times = [] if lease_ms is None else [folded_ms + lease_ms]
        if checkpoints.under_way or has_sent or lease_ms is not None:
            times.append(folded_ms + TICK_MAX_MS)
        if (event_ms := checkpoints.event_ms(now_ms)) is not None:
            times.append(event_ms)
        due_ms, undecided = partition.next_time_ms(), partition.undecided
        if not self.told or undecided:
            times.append(now_ms)
        elif due_ms is not None:
            times.append(self._ticked_ms + TICK_MAX_MS)
            times.append(self._told_ms + due_ms if partition.agreed else now_ms)
        if not times:
            return None
        return max(min(times), self._ticked_ms + (TICK_MAX_MS if self.is_out else TICK_MIN_MS))

    def _wants_time(self, now_ms: int, has_ttl: bool) -> bool:
        """True if a tick has to tell broker time: other markers only move the clock of leases."""
        if not self.told:
            return True
        partition = self._partition
        due_ms, is_due = partition.next_time_ms(), partition.undecided
        if due_ms is None and not has_ttl and not is_due:
            return False
        is_due = is_due or (due_ms is not None and now_ms - self._told_ms >= due_ms)
        if self._doubt_since_ms is None and (is_due or not partition.agreed):
            return True
        return now_ms - self._ticked_ms >= TICK_MAX_MS
