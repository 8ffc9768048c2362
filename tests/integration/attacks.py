"""The means of an attacker: raw sockets, from chosen addresses, with arbitrary bytes."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.integration.cluster import Worker

#: Keys of the installation under attack.
ADMIN = "admin-key-of-enough-length"
TIMEOUT_S = 30.0


def dial(url: str, source: str = "127.0.0.1") -> socket.socket:
    """A connection to a worker from a loopback address."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), TIMEOUT_S, (source, 0))


def answer_of(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer; status 0 if the connection ends without one."""
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            more = connection.recv(65536)
            if not more:
                return 0, data
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        length = int(found[1]) if found else 0
        while len(body) < length:
            more = connection.recv(65536)
            if not more:
                break
            body += more
    except OSError:
        return 0, data
    return int(head.split(b" ", 2)[1]), body


def head_of(method: str, path: str, length: int | None = None, **headers: Any) -> bytes:
    """The head of a request; `_` in the names of headers stands for `-`."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    if "Host" not in headers:
        lines.append("Host: 127.0.0.1")
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join((*lines, "", "")).encode("latin-1", "surrogateescape")


def ask(
    url: str, method: str, path: str, body: bytes = b"", source: str = "127.0.0.1", **headers: Any
) -> tuple[int, bytes]:
    """One request on a connection of its own."""
    with dial(url, source) as connection:
        connection.sendall(head_of(method, path, len(body), Connection="close", **headers) + body)
        return answer_of(connection)


def rss_bytes(worker: Worker) -> int:
    """Memory that a worker has."""
    return int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1]) * 4096
