"""Folds the markers log: on which messages a marker takes effect, and how it changes them."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify

from marq.core import state
from marq.core.markers import End, Keepalive, Marker, Own, Purge, Release, Start, Tick
from marq.core.ranges import count, flat, offsets_in, ranges_of
from marq.core.reading import Reading
from marq.core.segments import Segment
from marq.core.state import MESSAGE_OVERHEAD_BYTES, DeliveryState, MessageState, block_of, headers_size, size_of
from marq.errors import InternalError

#: Milliseconds by which one record advances the partition clock at most, so that no lease ends early when the clock of
#: a broker jumps.
CLOCK_STEP_MS = 5_000


class Folding(Reading):
    """Folds the markers log."""

    def fold(self, offset: int, timestamp_ms: int, markers: Iterable[Marker]) -> list[list[int]]:
        """Apply the record at ``offset`` of the markers topic, which must be the next one.

        Returns, for each marker, the offsets on which it took effect.

        Raises:
            InternalError: the record was folded before. The caller has to skip records that are read twice.
        """
        if offset < self.markers_position:
            raise InternalError(f"partition {self.number}: marker record {offset} is folded a second time")
        if self.last_timestamp_ms >= 0:
            step = timestamp_ms - self.last_timestamp_ms
            if step > 0:
                self.clock_ms += min(step, CLOCK_STEP_MS)
        self.last_timestamp_ms = timestamp_ms
        self.markers_position = offset + 1
        while self._timers and self._end_wait():
            pass
        effects: list[list[int]] = []
        idle = True
        for marker in markers:
            effect: list[int]
            kind = type(marker)
            if kind is Start:
                effect = self._start(marker)  # type: ignore[arg-type]
            elif kind is End:
                effect = self._end(marker)  # type: ignore[arg-type]
            elif kind is Keepalive or kind is Release:
                effect = self._change(marker)  # type: ignore[arg-type]
            elif kind is Purge:
                effect = self._purge(marker)  # type: ignore[arg-type]
            else:
                effect = []
                if kind is Own:
                    self.own = offset
                    self.delivery = 0
                    self.tick_ms = -1
                elif kind is Tick and not marker.fence:  # type: ignore[union-attr]
                    self._tick(marker, timestamp_ms)  # type: ignore[arg-type]
            idle = idle and kind is Tick
            effects.append(effect)
        self._ticks += idle
        if self._held_up and not self._is_one_ahead():
            self._deliver_again()
        if self._listed > self._listed_max:
            self._clean()
        if len(self._dirty) > self._dirty_max:
            self._clean_dirty()
        return effects

    def _tick(self, tick: Tick, timestamp_ms: int) -> None:
        if tick.time_ms:
            # what its owner believes of the clocks has to agree with a stamp that the owner did not know
            if tick.epoch == self.own and abs(timestamp_ms - tick.clock_ms) <= CLOCK_STEP_MS:
                self._tell_time(tick.time_ms, max(timestamp_ms, tick.clock_ms))
        elif tick.sure and timestamp_ms != self.tick_ms:
            # of version 0.2: two ticks have to agree, and those of one batch, with the same timestamp, prove nothing
            before, self.tick_ms = self.tick_ms, timestamp_ms
            if before >= 0 and 0 < timestamp_ms - before <= CLOCK_STEP_MS:
                self._tell_time(timestamp_ms, timestamp_ms)

    def _tell_time(self, broker_ms: int, told_ms: int) -> None:
        """It is ``broker_ms`` by the clock that stamps messages, and ``told_ms`` by that of the markers topic."""
        fell = broker_ms < self.broker_ms
        self.broker_ms, self.told_ms, self.told_at = broker_ms, told_ms, self.markers_position
        if fell:
            self._turn_back()
        self._fire_delays()

    def _turn_back(self) -> None:
        """Broker time went back: delays that were over by the wrong time are pending again."""
        now_ms = self.broker_ms
        again = {offset: due_ms for offset, due_ms in self.elapsed.items() if due_ms > now_ms}
        for offset in again:
            del self.elapsed[offset]
            if offset not in self.messages:  # parked: only what is ready may be
                self._unfinished(offset)
                queue = self.queue_of(offset)
                if queue is not None:
                    self._note_out(queue, offset)
        self.delays.update(again)
        self._delayed = [(due_ms, offset) for offset, due_ms in self.delays.items()]
        heapify(self._delayed)
        self._expiring = [(expires_ms, offset) for offset, expires_ms in self.ttls.items()]
        heapify(self._expiring)
        if again:
            self._count_change(again, MessageState.READY, MessageState.DELAYED)
            for backlog in self.backlogs.values():
                if not backlog.fifo:  # else they keep their places
                    for lane in backlog.lanes():
                        lane.remove(again)

    def _clean_dirty(self) -> None:
        """Drop blocks without deliveries and without a row. A fold that writes no rows would keep them for ever."""
        for block in self._dirty:
            if block << state.BLOCK_BITS < self.persisted:
                self.segments.touch(block << state.BLOCK_BITS, (block + 1) << state.BLOCK_BITS)
        dirty = self._dirty & self._marker_rows.keys()
        dirty |= self._dirty.intersection(map(block_of, self.deliveries))
        self._dirty = dirty
        self._dirty_max = 2 * len(dirty) + state.CLEAN_SLACK

    def skip_markers(self, stop: int) -> None:
        """Skip to ``stop``: the markers topic has no more records below it (control records, deleted records)."""
        self.markers_position = max(self.markers_position, stop)

    def _start(self, m: Start) -> list[int]:
        if m.epoch != self.own:
            self.counters["ignored_starts"] += 1
            return []
        self.delivery = max(self.delivery, m.delivery)
        deliveries, messages, clock_ms = self.deliveries, self.messages, self.clock_ms
        deadline_ms = clock_ms + m.redeliver_after_ms
        first: list[int] = []
        again: dict[int, list[int]] = {}
        waited: list[int] = []
        for offset in flat(m.offsets):
            if offset not in messages and not self._unfinished(offset):
                continue
            delivered = deliveries.get(offset)
            if delivered is None:
                first.append(offset)
            elif (delivered.epoch != m.epoch or delivered.delivery < m.delivery) and (
                not delivered.is_leased(clock_ms)
            ):
                again.setdefault(delivered.receives, []).append(offset)
                if not delivered.is_over(clock_ms):
                    waited.append(offset)
        self._touch(m.offsets)
        effect = first
        if first:
            if self.delays or self.elapsed:
                waited += [offset for offset in first if offset in self.delays]
                for offset in first:  # what was started waits for no delay any more, whatever becomes of broker time
                    self.delays.pop(offset, None)
                    self.elapsed.pop(offset, None)
            self._set_delivery(DeliveryState(m.epoch, m.delivery, 1, deadline_ms, True, m.receiver, first))
        if again:
            effect = list(first)
            for receives, offsets in again.items():
                self._set_delivery(
                    DeliveryState(
                        m.epoch,
                        m.delivery,
                        receives + 1,
                        deadline_ms,
                        True,
                        m.receiver,
                        offsets,
                    )
                )
                effect += offsets
                if receives:
                    self.counters["redelivered"] += len(offsets)
            effect.sort()
        if waited:
            self._count_change(waited, MessageState.DELAYED, MessageState.READY)
        if deadline_ms > clock_ms:
            self._count_change(effect, MessageState.READY, MessageState.IN_FLIGHT)
        self.counters["delivered"] += len(effect)
        return effect

    def _set_delivery(self, delivered: DeliveryState) -> None:
        self.deliveries.update(dict.fromkeys(delivered.offsets, delivered))
        self._highest_delivered = max(self._highest_delivered, delivered.offsets[-1])
        if delivered.is_over(self.clock_ms):
            self._come_back(delivered)
        else:
            self._set_timer(delivered)

    def _end(self, m: End) -> list[int]:
        effect: list[int] = []
        if m.outcome != "acked":
            if m.epoch != self.own:
                self.counters["ignored_ends"] += count(m.offsets)
                return effect
            for offset in offsets_in(m.offsets):
                if self._unfinished(offset):
                    if offset in self.duplicates:
                        self.counters["duplicates"] += 1
                    self._count_out(offset)
                    self._drop(offset)
                    self.deliveries.pop(offset, None)
                    effect.append(offset)
        else:
            deliveries, messages, epoch, delivery = self.deliveries, self.messages, m.epoch, m.delivery
            clock_ms = self.clock_ms
            if not delivery:
                deliveries = {}  # the receipt of no delivery
            plain = not (self.delays or self.ttls or self.poison or self.duplicates or self.missed)
            persisted, size, topic = self.persisted, 0, self.queue_id is not None
            last_key: bytes | None = None  # of a run of messages that shared a delivery and a queue …
            last, counts, run, state = None, None, 0, MessageState.READY
            acked: DeliveryState | None = None  # that the last message had
            for offset in flat(m.offsets):
                delivered = deliveries.get(offset)
                if delivered is not acked:
                    if (
                        delivered is None
                        or delivered.epoch < epoch
                        or (delivered.epoch == epoch and delivered.delivery < delivery)
                    ):
                        continue
                    acked = delivered
                    self.ended_by_others += delivered.epoch != epoch or delivered.delivery != delivery
                elif delivered is None:
                    continue
                effect.append(offset)
                if plain and offset >= persisted:
                    del deliveries[offset]
                    record = messages.pop(offset, None)
                    if record is not None:
                        if delivered is not last or (record.key != last_key and not topic):
                            if counts is not None:
                                counts.total -= run
                                self._count_state(counts, state, -run)
                            counts, run = self.counted(self._backlog_of(record).name), 0  # type: ignore[union-attr]
                            last, last_key, state = delivered, record.key, delivered.state_at(clock_ms)
                        run += 1
                        value = record.value
                        size += MESSAGE_OVERHEAD_BYTES if value is None else len(value) + MESSAGE_OVERHEAD_BYTES
                        if record.headers:
                            size += headers_size(record)
                        continue
                else:
                    self._count_out(offset)
                    del deliveries[offset]
                self._drop(offset)
            if counts is not None:
                counts.total -= run
                self._count_state(counts, state, -run)
            self.reserved.difference_update(effect)
            self.bytes -= size
            if self.bytes < 0:
                raise InternalError(f"partition {self.number}: {self.bytes} bytes of payload are left after an end")
        self._touch(m.offsets)
        if self._blockers:
            self._moved(effect)
        self.counters[m.outcome] += len(effect)
        self.counters["ignored_ends"] += count(m.offsets) - len(effect)
        return effect

    def _change(self, m: Keepalive | Release) -> list[int]:
        """Extend or give back the current delivery of each offset; anything else is ignored."""
        deliveries = self.deliveries
        groups: dict[DeliveryState, list[int]] = {}
        for offset in offsets_in(m.offsets):
            delivered = deliveries.get(offset)
            if (
                delivered is not None
                and delivered.leased
                and delivered.delivery == m.delivery
                and delivered.epoch == m.epoch
            ):
                groups.setdefault(delivered, []).append(offset)
        effect: list[int] = []
        for delivered, offsets in groups.items():
            receives, leased = delivered.receives, isinstance(m, Keepalive)
            was = delivered.state_at(self.clock_ms)
            if isinstance(m, Keepalive):
                deadline_ms = self.clock_ms + m.redeliver_after_ms
            else:
                deadline_ms = self.clock_ms + m.delay_ms
                if not m.counted:
                    receives -= 1
            changed = DeliveryState(
                delivered.epoch, delivered.delivery, receives, deadline_ms, leased, delivered.receiver, offsets
            )
            self._count_change(offsets, was, changed.state_at(self.clock_ms))
            self._set_delivery(changed)
            effect += offsets
        self._touch(m.offsets)
        if self._blockers:
            self._moved(effect)
        return effect

    def _purge(self, m: Purge) -> list[int]:
        if m.epoch != self.own:
            self.counters["ignored_purges"] += 1
            return []
        effect = [o for o in self.messages if o < m.before and self.queue_of(o) == m.queue]
        for segment in self.segments.of(m.queue):
            effect += [o for o in segment.parked_of(m.queue) if o < m.before]
        for offset in effect:
            self._count_out(offset)
            self._drop(offset)
            self.deliveries.pop(offset, None)
        self.ended_by_others += bool(effect)
        self._touch(ranges_of(sorted(effect)))
        if self._blockers:
            self._moved(effect)
        if self.named.get(m.queue, m.before) < m.before:
            del self.named[m.queue]
        if m.before > (self.missed.first() if self.missed else self.position):
            self.purges[m.queue] = max(m.before, self.purges.get(m.queue, 0))
            if self.unread.stop > self.position:
                self.unread.purge(m.queue, m.before, self.position)
        self.counters["purged"] += len(effect)
        return effect

    def _unfinished(self, offset: int) -> bool:
        """True if ``offset`` is not done. A parked message gets an entry of its own, because its state changes."""
        if offset in self.messages:
            return True
        if self.is_unread(offset):
            return True
        if offset < self.persisted:
            segment = self.segments.unpark(offset)
            if segment is not None:
                self.messages[offset] = segment
                return True
        return False

    def _drop(self, offset: int) -> None:
        """``offset`` is done."""
        record = self.messages.pop(offset, None)
        missed = bool(self.missed) and offset in self.missed
        if missed:
            self.missed.discard(offset, offset + 1)
            self._keep_purges()
        if record is None:
            if offset >= self.position:
                self.ahead.add(offset, offset + 1)
                if offset < self.unread.stop:
                    self.unread.end(offset)
                return
            if missed:
                self._ended_unread()
                return
            self.segments.unpark(offset)
        elif type(record) is not Segment:
            self.bytes -= size_of(record)
        if offset < self.persisted and not missed:
            self.segments.finish(offset)
        self._forget(offset)
