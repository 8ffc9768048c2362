"""The client against real workers."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from marq import errors
from marq.client import AsyncService, Outgoing, Queue, Sent, Service
from tests.integration.cluster import Cluster, until
from tests.kafka import unique


@pytest.fixture(scope="module")
def cluster(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(kafka, tmp_path_factory.mktemp("client"), partitions=4, handlers="") as cluster:
        cluster.start_many(2)
        yield cluster


@pytest.fixture
def service(cluster: Cluster) -> Iterator[Service]:
    with Service([worker.url for worker in cluster.workers]) as service:
        yield service


@pytest.fixture
def queue(service: Service) -> Queue:
    return service.queue(unique("q"))


def test_a_message_goes_round(queue: Queue) -> None:
    sent = queue.send(b"hi", key=b"k", headers={"h": b"v"}, group="g")
    message = queue.receive(timeout=5)
    assert message is not None
    assert (message.payload, message.key, message.headers) == (b"hi", b"k", {"h": b"v"})
    assert (message.partition, message.offset, message.attempt) == (sent.partition, sent.offset, 1)
    message.extend(60)
    message.ack()
    assert queue.receive(timeout=0.3) is None


@pytest.mark.parametrize("name", ["a/b", "ü ?&#%", "x" * 100])
def test_a_queue_may_have_any_name(service: Service, name: str) -> None:
    queue = service.queue(unique(name))
    queue.send("hi")
    message = queue.receive(timeout=5)
    assert message is not None and message.queue == queue.name
    message.ack()


def test_a_message_given_back_comes_again_counted_and_delayed(queue: Queue) -> None:
    queue.send(b"x")
    message = queue.receive(timeout=5)
    assert message is not None
    message.release(delay=1)
    began = time.monotonic()
    again = queue.receive(timeout=10)
    assert again is not None and again.attempt == 2
    assert 0.8 < time.monotonic() - began < 5
    again.ack()


def test_an_older_delivery_can_not_be_extended_or_given_back(service: Service, queue: Queue) -> None:
    queue.send(b"x")
    first = queue.receive(timeout=5, visibility_timeout=1)
    second = queue.receive(timeout=10)
    assert first is not None and second is not None
    with pytest.raises(errors.LeaseOverError):
        first.extend(60)
    with pytest.raises(errors.LeaseOverError):
        first.release()
    (result,) = queue.extend_many([first])
    assert isinstance(result, errors.LeaseOverError)
    second.ack()

    async def extend_and_release(url: str) -> None:
        async with AsyncService(url) as asynchronous:
            (one,) = await asynchronous.queue(queue.name).receive_many(1, timeout=10)
            await one.release()
            for late in (one.extend(60), one.release()):
                with pytest.raises(errors.LeaseOverError):
                    await late

    queue.send(b"y")
    asyncio.run(extend_and_release(queue._operations.connection.addresses[0]))


def test_a_rejected_message_is_a_dead_letter(service: Service, queue: Queue) -> None:
    queue.send(b"bad")
    message = queue.receive(timeout=5)
    assert message is not None
    message.reject("can't be read")
    dead = service.queue(f"{queue.name}.dead").receive(timeout=10)
    assert dead is not None and dead.payload == b"bad"
    dead.ack()


def test_a_consumer_gets_every_message_once(queue: Queue) -> None:
    results = queue.send_many([b"%d" % i for i in range(5_000)])
    assert all(isinstance(result, Sent) for result in results)
    seen: Counter[bytes] = Counter()
    with queue.consume(timeout=3) as messages:
        for message in messages:
            seen[message.payload] += 1
            message.ack()
            if len(seen) == 5_000:
                break
        messages.flush()
    assert seen == Counter(b"%d" % i for i in range(5_000))
    assert queue.receive(timeout=0.5) is None


def test_what_a_consumer_did_not_hand_out_is_there_for_others_at_once_uncounted(queue: Queue) -> None:
    queue.send_many([b"x"] * 20)
    with queue.consume(prefetch=20) as messages:
        first = next(messages)
        first.ack()
    got = []
    while len(got) < 19:
        part = queue.receive_many(20, timeout=5)
        assert part, f"only {len(got)} of 19"
        got += part
    assert {message.attempt for message in got} == {1}
    assert queue.ack_many(got) == [None] * 19


def test_a_consumer_keeps_its_messages_for_longer_than_their_lease(queue: Queue) -> None:
    queue.send(b"slow")
    with queue.consume(visibility_timeout=1) as messages:
        message = next(messages)
        assert queue.receive(timeout=3) is None
        message.ack()
        messages.flush()
    assert queue.receive(timeout=1.5) is None


def waiting_receives(url: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("marq_waiting_receives "))


def test_a_receive_that_was_given_up_takes_nothing(queue: Queue) -> None:
    url = queue._operations.connection.addresses[0]
    before = waiting_receives(url)

    async def give_up() -> None:
        async with AsyncService(url) as service:
            receive = asyncio.ensure_future(service.queue(queue.name).receive(timeout=None))
            while await asyncio.to_thread(waiting_receives, url) <= before:
                await asyncio.sleep(0.05)
            receive.cancel()

    asyncio.run(give_up())
    # an answer to a client that went away unnoticed comes back when its lease ends
    until(lambda: waiting_receives(url) <= before, "the worker has noticed")
    queue.send(b"x")
    message = queue.receive(timeout=20)
    assert message is not None and message.attempt == 1
    message.ack()


def test_messages_of_any_size_that_is_allowed(queue: Queue) -> None:
    large = bytes(4 * 1024 * 1024 - 2048)
    assert [type(r) for r in queue.send_many([large, b"small"])] == [Sent, Sent]
    assert all(isinstance(r, Sent) for r in queue.send_many([bytes(1024 * 1024)] * 10))
    sizes: list[int] = []
    for message in queue.consume(timeout=3):
        sizes.append(len(message.payload))
        message.ack()
        if len(sizes) == 12:
            break
    assert sorted(sizes) == [5] + [1024 * 1024] * 10 + [len(large)]
    with pytest.raises(errors.TooLargeError):
        queue.send(bytes(5 * 1024 * 1024))


def test_bad_values_say_what_is_wrong(queue: Queue) -> None:
    with pytest.raises(errors.BadValueError, match="delay_ms"):
        queue.send(b"x", delay=-1)
    with pytest.raises(errors.BadValueError, match="max"):
        queue.receive_many(0)
    queue.send(b"x")
    message = queue.receive(timeout=5)
    assert message is not None
    with pytest.raises(errors.BadValueError):
        message.extend(-1)
    message.ack()
    message.receipt = "A" * len(message.receipt)
    with pytest.raises(errors.BadReceiptError):
        message.ack()


def test_queues_are_managed(service: Service, queue: Queue) -> None:
    assert queue.create(max_receives=5).settings["max_receives"] == 5
    info = queue.set(ttl_ms=60_000)
    assert (info.settings["max_receives"], info.settings["ttl_ms"]) == (5, 60_000)
    until(lambda: queue.get().settings["ttl_ms"] == 60_000, "known at the worker that is asked")
    assert [info.name for info in service.queues(queue.name)] == [queue.name]
    with pytest.raises(errors.BadValueError):
        queue.set(no_such_setting=1)
    queue.send_many([b"x"] * 10)
    queue.purge()
    until(lambda: not queue.get().purging, "purged")
    assert queue.receive(timeout=0.3) is None
    queue.delete()
    until(lambda: not list(service.queues(queue.name)), "deleted")
    with pytest.raises(errors.UnknownQueueError, match=queue.name):
        queue.get()


def test_many_queues_are_listed_page_by_page(service: Service) -> None:
    prefix = unique("many")

    async def create(url: str) -> None:
        async with AsyncService(url) as service:
            await asyncio.gather(*(service.queue(f"{prefix}-{i:04}").create() for i in range(1_050)))

    asyncio.run(create(service._operations.connection.addresses[0]))
    names = [f"{prefix}-{i:04}" for i in range(1_050)]
    until(lambda: [info.name for info in service.queues(prefix)] == names, "all are listed, in order")


def test_a_batch_with_one_message_that_is_refused(queue: Queue) -> None:
    first, second, third = queue.send_many([b"a", Outgoing(b"b", headers={"marq-x": b"1"}), b"c"])
    assert isinstance(second, errors.BadValueError)
    assert isinstance(first, Sent) and isinstance(third, Sent)


@pytest.mark.slow
def test_nothing_is_lost_when_the_worker_that_the_client_talks_to_is_killed(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=4, handlers="") as cluster:
        cluster.start_many(2)
        urls = [worker.url for worker in cluster.workers]
        confirmed: set[bytes] = set()
        seen: Counter[bytes] = Counter()
        stop = threading.Event()

        def send() -> None:
            with Service(urls, retry_for=60) as service:
                queue, n = service.queue("orders"), 0
                while not stop.is_set():
                    payloads = [b"%d" % i for i in range(n, n + 20)]
                    n += 20
                    for payload, result in zip(payloads, queue.send_many(payloads), strict=True):
                        if isinstance(result, Sent):
                            confirmed.add(payload)
                    time.sleep(0.02)

        def consume() -> None:
            with (
                Service(urls, retry_for=60) as service,
                service.queue("orders").consume(visibility_timeout=2, timeout=8) as messages,
            ):
                for message in messages:
                    seen[message.payload] += 1
                    message.ack()

        threads = [threading.Thread(target=send), threading.Thread(target=consume)]
        for thread in threads:
            thread.start()
        until(lambda: sum(seen.values()) > 200, "it runs")
        cluster.workers[0].kill()
        time.sleep(15)
        stop.set()
        for thread in threads:
            thread.join(90)
            assert not thread.is_alive()
        lost = confirmed - set(seen)
        duplicates = sum(seen.values()) - len(seen)
        print(f"confirmed={len(confirmed)} lost={len(lost)} duplicates={duplicates}")
        assert not lost
        assert len(confirmed) > 400
