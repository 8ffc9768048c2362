"""Clients send and receive over HTTP while workers are restarted and killed: nothing confirmed is lost.

Every message carries an id of its own. Three figures are told apart: ids that were sent and confirmed but never
received (lost), messages that a client got again after it had them (redelivered), and ids that were sent twice because
an answer got lost on its way to the sender.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from marq.client import Message, Sent, Service
from marq.errors import MarqError
from tests.faults.trio import NAMES, Trio
from tests.integration.cluster import until
from tests.integration.duplicates import Done, Place
from tests.integration.json_client import Client
from tests.kafka import unique

#: Messages that one consumer has at once: one fault can bring back at most as many.
HELD = 200
BATCH = 50
#: Seconds for which a client retries; longer than the restart of a worker takes.
PATIENCE_S = 90.0


class Traffic:
    """A sender and consumers, each with its own view of which workers there are, all the while until it is stopped."""

    def __init__(self, sender: list[str], consumers: list[list[str]]) -> None:
        self.queue = unique("faults")
        self.confirmed: set[bytes] = set()
        self.failed = 0
        self.received: list[tuple[bytes, int, int, int]] = []  # id, partition, offset, attempt
        self.errors: list[BaseException] = []
        self.refused: set[Place] = set()  # of consumers whose acknowledgement failed with an error
        self._serial = 0
        self._sending, self._receives = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(sender,))]
        self._threads += [threading.Thread(target=self._receive, args=(urls,)) for urls in consumers]

    def start(self) -> None:
        self._sending.set()
        self._receives.set()
        for thread in self._threads:
            thread.start()

    def stop_sending(self) -> None:
        self._sending.clear()
        self._threads[0].join(PATIENCE_S + 30)

    def stop(self) -> None:
        self._sending.clear()
        self._receives.clear()
        for thread in self._threads:
            thread.join(PATIENCE_S + 30)
            assert not thread.is_alive()

    def _send(self, urls: list[str]) -> None:
        try:
            with Service(urls, retry_for=PATIENCE_S) as service:
                queue = service.queue(self.queue)
                while self._sending.is_set():
                    ids = [b"%d" % (self._serial + n) for n in range(BATCH)]
                    self._serial += BATCH
                    results = queue.send_many(ids)
                    self.confirmed.update(i for i, result in zip(ids, results, strict=True) if isinstance(result, Sent))
                    self.failed += sum(not isinstance(result, Sent) for result in results)
                    time.sleep(0.02)
        except BaseException as error:
            self.errors.append(error)

    def _receive(self, urls: list[str]) -> None:
        mine: set[Place] = set()
        try:
            with (
                Service(urls, retry_for=PATIENCE_S) as service,
                service.queue(self.queue).consume(
                    prefetch=HELD // 2, max_in_flight=HELD, visibility_timeout=5
                ) as messages,
            ):
                while self._receives.is_set():
                    for message in messages.take(HELD, timeout=0.2):
                        self._note(message)
                        mine.add((message.partition, message.offset))
                        message.ack()
        except MarqError as error:
            # a message whose acknowledgement failed comes again: the check at the end sees it
            print(f"  a consumer: {error}")
            self.refused |= mine
        except BaseException as error:
            self.errors.append(error)

    def _note(self, message: Message) -> None:
        self.received.append((message.payload, message.partition, message.offset, message.attempt))

    def progress(self) -> int:
        return len(self.received)

    def check(self, trio: Trio, what: str, faults: int, consumers: int) -> None:
        """Wait until all that was confirmed has been received; then the total-queue check."""
        self.stop_sending()
        until(lambda: self.confirmed <= {i for i, *_ in self.received}, "all that was confirmed is received", 60)
        time.sleep(6)  # longer than the lease: unacknowledged messages would come again
        self.stop()
        assert self.errors == []
        deliveries = Counter((partition, offset) for _, partition, offset, _ in self.received)
        places: dict[bytes, set[tuple[int, int]]] = {}
        for message_id, partition, offset, _ in self.received:
            places.setdefault(message_id, set()).add((partition, offset))
        lost = self.confirmed - places.keys()
        again = sum(count - 1 for count in deliveries.values())
        twice = sum(len(found) - 1 for found in places.values())
        print(
            f"{what}: sent={len(self.confirmed)} lost={len(lost)} redelivered to a client that had it={again} "
            f"sent twice={twice} sends not confirmed={self.failed}"
        )
        assert lost == set()
        assert self.confirmed, "nothing was sent"
        explained = trio.explained([Done(*received[1:]) for received in self.received], self.refused)
        print(f"done twice because: {explained}")
        assert not explained.unexplained, explained.unexplained[:20]
        assert again <= faults * consumers * HELD
        assert twice <= faults * BATCH


@contextlib.contextmanager
def traffic(sender: list[str], consumers: list[list[str]]) -> Iterator[Traffic]:
    running = Traffic(sender, consumers)
    running.start()
    try:
        until(lambda: running.progress() > 50, "messages go round")
        yield running
    finally:
        running.stop()


def goes_on(running: Traffic) -> None:
    before = running.progress()
    until(lambda: running.progress() > before + 50, "messages go round again", 60)


@pytest.mark.slow
def test_a_rolling_restart_under_load_loses_nothing(trio: Trio) -> None:
    """Twice around, with clients that know all workers, and one of each kind that knows only one."""
    a, b, c = (trio.worker(name).url for name in NAMES)
    consumers = [[a, b, c], [b], [c, a]]
    with traffic([b], consumers) as running:
        for _ in range(2):
            for name in NAMES:
                trio.worker(name).stop()
                if name != "b":  # the one that the sender knows
                    goes_on(running)
                trio.start_up(name)
                goes_on(running)
        running.check(trio, "rolling restart, twice around", 2 * len(NAMES), len(consumers))
    for worker in trio.workers[:-3]:
        assert worker.process.returncode == 0, worker.log[-3000:]


@pytest.mark.slow
def test_a_kill_of_the_worker_that_the_clients_talk_to_loses_nothing(trio: Trio) -> None:
    a, b, c = (trio.worker(name).url for name in NAMES)
    consumers = [[a, b, c], [a, c, b]]
    with traffic([a, b, c], consumers) as running:
        trio.worker("a").kill()
        goes_on(running)
        trio.start_up("a")
        goes_on(running)
        running.check(trio, "kill -9 of the worker that all clients talk to", 1, len(consumers))


def test_queues_and_receipts_survive_the_kill_of_all_workers(trio: Trio) -> None:
    queue, settings = unique("kept"), {"visibility_timeout_ms": 60_000, "max_receives": 7, "delay_ms": 1}
    before = Client(trio.worker("a").url)
    assert before.request("PUT", f"/v1/queues/{queue}", settings).status in (200, 201)
    assert before.request("PUT", f"/v1/queues/{queue}.dead", {}).status in (200, 201)
    before.send(queue, b"x")
    (message,) = before.receive(queue, 1, 5_000)
    for name in NAMES:
        trio.worker(name).kill()

    trio.start_up("b")
    after = Client(trio.worker("b").url)
    kept = after.request("GET", f"/v1/queues/{queue}").body["settings"]
    assert {name: kept[name] for name in settings} == settings
    assert after.ack(message) == [{"ok": True}]
    assert after.receive(queue, 1, 0) == []
