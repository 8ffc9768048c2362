"""`marq` at the address of something that is no worker: one line, no traceback, whatever it answers."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from marq.cli.commands import cli
from marq.client import Service
from marq.errors import ServiceError

COMMANDS = (
    "stats", "stats orders", "queues", "workers", "partitions", "top --count 1", "peek orders", "message 0:1", "doctor",
    "receive orders", "ack x", "send orders a", "set orders", "create orders", "purge orders --yes", "redrive orders",
    "move orders --to b", "delete orders --yes",
)  # fmt: skip
ANSWERS: tuple[Any, ...] = (
    {}, [], None, 7, "text", {"queues": [{}]}, {"workers": [{}], "partitions": [{}], "messages": [{}], "results": [{}]},
    {"partitions": [{"partition": 0}]}, {"state": "ready"},
)  # fmt: skip


class Stranger(BaseHTTPRequestHandler):
    """Answers everything with the same."""

    answer = b""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "application/msgpack")
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("command", COMMANDS)
def test_an_answer_that_no_worker_gives_is_one_line(stranger: str, command: str) -> None:
    for answer in ANSWERS:
        Stranger.answer = msgspec.msgpack.encode(answer)
        done = CliRunner().invoke(cli, [*command.split(), "--url", stranger])
        assert done.exception is None or isinstance(done.exception, SystemExit), (answer, done.exception)
        assert "Traceback" not in done.output


def answering(head: str, body: bytes = b"", times: int = 1) -> tuple[str, list[bytes]]:
    """A server that answers with this head, and `times` times the body. Returns its URL, and what it is asked."""
    listener, asked = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def serve() -> None:
        with listener, contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    asked.append(connection.recv(65_536))
                    connection.sendall(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode())
                    for _ in range(times):
                        connection.sendall(body)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", asked


def test_a_redirect_is_not_followed() -> None:
    """It could lead from HTTPS to plain HTTP, with the payload and the key."""
    elsewhere, asked = answering("200 OK")
    url, _ = answering(f"307 Temporary Redirect\r\nLocation: {elsewhere}/v1/queues/q/messages")
    with Service(url, retry_for=0) as service, pytest.raises(ServiceError, match=r"redirects to .* not followed"):
        service.queue("q").send(b"secret")
    assert asked == []


@pytest.mark.parametrize(
    ("head", "body", "times", "said"),
    [
        ("200 OK", b"x" * 1_000_000, 100, "an answer of more than"),
        ("200 OK\r\nContent-Encoding: gzip", gzip.compress(bytes(1_000_000)), 1, "compresses its answers"),
    ],
    ids=["large", "gzip"],
)
def test_an_answer_has_a_bound(head: str, body: bytes, times: int, said: str) -> None:
    url, _ = answering(head, body, times)
    with Service(url, retry_for=0) as service, pytest.raises(ServiceError, match=said):
        service.queue("q").get()
