"""SQS clients of the tests, and what they do often."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.integration.cluster import Worker
from tests.kafka import unique

REGION = "eu-central-1"


def client_of(
    url: str, key: tuple[str, str] = ("x", "x"), retries: int = 1, connect_timeout: int = 10, **values: Any
) -> Any:
    """A boto3 client of the worker at `url`."""
    config = Config(retries={"total_max_attempts": retries}, read_timeout=40, connect_timeout=connect_timeout)
    return boto3.client(
        "sqs",
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        config=config,
        **values,
    )


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
        fifo = attributes.get("FifoQueue") == "true"
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
        """Receive and delete until `count` messages came, or none does any more."""
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
def refused(code: str, exception: str | None = None, text: str = "") -> Iterator[None]:
    """The block raises an error of AWS's code, and of the exception class that boto3 has for it."""
    with pytest.raises(ClientError) as caught:
        yield
    assert caught.value.response["Error"]["Code"] == code, caught.value
    if exception is not None:
        assert type(caught.value).__name__ == exception, type(caught.value)
    assert text in str(caught.value), caught.value
