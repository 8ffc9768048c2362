"""Calls to the owner of a partition: this worker, or another one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from app.cluster.peers import CALL_TIMEOUT_S, Peers
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from marq.errors import UnavailableError

#: Seconds that another worker has to carry out an operation, which may wait for Kafka.
OPERATION_TIMEOUT_S = 20.0

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")


class Owners:
    """Finds and asks the owners of partitions."""

    def __init__(self, ownership: Ownership, peers: Peers) -> None:
        self._ownership = ownership
        self._peers = peers

    def serving_here(self, number: int) -> OwnedPartition:
        """A partition that this worker serves. Raises `UnavailableError`."""
        owned = self._ownership.owned.get(number)
        if owned is None or not owned.serving:
            raise UnavailableError(f"partition {number} is not served here right now; try again")
        return owned

    def hurry(self) -> None:
        """The caller waits for records of a partition here that are not read yet."""
        self._ownership.hurry()

    async def ask(
        self,
        number: int,
        operation: Callable[[Argument], Awaitable[Answer]],
        argument: Argument,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Answer:
        """Call a `@peer_call` of the owner of a partition. Returns its answer.

        Raises:
            UnavailableError: nobody serves the partition right now.
        """
        owned = self._ownership.owned.get(number)
        if owned is not None and owned.serving:
            return await operation(argument)
        url = self._peers.owner_of(number)
        if url is None or url == self._peers.url:
            raise UnavailableError(f"partition {number} is served by nobody right now")
        return await self._peers.call(url, operation, argument, timeout_s)
