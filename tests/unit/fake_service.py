"""A service in memory that speaks the wire format over real sockets, and fails on demand."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

MSGPACK = "application/msgpack"


@dataclass
class Request:
    """A request that came in."""

    path: str
    body: Any
    key: str | None
    at_s: float


@dataclass
class Failure:
    """What to do instead of an answer."""

    status: int = 0  # 0: drop the connection
    type: str = "urn:marq:problem:unavailable"
    detail: str = "not now"
    retry_after: str | None = None
    after: bool = False  # carry it out first, and then fail


@dataclass
class FakeService:
    """One worker. Use as a context manager."""

    port: int = 0
    lease_s: float = 30.0
    requests: list[Request] = field(default_factory=list)
    failures: deque[Failure] = field(default_factory=deque)
    pause_s: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)  # receipt -> type of the problem
    refused_once: dict[str, str] = field(default_factory=dict)
    ready: dict[str, deque[dict[str, Any]]] = field(default_factory=lambda: defaultdict(deque))
    out: dict[str, dict[str, Any]] = field(default_factory=dict)
    acked: list[int] = field(default_factory=list)
    released: list[tuple[int, int, bool]] = field(default_factory=list)  # offset, delay_ms, counted
    rejected: list[tuple[int, str | None]] = field(default_factory=list)
    extended: Counter[int] = field(default_factory=Counter)
    most_out: int = 0

    def __enter__(self) -> FakeService:
        self.loop = asyncio.new_event_loop()
        self._offsets = itertools.count()
        self._arrived = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait(5)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        async def stop() -> None:
            self._arrived.set()
            await self._runner.cleanup()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

        async def start() -> None:
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
            await site.start()
            self.port = self._runner.addresses[0][1]

        self.loop.run_until_complete(start())
        self._started.set()
        self.loop.run_forever()
        self.loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    def fail(self, times: int = 1, **failure: Any) -> None:
        self.failures.extend(Failure(**failure) for _ in range(times))

    def put(self, queue: str, *payloads: bytes) -> None:
        """Messages that were sent."""

        def add() -> None:
            for payload in payloads:
                self._add(queue, {"payload": payload})
            self._arrived.set()

        self.loop.call_soon_threadsafe(add)

    def _add(self, queue: str, message: dict[str, Any]) -> int:
        offset = next(self._offsets)
        self.ready[queue].append(message | {"offset": offset, "attempt": 0})
        return offset

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health/live":
            return web.json_response({"live": True})
        raw = await request.read()
        body = msgspec.msgpack.decode(raw) if raw else None
        self.requests.append(Request(request.raw_path, body, request.headers.get("Authorization"), time.monotonic()))
        failure = self.failures.popleft() if self.failures else None
        if self.pause_s:
            await asyncio.sleep(self.pause_s)
        if failure is None or failure.after:
            answer = await self._answer(request, body)
            if failure is None:
                return answer
        if failure.status == 0:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        problem = {"type": failure.type, "title": "t", "status": failure.status, "detail": failure.detail}
        headers = {"Retry-After": failure.retry_after} if failure.retry_after is not None else {}
        return web.Response(
            status=failure.status,
            body=msgspec.json.encode(problem),
            content_type="application/problem+json",
            headers=headers,
        )

    async def _answer(self, request: web.Request, body: Any) -> web.Response:
        parts = [unquote(part) for part in request.raw_path.split("?")[0].split("/")[2:]]
        if parts[0] == "queues" and len(parts) == 3:
            value = await getattr(self, "_" + parts[2])(parts[1], body, request)
        elif parts == ["queues"]:
            value = {"queues": [{"name": name, "settings": {}} for name in sorted(self.ready)], "after": ""}
        elif parts[0] == "queues":
            value = {"name": "/".join(parts[1:]), "settings": body or {}}
        else:
            value = {"results": [self._settle(parts[0], receipt, body) for receipt in body["receipts"]]}
        return web.Response(body=msgspec.msgpack.encode(value), content_type=MSGPACK)

    async def _stats(self, queue: str, body: Any, request: web.Request) -> Any:
        counts = {"ready": len(self.ready[queue]), "delayed": 0, "in_flight": len(self.out), "dead": 0}
        return {"queue": queue, "oldest_ms": None, "has_receiver": False, **counts}

    async def _messages(self, queue: str, body: Any, request: web.Request) -> Any:
        if request.method == "GET":
            seen = [
                {"partition": 0, "offset": m["offset"], "state": "ready", "receives": m["attempt"]}
                | {"sent_ms": 1, "size_bytes": len(m["payload"]), "payload": m["payload"], "headers": []}
                for m in self.ready[queue]
            ]
            return {"messages": seen[: int(request.query["limit"])], "after": "", "missing": []}
        results: list[Any] = []
        for message in body["messages"]:
            if message["payload"] == b"refused":
                results.append({"error": {"type": "urn:marq:problem:too-large", "detail": "too large"}})
            else:
                results.append({"topic": "t.queue", "partition": 0, "offset": self._add(queue, message)})
        self._arrived.set()
        return {"results": results}

    async def _receive(self, queue: str, body: Any, request: web.Request) -> Any:
        deadline = self.loop.time() + body["wait_ms"] / 1000
        while not self.ready[queue] and self.loop.time() < deadline:
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._arrived.wait()
            except TimeoutError:
                break
        taken = []
        while self.ready[queue] and len(taken) < body["max"]:
            message = self.ready[queue].popleft()
            message["attempt"] += 1
            receipt = f"{message['offset']}/{message['attempt']}"
            self.out[receipt] = message
            taken.append(
                {
                    "receipt": receipt,
                    "queue": queue,
                    "topic": "t.queue",
                    "partition": 0,
                    "offset": message["offset"],
                    "attempt": message["attempt"],
                    "sent_ms": 1,
                    "key": message.get("key"),
                    "headers": message.get("headers", {}),
                    "payload": message["payload"],
                }
            )
        self.most_out = max(self.most_out, len(self.out))
        return {"messages": taken}

    async def _purge(self, queue: str, body: Any, request: web.Request) -> Any:
        self.ready[queue].clear()
        return {"purging": True}

    def _settle(self, action: str, receipt: str, body: Any) -> Any:
        problem = self.refused_once.pop(receipt, None) or self.refused.get(receipt)
        if problem is not None:
            return {"error": {"type": f"urn:marq:problem:{problem}", "title": "t", "detail": f"{receipt}: {problem}"}}
        offset = int(receipt.partition("/")[0])
        if action == "extend":
            self.extended[offset] += 1
            return {"ok": True}
        self.out.pop(receipt, None)
        if action == "ack":
            self.acked.append(offset)
        elif action == "release":
            self.released.append((offset, body["delay_ms"], body["counted"]))
        else:
            self.rejected.append((offset, body.get("reason")))
        return {"ok": True}
