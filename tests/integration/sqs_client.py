"""SQS clients of the tests, and their frequent calls."""

from __future__ import annotations

import html
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlencode

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.integration.cluster import Worker
from tests.kafka import unique

REGION = "eu-central-1"


def client_of(
    url: str,
    key: tuple[str, str] = ("x", "x"),
    retries: int = 1,
    connect_timeout: int = 10,
    read_timeout: float = 40,
    region: str = REGION,
    **values: Any,
) -> Any:
    """A boto3 client of the worker at `url`."""
    config = Config(retries={"total_max_attempts": retries}, read_timeout=read_timeout, connect_timeout=connect_timeout)
    return boto3.client(
        "sqs",
        endpoint_url=url,
        region_name=region,
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        config=config,
        **values,
    )


def sts_client_of(url: str, key: tuple[str, str] = ("x", "x")) -> Any:
    """A boto3 client of the Security Token Service, at the same address."""
    return boto3.client(
        "sts", endpoint_url=url, region_name=REGION, aws_access_key_id=key[0], aws_secret_access_key=key[1]
    )


class Answer(NamedTuple):
    """Of the query protocol."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    def told(self, name: str) -> str:
        """What the first element of a name says."""
        found = re.search(f"<{name}>(.*?)</{name}>", self.text, re.DOTALL)
        assert found is not None, f"no {name} in {self.text}"
        return html.unescape(found[1])

    @property
    def error(self) -> tuple[int, str, str]:
        """Status, code and message."""
        return self.status, self.told("Code"), self.told("Message")


def ask(
    url: str,
    action: str = "",
    values: dict[str, Any] | None = None,
    method: str = "POST",
    accept: str | None = None,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Answer:
    """A request of the query protocol, not signed. `values`: parameters with dots in their names.

    A `GET` has a header that no link can add: without it, a worker without keys refuses it.
    """
    form = urlencode({**({"Action": action} if action else {}), **(values or {}), **more})
    sent = {**(headers or {}), **({"Accept": accept} if accept else {})}
    if method == "GET":
        sent.setdefault("Authorization", "AWS4-HMAC-SHA256")
        request = urllib.request.Request(f"{url}?{form}" if form else url, headers=sent)
    else:
        request = urllib.request.Request(url, form.encode(), sent)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Answer(answer.status, answer.read().decode())
    except urllib.error.HTTPError as exc:
        return Answer(exc.code, exc.read().decode())


class Queue:
    """A queue, through one client."""

    def __init__(self, sqs: Any, url: str) -> None:
        self.sqs = sqs
        self.url = url
        self.name = url.rpartition("/")[2]

    @classmethod
    def make(cls, worker: Worker | str, name: str | None = None, **attributes: Any) -> Queue:
        """A new queue, through a client of its own."""
        sqs = client_of(worker if isinstance(worker, str) else worker.url)
        fifo = str(attributes.get("FifoQueue")) in ("true", "True")
        name = name or unique("q") + (".fifo" if fifo else "")
        given = {key: str(value) for key, value in attributes.items()}
        return cls(sqs, sqs.create_queue(QueueName=name, Attributes=given)["QueueUrl"])

    @property
    def arn(self) -> str:
        return self.attribute("QueueArn")

    def at(self, worker: Worker) -> Queue:
        """The same queue through another worker."""
        sqs = client_of(worker.url)
        return Queue(sqs, sqs.get_queue_url(QueueName=self.name)["QueueUrl"])

    def ask(self, action: str, values: dict[str, Any] | None = None, **more: Any) -> Answer:
        """A request of the query protocol to the queue."""
        return ask(self.url, action, values, **more)

    def send(self, body: str = "body", **values: Any) -> dict[str, Any]:
        return self.sqs.send_message(QueueUrl=self.url, MessageBody=body, **values)  # type: ignore[no-any-return]

    def receive(self, limit: int = 1, wait_s: int = 5, **values: Any) -> list[Any]:
        values.setdefault("MessageSystemAttributeNames", ["All"])
        values.setdefault("MessageAttributeNames", ["All"])
        answer = self.sqs.receive_message(
            QueueUrl=self.url, MaxNumberOfMessages=limit, WaitTimeSeconds=wait_s, **values
        )
        return answer.get("Messages", [])  # type: ignore[no-any-return]

    def delete(self, *messages: Any) -> None:
        for message in messages:
            self.sqs.delete_message(QueueUrl=self.url, ReceiptHandle=message["ReceiptHandle"])

    def drain(self, count: int, wait_s: int = 3) -> list[Any]:
        """Receive and delete until `count` messages came, or no more come."""
        got: list[Any] = []
        while len(got) < count and (messages := self.receive(10, wait_s)):
            self.delete(*messages)
            got += messages
        return got

    def change(self, message: Any, visibility_s: int) -> None:
        self.sqs.change_message_visibility(
            QueueUrl=self.url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=visibility_s
        )

    def attributes(self, *names: str) -> dict[str, str]:
        answer = self.sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=list(names) or ["All"])
        return answer.get("Attributes", {})  # type: ignore[no-any-return]

    def attribute(self, name: str) -> str:
        return self.attributes(name)[name]

    def set(self, **attributes: Any) -> None:
        self.sqs.set_queue_attributes(QueueUrl=self.url, Attributes={k: str(v) for k, v in attributes.items()})

    def wait_for(self, timeout_s: float = 15.0, **counts: int) -> None:
        """Wait until the approximate counts are so: visible, in_flight, delayed."""
        names = {
            "visible": "ApproximateNumberOfMessages",
            "in_flight": "ApproximateNumberOfMessagesNotVisible",
            "delayed": "ApproximateNumberOfMessagesDelayed",
        }
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.attributes(*(names[name] for name in counts))
            if all(int(found[names[name]]) == count for name, count in counts.items()):
                return
            assert time.monotonic() < deadline, f"{counts} wanted, {found} found"
            time.sleep(0.1)


@contextmanager
def refused(code: str, exception: str | None = None, text: str = "", status: int | None = None) -> Iterator[None]:
    """The block raises an error of AWS's code and status, and of the exception class that boto3 has for it."""
    with pytest.raises(ClientError) as caught:
        yield
    assert caught.value.response["Error"]["Code"] == code, caught.value
    if exception is not None:
        assert type(caught.value).__name__ == exception, type(caught.value)
    assert text in str(caught.value), caught.value
    if status is not None:
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status, caught.value
