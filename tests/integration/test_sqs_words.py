"""SQS word for word, with boto3 and in the query protocol: errors and their statuses, sizes, names, empty answers."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.integration.cluster import Cluster
from tests.integration.sqs_client import Queue, ask, client_of, refused, sts_client_of
from tests.kafka import unique

PREFIX = "AWS.SimpleQueueService."
NO_QUEUE = PREFIX + "NonExistentQueue"
INVALID = "InvalidParameterValue"


@pytest.fixture(scope="module")
def url(shared_cluster: Cluster) -> str:
    """The address of a worker."""
    return shared_cluster.workers[0].url


@pytest.fixture
def queue(url: str) -> Queue:
    return Queue.make(url)


def text_of(value: str, kind: str = "String") -> dict[str, str]:
    return {"DataType": kind, "StringValue": value}


def attributes_of(**given: str) -> dict[str, str]:
    """Parameters of the query protocol."""
    return {
        f"Attribute.{i}.{part}": value
        for i, pair in enumerate(given.items(), 1)
        for part, value in zip(("Name", "Value"), pair, strict=True)
    }


def attribute_of(name: str, value: str, kind: str = "String") -> dict[str, str]:
    """The same of one message attribute."""
    first = "MessageAttribute.1."
    return {first + "Name": name, first + "Value.DataType": kind, first + "Value.StringValue": value}


# -- sizes


def test_a_message_is_as_large_as_body_names_types_and_values(url: str) -> None:
    queue = Queue.make(url, MaximumMessageSize=1024)
    attributes = {"name": text_of("12345", "String.custom")}  # 4 + 13 + 5
    trace = {"AWSTraceHeader": text_of("Root=1-5759e988-bd862e3fe1be46a994272793")}
    queue.send("x" * 1002, MessageAttributes=attributes, MessageSystemAttributes=trace)
    words = "One or more parameters are invalid. Reason: Message must be shorter than 1024 bytes."
    with refused(INVALID, text=words):
        queue.send("x" * 1003, MessageAttributes=attributes)
    values = attribute_of("name", "12345", "String.custom")
    assert queue.ask("SendMessage", values, MessageBody="x" * 1003).error == (400, INVALID, words)
    assert queue.ask("SendMessage", values, MessageBody="x" * 1002).status == 200


def test_an_entry_that_is_too_large_fails_by_itself(url: str) -> None:
    queue = Queue.make(url, MaximumMessageSize=1024)
    words = "One or more parameters cannot be validated. Reason: Message must be shorter than 1024 bytes."
    entries = [{"Id": "small", "MessageBody": "x"}, {"Id": "large", "MessageBody": "x" * 1025}]
    answer = queue.sqs.send_message_batch(QueueUrl=queue.url, Entries=entries)
    assert [one["Id"] for one in answer["Successful"]] == ["small"]
    assert answer["Failed"] == [{"Id": "large", "SenderFault": True, "Code": INVALID, "Message": words}]
    entry = "SendMessageBatchRequestEntry.1."
    told = queue.ask("SendMessageBatch", {entry + "Id": "large", entry + "MessageBody": "x" * 1025})
    assert (told.status, told.told("Code"), told.told("Message")) == (200, INVALID, words)


# -- statuses


def test_errors_have_the_status_of_aws_in_both_protocols(url: str, queue: Queue) -> None:
    queue.sqs.purge_queue(QueueUrl=queue.url)
    with refused(PREFIX + "PurgeQueueInProgress", "PurgeQueueInProgress", status=403):
        queue.sqs.purge_queue(QueueUrl=queue.url)
    assert queue.ask("PurgeQueue").error[:2] == (403, PREFIX + "PurgeQueueInProgress")
    with refused("ReceiptHandleIsInvalid", "ReceiptHandleIsInvalid", status=404):
        queue.delete({"ReceiptHandle": "nonsense"})
    assert queue.ask("DeleteMessage", ReceiptHandle="nonsense").error[:2] == (404, "ReceiptHandleIsInvalid")
    with refused("OverLimit", "OverLimit", status=403):
        queue.sqs.add_permission(QueueUrl=queue.url, Label="x", AWSAccountIds=["1" * 12], Actions=["*"] * 8)
    values = {"AWSAccountId.1": "1" * 12, **{f"ActionName.{i}": "*" for i in range(1, 9)}}
    assert queue.ask("AddPermission", values, Label="x").error[:2] == (403, "OverLimit")
    with refused("ResourceNotFoundException", "ResourceNotFoundException", status=404):
        queue.sqs.list_message_move_tasks(SourceArn=queue.arn + "x")
    answer = ask(url, "ListMessageMoveTasks", SourceArn=queue.arn + "x")
    assert answer.error[:2] == (404, "ResourceNotFoundException")
    with refused("InvalidAddress", "InvalidAddress", status=404):
        queue.sqs.send_message(QueueUrl="http://localhost/0/%ff", MessageBody="x")
    assert ask(url, "SendMessage", QueueUrl="http://localhost/0/%ff", MessageBody="x").error[:2] == (
        404,
        "InvalidAddress",
    )


def test_an_unknown_queue_is_unknown_in_the_words_of_the_protocol(url: str, queue: Queue) -> None:
    with refused(NO_QUEUE, "QueueDoesNotExist", "The specified queue does not exist.", status=400):
        queue.sqs.send_message(QueueUrl=queue.url + "x", MessageBody="x")
    words = "The specified queue does not exist for this wsdl version."
    assert ask(queue.url + "x", "SendMessage", MessageBody="x").error == (400, NO_QUEUE, words)
    for without_path in (url, url + "/"):
        with refused(NO_QUEUE, "QueueDoesNotExist", status=400):
            queue.sqs.send_message(QueueUrl=without_path, MessageBody="x")
        assert ask(url, "SendMessage", QueueUrl=without_path, MessageBody="x").error == (400, NO_QUEUE, words)


# -- the query protocol


def test_a_look_at_the_url_of_a_queue_finds_no_operation(queue: Queue) -> None:
    assert ask(queue.url, method="GET") == (404, "<UnknownOperationException/>")
    answer = ask(queue.url, "GetQueueAttributes", {"AttributeName.1": "QueueArn"}, method="GET")
    assert (answer.status, answer.told("Value").rpartition(":")[2]) == (200, queue.name)


@pytest.mark.parametrize("action", ["CreateQueue", "ListQueues"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_no_action_of_a_queue_can_not_be_asked_of_its_url(queue: Queue, action: str, method: str) -> None:
    answer = ask(queue.url, action, method=method, QueueName="x")
    assert answer.error == (400, "InvalidAction", f"The action {action} is not valid for this endpoint.")


def test_results_that_are_empty_are_empty_elements(url: str, queue: Queue) -> None:
    assert "<ReceiveMessageResult/>" in queue.ask("ReceiveMessage").text
    assert "<ListQueuesResult/>" in ask(url, "ListQueues", QueueNamePrefix=unique("none")).text
    assert "<ListQueueTagsResult/>" in queue.ask("ListQueueTags").text
    assert "<GetQueueAttributesResult/>" in queue.ask("GetQueueAttributes", {"AttributeName.1": "Policy"}).text
    assert "Attributes" not in queue.sqs.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["Policy"])


def test_whoever_accepts_json_gets_json(queue: Queue) -> None:
    def told(action: str, **values: Any) -> Any:
        answer = ask(queue.url, action, values, accept="application/json")
        assert answer.status == 200, answer
        response = answer.json[f"{action}Response"]
        assert len(response["ResponseMetadata"]["RequestId"]) == 36
        return response[f"{action}Result"]

    sent = told("SendMessage", MessageBody="body", **attribute_of("n", "7", "Number"))
    (message,) = told("ReceiveMessage", WaitTimeSeconds=5, **{"MessageAttributeName.1": "*"})["messages"]
    assert (message["Body"], message["MessageId"]) == ("body", sent["MessageId"])
    ((name, value),) = [(one["Name"], one["Value"]["StringValue"]) for one in message["MessageAttributes"]]
    assert (name, value) == ("n", "7")
    assert told("ReceiveMessage") == {"messages": None}
    attributes = told("GetQueueAttributes", **{"AttributeName.1": "VisibilityTimeout"})["Attributes"]
    assert attributes == [{"Name": "VisibilityTimeout", "Value": "30"}]
    answer = ask(queue.url, "CreateQueue", accept="application/json")
    assert (answer.status, answer.json["Error"]["Code"]) == (400, "InvalidAction")


@pytest.mark.parametrize("body", ['{"foo": "ba\rr", "foo2": "ba&quot;r&quot;"}', '"{\\"foo\\": \\"ba\\rr\\"}"'])
def test_carriage_returns_and_quotes_of_a_body_are_kept_in_all_answers(queue: Queue, body: str) -> None:
    queue.send(body)
    (message,) = queue.receive(VisibilityTimeout=0)
    assert message["Body"] == body
    answer = queue.ask("ReceiveMessage", WaitTimeSeconds=5, VisibilityTimeout=0)
    assert ElementTree.fromstring(answer.text).findtext(".//{*}Message/{*}Body") == body
    told = queue.ask("ReceiveMessage", accept="application/json", WaitTimeSeconds=5)
    (message,) = told.json["ReceiveMessageResponse"]["ReceiveMessageResult"]["messages"]
    assert message["Body"] == body


# -- attributes of queues


def test_booleans_may_be_those_of_python(url: str) -> None:
    queue = Queue.make(url, FifoQueue=True, ContentBasedDeduplication=True)
    assert queue.attributes("FifoQueue", "ContentBasedDeduplication") == {
        "FifoQueue": "true",
        "ContentBasedDeduplication": "true",
    }
    queue.set(ContentBasedDeduplication=False)
    assert queue.attribute("ContentBasedDeduplication") == "false"
    assert queue.ask("SetQueueAttributes", attributes_of(ContentBasedDeduplication="True")).status == 200
    assert queue.attribute("ContentBasedDeduplication") == "true"
    name = unique("q") + ".fifo"
    assert ask(url, "CreateQueue", attributes_of(FifoQueue="True"), QueueName=name).told("QueueUrl").endswith(name)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"FifoQueue": "true"}, "Unknown Attribute FifoQueue."),
        ({"FifoQueue": "false"}, "Unknown Attribute FifoQueue."),
        ({"DeduplicationScope": "queue"}, "You can specify the DeduplicationScope only when FifoQueue is set to true."),
        ({"ContentBasedDeduplication": "true"}, "Unknown Attribute ContentBasedDeduplication."),
    ],
)
def test_a_standard_queue_takes_no_attributes_of_fifo_queues(queue: Queue, given: dict[str, str], words: str) -> None:
    with refused("InvalidAttributeName", "InvalidAttributeName", words):
        queue.set(**given)
    answer = queue.ask("SetQueueAttributes", attributes_of(**given))
    assert answer.error == (400, "InvalidAttributeName", words)


def test_the_attribute_that_differs_from_the_queue_that_is_there_is_named(url: str) -> None:
    queue = Queue.make(url, VisibilityTimeout=30, DelaySeconds=5)
    given = {"VisibilityTimeout": "30", "DelaySeconds": "6"}
    words = "A queue already exists with the same name and a different value for attribute DelaySeconds"
    with refused("QueueAlreadyExists", "QueueNameExists", words):
        queue.sqs.create_queue(QueueName=queue.name, Attributes=given)
    answer = ask(url, "CreateQueue", attributes_of(**given), QueueName=queue.name)
    assert answer.error == (400, "QueueAlreadyExists", words)
    given["DelaySeconds"] = "5"
    assert queue.sqs.create_queue(QueueName=queue.name, Attributes=given)["QueueUrl"] == queue.url


def test_without_a_key_nothing_is_encrypted(url: str) -> None:
    names = ("KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds", "SqsManagedSseEnabled")
    given = {"KmsMasterKeyId": "alias/aws/sqs", "KmsDataKeyReusePeriodSeconds": "600"}
    queues = [Queue.make(url, **given) for _ in range(2)]
    assert queues[0].attributes(*names) == {**given, "SqsManagedSseEnabled": "false"}
    queues[0].set(KmsMasterKeyId="")
    assert queues[1].ask("SetQueueAttributes", attributes_of(KmsMasterKeyId="")).status == 200
    for queue in queues:
        queue.set(KmsDataKeyReusePeriodSeconds="300")
        assert queue.attributes(*names) == {"SqsManagedSseEnabled": "false"}


def test_a_queue_may_be_its_own_dead_letter_queue(queue: Queue) -> None:
    policy = json.dumps({"deadLetterTargetArn": queue.arn, "maxReceiveCount": 1})
    queue.set(RedrivePolicy=policy, VisibilityTimeout=0)
    assert json.loads(queue.attribute("RedrivePolicy")) == json.loads(policy)
    assert queue.ask("SetQueueAttributes", attributes_of(RedrivePolicy=policy)).status == 200
    sources = queue.sqs.list_dead_letter_source_queues(QueueUrl=queue.url)["queueUrls"]
    assert sources == [queue.url]
    queue.send("again and again")
    counts: list[int] = []
    while len(counts) < 3:
        (message,) = queue.receive(wait_s=10)
        assert message["Body"] == "again and again"
        counts.append(int(message["Attributes"]["ApproximateReceiveCount"]))
    assert counts == [1, 2, 2]  # for a dead letter of a dead letter, the receives in its last two queues count
    queue.sqs.delete_queue(QueueUrl=queue.url)


# -- messages


@pytest.fixture(scope="module")
def fifo(url: str) -> Iterator[Queue]:
    yield Queue.make(url, FifoQueue="true", ContentBasedDeduplication="true")


def test_a_parameter_of_another_type_of_queue_is_refused_in_the_words_of_aws(queue: Queue, fifo: Queue) -> None:
    reason = "is invalid. Reason: The request include parameter that is not valid for this queue type."
    words = f"Value id for parameter MessageDeduplicationId {reason}"
    with refused(INVALID, text=words):
        queue.send(MessageDeduplicationId="id")
    answer = queue.ask("SendMessage", MessageBody="x", MessageDeduplicationId="id")
    assert answer.error == (400, INVALID, words)
    words = f"Value 5 for parameter DelaySeconds {reason}"
    with refused(INVALID, text=words):
        fifo.send(MessageGroupId="g", DelaySeconds=5)
    answer = fifo.ask("SendMessage", MessageBody="x", MessageGroupId="g", DelaySeconds=5)
    assert answer.error == (400, INVALID, words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "Message (user) attribute 'X' must contain a non-empty value of type 'String'."),
        ("a\x01", "Invalid characters found."),
    ],
)
def test_values_that_an_attribute_can_not_have(queue: Queue, value: str, words: str) -> None:
    with refused(INVALID, text=words):
        queue.send(MessageAttributes={"X": text_of(value)})
    status, code, told = queue.ask("SendMessage", attribute_of("X", value), MessageBody="x").error
    assert (status, code) == (400, INVALID) and told.startswith(words)


def test_letters_with_accents_are_letters_in_names_of_attributes(queue: Queue) -> None:
    attributes = {"smørrebrød": text_of("Ægir")}
    sent = queue.send(MessageAttributes=attributes)
    ((name, kind, value),) = [("smørrebrød".encode(), b"String", "Ægir".encode())]
    data = b"".join((struct.pack(">I", len(name)), name, struct.pack(">I", len(kind)), kind, b"\x01"))
    expected = hashlib.md5(data + struct.pack(">I", len(value)) + value).hexdigest()
    assert sent["MD5OfMessageAttributes"] == expected
    (message,) = queue.receive()
    assert message["MessageAttributes"] == attributes
    answer = queue.ask("SendMessage", attribute_of("smørrebrød", "Ægir"), MessageBody="x")
    assert answer.told("MD5OfMessageAttributes") == expected


@pytest.mark.parametrize("names", [["All"], ["*"], [".*"]])
def test_a_star_asks_for_all_attributes(queue: Queue, names: list[str]) -> None:
    queue.send(MessageAttributes={"a": text_of("1"), "b.c": text_of("2")})
    (message,) = queue.receive(MessageAttributeNames=names, VisibilityTimeout=0)
    assert message["MessageAttributes"].keys() == {"a", "b.c"}
    answer = queue.ask("ReceiveMessage", {"MessageAttributeName.1": names[0]}, WaitTimeSeconds=5)
    assert answer.text.count("<MessageAttribute>") == 2


def test_a_header_of_the_request_gives_its_messages_their_trace(queue: Queue) -> None:
    trace, own = "Root=1-5759e988-bd862e3fe1be46a994272793", "Root=1-67891233-abcdef012345678912345678"
    queue.sqs.meta.events.register(
        "before-call.sqs.SendMessage", lambda params, **_: params["headers"].update({"X-Amzn-Trace-Id": trace})
    )
    sent = queue.send("header")
    assert "MD5OfMessageSystemAttributes" not in sent
    queue.send("own", MessageSystemAttributes={"AWSTraceHeader": text_of(own)})
    ask(queue.url, "SendMessage", headers={"X-Amzn-Trace-Id": trace}, MessageBody="query")
    ask(queue.url, "SendMessage", MessageBody="none")
    got = {m["Body"]: m["Attributes"].get("AWSTraceHeader") for m in queue.drain(4)}
    assert got == {"header": trace, "own": own, "query": trace, "none": None}


def test_ids_and_sequence_numbers_look_random_and_numbers_grow(shared_cluster: Cluster, fifo: Queue) -> None:
    group = unique("g")
    sent = [fifo.at(shared_cluster.workers[i % 3]).send(f"{group}{i}", MessageGroupId=group) for i in range(6)]
    numbers = [one["SequenceNumber"] for one in sent]
    assert all(len(n) == 20 and "0000000" not in n for n in numbers)
    assert all(int(a) < int(b) for a, b in pairwise(numbers))
    ids = [one["MessageId"] for one in sent]
    assert all(one[14] == "4" and one[19] in "89ab" and "0000000" not in one for one in ids)
    assert len({one[:8] for one in ids}) == 6
    got = {m["MessageId"]: m["Attributes"]["SequenceNumber"] for m in fifo.drain(6)}
    assert got == dict(zip(ids, numbers, strict=True))
    told = fifo.ask("SendMessage", MessageBody="x" + group, MessageGroupId=group)
    assert int(told.told("SequenceNumber")) > int(numbers[-1])
    fifo.drain(1)


# -- where we are not AWS


def test_a_queue_is_the_same_in_all_regions(url: str, queue: Queue) -> None:
    here, there = (client_of(url, region=region) for region in ("eu-central-1", "us-west-2"))
    there.send_message(QueueUrl=there.get_queue_url(QueueName=queue.name)["QueueUrl"], MessageBody="from afar")
    assert [m["Body"] for m in queue.drain(1)] == ["from afar"]

    def arn(sqs: Any) -> str:
        return str(sqs.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"])

    assert [arn(sqs).split(":")[3] for sqs in (here, there)] == ["eu-central-1", "us-west-2"]
    answer = queue.ask("GetQueueAttributes", {"AttributeName.1": "QueueArn"})
    assert answer.told("Value").split(":")[3] == "us-east-1"
    dead = Queue.make(url)
    policy = json.dumps({"deadLetterTargetArn": dead.arn.replace("eu-central-1", "us-west-2"), "maxReceiveCount": 5})
    queue.set(RedrivePolicy=policy)
    assert json.loads(queue.attribute("RedrivePolicy"))["deadLetterTargetArn"] == dead.arn


def test_a_policy_is_kept_and_not_enforced(queue: Queue) -> None:
    statement = {"Sid": "no", "Effect": "Deny", "Principal": "*", "Action": "sqs:*", "Resource": queue.arn}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    queue.set(Policy=policy)
    assert queue.attribute("Policy") == policy
    queue.send()
    assert queue.ask("SendMessage", MessageBody="x").status == 200
    assert len(queue.drain(2)) == 2


def test_a_visibility_timeout_has_no_total(queue: Queue) -> None:
    queue.send()
    (message,) = queue.receive()
    time.sleep(1.1)  # AWS: the total is beyond the limit
    queue.change(message, 43_200)
    answer = queue.ask("ChangeMessageVisibility", ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=43_200)
    assert answer.status == 200


# -- the calls of the Terraform AWS provider for `aws_sqs_queue` and `aws_sqs_queue_policy`


def test_the_calls_of_terraform_find_what_it_expects(url: str) -> None:
    sqs, name = client_of(url), unique("tf")
    assert len(sts_client_of(url).get_caller_identity()["Account"]) == 12
    attributes = {
        "DelaySeconds": "0",
        "KmsDataKeyReusePeriodSeconds": "300",
        "MaximumMessageSize": "262144",
        "MessageRetentionPeriod": "345600",
        "ReceiveMessageWaitTimeSeconds": "0",
        "SqsManagedSseEnabled": "true",
        "VisibilityTimeout": "30",
    }
    tags = {"Name": "terraform", "stage": "test"}
    queue = sqs.create_queue(QueueName=name, Attributes=attributes, tags=tags)["QueueUrl"]
    assert len(queue.removeprefix("http://").split("/")) == 3  # it reads the name from the URL
    account, told_name = queue.split("/")[-2:]
    assert (len(account), told_name) == (12, name)

    def attributes_now() -> dict[str, str]:
        found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]
        return dict(found)

    def expect(expected: dict[str, str]) -> None:
        """Wait, as the provider does, until the answer has the values that were set; missing ones count as empty."""
        found = attributes_now()
        for key, value in expected.items():
            if key.endswith("Policy") and value:
                assert json.loads(found[key]) == json.loads(value)
            else:
                assert found.get(key, "300" if key == "KmsDataKeyReusePeriodSeconds" else "") == value, key

    expect(attributes)
    assert sqs.list_queue_tags(QueueUrl=queue)["Tags"] == tags
    # made again with the same values, as after a lost answer
    assert sqs.create_queue(QueueName=name, Attributes=attributes, tags=tags)["QueueUrl"] == queue

    # aws_sqs_queue_policy: set, read, and taken away with an empty one
    arn = attributes_now()["QueueArn"]
    statement = {"Sid": "s", "Effect": "Allow", "Principal": "*", "Action": "sqs:SendMessage", "Resource": arn}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    sqs.set_queue_attributes(QueueUrl=queue, Attributes={"Policy": policy})
    expect(attributes | {"Policy": policy})
    sqs.set_queue_attributes(QueueUrl=queue, Attributes={"Policy": ""})
    expect(attributes | {"Policy": ""})

    # changed: to a key of one's own, a dead-letter queue, and back
    dead = sqs.create_queue(QueueName=name + "-dead", Attributes=attributes)["QueueUrl"]
    redrive = json.dumps({"deadLetterTargetArn": arn + "-dead", "maxReceiveCount": 4})
    changed = {
        "DelaySeconds": "90",
        "KmsMasterKeyId": "alias/aws/sqs",
        "RedrivePolicy": redrive,
        "SqsManagedSseEnabled": "false",
        "VisibilityTimeout": "60",
    }
    sqs.set_queue_attributes(QueueUrl=queue, Attributes=changed)
    expect(attributes | changed)
    sqs.set_queue_attributes(QueueUrl=queue, Attributes={"KmsMasterKeyId": "", "RedrivePolicy": ""})
    expect({"KmsMasterKeyId": "", "RedrivePolicy": "", "SqsManagedSseEnabled": "false", "VisibilityTimeout": "60"})
    sqs.untag_queue(QueueUrl=queue, TagKeys=["stage"])
    sqs.tag_queue(QueueUrl=queue, Tags={"Name": "changed"})
    assert sqs.list_queue_tags(QueueUrl=queue)["Tags"] == {"Name": "changed"}

    # imported by its URL, found by its name, and destroyed
    assert sqs.get_queue_url(QueueName=name)["QueueUrl"] == queue
    for one in (queue, dead):
        sqs.delete_queue(QueueUrl=one)
        with refused(NO_QUEUE, "QueueDoesNotExist", status=400):
            sqs.get_queue_attributes(QueueUrl=one, AttributeNames=["All"])
    with refused(PREFIX + "QueueDeletedRecently", "QueueDeletedRecently"):  # it waits for a minute then
        sqs.create_queue(QueueName=name, Attributes=attributes)
