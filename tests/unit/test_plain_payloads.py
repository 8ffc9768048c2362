"""Payloads as text or JSON instead of base64, both ways."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from gateway.routes import is_typed_by_hand
from gateway.schemas import JSON_IN_MSGPACK_BYTES, Send, entries_of, told_all, told_as
from marq.errors import BadValueError, TooLargeError
from marq.protocol.messages import Received


def sent(body: bytes) -> list[bytes]:
    entries = asyncio.run(entries_of(msgspec.json.decode(body, type=Send).messages, False))
    return [entry.payload for entry in entries]


def received(payload: bytes) -> Received:
    return Received("receipt", "q", "t", 0, 0, 1, 1, payload)


def test_json_is_kept_as_it_was_written() -> None:
    assert sent(
        b'{"messages":[{"json":{"a" : 1.50, "a":1e999}},{"json":null},{"text":"\\u00e4"},{"payload":"aGk="}]}'
    ) == [
        b'{"a" : 1.50, "a":1e999}',
        b"null",
        "ä".encode(),
        b"hi",
    ]


def test_in_msgpack_json_is_any_value() -> None:
    body = msgspec.msgpack.encode({"messages": [{"json": {"a": [1, None]}}, {"text": "t"}, {"payload": b"p"}]})
    entries = asyncio.run(entries_of(msgspec.msgpack.decode(body, type=Send).messages, True))
    assert [entry.payload for entry in entries] == [b'{"a":[1,null]}', b"t", b"p"]


@pytest.mark.parametrize(
    "message",
    [b"{}", b'{"text":"a","payload":"aGk="}', b'{"json":1,"text":"a"}', b'{"json":1,"payload":""}', b'{"json":"\xff"}'],
)
def test_a_message_has_one_payload_that_is_what_it_is_said_to_be(message: bytes) -> None:
    with pytest.raises(BadValueError, match=r"messages\[1\]"):
        sent(b'{"messages":[{"text":"good"},' + message + b"]}")


@pytest.mark.parametrize(
    ("payload", "how", "told"),
    [
        (b"hi", "text", {"text": "hi"}),
        (b"", "text", {"text": ""}),
        (b"\xff", "text", {"payload": "/w=="}),
        (b'{"a":1.50}', "json", {"json": {"a": 1.5}}),
        (b"null", "json", {"json": None}),
        (b"no json", "json", {"text": "no json"}),
        (b"\xff", "json", {"payload": "/w=="}),
        (b'"\xff"', "json", {"payload": "Iv8i"}),
        (b"1e999", "json", {"text": "1e999"}),
        (b"[" * 100_000, "json", {"text": "[" * 100_000}),
    ],
)
def test_a_payload_is_told_as_what_was_asked_for_if_it_is_that(payload: bytes, how: Any, told: dict[str, Any]) -> None:
    for encode, decode, is_msgpack in (
        (msgspec.json.encode, msgspec.json.decode, False),
        (msgspec.msgpack.encode, msgspec.msgpack.decode, True),
    ):
        answer = decode(encode(told_as(received(payload), how, is_msgpack)))
        if is_msgpack and "payload" in told:
            assert answer["payload"] == payload
        else:
            assert {name: answer[name] for name in ("payload", "text", "json") if name in answer} == told


def nested(count: int) -> bytes:
    """Msgpack of a list of so many empty lists: a byte each."""
    return b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count


def in_msgpack(*values: bytes) -> Send:
    body = b"\x81\xa8messages\xdd" + len(values).to_bytes(4, "big") + b"".join(b"\x81\xa4json" + v for v in values)
    return msgspec.msgpack.decode(body, type=Send)


def test_json_in_msgpack_that_is_too_large_is_not_decoded() -> None:
    messages = in_msgpack(nested(JSON_IN_MSGPACK_BYTES)).messages
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match=r"messages\[0\]\.json"):
            asyncio.run(entries_of(messages, True))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def turns_of_others(work: Callable[[], Awaitable[Any]]) -> int:
    """How often others get a turn while `work` runs."""

    async def main() -> int:
        task, turns = asyncio.ensure_future(work()), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        await task
        return turns

    return asyncio.run(main())


def test_others_get_turns_while_values_are_converted() -> None:
    messages = in_msgpack(*[nested(150_000)] * 10).messages
    assert turns_of_others(lambda: entries_of(messages, True)) >= 10
    listed = [received(b"[" + b"[]," * 50_000 + b"[]]")] * 10
    for is_msgpack in (False, True):
        assert turns_of_others(lambda is_msgpack=is_msgpack: told_all(listed, "json", is_msgpack)) >= 10  # type: ignore[misc]


def test_values_of_many_messages_are_not_in_memory_at_once() -> None:
    listed = [received(b"[" + b"[]," * 50_000 + b"[]]")] * 40  # 3 MiB of lists in each
    tracemalloc.start()
    try:
        asyncio.run(told_all(listed, "json", True))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_what_a_page_sends_is_known_by_its_headers() -> None:
    assert is_typed_by_hand({"User-Agent": "curl/8", "Content-Type": "application/x-www-form-urlencoded"})
    for header in ("Origin", "Sec-Fetch-Site", "sec-fetch-mode"):
        assert not is_typed_by_hand({header: "x"})
