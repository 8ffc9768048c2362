"""Requests as clients really send them, changed in some of their bytes, and sent as they are then.

    recorded = Recorder.record(url, calls)          what boto3, our own client and others put on the wire
    report = await fuzz(port, requests, count, seed, sign)

A run is defined by its seed: the same recorded requests and seed make the same bytes, except for signatures.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from random import Random

from gateway.sqs.signature import ALGORITHM, canonical_request, sign, signing_key

#: Connections that send at the same time.
CONNECTIONS = 12
#: Seconds after which an answer counts as missing. A limit, not an expected time.
ANSWER_S = 60.0
#: Seconds that a request gets which says that it is longer than it is: the server waits for the rest.
INCOMPLETE_S = 0.05
#: Part of the requests that are sent with the length that they have.
FRAMED = 0.85
#: The answer of a worker that hands out nothing for a second because it is late.
BUSY = b"acks would be late"
#: Bytes, and texts, that are likely to mean something.
SPECIAL = (
    b"\x00 \xff \r \n \r\n \t \x1b \x7f \x80 \xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80 \xe2\x80\xae % %0A %00 %FF %C3%28 "
    b"+ ; = & \" ' \\ \\u0000 \\ud800 { } [ ] [[ {{ : , null true -1 0 1e999 NaN 99999999999999999999 -0 1.5 0x10 AWS. "
    b"marq- Content-Length: Transfer-Encoding: chunked gzip HTTP/1.0 HTTP/9 .. / // /../ ? # * ~ $ ` | < > ( )"
).split(b" ")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(\d+)[ \t]*(?=\r\n|\Z)")


def framed(request: bytes) -> bytes:
    """A request with the length of its body in its head, if there is a head."""
    head, end, body = request.partition(b"\r\n\r\n")
    return _LENGTH.sub(b"\r\nContent-Length: %d" % len(body), head) + end + body


def is_whole(request: bytes) -> bool:
    """True if a server has no reason to wait for more."""
    head, end, body = request.partition(b"\r\n\r\n")
    if not end or re.search(rb"(?i)transfer-encoding|upgrade|expect", head):
        return False
    found = re.findall(rb"(?i)\r\ncontent-length:([^\r\n]*)", head)
    return [one.strip() for one in found] == [b"%d" % len(body)] if found else not body


def mutated(request: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """A request with one to four changes."""
    changed = bytearray(request)
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        # our code reads bodies; aiohttp reads heads first
        start = max(0, changed.find(b"\r\n\r\n")) if random.random() < 0.5 else 0
        at = random.randrange(start, len(changed) + 1)
        kind = random.randrange(8)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << random.randrange(8)
        elif kind == 1 and changed:
            changed[at % len(changed)] = random.randrange(256)
        elif kind == 2:
            changed[at:at] = random.choice(SPECIAL)
        elif kind == 3:
            changed[at : at + random.randrange(1, 12)] = random.choice(SPECIAL)
        elif kind == 4:
            del changed[at : at + random.choice((1, 2, 8, 64))]
        elif kind == 5:
            piece = changed[at : at + random.choice((1, 4, 32, 200))]
            changed[at:at] = piece * random.choice((1, 1, 2, 50))
        elif kind == 6:
            other = random.choice(others)
            start = random.randrange(len(other) + 1)
            changed[at : at + random.choice((0, 0, 20))] = other[start : start + random.choice((4, 40, 400))]
        else:
            changed[at:at] = random.randbytes(random.choice((1, 3, 16)))
    return bytes(changed)


# -- signatures


def signed(request: bytes, key_id: str, secret: str) -> bytes:
    """The request with a new signature, if it has a head that can be signed."""
    head, end, body = request.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    parts = lines[0].split(b" ")
    if not end or len(parts) != 3:
        return request
    kept = [one for one in lines[1:] if not re.match(rb"(?i)(authorization|x-amz-date|x-amz-security-token)\s*:", one)]
    at = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"x-amz-date": at}
    for line in kept:
        name, _, value = line.partition(b":")
        text = value.strip().decode("utf-8", "surrogateescape")
        headers.setdefault(name.decode("latin-1").lower(), text)
    names = tuple(n for n in ("host", "x-amz-content-sha256", "x-amz-date", "x-amz-target") if n in headers)
    path, _, query = parts[1].decode("utf-8", "surrogateescape").partition("?")
    scope = f"{at[:8]}/eu-west-1/sqs/aws4_request"
    try:
        payload = headers.get("x-amz-content-sha256", sha256(body).hexdigest())
        canonical = canonical_request(parts[0].decode("latin-1"), path, query, headers, names, payload)
    except ValueError:
        return request
    digest = sha256(canonical.encode(errors="surrogateescape")).hexdigest()
    signature = sign(signing_key(secret, scope), ALGORITHM, at, scope, digest)
    authorization = f"{ALGORITHM} Credential={key_id}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    kept += [f"X-Amz-Date: {at}".encode(), f"Authorization: {authorization}".encode()]
    return b"\r\n".join((lines[0], *kept, b"", body))


# -- sending


@dataclass
class Report:
    """What became of the requests."""

    seed: int
    statuses: Counter[int] = field(default_factory=Counter)  # 0: the connection was closed without an answer
    busy: int = 0  # including those for a lease that would be over before it could be used, which depend on the machine
    failures: list[tuple[int, bytes, bytes]] = field(default_factory=list)  # status, request, answer
    unanswered: list[bytes] = field(default_factory=list)  # though they were whole
    slowest_s: float = 0.0
    slowest: bytes = b""

    def __str__(self) -> str:
        return f"seed={self.seed} {dict(sorted(self.statuses.items()))} busy={self.busy} slowest={self.slowest_s:.3f} s"


class _Sender:
    """One connection, that is made again when it was closed."""

    def __init__(self, port: int, report: Report) -> None:
        self._port = port
        self._report = report
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes) -> None:
        whole = is_whole(request)
        if not whole:
            self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 25)
        reader, writer = self._streams
        began = time.monotonic()
        try:
            writer.write(request)
            if whole:
                status, answer = await asyncio.wait_for(_answer_of(reader), ANSWER_S)
            else:
                status, answer = await asyncio.wait_for(_answer_of(reader), INCOMPLETE_S)
        except TimeoutError:
            status, answer = 0, b""
            if whole:
                self._report.unanswered.append(request)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            status, answer = 0, b""
        took_s = time.monotonic() - began
        report = self._report
        report.statuses[status] += 1
        if status == 503 and BUSY in answer:
            report.busy += 1
        elif status >= 500:
            report.failures.append((status, request, answer[:500]))
        if whole and took_s > report.slowest_s:
            report.slowest_s, report.slowest = took_s, request
        if not whole or not status or status >= 400:
            self.close()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def _answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    found = _LENGTH.search(head)
    body = await reader.readexactly(int(found[1])) if found else b""
    return int(head.split(b" ", 2)[1]), body


Sign = Callable[[bytes], bytes]


async def fuzz(port: int, recorded: Sequence[bytes], count: int, seed: int, sign_it: Sign | None = None) -> Report:
    """Send `count` changed requests; `sign_it` signs most of them after the change, and some before."""
    random, report = Random(seed), Report(seed)
    left = count

    def next_one() -> bytes:
        request = random.choice(recorded)
        if sign_it is not None and random.random() < 0.3:
            return framed(mutated(sign_it(request), recorded, random))
        request = mutated(request, recorded, random)
        if random.random() < FRAMED:
            request = framed(request)
        return sign_it(request) if sign_it is not None else request

    async def run() -> None:
        nonlocal left
        sender = _Sender(port, report)
        while left > 0:
            left -= 1
            await sender.send(next_one())
        sender.close()

    await asyncio.gather(*(run() for _ in range(CONNECTIONS)))
    return report


# -- recording


class Recorder:
    """A proxy that keeps what clients send, one request a connection or several."""

    def __init__(self, port: int) -> None:
        self.requests: list[bytes] = []
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._listener.close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            while request := _message(client):
                self.requests.append(request)
                server.sendall(request)
                answer = _message(server)
                if not answer:
                    return
                client.sendall(answer)


def _message(connection: socket.socket) -> bytes:
    """One whole request or answer; empty at the end of the connection."""
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            more = connection.recv(65536)
            if not more:
                return b""
            data += more
        found = _LENGTH.search(data)
        whole = data.index(b"\r\n\r\n") + 4 + (int(found[1]) if found else 0)
        while len(data) < whole:
            more = connection.recv(65536)
            if not more:
                return b""
            data += more
    except OSError:
        return b""
    return data
