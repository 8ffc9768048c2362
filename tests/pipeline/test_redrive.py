"""`redrive`: dead letters, chosen with a SQL predicate, go back to work, each once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from marq.client import Queue, Service
from marq.errors import PipelineError, UnknownQueueError
from pipeline.redrive import Moved, run
from tests.pipeline.lab import Installation
from tests.pipeline.sending_lab import Here, ends, wait_for


@pytest.fixture
def url(target: Installation) -> Iterator[str]:
    """Address of a real worker."""
    with target.cluster(handlers="") as cluster:
        yield cluster.start().url


@pytest.fixture
def service(url: str) -> Iterator[Service]:
    with Service(url) as service:
        yield service


def take(queue: Queue, count: int) -> list[bytes]:
    """Receive and acknowledge so many messages."""
    found: list[bytes] = []
    while len(found) < count:
        messages = queue.receive_many(count - len(found), timeout=10)
        assert messages, f"{len(found)} of {count} arrived"
        for message in messages:
            found.append(message.payload)
            message.ack()
    return sorted(found)


def is_empty(queue: Queue) -> bool:
    return not queue.receive_many(10, timeout=0.5, visibility_timeout=1)


def make_dead_letters(target: Installation, service: Service, payloads: list[bytes], reason: str) -> None:
    """Send messages to the queue `orders`, and make dead letters of them."""
    began, queue = ends(target), service.queue("orders")
    queue.send_many(payloads)
    left = len(payloads)
    while left:
        for message in queue.receive_many(left, timeout=10):
            message.reject(reason)
            left -= 1
    wait_for(lambda: ends(target) == began + 2 * len(payloads), "the dead letters are in the topic")
    wait_for(lambda: knows(service, "orders.dead"), "their queue is known")


def knows(service: Service, queue: str) -> bool:
    try:
        service.queue(queue).get()
    except UnknownQueueError:
        return False
    return True


def test_chosen_dead_letters_go_back_to_their_queue_once(
    target: Installation, job: Here, url: str, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    orders, dead = service.queue("orders"), service.queue("orders.dead")
    payloads = [json.dumps({"n": n, "to": "LAX" if n % 2 else "JFK"}).encode() for n in range(10)]
    make_dead_letters(target, service, payloads, "timeout")
    make_dead_letters(target, service, [b"other"], "broken")
    dead.send(b"no dead letter: it was sent here")
    where = "reason = 'timeout' AND dead_from = 'orders' AND get_json_object(payload_text, '$.to') = 'LAX'"

    assert run(job, "orders.dead", where, url=url, dry_run=True) == Moved()
    assert "chosen: 5 messages" in capsys.readouterr().out
    assert is_empty(orders)
    with pytest.raises(PipelineError, match="add --yes"):
        run(job, "orders.dead", where, url=url)

    assert run(job, "orders.dead", where, url=url, yes=True) == Moved(moved=5)
    assert [json.loads(payload)["n"] for payload in take(orders, 5)] == [1, 3, 5, 7, 9]
    assert run(job, "orders.dead", where, url=url, yes=True) == Moved(left=5)
    assert is_empty(orders)

    assert run(job, "orders.dead", "true", to="elsewhere", rate=100, url=url, yes=True) == Moved(moved=6, left=5)
    assert len(take(service.queue("elsewhere"), 6)) == 6
    assert take(dead, 1) == [b"no dead letter: it was sent here"]


def test_what_cant_be_chosen_is_an_error_of_one_line(
    target: Installation, job: Here, url: str, service: Service
) -> None:
    make_dead_letters(target, service, [b"x"], "timeout")
    for queue, where, message in (
        ("orders.dead", "no_column = 1", "is not a valid condition on these messages"),
        ("orders.dead", "reason ==== 1", "is not a valid condition on these messages"),
        ("nobody", "true", "there is no queue 'nobody'"),
    ):
        with pytest.raises(PipelineError, match=message) as caught:
            run(job, queue, where, url=url, yes=True)
        assert "\n" not in str(caught.value)
    assert not is_empty(service.queue("orders.dead"))


@pytest.mark.slow
def test_killed_and_made_again_it_moves_each_once(target: Installation, job: Here, url: str, service: Service) -> None:
    payloads = [b"%d" % n for n in range(300)]
    make_dead_letters(target, service, payloads, "timeout")
    began = ends(target)
    process = target.start_job("redrive", "orders.dead", "--rate", "60", "--url", url, "--yes", "--master", "local[2]")
    try:
        wait_for(lambda: ends(target) > began + 50, "some are moved")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    outcome = run(job, "orders.dead", "true", url=url, yes=True)
    assert outcome.moved + outcome.left == len(payloads)
    assert outcome.moved
    assert outcome.left
    assert take(service.queue("orders"), len(payloads)) == sorted(payloads)
    assert is_empty(service.queue("orders"))
    assert is_empty(service.queue("orders.dead"))


def test_without_a_worker_there_is_an_error_that_says_so(target: Installation, job: Here) -> None:
    with pytest.raises(PipelineError, match=r"no worker runs on .*: give the address of one with --url"):
        run(replace(job, settings=job.settings.model_copy(update={"data_dir": target.folder})), "orders.dead", "true")
    with pytest.raises(PipelineError, match="give the address of a worker with --url"):
        run(job, "orders.dead", "true", url="http://127.0.0.1:9")
