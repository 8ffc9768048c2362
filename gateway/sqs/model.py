"""What actions there are and what they take and give: botocore's own service model of SQS, read, not repeated.

Of the shape of each request a msgspec struct is made, so that bodies are decoded and checked in one step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from botocore.loaders import Loader
from botocore.model import ListShape, MapShape, ServiceModel, Shape, StructureShape

from gateway.sqs.errors import SqsError, missing

SERVICE, API_VERSION = "sqs", "2012-11-05"

_SCALARS = {"string": str, "integer": int, "long": int, "boolean": bool, "blob": bytes}


@cache
def service_model() -> ServiceModel:
    """The model."""
    loader = Loader()
    return ServiceModel(loader.load_service_model(SERVICE, "service-2", API_VERSION), SERVICE)


def _type_of(shape: Shape, known: dict[str, Any]) -> Any:
    if isinstance(shape, StructureShape):
        made = known.get(shape.name)
        if made is None:
            required = set(shape.required_members)
            fields: list[Any] = []
            for name, member in shape.members.items():
                kind = _type_of(member, known)
                fields.append((name, kind) if name in required else (name, kind | None, None))
            made = known[shape.name] = msgspec.defstruct(shape.name, fields, kw_only=True, module=__name__)
        return made
    if isinstance(shape, ListShape):
        return list[_type_of(shape.member, known)]  # type: ignore[misc]
    if isinstance(shape, MapShape):
        return dict[str, _type_of(shape.value, known)]  # type: ignore[misc]
    return _SCALARS[shape.type_name]


class Action:
    """One action: its name, the shapes of what it takes and gives, and how requests are decoded."""

    def __init__(self, name: str, input_shape: StructureShape, output_shape: StructureShape | None, kind: type) -> None:
        self.name = name
        self.input = input_shape
        self.output = output_shape
        self._kind = kind
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    def of_json(self, body: bytes) -> Any:
        """The request in a JSON body. Raises `SqsError`."""
        try:
            try:
                return self._decoder.decode(body or b"{}")
            except msgspec.ValidationError as exc:
                raise self._problem(msgspec.json.decode(body), exc) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise SqsError("Serialization", f"The body is not JSON: {exc}") from None

    def of_texts(self, parameters: dict[str, Any]) -> Any:
        """The request in parameters that are all text. Raises `SqsError`."""
        try:
            return msgspec.convert(parameters, self._kind, strict=False)
        except msgspec.ValidationError as exc:
            error = self._problem(parameters, exc)
            name = "InvalidParameterValue" if error.name == "Serialization" else error.name
            raise SqsError(name, str(error)) from None

    def _problem(self, value: Any, error: Exception) -> SqsError:
        absent = _absent(self.input, value)
        return missing(absent) if absent is not None else SqsError("Serialization", f"{error}")


def _absent(shape: Shape, value: Any, path: str = "") -> str | None:
    """The first required member that is not in `value`."""
    if isinstance(shape, StructureShape) and isinstance(value, dict):
        for name in shape.required_members:
            if value.get(name) is None:
                return f"{path}{name}"
        for name, member in shape.members.items():
            if value.get(name) is not None and (found := _absent(member, value[name], f"{path}{name}.")):
                return found
    elif isinstance(shape, ListShape) and isinstance(value, list):
        for number, one in enumerate(value, 1):
            if found := _absent(shape.member, one, f"{path}{number}."):
                return found
    elif isinstance(shape, MapShape) and isinstance(value, dict):
        for name, one in value.items():
            if found := _absent(shape.value, one, f"{path}{name}."):
                return found
    return None


@cache
def actions() -> dict[str, Action]:
    """All actions by name."""
    model, known = service_model(), {}  # type: ignore[var-annotated]
    found = {}
    for name in model.operation_names:
        operation = model.operation_model(name)
        shape = operation.input_shape
        found[name] = Action(name, shape, operation.output_shape, _type_of(shape, known))
    return found


@cache
def enum_of(shape_name: str) -> frozenset[str]:
    """The values that a string shape may have."""
    return frozenset(service_model().shape_for(shape_name).enum)
