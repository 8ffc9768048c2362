"""A second request for a path gets the same answer as the first one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.routing import PATHS_MAX, Routing
from tests.unit.http_lab import Http, head_of, keep_catalog, run, serving

REQUESTS = [
    ("GET", "/v1/queues/orders", b""),
    ("GET", "/v1/queues/none", b""),
    ("GET", "/v1/queues/or%64ers", b""),
    ("GET", "/v1/queues?limit=1", b""),
    ("PATCH", "/v1/queues/orders", b"[]"),
    ("POST", "/v1/ack", b'{"receipts": ["x"]}'),
    ("POST", "/v1/ack", b"no JSON"),
    ("DELETE", "/v1/ack", b""),
    ("GET", "/nowhere", b""),
    ("POST", "/", b"Action=GetQueueUrl&QueueName=orders"),
    ("POST", "/000000000000/orders", b"Action=Nothing"),
    ("GET", "/health/live", b""),
    ("HEAD", "/health/live", b""),
]


def routing_of(http: Http) -> Routing:
    server = http.app.web._runner.server
    assert server is not None
    found = server.request_handler
    assert isinstance(found, Routing)
    return found


async def told(http: Http, method: str, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, str], bytes]:
    headers = {"Content_Type": "application/json" if path.startswith("/v1") else "application/x-www-form-urlencoded"}
    status, got, content = await http.ask(head_of(method, path, len(body), Connection="close", **headers) + body)
    got = {name: value for name, value in got.items() if name not in ("date", "x-amzn-requestid")}
    return status, got, re.sub(rb"<RequestId>.*?</RequestId>", b"", content)


@pytest.mark.parametrize("keys", [None, "a-key-that-nobody-guesses=send:other"])
def test_the_second_answer_is_the_first_one(tmp_path: Path, keys: str | None) -> None:
    async def check() -> None:
        async with serving(tmp_path, keys=keys) as http:
            keep_catalog(http)
            http.app.catalog.auto.add("orders")
            for request in REQUESTS:
                if request[0] == "HEAD":
                    continue
                first = await told(http, *request)
                before = routing_of(http).known
                assert await told(http, *request) == first, request
                assert routing_of(http).known == before, request

    run(check)


def test_each_path_has_its_own_variables(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path) as http:
            keep_catalog(http)
            http.app.catalog.auto.update(("a", "b"))
            for queue in "abab":
                _, _, content = await told(http, "GET", f"/v1/queues/{queue}", b"")
                assert content.startswith(f'{{"name":"{queue}"'.encode()), content

    run(check)


def test_paths_of_strangers_fill_no_memory(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path) as http:
            keep_catalog(http)
            reader, writer = await http.send(b"")
            for number in range(PATHS_MAX + 50):
                writer.write(head_of("GET", f"/v1/queues/q{number}"))
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                assert length is not None
                await reader.readexactly(int(length[1]))
            assert routing_of(http).known <= PATHS_MAX
            before = routing_of(http).known
            for path in ("/v1/queues/" + "x" * 400, "/v1/queues/q?x=1", "/nowhere/at/all/here"):
                await told(http, "GET", path, b"")
            assert routing_of(http).known == before
            writer.close()

    run(check)
