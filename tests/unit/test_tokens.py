"""What clients get as opaque tokens, from a worker of a later version: refused in one line, never taken for another."""

from __future__ import annotations

import json
from base64 import b64encode, urlsafe_b64encode
from hashlib import blake2b
from types import SimpleNamespace

import pytest

from app.service.receipts import _BODY, _HASH_BYTES, LENGTH, Receipts
from gateway.auth import Keys
from gateway.sqs.errors import SqsError, error_of
from gateway.sqs.moves import _read_handle
from gateway.sqs.queues import _page_of
from gateway.ui.sessions import Sessions
from marq.errors import BadReceiptError

SECRET = b"the secret of all workers"
FIELDS = (1, 7, 2, 40, 1, b"0123456789")


def of_a_later_format(body: bytes) -> str:
    """A receipt that a later version made with the same secret, by the rule: with another key."""
    key = blake2b(SECRET, digest_size=32, person=b"marq-receipt-2").digest()
    return b64encode(body + blake2b(body, key=key, digest_size=_HASH_BYTES).digest()).decode()


def test_a_longer_receipt_says_how_long_one_is() -> None:
    later = of_a_later_format(_BODY.pack(*FIELDS) + bytes(6))
    assert len(later) == LENGTH + 8
    with pytest.raises(BadReceiptError, match=f"has {LENGTH + 8} characters, not {LENGTH} as those of this version"):
        Receipts(lambda: SECRET).read(later)


def test_a_receipt_of_the_same_length_is_not_taken_for_one_of_ours() -> None:
    receipts = Receipts(lambda: SECRET)
    assert receipts.read(receipts.make(*FIELDS)) == FIELDS
    with pytest.raises(BadReceiptError, match="or by a later version of marq, or is damaged; its message comes again"):
        receipts.read(of_a_later_format(_BODY.pack(*FIELDS)))


def test_sqs_says_so_in_its_own_words() -> None:
    with pytest.raises(BadReceiptError) as refused:
        Receipts(lambda: SECRET).read(of_a_later_format(_BODY.pack(*FIELDS)))
    told = error_of(refused.value)
    assert told.name == "ReceiptHandleIsInvalid"
    assert "\n" not in str(told)


@pytest.mark.parametrize("token", ["\02:orders", "\n", "", "x" * 300])
def test_the_token_of_a_page_is_not_taken_for_the_name_of_a_queue(token: str) -> None:
    request = SimpleNamespace(MaxResults=2, NextToken=urlsafe_b64encode(token.encode()).decode())
    with pytest.raises(SqsError, match=r"Invalid or expired next token\."):
        _page_of(request)
    request.NextToken = urlsafe_b64encode("Aufträge".encode()).decode()
    assert _page_of(request) == (2, "Aufträge")


@pytest.mark.parametrize("handle", [{"v": 2}, {"taskId": 7, "sourceArn": "a"}, ["t", "a"], "t"])
def test_the_handle_of_a_task_that_moves_messages(handle: object) -> None:
    with pytest.raises(SqsError, match=r"Value for parameter TaskHandle is invalid\."):
        _read_handle(b64encode(json.dumps(handle).encode()).decode())


def test_a_field_more_in_a_handle_is_passed_over() -> None:
    handle = {"taskId": "t", "sourceArn": "a", "more": "x"}
    assert _read_handle(b64encode(json.dumps(handle).encode()).decode()) == ("t", "a")


def test_a_session_of_the_cockpit() -> None:
    keys = Keys.__new__(Keys)
    sessions = Sessions(keys, lambda purpose: [b"k" * 32], "marq")
    for session in ("2.99999999999.a.b.c", "99999999999.a.b.c", ""):
        assert sessions.grants_of_session(session) is None, "it has to sign in"
