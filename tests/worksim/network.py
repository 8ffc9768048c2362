"""HTTP between workers: the real `Peers` on both sides, and a network between them that is slow and loses things."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiohttp import ClientConnectionError, web

from marq.errors import MarqError
from marq.protocol import problems
from tests.worksim.clock import current

if TYPE_CHECKING:
    from tests.worksim.worker import Worker
    from tests.worksim.world import World


class Session:
    """In the place of aiohttp's `ClientSession`."""

    def __init__(self, **options: Any) -> None:
        self.process = current()
        self.open: dict[_Exchange, None] = {}

    def post(self, url: str, **options: Any) -> _Exchange:
        return _Exchange(self, url, **options)

    async def close(self) -> None:
        for exchange in list(self.open):
            exchange.cut()


class _Content:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def is_eof(self) -> bool:
        return True

    def read_nowait(self) -> bytes:
        return self._data

    async def iter_any(self) -> Any:
        yield self._data


class _Exchange:
    """One request, and its answer."""

    def __init__(
        self, session: Session, url: str, *, data: bytes, headers: dict[str, str], timeout: Any, allow_redirects: bool
    ) -> None:
        self.session = session
        self.world: World = session.process.world
        self.base, _, path = url.partition("/v1/")
        self.path = "/v1/" + path
        self.data = data
        self.headers = headers
        self.timeout = timeout
        self.is_over = False
        self.answer: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> Any:
        net = self.world.net
        self.world.calls[self.path.rpartition("/")[2]] += 1
        self.answer = self.world.loop.create_future()
        self.session.open[self] = None
        if net.loses():
            pass  # the request: nobody answers
        else:
            self.world.kafka.later(net.latency(), self._arrive)
        try:
            async with asyncio.timeout(self.timeout.total):
                found = await self.answer
        except BaseException:
            self.is_over = True
            raise
        finally:
            self.session.open.pop(self, None)
        if isinstance(found, Exception):
            raise found
        return found

    async def __aexit__(self, *_: object) -> None:
        self.is_over = True

    def _arrive(self) -> None:
        worker = self.world.at(self.base)
        if worker is None:
            self._give(ClientConnectionError(f"{self.base}: connection refused"))
        elif worker.listens:
            worker.process.spawn(self._serve(worker))
            worker.open_exchanges[self] = None
            net = self.world.net
            if net.replays and net.random.random() < net.replays:
                seconds = net.random.random() * net.random.choice((0.001, 5.0, 60.0))
                self.world.kafka.later(seconds, self._arrive_again)
        else:
            self._give(ClientConnectionError(f"{self.base}: connection refused"))

    def _arrive_again(self) -> None:
        worker = self.world.at(self.base)
        if worker is not None and worker.listens:
            worker.process.spawn(self._serve_again(worker))

    async def _serve_again(self, worker: Worker) -> None:
        """Somebody sends the request once more, or one of the same body with a seal of his own: it is refused."""
        world = self.world
        headers = dict(self.headers)
        if world.net.random.random() < 0.5:  # a call that nobody has made
            headers = {
                name: re.sub(r"number=\d+", f"number={world.net.random.getrandbits(40)}", seal)
                for name, seal in headers.items()
            }
        try:
            response = await worker.peers.serve(self._request(headers))
        except (web.HTTPException, MarqError):
            world.count("strangers refused")
            return
        if response.status < 400:
            world.violated("strangers", f"{worker.process.name} answers {self.path} to a stranger: {headers}")
        world.count("strangers refused")

    def cut(self) -> None:
        """The caller closes the connection: what was answered and has not arrived is lost."""
        self.is_over = True
        self._give(ClientConnectionError("this worker has closed the connection"))

    def broken(self) -> None:
        """The called process has ended."""
        self._give(ClientConnectionError(f"{self.base}: connection reset"))

    def _request(self, headers: dict[str, str]) -> Any:
        return SimpleNamespace(
            headers=headers,
            method="POST",
            raw_path=self.path,
            match_info={"name": self.path.rpartition("/")[2]},
            remote="10.0.0.1",
            content_length=len(self.data),
            content=_Content(self.data),
            transport=SimpleNamespace(is_closing=lambda: self.is_over),
        )

    async def _serve(self, worker: Worker) -> None:
        request = self._request(self.headers)
        try:
            response: Any = await worker.peers.serve(request)
        except web.HTTPException as exc:
            response = exc
        except MarqError as exc:
            status, problem, title = problems.kind_of(exc)
            response = web.Response(
                body=problems.body(status, problem, title, str(exc)).__repr__().encode(),
                status=status,
                content_type=problems.CONTENT_TYPE,
            )
        worker.open_exchanges.pop(self, None)
        body = bytes(response.body or b"")
        found = SimpleNamespace(
            status=response.status,
            content_type=response.content_type,
            headers=response.headers,
            content=_Content(body),
            close=lambda: None,
        )
        net = self.world.net
        if not net.loses():
            self.world.kafka.later(net.latency(), self._give, found)

    def _give(self, found: Any) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(found)


class Network:
    """Latency and loss between workers."""

    def __init__(self, random: Any) -> None:
        self.random = random
        self.loss = 0.0
        self.replays = 0.0
        self.base_s = 0.0005
        self.jitter_s = 0.001

    def loses(self) -> bool:
        return self.loss > 0 and bool(self.random.random() < self.loss)

    def latency(self) -> float:
        return float(self.base_s + self.jitter_s * self.random.random())
