"""Message attributes as headers of a record and back, their checksums, and the ids of messages.

    attribute `Name`        header `Name`: the text, or the bytes
    its data type           in the header `AWS.types`, `{"Name": "Number"}`, where it is not what the value looks like:
                            `String` for text, `Binary` for other bytes
    AWSTraceHeader          header `AWS.TraceHeader`
    the sender              header `AWS.SenderId`, where keys are configured

So whoever reads the topic or uses the JSON API sees plain headers, and headers that others set are attributes here.
Names that begin with `AWS.` can't be those of attributes.
"""

from __future__ import annotations

import re
import struct
from base64 import b64encode
from collections.abc import Callable
from hashlib import blake2b, md5
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from gateway.sqs.errors import SqsError, bad_value
from marq.protocol.headers import H_SQS_SENDER, H_SQS_TRACE, H_SQS_TYPES, RESERVED

_OURS = frozenset({H_SQS_TYPES, H_SQS_TRACE, H_SQS_SENDER})
#: The one system attribute that senders give.
TRACE = "AWSTraceHeader"
#: Attribute that tells that a payload is no text, and is given in base64.
ENCODING = "marq-payload-encoding"

#: Attributes of one message.
ATTRIBUTES_MAX = 10
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_RESERVED_NAME = re.compile(r"^(aws|amazon)\.", re.IGNORECASE)
_TYPE = re.compile(r"(String|Number|Binary)(\.[^\x00]{1,240})?", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d{1,128}(\.\d{0,128})?|\.\d{1,128})([eE][+-]?\d{1,4})?")
_NOT_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
#: Group and deduplication ids.
_ID = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}")
_TEXT_TRANSPORT, _BINARY_TRANSPORT = b"\x01", b"\x02"

_length = struct.Struct(">I").pack
_to_json = msgspec.json.Encoder().encode
_types_of = msgspec.json.Decoder(dict[str, str]).decode


class Attribute(NamedTuple):
    """A message attribute."""

    name: str
    type: str
    value: bytes

    @property
    def is_binary(self) -> bool:
        return self.type.startswith("Binary")

    def as_value(self) -> dict[str, Any]:
        """As the service model has it."""
        if self.is_binary:
            return {"BinaryValue": self.value, "DataType": self.type}
        return {"StringValue": self.value.decode(errors="replace"), "DataType": self.type}


def md5_of(data: bytes) -> str:
    """The checksum of a body."""
    return md5(data, usedforsecurity=False).hexdigest()


def md5_of_attributes(attributes: list[Attribute]) -> str:
    """The checksum of attributes: of names, types and values with their lengths, in the order of the names."""
    digest = md5(usedforsecurity=False)
    for name, kind, value in sorted(attributes):
        for part in (name.encode(), kind.encode()):
            digest.update(_length(len(part)) + part)
        digest.update(_BINARY_TRANSPORT if kind.startswith("Binary") else _TEXT_TRANSPORT)
        digest.update(_length(len(value)) + value)
    return digest.hexdigest()


def body_of(text: str) -> bytes:
    """The payload for a body. Raises `SqsError`."""
    if not text:
        raise SqsError("MissingParameter", "The request must contain the parameter MessageBody.")
    if _NOT_TEXT.search(text) is not None:
        raise SqsError(
            "InvalidMessageContents",
            "Invalid characters found. Valid unicode characters are #x9 | #xA | #xD | #x20 to #xD7FF | #xE000 to "
            "#xFFFD | #x10000 to #x10FFFF",
        )
    return text.encode()


def check_id(value: str, parameter: str) -> str:
    """A group's or deduplication id. Raises `SqsError`."""
    if _ID.fullmatch(value) is None:
        raise bad_value(
            value,
            parameter,
            f"{parameter} can only include alphanumeric and punctuation characters. 1 to 128 in length.",
        )
    return value


def attributes_of(given: dict[str, Any], limit: int = ATTRIBUTES_MAX) -> list[Attribute]:
    """The attributes of a message that is sent. Raises `SqsError`."""
    if len(given) > limit:
        raise _invalid(f"Number of message attributes [{len(given)}] exceeds the allowed maximum [{limit}].")
    return [_attribute_of(name, value) for name, value in given.items()]


def _attribute_of(name: str, value: Any) -> Attribute:
    if (
        _NAME.fullmatch(name) is None
        or name.startswith((".", RESERVED))
        or name.endswith(".")
        or ".." in name
        or _RESERVED_NAME.match(name)
    ):
        raise _invalid(
            f"The message attribute name '{name[:300]}' is invalid. Attribute name can contain A-Z, a-z, 0-9, "
            "underscore (_), hyphen (-), and period (.) characters, not begin or end with a period, and not begin "
            f"with AWS., Amazon. or {RESERVED}"
        )
    return Attribute(name, *_typed_value_of(name, value))


def _typed_value_of(name: str, value: Any) -> tuple[str, bytes]:
    kind = value.DataType
    if not kind:
        raise _invalid(f"The message attribute '{name}' must contain a non-empty attribute type.")
    if _TYPE.fullmatch(kind) is None:
        raise _invalid(
            f"The message attribute '{name}' has an invalid message attribute type, the set of supported type "
            "prefixes is Binary, Number, and String."
        )
    if value.StringListValues or value.BinaryListValues:
        raise SqsError(
            "UnsupportedOperation", "Message attribute list values in SendMessage operation are not supported."
        )
    binary = kind.startswith("Binary")
    if (value.StringValue if binary else value.BinaryValue) is not None:
        raise _invalid(
            f"The message attribute '{name}' with type '{kind}' must use field '{'Binary' if binary else 'String'}'."
        )
    if binary:
        if not value.BinaryValue:
            raise _invalid(f"The message attribute '{name}' must contain a non-empty message attribute value.")
        return kind, value.BinaryValue
    text = value.StringValue
    if not text:
        raise _invalid(f"The message attribute '{name}' must contain a non-empty message attribute value.")
    if _NOT_TEXT.search(text) is not None:
        raise SqsError("InvalidMessageContents", f"Invalid characters found in the message attribute '{name}'.")
    if kind.startswith("Number") and _NUMBER.fullmatch(text) is None:
        raise _invalid(f"Can't cast the value of message (user) attribute '{name}' to a number.")
    return kind, text.encode()


def trace_of(given: dict[str, Any]) -> Attribute:
    """The system attribute of a message that is sent. Raises `SqsError`."""
    for name in given:
        if name != TRACE:
            raise _invalid(f"Message system attribute name '{name[:300]}' is invalid. Use {TRACE}.")
    kind, value = _typed_value_of(TRACE, given[TRACE])
    if kind != "String":
        raise _invalid(f"The message system attribute '{TRACE}' must have the type String.")
    return Attribute(TRACE, kind, value)


def _invalid(message: str) -> SqsError:
    return SqsError("InvalidParameterValue", message)


def headers_of(attributes: list[Attribute]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The headers that carry attributes, and what is added to them."""
    headers = {name: value for name, _, value in attributes}
    types = {name: kind for name, kind, value in attributes if kind != _natural_type(value)}
    return headers, {H_SQS_TYPES: _to_json(types)} if types else {}


def _natural_type(value: bytes) -> str:
    """What a value looks like that nobody told the type of."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "Binary"
    return "String" if text and _NOT_TEXT.search(text) is None else "Binary"


def attributes_in(headers: dict[str, bytes]) -> list[Attribute]:
    """The attributes that headers carry, whoever set them."""
    types: dict[str, str] = {}
    if H_SQS_TYPES in headers:
        try:
            types = _types_of(headers[H_SQS_TYPES])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            types = {}
    found = []
    for name, value in headers.items():
        if name.startswith(RESERVED) or name in _OURS or not value:
            continue
        natural = _natural_type(value)
        kind = types.get(name, natural)
        if _TYPE.fullmatch(kind) is None or (natural == "Binary" and not kind.startswith("Binary")):
            kind = natural
        found.append(Attribute(name, kind, value))
    return found


def select(attributes: list[Attribute], names: list[str]) -> list[Attribute]:
    """The attributes that a receiver asks for: names, `All`, `.*`, and prefixes as `shop.*`."""
    if "All" in names or ".*" in names:
        return attributes
    prefixes = tuple(name[:-2] for name in names if name.endswith(".*"))
    return [a for a in attributes if a.name in names or (prefixes and a.name.startswith(prefixes))]


class MessageIds:
    """Ids of messages: a UUID that says, to who knows, in which partition and at which offset the message is."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret  # known when the worker has started
        self._tag = ""

    def of(self, partition: int, offset: int) -> str:
        """The id of a message; a random one where Kafka can't tell the offset (-1)."""
        if offset < 0:
            return str(uuid4())
        tag = self._tag
        if not tag:
            tag = self._tag = blake2b(self._secret(), digest_size=6, person=b"marq-message-id").hexdigest()
        last = f"{offset:015x}"
        return f"{tag[:8]}-{partition:04x}-8{tag[8:11]}-8{last[:3]}-{last[3:]}"


def sequence_number(offset: int) -> str:
    """Of a message in a FIFO queue: grows within a group."""
    return f"{max(0, offset):020d}"


#: What a receiver is told of a payload that is given in base64.
ENCODED = Attribute(ENCODING, "String", b"base64")


def text_of(payload: bytes) -> tuple[str, bool]:
    """A payload as the text of a body, and whether that is base64 because the payload is no text."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return b64encode(payload).decode(), True
    if _NOT_TEXT.search(text) is not None:
        return b64encode(payload).decode(), True
    return text, False
