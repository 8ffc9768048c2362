"""Copies of messages under another queue's name: dead letters, and messages that are moved on demand.

The copy is appended before the message is ended: to the same partition, or in a FIFO queue to the partition of its
group. A header names the original. A crash in between causes at most a second copy, which the partition recognises by
that header and purges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from app.engine.copier import Copier, Partitions, Target, own_headers, reason_value, too_large
from app.engine.dead_letter_log import DeadLetterLog
from app.engine.owned_partition import OwnedPartition
from app.engine.quarantine import Quarantine
from marq.errors import LeaseOverError, MarqError, NotPossibleError, UnavailableError
from marq.protocol.headers import H_DEAD_AT_MS, H_DEAD_QUEUE, H_DEAD_REASON, H_DEAD_RECEIVES, H_DEAD_SENT_MS

if TYPE_CHECKING:
    from marq.core.agenda import Handout


#: Seconds to wait for the fold of the start under which messages are moved.
START_TIMEOUT_S = 15.0
#: Milliseconds of the lease under which the owner moves messages. If it ends too early, a second copy is made.
MOVE_LEASE_MS = 15_000
#: The name of the receiver under which the owner moves messages.
MOVER = "move"

#: The reason of poison for a message whose dead letter Kafka refuses.
TOO_LARGE = "no dead letter can be made of it: it is too large"
#: Where a copy is: partition and offset.
Place = tuple[int, int]


class Rejected(msgspec.Struct):
    """Offsets of messages that a receiver rejected. Those in neither list do not belong to the receiver any more."""

    done: list[int]  # dead letters now
    unsure: list[int]  # Kafka did not confirm it


class _Mover:
    """The receiver of messages that are about to be moved."""

    def __init__(self) -> None:
        self.begun: asyncio.Future[Handout] = asyncio.get_running_loop().create_future()

    def handed(self, owned: OwnedPartition, handout: Handout) -> None:
        if not self.begun.done():
            self.begun.set_result(handout)


class Copies:
    """Makes dead letters and moves messages: a copy each, then the end of the original."""

    def __init__(self, ownership: Partitions, now_ms: Callable[[], int]) -> None:
        self._ownership = ownership
        self._now_ms = now_ms
        self._copier = Copier(ownership)
        self._log = DeadLetterLog(ownership.log)
        self.poison = Quarantine(self._copier, ownership, now_ms)
        self._dying: dict[int, set[int]] = {}  # partition -> messages whose dead letter is being made, or was just now

    # ------------------------------------------------------------------ dead letters

    def begin(self, owned: OwnedPartition, offsets: list[int]) -> None:
        """`dead_letter` is about to be called."""
        self._dying[owned.number] = {*self._still_dying(owned), *offsets}

    def forget(self, owned: OwnedPartition) -> None:
        """A partition is not served any more."""
        self._dying.pop(owned.number, None)

    def are_dying(self, owned: OwnedPartition, queue: str) -> bool:
        """True if dead letters of a queue, or for it, are being made in a partition."""
        partition, settings_of = owned.owner.partition, self._ownership.catalog.settings_of
        dying = self._dying[owned.number] = self._still_dying(owned)
        for offset in (*dying, *owned.owner.starts.dying()):
            source = partition.queue_of(offset) if offset in partition.messages else None
            if source is not None and queue in (source, settings_of(source).dead_letters_of(source)):
                return True
        return False

    def _still_dying(self, owned: OwnedPartition) -> set[int]:
        """Those whose end is not folded yet. Only the fold tells when a dead letter is done."""
        messages = owned.owner.partition.messages
        return {offset for offset in self._dying.get(owned.number, ()) if offset in messages}

    async def dead_letter(self, owned: OwnedPartition, offsets: list[int]) -> None:
        """Copy messages that the owner holds to their dead-letter queues, then end them."""
        # the owner's own start, under which the copy is made, was counted too
        copies = self._copier.append(
            owned, offsets, lambda record, offset: self._dead(owned, record, offset, "max-receives", 1)
        )
        copied, failed = await self._copier.confirmed(owned, copies)
        if not self._copier.is_served(owned):
            return
        self._dying.get(owned.number, set()).difference_update(failed)
        self._log_dead(owned, copied, "")
        owned.owner.ended_as("dead", sorted(copied))
        # the others come up again when the owner's lease is over, except those that can't be copied
        hopeless = too_large(failed)
        self._ownership.drain(owned)
        if hopeless:
            await self.poison.quarantine(owned, [(o, TOO_LARGE) for o in hopeless])

    def _log_dead(self, owned: OwnedPartition, offsets: Iterable[int], reason: str) -> None:
        """Log dead letters. ``reason`` "": the maximum receive count was reached."""
        partition, ownership = owned.owner.partition, self._ownership
        last: dict[str, list[int]] = {}
        for offset in offsets:
            if offset in partition.messages and (queue := partition.queue_of(offset)) is not None:
                last.setdefault(queue, []).append(offset)
        for queue, dead in last.items():
            if ownership.settings.queue_id is None:
                target = ownership.catalog.settings_of(queue).dead_letters_of(queue)
            else:
                target = ownership.topics.dead_letter or ""
            why = reason or f"delivered {partition.receives(max(dead)) - 1} times without an ack"
            self._log.note(queue, target, len(dead), why)

    async def reject(
        self, owned: OwnedPartition, offsets: list[int], receipt: tuple[int, int], reason: str
    ) -> Rejected:
        """Make dead letters of messages that a receiver has, because it rejects them.

        Messages that have another delivery by now are left alone.
        """
        partition = owned.owner.partition
        taken = partition.reserve_current(offsets, *receipt)
        if not taken:
            return Rejected([], [])
        copies = self._copier.append(owned, taken, lambda record, offset: self._dead(owned, record, offset, reason, 0))
        copied, failed = await self._copier.confirmed(owned, copies)
        if not self._copier.is_served(owned):
            return Rejected([], taken)
        hopeless = too_large(failed)
        partition.put_back(failed.keys() - set(hopeless))
        if hopeless:
            await self.poison.quarantine(owned, [(o, TOO_LARGE) for o in hopeless])
        self._log_dead(owned, copied, f"rejected, {reason}" if reason else "rejected")
        done = await self._copier.end(owned, "dead", list(copied)) | set(hopeless)
        unsure = sorted(set(taken) - done)
        partition.put_back(set(unsure) & copied.keys())
        return Rejected(sorted(done), unsure)

    # ------------------------------------------------------------------ moves

    async def move(
        self,
        owned: OwnedPartition,
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
        if owned.owner.stalled:
            raise self._stalled(owned)
        if not make:
            await self._ownership.catalog.catch_up()  # another worker may have deleted the queue a moment ago
        mover = _Mover()
        pending = owned.owner.acquire_to_end(
            queue, offsets, limit, mover, self._now_ms(), lease_ms=MOVE_LEASE_MS, name=MOVER
        )
        moved: dict[int, Place | MarqError] = {}
        if pending is not None:
            self._ownership.drain(owned)
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    handout = await mover.begun
            except TimeoutError:
                pending.cancel()
                raise UnavailableError("Kafka did not confirm in time that it is to be moved; try again") from None
            if owned.owner.stalled:
                raise self._stalled(owned)
            moved = await self._move(owned, queue, handout, to, make)
        for offset in offsets or ():
            if offset not in moved:
                moved[offset] = LeaseOverError(
                    f"{owned.number}:{offset} is not ready in {queue!r}: finished, or in work"
                )
        return moved

    def _stalled(self, owned: OwnedPartition) -> UnavailableError:
        return UnavailableError(f"Kafka takes nothing in partition {owned.number} at present; try again later", 2.0)

    async def _move(
        self, owned: OwnedPartition, queue: str, handout: Handout, to: str | None, make: bool
    ) -> dict[int, Place | MarqError]:
        catalog, partition = self._ownership.catalog, owned.owner.partition
        targets: dict[int, str] = {}
        moved: dict[int, Place | MarqError] = {}
        for offset in handout.offsets:
            try:
                target = to or self._origin_queue(partition.record(offset))
                if target == queue:
                    raise NotPossibleError(f"{owned.number}:{offset} is in {queue!r} already")
                if make:
                    await catalog.require_or_make(target)
                else:
                    catalog.require(target)
                targets[offset] = target
            except MarqError as exc:
                moved[offset] = exc
        # the copy of an earlier attempt, after which a worker died
        copies_made = {offset: partition.copy_of(offset) for offset in targets}
        places: dict[int, Place] = {o: (owned.number, copy) for o, copy in copies_made.items() if copy is not None}
        copies = self._copier.append(
            owned,
            [offset for offset in targets if offset not in places],
            lambda record, offset: self._copier.to_queue(owned, targets[offset], own_headers(record)),
        )
        copied, failed = await self._copier.confirmed(owned, copies)
        if not self._copier.is_served(owned):
            raise UnavailableError(f"partition {owned.number} went to another worker; try again")
        places |= {offset: (result.partition, result.offset) for offset, result in copied.items()}
        moved |= {offset: UnavailableError(f"its copy was not confirmed: {exc!r}") for offset, exc in failed.items()}
        if moved:
            owned.owner.release(sorted(moved), handout.receipt, counted=False)
            self._ownership.drain(owned)
        ended = await self._copier.end(owned, "moved", list(places))
        for offset, place in places.items():
            moved[offset] = place if offset in ended else UnavailableError("its end was not confirmed; try again")
        return moved

    def _origin_queue(self, record: Any) -> str:
        for name, value in reversed(record.headers):
            if name == H_DEAD_QUEUE and value:
                return str(value.decode(errors="replace"))
        raise NotPossibleError("it is no dead letter: say to which queue it is to be moved")

    def _dead(self, owned: OwnedPartition, record: Any, offset: int, reason: str, uncounted: int) -> Target:
        """Where the dead letter of a record goes, with its headers."""
        ownership, partition = self._ownership, owned.owner.partition
        queue = partition.queue_of(offset)
        assert queue is not None
        headers = [
            *own_headers(record),
            (H_DEAD_QUEUE, queue.encode()),
            (H_DEAD_REASON, reason_value(reason)),
            (H_DEAD_RECEIVES, str(partition.receives(offset) - uncounted).encode()),
            (H_DEAD_SENT_MS, str(record.timestamp).encode()),
            (H_DEAD_AT_MS, str(partition.last_timestamp_ms).encode()),
        ]
        if ownership.settings.queue_id is None:
            return self._copier.to_queue(owned, ownership.catalog.settings_of(queue).dead_letters_of(queue), headers)
        assert ownership.topics.dead_letter is not None
        return ownership.topics.dead_letter, 0, record.key, headers
