"""Seals on calls between workers, and on their answers: who made them, for whom, when, and that nothing was changed.

    Marq-Peer: version=1,time=1769000000000,sender=<32 hex>,number=17,body=<64 hex>,seal=<64 hex>      a call
    Marq-Peer: version=1,time=1769000000005,seal=<64 hex>                                              its answer
    Marq-Peer: version=1                                                    to a call of a version not known here

The seal of a call covers its method, path, receiver and the other fields, so it can be judged before the body is read.
A receiver takes each number of a sender once, and only calls made within `FRESH_MS`. The time is the receiver's, which
begins anywhere at each of its starts: so no call that was made to it before a restart is of its time. A receiver that
finds a call too old, or from the future, says its time in a sealed answer.

A receiver that does not know the version of a call says which one it knows. That answer has no seal, so a later version
may fall back only to versions that are as safe.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from marq.errors import NotAuthenticatedError

HEADER = "Marq-Peer"
#: Version of the header, and of what it seals. marq 0.1 sent 64 hex digits.
VERSION = "1"
OLD_VERSION = "0"
#: Milliseconds after which a call is too old.
FRESH_MS = 30_000
#: Bits of the moment at which the time of a receiver begins, in milliseconds.
BEGINNING_BITS = 50
#: Numbers of one sender, above those that all came, that are remembered; calls that are late by more are refused.
NUMBERS_MAX = 10_000
#: Receivers whose time and numbers a caller keeps. A worker is another receiver after each start.
RECEIVERS_MAX = 1_000

_NAMES = ["version", "time", "sender", "number", "body", "seal"]
_ANSWER_NAMES = ["version", "time", "seal"]
_VERSION = re.compile(r"version=(\d{1,9})(?:,|\Z)")


class StaleCallError(NotAuthenticatedError):
    """A genuine call that is too old, from the future, or repeated."""


class OtherVersionError(NotAuthenticatedError):
    """A call or an answer of another version; we can't tell whether it is genuine."""

    def __init__(self, version: str) -> None:
        super().__init__(f"version {version} of calls between workers, which is not known here, where it is {VERSION}")
        self.version = version


class Call(NamedTuple):
    """A call, as its seal covers it."""

    method: str
    path: str
    receiver: str
    time_ms: int
    sender: str  # a worker, from its start to its end
    number: int
    body: str  # hash

    @property
    def text(self) -> bytes:
        return f"call {VERSION}\n".encode() + "\n".join(map(str, self)).encode(errors="surrogateescape")


def hash_of(body: bytes) -> str:
    """The hash of a body that goes into the seal."""
    return blake2b(body, digest_size=32).hexdigest()


class Seals:
    """Makes and checks the seals of one worker.

    Args:
        keys: the first one makes seals; seals of any of them are accepted.
        now_ms: a clock of this worker, which need not be anybody else's.
    """

    def __init__(self, keys: Sequence[bytes], now_ms: Callable[[], int]) -> None:
        self._keys = tuple(keys)
        self._now_ms = now_ms
        self._beginning_ms = secrets.randbits(BEGINNING_BITS)
        self._sender = secrets.token_hex(16)
        self._numbers: dict[str, int] = {}  # receiver -> last number
        self._ahead_ms: dict[str, int] = {}  # receiver -> how far its time is ahead of our clock
        self._seen: dict[str, _Seen] = {}  # by sender

    def _time_ms(self) -> int:
        """What senders have to learn: our clock, with another beginning."""
        return self._now_ms() + self._beginning_ms

    # -- as a caller

    def call(self, method: str, path: str, receiver: str, body: bytes, key: int = 0) -> tuple[Call, str]:
        """A new call, and its header. ``key``: which of the keys makes the seal."""
        if receiver not in self._numbers and len(self._numbers) >= RECEIVERS_MAX:
            longest_known = next(iter(self._numbers))
            del self._numbers[longest_known]
            self._ahead_ms.pop(longest_known, None)
        number = self._numbers[receiver] = self._numbers.get(receiver, 0) + 1
        time_ms = self._now_ms() + self._ahead_ms.get(receiver, 0)
        call = Call(method, path, receiver, time_ms, self._sender, number, hash_of(body))
        seal = _seal(self._keys[key], call.text)
        return (
            call,
            f"version={VERSION},time={time_ms},sender={call.sender},number={number},body={call.body},seal={seal}",
        )

    def check_answer(self, call: Call, header: str, status: int, kind: str, body: bytes) -> None:
        """Raises `NotAuthenticatedError` for an answer that the receiver of the call did not give."""
        fields = _fields(header, _ANSWER_NAMES)
        text = _answer_text(call, fields["time"], status, kind, body)
        if not any(compare_digest(_seal(key, text), fields["seal"]) for key in self._keys):
            raise NotAuthenticatedError("an answer without the seal of a worker")

    def learn_time(self, call: Call, header: str) -> None:
        """A checked answer says the receiver's time."""
        self._ahead_ms[call.receiver] = int(_fields(header, _ANSWER_NAMES)["time"]) - self._now_ms()

    @property
    def key_count(self) -> int:
        """The number of keys."""
        return len(self._keys)

    # -- as a receiver

    def open(self, header: str, method: str, path: str, receiver: str) -> tuple[Call, int]:
        """The call that a request is, and with which of the keys it was sealed, before its body is read.

        Raises:
            OtherVersionError: a worker of another version may have made it.
            NotAuthenticatedError: no worker made it for us.
        """
        fields = _fields(header, _NAMES)
        call = Call(
            method,
            path,
            receiver,
            int(fields["time"]),
            fields["sender"],
            int(fields["number"]),
            fields["body"],
        )
        for index, key in enumerate(self._keys):
            if compare_digest(_seal(key, call.text), fields["seal"]):
                return call, index
        raise _not_ours()

    def take(self, call: Call) -> None:
        """Record a call. Raises `StaleCallError` if it is a repetition or too old."""
        now_ms = self._time_ms()
        for sender in [s for s, seen in self._seen.items() if seen.last_ms < now_ms - 2 * FRESH_MS]:
            del self._seen[sender]
        if abs(now_ms - call.time_ms) > FRESH_MS:
            raise StaleCallError("the call is not of the present time of its receiver")
        seen = self._seen.get(call.sender)
        if seen is None:
            seen = self._seen[call.sender] = _Seen()
        seen.last_ms = now_ms
        if not seen.take(call.number):
            raise StaleCallError("the call was made before")

    def answer(self, call: Call, key: int, status: int, kind: str, body: bytes) -> str:
        """The header of the answer to a call."""
        time = str(self._time_ms())
        return (
            f"version={VERSION},time={time},seal={_seal(self._keys[key], _answer_text(call, time, status, kind, body))}"
        )


class _Seen:
    """The call numbers seen from one sender."""

    __slots__ = ("_above", "_all", "last_ms")

    def __init__(self) -> None:
        self._all = 0  # this and all below it
        self._above: set[int] = set()
        self.last_ms = 0

    def take(self, number: int) -> bool:
        """Record a number. Returns False if it was seen before."""
        if number <= self._all or number in self._above:
            return False
        self._above.add(number)
        if len(self._above) > NUMBERS_MAX:
            self._all = min(self._above)
        while self._all + 1 in self._above:
            self._all += 1
            self._above.discard(self._all)
        self._above.discard(self._all)
        return True


def _seal(key: bytes, text: bytes) -> str:
    return blake2b(text, key=key, digest_size=32).hexdigest()


def _answer_text(call: Call, time: str, status: int, kind: str, body: bytes) -> bytes:
    return call.text + f"\nanswer\n{time}\n{status}\n{kind}\n{hash_of(body)}".encode()


def _fields(header: str, names: list[str]) -> dict[str, str]:
    """The fields of a header: exactly these, in this order. Raises `NotAuthenticatedError`."""
    version = version_of(header)
    if version not in (None, VERSION):
        raise OtherVersionError(version)
    pairs = [part.partition("=") for part in header[:400].split(",")]
    fields = {name: value for name, _, value in pairs if value.isascii() and value.isalnum()}
    if list(fields) != names or len(pairs) != len(names):
        raise _not_ours()
    if not all(fields[n].isdigit() and len(fields[n]) < 19 for n in ("time", "number") if n in fields):
        raise _not_ours()
    return fields


def version_of(header: str) -> str | None:
    """The version in a header; None if there is none."""
    found = _VERSION.match(header)
    if found is not None:
        return found[1]
    return OLD_VERSION if len(header) == 64 and not set(header) - set("0123456789abcdef") else None


def _not_ours() -> NotAuthenticatedError:
    return NotAuthenticatedError("this path is for workers of the installation alone")
