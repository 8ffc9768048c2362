"""Requests to the cockpit that no page makes: odd ones, half ones, and such that never end."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from app import bodies
from gateway import connections
from gateway.ui.sessions import TOKEN
from tests.unit.http_lab import SECRET, Http, answer_of, head_of, keep_catalog, run, serving

KEY = "a-key-of-enough-length"
PATHS = ("/", "/ui/", "/ui/queues", "/ui/static/app.js", "/ui/api/session", "/ui/api/overview", "/ui/api/queues/a")


def attack(folder: Path, test: Callable[[Http], Awaitable[None]], **values: Any) -> None:
    async def main() -> None:
        async with serving(folder, **values) as http:
            keep_catalog(http)
            await test(http)
            async with asyncio.timeout(10):
                while http.app.room.used_bytes or http.app.connections.open:
                    await asyncio.sleep(0.01)

    run(main)


ODD_COOKIES = (
    "=",
    ";;;=;",
    "marq-marq",
    "marq-marq=",
    'marq-marq="',
    'marq-marq="\\377\\000\\012"',
    "marq-marq=" + "9" * 7_000,
    "marq-marq=9999999999.a.b.c; marq-marq=x",
    "marq-marq=9999999999.\xff.\xff.\xff",
    "marq-marq=\t.\x01.\x7f.\x80",
    "marq-marq=nan.a.b.c",
    "marq-marq=-1.a.b.c",
    "; ".join(f"c{i}=v" for i in range(900)),
    "a=b; expires=x; path=/; marq-marq=" + "." * 250,
)
ODD_TOKENS = ("", " ", "a" * 40, "\xff" * 40, "a" * 6_000, "0", "null", "\x01")


@pytest.mark.parametrize("keys", [None, KEY], ids=["open", "keys"])
def test_odd_cookies_and_tokens_are_no_session_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: str | None
) -> None:
    async def test(http: Http) -> None:
        for cookie in ODD_COOKIES:
            for token in ODD_TOKENS if cookie == ODD_COOKIES[-1] else ("a" * 40,):
                raw = head_of("GET", "/ui/api/settings", 0, Cookie=cookie, **{TOKEN.replace("-", "_"): token})
                status, _, _ = await http.ask(raw)
                # a control character is no HTTP
                assert status in ((401, 400) if keys else (200, 400)), (cookie, token)
                status, _, body = await http.request("GET", "/ui/api/session", Cookie=cookie)
                assert status in (200, 400)
                assert not (keys and b'"signed_in":true' in body), cookie

    attack(tmp_path, test, keys=keys, secret=SECRET)
    assert not [record for record in caplog.records if record.exc_info], caplog.text


ODD = (
    ("GET", "/ui/static/%00"),
    ("GET", "/ui/static/%2e%2e%2fpages.py"),
    ("GET", "/ui/static/..%5c..%5cpages.py"),
    ("GET", "/ui/static/app.js%00.css"),
    ("GET", "/ui/static/"),
    ("POST", "/ui/"),
    ("PUT", "/ui/static/app.js"),
    ("DELETE", "/ui/api/overview"),
    ("GET", "/ui/api/"),
    ("GET", "/ui/api/queues?page=0"),
    ("GET", "/ui/api/queues?page=1e9"),
    ("GET", "/ui/api/queues?page=9999999999999999999999"),
    ("GET", "/ui/api/queues?per=100000"),
    ("GET", "/ui/api/queues?sort=__class__"),
    ("GET", "/ui/api/queues?desc=perhaps"),
    ("GET", "/ui/api/queues?search=" + "a" * 4_000),
    ("GET", "/ui/api/queues?other=1"),
    ("GET", "/ui/api/queues/%00"),
    ("GET", "/ui/api/queues/" + "a" * 4_000),
    ("GET", "/ui/api/queues/nobody-made-it"),
    ("POST", "/ui/api/queues/%0a/moves"),
    ("DELETE", "/ui/api/queues/a/moves/%1b"),
    ("GET", "/ui/api/messages/-1/0"),
    ("GET", "/ui/api/messages/0/" + "9" * 400),
    ("GET", "/ui/api/messages/%D9%A1/0"),
    ("GET", "/ui/api/messages/7/0"),
    ("GET", "/ui/api/messages/0/0x10"),
)


def test_a_request_that_no_page_makes_is_no_error_of_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(http: Http) -> None:
        for method, path in ODD:
            status, head, body = await http.request(method, path, b"", Accept="text/html")
            assert 400 <= status < 500, (method, path, status, body)
            assert head["content-type"].startswith("application/problem+json"), "nothing that a browser shows as a page"
        # any page: the browser says that there is no such one
        for path in ("/ui/%00", "/ui/" + "b" * 7_000, "/ui/%3Cscript%3E"):
            status, _, body = await http.request("GET", path, b"", Accept="text/html")
            assert status == 200
            assert b"bbb" not in body and b"<script>" not in body

    attack(tmp_path, test)
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert all(record.getMessage().isprintable() for record in caplog.records if record.levelno >= logging.WARNING)


BODIES = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"key"',
    b'{"key":1}',
    b'{"key":null}',
    b'{"key":"\\ud800"}',
    b'{"key":"\xff\xfe"}',
    b'{"key":"a","other":1}',
    b'{"key":"%s"}' % (b"k" * 2_000),
    b'{"key":"' + b"\\u0000" * 100 + b'"}',
    b"[" * 4_000,
)


def test_a_login_that_makes_no_sense_is_refused_and_tells_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(http: Http) -> None:
        for body in BODIES:
            for kind in ("application/json", "application/msgpack", "text/plain", "multipart/form-data; boundary=a"):
                status, head, said = await http.request("POST", "/ui/api/session", body, Content_Type=kind)
                assert status in (400, 401, 415), (body, kind)
                assert "set-cookie" not in head
                assert KEY.encode() not in said

    attack(tmp_path, test, keys=KEY, secret=SECRET)
    assert not [record for record in caplog.records if record.exc_info], caplog.text


def test_a_login_that_is_too_large_is_refused_before_it_has_come(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        said = {"Content_Type": "application/json"}
        for data in (
            head_of("POST", "/ui/api/session", 1 << 40, **said),
            head_of("POST", "/ui/api/session", None, Transfer_Encoding="chunked", **said)
            + b"1000\r\n" + b"a" * 0x1000 + b"\r\n" + b"1000\r\n" + b"a" * 0x1000 + b"\r\n",
        ):  # fmt: skip
            assert (await http.ask(data))[0] == 413
        bomb = gzip.compress(bytes(20 << 20))
        status, _, _ = await http.request("POST", "/ui/api/session", bomb, Content_Encoding="gzip", **said)
        assert status == 413

    attack(tmp_path, test, keys=KEY, secret=SECRET)


def test_half_of_a_request_ends_with_its_time_whatever_page_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    monkeypatch.setattr(bodies, "TIMEOUT_S", 0.3)

    async def test(http: Http) -> None:
        halves = [await http.send(head_of("GET", path, Cookie="marq-marq=")[:-4] + b"; a=") for path in PATHS * 3]
        logins = [
            await http.send(head_of("POST", "/ui/api/session", 100, Content_Type="application/json") + b'{"key":"')
            for _ in range(20)
        ]
        assert (await http.request("GET", "/ui/", Accept="text/html"))[0] == 200, "others are served meanwhile"
        async with asyncio.timeout(20):
            for reader, _ in halves:
                await reader.read()
            for reader, _ in logins:
                assert (await answer_of(reader))[0] == 408
        for _, writer in (*halves, *logins):
            writer.close()

    attack(tmp_path, test, keys=KEY, secret=SECRET)


def test_a_page_can_not_be_put_into_another_one_and_is_read_as_what_it_is(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        for path in ("/", "/ui/", "/ui/queue?name=a", "/ui/static/app.js", "/ui/static/style.css"):
            status, head, _ = await http.request("GET", path, Accept="text/html")
            assert status == 200
            policy = dict(one.strip().partition(" ")[::2] for one in head["content-security-policy"].split(";"))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert head["x-content-type-options"] == "nosniff"
            assert head["cross-origin-opener-policy"] == head["cross-origin-resource-policy"] == "same-origin"
            assert "access-control-allow-origin" not in head

    attack(tmp_path, test)
