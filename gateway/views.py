"""Read-only routes: workers, queues, partitions, messages and tables; see `app.service.inspection`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from app.engine.catalog import Catalog
from app.service.descriptions import State
from app.service.inspection import Inspection
from app.service.message_views import SHOWN_BYTES
from app.service.paging import page_of
from gateway.auth import require_message
from gateway.openapi import Operation, document
from gateway.routes import GRANTS, answer, query_of, register
from gateway.schemas import Name, Nothing
from marq.core.policies import QUEUE_NAME_MAX
from marq.errors import BadValueError

Limit = Annotated[int, Meta(ge=1, le=1_000)]


class Page(msgspec.Struct, forbid_unknown_fields=True):
    prefix: Name = ""
    after: Annotated[str, Meta(max_length=QUEUE_NAME_MAX)] = ""
    limit: Limit = 100


class MessagesPage(msgspec.Struct, forbid_unknown_fields=True):
    state: State | None = None
    after: Annotated[str, Meta(pattern=r"^(\d{1,9}:\d{1,18})?$(?!\n)")] = ""
    limit: Limit = 100
    payload_bytes: Annotated[int, Meta(ge=0, le=SHOWN_BYTES)] = 0


class RowsPage(msgspec.Struct, forbid_unknown_fields=True):
    after: Name = ""
    limit: Limit = 100


class Scope(msgspec.Struct, forbid_unknown_fields=True):
    scope: Literal["worker", "cluster"] = "worker"


class Views:
    """The handlers."""

    def __init__(self, inspection: Inspection, catalog: Catalog) -> None:
        self._inspection = inspection
        self._catalog = catalog

    async def workers(self, request: web.Request) -> web.Response:
        query_of(request, Nothing)
        workers, missing = await self._inspection.workers()
        troubles = self._inspection.troubles()
        return answer(request, {"workers": workers, "missing": missing, "troubles": troubles})

    async def partitions(self, request: web.Request) -> web.Response:
        if query_of(request, Scope).scope == "worker":
            return answer(request, await self._inspection.partitions_here(None))
        partitions, missing = await self._inspection.partitions()
        return answer(request, {"partitions": partitions, "missing": missing})

    async def queues(self, request: web.Request) -> web.Response:
        page, grants = query_of(request, Page), request[GRANTS]
        visible = partial(grants.allow, "inspect")
        names, more = await page_of(self._catalog.names_from(page.prefix, page.after), page.limit, visible)
        stats = await self._inspection.stats(names)
        return answer(request, msgspec.structs.asdict(stats) | {"after": more})

    async def queue(self, request: web.Request) -> web.Response:
        query_of(request, Nothing)
        name = request.match_info["queue"]
        self._catalog.require(name)
        found = msgspec.structs.asdict(await self._inspection.stats([name]))
        (stats,) = found.pop("queues")
        return answer(request, msgspec.structs.asdict(stats) | found)

    async def messages(self, request: web.Request) -> web.Response:
        page, name = query_of(request, MessagesPage), request.match_info["queue"]
        self._catalog.require(name)
        partition, offset = page.after.split(":") if page.after else (-1, -1)
        listed, missing = await self._inspection.messages(
            name, page.state, (int(partition), int(offset)), page.limit + 1, page.payload_bytes
        )
        shown = listed[: page.limit]
        more = f"{shown[-1].partition}:{shown[-1].offset}" if len(listed) > page.limit else ""
        return answer(request, {"messages": shown, "after": more, "missing": missing})

    async def message(self, request: web.Request) -> web.Response:
        query_of(request, Nothing)
        place = _number(request, "partition"), _number(request, "offset")
        found = await self._inspection.message(*place)
        require_message(request[GRANTS], *place, found.queue)
        return answer(request, found)

    async def state(self, request: web.Request) -> web.Response:
        query_of(request, Nothing)
        return answer(request, await self._inspection.digest(_number(request, "partition")))

    async def rows(self, request: web.Request) -> web.Response:
        page, number = query_of(request, RowsPage), _number(request, "partition")
        rows = await self._inspection.rows(number, request.match_info["table"], page.after, page.limit)
        more = rows[-1].key if len(rows) == page.limit else ""
        return answer(request, {"rows": rows, "after": more})


def _number(request: web.Request, name: str) -> int:
    text = request.match_info[name]
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise BadValueError(f"{name} is a number, not {text[:50]!r}")
    return int(text)


def define(router: web.UrlDispatcher, inspection: Inspection, catalog: Catalog) -> list[Operation]:
    """Register the routes. Returns the operations."""
    views = Views(inspection, catalog)

    def view(path: str, handler: Any, summary: str, query: Any = Nothing, everywhere: bool = False) -> Operation:
        return Operation("GET", path, "inspect", handler, summary, query=query, everywhere=everywhere, tag="views")

    operations = [
        view("/v1/workers", views.workers, "All workers"),
        view("/v1/partitions", views.partitions, "Partitions of this worker, or of all", Scope),
        view("/v1/stats", views.queues, "Queues with counts by state", Page),
        view("/v1/queues/{queue}/stats", views.queue, "A queue with counts by state"),
        view("/v1/queues/{queue}/messages", views.messages, "Messages of a queue by state", MessagesPage),
        view("/v1/messages/{partition}/{offset}", views.message, "One message with everything"),
        view("/v1/state/{partition}", views.state, "Counts and digest of a partition", everywhere=True),
        view("/v1/tables/{table}/{partition}", views.rows, "Rows of a table, decoded", RowsPage, everywhere=True),
    ]
    register(router, operations)
    return operations


def define_document(router: web.UrlDispatcher, operations: list[Operation]) -> None:
    """Register `/v1/openapi.json`."""
    body = msgspec.json.encode(document(operations))

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    router.add_get("/v1/openapi.json", openapi)
