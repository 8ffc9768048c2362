"""The bodies of requests and answers (msgpack), and the errors in answers.

>>> to_wire(b"hi")
Entry(payload=b'hi', key=None, headers={}, delay_ms=None, ttl_ms=None, group=None, deduplication_id=None)
>>> to_wire(Outgoing("hi", delay=1.5)).delay_ms
1500
>>> error_of(Problem("urn:marq:problem:unknown-queue", detail="no queue 'x'; create it"))
UnknownQueueError("no queue 'x'; create it")
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from marq import errors
from marq.errors import BadValueError, MarqError, ServiceError
from marq.protocol import problems
from marq.protocol.messages import Entry, Peeked, Problem, QueueCounts, QueueInfo, Received, Sent

MSGPACK = "application/msgpack"

#: Longest wait of one receive in seconds; a longer one is several.
WAIT_MAX_S = 20.0

encode = msgspec.msgpack.Encoder().encode


class Outgoing(msgspec.Struct, frozen=True):
    """A message to send, with more than a payload.

    Args:
        payload: the message's content. Text is sent as UTF-8, here and in the key and headers.
        key: the sender's own key.
        headers: the sender's headers.
        delay: seconds until it can be received. None: as the queue says.
        ttl: seconds after which it is dropped if it is not finished. None: as the queue says.
        group: messages of one group take turns with those of others; in a FIFO queue they are delivered in order.
        deduplication_id: only for FIFO queues. Of several messages with the same id within five minutes, only the
            first counts.
    """

    payload: bytes | str
    key: bytes | str | None = None
    headers: Mapping[str, bytes | str] = {}
    delay: float | None = None
    ttl: float | None = None
    group: str | None = None
    deduplication_id: str | None = None


class Located(Protocol):
    """Anything with a place in the queue topic: a delivery, the result of a send, or a pair of your own."""

    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...


class Delivery(Received, eq=False):
    """One delivery of a message; see `marq.protocol.messages.Received`."""

    def json(self) -> Any:
        """The payload, decoded from JSON. Raises `ValueError` if it is not JSON."""
        return json.loads(self.payload)

    def __repr__(self) -> str:
        place = f"{self.topic}:{self.partition}:{self.offset}"
        return f"<{type(self).__name__} {place} of {self.queue!r}, attempt {self.attempt}>"


D = TypeVar("D", bound=Delivery)


class Deliveries(msgspec.Struct, Generic[D]):
    """The answer to a receive."""

    messages: list[D]


class _SendResult(msgspec.Struct):
    topic: str = ""
    partition: int = -1
    offset: int = -1
    error: Problem | None = None


class _SendResults(msgspec.Struct):
    results: list[_SendResult]


class _SettleResult(msgspec.Struct):
    error: Problem | None = None


class _SettleResults(msgspec.Struct):
    results: list[_SettleResult]


class _Peeks(msgspec.Struct):
    messages: list[Peeked]


class _QueuePage(msgspec.Struct):
    queues: list[QueueInfo]
    after: str = ""


_queue_info = msgspec.msgpack.Decoder(QueueInfo)
_queue_counts = msgspec.msgpack.Decoder(QueueCounts)
_peeks = msgspec.msgpack.Decoder(_Peeks)
_queue_page = msgspec.msgpack.Decoder(_QueuePage)
_send_results = msgspec.msgpack.Decoder(_SendResults)
_settle_results = msgspec.msgpack.Decoder(_SettleResults)
_problem = msgspec.json.Decoder(Problem)

#: Errors by the last part of a problem's type.
_ERRORS = problems.ERRORS | {"internal": ServiceError}

#: Errors by status, for answers that don't come from a worker but from a proxy, say.
_STATUSES: dict[int, type[MarqError]] = {
    401: errors.NotAuthenticatedError,
    403: errors.NotAllowedError,
    413: errors.TooLargeError,
    429: errors.UnavailableError,
    502: errors.UnavailableError,
    503: errors.UnavailableError,
    504: errors.UnavailableError,
}


def to_wire(message: bytes | str | Outgoing) -> Entry:
    """A message as it is sent. Raises `BadValueError` if it is invalid."""
    if not isinstance(message, Outgoing):
        return Entry(_as_bytes(message, "a message"))
    payload = _as_bytes(message.payload, "a message")
    key = None if message.key is None else _as_bytes(message.key, "a key")
    headers = {name: _as_bytes(value, f"the value of header {name!r}") for name, value in message.headers.items()}
    delay_ms, ttl_ms = ms(message.delay), ms(message.ttl)
    return Entry(payload, key, headers, delay_ms, ttl_ms, message.group, message.deduplication_id)


def several(messages: Iterable[bytes | str | Outgoing]) -> list[bytes | str | Outgoing]:
    """The messages of one call. Raises `BadValueError` for a single text, which would be a message per character."""
    if isinstance(messages, str | bytes):
        raise BadValueError("send_many takes several messages; use send for one")
    return list(messages)


def _as_bytes(value: Any, what: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    # the service would take other values for base64, and may succeed
    if isinstance(value, bytes | bytearray | memoryview):
        return value  # type: ignore[return-value]  # it is only written out
    raise BadValueError(f"{what} is bytes or text, not {type(value).__name__}; to send JSON, use json.dumps")


def ms(seconds: float | None) -> int | None:
    """Seconds as whole milliseconds."""
    return None if seconds is None else round(seconds * 1000)


def error_of(problem: Problem, status: int = 0) -> MarqError:
    """The error of a problem. If its type is not known, the status decides."""
    kind = _ERRORS.get(problem.type.rpartition(":")[2])
    if kind is None:
        kind = _STATUSES.get(status) or (errors.RequestError if status < 500 else errors.ServiceError)
    text = problem.detail or problem.title or f"the service answered with status {status}"
    if issubclass(kind, errors.UnavailableError):
        return kind(text, 0.0)
    return kind(text)


def error_of_answer(status: int, body: bytes, content_type: str, retry_after: str | None) -> MarqError:
    """The error of an answer with a status of 400 or above."""
    problem = Problem()
    if content_type.partition(";")[0] == problems.CONTENT_TYPE:
        with contextlib.suppress(msgspec.MsgspecError):
            problem = _problem.decode(body)
    if not problem.detail:
        problem.detail = f"status {status} from what is at this address: {body[:200].decode(errors='replace').strip()}"
    error = error_of(problem, status)
    if isinstance(error, errors.UnavailableError):
        error.retry_after_s = seconds_of(retry_after)
    return error


def seconds_of(retry_after: str | None) -> float:
    """Seconds that a Retry-After header asks to wait; 0 if there is none.

    >>> seconds_of("2"), seconds_of(None), seconds_of("soon")
    (2.0, 0.0, 0.0)
    """
    if retry_after is None:
        return 0.0
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        with contextlib.suppress(ValueError):
            return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time())
        return 0.0


def decoded(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    """A decoded answer. Raises `ServiceError` if it is not as expected."""
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as exc:
        raise ServiceError(f"what is at this address did not answer like marq ({exc}); check the address") from None


def queue_info(body: bytes) -> QueueInfo:
    """The information about a queue in an answer."""
    info: QueueInfo = decoded(_queue_info, body)
    return info


def queue_counts(body: bytes) -> QueueCounts:
    """How a queue stands."""
    counts: QueueCounts = decoded(_queue_counts, body)
    return counts


def peeked(body: bytes) -> list[Peeked]:
    """Messages that were looked at."""
    page: _Peeks = decoded(_peeks, body)
    return page.messages


def queue_page(body: bytes) -> tuple[list[QueueInfo], str]:
    """Some queues, and the name after which the list goes on ("" at its end)."""
    page = decoded(_queue_page, body)
    return page.queues, page.after


def send_results(body: bytes) -> list[Sent | MarqError]:
    """Per message of a send its place, or the error."""
    return [
        Sent(r.topic, r.partition, r.offset) if r.error is None else error_of(r.error)
        for r in decoded(_send_results, body).results
    ]


def settle_results(body: bytes) -> list[MarqError | None]:
    """Per receipt None, or the error."""
    return [None if r.error is None else error_of(r.error) for r in decoded(_settle_results, body).results]
