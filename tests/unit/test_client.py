"""The client against a service that fails on demand."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import marq
from marq import errors
from marq.client import AsyncService, Outgoing, Sent, Service, wire
from marq.client.connection import checked
from marq.protocol.messages import Problem
from tests.unit.fake_service import FakeService

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake() -> Iterator[FakeService]:
    with FakeService() as service:
        yield service


@pytest.fixture
def service(fake: FakeService) -> Iterator[Service]:
    with Service(fake.url, retry_for=5) as service:
        yield service


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def unused_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


# ---------------------------------------------------------------------- messages


def test_a_message_is_sent_received_and_acknowledged(fake: FakeService, service: Service) -> None:
    queue = service.queue("test-queue")
    sent = queue.send(b"hi", key=b"k", headers={"h": b"v"})
    message = queue.receive(timeout=1)
    assert message is not None
    assert (message.payload, message.key, message.headers) == (b"hi", b"k", {"h": b"v"})
    assert (message.topic, message.partition, message.offset) == (sent.topic, sent.partition, sent.offset)
    assert (message.queue, message.attempt, message.settled) == ("test-queue", 1, False)
    message.ack()
    assert message.settled
    assert fake.acked == [sent.offset]


def test_an_empty_queue_gives_none_when_the_time_is_over(service: Service) -> None:
    queue = service.queue("q")
    assert queue.receive() is None
    began = time.monotonic()
    assert queue.receive(timeout=0.2) is None
    assert 0.15 < time.monotonic() - began < 1.5


def test_a_message_can_be_extended_given_back_and_rejected(fake: FakeService, service: Service) -> None:
    queue = service.queue("q")
    fake.put("q", b"a", b"b")
    first, second = queue.receive_many(2, timeout=1)
    first.extend(60)
    first.release(delay=1.5)
    second.reject("broken")
    assert fake.extended[first.offset] == 1
    assert fake.released == [(first.offset, 1500, True)]
    assert fake.rejected == [(second.offset, "broken")]


def test_any_reason_can_be_given_for_a_rejection(fake: FakeService, service: Service) -> None:
    queue = service.queue("q")
    fake.put("q", b"a")
    (message,) = queue.receive_many(1, timeout=1)
    message.reject("no file b\udcffad: " + "x" * 5_000)
    assert fake.rejected == [(message.offset, "no file b?ad: " + "x" * 5_000)]


def test_a_message_as_a_block_is_acknowledged_at_its_end_and_given_back_if_it_raises(
    fake: FakeService, service: Service
) -> None:
    queue = service.queue("q")
    fake.put("q", b"good", b"bad", b"mine")
    good, bad, mine = queue.receive_many(3, timeout=1)
    with good:
        pass
    with pytest.raises(ValueError), bad:
        raise ValueError
    with mine:
        mine.reject()
    assert fake.acked == [good.offset]
    assert fake.released == [(bad.offset, 0, True)]
    assert fake.rejected == [(mine.offset, None)]


def test_a_block_that_raises_after_its_lease_was_over_shows_its_own_error(fake: FakeService, service: Service) -> None:
    fake.put("q", b"late")
    (late,) = service.queue("q").receive_many(1, timeout=1)
    fake.refused[late.receipt] = "lease-over"
    with pytest.raises(ValueError, match="mine"), late:
        raise ValueError("mine")


def test_a_batch_is_answered_per_message_in_order(service: Service) -> None:
    results = service.queue("q").send_many([b"a", "refused", Outgoing("c", delay=1.0, ttl=2.0, group="g")])
    assert [type(r) for r in results] == [Sent, errors.TooLargeError, Sent]


def test_a_batch_of_any_size_is_split_into_requests(fake: FakeService, service: Service) -> None:
    queue = service.queue("q")
    sent = queue.send_many([b"%d" % i for i in range(2_500)])
    assert [s.offset for s in sent if isinstance(s, Sent)] == list(range(2_500))
    large = queue.send_many([bytes(1024 * 1024)] * 10)
    assert all(isinstance(s, Sent) for s in large)
    assert [len(r.body["messages"]) for r in fake.requests] == [1000, 1000, 500, 4, 4, 2]


def test_receipts_are_answered_one_by_one(fake: FakeService, service: Service) -> None:
    queue = service.queue("q")
    fake.put("q", b"a", b"b", b"c")
    messages = queue.receive_many(3, timeout=1)
    fake.refused[messages[1].receipt] = "bad-receipt"
    first, second, third = queue.ack_many(messages)
    assert (first, third) == (None, None)
    assert isinstance(second, errors.BadReceiptError)
    with pytest.raises(errors.BadReceiptError, match="bad-receipt"):
        messages[1].ack()


def test_a_payload_of_another_type_is_refused_before_it_is_sent(fake: FakeService, service: Service) -> None:
    queue = service.queue("orders")
    for wrong in ({"a": 1}, 5, None, [b"x"]):
        with pytest.raises(errors.BadValueError, match="a message is bytes or text, not"):
            queue.send(wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.BadValueError, match="the value of header 'n' is bytes or text, not int"):
        queue.send(b"x", headers={"n": 1})  # type: ignore[dict-item]
    with pytest.raises(errors.BadValueError, match="use send for one"):
        queue.send_many("abc")
    with pytest.raises(errors.BadValueError, match="not int"):
        queue.send_many([3])  # type: ignore[list-item]
    assert fake.requests == []


def test_text_in_keys_and_headers_is_sent_as_utf_8(fake: FakeService, service: Service) -> None:
    """A service takes text for base64 in these places, so `abcd` would arrive as other bytes."""
    service.queue("orders").send("ä", key="abcd", headers={"kind": "book"})
    (request,) = fake.requests
    (message,) = request.body["messages"]
    assert (message["payload"], message["key"], message["headers"]) == ("ä".encode(), b"abcd", {"kind": b"book"})


def test_a_queue_of_any_name_is_one_part_of_the_path(fake: FakeService, service: Service) -> None:
    service.queue("a/b ü?").send(b"x")
    assert fake.paths() == ["/v1/queues/a%2Fb%20%C3%BC%3F/messages"]


def test_the_key_is_shown_to_the_service_and_to_nobody_else(fake: FakeService) -> None:
    with Service(fake.url, key="s3cret") as service:
        service.queue("q").send(b"x")
        assert "s3cret" not in repr(service)
    assert fake.requests[0].key == "Bearer s3cret"


# ---------------------------------------------------------------------- failures


def test_a_request_is_tried_again_when_the_connection_breaks_or_the_service_is_not_available(
    fake: FakeService, service: Service
) -> None:
    fake.fail(2, status=0)
    fake.fail(2, status=503)
    service.queue("q").send(b"x")
    assert len(fake.requests) == 5


def test_the_next_try_is_not_before_the_service_asked_for_it(fake: FakeService, service: Service) -> None:
    fake.fail(status=503, retry_after="1")
    service.queue("q").send(b"x")
    first, second = fake.requests
    assert second.at_s - first.at_s >= 1.0


def test_tries_end_when_their_time_is_over() -> None:
    with Service(unused_url(), retry_for=0.5) as service:
        began = time.monotonic()
        with pytest.raises(errors.UnreachableError, match=r"127\.0\.0\.1:\d+ does not answer"):
            service.queue("q").send(b"x")
        assert time.monotonic() - began < 2


def test_a_service_that_stays_unavailable_says_so(fake: FakeService) -> None:
    with Service(fake.url, retry_for=0) as service:
        fake.fail(status=503, detail="Kafka is away", retry_after="7")
        with pytest.raises(errors.UnavailableError, match="Kafka is away") as caught:
            service.queue("q").send(b"x")
    assert caught.value.retry_after_s == 7


def test_a_request_has_its_time(fake: FakeService) -> None:
    fake.pause_s = 1.0
    service = Service(fake.url, timeout=0.2, retry_for=0)
    with service, pytest.raises(errors.UnreachableError, match=r"within 0\.2 s"):
        service.queue("q").send(b"x")


def test_an_address_that_fails_is_left_for_the_next_which_is_kept(fake: FakeService) -> None:
    with Service([unused_url(), fake.url]) as service:
        began = time.monotonic()
        for _ in range(3):
            service.queue("q").send(b"x")
        assert time.monotonic() - began < 1
    assert len(fake.requests) == 3


def test_a_worker_that_is_not_ready_is_left_for_the_next_at_once(fake: FakeService) -> None:
    with FakeService() as other, Service([fake.url, other.url]) as service:
        fake.fail(status=503, retry_after="30")
        service.queue("q").send(b"x")
        assert len(other.requests) == 1


@pytest.mark.parametrize(
    ("status", "type_", "error"),
    [
        (400, "bad-value", errors.BadValueError),
        (400, "bad-receipt", errors.BadReceiptError),
        (401, "no-key", errors.NotAuthenticatedError),
        (403, "not-allowed", errors.NotAllowedError),
        (404, "unknown-queue", errors.UnknownQueueError),
        (409, "not-possible", errors.NotPossibleError),
        (413, "http", errors.TooLargeError),
        (422, "new-kind", errors.RequestError),
        (500, "internal", errors.ServiceError),
    ],
)
def test_what_the_service_refuses_is_raised_at_once(
    fake: FakeService, service: Service, status: int, type_: str, error: type[Exception]
) -> None:
    fake.fail(status=status, type=f"urn:marq:problem:{type_}", detail="what was wrong")
    with pytest.raises(error, match="what was wrong"):
        service.queue("q").send(b"x")
    assert len(fake.requests) == 1


def test_client_and_service_agree_on_the_names_of_errors() -> None:
    from marq.protocol.problems import _KINDS

    for kind, status, name, _ in _KINDS:
        if issubclass(kind, errors.RequestError | errors.UnavailableError):
            assert type(wire.error_of(Problem(f"urn:marq:problem:{name}"), status)) is kind


def test_receipts_that_could_not_be_confirmed_are_tried_again_without_the_others(
    fake: FakeService, service: Service
) -> None:
    queue = service.queue("q")
    fake.put("q", b"a", b"b")
    messages = queue.receive_many(2, timeout=1)
    fake.refused_once[messages[1].receipt] = "unavailable"
    assert queue.ack_many(messages) == [None, None]
    assert [len(r.body["receipts"]) for r in fake.requests if r.path == "/v1/ack"] == [2, 1]


def test_an_answer_that_is_none_of_marqs_says_so(fake: FakeService, service: Service) -> None:
    fake.fail(status=200, detail="another program")
    with pytest.raises(errors.ServiceError, match="did not answer like marq"):
        service.queue("q").receive()


@pytest.mark.parametrize("address", ["localhost:9324", "ftp://x", "http://", "http://me:secret@host"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(errors.SettingError) as caught:
        checked(address)
    assert "secret" not in str(caught.value)


def test_a_closed_service_says_so(fake: FakeService) -> None:
    service = Service(fake.url)
    service.queue("q").send(b"x")
    service.close()
    service.close()
    with pytest.raises(errors.ClosedError, match="closed"):
        service.queue("q").send(b"x")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_service_made_before_a_fork_says_so() -> None:
    code = """
        import os, sys
        from marq.client import Service
        from marq.errors import ClosedError, UnavailableError
        service = Service("http://127.0.0.1:9", retry_for=0)
        try:
            service.queue("q").send(b"x")
        except UnavailableError:
            pass
        child = os.fork()
        if not child:
            try:
                service.queue("q").send(b"x")
            except ClosedError:
                os._exit(7)
            os._exit(1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert python(code).wait(20) == 7


# ---------------------------------------------------------------------- shared requests


@in_loop
async def test_acknowledgements_under_way_at_the_same_time_share_requests(fake: FakeService) -> None:
    async with AsyncService(fake.url) as service:
        queue = service.queue("q")
        await queue.send_many([b"x"] * 300)
        messages = await queue.receive_many(300, timeout=1)
        await asyncio.gather(*(message.ack() for message in messages))
    assert sorted(fake.acked) == list(range(300))
    assert fake.paths().count("/v1/ack") <= 2


@in_loop
async def test_sends_under_way_at_the_same_time_share_requests_and_keep_their_order(fake: FakeService) -> None:
    async with AsyncService(fake.url) as service:
        queue = service.queue("q")
        sent = await asyncio.gather(*(queue.send(b"%d" % i) for i in range(500)))
    assert [s.offset for s in sent] == list(range(500))
    assert len(fake.requests) <= 3


@in_loop
async def test_one_bad_value_is_nothing_to_those_who_share_its_request(fake: FakeService) -> None:
    async with AsyncService(fake.url) as service:
        queue = service.queue("q")
        fake.fail(2, status=400, type="urn:marq:problem:bad-value")
        outcomes = await asyncio.gather(*(queue.send(b"x") for _ in range(3)), return_exceptions=True)
    assert [type(o) for o in outcomes] == [errors.BadValueError, Sent, Sent]


def test_an_acknowledgement_as_a_future(fake: FakeService, service: Service) -> None:
    queue = service.queue("q")
    fake.put("q", *[b"x"] * 50)
    messages = queue.receive_many(50, timeout=1)
    fake.refused[messages[7].receipt] = "lease-over"
    futures = [message.ack_soon() for message in messages]
    failed = [i for i, future in enumerate(futures) if future.exception(5) is not None]
    assert failed == [7]
    assert isinstance(futures[7].exception(), errors.LeaseOverError)
    assert len(fake.acked) == 49


# ---------------------------------------------------------------------- consumers


def test_a_consumer_gives_all_messages_and_acknowledges_in_the_background(fake: FakeService, service: Service) -> None:
    fake.put("q", *[b"%d" % i for i in range(1_000)])
    with service.queue("q").consume(timeout=0.3) as messages:
        seen = []
        for message in messages:
            seen.append(int(message.payload))
            message.ack()
        messages.flush()
        assert sorted(fake.acked) == list(range(1_000))
    assert seen == list(range(1_000))
    assert fake.paths().count("/v1/ack") < 500


def test_a_consumer_that_confirms_returns_from_ack_when_it_is_durable(fake: FakeService, service: Service) -> None:
    fake.put("q", b"a", b"b", b"c")
    with service.queue("q").consume(confirm=True) as messages:
        for n, message in enumerate(messages, 1):
            message.ack()
            assert len(fake.acked) == n
            if n == 3:
                break


def test_a_consumer_takes_so_many_ahead_and_holds_so_many(fake: FakeService, service: Service) -> None:
    fake.put("q", *[b"x"] * 100)
    with service.queue("q").consume(prefetch=4, max_in_flight=10, confirm=True) as messages:
        until(lambda: len(fake.out) == 4)
        time.sleep(0.1)
        assert len(fake.out) == 4
        held = [next(messages) for _ in range(10)]
        time.sleep(0.1)
        assert len(fake.out) == 10
        held[3].ack()
        held[7].ack()
        assert {next(messages).offset, next(messages).offset} == {10, 11}
    assert fake.most_out == 10


def test_without_prefetch_a_message_is_taken_when_it_is_asked_for(fake: FakeService, service: Service) -> None:
    fake.put("q", *[b"x"] * 10)
    with service.queue("q").consume(prefetch=0, confirm=True) as messages:
        time.sleep(0.1)
        assert len(fake.out) == 0
        for n in range(1, 4):
            next(messages)
            assert len(fake.out) == n


def test_a_consumer_keeps_its_messages_alive(fake: FakeService, service: Service) -> None:
    fake.put("q", b"slow", b"unread")
    with service.queue("q").consume(visibility_timeout=1) as messages:
        slow = next(messages)
        time.sleep(1.5)
        assert fake.extended[slow.offset] >= 3
        assert fake.extended[slow.offset + 1] >= 3
        slow.ack()
        messages.flush()
        before = fake.extended[slow.offset]
        time.sleep(0.5)
        assert fake.extended[slow.offset] == before


def test_an_unread_message_whose_lease_was_lost_is_not_handed_out(fake: FakeService, service: Service) -> None:
    fake.put("q", b"0", b"1", b"2")
    with service.queue("q").consume(visibility_timeout=1, timeout=0.2) as messages:
        assert next(messages).offset == 0
        fake.refused["1/1"] = "lease-over"
        time.sleep(0.6)
        assert [m.offset for m in messages] == [2]


def test_an_unread_message_whose_lease_could_not_be_extended_is_not_handed_out(fake: FakeService) -> None:
    fake.put("q", b"0", b"1")
    options: dict[str, Any] = {"visibility_timeout": 1.0, "prefetch": 2, "timeout": 0.2}
    with Service(fake.url, retry_for=0.2) as service, service.queue("q").consume(**options) as messages:
        next(messages)
        fake.fail(100, status=503)
        time.sleep(1.3)
        fake.failures.clear()
        assert list(messages) == []


def test_leaving_the_loop_gives_back_what_is_unread_uncounted(fake: FakeService, service: Service) -> None:
    fake.put("q", *[b"x"] * 10)
    for message in service.queue("q").consume(prefetch=6):
        until(lambda: len(fake.out) >= 6)
        message.ack()
        break
    assert fake.acked == [0]
    assert {(delay, counted) for _, delay, counted in fake.released} == {(0, False)}
    assert [offset for offset, _, _ in fake.released] == list(range(1, 1 + len(fake.released)))
    assert fake.out == {}


def test_an_exception_in_the_loop_gives_back_what_is_unread(fake: FakeService, service: Service) -> None:
    fake.put("q", *[b"x"] * 4)
    with pytest.raises(ZeroDivisionError):
        for message in service.queue("q").consume():
            with message:
                raise ZeroDivisionError
    assert sorted(fake.released) == [(0, 0, True), (1, 0, False), (2, 0, False), (3, 0, False)]


def test_ctrl_c_gives_back_what_is_unread(fake: FakeService) -> None:
    fake.put("q", *[b"x"] * 5)
    process = python(
        f"""
        import time
        from marq.client import Service
        service = Service({fake.url!r})
        for message in service.queue("q").consume():
            message.ack()
            if message.offset == 2:
                print("working", flush=True)
                time.sleep(60)
        """
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) != 0
    assert sorted(fake.acked) == [0, 1, 2]
    assert sorted(fake.released) == [(3, 0, False), (4, 0, False)]


def test_ctrl_c_while_waiting_ends_the_receive(fake: FakeService) -> None:
    process = python(
        f"""
        from marq.client import Service
        with Service({fake.url!r}) as service:
            service.queue("q").receive(timeout=None)
        """
    )
    until(lambda: len(fake.requests) == 1)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) != 0


def test_acknowledgements_are_sent_when_the_interpreter_ends(fake: FakeService) -> None:
    fake.put("q", *[b"x"] * 5)
    process = python(
        f"""
        from marq.client import Service
        messages = Service({fake.url!r}).queue("q").consume()
        for _ in range(3):
            next(messages).ack()
        """
    )
    assert process.wait(20) == 0
    assert sorted(fake.acked) == [0, 1, 2]
    assert sorted(fake.released) == [(3, 0, False), (4, 0, False)]


def test_a_consumer_goes_on_when_the_service_is_back() -> None:
    with FakeService() as before:
        port = before.port
        before.put("q", b"1")
        service = Service(before.url, retry_for=0.1)
        messages = service.queue("q").consume()
        next(messages).ack()
        messages.flush()
    time.sleep(0.3)
    with FakeService(port=port) as after, contextlib.closing(service), contextlib.closing(messages):
        after.put("q", b"2")
        message = next(messages)
        message.ack()
        messages.flush()
        assert (message.payload, after.acked) == (b"2", [0])


def test_an_acknowledgement_in_the_background_is_sent_when_the_service_is_back(fake: FakeService) -> None:
    fake.put("q", b"1")
    with Service(fake.url, retry_for=0) as service, service.queue("q").consume() as messages:
        message = next(messages)
        fake.fail(4, status=503)
        message.ack()
        messages.flush()
    assert fake.acked == [0]


def test_a_failed_acknowledgement_is_raised_by_flush_once(fake: FakeService, service: Service) -> None:
    fake.put("q", b"1", b"2")
    with service.queue("q").consume() as messages:
        fake.refused["0/1"] = "bad-receipt"
        next(messages).ack()
        next(messages).ack()
        with pytest.raises(errors.BadReceiptError):
            messages.flush()
        messages.flush()
    assert fake.acked == [1]


@pytest.mark.parametrize("consumes", [True, False])
@in_loop
async def test_an_acknowledgement_that_can_not_be_taken_yet_holds_up_no_other(
    fake: FakeService, consumes: bool
) -> None:
    fake.put("q", b"1", b"2")
    fake.refused["0/1"] = "unavailable"
    async with AsyncService(fake.url) as service:
        queue = service.queue("q")
        consumer = queue.consume(confirm=True)
        taken = await consumer.take(2) if consumes else await queue.receive_many(2, timeout=1)
        taken += await consumer.take(2 - len(taken)) if consumes and len(taken) < 2 else []
        late = asyncio.ensure_future(taken[0].ack())
        while not fake.paths().count("/v1/ack"):
            await asyncio.sleep(0.01)
        await taken[1].ack()
        assert not late.done()
        del fake.refused["0/1"]
        await late
        await consumer.close()
    assert sorted(fake.acked) == [0, 1]


def test_an_error_of_our_own_in_an_acknowledgement_is_raised_by_flush_and_lets_the_lease_end(
    fake: FakeService, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def planted(*_: object) -> None:
        raise KeyError("planted")

    fake.put("q", b"1")
    with service.queue("q").consume() as messages:
        message = next(messages)
        monkeypatch.setattr(messages._prefetcher._settles, "put", planted)
        message.ack()
        with pytest.raises(errors.ServiceError, match="planted"):
            messages.flush()
        assert not messages._prefetcher.held


def test_an_acknowledgement_that_fails_when_the_consumer_closes_is_told(
    fake: FakeService, service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.put("q", b"1", b"2")
    with service.queue("q").consume() as messages:
        fake.refused["0/1"] = "bad-receipt"
        first, second = next(messages), next(messages)
        # nothing of it is sent before the consumer closes
        monkeypatch.setattr(messages._prefetcher, "send_later", lambda: None)
        first.ack()
        second.ack()
    assert fake.acked == [1]
    assert "1 acknowledgements failed" in caplog.text


def test_acknowledgements_that_are_not_confirmed_when_the_consumer_closes_are_told(
    fake: FakeService, service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marq.client.prefetch.CLOSE_TIMEOUT_S", 0.1)
    fake.put("q", b"1")
    with service.queue("q").consume() as messages:
        message = next(messages)
        fake.fail(1_000)
        message.ack()
    assert "1 acknowledgements not confirmed" in caplog.text


def test_what_receives_are_refused_with_is_raised_in_the_loop(fake: FakeService, service: Service) -> None:
    fake.fail(status=403, type="urn:marq:problem:not-allowed", detail="this key may only send")
    with pytest.raises(errors.NotAllowedError, match="may only send"):
        next(service.queue("q").consume())


@pytest.mark.parametrize("options", [{"prefetch": -1}, {"max_in_flight": 0}, {"visibility_timeout": 0.5}])
def test_options_that_make_no_sense_are_refused(service: Service, options: dict[str, float]) -> None:
    with pytest.raises(errors.BadValueError, match=next(iter(options))):
        service.queue("q").consume(**options)  # type: ignore[arg-type]


def test_several_threads_share_a_consumer(fake: FakeService, service: Service) -> None:
    fake.put("q", *[b"x"] * 400)
    seen: list[int] = []

    def work() -> None:
        for message in messages:
            seen.append(message.offset)
            message.ack()

    with service.queue("q").consume(prefetch=20, max_in_flight=40, timeout=0.3) as messages:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        messages.flush()
    assert sorted(seen) == sorted(fake.acked) == list(range(400))
    assert fake.most_out <= 40


def test_a_batch_is_taken_from_what_is_there(fake: FakeService, service: Service) -> None:
    fake.put("q", *[b"x"] * 9)
    with service.queue("q").consume(prefetch=30) as messages:
        until(lambda: len(fake.out) == 9)
        assert len(messages.take(6)) == 6
        rest = messages.take(6)
        assert len(rest) == 3
        messages.ack_many(rest)
        messages.flush()
        assert len(fake.acked) == 3
        assert messages.take(5, timeout=0.05) == []


@in_loop
async def test_the_asynchronous_consumer_does_the_same(fake: FakeService) -> None:
    fake.put("q", *[b"x"] * 20)
    async with AsyncService(fake.url) as service, service.queue("q").consume(prefetch=8) as messages:
        n = 0
        async for message in messages:
            async with message:
                n += 1
            if n == 10:
                break
        await messages.flush()
    assert sorted(fake.acked) == list(range(10))
    assert all(counted is False for _, _, counted in fake.released)
    assert fake.out == {}


@in_loop
async def test_closing_the_service_closes_its_consumers(fake: FakeService) -> None:
    fake.put("q", *[b"x"] * 5)
    async with AsyncService(fake.url) as service:
        messages = service.queue("q").consume()
        await (await anext(messages)).ack()
    assert fake.acked == [0]
    assert len(fake.released) == 4
    assert [m async for m in messages] == []


# ---------------------------------------------------------------------- queues, and the package


def test_queues_are_managed(fake: FakeService, service: Service) -> None:
    queue = service.queue("q")
    assert queue.create(max_receives=5).settings == {"max_receives": 5}
    assert queue.set(ttl_ms=1_000).settings == {"ttl_ms": 1_000}
    assert queue.get().name == "q"
    queue.purge()
    queue.delete()


def test_the_client_needs_nothing_of_the_worker() -> None:
    code = """
        import sys
        import marq.client
        for name in ("faust", "aiokafka", "pyspark", "app", "gateway", "rocksdict", "pydantic", "marq.core"):
            assert name not in sys.modules, name
    """
    assert python(code).wait(20) == 0


def test_the_package_alone_brings_what_the_client_needs_and_says_that_it_is_typed() -> None:
    alone = {re.split(r"[ <>=!~;\[]", name)[0] for name in metadata.requires("marq") or () if "extra ==" not in name}
    assert alone == {"aiohttp", "msgspec", "tenacity", "yarl"}
    assert (Path(marq.__file__).parent / "py.typed").exists()


def python(code: str) -> subprocess.Popen[str]:
    """A process that runs `code`."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_slow_reader_has_few_messages_ahead_and_loses_no_lease(fake: FakeService, service: Service) -> None:
    fake.put("q", *(b"%d" % i for i in range(200)))
    taken, ahead = [], []
    with service.queue("q").consume(prefetch=100, visibility_timeout=1.0, confirm=True) as messages:
        for message in messages:
            time.sleep(0.1)
            ahead.append(len(messages._prefetcher.unread))
            message.ack()
            taken.append(message.offset)
            if len(taken) == 25:
                break
    assert taken == list(range(25))
    assert max(ahead) <= 11  # not the hundred that would wait for ten leases
    assert max(ahead[15:]) <= 3
