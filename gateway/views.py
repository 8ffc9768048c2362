"""Views: what is in the queues, partitions and tables. Any worker answers for the whole cluster.

Each worker describes what it owns (the functions called `…_here`, registered with `app.cluster.peers`); the one that is
asked puts the answers together. A worker that does not answer is named under `missing`.
"""

from __future__ import annotations

import asyncio
import base64
import resource
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from aiohttp import web
from faust.types import TP
from msgspec import Meta

from gateway.json_api import GRANTS, Name, Nothing, answer, query_of, register
from gateway.openapi import Operation, document
from marq.core import rows
from marq.core.digest import STATES, Entry, digest_of, entries, entries_among
from marq.core.partition import Partition
from marq.core.policies import QUEUE_NAME_MAX
from marq.core.segments import Segment
from marq.core.state import MessageState
from marq.errors import BadValueError, MarqError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from app.engine.ownership import OwnedPartition
    from app.worker import WorkerApp

#: Milliseconds for which counts are used again: to count, every message has to be looked at.
COUNTS_KEPT_MS = 500
#: Messages that are looked at before other work has its turn.
TURN_MESSAGES = 2_000
#: Bytes of a payload that a view shows.
SHOWN_BYTES = 64 * 1024

Limit = Annotated[int, Meta(ge=1, le=1_000)]


class Page(msgspec.Struct, forbid_unknown_fields=True):
    prefix: Name = ""
    after: Annotated[str, Meta(max_length=QUEUE_NAME_MAX)] = ""
    limit: Limit = 100


class MessagesPage(msgspec.Struct, forbid_unknown_fields=True):
    state: Literal["ready", "delayed", "in_flight"] | None = None
    after: Annotated[str, Meta(pattern=r"^(\d{1,9}:\d{1,18})?$")] = ""
    limit: Limit = 100


class RowsPage(msgspec.Struct, forbid_unknown_fields=True):
    after: Name = ""
    limit: Limit = 100


class Scope(msgspec.Struct, forbid_unknown_fields=True):
    scope: Literal["worker", "cluster"] = "worker"


class Census(NamedTuple):
    """What is in the partitions of this worker."""

    at_s: float  # monotonic
    counts: dict[str, dict[str, int]]  # by queue and state
    oldest: dict[str, int]  # queue -> when its oldest unfinished message was sent


class Views:
    """All of them."""

    def __init__(self, app: WorkerApp) -> None:
        self.app = app
        self._census = Census(-1e9, {}, {})
        self._sent_ms: dict[tuple[int, int], int] = {}  # of the messages that were the oldest when last looked at
        self._counting: asyncio.Lock = asyncio.Lock()
        for name in (
            "worker",
            "partitions",
            "counts",
            "digest",
            "messages",
            "message",
            "rows",
            "oldest",
            "breaker_states",
            "unserved",
        ):
            app.peers.register(name, getattr(self, f"{name}_here"))

    # ------------------------------------------------------------------ here

    def _held(self, number: int) -> OwnedPartition:
        held = self.app.ownership.held.get(number)
        if held is None or not held.serving:
            raise UnavailableError(f"partition {number} is not served here right now; try again")
        return held

    def _serving(self) -> list[OwnedPartition]:
        held = self.app.ownership.held
        return [held[n] for n in sorted(held) if held[n].serving]

    async def worker_here(self, _: Any = None) -> Any:
        app, held = self.app, self.app.ownership.held
        return {
            "worker": app.ownership.worker_name,
            "url": app.peers.url,
            "ready": app.ownership.ready,
            "partitions": sorted(held),
            "uptime_s": round(time.monotonic() - app.began_s, 1),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "payload_bytes": sum(h.owner.partition.bytes for h in held.values()),
            "pending_bytes": app.producer.pending_bytes,
            "waiting_receives": app.operations.receives.count,
        }

    async def partitions_here(self, _: Any = None) -> Any:
        return {
            "worker": self.app.ownership.worker_name,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "partitions": [self._describe(held) for _, held in sorted(self.app.ownership.held.items())]
            + [
                {"partition": n, "owner": self.app.ownership.worker_name, "phase": "unserved", "reason": reason}
                for n, reason in sorted(self._unserved().items())
            ],
        }

    def _unserved(self) -> dict[int, str]:
        """Partitions that were assigned to this worker and that it can't serve, with the reason."""
        ownership = self.app.ownership
        return {n: reason for n, reason in ownership.unserved.items() if n not in ownership.held}

    async def unserved_here(self, _: Any = None) -> Any:
        return self._unserved()

    def _describe(self, held: OwnedPartition) -> dict[str, Any]:
        partition, now = held.owner.partition, time.monotonic()
        topics = self.app.ownership.topics
        return {
            "partition": held.number,
            "owner": self.app.ownership.worker_name,
            "phase": held.owner.phase.value,
            "epoch": held.owner.epoch,
            "position": partition.position,
            "lag": self._lag(TP(topics.queue, held.number), partition.position),
            "markers_position": partition.markers_position,
            "markers_lag": self._lag(TP(topics.markers, held.number), partition.markers_position),
            "persisted": partition.persisted,
            "checkpoint_age_ms": None if held.checkpoint_s is None else round((now - held.checkpoint_s) * 1000),
            "clock_ms": partition.clock_ms,
            "in_memory": len(partition.messages),
            "held": len(partition.deliveries),
            "parked": partition.segments.parked_total(),
            "segments": len(partition.segments),
            "bytes": partition.bytes,
            "paused": held.paused,
            "counters": dict(partition.counters),
        }

    def _lag(self, tp: TP, position: int) -> int | None:
        try:
            highwater = self.app.consumer.highwater(tp)
        except Exception:  # the consumer may just be without the partition
            return None
        return max(0, highwater - position) if highwater is not None else None

    async def counts_here(self, _: Any = None) -> Any:
        """Messages by queue and state; counted at most twice a second."""
        return (await self._census_now()).counts

    async def _census_now(self) -> Census:
        async with self._counting:
            if time.monotonic() - self._census.at_s > COUNTS_KEPT_MS / 1000:
                self._census = await self._count()
        return self._census

    async def _count(self) -> Census:
        """Look at every message, and at the stamp of the oldest of each queue and partition."""
        counts: dict[str, dict[str, int]] = {}
        lowest: dict[tuple[int, str], int] = {}
        for held in self._serving():
            partition, number = held.owner.partition, held.number
            for queue, count in partition.segments.parked_counts().items():
                counts.setdefault(queue, dict.fromkeys(STATES, 0))[MessageState.READY] += count
                offset = partition.segments.lowest_parked(queue)
                if offset is not None:
                    lowest[number, queue] = offset
            async for entry in _entries_in_turns(partition):
                queue, offset = entry.queue, entry.offset
                counts.setdefault(queue, dict.fromkeys(STATES, 0))[entry.state] += 1
                place = number, queue
                if offset < lowest.get(place, offset + 1):
                    lowest[place] = offset
            if partition.queue_id is not None:
                # they are in a topic of the user's, which nobody counts
                dead = counts.setdefault(partition.queue_id, dict.fromkeys(STATES, 0))
                dead["dead"] = dead.get("dead", 0) + partition.counters["dead"]
        return Census(time.monotonic(), counts, await self._oldest_of(lowest))

    async def _oldest_of(self, lowest: dict[tuple[int, str], int]) -> dict[str, int]:
        """By queue, when the oldest of the lowest messages of its partitions was sent."""
        known, self._sent_ms = self._sent_ms, {}
        oldest: dict[str, int] = {}
        for (number, queue), offset in lowest.items():
            sent_ms = known.get((number, offset))
            if sent_ms is None:
                held = self.app.ownership.held.get(number)
                if held is None or not held.serving:
                    continue
                sent_ms = _sent_ms(held.owner.partition, offset)
                await asyncio.sleep(0)  # a segment may have been read
                if sent_ms is None:
                    continue
            self._sent_ms[number, offset] = sent_ms
            oldest[queue] = min(sent_ms, oldest.get(queue, sent_ms))
        return oldest

    async def ages_here(self) -> dict[str, int]:
        """Age of the oldest unfinished message of each queue, by the brokers' time now."""
        oldest, now = (await self._census_now()).oldest, self.app.ownership.broker_time.now_ms
        return {queue: max(0, (now or sent_ms) - sent_ms) for queue, sent_ms in oldest.items()}

    async def digest_here(self, number: int) -> Any:
        partition = self._held(number).owner.partition
        stamp = {
            "partition": number,
            "epoch": self._held(number).owner.epoch,
            "queue_position": partition.position,
            "markers_position": partition.markers_position,
            "clock_ms": partition.clock_ms,
            "broker_ms": partition.broker_ms,
            "counters": dict(partition.counters),
        }
        found = await asyncio.to_thread(digest_of, list(entries(partition)))
        return stamp | {"queues": found.queues, "digest": found.digest}

    async def messages_here(self, argument: Any) -> Any:
        queue, state, limit = argument["queue"], argument["state"], argument["limit"]
        after: tuple[int, int] = tuple(argument["after"])
        found: list[Any] = []
        for held in self._serving():
            if held.number < after[0] or len(found) >= limit:
                continue
            partition, first = held.owner.partition, after[1] + 1 if held.number == after[0] else 0
            listed = sorted(
                e
                for e in entries(partition)
                if e.queue == queue and e.offset >= first and (state is None or e.state == state)
            )
            found += [_brief(held, entry) for entry in listed[: limit - len(found)]]
        return found

    async def message_here(self, argument: Any) -> Any:
        held = self._held(argument["partition"])
        partition, offset = held.owner.partition, argument["offset"]
        base = {"topic": self.app.ownership.topics.queue, "partition": held.number, "offset": offset}
        if offset >= partition.position:
            raise NotFoundError(f"partition {held.number} has been read up to offset {partition.position} only")
        state = partition.state_of(offset)
        if state is MessageState.DONE:
            return base | {"state": state}
        queue = partition.segments.queue_of(offset)
        if queue is not None:
            segment = partition.segments.find(offset)
            assert segment is not None
            record = partition.records_of(segment)[offset]
        else:
            queue, record = partition.queue_of(offset), partition.record(offset)
        payload = record.value or b""
        delivered = partition.deliveries.get(offset)
        return base | {
            "queue": queue or "",
            "state": state,
            "receives": partition.receives(offset),
            "sent_ms": record.timestamp,
            "age_ms": max(0, (self.app.ownership.broker_time.now_ms or record.timestamp) - record.timestamp),
            "headers": [[name, _text(value)] for name, value in record.headers],
            "payload": base64.b64encode(payload[:SHOWN_BYTES]).decode(),
            "size_bytes": len(payload),
            "poison": partition.poison.get(offset),
            "reserved": offset in partition.reserved,
            "ready_at_ms": partition.delays.get(offset),
            "expires_at_ms": partition.ttls.get(offset),
            "delivery": None
            if delivered is None
            else {
                "epoch": delivered.epoch,
                "delivery": delivered.delivery,
                "receiver": delivered.receiver,
                "leased": delivered.leased,
                "left_ms": max(0, delivered.deadline_ms - partition.clock_ms),
            },
        }

    async def oldest_here(self, queues: Iterable[str]) -> Any:
        """Age of the oldest unfinished message of some queues."""
        ages = await self.ages_here()
        return {queue: ages[queue] for queue in queues if queue in ages}

    async def breaker_states_here(self, _: Any = None) -> Any:
        """Circuit breakers by queue."""
        return self.app.ownership.breakers.states()

    async def _breakers(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """The breakers of those queues that have one; where workers differ for a moment, the one that is not closed."""
        settings_of = self.app.catalog.settings_of
        new = {"state": "closed", "failures": 0, "pause_ms": 0}
        found: dict[str, dict[str, Any]] = {name: new for name in names if settings_of(name).breaker_failures}
        for one in (await self._everywhere("breaker_states"))[0] if found else ():
            for name in found.keys() & one.keys():
                found[name] = max(found[name], one[name], key=lambda b: (b["state"] != "closed", b["failures"]))
        return found

    async def rows_here(self, argument: Any) -> Any:
        held = self._held(argument["partition"])
        table = self.app.ownership.tables.get(argument["table"])
        if table is None:
            raise NotFoundError(f"there is no table {argument['table']!r}; there are messages, markers, progress")
        found = []
        for key, value in table.items(held.number):
            name = key.decode()
            if name > argument["after"]:
                found.append({"key": name, "size_bytes": len(value), "row": _decoded(argument["table"], name, value)})
                if len(found) >= argument["limit"]:
                    break
        return found

    # ------------------------------------------------------------------ of the cluster

    async def _everywhere(self, name: str, argument: Any = None) -> tuple[list[Any], list[str]]:
        answers = await self.app.peers.everywhere(name, argument)
        good = [a for a in answers.values() if not isinstance(a, MarqError)]
        return good, sorted(url for url, a in answers.items() if isinstance(a, MarqError))

    async def _at_owner(self, name: str, number: int, argument: Any) -> Any:
        """Ask the owner of one partition."""
        if not 0 <= number < self.app.ownership.topics.partitions:
            raise NotFoundError(f"there are partitions 0 to {self.app.ownership.topics.partitions - 1}, not {number}")
        held = self.app.ownership.held.get(number)
        if held is not None and held.serving:
            return await getattr(self, f"{name}_here")(argument)
        url = self.app.peers.owner_of(number)
        if url is None or url == self.app.peers.url:
            raise UnavailableError(f"partition {number} is served by nobody right now")
        return await self.app.peers.call(url, name, argument)

    async def workers(self, request: web.Request) -> web.Response:
        query_of(request, Nothing)
        found, missing = await self._everywhere("worker")
        return answer(request, {"workers": sorted(found, key=lambda w: w["url"]), "missing": missing})

    async def partitions(self, request: web.Request) -> web.Response:
        if query_of(request, Scope).scope == "worker":
            return answer(request, await self.partitions_here())
        found, missing = await self._everywhere("partitions")
        listed = [p for one in found for p in one["partitions"]]
        return answer(request, {"partitions": sorted(listed, key=lambda p: p["partition"]), "missing": missing})

    async def counts_of(self, queue: str) -> dict[str, int]:
        """Messages of a queue by state, in the whole cluster."""
        found, _ = await self._everywhere("counts")
        return {state: sum(one[queue][state] for one in found if queue in one) for state in STATES}

    async def _stats(self, names: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
        found, missing = await self._everywhere("counts")
        counts: dict[str, dict[str, int]] = {}
        for one in found:
            for queue, states in one.items():
                total = counts.setdefault(queue, dict.fromkeys(STATES, 0))
                for state, count in states.items():
                    total[state] = total.get(state, 0) + count
        ages: dict[str, int] = {}
        for one in (await self._everywhere("oldest", [name for name in names if name in counts]))[0]:
            for queue, age in one.items():
                ages[queue] = max(ages.get(queue, 0), age)
        breakers, received = await self._breakers(names), await self.app.receivers.of(names)
        none = dict.fromkeys(STATES, 0)
        stats: list[dict[str, Any]] = []
        for name in names:
            mine = counts.get(name, none)
            letters = counts.get(self.app.catalog.settings_of(name).dead_letters_of(name), none)
            dead = mine.get("dead", sum(letters.values()))
            more = {
                "dead": dead,
                "oldest_ms": ages.get(name),
                "breaker": breakers.get(name),
                "has_receiver": received[name],
            }
            stats.append({"queue": name} | mine | more)
        return stats, missing

    async def queues(self, request: web.Request) -> web.Response:
        page, grants = query_of(request, Page), request[GRANTS]
        names = [
            name
            for name in self.app.catalog.names()
            if name.startswith(page.prefix) and name > page.after and grants.allow("inspect", name)
        ]
        stats, missing = await self._stats(names[: page.limit])
        more = names[page.limit - 1] if len(names) > page.limit else ""
        unserved = await self._unserved_everywhere()
        return answer(request, {"queues": stats, "after": more, "missing": missing, "unserved": unserved})

    async def _unserved_everywhere(self) -> dict[str, str]:
        """Partitions of the cluster that nobody serves, with the reason: their messages are in no count."""
        found, _ = await self._everywhere("unserved")
        return {str(number): reason for one in found for number, reason in sorted(one.items())}

    async def queue(self, request: web.Request) -> web.Response:
        query_of(request, Nothing)
        name = request.match_info["queue"]
        self.app.catalog.require(name)
        stats, missing = await self._stats([name])
        return answer(request, stats[0] | {"missing": missing, "unserved": await self._unserved_everywhere()})

    async def messages(self, request: web.Request) -> web.Response:
        page, name = query_of(request, MessagesPage), request.match_info["queue"]
        self.app.catalog.require(name)
        after = [int(part) for part in page.after.split(":")] if page.after else [-1, -1]
        found, missing = await self._everywhere(
            "messages", {"queue": name, "state": page.state, "after": after, "limit": page.limit + 1}
        )
        listed = sorted((m for one in found for m in one), key=lambda m: (m["partition"], m["offset"]))
        shown = listed[: page.limit]
        more = f"{shown[-1]['partition']}:{shown[-1]['offset']}" if len(listed) > page.limit else ""
        return answer(request, {"messages": shown, "after": more, "missing": missing})

    async def message(self, request: web.Request) -> web.Response:
        query_of(request, Nothing)
        number, offset = _number(request, "partition"), _number(request, "offset")
        found = await self._at_owner("message", number, {"partition": number, "offset": offset})
        if found["state"] == "done":
            request[GRANTS].require("inspect", None, everywhere=True)
        else:
            request[GRANTS].require("inspect", found["queue"])
        return answer(request, found)

    async def state(self, request: web.Request) -> web.Response:
        query_of(request, Nothing)
        number = _number(request, "partition")
        return answer(request, await self._at_owner("digest", number, number))

    async def rows(self, request: web.Request) -> web.Response:
        page, number = query_of(request, RowsPage), _number(request, "partition")
        found = await self._at_owner(
            "rows",
            number,
            {
                "partition": number,
                "table": request.match_info["table"],
                "after": page.after,
                "limit": page.limit,
            },
        )
        more = found[-1]["key"] if len(found) == page.limit else ""
        return answer(request, {"rows": found, "after": more})


def _sent_ms(partition: Partition, offset: int) -> int | None:
    """When a message was sent; None if it is done meanwhile."""
    if offset in partition.messages:
        return int(partition.record(offset).timestamp)
    segment = partition.segments.find(offset)
    if segment is None or not segment.is_parked(offset):
        return None
    return int(partition.records_of(segment)[offset].timestamp)


async def _entries_in_turns(partition: Partition) -> AsyncIterator[Entry]:
    """Messages in memory, about as they are at one time: where there are many, other work has its turns between."""
    offsets = list(partition.messages)
    for start in range(0, len(offsets), TURN_MESSAGES):
        for entry in list(entries_among(partition, offsets[start : start + TURN_MESSAGES])):
            yield entry
        await asyncio.sleep(0)


def _brief(held: OwnedPartition, entry: Entry) -> dict[str, Any]:
    partition = held.owner.partition
    record = partition.messages.get(entry.offset)
    if isinstance(record, Segment):
        record = None  # its payload is only in the table
    return {
        "partition": held.number,
        "offset": entry.offset,
        "state": entry.state,
        "receives": entry.receives,
        "sent_ms": record.timestamp if record is not None else None,
        "size_bytes": len(record.value or b"") if record is not None else None,
    }


def _number(request: web.Request, name: str) -> int:
    text = request.match_info[name]
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise BadValueError(f"{name} is a number, not {text[:50]!r}")
    return int(text)


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="backslashreplace")


def _decoded(table: str, key: str, value: bytes) -> Any:
    if table == "messages":
        return [
            {"offset": r.offset, "sent_ms": r.timestamp, "queue": _text(r.key), "size_bytes": len(r.value or b"")}
            for r in rows.decode_messages(value).records()
        ]
    if table == "progress":
        return _plain(rows.decode_manifest(value))
    kind = rows.kind_of(key)
    if kind in ("dedup", "origins"):
        digests, offsets, timestamps_ms = rows.decode_dedup(value)
        ids = zip(digests, offsets, timestamps_ms, strict=True)
        return [{"id": digest.hex(), "offset": offset, "sent_ms": sent_ms} for digest, offset, sent_ms in ids]
    return _plain(rows.decode_marker_row(kind, value))


def _plain(value: Any) -> Any:
    """As plain values with names, whatever the row's own layout is."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def define(app: WorkerApp) -> list[Operation]:
    """Register the routes; what they are."""
    views = app.views = Views(app)

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
    register(app, operations)
    return operations


def define_document(app: WorkerApp, operations: list[Operation]) -> None:
    """Register `/v1/openapi.json`."""
    body = msgspec.json.encode(document(operations))

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app.web.web_app.router.add_get("/v1/openapi.json", openapi)
