"""The requests to a service. Both surfaces call them, in an event loop."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from marq.client import wire
from marq.client.batching import Batching
from marq.client.connection import RETRY_FOR_S, TIMEOUT_S, Connection
from marq.client.wire import Deliveries, Delivery
from marq.errors import MarqError, ServiceError, UnavailableError
from marq.protocol.messages import Entry, Peeked, QueueCounts, QueueInfo, Sent

#: Seconds until a receive that returned empty too early is repeated: its worker is probably stopping.
EARLY_PAUSE_S = 0.2
#: Bytes of a payload that `peek` brings along.
PEEKED_BYTES = 64 * 1024
#: Queues per request when they are listed.
PAGE = 1_000

D = TypeVar("D", bound=Delivery)


class Action(NamedTuple):
    """A change of deliveries: the name of its route, and the rest of the request's body."""

    name: str
    values: tuple[tuple[str, Any], ...] = ()

    @property
    def settles(self) -> bool:
        """True if the delivery is over after it."""
        return self.name != "extend"


ACK = Action("ack")
UNREAD = Action("release", (("delay_ms", 0), ("counted", False)))


def extend(visibility_timeout: float) -> Action:
    """Extend the lease to so many seconds from now."""
    return Action("extend", (("visibility_timeout_ms", wire.ms(visibility_timeout)),))


def release(delay: float) -> Action:
    """Give back: delivered again after so many seconds."""
    return Action("release", (("delay_ms", wire.ms(delay)), ("counted", True)))


def reject(reason: str | None) -> Action:
    """Never deliver again: it becomes a dead letter. Characters of `reason` that are no Unicode are replaced."""
    if reason is None:
        return Action("reject")
    return Action("reject", (("reason", str(reason).encode(errors="replace").decode()),))


#: Full requests that settle deliveries at the same time. Their order does not matter. Entries that wait here use up
#: leases unseen, while a worker serves them first.
SETTLES_AT_ONCE = 16


class Operations:
    """The requests of one client, in one event loop."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        key: str | None = None,
        name: str | None = None,
        timeout: float = TIMEOUT_S,
        retry_for: float = RETRY_FOR_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.connection = Connection(addresses, key=key, timeout=timeout, retry_for=retry_for, tls=tls)
        self.name = f"{socket.gethostname()}:{os.getpid()}" if name is None else name
        self._sends = Batching(self._post_messages, lambda entry: len(entry.payload))
        self._settles = self.settles()
        self.prefetchers: set[Any] = set()

    # ------------------------------------------------------------------ messages

    async def send(self, queue: str, messages: Sequence[Any]) -> list[Any]:
        """Send messages. Returns per message its place, or the error."""
        if not messages:
            return []
        return await self._sends.put(queue, [wire.to_wire(message) for message in messages])

    async def receive(
        self,
        queue: str,
        decoder: msgspec.msgpack.Decoder[Deliveries[D]],
        limit: int,
        *,
        timeout: float | None,
        visibility_timeout: float | None,
        retry_for: float | None = None,
    ) -> list[D]:
        """Up to `limit` messages, after at most `timeout` seconds (None: when there are some)."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        path = _path(queue, "receive")
        request: dict[str, Any] = {"max": limit, "receiver": self.name}
        if visibility_timeout is not None:
            request["visibility_timeout_ms"] = wire.ms(visibility_timeout)
        while True:
            began = loop.time()
            wait = wire.WAIT_MAX_S if deadline is None else min(wire.WAIT_MAX_S, max(0.0, deadline - began))
            body = wire.encode(request | {"wait_ms": wire.ms(wait)})
            answer = await self.connection.request("POST", path, body, wait=wait, retry_for=retry_for)
            messages: list[D] = wire.decoded(decoder, answer).messages
            if messages or (deadline is not None and loop.time() >= deadline - 0.001):
                return messages
            if loop.time() - began < wait / 2:
                await asyncio.sleep(EARLY_PAUSE_S * random.uniform(0.5, 1.0))

    async def move(self, queue: str, messages: Sequence[wire.Located], to: str | None) -> list[Sent | MarqError]:
        """Move messages. Returns per message the place of its copy, or the error."""
        return await self._post_all(
            _path(queue, "move"),
            [{"partition": m.partition, "offset": m.offset} for m in messages],
            lambda places: wire.encode({"to": to, "messages": places}),
            wire.send_results,
        )

    def settles(self) -> Batching:
        """Gathers requests that settle deliveries. It does not repeat them."""
        return Batching(self._post_receipts, at_once=SETTLES_AT_ONCE)

    async def settle(
        self,
        action: Action,
        receipts: Sequence[str],
        retry_for: float | None = None,
        settles: Batching | None = None,
    ) -> list[MarqError | None]:
        """Carry out `action`. Returns per receipt None, or the error. Receipts that are refused for now are repeated on
        their own, so that the others don't wait for a partition that is stalled."""
        if not receipts:
            return []
        by = self._settles if settles is None else settles
        return await self._all(lambda left: by.put(action, left), receipts, retry_for)

    async def post_receipts(
        self, action: Action, receipts: list[str], retry_for: float | None = None
    ) -> list[MarqError | None]:
        """Carry out `action` for `receipts`, in a request of their own."""
        return await self._all(lambda left: self._post_receipts(action, left), receipts, retry_for)

    async def _post_receipts(self, action: Action, receipts: list[str]) -> list[MarqError | None]:
        values = dict(action.values)
        return await self._post_once(
            f"/v1/{action.name}", receipts, lambda r: wire.encode({"receipts": r, **values}), wire.settle_results
        )

    async def _post_messages(self, queue: str, entries: list[Entry]) -> list[Any]:
        return await self._post_all(
            _path(queue, "messages"), entries, lambda e: wire.encode({"messages": e}), wire.send_results
        )

    async def _post_all(
        self,
        path: str,
        entries: list[Any],
        body: Callable[[list[Any]], bytes],
        results_of: Callable[[bytes], list[Any]],
        retry_for: float | None = None,
    ) -> list[Any]:
        """Post entries, and repeat those that are refused for now."""
        return await self._all(lambda left: self._post_once(path, left, body, results_of), entries, retry_for)

    async def _post_once(
        self,
        path: str,
        entries: list[Any],
        body: Callable[[list[Any]], bytes],
        results_of: Callable[[bytes], list[Any]],
    ) -> list[Any]:
        outcomes = results_of(await self.connection.once("POST", path, body(entries)))
        if len(outcomes) != len(entries):
            raise ServiceError(f"{len(outcomes)} results for {len(entries)} entries; check the address")
        return outcomes

    async def _all(
        self, post: Callable[[list[Any]], Awaitable[list[Any]]], entries: Sequence[Any], retry_for: float | None
    ) -> list[Any]:
        """The results of `post`, per entry. Entries that are refused for now are posted again."""
        results: list[Any] = [None] * len(entries)
        left = list(range(len(entries)))
        answered = False

        async def attempt() -> None:
            nonlocal left, answered
            outcomes = await post([entries[i] for i in left])
            answered = True
            for i, outcome in zip(left, outcomes, strict=True):
                results[i] = outcome
            left = [i for i in left if isinstance(results[i], UnavailableError)]
            if left:
                raise results[left[0]]

        try:
            await self.connection.retried(attempt, retry_for)
        except MarqError:
            if not answered:
                raise
        return results

    # ------------------------------------------------------------------ queues

    async def create(self, queue: str, values: dict[str, Any]) -> QueueInfo:
        """Create a queue, or set all settings that are not named to their defaults."""
        return await self._admin("PUT", queue, values)

    async def change(self, queue: str, values: dict[str, Any]) -> QueueInfo:
        """Change the settings that are named."""
        return await self._admin("PATCH", queue, values)

    async def get(self, queue: str) -> QueueInfo:
        """Information about a queue."""
        return await self._admin("GET", queue)

    async def stats(self, queue: str) -> QueueCounts:
        """How a queue stands."""
        return wire.queue_counts(await self.connection.request("GET", _path(queue, "stats")))

    async def peek(self, queue: str, limit: int, state: str | None) -> list[Peeked]:
        """Messages of a queue, looked at and not received."""
        query = {"limit": str(limit), "payload_bytes": str(PEEKED_BYTES)}
        if state is not None:
            query["state"] = state
        return wire.peeked(await self.connection.request("GET", _path(queue, "messages"), query=query))

    async def delete(self, queue: str) -> None:
        """Delete a queue with its messages."""
        await self.connection.request("DELETE", _path(queue))

    async def purge(self, queue: str) -> None:
        """Delete all messages of a queue."""
        await self.connection.request("POST", _path(queue, "purge"))

    async def queue_pages(self, prefix: str) -> AsyncIterator[list[QueueInfo]]:
        """All queues whose names begin with `prefix`, in order."""
        after = ""
        while True:
            query = {"prefix": prefix, "after": after, "limit": str(PAGE)}
            answer = await self.connection.request("GET", "/v1/queues", query={k: v for k, v in query.items() if v})
            page, after = wire.queue_page(answer)
            yield page
            if not after:
                return

    async def _admin(self, method: str, queue: str, values: dict[str, Any] | None = None) -> QueueInfo:
        body = b"" if values is None else wire.encode(values)
        return wire.queue_info(await self.connection.request(method, _path(queue), body))

    # ------------------------------------------------------------------ end

    async def close(self) -> None:
        """Give back messages that were received ahead, and close the connections."""
        await asyncio.gather(*(prefetcher.close() for prefetcher in list(self.prefetchers)))
        await self._sends.close()
        await self._settles.close()
        await self.connection.close()


def _path(queue: str, *rest: str) -> str:
    return "/".join(("/v1/queues", quote(queue, safe=""), *rest))
