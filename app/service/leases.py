"""Checks whether leases are still valid, by asking the owners of the partitions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeVar

import msgspec

from app.cluster.peers import Peers, peer_call
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.service.owners import OPERATION_TIMEOUT_S, Owners
from app.service.receipts import Receipts
from marq.clock import now_ms
from marq.core.state import MessageState
from marq.errors import MarqError, UnavailableError

#: Seconds within which the owner of a partition has to say whether an extension or release had effect.
EFFECT_TIMEOUT_S = 3.0
#: Seconds before the next try, while the partition goes to another owner.
ASK_AGAIN_S = 0.1
#: Seconds between checks whether a record is folded; most are as soon as Kafka confirms them.
FOLDED_S = 0.002


Told = TypeVar("Told")


class Lease(Enum):
    """Of one delivery."""

    HELD = "held"  # the receiver has the message
    OVER = "over"  # it will be, or was, delivered again
    DONE = "done"  # the message is finished


class Latest(msgspec.Struct, array_like=True):
    """The last delivery of a message.

    HELD: it can be extended, be its time over or not. OVER: its receiver gave it back. DONE: the message is finished.
    """

    lease: Lease
    epoch: int = -1
    delivery: int = -1


class Deliveries(msgspec.Struct):
    """Deliveries of one partition: epoch, delivery and offset of each."""

    partition: int
    deliveries: list[tuple[int, int, int]]


class Effects(Deliveries):
    """Deliveries of one partition, and the markers record with their extension or release."""

    record: int


class Leases:
    """Asks the owners."""

    def __init__(self, ownership: Ownership, receipts: Receipts, peers: Peers) -> None:
        self._ownership = ownership
        self._receipts = receipts
        self._owners = Owners(ownership, peers)
        peers.register(self)

    async def states(self, receipts: Sequence[str]) -> list[Lease | MarqError]:
        """The state of each delivery, by its receipt, or an error if no owner answers. Receipts must be valid."""
        return await self._each(receipts, self.states_here)

    async def latest(self, receipts: Sequence[str]) -> list[Latest | MarqError]:
        """The last delivery of each message that a receipt is for; see `states`."""
        return await self._each(receipts, self.latest_here)

    async def _each(
        self, receipts: Sequence[str], ask: Callable[[Deliveries], Awaitable[list[Told]]]
    ) -> list[Told | MarqError]:
        """The owners' answer for each receipt."""
        places: dict[int, list[int]] = {}
        read = [self._receipts.read(receipt) for receipt in receipts]
        for i, receipt in enumerate(read):
            places.setdefault(receipt[0], []).append(i)
        answers = await asyncio.gather(
            *(self._of(number, [read[i][1:4] for i in chosen], ask) for number, chosen in places.items())
        )
        told: dict[int, Told | MarqError] = {}
        for chosen, answer in zip(places.values(), answers, strict=True):
            for k, i in enumerate(chosen):
                told[i] = answer if isinstance(answer, MarqError) else answer[k]
        return [told[i] for i in range(len(receipts))]

    async def _of(
        self,
        number: int,
        deliveries: list[tuple[int, int, int]],
        ask: Callable[[Deliveries], Awaitable[list[Told]]],
    ) -> list[Told] | MarqError:
        try:
            return await self._owners.ask(number, ask, Deliveries(number, deliveries), OPERATION_TIMEOUT_S)
        except MarqError as exc:
            return exc

    async def took_effect(
        self, number: int, record: int, deliveries: list[tuple[int, int, int]]
    ) -> list[bool] | MarqError:
        """For each (epoch, delivery, offset): True if the extension or release in a markers record had effect.

        Returns an error if no owner answers in time.
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
        """See `took_effect`, for a partition of this worker. Answers once the record is folded."""
        deadline = time.monotonic() + EFFECT_TIMEOUT_S
        while True:
            owned = self._owners.serving_here(asked.partition)
            if asked.record < owned.owner.partition.markers_position:
                return [owned.owner.took_effect(asked.record, *delivery) for delivery in asked.deliveries]
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"partition {asked.partition} has not been read up to record {asked.record} of its markers"
                )
            self._owners.hurry()
            await asyncio.sleep(FOLDED_S)

    @peer_call("leases")
    async def states_here(self, asked: Deliveries) -> list[Lease]:
        """The states of deliveries in a partition of this worker."""
        owned = self._owners.serving_here(asked.partition)
        return [lease_of(owned, *delivery, now_ms()) for delivery in asked.deliveries]

    @peer_call("latest")
    async def latest_here(self, asked: Deliveries) -> list[Latest]:
        """See `latest`, for a partition of this worker."""
        owned = self._owners.serving_here(asked.partition)
        return [latest_of(owned, offset) for _, _, offset in asked.deliveries]


def lease_of(owned: OwnedPartition, epoch: int, delivery: int, offset: int, now_ms: int) -> Lease:
    """The state of a delivery. It is over from its deadline on, also before a record tells the partition that time."""
    partition = owned.owner.partition
    state = partition.state_of(offset)
    if state is MessageState.IN_FLIGHT and partition.is_current(offset, epoch, delivery):
        return Lease.OVER if partition.deliveries[offset].is_over(owned.owner.clock_at(now_ms)) else Lease.HELD
    return Lease.DONE if state is MessageState.DONE else Lease.OVER


def latest_of(owned: OwnedPartition, offset: int) -> Latest:
    """The last delivery of a message."""
    partition = owned.owner.partition
    delivered = partition.deliveries.get(offset)
    if partition.state_of(offset) is MessageState.DONE:
        return Latest(Lease.DONE)
    if delivered is None or not delivered.leased:
        return Latest(Lease.OVER)
    return Latest(Lease.HELD, delivered.epoch, delivered.delivery)
