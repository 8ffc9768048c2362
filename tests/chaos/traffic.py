"""Clients of every protocol: senders that know what was confirmed, receivers that write down what they did.

Each client knows all workers, and goes on to the next one when a request fails. No request waits for longer than
`PATIENCE_S`. A message of a FIFO stream is sent again, with the same deduplication id, until it is confirmed; then
comes the next of its group. Other messages are not sent again, except by `marq.client` itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from botocore.exceptions import BotoCoreError, ClientError

from app.kafka.connection import end_client
from app.service.receipts import read_unchecked
from marq.client import Outgoing, Sent, Service
from marq.errors import MarqError
from tests.chaos.history import FIFO, Asked, History, Name, Place, Seen
from tests.integration.json_client import Client
from tests.integration.sqs_client import client_of

#: Most seconds for an answer, besides the wait of a receive.
PATIENCE_S = 5.0
#: Seconds that a receive waits for a message.
WAIT_S = 1.0
#: Seconds for which the Python client repeats a request by itself, and for which all repeat acknowledgements.
RETRY_S = 20.0
#: Most seconds until the producer's sends count as not confirmed.
KAFKA_PATIENCE_S = 60.0
#: Seconds until a client goes on after an error.
PAUSE_S = 0.2
GROUPS = 4
#: Most messages of a receive; SQS permits 10.
RECEIVES_AT_MOST = 100


class Failed(Exception):
    """A request got no answer, or an error."""


FAILURES = (Failed, MarqError, ClientError, BotoCoreError, OSError, http.client.HTTPException, AssertionError)


class Got(NamedTuple):
    """A message that a client received, and what acknowledges it."""

    id: str
    place: Place
    attempt: int
    handle: Any


class Channel(ABC):
    """A client of one queue, in one thread."""

    def __init__(self, urls: list[str], queue: str) -> None:
        self.urls = itertools.cycle(urls)
        self.queue = queue
        self.next()

    @abstractmethod
    def next(self) -> None:
        """Go on to the next worker."""

    @abstractmethod
    def send(self, names: list[Name]) -> list[bool]:
        """Send messages. Says of each whether it was confirmed."""

    @abstractmethod
    def receive(self) -> list[Got]:
        """Receive messages."""

    @abstractmethod
    def ack(self, messages: list[Got]) -> list[bool]:
        """Acknowledge messages. Says of each whether that was confirmed."""

    @abstractmethod
    def close(self) -> None:
        """The client is not used any more."""


def body_of(name: Name) -> str:
    return json.dumps({"id": str(name)})


def id_of(body: str | bytes) -> str:
    return str(json.loads(body)["id"])


class Json(Channel):
    """The JSON API, over one connection."""

    def next(self) -> None:
        self.client = Client(next(self.urls), timeout_s=PATIENCE_S + WAIT_S)

    def send(self, names: list[Name]) -> list[bool]:
        results = self.client.send(self.queue, *[body_of(name).encode() for name in names])
        return ["offset" in result for result in results]

    def receive(self) -> list[Got]:
        messages = self.client.receive(self.queue, RECEIVES_AT_MOST, round(1000 * WAIT_S))
        return [Got(id_of(m["payload"]), (m["partition"], m["offset"]), m["attempt"], m["receipt"]) for m in messages]

    def ack(self, messages: list[Got]) -> list[bool]:
        return [result == {"ok": True} for result in self.client.ack(*[m.handle for m in messages])]

    def close(self) -> None:
        self.client.close()


class Python(Channel):
    """`marq.client`, which goes from worker to worker and repeats by itself."""

    def __init__(self, urls: list[str], queue: str) -> None:
        self.service = Service(urls, timeout=PATIENCE_S, retry_for=RETRY_S)
        super().__init__(urls, queue)

    def next(self) -> None:
        pass

    def send(self, names: list[Name]) -> list[bool]:
        found = self.service.queue(self.queue).send_many(
            [
                Outgoing(body_of(n).encode(), group=n.group, deduplication_id=str(n)) if n.group else body_of(n)
                for n in names
            ]
        )
        return [isinstance(one, Sent) for one in found]

    def receive(self) -> list[Got]:
        messages = self.service.queue(self.queue).receive_many(RECEIVES_AT_MOST, timeout=WAIT_S)
        return [Got(id_of(m.payload), (m.partition, m.offset), m.attempt, m) for m in messages]

    def ack(self, messages: list[Got]) -> list[bool]:
        return [one is None for one in self.service.queue(self.queue).ack_many([m.handle for m in messages])]

    def close(self) -> None:
        self.service.close()


class Sqs(Channel):
    """boto3, without repetitions of its own."""

    def next(self) -> None:
        url = next(self.urls)
        self.sqs = client_of(url, connect_timeout=2, read_timeout=PATIENCE_S + WAIT_S)
        self.url = f"{url}/000000000000/{self.queue}"

    def send(self, names: list[Name]) -> list[bool]:
        entries = [
            {"Id": f"{i}", "MessageBody": body_of(n)}
            | ({"MessageGroupId": n.group, "MessageDeduplicationId": str(n)} if n.group else {})
            for i, n in enumerate(names)
        ]
        answer = self.sqs.send_message_batch(QueueUrl=self.url, Entries=entries)
        done = {one["Id"] for one in answer.get("Successful", ())}
        return [f"{i}" in done for i in range(len(names))]

    def receive(self) -> list[Got]:
        answer = self.sqs.receive_message(QueueUrl=self.url, MaxNumberOfMessages=10, WaitTimeSeconds=round(WAIT_S))
        return [self._got(message) for message in answer.get("Messages", ())]

    def _got(self, message: Any) -> Got:
        partition, _, _, offset, attempt, _ = read_unchecked(message["ReceiptHandle"])
        return Got(id_of(message["Body"]), (partition, offset), attempt, message["ReceiptHandle"])

    def ack(self, messages: list[Got]) -> list[bool]:
        entries = [{"Id": f"{i}", "ReceiptHandle": m.handle} for i, m in enumerate(messages)]
        answer = self.sqs.delete_message_batch(QueueUrl=self.url, Entries=entries)
        done = {one["Id"] for one in answer.get("Successful", ())}
        return [f"{i}" in done for i in range(len(messages))]

    def close(self) -> None:
        self.sqs.close()


class Stream(NamedTuple):
    """One queue with its sender and its receivers; without receivers, handlers take its messages."""

    name: str
    queue: str
    channel: type[Channel]
    receivers: int
    #: Part of all messages that are sent.
    part: float

    @property
    def fifo(self) -> bool:
        return self.name in FIFO


STREAMS = (
    Stream("json", "json", Json, 2, 0.10),
    Stream("client", "client", Python, 2, 0.10),
    Stream("sqs", "sqs", Sqs, 2, 0.05),
    Stream("client-fifo", "client-fifo", Python, 1, 0.02),
    Stream("sqs-fifo", "sqs.fifo", Sqs, 2, 0.02),
    Stream("handler-fifo", "work-fifo", Python, 0, 0.02),
)
#: Queues of the plain producer, which handlers take.
KAFKA_QUEUES = ("work-kafka", "bulk-kafka")


def create_queues(urls: list[str], lease_s: float) -> None:
    """Those of FIFO streams and of SQS. Their first message makes the others, with the defaults of the workers."""
    with Service(urls, timeout=PATIENCE_S, retry_for=60) as service:
        service.queue("client-fifo").create(fifo=True, deduplication_scope="group")
        service.queue("work-fifo").create(fifo=True, deduplication_scope="group")
    sqs, lease = client_of(urls[0]), {"VisibilityTimeout": f"{lease_s:.0f}"}
    fifo = {"FifoQueue": "true", "DeduplicationScope": "messageGroup", "FifoThroughputLimit": "perMessageGroupId"}
    sqs.create_queue(QueueName="sqs.fifo", Attributes=fifo | lease)
    sqs.create_queue(QueueName="sqs", Attributes=lease)


class Traffic:
    """All clients, from `start` to `stop`."""

    def __init__(
        self,
        history: History,
        urls: list[str],
        bootstrap: str,
        topic: str,
        partitions: int,
        streams: Sequence[Stream] = STREAMS,
    ) -> None:
        self.history = history
        self._streams = streams
        self.urls = urls
        self.errors: list[BaseException] = []
        self._kafka = (bootstrap, topic, partitions)
        self._sending, self._receiving = threading.Event(), threading.Event()
        self._senders: list[threading.Thread] = []
        self._receivers: list[threading.Thread] = []

    def start(self, rate: float) -> None:
        """Send so many messages a second in all."""
        self._sending.set()
        self._receiving.set()
        of_kafka = rate * (1 - sum(stream.part for stream in self._streams))
        begin = [self._thread(lambda: asyncio.run(self._produce(of_kafka)), "kafka producer")]
        for stream in self._streams:
            begin.append(self._thread(lambda s=stream: self._send(s, rate * s.part), f"{stream.name} sender"))
        for stream in self._streams:
            for i in range(stream.receivers):
                self._receivers.append(self._thread(lambda s=stream, n=i: self._receive(s, n), f"{stream.name} {i}"))
        self._senders = begin
        for thread in [*self._receivers, *self._senders]:
            thread.start()

    def stop_sending(self) -> None:
        self._sending.clear()
        self._join(self._senders)

    def stop(self) -> None:
        self._sending.clear()
        self._receiving.clear()
        self._join([*self._senders, *self._receivers])

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            if thread.ident is not None:
                thread.join(KAFKA_PATIENCE_S + RETRY_S + 30)
                if thread.is_alive():
                    self.errors.append(AssertionError(f"{thread.name} does not end"))

    def _thread(self, do: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                do()
            except BaseException as error:
                self.errors.append(error)

        return threading.Thread(target=guarded, name=name, daemon=True)

    @contextlib.contextmanager
    def _request(self, client: str, action: str) -> Iterator[None]:
        """Write down a request: how long it took, and whether it was answered."""
        began_s, answered = time.time(), False
        try:
            yield
            answered = True
        finally:
            with self.history.lock:
                self.history.asked.append(Asked(client, action, began_s, time.time(), answered))

    def _tried(
        self, channel: Channel, client: str, action: str, call: Callable[[list[Any]], list[bool]], what: list[Any]
    ) -> list[bool]:
        """Make a request: of what it was confirmed. If of nothing, the next one goes to another worker, a bit later."""
        try:
            with self._request(client, action):
                confirmed = call(what)
                if not any(confirmed):
                    raise Failed
        except FAILURES:
            channel.next()
            time.sleep(PAUSE_S)
            return [False] * len(what)
        return confirmed

    # -- senders

    def _send(self, stream: Stream, rate: float) -> None:
        channel = stream.channel(self.urls, stream.queue)
        names = _in_groups(stream.name) if stream.fifo else _alone(stream.name)
        size = GROUPS if stream.fifo else max(1, min(10, round(rate / 5)))
        began_s: dict[str, float] = {}
        turn_s, at_s = size / rate, time.monotonic()
        todo: list[Name] = []
        with contextlib.closing(channel):
            while self._sending.is_set():
                todo = todo or [next(names) for _ in range(size)]
                with self.history.lock:
                    self.history.tried.update(map(str, todo))
                for name in todo:
                    began_s.setdefault(str(name), time.time())
                confirmed = self._tried(channel, f"{stream.name} sender", "send", channel.send, todo)
                now_s = time.time()
                with self.history.lock:
                    for name, done in zip(todo, confirmed, strict=True):
                        if done:
                            self.history.confirmed[str(name)] = (began_s.pop(str(name)), now_s)
                todo = [name for name, done in zip(todo, confirmed, strict=True) if not done] if stream.fifo else []
                at_s = max(at_s + turn_s, time.monotonic() - 1.0)  # what could not be sent is not made up for
                time.sleep(max(0.0, at_s - time.monotonic()))

    async def _produce(self, rate: float) -> None:
        bootstrap, topic, partitions = self._kafka
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap, enable_idempotence=True, acks="all", request_timeout_ms=5_000, linger_ms=5
        )
        await producer.start()
        waiting: set[asyncio.Task[None]] = set()
        size = max(1, round(rate / 20))
        names, turns, at_s = _alone("kafka"), itertools.count(), time.monotonic()
        try:
            while self._sending.is_set():
                turn = next(turns)
                batch = [next(names) for _ in range(size)]
                queue = KAFKA_QUEUES[turn % len(KAFKA_QUEUES)]
                task = asyncio.create_task(self._produce_batch(producer, topic, queue, turn % partitions, batch))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                while len(waiting) > 20 * KAFKA_PATIENCE_S:
                    await asyncio.sleep(0.1)
                at_s = max(at_s + size / rate, time.monotonic() - 1.0)
                await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            await asyncio.gather(*waiting)
        finally:
            await end_client(producer.stop())

    async def _produce_batch(
        self, producer: AIOKafkaProducer, topic: str, queue: str, partition: int, names: list[Name]
    ) -> None:
        began_s = time.time()
        with self.history.lock:
            self.history.tried.update(map(str, names))
        confirmed = []
        # each batch counts as a client, because they wait side by side
        with contextlib.suppress(Failed), self._request(f"kafka {names[0].number}", "send"):
            with contextlib.suppress(KafkaError, TimeoutError):
                async with asyncio.timeout(KAFKA_PATIENCE_S):
                    futures = [
                        await producer.send(topic, body_of(name).encode(), key=queue.encode(), partition=partition)
                        for name in names
                    ]
                    for name, future in zip(names, futures, strict=True):
                        await asyncio.shield(future)
                        confirmed.append(name)
            if not confirmed:
                raise Failed
        now_s = time.time()
        with self.history.lock:
            self.history.confirmed.update((str(name), (began_s, now_s)) for name in confirmed)

    # -- receivers

    def _receive(self, stream: Stream, number: int) -> None:
        urls = self.urls[number % len(self.urls) :] + self.urls[: number % len(self.urls)]
        channel = stream.channel(urls, stream.queue)
        client = f"{stream.name} {number}"
        with contextlib.closing(channel):
            while self._receiving.is_set():
                messages: list[Got] = []
                try:
                    asked_s = time.time()
                    with self._request(client, "receive"):
                        messages = channel.receive()
                    self._work(messages, asked_s)
                    if messages:
                        self._ack(channel, client, messages)
                except FAILURES:
                    channel.next()
                    time.sleep(PAUSE_S)

    def _work(self, messages: list[Got], asked_s: float) -> None:
        """One after the other, in the order of the answer."""
        for message in messages:
            begun = Seen(message.id, message.place, message.attempt, time.time(), asked_s=asked_s)
            with self.history.lock:
                self.history.begun.append(begun)
                self.history.finished.append(begun._replace(at_s=time.time()))

    def _ack(self, channel: Channel, client: str, messages: list[Got]) -> None:
        """Acknowledge, again and again as long as it fails, as any client should."""
        left, until_s = messages, time.monotonic() + RETRY_S
        while left:
            confirmed = self._tried(channel, client, "ack", channel.ack, left)
            now_s = time.time()
            with self.history.lock:
                for message, done in zip(left, confirmed, strict=True):
                    if done:
                        self.history.acked.setdefault(message.place, now_s)
            left = [message for message, done in zip(left, confirmed, strict=True) if not done]
            if left and time.monotonic() > until_s:
                with self.history.lock:
                    self.history.refused.update(message.place for message in left)
                return


def _alone(stream: str) -> Iterator[Name]:
    return (Name(stream, "", number) for number in itertools.count())


def _in_groups(stream: str) -> Iterator[Name]:
    """One message of each group in turn."""
    return (Name(stream, f"g{i}", number) for number in itertools.count() for i in range(GROUPS))
