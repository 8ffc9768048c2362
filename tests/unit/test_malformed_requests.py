"""Malformed requests get 4xx without a traceback, and can't forge lines of the log."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.logs import CleanRecord, clean_records
from marq.text import cleaned
from tests.unit.http_lab import Http, answer_of, run, serving

KEY = "a-key-of-enough-length"
AWS = "AWS4-HMAC-SHA256 Credential=AKID/20260101/us-east-1/sqs/aws4_request, SignedHeaders=host, Signature=00"
SEND = "/v1/queues/q/messages"


def attack(folder: Path, test: Callable[[Http], Awaitable[None]], keys: str | None) -> None:
    async def main() -> None:
        async with serving(folder, keys=keys) as http:
            await test(http)

    run(main)


@pytest.mark.parametrize("keys", [None, f"{KEY},AKID:{KEY}"], ids=["open", "keys"])
@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/v1/ack", {"Authorization": "Bearer \xff"}),
        ("POST", "/v1/ack", {"Authorization": "\xff\xfe"}),
        ("POST", "/v1/peer/watch", {"Marq-Peer": "\xff"}),
        ("GET", "/v1/queues", {"Host": "["}),
        ("GET", "/v1/queues", {"Host": "[::1"}),
        ("GET", "/v1/queues", {"Host": "\xff"}),
        ("GET", "/v1/queues", {"Host": "a]b:99999999999"}),
        ("POST", "/v1/ack", {"Origin": "http://["}),
        ("POST", "/v1/ack", {"Origin": "\xff://["}),
        ("POST", SEND, {"Content-Type": "\xff"}),
        ("POST", SEND, {"Content-Type": "application/json; charset=\xff"}),
        ("POST", SEND, {"Content-Type": "a" * 5000}),
        ("POST", SEND, {"Accept": "\xff", "Content-Type": "x"}),
        ("GET", "/v1/queues?limit=\xff", {}),
        ("GET", "/v1/queues?limit=%FF", {}),
        ("GET", "/v1/queues/%FF%FE", {}),
        ("PUT", "/v1/queues/%ED%A0%80", {"Content-Type": "text/plain"}),
        ("PUT", "/v1/queues/%00", {}),
        ("POST", "/v1/queues/%0A/messages", {}),
        ("POST", "/", {"X-Amz-Target": "\xff"}),
        ("POST", "/", {"X-Amz-Target": "AmazonSQS.\xff"}),
        ("POST", "/", {"X-Amz-Target": "AmazonSQS.SendMessage", "Authorization": "\xff"}),
        ("POST", "/", {"X-Amz-Target": "AmazonSQS.SendMessage", "Authorization": AWS, "X-Amz-Date": "\xff"}),
        (
            "POST",
            "/",
            {"X-Amz-Target": "AmazonSQS.SendMessage", "Authorization": AWS, "X-Amz-Date": "20269999T000000Z"},
        ),
        ("POST", "/?Action=%FF", {}),
        ("POST", "/1/%FF?Action=SendMessage", {"Content-Type": "application/x-www-form-urlencoded"}),
        ("GET", "/?X-Amz-Signature=\xff&X-Amz-Credential=%FF", {}),
        ("GET", "/?X-Amz-Signature=a&X-Amz-Expires=%D9%A1", {}),
        ("POST", "/v1/ack", {"Content-Encoding": "gzip"}),
        ("POST", "/v1/ack", {"Content-Length": "-1"}),
        ("POST", "/v1/ack", {"Content-Length": "9" * 30}),
        ("POST", "/v1/ack", {"Expect": "\xff"}),
        ("OPTIONS", "*", {}),
        ("TRACE", "/", {}),
        ("\xff", "/", {}),
        ("GET", "//[", {}),
        ("GET", "http://[", {}),
        ("GET", "/%", {}),
        ("CONNECT", "x:1", {}),
    ],
)
def test_a_request_that_makes_no_sense_is_the_clients_fault(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    keys: str | None,
    method: str,
    path: str,
    headers: dict[str, str],
) -> None:
    async def test(http: Http) -> None:
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        if "Host" not in headers:
            lines.append("Host: 127.0.0.1")
        if "Content-Length" not in headers:
            lines.append("Content-Length: 2")
        reader, writer = await http.send("\r\n".join((*lines, "", "{}")).encode("latin-1"))
        status, _, _ = await answer_of(reader)
        writer.close()
        assert 400 <= status < 500, status

    attack(tmp_path, test, keys)
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert not [record for record in caplog.records if not record.getMessage().isprintable()]


# -- the log


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines that are logged, as they are written."""
    before = logging.getLogRecordFactory()
    clean_records()
    written: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.extend(self.format(record).split("\n"))

    handler = Handler()
    handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
    logger = logging.getLogger("gateway")
    logger.addHandler(handler)
    yield written
    logger.removeHandler(handler)
    logging.setLogRecordFactory(before)


FORGED = "x\n[ERROR] all is lost\x1b[2J\u202egnp.exe\r\x9b"


def test_what_strangers_send_is_one_line_of_the_log(log: list[str]) -> None:
    logging.getLogger("gateway.routes").warning("%s failed", FORGED)
    logging.getLogger("gateway.routes").warning(FORGED)

    assert len(log) == 2
    assert all(line.isprintable() and line.startswith("[WARNING]") for line in log)


def test_no_line_of_a_traceback_looks_like_a_record(log: list[str]) -> None:
    try:
        try:
            raise ValueError(FORGED)
        except ValueError as exc:
            raise KeyError(FORGED) from exc
    except KeyError:
        logging.getLogger("gateway.routes").exception("failed: %s", FORGED)

    assert [line for line in log if not line.startswith("  ")] == log[:1]
    assert all(line.isprintable() for line in log)
    assert any("all is lost" in line for line in log)


def test_a_path_with_a_line_end_forges_nothing(tmp_path: Path, log: list[str]) -> None:
    async def test(http: Http) -> None:
        async def fail(request: object) -> None:
            raise RuntimeError("planted")

        http.app.operations.list_queues = fail  # type: ignore[method-assign, assignment]
        path = "/v1/queues?prefix=%0A[ERROR]%20forged"
        assert (await http.request("GET", path))[0] == 500
        http.app.operations.get_queue = lambda name: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        assert (await http.request("GET", "/v1/queues/%0A[ERROR]%20forged%1B"))[0] == 500

    attack(tmp_path, test, None)
    assert len([line for line in log if line.startswith("[ERROR]")]) == 2
    assert all(line.isprintable() for line in log)


def test_what_handlers_of_users_log_is_left_alone() -> None:
    record = CleanRecord("shop.handlers", logging.INFO, "f", 1, "two\nlines", (), None)

    assert record.getMessage() == "two\nlines"


@given(st.text())
def test_clean_text_is_one_line_and_stays_as_it_is(text: str) -> None:
    once = cleaned(text)
    assert len(once.splitlines()) <= 1
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in once)
    assert cleaned(once) == once
    once.encode()


def test_text_without_such_characters_is_not_touched() -> None:
    for text in ("orders.eu", "Größe €\u00a0ß 日本", "a\\nb"):
        assert cleaned(text) == text
