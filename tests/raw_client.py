"""A Kafka client of one request: it produces a batch of arbitrary bytes."""

from __future__ import annotations

import asyncio
import struct

_PRODUCE, _VERSION = 0, 7
#: Errors of a topic that was just created: not known everywhere yet.
_PASSING = {3, 6}
_PASSING_S = 15


def _string(text: str | None) -> bytes:
    return struct.pack(">h", -1) if text is None else struct.pack(">h", len(text)) + text.encode()


async def produce(bootstrap: str, topic: str, partition: int, batch: bytes) -> int:
    """Append a batch to a partition whose leader is at `bootstrap`; the error code that the broker answers.

    Returns -1 if the broker closes the connection instead, as it does if it can't parse the request.
    """
    deadline = asyncio.get_running_loop().time() + _PASSING_S
    while (error := await _ask(bootstrap, topic, partition, batch)) in _PASSING:
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.1)
    return error


async def _ask(bootstrap: str, topic: str, partition: int, batch: bytes) -> int:
    host, _, port = bootstrap.partition(":")
    body = _string(None) + struct.pack(">hii", -1, 10_000, 1)  # no transaction, acks, timeout, topics
    body += _string(topic) + struct.pack(">iii", 1, partition, len(batch)) + batch
    request = struct.pack(">hhi", _PRODUCE, _VERSION, 1) + _string("raw") + body
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", await asyncio.wait_for(reader.readexactly(4), 15))
        answer = await asyncio.wait_for(reader.readexactly(size), 15)
    except (asyncio.IncompleteReadError, ConnectionError):
        return -1
    finally:
        writer.close()
    # correlation id, one topic, its name, one partition, its number
    (error,) = struct.unpack_from(">h", answer, 4 + 4 + 2 + len(topic) + 4 + 4)
    return int(error)
