"""Encodes and decodes the requests that a busy worker makes all the time, fetch and produce, faster than aiokafka does.

aiokafka calls several functions for each number of a request. Here numbers that follow each other are packed together,
as a schema says once for each kind of request: a tenth of the calls. What goes over the wire, and what comes out,
must stay the same for every value: `tests/unit/test_codec.py` compares both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from io import BytesIO
from itertools import groupby
from typing import Any

from aiokafka.protocol import types
from aiokafka.protocol.api import RequestHeader_v1, RequestStruct, ResponseHeader_v0
from aiokafka.protocol.struct import Struct

#: The format of each type with a fixed size.
_FORMATS: dict[Any, str] = {
    types.Int8: "b",
    types.Int16: "h",
    types.Int32: "i",
    types.UInt32: "I",
    types.Int64: "q",
    types.Float64: "d",
    types.Boolean: "?",
}
_INT16, _INT32 = struct.Struct(">h"), struct.Struct(">i")

#: Adds the value at a place of the data to the list. Returns the place behind it.
_Read = Callable[[bytes, int, list[Any]], int]
#: Adds the bytes of some values to the list.
_Write = Callable[[Sequence[Any], list[bytes]], None]


class _UnknownTypeError(Exception):
    """A schema has a type that is not known here."""


def _sized(prefix: struct.Struct, encoding: str | None) -> tuple[_Read, _Write]:
    """Bytes, or a text in an encoding, behind their length; None has the length -1."""

    def read(data: bytes, at: int, values: list[Any]) -> int:
        (size,) = prefix.unpack_from(data, at)
        at += prefix.size
        if size < 0:
            values.append(None)
            return at
        value = data[at : at + size]
        if len(value) != size:
            raise ValueError("the answer ends within a field")
        values.append(value if encoding is None else value.decode(encoding))
        return at + int(size)

    def write(values: Sequence[Any], out: list[bytes]) -> None:
        (value,) = values
        if value is None:
            out.append(prefix.pack(-1))
            return
        encoded = value if encoding is None else str(value).encode(encoding)
        out += prefix.pack(len(encoded)), encoded

    return read, write


def _array(kind: Any) -> tuple[_Read, _Write]:
    is_row = type(kind) is types.Schema
    read_item, write_item = _fields(kind.fields if is_row else (kind,))
    width = len(kind.fields) if is_row else 1

    def read(data: bytes, at: int, values: list[Any]) -> int:
        (count,) = _INT32.unpack_from(data, at)
        at += 4
        if count == -1:
            values.append(None)
            return at
        items: list[Any] = []
        for _ in range(count):
            item: list[Any] = []
            at = read_item(data, at, item)
            items.append(tuple(item) if is_row else item[0])
        values.append(items)
        return at

    def write(values: Sequence[Any], out: list[bytes]) -> None:
        (items,) = values
        if items is None:
            out.append(_INT32.pack(-1))
            return
        out.append(_INT32.pack(len(items)))
        for item in items:
            if is_row and len(item) != width:
                raise ValueError("a row has not as many values as its schema has fields")
            write_item(item if is_row else (item,), out)

    return read, write


def _numbers(kinds: Sequence[Any]) -> tuple[_Read, _Write]:
    packed = struct.Struct(">" + "".join(_FORMATS[kind] for kind in kinds))
    size, unpack_from, pack = packed.size, packed.unpack_from, packed.pack

    def read(data: bytes, at: int, values: list[Any]) -> int:
        values += unpack_from(data, at)
        return at + size

    def write(values: Sequence[Any], out: list[bytes]) -> None:
        out.append(pack(*values))

    return read, write


def _fields(kinds: Sequence[Any]) -> tuple[_Read, _Write]:
    """Reads and writes values of these types, one after another."""
    parts: list[tuple[int, int, _Read, _Write]] = []
    at = 0
    for fixed, group in groupby(kinds, key=lambda kind: kind in _FORMATS):
        together = list(group)
        for run in [together] if fixed else [[kind] for kind in together]:
            parts.append((at, at + len(run), *(_numbers(run) if fixed else _other(run[0]))))
            at += len(run)
    if len(parts) == 1:
        return parts[0][2:]

    def read(data: bytes, at: int, values: list[Any]) -> int:
        for _, _, part, _ in parts:
            at = part(data, at, values)
        return at

    def write(values: Sequence[Any], out: list[bytes]) -> None:
        for first, behind, _, part in parts:
            part(values[first:behind], out)

    return read, write


def _other(kind: Any) -> tuple[_Read, _Write]:
    if kind is types.Bytes:
        return _sized(_INT32, None)
    if type(kind) is types.String:
        return _sized(_INT16, kind.encoding)
    if type(kind) is types.Array:
        return _array(kind.array_of)
    raise _UnknownTypeError(repr(kind))


def _sped_up(kind: type[Struct]) -> dict[str, Any]:
    """`encode` and `decode` for a request or an answer of aiokafka; nothing if its schema has types unknown here."""
    names = kind.SCHEMA.names
    try:
        read, write = _fields(kind.SCHEMA.fields)
    except _UnknownTypeError:
        return {}

    def encode(self: Struct) -> bytes:
        out: list[bytes] = []
        try:
            write([self.__dict__[name] for name in names], out)
        except struct.error as exc:
            raise ValueError(f"a value does not fit its type: {exc}") from exc
        return b"".join(out)

    def decode(cls: type[Struct], data: BytesIO | bytes) -> Struct:
        values: list[Any] = []
        try:
            if isinstance(data, bytes):
                read(data, 0, values)
            else:
                data.seek(read(data.getvalue(), data.tell(), values))
        except struct.error as exc:
            raise ValueError(f"the answer ends within a field: {exc}") from exc
        return cls(*values)

    return {"encode": encode, "decode": classmethod(decode)}


@cache
def faster(kind: type[Struct]) -> type[Struct]:
    """A request or an answer of aiokafka that encodes and decodes itself faster; of a request, its answer too."""
    own = _sped_up(kind)
    if issubclass(kind, RequestStruct):
        own["RESPONSE_TYPE"] = faster(kind.RESPONSE_TYPE)
        if not kind.FLEXIBLE_VERSION:  # it has other headers
            own["build_request_header"] = lambda self, correlation_id, client_id: faster(RequestHeader_v1)(
                self, correlation_id=correlation_id, client_id=client_id
            )
            own["parse_response_header"] = lambda self, data: faster(ResponseHeader_v0).decode(data)
    return type(kind.__name__, (kind,), own)
