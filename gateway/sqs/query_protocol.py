"""The query protocol: parameters as a form or in the URL, lists and maps flattened by numbers, answers in XML or JSON.

Botocore's model describes JSON now, and lacks the names that lists and maps have here: those of their members, in the
singular.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any
from xml.sax.saxutils import escape

import msgspec
from aiohttp import web
from botocore.model import ListShape, MapShape, Shape, StructureShape

from gateway.sqs.errors import NO_QUEUE, NO_QUEUE_QUERY, SqsError, missing
from gateway.sqs.model import API_VERSION, SERVICE, STS, STS_VERSION, Action, actions, identity_action

CONTENT_TYPE = "text/xml"
JSON_TYPE = "application/json"
NAMESPACE = f"http://queue.amazonaws.com/doc/{API_VERSION}/"
_STS_NAMESPACE = f"https://sts.amazonaws.com/doc/{STS_VERSION}/"
#: Actions that are not about one queue.
_NOT_OF_A_QUEUE = frozenset({"CreateQueue", "ListQueues"})
_VERSIONS = {SERVICE: (API_VERSION, "2011-10-01", "2009-02-01"), STS: (STS_VERSION,)}
#: Parameters of one request.
PARAMETERS_MAX = 20_000
#: Parts of a parameter's name.
_DEPTH_MAX = 8
#: Names that differ from the singular of the member's name.
_NAMES = {"Actions": "ActionName", "queueUrls": "QueueUrl", "tags": "Tag"}
#: Names in JSON answers that differ from the member's name.
_JSON_NAMES = {"Messages": "messages", "QueueUrls": "queueUrls"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


_to_json = msgspec.json.Encoder().encode


def _name_of(name: str, shape: Shape) -> str:
    """The name of a member in this protocol."""
    if isinstance(shape, ListShape) and isinstance(shape.member, StructureShape):
        return str(shape.member.name)
    if isinstance(shape, ListShape | MapShape):
        return _NAMES.get(name, name.removesuffix("s"))
    return name


def _keys_of(shape: MapShape) -> tuple[str, str]:
    return ("Key", "Value") if shape.name == "TagMap" else ("Name", "Value")


# -- requests


class Nested(dict[str, "Nested"]):
    """Parameters by the parts of their names."""

    text: str | None = None


def read(query: str, body: bytes, url: str | None) -> tuple[Action, Any]:
    """The action of a request, and its parameters; `url` names the queue if they don't.

    Raises `SqsError`.
    """
    nested = _nested(query, body)
    name = nested["Action"].text if "Action" in nested else None
    if not name:
        raise SqsError("MissingAction", "The request must contain the parameter Action.")
    action = identity_action() if name == identity_action().name else actions().get(name)
    if action is None or (url is not None and name in _NOT_OF_A_QUEUE):
        raise SqsError("UnknownOperation", f"The action {name[:200]} is not valid for this endpoint.")
    version = nested["Version"].text if "Version" in nested else None
    if version is not None and version not in _VERSIONS[action.service]:
        raise SqsError("InvalidParameterValue", f"Value {version} for parameter Version is invalid.")
    parameters = _structure(action.input, nested)
    if url is not None and "QueueUrl" in action.input.members:
        parameters.setdefault("QueueUrl", url)
    return action, action.of_texts(parameters)


def _nested(query: str, body: bytes) -> Nested:
    root = Nested()
    try:
        pairs = [*_pairs(query.encode()), *_pairs(body)]
    except ValueError as exc:
        raise SqsError("Serialization", f"The parameters can't be read: {exc}") from None
    for name, text in pairs:
        node, parts = root, name.split(".", _DEPTH_MAX)
        if len(parts) > _DEPTH_MAX:
            continue
        for part in parts:
            node = node.setdefault(part, Nested())
        node.text = text
    return root


def _pairs(form: bytes) -> Iterator[tuple[str, str]]:
    """Names and values of a form. Raises `ValueError`.

    `urllib.parse` takes 0.5 s and 400 MB for 4 MiB of escapes, and leaves an invalid one as it is.
    """
    if form.count(b"&") >= PARAMETERS_MAX:
        raise ValueError(f"more than {PARAMETERS_MAX} parameters")
    for part in form.split(b"&"):
        if part:
            name, _, value = part.partition(b"=")
            yield _unquoted(name), _unquoted(value)


def _unquoted(text: bytes) -> str:
    """`%41` -> `A`, and `+` -> a blank. Raises `ValueError` for an invalid escape, and for what is not UTF-8."""
    text = text.replace(b"+", b" ")
    if b"%" in text:
        # the only fast decoder of escapes that Python has; of others than `\\x`, nothing is left
        escaped = text.replace(b"\\", b"\\\\").replace(b"%", b"\\x")
        try:
            text = escaped.decode("unicode_escape").encode("latin-1")
        except UnicodeDecodeError:
            raise ValueError("a % is not followed by two hexadecimal digits") from None
    return text.decode()


def _structure(shape: StructureShape, nested: Nested) -> dict[str, Any]:
    found = {}
    for name, member in shape.members.items():
        node = nested.get(_name_of(name, member))
        if node is not None:
            value = _value(member, node)
            if value is not None:
                found[name] = value
        elif isinstance(member, ListShape) and name in shape.required_members:
            found[name] = []  # a form can't say that a list is empty
    return found


def _value(shape: Shape, node: Nested) -> Any:
    if isinstance(shape, StructureShape):
        return _structure(shape, node)
    if isinstance(shape, ListShape):
        return [_value(shape.member, one) for one in _numbered(node)]
    if isinstance(shape, MapShape):
        key, value = _keys_of(shape)
        found = {}
        for number, one in enumerate(_numbered(node), 1):
            if key not in one or one[key].text is None:
                raise missing(f"{number}.{key}")
            if value not in one:
                raise missing(f"{number}.{value}")
            found[one[key].text] = _value(shape.value, one[value])
        return found
    return node.text


def _numbered(node: Nested) -> list[Nested]:
    numbers = sorted((int(part), part) for part in node if part.isascii() and part.isdigit() and len(part) < 9)
    return [node[part] for _, part in numbers]


# -- answers


def wants_json(request: web.Request) -> bool:
    """True if the client wants JSON instead of XML."""
    return JSON_TYPE in request.headers.get("Accept", "")


def answer(action: Action, result: dict[str, Any] | None, request_id: str, as_json: bool = False) -> web.Response:
    """Encode a result."""
    if as_json:
        return _json_answer(action, result, request_id)
    namespace = NAMESPACE if action.service == SERVICE else _STS_NAMESPACE
    parts = [f'<?xml version="1.0"?><{action.name}Response xmlns="{namespace}">']
    if action.output is not None:
        members: list[str] = []
        _write_members(members, action.output, result or {})
        if members:
            parts += [f"<{action.name}Result>", *members, f"</{action.name}Result>"]
        else:
            parts.append(f"<{action.name}Result/>")
    parts.append(f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata></{action.name}Response>")
    return web.Response(text="".join(parts), content_type=CONTENT_TYPE)


def unknown_operation() -> web.Response:
    """The answer to a `GET` of a queue's URL without an action."""
    return web.Response(text="<UnknownOperationException/>", status=404, content_type=CONTENT_TYPE)


def _write_members(parts: list[str], shape: StructureShape, value: dict[str, Any]) -> None:
    for name, member in shape.members.items():
        if name in value:
            _write(parts, _name_of(name, member), member, value[name])


def _write(parts: list[str], name: str, shape: Shape, value: Any) -> None:
    if isinstance(shape, ListShape):
        for one in value:
            _write(parts, name, shape.member, one)
    elif isinstance(shape, MapShape):
        key_name, value_name = _keys_of(shape)
        for key, one in value.items():
            parts.append(f"<{name}><{key_name}>{_text(key)}</{key_name}>")
            _write(parts, value_name, shape.value, one)
            parts.append(f"</{name}>")
    elif isinstance(shape, StructureShape):
        parts.append(f"<{name}>")
        _write_members(parts, shape, value)
        parts.append(f"</{name}>")
    else:
        parts.append(f"<{name}>{_text(value)}</{name}>")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, bool):
        return "true" if value else "false"
    # XML turns a carriage return into a line feed unless it is written as a number
    return escape(_NOT_XML.sub("\ufffd", str(value)), {"\r": "&#13;"})


def problem(error: SqsError, request_id: str, as_json: bool = False) -> web.Response:
    """Encode an error."""
    kind = error.kind
    message = NO_QUEUE_QUERY if str(error) == NO_QUEUE else str(error)
    if as_json:
        told = {"Code": kind.code, "Message": message, "Type": kind.fault}
        body = _to_json({"Error": told, "RequestId": request_id})
        return web.Response(body=body, status=kind.status, content_type=JSON_TYPE)
    text = (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{NAMESPACE}"><Error><Type>{kind.fault}</Type>'
        f"<Code>{kind.code}</Code><Message>{_text(message)}</Message><Detail/></Error>"
        f"<RequestId>{request_id}</RequestId></ErrorResponse>"
    )
    return web.Response(text=text, status=kind.status, content_type=CONTENT_TYPE)


# -- answers in JSON: all members, null where there is nothing, and maps as lists of names and values


def _json_answer(action: Action, result: dict[str, Any] | None, request_id: str) -> web.Response:
    told: dict[str, Any] = {"ResponseMetadata": {"RequestId": request_id}}
    if action.output is not None:
        told[f"{action.name}Result"] = _json_value(action.output, result or {})
    return web.Response(body=_to_json({f"{action.name}Response": told}), content_type=JSON_TYPE)


def _json_value(shape: Shape, value: Any) -> Any:
    if isinstance(shape, StructureShape):
        return {
            _JSON_NAMES.get(name, name): _json_value(member, value[name]) if value.get(name) is not None else None
            for name, member in shape.members.items()
        }
    if isinstance(shape, ListShape):
        return [_json_value(shape.member, one) for one in value] or None
    if isinstance(shape, MapShape):
        key_name, value_name = _keys_of(shape)
        return [{key_name: key, value_name: _json_value(shape.value, one)} for key, one in value.items()] or None
    return b64encode(value).decode() if isinstance(value, bytes) else value
