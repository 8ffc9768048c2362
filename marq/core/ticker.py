"""Decides when the log has to tell the time, and which time it is.

Log time passes only with records. So when nothing else is appended, the owner appends a tick: if a lease, a delay or
a time to live may be over, or if a step of a checkpoint waits for a marker. Ticks also tell broker time, by which
delays and times to live end: it passes with the owner's monotonic clock, and :mod:`marq.core.queue_clock` corrects it.
What the clocks of brokers say counts only for the time in which no owner served, when one takes over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from marq.core.checkpoint_cycle import CheckpointCycle
from marq.core.markers import Marker, Tick
from marq.core.partition import Partition
from marq.core.queue_clock import QueueClock

#: Milliseconds between two ticks of a partition at least: each is a record in Kafka.
TICK_MIN_MS = 100

#: Milliseconds between two ticks at most while a lease, a delay or a time to live is pending.
TICK_MAX_MS = 1_000

#: Milliseconds between two searches for the lowest unfinished message, while several clocks have stamped what is.
FORGET_MS = 10_000


class Made(NamedTuple):
    """A tick of this owner."""

    number: int
    at_ms: int


class Ticker:
    """The ticks of one owner. Times are its monotonic clock, except broker times."""

    def __init__(self, partition: Partition) -> None:
        self.told = False  # a tick of this owner has told broker time, and nothing was read since that changes it
        self._partition = partition
        self._clock = QueueClock()
        self._made = Made(0, 0)  # the last tick
        self.is_out = False  # it has not been folded yet
        self.on_its_way: dict[int, Made] = {}  # own record with a tick, not folded yet -> the tick
        self._told_ms = -1  # when the last tick was made that told broker time
        self._tells_from = 1  # number of the first tick that counts for ``told``
        self._markers_ahead_ms: int | None = None  # of our clock, that of the markers topic's leader
        self._searched_ms = 0

    @property
    def behind_ms(self) -> int | None:
        """How far broker time is behind the clock of the markers topic's leader; None: not known."""
        if not self.told or self._markers_ahead_ms is None:
            return None
        return self._markers_ahead_ms - self._clock.now_ms(0)

    def read(self, start: int, records: Sequence[Any], now_ms: int, since_ms: int) -> None:
        """Messages were read that no log contained before ``since_ms``. See :meth:`QueueClock.read`."""
        if self._clock.read(start, records, now_ms, since_ms):
            self.told, self._tells_from = False, self._made.number + 1

    def sent(self, seq: int, markers: Iterable[Marker]) -> None:
        """An own record is on its way, while a tick is out."""
        if any(type(marker) is Tick for marker in markers):
            self.on_its_way[seq] = self._made

    def settled(self, seq: int) -> None:
        """Own record ``seq`` was folded, or never will be."""
        self.on_its_way.pop(seq, None)

    def folded(self, seq: int, timestamp_ms: int, now_ms: int) -> None:
        """An own record with this timestamp was folded by an owner that serves."""
        made = self.on_its_way.get(seq)
        if made is None:
            return
        self.is_out = False
        self._markers_ahead_ms = timestamp_ms - now_ms
        partition = self._partition
        if partition.told_at == partition.markers_position:
            self._told_ms = made.at_ms
            if not self.told and made.number >= self._tells_from:
                self.told = True
                partition.woken.update(dict.fromkeys(list(partition.queues())))
        elif self._told_ms < 0:
            # none was believed yet, so the stamp from which they began may have been wrong
            passed_ms = max(0, timestamp_ms - partition.told_ms)
            broker_ms = timestamp_ms if partition.broker_ms < 0 else partition.broker_ms + passed_ms
            self._clock.begin(broker_ms, now_ms)

    def estimate(self, now_ms: int) -> None:
        """Tell the partition the broker time by our own clock: it delivers no message that has expired by then."""
        self._partition.estimate_ms = self._clock.now_ms(now_ms) if self.told else -1

    def tick(
        self,
        epoch: int,
        now_ms: int,
        folded_ms: int,
        checkpoints: CheckpointCycle,
        *,
        has_sent: bool,
        has_ttl: bool,
    ) -> Tick | None:
        """The tick to append now, or None. The rate of ticks is limited.

        Args:
            epoch: of the owner.
            folded_ms: when a marker was folded last.
            has_sent: own records are on their way.
            has_ttl: a queue with a time to live of its own has something here.
        """
        partition = self._partition
        since_tick = now_ms - self._made.at_ms
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
        if self._clock.has_changed and now_ms - self._searched_ms >= FORGET_MS:
            self._searched_ms = now_ms
            self._clock.forget(partition.lowest())
        self._made = Made(self._made.number + 1, now_ms)
        self.is_out = True
        if self._markers_ahead_ms is None:
            return Tick(sure=False)  # asks for the time
        broker_ms, clock_ms = self._clock.now_ms(now_ms), now_ms + self._markers_ahead_ms
        return Tick(epoch=epoch, time_ms=max(1, broker_ms), clock_ms=max(0, clock_ms))

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
        due_ms = partition.next_time_ms()
        if not self.told or partition.undecided:
            times.append(now_ms)
        elif due_ms is not None:
            times += [self._made.at_ms + TICK_MAX_MS, self._told_ms + due_ms]
        if not times:
            return None
        return max(min(times), self._made.at_ms + (TICK_MAX_MS if self.is_out else TICK_MIN_MS))

    def _wants_time(self, now_ms: int, has_ttl: bool) -> bool:
        """True if a tick has to tell broker time: other markers only move the clock of leases."""
        partition = self._partition
        if not self.told or partition.undecided:
            return True
        due_ms = partition.next_time_ms()
        if due_ms is None and not has_ttl:
            return False
        is_due = due_ms is not None and now_ms - self._told_ms >= due_ms
        return is_due or now_ms - self._made.at_ms >= TICK_MAX_MS
