"""Whether deliveries are still their receivers': the owners of the partitions know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from enum import Enum

import msgspec

from app.cluster.peers import Peers, peer_call
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.service.owners import OPERATION_TIMEOUT_S, Owners
from app.service.receipts import Receipts
from marq.core.state import MessageState
from marq.errors import MarqError, UnavailableError

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


class Deliveries(msgspec.Struct):
    """Some deliveries of one partition: (epoch, delivery, offset) of each."""

    partition: int
    deliveries: list[tuple[int, int, int]]


class Effects(Deliveries):
    """What an extension or release of them did, that is in a record of the markers log."""

    record: int


class Leases:
    """Asks the owners."""

    def __init__(self, ownership: Ownership, receipts: Receipts, peers: Peers) -> None:
        self._ownership = ownership
        self._receipts = receipts
        self._owners = Owners(ownership, peers)
        peers.register(self)

    async def states(self, receipts: Sequence[str]) -> list[Lease | MarqError]:
        """Of each delivery, by its receipt, how it stands; an error where nobody can tell. Receipts have to be good."""
        if not receipts:
            return []
        places: dict[int, list[int]] = {}
        read = [self._receipts.read(receipt) for receipt in receipts]
        for i, receipt in enumerate(read):
            places.setdefault(receipt[0], []).append(i)
        states: list[Lease | MarqError] = [Lease.DONE] * len(receipts)
        answers = await asyncio.gather(
            *(self._of(number, [read[i][1:4] for i in chosen]) for number, chosen in places.items())
        )
        for chosen, answer in zip(places.values(), answers, strict=True):
            for k, i in enumerate(chosen):
                states[i] = answer if isinstance(answer, MarqError) else answer[k]
        return states

    async def _of(self, number: int, deliveries: list[tuple[int, int, int]]) -> list[Lease] | MarqError:
        asked = Deliveries(number, deliveries)
        try:
            return await self._owners.ask(number, self.states_here, asked, OPERATION_TIMEOUT_S)
        except MarqError as exc:
            return exc

    async def took_effect(
        self, number: int, record: int, deliveries: list[tuple[int, int, int]]
    ) -> list[bool] | MarqError:
        """Whether an extension or release in a record of the markers log had effect, per (epoch, delivery, offset).

        An error if nobody can tell in time.
        """
        asked = Effects(number, deliveries, record)
        deadline = time.monotonic() + EFFECT_TIMEOUT_S
        while True:
            try:
                return await self._owners.ask(number, self.effects_here, asked, OPERATION_TIMEOUT_S)
            except MarqError as exc:
                if time.monotonic() > deadline:
                    return UnavailableError(f"it is in the log, but whether it came in time is not known: {exc}")
            await asyncio.sleep(ASK_AGAIN_S)

    @peer_call("effects")
    async def effects_here(self, asked: Effects) -> list[bool]:
        """See `took_effect`, of a partition of this worker, as soon as it has folded the record."""
        deadline = time.monotonic() + EFFECT_TIMEOUT_S
        while True:
            held = self._owners.serving_here(asked.partition)
            if asked.record < held.owner.partition.markers_position:
                return [held.owner.took_effect(asked.record, *delivery) for delivery in asked.deliveries]
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"partition {asked.partition} has not been read up to record {asked.record} of its markers"
                )
            await asyncio.sleep(FOLDED_S)

    @peer_call("leases")
    async def states_here(self, asked: Deliveries) -> list[Lease]:
        """How deliveries stand in a partition of this worker."""
        held = self._owners.serving_here(asked.partition)
        return [lease_of(held, *delivery) for delivery in asked.deliveries]


def lease_of(held: OwnedPartition, epoch: int, delivery: int, offset: int) -> Lease:
    partition = held.owner.partition
    state = partition.state_of(offset)
    if state is MessageState.IN_FLIGHT and partition.is_current(offset, epoch, delivery):
        return Lease.HELD
    return Lease.DONE if state is MessageState.DONE else Lease.OVER
