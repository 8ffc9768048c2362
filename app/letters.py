"""Copies of messages under another queue's name: dead letters, messages that are moved on demand, and poison.

A copy goes to the same partition, or to that of its group in a FIFO queue, with a header that says of what it is the
copy, before the message is ended: a crash in between makes a second copy at most, which the partition recognises by
that header and purges.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordTooLargeError

from marq.core import markers as m
from marq.core.partition import H_DEDUP, H_DELAY, H_ORIGIN, H_TTL, MESSAGE_MAX_BYTES
from marq.core.placing import fifo_partition
from marq.core.ranges import ranges_of
from marq.core.state import group_name
from marq.errors import LeaseOverError, MarqError, NotPossibleError, UnavailableError

if TYPE_CHECKING:
    from app.ownership import Held, Ownership
    from marq.core.owner import Handout

H_FROM = "marq-dead-queue"
H_WHY = "marq-dead-reason"
H_RECEIVES = "marq-dead-receives"
H_FIRST = "marq-dead-sent-ms"
H_LAST = "marq-dead-at-ms"
H_POISON = "marq-poison-reason"

#: Seconds until what was ended has to be folded, and how often that is looked at.
FOLD_TIMEOUT_S = 3.0
FOLD_CHECK_S = 0.01
#: Seconds until the start of what is moved has to be folded.
START_TIMEOUT_S = 15.0
#: Lease under which the owner holds what it moves. Were it over too early, a second copy would be made, and purged.
MOVE_LEASE_MS = 15_000
#: Receiver in whose name the owner holds what it moves.
MOVER = "move"
#: Header of a copy: the deduplication id that its original had, which the copy must not be recognised by.
H_DEDUP_WAS = "marq-dedup-was"

#: Headers that describe one stay in one queue: a copy begins anew.
_OF_THE_STAY = {H_DELAY, H_TTL, H_ORIGIN, H_FROM, H_WHY, H_RECEIVES, H_FIRST, H_LAST}

#: A copy on its way, or why there is none.
Copy = tuple[int, "asyncio.Future[Any]"]
#: Where a copy is: partition and offset.
Place = tuple[int, int]
#: Where a copy is to be: topic, partition, key, headers.
Target = tuple[str, int, bytes | None, list[tuple[str, bytes]]]


def _own(record: Any) -> list[tuple[str, bytes]]:
    """The headers of a message that it has wherever it is."""
    return [
        (H_DEDUP_WAS if name == H_DEDUP else name, value) for name, value in record.headers if name not in _OF_THE_STAY
    ]


class _Mover:
    """The receiver of what is about to be moved."""

    def __init__(self) -> None:
        self.begun: asyncio.Future[Handout] = asyncio.get_running_loop().create_future()

    def handed(self, held: Held, handout: Handout) -> None:
        if not self.begun.done():
            self.begun.set_result(handout)


class Letters:
    """Makes the copies and ends the messages."""

    def __init__(self, ownership: Ownership, now_ms: Callable[[], int]) -> None:
        self._ownership = ownership
        self._now_ms = now_ms

    # ------------------------------------------------------------------ dead letters

    async def bury(self, held: Held, offsets: list[int]) -> None:
        """Copy messages that the owner holds to their dead-letter queues, then end them."""
        # the owner's own start, under which the copy is made, was counted too
        copies = self._copies(held, offsets, lambda record, offset: self._dead(held, record, offset, "max-receives", 1))
        copied, failed = await self._confirmed(held, copies)
        if not self._still(held):
            return
        held.owner.ended_as("dead", sorted(copied))
        # the others come up again when the owner's lease is over, but for those that no copy can be made of
        hopeless = [o for o, e in failed.items() if isinstance(e, MessageSizeTooLargeError | RecordTooLargeError)]
        self._ownership.drain(held)
        if hopeless:
            await self.set_aside(held, [(o, "no dead letter can be made of it: it is too large") for o in hopeless])

    async def reject(self, held: Held, offsets: list[int], receipt: tuple[int, int], reason: str) -> set[int]:
        """Make dead letters of messages that a receiver holds, because it says so; which of them are finished by it.

        Those whose delivery is not the current one any more are left alone.
        """
        partition = held.owner.partition
        taken = []
        for offset in offsets:
            hold = partition.holds.get(offset)
            if (
                hold is not None
                and hold.leased
                and (hold.epoch, hold.delivery) == receipt
                and offset in partition.messages
                and offset not in partition.reserved
            ):
                taken.append(offset)
        if not taken:
            return set()
        partition.reserved.update(taken)  # a lease that ends meanwhile must not begin another delivery
        copies = self._copies(held, taken, lambda record, offset: self._dead(held, record, offset, reason, 0))
        copied, failed = await self._confirmed(held, copies)
        if not self._still(held):
            return set()
        partition.put_back(failed)
        return await self._end(held, "dead", list(copied))

    # ------------------------------------------------------------------ moves

    async def move(
        self, held: Held, queue: str, offsets: Sequence[int] | None, limit: int, to: str | None
    ) -> dict[int, Place | MarqError]:
        """Put messages that are ready in `queue` into another queue, each once; by offset where it is now, or why not.

        Args:
            offsets: which ones; None: up to `limit` of them, in their order.
            to: the queue; None: that of which each is a dead letter.
        """
        mover = _Mover()
        pending = held.owner.hold(queue, offsets, limit, mover, self._now_ms(), lease_ms=MOVE_LEASE_MS, name=MOVER)
        moved: dict[int, Place | MarqError] = {}
        if pending is not None:
            self._ownership.drain(held)
            try:
                handout = await asyncio.wait_for(mover.begun, START_TIMEOUT_S)
            except TimeoutError:
                pending.gone = True
                raise UnavailableError("Kafka did not confirm in time that it is to be moved; try again") from None
            moved = await self._move(held, queue, handout, to)
        for offset in offsets or ():
            if offset not in moved:
                moved[offset] = LeaseOverError(
                    f"{held.number}:{offset} is not ready in {queue!r}: finished, or in work"
                )
        return moved

    async def _move(self, held: Held, queue: str, handout: Handout, to: str | None) -> dict[int, Place | MarqError]:
        catalog, partition = self._ownership.catalog, held.owner.partition
        targets: dict[int, str] = {}
        moved: dict[int, Place | MarqError] = {}
        for offset in handout.offsets:
            try:
                target = to or self._origin_queue(partition.record(offset))
                if target == queue:
                    raise NotPossibleError(f"{held.number}:{offset} is in {queue!r} already")
                await catalog.require_or_make(target)
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
            if name == H_FROM and value:
                return str(value.decode(errors="replace"))
        raise NotPossibleError("it is no dead letter: say to which queue it is to be moved")

    # ------------------------------------------------------------------ poison

    async def set_aside(self, held: Held, poison: list[tuple[int, str]]) -> None:
        """Copy records that are no messages to the poison topic, with the reason, then end them."""
        ownership, reasons = self._ownership, dict(poison)

        def target(record: Any, offset: int) -> Target:
            ownership.log.warning("Record %s:%s is poison: %s", held.number, offset, reasons[offset])
            return ownership.topics.poison, 0, record.key, [*record.headers, (H_POISON, reasons[offset].encode())]

        copied, failed = await self._confirmed(held, self._copies(held, list(reasons), target))
        if self._still(held):
            held.owner.ended_as("poison", sorted(copied))
            held.owner.partition.put_back(failed)
            ownership.drain(held)

    # ------------------------------------------------------------------ copies

    def _dead(self, held: Held, record: Any, offset: int, reason: str, uncounted: int) -> Target:
        """Where the dead letter of a record goes, and what it says of it."""
        ownership, partition = self._ownership, held.owner.partition
        queue = partition.queue_of(offset)
        assert queue is not None
        headers = [
            *_own(record),
            (H_FROM, queue.encode()),
            (H_WHY, reason.encode()),
            (H_RECEIVES, str(partition.receives(offset) - uncounted).encode()),
            (H_FIRST, str(record.timestamp).encode()),
            (H_LAST, str(partition.last_timestamp_ms).encode()),
        ]
        if ownership.settings.queue_id is None:
            return self._to_queue(held, ownership.catalog.settings_of(queue).dead_letters_of(queue), headers)
        assert ownership.topics.dead_letter is not None
        return ownership.topics.dead_letter, 0, record.key, headers

    def _to_queue(self, held: Held, queue: str, headers: list[tuple[str, bytes]]) -> Target:
        """Where the copy in a queue goes: to the same partition, unless the queue is FIFO and all of a group in one."""
        topics, settings = self._ownership.topics, self._ownership.catalog.settings_of(queue)
        number, key = held.number, queue.encode()
        if settings.fifo:
            number = fifo_partition(key, group_name(headers) or b"", settings, topics.partitions)
        return topics.queue, number, key, headers

    def _copies(self, held: Held, offsets: list[int], target: Callable[[Any, int], Target]) -> list[Copy]:
        """Append a copy of each message: where it goes `target` says of its record and offset."""
        partition, copies = held.owner.partition, []
        for offset in offsets:
            if offset not in partition.messages:
                continue
            try:
                record = partition.record(offset)
                topic, number, key, headers = target(record, offset)
                headers.append((H_ORIGIN, f"{held.number}:{offset}".encode()))
                value = record.value
                if value is not None and len(value) > MESSAGE_MAX_BYTES:
                    value = None  # it fits no topic of ours
                future = self._ownership.app.producer.append(topic, number, value, key, headers)
            except MarqError as exc:  # a row that can't be read must not keep the others
                future = asyncio.get_running_loop().create_future()
                future.set_exception(exc)
            copies.append((offset, future))
        return copies

    async def _confirmed(self, held: Held, copies: list[Copy]) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Which copies are in the log, with their metadata, and which may not be."""
        done: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        for offset, future in copies:
            try:
                done[offset] = await future
            except (KafkaError, MarqError) as exc:
                failed[offset] = exc
                self._ownership.log.warning("Copy of %s:%s failed: %r", held.number, offset, exc)
        return done, failed

    async def _end(self, held: Held, outcome: m.Outcome, offsets: list[int]) -> set[int]:
        """End messages that were copied; those of which that is folded."""
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

    def _still(self, held: Held) -> bool:
        """Whether the partition is still this worker's."""
        return self._ownership.held.get(held.number) is held and held.serving
