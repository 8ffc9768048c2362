"""SQS clients that are not ours, as processes: AWS CLI, Celery, sqs-consumer, a boto3 of the query protocol."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.worker import state as worker_state

from app.kafka.jars import default_cache_dir
from tests.integration.celery_app import VISIBILITY_S
from tests.integration.cluster import ROOT, Cluster, until
from tests.integration.sqs_client import Queue, client_of
from tests.kafka import unique
from tests.sdks.programs import CLIENTS, Client, environment

#: The last boto3 that speaks the query protocol, and its service model.
OLD_BOTO3 = ("boto3==1.28.80", "botocore==1.31.80")
NPM_PACKAGES = ("sqs-consumer@11.6.0", "@aws-sdk/client-sqs@3.1169.0")
INSTALL_S = 120.0
#: Id of a task that the Celery workers know as revoked.
REVOKED = "00000000-0000-4000-8000-000000000001"
MANY = 5000


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


def install(folder: Path, command: list[str]) -> Path:
    """Install something once, for all runs; skip where that can't be done."""
    marker = folder / "INSTALLED"
    if not marker.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{command[0]} can't install what the test needs: {error}")
        if done.returncode:
            pytest.skip(f"{command[0]} can't install what the test needs: {done.stderr[-300:]}")
        marker.touch()
    return folder


# -- AWS CLI


def aws(url: str, *arguments: str) -> Any:
    """The answer of a command of the AWS CLI."""
    done = subprocess.run(
        [sys.executable, "-m", "awscli", "--endpoint-url", url, "--output", "json", "sqs", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else None


def test_the_aws_cli_does_its_work(cluster: Cluster) -> None:
    url, name = cluster.workers[0].url, unique("cli")
    queue = aws(url, "create-queue", "--queue-name", name, "--attributes", "VisibilityTimeout=40")["QueueUrl"]
    attributes = '{"n":{"DataType":"Number","StringValue":"7"}}'
    sent = aws(url, "send-message", "--queue-url", queue, "--message-body", "hi", "--message-attributes", attributes)
    (message,) = aws(
        cluster.workers[1].url,
        *("receive-message", "--queue-url", queue, "--wait-time-seconds", "5"),
        *("--message-attribute-names", "All", "--message-system-attribute-names", "All"),
    )["Messages"]
    assert (message["Body"], message["MessageId"]) == ("hi", sent["MessageId"])
    assert message["MessageAttributes"]["n"]["StringValue"] == "7"
    aws(url, "delete-message", "--queue-url", queue, "--receipt-handle", message["ReceiptHandle"])
    assert aws(url, "get-queue-attributes", "--queue-url", queue, "--attribute-names", "VisibilityTimeout") == {
        "Attributes": {"VisibilityTimeout": "40"}
    }
    assert queue in aws(url, "list-queues", "--queue-name-prefix", name)["QueueUrls"]


# -- a boto3 that speaks the query protocol

CLIENT = """
import json, sys, time
import boto3
sqs = boto3.client("sqs", endpoint_url=sys.argv[1])
assert sqs.meta.service_model.protocol == sys.argv[3], boto3.__version__
url = sqs.create_queue(QueueName=sys.argv[2], Attributes={"VisibilityTimeout": "20"}, tags={"a": "b"})["QueueUrl"]
attributes = {
    "n": {"DataType": "Number", "StringValue": "1"},
    "b": {"DataType": "Binary", "BinaryValue": b"\\x00\\xff"},
}
trace = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1"}}
body = "h\\u00e9 <&> \\r\\n \\U0001f600"
sent = sqs.send_message(QueueUrl=url, MessageBody=body, MessageAttributes=attributes, MessageSystemAttributes=trace)
(message,) = sqs.receive_message(
    QueueUrl=url, WaitTimeSeconds=5, AttributeNames=["All"], MessageAttributeNames=["All"])["Messages"]
assert message["Body"] == body, message
assert message["MessageAttributes"] == attributes, message
assert message["Attributes"]["AWSTraceHeader"] == "Root=1"
assert message["MessageId"] == sent["MessageId"]
assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=15)
sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
batch = sqs.send_message_batch(QueueUrl=url, Entries=[{"Id": str(i), "MessageBody": str(i)} for i in range(5)] + [
    {"Id": "bad", "MessageBody": "x", "DelaySeconds": 901}])
assert len(batch["Successful"]) == 5 and batch["Failed"][0]["Code"] == "InvalidParameterValue", batch
got = []
while len(got) < 5:
    got += sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=5)["Messages"]
done = sqs.delete_message_batch(
    QueueUrl=url, Entries=[{"Id": str(i), "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(got)])
assert len(done["Successful"]) == 5
assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"a": "b"}
sqs.untag_queue(QueueUrl=url, TagKeys=["a"])
sqs.tag_queue(QueueUrl=url, Tags={"c": "d"})
assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"c": "d"}
sqs.set_queue_attributes(QueueUrl=url, Attributes={"DelaySeconds": "3"})
assert sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["DelaySeconds"])["Attributes"] == {"DelaySeconds": "3"}
sqs.add_permission(QueueUrl=url, Label="l", AWSAccountIds=["123456789012"], Actions=["SendMessage"])
sqs.remove_permission(QueueUrl=url, Label="l")
assert url in sqs.list_queues(QueueNamePrefix=sys.argv[2])["QueueUrls"]
dead = sqs.create_queue(QueueName=sys.argv[2] + "-dead")["QueueUrl"]
arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
sqs.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy, "DelaySeconds": "0"})
assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [url]
sqs.send_message(QueueUrl=url, MessageBody="to be moved")
(message,) = sqs.receive_message(QueueUrl=url, WaitTimeSeconds=5)["Messages"]
changed = sqs.change_message_visibility_batch(QueueUrl=url, Entries=[
    {"Id": "a", "ReceiptHandle": message["ReceiptHandle"], "VisibilityTimeout": 0},
    {"Id": "b", "ReceiptHandle": "x", "VisibilityTimeout": 0}])
assert [e["Id"] for e in changed["Successful"]] == ["a"] and [e["Id"] for e in changed["Failed"]] == ["b"], changed
count = "ApproximateNumberOfMessages"
while sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["All"])["Attributes"][count] != "1":
    sqs.receive_message(QueueUrl=url)
    time.sleep(0.1)
handle = sqs.start_message_move_task(SourceArn=arn)["TaskHandle"]
while (task := sqs.list_message_move_tasks(SourceArn=arn)["Results"][0])["Status"] == "RUNNING":
    time.sleep(0.1)
assert (task["Status"], task["ApproximateNumberOfMessagesMoved"]) == ("COMPLETED", 1), task
try:
    sqs.cancel_message_move_task(TaskHandle=handle)
except sqs.exceptions.UnsupportedOperation:
    pass
else:
    raise AssertionError("the task was over")
sqs.purge_queue(QueueUrl=url)
sqs.delete_queue(QueueUrl=dead)
for call, error in (
    (lambda: sqs.get_queue_url(QueueName="nothing-of-this-name"), sqs.exceptions.QueueDoesNotExist),
    (lambda: sqs.create_queue(QueueName=sys.argv[2], Attributes={"DelaySeconds": "4"}), sqs.exceptions.QueueNameExists),
    (lambda: sqs.delete_message(QueueUrl=url, ReceiptHandle="x"), sqs.exceptions.ReceiptHandleIsInvalid),
    (lambda: sqs.send_message(QueueUrl=url, MessageBody="\\x01"), sqs.exceptions.InvalidMessageContents),
    (lambda: sqs.delete_message_batch(QueueUrl=url, Entries=[]), sqs.exceptions.EmptyBatchRequest),
):
    try:
        call()
    except error:
        pass
    else:
        raise AssertionError(error)
print("fine")
"""


RESOURCE = """
import sys
import boto3
sqs = boto3.resource("sqs", endpoint_url=sys.argv[1])
queue = sqs.create_queue(QueueName=sys.argv[2], Attributes={"VisibilityTimeout": "20"})
assert sqs.get_queue_by_name(QueueName=sys.argv[2]).url == queue.url
queue.send_messages(Entries=[{"Id": str(i), "MessageBody": str(i)} for i in range(5)])
got = []
while len(got) < 5:
    for message in queue.receive_messages(MaxNumberOfMessages=10, WaitTimeSeconds=5):
        got.append(message.body)
        message.delete()
assert sorted(got) == list("01234"), got
assert queue.receive_messages() == []
queue.delete()
print("fine")
"""


@pytest.mark.parametrize("script", [CLIENT, RESOURCE], ids=["client", "resource"])
def test_boto3_of_today_does_its_work(cluster: Cluster, script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, cluster.workers[1].url, unique("new"), "json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_a_client_of_the_query_protocol_does_its_work(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", ".", *OLD_BOTO3]
    folder = install(default_cache_dir() / "tests" / OLD_BOTO3[1], command)
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, cluster.workers[0].url, unique("old"), "query"],
        env=environment(PYTHONPATH=str(folder)),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout.strip() == "fine", done.stderr


# -- sqs-consumer on the AWS SDK for JavaScript


def test_sqs_consumer_does_its_work(cluster: Cluster) -> None:
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", *NPM_PACKAGES]
    folder = install(default_cache_dir() / "tests" / "sqs-consumer-11.6.0", command)
    script = shutil.copy(Path(__file__).with_name("sqs_consumer.mjs"), folder)
    queue = Queue.make(cluster.workers[0], VisibilityTimeout=20)
    queue.send("fails-once")
    for i in range(14):
        queue.send(f"{i}")
    done = subprocess.run(
        ["node", script, cluster.workers[1].url, queue.url, "20"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert sorted(body for body, _, _ in lines) == sorted(
        ["fails-once", *(f"{i}" for i in range(14)), *(f"from-js-{i}" for i in range(5))]
    )
    assert {attempt for body, attempt, _ in lines if body == "fails-once"} == {"2"}
    assert {number for body, _, number in lines if body == "from-js-3"} == {"3"}
    queue.wait_for(visible=0, in_flight=0)


# -- kombu


def test_a_simple_queue_of_kombu_gives_what_was_put_into_it(cluster: Cluster, tmp_path: Path) -> None:
    queue = Queue.make(cluster.workers[0])
    kombu = Client("kombu", CLIENTS["kombu"](), tmp_path)
    try:
        sender = kombu.start(cluster.workers[1].url, queue.url, "send", 20)
        worker = kombu.start(cluster.workers[0].url, queue.url, "work", 20)
        assert sorted(worker.end_said("got")) == sorted(sender.end_said("sent"))
        queue.wait_for(visible=0, in_flight=0)
        assert sender.errors == worker.errors == ""
    finally:
        kombu.stop()


# -- Celery


class CeleryApp:
    """The application of `celery_app`, with worker processes."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.notes = folder / "notes"
        self.notes.touch()
        self._folder = folder
        self._url = cluster.workers[0].url
        address = self._url.removeprefix("http://")
        self.environment = environment(
            TEST_BROKER_URL=f"sqs://x:x@{address}//",
            TEST_QUEUE_PREFIX=unique("c") + "-",
            TEST_NOTES=str(self.notes),
        )
        self.workers: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        name = f"worker-{len(self.workers)}"
        log = (self._folder / f"{name}.log").open("wb")
        command = [sys.executable, "-m", "celery", "-A", "tests.integration.celery_app", "worker", "--pool", "solo"]
        state = self._folder / name
        revoked = worker_state.Persistent(worker_state, str(state))
        worker_state.revoked.update([REVOKED])
        revoked.save()
        with log:
            worker = subprocess.Popen(
                [*command, "-n", unique("w"), "--loglevel", "INFO", "--statedb", str(state)],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.workers.append(worker)
        return worker

    def begin(self, code: str) -> subprocess.Popen[bytes]:
        """Begin to run a statement in which `tasks` is the module of the application."""
        command = [sys.executable, "-c", f"import tests.integration.celery_app as tasks; {code}"]
        return subprocess.Popen(command, cwd=ROOT, env=self.environment)

    def call(self, code: str) -> None:
        """Run such a statement."""
        assert self.begin(code).wait(60) == 0

    def noted(self) -> list[tuple[str, int, float]]:
        lines = [line.split() for line in self.notes.read_text().splitlines()]
        return [(what, int(pid), float(at)) for what, pid, at in lines]

    def logged(self) -> list[str]:
        return [line for file in self._folder.glob("*.log") for line in file.read_text().splitlines()]

    def warnings(self) -> list[str]:
        """The warnings of the workers, without Celery's own at the start."""
        return [line for line in self.logged() if re.search(r": (WARNING|ERROR|CRITICAL)/", line)]

    def what(self) -> list[str]:
        return [what for what, _, _ in self.noted()]

    def queue(self) -> Queue:
        sqs = client_of(self._url, region="us-east-1")
        name = self.environment["TEST_QUEUE_PREFIX"] + "celery"
        return Queue(sqs, sqs.get_queue_url(QueueName=name)["QueueUrl"])

    def stop(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


@pytest.fixture(scope="module")
def celery(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryApp]:
    """Two Celery workers that are at work."""
    app = CeleryApp(cluster, tmp_path_factory.mktemp("celery"))
    try:
        for _ in range(2):
            app.start()
        app.call("[tasks.note.delay(i) for i in range(20)]")
        until(lambda: len(app.what()) >= 20, "the first tasks are done", 60)
        yield app
    finally:
        app.stop()


def test_celery_does_each_task_once(celery: CeleryApp) -> None:
    done = [what for what in celery.what() if what.startswith("note-")]
    assert sorted(done) == sorted(f"note-{i}" for i in range(20))


@pytest.mark.slow
def test_an_eta_longer_than_the_visibility_timeout_runs_once(celery: CeleryApp) -> None:
    seconds = VISIBILITY_S + 3
    celery.call(f"import time; open(tasks.os.environ['TEST_NOTES'] + '-eta', 'w').write(str(time.time())); "
                f"tasks.note.apply_async((100,), countdown={seconds})")  # fmt: skip
    until(lambda: "note-100" in celery.what(), "the task with the ETA is done", 40)
    asked = float(Path(f"{celery.notes}-eta").read_text())
    with pytest.raises(AssertionError):
        until(lambda: celery.what().count("note-100") > 1, "it is done again", VISIBILITY_S + 2)
    ((_, _, at),) = [one for one in celery.noted() if one[0] == "note-100"]
    assert at - asked > seconds - 0.5


def test_a_task_that_asks_for_a_retry_is_run_again_and_once(celery: CeleryApp) -> None:
    celery.call("tasks.fails_twice.delay(1)")
    until(lambda: "try-1-2" in celery.what(), "the third try", 40)
    assert [what for what in celery.what() if what.startswith("try-1-")] == ["try-1-0", "try-1-1", "try-1-2"]


def test_a_revoked_task_is_taken_from_the_queue_and_not_run(celery: CeleryApp) -> None:
    celery.call(f"tasks.note.apply_async((200,), task_id={REVOKED!r})")
    until(lambda: any("Discarding revoked task" in line for line in celery.logged()), "it is discarded", 40)
    celery.queue().wait_for(visible=0, in_flight=0, delayed=0)
    assert "note-200" not in celery.what()


def test_celery_workers_have_nothing_to_warn_of(celery: CeleryApp) -> None:
    assert celery.warnings() == []


def test_the_task_of_a_killed_celery_worker_is_run_again(celery: CeleryApp) -> None:
    celery.call("tasks.slow.delay(1, 3)")
    until(lambda: "begin-1" in celery.what(), "the task has begun", 40)
    (pid,) = [pid for what, pid, _ in celery.noted() if what == "begin-1"]
    os.killpg(pid, signal.SIGKILL)
    next(worker for worker in celery.workers if worker.pid == pid).wait()
    until(lambda: "end-1" in celery.what(), "another worker has done it", 40)
    assert {p for what, p, _ in celery.noted() if what == "end-1"} != {pid}


@pytest.mark.slow
def test_no_task_of_thousands_is_lost_when_a_celery_worker_is_killed(celery: CeleryApp) -> None:
    celery.start()
    sender = celery.begin(f"[tasks.note.delay(1000 + i) for i in range({MANY})]")
    done = lambda: {what for what in celery.what() if re.fullmatch(r"note-\d{4}", what)}  # noqa: E731
    until(lambda: len(done()) > MANY // 4, "a quarter is done", 120)
    running = [worker for worker in celery.workers if worker.poll() is None]
    os.killpg(running[0].pid, signal.SIGKILL)
    running[0].wait()
    assert len(done()) < MANY, "it was to be killed while there is work"
    assert sender.wait(240) == 0
    until(lambda: len(done()) == MANY, "all are done", 120)
    celery.queue().wait_for(visible=0, in_flight=0, delayed=0)
    assert celery.warnings() == []
