"""Bodies that are too large, too late or not allowed are refused before they cost anything."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import secrets
import tracemalloc
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlencode

import msgspec
import pytest
from aiohttp import StreamReader
from aiohttp.test_utils import make_mocked_request
from aiohttp.web_protocol import RequestHandler

from app import bodies
from gateway import connections
from gateway.routes import VALUES_MAX, Body
from gateway.schemas import RECEIPTS_BYTES, Send
from gateway.sqs import query_protocol
from gateway.sqs.errors import TEXT_MAX, SqsError
from gateway.sqs.model import actions
from marq.errors import BadValueError, TooLargeError
from marq.protocol.limits import BATCH_MAX
from tests.unit.http_lab import Http, answer_of, head_of, keep_catalog, run, serving, signed_request

KEY = "a-key-of-enough-length"
JSON = {"Authorization": f"Bearer {KEY}", "Content_Type": "application/json"}
SQS = {"X_Amz_Target": "AmazonSQS.SendMessage", "Content_Type": "application/x-amz-json-1.0"}
MIB = 1024 * 1024


def attack(folder: Path, test: Callable[[Http], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with serving(folder, **settings) as http:
            await test(http)

    run(main)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("method", "path", "limit"),
    [
        ("POST", "/v1/queues/q/messages", 32 * MIB),
        ("POST", "/v1/ack", 640 * 1024),
        ("POST", "/v1/extend", 640 * 1024),
        ("POST", "/v1/release", 640 * 1024),
        ("POST", "/v1/reject", 640 * 1024),
        ("POST", "/v1/queues/q/move", 128 * 1024),
        ("POST", "/v1/queues/q/receive", 64 * 1024),
        ("POST", "/v1/queues/q/purge", 64 * 1024),
        ("PUT", "/v1/queues/q", 64 * 1024),
        ("PATCH", "/v1/queues/q", 64 * 1024),
    ],
)
def test_a_body_of_json_that_is_too_large_is_refused_unread(tmp_path: Path, method: str, path: str, limit: int) -> None:
    async def test(http: Http) -> None:
        reader, _ = await http.send(head_of(method, path, limit + 1, **JSON))

        assert (await answer_of(reader))[0] == 413

    attack(tmp_path, test, keys=KEY)


@pytest.mark.parametrize(("limits", "limit"), [("strict", 4 * MIB), ("relaxed", 32 * MIB)])
def test_a_request_to_sqs_that_is_too_large_is_refused_unread(tmp_path: Path, limits: str, limit: int) -> None:
    async def test(http: Http) -> None:
        reader, _ = await http.send(head_of("POST", "/", limit + 1, **SQS))
        assert (await answer_of(reader))[0] == 413

        reader, _ = await http.send(head_of("POST", "/", limit, **SQS))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)

    attack(tmp_path, test, sqs_limits=limits)


@pytest.mark.parametrize("action", ["TagQueue", "ReceiveMessage", "DeleteMessageBatch", "NoSuchAction"])
def test_a_request_to_sqs_that_carries_no_messages_is_smaller(tmp_path: Path, action: str) -> None:
    async def test(http: Http) -> None:
        target = SQS | {"X_Amz_Target": f"AmazonSQS.{action}"}
        reader, _ = await http.send(head_of("POST", "/", 640 * 1024 + 1, **target))
        assert (await answer_of(reader))[0] == 413

    attack(tmp_path, test, sqs_limits="relaxed")


def test_the_largest_message_of_sqs_fits_into_a_request(tmp_path: Path) -> None:
    """A mebibyte of letters of two bytes, as SDKs write JSON, and as a form: three times as long."""
    largest = "é" * (MIB // 2)
    body = json.dumps({"QueueUrl": "u", "MessageBody": largest}).encode()
    form = urlencode({"Action": "SendMessage", "QueueUrl": "u", "MessageBody": largest}).encode()
    assert 2 * MIB < min(len(body), len(form)) <= max(len(body), len(form)) <= 4 * MIB

    async def test(http: Http) -> None:
        keep_catalog(http)
        # the whole body is read, so the error is that of the missing queue
        assert (await http.request("POST", "/", body, **SQS))[0] == 400
        kind = {"Content_Type": "application/x-www-form-urlencoded"}
        assert (await http.request("POST", "/", form, **kind))[0] in (400, 404)

    attack(tmp_path, test)


def test_a_body_without_a_length_has_the_same_limit(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        reader, writer = await http.send(head_of("POST", "/v1/ack", None, Transfer_Encoding="chunked", **JSON))
        for _ in range(11):
            writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")

        assert (await answer_of(reader))[0] == 413

    attack(tmp_path, test, keys=KEY)


def test_a_compressed_body_counts_as_what_it_unpacks_to(tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(64 * MIB))
    assert len(bomb) < 128 * 1024

    async def test(http: Http) -> None:
        status, _, _ = await http.request("POST", "/v1/queues/q/messages", bomb, Content_Encoding="gzip", **JSON)

        assert status == 413

    attack(tmp_path, test, keys=KEY)


def _without_head(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        (" GZip ", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", _without_head),
        ("identity", bytes),
    ],
    ids=["gzip", "in other letters", "deflate", "deflate without a head", "identity"],
)
def test_a_compressed_body_means_what_it_unpacks_to(
    tmp_path: Path, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    async def test(http: Http) -> None:
        # random, so that the compressed input has several pieces; and long, so that the output has several, too
        body = json.dumps({"receipts": [secrets.token_hex(30_000), " " * 300_000]}).encode()
        status, _, answer = await http.request("POST", "/v1/ack", pack(body), Content_Encoding=encoding, **JSON)

        assert status == 200
        assert len(json.loads(answer)["results"]) == 2
        assert http.app.room.used_bytes == 0

    attack(tmp_path, test, keys=KEY)


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzip.compress(b"{}")[:-1], 400),
        ("gzip", gzip.compress(b"{}") + b"x", 400),
        ("gzip", gzip.compress(b"{}") + bytes(100_000), 400),
        ("gzip", b"{}", 400),
        ("deflate", b"\x78\x00", 400),
        ("br", b"{}", 415),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415),
    ],
    ids=["short", "more", "much more", "not packed", "damaged", "unknown", "twice"],
)
def test_a_body_that_can_not_be_unpacked_is_the_clients_fault(
    tmp_path: Path, encoding: str, body: bytes, status: int
) -> None:
    async def test(http: Http) -> None:
        assert (await http.request("POST", "/v1/ack", body, Content_Encoding=encoding, **JSON))[0] == status
        sqs = SQS | {"Content_Encoding": encoding}
        assert (await http.request("POST", "/", body, Authorization="x", **sqs))[0] in (status, 400)

    attack(tmp_path, test)


def test_nothing_of_a_body_is_unpacked_that_nobody_may_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []

    class Stream:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._real = real(*arguments, **options)

        def decompress(self, *arguments: Any) -> bytes:
            part = self._real.decompress(*arguments)
            unpacked.append(len(part))
            return part

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    real = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Stream)
    bomb = gzip.compress(bytes(64 * MIB))

    async def test(http: Http) -> None:
        for path, key, status in (
            ("/v1/ack", "another-key-of-enough-length", 401),
            ("/v1/peer/receive", KEY, 401),
            ("/v1/queues/q/messages", f"{KEY}2", 403),
            ("/v1/nothing", KEY, 404),
            ("/", KEY, 403),
        ):
            headers = JSON | {"Authorization": f"Bearer {key}"}
            reader, writer = await http.send(
                head_of("POST", path, len(bomb), Content_Encoding="gzip", **headers) + bomb
            )
            assert (await answer_of(reader))[0] == status
            # an unread body is dropped before the next request is answered
            writer.write(head_of("GET", "/health/live"))
            with contextlib.suppress(asyncio.IncompleteReadError):
                await answer_of(reader)
            writer.close()
        assert not unpacked

        # of a body that is too large, only enough is unpacked to find that out
        status, _, _ = await http.request("POST", "/v1/ack", bomb, Content_Encoding="gzip", **JSON)
        assert status == 413
        assert 0 < sum(unpacked) < 2 * MIB
        assert max(unpacked) <= bodies.PIECE_BYTES

    attack(tmp_path, test, keys=f"{KEY},{KEY}2=inspect:*")


@pytest.mark.parametrize("path", ["/v1/queues/q/messages", "/v1/ack", "/v1/queues/q"], ids=["send", "ack", "settings"])
def test_without_the_permission_not_a_byte_of_a_body_is_read(tmp_path: Path, path: str) -> None:
    async def test(http: Http) -> None:
        reader, _ = await http.send(head_of("POST" if path != "/v1/queues/q" else "PUT", path, 1000, **JSON))

        assert (await answer_of(reader))[0] == 403

    attack(tmp_path, test, keys=f"{KEY}=inspect:*")


def test_a_key_without_the_permission_does_not_get_its_request_to_sqs_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    monkeypatch.setattr(type(actions()["SendMessage"]), "of_json", lambda *_: decoded.append(1))

    async def test(http: Http) -> None:
        status, _, body = await http.ask(signed_request(http.url, "SendMessage", b"[[],[]]", KEY, "s" * 20))
        assert (status, json.loads(body)["__type"].rpartition("#")[2]) == (403, "AccessDeniedException")

    attack(tmp_path, test, keys=f"{KEY}:{'s' * 20}=inspect:*")
    assert not decoded


def test_a_request_whose_head_has_a_wrong_signature_is_refused_unread(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        body = b"x" * 100_000
        whole = signed_request(http.url, "SendMessage", body, KEY, "wrong" * 4, with_hash=True)
        head, _, _ = whole.partition(b"\r\n\r\n")
        reader, _ = await http.send(head + b"\r\n\r\n")

        assert (await answer_of(reader))[0] == 403

    attack(tmp_path, test, keys=f"{KEY}:{'s' * 20}")


def test_what_bodies_under_way_have_together_is_bounded(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        http.app.room.most_bytes = 4 * MIB
        head = head_of("POST", "/v1/queues/q/messages", 2 * MIB, **JSON)
        waiting = [await http.send(head + b" " * (2 * MIB - 1)) for _ in range(2)]
        async with asyncio.timeout(10):
            while http.app.room.used_bytes < 4 * MIB - 2:
                await asyncio.sleep(0.01)

        reader, _ = await http.send(head + b" " * MIB)
        status, headers, _ = await answer_of(reader)
        assert (status, headers["retry-after"]) == (503, "1")
        # acks, which are small, get in
        status, _, _ = await http.request("POST", "/v1/ack", b'{"receipts":["x"]}', **JSON)
        assert status == 200

        for reader, writer in waiting:
            writer.write(b" ")
            assert (await answer_of(reader))[0] == 400
        assert http.app.room.used_bytes == 0

    attack(tmp_path, test)


@pytest.mark.parametrize("path", ["/v1/queues/q/messages", "/"])
def test_a_client_that_goes_away_in_the_midst_of_a_body_is_no_error(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(http: Http) -> None:
        _, writer = await http.send(head_of("POST", path, MIB, **(SQS if path == "/" else JSON)) + b" " * 1000)
        await until(lambda: http.app.room.used_bytes == 1000)
        writer.close()
        await until(lambda: not http.app.room.used_bytes)
        await until(lambda: not http.app.connections.open)

    attack(tmp_path, test)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_room_is_free_again_when_a_client_goes_away(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        _, writer = await http.send(head_of("POST", "/v1/queues/q/messages", MIB, **JSON) + b" " * 1000)
        async with asyncio.timeout(10):
            while http.app.room.used_bytes != 1000:
                await asyncio.sleep(0.01)
            writer.close()
            while http.app.room.used_bytes:
                await asyncio.sleep(0.01)

    attack(tmp_path, test, keys=KEY)


def _chunks(body: bytes) -> bytes:
    """A body in chunks of a byte each."""
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The bytes and lines that are parsed at once."""
    found: list[tuple[int, int]] = []
    real = RequestHandler.data_received

    def spy(self: RequestHandler, data: bytes) -> None:
        found.append((len(data), data.count(b"\n")))
        real(self, data)

    monkeypatch.setattr(RequestHandler, "data_received", spy)
    return found


def in_turns(parsed: list[tuple[int, int]]) -> bool:
    return all(lines <= connections.LINES_MAX or size <= connections.PIECE_BYTES for size, lines in parsed)


def test_a_body_in_many_short_lines_is_parsed_in_turns(tmp_path: Path, parsed: list[tuple[int, int]]) -> None:
    receipts = {"receipts": [f"{i}" * 20 for i in range(1000)]}
    chunked = head_of("POST", "/v1/ack", None, Transfer_Encoding="chunked", **JSON) + _chunks(
        json.dumps(receipts).encode()
    )
    pretty = json.dumps(receipts, indent=0).encode() + b"\n " * 100_000
    plain = head_of("POST", "/v1/ack", len(pretty), **JSON) + pretty

    async def test(http: Http) -> None:
        answers = [await http.send(request) for request in (chunked, plain, chunked + plain, chunked)]
        for at, (reader, writer) in enumerate(answers):
            for _ in range(2 if at == 2 else 1):
                status, _, body = await answer_of(reader)
                assert (status, len(json.loads(body).get("results", body))) == (200, 1000), (at, body[:300])
            # the connection goes on as any other
            writer.write(head_of("GET", "/health/live"))
            assert (await answer_of(reader))[0] == 200
            writer.close()
        server = http.app.web._runner.server
        assert server.later.put_off_bytes == 0

    attack(tmp_path, test, keys=KEY)
    assert in_turns(parsed), max(parsed)
    assert max(size for size, _ in parsed) <= 256 * 1024


def test_a_stranger_with_many_short_lines_is_refused_and_forgotten(
    tmp_path: Path, parsed: list[tuple[int, int]]
) -> None:
    async def test(http: Http) -> None:
        later = http.app.web._runner.server.later
        sent = head_of("POST", "/v1/ack", Transfer_Encoding="chunked") + b"1\r\n \r\n" * 200_000
        held = [await http.send(sent) for _ in range(5)]
        for reader, _ in held:
            assert (await answer_of(reader))[0] == 401
        for _, writer in held:
            writer.close()
        await until(lambda: not http.app.connections.open)
        assert later.put_off_bytes == 0 and not later._waiting

    attack(tmp_path, test, keys=KEY)
    assert in_turns(parsed), max(parsed)


def test_what_waits_to_be_parsed_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PUT_OFF_BYTES", 1000)

    async def test(http: Http) -> None:
        sent = head_of("POST", "/v1/ack", None, Transfer_Encoding="chunked", **JSON) + _chunks(b" " * 10_000)
        reader, _ = await http.send(sent)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        await until(lambda: not http.app.connections.open)
        assert http.app.connections.refused["lines"] == 1
        assert http.app.web._runner.server.later.put_off_bytes == 0

    attack(tmp_path, test, keys=KEY)


@pytest.mark.parametrize(
    "body",
    [b"5\r\nabc", b"zz\r\n", b"-1\r\n", b"5\r\nabcdefgh\r\n"],
    ids=["short", "no-number", "negative", "long"],
)
def test_a_malformed_body_is_a_bad_request(tmp_path: Path, body: bytes) -> None:
    async def test(http: Http) -> None:
        for path, headers in (("/v1/ack", JSON), ("/", SQS)):
            data = head_of("POST", path, None, Transfer_Encoding="chunked", **headers) + body
            reader, writer = await http.send(data)
            if body == b"5\r\nabc":
                writer.write_eof()  # it ends too early
                assert await asyncio.wait_for(reader.read(), 10) == b""
                continue
            assert (await answer_of(reader))[0] == 400

    attack(tmp_path, test)


# -- what is decoded


def peak_bytes(decode: Callable[[], object], error: type[Exception]) -> int:
    """Memory that an attempt took which ended with an error."""
    tracemalloc.start()
    try:
        with pytest.raises(error) as caught:
            decode()
        assert len(str(caught.value)) <= TEXT_MAX + 100
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_error_in_a_request_to_sqs_does_not_decode_it_again() -> None:
    body = b"[" + b"[]," * 300_000 + b"[]]"

    assert peak_bytes(lambda: actions()["SendMessage"].of_json(body), SqsError) < 200_000


@pytest.mark.parametrize(
    ("action", "body", "absent"),
    [
        ("SendMessage", {}, "QueueUrl"),
        ("SendMessage", {"QueueUrl": None}, "QueueUrl"),
        ("SendMessage", {"QueueUrl": "u"}, "MessageBody"),
        (
            "SendMessageBatch",
            {"QueueUrl": "u", "Entries": [{"Id": "a", "MessageBody": "b"}, {"Id": "a"}]},
            "Entries.2.MessageBody",
        ),
        ("SendMessageBatch", {"QueueUrl": "u", "Entries": [{"Id": None}]}, "Entries.1.Id"),
        (
            "SendMessage",
            {"QueueUrl": "u", "MessageBody": "b", "MessageAttributes": {"a": {}}},
            "MessageAttributes.DataType",
        ),
    ],
    ids=["all", "null", "second", "entry", "null-in-entry", "attribute"],
)
def test_what_a_request_to_sqs_lacks_is_named(action: str, body: Any, absent: str) -> None:
    with pytest.raises(SqsError, match=rf"must contain the parameter {absent}\.") as caught:
        actions()[action].of_json(json.dumps(body).encode())
    assert caught.value.name == "MissingParameter"


def test_a_null_where_nothing_has_to_be_is_no_missing_parameter() -> None:
    with pytest.raises(SqsError) as caught:
        actions()["SendMessage"].of_json(b'{"QueueUrl":"u","MessageBody":"b","MessageAttributes":{"a":null}}')
    assert caught.value.name == "Serialization"


def test_a_form_that_lacks_something_says_what() -> None:
    body = urlencode({"Action": "SendMessage", "QueueUrl": "u"}).encode()
    with pytest.raises(SqsError, match="MessageBody"):
        query_protocol.read("", body, None)


def test_a_form_with_names_of_many_parts_costs_no_more_than_its_size() -> None:
    body = b"Action=SendMessage&QueueUrl=u&" + b"." * 1_000_000 + b"=1"

    assert peak_bytes(lambda: query_protocol.read("", body, None), SqsError) < 10_000_000


@pytest.mark.parametrize("escape", [b"%41", b"%4", b"%c3%a9"])
def test_a_form_of_escapes_costs_no_more_than_its_size(escape: bytes) -> None:
    size = MIB // len(escape)
    body = b"Action=GetQueueUrl&QueueName=" + escape * size
    tracemalloc.start()
    try:
        with contextlib.suppress(SqsError):
            query_protocol.read("", body, None)
        assert tracemalloc.get_traced_memory()[1] < 10 * MIB
    finally:
        tracemalloc.stop()


async def read(body: bytes, content_type: str) -> Any:
    content = StreamReader(Mock(_reading_paused=False), 1 << 30)
    content.feed_data(body)
    content.feed_eof()
    headers = {"Content-Type": content_type}
    return await Body(Send, 1 << 30).read(make_mocked_request("POST", "/", headers, payload=content))


@pytest.mark.parametrize("kind", ["messages", "headers", "empty"])
def test_more_values_than_are_good_for_a_request_are_not_decoded(kind: str) -> None:
    if kind == "empty":
        body = b'{"messages":[' + b"{}," * VALUES_MAX + b"{}]}"
    elif kind == "headers":
        one = {"payload": "", "headers": {f"{i}": "" for i in range(99)}}
        body = json.dumps({"messages": [one] * (VALUES_MAX // 100 + 1)}).encode()
    else:
        body = b'{"messages":[' + b'{"payload":""},' * VALUES_MAX + b'{"payload":""}]}'

    assert peak_bytes(lambda: asyncio.run(read(body, "application/json")), TooLargeError) < 1_000_000 + len(body)


def test_msgpack_says_how_much_comes_and_is_refused_by_that() -> None:
    body = b"\x81\xa8messages\xdd" + (1 << 20).to_bytes(4, "big") + b"\x81\xa7payload\xc4\x00" * (1 << 20)

    assert peak_bytes(lambda: asyncio.run(read(body, "application/msgpack")), BadValueError) < 1_000_000


@pytest.mark.parametrize("kind", ["json", "msgpack"])
def test_a_message_has_at_most_a_hundred_headers(kind: str) -> None:
    encode = getattr(msgspec, kind).encode
    body: Any = {"messages": [{"payload": b"", "headers": {f"{i}": b"" for i in range(101)}}]}

    with pytest.raises(BadValueError, match="length <= 100"):
        asyncio.run(read(encode(body), f"application/{kind}"))
    body["messages"][0]["headers"].pop("0")
    assert len(asyncio.run(read(encode(body), f"application/{kind}")).messages[0].headers) == 100


def test_errors_repeat_a_little_of_a_request_not_all(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        long = "x" * 300_000
        named = {"payload": "", "headers": {f"marq-{long}": ""}}
        for path, body, headers in (
            ("/", json.dumps({"QueueUrl": long, "MessageBody": "b"}).encode(), SQS),
            ("/", urlencode({"Action": long}).encode(), {"Content_Type": "application/x-www-form-urlencoded"}),
            ("/v1/queues/q/messages", json.dumps({"messages": [named]}).encode(), JSON),
            ("/v1/ack", json.dumps({"receipts": [long]}).encode(), JSON),
        ):
            _, _, answer = await http.request("POST", path, body, **headers)
            assert len(answer) < 8_000, path

    attack(tmp_path, test)


def test_limits_are_those_that_the_documentation_says() -> None:
    assert RECEIPTS_BYTES >= BATCH_MAX * 55 + 100
