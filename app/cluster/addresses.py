"""The address of a worker in the consumer group: its URL, an identity of its own, and seals that prove both.

    http://vm1-4711-0-9f3a2c81d7e0:<seal>.<seal>@10.0.0.5:9324

The user name is the identity. It is new at each start, so a worker is confused neither with the process that had its
URL before, nor with another worker at the same URL, nor with a copy of its folder. The password has one seal for each
secret that the worker accepts. Earlier versions announce a URL alone; they call ours as it stands, since HTTP clients
take user and password out of a URL, and the header that they make of them is ignored.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from hashlib import blake2b
from hmac import compare_digest
from itertools import product
from typing import NamedTuple

#: What keys of these seals are derived for.
PURPOSE = b"marq-member"
#: Characters of a worker's name that its identity repeats.
NAME_MAX = 60
#: Identity of what is no address of a worker.
NO_WORKER = "?"

_ADDRESS = re.compile(r"(https?://)(?:([A-Za-z0-9.-]{1,100}):([0-9a-f.]{32,200})@)?([^/?#@\s]{1,300})/?\Z")


class Address(NamedTuple):
    """An address, taken apart."""

    url: str
    worker: str  # identity; empty for a worker of an earlier version
    is_proven: bool  # made by a worker with one of our secrets

    @property
    def may_be_ours(self) -> bool:
        """True if a worker of this installation may have announced it."""
        return self.is_proven or not self.worker


def new_identity(name: str) -> str:
    """An identity for a worker that starts. `name`: what people know it by."""
    return f"{re.sub(r'[^A-Za-z0-9.-]', '-', name)[:NAME_MAX]}-{secrets.token_hex(6)}"


def announce(url: str, worker: str, keys: Sequence[bytes]) -> str:
    """The address of a worker, with a seal by each key."""
    scheme, _, host = url.rstrip("/").partition("://")
    seals = ".".join(_seal(key, f"{scheme}://{host}", worker) for key in keys)
    return f"{scheme}://{worker}:{seals}@{host}"


def read(text: str, keys: Callable[[], Sequence[bytes]]) -> Address:
    """Take an address apart. What no worker announces has `NO_WORKER` as its identity."""
    found = _ADDRESS.match(text)
    if found is None:
        return Address(text, NO_WORKER, is_proven=False)
    scheme, worker, seals, host = found.groups()
    url = scheme + host
    if not worker:
        return Address(url, "", is_proven=False)
    made = [_seal(key, url, worker) for key in keys()]
    return Address(url, worker, any(compare_digest(*pair) for pair in product(made, seals.split("."))))


def _seal(key: bytes, url: str, worker: str) -> str:
    return blake2b(f"{worker}\n{url}".encode(), key=key, digest_size=16).hexdigest()
