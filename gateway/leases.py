"""Whether deliveries are still their receivers': the owners of the partitions know."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from marq.errors import MarqError, UnavailableError

if TYPE_CHECKING:
    from app.ownership import Held
    from gateway.door import Door


class Lease(Enum):
    """Of one delivery."""

    HELD = "held"  # the receiver has the message
    OVER = "over"  # it is to be, or was, delivered again
    DONE = "done"  # the message is finished


class Leases:
    """Asks the owners."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def states(self, receipts: Sequence[str]) -> list[Lease | MarqError]:
        """Of each delivery, by its receipt, how it stands; an error where nobody can tell. Receipts have to be good."""
        if not receipts:
            return []
        places: dict[int, list[int]] = {}
        read = [self._door.receipts.read(receipt)[:4] for receipt in receipts]
        for i, receipt in enumerate(read):
            places.setdefault(receipt[0], []).append(i)
        states: list[Lease | MarqError] = [Lease.DONE] * len(receipts)
        answers = await asyncio.gather(
            *(self._of(number, [read[i][1:] for i in chosen]) for number, chosen in places.items())
        )
        for chosen, answer in zip(places.values(), answers, strict=True):
            for k, i in enumerate(chosen):
                states[i] = answer if isinstance(answer, MarqError) else answer[k]
        return states

    async def _of(self, number: int, deliveries: list[tuple[int, ...]]) -> list[Lease] | MarqError:
        argument = {"partition": number, "deliveries": deliveries}
        try:
            found = await self._door.at_owner(number, "leases", argument, self.states_here, list[str])
        except MarqError as exc:
            return exc
        return [Lease(state) for state in found]

    async def states_here(self, argument: dict[str, Any]) -> list[str]:
        """How deliveries stand in a partition of this worker."""
        held = self._door.ownership.held.get(argument["partition"])
        if held is None or not held.serving:
            raise UnavailableError(f"partition {argument['partition']} is not served here")
        return [_state(held, *delivery).value for delivery in argument["deliveries"]]


def _state(held: Held, epoch: int, delivery: int, offset: int) -> Lease:
    partition = held.owner.partition
    hold = partition.holds.get(offset)
    if hold is not None and hold.leased and (hold.epoch, hold.delivery) == (epoch, delivery):
        return Lease.HELD if partition.clock_ms < hold.deadline_ms else Lease.OVER
    if offset in partition.messages or partition.segments.queue_of(offset) is not None:
        return Lease.OVER
    return Lease.DONE
