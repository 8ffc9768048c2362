"""How many connections a worker takes, in total and per address, and the count of those that it refused or ended."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import resource
import time
from collections import Counter
from typing import Any

from app.bodies import Room

#: Seconds within which the head of a request has to arrive, from the connection or its first byte; and a handshake.
HEAD_S = 10.0
#: Seconds without any progress after which a client is taken to have stopped reading an answer.
STUCK_S = 30.0
#: Limit of open files that is asked of the system …
FILES_WANTED = 65_536
#: … and how many of them are reserved for tables, Kafka and other workers.
FILES_KEPT = 1_024
#: Seconds between two log lines with the same reason.
LOG_S = 10.0

#: Reasons for refusing or ending a connection: the label in the metric, and the text in the log.
REASONS = {
    "total": "the worker has as many connections as it takes (MARQ_MAX_CONNECTIONS)",
    "address": "one address has as many connections as it may (MARQ_MAX_CONNECTIONS_PER_ADDRESS)",
    "head": f"no whole head of a request came within {HEAD_S:.0f} s",
    "handshake": f"no TLS handshake within {HEAD_S:.0f} s",
    "stuck": f"nothing of an answer was read for {STUCK_S:.0f} s",
    "malformed": "what came was no HTTP",
    "lines": "too much came in very short lines",
}

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise the limit of open files as far as the system allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return FILES_WANTED if soft == resource.RLIM_INFINITY else soft


def connections_for(files: int, wanted: int) -> int:
    """How many of the wanted connections the limit of open files allows."""
    return max(1, min(wanted, files - min(FILES_KEPT, files // 2)))


def address_of(peer: Any) -> str:
    """The name under which a client is counted: its IPv4 address, or its IPv6 network of 64 bits."""
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64"


class Connections:
    """Counts connections: how many there are, of whom, and how many were refused or ended, and why.

    Args:
        total: most connections.
        per_address: most connections of one address.
        answers: where large answers count until they are written.
    """

    def __init__(self, total: int, per_address: int, answers: Room) -> None:
        self.total = total
        self.per_address = per_address
        self.answers = answers
        self.open = 0
        self.refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._of: Counter[str] = Counter()
        self._lines: dict[
            str, tuple[float, int]
        ] = {}  # reason -> when it was last logged, and how often it occurred since

    def admit(self, address: str) -> bool:
        """Count a new connection. Returns False if there are too many already."""
        if self.open >= self.total:
            self.note("total", address)
            return False
        if self._of[address] >= self.per_address:
            self.note("address", address)
            return False
        self.open += 1
        self._of[address] += 1
        return True

    def leave(self, address: str) -> None:
        """Note that a connection which was admitted has ended."""
        self.open -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]

    def note(self, reason: str, address: str) -> None:
        """Count a connection that was refused or ended, and log it from time to time."""
        self.refused[reason] += 1
        now = time.monotonic()
        at, silent = self._lines.get(reason, (-LOG_S, 0))
        if now - at < LOG_S:
            self._lines[reason] = (at, silent + 1)
            return
        self._lines[reason] = (now, 0)
        more = f" (and {silent} times before)" if silent else ""
        log.warning("A connection from %s was refused or ended: %s%s", address or "?", REASONS[reason], more)
