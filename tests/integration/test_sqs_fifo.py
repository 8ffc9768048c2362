"""Groups over SQS, with boto3: their order and their duplicates in FIFO queues, their turns in standard queues.

Three workers on two partitions; a request goes to any of them.
"""

from __future__ import annotations

import json
import time
from hashlib import sha256
from typing import Any

import pytest

from tests.integration.cluster import Cluster
from tests.integration.sqs_client import Queue, refused

NO_DEDUPLICATION = (
    "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided explicitly"
)


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


@pytest.fixture
def queue(cluster: Cluster) -> Queue:
    """A FIFO queue whose messages are their own deduplication ids."""
    return Queue.make(cluster.workers[0], FifoQueue="true", ContentBasedDeduplication="true")


def bodies(messages: list[Any]) -> list[str]:
    return [message["Body"] for message in messages]


def group_of(message: Any) -> str:
    return str(message["Attributes"]["MessageGroupId"])


def send_batch(queue: Queue, group: str, texts: list[str]) -> list[Any]:
    entries = [{"Id": f"{i}", "MessageBody": text, "MessageGroupId": group} for i, text in enumerate(texts)]
    answer = queue.sqs.send_message_batch(QueueUrl=queue.url, Entries=entries)
    assert "Failed" not in answer, answer
    return answer["Successful"]  # type: ignore[no-any-return]


# -- order


def test_a_group_is_received_in_the_order_in_which_it_was_sent_at_whatever_worker(
    cluster: Cluster, queue: Queue
) -> None:
    for i in range(24):
        queue.at(cluster.workers[i % 3]).send(f"{i}", MessageGroupId="g")
    got: list[str] = []
    for i in range(24):
        messages = queue.at(cluster.workers[i % 3]).receive(3)
        got += bodies(messages)
        queue.delete(*messages)
        if len(got) == 24:
            break
    assert got == [f"{i}" for i in range(24)]


def test_nothing_else_of_a_group_is_received_while_one_of_it_is_in_flight(cluster: Cluster, queue: Queue) -> None:
    send_batch(queue, "a", ["a0", "a1"])
    send_batch(queue, "b", ["b0"])
    (first,) = queue.receive(1)
    (other,) = queue.at(cluster.workers[1]).receive(10)
    assert {first["Body"], other["Body"]} == {"a0", "b0"}
    for worker in cluster.workers:
        assert queue.at(worker).receive(10, wait_s=1) == []
    a0 = first if first["Body"] == "a0" else other
    queue.delete(a0)
    assert bodies(queue.receive(10)) == ["a1"]


def test_one_receive_gives_several_of_a_group_in_order(queue: Queue) -> None:
    send_batch(queue, "a", [f"a{i}" for i in range(8)])
    send_batch(queue, "b", [f"b{i}" for i in range(8)])
    queue.wait_for(visible=16)
    messages = queue.receive(10)
    assert len(messages) == 10
    for group in "ab":
        texts = [text for text in bodies(messages) if text.startswith(group)]
        assert texts == [f"{group}{i}" for i in range(len(texts))]


def test_a_visibility_timeout_that_ends_brings_the_group_back_from_its_first_message(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[1], FifoQueue="true", ContentBasedDeduplication="true", VisibilityTimeout=1)
    send_batch(queue, "g", ["0", "1", "2"])
    queue.wait_for(visible=3)
    first = queue.receive(2)
    assert bodies(first) == ["0", "1"]
    queue.delete(first[1])
    again = queue.at(cluster.workers[2]).receive(10, wait_s=10, VisibilityTimeout=30)
    assert bodies(again) == ["0", "2"]
    assert [m["Attributes"]["ApproximateReceiveCount"] for m in again] == ["2", "1"]


def test_visibility_is_per_message(cluster: Cluster, queue: Queue) -> None:
    send_batch(queue, "g", [f"{i}" for i in range(5)])
    messages = queue.receive(4, wait_s=0, VisibilityTimeout=2)
    assert bodies(messages) == ["0", "1", "2", "3"]
    queue.change(messages[2], 60)
    # messages before the first one in flight come back after their time; those behind it wait for it
    again = queue.at(cluster.workers[1]).receive(10, wait_s=10)
    assert bodies(again) == ["0", "1"]
    assert queue.receive(10, wait_s=0) == []
    queue.change(again[0], 0)
    assert bodies(queue.at(cluster.workers[2]).receive(10, wait_s=0)) == ["0"]


def test_an_answer_is_group_by_group_and_a_group_just_received_goes_behind_the_others(queue: Queue) -> None:
    for i in range(4):
        for group in "abc":
            queue.send(f"{group}{i}", MessageGroupId=group)
    first = queue.receive(6, wait_s=0)
    groups = [text[0] for text in bodies(first)]
    assert groups == [groups[0]] * 4 + [groups[4]] * 2
    assert bodies(first) == [f"{groups[0]}{i}" for i in range(4)] + [f"{groups[4]}{i}" for i in range(2)]
    (last,) = set("abc") - set(groups)
    for message in reversed(first):
        queue.change(message, 0)
    assert bodies(queue.receive(4, wait_s=0)) == [f"{last}{i}" for i in range(4)]


def test_a_message_given_back_is_the_first_of_its_group_again(queue: Queue) -> None:
    send_batch(queue, "g", ["0", "1", "2"])
    queue.wait_for(visible=3)
    messages = queue.receive(2)
    for message in messages:  # the order in which they are given back makes no difference
        queue.change(message, 0)
    assert bodies(queue.receive(10)) == ["0", "1", "2"]


def test_sequence_numbers_grow_and_are_the_same_for_sender_and_receiver(queue: Queue) -> None:
    sent = [int(queue.send(f"{i}", MessageGroupId="g")["SequenceNumber"]) for i in range(5)]
    queue.wait_for(visible=5)
    received = [int(m["Attributes"]["SequenceNumber"]) for m in queue.receive(10)]
    assert received == sent == sorted(set(sent))


def test_a_delay_is_the_queue_s_alone(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[0], FifoQueue="true", ContentBasedDeduplication="true", DelaySeconds=1)
    with refused("InvalidParameterValue", text="not valid for this queue type"):
        queue.send(MessageGroupId="g", DelaySeconds=5)
    send_batch(queue, "g", ["0", "1"])
    got: list[str] = []
    while len(got) < 2:
        messages = queue.receive(10, wait_s=10)
        got += bodies(messages)
        queue.delete(*messages)
    assert got == ["0", "1"]


def test_a_group_goes_on_when_its_first_message_is_dead(cluster: Cluster) -> None:
    dead = Queue.make(cluster.workers[0], FifoQueue="true")
    policy = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 2})
    queue = Queue.make(
        cluster.workers[0],
        FifoQueue="true",
        ContentBasedDeduplication="true",
        VisibilityTimeout=1,
        RedrivePolicy=policy,
    )
    text = {"x": {"DataType": "String", "StringValue": "y"}}
    bad = queue.send("bad", MessageGroupId="g", MessageAttributes=text)
    queue.send("good", MessageGroupId="g")
    for _ in range(2):
        (message,) = queue.receive(1, wait_s=10)
        assert message["Body"] == "bad"
        queue.change(message, 0)
    (message,) = queue.receive(1, wait_s=10)
    assert message["Body"] == "good"
    (dead_letter,) = dead.receive(1, wait_s=10)
    assert (dead_letter["Body"], dead_letter["MessageId"], dead_letter["MessageAttributes"]) == (
        "bad",
        bad["MessageId"],
        text,
    )
    assert group_of(dead_letter) == "g"
    assert dead_letter["Attributes"]["MessageDeduplicationId"] == sha256(b"bad").hexdigest()
    assert dead_letter["Attributes"]["DeadLetterQueueSourceArn"] == queue.arn


def test_dead_letters_of_a_fifo_queue_go_back_in_order(cluster: Cluster) -> None:
    dead = Queue.make(cluster.workers[0], FifoQueue="true")
    policy = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 1})
    queue = Queue.make(cluster.workers[0], FifoQueue="true", ContentBasedDeduplication="true", RedrivePolicy=policy)
    send_batch(queue, "g", [f"{i}" for i in range(6)])
    for _ in range(6):
        messages = queue.receive(1, wait_s=10)
        for message in messages:
            queue.change(message, 0)
    dead.wait_for(visible=6)
    dead.sqs.start_message_move_task(SourceArn=dead.arn)
    got: list[str] = []
    while len(got) < 6:
        messages = queue.receive(10, wait_s=15)
        assert messages, got
        got += bodies(messages)
        queue.delete(*messages)
    assert got == [f"{i}" for i in range(6)]


# -- duplicates


def test_a_second_message_with_the_same_id_is_accepted_and_never_received(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[0], FifoQueue="true")
    first = queue.send("first", MessageGroupId="g", MessageDeduplicationId="id")
    second = queue.send("second", MessageGroupId="g", MessageDeduplicationId="id")
    assert (second["MessageId"], second["SequenceNumber"]) == (first["MessageId"], first["SequenceNumber"])
    third = queue.at(cluster.workers[1]).send("third", MessageGroupId="h", MessageDeduplicationId="id")
    assert third["MessageId"] != first["MessageId"]
    queue.send("fourth", MessageGroupId="g", MessageDeduplicationId="another-id")
    got = queue.drain(2)
    assert bodies(got) == ["first", "fourth"]
    assert [m["Attributes"]["MessageDeduplicationId"] for m in got] == ["id", "another-id"]
    queue.send("fifth", MessageGroupId="g", MessageDeduplicationId="id")  # that it is deleted makes no difference
    assert queue.receive(wait_s=1) == []
    queue.wait_for(visible=0, in_flight=0)


def test_content_is_an_id_where_the_queue_says_so(queue: Queue) -> None:
    text = {"x": {"DataType": "String", "StringValue": "y"}}
    queue.send("same", MessageGroupId="g")
    queue.send("same", MessageGroupId="g", MessageAttributes=text)  # attributes are no content
    queue.send("same", MessageGroupId="g", MessageDeduplicationId="an-id-of-its-own")
    queue.send("other", MessageGroupId="g")
    assert bodies(queue.drain(3)) == ["same", "same", "other"]


def test_an_id_counts_in_its_group_alone_where_the_queue_says_so(cluster: Cluster) -> None:
    queue = Queue.make(
        cluster.workers[0],
        FifoQueue="true",
        DeduplicationScope="messageGroup",
        FifoThroughputLimit="perMessageGroupId",
    )
    for group in ("a", "b", "c", "a", "b", "c"):
        queue.send(group, MessageGroupId=group, MessageDeduplicationId="id")
    got = queue.drain(3)
    assert sorted(bodies(got)) == ["a", "b", "c"]
    assert {m["Attributes"]["MessageDeduplicationId"] for m in got} == {"id"}
    assert queue.receive(wait_s=1) == []


def test_scope_and_throughput_can_be_changed_and_are_told_as_set(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[0], FifoQueue="true")

    def told() -> tuple[str, str]:
        found = queue.attributes("DeduplicationScope", "FifoThroughputLimit")
        return found["DeduplicationScope"], found["FifoThroughputLimit"]

    assert told() == ("queue", "perQueue")
    for group in ("a", "b"):
        queue.send(group, MessageGroupId=group, MessageDeduplicationId="id")
    assert bodies(queue.drain(1)) == ["a"]
    queue.set(DeduplicationScope="messageGroup", FifoThroughputLimit="perMessageGroupId")
    assert told() == ("messageGroup", "perMessageGroupId")
    for group in ("a", "b", "a", "b"):
        queue.send(group, MessageGroupId=group, MessageDeduplicationId="id")
    assert sorted(bodies(queue.drain(2))) == ["a", "b"]
    assert queue.receive(wait_s=1) == []  # the second one of each group is a duplicate
    queue.set(DeduplicationScope="queue", FifoThroughputLimit="perQueue")
    assert told() == ("queue", "perQueue")
    spread = Queue.make(cluster.workers[0], FifoQueue="true", DeduplicationScope="messageGroup")
    spread.set(DeduplicationScope="queue")
    assert spread.attribute("DeduplicationScope") == "queue"
    for group in ("a", "b", "a"):
        spread.send(group, MessageGroupId=group, MessageDeduplicationId="id")
    assert sorted(bodies(spread.drain(2))) == ["a", "b"]
    assert spread.receive(1, wait_s=0) == []


def test_what_a_fifo_queue_needs_is_missed_and_what_a_standard_queue_has_not_is_refused(cluster: Cluster) -> None:
    fifo, standard = Queue.make(cluster.workers[0], FifoQueue="true"), Queue.make(cluster.workers[0])
    with refused("MissingParameter", text="MessageGroupId"):
        fifo.send(MessageDeduplicationId="id")
    with refused("InvalidParameterValue", text="ContentBasedDeduplication"):
        fifo.send(MessageGroupId="g")
    with refused("InvalidParameterValue", text="not valid for this queue type"):
        standard.send(MessageDeduplicationId="id")
    for wrong in ("", "x" * 129, "a b", "é"):
        with refused("InvalidParameterValue"):
            fifo.send(MessageGroupId=wrong, MessageDeduplicationId="id")
        with refused("InvalidParameterValue"):
            fifo.send(MessageGroupId="g", MessageDeduplicationId=wrong)
    entries = [
        {"Id": "good", "MessageBody": "x", "MessageGroupId": "g", "MessageDeduplicationId": "1"},
        {"Id": "bad", "MessageBody": "x", "MessageDeduplicationId": "2"},
    ]
    with refused("InvalidParameterValue", text="The request must contain the parameter MessageGroupId."):
        fifo.sqs.send_message_batch(QueueUrl=fifo.url, Entries=entries)
    entries[1] = {"Id": "bad", "MessageBody": "x", "MessageGroupId": "g"}
    with refused("InvalidParameterValue", text=NO_DEDUPLICATION):
        fifo.sqs.send_message_batch(QueueUrl=fifo.url, Entries=entries)
    entry = "SendMessageBatchRequestEntry.1."
    values = {entry + "Id": "a", entry + "MessageBody": "x", entry + "MessageDeduplicationId": "1"}
    assert fifo.ask("SendMessageBatch", values).error == (
        400,
        "InvalidParameterValue",
        "The request must contain the parameter MessageGroupId.",
    )
    del values[entry + "MessageDeduplicationId"]
    values[entry + "MessageGroupId"] = "g"
    assert fifo.ask("SendMessageBatch", values).error == (400, "InvalidParameterValue", NO_DEDUPLICATION)
    assert fifo.ask("SendMessage", MessageBody="x", MessageDeduplicationId="1").error == (
        400,
        "MissingParameter",
        "The request must contain the parameter MessageGroupId.",
    )
    assert fifo.receive(wait_s=1) == []  # no entry of them was sent


def test_a_receipt_whose_time_is_over_deletes_nothing(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[0], FifoQueue="true")
    queue.send("a", MessageGroupId="g", MessageDeduplicationId="1")
    (message,) = queue.receive(VisibilityTimeout=1)
    time.sleep(1.02)  # no record has advanced log time since
    with refused("InvalidParameterValue", text="The receipt handle has expired."):
        queue.delete(message)
    answer = queue.ask("DeleteMessage", ReceiptHandle=message["ReceiptHandle"])
    assert (answer.status, answer.told("Code")) == (400, "InvalidParameterValue")
    (again,) = queue.receive()
    assert again["MessageId"] == message["MessageId"]
    queue.delete(again)


# -- receives that are tried again


def test_a_receive_that_is_tried_again_is_given_the_same_messages(cluster: Cluster, queue: Queue) -> None:
    send_batch(queue, "g", ["0", "1", "2"])
    queue.wait_for(visible=3)
    first = queue.receive(2, ReceiveRequestAttemptId="try")
    again = queue.receive(2, ReceiveRequestAttemptId="try")
    assert bodies(again) == bodies(first) == ["0", "1"]
    assert [m["ReceiptHandle"] for m in again] == [m["ReceiptHandle"] for m in first]
    assert queue.receive(2, wait_s=1, ReceiveRequestAttemptId="another") == []
    for worker in cluster.workers[1:]:
        assert queue.at(worker).receive(2, wait_s=0, ReceiveRequestAttemptId="try") == []
    queue.delete(first[0])
    assert queue.receive(2, wait_s=1, ReceiveRequestAttemptId="try") == []
    queue.delete(first[1])
    assert bodies(queue.receive(2)) == ["2"]


# -- fair queues


def test_a_noisy_group_of_a_standard_queue_does_not_starve_the_others(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[0])
    for i in range(0, 400, 10):
        send_batch(queue, "noisy", [f"n{k}" for k in range(i, i + 10)])
    queue.wait_for(visible=400)
    for i in range(10):
        queue.send(f"q{i}", MessageGroupId="quiet")
    queue.wait_for(visible=410)
    got: list[Any] = []
    while len([m for m in got if group_of(m) == "quiet"]) < 10:
        messages = queue.receive(10)
        assert messages
        got += messages
    # a fair share is one in two of a partition; each receive may be of either partition
    assert len(got) <= 100, [group_of(m) for m in got]


def test_what_a_noisy_group_has_in_flight_delays_no_other_group(cluster: Cluster) -> None:
    """All in flight are of one group, far above a tenth, and it has a backlog. The other group comes at once."""
    queue = Queue.make(cluster.workers[0], VisibilityTimeout="600")
    for i in range(0, 200, 10):
        send_batch(queue, "noisy", [f"n{k}" for k in range(i, i + 10)])
    in_flight: list[Any] = []
    while len(in_flight) < 60:
        in_flight += queue.receive(10)
    queue.send("q", MessageGroupId="quiet")
    got = queue.receive(10) + queue.receive(10)
    assert "q" in bodies(got), [group_of(m) for m in got]


def test_a_standard_queue_delivers_a_group_to_several_receivers_at_once(cluster: Cluster) -> None:
    queue = Queue.make(cluster.workers[0])
    send_batch(queue, "g", ["0", "1"])
    queue.wait_for(visible=2)
    assert sorted(bodies(queue.receive(1) + queue.receive(1))) == ["0", "1"]
