"""Each client does what applications do with it, against real workers: nothing is lost, and its log stays empty."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.integration.cluster import Cluster, until
from tests.integration.sqs_client import Queue
from tests.sdks.programs import Client, Program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

MANY = 5000
#: Seconds until the messages of a killed process are delivered to others.
VISIBILITY_S = 10


def requests(url: str, action: str) -> dict[int, int]:
    """Requests that a worker has answered, by status."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[int, int] = defaultdict(int)
    for labels, value in re.findall(r"^marq_http_request_seconds_count\{(.*)\} (\S+)$", text, re.MULTILINE):
        if f'"{action}"' in labels:
            found[int(re.search(r'status="(\d+)"', labels)[1])] += int(float(value))  # type: ignore[index]
    return dict(found)


class Endpoint:
    """The worker that the clients talk to, with counts of its requests."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.worker = cluster.running[0]
        self.url = self.worker.url
        self._before = self._requests()

    def _requests(self) -> dict[str, dict[int, int]]:
        actions = ("SendMessage", "SendMessageBatch", "ReceiveMessage", "DeleteMessageBatch", "DeleteMessage")
        return {action: requests(self.url, action) for action in (*actions, "ChangeMessageVisibility")}

    def asked(self) -> dict[str, dict[int, int]]:
        """The number of requests since, by action and status."""
        now = self._requests()
        return {action: dict(Counter(found) - Counter(self._before[action])) for action, found in now.items()}

    def queue(self, **attributes: Any) -> Queue:
        return Queue.make(self.worker, **attributes)


@pytest.fixture
def endpoint(cluster: Cluster) -> Endpoint:
    return Endpoint(cluster)


def bodies(count: int) -> list[str]:
    return [f"m-{i}" for i in range(count)]


def deleted(*programs: Program) -> set[str]:
    """Bodies of the messages that they have deleted."""
    said = [line for program in programs for line in list(program.lines)]
    body_of = {line["id"]: line["got"] for line in said if "got" in line}
    return {body_of[line["deleted"]] for line in said if "deleted" in line}


def quiet(*programs: Program) -> None:
    for program in programs:
        assert program.errors == ""


def test_sends_and_batches_arrive_whole_with_one_request_each(sdk: Client, endpoint: Endpoint) -> None:
    queue = endpoint.queue()
    sender = sdk.start(endpoint.url, queue.url, "send", 25)
    sent = {line["sent"]: line["id"] for line in sender.end()}
    assert sorted(sent) == sorted(bodies(25))
    got = {m["Body"]: m for m in queue.drain(25)}
    assert {body: m["MessageId"] for body, m in got.items()} == sent
    for body, m in got.items():
        assert m["MessageAttributes"]["n"]["StringValue"] == body.removeprefix("m-")
        assert m["MessageAttributes"]["n"]["DataType"].startswith("Number")
    asked = endpoint.asked()
    assert (asked["SendMessage"], asked["SendMessageBatch"]) == ({200: 1}, {200: 3})
    quiet(sender)


def test_a_long_poll_is_answered_by_what_comes(sdk: Client, endpoint: Endpoint) -> None:
    queue = endpoint.queue()
    worker = sdk.start(endpoint.url, queue.url, "work", 100)
    worker.until_said("ready")
    sent = []
    for i in range(5):
        attributes = {"n": {"DataType": "Number", "StringValue": f"{i}"}}
        sent.append(queue.send(f"m-{i}", MessageAttributes=attributes)["MessageId"])
        worker.until_said("got", i + 1)
    until(lambda: len(worker.said("deleted")) == 5, "all are deleted")
    found = [(line["got"], line["id"], str(line["receives"]), str(line["n"])) for line in worker.lines if "got" in line]
    assert found == [(f"m-{i}", sent[i], "1", f"{i}") for i in range(5)]
    worker.kill()
    assert set(endpoint.asked()["ReceiveMessage"]) == {200}
    queue.wait_for(visible=0, in_flight=0)
    quiet(worker)


def test_a_heartbeat_keeps_a_message_beyond_its_time(sdk: Client, endpoint: Endpoint) -> None:
    queue = endpoint.queue(VisibilityTimeout=4)
    queue.send("m-0", MessageAttributes={"n": {"DataType": "Number", "StringValue": "0"}})
    worker = sdk.start(endpoint.url, queue.url, "heartbeat", 9)
    worker.until_said("got")
    while not worker.said("deleted"):
        assert queue.receive(1, 1) == [] or worker.said("deleted")
    worker.kill()
    assert [line["receives"] for line in worker.lines if "got" in line] in (["1"], [1])
    queue.wait_for(visible=0, in_flight=0)
    quiet(worker)


def test_what_fails_too_often_is_a_dead_letter(client: Client, endpoint: Endpoint) -> None:
    dead = endpoint.queue()
    policy = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 2})
    queue = endpoint.queue(RedrivePolicy=policy, VisibilityTimeout=4)
    client.start(endpoint.url, queue.url, "send", 1).end()
    worker = client.start(endpoint.url, queue.url, "fail", 2)
    worker.until_said("got", 2)
    listens = client.name == "spring"  # on, and writes of what its handler raised
    if not listens:
        worker.end()
        assert worker.said("left") == [0]
        quiet(worker)
    (dead_letter,) = until(lambda: dead.receive(1, 1), "the dead letter")
    assert dead_letter["MessageId"] == worker.said("id")[0]
    assert dead_letter["Attributes"]["DeadLetterQueueSourceArn"] == queue.arn
    assert [str(times) for times in worker.said("receives")] == ["1", "2"]
    queue.wait_for(visible=0, in_flight=0)


def in_order(worker: Program) -> None:
    """Messages of a group came one after the other, as far as they came for the first time."""
    groups: dict[str, list[int]] = defaultdict(list)
    for line in list(worker.lines):
        if "got" in line and str(line["receives"]) == "1":
            groups[line["group"]].append(int(line["got"].removeprefix("m-")))
    assert groups
    for group, numbers in groups.items():
        assert numbers == sorted(numbers), group
        assert {number % 7 for number in numbers} == {int(group.removeprefix("g"))}


def test_groups_of_a_fifo_queue_come_in_order(client: Client, endpoint: Endpoint) -> None:
    queue = endpoint.queue(FifoQueue="true", DeduplicationScope="messageGroup", FifoThroughputLimit="perMessageGroupId")
    sender = client.start(endpoint.url, queue.url, "send", 200)
    sent = sender.end_said("sent")
    assert sorted(sent) == sorted(bodies(200))
    client.start(endpoint.url, queue.url, "send", 200).end()  # again: duplicates, all of them
    worker = client.start(endpoint.url, queue.url, "work", 200)
    worker.until_said("deleted", 200)
    in_order(worker)
    assert sorted(worker.said("got")) == sorted(sent)
    worker.kill()
    assert queue.receive(10, 1) == []
    quiet(sender, worker)


@pytest.mark.parametrize("fifo", [False, True], ids=["standard", "fifo"])
def test_nothing_of_thousands_is_lost_when_processes_are_killed(client: Client, endpoint: Endpoint, fifo: bool) -> None:
    more = {"FifoQueue": "true", "DeduplicationScope": "messageGroup", "FifoThroughputLimit": "perMessageGroupId"}
    queue = endpoint.queue(VisibilityTimeout=VISIBILITY_S, **(more if fifo else {}))
    sender = client.start(endpoint.url, queue.url, "send", MANY)
    workers = [client.start(endpoint.url, queue.url, "work", MANY) for _ in range(2)]
    sender.until_said("sent", MANY // 10)
    workers[0].until_said("got", 1, 60)
    workers[0].kill()
    sender.until_said("sent", MANY // 3)
    other = next(worker for worker in endpoint.cluster.running if worker is not endpoint.worker)
    other.kill()
    endpoint.cluster.start(ready=False)
    sent = sender.end_said("sent", 240)
    assert sorted(sent) == sorted(bodies(MANY))
    # the killed program may not have printed its last deletions
    last = set(workers[0].said("got")[-10:])
    until(lambda: deleted(*workers) | last == set(sent), "all are deleted", 240)
    for worker in workers if fifo else ():
        in_order(worker)
    queue.wait_for(visible=0, in_flight=0)
    workers[1].kill()
    quiet(sender, *workers)
    asked = endpoint.asked()
    assert sum(asked["SendMessageBatch"].values()) <= MANY // 10 + 20
    endpoint.cluster.wait_served()
