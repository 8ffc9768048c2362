"""The client for asyncio: like `marq.client.blocking`, with `await`."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from marq.client import operations
from marq.client.connection import RETRY_FOR_S, TIMEOUT_S, unwrap
from marq.client.operations import ACK, Action, Operations
from marq.client.prefetch import MAX_IN_FLIGHT, PREFETCH, VISIBILITY_TIMEOUT_S, Prefetcher, Tracked
from marq.client.wire import Deliveries, Located, Outgoing
from marq.errors import LeaseOverError, MarqError
from marq.protocol.messages import QueueInfo, Sent

T = TypeVar("T", bound=Tracked)


class AsyncMessage(Tracked, eq=False):
    """One delivery of a message, yours until it is acknowledged, given back, rejected, or its lease is over.

    ``async with message:`` acknowledges it at the end of the block, or gives it back if the block raises.
    """

    async def ack(self) -> None:
        """Finished: never delivered again.

        Returns when that is durable; for a message of a consumer with ``confirm=False`` at once.

        Raises:
            BadReceiptError: the service knows no such delivery.
            UnavailableError: it could not be confirmed; the message may be delivered again.
        """
        await self._owner.ack(self)

    def ack_soon(self) -> asyncio.Future[None]:
        """Like `ack`, as a future; acknowledgements under way at the same time share a request."""
        return asyncio.ensure_future(self._owner.confirmed(ACK, self))  # type: ignore[no-any-return]

    async def extend(self, visibility_timeout: float = VISIBILITY_TIMEOUT_S) -> None:
        """Still at work: the lease ends so many seconds from now. A consumer does that by itself."""
        await self._owner.confirmed(operations.extend(visibility_timeout), self)

    async def release(self, delay: float = 0.0) -> None:
        """Give it back: delivered again, as one more attempt, after `delay` seconds."""
        await self._owner.confirmed(operations.release(delay), self)

    async def reject(self, reason: str | None = None) -> None:
        """It can't be handled, now or ever: it goes to the dead letters."""
        await self._owner.confirmed(operations.reject(reason), self)

    @property
    def settled(self) -> bool:
        """True once it was acknowledged, given back or rejected here."""
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
    """What the messages of one receiver are settled with."""

    __slots__ = ("background", "operations", "prefetcher")

    def __init__(
        self, operations: Operations, prefetcher: Prefetcher[Any] | None = None, background: bool = False
    ) -> None:
        self.operations = operations
        self.prefetcher = prefetcher
        self.background = background

    async def settle(self, action: Action, messages: Sequence[Tracked]) -> list[MarqError | None]:
        """Per message None, or why it was not carried out."""
        for message in messages:
            message._settled = message._settled or action.settles
        if self.prefetcher is not None:
            return await self.prefetcher.settle(action, list(messages))
        return await self.operations.settle(action, [m.receipt for m in messages])

    async def confirmed(self, action: Action, message: Tracked) -> None:
        """Carry out, or raise why not."""
        unwrap((await self.settle(action, (message,)))[0])

    async def ack(self, message: Tracked) -> None:
        """Acknowledge, in the background if that is what the consumer was made for."""
        prefetcher = self.prefetcher
        if prefetcher is None or not self.background or prefetcher.closed:
            await self.confirmed(ACK, message)
            return
        message._settled = True
        if prefetcher.later((message,)):
            asyncio.get_running_loop().call_soon(prefetcher.send_later)


async def settle_all(action: Action, messages: Sequence[Any]) -> list[MarqError | None]:
    """Settle messages of any receivers of one service; per message None or why not."""
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
    """A marq service. Make one per process and event loop and close it at the end; ``async with`` does.

    Args:
        addresses: of one or more of its workers; when one fails the next is used. Any worker serves every queue.
        key: what the service was told to let in (``MARQ_KEYS``).
        name: of this receiver, noted with what it receives (default: host and process).
        timeout: seconds until a request has to be answered.
        retry_for: seconds that a request is tried again for while the service is away or not available, with growing
            random pauses, or those that it asks for. A send that is tried again may be there twice.
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
        """A queue; nothing is asked of the service yet."""
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
        key: bytes | None = None,
        headers: dict[str, bytes] | None = None,
        delay: float | None = None,
        ttl: float | None = None,
        group: str | None = None,
        deduplication_id: str | None = None,
    ) -> Sent:
        """Send one message; returns when it is durable. See `Outgoing` for the arguments.

        Sends that are under way at the same time share requests.

        Raises:
            BadValueError, TooLargeError, UnknownQueueError: it was refused.
            UnavailableError: it was not confirmed; it may be there all the same.
        """
        message = Outgoing(payload, key, headers or {}, delay, ttl, group, deduplication_id)
        sent: Sent = unwrap((await self._operations.send(self.name, (message,)))[0])
        return sent

    async def send_many(self, messages: Iterable[bytes | str | Outgoing]) -> list[Sent | MarqError]:
        """Send messages, in order; per message where it is, or the error that kept it from there.

        Raises:
            MarqError: nothing was accepted.
        """
        return await self._operations.send(self.name, list(messages))

    async def receive(
        self, *, timeout: float | None = 0.0, visibility_timeout: float | None = None
    ) -> AsyncMessage | None:
        """Take one message; None if there is none within `timeout` seconds (None: wait for one).

        It is yours for `visibility_timeout` seconds (None: as the queue says).
        """
        messages = await self.receive_many(1, timeout=timeout, visibility_timeout=visibility_timeout)
        return messages[0] if messages else None

    async def receive_many(
        self, max: int = 10, *, timeout: float | None = 0.0, visibility_timeout: float | None = None
    ) -> list[AsyncMessage]:
        """Take up to `max` messages (at most 1,000): what is there, else what comes first within `timeout` seconds."""
        messages = await self._operations.receive(
            self.name, _decoder, max, timeout=timeout, visibility_timeout=visibility_timeout
        )
        for message in messages:
            message._owner = self._owner
        return messages

    async def ack_many(self, messages: Sequence[AsyncMessage]) -> list[MarqError | None]:
        """Acknowledge messages; per message None once that is durable, or why it is not."""
        return await settle_all(ACK, messages)

    async def extend_many(
        self, messages: Sequence[AsyncMessage], visibility_timeout: float = VISIBILITY_TIMEOUT_S
    ) -> list[MarqError | None]:
        """Extend the leases of messages; per message None, or why it was not done."""
        return await settle_all(operations.extend(visibility_timeout), messages)

    async def release_many(self, messages: Sequence[AsyncMessage], delay: float = 0.0) -> list[MarqError | None]:
        """Give messages back; per message None, or why it was not done."""
        return await settle_all(operations.release(delay), messages)

    async def move(self, messages: Sequence[Located], to: str | None = None) -> list[Sent | MarqError]:
        """Put messages that are ready in this queue, at most 1,000, into another one, each once.

        Args:
            messages: which ones; only their partition and offset count.
            to: the queue (None: for each the one of which it is a dead letter).

        Returns:
            Per message where it is now, or why it was not moved: `LeaseOverError` if it is finished or in work.
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
        """Messages one after the other, taken ahead and kept alive until they are settled.

        Args:
            prefetch: messages taken ahead; 0: each is taken when it is asked for.
            max_in_flight: messages held at once, unread ones included; when so many are not settled, no more come.
            visibility_timeout: seconds after which a message is delivered again if this process dies. While it lives,
                leases are extended.
            confirm: False: ``ack()`` returns at once and acknowledgements are sent together within milliseconds, at the
                latest when the consumer is closed; failures are logged, and raised by ``flush()``. True: ``ack()``
                returns when it is durable.
            timeout: the iteration ends when no message came for so many seconds (None: it goes on for ever).
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
        """Make the queue with `settings`, such as ``max_receives=5``; those not named get their defaults."""
        return await self._operations.create(self.name, settings)

    async def set(self, **settings: Any) -> QueueInfo:
        """Change the settings that are named."""
        return await self._operations.change(self.name, settings)

    async def get(self) -> QueueInfo:
        """What the service tells of the queue, its settings included. Raises `UnknownQueueError`."""
        return await self._operations.get(self.name)

    async def delete(self) -> None:
        """Remove the queue and its messages."""
        await self._operations.delete(self.name)

    async def purge(self) -> None:
        """Drop all messages that are in the queue now."""
        await self._operations.purge(self.name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class AsyncConsumer:
    """``async for message in queue.consume():``. Close it, or use ``async with``: what is unread goes back uncounted.

    What was handed out and is not settled stays yours until its lease is over, but is not kept alive any more.
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
        """Up to `max` messages of those taken ahead; waits for the first, at most `timeout` seconds."""
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
        """Acknowledge messages of this consumer, each like ``message.ack()``."""
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
        """Send the last acknowledgements, give back what is unread, end the iteration."""
        await self._prefetcher.close()

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # a loop that was left with `break` and kept no name for this
        if not self._prefetcher.closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._prefetcher.close_soon)
