"""The query protocol: parameters as a form or in the URL, lists and maps flattened by numbers, answers in XML.

Botocore's model speaks JSON now; what it does not say any more is by what names lists and maps go here: as their
members do, in the singular.
"""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from aiohttp import web
from botocore.model import ListShape, MapShape, Shape, StructureShape

from gateway.sqs.errors import SqsError, missing
from gateway.sqs.model import API_VERSION, Action, actions

CONTENT_TYPE = "text/xml"
NAMESPACE = f"http://queue.amazonaws.com/doc/{API_VERSION}/"
#: Parameters of one request.
PARAMETERS_MAX = 20_000
#: Parts of a parameter's name.
_DEPTH_MAX = 8
#: Names that are not the member's in the singular.
_NAMES = {"Actions": "ActionName", "queueUrls": "QueueUrl", "tags": "Tag"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _name_of(name: str, shape: Shape) -> str:
    """By what name a member goes."""
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
    """The action that a request asks for, and its parameters; `url` names the queue if they don't.

    Raises `SqsError`.
    """
    nested = _nested(query, body)
    name = nested["Action"].text if "Action" in nested else None
    if not name:
        raise SqsError("MissingAction", "The request must contain the parameter Action.")
    action = actions().get(name)
    if action is None:
        raise SqsError("UnknownOperation", f"The action {name[:200]} is not valid for this endpoint.")
    version = nested["Version"].text if "Version" in nested else None
    if version not in (None, API_VERSION, "2011-10-01", "2009-02-01"):
        raise SqsError("InvalidParameterValue", f"Value {version} for parameter Version is invalid.")
    parameters = _structure(action.input, nested)
    if url is not None and "QueueUrl" in action.input.members:
        parameters.setdefault("QueueUrl", url)
    return action, action.of_texts(parameters)


def _nested(query: str, body: bytes) -> Nested:
    root = Nested()
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=PARAMETERS_MAX)
        pairs += parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=PARAMETERS_MAX)
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


def answer(action: Action, result: Any, request_id: str) -> web.Response:
    """A result on the wire."""
    parts = [f'<?xml version="1.0"?><{action.name}Response xmlns="{NAMESPACE}">']
    if action.output is not None:
        parts.append(f"<{action.name}Result>")
        _write_members(parts, action.output, result or {})
        parts.append(f"</{action.name}Result>")
    parts.append(f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata></{action.name}Response>")
    return web.Response(text="".join(parts), content_type=CONTENT_TYPE)


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


def problem(error: SqsError, request_id: str) -> web.Response:
    """An error on the wire."""
    kind = error.kind
    text = (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{NAMESPACE}"><Error><Type>{kind.fault}</Type>'
        f"<Code>{kind.code}</Code><Message>{_text(str(error))}</Message><Detail/></Error>"
        f"<RequestId>{request_id}</RequestId></ErrorResponse>"
    )
    return web.Response(text=text, status=kind.status, content_type=CONTENT_TYPE)
