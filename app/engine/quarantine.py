"""Poison: records that are no messages, and dead letters that Kafka refuses. They are copied to a separate topic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from app.engine.copier import Copier, Partitions, Target, reason_value, too_large
from app.engine.owned_partition import OwnedPartition
from marq.core.ranges import ranges_of
from marq.core.reading import Undecodable
from marq.protocol.headers import H_ORIGIN, H_ORIGIN_SEAL, H_POISON, H_POISON_CUT
from marq.protocol.limits import RECORD_MAX_BYTES

#: Bytes of a copy in the poison topic at most, without the headers that the copy adds.
POISON_ROOM_BYTES = RECORD_MAX_BYTES - 8 * 1024
#: Bytes of the smallest copy in the poison topic. Each time Kafka finds a copy too large, it is cut to a quarter.
POISON_ROOM_MIN_BYTES = 1024
#: Seconds before a failed copy is tried again, doubled each time up to the second value.
COPY_AGAIN_S, COPY_AGAIN_MAX_S = 0.1, 5.0
#: Poison ends without a copy if the poison topic refuses it for so many seconds while Kafka accepts markers.
COPY_GIVE_UP_S = 60.0

#: Headers that a copy in the poison topic adds.
_OF_POISON = {H_POISON, H_POISON_CUT, H_ORIGIN, H_ORIGIN_SEAL}


class Quarantine:
    """Copies poison to the poison topic, then ends it."""

    def __init__(self, copier: Copier, ownership: Partitions, now_ms: Callable[[], int]) -> None:
        self._copier = copier
        self._ownership = ownership
        self._now_ms = now_ms
        #: Poison that was ended without a copy.
        self.uncopied = 0
        self._refused_ms: int | None = None  # since when the poison topic has taken nothing

    async def quarantine(self, owned: OwnedPartition, poison: list[tuple[int, str]]) -> None:
        """Copy records that are no messages to the poison topic, with the reason, then end them.

        A copy that is too large is made smaller. A failed copy is tried again, for `COPY_GIVE_UP_S` at most. Then the
        record is ended without a copy, so that it does not hold up the partition for ever.
        """
        reasons, partition = dict(poison), owned.owner.partition
        self._log_poison(owned, reasons)
        room, pause_s = POISON_ROOM_BYTES, COPY_AGAIN_S
        while reasons:
            position = partition.markers_position
            copies = self._copier.append(owned, list(reasons), self._aside(reasons), room)
            copied, failed = await self._copier.confirmed(owned, copies)
            if not self._copier.is_served(owned):
                return
            if copied or not failed:
                self._refused_ms = None
            owned.owner.ended_as("poison", sorted(copied))
            self._ownership.drain(owned)
            reasons = {offset: reasons[offset] for offset in failed}
            if failed and len(too_large(failed)) == len(failed) and room > POISON_ROOM_MIN_BYTES:
                room //= 4
                continue
            if not failed:
                return
            now_ms = self._now_ms()
            if self._refused_ms is None:
                self._refused_ms = now_ms
            # a Kafka that does not take markers either is away, and will take the copy later
            if now_ms - self._refused_ms >= COPY_GIVE_UP_S * 1000 and partition.markers_position > position:
                self._end_uncopied(owned, failed)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, COPY_AGAIN_MAX_S)
            if not self._copier.is_served(owned):
                return

    def _aside(self, reasons: dict[int, str]) -> Callable[[Any, int], Target]:
        def target(record: Any, offset: int) -> Target:
            headers = [header for header in record.headers if header[0] not in _OF_POISON]
            reason = (H_POISON, reason_value(reasons[offset]))
            return self._ownership.topics.poison, 0, record.key, [*headers, reason]

        return target

    def _log_poison(self, owned: OwnedPartition, reasons: dict[int, str]) -> None:
        """Log a line for each reason. Undecodable records were logged when they were read."""
        messages = owned.owner.partition.messages
        offsets_of: dict[str, list[int]] = {}
        for offset, reason in reasons.items():
            if type(messages.get(offset)) is not Undecodable:
                offsets_of.setdefault(reason, []).append(offset)
        for reason, offsets in offsets_of.items():
            self._ownership.log.warning("Poison at %s: %s", _places(owned, offsets), reason)

    def _end_uncopied(self, owned: OwnedPartition, failed: dict[int, Exception]) -> None:
        offsets = sorted(failed)
        self.uncopied += len(offsets)
        self._ownership.log.error(
            "Poison at %s ends without a copy: %s has taken nothing for %.0f s (%r)",
            _places(owned, offsets),
            self._ownership.topics.poison,
            COPY_GIVE_UP_S,
            failed[offsets[0]],
        )
        owned.owner.ended_as("poison", offsets)
        self._ownership.drain(owned)


def _places(owned: OwnedPartition, offsets: list[int]) -> str:
    """Offsets as they are logged: `3:10-19, 3:25`."""
    pairs = ranges_of(sorted(offsets))
    ranges = zip(pairs[::2], pairs[1::2], strict=True)
    shown = [f"{owned.number}:{a}" + (f"-{b - 1}" if b > a + 1 else "") for a, b in ranges]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more ranges" if len(shown) > 20 else "")
