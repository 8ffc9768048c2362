"""A worker's HTTP without Kafka: its real routes, guards and limits on a real port, and raw requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from app.kafka.datadir import Worker
from app.kafka.topics import Topics
from app.settings import Settings
from app.worker import WorkerApp, build
from gateway import listening

SECRET = "a secret of the installation that nobody guesses"


class Http:
    """The HTTP of one worker."""

    def __init__(self, app: WorkerApp, port: int) -> None:
        self.app = app
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that has sent `data`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        writer.write(data)
        return reader, writer

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to bytes that are sent as they are."""
        reader, writer = await self.send(data)
        try:
            return await answer_of(reader)
        finally:
            writer.close()

    async def request(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """The same for a request; `_` in the names of headers stands for `-`."""
        return await self.ask(head_of(method, path, len(body), **headers) + body)


def head_of(method: str, path: str, length: int | None = None, **headers: str) -> bytes:
    """The head of a request."""
    if length is not None:
        headers["Content_Length"] = f"{length}"
    lines = [f"{method} {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    if "Host" not in headers:
        lines.append("Host: 127.0.0.1")
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def signed_request(
    url: str, action: str, body: bytes, key_id: str, secret: str, *, with_hash: bool = False, path: str = "/"
) -> bytes:
    """A request to SQS, signed as AWS's clients do."""
    headers = {"X-Amz-Target": f"AmazonSQS.{action}", "Content-Type": "application/x-amz-json-1.0"}
    if with_hash:
        headers["X-Amz-Content-Sha256"] = sha256(body).hexdigest()
    request = AWSRequest("POST", url + path, data=body, headers=headers)
    SigV4Auth(Credentials(key_id, secret), "sqs", "eu-west-1").add_auth(request)
    sent = {name.replace("-", "_"): value for name, value in request.headers.items()}
    return head_of("POST", path, len(body), Host=url.removeprefix("http://"), **sent) + body


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer."""
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {name.lower(): value for name, value in re.findall(r"(?m)^([^:\r\n]+): *(.*?)\r$", head)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head.split(" ", 2)[1]), headers, body


@contextlib.asynccontextmanager
async def serving(folder: Path, **values: Any) -> AsyncIterator[Http]:
    """A worker with these settings that only runs HTTP."""
    settings = Settings(**{"data_dir": folder, "secret": SECRET, **values})
    app = build(settings)
    app._topics = Topics(
        queue=settings.queue_topic,
        markers=settings.markers_topic,
        poison=settings.poison_topic,
        queues=settings.queues_topic,
        dead_letter=None,
        changelogs={},
        partitions=2,
    )
    app.define_routes()
    app.place = Worker(folder, 0, 0)
    app.web.runner = listening.Runner(app.web.web_app, app.connections, shutdown_timeout=0.1)
    await app.web.start_server()
    http = Http(app, app.web.runner.addresses[0][1])
    app.conf.canonical_url = http.url  # type: ignore[assignment]
    try:
        yield http
    finally:
        await app.web.runner.cleanup()


def keep_catalog(http: Http) -> None:
    """Let the worker have a catalog of queues, in memory instead of in Kafka."""
    catalog, offsets = http.app.catalog, itertools.count()

    async def write(key: bytes, value: bytes | None) -> None:
        catalog._take(SimpleNamespace(key=key, value=value, offset=next(offsets)))

    async def end_offsets(topic: str, partitions: int) -> tuple[int, ...]:
        return (0,) * partitions

    catalog.topic.write = write  # type: ignore[method-assign]
    catalog.end_offsets = end_offsets  # type: ignore[method-assign]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test in the event loop that workers have."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
