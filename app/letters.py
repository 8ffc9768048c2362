"""Copies of messages that receivers can't or may not get: dead letters, and poison.

A dead letter goes to the same partition, with a header that says of what it is the copy, before the message is ended:
a crash in between makes a second copy at most, which the partition recognises by that header and purges.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiokafka.errors import KafkaError

from marq.core import markers as m
from marq.core.partition import H_DELAY, H_ORIGIN, H_TTL, MESSAGE_MAX_BYTES
from marq.core.ranges import ranges_of
from marq.errors import MarqError

if TYPE_CHECKING:
    from app.ownership import Held, Ownership

H_FROM = "marq-dead-queue"
H_WHY = "marq-dead-reason"
H_RECEIVES = "marq-dead-receives"
H_FIRST = "marq-dead-sent-ms"
H_LAST = "marq-dead-at-ms"

#: Times, every 10 ms, that the end of a rejected message is looked for in what was folded.
FOLD_CHECKS = 300

#: Headers that describe one stay in one queue: a copy begins anew.
_OF_THE_STAY = {H_DELAY, H_TTL, H_ORIGIN, H_FROM, H_WHY, H_RECEIVES, H_FIRST, H_LAST}


class Letters:
    """Makes the copies and ends the messages."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership

    async def bury(self, held: Held, offsets: list[int]) -> None:
        """Copy messages that the owner holds to their dead-letter queues, then end them."""
        # the owner's own start, under which the copy is made, was counted too
        await self._end(held, "dead", self._copy(held, offsets, "max-receives", -1))

    async def reject(self, held: Held, offsets: list[int], receipt: tuple[int, int], reason: str) -> set[int]:
        """Make dead letters of messages that a receiver holds, because it says so; which of them are finished by it.

        Those whose delivery is not the current one any more are left alone.
        """
        partition, owner = held.owner.partition, held.owner
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
        copied, failed = await self._confirmed(held.number, self._copy(held, taken, reason, 0))
        if self._ownership.held.get(held.number) is not held or not held.serving:
            return set()
        partition.put_back(failed)
        if copied:
            try:
                await held.outbox.put_confirmed(list(m.split(m.End(owner.epoch, ranges_of(copied), "dead"))))
            except MarqError:
                return set()
            # folded now, or when what other workers appended before it has been read
            for _ in range(FOLD_CHECKS):
                if not any(offset in partition.messages for offset in copied):
                    break
                await asyncio.sleep(0.01)
        return {offset for offset in copied if offset not in partition.messages}

    def _copy(self, held: Held, offsets: list[int], reason: str, uncounted: int) -> list[tuple[int, Any]]:
        ownership, partition = self._ownership, held.owner.partition
        copies = []
        for offset in offsets:
            if offset not in partition.messages:
                continue
            record, queue = partition.record(offset), partition.queue_of(offset)
            assert queue is not None
            headers = [(name, value) for name, value in record.headers if name not in _OF_THE_STAY]
            receives = partition.receives(offset) + uncounted
            headers += [
                (H_ORIGIN, f"{held.number}:{offset}".encode()),
                (H_FROM, queue.encode()),
                (H_WHY, reason.encode()),
                (H_RECEIVES, str(receives).encode()),
                (H_FIRST, str(record.timestamp).encode()),
                (H_LAST, str(partition.max_timestamp_ms).encode()),
            ]
            topics = ownership.topics
            if ownership.settings.queue_id is None:
                key = ownership.catalog.settings_of(queue).dead_letters_of(queue).encode()
                future = ownership.app.producer.append(topics.queue, held.number, record.value, key, headers)
            else:
                assert topics.dead_letter is not None
                future = ownership.app.producer.append(topics.dead_letter, 0, record.value, record.key, headers)
            copies.append((offset, future))
        return copies

    async def set_aside(self, held: Held, poison: list[tuple[int, str]]) -> None:
        """Copy records that are no messages to the poison topic, with the reason, then end them."""
        ownership, partition = self._ownership, held.owner.partition
        copies = []
        for offset, reason in poison:
            if offset not in partition.messages:
                continue
            record = partition.record(offset)
            headers = [
                *record.headers,
                (H_ORIGIN, f"{held.number}:{offset}".encode()),
                ("marq-poison-reason", reason.encode()),
            ]
            value = record.value
            if value is not None and len(value) > MESSAGE_MAX_BYTES:
                value = None  # it would not fit
            future = ownership.app.producer.append(ownership.topics.poison, 0, value, record.key, headers)
            copies.append((offset, future))
            ownership.log.warning("Record %s:%s is poison: %s", held.number, offset, reason)
        await self._end(held, "poison", copies)

    async def _end(self, held: Held, outcome: Any, copies: list[tuple[int, Any]]) -> None:
        done, failed = await self._confirmed(held.number, copies)
        if self._ownership.held.get(held.number) is held and held.serving:
            held.owner.ended_as(outcome, done)
            if outcome == "poison":
                # dead letters are leased by the owner and come up again when that is over
                held.owner.partition.put_back(failed)
            self._ownership.drain(held)

    async def _confirmed(self, number: int, copies: list[tuple[int, Any]]) -> tuple[list[int], list[int]]:
        """Which copies are in the log, and which may not be."""
        done: list[int] = []
        failed: list[int] = []
        for offset, future in copies:
            try:
                await future
                done.append(offset)
            except (KafkaError, MarqError) as exc:
                failed.append(offset)
                self._ownership.log.warning("Copy of %s:%s failed: %r", number, offset, exc)
        return done, failed
