"""The OpenAPI document, made from the operations and the structs of their requests and answers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from marq import __version__
from marq.core.policies import QUEUE_NAME_MAX
from marq.protocol import problems

JSON, MSGPACK = "application/json", "application/msgpack"

_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_STATUSES = {
    400: "A value is malformed or out of range.",
    401: "A key is needed.",
    403: "This key may not do that.",
    404: "No such queue, message or partition.",
    408: "The body did not come in time.",
    409: "Not possible in this installation.",
    413: "The request is too large.",
    415: "Neither JSON nor msgpack.",
    503: "Not now: Kafka is slow or away, or too much waits already. See Retry-After.",
}


class Operation(NamedTuple):
    """One route: the permission that it needs, its request and its answer."""

    method: str
    path: str  # as in aiohttp
    permission: str | None  # None: any key
    handler: Any
    summary: str
    request: Any = None  # type of the body
    query: Any = None  # type of the query
    response: Any = dict[str, Any]
    statuses: tuple[int, ...] = (200,)
    everywhere: bool = False  # the permission is needed for all queues
    tag: str = "messages"


_PARAMETERS: dict[str, dict[str, Any]] = {
    "queue": {"type": "string", "minLength": 1, "maxLength": QUEUE_NAME_MAX, "pattern": r"^[^\x00-\x1f\x7f-\x9f]+$"},
    "partition": {"type": "integer", "minimum": 0},
    "offset": {"type": "integer", "minimum": 0},
    "table": {"type": "string", "enum": ["messages", "markers", "progress"]},
}


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """Returns the document as plain values."""
    operations = list(operations)
    types = {t for o in operations for t in (o.request, o.query, o.response) if t is not None}
    ordered = sorted(types, key=str)
    found, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(ordered, found, strict=True))
    components["ProblemDetails"] = {
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {name: {"type": "string"} for name in ("type", "title", "detail")}
        | {"status": {"type": "integer"}},
    }
    paths: dict[str, Any] = {}
    for operation in operations:
        described = _described(operation, schema_of, components)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "marq",
            "version": __version__,
            "description": "A message queue on your Kafka. Bodies are JSON, or msgpack where Content-Type or Accept "
            "is application/msgpack: then payloads, keys and header values are bytes; in JSON they are base64.",
        },
        "paths": paths,
        "components": {
            "schemas": _with_base64(components),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _described(operation: Operation, schema_of: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _PARAMETERS[name]}
        for name in re.findall(r"\{(\w+)\}", operation.path)
    ]
    if operation.query is not None:
        query = components[schema_of[operation.query]["$ref"].rsplit("/", 1)[1]]
        parameters += [
            {"name": name, "in": "query", "schema": schema} for name, schema in query.get("properties", {}).items()
        ]
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.handler.__name__,
        "tags": [operation.tag],
        "parameters": parameters,
        "responses": {
            str(status): {
                "description": "Done." if status < 202 else "Under way.",
                "content": {JSON: {"schema": schema_of[operation.response]}},
            }
            for status in operation.statuses
        }
        | {
            str(status): {
                "description": text,
                "content": {problems.CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
            }
            for status, text in _STATUSES.items()
        },
    }
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schema_of[operation.request]}},
        }
    return described


def _with_base64(value: Any) -> Any:
    """Adds the pattern of base64, for generated clients and tests."""
    if isinstance(value, dict):
        changed = {key: _with_base64(item) for key, item in value.items()}
        if changed.get("contentEncoding") == "base64":
            changed["pattern"] = _BASE64
        return changed
    return [_with_base64(item) for item in value] if isinstance(value, list) else value
