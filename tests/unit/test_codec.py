"""Requests and answers are encoded and decoded as aiokafka does it, byte for byte."""

from __future__ import annotations

import random
from io import BytesIO
from typing import Any

import pytest
from aiokafka.protocol import types
from aiokafka.protocol.struct import Struct

from app.streaming import codec

NUMBERS: dict[Any, int] = {types.Int8: 7, types.Int16: 15, types.Int32: 31, types.Int64: 63}
THEIR_ENCODE = Struct.encode
STRUCTS = codec.structs()


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


class Plain:
    """Takes the values as they were decoded."""

    SCHEMA: Any

    def __init__(self, *values: Any) -> None:
        self.values = values


def fast_of(kind: type[Struct]) -> tuple[Any, Any]:
    """`encode` and `decode` of a copy of `kind` that was sped up."""
    copy: Any = type("Copy", (Plain,), {"SCHEMA": kind.SCHEMA})
    assert codec.speed_up(copy), kind
    return copy.encode, copy.decode


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_what_is_sent_and_read_is_the_same(kind: type[Struct]) -> None:
    encode, decode = fast_of(kind)
    chance = random.Random(kind.__name__)
    for _ in range(100):
        one = filled(kind, chance)
        wire = THEIR_ENCODE(one)
        assert encode(one) == wire
        theirs = [field.decode(data) for data in [BytesIO(wire)] for field in kind.SCHEMA.fields]
        assert list(decode(wire).values) == theirs
        behind_a_header = BytesIO(b"head" + wire + b"rest")
        behind_a_header.seek(4)
        assert list(decode(behind_a_header).values) == theirs
        assert behind_a_header.read() == b"rest"


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_an_answer_that_was_cut_off_is_an_error(kind: type[Struct]) -> None:
    _, decode = fast_of(kind)
    wire = THEIR_ENCODE(filled(kind, random.Random(1)))
    for size in range(len(wire)):
        with pytest.raises(ValueError):  # as aiokafka's
            decode(wire[:size])


def test_a_value_that_does_not_fit_is_an_error() -> None:
    encode, _ = fast_of(STRUCTS[0])
    header = filled(STRUCTS[0], random.Random(1))
    header.__dict__["correlation_id"] = 2**31
    with pytest.raises(ValueError, match="does not fit"):
        encode(header)


def test_a_row_with_a_value_too_few_is_an_error() -> None:
    kind = next(one for one in STRUCTS if one.__name__ == "ProduceRequest_v7")
    encode, _ = fast_of(kind)
    request = filled(kind, random.Random(1))
    request.__dict__["topics"] = [("topic",)]
    with pytest.raises(ValueError, match="as many values"):
        encode(request)


def test_a_schema_with_unknown_types_stays_as_it_is() -> None:
    copy: Any = type("Copy", (Plain,), {"SCHEMA": types.Schema(("tags", types.TaggedFields))})
    assert not codec.speed_up(copy)
