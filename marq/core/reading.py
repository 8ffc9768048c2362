"""Reads the queue log: what a record means, in chunks without gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappush
from typing import Any, NamedTuple

from marq.core import state
from marq.core.backlog import group_number
from marq.core.dedup import digest_of, is_sealed, origin_digest
from marq.core.lanes import TIMERS_SLACK, Lanes
from marq.core.policies import DELAY_MAX_MS
from marq.core.state import MESSAGE_OVERHEAD_BYTES, block_of, queue_of_key, size_of, stored_size
from marq.errors import InternalError
from marq.protocol.headers import H_DEDUP, H_DELAY, H_GROUP, H_ORIGIN, H_ORIGIN_SEAL, H_POISON, H_TTL, RESERVED
from marq.protocol.limits import MESSAGE_MAX_BYTES

#: Bytes by which a copy (a dead letter, a moved message: it has an origin header) may be larger than other messages,
#: for the headers that it adds.
COPY_ROOM_BYTES = 16 * 1024

#: Bytes of payload below which a record needs no exact measurement, if its key is small, too.
PLAIN_MAX_BYTES = MESSAGE_MAX_BYTES - 1024

#: Bytes of key below which it is small.
PLAIN_KEY_BYTES = 1024

#: Readers put this character into the name of a header that is not UTF-8. Kafka's Java client can't tell such a name
#: from one that was sent with it, and all readers of the log have to decide alike.
BAD_NAME = "\ufffd"

#: Milliseconds of the longest delay, and time to live, that a header may name.
SPAN_MAX_MS = DELAY_MAX_MS

#: Begins the reason of poison that could not be decoded: the jobs of the pipeline recognise it by that.
UNDECODABLE = "can't be decoded"


class Undecodable(NamedTuple):
    """Stands for a record that could not be decoded. It is poison in the queue log, and no marker in the markers log.

    ``value`` has the undecodable bytes if they begin at this offset. ``timestamp`` is that of the batch if it can be
    read, else the last one before it, or -1.
    """

    offset: int
    timestamp: int
    value: bytes | None
    reason: str
    key: None = None
    headers: tuple[tuple[str, bytes], ...] = ((H_POISON, b""),)  # not empty: no record of the plain kind


class Unreadable(NamedTuple):
    """Stands for the records in ``[offset, stop)``, which no replica has whole at present: see :attr:`State.missed`.

    ``value`` has the bytes of their batch as they were read, if there are any. They are no payload.
    """

    offset: int
    timestamp: int
    stop: int
    reason: str
    value: bytes | None = None
    key: None = None
    headers: tuple[tuple[str, bytes], ...] = ((H_POISON, b""),)  # not empty: no record of the plain kind


class Facts(NamedTuple):
    """What key and headers of a record say. ``ttl_ms`` 0: the message is kept until it is done."""

    queue: str
    delay_ms: int | None = None
    ttl_ms: int = 0
    group: int = 0
    dedup: bytes | None = None
    origin: str | None = None


class Reading(Lanes):
    """Takes up the queue log."""

    def start_at(self, position: int, markers_position: int) -> None:
        """Begin a partition without a manifest at the first offsets of its logs."""
        if self.messages or self.position:
            raise InternalError(f"partition {self.number} begins at {position}, and has been read to {self.position}")
        self.position = self.persisted = position
        self.markers_position = markers_position

    def ingest(self, start: int, stop: int, records: Sequence[Any]) -> bool:
        """Take up a chunk of the queue topic: ``records`` and the fetch positions before and after it.

        Returns False, and changes nothing, if the chunk begins beyond what has been read: seek back. Offsets in
        ``[start, stop)`` without a record are done. What is :class:`Unreadable` is passed, and stays unfinished.
        """
        position = self.position
        if start > position:
            return False
        if stop <= position:
            return True
        messages, size, expected = self.messages, 0, position
        plain = not self.ahead and self._highest_delivered < position and not self.purges
        last_key: Any = self  # equal to no key
        push, counts, run = None, None, 0
        for record in records:
            offset = record.offset
            if offset < position:
                if type(record) is Unreadable and record.stop > position:
                    expected = self._miss(position, record.stop)
                continue
            if offset != expected:
                self._absent(expected, offset)
            expected = offset + 1
            value = record.value
            payload_bytes = len(value) if value is not None else 0
            if not plain or record.headers or payload_bytes > PLAIN_MAX_BYTES:
                if type(record) is Unreadable:
                    expected = self._miss(offset, record.stop)
                else:
                    self._take_up(record)
                continue
            if record.key != last_key:
                if counts is not None:
                    counts.total += run
                    counts, run = None, 0
                last_key = record.key
                backlog = self._backlog_of(record)
                if backlog is None or (last_key is not None and len(last_key) > PLAIN_KEY_BYTES):
                    self._take_up(record)
                    last_key = self
                    continue
                counts = self.counted(backlog.name)
                push = backlog.fresh.append
                self.woken[backlog.name] = None
                self.named[backlog.name] = offset
            messages[offset] = record
            push(offset)  # type: ignore[misc]
            run += 1
            size += payload_bytes + MESSAGE_OVERHEAD_BYTES
        if counts is not None:
            counts.total += run
        if expected < stop:
            self._absent(expected, stop)
        if records:
            self.queue_timestamp_ms = records[-1].timestamp
            self.newest_ms = max(self.newest_ms, max([record.timestamp for record in records]))
            for ids in (self.recent, self.origins):
                ids.pass_time(records[-1].offset, self.queue_timestamp_ms)
        self.bytes += size
        if self.unread.stop > position:
            self._take_from_unread(position, stop, records)
        self._listed += stop - position
        self.position = stop
        if self.ahead:
            self.ahead.discard(0, stop)
        self._keep_purges()
        if self._held_up and not self._is_one_ahead():
            self._deliver_again()
        if self._listed > self._listed_max:
            self._clean()
        if len(self.named) > state.NAMED_MAX:
            self.named.clear()  # what is unfinished still names its queue
        return True

    def count_unread(self, start: int, stop: int, records: Sequence[Any]) -> bool:
        """Count a chunk of the queue log beyond the position; keep no payload. See :mod:`~marq.core.unread`.

        Returns False, and counts nothing, if the chunk begins beyond what was counted: read from `unread.stop` on.
        """
        unread = self.unread
        if unread.stop < self.position:
            unread.begin(self.position)
        first = unread.stop
        if start > first:
            return False
        plain = not self.ahead and not self.purges and self._highest_delivered < first
        last_key: Any = self  # equal to no key
        queue, stamp_ms, begin, run = "", 0, 0, 0  # messages of one queue come in runs
        for record in records:
            offset = record.offset
            if offset < first:
                continue
            value = record.value
            if not plain or record.headers or (value is not None and len(value) > PLAIN_MAX_BYTES):
                self._count_one(record)
                continue
            if record.key != last_key or record.timestamp != stamp_ms:
                if run:
                    unread.add(queue, begin, stamp_ms, run)
                name = self._name_of(record.key)
                if name is None or (record.key is not None and len(record.key) > PLAIN_KEY_BYTES):
                    self._count_one(record)
                    last_key, run = self, 0
                    continue
                last_key, queue, stamp_ms, begin, run = record.key, name, record.timestamp, offset, 0
            run += 1
        if run:
            unread.add(queue, begin, stamp_ms, run)
        unread.stop = max(stop, first)
        return True

    def _count_one(self, record: Any) -> None:
        """Count an unread record that may have anything special, as :meth:`_take_up` will see it."""
        if type(record) is Unreadable:
            return  # nobody knows what it is
        offset, unread, stamp_ms = record.offset, self.unread, record.timestamp
        facts = self._facts_of(record, None if type(record) is Undecodable else self._name_of(record.key))
        if type(facts) is not Facts:
            if offset not in self.ahead:
                unread.add("", offset, stamp_ms)
            return
        duplicate = False
        if facts.dedup is not None:
            digest = digest_of(facts.queue, facts.dedup)
            duplicate = self.recent.knows(digest, stamp_ms) or unread.ids.is_duplicate(digest, offset, stamp_ms)
        if facts.origin is not None:
            digest = origin_digest(facts.origin)
            duplicate |= self.origins.knows(digest, stamp_ms) or unread.origins.is_duplicate(digest, offset, stamp_ms)
        if duplicate or offset in self.ahead or offset < self.purges.get(facts.queue, 0):
            return
        one = unread.add(facts.queue, offset, stamp_ms)
        if one is None:
            return
        if offset in self.deliveries:
            unread.delivered[offset] = facts.queue
        elif facts.delay_ms:
            one.delay_until(stamp_ms + facts.delay_ms)
        if facts.ttl_ms:
            one.expires_ms = min(one.expires_ms, stamp_ms + facts.ttl_ms)

    def _take_from_unread(self, position: int, stop: int, records: Sequence[Any]) -> None:
        """These were counted as unread, and are read now."""
        unread = self.unread
        if stop >= unread.stop:
            unread.begin(stop)
            return
        records = [record for record in records if type(record) is not Unreadable]
        special = self.ahead or self.purges or self.poison or self.duplicates or self.delays or self.elapsed
        if not (special or unread.delivered):
            for key, number in Counter(record.key for record in records if record.offset >= position).items():
                unread.take(self._name_of(key) or "", number)
            return
        for record in records:
            offset = record.offset
            if offset < position or offset in self.ahead or offset in self.duplicates:
                continue
            queue = "" if offset in self.poison else self._name_of(record.key) or ""
            if offset >= self.purges.get(queue, 0):
                unread.delivered.pop(offset, None)
                unread.take(queue, 1, self.delays.get(offset, self.elapsed.get(offset)))

    def _name_of(self, key: bytes | None) -> str | None:
        return self.queue_id if self.queue_id is not None else queue_of_key(key)

    def read_again(self, start: int, stop: int, records: Sequence[Any]) -> None:
        """Take up what was read of ``[start, stop)``, of which a part was unreadable when reading passed it.

        Its records take their places as if they had been read in time, but for two things: later messages of their
        queues may have been delivered before them, and their ids count only against those of others.
        """
        expected = start
        for record in records:
            if type(record) is Unreadable:
                self._absent_again(expected, record.offset)
                expected = max(expected, record.stop)
                continue
            offset = record.offset
            if not start <= offset < stop:
                continue
            self._absent_again(expected, offset)
            expected = offset + 1
            self.newest_ms = max(self.newest_ms, record.timestamp)
            if offset in self.missed and offset not in self.messages:
                self._take_up(record, late=True)
        self._absent_again(expected, stop)
        self._keep_purges()
        if self._held_up and not self._is_one_ahead():
            self._deliver_again()

    def _miss(self, start: int, stop: int) -> int:
        """What lies in ``[start, stop)`` can't be read: it stays unfinished, except what is done by its markers."""
        done = self.ahead.within(start, stop)
        self.missed.add(start, stop)
        for first, behind in zip(done[::2], done[1::2], strict=True):
            self.missed.discard(first, behind)
            self._ended_unread()
        return stop

    def _absent_again(self, start: int, stop: int) -> None:
        """Of what was unreadable, the log has no records in ``[start, stop)``."""
        missing = self.missed.within(start, stop)
        for first, behind in zip(missing[::2], missing[1::2], strict=True):
            for offset in range(first, behind):
                if offset not in self.messages:
                    self.missed.discard(offset, offset + 1)
                    if self.deliveries.pop(offset, None) is not None:
                        self._dirty.add(block_of(offset))

    def _keep_purges(self) -> None:
        """Keep those purges that may concern unread messages."""
        if self.purges:
            unread = self.missed.first() if self.missed else self.position
            self.purges = {queue: before for queue, before in self.purges.items() if before > unread}

    def _take_up(self, record: Any, late: bool = False) -> None:
        """Take up one record that may have anything special: headers, a size near the limit, an earlier end.

        ``late``: later records were read before it.
        """
        offset = record.offset
        facts = self._facts_or_poison(record)
        duplicate = type(facts) is Facts and self._is_duplicate(facts, record, late)
        if offset in self.ahead:
            return
        if type(facts) is Facts:
            if offset < self.purges.get(facts.queue, 0):
                if self.deliveries.pop(offset, None) is not None:
                    self._dirty.add(block_of(offset))
                self.missed.discard(offset, offset + 1)
                return
            if duplicate:
                self.duplicates.add(offset)
        self._describe(record, facts)
        self.messages[offset] = record
        self.bytes += size_of(record)
        if not duplicate:
            self._count_in(offset)
        if type(facts) is not Facts or duplicate:
            return
        self.named[facts.queue] = offset
        backlog = self._backlog(facts.queue)
        delivered = self.deliveries.get(offset)
        if delivered is not None:
            if delivered.is_over(self.clock_ms):
                self._push(offset, delivered.receives)
            elif self._fifo or self._apart is not None:
                self._note_out(backlog.name, offset)  # its group must not go on before it
            return
        if late:
            if backlog.fifo:
                self._push_in_order(backlog, offset)
            elif offset not in self.delays:
                self._push(offset, 0)
            return
        if offset in self.delays:
            if not (facts.group or backlog.fifo):
                return
        else:
            self.woken[facts.queue] = None
        if not facts.group:
            backlog.fresh.append(offset)
            return
        lane = self._lane(backlog, facts.group)
        lane.add(offset)
        if lane.blocker < 0:
            backlog.queue_up(lane)

    def _facts_or_poison(self, record: Any) -> Facts | str:
        """What marq reads in a record; or, as a text, why the record is poison. Depends on nothing but the record."""
        backlog = None if type(record) is Undecodable else self._backlog_of(record)
        return self._facts_of(record, None if backlog is None else backlog.name)

    def _facts_of(self, record: Any, queue: str | None) -> Facts | str:
        """The same, of a record whose key names this queue."""
        if type(record) is Undecodable:
            return record.reason
        if queue is None:
            return "no queue: the key is " + ("null" if record.key is None else "no queue id")
        size = stored_size(record)
        if size > MESSAGE_MAX_BYTES and is_too_large(size, any(name == H_ORIGIN for name, _ in record.headers)):
            return f"larger than {MESSAGE_MAX_BYTES} bytes"
        delay_ms, ttl_ms, group, dedup, origin, seal = None, 0, 0, None, None, None
        for name, value in record.headers:
            if not name.isascii() and BAD_NAME in name:
                return "the name of a header is not UTF-8"
            if not name.startswith(RESERVED):
                continue
            if name == H_GROUP:
                group = group_number(value)
            elif name in (H_DELAY, H_TTL):
                amount = milliseconds(value)
                if amount is None:
                    return f"header {name} is not a number of milliseconds"
                if amount > SPAN_MAX_MS:
                    return f"header {name} is more than {SPAN_MAX_MS} milliseconds"
                if name == H_DELAY:
                    delay_ms = amount
                else:
                    ttl_ms = amount
            elif name == H_DEDUP:
                dedup = value
            elif name == H_ORIGIN and self.queue_id is None:
                origin = _origin(value)
            elif name == H_ORIGIN_SEAL:
                seal = value
        if origin is not None and self.origin_keys and not is_sealed(origin, seal, self.origin_keys):
            origin = None  # somebody else's word, which counts for nothing
        return Facts(queue, delay_ms, ttl_ms, group, dedup, origin)

    def _describe(self, record: Any, facts: Facts | str) -> tuple[str | None, int]:
        """Note when ``record`` is due and how long it is kept. Returns its queue (None if it is poison) and group."""
        offset = record.offset
        if type(facts) is not Facts:
            self.poison[offset] = str(facts)
            return None, 0
        if offset in self.duplicates:
            return facts.queue, facts.group  # it is only waited for that its owner ends it
        if facts.delay_ms and offset not in self.deliveries:
            self._delay_until(offset, record.timestamp + facts.delay_ms)
        if facts.ttl_ms:
            self._expire_at(offset, record.timestamp + facts.ttl_ms)
        return facts.queue, facts.group

    def _delay_until(self, offset: int, due_ms: int) -> None:
        if due_ms <= self.broker_ms:
            self.elapsed[offset] = due_ms
            return
        self.delays[offset] = due_ms
        heappush(self._delayed, (due_ms, offset))
        if len(self._delayed) > 2 * len(self.delays) + TIMERS_SLACK:
            self._delayed = [(due, o) for o, due in self.delays.items()]
            heapify(self._delayed)

    def _is_duplicate(self, facts: Facts, record: Any, late: bool = False) -> bool:
        """True if it was sent before, or is a second copy. Call it once for each record, in order unless ``late``."""
        offset: int = record.offset
        duplicate = False
        if late:
            # one that was read in its turn counts, though it was sent later; both would be delivered otherwise
            if facts.dedup is not None:
                duplicate = self.recent.is_near(digest_of(facts.queue, facts.dedup), record.timestamp)
            if facts.origin is not None:
                duplicate |= self.origins.is_near(origin_digest(facts.origin), record.timestamp)
            return duplicate
        if facts.dedup is not None:
            duplicate = self.recent.is_duplicate(digest_of(facts.queue, facts.dedup), offset, record.timestamp)
        if facts.origin is not None:
            duplicate |= self.origins.is_duplicate(origin_digest(facts.origin), offset, record.timestamp)
        return duplicate

    def _expire_at(self, offset: int, expires_ms: int) -> None:
        self.ttls[offset] = expires_ms
        heappush(self._expiring, (expires_ms, offset))
        if len(self._expiring) > 2 * len(self.ttls) + TIMERS_SLACK:
            self._expiring = [entry for entry in self._expiring if entry[1] in self.ttls]
            heapify(self._expiring)

    def _absent(self, start: int, stop: int) -> None:
        """The log has no records in ``[start, stop)``: they are done."""
        if self._highest_delivered >= start:
            deliveries = self.deliveries
            within: Iterable[int] = range(start, stop) if stop - start < len(deliveries) else list(deliveries)
            for offset in within:
                if start <= offset < stop and deliveries.pop(offset, None) is not None:
                    self._dirty.add(block_of(offset))


def is_too_large(size: int, copied: bool) -> bool:
    """True if a record of this `stored_size` is too large for a message. ``copied``: it has an origin header."""
    return size > MESSAGE_MAX_BYTES + (COPY_ROOM_BYTES if copied else 0)


def _number(digits: bytes) -> int | None:
    """A number that Spark and others read alike: decimal digits without sign, spaces or underscores, below 10**15."""
    return int(digits) if digits.isdigit() and len(digits) <= 15 else None


def milliseconds(value: bytes | None) -> int | None:
    """The number in a header of a delay or a time to live; None if it is none."""
    return None if value is None else _number(value)


def _origin(value: bytes | None) -> str | None:
    """What an origin header ``b"<partition>:<offset>"`` names, as text; None if it names nothing."""
    if value is None:
        return None
    left, _, right = value.partition(b":")
    number, offset = _number(left), _number(right)
    if number is None or offset is None:
        return None
    return f"{number}:{offset}"
