"""Copies of messages that receivers can't or may not get: dead letters, and poison.

A dead letter goes to the same partition, with a header that says of what it is the copy, before the message is ended:
a crash in between makes a second copy at most, which the partition recognises by that header and purges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokafka.errors import KafkaError

from marq.core.partition import H_DELAY, H_ORIGIN, H_TTL
from marq.errors import MarqError

if TYPE_CHECKING:
    from app.ownership import Held, Ownership

H_FROM = "marq-dead-queue"
H_WHY = "marq-dead-reason"
H_RECEIVES = "marq-dead-receives"
H_FIRST = "marq-dead-sent-ms"
H_LAST = "marq-dead-at-ms"

#: Headers that describe one stay in one queue: a copy begins anew.
_OF_THE_STAY = {H_DELAY, H_TTL, H_ORIGIN, H_FROM, H_WHY, H_RECEIVES, H_FIRST, H_LAST}


class Letters:
    """Makes the copies and ends the messages."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership

    async def bury(self, held: Held, offsets: list[int]) -> None:
        """Copy messages that the owner holds to their dead-letter queues, then end them."""
        ownership, partition = self._ownership, held.owner.partition
        copies = []
        for offset in offsets:
            if offset not in partition.messages:
                continue
            record, queue = partition.record(offset), partition.queue_of(offset)
            assert queue is not None
            headers = [(name, value) for name, value in record.headers if name not in _OF_THE_STAY]
            # the owner's own start, under which the copy is made, was counted too
            receives = partition.receives(offset) - 1
            headers += [
                (H_ORIGIN, f"{held.number}:{offset}".encode()),
                (H_FROM, queue.encode()),
                (H_WHY, b"max-receives"),
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
        await self._end(held, "dead", copies)

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
            future = ownership.app.producer.append(ownership.topics.poison, 0, record.value, record.key, headers)
            copies.append((offset, future))
            ownership.log.warning("Record %s:%s is poison: %s", held.number, offset, reason)
        await self._end(held, "poison", copies)

    async def _end(self, held: Held, outcome: Any, copies: list[tuple[int, Any]]) -> None:
        done: list[int] = []
        failed: list[int] = []
        for offset, future in copies:
            try:
                await future
                done.append(offset)
            except (KafkaError, MarqError) as exc:
                failed.append(offset)
                self._ownership.log.warning("Copy of %s:%s failed: %r", held.number, offset, exc)
        if self._ownership.held.get(held.number) is held and held.serving:
            held.owner.ended_as(outcome, done)
            if outcome == "poison":
                # dead letters are leased by the owner and come up again when that is over
                held.owner.partition.put_back(failed)
            self._ownership.drain(held)
