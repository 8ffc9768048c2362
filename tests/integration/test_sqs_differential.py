"""Random, seeded sequences of boto3 calls against marq and against moto, side by side: the same answers and errors.

`moto_differences` lists where they are not the same, with what AWS's documentation says there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from tests.integration.cluster import Cluster
from tests.integration.moto_differences import DIFFERENCES
from tests.integration.sqs_client import client_of
from tests.integration.sqs_scripts import ACCOUNT, FifoScript, Script, Side
from tests.kafka import unique

STEPS = 150
SEEDS = (1, pytest.param(2, marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def marq(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a worker."""
    with Cluster(kafka, tmp_path_factory.mktemp("marq"), partitions=2, handlers="", sqs_account=ACCOUNT) as cluster:
        yield cluster.start().url


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """The address of moto's server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_calls_have_the_same_answers_as_moto_s(seed: int, marq: str, moto: str) -> None:
    Script(seed, Side(client_of(marq)), Side(client_of(moto))).run(STEPS)


@pytest.mark.parametrize("seed", SEEDS)
def test_fifo_queues_have_the_order_and_the_duplicates_of_moto_s(seed: int, marq: str, moto: str) -> None:
    FifoScript(seed, Side(client_of(marq)), Side(client_of(moto))).run(4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 15))
def test_more_of_the_same_calls_have_the_same_answers(seed: int, marq: str, moto: str) -> None:
    Script(seed, Side(client_of(marq)), Side(client_of(moto))).run(300)
    FifoScript(seed, Side(client_of(marq)), Side(client_of(moto))).run(10)


def test_where_they_differ_it_is_as_aws_says(marq: str, moto: str) -> None:
    script = Script(0, Side(client_of(marq)), Side(client_of(moto)))
    script.create()
    (queue,) = script.queues
    url = script.url(queue)
    send: dict[str, Any] = {"QueueUrl": url, "MessageBody": "x"}
    text = {"DataType": "String", "StringValue": "x"}
    script.both("send_message", "a body with a character that is not allowed", QueueUrl=url, MessageBody="\x01")
    script.both("send_message", "an empty body", QueueUrl=url, MessageBody="")
    script.both("send_message", "a negative delay", **send, DelaySeconds=-1)
    for what, attributes in (
        ("an attribute without a value", {"x": {"DataType": "String", "StringValue": ""}}),
        ("a number that is none", {"x": {"DataType": "Number", "StringValue": "one"}}),
        ("an attribute that begins with AWS.", {"AWS.x": text}),
        ("eleven attributes", {f"a{i}": text for i in range(11)}),
    ):
        script.both("send_message", what, **send, MessageAttributes=attributes)
    script.both("send_message", "a group with a space in its name", **send, MessageGroupId="x y")
    script.both("change_message_visibility_batch", "a batch without entries", QueueUrl=url, Entries=[])
    target = json.dumps({"deadLetterTargetArn": f"arn:aws:sqs:eu-central-1:{ACCOUNT}:nothing", "maxReceiveCount": 1})
    script.both(
        "set_queue_attributes",
        "a redrive policy whose target does not exist",
        QueueUrl=url,
        Attributes={"RedrivePolicy": target},
    )
    for what, values in (
        ("a redrive policy that is no JSON", {"RedrivePolicy": "no json"}),
        ("an attribute out of range", {"VisibilityTimeout": "43201"}),
        ("an attribute of the queue that nobody knows", {"Nothing": "x"}),
    ):
        script.both("set_queue_attributes", what, QueueUrl=url, Attributes=values)
    script.both("add_permission", QueueUrl=url, Label="one", AWSAccountIds=["1" * 12], Actions=["SendMessage"])
    script.both("set_queue_attributes", QueueUrl=url, Attributes={"DelaySeconds": "0"})
    script.both("remove_permission", "a permission, after another attribute was set", QueueUrl=url, Label="one")
    for side in script.sides:
        side.sqs.set_queue_attributes(QueueUrl=side.urls[queue], Attributes={"VisibilityTimeout": "600"})
        other = side.sqs.create_queue(QueueName=unique("given-back"))["QueueUrl"]
        side.urls["other"] = other
        side.sqs.send_message(QueueUrl=other, MessageBody="b")
        (message,) = side.sqs.receive_message(QueueUrl=other, WaitTimeSeconds=5)["Messages"]
        side.handles["other", "b"] = message["ReceiptHandle"]
        side.sqs.change_message_visibility(QueueUrl=other, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0)
    message_of: dict[str, Any] = {"QueueUrl": script.url("other"), "ReceiptHandle": script.handle("other", "b")}
    script.both(
        "change_message_visibility", "the timeout of a message that was given back", VisibilityTimeout=5, **message_of
    )
    script.both("delete_message", **message_of)
    script.both(
        "change_message_visibility", "the timeout of a message that was deleted", VisibilityTimeout=5, **message_of
    )
    assert script.differed == DIFFERENCES.keys()
