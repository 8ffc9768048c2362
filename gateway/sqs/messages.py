"""Message attributes as headers of a record and back, their checksums, and the ids of messages.

    attribute `Name`        header `Name`: the text, or the bytes
    its data type           in the header `AWS.types`, `{"Name": "Number"}`, where it is not what the value looks like:
                            `String` for text, `Binary` for other bytes
    AWSTraceHeader          header `AWS.TraceHeader`
    the sender              header `AWS.SenderId`, where keys are configured

So readers of the topic and users of the JSON API see plain headers, and their headers are attributes here. Names of
attributes can't begin with `AWS.`.
"""

from __future__ import annotations

import re
import struct
from base64 import b64encode
from collections.abc import Callable, Iterable
from hashlib import blake2b, md5
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import msgspec

from gateway.sqs.errors import SqsError, bad_value
from marq.protocol.headers import H_SQS_SENDER, H_SQS_TRACE, H_SQS_TYPES, RESERVED

_OURS = frozenset({H_SQS_TYPES, H_SQS_TRACE, H_SQS_SENDER})
#: The only system attribute that senders can set.
TRACE = "AWSTraceHeader"
#: Characters of a trace in a header of a request.
TRACE_HEADER_MAX = 1024
#: Attribute of a message whose payload is not text, and is given in base64.
ENCODING = "marq-payload-encoding"

#: Attributes of one message.
ATTRIBUTES_MAX = 10
#: AWS documents A-Z, a-z and digits, and also accepts Latin letters with accents.
_NAME = re.compile(r"[A-Za-z0-9_.\-\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017f]{1,256}")
_RESERVED_NAME = re.compile(r"^(aws|amazon)\.", re.IGNORECASE)
_TYPE = re.compile(r"(String|Number|Binary)(\.[^\x00]{1,240})?", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d{1,128}(\.\d{0,128})?|\.\d{1,128})([eE][+-]?\d{1,4})?")
_NOT_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
#: Bytes of ASCII that are valid: to look for others takes an eighth of the time of that pattern.
_PLAIN = bytes([*b"\t\n\r", *range(0x20, 0x80)])
_VALID = (
    "Invalid characters found. Valid unicode characters are #x9 | #xA | #xD | #x20 to #xD7FF | #xE000 to #xFFFD | "
    "#x10000 to #x10FFFF"
)
#: Group and deduplication ids.
_ID = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}")
#: Each of these means all attributes of a message.
_EVERY = frozenset({"All", "*", ".*"})
#: Bits of a message's id: of the hash of its place, of that place, and of the offset in it; and its last ones.
_TAG_BITS, _PLACE_BITS, _OFFSET_BITS = 46, 76, 60
_LAST = (1 << 62) - 1
#: Ids given out here that are known without a hash.
_REMEMBERED = 50_000
#: Sequence numbers have 20 digits: they begin within 2 ** 62 (4.6e18) above 1e19, and offsets stay below 2 ** 54.
_SEQUENCE_MIN, _SEQUENCE_BITS, _SEQUENCE_STEP = 10**19, 62, 256
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


def size_of(payload: bytes, attributes: Iterable[Attribute]) -> int:
    """The size of a message for the limit of its queue: its body, and name, type and value of each attribute."""
    size = len(payload)
    for name, kind, value in attributes:
        size += len(name.encode()) + len(kind.encode()) + len(value)
    return size


def body_of(text: str) -> bytes:
    """The payload of a body. Raises `SqsError`."""
    if not text:
        raise SqsError("MissingParameter", "The request must contain the parameter MessageBody.")
    if text.isascii():
        payload = text.encode()
        is_valid = not payload.translate(None, _PLAIN)
    else:
        is_valid = _NOT_TEXT.search(text) is None
        payload = text.encode() if is_valid else b""
    if not is_valid:
        raise SqsError("InvalidMessageContents", _VALID)
    return payload


def check_id(value: str, parameter: str) -> str:
    """Check a group id or a deduplication id. Raises `SqsError`."""
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
            raise _no_value(name, kind)
        return kind, value.BinaryValue
    text = value.StringValue
    if not text:
        raise _no_value(name, kind)
    if _NOT_TEXT.search(text) is not None:
        raise _invalid(_VALID)
    if kind.startswith("Number") and _NUMBER.fullmatch(text) is None:
        raise _invalid(f"Can't cast the value of message (user) attribute '{name}' to a number.")
    return kind, text.encode()


def trace_of(given: dict[str, Any]) -> Attribute:
    """The trace among the system attributes of a message that is sent. Raises `SqsError`."""
    for name in given:
        if name != TRACE:
            raise _invalid(f"Message system attribute name '{name[:300]}' is invalid. Use {TRACE}.")
    kind, value = _typed_value_of(TRACE, given[TRACE])
    if kind != "String":
        raise _invalid(f"The message system attribute '{TRACE}' must have the type String.")
    return Attribute(TRACE, kind, value)


def trace_in(header: str) -> bytes | None:
    """The trace for the messages of a request, from its header; None if the value can't be an attribute."""
    if _NOT_TEXT.search(header) is not None or len(header) > TRACE_HEADER_MAX:
        return None
    return header.encode()


def _no_value(name: str, kind: str) -> SqsError:
    return _invalid(f"Message (user) attribute '{name}' must contain a non-empty value of type '{kind}'.")


def _invalid(message: str) -> SqsError:
    return SqsError("InvalidParameterValue", message)


def headers_of(attributes: list[Attribute]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The headers for attributes, and those that this package adds."""
    headers = {name: value for name, _, value in attributes}
    types = {name: kind for name, kind, value in attributes if kind != _natural_type(value)}
    return headers, {H_SQS_TYPES: _to_json(types)} if types else {}


def _natural_type(value: bytes) -> str:
    """The type of a value whose sender named none."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "Binary"
    return "String" if text and _NOT_TEXT.search(text) is None else "Binary"


def attributes_in(headers: dict[str, bytes], key: bytes | None = None) -> list[Attribute]:
    """The attributes in headers, from SQS or any other sender. `key`: of the record, in topic mode."""
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
    if key and KEY not in headers:
        found.append(Attribute(KEY, _natural_type(key), key))
    return found


def select(attributes: list[Attribute], names: list[str]) -> list[Attribute]:
    """The attributes that a receiver wants: names, `All`, `*`, `.*`, and prefixes like `shop.*`."""
    if not _EVERY.isdisjoint(names):
        return attributes
    prefixes = tuple(name[:-2] for name in names if name.endswith(".*"))
    return [a for a in attributes if a.name in names or (prefixes and a.name.startswith(prefixes))]


class MessageIds:
    """Ids of messages: UUIDs from which the partition and the offset can be read with the secret.

    Of the 122 bits that a random UUID has, 46 are a keyed hash of the place. The other 76 are the place, hidden by a
    keyed hash of those 46. So ids look random, each place has one id, and ids from elsewhere are recognised.
    """

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret  # known when the worker has started
        self._known_keys: tuple[bytes, bytes] | None = None
        self._bases: dict[int, int] = {}
        self._given: dict[tuple[int, int], str] = {}  # most messages are received where they were sent

    @property
    def _keys(self) -> tuple[bytes, bytes]:
        if self._known_keys is None:
            secret = self._secret()
            self._known_keys = (
                blake2b(secret, digest_size=32, person=b"marq-message-id").digest(),
                blake2b(secret, digest_size=32, person=b"marq-message-at").digest(),
            )
        return self._known_keys

    def of(self, partition: int, offset: int) -> str:
        """The id of a message; a random one where Kafka can't tell the offset (-1)."""
        found = self._given.get((partition, offset))
        if found is not None:
            return found
        if offset < 0:
            return str(uuid4())
        found = self._made(partition, offset)
        # only a place that a message has may come here: what clients name must not fill the memory
        if len(self._given) >= _REMEMBERED:
            self._given.clear()
        self._given[partition, offset] = found
        return found

    def _made(self, partition: int, offset: int) -> str:
        tag_key, place_key = self._keys
        place = partition << _OFFSET_BITS | offset
        tag = _hash(tag_key, place, _TAG_BITS)
        value = tag << _PLACE_BITS | place ^ _hash(place_key, tag, _PLACE_BITS)
        # version and variant of a random UUID come after its first 48 bits, and 12 bits later
        h = "%032x" % (value >> 74 << 80 | 0x4 << 76 | (value >> 62 & 0xFFF) << 64 | 0b10 << 62 | value & _LAST)
        return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"

    def place_of(self, text: str) -> tuple[int, int] | None:
        """The partition and offset of an id; None if the id is not from this installation."""
        try:
            bits = UUID(text).int
        except ValueError:
            return None
        value = bits >> 80 << 74 | (bits >> 64 & 0xFFF) << 62 | bits & _LAST
        tag, hidden = value >> _PLACE_BITS, value & (1 << _PLACE_BITS) - 1
        place = hidden ^ _hash(self._keys[1], tag, _PLACE_BITS)
        found = place >> _OFFSET_BITS, place & (1 << _OFFSET_BITS) - 1
        return found if self._made(*found) == text else None

    def sequence_number(self, partition: int, offset: int) -> str:
        """The sequence number of a message in a FIFO queue: 20 digits that grow with the offset."""
        base = self._bases.get(partition)
        if base is None:
            base = _SEQUENCE_MIN + _hash(self._keys[1], 1 << 64 | partition, _SEQUENCE_BITS)
            self._bases[partition] = base
        return str(base + max(0, offset) * _SEQUENCE_STEP)


def _hash(key: bytes, value: int, bits: int) -> int:
    return int.from_bytes(blake2b(value.to_bytes(10, "big"), key=key, digest_size=10).digest(), "big") >> 80 - bits


#: The attribute that has the key of the record, in topic mode.
KEY = "kafka-key"
#: The attribute of a payload that is given in base64.
ENCODED = Attribute(ENCODING, "String", b"base64")


def text_of(payload: bytes) -> tuple[str, bool]:
    """The text of a body for a payload, and True if it is base64 because the payload is not text."""
    if payload.isascii() and not payload.translate(None, _PLAIN):
        return payload.decode(), False
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return b64encode(payload).decode(), True
    if _NOT_TEXT.search(text) is not None:
        return b64encode(payload).decode(), True
    return text, False
