"""Errors as HTTP answers: RFC 9457 problem details, from the one exception hierarchy."""

from __future__ import annotations

from typing import Any

import msgspec

from marq import errors

TYPE = "urn:marq:problem:"
#: Characters of the text of an error: what it repeats of a request may be megabytes.
DETAIL_MAX = 2_000
CONTENT_TYPE = "application/problem+json"

#: Status, name and title of each kind of error; the first that fits counts.
_KINDS: tuple[tuple[type[BaseException], int, str, str], ...] = (
    (errors.BadReceiptError, 400, "bad-receipt", "Not a receipt"),
    (errors.BadValueError, 400, "bad-value", "A value that is not allowed"),
    (errors.UnknownQueueError, 404, "unknown-queue", "No such queue"),
    (errors.NotFoundError, 404, "not-found", "Not here"),
    (errors.TooLargeError, 413, "too-large", "Too large"),
    (errors.NotPossibleError, 409, "not-possible", "Not possible here"),
    (errors.LeaseOverError, 409, "lease-over", "The lease is over"),
    (errors.NotAuthenticatedError, 401, "no-key", "A key is needed"),
    (errors.NotAllowedError, 403, "not-allowed", "Not allowed"),
    (errors.RequestError, 400, "bad-request", "A request that can't be carried out"),
    (errors.UnavailableError, 503, "unavailable", "Not now"),
    (errors.BrokerError, 503, "unavailable", "Not now"),
)
#: Errors by the name of their kind.
ERRORS: dict[str, type[errors.MarqError]] = {
    name: kind for kind, _, name, _ in reversed(_KINDS) if issubclass(kind, errors.MarqError)
}
_INTERNAL = (500, "internal", "Something went wrong here")


def kind_of(error: BaseException) -> tuple[int, str, str]:
    """Status, name and title for an error."""
    for kind, status, name, title in _KINDS:
        if isinstance(error, kind):
            return status, name, title
    return _INTERNAL


def entry(error: BaseException) -> dict[str, str]:
    """An error among the results of a batch."""
    _, name, title = kind_of(error)
    return {"type": TYPE + name, "title": title, "detail": _cut(str(error))}


def body(status: int, name: str, title: str, detail: str) -> dict[str, object]:
    """A whole answer."""
    return {"type": TYPE + name, "title": title, "status": status, "detail": _cut(detail)}


def _cut(text: str) -> str:
    """A text that can be sent: not too long, without halves of characters, which headers may have."""
    text = text if len(text) <= DETAIL_MAX else text[:DETAIL_MAX] + "…"
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def error_of(answer: bytes) -> errors.MarqError:
    """The error that another worker answered with."""
    return error_in(msgspec.json.decode(answer))


def error_in(found: dict[str, Any]) -> errors.MarqError:
    """The error that problem details tell."""
    name = str(found.get("type", "")).removeprefix(TYPE)
    for kind, _, known, _ in _KINDS:
        if known == name and issubclass(kind, errors.MarqError):
            return kind(str(found.get("detail", "")))
    return errors.UnavailableError("another worker failed; try again")
