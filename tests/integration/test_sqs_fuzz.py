"""Random requests to SQS, in both protocols: never a 5xx, and accepted messages are received until they are deleted."""

from __future__ import annotations

import http.client
import json
import re
import time
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest
from botocore.model import ListShape, MapShape, Shape, StructureShape
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.sqs.model import actions
from tests.integration.cluster import Cluster
from tests.integration.sqs_client import Queue

NAMES = sorted(actions())
#: Actions whose valid calls would remove what the test looks for, or make ever more queues.
HARMFUL = {"DeleteQueue", "PurgeQueue", "CreateQueue", "SetQueueAttributes", "StartMessageMoveTask"}
TAME = [n for n in NAMES if n not in HARMFUL] + 3 * ["ReceiveMessage", "SendMessage", "SendMessageBatch"]

#: Stands for the receipt of a message that is in flight.
RECEIPT = "receipt"
texts = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [RECEIPT, "", "0", "-1", "1", "99999999999999999999", "All", "true", "{}", "[]", "null", "é\u0000", "\ud7ff"]
    ),
)
numbers = st.one_of(st.integers(-(2**70), 2**70), st.sampled_from([0, 1, 10, 20, 43200]))
anything: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)


def _id_of(entry: Any) -> Any:
    return str(entry.get("Id", entry)) if isinstance(entry, dict) else repr(entry)


def values_of(shape: Shape, queue: Queue) -> st.SearchStrategy[Any]:
    """Values that are nearly valid for a shape."""
    good: st.SearchStrategy[Any]
    if isinstance(shape, StructureShape):
        members = {name: values_of(member, queue) for name, member in shape.members.items()}
        if "QueueUrl" in members:
            members["QueueUrl"] = st.sampled_from([*[queue.url] * 10, queue.url + "x", "", "/", "%"])
        if "ReceiptHandle" in members:
            members["ReceiptHandle"] = st.one_of(st.just(RECEIPT), texts)
        if "Id" in members:
            members["Id"] = st.one_of(st.sampled_from("abcdef"), texts)
        required = {name: members[name] for name in shape.required_members}
        optional = {name: value for name, value in members.items() if name not in required}
        good = st.one_of(st.fixed_dictionaries(required), st.fixed_dictionaries(required, optional=optional))
    elif isinstance(shape, ListShape):
        good = st.lists(values_of(shape.member, queue), max_size=12, unique_by=_id_of)
    elif isinstance(shape, MapShape):
        keys: st.SearchStrategy[str] = texts
        if getattr(shape.key, "enum", None):
            keys = st.one_of(st.sampled_from(sorted(shape.key.enum)), texts)
        good = st.dictionaries(keys, values_of(shape.value, queue), max_size=12)
    elif shape.type_name in ("integer", "long"):
        good = numbers
    elif shape.type_name == "boolean":
        good = st.booleans()
    else:
        good = st.one_of(st.sampled_from(sorted(shape.enum)), texts) if getattr(shape, "enum", None) else texts
    return st.integers(0, 19).flatmap(lambda n: anything if n == 0 else good)


def flat(value: Any, name: str = "") -> dict[str, str]:
    """Parameters of the query protocol, with names as they come."""
    if isinstance(value, dict):
        found: dict[str, str] = {}
        for i, (key, one) in enumerate(value.items(), 1):
            found |= flat(one, f"{name}.{key}" if name else key)
            found |= {f"{name}.{i}.Name": key} | flat(one, f"{name}.{i}.Value") if name else {}
        return found
    if isinstance(value, list):
        singular = {"Entries": "SendMessageBatchRequestEntry"}.get(name, name.removesuffix("s"))
        return {k: v for i, one in enumerate(value, 1) for k, v in flat(one, f"{singular}.{i}").items()}
    return {name: f"{value}"}


class Wire:
    """A connection that is made again when it was closed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)

    def post(self, body: bytes, path: str = "/", **headers: str) -> tuple[int, bytes]:
        try:
            self._connection.request("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, OSError):
            self._connection.close()
            raise


class Known:
    """A queue, and what answers have said of its messages."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.wire = Wire(queue.sqs.meta.endpoint_url)
        self.sent: set[str] = set()
        self.deleted: set[str] = set()
        self.receipts: dict[str, str] = {}  # -> id of the message

    def tamed(self, value: Any) -> Any:
        """The request, with real receipts, and without waits of minutes."""
        if isinstance(value, dict):
            known = {"WaitTimeSeconds": 0, "DelaySeconds": 1, "VisibilityTimeout": 1}
            return {
                name: min(one, known[name])
                if name in known and isinstance(one, int) and one <= 43_200
                else self.tamed(one)
                for name, one in value.items()
            }
        if isinstance(value, list):
            return [self.tamed(one) for one in value]
        if value == RECEIPT and self.receipts:
            return next(reversed(self.receipts))
        return value

    def note(self, name: str, parameters: Any, answer: bytes) -> None:
        """A request was answered well."""
        if name == "ReceiveMessage":
            for ours, receipt in _found(answer, "MessageId", "ReceiptHandle"):
                self.receipts[receipt] = ours
        elif name in ("SendMessage", "SendMessageBatch"):
            self.sent |= {ours for (ours,) in _found(answer, "MessageId")}
        elif name.startswith("DeleteMessage"):
            # some entries of a batch may have been refused: their messages may come again
            self.deleted |= {ours for receipt, ours in self.receipts.items() if receipt in json.dumps(parameters)}


def _found(answer: bytes, *names: str) -> list[tuple[str, ...]]:
    """The values of these names, in JSON or XML."""
    text = answer.decode()
    columns = [re.findall(rf'(?:"{name}":"|<{name}>)([^"<]+)', text) for name in names]
    return list(zip(*columns, strict=True))


@pytest.fixture(scope="module")
def known(shared_cluster: Cluster) -> Known:
    known = Known(Queue.make(shared_cluster.workers[0], VisibilityTimeout=1))
    known.sent.add(known.queue.send("still here")["MessageId"])
    return known


short = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)


@short
@given(data=st.data())
def test_no_json_request_is_answered_with_a_failure(data: Any, known: Known) -> None:
    name = data.draw(st.sampled_from(TAME))
    parameters = known.tamed(data.draw(values_of(actions()[name].input, known.queue)))
    body = json.dumps(parameters).encode()
    status, answer = known.wire.post(body, X_Amz_Target=f"AmazonSQS.{name}", Content_Type="application/x-amz-json-1.0")
    assert status < 500, (name, body, answer)
    if status != 200:
        assert json.loads(answer)["__type"], (name, body, answer)
    else:
        known.note(name, parameters, answer)


@short
@given(data=st.data())
def test_no_query_request_is_answered_with_a_failure(data: Any, known: Known) -> None:
    name = data.draw(st.sampled_from(TAME))
    parameters = flat(known.tamed(data.draw(values_of(actions()[name].input, known.queue))))
    parameters.update(data.draw(st.dictionaries(texts, texts, max_size=3)))
    body = urlencode({**parameters, "Action": name}, errors="replace").encode()
    own = urlsplit(known.queue.url).path
    path = data.draw(st.sampled_from(["/", own, "/x/y", "/0/" + quote("é", safe="")]))
    status, answer = known.wire.post(body, path, Content_Type="application/x-www-form-urlencoded")
    assert status < 500, (name, body, answer)
    assert answer.startswith(b"<?xml"), answer
    if status == 200:
        known.note(name, parameters, answer)


@short
@given(
    body=st.binary(max_size=200),
    target=st.sampled_from(
        ["", "AmazonSQS.SendMessage", "AmazonSQS.ReceiveMessage", "AmazonSQS.", "x", "AmazonSQS.Xx"]
    ),
    kind=st.sampled_from(["application/x-amz-json-1.0", "application/x-www-form-urlencoded", "text/plain", "x"]),
)
def test_no_bytes_are_answered_with_a_failure(body: bytes, target: str, kind: str, known: Known) -> None:
    headers = {"X_Amz_Target": target} if target else {}
    status, answer = known.wire.post(body, Content_Type=kind, **headers)
    assert 400 <= status < 500, answer


@settings(short, max_examples=50)
@given(data=st.data())
def test_no_request_about_a_queue_that_can_not_be_is_answered_with_a_failure(data: Any, known: Known) -> None:
    name = data.draw(st.sampled_from(sorted(HARMFUL)))
    parameters = data.draw(values_of(actions()[name].input, known.queue))
    if isinstance(parameters, dict):
        parameters["QueueUrl"] = parameters["QueueName"] = "no queue has such a name\u0001"
    status, answer = known.wire.post(
        json.dumps(parameters).encode(), X_Amz_Target=f"AmazonSQS.{name}", Content_Type="application/x-amz-json-1.0"
    )
    assert 400 <= status < 500, answer


def test_all_that_was_accepted_is_there_until_it_is_deleted(known: Known) -> None:
    print(f"accepted: {len(known.sent)}, received: {len(known.receipts)} times, deleted: {len(known.deleted)}")
    assert len(known.sent) > 1
    found: set[str] = set()
    deadline = time.monotonic() + 60
    while not known.sent - known.deleted <= found and time.monotonic() < deadline:
        messages = known.queue.receive(10, wait_s=2, VisibilityTimeout=60)
        found |= {m["MessageId"] for m in messages}
        known.queue.delete(*messages)
    assert known.sent - known.deleted - found == set()
    assert known.queue.receive(10, wait_s=2) == []
