"""Messages over SQS, with boto3: sent, received, deleted, hidden, delayed, dead. Three workers on two partitions."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from hashlib import md5
from typing import Any
from uuid import UUID

import boto3
import pytest
from botocore.exceptions import ClientError
from confluent_kafka import Producer

from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client
from tests.integration.sqs_client import REGION, Queue, client_of, refused

NO_QUEUE = "AWS.SimpleQueueService.NonExistentQueue"
PREFIX = "AWS.SimpleQueueService."


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


@pytest.fixture
def queue(cluster: Cluster) -> Queue:
    return Queue.make(cluster.workers[0], VisibilityTimeout=30)


HOSTILE: dict[str, dict[str, bytes]] = {
    "origin": {"marq-dead-queue": b"evil", "marq-origin": b"9" * 26 + b":1", "marq-origin-seal": b"f" * 24},
    "offset": {"marq-dead-queue": b"evil", "marq-origin": b"1:" + b"9" * 32},
    "negative": {"marq-dead-queue": b"evil", "marq-origin": b"-5:7"},
    "forged": {"marq-dead-queue": b"payroll", "marq-origin": b"0:0"},
    "receives": {"marq-dead-queue": b"evil", "marq-dead-receives": b"9" * 4300},
    "sent": {"marq-dead-queue": b"evil", "marq-dead-sent-ms": b"9" * 4300},
    "types": {"AWS.types": b'{"a":"Number.\\u0000"}', "a": b"\xff\xfe"},
    "names": {"marq-group": b"\xff\xff", "AWS.SenderId": b"\xff<b>", "AWS.TraceHeader": b"\x00\xff"},
    "delays": {"marq-ttl-ms": b"9" * 19, "marq-delay-ms": b"-1"},
}


def test_headers_of_one_record_do_not_keep_its_neighbours_from_their_receiver(cluster: Cluster, queue: Queue) -> None:
    """Whoever may write to the topic can write any header: of marq's own, only what is sealed counts."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap})
    topic = cluster.environment.get("MARQ_QUEUE_TOPIC", f"{cluster.name}.queue")
    for name, headers in HOSTILE.items():
        for value, those in ((f"before {name}", {}), (name, headers), (f"after {name}", {})):
            producer.produce(topic, value, queue.name, partition=0, headers=[*those.items()])
    assert producer.flush(30) == 0
    found: dict[str, Any] = {}

    def receive() -> bool:
        found.update((m["Body"], m) for m in queue.receive(10, 1))
        return len(found) >= 3 * len(HOSTILE) - 1  # that of the wrong delay is poison

    until(receive, "all were received", 60)
    assert found.keys() >= {f"{side} {name}" for side in ("before", "after") for name in HOSTILE}
    assert len({m["MessageId"] for m in found.values()}) == len(found)
    for message in found.values():
        assert "DeadLetterQueueSourceArn" not in message["Attributes"]
        assert int(message["Attributes"]["ApproximateReceiveCount"]) < 100


def test_a_message_comes_back_as_it_was_sent(queue: Queue) -> None:
    body = "héllo \U0001f600 <&> \r\n\t end"
    attributes = {
        "text": {"DataType": "String", "StringValue": "wörter"},
        "number": {"DataType": "Number", "StringValue": "-1.5e3"},
        "bytes": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
        "text-as-bytes": {"DataType": "Binary", "BinaryValue": b"plain"},
        "custom": {"DataType": "String.json", "StringValue": "{}"},
        "traceparent": {"DataType": "String", "StringValue": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    }
    trace = "Root=1-5759e988-bd862e3fe1be46a994272793;Sampled=1"
    sent = queue.send(
        body,
        MessageAttributes=attributes,
        MessageSystemAttributes={"AWSTraceHeader": {"DataType": "String", "StringValue": trace}},
    )
    (message,) = queue.receive()
    assert message["Body"] == body
    assert message["MD5OfBody"] == sent["MD5OfMessageBody"] == md5(body.encode()).hexdigest()
    assert message["MessageAttributes"] == attributes
    assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    assert message["MessageId"] == sent["MessageId"]
    assert str(UUID(sent["MessageId"])) == sent["MessageId"]
    system = message["Attributes"]
    assert system["AWSTraceHeader"] == trace
    assert system["ApproximateReceiveCount"] == "1"
    assert system["SenderId"] == "000000000000"
    assert abs(int(system["SentTimestamp"]) / 1000 - time.time()) < 60
    assert int(system["ApproximateFirstReceiveTimestamp"]) >= int(system["SentTimestamp"]) - 1000


def test_the_checksum_of_attributes_is_that_of_aws(queue: Queue) -> None:
    # computed by hand as the developer guide says: lengths, names, types, transport types, values, sorted by name
    sent = queue.send(
        MessageAttributes={
            "b": {"DataType": "Binary", "BinaryValue": b"\x01\x02"},
            "a": {"DataType": "Number", "StringValue": "7"},
        }
    )
    parts = [b"\0\0\0\1a", b"\0\0\0\6Number", b"\1\0\0\0\0017", b"\0\0\0\1b", b"\0\0\0\6Binary", b"\2\0\0\0\2\1\2"]
    assert sent["MD5OfMessageAttributes"] == md5(b"".join(parts)).hexdigest()


def test_a_receiver_gets_the_attributes_that_it_asks_for(queue: Queue) -> None:
    text = {"DataType": "String", "StringValue": "x"}
    queue.send(MessageAttributes={"shop.id": text, "shop.name": text, "other": text})
    for names, expected in (
        ([], None),
        (["shop.*"], {"shop.id", "shop.name"}),
        (["other", "nothing"], {"other"}),
        ([".*"], {"shop.id", "shop.name", "other"}),
    ):
        (message,) = queue.receive(MessageAttributeNames=names, MessageSystemAttributeNames=["SentTimestamp"])
        assert message.get("MessageAttributes", {}).keys() == (expected or set())
        assert message["Attributes"].keys() == {"SentTimestamp"}
        queue.change(message, 0)


def test_the_receive_count_is_exact_at_whatever_worker(cluster: Cluster, queue: Queue) -> None:
    queue.send()
    for attempt in range(1, 8):
        at = queue.at(cluster.workers[attempt % 3])
        (message,) = at.receive()
        assert message["Attributes"]["ApproximateReceiveCount"] == str(attempt)
        queue.change(message, 0)


def test_a_visibility_timeout_that_ends_brings_the_message_back(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[1], VisibilityTimeout=1)
    queue.send()
    (first,) = queue.receive()
    began = time.monotonic()
    (again,) = queue.receive(wait_s=10)
    assert time.monotonic() - began > 0.5
    assert again["MessageId"] == first["MessageId"]
    assert again["ReceiptHandle"] != first["ReceiptHandle"]


def test_a_visibility_timeout_can_be_asked_for_and_made_longer(queue: Queue) -> None:
    queue.send()
    (message,) = queue.receive(VisibilityTimeout=1)
    queue.change(message, 30)
    assert queue.receive(wait_s=2) == []
    queue.delete(message)

    def error() -> dict[str, str]:
        try:
            queue.change(message, 30)
        except ClientError as exc:
            return exc.response["Error"]
        return {}  # another worker knows of the deletion a moment later

    found = until(error, "the message is known to be deleted")
    assert found["Code"] == "InvalidParameterValue" and "does not exist" in found["Message"]


def test_the_timeout_of_a_message_that_is_not_in_flight_can_not_be_changed(queue: Queue) -> None:
    queue.send()
    (message,) = queue.receive()
    queue.change(message, 0)
    with refused(PREFIX + "MessageNotInflight", "MessageNotInflight"):
        queue.change(message, 10)


def test_a_late_heartbeat_keeps_the_message(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[0], VisibilityTimeout=30)
    queue.send()
    (message,) = queue.receive(VisibilityTimeout=1)
    queue.wait_for(visible=1)
    queue.at(cluster.workers[1]).change(message, 30)
    assert queue.receive(wait_s=1) == []
    queue.change(message, 1)
    queue.wait_for(visible=1)
    answer = queue.ask("ChangeMessageVisibility", ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=30)
    assert answer.status == 200
    assert queue.receive(wait_s=1) == []
    queue.delete(message)
    queue.wait_for(visible=0, in_flight=0)


def test_the_receipt_of_an_older_delivery_acts_on_the_message_in_flight(cluster: Cluster, queue: Queue) -> None:
    queue.send()
    (first,) = queue.receive(VisibilityTimeout=1)
    (second,) = queue.receive(wait_s=5, VisibilityTimeout=3)
    assert second["MessageId"] == first["MessageId"]
    queue.at(cluster.workers[1]).change(first, 60)
    time.sleep(3.2)
    assert queue.receive(wait_s=0) == []
    entry = "ChangeMessageVisibilityBatchRequestEntry.1."
    values = {entry + "Id": "a", entry + "ReceiptHandle": first["ReceiptHandle"], entry + "VisibilityTimeout": 0}
    assert (
        "<Id>a</Id></ChangeMessageVisibilityBatchResultEntry>" in queue.ask("ChangeMessageVisibilityBatch", values).text
    )
    (third,) = queue.receive(wait_s=5)
    assert third["Attributes"]["ApproximateReceiveCount"] == "3"
    queue.change(first, 0)
    with refused(PREFIX + "MessageNotInflight", "MessageNotInflight"):  # given back
        queue.change(first, 10)
    assert queue.ask("ChangeMessageVisibility", ReceiptHandle=first["ReceiptHandle"], VisibilityTimeout=10).error == (
        400,
        PREFIX + "MessageNotInflight",
        "The specified message isn't in flight.",
    )


def test_deleted_means_gone_and_may_be_said_twice(cluster: Cluster, queue: Queue) -> None:
    queue.send()
    (message,) = queue.receive(VisibilityTimeout=1)
    for worker in cluster.workers:
        queue.at(worker).delete(message)
    assert queue.receive(wait_s=2) == []


def test_batches_are_answered_entry_by_entry(queue: Queue) -> None:
    entries = [{"Id": f"n{i}", "MessageBody": f"{i}"} for i in range(9)]
    answer = queue.sqs.send_message_batch(
        QueueUrl=queue.url, Entries=[*entries, {"Id": "bad", "MessageBody": "x", "DelaySeconds": 901}]
    )
    assert {one["Id"] for one in answer["Successful"]} == {f"n{i}" for i in range(9)}
    (failed,) = answer["Failed"]
    assert (failed["Id"], failed["Code"], failed["SenderFault"]) == ("bad", "InvalidParameterValue", True)
    messages: list[Any] = []
    while len(messages) < 9 and (some := queue.receive(10)):
        messages += some
    assert {m["MessageId"] for m in messages} == {one["MessageId"] for one in answer["Successful"]}
    changes = [
        {"Id": f"{i}", "ReceiptHandle": m["ReceiptHandle"], "VisibilityTimeout": 20 + i} for i, m in enumerate(messages)
    ]
    changes.append({"Id": "bad", "ReceiptHandle": "nonsense", "VisibilityTimeout": 1})
    answer = queue.sqs.change_message_visibility_batch(QueueUrl=queue.url, Entries=changes)
    assert len(answer["Successful"]) == 9
    assert [f["Code"] for f in answer["Failed"]] == ["ReceiptHandleIsInvalid"]
    deletes = [{"Id": f"{i}", "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(messages)]
    answer = queue.sqs.delete_message_batch(
        QueueUrl=queue.url, Entries=[*deletes, {"Id": "bad", "ReceiptHandle": "nonsense"}]
    )
    assert len(answer["Successful"]) == 9
    assert [(f["Id"], f["Code"]) for f in answer["Failed"]] == [("bad", "ReceiptHandleIsInvalid")]
    queue.wait_for(visible=0, in_flight=0)


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ([], "EmptyBatchRequest"),
        ([{"Id": f"{i}", "MessageBody": "x"} for i in range(11)], "TooManyEntriesInBatchRequest"),
        ([{"Id": "a", "MessageBody": "x"}, {"Id": "a", "MessageBody": "y"}], "BatchEntryIdsNotDistinct"),
        ([{"Id": "a b", "MessageBody": "x"}], "InvalidBatchEntryId"),
        ([{"Id": f"{i}", "MessageBody": "x" * 600_000} for i in range(2)], "BatchRequestTooLong"),
    ],
)
def test_batches_that_can_not_be_are_refused_as_a_whole(queue: Queue, entries: list[Any], code: str) -> None:
    with refused(PREFIX + code, code):
        queue.sqs.send_message_batch(QueueUrl=queue.url, Entries=entries)
    assert queue.receive(wait_s=0) == []


def test_what_a_message_may_not_be_gets_the_error_of_aws(cluster: Cluster, queue: Queue) -> None:
    with refused("InvalidMessageContents", "InvalidMessageContents"):
        queue.send("\x00")
    with refused("MissingParameter", text="MessageBody"):
        queue.send("")
    with refused("InvalidParameterValue", text="shorter than 1048576 bytes"):
        queue.send("x" * (1024 * 1024 + 1))
    with refused("InvalidParameterValue", text="DelaySeconds"):
        queue.send(DelaySeconds=901)
    with refused("InvalidParameterValue", text="MessageDeduplicationId"):
        queue.send(MessageDeduplicationId="x")
    for name, value in (
        ("AWS.x", {"DataType": "String", "StringValue": "x"}),
        ("a..b", {"DataType": "String", "StringValue": "x"}),
        ("a b", {"DataType": "String", "StringValue": "x"}),
        ("marq-x", {"DataType": "String", "StringValue": "x"}),
        ("x", {"DataType": "Text", "StringValue": "x"}),
        ("x", {"DataType": "String", "StringValue": ""}),
        ("x", {"DataType": "String", "BinaryValue": b"x"}),
        ("x", {"DataType": "Number", "StringValue": "one"}),
        ("x", {"DataType": "Binary", "BinaryValue": b""}),
    ):
        with refused("InvalidParameterValue"):
            queue.send(MessageAttributes={name: value})
    with refused("InvalidParameterValue", text="exceeds the allowed maximum"):
        queue.send(MessageAttributes={f"a{i}": {"DataType": "String", "StringValue": "x"} for i in range(11)})
    small = Queue.make(cluster.workers[0], MaximumMessageSize=1024)
    small.send("x" * 1024)
    with refused("InvalidParameterValue", text="shorter than 1024 bytes"):
        small.send("x" * 1000, MessageAttributes={"a" * 20: {"DataType": "String", "StringValue": "x" * 10}})


def test_what_a_receive_may_not_ask_for_gets_the_error_of_aws(queue: Queue) -> None:
    for values in ({"limit": 0}, {"limit": 11}, {"wait_s": 21}, {"wait_s": -1}, {"VisibilityTimeout": 43_201}):
        with refused("InvalidParameterValue"):
            queue.receive(**values)  # type: ignore[arg-type]
    with refused("InvalidAttributeName", "InvalidAttributeName"):
        queue.receive(MessageSystemAttributeNames=["Nothing"])
    with refused(NO_QUEUE, "QueueDoesNotExist"):
        queue.sqs.receive_message(QueueUrl=queue.url + "x")


def test_a_receipt_of_another_queue_or_of_nobody_is_invalid(cluster: Cluster, queue: Queue) -> None:
    other = Queue.make(cluster.workers[0])
    other.send()
    (message,) = other.receive()
    for receipt in (message["ReceiptHandle"], "nonsense", "é" * 30, "A" * 52):
        with refused("ReceiptHandleIsInvalid", "ReceiptHandleIsInvalid"):
            queue.delete({"ReceiptHandle": receipt})
        with refused("ReceiptHandleIsInvalid", "ReceiptHandleIsInvalid"):
            queue.change({"ReceiptHandle": receipt}, 5)
    other.delete(message)


def test_a_long_poll_ends_when_a_message_comes(cluster: Cluster, queue: Queue) -> None:
    import threading

    queue.wait_for(visible=0)
    sender = queue.at(cluster.workers[1])
    timer = threading.Timer(1.0, sender.send)
    timer.start()
    began = time.monotonic()
    assert len(queue.receive(wait_s=20)) == 1
    assert 0.5 < time.monotonic() - began < 15
    timer.join()


def test_a_queue_can_wait_by_itself(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[0], ReceiveMessageWaitTimeSeconds=1)
    began = time.monotonic()
    assert "Messages" not in queue.sqs.receive_message(QueueUrl=queue.url)
    assert time.monotonic() - began > 0.9


def test_delays_are_the_message_s_or_else_the_queue_s(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[2], DelaySeconds=2)
    began = time.monotonic()
    queue.send("late")
    queue.send("now", DelaySeconds=0)
    assert [m["Body"] for m in queue.drain(1)] == ["now"]
    queue.wait_for(delayed=1)
    assert [m["Body"] for m in queue.drain(1, wait_s=10)] == ["late"]
    assert time.monotonic() - began > 1.5


def test_messages_older_than_the_retention_period_are_gone(cluster: Cluster) -> None:
    # AWS has no retention below a minute; the JSON API sets the same setting in milliseconds
    queue = Queue.make(cluster.workers[0])
    answer = Client(cluster.workers[0].url).request("PATCH", f"/v1/queues/{queue.name}", {"ttl_ms": 1000})
    assert answer.status == 200
    queue.send()
    ticking = Queue.make(cluster.workers[0])  # log time advances only in partitions where something waits
    for _ in range(2):
        ticking.send(DelaySeconds=60)
    time.sleep(3)
    assert queue.receive(wait_s=1) == []


def test_counts_tell_visible_in_flight_and_delayed(queue: Queue) -> None:
    for _ in range(5):
        queue.send()
    queue.send(DelaySeconds=60)
    messages = queue.receive(2)
    queue.wait_for(visible=5 - len(messages), in_flight=len(messages), delayed=1)
    queue.delete(*messages)
    queue.wait_for(visible=5 - len(messages), in_flight=0, delayed=1)


def test_dead_letters_keep_body_attributes_and_id(cluster: Cluster) -> None:
    dead = Queue.make(cluster.workers[0])
    queue = Queue.make(
        cluster.workers[1],
        VisibilityTimeout=30,
        RedrivePolicy=f'{{"deadLetterTargetArn":"{dead.arn}","maxReceiveCount":"2"}}',
    )
    sent = queue.send("poison", MessageAttributes={"a": {"DataType": "Number", "StringValue": "1"}})
    for attempt in ("1", "2"):
        (message,) = queue.receive()
        assert message["Attributes"]["ApproximateReceiveCount"] == attempt
        queue.change(message, 0)
    (dead_letter,) = dead.receive(wait_s=15)
    assert dead_letter["Body"] == "poison"
    assert dead_letter["MessageId"] == sent["MessageId"]
    assert dead_letter["MessageAttributes"] == {"a": {"DataType": "Number", "StringValue": "1"}}
    assert dead_letter["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    system = dead_letter["Attributes"]
    assert system["DeadLetterQueueSourceArn"] == queue.arn
    assert system["ApproximateReceiveCount"] == "3"
    assert system["SentTimestamp"] == message["Attributes"]["SentTimestamp"]
    assert queue.receive(wait_s=1) == []


def test_all_protocols_see_the_same_message(cluster: Cluster, queue: Queue) -> None:
    json_api = Client(cluster.workers[1].url)
    queue.send(
        "from sqs",
        MessageAttributes={
            "text": {"DataType": "String", "StringValue": "x"},
            "number": {"DataType": "Number", "StringValue": "1"},
        },
    )
    (seen,) = json_api.receive(queue.name, wait_ms=5000)
    assert seen["payload"] == b"from sqs"
    assert b64decode(seen["headers"]["text"]) == b"x"
    assert b64decode(seen["headers"]["number"]) == b"1"
    json_api.ack(seen)
    json_api.send(queue.name, b"from json", headers={"h": b64encode(b"v").decode(), "b": b64encode(b"\xff").decode()})
    (message,) = queue.receive()
    assert message["Body"] == "from json"
    assert message["MessageAttributes"] == {
        "h": {"DataType": "String", "StringValue": "v"},
        "b": {"DataType": "Binary", "BinaryValue": b"\xff"},
    }
    queue.delete(message)
    json_api.send(queue.name, b"\xff\x00")
    (message,) = queue.receive()
    assert b64decode(message["Body"]) == b"\xff\x00"
    assert message["MessageAttributes"]["marq-payload-encoding"]["StringValue"] == "base64"
    assert message["MD5OfBody"] == md5(message["Body"].encode()).hexdigest()


def test_the_resource_of_boto3_works(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    sqs = boto3.resource(
        "sqs",
        endpoint_url=worker.url,
        region_name=REGION,
        aws_access_key_id="x",
        aws_secret_access_key="x",
    )
    name = Queue.make(worker).name
    queue = sqs.get_queue_by_name(QueueName=name)
    assert queue.attributes["QueueArn"] == f"arn:aws:sqs:{REGION}:000000000000:{name}"
    queue.send_messages(Entries=[{"Id": "1", "MessageBody": "a"}, {"Id": "2", "MessageBody": "b"}])
    bodies = set()
    while len(bodies) < 2:
        for message in queue.receive_messages(MaxNumberOfMessages=10, WaitTimeSeconds=5):
            bodies.add(message.body)
            message.change_visibility(VisibilityTimeout=20)
            message.delete()
    assert bodies == {"a", "b"}
    with pytest.raises(sqs.meta.client.exceptions.QueueDoesNotExist):
        sqs.get_queue_by_name(QueueName="nothing-of-this-name")


def test_a_message_that_a_lost_client_did_not_get_is_there_for_the_next(cluster: Cluster, queue: Queue) -> None:
    import socket
    from urllib.parse import urlsplit

    parts = urlsplit(cluster.workers[0].url)
    body = f'{{"QueueUrl":"{queue.url}","WaitTimeSeconds":20}}'
    with socket.create_connection((parts.hostname, parts.port)) as lost:  # type: ignore[arg-type]
        lost.sendall(
            f"POST / HTTP/1.1\r\nHost: {parts.netloc}\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
            f"Content-Type: application/x-amz-json-1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        time.sleep(0.5)
    queue.send()
    (message,) = queue.receive(wait_s=5)
    assert message["Attributes"]["ApproximateReceiveCount"] == "1"


def test_two_clients_of_all_workers_get_every_message_once(cluster: Cluster) -> None:
    queues = [Queue.make(cluster.workers[0], VisibilityTimeout=60)]
    queues += [queues[0].at(worker) for worker in cluster.workers[1:]]
    bodies = [f"{i}" for i in range(90)]
    for i in range(0, 90, 10):
        entries = [{"Id": body, "MessageBody": body} for body in bodies[i : i + 10]]
        queues[i // 10 % 3].sqs.send_message_batch(QueueUrl=queues[0].url, Entries=entries)
    got: list[str] = []
    for _ in range(60):
        for queue in queues:
            got += [m["Body"] for m in queue.drain(10, wait_s=0)]
        if len(got) >= 90:
            break
    assert sorted(got) == sorted(bodies)
    assert client_of(cluster.workers[0].url).meta.endpoint_url == cluster.workers[0].url
