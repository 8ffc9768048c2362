"""How many connections a worker takes, in total and per address, and the count of those that it refused or ended."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import resource
import time
from collections import Counter
from typing import Any

#: Seconds until the head of a request has to be there, from the connection or from its first byte; and of a handshake.
HEAD_S = 10.0
#: Seconds in which a client has to read something of an answer that waits for it.
STUCK_S = 60.0
#: Open files that are asked of the system …
FILES_WANTED = 65_536
#: … and of them those that are not for connections of clients: tables, Kafka, other workers.
FILES_KEPT = 1_024
#: Seconds between two lines about connections refused or ended for one reason.
LOG_S = 10.0

#: Why a connection was refused or ended, as the metric and the log say it.
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
    """Open as many files as the system lets us; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return FILES_WANTED if soft == resource.RLIM_INFINITY else soft


def connections_for(files: int, wanted: int) -> int:
    """Connections that can be taken with so many open files."""
    return max(1, min(wanted, files - min(FILES_KEPT, files // 2)))


def address_of(peer: Any) -> str:
    """By what a client is counted: its IPv4 address, or the network of 64 bits that a single client may have."""
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
    """Counts connections: how many there are, of whom, and how many were refused or ended, and why."""

    def __init__(self, total: int, per_address: int) -> None:
        self.total = total
        self.per_address = per_address
        self.open = 0
        self.refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._of: Counter[str] = Counter()
        self._lines: dict[str, tuple[float, int]] = {}  # reason -> when it was logged, and how often it was not since

    def admit(self, address: str) -> bool:
        """Count a new connection, unless there are too many."""
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
        """A connection that was admitted has ended."""
        self.open -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]

    def note(self, reason: str, address: str) -> None:
        """Count, and seldom log, that a connection was refused or ended."""
        self.refused[reason] += 1
        now = time.monotonic()
        at, silent = self._lines.get(reason, (-LOG_S, 0))
        if now - at < LOG_S:
            self._lines[reason] = (at, silent + 1)
            return
        self._lines[reason] = (now, 0)
        more = f" (and {silent} times before)" if silent else ""
        log.warning("A connection from %s was refused or ended: %s%s", address or "?", REASONS[reason], more)
