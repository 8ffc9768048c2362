"""The JSON protocol (AWS JSON 1.0): the action in `X-Amz-Target`, parameters and answers as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from gateway.replies import Reply
from gateway.sqs.errors import SqsError
from gateway.sqs.model import Action, actions

CONTENT_TYPE = "application/x-amz-json-1.0"
TARGET = "X-Amz-Target"
#: Header with an error's code of the query protocol, by which SDKs choose an exception.
QUERY_ERROR = "x-amzn-query-error"
_PREFIX = "AmazonSQS."
_HEADERS = {"Content-Type": CONTENT_TYPE}

_encode = msgspec.json.Encoder().encode


def target_of(action: str) -> str:
    """The value of `X-Amz-Target` for an action."""
    return _PREFIX + action


def read(target: str, body: bytes) -> tuple[Action, Any]:
    """The action of a request, and its parameters. Raises `SqsError`."""
    prefix, _, name = target.partition(".")
    action = actions().get(name) if prefix + "." == _PREFIX else None
    if action is None:
        raise SqsError("UnknownOperation", f"The action {target[:200]} is not valid for this endpoint.")
    return action, action.of_json(body)


def answer(result: Any) -> web.Response:
    """Encode a result."""
    return Reply(body=_encode(result) if result is not None else b"{}", headers=_HEADERS)


def problem(error: SqsError) -> web.Response:
    """Encode an error."""
    kind = error.kind
    headers = {**_HEADERS, QUERY_ERROR: f"{kind.code};{kind.fault}"}
    body = _encode({"__type": kind.type, "message": str(error)})
    return web.Response(body=body, status=kind.json_status or kind.status, headers=headers)
