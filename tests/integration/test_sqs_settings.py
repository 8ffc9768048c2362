"""SQS with keys, and with relaxed limits: a worker each."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.integration.cluster import Cluster, Worker
from tests.integration.json_client import Client
from tests.integration.sqs_client import REGION, Queue, ask, client_of, refused, sts_client_of
from tests.kafka import unique

ROOT = ("ROOTKEY", "root-secret-of-the-tests")
SENDER = ("SENDER", "secret-of-the-sender")
READER = ("READER", "secret-of-the-reader")
MANAGER = ("MANAGER", "secret-of-the-manager")
ACCOUNT = "123412341234"
BEARER = "bearer-key-of-the-tests"


@pytest.fixture(scope="module")
def secured(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker with keys."""
    keys = f"{':'.join(ROOT)},{':'.join(SENDER)}=send:jobs-*,{':'.join(READER)}=receive:jobs-*,"
    keys += f"{':'.join(MANAGER)}=send+receive+manage:jobs-*,{BEARER}"
    with Cluster(kafka, tmp_path_factory.mktemp("keys"), partitions=1, handlers="", keys=keys) as cluster:
        yield cluster.start()


@pytest.fixture(scope="module")
def relaxed(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that allows what marq can do."""
    folder = tmp_path_factory.mktemp("relaxed")
    with Cluster(kafka, folder, partitions=2, handlers="", sqs_limits="relaxed", sqs_account=ACCOUNT) as cluster:
        yield cluster.start()


# -- keys


def test_keys_are_access_keys_with_their_permissions(secured: Worker) -> None:
    root, sender, reader = (client_of(secured.url, key) for key in (ROOT, SENDER, READER))
    url = root.create_queue(QueueName=unique("jobs-"))["QueueUrl"]
    other = root.create_queue(QueueName=unique("other"))["QueueUrl"]
    sender.send_message(QueueUrl=url, MessageBody="x")
    (message,) = reader.receive_message(QueueUrl=url, WaitTimeSeconds=5, AttributeNames=["All"])["Messages"]
    assert message["Attributes"]["SenderId"] == "SENDER"
    for call in (
        lambda: sender.receive_message(QueueUrl=url),
        lambda: sender.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"]),
        lambda: reader.send_message(QueueUrl=url, MessageBody="x"),
        lambda: reader.purge_queue(QueueUrl=url),
        lambda: sender.create_queue(QueueName=unique("jobs-")),
        lambda: sender.send_message(QueueUrl=other, MessageBody="x"),
        lambda: sender.get_queue_attributes(QueueUrl=other, AttributeNames=["All"]),
    ):
        with refused("AccessDenied"):
            call()
    assert sender.list_queues()["QueueUrls"] == [url]
    reader.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])


def test_messages_are_moved_only_to_where_the_key_may_send(secured: Worker) -> None:
    root, manager = (client_of(secured.url, key) for key in (ROOT, MANAGER))
    dead, other = Queue(root, _made(root, unique("jobs-dead"))), Queue(root, _made(root, unique("other")))
    policy = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 1})
    source = root.create_queue(QueueName=unique("other"), Attributes={"RedrivePolicy": policy})["QueueUrl"]
    root.send_message(QueueUrl=source, MessageBody="x")
    with refused("AccessDenied"):
        manager.start_message_move_task(SourceArn=dead.arn, DestinationArn=other.arn)
    with refused("AccessDenied"):  # back to the queues that the dead letters came from
        manager.start_message_move_task(SourceArn=dead.arn)
    manager.start_message_move_task(SourceArn=dead.arn, DestinationArn=Queue(root, _made(root, unique("jobs-"))).arn)


def _made(sqs: Any, name: str) -> str:
    return str(sqs.create_queue(QueueName=name)["QueueUrl"])


def test_wrong_keys_get_the_errors_of_aws(secured: Worker) -> None:
    with refused("InvalidClientTokenId"):
        client_of(secured.url, ("NOBODY", "secret-of-nobody-at-all")).list_queues()
    with refused("SignatureDoesNotMatch"):
        client_of(secured.url, (ROOT[0], "another secret")).list_queues()
    for headers in ({}, {"Authorization": f"Bearer {BEARER}"}, {"Authorization": "AWS4-HMAC-SHA256 Credential=x"}):
        request = urllib.request.Request(
            secured.url + "/", b"{}", {"X-Amz-Target": "AmazonSQS.ListQueues", **headers}, method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        assert caught.value.code == 403
        code = caught.value.headers["x-amzn-query-error"]
        assert code == ("IncompleteSignature;Sender" if headers else "MissingAuthenticationToken;Sender")


def test_a_presigned_url_does_what_it_was_signed_for(secured: Worker) -> None:
    root = client_of(secured.url, ROOT)
    queue = root.create_queue(QueueName=unique("jobs-"))["QueueUrl"]
    query = urlencode({"Action": "SendMessage", "MessageBody": "by a link, with + and %"})
    request = AWSRequest("GET", f"{queue}?{query}")
    SigV4QueryAuth(Credentials(*SENDER), "sqs", REGION, expires=60).add_auth(request)
    with urllib.request.urlopen(request.url, timeout=10) as answer:
        assert b"<MessageId>" in answer.read()
    (message,) = root.receive_message(QueueUrl=queue, WaitTimeSeconds=5)["Messages"]
    assert message["Body"] == "by a link, with + and %"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request.url.replace("link", "lynk"), timeout=10)
    assert b"SignatureDoesNotMatch" in caught.value.read()


def test_a_presigned_url_of_the_service_itself_works_too(secured: Worker) -> None:
    queue = client_of(secured.url, ROOT).create_queue(QueueName=unique("jobs-"))["QueueUrl"]
    request = AWSRequest("GET", f"{secured.url}/?Action=ListQueues")
    SigV4QueryAuth(Credentials(*ROOT), "sqs", REGION, expires=60).add_auth(request)
    with urllib.request.urlopen(request.url, timeout=10) as answer:
        assert f"<QueueUrl>{queue}</QueueUrl>".encode() in answer.read()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{secured.url}/?Action=ListQueues", timeout=10)
    assert caught.value.code == 403
    assert b"<Code>MissingAuthenticationToken</Code>" in caught.value.read()


def test_an_access_key_is_a_bearer_key_of_the_json_api(secured: Worker) -> None:
    name = unique("jobs-")
    assert Client(secured.url, ":".join(SENDER)).send(name, b"x")[0]["offset"] >= 0
    assert Client(secured.url, SENDER[1]).request("GET", "/v1/queues").status == 401


def test_a_page_in_a_browser_reaches_nothing_without_keys(relaxed: Worker) -> None:
    queue = Queue.make(relaxed)
    for headers in (
        {},  # a link that hides where it came from
        {"Authorization": "Basic dTpw"},  # one with a name and a password
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Dest": "image"},
        {"Referer": "https://evil.example/"},
        {"Host": "evil.example"},
    ):
        request = urllib.request.Request(f"{queue.url}?Action=DeleteQueue", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        assert caught.value.code == 403
    queue.send()


def test_without_keys_a_get_counts_only_if_no_link_can_make_it(relaxed: Worker) -> None:
    queue = Queue.make(relaxed)
    presigned = AWSRequest("GET", f"{queue.url}?Action=DeleteQueue")
    SigV4QueryAuth(Credentials("any", "thing"), "sqs", REGION, expires=60).add_auth(presigned)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(presigned.url, timeout=10)
    assert caught.value.code == 403
    assert b"an action is a POST" in caught.value.read()
    signed = AWSRequest("GET", f"{queue.url}?Action=DeleteQueue")
    SigV4Auth(Credentials("any", "thing"), "sqs", REGION).add_auth(signed)
    with urllib.request.urlopen(urllib.request.Request(signed.url, headers=dict(signed.headers)), timeout=10) as answer:
        assert b"<DeleteQueueResponse" in answer.read()


def test_whoever_asks_is_told_who_it_is(relaxed: Worker, secured: Worker) -> None:
    fields = ("UserId", "Account", "Arn")
    told = sts_client_of(secured.url, SENDER).get_caller_identity()
    assert [told[f] for f in fields] == ["SENDER", "0" * 12, f"arn:aws:iam::{'0' * 12}:user/SENDER"]
    assert f"SQS account {ACCOUNT}" in relaxed.log
    told = sts_client_of(relaxed.url).get_caller_identity()
    assert [told[f] for f in fields] == [ACCOUNT, ACCOUNT, f"arn:aws:iam::{ACCOUNT}:root"]
    answer = ask(relaxed.url + "/", "GetCallerIdentity", Version="2011-06-15")
    assert answer.status == 200
    assert f"<Account>{ACCOUNT}</Account>" in answer.text
    answer = ask(relaxed.url + "/", "GetCallerIdentity", accept="application/json")
    assert answer.json["GetCallerIdentityResponse"]["GetCallerIdentityResult"]["Account"] == ACCOUNT


def test_a_signature_is_good_for_the_service_that_it_names(secured: Worker) -> None:
    with refused("SignatureDoesNotMatch"):
        sts_client_of(secured.url, (ROOT[0], "another secret of the tests")).get_caller_identity()
    for action, service in (("ListQueues", "sts"), ("GetCallerIdentity", "sqs")):
        request = AWSRequest("GET", f"{secured.url}/?Action={action}")
        SigV4QueryAuth(Credentials(*ROOT), service, REGION, expires=60).add_auth(request)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request.url, timeout=10)
        assert b"Credential should be scoped to correct service" in caught.value.read()


# -- relaxed limits


def test_relaxed_limits_are_those_of_marq(relaxed: Worker) -> None:
    week = 7 * 24 * 3600
    queue = Queue.make(relaxed, VisibilityTimeout=week, DelaySeconds=0, MessageRetentionPeriod=100 * 24 * 3600)
    assert queue.url.split("/")[3] == ACCOUNT
    queue.send(DelaySeconds=week)
    queue.send("x" * (3 * 1024 * 1024))
    entries = [{"Id": f"{i}", "MessageBody": f"{i}"} for i in range(300)]
    assert len(queue.sqs.send_message_batch(QueueUrl=queue.url, Entries=entries)["Successful"]) == 300
    got: list[Any] = []
    while len(got) < 301 and (some := queue.receive(1000)):
        got += some
    assert len(got) == 301
    assert max(len(m["Body"]) for m in got) == 3 * 1024 * 1024
    deletes = [{"Id": f"{i}", "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(got)]
    assert len(queue.sqs.delete_message_batch(QueueUrl=queue.url, Entries=deletes)["Successful"]) == 301
    with refused("InvalidParameterValue"):
        queue.send(DelaySeconds=366 * 24 * 3600 + 1)
    with refused("InvalidParameterValue"):
        queue.receive(1001)


def test_relaxed_queues_are_purged_deleted_and_made_again_at_once(relaxed: Worker) -> None:
    queue = Queue.make(relaxed)
    for _ in range(2):
        queue.send("old")
        queue.sqs.purge_queue(QueueUrl=queue.url)
    queue.wait_for(visible=0)
    queue.sqs.tag_queue(QueueUrl=queue.url, Tags={"a": "b"})
    queue.send("older")
    queue.sqs.delete_queue(QueueUrl=queue.url)
    again = Queue.make(relaxed, queue.name, VisibilityTimeout=5)
    assert again.attribute("VisibilityTimeout") == "5"
    assert "Tags" not in again.sqs.list_queue_tags(QueueUrl=again.url)
    again.send("new")
    assert [m["Body"] for m in again.drain(1)] == ["new"]
    assert again.receive(wait_s=1) == []


def test_a_fifo_queue_that_is_made_again_knows_no_id_of_the_one_before(relaxed: Worker) -> None:
    attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
    queue = Queue.make(relaxed, **attributes)
    for _ in range(3):
        queue.send("x", MessageGroupId="g")
        queue.send("x", MessageGroupId="g")
        (message,) = queue.drain(1, wait_s=10)
        assert message["Body"] == "x"
        assert queue.receive(wait_s=1) == []
        queue.sqs.delete_queue(QueueUrl=queue.url)
        queue = Queue.make(relaxed, queue.name, **attributes)


def test_a_visibility_timeout_of_nothing_shows_the_message_again(relaxed: Worker) -> None:
    queue = Queue.make(relaxed, VisibilityTimeout=0)
    assert queue.attribute("VisibilityTimeout") == "0"
    queue.send()
    assert len(queue.receive()) == 1
    assert len(queue.receive()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("fifo", "count"), [(True, 20_001), (False, 120_001)], ids=["fifo", "standard"])
def test_more_messages_are_in_flight_than_with_aws(relaxed: Worker, fifo: bool, count: int) -> None:
    queue = Queue.make(relaxed, VisibilityTimeout=3600, **({"FifoQueue": "true"} if fifo else {}))
    for start in range(0, count, 1000):
        entries = [
            {"Id": f"{i}", "MessageBody": "x"}
            | ({"MessageGroupId": f"{i}", "MessageDeduplicationId": f"{i}"} if fifo else {})
            for i in range(start, min(start + 1000, count))
        ]
        assert len(queue.sqs.send_message_batch(QueueUrl=queue.url, Entries=entries)["Successful"]) == len(entries)
    got: set[str] = set()
    while len(got) < count:
        messages = queue.receive(1000)
        assert messages
        got |= {message["MessageId"] for message in messages}
    queue.wait_for(visible=0, in_flight=count)
    queue.sqs.delete_queue(QueueUrl=queue.url)


@pytest.mark.slow
def test_a_task_that_moves_messages_survives_its_worker(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Cluster(kafka, tmp_path_factory.mktemp("moves"), partitions=1, handlers="") as cluster:
        first = cluster.start()
        dead, target = Queue.make(first), Queue.make(first)
        arn = dead.arn
        policy = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 1})
        Queue.make(first, RedrivePolicy=policy)
        for i in range(0, 40, 10):
            dead.sqs.send_message_batch(
                QueueUrl=dead.url, Entries=[{"Id": f"{k}", "MessageBody": f"{k}"} for k in range(i, i + 10)]
            )
        dead.wait_for(visible=40)
        dead.sqs.start_message_move_task(SourceArn=dead.arn, DestinationArn=target.arn, MaxNumberOfMessagesPerSecond=10)
        time.sleep(1.5)
        first.kill()
        second = cluster.start()
        moved = target.at(second).drain(40, wait_s=20)
        # messages that the killed worker had taken but not copied were in flight when the task ended: they stay
        left = dead.at(second).drain(40 - len(moved), wait_s=20) if len(moved) < 40 else []
        assert sorted(int(m["Body"]) for m in [*moved, *left]) == list(range(40))
        assert len(left) <= 10, "a second's messages"
        (task,) = dead.at(second).sqs.list_message_move_tasks(SourceArn=arn)["Results"]
        assert task["Status"] in ("RUNNING", "COMPLETED")
