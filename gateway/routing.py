"""Finds the handler of a request. What was found for a method and a path is known when they come again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import hdrs, web
from aiohttp.web_urldispatcher import UrlMappingMatchInfo

#: Paths that are known, and characters of one: anybody may name queues that there are not.
PATHS_MAX, PATH_MAX = 1_000, 300

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routing:
    """Answers the requests of an application whose routes and middlewares do not change any more.

    As aiohttp does it, with the same middlewares in the same order, but without the URL, the search among routes and
    the variables of the path for each request. What matches nothing, has a query or expects something goes its way.
    """

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._known: dict[tuple[str, str], tuple[UrlMappingMatchInfo, Handler]] = {}

    @property
    def known(self) -> int:
        """Methods and paths that are known."""
        return len(self._known)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        message = request._message
        found = self._known.get((message.method, message.path))
        if found is None or hdrs.EXPECT in message.headers:
            try:
                return await self._app._handle(request)
            finally:
                self._learn(message.method, message.path, request._match_info)
        # several requests may have it at once: handlers only read it
        request._match_info = found[0]
        return await found[1](request)

    def _learn(self, method: str, path: str, match_info: Any) -> None:
        if (
            type(match_info) is not UrlMappingMatchInfo  # nothing matches
            or match_info.apps != (self._app,)
            or len(path) > PATH_MAX
            or "?" in path
        ):
            return
        handler: Any = match_info.handler
        for middleware in reversed(self._app.middlewares):
            handler = partial(middleware, handler=handler)
        if len(self._known) >= PATHS_MAX:
            self._known.clear()
        self._known[method, path] = match_info, handler
