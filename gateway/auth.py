"""Who may do what: bearer keys with permissions per queue.

`MARQ_KEYS` is a list, separated by commas, of

    KEY                            may do everything
    KEY=PERMISSIONS:QUEUES         e.g. 8Ck3…=send+receive:orders.*|invoices

A `KEY` that is `ID:SECRET` is an access key of Amazon SQS too: access key id and secret access key.

Permissions: `send`, `receive` (and acknowledge, extend, release, reject), `manage` (make, set, purge, delete queues),
`inspect` (look at messages, partitions, metrics), `*`. Queues: names, or patterns with `*` (any characters) and `?`
(one), which are the only wildcards. A key can't have `,` or `=` in it. One that stands
several times may do what any of its entries allows. Without keys everybody may do everything, and HTTP listens on
loopback only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import urlsplit

from gateway.shares import Share
from marq.core.policies import QUEUE_NAME_MAX
from marq.errors import NotAllowedError, NotAuthenticatedError, SettingError

PERMISSIONS = frozenset({"send", "receive", "manage", "inspect"})
_NOTHING = contextlib.nullcontext()
#: Characters of a `Host`: a name has 253 at most, and there is a port.
HOST_MAX = 300
_LOOPBACK = re.compile(r"127(\.(0|[1-9]\d{0,2})){3}", re.ASCII)
#: Shortest key that is accepted: shorter ones can be guessed.
KEY_MIN = 16


class Grant(NamedTuple):
    """Permissions for the queues that match."""

    permissions: frozenset[str]
    queues: tuple[str, ...]

    @property
    def patterns(self) -> list[re.Pattern[str]]:
        """What the names of the queues have to match."""
        return [_pattern_of(queue) for queue in self.queues]


@lru_cache(10_000)
def _pattern_of(queue: str) -> re.Pattern[str]:
    """`*` stands for any characters, `?` for one, and everything else for itself."""
    parts = (".*" if part == "*" else "." if part == "?" else re.escape(part) for part in re.split(r"([*?])", queue))
    return re.compile("".join(parts), re.DOTALL)


class Grants:
    """What the owner of one key may do."""

    def __init__(self, grants: list[Grant], share: Share | None = None) -> None:
        self._grants = grants
        self.share = share  # None: nobody has a key
        self._known: dict[tuple[str, str], bool] = {}

    def allow(self, permission: str, queue: str) -> bool:
        """True if `permission` is given for `queue`."""
        if len(queue) > QUEUE_NAME_MAX:  # too long for a queue name, and for matching patterns
            return self.allow_everywhere(permission)
        known = self._known.get((permission, queue))
        if known is None:
            known = any(
                permission in grant.permissions and any(pattern.fullmatch(queue) for pattern in grant.patterns)
                for grant in self._grants
            )
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[permission, queue] = known
        return known

    def begin(self) -> None:
        """Count a request; call `end` when it has ended. Raises `UnavailableError` if its key has too many."""
        if self.share is not None:
            self.share.begin()

    def end(self) -> None:
        """A request that began has ended."""
        if self.share is not None:
            self.share.end()

    def wait(self, wait_ms: int) -> contextlib.AbstractContextManager[None]:
        """Context of a receive that may wait. Raises `UnavailableError` if too many of its key wait."""
        return self.share.wait(wait_ms) if self.share is not None else _NOTHING

    def make_queue(self) -> None:
        """Count a queue that is about to be made. Raises `UnavailableError` if its key makes too many."""
        if self.share is not None:
            self.share.make_queue()

    def allow_somewhere(self, permission: str) -> bool:
        """True if `permission` is given for any queue."""
        return any(permission in grant.permissions for grant in self._grants)

    def allow_everywhere(self, permission: str) -> bool:
        """True if `permission` is given for all queues."""
        return any(permission in grant.permissions and "*" in grant.queues for grant in self._grants)

    def require(self, permission: str, queue: str | None, everywhere: bool = False) -> None:
        """Raise `NotAllowedError` if the permission is missing: for `queue`, else for all queues, or for any."""
        if queue is not None:
            allowed = self.allow(permission, queue)
        else:
            allowed = self.allow_everywhere(permission) if everywhere else self.allow_somewhere(permission)
        if not allowed:
            where = f"queue {queue!r}" if queue is not None else ("all queues" if everywhere else "any queue")
            raise NotAllowedError(f"this key does not have the permission {permission!r} for {where}")


def require_message(grants: Grants, partition: int, offset: int, queue: object) -> None:
    """Raise `NotAllowedError`, which does not name the queue, if a message may not be inspected.

    Args:
        queue: the name of its queue. Anything else: it is not known, so the permission is needed for all queues.
    """
    if not (grants.allow("inspect", queue) if queue and isinstance(queue, str) else grants.allow_everywhere("inspect")):
        raise NotAllowedError(f"this key does not have the permission 'inspect' for the queue of {partition}:{offset}")


def may_see(grants: Grants, queue: str) -> bool:
    """Any permission for a queue includes to know that it exists, and its settings."""
    return any(grants.allow(permission, queue) for permission in PERMISSIONS)


class Credential(NamedTuple):
    """An access key: requests are signed with the secret, and may do what its key may."""

    secret: str
    grants: Grants


ALL = Grants([Grant(PERMISSIONS, ("*",))])


class Keys:
    """The keys of the installation. Raises `SettingError` for a list that makes no sense."""

    def __init__(self, text: str | None) -> None:
        grants: dict[bytes, list[Grant]] = {}
        secrets: dict[str, tuple[bytes, str]] = {}  # by access key id
        for number, entry in enumerate((text or "").split(","), 1):
            entry = entry.strip()
            if not entry:
                continue
            key, sign, what = entry.partition("=")
            # an error message must not have any part of a key
            if len(key) < KEY_MIN:
                raise SettingError(f"MARQ_KEYS: key {number} is shorter than {KEY_MIN} characters")
            access_id, colon, secret = key.partition(":")
            if colon:
                if len(secret) < KEY_MIN:
                    raise SettingError(f"MARQ_KEYS: the secret of key {number} is shorter than {KEY_MIN} characters")
                if secrets.setdefault(access_id, (_digest(key), secret))[1] != secret:
                    raise SettingError(f"MARQ_KEYS: key {number} has the id of another key, and another secret")
            grants.setdefault(_digest(key), []).append(_grant(number, what) if sign else ALL._grants[0])
        self._grants = {digest: Grants(found, Share()) for digest, found in grants.items()}
        self._credentials = {
            access_id: Credential(secret, self._grants[digest]) for access_id, (digest, secret) in secrets.items()
        }

    def __bool__(self) -> bool:
        return bool(self._grants)

    def credential(self, access_id: str) -> Credential | None:
        """The access key with this id."""
        return self._credentials.get(access_id)

    def grants_of(self, headers: Mapping[str, str]) -> Grants:
        """The permissions of a request. Raises `NotAuthenticatedError`."""
        if not self._grants:
            return ALL
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise NotAuthenticatedError("send a key: `Authorization: Bearer …`")
        return self._grants[self.digest_of(key)]

    @property
    def digests(self) -> Iterable[bytes]:
        """The digests of all keys."""
        return self._grants

    def digest_of(self, key: str) -> bytes:
        """The digest of a key of this installation. Raises `NotAuthenticatedError`."""
        # looked up by a hash, so that the time it takes says nothing about the keys
        digest = _digest(key.strip())
        if digest not in self._grants:
            raise NotAuthenticatedError("this key is not known here")
        return digest

    def grants_by_digest(self, digest: bytes) -> Grants:
        """The permissions of the key with this digest."""
        return self._grants[digest]


def _digest(key: str) -> bytes:
    return blake2b(key.encode(errors="surrogateescape"), digest_size=32, person=b"marq-key").digest()


def _grant(number: int, text: str) -> Grant:
    permissions, _, queues = text.partition(":")
    given = frozenset(p.strip() for p in permissions.split("+"))
    if given == {"*"}:
        given = PERMISSIONS
    if not given <= PERMISSIONS:
        raise SettingError(
            f"MARQ_KEYS: what follows the first = of key {number} has a permission that there is not; there are "
            f"{', '.join(sorted(PERMISSIONS))} and *. A key itself can't have a = in it"
        )
    patterns = tuple(q.strip() for q in queues.split("|") if q.strip())
    if not patterns:
        raise SettingError(f"MARQ_KEYS: key {number} names no queues; write KEY=PERMISSIONS:QUEUES, with * for all")
    return Grant(given, patterns)


def is_loopback(host: str) -> bool:
    """True if an address can be reached from this machine only."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_browser(method: str, headers: Mapping[str, str]) -> None:
    """Without keys, a web page that is open in a browser of this machine must not be able to use the API.

    Raises `NotAllowedError` for a `Host` that is somebody else's name (DNS rebinding), and for a change that a
    page of another origin asks for.
    """
    host = headers.get("Host", "")
    if len(host) > HOST_MAX or not is_answered(host):
        raise NotAllowedError(
            f"without keys, marq answers only to localhost, 127.0.0.1 or [::1], not to {host[:100]!r}"
        )
    origin = headers.get("Origin")
    if origin is not None and method not in ("GET", "HEAD") and (_split(origin) or ("", ""))[1] != host:
        raise NotAllowedError("a page of another origin can't ask for that")


@lru_cache(1_000)
def is_answered(host: str) -> bool:
    """True for a `Host` that every browser knows as this machine, so that it tells us when another site asks.

    `[::ffff:127.0.0.1]` is not one: it reaches us as well, but browsers take it for an address like any other.
    """
    name = (_split(f"//{host}") or ("", ""))[0]
    return name in ("localhost", "::1") or name.endswith(".localhost") or _LOOPBACK.fullmatch(name) is not None


def _split(url: str) -> tuple[str, str] | None:
    """The host in a URL, without and with its port; None if the text is no URL."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.netloc
    except ValueError:
        return None
