"""The client: queues of a marq service, from any process.

    from marq.client import Service

    with Service("http://localhost:9324") as service:
        queue = service.queue("test-queue")
        queue.send(b"hi")
        message = queue.receive(timeout=1)
        print(message.payload)
        message.ack()

`Service` and its objects block; `AsyncService` is the same for asyncio. Both are one implementation: the blocking one
runs the other in a thread of its own.

    wire          the bodies of requests and answers, and the errors in answers
    connection    HTTP: addresses, time-outs, retries
    batching      acknowledgements and sends at the same time share requests
    prefetch      messages received ahead of their reader: their leases are extended, unread ones given back
    asynchronous  AsyncService, AsyncQueue, AsyncConsumer
    loop_thread   an event loop in a thread of its own
    blocking      Service, Queue, Consumer

May import `marq.clock`, `marq.errors` and `marq.protocol`. Its dependencies are msgspec, aiohttp and tenacity.
"""

from marq.client.asynchronous import AsyncConsumer, AsyncMessage, AsyncQueue, AsyncService
from marq.client.blocking import Consumer, Message, Queue, Service
from marq.client.wire import Outgoing
from marq.protocol.messages import Peeked, QueueCounts, QueueInfo, Sent

__all__ = [
    "AsyncConsumer",
    "AsyncMessage",
    "AsyncQueue",
    "AsyncService",
    "Consumer",
    "Message",
    "Outgoing",
    "Peeked",
    "Queue",
    "QueueCounts",
    "QueueInfo",
    "Sent",
    "Service",
]
