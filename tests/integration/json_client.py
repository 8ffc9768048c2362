"""A small HTTP client for tests: JSON or msgpack, over one connection."""

from __future__ import annotations

import http.client
import json
from base64 import b64decode, b64encode
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec


class Answer:
    """The answer of a worker."""

    def __init__(self, status: int, headers: Any, body: Any) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def __repr__(self) -> str:
        return f"<{self.status} {self.body!r:.500}>"


def _decoded(kind: str, raw: bytes) -> Any:
    if "msgpack" in kind:
        return msgspec.msgpack.decode(raw)
    return json.loads(raw) if "json" in kind else raw


class Client:
    """Speaks to one worker."""

    def __init__(self, url: str, key: str | None = None, msgpack: bool = False, timeout_s: float = 70) -> None:
        self.url = url
        self.key = key
        self.msgpack = msgpack
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        data = None
        sent = dict(headers)
        if body is not None:
            sent.setdefault("Content-Type", "application/msgpack" if self.msgpack else "application/json")
            data = (
                body
                if isinstance(body, bytes)
                else (msgspec.msgpack.encode(body) if self.msgpack else json.dumps(body).encode())
            )
        if self.key is not None:
            sent["Authorization"] = f"Bearer {self.key}"
        try:
            self._connection.request(method, path, data, sent)
            response = self._connection.getresponse()
            raw = response.read()
        except (http.client.HTTPException, OSError):
            self._connection.close()
            raise
        return Answer(response.status, response.headers, _decoded(response.headers.get("Content-Type", ""), raw))

    def close(self) -> None:
        self._connection.close()

    # -- what users do

    def send(self, queue: str, *payloads: bytes, **values: Any) -> list[Any]:
        messages = [{"payload": p if self.msgpack else b64encode(p).decode(), **values} for p in payloads]
        answer = self.request("POST", f"/v1/queues/{quote(queue, safe='')}/messages", {"messages": messages})
        assert answer.status == 200, answer
        return answer.body["results"]  # type: ignore[no-any-return]

    def receive(self, queue: str, limit: int = 1, wait_ms: int = 0, **values: Any) -> list[Any]:
        answer = self.request(
            "POST", f"/v1/queues/{quote(queue, safe='')}/receive", {"max": limit, "wait_ms": wait_ms, **values}
        )
        assert answer.status == 200, answer
        messages = answer.body["messages"]
        if not self.msgpack:
            for message in messages:
                message["payload"] = b64decode(message["payload"])
        return messages  # type: ignore[no-any-return]

    def drain(self, queue: str, count: int, wait_ms: int = 3000, limit: int = 100) -> list[Any]:
        """Receive and acknowledge until `count` messages came, or none came for `wait_ms`."""
        got: list[Any] = []
        while len(got) < count and (messages := self.receive(queue, limit, wait_ms)):
            got += messages
            assert self.ack(*messages) == [{"ok": True}] * len(messages)
        return got

    def settle(self, path: str, messages: Any, **values: Any) -> list[Any]:
        receipts = [m if isinstance(m, str) else m["receipt"] for m in messages]
        answer = self.request("POST", path, {"receipts": receipts, **values})
        assert answer.status == 200, answer
        return answer.body["results"]  # type: ignore[no-any-return]

    def ack(self, *messages: Any) -> list[Any]:
        return self.settle("/v1/ack", messages)

    def extend(self, *messages: Any, ms: int = 30_000) -> list[Any]:
        return self.settle("/v1/extend", messages, visibility_timeout_ms=ms)

    def release(self, *messages: Any, **values: Any) -> list[Any]:
        return self.settle("/v1/release", messages, **values)

    def reject(self, *messages: Any, **values: Any) -> list[Any]:
        return self.settle("/v1/reject", messages, **values)
