"""No request gets a 5xx, and none makes a message get lost."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote, urlsplit

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.cluster import Cluster
from tests.integration.json_client import Client
from tests.kafka import unique

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 6
NEGATIVE = ("/v1/queues/{queue}/messages", "/v1/ack")

SLOW = [
    HealthCheck.too_slow,
    HealthCheck.function_scoped_fixture,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
]


def test_the_service_does_what_its_document_says(shared_cluster: Cluster) -> None:
    url = shared_cluster.workers[0].url
    api = schemathesis.openapi.from_dict(Client(url).request("GET", "/v1/openapi.json").body)
    tried = 0
    for result in api.get_all_operations():
        operation = result.ok()
        # negative examples take long to find; the tests below make other invalid requests
        modes = [GenerationMode.POSITIVE]
        if operation.path in NEGATIVE:
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            strategy = operation.as_strategy(generation_mode=mode)

            @given(case=strategy)
            @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=SLOW, database=None)
            def check(case: Any) -> None:
                if isinstance(case.body, dict) and "wait_ms" in case.body:
                    case.body["wait_ms"] = 1
                case.call_and_validate(base_url=url, checks=CHECKS)

            check()
            tried += 1
    assert tried > 20


PATHS = (
    "/v1/ack /v1/extend /v1/release /v1/reject /v1/queues/fuzz/messages /v1/queues/fuzz/purge /v1/queues/fuzz "
    "/v1/queues /v1/state/0 /v1/messages/0/0 /v1/stats /v1/peer/watch / /metrics"
)
paths = st.sampled_from(PATHS.split()) | st.text(max_size=30).map(
    lambda text: f"/v1/queues/{quote(text, safe='')}/messages"
)
bodies = st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["messages", "receipts", "payload", "delay_ms", "key", "headers"]), inner)
    ),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())


@given(
    method=st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "BREW"]),
    path=paths,
    body=bodies,
    kind=st.sampled_from(["application/json", "application/msgpack", "text/plain", "x", ""]),
    accept=st.sampled_from(["application/json", "application/msgpack", "*/*", "", "\x7f"]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
def test_no_request_makes_the_service_fail(
    shared_cluster: Cluster, method: str, path: str, body: bytes, kind: str, accept: str
) -> None:
    parts = urlsplit(shared_cluster.workers[1].url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request(method, path, body, {"Content-Type": kind, "Accept": accept})
        response = connection.getresponse()
        response.read()
        assert response.status < 500, (response.status, method, path, body)
    finally:
        connection.close()


@given(junk=st.lists(st.text(max_size=80), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
def test_junk_among_receipts_harms_no_message(shared_cluster: Cluster, junk: list[str]) -> None:
    client, queue = Client(shared_cluster.workers[2].url), unique("junk")
    client.send(queue, b"kept", b"acked")
    got: list[Any] = []
    while len(got) < 2:
        got += client.receive(queue, 2, 3000)
    got.sort(key=lambda m: m["payload"])
    results = client.ack(*junk, got[0], *junk)
    assert [i for i, r in enumerate(results) if "ok" in r] == [len(junk)]
    assert client.release(got[1]) == [{"ok": True}]
    (again,) = client.receive(queue, 5, 3000)
    assert again["payload"] == b"kept"
    client.ack(again)
    client.close()
