"""Where a worker listens, and who may connect: HTTP, and HTTPS whose handshakes count as connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Any

from aiohttp import web
from aiohttp.web import TCPSite
from aiohttp.web_runner import BaseSite
from aiohttp.web_server import Server

from app.settings import Settings
from gateway.auth import is_loopback
from gateway.connection_limits import HEAD_S, Connections, address_of
from gateway.connections import ConnectionServer
from gateway.routing import Routing
from marq.errors import SettingError

#: Seconds that a connection is kept open between requests.
KEEPALIVE_S = 75.0
#: Bytes of a body that are read ahead of its handler (aiohttp reads up to twice as many).
READ_AHEAD_BYTES = 64 * 1024
#: Connections that may wait in the system until they are accepted.
BACKLOG = 1024

log = logging.getLogger(__name__)


class Runner(web.AppRunner):
    """Runs an application with limits."""

    __slots__ = ("book",)

    def __init__(self, app: web.Application, book: Connections, **kwargs: Any) -> None:
        # `app.bodies` unpacks bodies: aiohttp would also unpack those that nobody reads
        super().__init__(
            app,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            read_bufsize=READ_AHEAD_BYTES,
            auto_decompress=False,
            **kwargs,
        )
        self.book = book

    @property
    def addresses(self) -> list[Any]:
        """The addresses that it listens on."""
        tls = (address for site in self.sites if isinstance(site, TlsSite) for address in site.addresses)
        return [*super().addresses, *tls]

    async def _make_server(self) -> Server:
        made = await super()._make_server()
        return ConnectionServer(
            self.book,
            Routing(self.app),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **made._kwargs,
        )


class TlsSite(BaseSite):
    """Listens for HTTPS. A connection is counted, and has to make progress, from before its handshake on."""

    __slots__ = ("_accepting", "_context", "_host", "_listeners", "_port", "_shaking", "_shared")

    def __init__(self, runner: Runner, host: str, port: int, context: ssl.SSLContext, *, shared: bool = False) -> None:
        super().__init__(runner)
        self._shared = shared  # with other processes
        self._host, self._port, self._context = host, port, context
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._shaking: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return f"https://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((info[0], info[4]) for info in found):
            listener = socket.socket(family, socket.SOCK_STREAM)
            self._listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
            self._accepting.append(loop.create_task(self._accept(listener)))

    @property
    def addresses(self) -> list[Any]:
        """The addresses that it listens on."""
        return [listener.getsockname() for listener in self._listeners]

    async def stop(self) -> None:
        for task in (*self._accepting, *self._shaking):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._shaking, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        await super().stop()

    async def _accept(self, listener: socket.socket) -> None:
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert isinstance(server, ConnectionServer)
        while True:
            try:
                client, peer = await loop.sock_accept(listener)
            except OSError as exc:  # no file descriptor is left, or the client has gone
                log.warning("A connection can't be accepted: %s", exc)
                await asyncio.sleep(0.1)
                continue
            address = address_of(peer)
            if not server.book.admit(address):
                client.close()
                continue
            task = loop.create_task(self._shake_hands(server, client, address))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake_hands(self, server: ConnectionServer, client: socket.socket, address: str) -> None:
        connection = server(address)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, client, ssl=self._context, ssl_handshake_timeout=HEAD_S
            )
        except (OSError, TimeoutError):
            server.book.note("handshake", address)
        finally:
            if not connection.is_made:
                connection.leave()
                client.close()


async def listen(
    runner: Runner,
    host: str,
    port: int,
    context: ssl.SSLContext | None,
    *,
    only_loopback: bool,
    shared: bool = False,
) -> BaseSite:
    """Listen, with HTTPS if there is a context. `runner` has to be set up.

    Args:
        shared: other processes listen on this port as well; the system deals new connections out among them.

    Raises:
        SettingError: other machines could connect, although `only_loopback` is set.
    """
    site: BaseSite
    if context is None:
        site = TCPSite(runner, host, port, backlog=BACKLOG, reuse_port=shared or None)
    else:
        site = TlsSite(runner, host, port, context, shared=shared)
    await site.start()
    for address in runner.addresses:
        if only_loopback and not is_loopback(address[0]):
            await site.stop()
            raise open_to_others(host, address[0])
    return site


def require_loopback(host: str) -> None:
    """Raises `SettingError` if other machines could connect to `host`: the worker has no keys."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise SettingError(f"MARQ_WEB_HOST={host!r} is not an address to listen on: {error.strerror}") from None
    for address in sorted(found):
        if not is_loopback(address):
            raise open_to_others(host, address)


def open_to_others(host: str, address: str) -> SettingError:
    """The error for a worker without keys that other machines could reach."""
    which = "" if address == host else f", which is {address},"
    return SettingError(f"MARQ_WEB_HOST={host!r}{which} lets others in: set MARQ_KEYS, or listen on 127.0.0.1")


def tls_context(settings: Settings) -> ssl.SSLContext:
    """The context for HTTPS. Raises `SettingError`."""
    assert settings.web_tls_certificate_file is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.web_tls_certificate_file, settings.web_tls_key_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(
            f"MARQ_WEB_TLS_CERTIFICATE_FILE={str(settings.web_tls_certificate_file)!r} and "
            f"MARQ_WEB_TLS_KEY_FILE can't be used: {error.strerror or error}"
        ) from None
    return context
