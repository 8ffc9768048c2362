"""Copies of messages under another queue's name: dead letters, messages that are moved on demand, and poison.

The copy is appended before the message is ended, to the same partition, or to that of its group in a FIFO queue. A
header names the original. A crash in between causes a second copy at most, which the partition recognises by that
header and purges.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordTooLargeError
from mode.utils.logging import CompositeLogger

from app.engine import fitting
from app.engine.catalog import Catalog
from app.engine.owned_partition import OwnedPartition
from app.kafka.topics import Topics
from app.settings import Settings
from app.streaming.faust_app import MarqApp
from marq.core import markers as m
from marq.core.dedup import origin_seal
from marq.core.partition import Unreadable
from marq.core.placing import fifo_partition
from marq.core.ranges import ranges_of
from marq.core.reading import is_too_large
from marq.core.rows import Record
from marq.core.state import group_name, stored_size
from marq.errors import LeaseOverError, MarqError, NotPossibleError, UnavailableError
from marq.protocol.headers import (
    H_DEAD_AT_MS,
    H_DEAD_QUEUE,
    H_DEAD_REASON,
    H_DEAD_RECEIVES,
    H_DEAD_SENT_MS,
    H_DEDUP,
    H_DEDUP_WAS,
    H_DELAY,
    H_ORIGIN,
    H_ORIGIN_SEAL,
    H_POISON,
    H_POISON_CUT,
    H_TTL,
)
from marq.protocol.limits import RECORD_MAX_BYTES

if TYPE_CHECKING:
    from marq.core.agenda import Handout


#: Seconds to wait for the fold of an end, and between two checks.
FOLD_TIMEOUT_S = 3.0
FOLD_CHECK_S = 0.01
#: Seconds to wait for the fold of the start under which messages are moved.
START_TIMEOUT_S = 15.0
#: Milliseconds of the lease under which the owner moves messages. If it ends too early, a second copy is made.
MOVE_LEASE_MS = 15_000
#: The name of the receiver under which the owner moves messages.
MOVER = "move"

#: Bytes of a reason in a copy at most.
REASON_MAX_BYTES = 1024
#: Bytes of a copy in the poison topic at most, without the headers that the copy adds.
POISON_ROOM_BYTES = RECORD_MAX_BYTES - 8 * 1024
#: Bytes of the smallest copy in the poison topic. Each time Kafka finds a copy too large, it is cut to a quarter.
POISON_ROOM_MIN_BYTES = 1024
#: Seconds before a failed copy is tried again, doubled each time up to the second value.
COPY_AGAIN_S, COPY_AGAIN_MAX_S = 0.1, 5.0
#: Seconds during which the poison topic takes nothing, while Kafka takes markers, before poison ends without a copy.
COPY_GIVE_UP_S = 60.0

#: Headers that belong to the stay of a message in one queue. A copy does not get them.
_OF_THE_STAY = {
    H_DELAY,
    H_TTL,
    H_ORIGIN,
    H_ORIGIN_SEAL,
    H_DEAD_QUEUE,
    H_DEAD_REASON,
    H_DEAD_RECEIVES,
    H_DEAD_SENT_MS,
    H_DEAD_AT_MS,
}

#: Headers that a copy in the poison topic adds.
_OF_POISON = {H_POISON, H_POISON_CUT, H_ORIGIN, H_ORIGIN_SEAL}

#: The reason of poison for a message whose dead letter Kafka refuses.
TOO_LARGE = "no dead letter can be made of it: it is too large"

#: A copy on its way, or why there is none.
Copy = tuple[int, "asyncio.Future[Any]"]
#: Where a copy is: partition and offset.
Place = tuple[int, int]
#: Where a copy is to be: topic, partition, key, headers.
Target = tuple[str, int, bytes | None, list[tuple[str, bytes]]]


def _own(record: Any) -> list[tuple[str, bytes]]:
    """The headers of a message that its copy gets."""
    # of several ids the last one counts: the others would make the copy larger than its original
    last = max((i for i, header in enumerate(record.headers) if header[0] == H_DEDUP), default=-1)
    return [
        (H_DEDUP_WAS if name == H_DEDUP else name, value)
        for i, (name, value) in enumerate(record.headers)
        if name not in _OF_THE_STAY and (name != H_DEDUP or i == last)
    ]


def _reason(text: str) -> bytes:
    """A reason as the value of a header, cut to whole characters."""
    return text.encode()[:REASON_MAX_BYTES].decode(errors="ignore").encode()


def _hopeless(failed: dict[int, Exception]) -> list[int]:
    """The offsets of copies that are too large for Kafka."""
    return [o for o, exc in failed.items() if isinstance(exc, MessageSizeTooLargeError | RecordTooLargeError)]


def _places(held: OwnedPartition, offsets: list[int]) -> str:
    """Offsets as they are logged: `3:10-19, 3:25`."""
    pairs = ranges_of(sorted(offsets))
    ranges = zip(pairs[::2], pairs[1::2], strict=True)
    shown = [f"{held.number}:{a}" + (f"-{b - 1}" if b > a + 1 else "") for a, b in ranges]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more ranges" if len(shown) > 20 else "")


class Rejected(msgspec.Struct):
    """Offsets of messages that a receiver rejected. Those in neither list do not belong to the receiver any more."""

    done: list[int]  # dead letters now
    unsure: list[int]  # Kafka did not confirm it


class _Mover:
    """The receiver of messages that are about to be moved."""

    def __init__(self) -> None:
        self.begun: asyncio.Future[Handout] = asyncio.get_running_loop().create_future()

    def handed(self, held: OwnedPartition, handout: Handout) -> None:
        if not self.begun.done():
            self.begun.set_result(handout)


class Partitions(Protocol):
    """What copies need of the ownership."""

    app: MarqApp
    settings: Settings
    catalog: Catalog
    held: dict[int, OwnedPartition]

    @property
    def topics(self) -> Topics:
        """The topics in use."""

    @property
    def log(self) -> CompositeLogger:
        """The log of the worker."""

    def drain(self, held: OwnedPartition) -> None:
        """Carry out what the owner has to say."""


class Copies:
    """Makes the copies and ends the messages."""

    def __init__(self, ownership: Partitions, now_ms: Callable[[], int]) -> None:
        self._ownership = ownership
        self._now_ms = now_ms
        #: Poison that was ended without a copy.
        self.uncopied = 0
        self._refused_ms: int | None = None  # since when the poison topic has taken nothing
        self._dying: dict[int, set[int]] = {}  # partition -> messages whose dead letter is being made, or was just now

    # ------------------------------------------------------------------ dead letters

    def begin(self, held: OwnedPartition, offsets: list[int]) -> None:
        """`dead_letter` is about to be called."""
        self._dying[held.number] = {*self._still_dying(held), *offsets}

    def forget(self, held: OwnedPartition) -> None:
        """A partition is not served any more."""
        self._dying.pop(held.number, None)

    def are_dying(self, held: OwnedPartition, queue: str) -> bool:
        """True if dead letters of a queue, or for it, are being made in a partition."""
        partition, settings_of = held.owner.partition, self._ownership.catalog.settings_of
        dying = self._dying[held.number] = self._still_dying(held)
        for offset in (*dying, *held.owner.starts.dying()):
            source = partition.queue_of(offset) if offset in partition.messages else None
            if source is not None and queue in (source, settings_of(source).dead_letters_of(source)):
                return True
        return False

    def _still_dying(self, held: OwnedPartition) -> set[int]:
        """Those whose end is not folded: nothing else says when a dead letter is done."""
        messages = held.owner.partition.messages
        return {offset for offset in self._dying.get(held.number, ()) if offset in messages}

    async def dead_letter(self, held: OwnedPartition, offsets: list[int]) -> None:
        """Copy messages that the owner holds to their dead-letter queues, then end them."""
        # the owner's own start, under which the copy is made, was counted too
        copies = self._copies(held, offsets, lambda record, offset: self._dead(held, record, offset, "max-receives", 1))
        copied, failed = await self._confirmed(held, copies)
        if not self._still(held):
            return
        self._dying.get(held.number, set()).difference_update(failed)
        held.owner.ended_as("dead", sorted(copied))
        # the others come up again when the owner's lease is over, but for those that no copy can be made of
        hopeless = _hopeless(failed)
        self._ownership.drain(held)
        if hopeless:
            await self.quarantine(held, [(o, TOO_LARGE) for o in hopeless])

    async def reject(self, held: OwnedPartition, offsets: list[int], receipt: tuple[int, int], reason: str) -> Rejected:
        """Make dead letters of messages that a receiver has, because it rejects them.

        Messages that have another delivery by now are left alone.
        """
        partition = held.owner.partition
        taken = partition.reserve_current(offsets, *receipt)
        if not taken:
            return Rejected([], [])
        copies = self._copies(held, taken, lambda record, offset: self._dead(held, record, offset, reason, 0))
        copied, failed = await self._confirmed(held, copies)
        if not self._still(held):
            return Rejected([], taken)
        hopeless = _hopeless(failed)
        partition.put_back(failed.keys() - set(hopeless))
        if hopeless:
            await self.quarantine(held, [(o, TOO_LARGE) for o in hopeless])
        done = await self._end(held, "dead", list(copied)) | set(hopeless)
        unsure = sorted(set(taken) - done)
        partition.put_back(set(unsure) & copied.keys())
        return Rejected(sorted(done), unsure)

    # ------------------------------------------------------------------ moves

    async def move(
        self,
        held: OwnedPartition,
        queue: str,
        offsets: Sequence[int] | None,
        limit: int,
        to: str | None,
        make: bool = True,
    ) -> dict[int, Place | MarqError]:
        """Put ready messages of `queue` into another queue, each once.

        Args:
            offsets: which messages; None: up to `limit` messages in their order.
            to: the other queue; None: the queue of which each message is a dead letter.
            make: make the queue if it does not exist and sending makes queues.

        Returns:
            By offset: the place of the copy, or why there is none.
        """
        if held.owner.stalled:
            raise self._stalled(held)
        if not make:
            await self._ownership.catalog.catch_up()  # another worker may have deleted the queue a moment ago
        mover = _Mover()
        pending = held.owner.acquire_to_end(
            queue, offsets, limit, mover, self._now_ms(), lease_ms=MOVE_LEASE_MS, name=MOVER
        )
        moved: dict[int, Place | MarqError] = {}
        if pending is not None:
            self._ownership.drain(held)
            try:
                handout = await asyncio.wait_for(mover.begun, START_TIMEOUT_S)
            except TimeoutError:
                pending.cancel()
                raise UnavailableError("Kafka did not confirm in time that it is to be moved; try again") from None
            if held.owner.stalled:
                raise self._stalled(held)
            moved = await self._move(held, queue, handout, to, make)
        for offset in offsets or ():
            if offset not in moved:
                moved[offset] = LeaseOverError(
                    f"{held.number}:{offset} is not ready in {queue!r}: finished, or in work"
                )
        return moved

    def _stalled(self, held: OwnedPartition) -> UnavailableError:
        return UnavailableError(f"Kafka takes nothing in partition {held.number} at present; try again later", 2.0)

    async def _move(
        self, held: OwnedPartition, queue: str, handout: Handout, to: str | None, make: bool
    ) -> dict[int, Place | MarqError]:
        catalog, partition = self._ownership.catalog, held.owner.partition
        targets: dict[int, str] = {}
        moved: dict[int, Place | MarqError] = {}
        for offset in handout.offsets:
            try:
                target = to or self._origin_queue(partition.record(offset))
                if target == queue:
                    raise NotPossibleError(f"{held.number}:{offset} is in {queue!r} already")
                if make:
                    await catalog.require_or_make(target)
                else:
                    catalog.require(target)
                targets[offset] = target
            except MarqError as exc:
                moved[offset] = exc
        # the copy of an earlier attempt, after which a worker died
        copies_made = {offset: partition.copy_of(offset) for offset in targets}
        places: dict[int, Place] = {o: (held.number, copy) for o, copy in copies_made.items() if copy is not None}
        copies = self._copies(
            held,
            [offset for offset in targets if offset not in places],
            lambda record, offset: self._to_queue(held, targets[offset], _own(record)),
        )
        copied, failed = await self._confirmed(held, copies)
        if not self._still(held):
            raise UnavailableError(f"partition {held.number} went to another worker; try again")
        places |= {offset: (result.partition, result.offset) for offset, result in copied.items()}
        moved |= {offset: UnavailableError(f"its copy was not confirmed: {exc!r}") for offset, exc in failed.items()}
        if moved:
            held.owner.release(sorted(moved), handout.receipt, counted=False)
            self._ownership.drain(held)
        ended = await self._end(held, "moved", list(places))
        for offset, place in places.items():
            moved[offset] = place if offset in ended else UnavailableError("its end was not confirmed; try again")
        return moved

    def _origin_queue(self, record: Any) -> str:
        for name, value in reversed(record.headers):
            if name == H_DEAD_QUEUE and value:
                return str(value.decode(errors="replace"))
        raise NotPossibleError("it is no dead letter: say to which queue it is to be moved")

    # ------------------------------------------------------------------ poison

    async def quarantine(self, held: OwnedPartition, poison: list[tuple[int, str]]) -> None:
        """Copy records that are no messages to the poison topic, with the reason, then end them.

        A copy that is too large is made smaller. A failed copy is tried again, for `COPY_GIVE_UP_S` at most. Then the
        record is ended without a copy, so that it does not hold up the partition for ever.
        """
        reasons, partition = dict(poison), held.owner.partition
        self._log_poison(held, reasons)
        room, pause_s = POISON_ROOM_BYTES, COPY_AGAIN_S
        while reasons:
            position = partition.markers_position
            copied, failed = await self._confirmed(held, self._copies(held, list(reasons), self._aside(reasons), room))
            if not self._still(held):
                return
            if copied or not failed:
                self._refused_ms = None
            held.owner.ended_as("poison", sorted(copied))
            self._ownership.drain(held)
            reasons = {offset: reasons[offset] for offset in failed}
            if failed and len(_hopeless(failed)) == len(failed) and room > POISON_ROOM_MIN_BYTES:
                room //= 4
                continue
            if not failed:
                return
            now_ms = self._now_ms()
            if self._refused_ms is None:
                self._refused_ms = now_ms
            # where Kafka does not take markers either, it is away, and will take the copy later
            if now_ms - self._refused_ms >= COPY_GIVE_UP_S * 1000 and partition.markers_position > position:
                self._end_uncopied(held, failed)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, COPY_AGAIN_MAX_S)
            if not self._still(held):
                return

    def _aside(self, reasons: dict[int, str]) -> Callable[[Any, int], Target]:
        def target(record: Any, offset: int) -> Target:
            headers = [header for header in record.headers if header[0] not in _OF_POISON]
            reason = (H_POISON, _reason(reasons[offset]))
            return self._ownership.topics.poison, 0, record.key, [*headers, reason]

        return target

    def _log_poison(self, held: OwnedPartition, reasons: dict[int, str]) -> None:
        """Log a line for each reason. Undecodable records were logged when they were read."""
        messages = held.owner.partition.messages
        offsets_of: dict[str, list[int]] = {}
        for offset, reason in reasons.items():
            if type(messages.get(offset)) is not Unreadable:
                offsets_of.setdefault(reason, []).append(offset)
        for reason, offsets in offsets_of.items():
            self._ownership.log.warning("Poison at %s: %s", _places(held, offsets), reason)

    def _end_uncopied(self, held: OwnedPartition, failed: dict[int, Exception]) -> None:
        offsets = sorted(failed)
        self.uncopied += len(offsets)
        self._ownership.log.error(
            "Poison at %s ends without a copy: %s has taken nothing for %.0f s (%r)",
            _places(held, offsets),
            self._ownership.topics.poison,
            COPY_GIVE_UP_S,
            failed[offsets[0]],
        )
        held.owner.ended_as("poison", offsets)
        self._ownership.drain(held)

    # ------------------------------------------------------------------ copies

    def _dead(self, held: OwnedPartition, record: Any, offset: int, reason: str, uncounted: int) -> Target:
        """Where the dead letter of a record goes, with its headers."""
        ownership, partition = self._ownership, held.owner.partition
        queue = partition.queue_of(offset)
        assert queue is not None
        headers = [
            *_own(record),
            (H_DEAD_QUEUE, queue.encode()),
            (H_DEAD_REASON, _reason(reason)),
            (H_DEAD_RECEIVES, str(partition.receives(offset) - uncounted).encode()),
            (H_DEAD_SENT_MS, str(record.timestamp).encode()),
            (H_DEAD_AT_MS, str(partition.last_timestamp_ms).encode()),
        ]
        if ownership.settings.queue_id is None:
            return self._to_queue(held, ownership.catalog.settings_of(queue).dead_letters_of(queue), headers)
        assert ownership.topics.dead_letter is not None
        return ownership.topics.dead_letter, 0, record.key, headers

    def _to_queue(self, held: OwnedPartition, queue: str, headers: list[tuple[str, bytes]]) -> Target:
        """Where a copy in a queue goes: to the same partition, or in a FIFO queue to the partition of its group."""
        topics, settings = self._ownership.topics, self._ownership.catalog.settings_of(queue)
        number, key = held.number, queue.encode()
        if settings.fifo:
            number = fifo_partition(key, group_name(headers) or b"", settings, topics.partitions)
        return topics.queue, number, key, headers

    def _copies(
        self, held: OwnedPartition, offsets: list[int], target: Callable[[Any, int], Target], room: int | None = None
    ) -> list[Copy]:
        """Append a copy of each message, to the `target` for its record and offset.

        `room` is the size in bytes to which a copy is cut; None: it is not cut, and may fail as too large.
        """
        partition, copies = held.owner.partition, []
        for offset in offsets:
            if offset not in partition.messages:
                continue
            try:
                record = partition.record(offset)
                topic, number, key, own = target(record, offset)
                headers: list[tuple[str, bytes | None]] = [*own]
                origin, value = f"{held.number}:{offset}", record.value
                if room is not None:
                    *theirs, reason = headers
                    key, value, headers, cut = fitting.fit(key, value, theirs, room)
                    headers += [reason, *([(H_POISON_CUT, cut)] if cut is not None else [])]
                headers.append((H_ORIGIN, origin.encode()))
                if partition.origin_keys:
                    headers.append((H_ORIGIN_SEAL, origin_seal(origin, partition.origin_keys[0])))
                if topic == self._ownership.topics.queue:
                    self._check_size(Record(0, 0, key, value, headers))
                future = self._ownership.app.producer.append(topic, number, value, key, headers)
            except (MarqError, KafkaError) as exc:  # a row that can't be read must not keep the others
                future = asyncio.get_running_loop().create_future()
                future.set_exception(exc)
            copies.append((offset, future))
        return copies

    @staticmethod
    def _check_size(copy: Record) -> None:
        """Raises `MessageSizeTooLargeError` if the added headers make a copy too large for a message."""
        if is_too_large(stored_size(copy), True):
            raise MessageSizeTooLargeError(f"a copy of {stored_size(copy)} bytes is no message")

    async def _confirmed(self, held: OwnedPartition, copies: list[Copy]) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Wait for the copies. Returns the metadata of those in the log, and the errors of the others."""
        done: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        for offset, future in copies:
            try:
                done[offset] = await future
            except (KafkaError, MarqError) as exc:
                failed[offset] = exc
                self._ownership.log.warning("Copy of %s:%s failed: %r", held.number, offset, exc)
        return done, failed

    async def _end(self, held: OwnedPartition, outcome: m.Outcome, offsets: list[int]) -> set[int]:
        """End the messages that were copied. Returns those whose end was folded in time."""
        if not offsets:
            return set()
        messages = held.owner.partition.messages
        try:
            await held.outbox.put_confirmed(list(m.split(m.End(held.owner.epoch, ranges_of(sorted(offsets)), outcome))))
        except MarqError:
            return set()
        # folded now, or when what other workers appended before it has been read
        for _ in itertools.takewhile(
            lambda _: any(o in messages for o in offsets), range(int(FOLD_TIMEOUT_S / FOLD_CHECK_S))
        ):
            await asyncio.sleep(FOLD_CHECK_S)
        return {offset for offset in offsets if offset not in messages}

    def _still(self, held: OwnedPartition) -> bool:
        """True if this worker still serves the partition."""
        return self._ownership.held.get(held.number) is held and held.serving
