"""The server of the cockpit: sessions, what is served to whom, vendored files, the form of settings."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.auth import Keys
from gateway.ui import pages, vendored
from gateway.ui.fields import FIELDS, OURS
from gateway.ui.sessions import SESSION_S, TOKEN, Sessions
from marq.core.policies import QueueSettings
from marq.errors import NotAuthenticatedError
from tests.unit.http_lab import SECRET, Http, run, serving

KEY, READER = "k" * 24, "r" * 24
BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"
SEAL = (b"1" * 32,)


def with_http(folder: Path, test: Callable[[Http], Awaitable[None]], **values: Any) -> None:
    async def main() -> None:
        async with serving(folder, **values) as http:
            await test(http)

    run(main)


def sessions(keys: str = f"{KEY},{READER}=inspect:a*", seal: tuple[bytes, ...] = SEAL, now_s: float = 0) -> Sessions:
    return Sessions(Keys(keys), lambda purpose: seal, "marq", lambda: now_s)


def headers(made: Sessions, session: str, token: str | None = None) -> dict[str, str]:
    return {"Cookie": f"{made.cookie}={session}", TOKEN: made.token_of(session) if token is None else token}


# -- sessions


def test_a_session_may_do_what_its_key_may_at_every_worker() -> None:
    session = sessions().begin(READER)
    grants = sessions().grants_of(headers(sessions(), session))
    assert grants is not None
    assert grants.allow("inspect", "abc")
    assert not grants.allow("inspect", "b")
    assert not grants.allow("manage", "abc")


def test_nothing_of_a_key_is_in_a_session() -> None:
    session = sessions().begin(KEY)
    assert KEY not in session
    assert session.rsplit(".", 2)[1] != sessions(seal=(b"2" * 32,)).begin(KEY).rsplit(".", 2)[1]


def test_a_session_ends_with_its_time_its_key_or_the_secret() -> None:
    session = sessions().begin(KEY)
    assert sessions(now_s=SESSION_S - 1).grants_of_session(session) is not None
    assert sessions(now_s=SESSION_S + 1).grants_of_session(session) is None
    assert sessions(keys="z" * 24).grants_of_session(session) is None
    assert sessions(seal=(b"2" * 32,)).grants_of_session(session) is None
    assert sessions(seal=(b"2" * 32, *SEAL)).grants_of_session(session) is not None, "while the secret is changed"


@pytest.mark.parametrize("place", [0, 5, 14, 30, 50, 70, -1])
def test_a_session_that_was_changed_is_none(place: int) -> None:
    session = sessions().begin(KEY)
    changed = "1" if session[place] != "1" else "2"
    at = place % len(session)
    assert sessions().grants_of_session(session[:at] + changed + session[at + 1 :]) is None


@pytest.mark.parametrize("session", ["", ".", "...", "a.b.c.d", "9999999999.a.b.", "\xff.a.b.c", "1" * 5000])
def test_what_is_no_session_is_refused(session: str) -> None:
    assert sessions().grants_of_session(session) is None


def test_a_cookie_without_the_token_of_its_page_counts_for_nothing() -> None:
    made = sessions()
    session = made.begin(KEY)
    assert made.grants_of({"Cookie": f"{made.cookie}={session}"}) is None, "then a key is asked for"
    for token in ("", "a" * 40, made.token_of(made.begin(KEY)), "\xff"):
        with pytest.raises(NotAuthenticatedError):
            made.grants_of(headers(made, session, token))


def test_a_key_that_is_not_known_begins_no_session() -> None:
    with pytest.raises(NotAuthenticatedError):
        sessions().begin("x" * 24)


# -- what is served


def test_a_browser_gets_the_page_on_the_root_and_everybody_else_sqs(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        status, head, body = await http.request("GET", "/", Accept=BROWSER)
        assert (status, b'<div id="app">' in body) == (200, True)
        assert "script-src 'self'" in head["content-security-policy"]
        assert "unsafe" not in head["content-security-policy"]
        for path, named in (
            ("/", {"Accept": "*/*"}),
            ("/", {}),
            ("/?Action=ListQueues", {"Accept": BROWSER}),
            ("/", {"Accept": BROWSER, "Authorization": "AWS4-HMAC-SHA256 x"}),
        ):
            _, head, body = await http.request("GET", path, b"", **named)
            assert b"<div" not in body, (path, named)
            assert "x-amzn-requestid" in head
        status, head, _ = await http.request("POST", "/", b"", Accept=BROWSER)
        assert "x-amzn-requestid" in head

    with_http(tmp_path, test)


def test_pages_can_be_shared_and_files_are_kept_by_browsers_until_they_change(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        for path in ("/ui", "/ui/", "/ui/queues", "/ui/queue?name=a%2Fb"):
            assert (await http.request("GET", path, Accept=BROWSER))[0] == 200
        status, head, _ = await http.request("GET", "/ui/static/app.js")
        assert (status, head["x-content-type-options"]) == (200, "nosniff")
        again = await http.request("GET", "/ui/static/app.js", If_None_Match=head["etag"])
        assert (again[0], again[2]) == (304, b"")
        for path in (
            "/ui/static/nothing.js",
            "/ui/static/..%2fpages.py",
            "/ui/static/preact.LICENSE",
            "/ui/api/nothing",
        ):
            assert (await http.request("GET", path))[0] == 404, path

    with_http(tmp_path, test)


def test_without_keys_only_this_machine_gets_anything(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        for path in ("/", "/ui/", "/ui/static/app.js", "/ui/api/session", "/ui/api/queues"):
            assert (await http.request("GET", path, Accept=BROWSER, Host="evil.example"))[0] == 403, path

    with_http(tmp_path, test)


def test_with_keys_a_page_knows_nothing_before_somebody_signs_in(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        assert (await http.request("GET", "/", Accept=BROWSER))[0] == 200
        for path in (
            "/ui/api/overview",
            "/ui/api/queues",
            "/ui/api/queues/a",
            "/ui/api/settings",
            "/ui/api/messages/0/0",
        ):
            assert (await http.request("GET", path))[0] == 401, path
        status, _, body = await http.request("GET", "/ui/api/session")
        assert (status, b'"signed_in":false' in body, b"token" in body) == (200, True, False)

    with_http(tmp_path, test, keys=KEY, secret=SECRET)


async def sign_in(http: Http, key: str, **named: str) -> tuple[int, dict[str, str], bytes]:
    body = b'{"key":"%s"}' % key.encode()
    return await http.request("POST", "/ui/api/session", body, Content_Type="application/json", **named)


def test_a_session_is_in_a_cookie_that_scripts_and_other_sites_do_not_get(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        status, head, body = await sign_in(http, KEY)
        assert status == 200
        cookie = head["set-cookie"]
        assert re.search("HttpOnly", cookie) and re.search("SameSite=Strict", cookie)
        assert "Secure" not in cookie, "this is no HTTPS"
        assert KEY.encode() not in body and KEY not in cookie
        session = cookie.split(";")[0]
        assert (await http.request("GET", "/v1/queues", Cookie=session))[0] == 401, "a page of a stranger has no token"
        token = re.findall(rb'"token":"(\w+)"', body)[0].decode()
        assert (await http.request("GET", "/v1/queues", Cookie=session, X_Marq_Token=token))[0] == 200
        assert (await http.request("GET", "/ui/api/settings", Cookie=session, X_Marq_Token=token))[0] == 200
        _, _, told = await http.request("GET", "/ui/api/session", Cookie=session)
        assert b"token" not in told and b'"signed_in":false' in told, "the server of another port has the cookie, too"
        _, _, told = await http.request("GET", "/ui/api/session", Cookie=session, X_Marq_Token=token)
        assert b"token" not in told and b'"signed_in":true' in told
        assert (await http.request("DELETE", "/ui/api/session", Cookie=session))[0] == 401
        status, head, _ = await http.request("DELETE", "/ui/api/session", Cookie=session, X_Marq_Token=token)
        assert (status, "Max-Age=0" in head["set-cookie"]) == (200, True)
        status, head, _ = await sign_in(http, KEY, X_Forwarded_Proto="https")
        assert head["set-cookie"].startswith("marq-"), "anybody may set this header"
        assert (await sign_in(http, "x" * 24))[0] == 401
        assert (await sign_in(http, KEY, Origin="https://evil.example"))[0] == 403
        assert (await sign_in(http, KEY, Sec_Fetch_Site="cross-site"))[0] == 403

    with_http(tmp_path, test, keys=KEY, secret=SECRET)


def test_behind_a_proxy_with_https_the_cookie_is_for_https_only(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        assert "Secure" in (await sign_in(http, KEY))[1]["set-cookie"]

    with_http(tmp_path, test, keys=KEY, secret=SECRET, web_url="https://marq.example")


# -- files, form


def test_vendored_files_are_what_they_are_said_to_be() -> None:
    assert vendored.problems() == []
    assert all(f"{library.name}.LICENSE" in library.files for library in vendored.LIBRARIES)


def test_all_of_the_page_is_below_200_kib_and_comes_from_here() -> None:
    served = pages.files()
    assert sum(len(file.body) for file in served.values()) < 200 * 1024
    for name, file in served.items():
        text = re.sub(rb'"http://www.w3.org/[^"]*"', b"", file.body)
        if name not in ("uplot.js", "preact.js"):
            assert not re.search(rb"""(src|href)=["']?(https?:)?//""", text), name
        if name.endswith(".html"):
            assert b"style=" not in text and not re.search(rb"<script>", text) and not re.search(rb"\son\w+=", text)


def test_every_setting_has_a_field_with_its_bounds() -> None:
    assert {field["name"] for field in FIELDS} == set(QueueSettings.__struct_fields__) - OURS
    by_name: dict[str, Any] = {field["name"]: field for field in FIELDS}
    assert (by_name["visibility_timeout_ms"]["min"], by_name["visibility_timeout_ms"]["max"]) == (0, 604_800_000)
    assert by_name["deduplication_scope"]["choices"] == ["group", "queue"]
    assert all(field["meaning"] for field in FIELDS)
