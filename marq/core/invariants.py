"""Rules that are true of a partition at any time, whatever was read, folded, delivered or written.

:func:`check` raises :exc:`InternalError` at the first rule that does not hold, and changes nothing. It is called

===========================  ================================================================================
by the simulator             after each event, in full
by :mod:`~marq.core.owner`   when a state was restored, of up to :data:`MANY` messages, deliveries, waits, queues and
                             so on (0.02 s, in slices)
by the checkpoint cycle      before a state is written, of up to :data:`SOME` of each (0.1 ms)
===========================  ================================================================================

So a state that breaks a rule is neither served nor written: the partition is recovered from the last checkpoint. Rules
that hold only between two steps of one call, and the arguments of calls, are checked where the code relies on them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NoReturn, TypeVar

from marq.core.backlog import Backlog, Lane
from marq.core.segments import Segment
from marq.core.state import DeliveryState, MessageState, State, block_of, size_of
from marq.errors import InternalError

#: Entries of each structure that are checked before a checkpoint, those that have been there longest: 0.1 ms, which is
#: 1 % to 2 % of a small checkpoint.
SOME = 25

#: Entries of each structure that are checked when a state was restored: 0.02 s.
MANY = 5_000

#: A segment counts as this many entries: its counts are those of up to a thousand messages.
SEGMENT_ENTRIES = 25

T = TypeVar("T")


def check(partition: State, most: int | None = None) -> None:
    """Raises :exc:`InternalError` if a rule does not hold.

    Args:
        most: check at most this many entries of each structure; None: all of them.
    """
    for _ in checking(partition, most):
        pass


def checking(partition: State, most: int | None = None) -> Iterator[None]:
    """:func:`check` in slices, one for each kind of rule."""
    positions(partition)
    for rules in (messages, deliveries, waits, lanes, segments):
        rules(partition, most)
        yield
    if most is None:
        sums(partition)


def positions(p: State) -> None:
    """The positions of reading, folding and persisting agree."""
    if not 0 <= p.persisted <= p.position:
        _broken(p, f"persisted up to {p.persisted}, read up to {p.position}")
    missed = p.missed.ranges()
    if missed and missed[-1] > p.position:
        _broken(p, f"{missed[-1] - 1} is noted as unreadable, reading is at {p.position}")
    if p.ahead and p.ahead.first() < p.position:
        _broken(p, f"{p.ahead.first()} is noted as done ahead of reading, which is at {p.position}")
    if p.own >= p.markers_position or p.delivery < 0:
        _broken(p, f"own marker {p.own}, delivery {p.delivery}, markers folded up to {p.markers_position}")
    for queue, before in p.purges.items():
        if before <= (p.missed.first() if p.missed else p.position):
            _broken(p, f"purge of {queue!r} below {before} is kept, reading is at {p.position}")
    if p.bytes < 0:
        _broken(p, f"{p.bytes} bytes of payload")


def messages(p: State, most: int | None = None) -> None:
    """An unfinished message has its record in memory, or its segment; below ``persisted`` there is a segment of it."""
    for offset, record in _some(p.messages.items(), most):
        if offset >= p.position:
            _broken(p, f"message {offset} is known, reading is at {p.position}")
        if type(record) is not Segment and record.offset != offset:
            _broken(p, f"message {offset} has the record of {record.offset}")
        segment = p.segments.find(offset) if offset < p.persisted else None
        if offset in p.missed:
            if type(record) is Segment or (segment is not None and segment.is_loose(offset)):
                _broken(p, f"message {offset} was unreadable, and is in a segment")
        elif segment is None:
            if offset < p.persisted or type(record) is Segment:
                _broken(p, f"message {offset} is in no segment, persisted up to {p.persisted}")
        elif not segment.is_loose(offset) or (type(record) is Segment and record is not segment):
            _broken(p, f"message {offset} has an entry, its segment {segment.key} says otherwise")
    for name in ("delays", "poison", "duplicates", "reserved"):
        for offset in _some(getattr(p, name), most):
            if offset not in p.messages:
                _broken(p, f"{offset} in {name} is no message")
    for name, times in (("elapsed", p.elapsed), ("ttls", p.ttls)):
        for offset in _some(times, most):
            if offset not in p.messages and p.segments.queue_of(offset) is None:
                _broken(p, f"{offset} in {name} is no message")


def deliveries(p: State, most: int | None = None) -> None:
    """A delivery belongs to an unfinished message, and its epoch and number were folded."""
    for offset, delivered in _some(p.deliveries.items(), most):
        if offset not in p.messages and not p.is_unread(offset):
            _broken(p, f"{offset} is done, and has a delivery {delivered.as_tuple()}")
        if (delivered.epoch, delivered.delivery) > (p.own, p.delivery):
            _broken(p, f"{offset} has a delivery {delivered.as_tuple()} after the last one, {p.own}/{p.delivery}")
        if delivered.receives < (1 if delivered.leased else 0):
            _broken(p, f"{offset} was received {delivered.receives} times, {delivered.as_tuple()}")
        if offset > p._highest_delivered:
            _broken(p, f"{offset} is delivered, the highest is {p._highest_delivered}")
        if not _is_among(offset, delivered):
            _broken(p, f"{offset} has a delivery that is not of it: {delivered.as_tuple()}")
        in_block = offset >= p.persisted or offset in p.missed
        if in_block and block_of(offset) not in p._dirty and block_of(offset) not in p._marker_rows:
            _broken(p, f"the delivery of {offset} is in no row, and is not to be written")


def waits(p: State, most: int | None = None) -> None:
    """Delays, leases and waits end when their time is over."""
    for offset, due_ms in _some(p.delays.items(), most):
        if due_ms <= p.broker_ms or offset in p.deliveries:
            _broken(p, f"{offset} waits until {due_ms}, broker time is {p.broker_ms}")
    for offset, due_ms in _some(p.elapsed.items(), most):
        if due_ms > p.broker_ms or offset in p.delays or offset in p.deliveries:
            _broken(p, f"{offset} has waited until {due_ms}, broker time is {p.broker_ms}")
    if p._timers and p._timers[0][2].is_over(p.clock_ms):
        _broken(p, f"a lease or wait was over at {p._timers[0][0]}, the clock is at {p.clock_ms}")
    if most is None:
        timed = {id(delivered) for _, _, delivered in p._timers}
        for offset, delivered in p.deliveries.items():
            if not delivered.is_over(p.clock_ms) and id(delivered) not in timed:
                _broken(p, f"nothing ends the delivery {delivered.as_tuple()} of {offset}")
        missing = {(due_ms, offset) for offset, due_ms in p.delays.items()}.difference(p._delayed)
        if missing:
            _broken(p, f"nothing ends the delays of {sorted(offset for _, offset in missing)[:10]}")


def lanes(p: State, most: int | None = None) -> None:
    """The order of deliveries agrees: which lanes take turns, and which wait for what."""
    for name, backlog in _some(p.backlogs.items(), most):
        if backlog.name != name or backlog.fifo != (name in p._fifo):
            _broken(p, f"queue {name!r} has the backlog of {backlog.name!r}, fifo {backlog.fifo}")
        _turns(p, backlog, most)
        for lane in _some(backlog.lanes(), most):
            _lane(p, lane)
    for offset, lane in _some(p._blockers.items(), most):
        if lane.blocker != offset:
            _broken(
                p, f"a lane of {lane.backlog.name!r} is listed as waiting for {offset}, and waits for {lane.blocker}"
            )
        if lane.group and lane.backlog.groups.get(lane.group) is not lane:
            _broken(p, f"a lane of {lane.backlog.name!r} that is gone waits for {offset}")


def segments(p: State, most: int | None = None) -> None:
    """Segments do not overlap, each is in one page, and its counts agree with its messages."""
    store, before = p.segments, 0
    chosen = store[:]
    if most is not None and len(store) > most // SEGMENT_ENTRIES:
        at = p._next_row % len(store)  # others each time
        before, chosen = store[at - 1 : at][0].stop if at else 0, store[at : at + most // SEGMENT_ENTRIES]
    pages = {id(page) for page in store.pages}
    for segment in chosen:
        if segment.start < before or segment.stop <= segment.offsets[-1] or segment.stop > p.persisted:
            _broken(p, f"segment {segment.key} is [{segment.start}, {segment.stop}), after {before}")
        before = segment.stop
        if segment.page is None or id(segment.page) not in pages or segment not in segment.page.segments:
            _broken(p, f"segment {segment.key} is in no page")
        problem = segment.problem()
        if problem:
            _broken(p, f"segment {segment.key}: {problem}")
        for queue, group in _some(segment.lanes_with_parked(), most and SEGMENT_ENTRIES):
            known = store.queues.get(queue, {}).get(group, [])
            at = bisect_left(known, segment)
            if at == len(known) or known[at] is not segment:
                _broken(p, f"segment {segment.key} has parked messages of {queue!r} that nothing will find")
        for offset in _some(segment.loose(), most):
            if offset not in p.messages:
                _broken(p, f"{offset} of segment {segment.key} is neither parked nor done nor a message")


def sums(p: State) -> None:
    """The counts that are kept are the same as a recount."""
    size = sum(size_of(record) for record in p.messages.values() if type(record) is not Segment)
    if size != p.bytes:
        _broken(p, f"{p.bytes} bytes of payload are counted, there are {size}")
    counts: dict[str, list[int]] = {queue: [n, 0, 0] for queue, n in p.segments.parked_counts().items()}
    for offset in p.messages:
        if offset not in p.duplicates:
            found = counts.setdefault(p.queue_of(offset) or "", [0, 0, 0])
            found[0] += 1
            state = p.state_of(offset)
            found[1] += state is MessageState.IN_FLIGHT
            found[2] += state is MessageState.DELAYED
    kept = {queue: list(one.as_tuple()) for queue, one in p.counts.items() if any(one.as_tuple())}
    if kept != {queue: one for queue, one in counts.items() if any(one)}:
        _broken(p, f"messages are counted as {kept}, there are {counts}")
    timed = sum(len(delivered.offsets) for _, _, delivered in p._timers)
    if timed != p._timed:
        _broken(p, f"{p._timed} offsets are counted in timers, there are {timed}")
    paged = [segment for page in p.segments.pages for segment in page.segments]
    if paged != list(p.segments):
        _broken(p, f"{len(paged)} segments are in pages, there are {len(p.segments)}")
    parked = sum(len(segment.lanes_with_parked()) for segment in p.segments)
    listed = sum(len(known) for groups in p.segments.queues.values() for known in groups.values())
    if parked != listed:
        _broken(p, f"{listed} lanes with parked messages are listed, there are {parked}")


def _turns(p: State, backlog: Backlog, most: int | None) -> None:
    """A lane is in a rotation once, and only if its flag says so."""
    rotations = [("queued", backlog.turns)] if backlog.fifo else [
        ("queued", backlog.turns), ("queued_again", backlog.again_turns)
    ]  # fmt: skip
    for flag, turns in rotations:
        for lane in _some(turns, most):
            if not getattr(lane, flag):
                _broken(p, f"a lane of {backlog.name!r} is in a rotation, and does not know ({flag})")
        if most is None:
            inside = {id(lane) for lane in turns}
            missing = sum(getattr(lane, flag) and id(lane) not in inside for lane in backlog.lanes())
            if missing or len(inside) < len(turns):
                _broken(p, f"of {len(turns)} lanes of {backlog.name!r} that are {flag}, {missing} have no turn")


def _lane(p: State, lane: Lane) -> None:
    name, fifo = lane.backlog.name, lane.backlog.fifo
    if lane.blocker >= 0 and (not fifo or p._blockers.get(lane.blocker) is not lane):
        _broken(p, f"a lane of {name!r} waits for {lane.blocker}, and nothing will tell it")
    if lane.blocker >= 0 and lane.queued:
        _broken(p, f"a lane of {name!r} waits for {lane.blocker}, and takes turns")
    if fifo and (lane.returned or lane.again):
        _broken(p, f"a lane of {name!r} has redeliveries beside its order")
    if not fifo and lane.out:
        _broken(p, f"a lane of {name!r}, which has no order, has {len(lane.out)} messages out")


def _is_among(offset: int, delivered: DeliveryState) -> bool:
    offsets = delivered.offsets
    i = bisect_left(offsets, offset)
    return i < len(offsets) and offsets[i] == offset


def _some(entries: Iterable[T], most: int | None) -> Iterable[T]:
    return entries if most is None else islice(entries, most)


def _broken(p: State, text: str) -> NoReturn:
    raise InternalError(f"partition {p.number} breaks a rule: {text}")
