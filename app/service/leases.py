"""Whether deliveries are still their receivers': the owners of the partitions know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from marq.core.state import MessageState
from marq.errors import MarqError, UnavailableError

if TYPE_CHECKING:
    from app.engine.ownership import OwnedPartition
    from app.service.operations import QueueService


#: Seconds in which the owner of a partition has to tell what became of an extension or release.
EFFECT_TIMEOUT_S = 3.0
#: Seconds before it is asked again, while the partition changes hands.
ASK_AGAIN_S = 0.1
#: Seconds between looks at whether a record has been folded; most are when Kafka confirms them.
FOLDED_S = 0.002


class Lease(Enum):
    """Of one delivery."""

    HELD = "held"  # the receiver has the message
    OVER = "over"  # it is to be, or was, delivered again
    DONE = "done"  # the message is finished


class Leases:
    """Asks the owners."""

    def __init__(self, door: QueueService) -> None:
        self._operations = door

    async def states(self, receipts: Sequence[str]) -> list[Lease | MarqError]:
        """Of each delivery, by its receipt, how it stands; an error where nobody can tell. Receipts have to be good."""
        if not receipts:
            return []
        places: dict[int, list[int]] = {}
        read = [self._operations.receipts.read(receipt)[:4] for receipt in receipts]
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
            found = await self._operations.at_owner(number, "leases", argument, self.states_here, list[str])
        except MarqError as exc:
            return exc
        return [Lease(state) for state in found]

    async def took_effect(
        self, number: int, record: int, deliveries: list[tuple[int, int, int]]
    ) -> list[bool] | MarqError:
        """Whether an extension or release in a record of the markers log had effect, per (epoch, delivery, offset).

        An error if nobody can tell in time.
        """
        argument = {"partition": number, "record": record, "deliveries": deliveries}
        deadline = time.monotonic() + EFFECT_TIMEOUT_S
        while True:
            try:
                return await self._operations.at_owner(number, "effects", argument, self.effects_here, list[bool])  # type: ignore[no-any-return]
            except MarqError as exc:
                if time.monotonic() > deadline:
                    return UnavailableError(f"it is in the log, but whether it came in time is not known: {exc}")
            await asyncio.sleep(ASK_AGAIN_S)

    async def effects_here(self, argument: dict[str, Any]) -> list[bool]:
        """See `took_effect`, of a partition of this worker, as soon as it has folded the record."""
        number, record = argument["partition"], argument["record"]
        deadline = time.monotonic() + EFFECT_TIMEOUT_S
        while True:
            held = self._operations.ownership.held.get(number)
            if held is None or not held.serving:
                raise UnavailableError(f"partition {number} is not served here")
            if record < held.owner.partition.markers_position:
                return [held.owner.took_effect(record, *delivery) for delivery in argument["deliveries"]]
            if time.monotonic() > deadline:
                raise UnavailableError(f"partition {number} has not been read up to record {record} of its markers")
            await asyncio.sleep(FOLDED_S)

    async def states_here(self, argument: dict[str, Any]) -> list[str]:
        """How deliveries stand in a partition of this worker."""
        held = self._operations.ownership.held.get(argument["partition"])
        if held is None or not held.serving:
            raise UnavailableError(f"partition {argument['partition']} is not served here")
        return [lease_of(held, *delivery).value for delivery in argument["deliveries"]]


def lease_of(held: OwnedPartition, epoch: int, delivery: int, offset: int) -> Lease:
    partition = held.owner.partition
    state = partition.state_of(offset)
    if state is MessageState.IN_FLIGHT and partition.is_current(offset, epoch, delivery):
        return Lease.HELD
    return Lease.DONE if state is MessageState.DONE else Lease.OVER
