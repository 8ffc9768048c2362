"""Signature Version 4, against botocore's signer and the example of AWS's documentation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gateway.auth import Keys
from gateway.sqs.errors import SqsError
from gateway.sqs.signature import CHUNKS_MAX, Signatures, signing_key, unframed
from marq.errors import SettingError

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
KEYS = f"AKID1:{SECRET},AKID2:{SECRET[::-1]}=send:orders"
URL = "http://localhost:9324/"


def signed(
    body: bytes = b"{}",
    url: str = URL,
    key: tuple[str, str] = ("AKID1", SECRET),
    method: str = "POST",
    query: bool = False,
    **headers: str,
) -> AWSRequest:
    request = AWSRequest(method, url, data=body, headers={"X-Amz-Target": "AmazonSQS.ListQueues", **headers})
    auth = SigV4QueryAuth if query else SigV4Auth
    auth(Credentials(*key), "sqs", "eu-west-1").add_auth(request)
    return request


def check(request: AWSRequest, body: bytes | None = None, **changed: str) -> str:
    """The access key id that a request was signed with."""
    prepared = request.prepare()
    headers = {name: value.decode() if isinstance(value, bytes) else value for name, value in prepared.headers.items()}
    headers = {"Host": "localhost:9324"} | headers | changed
    path = prepared.url.removeprefix("http://localhost:9324")
    received = make_mocked_request(prepared.method, path, headers=headers)
    signatures = Signatures(Keys(KEYS))
    claim, credential = signatures.claim_of(received)
    content = prepared.body if body is None else body
    signatures.check(
        received, content.encode() if isinstance(content, str) else content or b"", claim, credential.secret
    )
    return claim.key_id


def error_of(request: AWSRequest, body: bytes | None = None, **changed: str) -> str:
    with pytest.raises(SqsError) as caught:
        check(request, body, **changed)
    return caught.value.kind.code


def test_what_botocore_signs_is_good() -> None:
    assert check(signed()) == "AKID1"
    assert check(signed(key=("AKID2", SECRET[::-1]))) == "AKID2"


@pytest.mark.parametrize(
    "url",
    [
        URL + "123/queue",
        URL + "000000000000/a%2Fb%20c",
        URL + "?Action=ListQueues&QueueNamePrefix=a%20b%2B&b=&A=1",
        URL + "?x=%C3%A9&x=1",
    ],
)
def test_paths_and_queries_are_taken_as_they_are_on_the_wire(url: str) -> None:
    assert check(signed(url=url)) == "AKID1"
    assert check(signed(url=url, method="GET", body=b"", query=True)) == "AKID1"


def test_a_presigned_request_is_good_until_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    url = URL + "?Action=ListQueues"
    assert check(signed(url=url, method="GET", body=b"", query=True)) == "AKID1"
    late = datetime.now(UTC) - timedelta(hours=2)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_: late)
    assert error_of(signed(url=url, method="GET", body=b"", query=True)) == "RequestExpired"


@pytest.mark.parametrize("minutes", [-16, 16])
def test_a_clock_that_is_off_by_more_than_a_quarter_of_an_hour_is_refused(
    minutes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = datetime.now(UTC) + timedelta(minutes=minutes)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_: off)
    assert error_of(signed()) == "SignatureDoesNotMatch"


def test_whatever_is_changed_after_it_was_signed_is_noticed() -> None:
    request = signed(b'{"a":1}')
    assert error_of(request, b'{"a":2}') == "SignatureDoesNotMatch"
    assert error_of(request, None, **{"X-Amz-Target": "AmazonSQS.DeleteQueue"}) == "SignatureDoesNotMatch"
    assert error_of(request, Host="elsewhere:9324") == "SignatureDoesNotMatch"
    assert error_of(signed(key=("AKID1", "another secret, also long"))) == "SignatureDoesNotMatch"


def test_a_target_that_was_not_signed_does_not_count() -> None:
    request = AWSRequest("POST", URL, data=b"{}", headers={})
    SigV4Auth(Credentials("AKID1", SECRET), "sqs", "eu-west-1").add_auth(request)
    assert error_of(request, None, **{"X-Amz-Target": "AmazonSQS.DeleteQueue"}) == "IncompleteSignature"


def test_unknown_missing_and_malformed_signatures_get_the_errors_of_aws() -> None:
    assert error_of(signed(key=("NOBODY", SECRET))) == "InvalidClientTokenId"
    assert error_of(AWSRequest("POST", URL, data=b"{}", headers={})) == "MissingAuthenticationToken"
    for text in ("Bearer x", "AWS4-HMAC-SHA256", "AWS4-HMAC-SHA256 Credential=a", "AWS4-HMAC-SHA256 Credential=a/b"):
        assert error_of(AWSRequest("POST", URL, data=b"{}", headers={"Authorization": text})) == "IncompleteSignature"


def test_a_signature_or_a_header_that_is_no_ascii_is_a_mismatch() -> None:
    request, odd = signed(), "\u00e9"
    authorization = request.headers["Authorization"]
    assert error_of(request, Authorization=authorization + odd) == "SignatureDoesNotMatch"
    assert error_of(request, None, **{"X-Amz-Target": odd}) == "SignatureDoesNotMatch"
    region = authorization.replace("eu-west-1", odd)
    assert error_of(request, Authorization=region) == "SignatureDoesNotMatch"


def test_a_payload_may_be_left_unsigned() -> None:
    request = signed(b"{}", **{"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"})  # type: ignore[arg-type]
    assert check(request, b"anything") == "AKID1"


def test_signed_chunks_are_put_together_as_in_the_documentation_of_aws() -> None:
    scope = "20130524/us-east-1/s3/aws4_request"
    key, time = signing_key(SECRET, scope), "20130524T000000Z"
    seed = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
    chunks = [
        (b"a" * 65536, "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648"),
        (b"a" * 1024, "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497"),
        (b"", "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9"),
    ]
    body = b"".join(b"%x;chunk-signature=%s\r\n%s\r\n" % (len(data), mark.encode(), data) for data, mark in chunks)
    assert unframed(body, key, time, scope, seed) == b"a" * (65536 + 1024)
    for broken in (body.replace(b"aa", b"ab", 1), body[:-100], body.replace(b"ad80", b"ad81"), body[:500]):
        with pytest.raises(SqsError):
            unframed(broken, key, time, scope, seed)


def test_unsigned_chunks_with_a_trailer_are_put_together() -> None:
    body = b"3\r\nabc\r\n2\r\nde\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"
    assert unframed(body, None, "", "", "") == b"abcde"


@pytest.mark.parametrize("keys", ["AKID:short-secret", f"AKID:{SECRET},AKID:{SECRET[::-1]}"])
def test_access_keys_that_make_no_sense_are_refused(keys: Any) -> None:
    with pytest.raises(SettingError, match="MARQ_KEYS"):
        Keys(keys)


def test_a_body_in_very_many_chunks_is_refused() -> None:
    assert unframed(b"1\r\na\r\n" * CHUNKS_MAX + b"0\r\n\r\n", None, "", "", "") == b"a" * CHUNKS_MAX
    with pytest.raises(SqsError, match=f"more than {CHUNKS_MAX} chunks"):
        unframed(b"1\r\na\r\n" * (CHUNKS_MAX + 1) + b"0\r\n\r\n", None, "", "", "")
