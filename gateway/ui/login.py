"""Routes of login and logout: a session is begun with a key, and told what it may do."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from app import bodies
from app.service.operations import QueueService
from gateway.auth import ALL, PERMISSIONS, Keys, check_browser
from gateway.routes import Body, answer
from gateway.ui.sessions import Sessions
from marq import __version__
from marq.errors import NotAllowedError, NotAuthenticatedError, NotPossibleError

#: Bytes of a login.
LOGIN_BYTES = 4096


class Login(msgspec.Struct, forbid_unknown_fields=True):
    key: Annotated[str, Meta(max_length=1_000)]


class SessionApi:
    """Login and logout. Checks its requests itself."""

    def __init__(self, sessions: Sessions, keys: Keys, operations: QueueService, room: bodies.Room) -> None:
        self._sessions = sessions
        self._keys = keys
        self._settings = operations.settings
        self._login = Body(Login, LOGIN_BYTES, room)

    def _check(self, request: web.Request) -> None:
        """Raise `NotAllowedError` for a request of a page of another origin."""
        check_browser(request.method, request.headers) if not self._keys else _check_origin(request)

    async def get(self, request: web.Request) -> web.Response:
        self._check(request)
        session = self._sessions.session_in(request.headers)
        has_token = bool(self._keys) and self._sessions.has_token(session, request.headers)
        return self._told(request, session if has_token else "")

    async def begin(self, request: web.Request) -> web.Response:
        self._check(request)
        if not self._keys:
            raise NotPossibleError("this installation has no keys: there is nothing to sign in with")
        session = self._sessions.begin((await self._login.read(request)).key)
        response = self._told(request, session, token=self._sessions.token_of(session))
        self._sessions.set_cookie(response, session, self._is_secure(request))
        return response

    async def end(self, request: web.Request) -> web.Response:
        self._check(request)
        session = self._sessions.session_in(request.headers)
        if not self._sessions.has_token(session, request.headers):
            raise NotAuthenticatedError("the session is over")
        response = self._told(request, "")
        self._sessions.set_cookie(response, "", self._is_secure(request))
        return response

    def _is_secure(self, request: web.Request) -> bool:
        """True if the browser uses HTTPS, to us or to a proxy in front of us."""
        return request.secure or (self._settings.web_url or "").startswith("https:")

    def _told(self, request: web.Request, session: str, **token: str) -> web.Response:
        grants = ALL if not self._keys else self._sessions.grants_of_session(session) if session else None
        told: dict[str, Any] = {
            "name": self._settings.name,
            "version": __version__,
            "keys": bool(self._keys),
            "signed_in": grants is not None,
            "topic_mode": self._settings.queue_id is not None,
        }
        if grants is not None:
            told |= {
                "everywhere": sorted(p for p in PERMISSIONS if grants.allow_everywhere(p)),
                "somewhere": sorted(p for p in PERMISSIONS if grants.allow_somewhere(p)),
            }
        return answer(request, told | token)


def _check_origin(request: web.Request) -> None:
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "same-origin")
    if request.method != "GET" and (
        site not in ("same-origin", "none")
        or (origin is not None and origin.partition("://")[2] != request.headers.get("Host"))
    ):
        raise NotAllowedError("a page of another origin can't ask for that")
