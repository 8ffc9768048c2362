"""Acks, extensions, releases and rejections: what receivers do with the messages that they have.

Each is a marker, which any worker can append. Only a rejection needs the owner of the partition, which makes the dead
letter.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from app.cluster.peers import Peers, peer_call
from app.engine.copier import reason_value
from app.engine.copies import Rejected
from app.engine.ownership import Ownership
from app.engine.stalls import is_stalled, stalled_error
from app.service.leases import Leases
from app.service.meters import Meters
from app.service.owners import OPERATION_TIMEOUT_S, Owners
from app.service.receipts import Receipt, Receipts, by_delivery
from app.service.waits import all_done
from marq.core.markers import End, Keepalive, Marker, Release
from marq.errors import BrokerError, LeaseOverError, MarqError, NotPossibleError, UnavailableError

if TYPE_CHECKING:
    from app.settings import Settings

#: Seconds until Kafka has to confirm the markers of a request.
CONFIRM_TIMEOUT_S = 10.0
#: The error for a receipt whose delivery is not the current one of its message.
LEASE_OVER = "the message is finished, or its lease is over"


class RejectHere(msgspec.Struct):
    """Messages of one delivery to reject."""

    partition: int
    epoch: int
    delivery: int
    offsets: list[int]
    reason: str


class Settlements:
    """Carries out acks, extensions, releases and rejections."""

    def __init__(
        self, ownership: Ownership, settings: Settings, receipts: Receipts, leases: Leases, meters: Meters, peers: Peers
    ) -> None:
        self._ownership = ownership
        self._catalog = ownership.catalog
        self._settings = settings
        self._receipts = receipts
        self._leases = leases
        self._meters = meters
        self._owners = Owners(ownership, peers)
        self._random = random.Random()
        peers.register(self)

    async def ack(self, receipts: Sequence[str]) -> list[MarqError | None]:
        """See `app.service.operations.QueueService.ack`."""
        results = await self._settle(receipts, lambda epoch, delivery, ranges: End(epoch, ranges, "acked", delivery))
        return self._counted("ack", results)

    async def extend(self, receipts: Sequence[str], lease_ms: int) -> list[MarqError | None]:
        """See `app.service.operations.QueueService.extend`."""
        results = await self._settle(
            receipts, lambda epoch, delivery, ranges: Keepalive(epoch, delivery, ranges, lease_ms), current=True
        )
        return self._counted("extend", results)

    async def release(
        self, receipts: Sequence[str], delay_ms: int | None = None, counted: bool = True
    ) -> list[MarqError | None]:
        """See `app.service.operations.QueueService.release`."""
        if delay_ms is None and counted and self._catalog.with_backoff:
            results = await self._release_with_backoff(receipts)
        else:
            results = await self._release(receipts, delay_ms or 0, counted)
        return self._counted("release", results)

    async def _release(self, receipts: Sequence[str], delay_ms: int, counted: bool = True) -> list[MarqError | None]:
        return await self._settle(
            receipts,
            lambda epoch, delivery, ranges: Release(epoch, delivery, ranges, delay_ms, counted),
            current=True,
        )

    async def _release_with_backoff(self, receipts: Sequence[str]) -> list[MarqError | None]:
        results: list[MarqError | None] = [None] * len(receipts)
        groups: dict[tuple[int, bytes], list[int]] = {}  # attempt, id of the queue -> places
        for i, text in enumerate(receipts):
            try:
                groups.setdefault(self._receipts.read(text)[4:], []).append(i)
            except MarqError as exc:
                results[i] = exc

        async def give_back(attempt: int, queue_id: bytes, places: list[int]) -> None:
            queue = self._catalog.with_backoff.get(queue_id)
            delay = self._catalog.settings_of(queue).backoff_of(attempt, self._random) if queue is not None else 0
            chosen = [receipts[i] for i in places]
            for i, result in zip(places, await self._release(chosen, delay), strict=True):
                results[i] = result

        await asyncio.gather(*(give_back(*group, places) for group, places in groups.items()))
        return results

    async def reject(self, receipts: Sequence[str], reason: str = "rejected") -> list[MarqError | None]:
        """See `app.service.operations.QueueService.reject`."""
        if self._settings.queue_id is not None and self._settings.dead_letter_topic is None:
            raise NotPossibleError("in topic mode, dead letters need a topic: set MARQ_DEAD_LETTER_TOPIC")
        reason = reason_value(reason).decode()
        results: list[MarqError | None] = [None] * len(receipts)
        deliveries: dict[tuple[int, int, int], dict[int, list[int]]] = {}
        for i, text in enumerate(receipts):
            try:
                receipt = self._receipts.read(text)
            except MarqError as exc:
                results[i] = exc
            else:
                deliveries.setdefault(receipt[:3], {}).setdefault(receipt[3], []).append(i)
        outcomes = await asyncio.gather(
            *(self._reject(*delivery, sorted(places), reason) for delivery, places in deliveries.items())
        )
        for places, found in zip(deliveries.values(), outcomes, strict=True):
            for offset, entries in places.items():
                if isinstance(found, MarqError):
                    error: MarqError | None = found
                elif offset in found.unsure:
                    error = UnavailableError("Kafka did not confirm its dead letter; try again")
                else:
                    error = None if offset in found.done else LeaseOverError(LEASE_OVER)
                for i in entries:
                    results[i] = error
        return self._counted("reject", results)

    async def _reject(
        self, number: int, epoch: int, delivery: int, offsets: list[int], reason: str
    ) -> Rejected | MarqError:
        asked = RejectHere(number, epoch, delivery, offsets, reason)
        try:
            return await self._owners.ask(number, self.reject_here, asked, OPERATION_TIMEOUT_S)
        except MarqError as exc:
            return exc

    @peer_call("reject")
    async def reject_here(self, asked: RejectHere) -> Rejected:
        """Make dead letters in a partition of this worker. Returns the result of each offset."""
        owned, receipt = self._owners.serving_here(asked.partition), (asked.epoch, asked.delivery)
        return await self._ownership.copies.reject(owned, asked.offsets, receipt, asked.reason)

    def _counted(self, action: str, results: list[MarqError | None]) -> list[MarqError | None]:
        self._meters.settle_all(action, results)
        return results

    async def _settle(
        self, receipts: Sequence[str], marker: Callable[[int, int, list[int]], Marker], *, current: bool = False
    ) -> list[MarqError | None]:
        """Append a marker for each delivery. `current`: it is an error if a message has another delivery by now."""
        results: list[MarqError | None] = [None] * len(receipts)
        read, good, where = self._receipts.read, [], []
        topics, producer = self._ownership.topics, self._ownership.app.producer
        stalled: dict[int, bool] = {}
        for i, text in enumerate(receipts):
            try:
                receipt = read(text)
            except MarqError as exc:
                results[i] = exc
                continue
            number = receipt[0]
            if number not in stalled:
                stalled[number] = is_stalled(producer, topics.markers, number)
            if stalled[number]:
                results[i] = stalled_error()
            else:
                good.append(receipt)
                where.append(i)
        if not good:
            return results
        confirmed = {
            number: self._ownership.outbox(number).put_confirmed(markers)
            for number, markers in by_delivery(good, marker).items()
            if number < topics.partitions
        }
        await all_done(confirmed.values(), CONFIRM_TIMEOUT_S)
        outcomes = {number: _outcome_of(future) for number, future in confirmed.items()}
        if any(isinstance(outcome, MarqError) for outcome in outcomes.values()):
            for i, receipt in zip(where, good, strict=True):
                outcome = outcomes.get(receipt[0])
                if isinstance(outcome, MarqError):
                    results[i] = outcome
        if current:
            await self._check_current(outcomes, good, where, results)
        return results

    async def _check_current(
        self,
        outcomes: dict[int, int | MarqError],
        receipts: Sequence[Receipt],
        where: Sequence[int],
        results: list[MarqError | None],
    ) -> None:
        """Ask the owners which markers came too late, and fill in an error for their receipts."""
        places: dict[int, list[int]] = {}
        for k, receipt in enumerate(receipts):
            if isinstance(outcomes.get(receipt[0]), int):
                places.setdefault(receipt[0], []).append(k)
        answers = await asyncio.gather(
            *(
                self._leases.took_effect(number, outcomes[number], [receipts[k][1:4] for k in chosen])  # type: ignore[arg-type]
                for number, chosen in places.items()
            )
        )
        for chosen, answer in zip(places.values(), answers, strict=True):
            for n, k in enumerate(chosen):
                if isinstance(answer, MarqError):
                    results[where[k]] = answer
                elif not answer[n]:
                    results[where[k]] = LeaseOverError(LEASE_OVER)


def _outcome_of(future: asyncio.Future[int]) -> int | MarqError:
    """The offset of a record (-1: not known), or the error of its append."""
    if not future.done():
        future.cancel()
        return UnavailableError("Kafka did not confirm it in time; it may still take effect")
    try:
        return future.result()
    except BrokerError as exc:
        return UnavailableError(f"Kafka did not confirm it; it may still take effect: {exc}")
