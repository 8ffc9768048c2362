"""Requests and answers are encoded and decoded as aiokafka does it, byte for byte."""

from __future__ import annotations

import random
from io import BytesIO
from typing import Any

import pytest
from aiokafka.protocol import types
from aiokafka.protocol.api import RequestHeader_v1, RequestStruct, ResponseHeader_v0
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.struct import Struct

from app.streaming.codec import faster

NUMBERS: dict[Any, int] = {types.Int8: 7, types.Int16: 15, types.Int32: 31, types.Int64: 63}
REQUESTS = [*FetchRequest._CLASSES, *ProduceRequest._CLASSES]
STRUCTS = [RequestHeader_v1, ResponseHeader_v0, *REQUESTS, *(request.RESPONSE_TYPE for request in REQUESTS)]


def value_of(kind: Any, chance: random.Random) -> Any:
    """Any value of a type, often one at an edge."""
    if kind in NUMBERS:
        bits = NUMBERS[kind]
        return chance.choice([0, -1, 2**bits - 1, -(2**bits), chance.randrange(2**bits)])
    if kind is types.UInt32:
        return chance.randrange(2**32)
    if kind is types.Boolean:
        return chance.random() < 0.5
    if kind is types.Bytes:
        return chance.choice([None, b"", chance.randbytes(chance.randrange(300))])
    if isinstance(kind, types.String):
        return chance.choice([None, "", "marq.queue", "Ünïcödé \0"])
    if isinstance(kind, types.Array):
        return chance.choice([None, [], *([[value_of(kind.array_of, chance) for _ in range(n)] for n in (1, 2, 5)])])
    assert isinstance(kind, types.Schema), kind
    return tuple(value_of(field, chance) for field in kind.fields)


def filled(kind: type[Struct], chance: random.Random) -> Struct:
    """A request or an answer with any values; some have another constructor."""
    made: Struct = object.__new__(kind)
    for name, field in zip(kind.SCHEMA.names, kind.SCHEMA.fields, strict=True):
        made.__dict__[name] = value_of(field, chance)
    return made


def plain(kind: type[Struct]) -> type[Struct]:
    """The faster kind; a header of ours takes the values as they were decoded."""
    fast = faster(kind)  # type: ignore[arg-type]
    return type("Plain", (fast,), {"__init__": Struct.__init__}) if kind is RequestHeader_v1 else fast


def values_of(one: Struct) -> list[Any]:
    return [one.__dict__[name] for name in one.SCHEMA.names]


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_what_is_sent_and_read_is_the_same(kind: type[Struct]) -> None:
    fast = plain(kind)
    chance = random.Random(kind.__name__)
    for _ in range(100):
        one = filled(fast, chance)
        wire = Struct.encode(one)
        assert one.encode() == wire
        theirs = [field.decode(data) for data in [BytesIO(wire)] for field in kind.SCHEMA.fields]
        assert values_of(fast.decode(wire)) == theirs
        behind_a_header = BytesIO(b"head" + wire + b"rest")
        behind_a_header.seek(4)
        assert values_of(fast.decode(behind_a_header)) == theirs
        assert behind_a_header.read() == b"rest"


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_an_answer_that_was_cut_off_is_an_error(kind: type[Struct]) -> None:
    wire = Struct.encode(filled(kind, random.Random(1)))
    for size in range(len(wire)):
        with pytest.raises(ValueError):  # as aiokafka's
            plain(kind).decode(wire[:size])


def test_a_value_that_does_not_fit_is_an_error() -> None:
    header = filled(faster(RequestHeader_v1), random.Random(1))
    header.__dict__["correlation_id"] = 2**31
    with pytest.raises(ValueError, match="does not fit"):
        header.encode()


def test_a_row_with_a_value_too_few_is_an_error() -> None:
    kind = next(one for one in STRUCTS if one.__name__ == "ProduceRequest_v7")
    request = filled(faster(kind), random.Random(1))
    request.__dict__["topics"] = [("topic",)]
    with pytest.raises(ValueError, match="as many values"):
        request.encode()


def test_a_schema_with_unknown_types_stays_as_it_is() -> None:
    kind = type("Tagged", (Struct,), {"SCHEMA": types.Schema(("tags", types.TaggedFields))})
    assert faster(kind).encode is Struct.encode


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_headers_and_answer_of_a_request_are_fast_as_well(kind: type[RequestStruct]) -> None:
    request: Any = filled(faster(kind), random.Random(1))  # type: ignore[arg-type]
    theirs: Any = filled(kind, random.Random(1))
    header = request.build_request_header(correlation_id=7, client_id="me")
    assert header.encode() == theirs.build_request_header(correlation_id=7, client_id="me").encode()
    assert request.parse_response_header(b"\0\0\0\7").correlation_id == 7
    for one in (type(request), request.RESPONSE_TYPE, type(header)):
        assert "encode" in vars(one)


def test_what_others_use_of_aiokafka_is_left_alone() -> None:
    assert all(kind.encode is Struct.encode for kind in STRUCTS)
