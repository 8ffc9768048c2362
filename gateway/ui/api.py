"""Routes of the pages beside the JSON API: overview, lists of queues, histories, tasks that move messages."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Meta

from app import bodies
from app.cluster.peers import is_gone
from app.engine.queue_records import MoveTask
from app.service.census import Census
from app.service.histories import FLOWS, STEP_S, Series
from app.service.move_tasks import MoveTasks
from app.service.operations import QueueService
from app.service.takers import Takers
from app.service.timelines import Timelines
from app.service.trends import Cluster, QueueNow, Trends
from gateway.auth import PERMISSIONS, Grants, may_see, require_message
from gateway.routes import GRANTS, Body, answer, query_of, secured
from gateway.schemas import SETTINGS_BYTES, Name
from gateway.ui.fields import FIELDS
from gateway.ui.login import SessionApi
from marq.core.policies import QUEUE_NAME_MAX
from marq.errors import BadValueError, NotAllowedError, NotFoundError
from marq.waiting import forsaken

#: Queues that the overview names for each kind of problem.
NAMED_MAX = 8
#: Points of the small chart in a list.
SPARK_POINTS = 30
#: The highest rate that a task can be given, messages a second.
PER_SECOND_MAX = 100_000
#: Sorted lists of queues that are reused until the next count.
ORDERS_MAX = 50

Sort = Literal["name", "unfinished", "ready", "delayed", "in_flight", "dead", "oldest", "sent", "done"]


class QueuesWanted(msgspec.Struct, forbid_unknown_fields=True):
    """A page of queues."""

    search: Name = ""
    sort: Sort = "name"
    desc: bool = False
    page: Annotated[int, Meta(ge=1, le=100_000)] = 1
    per: Annotated[int, Meta(ge=1, le=200)] = 50


class MoveWanted(msgspec.Struct, forbid_unknown_fields=True):
    """A task that moves all messages of a queue; see `app.service.move_tasks`."""

    to: Annotated[str, Meta(max_length=QUEUE_NAME_MAX)] = ""
    per_second: Annotated[int, Meta(ge=0, le=PER_SECOND_MAX)] = 0


class _Counted(NamedTuple):
    """The sums of the overview, over all queues."""

    shown: dict[str, QueueNow]
    totals: dict[str, Any]
    dead: list[tuple[str, int, int]]  # dead-letter queues with messages: name, count, age of the oldest
    busiest: list[dict[str, Any]]
    at_ms: int


class Api:
    """Answers requests of pages."""

    def __init__(
        self,
        operations: QueueService,
        trends: Trends,
        timelines: Timelines,
        takers: Takers,
        census: Census,
        move_tasks: MoveTasks,
        room: bodies.Room,
    ) -> None:
        self._operations = operations
        self._catalog = operations.catalog
        self._trends = trends
        self._timelines = timelines
        self._move_tasks = move_tasks
        self._takers = takers
        self._census = census
        self._move = Body(MoveWanted, SETTINGS_BYTES, room)

    # ------------------------------------------------------------------ overview

    async def overview(self, request: web.Request) -> web.Response:
        grants = request[GRANTS]
        cluster = await self._trends.cluster()
        everywhere = grants.allow_everywhere("inspect")
        counted: _Counted = _reused(cluster, ("overview", grants), lambda: self._counted(cluster, grants))
        workers = cluster.workers.values()
        return answer(
            request,
            {
                **self._frame(cluster, grants),
                "totals": counted.totals,
                "queues": len(self._names(cluster, grants)),
                "history": _history(cluster) if everywhere else None,
                "workers": {
                    "count": len(workers),
                    "ready": sum(worker.ready for worker in workers),
                    "missing": cluster.missing if everywhere else len(cluster.missing),
                    "rebalancing": any(worker.rebalancing for worker in workers),
                    "waiting_receives": sum(worker.waiting_receives for worker in workers),
                },
                "partitions": self._operations.ownership.topics.partitions,
                "trouble": self._trouble(cluster, grants, counted),
                "busiest": counted.busiest,
            },
        )

    def _frame(self, cluster: Cluster, grants: Grants) -> dict[str, Any]:
        """What each page has to know: since when figures leave something out, and where other workers are."""
        unknown = {"partitions": sorted(cluster.unknown), "since_ms": min(cluster.unknown.values(), default=0)}
        return {
            "now_ms": _now_ms(),
            "unknown": unknown if cluster.unknown else None,
            "others": sorted(self._trends.others(cluster)) if grants.allow_everywhere("inspect") else [],
        }

    def _counted(self, cluster: Cluster, grants: Grants) -> _Counted:
        """The sums of the overview, over all queues that the key may inspect."""
        shown = self._visible(cluster, grants)
        total = QueueNow()
        for queue, now in shown.items():
            if not self._catalog.takes_dead_letters(queue):
                total.add(now)
        dead = self._dead_letters(shown)
        totals = _told(total) | {"dead": total.dead + sum(count for _, count, _ in dead)}
        busiest = [_told(shown[queue]) | {"name": queue} for queue in self._busiest(shown)]
        return _Counted(shown, totals, dead, busiest, _now_ms())

    def _visible(self, cluster: Cluster, grants: Grants) -> dict[str, QueueNow]:
        """Queues with messages that the key may inspect; "" has records that are in no queue."""
        if grants.allow_everywhere("inspect"):
            return cluster.queues
        return {q: now for q, now in cluster.queues.items() if q and grants.allow("inspect", q)}

    def _busiest(self, shown: dict[str, QueueNow]) -> list[str]:
        def weight(queue: str) -> tuple[float, int]:
            now = shown[queue]
            return now.sent_rate + now.done_rate, now.unfinished

        takes_dead_letters = self._catalog.takes_dead_letters
        return heapq.nlargest(NAMED_MAX, (q for q in shown if q and not takes_dead_letters(q)), key=weight)

    def _dead_letters(self, shown: dict[str, QueueNow]) -> list[tuple[str, int, int]]:
        """Dead-letter queues with messages: name, count, age of the oldest."""
        return [
            (queue, now.unfinished, now.oldest_ms)
            for queue, now in shown.items()
            if now.unfinished and self._catalog.takes_dead_letters(queue)
        ]

    def _trouble(self, cluster: Cluster, grants: Grants, counted: _Counted) -> list[dict[str, Any]]:
        """Problems, the worst first. The page has the text for each kind."""
        found: list[dict[str, Any]] = []
        shown, dead, now_ms = counted.shown, counted.dead, counted.at_ms
        if grants.allow_everywhere("inspect"):
            found += [{"kind": "address", "what": one.what, "mend": one.mend} for one in cluster.troubles]
            found += [{"kind": "missing", "worker": url} for url in cluster.missing]
            served = {n for worker in cluster.workers.values() for n in worker.partitions}
            reasons = {n: r for worker in cluster.workers.values() for n, r in worker.unserved.items()}
            for number in range(self._operations.ownership.topics.partitions):
                if number not in served and (number in reasons or number not in cluster.unseen):
                    found.append({"kind": "unserved", "partition": number, "reason": reasons.get(number, "")})
            for number, stall in {n: s for w in cluster.workers.values() for n, s in w.stalled.items()}.items():
                one = {"kind": "stalled", "partition": number, "topic": stall.topic, "seconds": stall.seconds}
                found.append(one | {"kind": "waiting", "reason": stall.reason} if stall.reason else one)
            for number, losses in sorted((n, lost) for w in cluster.workers.values() for n, lost in w.lost.items()):
                messages = sum(loss.messages for loss in losses)
                found.append({"kind": "lost", "partition": number, "count": messages, "at_ms": losses[-1].at_ms})
            found += [
                {"kind": "topics", "what": line}
                for line in sorted({t for w in cluster.workers.values() for t in w.topics})
            ]
            found += [
                {"kind": "unreadable", "partition": number, "count": count}
                for worker in cluster.workers.values()
                for number, count in worker.unreadable.items()
            ]
            if "" in cluster.queues:
                found.append({"kind": "poison", "count": cluster.queues[""].unfinished})
        breakers = {queue for worker in cluster.workers.values() for queue in worker.breakers}
        found += [{"kind": "breaker", "queue": queue} for queue in sorted(breakers) if queue in shown]
        without: dict[str, int] = {}
        for worker in cluster.workers.values():
            for queue, count in worker.without_receiver.items():
                if queue in shown:
                    without[queue] = without.get(queue, 0) + count
        for queue, count in _largest(without):
            found.append({"kind": "without_receiver", "queue": queue, "count": count, "words": forsaken("it")})
        more = len(without) - NAMED_MAX
        if more > 0:
            found.append({"kind": "more_without_receiver", "count": more})
        by_count = sorted(dead, key=lambda one: one[1], reverse=True)
        for queue, count, oldest_ms in by_count[:NAMED_MAX]:
            since_ms = now_ms - oldest_ms if oldest_ms >= 0 else None
            found.append({"kind": "dead", "queue": queue, "count": count, "since_ms": since_ms})
        if len(by_count) > NAMED_MAX:
            found.append({"kind": "more_dead", "count": len(by_count) - NAMED_MAX})
        for queue, record in islice(self._catalog.moving.items(), NAMED_MAX):
            if grants.allow("inspect", queue):
                found += [{"kind": "moving", "queue": queue} | _task(t) for t in record.moves if t.active]
        return found

    # ------------------------------------------------------------------ queues

    async def queues(self, request: web.Request) -> web.Response:
        wanted, grants = query_of(request, QueuesWanted), request[GRANTS]
        cluster = await self._trends.cluster()
        names = self._ordered(cluster, wanted, grants)
        pages = max(1, -(-len(names) // wanted.per))
        page = min(wanted.page, pages)
        shown = names[(page - 1) * wanted.per : page * wanted.per]
        series = await self._trends.series(shown)
        return answer(
            request,
            {
                **self._frame(cluster, grants),
                "total": len(names),
                "page": page,
                "pages": pages,
                "missing": len(cluster.missing),
                "queues": [self._row(cluster, queue, series[queue]) for queue in shown],
            },
        )

    def _row(self, cluster: Cluster, queue: str, series: Series) -> dict[str, Any]:
        settings, record = self._catalog.settings_of(queue), self._catalog.records.get(queue)
        return {
            "name": queue,
            "fifo": settings.fifo,
            "purging": bool(record is not None and record.purge),
            "spark": _thin(series.unfinished),
            **_told(cluster.queues.get(queue, QueueNow())),
            "dead": self._dead_of(cluster, queue),
        }

    def _dead_of(self, cluster: Cluster, queue: str) -> int:
        own = cluster.queues.get(queue)
        if own is not None and own.dead:
            return own.dead
        dead_letters = cluster.queues.get(self._catalog.settings_of(queue).dead_letters_of(queue))
        return dead_letters.unfinished if dead_letters is not None else 0

    def _names(self, cluster: Cluster, grants: Grants) -> list[str]:
        """Queues that the key may inspect, in order."""
        if grants.allow_everywhere("inspect"):
            return cluster.names
        allowed: list[str] = _reused(
            cluster, ("names", grants), lambda: [q for q in cluster.names if grants.allow("inspect", q)]
        )
        return allowed

    def _ordered(self, cluster: Cluster, wanted: QueuesWanted, grants: Grants) -> list[str]:
        def ordered() -> list[str]:
            names = self._names(cluster, grants)
            if wanted.search:
                text = wanted.search.casefold()
                names = [name for name in names if text in name.casefold()]
            if wanted.sort != "name":
                # equal ones stay in the order of names
                return sorted(names, key=self._weight(cluster, wanted.sort), reverse=wanted.desc)
            return names[::-1] if wanted.desc else names

        names: list[str] = _reused(cluster, (wanted.search, wanted.sort, wanted.desc, grants), ordered)
        return names

    def _weight(self, cluster: Cluster, sort: str) -> Callable[[str], float]:
        queues, nothing = cluster.queues, QueueNow()
        if sort == "dead":
            return lambda queue: self._dead_of(cluster, queue)
        attribute = {"oldest": "oldest_ms", "sent": "sent_rate", "done": "done_rate"}.get(sort, sort)
        return lambda queue: getattr(queues.get(queue, nothing), attribute)

    async def queue(self, request: web.Request) -> web.Response:
        queue, grants = request.match_info["queue"], request[GRANTS]
        if not may_see(grants, queue):
            raise NotAllowedError(f"this key has no permission for queue {queue!r}")
        info = self._operations.get_queue(queue)
        target = self._catalog.settings_of(queue).dead_letters_of(queue)
        told: dict[str, Any] = {
            "now_ms": _now_ms(),
            "info": info,
            "can": sorted(p for p in PERMISSIONS if grants.allow(p, queue)),
            "may_send_everywhere": grants.allow_everywhere("send"),
            "dead_letter_queue": target,
            "is_dead_letter_queue": self._catalog.takes_dead_letters(queue),
        }
        if grants.allow("inspect", queue):
            cluster = await self._trends.cluster()
            series = (await self._trends.series([queue]))[queue].since(cluster.first)
            record = self._catalog.records.get(queue)
            told |= self._frame(cluster, grants) | {
                "now": _told(cluster.queues.get(queue, QueueNow())) | {"dead": self._dead_of(cluster, queue)},
                "missing": len(cluster.missing),
                "history": {
                    "first_ms": series.first * STEP_S * 1000,
                    "step_ms": STEP_S * 1000,
                    "sent": series.sent,
                    "done": series.done,
                    "unfinished": series.unfinished,
                    "in_flight": series.in_flight,
                },
                "takers": await self._takers.of(queue),
                "moves": [_task(task) for task in record.moves] if record is not None and record.active else [],
                "breaker_open": any(queue in worker.breakers for worker in cluster.workers.values()),
            }
        return answer(request, told)

    # ------------------------------------------------------------------ tasks that move messages

    async def start_move(self, request: web.Request) -> web.Response:
        queue, grants = request.match_info["queue"], request[GRANTS]
        wanted = await self._move.read(request)
        self._catalog.require(queue)
        grants.require("send", wanted.to or None, everywhere=True)
        task = await self._move_tasks.begin(queue, wanted.to, wanted.per_second)
        return answer(request, _task(task), 202)

    async def stop_move(self, request: web.Request) -> web.Response:
        queue, task_id = request.match_info["queue"], request.match_info["task"]
        if not any(task.id == task_id for task in self._move_tasks.tasks_of(queue)):
            raise NotFoundError("there is no such task")
        await self._move_tasks.cancel(queue, task_id)
        return answer(request, {"ok": True}, 202)

    # ------------------------------------------------------------------ messages, tables, settings

    async def timeline(self, request: web.Request) -> web.Response:
        numbers = [request.match_info["partition"], request.match_info["offset"]]
        if not all(text.isascii() and text.isdigit() and len(text) <= 18 for text in numbers):
            raise BadValueError("partition and offset are numbers")
        place = int(numbers[0]), int(numbers[1])
        grants = request[GRANTS]
        told = await self._timelines.of(
            *place,
            by=grants.share,
            gone=is_gone(request),
            check=lambda queue: require_message(grants, *place, queue),
        )
        return answer(request, told)

    async def settings(self, request: web.Request) -> web.Response:
        return answer(request, {"fields": FIELDS, "default": self._catalog.default})


def _reused(cluster: Cluster, key: Any, made: Callable[[], Any]) -> Any:
    """A value that is computed from the counts of the cluster, and reused as long as they are the same."""
    if key in cluster.shown:
        return cluster.shown[key]
    value = made()
    if len(cluster.shown) < ORDERS_MAX:
        cluster.shown[key] = value
    return value


def _largest(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda one: one[1], reverse=True)[:NAMED_MAX]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _told(now: QueueNow) -> dict[str, Any]:
    return {
        "ready": now.ready,
        "delayed": now.delayed,
        "in_flight": now.in_flight,
        "unfinished": now.unfinished,
        "dead": now.dead,
        "oldest_ms": now.oldest_ms if now.oldest_ms >= 0 else None,
        "sent_rate": round(now.sent_rate, 1),
        "done_rate": round(now.done_rate, 1),
    }


def _history(cluster: Cluster) -> dict[str, Any]:
    history = cluster.history
    nothing = (None,) * len(FLOWS)
    columns = list(zip(*(p.flows if p is not None else nothing for p in history), strict=True)) or [()] * len(FLOWS)
    return {
        "first_ms": cluster.first * STEP_S * 1000,
        "step_ms": STEP_S * 1000,
        **dict(zip(FLOWS, columns, strict=True)),
        "unfinished": [None if point is None else point.unfinished for point in history],
        "in_flight": [None if point is None else point.in_flight for point in history],
        "oldest_ms": [None if point is None else max(0, point.oldest_ms) for point in history],
    }


def _thin(values: list[int | None]) -> list[int | None]:
    """About `SPARK_POINTS` of the values: the highest of each stretch that is known."""
    size = -(-len(values) // SPARK_POINTS)
    parts = ([n for n in values[i : i + size] if n is not None] for i in range(0, len(values), size))
    return [max(part, default=None) for part in parts]


def _task(task: MoveTask) -> dict[str, Any]:
    return {
        "id": task.id,
        "to": task.to,
        "state": task.state,
        "moved": task.moved,
        "total": task.total,
        "started_ms": task.started_ms,
        "per_second": task.per_second,
        "reason": task.reason,
    }


def define(router: web.UrlDispatcher, api: Api, session: SessionApi) -> None:
    """Register the routes."""
    queue = "/ui/api/queues/{queue:[^/]+}"
    for method, path, permission, handler in (
        ("GET", "/ui/api/overview", "inspect", api.overview),
        ("GET", "/ui/api/queues", "inspect", api.queues),
        ("GET", "/ui/api/settings", "", api.settings),
        ("GET", queue, "", api.queue),
        ("POST", f"{queue}/moves", "receive", api.start_move),
        ("DELETE", f"{queue}/moves/{{task}}", "receive", api.stop_move),
        ("GET", "/ui/api/messages/{partition}/{offset}", "inspect", api.timeline),
    ):
        router.add_route(method, path, secured(permission, handler) if permission else handler)

    def guarding_itself(handler: Any) -> Any:
        async def answered(request: web.Request) -> web.Response:
            return await handler(request)  # type: ignore[no-any-return]

        answered.guards_itself = True  # type: ignore[attr-defined]
        return answered

    for method, handler in (("GET", session.get), ("POST", session.begin), ("DELETE", session.end)):
        router.add_route(method, "/ui/api/session", guarding_itself(handler))
