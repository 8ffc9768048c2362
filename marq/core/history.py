"""What happened to each message, told from what the fold did: the raw material of life cycles, audits and metrics.

:class:`Histories` watches the fold of a :class:`~marq.core.partition.Partition`. The history of a message is a chain of
events. Messages with the same history share it, so that a million waiting or leased messages cost a dict entry each. A
history is kept until its message is done. Of payloads only the size is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from marq.core.markers import End, Keepalive, Marker, Own, Purge, Release, Start
from marq.core.partition import Partition
from marq.core.policies import QUEUE_NAME_MAX
from marq.core.reading import BAD_NAME, SPAN_MAX_MS, milliseconds
from marq.core.state import MessageState
from marq.errors import InternalError, RowError
from marq.protocol.headers import H_DELAY, H_TTL

#: Version of what :meth:`Histories.dump` writes.
VERSION = 1

#: Unfinished messages in one value of :meth:`Histories.dump`, so that a value has a bounded size.
CHUNK_MESSAGES = 20_000


#: The place of a marker in the log is the offset of its record times this, plus its number in the record.
PLACES = 1 << 16


class Envelope(NamedTuple):
    """A message without its payload, as :meth:`Partition.ingest` takes it.

    ``value`` is None, whatever the payload, unless the message is too large to be one.
    """

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    size: int  # of the payload, bytes; -1: null


class Event:
    """Something that took effect on a message, and what came before it."""

    __slots__ = ("at", "at_ms", "before", "delivery", "epoch", "kind", "receiver", "span_ms")

    def __init__(
        self,
        before: Event | None,
        kind: str,
        at: int,
        at_ms: int,
        epoch: int,
        delivery: int,
        receiver: str,
        span_ms: int,
    ) -> None:
        self.before = before
        self.kind = kind  # start, keepalive, release, uncounted
        self.at = at  # place in the markers log
        self.at_ms = at_ms  # of log time
        self.epoch = epoch
        self.delivery = delivery
        self.receiver = receiver
        self.span_ms = span_ms  # lease of a start or keepalive, delay of a release


class Delivery(NamedTuple):
    """One delivery of a message. Times are those of the log."""

    attempt: int  # 1, 2, 3 …; that of an uncounted one is given again
    epoch: int
    delivery: int
    owner: str  # the worker of that epoch; empty if its own marker was not read
    receiver: str
    start_ms: int
    deadline_ms: int  # of the start or the last extension
    extensions: int
    end_ms: int | None  # None: the lease ran out, or is on
    end: str | None  # outcome; released, uncounted, expired_lease, overtaken (another delivery's ack); None: is on


class MessageHistory(NamedTuple):
    """A chain of events as deliveries and counts."""

    deliveries: list[Delivery]
    receives: int
    extensions: int
    releases: int
    working_ms: int


#: The history of a message that was never delivered.
NO_HISTORY = MessageHistory([], 0, 0, 0, 0)


class Ahead(NamedTuple):
    """A purge that reaches beyond what has been read."""

    before: int
    at: int  # place in the markers log
    at_ms: int


class Early(NamedTuple):
    """The end of a message that was not read yet."""

    outcome: str
    at: int  # place in the markers log
    at_ms: int
    receipt: tuple[int, int] | None  # of an ack


class Ended(NamedTuple):
    """Messages that ended in the same way."""

    envelopes: list[Envelope]
    outcome: str
    ended_ms: int
    history: MessageHistory


class Unfinished(NamedTuple):
    """A message that is not done."""

    envelope: Envelope
    state: MessageState
    history: MessageHistory


class Histories:
    """The histories of one partition. Take what has ended from :attr:`ended`, and clear it."""

    def __init__(self, *, queue_id: str | None = None) -> None:
        self.queue_id = queue_id
        self.ended: list[Ended] = []
        self.sent: dict[int, Envelope] = {}  # read and not done
        self.last: dict[int, Event] = {}  # not done, delivered at least once -> what happened last
        self.early: dict[int, Early] = {}  # done before they were read
        self.owners: dict[int, str] = {}  # epoch -> worker
        self.purges: dict[str, list[Ahead]] = {}  # queue -> purges of messages to come
        self._names: dict[bytes, str | None] = {}

    # ------------------------------------------------------------------ what happens

    def read(self, envelopes: Sequence[Envelope], partition: Partition) -> None:
        """``envelopes`` have just been ingested by ``partition``."""
        if not self.early and not self.purges:
            self.sent.update(zip([e.offset for e in envelopes], envelopes, strict=True))
            return
        for envelope in envelopes:
            early = self.early.pop(envelope.offset, None)
            if early is None and envelope.offset in partition.messages:
                self.sent[envelope.offset] = envelope
            else:
                self._ended_unread(envelope, early)
        position = envelopes[-1].offset + 1
        for queue, ahead in list(self.purges.items()):
            self.purges[queue] = [purge for purge in ahead if purge.before > position]
            if not self.purges[queue]:
                del self.purges[queue]

    def _ended_unread(self, envelope: Envelope, early: Early | None) -> None:
        """A message ended before it was read: by the end that was seen, or by a purge that came before that end."""
        offset = envelope.offset
        purges = self.purges.get(self.queue_of(envelope) or "", ())
        purge = next((p for p in purges if offset < p.before and (early is None or p.at < early.at)), None)
        event = self.last.pop(offset, None)
        if purge is not None:
            early = Early("purged", purge.at, purge.at_ms, None)
            while event is not None and event.at > purge.at:
                event = event.before
        if early is None:
            raise InternalError(f"message {offset} is not unfinished, and no marker has ended it")
        # the broker of the queue log may be ahead of that of the markers
        at_ms = max(early.at_ms, envelope.timestamp)
        history = self._history_of(event, early.receipt, at_ms, early.outcome)
        self.ended.append(Ended([envelope], early.outcome, at_ms, history))

    def absent(self, start: int, stop: int) -> None:
        """The queue log has no records in ``[start, stop)``: drop their histories."""
        for store in (self.last, self.early):
            if store:
                span: Iterable[int] = range(start, stop) if stop - start < len(store) else list(store)
                for offset in span:
                    if start <= offset < stop:
                        store.pop(offset, None)

    def folded(self, offset: int, at_ms: int, markers: Iterable[Marker], effects: Iterable[Sequence[int]]) -> None:
        """The markers record at ``offset`` was folded. ``effects`` has a list of offsets for each marker."""
        place = offset * PLACES
        for at, (marker, effect) in enumerate(zip(markers, effects, strict=True), place):
            if type(marker) is Own:
                self._own(offset, marker)
            elif type(marker) is Purge and marker.epoch == max(self.owners, default=marker.epoch):
                self.purges.setdefault(marker.queue, []).append(Ahead(marker.before, at, at_ms))
            if effect:
                if type(marker) is Start:
                    self._happened(effect, "start", at, at_ms, marker, marker.receiver, marker.redeliver_after_ms)
                elif type(marker) is Keepalive:
                    self._happened(effect, "keepalive", at, at_ms, marker, "", marker.redeliver_after_ms)
                elif type(marker) is Release:
                    kind = "release" if marker.counted else "uncounted"
                    self._happened(effect, kind, at, at_ms, marker, "", marker.delay_ms)
                elif type(marker) is End:
                    receipt = (marker.epoch, marker.delivery) if marker.outcome == "acked" else None
                    self._over(effect, marker.outcome, at, at_ms, receipt)
                elif type(marker) is Purge:
                    self._over(effect, "purged", at, at_ms, None)

    def _own(self, offset: int, marker: Own) -> None:
        if len(self.owners) > 1_000:
            used = {event.epoch for event in self._events(self.last.values())}
            self.owners = {epoch: worker for epoch, worker in self.owners.items() if epoch in used}
        self.owners[offset] = marker.worker

    def _happened(
        self, effect: Sequence[int], kind: str, at: int, at_ms: int, marker: Any, receiver: str, span_ms: int
    ) -> None:
        last, epoch, delivery = self.last, marker.epoch, marker.delivery
        if last.keys().isdisjoint(effect):
            last.update(dict.fromkeys(effect, Event(None, kind, at, at_ms, epoch, delivery, receiver, span_ms)))
            return
        groups: dict[Event | None, list[int]] = {}
        for offset in effect:
            groups.setdefault(last.get(offset), []).append(offset)
        for before, offsets in groups.items():
            last.update(dict.fromkeys(offsets, Event(before, kind, at, at_ms, epoch, delivery, receiver, span_ms)))

    def _over(self, effect: Sequence[int], outcome: str, at: int, at_ms: int, receipt: tuple[int, int] | None) -> None:
        last, sent = self.last, self.sent
        if not sent.keys() >= set(effect):
            unread = [offset for offset in effect if offset not in sent]
            self.early.update(dict.fromkeys(unread, Early(outcome, at, at_ms, receipt)))
            effect = [offset for offset in effect if offset in sent]
            if not effect:
                return
        events = [last.pop(offset, None) for offset in effect]
        if events.count(events[0]) == len(events):
            groups: dict[Event | None, Sequence[int]] = {events[0]: effect}
        else:
            lists: dict[Event | None, list[int]] = {}
            for offset, event in zip(effect, events, strict=True):
                lists.setdefault(event, []).append(offset)
            groups = dict(lists)
        for event, offsets in groups.items():
            history = self._history_of(event, receipt, at_ms, outcome)
            self.ended.append(Ended([sent.pop(offset) for offset in offsets], outcome, at_ms, history))

    # ------------------------------------------------------------------ what it comes to

    def unfinished(self, partition: Partition) -> Iterator[Unfinished]:
        """Each message that was read and is not done, in no particular order. Nothing may be folded meanwhile."""
        histories: dict[Event | None, MessageHistory] = {None: NO_HISTORY}
        for offset, envelope in self.sent.items():
            event = self.last.get(offset)
            history = histories.get(event)
            if history is None:
                delivered = partition.deliveries.get(offset)
                over = delivered is not None and delivered.is_over(partition.clock_ms)
                history = histories[event] = self._history_of(
                    event, None, partition.last_timestamp_ms, None, lease_over=over
                )
            yield Unfinished(envelope, partition.state_of(offset), history)

    def queue_of(self, envelope: Envelope) -> str | None:
        """The queue that a message is in; None for poison."""
        if envelope.value is not None or (envelope.headers and _is_malformed(envelope)):
            return None
        if self.queue_id is not None:
            return self.queue_id
        key = envelope.key
        if not key:
            return None
        if key not in self._names:
            try:
                name: str | None = key.decode()
            except UnicodeDecodeError:
                name = None
            if len(self._names) > 100_000:
                self._names.clear()
            self._names[key] = name if name is not None and len(name) <= QUEUE_NAME_MAX else None
        return self._names[key]

    def _history_of(
        self,
        event: Event | None,
        receipt: tuple[int, int] | None,
        at_ms: int,
        outcome: str | None,
        *,
        lease_over: bool = False,
    ) -> MessageHistory:
        """The history that ends with ``event``. ``receipt`` is that of an ack, None for any other outcome."""
        if event is None:
            return NO_HISTORY
        chain = list(self._chain(event))
        chain.reverse()
        deliveries: list[Delivery] = []
        receives = extensions = releases = working_ms = 0
        for i, first in enumerate(chain):
            if first.kind == "keepalive":
                extensions += 1
                deliveries[-1] = deliveries[-1]._replace(
                    deadline_ms=first.at_ms + first.span_ms, extensions=deliveries[-1].extensions + 1
                )
                continue
            if first.kind != "start":
                counted = first.kind == "release"
                releases += counted
                receives -= not counted
                end = "released" if counted else "uncounted"
                deliveries[-1] = deliveries[-1]._replace(end_ms=first.at_ms, end=end)
                continue
            if i and deliveries[-1].end is None:
                deliveries[-1] = deliveries[-1]._replace(end="expired_lease")
            receives += 1
            deliveries.append(
                Delivery(
                    attempt=receives,
                    epoch=first.epoch,
                    delivery=first.delivery,
                    owner=self.owners.get(first.epoch, ""),
                    receiver=first.receiver,
                    start_ms=first.at_ms,
                    deadline_ms=first.at_ms + first.span_ms,
                    extensions=0,
                    end_ms=None,
                    end=None,
                )
            )
        self._close(deliveries, receipt, at_ms, outcome, lease_over)
        for d in deliveries:
            until = d.end_ms if d.end_ms is not None else min(d.deadline_ms, at_ms)
            working_ms += max(0, until - d.start_ms)
        return MessageHistory(deliveries, receives, extensions, releases, working_ms)

    @staticmethod
    def _close(
        deliveries: list[Delivery],
        receipt: tuple[int, int] | None,
        at_ms: int,
        outcome: str | None,
        lease_over: bool,
    ) -> None:
        """Say how the last delivery ended, and which one an ack was for."""
        final = deliveries[-1]
        if outcome is None:
            if lease_over and final.end is None:
                deliveries[-1] = final._replace(end="expired_lease")
            return
        acked = len(deliveries) - 1
        if receipt is not None:
            while acked > 0 and (deliveries[acked].epoch, deliveries[acked].delivery) > receipt:
                acked -= 1
        if acked < len(deliveries) - 1 and final.end is None:
            deliveries[-1] = final._replace(end_ms=at_ms, end="overtaken")
        if receipt is not None or deliveries[acked].end is None:
            deliveries[acked] = deliveries[acked]._replace(end_ms=at_ms, end=outcome)

    @staticmethod
    def _chain(event: Event | None) -> Iterator[Event]:
        while event is not None:
            yield event
            event = event.before

    def _events(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            yield from self._chain(event)

    # ------------------------------------------------------------------ between runs

    def dump(self) -> list[bytes]:
        """All histories, as values of bounded size for :meth:`load`."""
        offsets = sorted({*self.sent, *self.last, *self.early})
        chunks = [offsets[i : i + CHUNK_MESSAGES] for i in range(0, len(offsets), CHUNK_MESSAGES)] or [[]]
        return [self._dump(chunk) for chunk in chunks]

    def _dump(self, offsets: list[int]) -> bytes:
        numbers: dict[Event, int] = {}
        events: list[Any] = []
        messages: list[Any] = []
        for offset in offsets:
            event = self.last.get(offset)
            new = []
            for one in self._chain(event):
                if one in numbers:
                    break
                new.append(one)
            for one in reversed(new):
                before = -1 if one.before is None else numbers[one.before]
                numbers[one] = len(events)
                events.append((before, one.kind, one.at, one.at_ms, one.epoch, one.delivery, one.receiver, one.span_ms))
            envelope = self.sent.get(offset)
            number = -1 if event is None else numbers[event]
            messages.append((offset, number, None if envelope is None else envelope[1:], self.early.get(offset)))
        used = {event.epoch for event in numbers} | {max(self.owners, default=-1)}
        owners = {epoch: worker for epoch, worker in self.owners.items() if epoch in used}
        return msgspec.msgpack.encode(_Dump(VERSION, owners, self.purges, events, messages))

    @classmethod
    def load(cls, values: Iterable[bytes], *, queue_id: str | None = None) -> Histories:
        """The inverse of :meth:`dump`. Raises :exc:`RowError` for a damaged value or one of another version."""
        self = cls(queue_id=queue_id)
        for value in values:
            try:
                dump = _dumps.decode(value)
            except msgspec.MsgspecError as exc:
                raise RowError(f"damaged histories of {len(value)} bytes: {exc}") from None
            if dump.v != VERSION:
                raise RowError(f"histories of version {dump.v}; this program reads version {VERSION}")
            self.owners.update(dump.owners)
            self.purges.update(dump.purges)
            events: list[Event] = []
            for before, *rest in dump.events:
                events.append(Event(events[before] if before >= 0 else None, *rest))  # type: ignore[arg-type]
            for offset, number, envelope, early in dump.messages:
                if number >= 0:
                    self.last[offset] = events[number]
                if envelope is not None:
                    timestamp, key, body, headers, size = envelope
                    self.sent[offset] = Envelope(offset, timestamp, key, body, headers, size)
                if early is not None:
                    self.early[offset] = early
        return self


def _is_malformed(envelope: Envelope) -> bool:
    for name, value in envelope.headers:
        if BAD_NAME in name:
            return True
        if name in (H_DELAY, H_TTL):
            amount = milliseconds(value)
            if amount is None or amount > SPAN_MAX_MS:
                return True
    return False


def visible_ms(envelope: Envelope) -> int:
    """When a message could be delivered for the first time: when it was sent, or its delay header is over."""
    visible = envelope.timestamp
    for name, value in envelope.headers:
        if name == H_DELAY:
            visible = envelope.timestamp + (milliseconds(value) or 0)  # the last one counts
    return visible


class _Dump(msgspec.Struct, array_like=True):
    v: int
    owners: dict[int, str]
    purges: dict[str, list[Ahead]]
    events: list[tuple[int, str, int, int, int, int, str, int]]
    messages: list[
        tuple[
            int,
            int,
            tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]], int] | None,
            Early | None,
        ]
    ]


_dumps = msgspec.msgpack.Decoder(_Dump)
