"""Sessions of the cockpit: a login with a key, a session in a signed cookie, a token against forged requests.

A session is `<ends, seconds since 1970>.<random>.<id of the key>.<seal>`, sealed with a key that is derived from the
installation's secret: every worker accepts it, none keeps it, and it ends with its time, with the key, or with the
secret. The id of the key is a keyed hash; nothing of the key itself is in the cookie.

A request with a session counts only with the header `X-Marq-Token`. The token is made from the cookie with the secret,
is told once, in the answer to the login, and is kept by the page. Browsers send a cookie to every port of a host, so
another server there may have it: without the token, it is worth nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from hmac import compare_digest

from aiohttp import web

from gateway.auth import Grants, Keys
from marq.errors import NotAuthenticatedError

#: Seconds that a session lasts.
SESSION_S = 12 * 3600
#: Header of requests of the page.
TOKEN = "X-Marq-Token"
#: The purpose of the key, for `Catalog.keys_for`.
PURPOSE = b"marq-session"
SECURE = "__Host-"
_COOKIE_MAX = 300


class Sessions:
    """Makes and checks sessions."""

    def __init__(
        self,
        keys: Keys,
        seal_keys: Callable[[bytes], Sequence[bytes]],
        name: str,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._seal_keys = seal_keys
        self._now_s = now_s
        #: The name of the cookie, which differs between installations on the same host. With HTTPS it has a prefix, for
        #: which browsers see to it that no other host and no page without HTTPS has set it.
        self.cookie = f"marq-{name}"
        self._cookies = {self.cookie, SECURE + self.cookie}

    def begin(self, key: str) -> str:
        """Make a session for the owner of a key. Raises `NotAuthenticatedError`."""
        digest = self._keys.digest_of(key)
        seal_key = self._seal_keys(PURPOSE)[0]
        text = f"{int(self._now_s()) + SESSION_S}.{secrets.token_hex(12)}.{_id_of(digest, seal_key)}"
        return f"{text}.{_seal(text, seal_key)}"

    def token_of(self, session: str) -> str:
        """The value of the header in requests with a session. Without keys, the session is empty."""
        return _seal("token:" + session, self._seal_keys(PURPOSE)[0])

    def session_in(self, headers: Mapping[str, str]) -> str:
        """The session that a browser sent; empty if there is none."""
        # http.cookies takes 0.1 s for 8 KB of backslashes before Python 3.13
        for pair in headers.get("Cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name in self._cookies and len(value) <= _COOKIE_MAX and value.isascii():
                return value
        return ""

    def grants_of_session(self, session: str) -> Grants | None:
        """The permissions of a session; None if it is invalid or over."""
        text, _, seal = session.rpartition(".")
        parts = text.split(".")
        if len(parts) != 3 or not session.isascii():
            return None
        ends, _, key_id = parts
        for seal_key in self._seal_keys(PURPOSE):
            if compare_digest(_seal(text, seal_key), seal):
                if int(ends) < self._now_s():
                    return None
                found = (d for d in self._keys.digests if compare_digest(_id_of(d, seal_key), key_id))
                digest = next(found, None)
                return self._keys.grants_by_digest(digest) if digest is not None else None
        return None

    def has_token(self, session: str, headers: Mapping[str, str]) -> bool:
        """True if a request comes from the page."""
        given = headers.get(TOKEN, "")
        return given.isascii() and any(
            compare_digest(_seal("token:" + session, key), given) for key in self._seal_keys(PURPOSE)
        )

    def grants_of(self, headers: Mapping[str, str]) -> Grants | None:
        """The permissions of a request of the page; None for other requests. Raises `NotAuthenticatedError`."""
        if TOKEN not in headers or "Authorization" in headers:
            return None
        session = self.session_in(headers)
        grants = self.grants_of_session(session)
        if grants is None or not self.has_token(session, headers):
            raise NotAuthenticatedError("the session is over: sign in")
        return grants

    def set_cookie(self, response: web.Response, session: str, secure: bool) -> None:
        """Set the session's cookie; an empty session deletes it."""
        cookie = SECURE + self.cookie if secure else self.cookie
        if not session:
            response.del_cookie(cookie, path="/", httponly=True, samesite="Strict", secure=secure)
            return
        response.set_cookie(
            cookie, session, max_age=SESSION_S, path="/", httponly=True, samesite="Strict", secure=secure
        )


def _seal(text: str, key: bytes) -> str:
    return blake2b(text.encode(), key=key, digest_size=20, person=PURPOSE).hexdigest()


def _id_of(digest: bytes, key: bytes) -> str:
    return blake2b(digest, key=key, digest_size=16, person=b"marq-session-key").hexdigest()
