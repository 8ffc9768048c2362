"""Receipts, keys, problems and the OpenAPI document, without a worker."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from aiohttp import StreamReader, web
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from app import bodies
from app.engine.queue_records import id_of_queue
from app.service.receipts import Receipt, Receipts
from gateway import routes, schemas
from gateway.auth import ALL, Grant, Grants, Keys, check_browser, is_loopback
from gateway.sqs import server as sqs
from gateway.sqs.errors import SqsError
from marq import errors
from marq.core.policies import name_problem
from marq.errors import BadReceiptError, NotAllowedError, NotAuthenticatedError, SettingError
from marq.protocol import problems

KEY = "a-key-of-enough-length"
OTHER = "another-key-of-enough-length"

# ---------------------------------------------------------------------- receipts

fields = st.tuples(
    st.integers(0, 0xFFFF),
    st.integers(0, 1 << 62),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 1 << 62),
    st.integers(0, 255),
    st.binary(min_size=10, max_size=10),
)


@given(fields)
def test_a_receipt_says_at_any_worker_what_went_into_it(values: Receipt) -> None:
    assert Receipts(lambda: b"secret").read(Receipts(lambda: b"secret").make(*values)) == values


@given(fields, st.integers(0, 59), st.sampled_from("ABCDwxyz0189+/"))
def test_a_changed_receipt_is_refused(values: Receipt, at: int, character: str) -> None:
    receipt = Receipts(lambda: b"secret").make(*values)
    changed = receipt[:at] + character + receipt[at + 1 :]
    if changed != receipt:
        with pytest.raises(BadReceiptError):
            Receipts(lambda: b"secret").read(changed)


def test_a_receipt_of_another_installation_is_refused() -> None:
    receipt = Receipts(lambda: b"one").make(1, 2, 3, 4, 5, b"0123456789")

    with pytest.raises(BadReceiptError, match="not given out"):
        Receipts(lambda: b"two").read(receipt)


@given(st.text(max_size=60))
def test_any_text_is_refused_or_read(text: str) -> None:
    with pytest.raises(BadReceiptError):
        Receipts(lambda: b"secret").read(text)


def test_attempts_beyond_what_fits_are_cut() -> None:
    receipts = Receipts(lambda: b"secret")

    assert Receipts(lambda: b"secret").read(receipts.make(0, 0, 0, 0, 1000, id_of_queue("q")))[4] == 255


# ---------------------------------------------------------------------- keys


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_keys_everybody_may_do_everything() -> None:
    assert Keys(None).grants_of({}) is ALL
    assert not Keys("")


def test_a_plain_key_may_do_everything() -> None:
    Keys(KEY).grants_of(bearer(KEY)).require("manage", None, everywhere=True)


@pytest.mark.parametrize("headers", [{}, bearer(""), bearer("x"), bearer(KEY + "x"), {"Authorization": f"Basic {KEY}"}])
def test_without_a_known_key_nobody_may_do_anything(headers: dict[str, str]) -> None:
    with pytest.raises(NotAuthenticatedError):
        Keys(KEY).grants_of(headers)


def test_permissions_per_queue() -> None:
    grants = Keys(f"{KEY}=send+receive:orders.*|invoices, {KEY}=inspect:*").grants_of(bearer(KEY))

    grants.require("send", "orders.eu")
    grants.require("receive", "invoices")
    grants.require("inspect", None, everywhere=True)
    grants.require("receive", None)
    for permission, queue in (("send", "payments"), ("manage", "invoices"), ("manage", None)):
        with pytest.raises(NotAllowedError):
            grants.require(permission, queue)
    with pytest.raises(NotAllowedError):
        grants.require("send", None, everywhere=True)


@pytest.mark.parametrize("text", ["short", f"{KEY}=fly:*", f"{KEY}=send", f"{KEY}=send:", f"{OTHER}=:*"])
def test_keys_that_make_no_sense_are_an_error_that_does_not_show_them(text: str) -> None:
    with pytest.raises(SettingError) as caught:
        Keys(text)

    assert KEY not in str(caught.value)
    assert OTHER not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("10.1.2.3", False), ("a.b", False)],
)
def test_what_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


ALIASES = (
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "0.0.0.0",
    "10.1.2.3",
    "127.1",
    "0x7f.1",
    "2130706433",
    "127.0.0.01",
)


@pytest.mark.parametrize(
    ("method", "headers", "allowed"),
    [
        ("GET", {"Host": "localhost:9324"}, True),
        ("POST", {"Host": "127.0.0.1:9324"}, True),
        ("POST", {"Host": "[::1]:9324"}, True),
        ("GET", {"Host": "evil.example"}, False),
        ("GET", {}, False),
        # other ways to reach this machine, for which a browser does not say that another site asks
        *(("POST", {"Host": f"{name}:9324"}, False) for name in ALIASES),
        ("POST", {"Host": "localhost:9324", "Origin": "http://evil.example"}, False),
        ("POST", {"Host": "localhost:9324", "Origin": "null"}, False),
        ("POST", {"Host": "localhost:9324", "Origin": "http://localhost:9324"}, True),
    ],
)
def test_a_page_in_a_browser_can_not_reach_in(method: str, headers: dict[str, str], allowed: bool) -> None:
    if allowed:
        check_browser(method, headers)
    else:
        with pytest.raises(NotAllowedError):
            check_browser(method, headers)


# ---------------------------------------------------------------------- problems and names


def test_every_error_of_a_request_has_a_status_of_its_kind() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RequestError)]
    assert len(kinds) > 5
    for kind in kinds:
        assert 400 <= problems.kind_of(kind("x"))[0] < 500
    assert problems.kind_of(errors.UnavailableError("x"))[0] == 503
    assert problems.kind_of(ZeroDivisionError())[0] == 500


def test_an_error_survives_the_way_from_worker_to_worker() -> None:
    import msgspec

    error = errors.LeaseOverError("too late")
    status, name, title = problems.kind_of(error)
    again = problems.error_of(msgspec.json.encode(problems.body(status, name, title, str(error))))

    assert (type(again), str(again)) == (errors.LeaseOverError, "too late")


@pytest.mark.parametrize("name", ["orders", "ä b/c", "x" * 255, "%"])
def test_possible_names(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0b", "a\nb", "\x7f", "\ud800"])
def test_impossible_names(name: str) -> None:
    assert name_problem(name)


@pytest.mark.parametrize(
    ("pattern", "granted", "denied"),
    [
        ("orders[eu]", ["orders[eu]"], ["orderse", "ordersu", "orders"]),
        ("orders[!x]", ["orders[!x]"], ["ordersy"]),
        ("orders.*", ["orders.", "orders.eu", "orders.a\nb"], ["orders", "ordersxeu"]),
        ("a?c", ["abc", "a.c", "a\nc"], ["ac", "abbc"]),
        ("a.c", ["a.c"], ["abc"]),
        ("(a|b)+$", ["(a|b)+$"], ["a", "ab"]),
        ("\\*", ["\\", "\\x"], ["*"]),
    ],
)
def test_only_asterisks_and_question_marks_are_wildcards(pattern: str, granted: list[str], denied: list[str]) -> None:
    # | separates names in a list
    grants = Grants([Grant(frozenset({"send"}), (pattern,))])
    assert all(grants.allow("send", queue) for queue in granted)
    assert not any(grants.allow("send", queue) for queue in denied)


@pytest.mark.parametrize(
    "entry",
    [
        f"{KEY}=part-of-the-key=send:orders",
        f"{KEY}=part-of-the-key",
        f"{KEY}==",
        f"{KEY}=send+part-of-the-key:orders",
        f"{KEY}=send:",
        "part-of-the-key",
        f"part-of-the-key:{'p' * 3}",
        f"{KEY}:part-of-the-key,{KEY}:another-part-of-it",
    ],
)
def test_errors_name_keys_by_their_position(entry: str) -> None:
    with pytest.raises(SettingError, match=r"key [12]\b") as caught:
        Keys(entry)
    assert "part-of" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_names_that_no_queue_can_have_are_not_remembered() -> None:
    grants = Keys(f"{KEY}=send:orders").grants_of(bearer(KEY))
    for i in range(10):
        assert not grants.allow("send", f"{i}" * 1000)
    assert not grants.allow("send", "other")
    assert list(grants._known) == [("send", "other")]


# ---------------------------------------------------------------------- bodies that do not come


def test_a_body_that_does_not_come_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "TIMEOUT_S", 0.02)

    async def run() -> None:
        content = StreamReader(Mock(_reading_paused=False), 1 << 16)
        request = make_mocked_request("POST", "/", payload=content)
        with pytest.raises(web.HTTPRequestTimeout):
            await routes.Body(schemas.Message, 1000).read(request)
        with pytest.raises(SqsError, match="did not come within"):
            await sqs.Server._body(Mock(_body_bytes=1000, _room=None), request, None)

    asyncio.run(run())
