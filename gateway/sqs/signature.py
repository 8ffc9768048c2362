"""Signature Version 4: checks which key a request was signed with, and that it was not changed.

Accepts signatures in the `Authorization` header and in the query (presigned); of the body's hash, of no body
(`UNSIGNED-PAYLOAD`), and of chunks (`STREAMING-…`), whose framing is removed here.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote, unquote

from aiohttp import web
from botocore.utils import normalize_url_path

from gateway.auth import Credential, Keys
from gateway.sqs.errors import SqsError
from gateway.sqs.model import SERVICE, STS

ALGORITHM = "AWS4-HMAC-SHA256"
#: Services that requests may be signed for.
SERVICES = (SERVICE, STS)
#: Greatest difference between the clock of the signer and ours.
SKEW = timedelta(minutes=15)
#: Longest time for which a presigned request is valid.
EXPIRES_MAX_S = 7 * 24 * 3600
PAYLOAD = "X-Amz-Content-Sha256"
UNSIGNED = "UNSIGNED-PAYLOAD"
_SIGNED_CHUNKS = ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER")
_UNSIGNED_CHUNKS = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_EMPTY = sha256(b"").hexdigest()
#: Chunks of a body: SDKs make them of 64 KiB and more. A body of very short ones would delay all other requests.
CHUNKS_MAX = 10_000
#: Headers that must be signed if they are present, because they change the meaning of the request.
_TO_BE_SIGNED = ("x-amz-target", "x-amz-content-sha256", "x-amz-date")

_PART = re.compile(r"\s*(Credential|SignedHeaders|Signature)\s*=\s*([^,\s]+)\s*")
_SCOPE = re.compile(r"Credential=[^,\s]{1,300}?/\d{8}/([a-z0-9-]{1,32})/")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})(?:;chunk-signature=([0-9a-f]{64}))?\r\n")
_HASH = re.compile(r"[0-9a-f]{64}")


class Claim(NamedTuple):
    """The signature of a request, as the request gives it."""

    key_id: str
    date: str  # of the scope
    region: str
    service: str
    time: str  # as 20130524T000000Z
    signed_headers: tuple[str, ...]
    signature: str
    expires_s: int | None  # presigned

    @property
    def scope(self) -> str:
        return f"{self.date}/{self.region}/{self.service}/aws4_request"


def region_of(request: web.Request) -> str | None:
    """The region in the signature, which may be invalid."""
    found = _SCOPE.search(request.headers.get("Authorization", ""))
    if found is not None:
        return found[1]
    parts = request.query.get("X-Amz-Credential", "").split("/")
    return parts[-3] if len(parts) >= 5 else None


class Signatures:
    """Checks signatures with the keys of the installation."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def claim_of(self, request: web.Request) -> tuple[Claim, Credential]:
        """The signature of a request, before its body is read. Raises `SqsError`."""
        claim = _claim_of(request.headers, request.query)
        _check_time(claim, datetime.now(UTC))
        credential = self._keys.credential(claim.key_id)
        if credential is None:
            raise SqsError("InvalidClientTokenId", "The security token included in the request is invalid.")
        return claim, credential

    def check_head(self, request: web.Request, claim: Claim, secret: str) -> None:
        """Raise `SqsError` if the head of a request shows that its signature is wrong."""
        payload = request.headers.get(PAYLOAD)
        if payload is not None:
            _check_signature(request, payload, signing_key(secret, claim.scope), claim)

    def check(self, request: web.Request, body: bytes, claim: Claim, secret: str) -> bytes:
        """Check a request with its body. Returns the body without the framing of chunks. Raises `SqsError`."""
        key = signing_key(secret, claim.scope)
        payload = request.headers.get(PAYLOAD)
        said = payload if payload is not None else sha256(body).hexdigest()
        _check_signature(request, said, key, claim)
        return _content(body, said, key, claim)


def check_service(claim: Claim, service: str) -> None:
    """Raise `SqsError` for a request to one service that is signed for another."""
    if claim.service != service:
        raise SqsError("SignatureDoesNotMatch", f"Credential should be scoped to correct service: '{service}'.")


# -- what is claimed


def _claim_of(headers: Mapping[str, str], query: Mapping[str, str]) -> Claim:
    authorization = headers.get("Authorization")
    if authorization is None and "X-Amz-Signature" not in query:
        raise SqsError("MissingAuthenticationToken", "Request is missing Authentication Token")
    expires_s: int | None = None
    if authorization is not None:
        algorithm, _, rest = authorization.partition(" ")
        parts = {found[1]: found[2] for part in rest.split(",") if (found := _PART.fullmatch(part))}
        time = headers.get("X-Amz-Date", "")
    else:
        algorithm, time = query.get("X-Amz-Algorithm", ""), query.get("X-Amz-Date", "")
        parts = {
            "Credential": query.get("X-Amz-Credential", ""),
            "SignedHeaders": query.get("X-Amz-SignedHeaders", ""),
            "Signature": query["X-Amz-Signature"],
        }
        text = query.get("X-Amz-Expires", "")
        if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= EXPIRES_MAX_S:
            raise _incomplete(f"X-Amz-Expires has to be 1 to {EXPIRES_MAX_S}.")
        expires_s = int(text)
    if algorithm != ALGORITHM:
        raise _incomplete(f"The algorithm has to be {ALGORITHM}.")
    for name in ("Credential", "SignedHeaders", "Signature"):
        if not parts.get(name):
            raise _incomplete(f"Authorization requires the parameter '{name}'.")
    if not re.fullmatch(r"[0-9]{8}T[0-9]{6}Z", time):
        raise _incomplete("X-Amz-Date has to be there, as 20130524T000000Z.")
    scope = parts["Credential"].rsplit("/", 4)
    if len(scope) != 5 or scope[3] not in SERVICES or scope[4] != "aws4_request" or scope[1] != time[:8]:
        raise _incomplete(f"Credential should be scoped to KEY/{time[:8]}/REGION/{SERVICE}/aws4_request.")
    signed = tuple(parts["SignedHeaders"].split(";"))
    for name in ("host", *(n for n in _TO_BE_SIGNED if n in headers)):
        if name not in signed:
            raise _incomplete(f"The header '{name}' has to be signed.")
    return Claim(
        key_id=scope[0],
        date=scope[1],
        region=scope[2],
        service=scope[3],
        time=time,
        signed_headers=signed,
        signature=parts["Signature"],
        expires_s=expires_s,
    )


def _check_time(claim: Claim, now: datetime) -> None:
    try:
        at = datetime.strptime(claim.time, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise _incomplete(f"{claim.time} is no time.") from None
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    if at > now + SKEW:
        raise SqsError("SignatureDoesNotMatch", f"Signature not yet current: {claim.time} is still later than {stamp}")
    if claim.expires_s is not None:
        if now > at + timedelta(seconds=claim.expires_s):
            raise SqsError("RequestExpired", "Request has expired.")
    elif at < now - SKEW:
        raise SqsError("SignatureDoesNotMatch", f"Signature expired: {claim.time} is now earlier than {stamp} - 15 min")


# -- what it has to be


def _check_signature(request: web.Request, payload: str, key: bytes, claim: Claim) -> None:
    path, _, query = request.raw_path.partition("?")
    canonical = canonical_request(request.method, path, query, request.headers, claim.signed_headers, payload)
    signature = sign(key, ALGORITHM, claim.time, claim.scope, sha256(_bytes(canonical)).hexdigest())
    if not hmac.compare_digest(signature.encode(), _bytes(claim.signature)):
        raise _mismatch()


def canonical_request(
    method: str, path: str, query: str, headers: Mapping[str, str], signed: tuple[str, ...], payload: str
) -> str:
    """The text that is signed for a request. `path` and `query` are as on the wire."""
    pairs = []
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name != "X-Amz-Signature":
            pairs.append((quote(unquote(name), safe="-_.~"), quote(unquote(value), safe="-_.~")))
    lines = [
        method,
        quote(_bytes(normalize_url_path(path)), safe="/~"),
        "&".join(f"{name}={value}" for name, value in sorted(pairs)),
    ]
    getall = getattr(headers, "getall", lambda name, _: [headers[name]] if name in headers else [])
    for name in signed:
        values = getall(name, [])
        lines.append(f"{name}:{','.join(' '.join(value.split()) for value in values)}")
    return "\n".join((*lines, "", ";".join(signed), payload))


def _bytes(text: str) -> bytes:
    """The bytes of a header, which may not be UTF-8."""
    return text.encode(errors="surrogateescape")


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, _bytes(text), "sha256")


@lru_cache(maxsize=1024)
def signing_key(secret: str, scope: str) -> bytes:
    """The key of a day, region and service."""
    key = ("AWS4" + secret).encode()
    for part in scope.split("/"):
        key = _hmac(key, part)
    return key


def sign(key: bytes, algorithm: str, *lines: str) -> str:
    """The signature of a text."""
    return _hmac(key, "\n".join((algorithm, *lines))).hex()


# -- bodies


def _content(body: bytes, payload: str, key: bytes, claim: Claim) -> bytes:
    """Check that the hash of the body is the one that was signed. Returns the body."""
    if payload == UNSIGNED:
        return body
    if payload in _SIGNED_CHUNKS or payload == _UNSIGNED_CHUNKS:
        return unframed(body, key if payload in _SIGNED_CHUNKS else None, claim.time, claim.scope, claim.signature)
    if _HASH.fullmatch(payload) is None or not hmac.compare_digest(payload, sha256(body).hexdigest()):
        raise _mismatch()
    return body


def unframed(body: bytes, key: bytes | None, time: str, scope: str, signature: str) -> bytes:
    """The content of chunks. With a `key`, each chunk is signed, the first one with the request's `signature`."""
    parts: list[bytes] = []
    at, previous = 0, signature
    while len(parts) <= CHUNKS_MAX:
        head = _CHUNK.match(body, at)
        if head is None:
            raise SqsError("Serialization", "The chunks of the body are malformed.")
        start = head.end()
        end = start + int(head[1], 16)
        data = body[start:end]
        if len(data) != end - start:
            raise SqsError("Serialization", "The body ends within a chunk.")
        if key is not None:
            expected = sign(key, ALGORITHM + "-PAYLOAD", time, scope, previous, _EMPTY, sha256(data).hexdigest())
            if head[2] is None or not hmac.compare_digest(expected, head[2].decode()):
                raise _mismatch()
            previous = expected
        if not data:
            return b"".join(parts)  # trailers are checksums: TCP and the signature protect the same bytes
        if body[end : end + 2] != b"\r\n":
            raise SqsError("Serialization", "The chunks of the body are malformed.")
        parts.append(data)
        at = end + 2
    raise SqsError("Serialization", f"The body has more than {CHUNKS_MAX} chunks.")


def _incomplete(message: str) -> SqsError:
    return SqsError("IncompleteSignature", message)


def _mismatch() -> SqsError:
    return SqsError(
        "SignatureDoesNotMatch",
        "The request signature we calculated does not match the signature you provided. Check your AWS Secret Access "
        "Key and signing method. Consult the service documentation for details.",
    )
