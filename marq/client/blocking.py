"""The client for programs that block.

    >>> service = Service("http://localhost:9324")
    >>> queue = service.queue("test-queue")
    >>> queue
    <Queue 'test-queue'>
    >>> service.close()

Requests are made in a thread of the service's own, where the asyncio client runs. All objects may be used by several
threads.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from marq.client import operations
from marq.client.asynchronous import Owner as AsyncOwner
from marq.client.asynchronous import settle_all
from marq.client.connection import RETRY_FOR_S, TIMEOUT_S, unwrap
from marq.client.loop_thread import Runner
from marq.client.operations import ACK, UNREAD, Action, Operations
from marq.client.prefetch import MAX_IN_FLIGHT, PREFETCH, VISIBILITY_TIMEOUT_S, Prefetcher, Tracked
from marq.client.wire import Deliveries, Located, Outgoing, several
from marq.errors import LeaseOverError, MarqError
from marq.protocol.messages import Peeked, QueueCounts, QueueInfo, Sent

T = TypeVar("T")


class Owner:
    """Settles the messages of one receiver, with the asyncio client's `Owner` in the runner's loop."""

    __slots__ = ("_of", "runner")

    def __init__(self, runner: Runner, of: AsyncOwner) -> None:
        self.runner = runner
        self._of = of

    @property
    def settle(self) -> Any:
        """Carry out an action. Returns per message None, or the error. Runs in the loop."""
        return self._of.settle

    def confirmed(self, action: Action, message: Message) -> None:
        """Carry out `action`, or raise the error."""
        self.runner.run(self._of.confirmed(action, message))

    def confirmed_soon(self, action: Action, message: Message) -> concurrent.futures.Future[None]:
        """Carry out `action`, without waiting."""
        return self.runner.start(self._of.confirmed(action, message))

    def ack(self, messages: Sequence[Message]) -> None:
        """Acknowledge, in the background if the consumer was made for that."""
        prefetcher = self._of.prefetcher
        if prefetcher is not None and self._of.background and not prefetcher.closed:
            for message in messages:
                message._settled = True
            if prefetcher.later(messages):
                self.runner.loop.call_soon_threadsafe(prefetcher.send_later)
            return
        for result in self.runner.run(self._of.settle(ACK, messages)):
            unwrap(result)


class Message(Tracked, eq=False):
    """One delivery of a message. It is yours until you acknowledge, release or reject it, or its lease ends.

    `with message:` acknowledges it at the end of the block, or releases it if the block raises.
    """

    def ack(self) -> None:
        """Finish the message: it is never delivered again.

        Returns when that is durable; for a message of a consumer with `confirm=False`, at once.

        Raises:
            BadReceiptError: the service knows no such delivery.
            UnavailableError: it could not be confirmed. The message may be delivered again.
        """
        self._owner.ack((self,))

    def ack_soon(self) -> concurrent.futures.Future[None]:
        """Like `ack`, as a future. Acknowledgements at the same time share a request."""
        return self._owner.confirmed_soon(ACK, self)  # type: ignore[no-any-return]

    def extend(self, visibility_timeout: float = VISIBILITY_TIMEOUT_S) -> None:
        """Extend the lease: it ends `visibility_timeout` seconds from now. A consumer does that by itself."""
        self._owner.confirmed(operations.extend(visibility_timeout), self)

    def release(self, delay: float = 0.0) -> None:
        """Give the message back: it is delivered again, as one more attempt, after `delay` seconds."""
        self._owner.confirmed(operations.release(delay), self)

    def reject(self, reason: str | None = None) -> None:
        """Give up on the message: it becomes a dead letter now."""
        self._owner.confirmed(operations.reject(reason), self)

    @property
    def settled(self) -> bool:
        """True once it was acknowledged, released or rejected here."""
        return self._settled

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._settled:
            if kind is None:
                self.ack()
            else:
                with contextlib.suppress(
                    LeaseOverError
                ):  # then it comes again anyway; the caller's error is the one to see
                    self.release()


_decoder = msgspec.msgpack.Decoder(Deliveries[Message])


class Service:
    """A marq service. Make one per process, and close it at the end; `with` does that.

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
        self._runner = Runner(self._operations)

    def queue(self, name: str) -> Queue:
        """A queue. This sends no request."""
        return Queue(self._operations, self._runner, name)

    def queues(self, prefix: str = "") -> Iterator[QueueInfo]:
        """All queues whose names begin with `prefix`, in order."""
        pages = self._operations.queue_pages(prefix)
        while (page := self._runner.run(_next(pages))) is not None:
            yield from page

    def close(self) -> None:
        """Close all consumers and connections."""
        self._runner.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(self._operations.connection.addresses)}>"


async def _next(iterator: AsyncIterator[T]) -> T | None:
    return await anext(iterator, None)


class Queue:
    """A queue of a service."""

    def __init__(self, operations: Operations, runner: Runner, name: str) -> None:
        self.name = name
        self._operations = operations
        self._runner = runner
        self._owner = Owner(runner, AsyncOwner(operations))

    def send(
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

        Sends of several threads at the same time share requests.

        Raises:
            BadValueError, TooLargeError, UnknownQueueError: the message was refused.
            UnavailableError: the send was not confirmed, but the message may be stored.
        """
        message = Outgoing(payload, key, headers or {}, delay, ttl, group, deduplication_id)
        sent: Sent = unwrap(self._runner.run(self._operations.send(self.name, (message,)))[0])
        return sent

    def send_many(self, messages: Iterable[bytes | str | Outgoing]) -> list[Sent | MarqError]:
        """Send messages, in order. Returns per message its place, or the error.

        Up to 500 messages of one request go to one partition, and the next request to the next one. For a few large
        batches that many receivers should share, send smaller ones.

        Raises:
            MarqError: nothing was accepted.
        """
        return self._runner.run(self._operations.send(self.name, several(messages)))

    def receive(self, *, timeout: float | None = 0.0, visibility_timeout: float | None = None) -> Message | None:
        """Receive one message, or None if there is none within `timeout` seconds (None: wait for one).

        It is yours for `visibility_timeout` seconds (None: as the queue says).
        """
        messages = self.receive_many(1, timeout=timeout, visibility_timeout=visibility_timeout)
        return messages[0] if messages else None

    def receive_many(
        self, max: int = 10, *, timeout: float | None = 0.0, visibility_timeout: float | None = None
    ) -> list[Message]:
        """Receive up to `max` messages (at most 1,000): those there now, else the first within `timeout` seconds."""
        future = self._runner.start(
            self._operations.receive(self.name, _decoder, max, timeout=timeout, visibility_timeout=visibility_timeout)
        )
        try:
            messages = future.result()
        except BaseException:
            # Ctrl-C: the service notices that nobody waits any more. If it answered already, we give the messages back
            if not future.cancel() and not future.cancelled() and future.exception() is None:
                receipts = [m.receipt for m in future.result()]
                self._runner.run(self._operations.settle(UNREAD, receipts))
            raise
        for message in messages:
            message._owner = self._owner
        return messages

    def ack_many(self, messages: Sequence[Message]) -> list[MarqError | None]:
        """Acknowledge messages. Returns per message None once that is durable, or the error."""
        return self._settle_all(ACK, messages)

    def extend_many(
        self, messages: Sequence[Message], visibility_timeout: float = VISIBILITY_TIMEOUT_S
    ) -> list[MarqError | None]:
        """Extend the leases of messages. Returns per message None, or the error."""
        return self._settle_all(operations.extend(visibility_timeout), messages)

    def release_many(self, messages: Sequence[Message], delay: float = 0.0) -> list[MarqError | None]:
        """Give messages back. Returns per message None, or the error."""
        return self._settle_all(operations.release(delay), messages)

    def move(self, messages: Sequence[Located], to: str | None = None) -> list[Sent | MarqError]:
        """Move messages that are ready in this queue, at most 1,000, to another queue, each once.

        Args:
            messages: the messages; only their partition and offset are used.
            to: the queue. None: each dead letter goes to the queue that it came from.

        Returns:
            Per message its new place, or the error: `LeaseOverError` if it is finished or in flight.
        """
        return self._runner.run(self._operations.move(self.name, messages, to))

    def _settle_all(self, action: Action, messages: Sequence[Message]) -> list[MarqError | None]:
        return self._runner.run(settle_all(action, messages))

    def consume(
        self,
        *,
        prefetch: int = PREFETCH,
        max_in_flight: int = MAX_IN_FLIGHT,
        visibility_timeout: float = VISIBILITY_TIMEOUT_S,
        confirm: bool = False,
        timeout: float | None = None,
    ) -> Consumer:
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

        def owner(prefetcher: Prefetcher[Message]) -> Owner:
            return Owner(self._runner, AsyncOwner(self._operations, prefetcher, background=not confirm))

        async def started() -> Prefetcher[Message]:
            return Prefetcher(
                self._operations,
                self.name,
                _decoder,
                owner,
                prefetch=prefetch,
                max_in_flight=max_in_flight,
                visibility_timeout=visibility_timeout,
            )

        return Consumer(self._runner, self._runner.run(started()), timeout)

    def create(self, **settings: Any) -> QueueInfo:
        """Create the queue with `settings`, such as `max_receives=5`. Others get their defaults."""
        return self._runner.run(self._operations.create(self.name, settings))

    def set(self, **settings: Any) -> QueueInfo:
        """Change these settings, and leave the others."""
        return self._runner.run(self._operations.change(self.name, settings))

    def get(self) -> QueueInfo:
        """Information about the queue, with its settings. Raises `UnknownQueueError`."""
        return self._runner.run(self._operations.get(self.name))

    def stats(self) -> QueueCounts:
        """How many messages the queue has by state, and how old the oldest is. Raises `UnknownQueueError`."""
        return self._runner.run(self._operations.stats(self.name))

    def peek(self, max: int = 10, *, state: str | None = None) -> list[Peeked]:
        """Look at messages without receiving them, in the order of partitions.

        Args:
            max: at most so many, up to 1,000.
            state: "ready", "delayed" or "in_flight"; None: all.

        Returns:
            The messages, each with up to 64 KiB of its payload.
        """
        return self._runner.run(self._operations.peek(self.name, max, state))

    def delete(self) -> None:
        """Delete the queue and its messages."""
        self._runner.run(self._operations.delete(self.name))

    def purge(self) -> None:
        """Delete all messages that are in the queue now."""
        self._runner.run(self._operations.purge(self.name))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class Consumer:
    """`for message in queue.consume():`. Leaving the loop closes it: unread messages go back uncounted.

    That holds for `break`, an exception and Ctrl-C, as long as nothing else refers to the consumer. If it has a name,
    use `with` or `close()`. Messages that you got and did not settle stay yours until their leases end, but these are
    no longer extended. Several threads may iterate over one consumer.
    """

    def __init__(self, runner: Runner, prefetcher: Prefetcher[Message], timeout: float | None) -> None:
        self._runner = runner
        self._prefetcher = prefetcher
        self._timeout = timeout

    def __iter__(self) -> Consumer:
        return self

    def __next__(self) -> Message:
        message = self._read(self._prefetcher.read, self._timeout)
        if message is None:
            raise StopIteration
        return message

    def take(self, max: int, *, timeout: float | None = None) -> list[Message]:
        """Up to `max` of the messages received ahead. Waits for the first one, at most `timeout` seconds."""
        return self._read(lambda: self._prefetcher.read_many(max) or None, timeout) or []

    def _read(self, read: Callable[[], T | None], timeout: float | None) -> T | None:
        prefetcher = self._prefetcher
        while not prefetcher.closed:
            found = read()
            if found is not None:
                if prefetcher.is_low:
                    self._runner.loop.call_soon_threadsafe(prefetcher.wake)
                return found
            if not self._runner.run(prefetcher.wait(timeout)):
                break
        return None

    def ack_many(self, messages: Sequence[Message]) -> None:
        """Acknowledge messages of this consumer, each like `message.ack()`."""
        self._prefetcher.owner.ack(messages)

    def flush(self) -> None:
        """Wait until all acknowledgements so far are durable. Raises the first failure since the last flush."""
        self._runner.run(self._prefetcher.flush())

    def close(self) -> None:
        """Send the last acknowledgements, give unread messages back, and end the iteration."""
        if not self._prefetcher.closed and not self._runner.closed:
            self._runner.run(self._prefetcher.close())

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
