"""The client for asyncio: like `marq.client.blocking`, with `await`."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from marq.client import operations
from marq.client.connection import RETRY_FOR_S, TIMEOUT_S, unwrap
from marq.client.operations import ACK, Action, Operations
from marq.client.prefetch import MAX_IN_FLIGHT, PREFETCH, VISIBILITY_TIMEOUT_S, Prefetcher, Tracked
from marq.client.wire import Deliveries, Located, Outgoing, several
from marq.errors import LeaseOverError, MarqError
from marq.protocol.messages import Peeked, QueueCounts, QueueInfo, Sent

T = TypeVar("T", bound=Tracked)


class AsyncMessage(Tracked, eq=False):
    """One delivery of a message. It is yours until you acknowledge, release or reject it, or its lease ends.

    `async with message:` acknowledges it at the end of the block, or releases it if the block raises.
    """

    async def ack(self) -> None:
        """Finish the message: it is never delivered again.

        Returns when that is durable; for a message of a consumer with `confirm=False`, at once.

        Raises:
            BadReceiptError: the service knows no such delivery.
            UnavailableError: it could not be confirmed. The message may be delivered again.
        """
        await self._owner.ack(self)

    def ack_soon(self) -> asyncio.Future[None]:
        """Like `ack`, as a future. Acknowledgements at the same time share a request."""
        return asyncio.ensure_future(self._owner.confirmed(ACK, self))  # type: ignore[no-any-return]

    async def extend(self, visibility_timeout: float = VISIBILITY_TIMEOUT_S) -> None:
        """Extend the lease: it ends `visibility_timeout` seconds from now. A consumer does that by itself."""
        await self._owner.confirmed(operations.extend(visibility_timeout), self)

    async def release(self, delay: float = 0.0) -> None:
        """Give the message back: it is delivered again, as one more attempt, after `delay` seconds."""
        await self._owner.confirmed(operations.release(delay), self)

    async def reject(self, reason: str | None = None) -> None:
        """Give up on the message: it becomes a dead letter now."""
        await self._owner.confirmed(operations.reject(reason), self)

    @property
    def settled(self) -> bool:
        """True once it was acknowledged, released or rejected here."""
        return self._settled

    async def __aenter__(self) -> AsyncMessage:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._settled:
            if kind is None:
                await self.ack()
            else:
                with contextlib.suppress(
                    LeaseOverError
                ):  # then it comes again anyway; the caller's error is the one to see
                    await self.release()


_decoder = msgspec.msgpack.Decoder(Deliveries[AsyncMessage])


class Owner:
    """Settles the messages of one receiver."""

    __slots__ = ("background", "operations", "prefetcher")

    def __init__(
        self, operations: Operations, prefetcher: Prefetcher[Any] | None = None, background: bool = False
    ) -> None:
        self.operations = operations
        self.prefetcher = prefetcher
        self.background = background

    async def settle(self, action: Action, messages: Sequence[Tracked]) -> list[MarqError | None]:
        """Carry out `action`. Returns per message None, or the error."""
        for message in messages:
            message._settled = message._settled or action.settles
        if self.prefetcher is not None:
            return await self.prefetcher.settle(action, list(messages))
        return await self.operations.settle(action, [m.receipt for m in messages])

    async def confirmed(self, action: Action, message: Tracked) -> None:
        """Carry out `action`, or raise the error."""
        unwrap((await self.settle(action, (message,)))[0])

    async def ack(self, message: Tracked) -> None:
        """Acknowledge, in the background if the consumer was made for that."""
        prefetcher = self.prefetcher
        if prefetcher is None or not self.background or prefetcher.closed:
            await self.confirmed(ACK, message)
            return
        message._settled = True
        if prefetcher.later((message,)):
            asyncio.get_running_loop().call_soon(prefetcher.send_later)


async def settle_all(action: Action, messages: Sequence[Any]) -> list[MarqError | None]:
    """Settle messages of any receivers of one service. Returns per message None, or the error."""
    owners = {id(m._owner): m._owner for m in messages}
    if len(owners) == 1:
        return await messages[0]._owner.settle(action, messages)  # type: ignore[no-any-return]
    results: list[MarqError | None] = [None] * len(messages)
    for name, owner in owners.items():
        where = [i for i, m in enumerate(messages) if id(m._owner) == name]
        for i, result in zip(where, await owner.settle(action, [messages[i] for i in where]), strict=True):
            results[i] = result
    return results


class AsyncService:
    """A marq service. Make one per process and event loop, and close it at the end; `async with` does that.

    Args:
        addresses: of one or more of its workers. When one fails, the next is used. Any worker serves every queue.
        key: a key that the service accepts (`MARQ_KEYS`).
        name: name of this receiver, recorded with what it receives. Default: host and process.
        timeout: seconds for an answer to a request.
        retry_for: seconds for which a request is repeated while the service is away or not available, after growing
            random pauses, or pauses that the service asks for. A repeated send may store the message twice.
        tls: for https with certificates of your own.
    """

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
        self._operations = Operations(addresses, key=key, name=name, timeout=timeout, retry_for=retry_for, tls=tls)

    def queue(self, name: str) -> AsyncQueue:
        """A queue. This sends no request."""
        return AsyncQueue(self._operations, name)

    async def queues(self, prefix: str = "") -> AsyncIterator[QueueInfo]:
        """All queues whose names begin with `prefix`, in order."""
        async for page in self._operations.queue_pages(prefix):
            for info in page:
                yield info

    async def close(self) -> None:
        """Close all consumers and connections."""
        await self._operations.close()

    async def __aenter__(self) -> AsyncService:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(self._operations.connection.addresses)}>"


class AsyncQueue:
    """A queue of a service."""

    def __init__(self, operations: Operations, name: str) -> None:
        self.name = name
        self._operations = operations
        self._owner = Owner(operations)

    async def send(
        self,
        payload: bytes | str,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes | str] | None = None,
        delay: float | None = None,
        ttl: float | None = None,
        group: str | None = None,
        deduplication_id: str | None = None,
    ) -> Sent:
        """Send one message. Returns when it is durable. See `Outgoing` for the arguments.

        Sends at the same time share requests.

        Raises:
            BadValueError, TooLargeError, UnknownQueueError: the message was refused.
            UnavailableError: the send was not confirmed, but the message may be stored.
        """
        message = Outgoing(payload, key, headers or {}, delay, ttl, group, deduplication_id)
        sent: Sent = unwrap((await self._operations.send(self.name, (message,)))[0])
        return sent

    async def send_many(self, messages: Iterable[bytes | str | Outgoing]) -> list[Sent | MarqError]:
        """Send messages, in order. Returns per message its place, or the error.

        Up to 500 messages of one request go to one partition, and the next request to the next one. For a few large
        batches that many receivers should share, send smaller ones.

        Raises:
            MarqError: nothing was accepted.
        """
        return await self._operations.send(self.name, several(messages))

    async def receive(
        self, *, timeout: float | None = 0.0, visibility_timeout: float | None = None
    ) -> AsyncMessage | None:
        """Receive one message, or None if there is none within `timeout` seconds (None: wait for one).

        It is yours for `visibility_timeout` seconds (None: as the queue says).
        """
        messages = await self.receive_many(1, timeout=timeout, visibility_timeout=visibility_timeout)
        return messages[0] if messages else None

    async def receive_many(
        self, max: int = 10, *, timeout: float | None = 0.0, visibility_timeout: float | None = None
    ) -> list[AsyncMessage]:
        """Receive up to `max` messages (at most 1,000): those there now, else the first within `timeout` seconds."""
        messages = await self._operations.receive(
            self.name, _decoder, max, timeout=timeout, visibility_timeout=visibility_timeout
        )
        for message in messages:
            message._owner = self._owner
        return messages

    async def ack_many(self, messages: Sequence[AsyncMessage]) -> list[MarqError | None]:
        """Acknowledge messages. Returns per message None once that is durable, or the error."""
        return await settle_all(ACK, messages)

    async def extend_many(
        self, messages: Sequence[AsyncMessage], visibility_timeout: float = VISIBILITY_TIMEOUT_S
    ) -> list[MarqError | None]:
        """Extend the leases of messages. Returns per message None, or the error."""
        return await settle_all(operations.extend(visibility_timeout), messages)

    async def release_many(self, messages: Sequence[AsyncMessage], delay: float = 0.0) -> list[MarqError | None]:
        """Give messages back. Returns per message None, or the error."""
        return await settle_all(operations.release(delay), messages)

    async def move(self, messages: Sequence[Located], to: str | None = None) -> list[Sent | MarqError]:
        """Move messages that are ready in this queue, at most 1,000, to another queue, each once.

        Args:
            messages: the messages; only their partition and offset are used.
            to: the queue. None: each dead letter goes to the queue that it came from.

        Returns:
            Per message its new place, or the error: `LeaseOverError` if it is finished or in flight.
        """
        return await self._operations.move(self.name, messages, to)

    def consume(
        self,
        *,
        prefetch: int = PREFETCH,
        max_in_flight: int = MAX_IN_FLIGHT,
        visibility_timeout: float = VISIBILITY_TIMEOUT_S,
        confirm: bool = False,
        timeout: float | None = None,
    ) -> AsyncConsumer:
        """Iterate over messages, which are received ahead. Their leases are extended until they are settled.

        Args:
            prefetch: messages received ahead; 0: each is received when it is asked for.
            max_in_flight: messages held at once, unread ones included. While so many are not settled, none are
                received.
            visibility_timeout: seconds after which a message is delivered again if this process dies. While it lives,
                leases are extended.
            confirm: False: `ack()` returns at once. Acknowledgements are sent together within milliseconds, at the
                latest when the consumer is closed; failures are logged, and raised by `flush()`. True: `ack()` returns
                when it is durable.
            timeout: the iteration ends when no message came for so many seconds. None: it never ends.
        """
        prefetcher: Prefetcher[AsyncMessage] = Prefetcher(
            self._operations,
            self.name,
            _decoder,
            lambda p: Owner(self._operations, p, background=not confirm),
            prefetch=prefetch,
            max_in_flight=max_in_flight,
            visibility_timeout=visibility_timeout,
        )
        return AsyncConsumer(prefetcher, timeout)

    async def create(self, **settings: Any) -> QueueInfo:
        """Create the queue with `settings`, such as `max_receives=5`. Others get their defaults."""
        return await self._operations.create(self.name, settings)

    async def set(self, **settings: Any) -> QueueInfo:
        """Change these settings, and leave the others."""
        return await self._operations.change(self.name, settings)

    async def get(self) -> QueueInfo:
        """Information about the queue, with its settings. Raises `UnknownQueueError`."""
        return await self._operations.get(self.name)

    async def stats(self) -> QueueCounts:
        """How many messages the queue has by state, and how old the oldest is. Raises `UnknownQueueError`."""
        return await self._operations.stats(self.name)

    async def peek(self, max: int = 10, *, state: str | None = None) -> list[Peeked]:
        """Look at messages without receiving them, in the order of partitions.

        Args:
            max: at most so many, up to 1,000.
            state: "ready", "delayed" or "in_flight"; None: all.

        Returns:
            The messages, each with up to 64 KiB of its payload.
        """
        return await self._operations.peek(self.name, max, state)

    async def delete(self) -> None:
        """Delete the queue and its messages."""
        await self._operations.delete(self.name)

    async def purge(self) -> None:
        """Delete all messages that are in the queue now."""
        await self._operations.purge(self.name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class AsyncConsumer:
    """`async for message in queue.consume():`. Close it, or use `async with`: then unread messages go back uncounted.

    Messages that you got and did not settle stay yours until their leases end, but these are no longer extended.
    """

    def __init__(self, prefetcher: Prefetcher[AsyncMessage], timeout: float | None) -> None:
        self._prefetcher = prefetcher
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> AsyncConsumer:
        return self

    async def __anext__(self) -> AsyncMessage:
        prefetcher = self._prefetcher
        while not prefetcher.closed:
            message = prefetcher.read()
            if message is not None:
                if prefetcher.is_low:
                    prefetcher.wake()
                return message
            if not await prefetcher.wait(self._timeout):
                break
        raise StopAsyncIteration

    async def take(self, max: int, *, timeout: float | None = None) -> list[AsyncMessage]:
        """Up to `max` of the messages received ahead. Waits for the first one, at most `timeout` seconds."""
        prefetcher = self._prefetcher
        while not prefetcher.closed:
            if messages := prefetcher.read_many(max):
                if prefetcher.is_low:
                    prefetcher.wake()
                return messages
            if not await prefetcher.wait(timeout):
                break
        return []

    async def ack_many(self, messages: Sequence[AsyncMessage]) -> None:
        """Acknowledge messages of this consumer, each like `message.ack()`."""
        owner = self._prefetcher.owner
        if owner.background and not self._prefetcher.closed:
            for message in messages:
                message._settled = True
            if self._prefetcher.later(messages):
                self._loop.call_soon(self._prefetcher.send_later)
            return
        for result in await owner.settle(ACK, messages):
            unwrap(result)

    async def flush(self) -> None:
        """Wait until all acknowledgements so far are durable. Raises the first failure since the last flush."""
        await self._prefetcher.flush()

    async def close(self) -> None:
        """Send the last acknowledgements, give unread messages back, and end the iteration."""
        await self._prefetcher.close()

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # after a `break` out of a loop over a consumer without a name
        if not self._prefetcher.closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._prefetcher.close_soon)
