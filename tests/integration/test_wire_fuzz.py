"""Every byte of a request may be wrong: no 5xx, no traceback, no growth of memory, no late answer.

Seeds are new in each run and printed; `MARQ_TEST_FUZZ_SEED` repeats one.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import secrets
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest
import uvloop

from marq.client import Service
from tests.integration import wire_fuzz
from tests.integration.attacks import rss_bytes
from tests.integration.cluster import Cluster, Worker, until
from tests.integration.json_client import Client
from tests.integration.sqs_client import client_of
from tests.integration.wire_fuzz import Recorder, Report, fuzz, signed

KEY_ID, SECRET = "AKIDFUZZFUZZFUZZ", "a-secret-of-enough-length"
#: Requests that are sent to each of the two workers.
QUICK, SLOW = 2_500, 500_000
#: Looks at memory in a slow run.
LOOKS = 20
#: What memory may grow by after the first tenth: fragments, and queues and messages that were made by chance.
GROWTH_BYTES = 96 * 1024 * 1024
#: Messages go away by themselves, and unknown queues are not made: what stays is what leaks.
SETTINGS = {"auto_create": "false", "memory_bytes": 32 * 1024 * 1024, "partitions": 2, "handlers": ""}


class Target:
    """A worker, and the requests that were recorded with it."""

    def __init__(self, worker: Worker, key: str | None) -> None:
        self.worker = worker
        self.port = urlsplit(worker.url).port or 0
        self.signed = key is not None
        self.recorded = _record(worker.url, key)

    def fuzz(self, count: int, seed: int) -> Report:
        def sign_it(request: bytes) -> bytes:
            return signed(request, KEY_ID, SECRET) if b"\r\nAuthorization: Bearer" not in request else request

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(fuzz(self.port, self.recorded, count, seed, sign_it if self.signed else None))


@pytest.fixture(scope="module", params=["unsigned", "signed"])
def target(request: pytest.FixtureRequest, kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    key = f"{KEY_ID}:{SECRET}" if request.param == "signed" else None
    values: dict[str, Any] = SETTINGS | ({"keys": key} if key else {})
    with Cluster(kafka, tmp_path_factory.mktemp("fuzz"), **values) as cluster:
        worker = cluster.start(ready=False)
        until(lambda: worker.get("/health/ready")[0] == 200, "the worker is ready", 60)
        yield Target(worker, key)


def _record(url: str, key: str | None) -> list[bytes]:
    """What clients of both protocols send."""
    with Recorder(urlsplit(url).port or 0) as recorder:
        _use_json(recorder.url, key)
        _use_our_client(recorder.url, key)
        _use_sqs(recorder.url)
        _use_forms(recorder.url, key)
    assert len(recorder.requests) > 50
    return recorder.requests


def _use_json(url: str, key: str | None) -> None:
    client = Client(url, key)
    settings = {"ttl_ms": 3_000, "max_receives": 2, "dead_letter_queue": "fuzz-dead", "dead_letters_from": []}
    for queue in ("fuzz", "fuzz-dead"):
        client.request("PUT", f"/v1/queues/{queue}", settings if queue == "fuzz" else {"ttl_ms": 3_000})
    client.request("PATCH", "/v1/queues/fuzz", {"delay_ms": 0, "backoff_ms": 5})
    whole = {"payload": "eA==", "key": "aw==", "headers": {"a": "Yg==", "é": ""}, "delay_ms": 1, "ttl_ms": 900}
    whole |= {"group": "g", "deduplication_id": "d"}
    for body in ({"messages": [{"payload": "eA=="}] * 3}, {"messages": [whole]}):
        client.request("POST", "/v1/queues/fuzz/messages", body)
    messages = client.receive("fuzz", 10)
    receipts = [m["receipt"] for m in messages] or ["none"]
    for path, values in (
        ("/v1/extend", {"visibility_timeout_ms": 200}),
        ("/v1/release", {"delay_ms": 1, "counted": False}),
        ("/v1/reject", {"reason": "no"}),
        ("/v1/ack", {}),
    ):
        client.request("POST", path, {"receipts": receipts[:2], **values})
    client.request("POST", "/v1/queues/fuzz/receive", {"max": 5, "visibility_timeout_ms": 150, "receiver": "r"})
    client.request("POST", "/v1/queues/fuzz-dead/move", {"max": 5})
    client.request("POST", "/v1/queues/fuzz-dead/move", {"to": "fuzz", "messages": [{"partition": 0, "offset": 0}]})
    client.request("POST", "/v1/queues/fuzz/purge")
    for path in (
        "/v1/queues?prefix=f&limit=2",
        "/v1/queues/fuzz",
        "/v1/stats?limit=3",
        "/v1/queues/fuzz/stats",
        "/v1/queues/fuzz/messages?state=ready&limit=2",
        "/v1/messages/0/0",
        "/v1/partitions?scope=cluster",
        "/v1/workers",
        "/v1/tables/messages/0?limit=2",
        "/v1/openapi.json",
        "/metrics",
        "/health/ready",
    ):
        client.request("GET", path)
    client.request(
        "POST", "/v1/peer/watch", b"\x80", **{"Marq-Peer": "version=1,time=1,sender=a,number=1,body=b,seal=c"}
    )
    client.close()


def _use_our_client(url: str, key: str | None) -> None:
    with Service(url, key=key) as client:
        queue = client.queue("fuzz")
        queue.send(b"x" * 100, headers={"h": b"v"})
        for message in queue.receive_many(5):
            message.ack()


def _use_sqs(url: str) -> None:
    sqs = client_of(url, (KEY_ID, SECRET))
    queue = sqs.create_queue(QueueName="fuzz-sqs", Attributes={"MessageRetentionPeriod": "60"})["QueueUrl"]
    attributes = {
        "a": {"DataType": "String.x", "StringValue": "é"},
        "b": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
        "n": {"DataType": "Number", "StringValue": "1.5"},
    }
    trace = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1"}}
    sqs.send_message(QueueUrl=queue, MessageBody="body", MessageAttributes=attributes, MessageSystemAttributes=trace)
    sqs.send_message_batch(
        QueueUrl=queue, Entries=[{"Id": f"{i}", "MessageBody": "b" * i, "DelaySeconds": 0} for i in range(1, 4)]
    )
    wanted = {"MessageAttributeNames": ["All"], "AttributeNames": ["All"], "VisibilityTimeout": 1}
    found = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, **wanted).get("Messages", [])
    receipts = [one["ReceiptHandle"] for one in found] or ["none"]
    with contextlib.suppress(sqs.exceptions.ClientError):
        sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=receipts[0], VisibilityTimeout=0)
        sqs.delete_message(QueueUrl=queue, ReceiptHandle=receipts[-1])
    entries = [{"Id": f"{i}", "ReceiptHandle": receipt} for i, receipt in enumerate(receipts)]
    sqs.delete_message_batch(QueueUrl=queue, Entries=entries)
    sqs.get_queue_url(QueueName="fuzz-sqs")
    sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])
    policy = {"RedriveAllowPolicy": json.dumps({"redrivePermission": "denyAll"}), "Policy": "{}", "DelaySeconds": "0"}
    sqs.set_queue_attributes(QueueUrl=queue, Attributes=policy)
    sqs.list_queues(QueueNamePrefix="fuzz", MaxResults=1)
    sqs.tag_queue(QueueUrl=queue, Tags={"k": "v"})
    sqs.list_queue_tags(QueueUrl=queue)
    sqs.untag_queue(QueueUrl=queue, TagKeys=["k"])
    sqs.add_permission(QueueUrl=queue, Label="l", AWSAccountIds=["1"], Actions=["SendMessage"])
    sqs.remove_permission(QueueUrl=queue, Label="l")
    sqs.list_dead_letter_source_queues(QueueUrl=queue)
    sqs.purge_queue(QueueUrl=queue)
    with contextlib.suppress(sqs.exceptions.ClientError):
        sqs.list_message_move_tasks(SourceArn="arn:aws:sqs:eu-west-1:000000000000:fuzz-sqs")


def _use_forms(url: str, key: str | None) -> None:
    """The query protocol, as clients of years ago speak it."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    address = f"{url}/000000000000/fuzz-sqs"
    for parameters in (
        {"Action": "SendMessage", "QueueUrl": address, "MessageBody": "b é &=+%", "DelaySeconds": "0"},
        {
            "Action": "SendMessage",
            "MessageBody": "b",
            "MessageAttribute.1.Name": "a",
            "MessageAttribute.1.Value.DataType": "String",
            "MessageAttribute.1.Value.StringValue": "v",
        },
        {
            "Action": "SendMessageBatch",
            "SendMessageBatchRequestEntry.1.Id": "a",
            "SendMessageBatchRequestEntry.1.MessageBody": "b",
            "SendMessageBatchRequestEntry.2.Id": "b",
            "SendMessageBatchRequestEntry.2.MessageBody": "c",
        },
        {"Action": "ReceiveMessage", "MaxNumberOfMessages": "3", "VisibilityTimeout": "1", "AttributeName.1": "All"},
        {"Action": "DeleteMessage", "ReceiptHandle": "none"},
        {"Action": "GetQueueAttributes", "AttributeName.1": "All", "Version": "2012-11-05"},
        {"Action": "SetQueueAttributes", "Attribute.1.Name": "DelaySeconds", "Attribute.1.Value": "0"},
        {"Action": "ListQueues", "QueueNamePrefix": "fuzz"},
        {"Action": "TagQueue", "Tag.1.Key": "k", "Tag.1.Value": "v"},
    ):
        form = urlencode(parameters)
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Authorization": "AWS4-HMAC-SHA256 x"}
        for method, path, body in (
            ("POST", "/000000000000/fuzz-sqs", form),
            ("GET", f"/000000000000/{quote('fuzz-sqs')}?{form}", None),
        ):
            connection.request(method, path, body, headers)
            connection.getresponse().read()
    connection.close()


def _seed() -> int:
    return int(os.environ.get("MARQ_TEST_FUZZ_SEED", "0")) or secrets.randbits(32)


def _check(report: Report, worker: Worker) -> None:
    print(report)
    assert worker.running, worker.log[-4000:]
    assert not report.failures, (report.seed, report.failures[:3])
    assert not report.unanswered, (report.seed, report.unanswered[:3])
    assert "Traceback" not in worker.log, worker.log[worker.log.index("Traceback") - 500 :][:4000]
    # some requests must be accepted: otherwise only heads would be tested
    assert report.statuses[200] > sum(report.statuses.values()) / 50


def test_no_changed_byte_makes_a_worker_fail(target: Target) -> None:
    report = target.fuzz(QUICK, _seed())
    _check(report, target.worker)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_million_changed_requests_leave_a_worker_as_it_was(target: Target) -> None:
    count = int(os.environ.get("MARQ_TEST_FUZZ_REQUESTS", SLOW * 2)) // 2
    sizes, slowest_s = [], 0.0
    for _ in range(LOOKS):
        report = target.fuzz(count // LOOKS, _seed())
        _check(report, target.worker)
        sizes.append(rss_bytes(target.worker))
        slowest_s = max(slowest_s, report.slowest_s)
    print(f"memory {[size >> 20 for size in sizes]} MiB, slowest answer {slowest_s:.3f} s")
    assert sizes[-1] - sizes[LOOKS // 10] < GROWTH_BYTES, sizes


@pytest.mark.parametrize("whole", [True, False])
def test_the_fuzzer_knows_what_is_whole(whole: bool) -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (3 if whole else 4)
    assert wire_fuzz.is_whole(head + b"abc") is whole
    assert wire_fuzz.is_whole(wire_fuzz.framed(head + b"abc"))
    assert not wire_fuzz.is_whole(head[:-2])
