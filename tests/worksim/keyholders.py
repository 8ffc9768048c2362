"""Requests with keys that have few permissions, or none: the real guard of the gateway, and the real JSON API.

Clients call the operations of a worker. These come over a simulated HTTP, and what a key may do is written down here a
second time.
"""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from app.bodies import Room
from gateway import json_api
from gateway.auth import Keys
from gateway.routes import guard
from gateway.shares import Share
from marq.protocol.messages import Received

if TYPE_CHECKING:
    from tests.worksim.clients import Clients
    from tests.worksim.worker import Worker

#: What the owner of each key may do, and where; None: there is no such key.
RIGHTS: dict[str, dict[str, tuple[str, ...]] | None] = {
    "key-of-a-sender-0": {"send": ("plain", "other")},
    "key-of-a-receiver": {"receive": ("other", "everything")},
    "key-of-a-manager-": {"manage": ("other",)},
    "key-of-an-auditor": {"inspect": ("few",)},
    "key-of-a-stranger": None,
}
KEYS = ",".join(
    f"{key}={permission}:{'|'.join(queues)}"
    for key, rights in RIGHTS.items()
    for permission, queues in (rights or {}).items()
)
BODY_MAX_BYTES = 1 << 20
REFUSED = (401, 403)
#: Deliveries to others that the owners of keys know the receipts of.
RECEIPTS_MAX = 20


class _Asked(NamedTuple):
    """A request, and the permission that it needs; a queue of None: it is enough to have it anywhere."""

    method: str
    path: str
    permission: str | None
    queue: str | None
    body: Any
    #: Not sent if it is allowed, because it would change what clients rely on.
    spoils: bool = False


class _Request(dict[Any, Any]):
    """In the place of aiohttp's request."""

    def __init__(self, asked: _Asked, key: str) -> None:
        super().__init__()
        data = msgspec.json.encode(asked.body) if asked.body is not None else b""
        self.method = asked.method
        self.path = asked.path.replace("{queue}", asked.queue or "")
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.query: dict[str, str] = {}
        self.content_type = "application/json"
        self.content_length = len(data)
        self.content = SimpleNamespace(is_eof=lambda: True, read_nowait=lambda: data)
        self.match_info = _Match({"queue": asked.queue} if "{queue}" in asked.path else {})
        self.transport = SimpleNamespace(is_closing=lambda: False)


class _Match(dict[str, Any]):
    handler = None


class Gateway:
    """The JSON API of a worker, with keys."""

    def __init__(self, worker: Worker) -> None:
        self._handlers: dict[tuple[str, str], Any] = {}
        room, keys = Room(1 << 30), Keys(KEYS)
        for grants in keys._grants.values():
            grants.share = Share(time.monotonic)  # the clock of this run
        json_api.define(self, worker.operations, BODY_MAX_BYTES, room, Room(1 << 30))  # type: ignore[arg-type]
        self._guarded = guard(keys, lambda headers: None)

    def add_route(self, method: str, path: str, handler: Any) -> None:
        self._handlers[method, path.replace("{queue:[^/]+}", "{queue}")] = handler

    async def answer(self, asked: _Asked, key: str) -> Any:
        return await self._guarded(_Request(asked, key), self._handlers[asked.method, asked.path])


class Keyholders:
    """Who have keys."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._world = clients.world
        #: Of deliveries to anybody.
        self.receipts: deque[Received] = deque(maxlen=RECEIPTS_MAX)

    async def ask(self) -> None:
        """Make a request that a key may not allow."""
        clients, world, r = self._clients, self._world, self._clients.random
        key, asked = r.choice(list(RIGHTS)), self._request()
        allowed = self._allows(key, asked)
        if asked.spoils and allowed:
            return
        if allowed:
            self._expect(asked)
        elif asked.path.endswith("/messages"):
            clients.refused.add(asked.body["messages"][0]["payload"])

        async def serve(worker: Worker) -> None:
            response = await worker.gateway.answer(asked, key)
            what = f"{worker.process.name}: {response.status} for {asked.method} {asked.path}, {asked.queue}, of {key}"
            if (response.status in REFUSED) is allowed:
                world.violated("permissions", what)
            world.count("permissions kept" if allowed else "permissions refused")
            if response.status == 200:
                self._look(worker, asked, key, bytes(response.body), what)

        await clients.call(serve)

    def _request(self) -> _Asked:
        clients, r = self._clients, self._clients.random
        queue = r.choice([queue for queue in clients.queues if queue not in clients.fifo])
        at, receipts = "/v1/queues/{queue}", [one.receipt for one in self.receipts] or ["no receipt"]
        payload = clients.plain_entry().payload
        return r.choice(
            (
                _Asked("POST", at + "/messages", "send", queue, {"messages": [{"payload": payload}]}),
                _Asked("POST", at + "/receive", "receive", queue, {"max": 3, "visibility_timeout_ms": 2_000}),
                _Asked("POST", at + "/purge", "manage", queue, {}, queue not in ("other", clients.topic_queue)),
                _Asked("PUT", at, "manage", queue, {"max_receives": 1}, True),
                _Asked("PATCH", at, "manage", queue, {"max_receives": 1}, True),
                _Asked("DELETE", at, "manage", queue, None, True),
                _Asked("GET", at, None, queue, None),
                _Asked("GET", "/v1/queues", None, None, None),
                _Asked("POST", "/v1/ack", "receive", None, {"receipts": receipts[:3]}),
                _Asked("POST", "/v1/reject", "receive", None, {"receipts": receipts[:3]}, True),
            )
        )

    def _allows(self, key: str, asked: _Asked) -> bool:
        rights = RIGHTS[key]
        if rights is None:
            return False
        if asked.permission is None:
            return asked.queue is None or any(asked.queue in queues for queues in rights.values())
        return asked.permission in rights and (asked.queue is None or asked.queue in rights[asked.permission])

    def _expect(self, asked: _Asked) -> None:
        """It may be carried out, whatever is answered."""
        if asked.path == "/v1/ack":
            self._clients.asked.update((one.partition, one.offset) for one in self.receipts)
        elif asked.path.endswith("/purge"):
            self._clients.purged.add(str(asked.queue))

    def _look(self, worker: Worker, asked: _Asked, key: str, body: bytes, what: str) -> None:
        """At an answer."""
        world, found = self._world, msgspec.json.decode(body)
        if asked.path.endswith("/receive"):
            for one in msgspec.convert(msgspec.json.decode(body)["messages"], list[Received]):
                receipt = worker.operations.receipts.read(one.receipt)
                world.truths[one.partition].handed_out(worker, one, receipt)
        elif asked.path.endswith("/messages") and "offset" in found["results"][0]:
            self._clients.accepted[asked.body["messages"][0]["payload"]] = str(asked.queue)
            world.count("accepted")
        elif asked.path == "/v1/queues":
            names = {queue["name"] for queue in found["queues"]}
            if hidden := {n for n in names if not self._allows(key, asked._replace(queue=n))}:
                world.violated("permissions", f"{what}, and tells of {hidden}")
