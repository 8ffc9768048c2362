"""The page and its files. Everybody who reaches the port may load them: they contain no data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import blake2b
from pathlib import Path

from aiohttp import web

from gateway.auth import Keys, check_browser
from marq.errors import NotFoundError

HOME = Path(__file__).parent
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
#: Load from this host only, run only scripts that are files, and show in no frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class File:
    """A file of the page. It is read once."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.kind = TYPES[path.suffix]
        self.tag = f'"{blake2b(self.body, digest_size=12).hexdigest()}"'

    def answer(self, request: web.Request) -> web.Response:
        """Answer with the file, or that it has not changed."""
        headers = HEADERS | {"ETag": self.tag}
        if request.headers.get("If-None-Match") == self.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=self.body, content_type=self.kind, charset="utf-8", headers=headers)


def files() -> dict[str, File]:
    """The files below `/ui/static/`, by name."""
    found = {}
    for folder in ("static", "vendor"):
        for path in sorted((HOME / folder).iterdir()):
            if path.suffix in TYPES:
                found[path.name] = File(path)
    return found


def asks_for_page(request: web.Request) -> bool:
    """True if a browser wants the page: on `/`, all other requests are SQS."""
    return (
        "text/html" in request.headers.get("Accept", "")
        and "Authorization" not in request.headers
        and "Action" not in request.query
    )


def define(router: web.UrlDispatcher, keys: Keys, otherwise: Handler) -> None:
    """Register the routes. `otherwise`: the handler for a `GET` of `/` that does not come from a browser."""
    served = files()
    shell = served.pop("index.html")

    def check(request: web.Request) -> None:
        if not keys:
            check_browser(request.method, request.headers)

    async def page(request: web.Request) -> web.StreamResponse:
        check(request)
        return shell.answer(request)

    async def root(request: web.Request) -> web.StreamResponse:
        return await (page(request) if asks_for_page(request) else otherwise(request))

    async def file(request: web.Request) -> web.StreamResponse:
        check(request)
        found = served.get(request.match_info["name"])
        if found is None:
            raise NotFoundError("there is no such file")
        return found.answer(request)

    for handler in (page, root, file):
        handler.guards_itself = True  # type: ignore[attr-defined]
    router.add_get("/", root)
    router.add_get("/ui/static/{name}", file)
    router.add_get("/ui", page)
    router.add_get("/ui/{page:(?!api/|static/).*}", page)
