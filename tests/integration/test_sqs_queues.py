"""Queues over SQS, with boto3: made, set, found, shared, purged, deleted, and messages moved between them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client
from tests.integration.sqs_client import REGION, Queue, ask, client_of, refused
from tests.kafka import unique

NO_QUEUE = "AWS.SimpleQueueService.NonExistentQueue"
PREFIX = "AWS.SimpleQueueService."

DEFAULTS = {
    "VisibilityTimeout": "30",
    "DelaySeconds": "0",
    "MessageRetentionPeriod": "345600",
    "MaximumMessageSize": "1048576",
    "ReceiveMessageWaitTimeSeconds": "0",
    "SqsManagedSseEnabled": "true",
    "ApproximateNumberOfMessages": "0",
    "ApproximateNumberOfMessagesNotVisible": "0",
    "ApproximateNumberOfMessagesDelayed": "0",
}


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


@pytest.fixture(scope="module")
def sqs(cluster: Cluster) -> Any:
    return client_of(cluster.workers[0].url)


@pytest.fixture
def queue(cluster: Cluster) -> Queue:
    return Queue.make(cluster.workers[0])


def test_a_new_queue_has_the_defaults_of_aws(queue: Queue) -> None:
    found = queue.attributes()
    arn = f"arn:aws:sqs:{REGION}:000000000000:{queue.name}"
    assert found == DEFAULTS | {"QueueArn": arn} | {
        name: found[name] for name in ("CreatedTimestamp", "LastModifiedTimestamp")
    }
    assert abs(int(found["CreatedTimestamp"]) - time.time()) < 60


def test_a_fifo_queue_tells_that_it_is_one(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[0], FifoQueue="true", ContentBasedDeduplication="true")
    found = queue.attributes()
    assert found["FifoQueue"] == found["ContentBasedDeduplication"] == "true"
    assert (found["DeduplicationScope"], found["FifoThroughputLimit"]) == ("queue", "perQueue")
    groups = {"DeduplicationScope": "messageGroup", "FifoThroughputLimit": "perMessageGroupId"}
    queue.set(**groups)
    assert queue.attributes(*groups) == groups
    queue = Queue.make(cluster.workers[0], FifoQueue="true", **groups)
    found = queue.attributes("DeduplicationScope", "FifoThroughputLimit")
    assert found == {"DeduplicationScope": "messageGroup", "FifoThroughputLimit": "perMessageGroupId"}
    with refused("InvalidAttributeValue", "InvalidAttributeValue"):
        queue.set(FifoQueue="false")


def test_attributes_are_set_at_one_worker_and_seen_at_all(cluster: Cluster, queue: Queue) -> None:
    policy = json.dumps({"Version": "2012-10-17", "Statement": []})
    values = {
        "VisibilityTimeout": "0",
        "DelaySeconds": "900",
        "MessageRetentionPeriod": "60",
        "MaximumMessageSize": "1024",
        "ReceiveMessageWaitTimeSeconds": "20",
        "Policy": policy,
        "KmsMasterKeyId": "alias/aws/sqs",
        "KmsDataKeyReusePeriodSeconds": "60",
    }
    queue.set(**values)
    for worker in cluster.workers:
        until(lambda w=worker: queue.at(w).attributes(*values) == values, "the attributes at another worker")
    queue.set(Policy="", KmsMasterKeyId="")
    assert queue.attributes("Policy", "KmsMasterKeyId") == {}


@pytest.mark.parametrize(
    ("attributes", "code"),
    [
        ({"VisibilityTimeout": "43201"}, "InvalidAttributeValue"),
        ({"VisibilityTimeout": "-1"}, "InvalidAttributeValue"),
        ({"VisibilityTimeout": "x"}, "InvalidAttributeValue"),
        ({"DelaySeconds": "901"}, "InvalidAttributeValue"),
        ({"MessageRetentionPeriod": "59"}, "InvalidAttributeValue"),
        ({"MaximumMessageSize": "1048577"}, "InvalidAttributeValue"),
        ({"ReceiveMessageWaitTimeSeconds": "21"}, "InvalidAttributeValue"),
        ({"SqsManagedSseEnabled": "yes"}, "InvalidAttributeValue"),
        ({"FifoQueue": "false"}, "InvalidAttributeName"),
        ({"ContentBasedDeduplication": "true"}, "InvalidAttributeName"),
        ({"QueueArn": "x"}, "InvalidAttributeName"),
        ({"Nothing": "x"}, "InvalidAttributeName"),
        ({"Policy": "{"}, "InvalidParameterValue"),
        ({"RedrivePolicy": "x"}, "InvalidParameterValue"),
        ({"RedrivePolicy": '{"maxReceiveCount":1}'}, "InvalidParameterValue"),
        ({"RedriveAllowPolicy": '{"redrivePermission":"some"}'}, "InvalidParameterValue"),
        ({"RedriveAllowPolicy": '{"redrivePermission":"byQueue"}'}, "InvalidParameterValue"),
    ],
)
def test_attributes_that_can_not_be_are_refused(sqs: Any, attributes: dict[str, str], code: str) -> None:
    with refused(code):
        sqs.create_queue(QueueName=unique("q"), Attributes=attributes)


@pytest.mark.parametrize("name", ["", "x" * 81, "a b", "a.b", "q.fifo", "é"])
def test_names_that_aws_does_not_take_are_refused(sqs: Any, name: str) -> None:
    with refused("InvalidParameterValue" if name else "MissingParameter"):
        sqs.create_queue(QueueName=name)


def test_a_fifo_queue_has_a_name_that_says_so(sqs: Any) -> None:
    with refused("InvalidParameterValue", text=".fifo"):
        sqs.create_queue(QueueName=unique("q"), Attributes={"FifoQueue": "true"})


def test_a_queue_is_made_twice_only_if_it_is_to_be_the_same(cluster: Cluster, sqs: Any, queue: Queue) -> None:
    assert Queue.make(cluster.workers[1], queue.name).name == queue.name
    assert Queue.make(cluster.workers[1], queue.name, VisibilityTimeout=30).name == queue.name
    with refused("QueueAlreadyExists", "QueueNameExists"):
        sqs.create_queue(QueueName=queue.name, Attributes={"VisibilityTimeout": "31"})


def test_a_queue_of_the_json_api_can_be_used(cluster: Cluster, sqs: Any) -> None:
    name = unique("json.queue/of é")
    Client(cluster.workers[1].url).send(name, b"x")
    queue = Queue(sqs, sqs.get_queue_url(QueueName=name)["QueueUrl"])
    assert len(queue.drain(1)) == 1
    assert queue.attributes("VisibilityTimeout") == {"VisibilityTimeout": "30"}
    queue.set(VisibilityTimeout=7)
    assert queue.attributes("VisibilityTimeout") == {"VisibilityTimeout": "7"}


def test_urls_echo_the_host_that_the_client_used(cluster: Cluster) -> None:
    url = cluster.workers[0].url.replace("127.0.0.1", "localhost")
    queue = Queue.make(url)
    assert queue.url == f"{url}/000000000000/{queue.name}"
    other = queue.sqs.get_queue_url(QueueName=queue.name, QueueOwnerAWSAccountId="123456789012")["QueueUrl"]
    assert other == f"{url}/123456789012/{queue.name}"
    queue.sqs.send_message(QueueUrl=other, MessageBody="any account will do")
    assert len(queue.receive()) == 1


def test_queues_are_listed_by_prefix_and_in_pages(cluster: Cluster, sqs: Any) -> None:
    prefix = unique("page")
    urls = [Queue.make(cluster.workers[i % 3], f"{prefix}-{i}").url.rpartition("/")[2] for i in range(5)]
    until(lambda: len(sqs.list_queues(QueueNamePrefix=prefix).get("QueueUrls", [])) == 5, "all queues are listed")
    pages = list(sqs.get_paginator("list_queues").paginate(QueueNamePrefix=prefix, PaginationConfig={"PageSize": 2}))
    assert [len(page["QueueUrls"]) for page in pages] == [2, 2, 1]
    assert [u.rpartition("/")[2] for page in pages for u in page["QueueUrls"]] == sorted(urls)
    assert "QueueUrls" not in sqs.list_queues(QueueNamePrefix=unique("none"))
    for values in ({"MaxResults": 0}, {"MaxResults": 1001}, {"MaxResults": 1, "NextToken": "é"}):
        with refused("InvalidParameterValue"):
            sqs.list_queues(**values)


def test_tags_are_kept_with_the_queue(cluster: Cluster, queue: Queue) -> None:
    sqs = queue.sqs
    assert "Tags" not in sqs.list_queue_tags(QueueUrl=queue.url)
    sqs.tag_queue(QueueUrl=queue.url, Tags={"team": "a", "stage": "test", "empty": ""})
    sqs.tag_queue(QueueUrl=queue.url, Tags={"team": "b"})
    sqs.untag_queue(QueueUrl=queue.url, TagKeys=["stage", "nothing"])
    assert sqs.list_queue_tags(QueueUrl=queue.url)["Tags"] == {"team": "b", "empty": ""}
    tagged = sqs.create_queue(QueueName=unique("q"), tags={"x": "y"})["QueueUrl"]
    assert sqs.list_queue_tags(QueueUrl=tagged)["Tags"] == {"x": "y"}
    words = f"Too many tags added for queue {queue.name}."
    with refused("InvalidParameterValue", text=words):
        sqs.tag_queue(QueueUrl=queue.url, Tags={f"k{i}": "v" for i in range(51)})
    values = {f"Tag.{i}.{part}": f"{i}" for i in range(1, 52) for part in ("Key", "Value")}
    assert queue.ask("TagQueue", values).error == (400, "InvalidParameterValue", words)


def test_permissions_are_statements_of_the_policy(queue: Queue) -> None:
    sqs = queue.sqs
    sqs.add_permission(QueueUrl=queue.url, Label="one", AWSAccountIds=["123456789012"], Actions=["SendMessage"])
    sqs.add_permission(
        QueueUrl=queue.url, Label="two", AWSAccountIds=["1" * 12, "2" * 12], Actions=["SendMessage", "ReceiveMessage"]
    )
    one, two = json.loads(queue.attribute("Policy"))["Statement"]
    assert one == {
        "Sid": "one",
        "Effect": "Allow",
        "Principal": {"AWS": "arn:aws:iam::123456789012:root"},
        "Action": "SQS:SendMessage",
        "Resource": queue.arn,
    }
    assert two["Action"] == ["SQS:SendMessage", "SQS:ReceiveMessage"]
    with refused("InvalidParameterValue", text="Already exists"):
        sqs.add_permission(QueueUrl=queue.url, Label="one", AWSAccountIds=["1" * 12], Actions=["*"])
    with refused("InvalidParameterValue"):
        sqs.add_permission(QueueUrl=queue.url, Label="x", AWSAccountIds=["1" * 12], Actions=["CreateQueue"])
    with refused("OverLimit", "OverLimit"):
        sqs.add_permission(QueueUrl=queue.url, Label="x", AWSAccountIds=["1" * 12], Actions=["*"] * 8)
    policy = json.loads(queue.attribute("Policy"))
    assert (policy["Version"], policy["Id"]) == ("2008-10-17", f"{queue.arn}/SQSDefaultPolicy")
    for label in ("one", "two"):
        sqs.remove_permission(QueueUrl=queue.url, Label=label)
    assert queue.attributes("Policy") == {}
    words = "Value one for parameter Label is invalid. Reason: can't find label."
    with refused("InvalidParameterValue", text=words):
        sqs.remove_permission(QueueUrl=queue.url, Label="one")
    assert queue.ask("RemovePermission", Label="one").error == (400, "InvalidParameterValue", words)


def test_a_redrive_policy_needs_a_queue_that_allows_it(cluster: Cluster, queue: Queue) -> None:
    dead = Queue.make(cluster.workers[1])
    policy = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 5})
    queue.set(RedrivePolicy=policy)
    assert json.loads(queue.attribute("RedrivePolicy")) == json.loads(policy)
    sources = queue.sqs.list_dead_letter_source_queues(QueueUrl=dead.url)["queueUrls"]
    assert [url.rpartition("/")[2] for url in sources] == [queue.name]
    queue.set(RedrivePolicy="")
    assert queue.attributes("RedrivePolicy") == {}
    assert queue.sqs.list_dead_letter_source_queues(QueueUrl=dead.url)["queueUrls"] == []
    for allow in (
        {"redrivePermission": "denyAll"},
        {"redrivePermission": "byQueue", "sourceQueueArns": [dead.arn]},
    ):
        dead.set(RedriveAllowPolicy=json.dumps(allow))
        until(lambda: json.loads(dead.at(cluster.workers[0]).attribute("RedriveAllowPolicy")) == allow, "it is known")  # noqa: B023
        with refused("InvalidParameterValue", text="RedrivePolicy"):
            queue.set(RedrivePolicy=policy)
    allow = {"redrivePermission": "byQueue", "sourceQueueArns": [queue.arn]}
    dead.set(RedriveAllowPolicy=json.dumps(allow))
    until(lambda: json.loads(dead.at(cluster.workers[0]).attribute("RedriveAllowPolicy")) == allow, "it is known")
    queue.set(RedrivePolicy=policy)
    fifo = Queue.make(cluster.workers[0], FifoQueue="true")
    for target, count in ((fifo.arn, 5), (dead.arn, 0), (dead.arn, 1001), (dead.arn + "x", 5), ("arn:x", 5)):
        with refused("InvalidParameterValue"):
            queue.set(RedrivePolicy=json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": count}))


def test_a_purge_empties_a_queue_once_a_minute(queue: Queue) -> None:
    for _ in range(5):
        queue.send()
    queue.receive(2)
    queue.sqs.purge_queue(QueueUrl=queue.url)
    queue.wait_for(visible=0, in_flight=0)
    with refused(PREFIX + "PurgeQueueInProgress", "PurgeQueueInProgress"):
        queue.sqs.purge_queue(QueueUrl=queue.url)


def test_a_deleted_queue_is_gone_and_can_not_be_made_again_for_a_minute(cluster: Cluster, queue: Queue) -> None:
    queue.send()
    queue.sqs.delete_queue(QueueUrl=queue.url)
    for call in (
        lambda: queue.send(),
        lambda: queue.receive(),
        lambda: queue.attributes(),
        lambda: queue.set(DelaySeconds=1),
        lambda: queue.sqs.get_queue_url(QueueName=queue.name),
        lambda: queue.sqs.delete_queue(QueueUrl=queue.url),
        lambda: queue.sqs.purge_queue(QueueUrl=queue.url),
    ):
        with refused(NO_QUEUE, "QueueDoesNotExist"):
            call()
    with refused(PREFIX + "QueueDeletedRecently", "QueueDeletedRecently"):
        Queue.make(cluster.workers[1], queue.name)


# -- message move tasks


def dead_letters(cluster: Cluster, count: int) -> tuple[Queue, Queue]:
    """A queue, and its dead-letter queue with so many dead letters."""
    dead = Queue.make(cluster.workers[0])
    policy = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 1})
    queue = Queue.make(cluster.workers[0], RedrivePolicy=policy)
    for i in range(0, count, 10):
        entries = [{"Id": f"{k}", "MessageBody": f"{k}"} for k in range(i, min(count, i + 10))]
        queue.sqs.send_message_batch(QueueUrl=queue.url, Entries=entries)
    taken = 0
    while taken < count:
        messages = queue.receive(10)
        assert messages
        for message in messages:
            queue.change(message, 0)
        taken += len(messages)
    dead.wait_for(visible=count)
    return queue, dead


def tasks_of(dead: Queue, limit: int = 10) -> list[Any]:
    answer = dead.sqs.list_message_move_tasks(SourceArn=dead.arn, MaxResults=limit)
    return answer["Results"]  # type: ignore[no-any-return]


def test_dead_letters_go_back_to_where_they_came_from(cluster: Cluster) -> None:
    queue, dead = dead_letters(cluster, 12)
    dead.sqs.start_message_move_task(SourceArn=dead.arn)
    bodies = {m["Body"] for m in queue.drain(12, wait_s=10)}
    assert bodies == {f"{i}" for i in range(12)}
    (task,) = tasks_of(dead)
    assert task["Status"] == "COMPLETED", "all that it was for has come back"
    assert (task["ApproximateNumberOfMessagesMoved"], task["ApproximateNumberOfMessagesToMove"]) == (12, 12)
    assert "TaskHandle" not in task
    assert task["SourceArn"] == dead.arn
    dead.wait_for(visible=0)


def test_a_move_task_keeps_to_its_rate_and_can_be_cancelled_at_any_worker(cluster: Cluster) -> None:
    queue, dead = dead_letters(cluster, 30)
    target = Queue.make(cluster.workers[2])
    handle = dead.sqs.start_message_move_task(
        SourceArn=dead.arn, DestinationArn=target.arn, MaxNumberOfMessagesPerSecond=4
    )["TaskHandle"]
    other = dead.at(cluster.workers[1])
    until(lambda: [t["Status"] for t in tasks_of(other)] == ["RUNNING"], "the task is known at another worker")
    with refused("InvalidParameterValue", text="already a task running"):
        dead.sqs.start_message_move_task(SourceArn=dead.arn)
    code = dead.ask("StartMessageMoveTask", SourceArn=dead.arn).told("Code")
    assert code == "InvalidParameterValue"
    time.sleep(2)
    other.sqs.cancel_message_move_task(TaskHandle=handle)
    until(lambda: tasks_of(dead)[0]["Status"] == "CANCELLED", "the task is cancelled")
    moved = tasks_of(dead)[0]["ApproximateNumberOfMessagesMoved"]
    assert 1 <= moved < 30
    target.wait_for(visible=moved)
    dead.wait_for(visible=30 - moved)
    with refused(PREFIX + "UnsupportedOperation", "UnsupportedOperation"):
        dead.sqs.cancel_message_move_task(TaskHandle=handle)
    assert queue.receive(wait_s=0) == []


def test_a_move_task_ends_with_its_target_and_the_rest_stays(cluster: Cluster) -> None:
    queue, dead = dead_letters(cluster, 20)
    target = Queue.make(cluster.workers[1])
    dead.sqs.start_message_move_task(SourceArn=dead.arn, DestinationArn=target.arn, MaxNumberOfMessagesPerSecond=5)
    until(lambda: tasks_of(dead)[0]["ApproximateNumberOfMessagesMoved"] > 0, "some are moved")
    target.sqs.delete_queue(QueueUrl=target.url)
    until(lambda: tasks_of(dead)[0]["Status"] == "FAILED", "the task has failed")
    (task,) = tasks_of(dead)
    assert task["FailureReason"] == NO_QUEUE
    moved = task["ApproximateNumberOfMessagesMoved"]
    assert 1 <= moved < 20
    dead.wait_for(visible=20 - moved)
    answer = dead.ask("ListMessageMoveTasks", SourceArn=dead.arn)
    assert (answer.told("Status"), answer.told("FailureReason")) == ("FAILED", NO_QUEUE)
    for worker in cluster.workers:  # it was not made again
        with refused(NO_QUEUE, "QueueDoesNotExist"):
            target.at(worker)
    queue.sqs.delete_queue(QueueUrl=queue.url)
    with refused("InvalidParameterValue", text="Dead Letter Queue"):
        dead.sqs.start_message_move_task(SourceArn=dead.arn)


def test_move_tasks_that_make_no_sense_are_refused(cluster: Cluster, sqs: Any, queue: Queue) -> None:
    with refused("ResourceNotFoundException", "ResourceNotFoundException"):
        sqs.start_message_move_task(SourceArn=queue.arn + "x")
    with refused("InvalidParameterValue", text="Dead Letter Queue"):
        sqs.start_message_move_task(SourceArn=queue.arn)
    with refused("InvalidParameterValue"):
        sqs.start_message_move_task(SourceArn=queue.arn, MaxNumberOfMessagesPerSecond=501)
    with refused("InvalidParameterValue"):
        sqs.start_message_move_task(SourceArn="nonsense")
    with refused("InvalidParameterValue", text="Value for parameter TaskHandle is invalid."):
        sqs.cancel_message_move_task(TaskHandle="nonsense")
    answer = ask(cluster.workers[0].url, "CancelMessageMoveTask", TaskHandle="nonsense")
    assert answer.error == (400, "InvalidParameterValue", "Value for parameter TaskHandle is invalid.")
    with refused("ResourceNotFoundException", "ResourceNotFoundException"):
        sqs.list_message_move_tasks(SourceArn=queue.arn + "x")
    assert sqs.list_message_move_tasks(SourceArn=queue.arn)["Results"] == []
