"""SQS clients send and receive while workers are killed: nothing confirmed is lost, and groups keep their order.

A sender tries a message again with the same deduplication id until it is confirmed, then goes on to the next; consumers
go from one worker to the next when theirs is gone.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from app.service.receipts import read_unchecked
from tests.faults.trio import NAMES, Trio
from tests.integration.cluster import until
from tests.integration.duplicates import Done, Place
from tests.integration.sqs_client import Queue, client_of

GROUPS = 12
CONSUMERS = 3
VISIBILITY_S = 4


def delivery_of(message: Any) -> Done:
    """Which delivery a message is, by its receipt."""
    partition, _, _, offset, attempt, _ = read_unchecked(message["ReceiptHandle"])
    return Done(partition, offset, attempt)


class Traffic:
    """One sender and some consumers of a queue, with a record of what they did, in order."""

    def __init__(self, urls: list[str], queue: Queue, fifo: bool) -> None:
        self._urls, self._queue, self._fifo = urls, queue, fifo
        self._lock = threading.Lock()
        self._sending, self._receives = threading.Event(), threading.Event()
        self.confirmed: set[tuple[str, int]] = set()
        self.received: dict[tuple[str, int], set[str]] = {}  # group and number -> ids of messages
        self.deleting: set[tuple[str, int]] = set()
        self.done: list[Done] = []
        self.refused: set[Place] = set()  # whose deletion failed
        self.wrong: list[str] = []
        self.again = self.failures = 0
        self._threads = [threading.Thread(target=self._guarded, args=(self._send, 0))]
        self._threads += [threading.Thread(target=self._guarded, args=(self._receive, i)) for i in range(CONSUMERS)]

    def __enter__(self) -> Traffic:
        self._sending.set()
        self._receives.set()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sending.clear()
        self._receives.clear()
        for thread in self._threads:
            thread.join(120)

    def stop_sending(self) -> None:
        self._sending.clear()
        self._threads[0].join(120)

    def _guarded(self, do: Callable[[int], None], number: int) -> None:
        try:
            do(number)
        except Exception as error:
            self.wrong.append(repr(error))

    def _at(self, start: int) -> Iterator[Queue]:
        """The queue at one worker after another."""
        clients = [client_of(url, connect_timeout=2) for url in self._urls]
        for i in itertools.count(start):
            at = i % len(clients)
            yield Queue(clients[at], f"{self._urls[at]}/000000000000/{self._queue.name}")

    def _send(self, start: int) -> None:
        places = self._at(start)
        queue = next(places)
        for number in itertools.count():
            for group in (f"g{i}" for i in range(GROUPS)):
                while True:
                    if not self._sending.is_set():
                        return
                    try:
                        name = {"MessageDeduplicationId": f"{group}-{number}"} if self._fifo else {}
                        queue.send(f"{group} {number}", MessageGroupId=group, **name)
                        break
                    except (ClientError, BotoCoreError):
                        self.failures += 1
                        queue = next(places)
                        time.sleep(0.2)
                self.confirmed.add((group, number))

    def _receive(self, start: int) -> None:
        places = self._at(start)
        queue = next(places)
        while self._receives.is_set():
            messages: list[Any] = []
            try:
                messages = queue.receive(10, wait_s=1)
                with self._lock:
                    self._note(messages)
                if messages:
                    entries = [{"Id": f"{i}", "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(messages)]
                    answer = queue.sqs.delete_message_batch(QueueUrl=queue.url, Entries=entries)
                    self._refuse(messages[int(one["Id"])] for one in answer.get("Failed", ()))
            except (ClientError, BotoCoreError):
                self.failures += 1
                self._refuse(messages)
                queue = next(places)
                time.sleep(0.2)

    def _refuse(self, messages: Iterable[Any]) -> None:
        with self._lock:
            self.refused |= {(one.partition, one.offset) for one in map(delivery_of, messages)}

    def _note(self, messages: list[Any]) -> None:
        for message in messages:
            self.done.append(delivery_of(message))
            group, _, text = message["Body"].partition(" ")
            number = int(text)
            if self._fifo and number and (group, number - 1) not in self.deleting:
                self.wrong.append(f"{group} {number} came, though {number - 1} was not deleted")
            ids = self.received.setdefault((group, number), set())
            self.again += message["MessageId"] in ids
            ids.add(message["MessageId"])
            self.deleting.add((group, number))  # the messages of one receive are processed one after the other

    def goes_on(self) -> None:
        before = len(self.received)
        until(lambda: self.wrong or len(self.received) > before + 100, "messages go round", 90)

    def check(self, trio: Trio, what: str) -> None:
        self.stop_sending()
        until(lambda: self.wrong or self.confirmed <= self.received.keys(), "all that was sent is received", 90)
        time.sleep(VISIBILITY_S + 2)  # messages that were not deleted come again
        self._queue.wait_for(visible=0, in_flight=0, timeout_s=60)
        twice = sum(len(ids) - 1 for ids in self.received.values())
        print(
            f"{what}: sent={len(self.confirmed)} lost={len(self.confirmed - self.received.keys())} "
            f"redelivered={self.again} sent twice={twice} failed requests={self.failures}"
        )
        assert self.wrong == []
        explained = trio.explained(self.done, self.refused)
        print(f"done twice because: {explained}")
        assert not explained.unexplained, explained.unexplained[:20]
        assert len(self.confirmed) > 100
        if self._fifo:
            assert twice == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fifo", "standard"])
def test_kills_of_workers_lose_nothing_and_groups_keep_their_order(trio: Trio, kind: str) -> None:
    a, b, c = (trio.worker(name) for name in NAMES)
    fifo = {"FifoQueue": "true", "DeduplicationScope": "messageGroup"} if kind == "fifo" else {}
    made = Queue.make(a, VisibilityTimeout=VISIBILITY_S, **fifo)
    queue = made.at(c)
    with Traffic([a.url, b.url, c.url], queue, bool(fifo)) as traffic:
        traffic.goes_on()
        for name in ("a", "b"):
            trio.worker(name).kill()
            traffic.goes_on()
            trio.start_up(name)
            traffic.goes_on()
        traffic.check(trio, f"kill -9 of two of three workers, one after the other, {kind}")
